"""Checks of datasets and checkpoints against index and sources; progress by source and by stage."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from megaindex._types import I64, IntArray
from megaindex.cache.fingerprint import array_bytes, contents_of
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import BlendedIndex, LazyIndex
from megaindex.index.blending import exact_values
from megaindex.index.spans import Index, sources_of
from megaindex.index.stretches import StretchedIndex
from megaindex.loader.targets import Targets
from megaindex.recipe.layout import RecipeLayout
from megaindex.validation import CheckpointReader, check_integer, shown

logger = logging.getLogger("megaindex")

_PROBES = 64  # sequences, or samples, that are compared


def check_token_dtype(datasets: Sequence[IndexedDataset], token_dtype: str) -> None:
    """Raise InvalidArgument if a dataset's tokens do not fit ``token_dtype``."""
    for dataset in datasets:
        if not np.can_cast(dataset.dtype, token_dtype):
            raise InvalidArgument(
                f"{dataset.path_prefix}: tokens of {dataset.dtype} do not fit token_dtype="
                f"{token_dtype!r}; use token_dtype='int64'"
                + ("" if dataset.dtype.kind in "iu" else ": batches hold integers")
            )


def check_datasets(index: Index, datasets: Sequence[IndexedDataset]) -> None:
    """Raise InvalidArgument for datasets from which the index was not built.

    A quick comparison: the number of sources, and of each source the number of sequences and the
    lengths of a few.
    """
    sources = sources_of(index)
    if len(sources) > len(datasets):
        raise InvalidArgument(
            f"datasets must be {len(sources)}, one for each source of the index, got "
            f"{len(datasets)}; give those from which it was built, in the order of the index"
        )
    for number, (source, dataset) in enumerate(zip(sources, datasets, strict=False)):
        lengths = getattr(source, "sequence_lengths", None)
        if lengths is None or not dataset.is_open:
            continue
        probes = np.linspace(0, max(0, lengths.size - 1), _PROBES).astype(np.int64)
        same = lengths.size == len(dataset) and (
            lengths.size == 0 or np.array_equal(lengths[probes], dataset.sequence_lengths[probes])
        )
        if not same:
            raise InvalidArgument(
                f"{dataset.path_prefix}: has {len(dataset)} sequences, and source {number} of the "
                f"index {lengths.size} of other lengths; give the datasets from which the index "
                "was built, in the order of the index"
            )


def order_facts(
    index: Index, consumed_samples: int, numbers: IntArray | None = None
) -> dict[str, str]:
    """Return hashes of the spans of the first and the last consumed samples, and of the weights of
    a greedy blend, by name.

    They differ between seeds, orders, corpora and weights, and stay equal when an index is
    extended, which writes the blend out and leaves the weights unknown, and with other skips.

    Args:
        numbers: the number to hash for each source; default: that of the index.
    """
    count = index.num_samples
    begin = getattr(index, "first_position", 0)
    last = np.arange(max(begin, consumed_samples - _PROBES), consumed_samples) % max(1, count)
    first = np.arange(begin, min(begin + _PROBES, count, consumed_samples))
    facts = {"first": _digest(index, first, numbers), "last": _digest(index, last, numbers)}
    weights = _greedy_weights(index)
    return facts if weights is None else {**facts, "weights": weights}


