"""From a recipe to the index of its run: sources opened and measured, stages laid out."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

from megaindex.build.known import KnownSources
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.arithmetic import samples_in
from megaindex.index.bins import Bins, make_bins
from megaindex.index.companions import check_in_step
from megaindex.index.orders.binned import BinIndex
from megaindex.index.orders.epoch import EpochIndex
from megaindex.index.orders.window import WindowIndex
from megaindex.index.spans import Index
from megaindex.index.staged import StagedIndex
from megaindex.recipe.corpus import Corpus
from megaindex.recipe.evaluation import rounds_of
from megaindex.recipe.itinerary import Itinerary
from megaindex.recipe.model import Recipe
from megaindex.recipe.resolve import resolve_recipe
from megaindex.recipe.streams import SourceSize

EXTRA = 1  # token that a sample reads beyond its length, for the shifted label


class Epochs(Index, Protocol):
    """An index that goes on for as many epochs as are needed."""

    def extend(self, epochs: int) -> Epochs: ...
    def epochs_for(self, num_samples: int) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenSource:
    """A source of a recipe, its files open."""

    corpus: Corpus
    dataset: IndexedDataset
    targets: IndexedDataset | None
    """Labels or loss mask, token by token, of a finetuning source that has them."""
    epoch: Epochs
    """Its samples of one epoch."""

    @property
    def size(self) -> SourceSize:
        return SourceSize(
            tokens=self.epoch.tokens_per_epoch,
            documents=self.dataset.document_indices.size - 1,
            samples=self.epoch.num_samples,
            cut_tokens=self.epoch.cut_tokens if isinstance(self.epoch, BinIndex) else 0,
        )

    def index(self, num_samples: int) -> Index:
        """Its samples, at least so many."""
        return self.epoch.extend(self.epoch.epochs_for(max(1, num_samples)))


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenRecipe:
    """A recipe whose sources are open: ``index`` locates every sample of the run."""

    itinerary: Itinerary
    sources: tuple[OpenSource, ...]
    known: KnownSources
    validation: OpenSource | None = None

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """Of the sources, as ``Spans.source`` counts them."""
        return tuple(source.dataset for source in self.sources)

    @property
    def fingerprints(self) -> list[str]:
        """Of the sources' lengths and document bounds, for receipts and checkpoints."""
        return [self.known.fingerprint(source.dataset) for source in self.sources]

    def contents(
        self, *, whole: bool = False
    ) -> list[tuple[dict[str, str], dict[str, str] | None]]:
        """Content fingerprints of the sources, see `megaindex.store.fingerprint.contents_of`.

        Of each its tokens, sampled or ``whole``, and its labels or mask, whole.

        Raises:
            StorageError: they cannot be read, or changed since they were opened.
        """
        found = [
            (
                self.known.content(source.dataset, whole=whole),
                None if source.targets is None else self.known.content(source.targets, whole=True),
            )
            for source in self.sources
        ]
        self.known.save()
        return found

    @cached_property
    def index(self) -> StagedIndex:
        ends = self.itinerary.reads_to()
        return StagedIndex(
            sources=tuple(s.index(end) for s, end in zip(self.sources, ends, strict=True)),
            stages=tuple(stage.mixed for stage in self.itinerary.stages),
        )


def open_recipe(recipe: Recipe, *, cache_dir: str | os.PathLike[str] | None = None) -> OpenRecipe:
    """Open the sources of a recipe and lay the run out.

    Args:
        cache_dir: where one process keeps what checking every entry of the sources told, for all
            that open the recipe later: they read one file and no .idx as a whole. It holds as long
            as the files are those it was learned of. Default: every process checks.

    Raises:
        InvalidArgument: the recipe cannot be laid out, or a source has no files.
        FormatError, StorageError: a source cannot be read, or its labels do not fit it.
    """
    known = KnownSources(_paths(recipe), None if cache_dir is None else os.fspath(cache_dir))
    sources = tuple(_open(corpus, recipe, known) for corpus in recipe.sources)
    evaluation = recipe.evaluation
    validation = None if evaluation is None else _open(evaluation.source, recipe, known)
    itinerary = _evaluated(
        resolve_recipe(recipe, [source.size for source in sources]),
        None if validation is None else validation.size,
    )
    opened = [*sources, *([] if validation is None else [validation])]
    known.keep([d for s in opened for d in (s.dataset, s.targets) if d is not None])
    return OpenRecipe(itinerary=itinerary, sources=sources, known=known, validation=validation)


