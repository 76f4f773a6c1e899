"""From corpora and requests to indices, through the cache: one corpus, a blend, a whole recipe."""

from __future__ import annotations

from megaindex.builders.single import BuiltIndex, build_index

__all__ = ["BuiltIndex", "build_index"]
