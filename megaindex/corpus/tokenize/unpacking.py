"""Zstandard files as streams that notice when they break off."""

from __future__ import annotations

import functools
import io
from typing import Any, BinaryIO

from megaindex.errors import InvalidArgument

_READ = 1 << 14  # packed bytes at a time: what they unpack to is in memory
_LONGEST_WINDOW = 1 << 31  # zstd --long=31; the library stops at 1 << 27 unless told


class ZstdStream(io.RawIOBase):
    """Unpacks all frames of a file, one behind the other.

    The library's own reader takes the end of the file for the end of the data; a file that was
    copied in part would pass for a whole one. Here that is an EOFError.
    """

    def __init__(self, file: BinaryIO) -> None:
        super().__init__()
        self._file = file
        self._frame: Any = None
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready and self._unpack():
            pass
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count

    def _unpack(self) -> bool:
        """Unpack the next packed bytes; False at the end of the file."""
        packed = self._rest() or self._file.read(_READ)
        if not packed:
            if self._frame is not None and not self._frame.eof:
                raise EOFError("the file ends within a frame")
            return False
        if self._frame is None or self._frame.eof:
            self._frame = (
                _zstandard().ZstdDecompressor(max_window_size=_LONGEST_WINDOW).decompressobj()
            )
        self._ready = memoryview(self._frame.decompress(packed))
        return True

    def _rest(self) -> bytes:
        """Bytes behind the end of a frame, with which the next one begins."""
        if self._frame is None or not self._frame.eof:
            return b""
        rest: bytes = self._frame.unused_data
        self._frame = None
        return rest


@functools.cache
def _zstandard() -> Any:
    try:
        import zstandard
    except ImportError:
        raise InvalidArgument(
            "zstd files take the library zstandard; pip install 'megaindex[zstd]'"
        ) from None
    return zstandard


def zstd_error() -> type[Exception]:
    """What the library raises for damaged data; where it is missing, no error can be its."""
    try:
        error: type[Exception] = _zstandard().ZstdError
    except InvalidArgument:
        return EOFError
    return error
