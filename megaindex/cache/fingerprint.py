"""Fingerprints of corpora and requests, and records of unchanged pairs.

A record has the prefix and the stamp of a pair (sizes, times, inodes; versions in an object store)
beside results computed from it. Nothing is lost with the file: they are computed again.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from megaindex._types import I32, I64, IntArray
from megaindex.io.json_files import Damaged, read_object
from megaindex.io.paths import FileInfo
from megaindex.objects.files import each_of, read_ranges, stamp

logger = logging.getLogger("megaindex")

Record = dict[str, Any]

_RECORDS_NAME = re.compile(r"(blend|sources)-[0-9a-f]{32}-megaindex\.json")


def records_path(cache_dir: str | os.PathLike[str], kind: str, key: str) -> Path:
    """Return the file of records of a ``kind``, "blend" or "sources", in a cache."""
    path = Path(cache_dir) / f"{kind}-{key}-megaindex.json"
    assert is_records_name(path.name), "so that it is told from a sidecar"
    return path


def is_records_name(name: str) -> bool:
    """Return whether a file of that name holds records, not a sidecar, whose names end alike."""
    return _RECORDS_NAME.fullmatch(name) is not None


def stamps_of(prefixes: Sequence[str]) -> list[list[int]]:
    """Return the stamps of pairs, asked for side by side."""
    return each_of(corpus_stamp, prefixes)


def load_records(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records in a file, whether or not they still hold.

    Raises:
        OSError: it is not there, or cannot be read.
        Damaged: it is not as it was written; the text goes on "it …".
    """
    stored = read_object(path)
    records = stored.get("sources")
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise Damaged("it holds no list of sources")
    if not all(isinstance(each.get("prefix"), str) for each in records):
        raise Damaged("it has a source without a prefix")
    try:
        is_whole = stored.get("checksum") == _checksum(records)
    except (ValueError, RecursionError):  # of NaN, which nobody writes, and of lists in lists
        is_whole = False
    if not is_whole:
        raise Damaged("its checksum is not that of its sources")
    return records


def read_records(
    path: Path, prefixes: Sequence[str], is_sound: Callable[[Record], bool]
) -> list[Record] | None:
    """Return the records of these pairs; None without any, or where one of the pairs changed.

    ``is_sound`` says whether what was learned of a pair is of the types that are written; it may
    raise KeyError and TypeError instead.
    """
    try:
        records = load_records(path)
        is_same = [record["prefix"] for record in records] == list(prefixes)
        whole = is_same and all(map(is_sound, records))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        logger.warning("%s: is damaged; every source is opened anew", path)
        return None
    for record, prefix, now in zip(records, prefixes, stamps_of(prefixes), strict=True):
        if record.get("stamp") != now:
            logger.info("%s: %s changed since it was written", path, prefix)
            return None
    return records


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Best effort: without the file the next start is slower and nothing else."""
    text = canonical_json({"sources": records, "checksum": _checksum(records)})
    aside = path.with_name(f"{path.name}.tmp.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(text)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


def _checksum(records: Any) -> str:
    return xxhash.xxh3_128_hexdigest(canonical_json({"sources": records}).encode())


CACHE_FORMAT = 1  # raise when the arrays of an entry would mean something else

CHUNKS = 32
CHUNK_BYTES = 8 << 10
"""A sampled content fingerprint reads so many chunks of so many bytes of a .bin."""
_PIECE = 16 << 20  # bytes of a .bin that are read and hashed at once


class HasLengths(Protocol):
    """The part of an IndexedDataset that decides its index arrays."""

    @property
    def sequence_lengths(self) -> I32: ...
    @property
    def document_indices(self) -> I64: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def index_nbytes(self) -> int: ...


class Content(Protocol):
    """The part of an IndexedDataset that decides which tokens it serves."""

    @property
    def sequence_pointers(self) -> I64: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def bin_info(self) -> FileInfo: ...


def corpus_fingerprint(dataset: HasLengths) -> str:
    """XXH3-128, as 32 hex digits, of both file sizes, the lengths and the document bounds.

    The tokens themselves are not read: a corpus rewritten with equal lengths keeps its indices,
    and its indices keep serving whatever tokens it holds. `content_fingerprint` reads them.
    Computed once for a dataset.
    """
    found = _fingerprints.get(dataset)
    if found is None:
        digest = xxhash.xxh3_128()
        sizes = (dataset.nbytes, dataset.index_nbytes, dataset.sequence_lengths.size)
        digest.update(np.array(sizes, "<i8").tobytes())
        digest.update(array_bytes(dataset.sequence_lengths))
        digest.update(array_bytes(dataset.document_indices))
        found = _fingerprints[dataset] = digest.hexdigest()
    return found


_fingerprints: WeakKeyDictionary[HasLengths, str] = WeakKeyDictionary()


def content_fingerprint(dataset: Content, *, whole: bool = False) -> str:
    """XXH3-128, as 32 hex digits, of the type of the tokens and the bytes of .bin and pointers.

    Sampled, it reads `CHUNKS` chunks of `CHUNK_BYTES` of the .bin and as many of the pointers, from
    the first byte to the last at equal distances: 256 KiB of a .bin of any size, and all of one up
    to that size. Another corpus has another; a change of a share p of a larger .bin is missed with
    probability of about (1 - p)**32, and so a few changed bytes nearly always. Whole, it reads
    every byte. Either way an object is read by ranges and no copy of it is kept.

    Args:
        whole: read the whole .bin.

    Raises:
        StorageError: the .bin cannot be read, or was replaced since the dataset was opened.
    """
    known = _contents.setdefault(dataset, {})
    if whole not in known:
        known[whole] = _content_fingerprint(dataset, whole)
    return known[whole]


_contents: WeakKeyDictionary[Content, dict[bool, str]] = WeakKeyDictionary()


def contents_of(
    dataset: Content, *, whole: bool, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return the content fingerprints ``sampled`` and, if asked for, ``whole``, by name.

    Args:
        known: those that need not be found out.
    """
    found = dict(known or {})
    for name in ("sampled", "whole") if whole else ("sampled",):
        if name not in found:
            found[name] = content_fingerprint(dataset, whole=name == "whole")
    return found