def _greedy_weights(index: Any) -> str | None:
    """Return the hash of the weights by which a run began, whose last bits decide ties.

    None if it is no greedy blend, or one that is written out.
    """
    while isinstance(index, StretchedIndex | LazyIndex):
        index = index.stretches[0].index if isinstance(index, StretchedIndex) else index.index
    if not isinstance(index, BlendedIndex) or index.rule != "greedy":
        return None
    return xxhash.xxh3_128_hexdigest(repr(exact_values(np.asarray(index.weights))).encode())


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Content fingerprints of a source's tokens and of its labels or loss mask."""

    tokens: Mapping[str, str]
    kind: str
    """text; for instruction data: all, labels or loss_mask."""
    targets: Mapping[str, str] | None

    def difference(self, other: Contents, part: str) -> str:
        """Return the difference of another in ``content`` or ``targets``; empty if they are equal.

        Only fingerprints that both have are compared: one may be sampled and the other whole.
        """
        if part == "content":
            return "it holds other tokens" if _differ(self.tokens, other.tokens) else ""
        if self.kind != other.kind:
            return f"its loss is on {other.kind} instead of {self.kind}, other targets"
        mine, others = self.targets, other.targets
        same = mine is others or (mine and others and not _differ(mine, others))
        return "" if same else "its labels or loss mask differ"

    def to_dict(self) -> dict[str, Any]:
        targets = None if self.targets is None else dict(self.targets)
        return {"tokens": dict(self.tokens), "loss": self.kind, "targets": targets}

    @classmethod
    def read(cls, stored: CheckpointReader) -> Contents:
        """Read a result of `to_dict`, or raise FormatError."""
        targets = stored.field("targets", "must be a mapping or null")
        return cls(
            tokens=_hashes(stored.part("tokens", "the content of tokens")),
            kind=stored.text("loss"),
            targets=None if targets is None else _hashes(stored.part("targets", "the content")),
        )


def _hashes(stored: CheckpointReader) -> dict[str, str]:
    return {name: stored.hashed(name) for name in stored.values}


def _differ(a: Mapping[str, str], b: Mapping[str, str]) -> bool:
    return any(a[name] != b[name] for name in a.keys() & b.keys())


def contents(
    datasets: Sequence[IndexedDataset], targets: Targets | None, *, whole: bool
) -> list[Contents]:
    """Return the contents of each source; labels and loss masks are always read whole.

    Raises:
        StorageError: a file cannot be read, or changed since it was opened.
    """
    marked = [None] * len(datasets) if targets is None else targets.sources
    return [
        Contents(
            tokens=contents_of(dataset, whole=whole),
            kind="text" if target is None else target.kind,
            targets=None
            if target is None or target.companion is None
            else contents_of(target.companion, whole=True),
        )
        for dataset, target in zip(datasets, marked, strict=False)
    ]


def check_content(content: object) -> None:
    if content not in ("sampled", "whole", None):
        raise InvalidArgument(f"content must be 'sampled', 'whole' or None, got {shown(content)}")


def stored_contents(
    stored: CheckpointReader, datasets: Sequence[IndexedDataset]
) -> dict[str, Contents | None]:
    """Return the ``content`` of a loader's state by source names; None where it is not recorded.

    Raises:
        InvalidArgument: the number of sources differs.
        FormatError: the state is damaged.
    """
    names = source_names(datasets)
    if stored.values.get("content") is None:
        return dict.fromkeys(names)
    rule = "must be a list of mappings, or null"
    given = stored.checked("content", rule, lambda value: isinstance(value, list) and value != [])
    read = [
        Contents.read(CheckpointReader("the content of a loader's source", each)) for each in given
    ]
    if len(read) > len(names):
        raise InvalidArgument(
            f"the number of sources must be {len(read)}, as in the checkpoint, or more, got "
            f"{len(names)}; give the loader those of the checkpoint, before any that joined since"
        )
    return dict(zip(names, read, strict=False))


def source_names(datasets: Sequence[IndexedDataset]) -> list[str]:
    """Return the names of the sources for messages."""
    return [f"{number} ({dataset.path_prefix})" for number, dataset in enumerate(datasets)]


def check_contents(
    theirs: Mapping[str, Contents | None], ours: Mapping[str, Contents], allow: Collection[str]
) -> None:
    """Raise InvalidArgument for a source whose tokens, labels or loss mask differ from a state's.

    Both mappings have the names of the sources. None stands for contents that the state does not
    record; a warning is logged.
    """
    if any(content is None for content in theirs.values()):
        logger.warning(
            "the checkpoint records only the lengths and document bounds of its sources, as in "
            "earlier versions: tokens, labels and loss masks were not compared"
        )
    for name, content in theirs.items():
        for part in ("content", "targets"):
            if content is None or name not in ours or part in allow:
                continue
            if difference := content.difference(ours[name], part):
                raise InvalidArgument(
                    f"source {name}: {difference} than the run of the checkpoint; restore them, "
                    f'or, if the change is intended, load the state with allow=("{part}",)'
                )


