"""The file ``run.lock``: its fields, its text, and its digests.

docs/lock-format.md specifies the format: fields, tables, descriptions of indices, and digests. The
fields of ``settings``, which open the run again, are those of `megaindex.lock.settings`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from megaindex.errors import FormatError, InvalidArgument
from megaindex.format.header import Fault
from megaindex.io.atomic import Damaged, read_named, write_file
from megaindex.io.paths import check_local, is_remote, path_text
from megaindex.lock.shape import (
    FORMAT,
    HASH_DIGITS,
    SECTIONS,
    VERSION,
    Misshapen,
    check_shape,
    parse_text,
)
from megaindex.markup import html_table
from megaindex.run.identity import canonical_forms, short_hash
from megaindex.validation import shown

_FIELDS = ("format", "version", "written_by", "settings", "root", "hash", "sources", "tokenizers",
           "about", "dialect", "tokens", "files", "subsets")  # fmt: skip
_WIDTH = 100
_END = b'"\n}\n'
_LONGEST = 1 << 28  # bytes
_AGAIN = "restore the file, or lock the run again"


@dataclass(frozen=True, kw_only=True)
class LockedSource:
    """A pair of files that a lock pins.

    Attributes:
        path: prefix of the pair as the lock names it, absolute or a URL.
        fingerprint: `corpus_fingerprint`, 32 hex digits.
        idx: hash of the .idx, by the algorithm of the lock.
        bin_bytes: size of the .bin.
        sequences: number of sequences.
        documents: number of documents.
        tokens: sum of all sequence lengths.
        token_type: type of a token, such as uint16.
        tokenizers: rows of the tokenizers that its provenance names.
        provenance: SHA-256 of its provenance, 64 hex digits; None without one.
        url: address of the pair without .idx and .bin, if it was given.
    """

    path: str
    fingerprint: str
    idx: str
    bin_bytes: int
    sequences: int
    documents: int
    tokens: int
    token_type: str
    tokenizers: Sequence[int]
    provenance: str | None
    url: str | None

    @property
    def hash(self) -> str:
        """Algorithm of ``idx``."""
        return next(name for name, digits in HASH_DIGITS.items() if digits == len(self.idx))


@dataclass(frozen=True, kw_only=True)
class LockedFile:
    """A file besides the pairs that a lock pins.

    Attributes:
        path: the file, absolute.
        bytes: its size.
        sha256: SHA-256 of its content, 64 hex digits.
    """

    path: str
    bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class Lock:
    """The content of a lock.

    Attributes:
        path: path of the file; empty for a lock that is not written yet.
        content: its fields.
    """

    path: str
    content: Mapping[str, Any]

    def __repr__(self) -> str:
        subsets = ", ".join(
            f"{name} {subset['samples']:,} samples in {_count(subset):,} steps"
            for name, subset in self.content["subsets"].items()
        )
        return f"Lock({self.path!r}: {len(self.sources)} pairs, {subsets})"

    def _repr_html_(self) -> str:
        rows = [["pairs", f"{len(self.sources):,}", ""]]
        for name, subset in self.content["subsets"].items():
            rows.append([name, f"{subset['samples']:,} samples", f"{_count(subset):,} steps"])
        return html_table([], rows, labels=1, caption=self.path or "lock, not written")

    @cached_property
    def sources(self) -> tuple[LockedSource, ...]:
        """The pairs, in the order of the lock."""
        table = self.content["sources"]
        rows = (dict(zip(table["columns"], row, strict=True)) for row in table["rows"])
        return tuple(LockedSource(**{**row, "path": self._located(row["path"])}) for row in rows)

    @cached_property
    def files(self) -> tuple[LockedFile, ...]:
        """The files of skipped documents, in the order of the lock."""
        return tuple(
            LockedFile(**{**row, "path": self._located(row["path"])})
            for row in self.content["files"]
        )

    def _located(self, path: str) -> str:
        if is_remote(path) or os.path.isabs(path):
            return path
        return os.path.normpath(os.path.join(self._folder, self.content["root"], path))

    @property
    def _folder(self) -> str:
        """Folder that a relative root is relative to."""
        return os.path.dirname(os.path.abspath(self.path))

    def subset(self, name: str) -> Mapping[str, Any]:
        """Return a subset, with the description of its index as `build_described` takes it.

        Raises:
            FormatError: the lock has no such subset.
        """
        subsets = self.content["subsets"]
        if name not in subsets:
            raise FormatError(
                f"{self.path}: has no subset {name}, it has {', '.join(subsets)}; give one of them"
            )
        return {**subsets[name], "index": expanded(subsets[name]["index"])}

    def fingerprints(self, subset: str) -> list[str]:
        """Return the fingerprints of the sources of a subset, by their numbers in its index."""
        return [self.sources[row].fingerprint for row in self.content["subsets"][subset]["sources"]]

    def names(self, subset: str) -> list[str]:
        """Return the names of the sources of a subset, by their numbers in its index."""
        content = self.content["subsets"][subset]
        pairs = zip(content["sources"], content["note"]["names"], strict=True)
        return [name or self.sources[row].path for row, name in pairs]

    @cached_property
    def identity(self) -> str:
        """Identity of the run, 32 hex digits: see docs/lock-format.md."""
        forms = canonical_forms(
            {name: self.subset(name) for name in self.content["subsets"]},
            [source.fingerprint for source in self.sources],
            [file.sha256 for file in self.files],
        )
        return short_hash(forms)

    @property
    def content_identity(self) -> str | None:
        """Hash of the tokens of the training sources, 32 hex digits; None if none were read."""
        tokens, train = self.content["tokens"], self.content["subsets"]["train"]
        if tokens is None:
            return None
        hashes = [tokens["hashes"][row] for row in train["sources"]]
        return short_hash({"chunk_bytes": tokens["chunk_bytes"], "hashes": hashes})

    def write(self, path: str | os.PathLike[str], *, overwrite: bool = False) -> Lock:
        """Write the lock, atomically, and return it with its path.

        Args:
            path: the file, which must not exist.
            overwrite: replace an existing file.

        Raises:
            InvalidArgument: `read_lock` would refuse it, as of a run of more than 2**24 steps.
            StorageError: the file exists, or cannot be written.
        """
        target = os.fspath(path)
        check_local(target, "write the lock to a disk and upload it")
        root = self.content["root"]
        if root:
            root = os.path.normpath(os.path.join(self._folder, root))
            folder = os.path.dirname(os.path.abspath(target))
            below = os.path.relpath(root, folder)
            if not below.startswith(".."):  # relative to the lock, if it lies below it
                root = below.replace(os.sep, "/")
        text = lock_text({**self.content, "root": root})
        try:
            check_shape(parse_text(text))
        except Misshapen as error:
            raise InvalidArgument(f"{target}: the run has no lock: {error}; divide it") from None
        write_file(target, lambda file: file.write(text), overwrite=overwrite)
        return read_lock(target)


def _count(subset: Mapping[str, Any]) -> int:
    return sum(number for _, _, number in subset["steps"])


def compact(node: Any) -> Any:
    """Return a description with the sources of its nodes as tables."""
    if isinstance(node, list):
        return [compact(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: compact(value) for key, value in node.items()}
    if "common" in node:
        columns = sorted({key for each in node["sources"] for key in each})
        del found["sources"]
        found["columns"] = columns
        found["rows"] = [[each.get(key) for key in columns] for each in node["sources"]]
    return found


def expanded(node: Any) -> Any:
    """Return the description that `compact` changed."""
    if isinstance(node, list):
        return [expanded(each) for each in node]
    if not isinstance(node, dict):
        return node
    found = {key: expanded(value) for key, value in node.items()}
    if "common" in node:
        columns, rows = found.pop("columns"), found.pop("rows")
        found["sources"] = [
            {key: value for key, value in zip(columns, row, strict=True) if value is not None}
            for row in rows
        ]
    return found


def section_digest(value: Any) -> str:
    """Return SHA-256 of the canonical JSON of a section."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def lock_text(content: Mapping[str, Any]) -> bytes:
    """Return the text of a lock; digests in ``content`` are replaced."""
    digests = {name: section_digest(content[name]) for name in SECTIONS}
    fields = {key: content[key] for key in _FIELDS}
    lines = "".join(
        f'"{key}": {"".join(_lines(value, len(key) + 5))},\n'
        for key, value in {**fields, "digests": digests}.items()
    )
    text = f'{{\n{lines}"digest": "'.encode()
    return text + hashlib.sha256(text).hexdigest().encode() + _END


