"""The kernels in Numba, compiled on first use and cached on disk."""

from megaindex.kernels.jit.bijection import (
    bijection_apply,
    bijection_invert,
    bijection_range,
)
from megaindex.kernels.jit.blending import (
    blend_checkpoints,
    blend_exhaustive,
    blend_greedy,
    divisor_counts,
    divisor_fill,
)
from megaindex.kernels.jit.epoch import epoch_spans, epoch_starts
from megaindex.kernels.jit.least_seen import least_seen
from megaindex.kernels.jit.mapping import build_blocks_mapping, build_mapping
from megaindex.kernels.jit.receipt import receipt_add
from megaindex.kernels.jit.samples import cut_samples
from megaindex.kernels.jit.shuffle import (
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
