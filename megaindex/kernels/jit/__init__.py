"""The kernels in Numba, compiled on first use and cached on disk."""

from megaindex.kernels.jit.balance import balance_rows, squared_lengths
from megaindex.kernels.jit.bijection import (
    bijection_apply,
    bijection_inverse_range,
    bijection_invert,
    bijection_range,
)
from megaindex.kernels.jit.blending import (
    blend_exhaustive,
    blend_greedy,
    mix_fill,
    mix_table,
)
from megaindex.kernels.jit.counts import least_seen
from megaindex.kernels.jit.divisor import divisor_counts, divisor_fill
from megaindex.kernels.jit.gather import (
    documents_by_run,
    documents_by_token,
    gather,
    mask_loss,
    read_rows,
)
from megaindex.kernels.jit.mapping import map_blocks, map_sentences
from megaindex.kernels.jit.packing import (
    count_pieces,
    pack_pieces,
    packed_bins,
    packed_spans,
    sort_pieces,
)
from megaindex.kernels.jit.receipts import receipt_add
from megaindex.kernels.jit.row_keys import row_keys
from megaindex.kernels.jit.samples import (
    cut_samples,
    pack_documents,
    shuffle,
    shuffled_documents,
    shuffled_range,
)
from megaindex.kernels.jit.spans import (
    array_spans,
    blended_spans,
    epoch_begins,
    epoch_spans,
    epoch_starts,
    window_spans,
)
from megaindex.kernels.reference.gather import row_table, token_table
from megaindex.kernels.reference.samples import seed_state, tokens_within
from megaindex.kernels.reference.spans import span_table
