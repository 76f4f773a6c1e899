"""Requests for sets of index arrays under a framework's file names, and the writer of the arrays.

The sets of one directory are looked up at once and built at once.
"""

from __future__ import annotations

import abc
import contextlib
import gc
import logging
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from megaindex._types import IntArray
from megaindex.arithmetic import ceil_div
from megaindex.cache.array_files import (
    ArrayFiles,
    Arrays,
    Identity,
    Listing,
    Sidecar,
    state_of,
)
from megaindex.cache.claim import build_once
from megaindex.cache.npy import MappedArrays, create_file
from megaindex.cache.sidecar import (
    find_arrays,
    make_sets_durable_later,
    map_arrays,
    record_accepted,
    remove,
    write_sidecars,
)
from megaindex.errors import FormatError, MissingFile
from megaindex.index.orders.framework import Sink
from megaindex.io.paths import storage_error
from megaindex.kernels import num_threads


class ArrayWriter(MappedArrays):
    """A sink for the arrays of one set of files.

    A framework takes a set as present when all its files are. So the last file is removed first and
    renamed into place after all others and the sidecar: a crash leaves a complete set or none.
    Every file is written under a temporary name, since a builder that was suspended and replaced
    may continue while others read the arrays of its replacement.
    """

    def __init__(self, files: ArrayFiles, listing: Listing | None = None) -> None:
        """``listing``: a listing of the directory, taken while its claim was held."""
        super().__init__()
        self.files = files
        self._listing = listing
        self._suffix = f".tmp.{secrets.token_hex(8)}"
        self._unnamed = files.paths

    def __enter__(self) -> ArrayWriter:
        return self.begin()

    def __exit__(self, *exc: object) -> None:
        self.close()
        for path in self._unnamed:
            with contextlib.suppress(OSError):  # the next builder removes leftovers
                remove(path + self._suffix)

    def path_of(self, name: str) -> str:
        return self.files.arrays[name] + self._suffix

    def begin(self) -> ArrayWriter:
        """Remove the last file and the sidecar, so that the set is absent."""
        try:
            if self._listing is None:
                os.makedirs(os.path.dirname(self.files.sidecar) or ".", exist_ok=True)
            for path in (self._unnamed[-1], self.files.sidecar):
                if self._listing is None or path in self._listing:
                    remove(path)
        except OSError as error:
            raise storage_error(error, str(self.files), "cannot replace") from error
        return self

    def copy(self, arrays: Mapping[str, IntArray]) -> None:
        """Write the arrays of another set of equal content."""
        for name, array in arrays.items():
            self.write(name, array)

    def sidecar(self, identity: Identity, origin: str = "built") -> Sidecar:
        """Return the record of the arrays, all of which are sealed."""
        records, states, checksums = {}, {}, {}
        for name, file in self.finish().items():
            assert file.status is not None, "finished"
            records[name] = file.dtype, file.shape, file.offset
            states[name] = state_of(file.status)
            checksums[name] = file.checksum
        return identity.sidecar(origin, records, states, checksums)

    def rename_into_place(self, text: str = "") -> None:
        """Rename all files into place; ``text`` is the content of the marker, if there is one."""
        if self.files.marker:
            create_file(self.files.marker + self._suffix, text.encode())
        while self._unnamed:
            path = self._unnamed[0]
            try:
                os.rename(path + self._suffix, path)
            except OSError as error:
                raise storage_error(error, path, "cannot publish") from error
            del self._unnamed[0]

    def publish(self, identity: Identity, text: str = "", origin: str = "built") -> Sidecar:
        """Write the sidecar and rename all files into place."""
        sidecar = self.sidecar(identity, origin)
        write_sidecars([(self.files, sidecar)])
        self.rename_into_place(text)
        make_sets_durable_later([(self.files, sidecar)])
        return sidecar


def write_together(
    writers: Sequence[tuple[ArrayWriter, Identity, str]], fill: Callable[[int, ArrayWriter], None]
) -> list[Sidecar]:
    """Publish sets of one directory, recorded in one sidecar file.

    Args:
        writers: writers, each with the identity of its set and the text of its marker.
        fill: function that fills the arrays of set k: ``fill(k, writer)``.
    """
    try:
        sidecars = []
        for k, (writer, identity, _) in enumerate(writers):
            fill(k, writer.begin())
            sidecars.append(writer.sidecar(identity))
        sets = [(w.files, s) for (w, *_), s in zip(writers, sidecars, strict=True)]
        write_sidecars(sets)
        for writer, _, text in writers:
            writer.rename_into_place(text)
    finally:
        for writer, *_ in writers:
            writer.__exit__()
    make_sets_durable_later(sets)
    return sidecars


logger = logging.getLogger("megaindex")

_WORTH_A_THREAD = 1 << 18  # bytes of an .idx: 13,000 documents
_WORTH_LISTING = 20  # names for each set: looking for its files by themselves takes longer
_TOGETHER = 64  # most sets that are recorded in one file


@dataclass(frozen=True)
class Fetched:
    """Arrays that may be used."""

    sidecar: Sidecar
    was_built: bool
    """True if this process built them."""


