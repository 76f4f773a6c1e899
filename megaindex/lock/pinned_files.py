"""The files that a lock pins: pairs, and files of documents and mix changes, by size and hash."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from typing import Any

import xxhash

from megaindex.errors import FormatError, MissingFile
from megaindex.format import IndexedDataset
from megaindex.format.header import Fault
from megaindex.format.pair import provenance_path
from megaindex.io.paths import FileInfo, absolute, sha256_of
from megaindex.lock.lock_file import Lock, LockedFile, LockedSource
from megaindex.lock.shape import HASH_DIGITS, LEAST_CHUNK
from megaindex.objects.files import read_ranges, stat_path
from megaindex.progress import Bar, silent
from megaindex.validation import count_of

Folder = str | os.PathLike[str]

RESTORE = "restore the file, or lock the run again if the change is intended"
SEARCH = "restore it, or give the folder that it was moved to with --search"
_PIECE = 16 << 20  # bytes read at a time
_MOST_CHUNKS = 1024
_HASHES: dict[str, Callable[[], Any]] = {"xxh3-64": xxhash.xxh3_64, "sha256": hashlib.sha256}
_NAMES = {"xxh3-64": "XXH3-64", "sha256": "SHA-256"}  # in messages


def file_facts(path: str) -> dict[str, Any]:
    """Return size and SHA-256 of a file that the run reads besides its pairs.

    Raises:
        MissingFile, StorageError: it cannot be read.
    """
    if not os.path.lexists(path):
        raise MissingFile(
            f"{path}: the file of skipped documents or mix changes is not there; restore it"
        )
    size, digest = sha256_of(path)
    return {"bytes": size, "sha256": digest}


def file_hash(path: str, algorithm: str = "sha256") -> str:
    """Return the hash of all bytes of a file or object, in hex digits.

    Raises:
        MissingFile, StorageError: it cannot be read.
    """
    (digest,) = _hashes(_file_info(path), None, algorithm)
    return digest


def provenance_hash(prefix: str) -> str | None:
    """Return SHA-256 of the provenance of a pair, 64 hex digits; None without one."""
    path = provenance_path(prefix)
    return None if stat_path(path) is None else file_hash(path)


def _file_info(path: str) -> FileInfo:
    info = stat_path(path)
    if info is None:
        raise MissingFile(f"{path}: does not exist; restore it")
    return info


def _hashes(
    info: FileInfo,
    chunk: int | None,
    algorithm: str,
    read: Callable[[int], None] | None = None,
) -> Iterator[str]:
    """Yield the hash of each chunk of a file; of all of it, also of no bytes, if chunk is None."""
    buffer = memoryview(bytearray(min(_PIECE, max(1, info.nbytes))))
    for first in (0,) if chunk is None else range(0, info.nbytes, chunk):
        digest = _HASHES[algorithm]()
        end = info.nbytes if chunk is None else min(first + chunk, info.nbytes)
        for begin in range(first, end, _PIECE):
            piece = buffer[: min(_PIECE, end - begin)]
            read_ranges(info, [(begin, piece)])
            digest.update(piece)
            if read is not None:
                read(len(piece))
        yield digest.hexdigest()


def all_token_hashes(paths: Sequence[str], algorithm: str, bar: Bar) -> dict[str, Any]:
    """Return ``tokens`` of a lock: the size of a chunk, and the hashes of those of each .bin."""
    infos = [_file_info(f"{path}.bin") for path in paths]
    total, chunk = sum(info.nbytes for info in infos), None
    if algorithm != "sha256":  # which others compute of whole files
        chunk = LEAST_CHUNK
        while total > _MOST_CHUNKS * chunk:
            chunk *= 2
    return {"chunk_bytes": chunk, "hashes": token_hashes(infos, chunk, algorithm, bar)}


def token_hashes(
    infos: Sequence[FileInfo], chunk: int | None, algorithm: str, bar: Bar = silent
) -> list[str]:
    """Return the hashes of the chunks of each .bin as one text; of all of it if chunk is None."""
    read = bar(sum(info.nbytes for info in infos))
    return ["".join(_hashes(info, chunk, algorithm, read)) for info in infos]


def differing_chunks(first: str, second: str, algorithm: str) -> list[tuple[int, str, str]]:
    """Return (number, hash, other hash) of chunks that differ; "" for one that is not there."""
    digits, texts = HASH_DIGITS[algorithm], (first, second)
    hashes = ([text[k : k + digits] for k in range(0, len(text), digits)] for text in texts)
    pairs = enumerate(zip_longest(*hashes, fillvalue=""))
    return [(number, ours, theirs) for number, (ours, theirs) in pairs if ours != theirs]


def located(lock: Lock, search: Folder | None = None) -> list[str | None]:
    """Return the prefix of each pair of a lock: its path, or where it was moved, sought by content
    in the folder ``search``; None: missing."""
    if search is not None and not os.path.isdir(search):
        raise MissingFile(f"{os.fspath(search)}: is not a folder; give one that holds the pairs")
    found: list[str | None] = [
        source.path if IndexedDataset.exists(source.path) else None for source in lock.sources
    ]
    if search is None or None not in found:
        return found
    candidates = {prefix: os.path.getsize(f"{prefix}.bin") for prefix in _pairs_below(search)}
    for number, source in enumerate(lock.sources):
        if found[number] is None:
            same_size = [p for p, size in candidates.items() if size == source.bin_bytes]
            # of several with the same content, that of the same name
            same_size.sort(key=lambda p: os.path.basename(p) != os.path.basename(source.path))
            same = (p for p in same_size if file_hash(f"{p}.idx", source.hash) == source.idx)
            found[number] = next(same, None)
    return found


def located_files(lock: Lock, search: Folder | None = None) -> list[str]:
    """Return the path of each other file of a lock: its path, or where it was moved."""
    found = [file.path for file in lock.files]
    if search is None or all(map(os.path.exists, found)):
        return found
    candidates = {
        path: os.path.getsize(path)
        for place, _, names in os.walk(search)
        for path in (os.path.join(place, name) for name in names)
        if os.path.isfile(path)
    }
    for number, file in enumerate(lock.files):
        if not os.path.exists(file.path):
            same_size = sorted(path for path, size in candidates.items() if size == file.bytes)
            same = (path for path in same_size if file_fault(file, path) is None)
            found[number] = absolute(next(same, file.path))
    return found


def file_fault(file: LockedFile, path: str) -> tuple[str, Fault] | None:
    """Return another file that differs from the lock, and how, or None."""
    if not os.path.isfile(path):
        found, expected = "no file", "a file"
        return path, pin_fault("missing", "the file", found, expected, SEARCH)
    facts = file_facts(path)
    for rule, where in (("bytes", "its size in bytes"), ("sha256", "SHA-256 of its content")):
        if facts[rule] != getattr(file, rule):
            return path, pin_fault(rule, where, str(facts[rule]), str(getattr(file, rule)))
    return None


def _pairs_below(folder: Folder) -> Iterator[str]:
    for place, _, names in os.walk(folder):
        for name in sorted(names):
            prefix = os.path.join(place, name.removesuffix(".idx"))
            if name.endswith(".idx") and os.path.isfile(f"{prefix}.bin"):
                yield absolute(prefix)


def sound_paths(lock: Lock, search: Folder | None = None) -> list[str]:
    """Return the prefix of each pair of a lock, see `located`.

    Raises:
        MissingFile, StorageError: a pair does not exist, or cannot be read.
        FormatError: it is not what it was.
    """
    found = located(lock, search)
    missing = [s.path for s, p in zip(lock.sources, found, strict=True) if p is None]
    if missing:
        more = len(missing) - 1
        raise MissingFile(
            f"{missing[0]}: {lock.path} names this pair, and its .idx or .bin does not exist"
            + (f", nor those of {count_of(more, 'other pair')}" if more else "")
            + "; restore it, or give the folder that it was moved to as search"
        )
    paths = [path for path in found if path is not None]
    for source, path in zip(lock.sources, paths, strict=True):
        refuse(lock, source_fault(source, path))
    return paths


def source_fault(source: LockedSource, path: str) -> tuple[str, Fault] | None:
    """Return the file of a pair that differs from the lock, with its difference, or None."""
    info, expected = stat_path(f"{path}.bin"), str(source.bin_bytes)
    size = "no file" if info is None else str(info.nbytes)
    if size != expected:
        return f"{path}.bin", pin_fault("size", "its size in bytes", size, expected)
    found = file_hash(f"{path}.idx", source.hash)
    if found != source.idx:
        where = f"{_NAMES[source.hash]} of all bytes"
        return f"{path}.idx", pin_fault("idx", where, found, source.idx)
    return None


def provenance_fault(
    source: LockedSource, path: str, found: str | None
) -> tuple[str, Fault] | None:
    """Return the provenance of a pair, if its hash is another than that of a lock, or None.

    It may be missing: the samples do not depend on it, and it names input files.
    """
    if found is None or source.provenance in (None, found):
        return None
    fault = pin_fault("provenance", "SHA-256 of all bytes", found, str(source.provenance))
    return provenance_path(path), fault


def refuse(lock: Lock, found: tuple[str, Fault] | None, note: str = "") -> None:
    """Raise the error of a file that differs from a lock, if one was found.

    Raises:
        MissingFile: the file is not there.
        FormatError: it is another.
    """
    if found is None:
        return
    file, fault = found
    kind = MissingFile if fault.rule == "missing" else FormatError
    raise kind(
        f"{file}: {fault.where}: must be {fault.expected}, as in {lock.path}{note}, got "
        f"{fault.found}; {fault.remedy}"
    )


def sound_files(lock: Lock, search: Folder | None = None) -> list[str]:
    """Return the path of each other file of a lock, see `located_files`.

    Raises:
        MissingFile, StorageError: a file cannot be read.
        FormatError: it is not what it was.
    """
    paths = located_files(lock, search)
    for file, path in zip(lock.files, paths, strict=True):
        refuse(lock, file_fault(file, path))
    return paths


def pin_fault(rule: str, where: str, found: str, expected: str, remedy: str = RESTORE) -> Fault:
    return Fault(rule=rule, where=where, found=found, expected=expected, remedy=remedy)
