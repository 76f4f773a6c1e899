"""Input files and objects: format, compression and identity.

Objects of a store are read while they are tokenized and not copied to a disk; parts that an earlier
run finished are not read again.
"""

from __future__ import annotations

import io
import logging
import os
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.io.os_errors import as_storage_error
from megaindex.io.paths import FileInfo, check_local, is_remote, names_folder
from megaindex.objects.files import list_remote, open_binary, stat_path
from megaindex.validation import check_choice

logger = logging.getLogger("megaindex")

FORMATS = ("jsonl", "lines", "files", "parquet")
"""A document is a JSON object on a line, a line of text, a text file, or a row of a Parquet file.
"""
_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "lines",
    ".text": "lines",
    ".parquet": "parquet",
}
_COMPRESSED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One input file, or object of a store."""

    path: str
    """Path or URL."""
    format: str
    """One of FORMATS."""
    compression: str
    """"gzip", "zstd", or "" for none, from the first bytes of the file."""
    size: int
    """Bytes as stored."""
    mtime_ns: int
    ctime_ns: int
    """Detects a file replaced with its old mtime (rsync -t, cp -p, tar). Unlike inode numbers it
    is the same on all nodes of a shared file system."""
    version: str = ""
    """Version tag of an object, whose times are 0; empty for a file."""

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)

    def open(self) -> io.RawIOBase:
        """Open the content, unbuffered; reading an object of another version raises."""
        return open_binary(FileInfo(self.path, self.size, self.version))

    def check_unchanged(self) -> None:
        """Raise StorageError if the file or object changed since the run began."""
        if self.is_remote:
            found = stat_path(self.path)
            if found != FileInfo(self.path, self.size, self.version):
                what = "gone" if found is None else "replaced"
                raise StorageError(
                    f"{self.path}: {what} while it was tokenized; start again when it no longer "
                    "changes"
                )
            return
        with as_storage_error(self.path, "cannot read the status of the input"):
            status = os.stat(self.path)
        now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if now != (self.size, self.mtime_ns, self.ctime_ns):
            raise StorageError(
                f"{self.path}: changed while it was tokenized: it had {self.size} bytes and has "
                f"{status.st_size}, or was rewritten, replaced, or given other permissions; start "
                "again when it no longer changes"
            )


def find_sources(
    inputs: Sequence[str | os.PathLike[str]], form: str | None, *, leave_out: Sequence[str] = ()
) -> list[InputFile]:
    """Return the inputs in the order given, a folder's files in the order of their names.

    Args:
        form: format of all inputs, one of FORMATS; by default it follows from each name.
        leave_out: paths to skip in a folder: the output of runs.

    Raises:
        MissingFile: an input does not exist, or a folder holds no file with a known suffix.
        FormatError: a file is empty, or its compression differs from its suffix.
        InvalidArgument: no input is given, one is a pipe or a device, or a suffix is unknown.
    """
    if form is not None:
        check_choice("format", form, FORMATS)
    if not inputs:
        raise InvalidArgument("inputs must name at least one file or folder, got none")
    given = [os.fspath(path) for path in inputs]
    for path in given:
        if not is_remote(path):
            check_local(path, "give a path")
    others = {os.path.abspath(path) for path in leave_out}
    paths = [path for name in given for path in _files(name, others)]
    return [_input_file(path, form) for path in paths]


def _files(path: str, leave_out: set[str]) -> list[str]:
    if is_remote(path):
        if not names_folder(path) and stat_path(path) is not None:
            return [path]
        there = list_remote(path)
        if not there:
            raise MissingFile(f"{path}: does not exist; check the bucket, the key and the endpoint")
        return _chosen(path, there, [url for url in there if _by_name(url)])
    path = os.path.abspath(path)  # tasks may run in another working directory
    if not os.path.isdir(path):
        return [path]
    with as_storage_error(path, "cannot list the folder"):
        files = sorted(f for f in Path(path).iterdir() if str(f) not in leave_out)
    wanted = [str(file) for file in files if _by_name(str(file)) and file.is_file()]
    return _chosen(path, list(map(str, files)), wanted)


def _chosen(path: str, there: Sequence[str], found: list[str]) -> list[str]:
    """Return the files of a folder that are read; warn of the others."""
    skipped = sorted(set(there) - set(found))
    if found and skipped:
        logger.warning(
            "%s: %d files and folders in it are skipped, first %s: of a folder, only files that "
            "end in %s are read; name the others explicitly",
            path,
            len(skipped),
            os.path.basename(skipped[0]),
            ", ".join(_SUFFIXES),
        )
    if not found:
        raise MissingFile(
            f"{path}: the folder holds no file that ends in {', '.join(_SUFFIXES)}, with or "
            f"without {', '.join(_COMPRESSED)}; name the files explicitly"
        )
    return found


def _input_file(path: str, form: str | None) -> InputFile:
    start, identity = _object(path) if is_remote(path) else _file(path)
    if not start:
        raise FormatError(f"{path}: is empty (0 bytes); leave it out, or write it again")
    compression = _compression(start)
    expected = _COMPRESSED.get(os.path.splitext(path)[1].lower(), "")
    if expected and compression != expected:
        raise FormatError(
            f"{path}: its suffix is that of {expected}, but its first bytes {start.hex(' ')} are "
            f"not; write it again or rename it"
        )
    known = form or _by_name(path)
    if known is None:
        raise InvalidArgument(
            f"{path}: its suffix must be one of {', '.join(_SUFFIXES)}; rename it, or pass "
            f"--format {'|'.join(FORMATS)}"
        )
    if known == "parquet" and compression:
        raise FormatError(f"{path}: is Parquet inside {compression}; decompress it first")
    return InputFile(path=path, format=known, compression=compression, **identity)


def _file(path: str) -> tuple[bytes, dict[str, Any]]:
    """Return the first bytes of a file, and its identity."""
    with as_storage_error(path, "cannot open the input"):
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    if not is_file:  # opening a pipe would block and consume its content
        raise InvalidArgument(
            f"{path}: is a pipe or a device, and inputs are read more than once; write it to a "
            f"file first"
        )
    with as_storage_error(path, "cannot open the input"), open(path, "rb") as file:
        start = file.read(4)
        status = os.fstat(file.fileno())
    return start, {
        "size": status.st_size,
        "mtime_ns": status.st_mtime_ns,
        "ctime_ns": status.st_ctime_ns,
    }


def _object(url: str) -> tuple[bytes, dict[str, Any]]:
    info = stat_path(url)
    if info is None:
        raise MissingFile(f"{url}: does not exist; check the bucket, the key and the endpoint")
    start = open_binary(info).read(4) or b""
    identity = {"size": info.nbytes, "mtime_ns": 0, "ctime_ns": 0, "version": info.version}
    return start, identity


def _compression(start: bytes) -> str:
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    skippable = start[1:] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F  # written by pzstd
    return "zstd" if start == b"\x28\xb5\x2f\xfd" or skippable else ""


def _by_name(path: str) -> str | None:
    """Return the format of a suffix, with or without that of a compression."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in _COMPRESSED:
        suffix = os.path.splitext(stem)[1]
    return _SUFFIXES.get(suffix)
