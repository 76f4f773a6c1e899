"""Which tokens of a recipe's instruction data carry loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megaindex.build.recipe import OpenRecipe, OpenSource
from megaindex.loader.targets import SourceTargets, Targets


def targets_of(opened: OpenRecipe) -> Targets | None:
    """The targets of its sources; None where all are text."""
    return targets_of_sources(opened.sources)


def targets_of_sources(sources: Sequence[OpenSource]) -> Targets | None:
    """The targets of some sources, numbered as they are given."""
    told = [source_targets(source) for source in sources]
    return Targets(told) if any(target is not None for target in told) else None


def source_targets(source: OpenSource) -> SourceTargets | None:
    """Of one source; None of text."""
    if source.corpus.kind == "pretraining":
        return None
    if source.targets is None:
        return SourceTargets(kind="all")
    kind: Any = "labels" if source.corpus.labels else "loss_mask"
    return SourceTargets(kind=kind, companion=source.targets)
