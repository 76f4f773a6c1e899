"""Calls of the functions of the native core that read: where samples lie, and their tokens."""

from __future__ import annotations

import contextlib
import os
import struct
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from arguments import array, rising, spoiled
from choices import Choices

from megaindex.errors import MegaIndexError
from megaindex.kernels import _native

Arguments = list[Any]
_FOLDER = tempfile.TemporaryDirectory()  # removed at exit


def _index(c: Choices) -> Arguments:
    """Megatron's three arrays and the lengths, mostly in agreement."""
    lengths = array(c, "int32", 1 + c.below(8))
    documents = array(c, "int32", 1 + c.below(12), len(lengths) - 1)
    extra, size = c.below(2), 1 + c.below(6)
    real = lengths.astype(np.int64).clip(0, 99)[documents.clip(0, len(lengths) - 1)]
    samples = max(0, int(real.sum()) - extra) // size
    rows = np.zeros((samples + 1, 2), c.one_of(("int32", "int64")))
    with contextlib.suppress(MegaIndexError):
        total = int(real.sum())
        _native.cut_samples(lengths, documents, size, extra, samples, total, rows)
    if c.seldom():
        rows[c.below(len(rows)), c.below(2)] = c.integer(99) % 2**31
    shuffle = array(c, c.one_of(("uint32", "int64")), samples, max(0, samples - 1))
    return [shuffle, rows, documents, lengths, extra]


def _array_spans(c: Choices) -> Arguments:
    index = _index(c)
    return [*index, array(c, "int64", c.below(8), max(0, len(index[0]) - 1))]


def _span_table(c: Choices) -> Arguments:
    return [[_tuple(c, _index(c)) for _ in range(c.below(4))]]


def _blended_spans(c: Choices) -> Arguments:
    indices = [tuple(_index(c)) for _ in range(c.below(4))]
    count = c.below(8)
    which = array(c, "int64", count, max(0, len(indices) - 1))
    most = max((len(index[0]) for index in indices), default=1)
    return [_native.span_table(indices), which, array(c, "int64", count, max(0, most - 1))]


def _tokens_within(c: Choices) -> Arguments:
    count = c.below(10)
    return [
        array(c, "int64", count, 99),
        array(c, "int32", count),
        c.one_of((1, 2, 4, 8)),
        c.integer(999),
    ]


