"""The datasets that GPT-NeoX builds in one go: corpora opened once, arrays fetched together.

GPT-NeoX makes three datasets of every source, one after another, and opens its corpus for each.
While one of its functions that do so runs, corpora are shared by path, and index arrays are only
noted; when it returns, those of one directory are looked up by one listing, and what is missing is
built by one process and recorded together.
"""

from __future__ import annotations

import contextvars
import functools
import logging
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from megaindex.format import IndexedDataset
from megaindex.store.array_group import fetch_together, uncollected
from megaindex.store.fingerprint import corpus_stamp

if TYPE_CHECKING:
    from megaindex.adapters.neox.samples import Samples

logger = logging.getLogger("megaindex")

_CLAIM = "megaindex-neox"
"""Of all groups in a directory: jobs that share some of their arrays do not build them twice."""


@dataclass(kw_only=True)
class Group:
    """What was opened and asked for so far."""

    corpora: dict[str, IndexedDataset] = field(default_factory=dict)
    stamps: dict[str, list[int]] = field(default_factory=dict)
    asked: list[tuple[Samples, Callable[[float], None]]] = field(default_factory=list)
    """With what reports them."""

    def fetch(self) -> None:
        """Find or build all that was asked for and not fetched by itself since."""
        started = time.perf_counter()
        directories: dict[str, list[Samples]] = defaultdict(list)
        for samples, _ in self.asked:
            if not samples.is_fetched:
                directories[samples.request().directory].append(samples)
        for directory, members in directories.items():
            # those of one corpus, which may have the same arrays, side by side
            members.sort(key=lambda samples: samples.data_prefix)
            requests = [samples.request() for samples in members]
            fetched = fetch_together(
                requests, directory, _CLAIM, partial(_report_building, len(requests))
            )
            for samples, one in zip(members, fetched, strict=True):
                samples.take(one)
        seconds = (time.perf_counter() - started) / max(1, len(self.asked))
        for _, report in self.asked:
            report(seconds)
        self.asked.clear()


def _report_building(count: int, missing: int) -> None:
    logger.info("building the index arrays of %d of %d datasets", missing, count)


_current: contextvars.ContextVar[Group | None] = contextvars.ContextVar("group", default=None)


def opened(path: str, open_corpus: Callable[[str], IndexedDataset]) -> IndexedDataset:
    """The corpus, opened unless the group has done so."""
    group = _current.get()
    if group is None:
        return open_corpus(path)
    corpus = group.corpora.get(path)
    if corpus is None:
        corpus = group.corpora[path] = open_corpus(path)
    return corpus


def has_opened(path: str) -> bool:
    """Whether `opened` has the corpus at hand."""
    group = _current.get()
    return group is not None and path in group.corpora


def stamp_of(corpus: IndexedDataset) -> list[int]:
    """`corpus_stamp`, asked for once in a group."""
    group, path = _current.get(), corpus.path_prefix
    if group is None:
        return corpus_stamp(path)
    if path not in group.stamps:
        group.stamps[path] = corpus_stamp(path)
    return group.stamps[path]


def fetch_soon(samples: Samples, report: Callable[[float], None]) -> None:
    """Fetch the arrays of the first epoch: at the end of the group, or at once where there is
    none. ``report`` is called then, with the seconds that it took, in a group each one's share."""
    samples.request()
    group = _current.get()
    if group is None:
        started = time.perf_counter()
        samples.fetch()
        report(time.perf_counter() - started)
    else:
        group.asked.append((samples, report))


def grouped(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of ``data_utils`` whose datasets are one group."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if _current.get() is not None:
            return function(*args, **kwargs)
        group = Group()
        token = _current.set(group)
        try:
            with uncollected():
                result = function(*args, **kwargs)
                group.fetch()
        finally:
            _current.reset(token)
        return result

    return run
