"""Numba versions of `megaindex.kernels.reference.blending`, compiled on first use."""

from __future__ import annotations

from megaindex.kernels.reference.blending import (
    blend_checkpoints,
    blend_exhaustive,
    blend_greedy,
    divisor_counts,
    divisor_fill,
)

__all__ = [
    "blend_checkpoints",
    "blend_exhaustive",
    "blend_greedy",
    "divisor_counts",
    "divisor_fill",
]
