"""What is known of pairs, kept in one file and good as long as none of them changes.

A record has the prefix and the stamp of a pair (sizes, times, inodes; versions in an object store)
beside what was learned of it. Nothing is lost with the file: what it told is found out again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import xxhash

from megaindex.io.json_files import read_object
from megaindex.io.objects.files import each_of
from megaindex.store.fingerprint import canonical_json, corpus_stamp

logger = logging.getLogger("megaindex")

Record = dict[str, Any]


def stamps_of(prefixes: Sequence[str]) -> list[list[int]]:
    """The stamps of pairs, asked for side by side."""
    return each_of(corpus_stamp, prefixes)


def read_records(
    path: Path, prefixes: Sequence[str], is_sound: Callable[[Record], bool]
) -> list[Record] | None:
    """The records of these pairs; None where there are none, or where one of the pairs changed.

    ``is_sound`` says whether what was learned of a pair is of the types that are written; it may
    raise KeyError and TypeError instead.
    """
    try:
        stored = read_object(path)
        records: list[Record] = stored["sources"]
        whole = (
            stored["checksum"] == _checksum(records)
            and [record["prefix"] for record in records] == list(prefixes)
            and all(map(is_sound, records))
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        whole = False
    if not whole:
        logger.warning("%s: is damaged; every source is opened anew", path)
        return None
    for record, prefix, stamp in zip(records, prefixes, stamps_of(prefixes), strict=True):
        if record.get("stamp") != stamp:
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
