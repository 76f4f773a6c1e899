"""Sets of arrays of one directory that are asked for together: looked up at once, built at once."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from megaindex.arithmetic import ceil_div
from megaindex.cache.claim import build_once
from megaindex.cache.framework_files.array_files import (
    ArrayFiles,
    Arrays,
    Identity,
    Listing,
    Sidecar,
)
from megaindex.cache.framework_files.sidecar import (
    find_arrays,
    make_sets_durable_later,
    record_accepted,
)
from megaindex.cache.framework_files.writer import ArrayWriter, write_together
from megaindex.index.orders.framework import Sink
from megaindex.kernels import num_threads

_WORTH_A_THREAD = 1 << 18  # bytes of an .idx: 13,000 documents
_WORTH_LISTING = 20  # names for each set: looking for its files by themselves takes longer
_TOGETHER = 64  # most sets that are recorded in one file


class ArrayRequest(Protocol):
    """One set of arrays that is asked for."""

    @property
    def files(self) -> ArrayFiles:
        """Where the framework keeps them."""
        ...

    @property
    def description(self) -> str:
        """Text of the file that marks them as complete, where the framework has one."""
        ...

    @property
    def identity(self) -> Identity:
        """What they depend on."""
        ...

    @property
    def corpus_nbytes(self) -> int:
        """Bytes of what is read to build them."""
        ...

    @property
    def content(self) -> object:
        """Requests of equal content have equal arrays; None where that is not known."""
        ...

    def check(self, arrays: Arrays) -> None:
        """Raise FormatError if these, which the framework wrote, are not the arrays."""
        ...

    def fill(self, sink: Sink, threads: int) -> None:
        """Build the arrays with so many threads."""
        ...


@dataclass(frozen=True)
class Fetched:
    """Arrays that may be used."""

    sidecar: Sidecar
    was_built: bool
    """By this process; else they were found."""


def fetch_together(
    requests: Sequence[ArrayRequest],
    directory: str,
    key: str,
    before_building: Callable[[int], object],
) -> list[Fetched]:
    """Look sets of one directory up, or let one process build those that are missing.

    Args:
        requests: those of equal content side by side.
        directory: of all their files.
        key: of the claim. Whoever builds one of these sets should use the same.
        before_building: called with the number of missing sets, in the process that builds.

    Raises:
        FormatError: arrays that the framework wrote belong to another corpus or are damaged.
        StorageError: the directory cannot be written, or another builder takes too long.
    """
    return build_once(
        directory,
        key,
        lambda: _find_all(requests, directory),
        lambda: _build_missing(requests, directory, before_building),
    )


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Thousands of objects are made at once, and stay: looking for garbage among them, and among
    all that a trainer holds, would take a fifth of the time. They are old objects afterwards."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            if gc.get_freeze_count() == 0:  # what others have frozen stays so
                gc.freeze()
                gc.unfreeze()
            gc.enable()


@contextlib.contextmanager
def _listing(requests: Sequence[ArrayRequest], directory: str) -> Iterator[Listing | None]:
    """To look requests up by; what is found to be the framework's is recorded at the end, and what
    has outlived a boot noted."""
    listing = Listing.of(directory, at_most=_WORTH_LISTING * len(requests))
    yield listing
    if listing is None:
        return
    for begin in range(0, len(listing.accepted), _TOGETHER):
        record_accepted(listing.accepted[begin : begin + _TOGETHER])
    for begin in range(0, len(listing.verified), _TOGETHER):
        make_sets_durable_later(listing.verified[begin : begin + _TOGETHER])


def _find(request: ArrayRequest, listing: Listing | None) -> Sidecar | None:
    return find_arrays(request.files, request.identity, request.check, listing)


def _find_all(requests: Sequence[ArrayRequest], directory: str) -> list[Fetched] | None:
    found = []
    with uncollected(), _listing(requests, directory) as listing:
        for request in requests:
            sidecar = _find(request, listing)
            if sidecar is None:
                return None
            found.append(Fetched(sidecar, was_built=False))
    return found


def _build_missing(
    requests: Sequence[ArrayRequest], directory: str, before_building: Callable[[int], object]
) -> list[Fetched]:
    with _listing(requests, directory) as listing:
        sidecars = [_find(request, listing) for request in requests]
    missing = [number for number, sidecar in enumerate(sidecars) if sidecar is None]
    before_building(len(missing))
    # Python's lock is held for most of the work on a small corpus: threads would only wait for it.
    nbytes = sum(requests[number].corpus_nbytes for number in missing)
    at_once = num_threads() if nbytes >= len(missing) * _WORTH_A_THREAD else 1
    rounds = ceil_div(len(missing), _TOGETHER * at_once)  # all threads end at about the same time
    size = max(1, ceil_div(len(missing), max(1, rounds * at_once)))
    parts = [missing[begin : begin + size] for begin in range(0, len(missing), size)]
    threads = max(1, num_threads() // at_once)

    def build(numbers: Sequence[int]) -> None:
        built = _build([requests[number] for number in numbers], listing, threads)
        for number, sidecar in zip(numbers, built, strict=True):
            sidecars[number] = sidecar

    if at_once > 1:
        with ThreadPoolExecutor(at_once, "megaindex-build") as pool:
            list(pool.map(build, parts))
    else:
        for part in parts:
            build(part)
    was_missing = set(missing)
    return [
        Fetched(sidecar, was_built=number in was_missing)
        for number, sidecar in enumerate(sidecars)
        if sidecar is not None
    ]


def _build(
    requests: Sequence[ArrayRequest], listing: Listing | None, threads: int
) -> list[Sidecar]:
    last: tuple[object, Arrays] = None, {}

    def fill(number: int, writer: ArrayWriter) -> None:
        nonlocal last
        request = requests[number]
        content = request.content
        if content is not None and content == last[0]:
            writer.copy(last[1])
        else:
            request.fill(writer, threads)
            last = content, dict(writer.arrays)

    return write_together(
        [(ArrayWriter(r.files, listing), r.identity, r.description) for r in requests], fill
    )