def _lines(value: Any, taken: int, depth: int = 1) -> Iterator[str]:
    """Yield the parts of a value's text: one line if it fits, else a line for each field or row."""
    whole = json.dumps(value, separators=(", ", ": "), allow_nan=False)
    if len(whole) + taken <= _WIDTH or not isinstance(value, (dict, list)):
        yield whole
        return
    indent = "\n" + " " * depth
    if isinstance(value, dict):
        items = list(value.items())
        yield "{"
        for number, (key, each) in enumerate(items):
            name = json.dumps(key)
            yield f"{indent}{name}: "
            yield from _lines(each, depth + len(name) + 3, depth + 1)
            yield "," if number < len(items) - 1 else ""
        yield "\n" + " " * (depth - 1) + "}"
        return
    yield "["
    if any(isinstance(each, (dict, list)) for each in value):
        for number, each in enumerate(value):
            yield indent
            is_row = isinstance(each, list)
            text = json.dumps(each, separators=(",", ":"))
            yield from [text] if is_row else _lines(each, depth, depth + 1)
            yield "," if number < len(value) - 1 else ""
    else:
        yield from _filled(value, indent)
    yield "\n" + " " * (depth - 1) + "]"


def _filled(values: Sequence[Any], indent: str) -> Iterator[str]:
    """Yield plain values, as many on a line as fit."""
    room = 0
    for number, value in enumerate(values):
        text = json.dumps(value) + ("," if number < len(values) - 1 else "")
        if room < len(text):
            yield indent
            room = _WIDTH - len(indent)
        yield text
        room -= len(text)


