"""What an object is, and any part of it, as long as it is that object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from megaindex.errors import StorageError
from megaindex.io.facts import Facts
from megaindex.io.objects.failures import as_storage_error, replaced
from megaindex.io.objects.library import client_of, library
from megaindex.io.objects.urls import folder_of, place_of
from megaindex.io.workers import map_interruptibly

PIECE = 4 << 20
"""Most bytes of a request: long enough for its latency not to count, short of its time limit."""
MERGE_GAP = 256 << 10
"""Bytes that are read in less time than another request takes."""
_THREADS = 8  # of a read of many pieces


def look_at(url: str) -> Facts | None:
    """Size and version of an object; None where there is none.

    Raises:
        StorageError: the store cannot be asked, denies it, or gives no strong ETag.
    """
    place = place_of(url)

    def ask(client: Any) -> Any:
        return library().head(client, place.key)

    try:
        with as_storage_error(url, "cannot look at"):
            (meta,) = map_interruptibly(ask, [client_of(place.store, as_set_now=True)], 1)
    except FileNotFoundError:
        return None
    return Facts(path=url, nbytes=meta["size"], version=_version(url, meta))


def list_folder(url: str) -> list[str]:
    """Return the URLs of the objects right below ``s3://bucket/folder``, or in a bucket, sorted.

    Raises:
        InvalidArgument: the URL is none of a known kind.
        StorageError: the store cannot be asked, or denies it.
    """
    place = folder_of(url)

    def ask(client: Any) -> Any:
        return library().list_with_delimiter(client, place.key or None)

    with as_storage_error(url, "cannot list"):
        (found,) = map_interruptibly(ask, [client_of(place.store, as_set_now=True)], 1)
    return sorted(f"{place.store}/{meta['path']}" for meta in found["objects"])


def read(facts: Facts, offset: int, into: memoryview) -> None:
    """Fill ``into`` with the bytes at ``offset`` of this very object, by one request.

    Raises:
        MissingFile: it is gone.
        StorageError: another object has its name, or the read failed in the end.
    """
    if not len(into):
        return
    url, stop = facts.path, offset + len(into)
    place = place_of(url)
    options: dict[str, Any] = {"range": (offset, stop), "if_match": facts.version}
    with as_storage_error(url, f"cannot read {len(into)} bytes at {offset}"):
        result = library().get(client_of(place.store), place.key, options=options)
        meta, got = result.meta, result.range
        if (meta["size"], _version(url, meta)) != (facts.nbytes, facts.version):
            raise replaced(url)  # by a store that does not know preconditions
        data = result.bytes()
    if len(data) != len(into) or got != (offset, stop):
        raise StorageError(
            f"{url}: {len(data)} bytes came where {len(into)} at {offset} were asked for; the "
            "store, or a proxy before it, is at fault: try again"
        )
    into[:] = memoryview(data)


def read_each(facts: Facts, ranges: Sequence[tuple[int, memoryview]]) -> Iterator[None]:
    """`read` each ``(offset, into)``; yields after each."""
    for offset, into in ranges:
        read(facts, offset, into)
        yield


def fill(facts: Facts, offset: int, into: memoryview) -> None:
    """`read` in pieces, several at a time.

    An interrupt ends it at once; requests that are under way may still write to ``into``.
    """
    pieces = [(offset + begin, into[begin : begin + PIECE]) for begin in range(0, len(into), PIECE)]
    map_interruptibly(lambda each: read(facts, *each), pieces, _THREADS)


def _version(url: str, meta: Any) -> str:
    """The tag that changes with any byte of an object. Times do not: they are whole seconds."""
    tag = meta["e_tag"]
    if not tag or not tag.startswith('"'):
        raise StorageError(
            f"{url}: the store gives no strong ETag, so that a replaced object would go unnoticed; "
            "copy the object to a disk, or to a store that does"
        )
    return str(tag)