def _content_fingerprint(dataset: Content, whole: bool) -> str:
    digest = xxhash.xxh3_128()
    facts, pointers = dataset.bin_info, dataset.sequence_pointers
    about = {"dtype": dataset.dtype.str, "nbytes": facts.nbytes, "sequences": pointers.size}
    digest.update(canonical_json({"content": 1, **about}).encode())
    for group in _chunks(8 * pointers.size, whole):
        for begin, end in group:
            digest.update(array_bytes(pointers[begin // 8 : end // 8]))
    for part in _bytes_of(facts, _chunks(facts.nbytes, whole)):
        digest.update(part)
    return digest.hexdigest()


_Chunks = list[tuple[int, int]]


def _chunks(size: int, whole: bool) -> list[_Chunks]:
    """Ranges [begin, end) of so many bytes to hash, from multiples of 8 on, read group by group."""
    if whole or size <= CHUNKS * CHUNK_BYTES:
        return [[(begin, min(begin + _PIECE, size))] for begin in range(0, size, _PIECE)]
    last = size - CHUNK_BYTES
    begins = [last * k // (CHUNKS - 1) // 8 * 8 for k in range(CHUNKS)]
    return [[*((begin, begin + CHUNK_BYTES) for begin in begins[:-1]), (begins[-1], size)]]


def _bytes_of(facts: FileInfo, groups: list[_Chunks]) -> Iterator[memoryview]:
    """Return the bytes of each group, good until the next is asked for."""
    most = max((sum(end - begin for begin, end in group) for group in groups), default=0)
    buffer = memoryview(bytearray(most))
    for group in groups:
        ranges, at = [], 0
        for begin, end in group:
            ranges.append((begin, buffer[at : at + end - begin]))
            at += end - begin
        read_ranges(facts, ranges)
        yield buffer[:at]


def corpus_stamp(path_prefix: str) -> list[int]:
    """The stamps of the .idx and the .bin: while they are the same the content is. Empty where one
    of them is missing."""
    stamps = each_of(stamp, [path_prefix + suffix for suffix in (".idx", ".bin")])
    return [*stamps[0], *stamps[1]] if all(stamps) else []


def array_bytes(array: IntArray) -> memoryview:
    """Return the bytes of an array, without a copy where it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def array_checksum(array: IntArray) -> str:
    """XXH3-128 of the elements' bytes, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(array_bytes(array))


def documents_setting(documents: range | IntArray) -> list[int] | str:
    """Chosen documents as a parameter: both ends of a range, else their checksum."""
    if isinstance(documents, range):
        return [documents.start, documents.stop]
    return array_checksum(documents)


def entry_key(parameters: Mapping[str, Any]) -> str:
    """Return the name of the cache entry that holds what ``parameters`` describe: 32 hex digits."""
    text = canonical_json({"cache_format": CACHE_FORMAT, **parameters})
    return xxhash.xxh3_128_hexdigest(text.encode())


def canonical_json(value: Mapping[str, Any]) -> str:
    """One text for one value, whatever the order its keys were given in."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