def read_lock(path: str | os.PathLike[str] | Lock) -> Lock:
    """Return the lock in a file; a lock is returned as it is.

    Raises:
        MissingFile, StorageError: the file cannot be read.
        FormatError: it is not a lock, was changed since it was written, or is of another version;
            the message names the section that was changed.
    """
    if isinstance(path, Lock):
        return path
    lock, fault = parse_lock(path)
    if fault is not None:
        raise FormatError(
            f"{lock.path}: {fault.where}: must be {fault.expected}, got {fault.found}; "
            f"{fault.remedy}"
        )
    return lock


def parse_lock(path: str | os.PathLike[str]) -> tuple[Lock, Fault | None]:
    """Return the lock in a file, and the fault if it was changed since it was written.

    Raises:
        MissingFile, StorageError: the file cannot be read.
        FormatError: it is not a lock, or is of another version.
    """
    name = path_text(path)
    text = read_named(name, longest=_LONGEST)
    try:
        content = parse_text(text)
    except Damaged as error:
        raise FormatError(
            f"{name}: is not a lock: {error}; {_AGAIN}, it may have been truncated"
        ) from None
    if content.get("format") != FORMAT:
        raise FormatError(
            f"{name}: is not a lock: format must be {FORMAT!r}, got "
            f"{shown(content.get('format'))}; give a file of `megaindex lock`"
        )
    version = content.get("version")
    if type(version) is not int or version != VERSION:
        writer = f", {shown(content['written_by'])}" if "written_by" in content else ""
        raise FormatError(
            f"{name}: has version {shown(version)} of the format, this release reads {VERSION}; "
            f"lock the run again, or use the release that wrote it{writer}"
        )
    try:
        check_shape(content)
    except Misshapen as error:
        raise FormatError(f"{name}: is not a lock: {error}; {_AGAIN}") from None
    return Lock(path=name, content=content), _digest_fault(text, content)


def _digest_fault(text: bytes, content: Mapping[str, Any]) -> Fault | None:
    digest = content["digest"]
    end = len(text) - len(_END) - len(digest)
    is_whole = text.endswith(digest.encode() + _END) and len(digest) == 64
    if is_whole and hashlib.sha256(text[:end]).hexdigest() == digest:
        return None
    changed = [
        name for name in SECTIONS if content["digests"].get(name) != section_digest(content[name])
    ]
    where = f"section {', '.join(changed)}" if changed else "a field outside the sections"
    return Fault(
        rule="digest",
        where=where,
        found="another digest",
        expected="as it was written",
        remedy=f"{_AGAIN}; a lock is not edited, the settings are",
    )
