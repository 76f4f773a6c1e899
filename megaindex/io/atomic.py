"""Atomic, durable publication of several files together; JSON objects of untrusted files."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import secrets
import stat
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO

from megaindex.errors import MissingFile, StorageError
from megaindex.io.paths import as_storage_error, check_local, check_regular, kind_of, open_at_once

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
    present only if the last one is (`train.bin`, `train.idx`). A crash at any moment leaves at most
    temporary files (`train.bin.tmp.<16 hex digits>`) or an incomplete set without its last file.

    Existing files are refused, by the constructor and again on publication, unless `overwrite`,
    which refuses anything but files. URLs are always refused.

    An interrupt may raise between any two steps. So each file is recorded before it is made, and
    removed only if its inode is the one recorded. The constructor makes no files; call `discard`,
    or `take_back` to undo a publication too, in a `finally` that begins before the first `open`.
    """

    def __init__(self, final_paths: Sequence[str], *, overwrite: bool = False) -> None:
        self._final_paths = tuple(final_paths)
        for path in self._final_paths:
            check_local(path, "write it to a disk and upload it with the store's own tool")
        self._directory = os.path.dirname(self._final_paths[0]) or "."
        self._overwrite = overwrite
        self._temporary: dict[str, str] = {}  # final path -> temporary path
        self._streams: dict[str, BinaryIO] = {}
        self._placed: dict[str, _Identity] = {}  # final path -> file that has or will have it
        self._aside = ""  # temporary path of the last file of the old set
        self._was_placed = False  # a file of the old set was replaced
        self._is_published = False
        self._refuse_existing()

    def open(self, final_path: str) -> BinaryIO:
        """Return a new, empty, buffered file that `publish` renames to `final_path`."""
        temporary = self._new_temporary(final_path)
        # O_EXCL: nobody can have put a link in the place of the temporary file
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        with as_storage_error(final_path, "cannot create"):
            descriptor = os.open(temporary, flags, 0o666)  # the umask narrows it
            stream = os.fdopen(descriptor, "wb", buffering=_BUFFER_BYTES)
        self._streams[final_path] = stream
        return stream

    def written(self, final_path: str) -> str:
        """Return the temporary path of a file that `open` returned, to read what is written."""
        with as_storage_error(final_path, "cannot write"):
            self._streams[final_path].flush()
        return self._temporary[final_path]

    def link(self, source: str, final_path: str) -> bool:
        """Make `final_path` a link to the existing file `source`, without a copy.

        Returns:
            True for a hard link; False for a symbolic link, where hard links are not possible.
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
        """Sync every file, then rename each; after a failure all new files are removed."""
        try:
            for path, stream in self._streams.items():
                with as_storage_error(path, "cannot write"):
                    stream.flush()
                    os.fsync(stream.fileno())
                    stream.close()
            self._hide_old_set()
            *others, last = self._final_paths
            for path in others:
                self._place(path)
            if others:  # or a power loss might keep the last name without the others
                sync_directory(self._directory)
            self._place(last)
            self._check_set()
            sync_directory(self._directory)
            self._is_published = True
        finally:
            self.discard()

    def discard(self) -> None:
        """Close and remove files that are not published; may be repeated.

        Raises:
            StorageError: a renamed file cannot be removed.
        """
        for stream in self._streams.values():
            with contextlib.suppress(OSError):  # a failed flush must not keep the file alive
                stream.close()
        try:
            if not self._is_published:
                self.take_back()
            if self._aside:  # else it stays: it may be all that is left of the old set
                _unlink_if_possible(self._aside)
        finally:
            for temporary in self._temporary.values():
                _unlink_if_possible(temporary)

    def take_back(self) -> None:
        """Remove published files unless they have been replaced; may be repeated.

        An old set is restored if none of its files was replaced.

        Raises:
            StorageError: a file cannot be removed or restored.
        """
        last = self._final_paths[-1]
        with as_storage_error(last, "cannot remove"):
            # the last file first, as it makes the set visible
            for path, identity in reversed(self._placed.items()):
                if _is_still(path, identity):
                    self._was_placed = True
                    os.unlink(path)
                    if path == last:  # or a power loss might bring it back without the others
                        with contextlib.suppress(StorageError):
                            sync_directory(self._directory)
            self._placed.clear()
        if self._aside and not self._was_placed:
            restoring = as_storage_error(last, f"cannot restore it from {self._aside}")
            # missing: it was not renamed, or is restored; existing: another writer has published
            with restoring, contextlib.suppress(FileNotFoundError, FileExistsError):
                _rename_without_replacing(self._aside, last)

    def _new_temporary(self, final_path: str) -> str:
        """Return an unused name, recorded before its file exists."""
        temporary = f"{final_path}.tmp.{secrets.token_hex(8)}"
        self._temporary[final_path] = temporary
        return temporary

    def _refuse_existing(self) -> None:
        for path in self._final_paths:
            if self._overwrite:
                _refuse_other_than_file(path)
            elif os.path.lexists(path):
                raise _already_there(path)

    def _hide_old_set(self) -> None:
        """Rename the file that makes an old set visible, and sync the directory: a crash may then
        leave no set, but never a new .bin with an old .idx."""
        self._refuse_existing()
        last = self._final_paths[-1]
        if self._overwrite and len(self._final_paths) > 1:
            self._aside = f"{last}.tmp.{secrets.token_hex(8)}"
            with contextlib.suppress(MissingFile):  # there is no old set
                with as_storage_error(last, "cannot replace"):
                    os.rename(last, self._aside)
                sync_directory(self._directory)

    def _place(self, path: str) -> None:
        temporary = self._temporary[path]
        with as_storage_error(path, "cannot publish"):
            # before the rename: Ctrl-C right after it must find what to take back
            self._placed[path] = _identity(temporary)
            if self._overwrite:
                os.replace(temporary, path)
                _unlink_if_possible(temporary)  # rename keeps both names of one file
                return
            try:
                _rename_without_replacing(temporary, path)
            except FileExistsError:
                # On a network the reply to a link() that succeeded can be lost, and it is repeated.
                # A file that was opened here is no other writer's, as a linked one could be.
                if path in self._streams and _is_still(path, self._placed[path]):
                    _unlink_if_possible(temporary)
                    return
                del self._placed[path]  # of another writer, even if both link to one file
                raise _already_there(path) from None

    def _check_set(self) -> None:
        """Raise StorageError if another writer has replaced a part of the set: with the files of
        this one it would be a mixture."""
        if len(self._placed) > 1:
            for path, identity in self._placed.items():
                with as_storage_error(path, "cannot publish"):
                    if not _is_still(path, identity):
                        raise StorageError(
                            f"{path}: another process replaced it at the same time; write the "
                            "files again, one process at a time"
                        )


def write_file(path: str, write: Callable[[BinaryIO], object], *, overwrite: bool = False) -> None:
    """Publish one file of the content that ``write`` writes, see `AtomicFiles`.

    Raises:
        StorageError: the file exists, or cannot be written.
    """
    files = AtomicFiles([path], overwrite=overwrite)
    try:
        with as_storage_error(path, "cannot write"):
            write(files.open(path))
        files.publish()
    finally:
        files.discard()


def _identity(path: str) -> _Identity:
    """Return device and inode of a file, or the target of a symbolic link."""
    status = os.lstat(path)
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(path)
    return status.st_dev, status.st_ino


def _is_still(path: str, identity: _Identity) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return _identity(path) == identity
    return False


def _rename_without_replacing(source: str, target: str) -> None:
    """Rename by a link, which fails if the target exists: rename would replace the file of another
    writer, and two writers of one prefix could leave the .bin of one and the .idx of the other."""
    try:
        if os.path.islink(source):  # hard links follow it on some platforms only
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
    name = "prefix" if path.endswith((".bin", ".idx", ".provenance")) else "path"
    error = StorageError(
        f"{path}: already exists; choose another {name}, or pass overwrite=True (--overwrite) to "
        "replace it"
    )
    error.errno = errno.EEXIST
    return error


def _refuse_other_than_file(path: str) -> None:
    try:
        mode = os.lstat(path).st_mode
    except OSError:  # missing, or creating a file beside it raises the error
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise StorageError(f"{path}: must be a file, got {kind_of(mode)}; choose another path")


def sync_directory(directory: str) -> None:
    """Sync the names in a directory, so that a power loss keeps them."""
    with as_storage_error(directory, "cannot sync the directory"):
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # as on some network file systems
                raise
        finally:
            os.close(descriptor)


def _unlink_if_possible(path: str) -> None:
    """Remove a temporary file without raising: its set is published, or failed before."""
    with contextlib.suppress(OSError):
        os.unlink(path)


_LONGEST = 1 << 28  # bytes; a snapshot of a blend of 32,767 datasets has a tenth of that


class Damaged(ValueError):
    """The file does not contain a JSON object; the reason begins with "it"."""


def read_object(
    path: str | os.PathLike[str], *, longest: int = _LONGEST, follow: bool = True
) -> dict[str, Any]:
    """Return the JSON object in a regular file; arguments and errors are those of `read_regular`.

    Raises:
        Damaged: it does not contain a JSON object.
    """
    return parse_object(read_regular(path, longest=longest, follow=follow))


def read_regular(
    path: str | os.PathLike[str], *, longest: int = _LONGEST, follow: bool = True
) -> bytes:
    """Return the bytes of a regular file, without waiting for a pipe.

    Args:
        longest: maximum size in bytes.
        follow: follow a symbolic link, which otherwise raises `Damaged`.

    Raises:
        OSError: the file does not exist or cannot be read.
        Damaged: it is not a regular file, or too long.
    """
    try:
        descriptor = open_at_once(path, follow=follow)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise Damaged("it is a symbolic link") from None
        raise
    try:
        status = os.fstat(descriptor)
        if not stat.S_ISREG(status.st_mode) or status.st_size > longest:
            raise Damaged(f"it is not a regular file of at most {longest} bytes")
        with open(descriptor, "rb", closefd=False) as file:
            # so that a file that grows meanwhile cannot exceed the limit
            return file.read(status.st_size)
    finally:
        os.close(descriptor)


_LEAST = 1 << 16  # bytes; files of /proc have no size
_HANDED = re.compile(r"/dev/stdin|/(dev|proc/self)/fd/[0-9]+")


def read_named(path: str, what: str = "", *, longest: int = 1 << 26) -> bytes:
    """Return the bytes of a file that a flag or a setting names.

    A pipe is read only where the shell hands its descriptor over, as for ``<(command)``: a named
    one may never have a writer.

    Args:
        path: the file.
        what: name of the flag or setting, for messages.
        longest: maximum size in bytes.

    Raises:
        MissingFile, StorageError: the file cannot be read, is not a regular file, or is too long.
        InvalidArgument: it is a URL, of which the message omits credentials.
    """
    check_local(path, "copy it to a disk")
    named = f"{what}: {path}" if what else path
    with as_storage_error(named, "cannot read"):
        try:
            descriptor = open_at_once(path)
        except FileNotFoundError:
            raise MissingFile(f"{named} does not exist; check the path") from None
        try:
            status, most = os.fstat(descriptor), longest
            if stat.S_ISFIFO(status.st_mode) and _HANDED.fullmatch(path):
                os.set_blocking(descriptor, True)
            else:
                check_regular(named, status)
                most = min(max(status.st_size, _LEAST), longest)  # read reserves so many bytes
            too_long = status.st_size > longest
            with open(descriptor, "rb", closefd=False) as file:
                text = b"" if too_long else file.read(most + 1)
        finally:
            os.close(descriptor)
        if text is None:  # a log of /proc without a line to read
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
    if too_long or len(text) > longest:
        raise StorageError(f"{named}: must have at most {longest} bytes; give the right file")
    return text


def is_size(value: object) -> bool:
    """Return True for an integer that can be a number of bytes or entries."""
    return type(value) is int and 0 <= value < 2**63


def parse_object(text: str | bytes, **hooks: Any) -> dict[str, Any]:
    """Return the JSON object of a text, or raise `Damaged`; ``hooks`` are those of `json.loads`."""
    try:
        found = json.loads(text, **hooks)
    except Damaged:  # of a hook
        raise
    except ValueError as error:  # also for invalid UTF-8, and integers of thousands of digits
        raise Damaged(f"it is not valid JSON: {error}") from error
    except RecursionError:
        raise Damaged("it is nested too deeply") from None
    if not isinstance(found, dict):
        raise Damaged("it is not a JSON object")
    return found
