"""Subsets of the sources of a run, as plans show them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from megaindex.index.documents import DocumentSubset, word_text
from megaindex.index.subset_rule import SubsetRule
from megaindex.recipe.layout import RecipeLayout
from megaindex.run.parts import SplitPart
from megaindex.run.run import Run


@dataclass(frozen=True, kw_only=True)
class SourceSubset:
    """Documents of a source that training reads, where they are a subset.

    Attributes:
        source: name of the source.
        documents: their number.
        of_documents: documents of the source, or of its part of a split.
        tokens: their tokens, of one epoch.
        of_tokens: tokens of the source, or of its part.
        share: share that was asked for; None: all that is not held out, or it is unknown.
        held_out: share that training leaves out, likewise.
        seed: ``subset_seed``.
        shuffle_name: name by which the documents are chosen, and the source is shuffled.
        threshold: word of the last document; as ``subset`` it pins the choice.
        held_from: word of the first document held out, likewise of ``held_out``.
    """

    source: str
    documents: int
    of_documents: int
    tokens: int
    of_tokens: int
    share: str | None
    held_out: str | None
    seed: int
    shuffle_name: str
    threshold: str
    held_from: str | None

    @classmethod
    def of(
        cls,
        source: str,
        members: DocumentSubset,
        *,
        tokens: int,
        of_tokens: int,
        rule: SubsetRule | None = None,
    ) -> SourceSubset:
        """Return the facts of a subset; ``rule`` is that of the settings, if they are known."""
        share, held_out = (rule.share, rule.held_out) if rule else (None, None)
        return cls(
            source=source,
            documents=len(members),
            of_documents=len(members.within),
            tokens=tokens,
            of_tokens=of_tokens,
            share=None if share is None else str(share),
            held_out=None if held_out is None else str(held_out),
            seed=members.words.seed,
            shuffle_name=members.words.name,
            threshold=word_text(members.words.last),
            held_from=None if members.held_from is None else word_text(members.held_from),
        )


def subsets_of_parts(parts: Iterable[SplitPart]) -> tuple[SourceSubset, ...]:
    """Return the subsets of the sources of settings."""
    return tuple(
        SourceSubset.of(
            part.source.path,
            part.members,
            tokens=part.tokens,
            of_tokens=part.members.of_tokens or 0,
            rule=part.source.subset_rule,
        )
        for part in parts
        if part.members is not None
    )


def subsets_of_layout(layout: RecipeLayout) -> tuple[SourceSubset, ...]:
    """Return the subsets of the sources of a recipe."""
    return tuple(
        SourceSubset.of(
            source.name,
            size.members,
            tokens=size.tokens,
            of_tokens=size.members.of_tokens or 0,
            rule=source.subset_rule,
        )
        for source, size in zip(layout.recipe.sources, layout.sizes, strict=True)
        if size.members is not None
    )


def subsets_of_run(run: Run) -> tuple[SourceSubset, ...]:
    """Return the subsets of the sources of a decided run, whose settings are not known."""
    return tuple(
        SourceSubset.of(
            source.name,
            source.members,
            tokens=int(source.lengths.sum(dtype=np.int64)),
            of_tokens=int(source.sequence_lengths.sum(dtype=np.int64)),
        )
        for source in run.sources
        if source.members is not None
    )
