"""Compatibility of an index with datasets, and of a checkpoint with a run's index and sources."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import xxhash

from megaindex._types import IntArray
from megaindex.cache.fingerprint import array_bytes, contents_of
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.spans import Index
from megaindex.loader.targets import Targets
from megaindex.validation import CheckpointReader, shown

logger = logging.getLogger("megaindex")

_PROBES = 64
"""Sequences, or samples, that are compared."""


def check_index(index: object) -> None:
    """
    Raises:
        InvalidArgument: it has no `locate` or no ``num_samples``.
    """
    if not hasattr(index, "locate") or not hasattr(index, "num_samples"):
        raise InvalidArgument(
            f"index must be what build_index or build_blend gives, got {shown(index)} of type "
            f"{type(index).__name__}"
        )


def check_token_dtype(datasets: Sequence[IndexedDataset], token_dtype: str) -> None:
    """
    Raises:
        InvalidArgument: batches of that type do not hold every token of a dataset.
    """
    for dataset in datasets:
        if not np.can_cast(dataset.dtype, token_dtype):
            raise InvalidArgument(
                f"{dataset.path_prefix}: its tokens are {dataset.dtype}, which token_dtype="
                f"{token_dtype!r} does not hold; use token_dtype='int64'"
                + ("" if dataset.dtype.kind in "iu" else ": batches hold integers")
            )


def check_datasets(index: Index, datasets: Sequence[IndexedDataset]) -> None:
    """Refuse datasets that the index was not built from, as far as a quick comparison shows.

    Compares the number of sources, and of each the number of sequences and the lengths of a few.

    Raises:
        InvalidArgument: they do not belong together; the message names the source.
    """
    sources = _sources(index)
    if len(sources) > len(datasets):
        raise InvalidArgument(
            f"the index has {len(sources)} sources and {len(datasets)} datasets were given; give "
            "those it was built from, in its order"
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
                f"index {lengths.size} of other lengths; give the datasets that the index was "
                "built from, in its order"
            )


def order_facts(
    index: Index, consumed_samples: int, numbers: IntArray | None = None
) -> dict[str, str]:
    """Return hashes by name of the runs that the first and the last samples of a run's past read.

    Indices of other seeds, orders or corpora give others; one that was extended gives the same.

    Args:
        numbers: the number to hash for each source; by default that of the index.
    """
    count = index.num_samples
    last = np.arange(max(0, consumed_samples - _PROBES), consumed_samples) % max(1, count)
    first = np.arange(min(_PROBES, count, consumed_samples))
    return {"first": _digest(index, first, numbers), "last": _digest(index, last, numbers)}


@dataclass(frozen=True, kw_only=True)
class Contents:
    """Content fingerprints of a source's tokens and of the labels or mask of their loss."""

    tokens: Mapping[str, str]
    kind: str
    """text, or of instruction data: all, labels or loss_mask."""
    targets: Mapping[str, str] | None
    """Of the labels or the mask."""

    def difference(self, other: Contents, part: str) -> str:
        """Return how another one differs in ``content`` or in ``targets``; empty if it does not.

        Only fingerprints that both have are compared: one may be sampled and the other whole.
        """
        if part == "content":
            return "it holds other tokens" if _differ(self.tokens, other.tokens) else ""
        if self.kind != other.kind:
            return f"its loss is on {other.kind} instead of {self.kind}, other targets"
        mine, others = self.targets, other.targets
        same = mine is others or (mine and others and not _differ(mine, others))
        return "" if same else "its labels or loss mask are others"

    def to_dict(self) -> dict[str, Any]:
        """JSON values."""
        targets = None if self.targets is None else dict(self.targets)
        return {"tokens": dict(self.tokens), "loss": self.kind, "targets": targets}

    @classmethod
    def read(cls, stored: CheckpointReader) -> Contents:
        """
        Raises:
            FormatError: not what `to_dict` gives.
        """
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
    """Of each source; tokens are sampled or read ``whole`` too, labels and masks are read whole.

    Raises:
        StorageError: they cannot be read, or changed since they were opened.
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
    """
    Raises:
        InvalidArgument: it does not say what of the tokens a checkpoint covers.
    """
    if content not in ("sampled", "whole", None):
        raise InvalidArgument(f"content must be 'sampled', 'whole' or None, got {shown(content)}")


def stored_contents(
    stored: CheckpointReader, datasets: Sequence[IndexedDataset]
) -> dict[str, Contents | None]:
    """The ``content`` in the state of a loader, by the names of its sources.

    Raises:
        InvalidArgument: it is that of another number of sources.
        FormatError: not what `Contents.to_dict` gives.
    """
    names = source_names(datasets)
    if stored.values.get("content") is None:
        return dict.fromkeys(names)
    rule = "must be a list of mappings, or null"
    given = stored.checked("content", rule, lambda value: isinstance(value, list))
    read = [
        Contents.read(CheckpointReader("the content of a loader's source", each)) for each in given
    ]
    if len(read) != len(names):
        raise InvalidArgument(
            f"the run read {len(read)} sources and this one has {len(names)}; give the loader "
            "those of the checkpoint"
        )
    return dict(zip(names, read, strict=True))


def source_names(datasets: Sequence[IndexedDataset]) -> list[str]:
    """For messages."""
    return [f"{number} ({dataset.path_prefix})" for number, dataset in enumerate(datasets)]


def check_contents(
    theirs: Mapping[str, Contents | None], ours: Mapping[str, Contents], allow: Collection[str]
) -> None:
    """Refuse sources that hold other tokens, or other labels or masks, than those of a state.

    Args:
        theirs: by the names of the sources; None where the state records nothing of them, which is
            logged once.
        ours: by the same names.

    Raises:
        InvalidArgument: they do; the message names the source.
    """
    if any(content is None for content in theirs.values()):
        logger.warning(
            "the checkpoint records the lengths and document bounds of its sources alone, as those "
            "of earlier versions do: that tokens, labels and loss masks are the same was not "
            "checked"
        )
    for name, content in theirs.items():
        for part in ("content", "targets"):
            if content is None or name not in ours or part in allow:
                continue
            if what := content.difference(ours[name], part):
                raise InvalidArgument(
                    f"source {name}: {what} than when the run read them; restore them, or, if it "
                    f'is meant, load the state with allow=("{part}",)'
                )


def _digest(index: Index, samples: Any, numbers: IntArray | None) -> str:
    spans = index.locate(samples)
    if numbers is not None:
        spans = replace(spans, source=numbers[spans.source].astype(spans.source.dtype))
    digest = xxhash.xxh3_128()
    for part in (*spans, spans.row_splits):
        digest.update(array_bytes(part))
    return digest.hexdigest()


def _sources(index: Any) -> Sequence[Any]:
    """The index of each source."""
    if hasattr(index, "indices"):  # a blend
        return tuple(index.indices)
    if hasattr(index, "stages") and hasattr(index, "sources"):
        return tuple(index.sources)
    return (index,)
