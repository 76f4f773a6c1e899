"""Publish several files together: complete and durable under their final names, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Sequence
from typing import BinaryIO

from megaindex.errors import StorageError
from megaindex.io.failures import as_storage_error
from megaindex.io.locations import check_local

_BUFFER_BYTES = 1 << 20
_NO_HARD_LINKS = {
    errno.EPERM,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EMLINK,
    errno.EXDEV,
}


class AtomicFiles:
    """Files written under temporary names beside their final ones, then published together.

    `final_paths` share one directory and are in order of publication: readers must take the set as
    present only when the last one is (`train.bin`, `train.idx`). A crash at any moment leaves at
    most temporaries (`train.bin.tmp.<16 hex digits>`) or an incomplete set without its last file.

    Existing files are refused, at once and again on publication, unless `overwrite`; URLs always.
    """

    def __init__(self, final_paths: Sequence[str], *, overwrite: bool = False) -> None:
        self._final_paths = tuple(final_paths)
        for path in self._final_paths:
            check_local(path, "write it to a disk and upload it with the store's own tool")
        self._directory = os.path.dirname(self._final_paths[0]) or "."
        self._overwrite = overwrite
        self._temporary: dict[str, str] = {}  # final path -> temporary path
        self._streams: dict[str, BinaryIO] = {}
        self._refuse_existing()

    def open(self, final_path: str) -> BinaryIO:
        """A new, empty, buffered file that `publish` will put at `final_path`."""
        temporary = f"{final_path}.tmp.{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with as_storage_error(final_path, "cannot create"):
            descriptor = os.open(temporary, flags, 0o666)  # the umask narrows it
            self._temporary[final_path] = temporary
            stream = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        self._streams[final_path] = stream
        return stream

    def link(self, source: str, final_path: str) -> bool:
        """Let `publish` put the existing file `source` at `final_path` too, without a copy.

        Returns:
            True for a hard link; False for a symbolic one, where no hard link is possible.
        """
        temporary = f"{final_path}.tmp.{secrets.token_hex(8)}"
        real = os.path.realpath(source)
        with as_storage_error(final_path, f"cannot link to {source}"):
            try:
                os.link(real, temporary)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                os.symlink(real, temporary)
        self._temporary[final_path] = temporary
        return not os.path.islink(temporary)

    def publish(self) -> None:
        """Sync every file, then give each its final name. On failure nothing of ours remains."""
        placed: list[str] = []
        try:
            for path, stream in self._streams.items():
                with as_storage_error(path, "cannot write"):
                    stream.flush()
                    os.fsync(stream.fileno())
                    stream.close()
            self._make_way()
            for path in self._final_paths:
                self._place(path)
                placed.append(path)
            with as_storage_error(self._directory, "cannot sync the directory"):
                _sync_directory(self._directory)
        except BaseException:
            with as_storage_error(self._final_paths[-1], "cannot take back"):
                for path in reversed(placed):  # the last one first, as it makes the set visible
                    _unlink_if_there(path)
            self.discard()
            raise

    def discard(self) -> None:
        """Close and remove every temporary; harmless when repeated."""
        for stream in self._streams.values():
            with contextlib.suppress(OSError):  # a failed flush must not keep the file alive
                stream.close()
        self._streams.clear()
        for temporary in self._temporary.values():
            _unlink_if_possible(temporary)
        self._temporary.clear()

    def _refuse_existing(self) -> None:
        if self._overwrite:
            return
        for path in self._final_paths:
            if os.path.lexists(path):
                raise _already_there(path)

    def _make_way(self) -> None:
        """When overwriting, remove the file that makes the old set visible, durably, first: a crash
        may then leave no set, but never a new .bin under an old .idx."""
        self._refuse_existing()
        last = self._final_paths[-1]
        if self._overwrite and os.path.lexists(last):
            with as_storage_error(last, "cannot replace"):
                os.unlink(last)
                _sync_directory(self._directory)

    def _place(self, path: str) -> None:
        temporary = self._temporary[path]
        with as_storage_error(path, "cannot publish"):
            if self._overwrite:
                os.replace(temporary, path)
                _unlink_if_possible(temporary)  # of two names of one file, rename keeps both
            else:
                _rename_without_replacing(temporary, path)
        del self._temporary[path]


def _rename_without_replacing(source: str, target: str) -> None:
    """A plain rename would silently replace what another writer published since we looked, and two
    writers of one prefix could end as one's .bin under the other's .idx. A link cannot."""
    try:
        if os.path.islink(source):  # whether a hard link would follow it depends on the platform
            os.symlink(os.readlink(source), target)
        else:
            os.link(source, target)
    except FileExistsError:
        raise _already_there(target) from None
    except OSError as error:
        if error.errno not in _NO_HARD_LINKS:
            raise
        os.rename(source, target)
    else:
        _unlink_if_possible(source)


def _already_there(path: str) -> StorageError:
    error = StorageError(
        f"{path}: already exists, and existing files are not replaced; "
        f"choose another prefix or, where files may be replaced, pass overwrite=True (--overwrite)"
    )
    error.errno = errno.EEXIST
    return error


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have none
            raise
    finally:
        os.close(descriptor)


def _unlink_if_there(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)


def _unlink_if_possible(path: str) -> None:
    """Of a temporary, whose set is what matters: published by now, or failed for another reason."""
    with contextlib.suppress(OSError):
        os.unlink(path)
