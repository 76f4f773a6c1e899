"""The files and objects that are tokenized: what each holds, how it is packed, and what
identifies it.

Objects of a store are read as they are tokenized, a part of an input at a time: nothing of them
is kept on a disk, and parts that an earlier run finished are not read again.
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

logger = logging.getLogger("megaindex")

FORMATS = {
    "jsonl": "a JSON object on each line",
    "lines": "each line of a text file is a document",
    "files": "each text file is a document",
    "parquet": "each row of a Parquet file is a document",
}

_SUFFIXES = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "lines",
    ".text": "lines",
    ".parquet": "parquet",
}
_PACKED = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}


@dataclass(frozen=True, kw_only=True)
class InputFile:
    """One input file, or object of a store."""

    path: str
    """Or URL."""
    format: str
    """One of FORMATS."""
    compression: str
    """"gzip", "zstd", or "" for none; what the first bytes say, not the name."""
    size: int
    """Bytes of the file as it lies there."""
    mtime_ns: int
    ctime_ns: int
    """Of the last change of content, permissions or links: unlike the other no program sets it at
    will, as rsync -t, cp -p and tar do when they put another file in the place of one. All nodes of
    a shared file system see the same, which inodes need not be."""
    version: str = ""
    """The version tag of an object, which has no times here; empty for a file."""

    @property
    def is_remote(self) -> bool:
        return is_remote(self.path)

    def open(self) -> io.RawIOBase:
        """The content, unbuffered; of an object, what is read is of this version or an error."""
        return open_binary(FileInfo(self.path, self.size, self.version))

    def check_unchanged(self) -> None:
        """StorageError if the file changed since it was looked at."""
        if self.is_remote:
            found = stat_path(self.path)
            if found != FileInfo(self.path, self.size, self.version):
                what = "gone" if found is None else "replaced"
                raise StorageError(
                    f"{self.path}: {what} while it was tokenized; start again once it stays as it "
                    f"is"
                )
            return
        with as_storage_error(self.path, "cannot look at the input"):
            status = os.stat(self.path)
        now = (status.st_size, status.st_mtime_ns, status.st_ctime_ns)
        if now != (self.size, self.mtime_ns, self.ctime_ns):
            raise StorageError(
                f"{self.path}: changed while it was tokenized: it had {self.size} bytes and has "
                f"{status.st_size}, or was written again, replaced, or given other permissions; "
                f"start again once it stays as it is"
            )


def find_sources(
    inputs: Sequence[str | os.PathLike[str]], form: str | None, *, leave_out: Sequence[str] = ()
) -> list[InputFile]:
    """Look at every input, in the order given; of a folder, at its files in order of name.

    Args:
        form: one of FORMATS for all; None goes by the name of each file.
        leave_out: paths to pass over in a folder: what runs put there.

    Raises:
        MissingFile: an input is not there, or a folder holds no file of a known name.
        FormatError: a file is empty, or is not packed as its name says.
        InvalidArgument: no input was found, one is a pipe or a device, or the name of a file does
            not tell its format.
    """
    if form is not None and form not in FORMATS:
        raise InvalidArgument(f"format={form!r}: unknown; choose one of {', '.join(FORMATS)}")
    if not inputs:
        raise InvalidArgument("inputs: there are none; give at least one file or folder")
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
        return _chosen(path, there, [_by_name(url) is not None for url in there])
    path = os.path.abspath(path)  # tasks may run where the working directory is another
    if not os.path.isdir(path):
        return [path]
    with as_storage_error(path, "cannot list the folder"):
        files = sorted(f for f in Path(path).iterdir() if str(f) not in leave_out)
    return _chosen(path, list(map(str, files)), [_is_text(f) for f in files])


def _chosen(path: str, there: Sequence[str], is_text: Sequence[bool]) -> list[str]:
    """Those of a folder that are read."""
    found = [each for each, wanted in zip(there, is_text, strict=True) if wanted]
    passed_over = [
        os.path.basename(each) for each, wanted in zip(there, is_text, strict=True) if not wanted
    ]
    if found and passed_over:
        logger.warning(
            "%s: %d files and folders in it are passed over, first %s: of a folder, files that end "
            "in %s are read; name the others themselves",
            path,
            len(passed_over),
            passed_over[0],
            ", ".join(_SUFFIXES),
        )
    if not found:
        raise MissingFile(
            f"{path}: the folder holds no file that ends in {', '.join(_SUFFIXES)}, with or "
            f"without {', '.join(_PACKED)}; name the files themselves"
        )
    return found


def _input_file(path: str, form: str | None) -> InputFile:
    start, identity = _object(path) if is_remote(path) else _file(path)
    if not start:
        raise FormatError(f"{path}: is empty (0 bytes); leave it out, or write it again")
    compression = _packed_as(start)
    promised = _PACKED.get(os.path.splitext(path)[1].lower(), "")
    if promised and compression != promised:
        raise FormatError(
            f"{path}: is named as a {promised} file and begins with the bytes {start.hex(' ')}, "
            f"which no {promised} file does; write it again or rename it"
        )
    known = form or _by_name(path)
    if known is None:
        raise InvalidArgument(
            f"{path}: its name does not tell its format (known: {', '.join(_SUFFIXES)}); pass "
            f"--format {'|'.join(FORMATS)}"
        )
    if known == "parquet" and compression:
        raise FormatError(f"{path}: is a {compression} file around Parquet; unpack it first")
    return InputFile(
        path=path,
        format=known,
        compression=compression,
        **identity,
    )


def _file(path: str) -> tuple[bytes, dict[str, Any]]:
    """Its first bytes, and what identifies it."""
    with as_storage_error(path, "cannot open the input"):
        is_file = stat.S_ISREG(os.stat(path).st_mode)
    if not is_file:  # opening a pipe would wait, and take what is in it
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


def _packed_as(start: bytes) -> str:
    if start[:2] == b"\x1f\x8b":
        return "gzip"
    skippable = start[1:] == b"\x2a\x4d\x18" and 0x50 <= start[0] <= 0x5F  # pzstd begins so
    return "zstd" if start == b"\x28\xb5\x2f\xfd" or skippable else ""


def _is_text(file: Path) -> bool:
    return _by_name(str(file)) is not None and file.is_file()


def _by_name(path: str) -> str | None:
    """Return the format that a name tells, with or without a suffix of packing."""
    stem, suffix = os.path.splitext(path.lower())
    if suffix in _PACKED:
        suffix = os.path.splitext(stem)[1]
    return _SUFFIXES.get(suffix)
