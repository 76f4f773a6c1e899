"""Fingerprints of corpora and requests, and files of records of pairs.

A record has the prefix and the stamp of a pair (sizes, times, inodes; versions in an object store)
and results computed from it, which are computed again if the file is missing.
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
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from megaindex._types import IntArray
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.documents import Documents, DocumentSubset
from megaindex.io.atomic import Damaged, parse_object, read_regular
from megaindex.io.paths import FileInfo
from megaindex.objects.files import each_of, read_ranges, stamp
from megaindex.validation import shown

logger = logging.getLogger("megaindex")

Record = dict[str, Any]

_RECORDS_NAME = re.compile(r"(blend|sources)-[0-9a-f]{32}-megaindex\.json")


def records_path(cache_dir: str | os.PathLike[str], kind: str, key: str) -> Path:
    """Return the path of a file of records; ``kind`` is "blend" or "sources"."""
    path = Path(cache_dir) / f"{kind}-{key}-megaindex.json"
    assert is_records_name(path.name), "sidecars have other names"
    return path


def is_records_name(name: str) -> bool:
    """Return True for the name of a file of records; those of sidecars have the same ending."""
    return _RECORDS_NAME.fullmatch(name) is not None


def stamps_of(prefixes: Sequence[str]) -> list[list[int]]:
    """Return the `corpus_stamp` of each pair; object stores are asked in parallel."""
    return each_of(corpus_stamp, prefixes)


def load_records(path: str | os.PathLike[str]) -> list[Record]:
    """Return the records in a file, without checking stamps.

    Raises:
        OSError: the file cannot be read.
        Damaged: its content is damaged; the text begins with "it".
    """
    text = read_regular(path)
    stored = parse_object(text)
    records = stored.get("sources")
    if not isinstance(records, list) or not all(isinstance(each, dict) for each in records):
        raise Damaged("it does not contain a list of sources")
    if not all(isinstance(each.get("prefix"), str) for each in records):
        raise Damaged("it has a source without a prefix")
    try:
        is_whole = _is_as_written(text, stored.get("checksum")) or (
            stored.get("checksum") == json_digest({"sources": records})
        )
    except (ValueError, RecursionError):  # NaN or deeply nested lists
        is_whole = False
    if not is_whole:
        raise Damaged("its checksum is not that of its sources")
    return records


def _is_as_written(text: bytes, checksum: object) -> bool:
    """Return True if `write_records` wrote the text, without encoding its records again."""
    head = f'{{"checksum":"{checksum}",'.encode()
    rest = text.removeprefix(head)
    return rest is not text and xxhash.xxh3_128_hexdigest(b"{" + rest) == checksum


def read_records(
    path: Path, prefixes: Sequence[str], is_sound: Callable[[Record], bool]
) -> list[Record] | None:
    """Return the records of these pairs, or None if the file is missing or a pair changed.

    ``is_sound`` returns True if the results in a record have the right types, or raises KeyError
    or TypeError.
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
        logger.warning("%s: is damaged; all sources are opened again", path)
        return None
    for record, prefix, now in zip(records, prefixes, stamps_of(prefixes), strict=True):
        if record.get("stamp") != now:
            logger.info("%s: %s changed since it was written", path, prefix)
            return None
    return records


def write_records(path: Path, records: Sequence[Record]) -> None:
    """Write the records, ignoring errors: without the file the next start is only slower."""
    text = canonical_json({"sources": records, "checksum": json_digest({"sources": records})})
    aside = path.with_name(f"{path.name}.tmp.{secrets.token_hex(8)}")
    with contextlib.suppress(OSError):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            aside.write_text(text)
            os.replace(aside, path)
        finally:
            aside.unlink(missing_ok=True)


CACHE_FORMAT = 1  # to be incremented when the meaning of the arrays changes

CHUNKS = 32
"""Chunks of a .bin that a sampled content fingerprint reads."""
CHUNK_BYTES = 8 << 10
_PIECE = 16 << 20  # bytes of a .bin read at a time


def corpus_fingerprint(dataset: IndexedDataset) -> str:
    """Return XXH3-128 of file sizes, sequence lengths and document bounds, as 32 hex digits.

    Tokens are not read: a corpus rewritten with equal lengths keeps its indices. See
    `content_fingerprint` for a hash of the tokens. Computed once per dataset.
    """
    _check_dataset(dataset)
    found = _fingerprints.get(dataset)
    if found is None:
        digest = xxhash.xxh3_128()
        sizes = (dataset.nbytes, dataset.index_nbytes, dataset.sequence_lengths.size)
        digest.update(np.array(sizes, "<i8").tobytes())
        digest.update(array_bytes(dataset.sequence_lengths))
        digest.update(array_bytes(dataset.document_indices))
        found = _fingerprints[dataset] = digest.hexdigest()
    return found


