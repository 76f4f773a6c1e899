"""Builders of indices: one dataset, many, a blend, an extended run, a recipe."""

from __future__ import annotations

from megaindex.builders.cached import build_index
from megaindex.builders.single import BuiltIndex

__all__ = ["BuiltIndex", "build_index"]
