"""Writer of index arrays under a framework's own file names."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Callable, Mapping, Sequence

from megaindex._types import IntArray
from megaindex.cache.framework_files.array_files import (
    ArrayFiles,
    Identity,
    Listing,
    Sidecar,
    state_of,
)
from megaindex.cache.framework_files.sidecar import make_sets_durable_later, remove, write_sidecars
from megaindex.cache.npy import MappedArrays, create_file
from megaindex.io.os_errors import storage_error


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
