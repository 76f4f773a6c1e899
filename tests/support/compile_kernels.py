"""Compilation of every Numba kernel, for the dtypes that megaindex and its tests pass.

``make test`` and ``make quick`` run this file when a kernel has changed, so that Numba's cache,
beside the kernels, is complete before several processes of tests start.

Each function calls the kernels of one module, with arrays as small as they allow.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np

from megaindex.kernels import load
from megaindex.kernels.reference.packing import SPLIT, STRIDE

if TYPE_CHECKING:
    from megaindex.kernels.protocol import Backend

INT32 = np.ones(1, np.int32)
KEY = np.array([1, 2], np.uint64)


def read_only(array: np.ndarray) -> np.ndarray:
    """Return a read-only array, as those of a mapped file are: a type of its own for Numba."""
    array = array.copy()
    array.flags.writeable = False
    return array


def mapping(jit: Backend) -> None:
    docs = np.array([0, 4])
    with tempfile.TemporaryFile() as file:  # with a hole
        wide = np.asarray(np.memmap(file, np.int32, "w+", shape=(2**32,)))  # rows of 64 bits
        wide[:4] = 5
        for sizes in (wide[:4].copy(), wide):
            jit.map_sentences(docs, sizes, 1, 4, 9, 0.5, 1)
            jit.map_blocks(docs, sizes, INT32, 1, 4, 9, 1, False)


def blending(jit: Backend) -> None:
    for datasets, index in itertools.product((2, 80), (np.int16, np.uint8)):  # 80: in windows
        weights = np.arange(1.0, datasets + 1)
        outputs = np.empty(1100, index), np.empty(1100, np.int64)
        jit.blend_greedy(weights, 0, 1100, np.zeros(datasets, np.int64), *outputs)
    jit.blend_exhaustive(np.array([1, 1]), 0, 2, np.zeros(2, np.int64), None, None)


def divisor(jit: Backend) -> None:
    weights = np.array([1, 2], np.uint64)
    outputs = np.empty(3, np.int16), np.empty(3, np.int64)
    jit.divisor_fill(weights, 0, 3, np.zeros(2, np.int64), *outputs)
    jit.divisor_counts(weights, 3)


def mix(jit: Backend) -> None:
    shares = np.full((1, 2), 2**30, np.uint32)
    deficits, counts = np.zeros((2, 2, 2), np.int64)
    jit.mix_table(shares, np.array([3]), deficits, counts)
    outputs = np.empty(3, np.int16), np.empty(3, np.int64)
    jit.mix_fill(shares, np.array([0]), deficits[:1], counts[:1], 0, *outputs)


def bijection(jit: Backend) -> None:
    for key, n in itertools.product((KEY, read_only(KEY)), (10, 5000)):
        indices = jit.bijection_apply(key, n, np.arange(3))
        jit.bijection_invert(key, n, indices)
        for dtype in (np.int32, np.int64):
            jit.bijection_range(key, n, 0, np.empty(3, dtype))
            jit.bijection_inverse_range(key, n, 0, np.empty(3, dtype))


def shuffle(jit: Backend) -> None:
    state = jit.seed_state(1)
    for dtype in (np.int32, np.uint32, np.int64):
        jit.shuffle(state, np.arange(3, dtype=dtype))
    jit.shuffled_range(state, 0, np.empty(3, np.int64))
    jit.shuffled_documents(state, None, 0, 1, np.empty(3, np.int32))


def samples(jit: Backend) -> None:
    for lengths, dtype in itertools.product((INT32, read_only(INT32)), (np.int32, np.int64)):
        jit.cut_samples(lengths, INT32 - 1, 1, 0, 1, 1, np.empty((2, 2), dtype))
    jit.pack_documents(INT32, 1, 0, np.empty(1, np.int64))


def packing(jit: Backend) -> None:
    for lengths in (np.array([3, 2, 9], np.int32), read_only(np.array([3, 2, 9], np.int32))):
        counts = jit.count_pieces(lengths, 4, SPLIT)
        documents = np.empty(counts[:-1].sum(), np.int32)
        starts = np.empty(-(-lengths.size // STRIDE) + 1, np.int64)
        jit.sort_pieces(lengths, 4, SPLIT, counts, documents, starts)
        layers, runs = jit.pack_pieces(counts, 0, 1, True)
        ends = np.concatenate(([0], np.cumsum(counts[:-1])))
        bins = np.arange(runs[-1, 2])
        jit.packed_bins(KEY, ends, layers, runs, bins + 1, bins * 0)
        jit.packed_spans(KEY, lengths, SPLIT, 1, ends, documents, starts, layers, runs, bins)


def spans(jit: Backend) -> None:
    one = np.zeros(1, np.int64)
    for shuffled, dtype in itertools.product((np.uint32, np.int64), (np.int32, np.int64)):
        index = np.zeros(1, shuffled), np.array([[0, 0], [0, 1]], dtype)
        table = jit.span_table([(*index, INT32 - 1, INT32, 0)])
        jit.array_spans(*index, INT32 - 1, INT32, 0, one)
        jit.blended_spans(table, one, one)
    for lengths in (INT32, read_only(INT32)):
        starts = np.zeros(2, np.int64)
        jit.epoch_starts(KEY, lengths, 1, 1, starts)
        jit.epoch_spans(KEY, lengths, 1, 1, starts, one, one + 1)
        jit.epoch_begins(KEY, lengths, 1, 1, starts, one)
        pointers = one if lengths.flags.writeable else read_only(one)
        jit.window_spans(pointers, lengths, 2, 0, 1, one, one + 1)


def receipt(jit: Backend) -> None:
    one, bounds = np.zeros(1, np.int64), np.array([0, 1])
    keys, sums = np.zeros((1, 2), np.uint64), np.zeros((1, 2), np.uint64)
    jit.receipt_add(one, INT32 - 1, one, one, one + 1, bounds, keys, one, sums)
    jit.least_seen(one, one + 1, bounds, one + 1, one, 1)
    rows, source, spans = INT32.copy(), INT32 - 1, (one, one, one + 1, bounds)
    jit.row_keys(one, one, source, *spans, 1, keys, one, one, one, rows, rows, one, one)


def balance(jit: Backend) -> None:
    one, bounds = np.ones(1, np.int64), np.array([0, 1])
    jit.squared_lengths(one, bounds, 1, one.copy())
    jit.balance_rows(one, 0, 0, 1, 1, one.copy())


def gather(jit: Backend) -> None:
    one, bounds = np.zeros(1, np.int64), np.array([0, 1])
    for dtype in (np.int32, np.int64):
        rows = np.ones((2, 3), dtype)
        for tokens in (rows, rows[:, 1:]):
            jit.mask_loss(tokens, tokens, 0, None, np.empty(tokens.shape, np.float32))
            jit.documents_by_token(tokens, 1, None, None, None)
    jit.documents_by_run(one + 1, bounds, 1, None, None, None)
    for pointers, lengths in ((one, INT32), (read_only(one), read_only(INT32))):
        table = jit.token_table([(np.ones(1, np.uint16), pointers, lengths)])
        out = np.empty((1, 1), np.int64)
        jit.gather(table, INT32 - 1, one, one, one + 1, bounds, out, None, 0)


MODULES = (
    bijection, blending, mapping, packing, divisor, mix, spans, shuffle, gather, samples, receipt,
    balance,
)  # fmt: skip


def compile_module(module: Callable[[Any], None]) -> None:
    module(load("numba"))


if __name__ == "__main__":
    processes = min(len(os.sched_getaffinity(0)), len(MODULES))
    with ProcessPoolExecutor(processes) as pool:
        list(pool.map(compile_module, MODULES))
