"""The unfinished pair behind a writer: a .bin that grows, an .idx that waits, one fate for both."""

from __future__ import annotations

import os
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import StorageError
from megaindex.format.cast import CHUNK
from megaindex.format.spool import IndexSpool
from megaindex.io.atomic import AtomicFiles
from megaindex.io.copying import Progress, copy_range
from megaindex.io.failures import storage_error
from megaindex.io.kinds import open_regular


class PairSink:
    """Whoever has one calls `open` inside a `try` that ends with `discard`: a Ctrl-C between making
    the one and beginning the other then leaves nothing, as there is nothing yet.

    Appends go inside `with sink:`. What fails there may have written half of an entry, so the
    sink then refuses to publish, even if the caller survives the exception."""

    def __init__(
        self,
        bin_path: str,
        idx_path: str,
        dtype: np.dtype[Any],
        *,
        multimodal: bool,
        overwrite: bool,
    ) -> None:
        self._idx_path = idx_path
        self._bin_path = bin_path
        self.dtype = dtype
        self._broken = False
        self._files = AtomicFiles((bin_path, idx_path), overwrite=overwrite)
        self.index = IndexSpool(os.path.dirname(bin_path) or ".", multimodal=multimodal)

    def open(self) -> None:
        """Make the .bin under a temporary name, and what the .idx is collected in."""
        self._bin = self._files.open(self._bin_path)
        self.index.open()

    def write_tokens(self, tokens: npt.NDArray[Any]) -> None:
        """Append token values that are known to fit, whatever type and layout they come in."""
        for start in range(0, tokens.size, CHUNK):
            chunk = tokens[start : start + CHUNK]
            self._bin.write(np.ascontiguousarray(chunk, dtype=self.dtype).data)

    def copy_bytes(
        self, path: str, size: int, offset: int, nbytes: int, progress: Progress
    ) -> None:
        """Append `nbytes` bytes at `offset` of the file at `path`, which must have `size` bytes."""
        descriptor = open_regular(path)
        try:
            self._bin.flush()  # the kernel appends behind what Python still buffers
            found = os.fstat(descriptor).st_size
            copied = copy_range(descriptor, self._bin.fileno(), offset, nbytes, progress)
        finally:
            os.close(descriptor)
        if found != size or copied < nbytes:
            raise StorageError(
                f"{path}: changed while it was copied: it had {size} bytes, has {found}, and "
                f"{copied} of {nbytes} bytes at {offset} could be read; start again with it whole"
            )

    def publish(self, dtype_code: int) -> None:
        """Write the .idx, sync both files and give them their names."""
        if self._broken:
            raise StorageError(
                f"{self._bin_path}: not published: an earlier write failed and left it incomplete; "
                f"write the pair again"
            )
        with self:
            self.index.assemble(self._files.open(self._idx_path), dtype_code, self.dtype.itemsize)
        self._files.publish()

    def discard(self) -> None:
        """Remove everything that has not been published; harmless after `publish`."""
        try:
            self._files.discard()
        finally:
            self.index.close()

    def take_back(self) -> None:
        """Remove the pair that `publish` made, where it is still that one."""
        self._files.take_back()

    def __enter__(self) -> PairSink:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if error is not None:
            self._broken = True
        if isinstance(error, OSError) and not isinstance(error, StorageError):
            raise storage_error(error, self._bin_path, "cannot write the pair") from error
