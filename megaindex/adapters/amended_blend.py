"""Blends that change in mid-run under a framework: ``install(amend=…)``.

The training data of the run as it began is built by the framework's rules and kept up to the first
change. From there on draws follow `megaindex.builders.extend.draw_changes`, and a source of which
more is read than was built gets longer arrays, so that the framework's own classes read everything.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from megaindex._types import IntArray
from megaindex.arithmetic import INT32_MAX, ceil_div, samples_in, shuffle_dtype
from megaindex.builders.cached import build_index
from megaindex.builders.extend import draw_changes, end_of_changes, read_on, reads_of
from megaindex.cache.cache import fetch
from megaindex.cache.fingerprint import stamps_of
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ArrayIndex
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.counts import source_counts
from megaindex.index.order_settings import order_of_row
from megaindex.index.orders.framework import Sink
from megaindex.index.spans import Index
from megaindex.index.staged_index import MixedStage
from megaindex.index.stretches import StretchedIndex
from megaindex.io.paths import absolute
from megaindex.settings.amended import AmendedBlend

Shapes = dict[str, tuple[tuple[int, ...], str]]
FOLDER = "megaindex-amended"
"""Name of the cache of draws and longer arrays, in the directory of the framework's arrays."""


@dataclass(frozen=True, kw_only=True)
class TrainSource:
    """One source of the training data: its arrays and what further epochs of it need."""

    path: str
    index: ArrayIndex
    """The arrays that the framework built; their epochs and tokens are not used."""
    documents: range

    def counted(self) -> ArrayIndex:
        """Return the index with the number of its epochs and their tokens."""
        begin, end = self.documents.start, self.documents.stop
        tokens = self.index.sequence_lengths[begin:end].sum(dtype=np.int64)
        epochs = self.index.document_index.size // len(self.documents)
        return replace(self.index, num_epochs=epochs, tokens_per_epoch=int(tokens))


@dataclass(frozen=True, kw_only=True, eq=False)
class AmendedData:
    """Draws of an amended run, and the sources with longer arrays."""

    dataset_index: IntArray
    dataset_sample_index: IntArray
    sources: list[TrainSource]
    longer: dict[int, dict[str, IntArray]]
    """New document_index, sample_index and shuffle_index, by the number of the source."""


def amended_data(
    amended: AmendedBlend,
    old: Index,
    sources: list[TrainSource],
    *,
    open_source: Callable[[str], TrainSource],
    row: Any,
    seed: int,
    end: int,
    cache_dir: str | None,
    key: Any,
) -> AmendedData:
    """Return the draws of a run of ``end`` samples, and the arrays of the sources that need longer
    ones.

    ``old`` are the training data as the run began, of ``sources``; ``open_source`` returns a source
    of which one epoch is built. ``cache_dir`` is that of the framework's arrays, which are known by
    the JSON values of ``key``, besides their corpora.

    Raises:
        InvalidArgument: the changes do not fit the run.
        StorageError: the cache cannot be read or written.
    """
    first = amended.changes[0].consumed_samples
    end = end_of_changes(amended.changes, old.num_samples, end, None)
    served = source_counts(old, 0, first).tolist()
    names = [source.path for source in sources]
    stages = draw_changes(amended.changes, names, served, end)
    sources = [*sources, *map(open_source, names[len(sources) :])]
    folder = None if cache_dir is None else os.path.join(cache_dir, FOLDER)
    named = [*names, *(path for change in amended.changes for path in change.weights)]
    known = {
        "order": "amended blend",
        "run": [key, stamps_of(list(dict.fromkeys(map(absolute, named))))],
        "changes": _plain(amended),
        "end": end,
    }
    types: Shapes = {"dataset_index": ((end,), "int16"), "dataset_sample_index": ((end,), "int64")}
    drawn, _ = fetch(folder, lambda: known, partial(_draw, old, first, stages, types), types)
    longer = {}
    for number, (begin, stop) in enumerate(reads_of(stages, served, len(names))):
        if stop > begin:
            arrays = _longer(sources[number], begin, stop - begin, seed, row, folder, known)
            if arrays is not None:
                longer[number] = arrays
    return AmendedData(**drawn, sources=sources, longer=longer)