class ArrayRequest(abc.ABC):
    """A request for one set of arrays, which can be looked up, built and mapped."""

    __slots__ = ()

    files: ArrayFiles | None
    """None where the framework keeps the arrays in memory; they cannot be fetched then."""
    description: str
    """Text of the file by which the framework marks the arrays as complete."""

    @property
    @abc.abstractmethod
    def identity(self) -> Identity:
        """The settings and the corpora that the arrays depend on."""

    @property
    @abc.abstractmethod
    def corpus_nbytes(self) -> int:
        """Bytes of the .idx files that are read to build the arrays."""

    @property
    def content(self) -> object:
        """A value that is equal for requests of equal arrays; None if it cannot be determined."""
        return None

    @abc.abstractmethod
    def fill(self, sink: Sink, threads: int) -> None:
        """Build the arrays with so many threads."""

    @abc.abstractmethod
    def check(self, arrays: Arrays) -> None:
        """Raise FormatError unless these arrays, which the framework wrote, are those requested."""

    @property
    def directory(self) -> str:
        """The directory of the files."""
        return os.path.dirname(str(self.files)) or "."

    def fetch(self) -> Fetched:
        """Look the arrays up, or let one process build them.

        Raises:
            FormatError: files that the framework wrote are not the arrays of this request.
            StorageError: the directory cannot be written, or another builder takes too long.
        """
        name = os.path.basename(str(self.files))
        return build_once(self.directory, name, self._find, self._build)

    def find(self, listing: Listing | None = None) -> Sidecar | None:
        """Return the sidecar of the arrays; None where they have to be built: see `find_arrays`."""
        return find_arrays(self._kept_files(), self.identity, self.check, listing)

    def open(self, sidecar: Sidecar) -> Arrays:
        """Map the arrays that ``sidecar`` describes; build them again if they were damaged."""
        files = self._kept_files()
        try:
            return map_arrays(files, sidecar)
        except (FormatError, MissingFile) as error:
            logger.warning("%s", error)
            again = self.fetch().sidecar
            if (again.corpus, again.arrays) != (sidecar.corpus, sidecar.arrays):
                raise
            return map_arrays(files, again)

    def writer(self, listing: Listing | None = None) -> ArrayWriter:
        """Return a writer of the files."""
        return ArrayWriter(self._kept_files(), listing)

    def _find(self) -> Fetched | None:
        sidecar = self.find()
        return None if sidecar is None else Fetched(sidecar, was_built=False)

    def _build(self) -> Fetched:
        with self.writer() as writer:
            self.fill(writer, num_threads())
            return Fetched(writer.publish(self.identity, self.description), was_built=True)

    def _kept_files(self) -> ArrayFiles:
        assert self.files is not None
        return self.files


def fetch_together(
    requests: Sequence[ArrayRequest],
    directory: str,
    key: str,
    before_building: Callable[[int], object] = lambda _: None,
) -> list[Fetched]:
    """Look sets of one directory up, or let one process build those that are missing.

    Args:
        requests: requests of equal content must be adjacent, so that it is built once.
        directory: directory of all files.
        key: key of the claim, the same for all jobs that build these sets.
        before_building: called with the number of missing sets in the process that builds.

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
    """Suspend garbage collection, which takes a fifth of the time when thousands of objects are
    made."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextlib.contextmanager
def _listing(requests: Sequence[ArrayRequest], directory: str) -> Iterator[Listing | None]:
    """Yield a listing to find requests with; at the end record the arrays that were accepted, and
    mark those that were verified as durable."""
    listing = Listing.of(directory, at_most=_WORTH_LISTING * len(requests))
    yield listing
    if listing is None:
        return
    for begin in range(0, len(listing.accepted), _TOGETHER):
        record_accepted(listing.accepted[begin : begin + _TOGETHER])
    for begin in range(0, len(listing.verified), _TOGETHER):
        make_sets_durable_later(listing.verified[begin : begin + _TOGETHER])


def _find_all(requests: Sequence[ArrayRequest], directory: str) -> list[Fetched] | None:
    found = []
    with uncollected(), _listing(requests, directory) as listing:
        for request in requests:
            sidecar = request.find(listing)
            if sidecar is None:
                return None
            found.append(Fetched(sidecar, was_built=False))
    return found


def _build_missing(
    requests: Sequence[ArrayRequest], directory: str, before_building: Callable[[int], object]
) -> list[Fetched]:
    with _listing(requests, directory) as listing:
        sidecars = [request.find(listing) for request in requests]
    wanted = [number for number, sidecar in enumerate(sidecars) if sidecar is None]
    first: dict[str, int] = {}  # of the requests for a set: a corpus may be in a blend twice
    for number in wanted:
        first.setdefault(str(requests[number].files), number)
    missing = list(first.values())
    before_building(len(missing))
    # threads do not pay for small corpora, where most of the work holds Python's lock
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
    for number in wanted:
        sidecars[number] = sidecars[first[str(requests[number].files)]]
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

    return write_together([(r.writer(listing), r.identity, r.description) for r in requests], fill)
