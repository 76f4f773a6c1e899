"""Settings and inputs of a tokenizing run: files, formats, identity, and texts of their documents.

Objects of a store are read while they are tokenized and not copied to a disk; parts that an earlier
run finished are not read again.
"""

from __future__ import annotations

import io
import json
import logging
import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format.header import code_of_dtype, get_dialect
from megaindex.format.tokenizers import Tokenizer, TokenizerFile, load
from megaindex.io.paths import FileInfo, as_storage_error, check_local, is_remote, names_folder
from megaindex.objects.files import list_remote, open_binary, stat_path
from megaindex.validation import check_choice, check_integer

Text = tuple[str, ...]
"""The value of one key: one text, or the texts of a list, each of which becomes a sequence."""

_DECODER = json.JSONDecoder()
_SHOWN = 60  # most characters of a value in a message


class BadRecord(Exception):
    """A line or row that cannot be a document."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(rule, detail)
        self.rule = rule
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A line or row that is left out."""

    place: int
    """As in `Record`."""
    error: BadRecord


class Record(NamedTuple):
    """A document before it is tokenized."""

    place: int
    """Number of its line or row in the piece, from 0."""
    texts: tuple[Text, ...]
    """One for each key."""
    size: int
    """Bytes of the line, or about so many of a row."""
    begin: int = 0
    """First byte of the line in the unpacked file; 0 of a row."""


def from_json(raw: bytes, keys: Sequence[str]) -> tuple[Text, ...]:
    """Return the values of `keys` in a JSON object, each a string or a list of strings.

    Python's json parses the line, as in Megatron: NaN is accepted, and the last of equal keys wins.

    Raises:
        BadRecord: rule utf-8, json, object, missing-key, type or surrogate.
    """
    text = decoded(raw)
    try:
        found, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        end = -1
    if end != len(text):  # an error, or white space around the value
        found = _parsed(text)
    if not isinstance(found, dict):
        raise BadRecord("object", f"must be a JSON object, got {_excerpt(found)}")
    return tuple([_value(found, key) for key in keys])


def _parsed(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(
            "json", f"is not valid JSON: {_reason(error)}; it begins {_excerpt(text)}"
        ) from None


def decoded(raw: bytes) -> str:
    """Decode UTF-8; raise BadRecord, rule utf-8, with the offset of the first bad byte."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(
            "utf-8",
            f"is not valid UTF-8: byte 0x{raw[error.start]:02x} at {error.start} ({error.reason})",
        ) from None


def _reason(error: Exception) -> str:
    """Return the message without its line number, which is always 1."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos}"
    return str(error)


def _value(found: dict[str, Any], key: str) -> Text:
    value = found.get(key)
    if isinstance(value, str) and value.isascii():  # nearly always
        return (value,)
    if key not in found:
        has = ", ".join(map(repr, list(found)[:10])) or "nothing"
        raise BadRecord("missing-key", f"has no key {key!r}; it has {has}")
    texts = tuple(value) if isinstance(value, list) else (value,)
    for text in texts:
        if not isinstance(text, str):
            rule = "must hold a string or a list of strings"
            raise BadRecord("type", f"key {key!r} {rule}, got {_excerpt(value)}")
        if not text.isascii():
            _check_characters(text, key)
    return texts


def _check_characters(text: str, key: str) -> None:
    """Refuse lone surrogates, which JSON can write and UTF-8 cannot encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise BadRecord(
            "surrogate", f"key {key!r} holds a lone surrogate, U+{code:04X}, at {error.start}"
        ) from None


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


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
_IN_FOLDER = {"lines": "files"}  # formats other than by name
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

    Without a format, a text file is a document if it is found in a folder, and each line is one if
    it is named; a warning says which.

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
    sources = [each for name in given for each in _sources(name, form, others)]
    for chosen, unit in (("lines", "line"), ("files", "file")):
        texts = [source for source in sources if source.format == chosen]
        if form is None and texts:
            more = f" and {len(texts) - 1:,} others" if len(texts) > 1 else ""
            logger.warning(
                "%s%s: each %s is a document; --format lines or --format files says which",
                texts[0].path,
                more,
                unit,
            )
    return sources


def _sources(name: str, form: str | None, leave_out: set[str]) -> list[InputFile]:
    paths = _files(name, leave_out)
    if form is None and paths not in ([name], [os.path.abspath(name)]):  # of a folder
        return [_input_file(path, _IN_FOLDER.get(_by_name(path) or "")) for path in paths]
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


_UINT16_BELOW = 65_500  # vocabulary size below which Megatron chooses uint16
_END_NAME = re.compile(r"eo[dst]\b|end|</s>", re.IGNORECASE)
_MOST_NAMED = 10  # special tokens in a message


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """Checked settings; small and picklable."""

    tokenizer: TokenizerFile
    keys: tuple[str, ...]
    """Keys of JSON objects, or columns; for text files they only name the output."""
    eod: int | None
    """Id appended to every document that has tokens."""
    dtype: str

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the tokens; a tokenizer by its content."""
        encoder = self.tokenizer.encoder
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "add_special_tokens": self.tokenizer.add_special_tokens,
            "keys": list(self.keys),
            "eod": self.eod,
            "dtype": self.dtype,
        } | ({} if encoder is None else {"encoder": encoder})


