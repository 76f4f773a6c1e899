"""Builders of indices: one dataset, many, a blend, an extended run, a recipe."""

from __future__ import annotations

from megaindex.builders.single import BuiltIndex, build_index

__all__ = ["BuiltIndex", "build_index"]
