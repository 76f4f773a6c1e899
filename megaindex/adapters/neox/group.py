"""Groups of datasets that GPT-NeoX builds in one call: shared corpora, arrays fetched together.

GPT-NeoX makes three datasets of every source, one after another, and opens its corpus for each.
While a grouped function of its ``data_utils`` runs, corpora are shared by path and requests for
index arrays are collected. When it returns, the requests of each directory are looked up with one
listing, one process builds and records missing arrays, and all datasets are reported.
"""

from __future__ import annotations

import contextvars
import functools
import itertools
import logging
import operator
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

from megaindex.cache.fingerprint import corpus_stamp
from megaindex.cache.framework_files.group import Fetched, fetch_together, uncollected
from megaindex.format import IndexedDataset

if TYPE_CHECKING:
    from megaindex.adapters.neox.arrays import NeoxRequest

logger = logging.getLogger("megaindex")

Report = Callable[[Sequence[Any], float], None]
"""A function of datasets whose arrays were fetched and the seconds for each of them."""

_CLAIM = "megaindex-neox"
"""Name of the claim of all groups of a directory, so that jobs do not build arrays twice."""


class GroupMember(Protocol):
    """The interface of a dataset's samples that a group uses to fetch their arrays."""

    data_prefix: str

    @property
    def is_fetched(self) -> bool: ...

    def request(self, epoch: int = 0) -> NeoxRequest[Any]: ...

    def fetch(self, epoch: int = 0) -> Fetched: ...

    def set_fetched(self, fetched: Fetched) -> None: ...


@dataclass(kw_only=True)
class DatasetGroup:
    """The corpora and requests collected so far."""

    corpora: dict[str, Any] = field(default_factory=dict)
    """GPT-NeoX's indexed datasets, by path."""
    stamps: dict[str, list[int]] = field(default_factory=dict)
    asked: list[tuple[Any, Report]] = field(default_factory=list)
    """GPT-NeoX's datasets, with the functions that report them."""

    def fetch(self) -> None:
        """Find or build the requested arrays that were not fetched by themselves since."""
        started = time.perf_counter()
        directories: dict[str, list[GroupMember]] = defaultdict(list)
        for dataset, _ in self.asked:
            samples: GroupMember = dataset.megaindex
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
        seconds = (time.perf_counter() - started) / max(1, len(self.asked))
        for report, asked in itertools.groupby(self.asked, operator.itemgetter(1)):
            report([dataset for dataset, _ in asked], seconds)
        self.asked.clear()


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


def is_active() -> bool:
    """Return whether corpora are shared now."""
    return _current.get() is not None


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
    samples: GroupMember = dataset.megaindex
    samples.request()
    group = _current.get()
    if group is None:
        started = time.perf_counter()
        samples.fetch()
        report([dataset], time.perf_counter() - started)
    else:
        group.asked.append((dataset, report))


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
