"""Index of a recipe's run, and the cache of validation results of its sources.

Validating an .idx reads all of it and takes seconds per billion documents. One process writes its
results to the cache, so that other ranks and later runs need not validate.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from megaindex.arithmetic import samples_in
from megaindex.builders.single import epoch_index, packed_index, tokens_of
from megaindex.cache.fingerprint import (
    Record,
    contents_of,
    corpus_fingerprint,
    entry_key,
    mark_fingerprint,
    read_records,
    records_path,
    stamps_of,
    write_records,
)
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import IndexedDataset
from megaindex.index.bins import BinIndex, Bins, make_bins
from megaindex.index.documents import DocumentSubset, members_of
from megaindex.index.order_settings import PackedOrder
from megaindex.index.orders.blocks import BlockedIndex, PassBlocks
from megaindex.index.orders.epoch import EpochIndex, WindowIndex
from megaindex.index.orders.keyed import shuffle_names
from megaindex.index.orders.packed import PackedIndex
from megaindex.index.skips import read_ids, with_skips
from megaindex.index.source_targets import LossKind, SourceTargets
from megaindex.index.spans import Index, check_same_lengths
from megaindex.index.staged_index import StagedIndex
from megaindex.index.stretches import Stretch, StretchedIndex, sequence
from megaindex.index.subset_rule import Reader, SubsetRule, check_held_out
from megaindex.io.atomic import is_size
from megaindex.io.paths import absolute, check_local
from megaindex.recipe.layout import RecipeLayout, resolve_recipe
from megaindex.recipe.mixture import SourceSize
from megaindex.settings.past import PastRead
from megaindex.settings.recipe import (
    Recipe,
    RecipeSource,
    check_recipe,
    default_block_tokens,
    rounds_of,
)


@dataclass(frozen=True, kw_only=True)
class ValidatedPair:
    """Results of validating a pair."""

    num_tokens: int
    fingerprint: str
    content: dict[str, str] = field(default_factory=dict)
    """`content_fingerprint` by name, ``sampled`` or ``whole``, as far as computed."""


class ValidationCache:
    """Results of validating the pairs at ``paths``, kept in a file of ``cache_dir`` if given.

    Args:
        paths: prefixes of the pairs.
        cache_dir: folder of the file; None: nothing is kept.
        kind: ``"known_fingerprints"`` for a file of its own, of pairs that are marked as validated
            because a lock holds their fingerprints, and whose pointers were not checked.

    Raises:
        InvalidArgument: ``cache_dir`` is a URL.
    """

    def __init__(
        self, paths: Sequence[str], cache_dir: str | None, kind: str = "known_sources"
    ) -> None:
        self._known: dict[str, ValidatedPair] = {}
        self._prefixes = sorted({absolute(path) for path in paths})
        self._path: Path | None = None
        self._is_new = False
        """True if there are results that are not saved yet."""
        if cache_dir is None:
            return
        check_local(cache_dir, "give a directory as cache_dir")
        key = entry_key({kind: 1, "prefixes": self._prefixes})
        self._path = records_path(cache_dir, "sources", key)
        records = read_records(self._path, self._prefixes, _is_sound)
        for record in records or ():
            self._known[record["prefix"]] = ValidatedPair(
                num_tokens=record["num_tokens"],
                fingerprint=record["fingerprint"],
                content=record["content"],
            )
        stamps = None if records is None else [record["stamp"] for record in records]
        self._stamps = stamps_of(self._prefixes) if stamps is None else stamps

    def open(self, path: str, *, dialect: str = "megatron") -> IndexedDataset:
        """Return the dataset, validated now or according to the cache."""
        dataset = IndexedDataset(path, dialect=dialect)
        known = self._known.get(absolute(path))
        if known is None:
            dataset.validate()
        else:
            dataset.mark_validated(known.num_tokens)
            mark_fingerprint(dataset, known.fingerprint)
        return dataset

    def fingerprint(self, dataset: IndexedDataset) -> str:
        """Return the `corpus_fingerprint` of one of the pairs."""
        known = self._known.get(absolute(dataset.path_prefix))
        return corpus_fingerprint(dataset) if known is None else known.fingerprint

    def content(self, dataset: IndexedDataset, *, whole: bool = False) -> dict[str, str]:
        """Return `contents_of` one of the pairs; `save` adds new results to the file."""
        prefix = absolute(dataset.path_prefix)
        known = self._known.get(prefix)
        content = contents_of(dataset, whole=whole, known={} if known is None else known.content)
        if known is not None and content != known.content:
            self._known[prefix] = replace(known, content=content)
            self._is_new = True
        return content

    def keep(self, datasets: Sequence[IndexedDataset]) -> None:
        """Save the results of opened pairs, unless the file has results or a pair changed."""
        if self._path is None or self._known:
            return
        opened = {absolute(dataset.path_prefix): dataset for dataset in datasets}
        self._known = {
            prefix: ValidatedPair(num_tokens=d.num_tokens, fingerprint=corpus_fingerprint(d))
            for prefix, d in opened.items()
        }
        self._is_new = True
        self.save()

    def save(self) -> None:
        """Write new results to the file, unless one of the pairs changed."""
        is_new, self._is_new = self._is_new, False
        if self._path is None or not is_new or self._stamps != stamps_of(self._prefixes):
            return
        records = [
            {"prefix": prefix, "stamp": stamp, **vars(self._known[prefix])}
            for prefix, stamp in zip(self._prefixes, self._stamps, strict=True)
        ]
        write_records(self._path, records)


def _is_sound(record: Record) -> bool:
    content = record["content"]
    texts = [record["fingerprint"], *content.keys(), *content.values()]
    return is_size(record["num_tokens"]) and all(isinstance(text, str) for text in texts)


EXTRA = 1  # token of a sample for the shifted label


class Epochs(Index, Protocol):
    """Index that can be extended by epochs."""

    def extend(self, epochs: int) -> Epochs: ...
    def epochs_for(self, num_samples: int) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class OpenSource:
    """Source of a recipe with its opened files."""

    corpus: RecipeSource
    dataset: IndexedDataset
    targets: SourceTargets | None
    """Labels or loss mask of a finetuning source, one for each token."""
    shuffle_name: str
    """Name by which it is shuffled: that of the recipe, else of its fingerprint."""
    epoch: Epochs
    """Index of one epoch."""
    past: PastRead | None = None
    """Documents that were read before the run joined; None without such a list."""
    unread: EpochIndex | None = None
    """Index of the other documents; None if they fill no sample."""

    @property
    def companion(self) -> IndexedDataset | None:
        """Dataset of the labels or the loss mask."""
        return None if self.targets is None else self.targets.companion

    @property
    def size(self) -> SourceSize:
        members = members_of(self.epoch)
        return SourceSize(
            tokens=self.epoch.tokens_per_epoch,
            documents=self.dataset.document_indices.size - 1 if members is None else len(members),
            samples=self.epoch.num_samples,
            cut_tokens=getattr(self.epoch, "cut_tokens", 0),
            packed=self.epoch if isinstance(self.epoch, PackedIndex) else None,
            unread_samples=None if self.past is None else self._num_unread,
            blocks=self.epoch if isinstance(self.epoch, BlockedIndex) else None,
            shuffle_name=self.shuffle_name,
            words=None if members is None else members.words,
            members=members,
            index=self.index,
        )

    @property
    def _num_unread(self) -> int:
        return 0 if self.unread is None else self.unread.num_samples

    def index(self, num_samples: int, sequence_length: int | None = None) -> Index:
        """Return the index of at least ``num_samples`` samples, by default of the first length.

        After a list of documents read, the epoch in progress ends with samples of the others.
        """
        epoch = self.epoch
        if isinstance(epoch, BlockedIndex) and sequence_length is not None:
            epoch = epoch.at_length(sequence_length)
        if self.past is None or self.unread is None:
            return epoch.extend(epoch.epochs_for(max(1, num_samples)))
        end = (int(self.past.epochs or 0) + 1) * epoch.num_samples
        whole = epoch.extend(epoch.epochs_for(max(end, num_samples)))
        left = range(self._num_unread)
        stretches = [
            Stretch(index=whole, samples=range(end - self._num_unread)),
            Stretch(
                index=self.unread,
                samples=left,
                first_passes=np.array([int(self.past.epochs or 0)]),
            ),
        ]
        if whole.num_samples > end:
            stretches.append(Stretch(index=whole, samples=range(end, whole.num_samples)))
        return StretchedIndex(stretches=tuple(stretches))

    def as_in(self, recipe: Recipe, corpus: RecipeSource) -> OpenSource:
        """Return the source as another recipe reads it, in which it is ``corpus``."""
        epoch = _epoch(corpus, recipe, self.dataset, self.shuffle_name, None)
        return replace(self, corpus=corpus, epoch=epoch)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class OpenRecipe:
    """Recipe with opened sources, and the index of its run.

    Attributes:
        layout: steps and draws of the stages.
        sources: opened sources, in the order of the recipe.
        validation_cache: results of the sources' validation, kept for later processes.
        validation: opened source of the evaluation; None for a recipe without one.
    """

    layout: RecipeLayout
    sources: tuple[OpenSource, ...]
    validation_cache: ValidationCache
    validation: OpenSource | None = None

    def __repr__(self) -> str:
        return f"OpenRecipe({self.layout!r})"

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """Dataset of each source, by the numbers in ``Spans.source``."""
        return tuple(source.dataset for source in self.sources)

    @property
    def pairs(self) -> dict[str, IndexedDataset]:
        """Every opened pair by its absolute path, also of labels, loss masks and evaluation."""
        sources = [*self.sources, *([] if self.validation is None else [self.validation])]
        opened = [pair for each in sources for pair in (each.dataset, each.companion)]
        return {absolute(pair.path_prefix): pair for pair in opened if pair is not None}

    @property
    def fingerprints(self) -> list[str]:
        """`corpus_fingerprint` of each source, for receipts and checkpoints."""
        return [self.validation_cache.fingerprint(source.dataset) for source in self.sources]

    def changed(self, recipe: Recipe) -> OpenRecipe:
        """Return the run of another recipe of the same sources, opened already.

        Raises:
            InvalidArgument: the recipe has no layout.
        """
        layout = _evaluated(resolve_recipe(recipe, self.layout.sizes), self.layout.validation)
        return replace(self, layout=layout)

    @cached_property
    def unskipped(self) -> Index:
        """Index of all samples of the run, without skips."""
        reads = self.layout.reads
        each = {(i, s): self.sources[i].index(end, s) for (i, s), end in reads.items()}
        unread = {source: source.index(0) for source in self.sources}
        parts = []
        for length, stages in groupby(self.layout.stages, lambda stage: stage.sequence_length):
            indices = (each.get((i, length), unread[s]) for i, s in enumerate(self.sources))
            mixed = tuple(stage.mixed for stage in stages)
            parts.append(StagedIndex(sources=tuple(indices), stages=mixed))
        return sequence(parts, first=self.layout.recipe.first_sample)

    @cached_property
    def index(self) -> Index:
        """Index of all samples of the run; with skips, of its positions."""
        return with_skips(
            self.unskipped,
            self.layout.skips,
            names=[source.corpus.name for source in self.sources],
            documents=[len(source.dataset) for source in self.sources],
        )


def open_recipe(recipe: Recipe, *, cache_dir: str | os.PathLike[str] | None = None) -> OpenRecipe:
    """Open the sources of a recipe and compute the layout of its run.

    Args:
        recipe: a `Recipe`, such as that of `read_recipe`.
        cache_dir: directory for the results of validating the sources. Processes that open the
            recipe later read this one file in place of every .idx, as long as the sources do not
            change. Default: every process validates.

    Returns:
        The opened recipe, whose ``index`` locates every sample of the run.

    Raises:
        InvalidArgument: the recipe has no layout, or a source has no path.
        FormatError, StorageError: a source cannot be read, or its labels do not match its text.
    """
    check_recipe(recipe)
    for corpus in recipe.all_sources:
        if not corpus.path:
            raise InvalidArgument(
                f"source {corpus.name}: path must be given to read it, got only a token count"
            )
    cache = ValidationCache(_paths(recipe), None if cache_dir is None else os.fspath(cache_dir))
    sources = tuple(source for source in _open_sources(recipe, cache) if source is not None)
    validation = _open_evaluation(recipe, cache)
    check_held_out(_readers(sources, validation, cache))
    layout = _evaluated(
        resolve_recipe(recipe, [source.size for source in sources]),
        None if validation is None else validation.size,
    )
    made = OpenRecipe(layout=layout, sources=sources, validation_cache=cache, validation=validation)
    cache.keep(list(made.pairs.values()))
    if recipe.skip:
        _ = made.index  # checks the ids of skipped documents
    return made


def _paths(recipe: Recipe) -> list[str]:
    named = ((c.path, _companion(c)) for c in recipe.all_sources)
    return [path for paths in named for path in paths if path]


def _companion(corpus: RecipeSource) -> str | None:
    return corpus.labels or corpus.loss_mask


def plan_recipe(recipe: Recipe) -> RecipeLayout:
    """Return the layout of a recipe, whose sources may have token counts in place of files.

    Raises:
        InvalidArgument, FormatError, StorageError: see `open_recipe`.
    """
    check_recipe(recipe)
    cache = ValidationCache(_paths(recipe), None)
    opened = _open_sources(recipe, cache)
    pairs = zip(recipe.sources, opened, strict=True)
    sizes = [_counted(c, recipe) if one is None else one.size for c, one in pairs]
    evaluation, validation = recipe.evaluation, _open_evaluation(recipe, cache)
    check_held_out(_readers([one for one in opened if one is not None], validation, cache))
    size = None if validation is None else validation.size
    if evaluation is not None and size is None:
        size = _counted(evaluation.source, recipe, evaluation_length(recipe))
    return _evaluated(resolve_recipe(recipe, sizes), size)


def _evaluated(layout: RecipeLayout, validation: SourceSize | None) -> RecipeLayout:
    """Return the layout with its evaluation rounds."""
    recipe = layout.recipe
    if recipe.evaluation is None or validation is None:
        return layout
    rounds = rounds_of(
        recipe.evaluation,
        validation.samples,
        layout.num_steps,
        layout.batch.final,
        rows=recipe.rows_per_round,
        first_step=0 if recipe.past is None else recipe.past.steps,
    )
    return replace(layout, evaluation=rounds, validation=validation)


def _counted(corpus: RecipeSource, recipe: Recipe, length: int | None = None) -> SourceSize:
    """Return the size of a source that has a token count in place of files."""
    assert corpus.tokens is not None, "or it has a path"
    tokens = _rule_of(corpus, evaluates=length is not None).count(corpus.tokens)
    for stage in recipe.stages:
        weighting = stage.weighting
        drawn = any(stream.source == corpus.name for stream in stage.streams)
        if drawn and weighting is not None and weighting.by == "documents":
            raise InvalidArgument(
                f"stage {stage.name}: weights by documents need the path of source {corpus.name}, "
                "which has only a token count; give its path, or weigh by tokens"
            )
    samples = samples_in(tokens, length or recipe.lengths_of(corpus.name)[0], EXTRA)
    return SourceSize(tokens=tokens, documents=1, samples=samples)


def _open_sources(recipe: Recipe, cache: ValidationCache) -> list[OpenSource | None]:
    """Open the sources of the stages; None stands for one that has only a token count."""
    datasets = [cache.open(corpus.path) if corpus.path else None for corpus in recipe.sources]
    given = [corpus.shuffle_name for corpus in recipe.sources]
    fingerprints = [
        "" if dataset is None or name else cache.fingerprint(dataset)
        for dataset, name in zip(datasets, given, strict=True)
    ]
    opened: list[OpenSource | None] = []
    each = zip(recipe.sources, datasets, shuffle_names(fingerprints, given), strict=True)
    for corpus, dataset, name in each:
        if dataset is None:
            opened.append(None)
            continue
        source = _open(corpus, recipe, dataset, name, cache)
        past = recipe.past_reads.get(corpus.name)
        if past is not None and past.documents:
            source = replace(source, past=past, unread=_unread(past, source.epoch, dataset))
        opened.append(source)
    return opened


def _open_evaluation(recipe: Recipe, cache: ValidationCache) -> OpenSource | None:
    """Open the source of the evaluation, which is not counted among those of the stages; None
    without one, or if it has only a token count."""
    if recipe.evaluation is None or not recipe.evaluation.source.path:
        return None
    corpus = recipe.evaluation.source
    dataset = cache.open(corpus.path)
    name = corpus.shuffle_name or cache.fingerprint(dataset)
    return _open(corpus, recipe, dataset, name, cache, evaluation_length(recipe))


def _readers(
    sources: Sequence[OpenSource], validation: OpenSource | None, cache: ValidationCache
) -> list[Reader]:
    """Return the sources of training and of the evaluation, for `check_held_out`."""
    opened = [(source, True) for source in sources]
    opened += [] if validation is None else [(validation, False)]
    return [
        Reader(
            label=f"source {source.corpus.name}",
            fingerprint=partial(cache.fingerprint, source.dataset),
            rule=source.corpus.subset_rule,
            shuffle_name=source.shuffle_name,
            trains=trains,
        )
        for source, trains in opened
    ]


def _open(
    corpus: RecipeSource,
    recipe: Recipe,
    dataset: IndexedDataset,
    shuffle_name: str,
    cache: ValidationCache,
    length: int | None = None,
) -> OpenSource:
    """Open a source of the stages; with ``length`` that of the evaluation, in these samples."""
    companion = _companion(corpus)
    targets = None
    if companion:
        kind: LossKind = "labels" if corpus.labels else "loss_mask"
        entries = cache.open(companion)
        check_same_lengths(dataset, entries, kind.replace("_", " "))
        targets = SourceTargets(kind=kind, companion=entries)
    return OpenSource(
        corpus=corpus,
        dataset=dataset,
        targets=targets,
        shuffle_name=shuffle_name,
        epoch=_epoch(corpus, recipe, dataset, shuffle_name, length),
    )


def _unread(past: PastRead, epoch: Any, dataset: IndexedDataset) -> EpochIndex | None:
    """Return the index of the documents that were not read; None if they fill no sample."""
    try:
        read = read_ids(past.documents)
    except MissingFile:
        raise MissingFile(
            f"past: source {past.source}: {past.documents} is not there; check the path of its "
            "documents"
        ) from None
    where = f"past: source {past.source}: {past.documents}"
    if members_of(epoch) is not None:
        raise InvalidArgument(
            f"{where}: a list of documents that were read is not taken of a subset; give epochs, "
            "samples or tokens in place of documents, or leave subset and held_out out"
        )
    if read.size and read[-1] >= len(dataset):
        raise InvalidArgument(
            f"{where}: document {read[-1]} is not among the {len(dataset)} of "
            f"{dataset.path_prefix}; give ids from 0 to {len(dataset) - 1}"
        )
    is_unread = np.ones(len(dataset), bool)
    is_unread[read] = False
    documents = np.flatnonzero(is_unread).astype(np.int32)
    tokens = int(dataset.sequence_lengths[documents].sum(dtype=np.int64))
    if tokens < epoch.sequence_length + EXTRA:
        return None
    unread: EpochIndex = replace(
        epoch, documents=documents, tokens_per_epoch=tokens, without=past.documents
    )
    return unread


def evaluation_length(recipe: Recipe) -> int:
    """Return the sequence_length of the evaluation."""
    own = None if recipe.evaluation is None else recipe.evaluation.sequence_length
    return own or recipe.stage_lengths[0]


def _epoch(
    corpus: RecipeSource,
    recipe: Recipe,
    dataset: IndexedDataset,
    shuffle_name: str,
    length: int | None,
) -> Epochs:
    """Return the index of one epoch of a source, for stages in samples of its first length."""
    documents = _documents(corpus, dataset, shuffle_name, evaluates=length is not None)
    tokens = tokens_of(dataset, documents)
    lengths = (length,) if length else recipe.lengths_of(corpus.name)
    common: dict[str, Any] = {
        "sequence_length": lengths[0],
        "seed": recipe.seed,
        "source_name": shuffle_name,
        "add_extra_token": EXTRA,
    }
    bounds = dataset.document_indices.size - 1
    if corpus.kind == "finetuning" and bounds != len(dataset):
        raise FormatError(
            f"source {corpus.name}: {dataset.path_prefix}.idx must have one sequence per document, "
            f"got {len(dataset)} sequences in {bounds} documents; write each document as one"
        )
    if corpus.order == "packed":
        packed = PackedOrder(
            max_documents=corpus.max_documents,
            long_documents=corpus.long_documents,
            align=corpus.align,
        )
        return packed_index(dataset, documents, packed, tokens_per_epoch=tokens, **common)
    if tokens < max(lengths) + EXTRA and corpus.kind == "pretraining":
        raise InvalidArgument(
            f"source {corpus.name}: {dataset.path_prefix} holds {tokens} tokens, one "
            f"sample needs {max(lengths)} + {EXTRA}; omit it or lower sequence_length"
        )
    if corpus.kind == "finetuning":
        return BinIndex(
            bins=_bins(corpus, dataset, documents, lengths[0]),
            tokens_per_epoch=tokens,
            datasets=(dataset,),
            **common,
        )
    if corpus.order == "window":
        return WindowIndex(dataset=dataset, documents=documents, **common)
    epochs = epoch_index(dataset, documents, tokens_per_epoch=tokens, **common)
    order = corpus.order if length else recipe.order_of(corpus)
    if order != "blocks":
        return epochs
    size = corpus.block_tokens or default_block_tokens(tokens, max(recipe.stage_lengths))
    return BlockedIndex(blocks=PassBlocks(epochs, size), sequence_length=lengths[0])


def _documents(
    corpus: RecipeSource, dataset: IndexedDataset, shuffle_name: str, *, evaluates: bool
) -> range | DocumentSubset:
    """Return the documents of an epoch of a source, of an evaluation those held out."""
    rule = _rule_of(corpus, evaluates=evaluates)
    within, where = range(len(dataset)), f"source {corpus.name}"
    return rule.choose(shuffle_name, dataset.sequence_lengths, within, where)


def _rule_of(corpus: RecipeSource, *, evaluates: bool) -> SubsetRule:
    """Return which documents a source of training or of an evaluation reads."""
    return replace(corpus.subset_rule, evaluates=evaluates and corpus.held_out is not None)


def _bins(
    corpus: RecipeSource, dataset: IndexedDataset, documents: range | DocumentSubset, length: int
) -> Bins:
    """Return bins of ``length`` tokens if packed; otherwise of one more, for the label."""
    try:
        return make_bins(
            dataset.sequence_lengths,
            documents,
            length if corpus.packed else length + EXTRA,
            packed=corpus.packed,
            long_documents=corpus.long_documents,
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"source {corpus.name}: {error}") from None
