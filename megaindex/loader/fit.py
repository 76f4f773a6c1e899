"""Whether datasets are those of an index, and whether an index is that of a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import xxhash

from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.spans import Index
from megaindex.store.fingerprint import array_bytes

_PROBES = 64
"""Sequences, or samples, that are compared."""


def check_datasets(index: Index, datasets: Sequence[IndexedDataset]) -> None:
    """Refuse datasets that the index was not built from, as far as a look can tell.

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


def order_facts(index: Index, consumed_samples: int) -> dict[str, str]:
    """What the first samples of a run and the last ones it consumed read: hashes by name.

    Indices of other seeds, orders or corpora give others; one that was extended gives the same.
    """
    count = index.num_samples
    last = np.arange(max(0, consumed_samples - _PROBES), consumed_samples) % max(1, count)
    first = np.arange(min(_PROBES, count, consumed_samples))
    return {"first": _digest(index, first), "last": _digest(index, last)}


def _digest(index: Index, samples: Any) -> str:
    spans = index.locate(samples)
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