def _digest(index: Index, samples: Any, numbers: IntArray | None) -> str:
    spans = getattr(index, "locate_any", index.locate)(samples)
    if numbers is not None:
        spans = replace(spans, source=numbers[spans.source].astype(spans.source.dtype))
    digest = xxhash.xxh3_128()
    for part in (*spans, spans.row_splits):
        digest.update(array_bytes(part))
    return digest.hexdigest()


@dataclass(frozen=True, kw_only=True)
class ProgressRow:
    """Samples served from one source."""

    source: str
    samples: int
    tokens: int
    """samples × sequence_length of their stage, the padding of instruction data included."""
    epochs: float
    """Samples served over samples of one epoch of the source, at the length of each."""


class SourceProgress:
    """Samples, tokens and epochs served from each source at any sample of a run.

    Computed from the layout for any past or future sample.

    >>> progress = SourceProgress(opened.layout)
    >>> progress.totals(loader.consumed_samples)      # rows of all sources

    Args:
        layout: layout of the recipe, `OpenRecipe.layout`.
    """

    def __init__(self, layout: RecipeLayout) -> None:
        self._plan = layout
        self._before = np.zeros((len(layout.stages) + 1, len(layout.sizes)), np.int64)
        for number, stage in enumerate(layout.stages):
            drawn = stage.mixed.drawn(stage.num_samples, len(layout.sizes))
            self._before[number + 1] = self._before[number] + drawn

    def totals(self, consumed_samples: int) -> list[ProgressRow]:
        """Return the row of every source, all stages together.

        Raises:
            OutOfRange: the run has fewer samples.
        """
        return self._rows(self._served(consumed_samples), range(len(self._plan.stages)))

    def stages(self, consumed_samples: int) -> dict[str, list[ProgressRow]]:
        """Return the rows of every stage that has begun, by the name of the stage.

        Raises:
            OutOfRange: the run has fewer samples.
        """
        begun: dict[str, list[int]] = {}
        served = self._served(consumed_samples)
        for number, stage in enumerate(self._plan.stages):
            if stage.first_sample < consumed_samples:
                begun.setdefault(stage.name, []).append(number)
        return {name: self._rows(served, numbers) for name, numbers in begun.items()}

    def _served(self, consumed: int) -> I64:
        """Return int64[stages, sources]: samples served before a position, without skipped ones."""
        consumed = check_integer("consumed_samples", consumed)
        skips = self._plan.skips
        end = self._plan.end_sample if skips is None else skips.run_end
        if not 0 <= consumed <= end:
            raise OutOfRange(
                f"consumed_samples must be from 0 to {end}, the samples of the run, got {consumed}"
            )
        if skips is None:
            return self._drawn(0, consumed)
        ranges = [
            *skips.segments(0, min(consumed, skips.end)),
            *skips.moved_ranges(max(0, consumed - skips.end)),
        ]
        return sum((self._drawn(*each) for each in ranges), self._drawn(0, 0))

    def _drawn(self, begin: int, end: int) -> I64:
        """Return int64[stages, sources]: draws of the samples begin ... end - 1 of the order."""
        return self._drawn_before(end) - self._drawn_before(begin)

    def _drawn_before(self, position: int) -> I64:
        counts = np.diff(self._before, axis=0)
        for k, stage in enumerate(self._plan.stages):
            within = position - stage.first_sample
            if within < stage.num_samples:
                counts[k] = stage.mixed.drawn(within, counts.shape[1]) if within > 0 else 0
        return counts

    def _rows(self, served: I64, numbers: Sequence[int]) -> list[ProgressRow]:
        """Return the sums of the stages of these numbers; ``served`` as from `_served`."""
        plan = self._plan
        lengths = [stage.sequence_length for stage in plan.stages]
        totals = {
            length: served[[n for n in numbers if lengths[n] == length]].sum(axis=0).tolist()
            for length in dict.fromkeys(lengths)
        }
        return [
            ProgressRow(
                source=source.name,
                samples=sum(counts[i] for counts in totals.values()),
                tokens=sum(counts[i] * length for length, counts in totals.items()),
                epochs=sum(
                    counts[i] / plan.size_at(i, length).samples
                    for length, counts in totals.items()
                    if counts[i]
                ),
            )
            for i, source in enumerate(plan.recipe.sources)
        ]
