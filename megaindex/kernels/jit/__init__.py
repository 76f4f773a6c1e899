"""The kernels in Numba, compiled on first use and cached on disk."""

from megaindex.kernels.jit.bijection import (
    bijection_apply,
    bijection_inverse_range,
    bijection_invert,
    bijection_range,
)
from megaindex.kernels.jit.blended_spans import blended_spans, span_table
from megaindex.kernels.jit.blending import (
    blend_checkpoints,
    blend_exhaustive,
    blend_greedy,
    divisor_counts,
    divisor_fill,
)
from megaindex.kernels.jit.epoch import epoch_spans, epoch_starts
from megaindex.kernels.jit.gather import gather, token_table
from megaindex.kernels.jit.least_seen import least_seen
from megaindex.kernels.jit.mapping import build_blocks_mapping, build_mapping
from megaindex.kernels.jit.masks import documents_by_run, documents_by_token, mask_loss
from megaindex.kernels.jit.packing import pack_documents
from megaindex.kernels.jit.receipt import receipt_add
from megaindex.kernels.jit.samples import cut_samples
from megaindex.kernels.jit.shuffle import (
    draw_positions,
    seed_state,
    shuffle,
    shuffled_documents,
    shuffled_range,
    sort_by_sample,
)
from megaindex.kernels.jit.spans import array_spans
from megaindex.kernels.jit.windows import window_spans
from megaindex.kernels.reference.layout import tokens_within
