"""Targets that read files: the .bin/.idx pair, the legacy index, cache entry, sidecar."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import shutil
import struct
import tempfile
from pathlib import Path

import numpy as np
import xxhash
from choices import Choices

from megaindex.cache import cache
from megaindex.cache import sidecar as sidecar_file
from megaindex.cache.array_files import ArrayFiles, Identity, states_of
from megaindex.cache.array_group import ArrayWriter
from megaindex.cache.entry import boot_id
from megaindex.cache.fingerprint import CACHE_FORMAT, canonical_json, entry_key
from megaindex.cache.npy import npy_header
from megaindex.cache.sidecar import find_arrays, map_arrays
from megaindex.corpus.inspect import inspect
from megaindex.errors import FormatError, MegaIndexError
from megaindex.format import IndexedDataset
from megaindex.format.header import DIALECTS
from megaindex.format.legacy import open_legacy
from megaindex.verify.verify import verify

logging.disable(logging.CRITICAL)
_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
_FOLDER = Path(tempfile.mkdtemp(prefix="megaindex-fuzz-", dir=_MEMORY))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
_PREFIX = str(_FOLDER / "pair")


def pair(data: bytes) -> None:
    """Byte 0: dialect; byte 1: tokens in the .bin; the rest is the .idx."""
    choices = Choices(data)
    dialect = choices.one_of(list(DIALECTS))
    Path(_PREFIX + ".bin").write_bytes(bytes(range(choices.byte())))
    Path(_PREFIX + ".idx").write_bytes(choices.rest())
    sound = _read(dialect)
    findings = verify(_PREFIX, full=True, dialect=dialect, vocab_size=90, eod=7).findings
    errors = [f for f in findings if f.severity == "error" and f.rule not in _OF_TOKENS]
    # what verify calls sound is read, and what is not read is not called sound
    assert sound == (not errors), errors
    inspect(_PREFIX)


_OF_TOKENS = ("token-range", "document-end", "not-finite")


def _read(dialect: str) -> bool:
    """Whether every entry is good; no damage leads to anything but a typed error."""
    try:
        dataset = IndexedDataset(_PREFIX, dialect=dialect)
    except MegaIndexError:
        return False
    for number in (0, len(dataset) // 2, -1):
        with contextlib.suppress(MegaIndexError):
            dataset.get(number)
            dataset.get(number, 1, 1)
    try:
        dataset.validate()
    except FormatError:
        return False
    assert sum(len(sequence) for sequence in dataset) == dataset.num_tokens
    return True


def legacy(data: bytes) -> None:
    """The old index format. Byte 0: dialect; byte 1: bytes in the .bin; the rest is the .idx."""
    choices = Choices(data)
    dialect = choices.one_of(list(DIALECTS))
    Path(_PREFIX + ".bin").write_bytes(bytes(range(choices.byte())))
    Path(_PREFIX + ".idx").write_bytes(choices.rest())
    with contextlib.suppress(MegaIndexError):
        pair = open_legacy(_PREFIX, dialect=dialect)
        ends = pair.byte_offsets + pair.sizes * pair.dtype.itemsize
        assert not len(ends) or int(ends.max()) <= pair.tokens.nbytes


def entry(data: bytes) -> None:
    """A cache entry. Byte 0: whether the checksum is mended, so that what it guards is reached."""
    choices = Choices(data)
    mended, same_boot = choices.below(2), choices.below(2)
    length = choices.byte() + 256 * choices.byte()
    rest = choices.rest()
    text, arrays = rest[:length], rest[length:]
    folder = _FOLDER / _KEY
    folder.mkdir(exist_ok=True)
    (folder / "manifest.json").write_bytes(_mended(text, same_boot) if mended else text)
    (folder / "document_index.npy").write_bytes(arrays)
    try:
        found = cache._load(folder)
    except MegaIndexError:
        return
    finally:
        verify(str(folder), full=True)
        inspect(str(folder))
    for array in (found or {}).values():
        assert array.flags.aligned
        assert not array.dtype.hasobject
        array.sum()


def _mended(text: bytes, same_boot: int) -> bytes:
    try:
        body = json.loads(text)
        body.pop("checksum", None)
        if same_boot:
            body["boot_id"] = boot_id()
        return canonical_json(
            {**body, "checksum": xxhash.xxh3_128_hexdigest(canonical_json(body).encode())}
        ).encode()
    except (ValueError, TypeError, AttributeError, RecursionError):
        return text


def sidecar(data: bytes) -> None:
    """Arrays under a framework's names, and what is recorded of them. Byte 0: whether it is of this
    boot; byte 1: whether it was written for the files that lie there; the rest is the sidecar."""
    choices = Choices(data)
    same_boot, same_files = choices.below(2), choices.below(2)
    path = Path(_SET.sidecar)
    path.unlink(missing_ok=True)
    path.write_bytes(_fitted(choices.rest(), same_boot, same_files))
    sidecar_file._read_last = None  # files that follow each other so fast look alike
    for full in (False, True):
        verify(path, full=full)
    inspect(path)
    with contextlib.suppress(MegaIndexError):
        found = find_arrays(_SET, _IDENTITY, lambda arrays: None)
        for array in map_arrays(_SET, found).values() if found else ():
            assert array.flags.aligned
            assert not array.dtype.hasobject
            array.sum()


def _fitted(text: bytes, same_boot: int, same_files: int) -> bytes:
    try:
        body = json.loads(text)
        if same_boot:
            body["boot"] = boot_id()
        if same_files:
            body["sets"]["set"]["files"] = states_of(_SET.arrays)
        return json.dumps({"durable": body.pop("durable"), **body}).encode()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return text


_SET = ArrayFiles(
    arrays={name: f"{_FOLDER}/set-{name}.npy" for name in ("document_index", "sample_index")},
    sidecar=f"{_FOLDER}/set-megaindex.json",
    marker=f"{_FOLDER}/set-description.txt",
)
_IDENTITY = Identity(settings=lambda: {"documents": [0, 3]}, corpus=lambda: "corpus")
sidecar_file.later = lambda sync: sync()  # what a thread would do some time


def sidecar_seeds() -> list[bytes]:
    """Recorded as built, and as found."""
    values = {"document_index": np.arange(3, dtype=np.int32), "sample_index": np.zeros((4, 2))}
    with ArrayWriter(_SET) as writer:
        for name, array in values.items():
            writer.allocate(name, array.shape, "int32")[...] = array
            writer.seal(name)
        writer.publish(_IDENTITY)
    built = Path(_SET.sidecar).read_bytes()
    texts = [built, built.replace(b'"built"', b'"found"')]
    return [bytes([b, f]) + text for text in texts for b in (0, 1) for f in (0, 1)]


_PARAMETERS = {"order": "megatron", "seed": 1}
_KEY = entry_key(_PARAMETERS)


def pair_seeds() -> list[bytes]:
    seeds = []
    for code, lengths, modes in ((4, [3, 0, 2], 0), (8, [5, 1], 2), (6, [1], 0), (9, [2, 2], 0)):
        sizes = np.array(lengths, np.int32)
        item = {4: 4, 8: 2, 6: 8, 9: 4}[code]
        begins = (np.cumsum(sizes, dtype=np.int64) - sizes) * item
        bounds = np.arange(len(lengths) + 1, dtype=np.int64)
        header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, code, len(lengths), len(bounds))
        size = int(sizes.sum()) * item
        idx = header + sizes.tobytes() + begins.tobytes() + bounds.tobytes() + bytes(modes)
        seeds += [bytes([dialect, size]) + idx for dialect in range(3)]
    return [*seeds, b"\0\0TNTIDX\0\0" + bytes(40)]


def legacy_seeds() -> list[bytes]:
    seeds = []
    for code, item, sizes in ((4, 4, [3, 0, 2]), (8, 2, [5]), (6, 4, []), (1, 1, [1, 1])):
        count, ends = len(sizes), [0, *np.cumsum(sizes, dtype=np.int64).tolist()]
        header = struct.pack("<8sQQQQQQ", b"TNTIDX\0\0", 1, code, item, count, count, count + 1)
        numbers = [*range(count + 1), *ends, *sizes, *range(count + 1)]
        idx = header + np.array(numbers, np.int64).tobytes()
        seeds += [bytes([dialect, ends[-1] * item]) + idx for dialect in range(2)]
    return seeds


def entry_seeds() -> list[bytes]:
    seeds = []
    for values in (np.arange(6, dtype=np.int32), np.zeros((3, 2), np.int64)):
        header = npy_header(values.shape, values.dtype.name)
        record = {
            "file": "document_index.npy",
            "dtype": values.dtype.name,
            "shape": list(values.shape),
            "offset": len(header),
            "checksum": xxhash.xxh3_128_hexdigest(values.tobytes()),
        }
        body = {
            "cache_format": CACHE_FORMAT,
            "key": _KEY,
            "parameters": _PARAMETERS,
            "arrays": {"document_index": record},
            "boot_id": "another",
        }
        text = _mended(json.dumps(body).encode(), same_boot=0)
        size = bytes([len(text) % 256, len(text) // 256])
        seeds += [
            bytes([m, b]) + size + text + header + values.tobytes() for m in (0, 1) for b in (0, 1)
        ]
    return seeds