def _window_spans(c: Choices) -> Arguments:
    item = c.one_of((1, 2, 4, 8))
    lengths = array(c, "int32", 1 + c.below(10))
    ends = np.cumsum(lengths.astype(np.int64) * item)
    pointers = ends - lengths.astype(np.int64) * item
    if c.seldom():
        pointers[c.below(len(pointers))] = np.int64(c.integer(99) % 2**63)
    begins = array(c, "int64", c.below(6), int(abs(ends[-1]) // item % 200))
    first = c.below(2)
    return [pointers, lengths, item, first, len(lengths), begins, begins + 1 + c.below(9)]


_TOKENS = (
    *("uint8", "int8", "uint16", "int16", "uint32", "int32", "uint64", "int64"),
    *("float32", "float64"),
)


def _source(c: Choices) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Tokens, pointers in bytes and lengths; at times unaligned, as they are in an .idx."""
    tokens = array(c, c.one_of(_TOKENS), c.below(40), 99)
    lengths = array(c, "int32", c.below(6), 12)
    begins = array(c, "int64", len(lengths), 30) * tokens.itemsize
    if c.seldom():
        begins = begins + 1
    return tokens, _unaligned(c, begins), _unaligned(c, lengths)


def _unaligned(c: Choices, values: np.ndarray) -> np.ndarray:
    if c.below(2):
        return values
    room = np.zeros(values.nbytes + 1, np.uint8)[1:].view(values.dtype)
    room[...] = values
    return room


def _tuple(c: Choices, items: Arguments) -> Any:
    items = [spoiled(c, item) if c.seldom() else item for item in items]
    return tuple(items[: c.below(len(items))] if c.seldom() else items)


def _token_table(c: Choices) -> Arguments:
    return [[_tuple(c, list(_source(c))) for _ in range(c.below(4))]]


def _row_table(c: Choices) -> Arguments:
    count = 1 + c.below(3)
    indices = [_tuple(c, _index(c)) for _ in range(count)]
    sources = [_tuple(c, list(_source(c))) for _ in range(count)]
    draws = [None, None]
    if c.below(4):
        draws = [
            array(c, c.one_of(("uint8", "int16")), c.below(9), count - 1),
            array(c, "int64", c.below(9), 5),
        ]
    return [indices, sources, *draws, c.one_of(([], [-1] * count, [-1]))]


def _read_rows(c: Choices) -> Arguments:
    """A table of arrays that fit each other in their sizes, over any values."""
    count, samples = 1 + c.below(3), c.below(9)
    indices, sources = [], []
    for _ in range(count):
        indices.append(tuple(_index(c)))
        lengths = _unaligned(c, indices[-1][3])
        tokens = array(c, c.one_of(("uint8", "uint16", "int32", "int64")), c.below(60), 99)
        begins = array(c, "int64", len(lengths), 30) * tokens.itemsize
        sources.append((tokens, _unaligned(c, begins), lengths))
    table = _native.row_table(
        indices, sources, array(c, c.one_of(("uint8", "int16")), samples, count - 1),
        array(c, "int64", samples, 5), [],
    )  # fmt: skip
    ids: list[Any] = [c.below(max(1, samples)) for _ in range(c.below(6))]
    if c.seldom():
        ids.append(c.one_of((c.integer(99), -1, None, "x", 2**70, 1.5)))
    return [table, ids, c.below(40), c.integer(99)]


def _gather(c: Choices) -> Arguments:
    sources = [_source(c) for _ in range(1 + c.below(3))]
    splits = rising(c, 1 + c.below(5), 3)
    runs, rows, width = int(splits[-1] % 64), len(splits) - 1, c.below(12)
    out = _cells(c, c.one_of(("int64", "int32", "float32")), rows, width)
    labels = c.one_of((None, _cells(c, str(out.dtype), rows, width), out))
    return [
        _native.token_table(sources),
        array(c, "int32", runs, len(sources) - 1),
        array(c, "int64", runs, 5),
        array(c, "int64", runs, 6),
        array(c, "int64", runs, 9),
        splits,
        *(out, labels, c.integer(99), c.integer(4)),
    ]


def _cells(c: Choices, dtype: str, rows: int, width: int) -> np.ndarray:
    """Rows that lie side by side, or apart."""
    return np.zeros((rows, width + c.one_of((0, 3))), dtype)[:, :width]


def _mask_loss(c: Choices) -> Arguments:
    rows, width, dtype = c.below(4), c.below(12), c.one_of(("int64", "int32"))
    tokens, labels = (_filled(c, _cells(c, dtype, rows, width)) for _ in range(2))
    eod = c.one_of((None, 3, 2**31))
    return [tokens, labels, c.integer(9), eod, _cells(c, "float32", rows, width)]


def _filled(c: Choices, cells: np.ndarray) -> np.ndarray:
    cells[...] = array(c, str(cells.dtype), cells.size).reshape(cells.shape)
    return cells


def _fields(c: Choices, rows: int, width: int) -> Arguments:
    return [
        c.one_of((None, _cells(c, "int64", rows, width))),
        c.one_of((None, _cells(c, "int32", rows, width + 1))),
        c.one_of((None, np.zeros(rows, np.int32))),
    ]


def _by_token(c: Choices) -> Arguments:
    tokens = _filled(c, _cells(c, c.one_of(("int64", "int32")), c.below(4), c.below(12)))
    return [tokens, c.integer(9), *_fields(c, *tokens.shape)]


def _by_run(c: Choices) -> Arguments:
    splits = rising(c, 1 + c.below(5), 3)
    lengths, width = array(c, "int64", int(splits[-1] % 64)), c.integer(12)
    return [lengths, splits, width, *_fields(c, len(splits) - 1, min(max(width, 0), 999))]


def _write(c: Choices, name: str, content: bytes) -> str:
    """Write a file, now and then with another byte or cut short, and return its path."""
    changed = bytearray(content)
    if changed and c.seldom():
        changed[c.integer(len(changed)) % len(changed)] = c.byte()
    if c.seldom():
        del changed[c.below(len(changed) + 1) :]
    path = os.path.join(_FOLDER.name, name)
    Path(path).write_bytes(changed)
    return c.one_of((path, path, path, "missing", "a\0b", "s3://a/b"))


def _pair_files(c: Choices) -> Arguments:
    """A .bin/.idx pair of uint16, mostly valid."""
    lengths = np.array([c.below(9) for _ in range(c.below(6))], np.int32)
    pointers = 2 * (np.cumsum(lengths, dtype=np.int64) - lengths)
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 8, len(lengths), len(bounds))
    idx = header + lengths.tobytes() + pointers.tobytes() + bounds.tobytes()
    paths = [_write(c, "fuzz.bin", bytes(2 * int(lengths.sum()))), _write(c, "fuzz.idx", idx)]
    return [*paths, {8: np.dtype(np.uint16), 1: np.dtype(np.uint8)}]


def _array_files(c: Choices) -> Arguments:
    """Arrays of a sidecar with their records and file states, mostly as they are."""
    paths, records, states = {}, {}, {}
    for name in ("document_index", "sample_index")[: c.below(3)]:
        shape, dtype = (1 + c.below(5), 1 + c.below(2)), c.one_of(("int32", "int64", "float64"))
        offset = c.one_of((128, 0, 1))
        content = bytes(offset + shape[0] * shape[1] * np.dtype(dtype).itemsize)
        paths[name] = _write(c, f"{name}.npy", content)
        status = os.stat(os.path.join(_FOLDER.name, f"{name}.npy"))
        state: list[Any] = [status.st_size, status.st_mtime_ns, status.st_ino]
        records[name] = (dtype, c.one_of((shape, shape, (c.integer(9), 2), "x")), offset)
        if c.seldom():
            state[c.below(3)] = c.one_of((c.integer(99), None, "x"))
        states[name] = c.one_of((state, state, state, state[:2], None))
    return [paths, records, states]


READING: dict[str, Callable[[Choices], Arguments]] = {
    "array_spans": _array_spans,
    "tokens_within": _tokens_within,
    "span_table": _span_table,
    "blended_spans": _blended_spans,
    "window_spans": _window_spans,
    "token_table": _token_table,
    "row_table": _row_table,
    "read_rows": _read_rows,
    "gather": _gather,
    "mask_loss": _mask_loss,
    "documents_by_token": _by_token,
    "documents_by_run": _by_run,
    "map_pair_files": _pair_files,
    "map_index_arrays": _array_files,
}
