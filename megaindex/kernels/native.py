"""The native core under the same names as the other backends.

Importing this module fails with ImportError where the core was not compiled.
"""

from megaindex.kernels._native import (
    bijection_apply,
    bijection_invert,
    bijection_range,
    blend_checkpoints,
    blend_exhaustive,
    blend_greedy,
    build_blocks_mapping,
    build_mapping,
    cut_samples,
    divisor_counts,
    divisor_fill,
    draw_positions,
    epoch_spans,
    epoch_starts,
    least_seen,
    receipt_add,
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
