"""The specification of all kernels: plain loops over NumPy arrays, written to be read."""

from megaindex.kernels.reference.balance import balance_rows, squared_lengths
from megaindex.kernels.reference.bijection import (
    bijection_apply,
    bijection_inverse_range,
    bijection_invert,
    bijection_range,
)
from megaindex.kernels.reference.blending import (
    blend_exhaustive,
    blend_greedy,
    divisor_counts,
    divisor_fill,
    mix_fill,
    mix_table,
)
from megaindex.kernels.reference.counts import least_seen
from megaindex.kernels.reference.gather import (
    documents_by_run,
    documents_by_token,
    gather,
    mask_loss,
    read_rows,
    row_table,
    token_table,
)
from megaindex.kernels.reference.mapping import map_blocks, map_sentences
from megaindex.kernels.reference.packing import (
    count_pieces,
    pack_pieces,
    packed_bins,
    packed_spans,
    sort_pieces,
)
from megaindex.kernels.reference.receipts import receipt_add
from megaindex.kernels.reference.row_keys import row_keys
from megaindex.kernels.reference.samples import (
    cut_samples,
    pack_documents,
    seed_state,
    shuffle,
    shuffled_documents,
    shuffled_range,
    tokens_within,
)
from megaindex.kernels.reference.spans import (
    array_spans,
    blended_spans,
    epoch_begins,
    epoch_spans,
    epoch_starts,
    span_table,
    window_spans,
)
