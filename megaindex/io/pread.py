"""Positional reads of files through a bounded number of descriptors.

A blend of 10,000 datasets cannot keep 10,000 descriptors: the default limit is 1024 a process. The
files read last stay open; a file that was closed is opened again when it is wanted, and must then
be the very file it was.
"""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megaindex.errors import InvalidArgument, StorageError
from megaindex.io.os_errors import as_storage_error, storage_error
from megaindex.io.paths import FileInfo, version_of

_FLAGS = os.O_RDONLY | os.O_CLOEXEC
_Identity = tuple[int, int, int, int]  # st_dev, st_ino, st_size, st_mtime_ns
# Worth another try: these come and go on network file systems and failing links.
_TRANSIENT = {errno.EIO, errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT, errno.EBUSY}

Pread = Callable[[int, list[memoryview], int], int]
"""As os.preadv: (descriptor, buffers, offset) -> bytes read, 0 at the end of the file."""


@dataclass(frozen=True, kw_only=True)
class RangeReader:
    """Reads byte ranges of files that are expected not to change."""

    descriptors: DescriptorCache
    retries: int = 4
    """Further attempts after a failure that may pass, for each range."""
    first_pause: float = 0.05
    """Seconds before the first of them; each further pause is twice as long."""
    pread: Pread = os.preadv

    def __post_init__(self) -> None:
        if self.retries < 0 or self.first_pause < 0:
            raise InvalidArgument(
                f"retries={self.retries} and first_pause={self.first_pause}: must not be negative"
            )

    def read_each(self, info: FileInfo, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[None]:
        """Fill each ``(offset, into)`` of the file, which is still what it was; yields after each.

        The kernel is told of all of them first: it reads ahead while the first are copied, so that
        one thread keeps many reads of the device in flight.

        Raises:
            MissingFile: the file is gone.
            StorageError: it ends before a range does, it was replaced, or reading fails in the
                end; names file and offset.
        """
        if len(ranges) > 1:
            self._hint(info, ranges)
        for offset, into in ranges:
            self.read(info, offset, into)
            yield

    def read(self, info: FileInfo, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes at ``offset``, as `read_each` does."""
        done, failures = 0, 0
        while done < len(into):
            try:
                done += self._attempt(info, offset + done, into[done:])
            except StorageError as error:  # noqa: PERF203  (a failure is far dearer than the try)
                if error.errno not in _TRANSIENT:
                    raise
                failures += 1
                if failures > self.retries:
                    raise _gave_up(error, failures) from error
                if error.errno == errno.ESTALE:  # the server wants the file opened anew
                    self.descriptors.forget(info.path)
                time.sleep(self.first_pause * 2 ** (failures - 1))

    def _hint(self, info: FileInfo, ranges: Sequence[tuple[int, memoryview]]) -> None:
        # only a hint: the read says what is wrong
        with contextlib.suppress(OSError), self.descriptors.lease(*info) as descriptor:
            for offset, into in ranges:
                os.posix_fadvise(descriptor, offset, len(into), os.POSIX_FADV_WILLNEED)

    def _attempt(self, info: FileInfo, offset: int, into: memoryview) -> int:
        """Return the bytes read, at least 1: a read may stop short and is then continued."""
        path, size, _ = info
        with self.descriptors.lease(*info) as descriptor:
            try:
                count = self.pread(descriptor, [into], offset)
            except OSError as error:
                action = f"cannot read {len(into)} bytes at {offset}"
                raise storage_error(error, path, action) from error
            if count:
                return count
            found = os.fstat(descriptor).st_size
        if found < offset + len(into):
            raise StorageError(
                f"{path}: ends at byte {found}, and bytes {offset} to {offset + len(into)} were "
                f"expected: it had {size} bytes and was cut short; restore the file"
            )
        nothing = StorageError(f"{path}: a read at {offset} returned nothing; it has {found} bytes")
        nothing.errno = errno.EIO
        raise nothing


class DescriptorCache:
    """Read-only descriptors by path, the least recently used of them closed first.

    Safe to share between threads, and across fork: positional reads have no common file position.
    At most ``capacity`` files are open, plus those in use at the moment.

    Raises:
        InvalidArgument: ``capacity`` is below 1.
    """

    def __init__(self, capacity: int = 64) -> None:
        if capacity < 1:
            raise InvalidArgument(f"capacity={capacity}: at least 1 file must be kept open")
        self._capacity = capacity
        self._open: OrderedDict[str, _Open] = OrderedDict()
        self._identities: dict[str, _Identity] = {}
        self._lock = threading.Lock()
        self._pid = os.getpid()

    def lease(self, path: str, size: int | None = None, version: str = "") -> Lease:
        """To be used in a ``with``: a descriptor of the file, open at least until that ends.

        Args:
            size: the bytes the file must have, checked whenever it is opened.
            version: likewise, its `FileInfo.version`; empty for any.

        Raises:
            MissingFile: the file does not exist, or no longer.
            StorageError: it cannot be opened, or is not the file that was opened before.
        """
        return Lease(self, path, size, version)

    def forget(self, path: str) -> None:
        """Open the file anew at its next use, as a stale handle of a network file system asks."""
        with self._lock:
            entry = self._open.pop(path, None)
            if entry is not None:
                self._drop(entry)

    def close(self) -> None:
        """Close every file; those in use are closed by their last user."""
        with self._lock:
            while self._open:
                self._drop(self._open.popitem()[1])

    def __len__(self) -> int:
        return len(self._open)

    # The default argument keeps close alive while the interpreter tears its modules down.
    def __del__(self, close: Callable[[int], None] = os.close) -> None:
        for entry in getattr(self, "_open", {}).values():  # none if __init__ refused its arguments
            close(entry.descriptor)

    def _take(self, path: str, size: int | None, version: str) -> _Open:
        if self._pid != os.getpid():  # the parent may have held the lock when it forked
            self._lock, self._pid = threading.Lock(), os.getpid()
        with self._lock:
            entry = self._open.get(path)
            if entry is not None:
                self._open.move_to_end(path)
                entry.users += 1
                return entry
        opened = self._checked_open(path, size, version)  # may take long: not under the lock
        with self._lock:
            entry = self._open.setdefault(path, opened)
            if entry is not opened:  # another thread was quicker
                os.close(opened.descriptor)
            entry.users += 1
            self._open.move_to_end(path)
            while len(self._open) > self._capacity:
                self._drop(self._open.popitem(last=False)[1])
            return entry

    def _give_back(self, entry: _Open) -> None:
        with self._lock:
            entry.users -= 1
            if entry.stale and entry.users == 0:
                os.close(entry.descriptor)

    def _drop(self, entry: _Open) -> None:
        entry.stale = True
        if entry.users == 0:
            os.close(entry.descriptor)

    def _checked_open(self, path: str, size: int | None, version: str) -> _Open:
        again = path in self._identities
        with as_storage_error(path, "cannot open again" if again else "cannot open"):
            descriptor = os.open(path, _FLAGS)
        try:
            with as_storage_error(path, "cannot look at"):
                status = os.fstat(descriptor)
            found = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
            before = self._identities.setdefault(path, found)
            as_asked = size in (None, status.st_size) and version in ("", version_of(status))
            if found != before or not as_asked:
                raise StorageError(_changed(path, before, found, size))
        except BaseException:
            os.close(descriptor)
            raise
        return _Open(descriptor)


class Lease:
    """The use of one open file."""

    __slots__ = ("_cache", "_entry", "_path", "_size", "_version")

    def __init__(self, cache: DescriptorCache, path: str, size: int | None, version: str) -> None:
        self._cache, self._path, self._size, self._version = cache, path, size, version

    def __enter__(self) -> int:
        self._entry = self._cache._take(self._path, self._size, self._version)
        return self._entry.descriptor

    def __exit__(self, *exc: object) -> None:
        self._cache._give_back(self._entry)


@dataclass(eq=False)
class _Open:
    descriptor: int
    users: int = 0
    stale: bool = False
    """Dropped from the cache while somebody read it; the last user closes it."""


def _changed(path: str, before: _Identity, found: _Identity, size: int | None) -> str:
    expected = before[2] if size is None else size
    detail = (
        f"it had {expected} bytes and now has {found[2]}"
        if expected != found[2]
        else "another file has its name, or it was written to"
    )
    return f"{path}: changed since it was opened: {detail}; restore the file or start anew with it"


def _gave_up(last: StorageError, attempts: int) -> StorageError:
    error = StorageError(f"{last}; gave up after {attempts} attempts")
    error.errno = last.errno
    return error
