"""The written specification: obvious loops over NumPy arrays, slow and sure."""

from megaindex.kernels.reference.bijection import (
    bijection_apply,
    bijection_invert,
    bijection_range,
)
from megaindex.kernels.reference.blending import (
    blend_checkpoints,
    blend_exhaustive,
    blend_greedy,
    divisor_counts,
    divisor_fill,
)
from megaindex.kernels.reference.epoch import epoch_spans, epoch_starts
from megaindex.kernels.reference.least_seen import least_seen
from megaindex.kernels.reference.mapping import build_blocks_mapping, build_mapping
from megaindex.kernels.reference.receipt import receipt_add
from megaindex.kernels.reference.samples import cut_samples
from megaindex.kernels.reference.shuffle import (
    draw_positions,
    seed_state,
    shuffle,
    shuffled_documents,
    shuffled_range,
)

__all__ = [
    "bijection_apply",
    "bijection_invert",
    "bijection_range",
    "blend_checkpoints",
    "blend_exhaustive",
    "blend_greedy",
    "build_blocks_mapping",
    "build_mapping",
    "cut_samples",
    "divisor_counts",
    "divisor_fill",
    "draw_positions",
    "epoch_spans",
    "epoch_starts",
    "least_seen",
    "receipt_add",
    "seed_state",
    "shuffle",
    "shuffled_documents",
    "shuffled_range",
]