def _plain(amended: AmendedBlend) -> list[Any]:
    return [
        [change.consumed_samples, [[absolute(p), str(w)] for p, w in change.weights.items()]]
        for change in amended.changes
    ]


def _draw(old: Index, first: int, stages: Sequence[MixedStage], types: Shapes, sink: Sink) -> None:
    which, samples = (sink.allocate(name, *types[name]) for name in types)
    if isinstance(old, BlendedIndex):
        which[:first], samples[:first] = old.dataset_index[:first], old.dataset_sample_index[:first]
    else:
        which[:first], samples[:first] = 0, np.arange(first)
    begin, at_once = first, 1 << 20
    for stage in stages:
        for low in range(0, stage.num_samples, at_once):
            drawn = stage.mixing.lookup(np.arange(low, min(low + at_once, stage.num_samples)))
            here = slice(begin + low, begin + low + drawn.stream.size)
            which[here] = np.array(stage.sources)[drawn.stream]
            samples[here] = np.array(stage.begins)[drawn.stream] + drawn.ordinal
        begin += stage.num_samples
    for name in types:
        sink.seal(name)


def _longer(
    source: TrainSource, begin: int, count: int, seed: int, row: Any, folder: Any, known: Any
) -> dict[str, IntArray] | None:
    """Return the arrays of a source for ``count`` samples after ``begin``; None if it has them."""
    old = source.counted()
    if old.num_epochs == 1 and begin + count <= old.num_samples:
        return None
    parameters = {**known, "order": "amended source", "path": absolute(source.path)}
    shapes = _shapes(old, len(source.documents), begin, count)

    def further(seed: int) -> Index:
        return build_index(
            IndexedDataset(source.path, dialect=row.file_dialect),
            sequence_length=old.sequence_length,
            seed=seed,
            epochs=1,
            documents=source.documents,
            add_extra_token=old.add_extra_token,
            order=order_of_row(row),
        )

    def build(sink: Sink) -> None:
        index = read_on(source.path, old, begin, count, seed, further)
        assert isinstance(index, StretchedIndex), "one epoch does not suffice"
        _join(index, shapes, sink)

    arrays: Any = fetch(folder, lambda: parameters, build, shapes)[0]
    return dict(arrays)


def _shapes(old: ArrayIndex, documents: int, begin: int, count: int) -> Shapes:
    """Return shape and dtype of the arrays of a source and its further epochs."""
    per_epoch = samples_in(old.tokens_per_epoch, old.sequence_length, old.add_extra_token)
    epochs = max(0, ceil_div(count - (old.num_samples - begin), per_epoch))
    entries = old.document_index.size + epochs * documents
    rows = len(old.sample_index) + epochs * (per_epoch + 1)
    wide = old.sample_index.dtype == np.int64 or entries > INT32_MAX
    return {
        "document_index": ((entries,), "int32"),
        "sample_index": ((rows, 2), "int64" if wide else "int32"),
        "shuffle_index": ((begin + count,), str(shuffle_dtype(rows))),
    }


def _join(index: StretchedIndex, shapes: Shapes, sink: Sink) -> None:
    """Write the arrays of all stretches one after the other; none reads across their seams."""
    documents, rows, shuffle = (sink.allocate(name, *shapes[name]) for name in shapes)
    begins: dict[int, int] = {}  # first row of each part
    entry = row = at = 0
    flat = (getattr(each.index, "stretches", (each,)) for each in index.stretches)
    for stretch in chain.from_iterable(flat):
        part: Any = stretch.index
        if id(part) not in begins:
            begins[id(part)] = row
            size, length = part.document_index.size, len(part.sample_index)
            documents[entry : entry + size] = part.document_index
            rows[row : row + length] = part.sample_index
            rows[row : row + length, 0] += entry
            entry, row = entry + size, row + length
        ids = stretch.samples
        chosen = part.shuffle_index[slice(ids.start, ids.stop) if isinstance(ids, range) else ids]
        shuffle[at : at + chosen.size] = chosen
        shuffle[at : at + chosen.size] += begins[id(part)]
        at += chosen.size
    for name in shapes:
        sink.seal(name)
