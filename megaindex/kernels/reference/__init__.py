"""The written specification: obvious loops over NumPy arrays, slow and sure."""

from megaindex.kernels.reference.bijection import (
    bijection_apply,
    bijection_inverse_range,
    bijection_invert,
    bijection_range,
)
from megaindex.kernels.reference.blended_spans import blended_spans, span_table
from megaindex.kernels.reference.blending import (
    blend_checkpoints,
    blend_exhaustive,
    blend_greedy,
    divisor_counts,
    divisor_fill,
)
from megaindex.kernels.reference.epoch import epoch_spans, epoch_starts
from megaindex.kernels.reference.gather import gather, token_table
from megaindex.kernels.reference.layout import tokens_within
from megaindex.kernels.reference.least_seen import least_seen
from megaindex.kernels.reference.mapping import build_blocks_mapping, build_mapping
from megaindex.kernels.reference.masks import documents_by_run, documents_by_token, mask_loss
from megaindex.kernels.reference.packing import pack_documents
from megaindex.kernels.reference.receipt import receipt_add
from megaindex.kernels.reference.samples import cut_samples
from megaindex.kernels.reference.shuffle import (
    draw_positions,
    seed_state,
    shuffle,
    shuffled_documents,
    shuffled_range,
    sort_by_sample,
)
from megaindex.kernels.reference.spans import array_spans
from megaindex.kernels.reference.windows import window_spans