def _paths(recipe: Recipe) -> list[str]:
    """Of all pairs that the recipe reads."""
    evaluation = [] if recipe.evaluation is None else [recipe.evaluation.source]
    named = ((c.path, _companion(c)) for c in (*recipe.sources, *evaluation))
    return [path for paths in named for path in paths if path]


def _companion(corpus: Corpus) -> str | None:
    return corpus.labels or corpus.loss_mask


def plan_recipe(recipe: Recipe) -> Itinerary:
    """Lay a recipe out; sources without files are taken by their tokens.

    Raises:
        As `open_recipe`.
    """
    evaluation = recipe.evaluation
    return _evaluated(
        resolve_recipe(recipe, [_size(corpus, recipe) for corpus in recipe.sources]),
        None if evaluation is None else _size(evaluation.source, recipe),
    )


def _evaluated(itinerary: Itinerary, validation: SourceSize | None) -> Itinerary:
    """With its evaluations counted."""
    recipe = itinerary.recipe
    if recipe.evaluation is None or validation is None:
        return itinerary
    rounds = rounds_of(
        recipe.evaluation,
        validation.samples,
        itinerary.num_steps,
        recipe.batch.final,
        rows=recipe.rows_per_round,
    )
    return replace(itinerary, evaluation=rounds, validation=validation)


def _size(corpus: Corpus, recipe: Recipe) -> SourceSize:
    if corpus.tokens is None:
        return _open(corpus, recipe, KnownSources([corpus.path], None)).size
    for stage in recipe.stages:
        weighting = stage.weighting
        drawn = any(stream.source == corpus.name for stream in stage.streams)
        if drawn and weighting is not None and weighting.by == "documents":
            raise InvalidArgument(
                f"stage {stage.name}: weights by documents, and source {corpus.name} has tokens "
                "alone; give its path, or weigh by tokens"
            )
    samples = samples_in(corpus.tokens, recipe.sequence_length, EXTRA)
    return SourceSize(tokens=corpus.tokens, documents=1, samples=samples)


def _open(corpus: Corpus, recipe: Recipe, known: KnownSources) -> OpenSource:
    if not corpus.path:
        raise InvalidArgument(
            f"source {corpus.name}: has tokens to plan with and no path to read; give its path"
        )
    dataset = known.open(corpus.path)
    companion = _companion(corpus)
    targets = known.open(companion) if companion else None
    if targets is not None:
        check_in_step(dataset, targets, "labels" if corpus.labels else "loss mask")
    return OpenSource(
        corpus=corpus, dataset=dataset, targets=targets, epoch=_epoch(corpus, dataset, recipe)
    )


def _epoch(corpus: Corpus, dataset: IndexedDataset, recipe: Recipe) -> Epochs:
    """The samples of one epoch of a source."""
    documents = range(len(dataset))
    common: dict[str, Any] = {
        "sequence_length": recipe.sequence_length,
        "seed": recipe.seed,
        "source_name": corpus.name,
        "add_extra_token": EXTRA,
    }
    if dataset.num_tokens < recipe.sequence_length + EXTRA and corpus.kind == "pretraining":
        raise InvalidArgument(
            f"source {corpus.name}: {dataset.path_prefix} holds {dataset.num_tokens} tokens, one "
            f"sample needs {recipe.sequence_length} + {EXTRA}; leave it out or lower "
            "sequence_length"
        )
    if corpus.kind == "finetuning":
        _check_documents(corpus, dataset)
        return BinIndex(
            bins=_bins(corpus, dataset, recipe.sequence_length),
            tokens_per_epoch=dataset.num_tokens,
            **common,
        )
    if corpus.order == "window":
        return WindowIndex(dataset=dataset, documents=documents, **common)
    return EpochIndex(
        sequence_lengths=dataset.sequence_lengths,
        documents=documents,
        tokens_per_epoch=dataset.num_tokens,
        **common,
    )


def _check_documents(corpus: Corpus, dataset: IndexedDataset) -> None:
    documents = dataset.document_indices.size - 1
    if documents != len(dataset):
        raise FormatError(
            f"source {corpus.name}: {dataset.path_prefix}.idx has {len(dataset)} sequences in "
            f"{documents} documents; samples of whole documents need one sequence each: write it "
            "with one"
        )


def _bins(corpus: Corpus, dataset: IndexedDataset, length: int) -> Bins:
    """Several documents fill the length itself; one alone may have the label's token more."""
    try:
        return make_bins(
            dataset.sequence_lengths,
            range(len(dataset)),
            length if corpus.packed else length + EXTRA,
            packed=corpus.packed,
            long_documents=corpus.long_documents,
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"source {corpus.name}: {error}") from None
