"""The three index arrays of a GPT-NeoX dataset, under GPT-NeoX's own cache names.

GPT-NeoX makes three datasets of every source, one after another, and opens its corpus for each.
While a grouped function of its ``data_utils`` runs, corpora are shared by path and requests for
index arrays are collected. When it returns, the requests of each directory are looked up with one
listing, one process builds and records missing arrays, and all datasets are reported.
"""

from __future__ import annotations

import abc
import contextvars
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from megaindex.arithmetic import ceil_div
from megaindex.builders.single import order_parameters
from megaindex.cache.array_files import ArrayFiles, Arrays, Identity
from megaindex.cache.array_group import ArrayRequest, fetch_together, uncollected
from megaindex.cache.fingerprint import canonical_json, corpus_fingerprint, corpus_stamp
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.array_index import check_arrays
from megaindex.index.orders import framework
from megaindex.index.orders.framework import Memory, PackingOrder, ShuffledOrder, Sink

logger = logging.getLogger("megaindex")

Report = Callable[[Sequence[Any], float], None]
"""A function of datasets whose arrays were fetched and the seconds for each of them."""

_CLAIM = "megaindex-neox"
"""Name of the claim of all groups of a directory, so that jobs do not build arrays twice."""


@dataclass(kw_only=True)
class DatasetGroup:
    """The corpora and requests collected so far."""

    corpora: dict[str, Any] = field(default_factory=dict)
    """GPT-NeoX's indexed datasets, by path."""
    stamps: dict[str, list[int]] = field(default_factory=dict)
    asked: list[Any] = field(default_factory=list)
    """GPT-NeoX's datasets."""
    report: Report | None = None
    """The function that reports them."""

    def fetch(self) -> None:
        """Find or build the requested arrays that were not fetched by themselves since."""
        started = time.perf_counter()
        directories: dict[str, list[Any]] = defaultdict(list)
        for samples in (dataset.megaindex for dataset in self.asked):
            if not samples.is_fetched:
                directories[samples.request().directory].append(samples)
        for directory, members in directories.items():
            # requests of one corpus, whose arrays may be equal, have to be adjacent
            members.sort(key=lambda samples: samples.data_prefix)
            requests = [samples.request() for samples in members]
            fetched = fetch_together(
                requests, directory, _CLAIM, partial(_report_building, len(requests))
            )
            for samples, one in zip(members, fetched, strict=True):
                samples.set_fetched(one)
        if self.asked and self.report is not None:
            self.report(self.asked, (time.perf_counter() - started) / len(self.asked))
        self.asked = []


def _report_building(count: int, missing: int) -> None:
    logger.info("building the index arrays of %d of %d datasets", missing, count)


_current: contextvars.ContextVar[DatasetGroup | None] = contextvars.ContextVar(
    "group", default=None
)


def open_shared(path: str, open_corpus: Callable[[], Any]) -> Any:
    """Return GPT-NeoX's indexed dataset, opened once in a group; None is not kept."""
    group = _current.get()
    corpus = None if group is None else group.corpora.get(path)
    if corpus is None:
        corpus = open_corpus()
        if group is not None and corpus is not None:
            group.corpora[path] = corpus
    return corpus


def stamp_of(corpus: IndexedDataset) -> list[int]:
    """Return `corpus_stamp`, read once in a group."""
    group, path = _current.get(), corpus.path_prefix
    if group is None:
        return corpus_stamp(path)
    if path not in group.stamps:
        group.stamps[path] = corpus_stamp(path)
    return group.stamps[path]


def fetch_in_group(dataset: Any, report: Report) -> None:
    """Fetch the arrays of a dataset's first epoch at the end of the group, or at once outside
    a group. ``report`` is called then."""
    dataset.megaindex.request()
    group = _current.get()
    if group is None:
        started = time.perf_counter()
        dataset.megaindex.fetch()
        report([dataset], time.perf_counter() - started)
    else:
        group.asked.append(dataset)
        group.report = report


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function of ``data_utils`` whose datasets form one group."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _current.get() is not None:
            return function(*args, **kwargs)
        group = DatasetGroup()
        token = _current.set(group)
        try:
            with uncollected():
                result = function(*args, **kwargs)
                group.fetch()
        finally:
            _current.reset(token)
        return result

    return run


T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class NeoxRequest(ArrayRequest, Generic[T]):
    """The request for the arrays of one epoch of a dataset."""

    files: ArrayFiles
    settings: Mapping[str, Any]
    """All values besides the corpora that the arrays depend on."""
    stamp: list[int]
    """Sizes and times of the corpora's files; while they are those of the sidecar, the content is
    taken as unchanged."""
    text: IndexedDataset
    make_order: Callable[[], T]
    description: str = ""  # GPT-NeoX writes no marker
    _order: T | None = None

    def order(self) -> T:
        """Return the order of the samples, computed once after the corpus was checked."""
        if self._order is None:  # cached_property of Python 3.11 has one lock for all instances
            self.text.validate()
            self._order = self.make_order()
        return self._order

    @functools.cached_property
    def identity(self) -> Identity:
        return Identity(
            settings=lambda: self.settings,
            corpus=self.corpus,
            stamp=self.stamp,
            facts=self.facts,
        )

    @property
    def corpus_nbytes(self) -> int:
        return self.stamp[0] if self.stamp else 0

    @abc.abstractmethod
    def corpus(self) -> str:
        """Return a fingerprint of the corpora that the arrays depend on."""

    @abc.abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Return num_epochs and tokens_per_epoch."""


class PackedRequest(NeoxRequest[ShuffledOrder]):
    """The request for arrays of pack_impl packed, over one corpus."""

    def corpus(self) -> str:
        self.text.validate()
        return corpus_fingerprint(self.text)

    def facts(self) -> Mapping[str, Any]:
        order = self.order()
        return {"num_epochs": order.num_epochs, "tokens_per_epoch": order.tokens_per_epoch}

    @property
    def content(self) -> object:
        order = self.order()
        if not isinstance(order.documents, range):
            return None
        final = order.final if order.final.apart else None
        return (
            self.text,
            order.documents,
            order.sequence_length,
            order.seed,
            order.num_epochs,
            final,
        )

    def fill(self, sink: Sink, threads: int) -> None:
        framework.build(self.order(), self.text.sequence_lengths, sink, threads)

    def check(self, arrays: Arrays) -> None:
        check_arrays(self.order(), self.text.sequence_lengths, **arrays)


class WholeDocumentsRequest(NeoxRequest[PackingOrder]):
    """The request for arrays of the packings of whole documents."""

    def corpus(self) -> str:
        parts = {"corpora": [corpus_fingerprint(self.text)], **order_parameters(self.order())}
        return xxhash.xxh3_128_hexdigest(canonical_json(parts).encode())

    def facts(self) -> Mapping[str, Any]:
        """Return num_epochs and tokens_per_epoch of the documents in the order."""
        order = self.order()
        return {
            "num_epochs": ceil_div(order.num_samples, int(order.takes_part.sum())),
            "tokens_per_epoch": int(order.lengths[order.takes_part].sum(dtype=np.int64)),
        }

    def fill(self, sink: Sink, threads: int) -> None:  # noqa: ARG002
        framework.build_packing(self.order(), sink)

    def check(self, arrays: Arrays) -> None:
        """Compare with newly built arrays; ten million documents take less than a second."""
        memory = Memory()
        framework.build_packing(self.order(), memory)
        for name, expected in memory.arrays.items():
            if arrays[name].dtype != expected.dtype or not np.array_equal(arrays[name], expected):
                raise FormatError(f"{name} is not that of the documents and the seed")
