"""Checks of datasets and checkpoints against index and sources; progress by source and by stage."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash

from megaindex._types import IntArray
from megaindex.cache.fingerprint import array_bytes, contents_of
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.blend import exact_values
from megaindex.index.blended_index import BlendedIndex, LazyIndex
from megaindex.index.counts import CountsByLength, add_counts, counts_by_length
from megaindex.index.skips import skips_of, unskipped
from megaindex.index.spans import (
    EpochSizes,
    Index,
    datasets_of,
    epoch_sizes,
    separates_documents,
    sources_of,
)
from megaindex.index.stretches import StretchedIndex
from megaindex.loader.targets import Targets
from megaindex.validation import CheckpointReader, check_integer, shown

if TYPE_CHECKING:
    from megaindex.builders.recipe import OpenRecipe

logger = logging.getLogger("megaindex")

STATE, STATE_VERSION = "the state of a loader", 5
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

    None if it is not a greedy blend, or one that is written out.
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
    datasets: Sequence[IndexedDataset],
    targets: Targets | None,
    *,
    whole: bool,
    of: Callable[..., dict[str, str]] = contents_of,
) -> list[Contents]:
    """Return the contents of each source, as ``of`` gives them of a pair, from a cache for example;
    labels and loss masks are always read whole.

    Raises:
        StorageError: a file cannot be read, or changed since it was opened.
    """
    marked = [None] * len(datasets) if targets is None else targets.sources
    return [
        Contents(
            tokens=of(dataset, whole=whole),
            kind="text" if target is None else target.kind,
            targets=None
            if target is None or target.companion is None
            else of(target.companion, whole=True),
        )
        for dataset, target in zip(datasets, marked, strict=False)
    ]


def check_content(content: object) -> None:
    if content not in ("sampled", "whole", None):
        raise InvalidArgument(f"content must be 'sampled', 'whole' or None, got {shown(content)}")


def stored_contents(
    stored: CheckpointReader, names: Sequence[str], numbers: IntArray | None = None
) -> dict[str, Contents | None]:
    """Return the ``content`` of a loader's state by source names; None where it is not recorded.

    Args:
        stored: the state.
        names: name of each source here.
        numbers: number of each source in the state, -1 for one that joined since; None: the same.

    Raises:
        InvalidArgument: the state has more sources.
        FormatError: the state is damaged.
    """
    rule = "must be a list of mappings, or null"
    if stored.field("content", rule) is None:
        return dict.fromkeys(names)
    given = stored.checked("content", rule, lambda value: isinstance(value, list) and value != [])
    read = [
        Contents.read(CheckpointReader("the content of a loader's source", each)) for each in given
    ]
    if numbers is not None:
        pairs = zip(names, numbers.tolist(), strict=True)
        return {name: read[number] for name, number in pairs if number >= 0}
    if len(read) > len(names):
        raise InvalidArgument(
            f"the number of sources must be {len(read)}, as in the checkpoint, or more, got "
            f"{len(names)}; give the loader those of the checkpoint, before any that joined since"
        )
    return dict(zip(names, read, strict=False))


def other_mix(stored: CheckpointReader, identity: str | None) -> bool:
    """Return True if a state changes the mix of a recipe, and is not of the run of an identity."""
    if stored.field("recipe", "must be a mapping or null") is None:
        return False
    part = stored.part("recipe", "the recipe of a loader's state")
    is_changed = part.field("mix_changes", "must be a mapping or null") is not None
    return is_changed and (identity is None or stored.values["identity"] != identity)


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
            "the checkpoint records only the lengths and document bounds of its sources: tokens, "
            "labels and loss masks were not compared"
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
    padded = spans.padding is not None and spans.padding.any()
    for part in (*spans, spans.row_splits, *([spans.padding] if padded else [])):
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
    """Samples, tokens and epochs served from each source at any position of a run.

    Computed from the index for any past or future position: at once where draws have a formula,
    else, as of a blend, by counting draws from the position asked for last.

    >>> progress = SourceProgress(index, ["web", "code"])
    >>> progress.totals(loader.consumed_samples)      # rows of all sources

    Args:
        index: samples of the run in order of training; with skips, its positions.
        names: name of each source. Default: the path prefixes of the datasets of the index.
        stages: name and first sample of each stage, in order; the parts of a stage may be listed.

    Raises:
        InvalidArgument: a source has no name.
    """

    def __init__(
        self,
        index: Index,
        names: Sequence[str] | None = None,
        stages: Sequence[tuple[str, int]] = (),
    ) -> None:
        paths = [dataset.path_prefix for dataset in datasets_of(index)]
        self._names = paths if names is None else list(names)
        if len(self._names) < (count := len(separates_documents(index))):
            raise InvalidArgument(
                f"names must be {count}, one for each source of the index, got {len(self._names)}"
            )
        self._index, self._stages = index, tuple(stages)
        self._order, self._skips = unskipped(index), skips_of(index)
        self._end = index.num_samples if self._skips is None else self._skips.run_end
        self._last: tuple[int, CountsByLength] = (0, {})

    @classmethod
    def of_recipe(cls, opened: OpenRecipe) -> SourceProgress:
        """Return the progress of a recipe's run, by the names of its sources and stages."""
        layout = opened.layout
        names = [source.name for source in layout.recipe.sources]
        return cls(opened.index, names, [(s.name, s.first_sample) for s in layout.stages])

    def totals(self, consumed_samples: int) -> list[ProgressRow]:
        """Return the row of every source.

        Raises:
            OutOfRange: the run has fewer samples.
        """
        consumed = self._checked(consumed_samples)
        position, before = self._last if self._last[0] <= consumed else (0, {})
        served = add_counts([before, counts_by_length(self._index, position, consumed)])
        self._last = consumed, served
        return self._rows(served)

    def stages(self, consumed_samples: int) -> dict[str, list[ProgressRow]]:
        """Return the rows of every stage that has begun, by the name of the stage.

        Moved samples count in the stage that they were moved from.

        Raises:
            OutOfRange: the run has fewer samples.
        """
        consumed = self._checked(consumed_samples)
        skips = self._skips
        served = [(0, consumed)] if skips is None else list(skips.served_samples(consumed))
        bounds = [*(first for _, first in self._stages), self._order.num_samples]
        found: dict[str, CountsByLength] = {}
        for (name, first), end in zip(self._stages, bounds[1:], strict=True):
            if first < consumed:
                inside = [(max(first, low), min(end, high)) for low, high in served]
                counts = (counts_by_length(self._order, a, b) for a, b in inside if a < b)
                found[name] = add_counts([found.get(name, {}), *counts])
        return {name: self._rows(counts) for name, counts in found.items()}

    def _checked(self, consumed: int) -> int:
        consumed = check_integer("consumed_samples", consumed)
        if not 0 <= consumed <= self._end:
            raise OutOfRange(
                f"consumed_samples must be from 0 to {self._end}, the samples of the run, got "
                f"{consumed}"
            )
        return consumed

    def _rows(self, served: CountsByLength) -> list[ProgressRow]:
        each: list[dict[int, int]] = [{} for _ in self._names]
        for length, counts in served.items():
            for source, count in enumerate(counts.tolist()):
                if count:
                    each[source][length] = count
        return [
            ProgressRow(
                source=name,
                samples=sum(counts.values()),
                tokens=sum(count * length for length, count in counts.items()),
                epochs=float(sum(n / self._epoch(source, length) for length, n in counts.items())),
            )
            for source, (name, counts) in enumerate(zip(self._names, each, strict=True))
        ]

    def _epoch(self, source: int, length: int) -> Fraction:
        """Return the samples of an epoch of a source at a sequence length."""
        size = self._epochs.get((source, length))
        if size is None:
            raise InvalidArgument(
                f"a {type(self._index).__name__} does not state the samples of an epoch of its "
                f"source {source}; build the index by megaindex, or count with index.locate"
            )
        return size

    @cached_property
    def _epochs(self) -> EpochSizes:
        return epoch_sizes(self._index)
