"""Read a range of a file completely, or say why not: bounded retries, truncation told apart."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from megaindex.errors import InvalidArgument, StorageError
from megaindex.io.descriptors import DescriptorCache
from megaindex.io.facts import Facts
from megaindex.io.failures import storage_error

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

    def read_each(self, facts: Facts, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[None]:
        """Fill each ``(offset, into)`` of the file, which is still what it was; yields after each.

        The kernel is told of all of them first: it reads ahead while the first are copied, so that
        one thread keeps many reads of the device in flight.

        Raises:
            MissingFile: the file is gone.
            StorageError: it ends before a range does, it was replaced, or reading fails in the
                end; names file and offset.
        """
        if len(ranges) > 1:
            self._hint(facts, ranges)
        for offset, into in ranges:
            self.read(facts, offset, into)
            yield

    def read(self, facts: Facts, offset: int, into: memoryview) -> None:
        """Fill ``into`` with the bytes at ``offset``, as `read_each` does."""
        done, failures = 0, 0
        while done < len(into):
            try:
                done += self._attempt(facts, offset + done, into[done:])
            except StorageError as error:  # noqa: PERF203  (a failure is far dearer than the try)
                if error.errno not in _TRANSIENT:
                    raise
                failures += 1
                if failures > self.retries:
                    raise _gave_up(error, failures) from error
                if error.errno == errno.ESTALE:  # the server wants the file opened anew
                    self.descriptors.forget(facts.path)
                time.sleep(self.first_pause * 2 ** (failures - 1))

    def _hint(self, facts: Facts, ranges: Sequence[tuple[int, memoryview]]) -> None:
        # only a hint: the read says what is wrong
        with contextlib.suppress(OSError), self.descriptors.lease(*facts) as descriptor:
            for offset, into in ranges:
                os.posix_fadvise(descriptor, offset, len(into), os.POSIX_FADV_WILLNEED)

    def _attempt(self, facts: Facts, offset: int, into: memoryview) -> int:
        """Bytes read, at least 1: a read may stop short and is then continued."""
        path, size, _ = facts
        with self.descriptors.lease(*facts) as descriptor:
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


def _gave_up(last: StorageError, attempts: int) -> StorageError:
    error = StorageError(f"{last}; gave up after {attempts} attempts")
    error.errno = last.errno
    return error
