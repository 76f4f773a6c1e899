"""What identifies a corpus and a request: content, never path, time or position."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import xxhash

from megaindex.io.locations import each_of, stamp
from megaindex.kernels.types import I32, I64, IntArray

CACHE_FORMAT = 1  # raise when the arrays of an entry would mean something else


class Corpus(Protocol):
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


def corpus_fingerprint(dataset: Corpus) -> str:
    """XXH3-128, as 32 hex digits, of both file sizes, the lengths and the document bounds.

    The tokens themselves are not read: a corpus rewritten with equal lengths keeps its indices,
    and its indices keep serving whatever tokens it holds.
    """
    digest = xxhash.xxh3_128()
    sizes = (dataset.nbytes, dataset.index_nbytes, dataset.sequence_lengths.size)
    digest.update(np.array(sizes, "<i8").tobytes())
    digest.update(array_bytes(dataset.sequence_lengths))
    digest.update(array_bytes(dataset.document_indices))
    return digest.hexdigest()


def corpus_stamp(path_prefix: str) -> list[int]:
    """The stamps of the .idx and the .bin: while they are the same the content is. Empty where one
    of them is missing."""
    stamps = each_of(stamp, [path_prefix + suffix for suffix in (".idx", ".bin")])
    return [*stamps[0], *stamps[1]] if all(stamps) else []


def array_bytes(array: IntArray) -> memoryview:
    """The bytes of an array, without a copy where it is contiguous."""
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
    """Name of the cache entry that holds what ``parameters`` describe: 32 hex digits."""
    text = canonical_json({"cache_format": CACHE_FORMAT, **parameters})
    return xxhash.xxh3_128_hexdigest(text.encode())


def canonical_json(value: Mapping[str, Any]) -> str:
    """One text for one value, whatever the order its keys were given in."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)
