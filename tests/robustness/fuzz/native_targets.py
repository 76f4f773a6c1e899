"""Calls of every function of the native core: mostly as it should be, each argument at times not.

A call may succeed, or raise a typed error, a TypeError of the signature or MemoryError. It may not
crash, read or write outside its arrays, or write into an array that is read-only.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import numpy as np
from arguments import array, overlapping, rising, spoiled
from choices import Choices
from native_reading import READING

from megaindex.errors import MegaIndexError
from megaindex.kernels import _native

Arguments = list[Any]


def native(data: bytes) -> None:
    choices = Choices(data)
    name = choices.one_of(NAMES)
    with np.errstate(all="ignore"):  # of extremes in narrow types
        arguments = [spoiled(choices, a) if choices.seldom() else a for a in CALLS[name](choices)]
    if choices.seldom() and len(arguments) > 1:  # one array in two places, or two in one place
        one, other = choices.below(len(arguments)), choices.below(len(arguments))
        arguments[one], arguments[other] = overlapping(choices, arguments[one], arguments[other])
    guarded = [(a, a.tobytes()) for a in arguments if _is_read_only(a)]
    try:
        getattr(_native, name)(*arguments)
    except (MegaIndexError, TypeError, MemoryError):
        pass
    except ValueError as error:
        if "too big" not in str(error) and "Maximum allowed" not in str(error):
            raise  # those two are NumPy's words for more than the address space
    for given, before in guarded:
        assert given.tobytes() == before, f"{name} wrote into a read-only array"


def _is_read_only(value: Any) -> bool:
    return isinstance(value, np.ndarray) and not value.flags.writeable


def _state(choices: Choices) -> np.ndarray:
    state = _native.seed_state(choices.byte())
    if choices.seldom():
        state[624] = choices.one_of((0, 1, 623, 624, 625, 2**32 - 1))
    return state


def _key(choices: Choices) -> np.ndarray:
    return array(choices, "uint64", 2, 255)


def _threads(choices: Choices) -> int:
    return choices.integer(4)


def _cut_samples(c: Choices) -> Arguments:
    lengths = array(c, "int32", 1 + c.below(12))
    documents = (array(c, "int32", 1 + c.below(30), len(lengths) - 1)).astype(np.int32)
    valid = documents[(documents >= 0) & (documents < len(lengths))]
    total = max(0, int(lengths[valid].astype(np.int64).sum())) if not c.seldom() else c.integer(99)
    size, extra = 1 + c.integer(5), c.below(2)
    samples = max(0, total - extra) // max(1, size)
    rows = np.zeros((min(samples, 500) + 1, 2), c.one_of(("int32", "int64")))
    return [lengths, documents, size, extra, samples, total, rows, _threads(c)]


def _sample_idx(c: Choices) -> Arguments:
    lengths, documents, size, *_ = _cut_samples(c)
    tokens = c.integer(99) if c.seldom() else max(0, int(lengths.sum() % 999))
    return [lengths, documents, size, 1 + c.below(2), tokens, bool(c.below(2))]


def _epoch_lengths(c: Choices) -> tuple[np.ndarray, np.ndarray, int, int]:
    lengths = array(c, "int32", 1 + c.below(40), 30)
    return _key(c), lengths, 1 + c.integer(2), 1 + c.integer(9)


def _epoch_starts(c: Choices) -> Arguments:
    key, lengths, copies, stride = _epoch_lengths(c)
    entries = -(-len(lengths) * copies // max(stride, 1)) + 1
    return [key, lengths, copies, stride, np.zeros(entries % 1000, np.int64), _threads(c)]


def _epoch_spans(c: Choices) -> Arguments:
    key, lengths, copies, stride = _epoch_lengths(c)
    starts = np.zeros((-(-len(lengths) * copies // max(stride, 1)) + 1) % 1000, np.int64)
    with contextlib.suppress(MegaIndexError, TypeError):
        _native.epoch_starts(key, lengths, copies, stride, starts)
    if c.seldom() and starts.size:
        starts[c.below(starts.size)] = np.int64(c.integer(99) % 2**63)
    last = int(starts[-1]) if starts.size else 0
    begins = np.array([c.below(max(1, min(last, 255))) for _ in range(c.below(6))], np.int64)
    ends = begins + 1 + array(c, "int64", len(begins), 9)
    return [key, lengths, copies, stride, starts, begins, np.minimum(ends, max(last, 1))]


def _receipt_add(c: Choices) -> Arguments:
    samples, sources, blocks = c.below(6), 1 + c.below(3), 1 + c.below(3)
    splits = rising(c, samples + 1, 3)
    runs = int(splits[-1] % 64)
    return [
        array(c, "int64", samples, 99),
        array(c, "int32", runs, sources - 1),
        *(array(c, "int64", runs, 99) for _ in range(3)),
        splits,
        array(c, "uint64", 2 * sources, 255).reshape(-1, 2),
        array(c, "int64", samples, blocks - 1),
        array(c, "uint64", 2 * blocks, 255).reshape(-1, 2),
    ]


def _row_keys(c: Choices) -> Arguments:
    positions, *runs, splits, words, _, _ = _receipt_add(c)
    rows, passes = positions.size, 1 + c.below(3)
    numbers, samples, keys, high = (array(c, "int64", rows, 9) for _ in range(4))
    sources, exposures = (array(c, "int32", rows, 9) for _ in range(2))
    starts = array(c, "int64", passes, 9), array(c, "int64", passes, 9)
    high = high if c.below(2) else high[:0]
    runs = [positions, numbers, *runs, splits, c.integer(99), words]
    return [*runs, *starts, samples, sources, exposures, keys, high]


def _squared_lengths(c: Choices) -> Arguments:
    samples = c.below(8)
    splits = rising(c, samples + 1, 3)
    runs = int(splits[-1] % 64)
    return [array(c, "int64", runs, 99), splits, c.integer(99), np.zeros(samples, np.int64)]


def _balance_rows(c: Choices) -> Arguments:
    ranks, size = 1 + c.below(4), 1 + c.below(3)
    rows, before = (ranks * size * c.below(4) for _ in range(2))
    served = c.below(before + 1)
    work = array(c, "int64", served + c.below(rows + 1), 99)
    out = np.zeros(rows, np.int64)
    return [work, served, before, c.integer(ranks), c.integer(size), out]


def _least_seen(c: Choices) -> Arguments:
    samples, segments = c.below(8), 1 + c.below(6)
    splits = rising(c, samples + 1, 2)
    runs = int(splits[-1] % 64)
    begins = array(c, "int64", runs, segments)
    ends = np.minimum(begins + array(c, "int64", runs, 3), segments)
    widths, counts = array(c, "int64", segments), array(c, "int64", segments)
    return [begins, ends, splits, widths, counts, c.integer(samples)]


def _blend(c: Choices, weights: np.ndarray, counts: np.ndarray) -> Arguments:
    begin = int(counts.sum() % 2**62) if c.below(2) else c.integer(50)
    size = c.below(60) * c.one_of((1, 20))
    index = c.one_of((None, np.zeros(size, np.int16), np.zeros(size, np.uint8)))
    rows = c.one_of((None, np.zeros(size, np.int64)))
    return [weights, begin, begin + size, counts, index, rows]


def _greedy(c: Choices) -> Arguments:
    n = 1 + c.below(40)
    weights = array(c, "float64", n, 99) / 100
    if c.seldom():
        weights[c.below(n)] = c.one_of((float("nan"), float("inf"), -1.0, 5e-324, 1.8e308))
    return _blend(c, weights, array(c, "int64", n, 3) * c.below(2))


def _exhaustive(c: Choices) -> Arguments:
    sizes = array(c, "int64", 1 + c.below(20), 30)
    return _blend(c, sizes, np.minimum(array(c, "int64", len(sizes), 3) * c.below(2), sizes))


def _blend_rows(c: Choices) -> Arguments:
    size = c.below(60)
    return [np.zeros(size, c.one_of((np.int16, np.uint8))), np.zeros(size, np.int64)]


def _blending_indices(c: Choices) -> Arguments:
    weights, *_ = _greedy(c)
    rows = _blend_rows(c)
    return [*rows, weights, len(weights), len(rows[0]), False]


def _exhaustive_indices(c: Choices) -> Arguments:
    sizes = array(c, "int64", 1 + c.below(9), 6)
    return [*_blend_rows(c), sizes, len(sizes)]


def _mix(c: Choices, more: int) -> list[Any]:
    """Return shares of some segments and streams, and their tables."""
    segments, streams = 1 + c.below(4), 1 + c.below(4)
    shares = np.zeros((segments, streams), np.uint32)
    shares[:, 0] = 2**31
    tables = [np.full((segments + more, streams), c.integer(99)) for _ in range(2)]
    steps = np.cumsum(np.full(segments, 1 + c.below(9)))
    return [shares, steps, *tables]


def _mix_fill(c: Choices) -> Arguments:
    outputs = [np.empty(c.below(60), np.int16), np.empty(c.below(60), np.int64)]
    return [*_mix(c, 0), c.integer(99), *outputs, c.below(3)]


def _divisor(c: Choices) -> Arguments:
    n = 1 + c.below(20)
    return _blend(c, array(c, "uint64", n, 99), np.zeros(n, np.int64))


def _bounds(c: Choices) -> tuple[np.ndarray, np.ndarray]:
    docs = rising(c, 1 + c.below(6))
    return docs, array(c, "int32", int(docs[-1] % 64), 40)


def _mapping(c: Choices) -> Arguments:
    head = [*_bounds(c), c.integer(3), c.integer(99), 1 + c.integer(30)]
    return [*head, c.one_of((0.0, 0.1, 1.0, float("nan"), -1.0, 5.0)), c.integer(99), c.integer(3)]


def _blocks(c: Choices) -> Arguments:
    docs, sizes = _bounds(c)
    titles = array(c, "int32", len(docs), 9)
    head = [docs, sizes, titles, c.integer(3), c.integer(99), 1 + c.integer(30)]
    return [*head, c.integer(99), bool(c.below(2))]


def _documents(c: Choices) -> Arguments:
    ids = c.one_of((None, array(c, "int32", c.below(20), 99)))
    count, epochs = c.below(20) if ids is None else len(ids), 1 + c.integer(2)
    out = np.zeros(count * epochs % 1000, np.int32)
    return [_state(c), ids, c.integer(99), epochs, out, _threads(c)]


def _any_ints(c: Choices) -> np.ndarray:
    return array(c, c.one_of(("int32", "uint32", "int64")), c.below(60), 99)


def _bijection(c: Choices) -> Arguments:
    n = c.integer(255) if c.below(2) else 4090 + c.below(12)
    return [
        _key(c),
        n,
        array(c, c.one_of(("int64", "uint64")), c.below(9), max(0, min(n, 256) - 1)),
    ]


def _bijection_range(c: Choices) -> Arguments:
    n, out = c.integer(255) + 60, np.zeros(c.below(60), c.one_of(("int32", "int64")))
    return [_key(c), n, c.integer(99), out]


def _epoch_begins(c: Choices) -> Arguments:
    key, lengths, copies, stride, starts, *_ = _epoch_spans(c)
    entries = array(c, "int64", c.below(9), max(0, len(lengths) * copies - 1))
    return [key, lengths, copies, stride, starts, entries, _threads(c)]


def _packed_bins(c: Choices) -> Arguments:
    key, _, _, _, starts, _, _, layers, runs, _ = _packed_spans(c)
    count = c.below(9)
    lengths = 1 + array(c, "int64", count, 20)
    return [key, starts, layers, runs, lengths, array(c, "int64", count, 5), _threads(c)]


def _cutting(c: Choices) -> Arguments:
    return [array(c, "int32", c.below(90), 40), 1 + c.integer(20), c.below(3)]


def _sort_pieces(c: Choices) -> Arguments:
    cutting = _cutting(c)
    counts = np.zeros(2, np.int64)
    with contextlib.suppress(MegaIndexError, TypeError):
        counts = _native.count_pieces(*cutting)
    if c.seldom():
        counts[c.below(counts.size)] = np.int64(c.integer(99) % 2**63)
    documents = np.zeros(int(counts[:-1].sum()) % 1000, np.int32)
    starts = np.zeros(-(-cutting[0].size // 64) + 1, np.int64)
    return [*cutting, counts, documents, starts, _threads(c)]


def _pack_pieces(c: Choices) -> Arguments:
    counts = array(c, "int64", 2 + c.below(40), 12)
    counts[0] *= c.seldom()
    return [counts, c.integer(5), 1 + c.integer(2), bool(c.below(2))]


def _packed_spans(c: Choices) -> Arguments:
    lengths, capacity, rule, counts, documents, sample_starts, threads = _sort_pieces(c)
    layers, runs = np.zeros((0, 6), np.int64), np.zeros((1, 3), np.int64)
    with contextlib.suppress(MegaIndexError, TypeError):
        _native.sort_pieces(lengths, capacity, rule, counts, documents, sample_starts, threads)
        layers, runs = _native.pack_pieces(counts, c.below(5), 1, bool(c.below(2)))
    with np.errstate(all="ignore"):
        starts = np.concatenate(([0], np.cumsum(counts[:-1])))
    for table in (layers, runs, starts, documents, sample_starts):
        if c.seldom() and table.size:
            at = c.below(table.size)
            table.flat[at] = np.array(c.integer(60) % 2**64, np.uint64).astype(table.dtype)
    bins = array(c, "int64", c.below(9), max(0, int(runs[-1, 2]) % 60 - 1))
    return [
        _key(c),
        lengths,
        rule,
        c.below(2),
        starts,
        documents,
        sample_starts,
        layers,
        runs,
        bins,
    ]


CALLS: dict[str, Callable[[Choices], Arguments]] = {
    "seed_state": lambda c: [c.integer(255)],
    "shuffle": lambda c: [_state(c), _any_ints(c), _threads(c)],
    "shuffled_range": lambda c: [_state(c), c.integer(99), _any_ints(c), _threads(c)],
    "shuffled_documents": _documents,
    "cut_samples": _cut_samples,
    "bijection_apply": _bijection,
    "bijection_invert": _bijection,
    "bijection_range": _bijection_range,
    "bijection_inverse_range": _bijection_range,
    "epoch_starts": _epoch_starts,
    "epoch_spans": _epoch_spans,
    "epoch_begins": _epoch_begins,
    "receipt_add": _receipt_add,
    "row_keys": _row_keys,
    "pack_documents": lambda c: [
        array(c, "int32", c.below(20)), 1 + c.integer(20), c.integer(200),
        np.zeros(c.below(20), np.int64),
    ],
    "squared_lengths": _squared_lengths,
    "balance_rows": _balance_rows,
    "count_pieces": lambda c: [*_cutting(c), _threads(c)],
    "sort_pieces": _sort_pieces,
    "pack_pieces": _pack_pieces,
    "packed_spans": _packed_spans,
    "packed_bins": _packed_bins,
    "least_seen": _least_seen,
    "blend_greedy": _greedy,
    "blend_exhaustive": _exhaustive,
    "fill_greedy": lambda c: _blending_indices(c)[:5],
    "fill_exhaustive": _exhaustive_indices,
    "divisor_fill": _divisor,
    "mix_fill": _mix_fill,
    "mix_table": lambda c: _mix(c, 1),
    "divisor_counts": lambda c: [array(c, "uint64", 1 + c.below(20), 99), c.integer(9999)],
    "map_sentences": _mapping,
    "map_blocks": _blocks,
    "build_mapping": lambda c: [*_mapping(c)[:7], False, c.integer(3)],
    "build_blocks_mapping": lambda c: [*_blocks(c)[:7], False, bool(c.below(2))],
    "build_sample_idx": lambda c: [*_sample_idx(c), bool(c.below(2))],
    "build_sample_idx_int32": lambda c: [*_sample_idx(c), c.below(2)],
    "build_sample_idx_int64": lambda c: [*_sample_idx(c), c.below(2)],
    "build_blending_indices": _blending_indices,
    "build_exhaustive_blending_indices": _exhaustive_indices,
    **READING,
}  # fmt: skip
NAMES = sorted(CALLS)


def native_seeds() -> list[bytes]:
    """Calls of every function: some as they should be, some with spoiled arguments."""
    rng = np.random.default_rng(0)
    return [
        bytes([k, *rng.integers(0, highest, 400, np.uint8).tolist()])
        for k in range(len(NAMES))
        for highest in (239, 239, 255, 255, 255)
    ]