def check_settings(
    tokenizer: TokenizerFile,
    keys: Sequence[str],
    *,
    eod: int | str | None,
    append_eod: bool,
    dtype: Any | None,
) -> TokenizeSettings:
    """Load the tokenizer and check the other settings against it.

    Raises:
        InvalidArgument: keys are missing or repeated, the end token is not in the vocabulary, or
            the token type does not hold every id.
        FormatError: the file is not a tokenizer.
    """
    if not keys or len(set(keys)) != len(keys):
        raise InvalidArgument(f"keys must be one or more distinct names, got {list(keys)}")
    loaded = load(tokenizer)
    end = _end_of_document(loaded, tokenizer, eod) if append_eod or eod is not None else None
    return TokenizeSettings(
        tokenizer=tokenizer,
        keys=tuple(keys),
        eod=end,
        dtype=str(_token_type(loaded, tokenizer, end, dtype)),
    )


def _end_of_document(loaded: Tokenizer, file: TokenizerFile, eod: int | str | None) -> int:
    if eod is None:
        if loaded.own_eod is None:
            raise InvalidArgument(
                f"{file}: defines no end token; name one with --eod{_special_tokens(loaded)}"
            )
        return loaded.own_eod
    found = loaded.id_of(eod) if isinstance(eod, str) else check_integer("eod", eod)
    if found is None or not 0 <= found <= loaded.largest_id:
        raise InvalidArgument(
            f"--eod must be a token of {file} or an id from 0 to {loaded.largest_id}, got {eod!r}"
            f"{_special_tokens(loaded)}"
        )
    return found


def _special_tokens(loaded: Tokenizer) -> str:
    """Return the special tokens for a message, those with the name of an end token first."""
    tokens = loaded.special_tokens.items()
    order = sorted(tokens, key=lambda token: (not _END_NAME.search(token[0]), token[1]))
    if not order:
        return ""
    named = ", ".join(f"{text!r} ({number})" for text, number in order[:_MOST_NAMED])
    more = len(order) - _MOST_NAMED
    return f"; its special tokens are {named}{f' and {more} more' if more > 0 else ''}"


def _token_type(
    loaded: Tokenizer, file: TokenizerFile, eod: int | None, dtype: Any | None
) -> np.dtype[Any]:
    """Return `dtype`, by default Megatron's choice of uint16 or int32; it must hold every id."""
    if dtype is None:
        dtype = np.uint16 if loaded.vocab_size < _UINT16_BELOW else np.int32
    dialect = get_dialect("megatron")
    chosen = dialect.dtypes[code_of_dtype(dtype, dialect)]
    largest = max(loaded.largest_id, -1 if eod is None else eod)
    if chosen.kind == "f":
        raise InvalidArgument(f"--dtype must be an integer type, got {chosen}; pass --dtype int32")
    if largest > np.iinfo(chosen).max:
        raise InvalidArgument(
            f"--dtype {chosen} holds ids up to {np.iinfo(chosen).max}, and those of {file} go up "
            f"to {largest}; pass --dtype int32"
        )
    return chosen
