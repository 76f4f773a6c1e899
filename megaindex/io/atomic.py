"""Publish several files together: complete and durable under their final names, or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Sequence
from typing import BinaryIO

from megaindex.errors import StorageError
from megaindex.io.os_errors import as_storage_error
from megaindex.io.paths import check_local, check_regular, kind_of

_BUFFER_BYTES = 1 << 20
_NO_HARD_LINKS = {
    errno.EPERM,
    errno.ENOSYS,
    errno.ENOTSUP,
    errno.EOPNOTSUPP,
    errno.EMLINK,
    errno.EXDEV,
}


_Identity = tuple[int, int] | str


class AtomicFiles:
    """Files written under temporary names beside their final ones, then published together.

    `final_paths` share one directory and are in order of publication: readers must take the set as
    present only when the last one is (`train.bin`, `train.idx`). A crash at any moment leaves at
    most temporaries (`train.bin.tmp.<16 hex digits>`) or an incomplete set without its last file.

    Existing files are refused, at once and again on publication, unless `overwrite`; URLs always,
    and with `overwrite` anything but files: folders, devices, pipes.

    A Ctrl-C raises between any two steps. So what is about to be made is noted first, and taken
    back by its inode: making an object does nothing yet, and whoever has one calls `discard`, or
    `take_back` to undo a publication too, in a `finally` that begins before the first file.
    """

    def __init__(self, final_paths: Sequence[str], *, overwrite: bool = False) -> None:
        self._final_paths = tuple(final_paths)
        for path in self._final_paths:
            check_local(path, "write it to a disk and upload it with the store's own tool")
        self._directory = os.path.dirname(self._final_paths[0]) or "."
        self._overwrite = overwrite
        self._temporary: dict[str, str] = {}  # final path -> temporary path
        self._streams: dict[str, BinaryIO] = {}
        self._placed: dict[str, _Identity] = {}  # final path -> what has, or is about to get, it
        self._aside = ""  # where the file lies that made the old set visible
        self._was_placed = False  # so that the old set has lost a file for good
        self._is_published = False
        self._refuse_existing()

    def open(self, final_path: str) -> BinaryIO:
        """Return a new, empty, buffered file that `publish` will put at `final_path`."""
        temporary = self._new_temporary(final_path)
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with as_storage_error(final_path, "cannot create"):
            descriptor = os.open(temporary, flags, 0o666)  # the umask narrows it
            stream = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        self._streams[final_path] = stream
        return stream

    def link(self, source: str, final_path: str) -> bool:
        """Let `publish` put the existing file `source` at `final_path` too, without a copy.

        Returns:
            True for a hard link; False for a symbolic one, where no hard link is possible.
        """
        real = os.path.realpath(source)
        temporary = self._new_temporary(final_path)
        with as_storage_error(final_path, f"cannot link to {source}"):
            check_regular(source, os.stat(real))
            try:
                os.link(real, temporary)
            except OSError as error:
                if error.errno not in _NO_HARD_LINKS:
                    raise
                os.symlink(real, temporary)
        return not os.path.islink(temporary)

    def publish(self) -> None:
        """Sync every file, then give each its final name. On failure nothing of ours remains."""
        try:
            for path, stream in self._streams.items():
                with as_storage_error(path, "cannot write"):
                    stream.flush()
                    os.fsync(stream.fileno())
                    stream.close()
            self._make_way()
            for path in self._final_paths:
                self._place(path)
            with as_storage_error(self._directory, "cannot sync the directory"):
                _sync_directory(self._directory)
            self._is_published = True
        finally:
            self.discard()

    def discard(self) -> None:
        """Close and remove what is not published; harmless when repeated.

        Raises:
            StorageError: a file that was placed already cannot be removed.
        """
        for stream in self._streams.values():
            with contextlib.suppress(OSError):  # a failed flush must not keep the file alive
                stream.close()
        self._streams.clear()
        try:
            if not self._is_published:
                self.take_back()
        finally:
            for temporary in (*self._temporary.values(), self._aside):
                if temporary:
                    _unlink_if_possible(temporary)

    def take_back(self) -> None:
        """Remove what was published, where it is still ours; harmless when repeated.

        An old set comes back if no file of the new one had taken a place.

        Raises:
            StorageError: a file cannot be removed.
        """
        with as_storage_error(self._final_paths[-1], "cannot take back"):
            # the last one first, as it makes the set visible
            for path, identity in reversed(self._placed.items()):
                if _is_still(path, identity):
                    self._was_placed = True
                    os.unlink(path)
            self._placed.clear()
            if self._aside and not self._was_placed and os.path.lexists(self._aside):
                with contextlib.suppress(FileExistsError):  # another writer was here meanwhile
                    _rename_without_replacing(self._aside, self._final_paths[-1])

    def _new_temporary(self, final_path: str) -> str:
        """Return an unused name, noted before a file of that name exists."""
        temporary = f"{final_path}.tmp.{secrets.token_hex(8)}"
        self._temporary[final_path] = temporary
        return temporary

    def _refuse_existing(self) -> None:
        for path in self._final_paths:
            if self._overwrite:
                _refuse_other_than_file(path)
            elif os.path.lexists(path):
                raise _already_there(path)

    def _make_way(self) -> None:
        """When overwriting, take the file away that makes the old set visible, durably, first: a
        crash may then leave no set, but never a new .bin under an old .idx."""
        self._refuse_existing()
        last = self._final_paths[-1]
        if self._overwrite and len(self._final_paths) > 1 and os.path.lexists(last):
            with as_storage_error(last, "cannot replace"):
                self._aside = f"{last}.tmp.{secrets.token_hex(8)}"
                os.rename(last, self._aside)
                _sync_directory(self._directory)

    def _place(self, path: str) -> None:
        temporary = self._temporary[path]
        with as_storage_error(path, "cannot publish"):
            self._placed[path] = _identity(temporary)
            if self._overwrite:
                os.replace(temporary, path)
                _unlink_if_possible(temporary)  # of two names of one file, rename keeps both
                return
            try:
                _rename_without_replacing(temporary, path)
            except FileExistsError:
                del self._placed[path]  # another's, even where both are links to one file
                raise _already_there(path) from None


def _identity(path: str) -> _Identity:
    """Device and inode of a file; of a symbolic link what it names."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(path)
    return status.st_dev, status.st_ino


def _is_still(path: str, identity: _Identity) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return _identity(path) == identity
    return False


def _rename_without_replacing(source: str, target: str) -> None:
    """A plain rename would silently replace what another writer published since we looked, and two
    writers of one prefix could end as one's .bin under the other's .idx. A link cannot."""
    try:
        if os.path.islink(source):  # whether a hard link would follow it depends on the platform
            os.symlink(os.readlink(source), target)
        else:
            os.link(source, target)
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


def _refuse_other_than_file(path: str) -> None:
    """Refuse to replace anything but a file: a folder, a device, a pipe."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # nothing is there, or creating a file beside it will say what is wrong
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise StorageError(
            f"{path}: cannot be replaced: it is {kind_of(mode)}, and only files are replaced; "
            f"choose another path"
        )


def _sync_directory(directory: str) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some network file systems have none
            raise
    finally:
        os.close(descriptor)


def _unlink_if_possible(path: str) -> None:
    """Of a temporary, whose set is what matters: published by now, or failed for another reason."""
    with contextlib.suppress(OSError):
        os.unlink(path)