def _check_dataset(dataset: object) -> None:
    if isinstance(dataset, (str, os.PathLike)):
        raise InvalidArgument(
            f"dataset must be an IndexedDataset, got the path {shown(str(dataset))}; open it first"
        )


def mark_fingerprint(dataset: IndexedDataset, fingerprint: str) -> None:
    """Set the `corpus_fingerprint` of a dataset, which records of unchanged files hold."""
    _fingerprints[dataset] = fingerprint


_fingerprints: WeakKeyDictionary[IndexedDataset, str] = WeakKeyDictionary()


def content_fingerprint(dataset: IndexedDataset, *, whole: bool = False) -> str:
    """Return XXH3-128 of token dtype, .bin and sequence pointers, as 32 hex digits.

    Reads `CHUNKS` chunks of `CHUNK_BYTES` (256 KiB in all) of the .bin and of the pointers at equal
    distances, or all bytes if ``whole``. A sampled fingerprint misses a change of a fraction p of a
    larger .bin with a probability of about (1 - p)**32, and a few changed bytes nearly always.
    Objects are read by ranges without a copy.

    Raises:
        StorageError: the .bin cannot be read, or was replaced since the dataset was opened.
    """
    _check_dataset(dataset)
    known = _contents.setdefault(dataset, {})
    if whole not in known:
        known[whole] = _content_fingerprint(dataset, whole)
    return known[whole]


_contents: WeakKeyDictionary[IndexedDataset, dict[bool, str]] = WeakKeyDictionary()


def contents_of(
    dataset: IndexedDataset, *, whole: bool, known: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Return content fingerprints ``sampled`` and, if requested, ``whole``, by name.

    Those in ``known`` are not computed again.
    """
    found = dict(known or {})
    for name in ("sampled", "whole") if whole else ("sampled",):
        if name not in found:
            found[name] = content_fingerprint(dataset, whole=name == "whole")
    return found


def _content_fingerprint(dataset: IndexedDataset, whole: bool) -> str:
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
    """Return groups of ranges [begin, end) to hash of ``size`` bytes, from multiples of 8 on."""
    if whole or size <= CHUNKS * CHUNK_BYTES:
        return [[(begin, min(begin + _PIECE, size))] for begin in range(0, size, _PIECE)]
    last = size - CHUNK_BYTES
    # multiples of 8, so that pointers are read whole
    begins = [last * k // (CHUNKS - 1) // 8 * 8 for k in range(CHUNKS)]
    # one group: all ranges are requested at once, which matters for objects
    return [[*((begin, begin + CHUNK_BYTES) for begin in begins[:-1]), (begins[-1], size)]]


def _bytes_of(facts: FileInfo, groups: list[_Chunks]) -> Iterator[memoryview]:
    """Yield the bytes of each group, valid until the next."""
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
    """Return numbers that change with the .idx or the .bin; [] if one of them is missing."""
    stamps = each_of(stamp, [path_prefix + suffix for suffix in (".idx", ".bin")])
    return [*stamps[0], *stamps[1]] if all(stamps) else []


def array_bytes(array: IntArray) -> memoryview:
    """Return the bytes of an array, without a copy if it is contiguous."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def array_checksum(array: IntArray) -> str:
    """Return XXH3-128 of the bytes of the elements, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(array_bytes(array))


def documents_setting(documents: Documents) -> list[Any] | str:
    """Return the cache key parameter of documents: bounds of a range, or a checksum of ids."""
    if isinstance(documents, range):
        return [documents.start, documents.stop]
    if isinstance(documents, DocumentSubset):
        return [*documents_setting(documents.within), documents.words.to_json()]
    return array_checksum(documents)


def entry_key(parameters: Mapping[str, Any]) -> str:
    """Return the name of the cache entry for ``parameters``, 32 hex digits."""
    return json_digest({"cache_format": CACHE_FORMAT, **parameters})


def json_digest(value: Mapping[str, Any]) -> str:
    """Return XXH3-128 of `canonical_json`, as 32 hex digits."""
    return xxhash.xxh3_128_hexdigest(canonical_json(value).encode())


def canonical_json(value: Mapping[str, Any]) -> str:
    """Return JSON that does not depend on the order of keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
