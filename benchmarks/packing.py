"""Benchmark of order packed: packing, locating, planning, its quality, and other packers.

The lengths are synthetic. OLMo-core and Megatron-Bridge are read from checkouts and run as they
are; modules that their packers import but do not use while packing are replaced by stubs.
"""

from __future__ import annotations

import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import erf, log, sqrt
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numpy as np
from rich.table import Table

from benchmarks.timing import PeakMemory, alternate
from megaindex import Spans
from megaindex.index.orders import packed
from megaindex.index.orders.framework import Memory
from megaindex.index.orders.packed import PackedIndex
from megaindex.kernels import active, load, num_threads

SEQUENCE_LENGTH = 8192
CUTTING = packed.Cutting(sequence_length=SEQUENCE_LENGTH)
DOCUMENTS = 100_000_000
COMPARED = 100_000  # documents that the other packers get
BATCH = 4096
LOGNORMAL = (log(1000) - 1.6**2 / 2, 1.6)  # mean 1000
_PART = 10_000_000
_EPOCHS = 16  # of the counted pairs


@dataclass(frozen=True, kw_only=True)
class Figure:
    """A measured value; a goal is an upper bound, or a lower one if ``at_least``."""

    what: str
    value: float
    unit: str
    goal: float | None = None
    at_least: bool = False
    note: str = ""

    @property
    def text(self) -> str:
        """The value, with four digits or as an integer."""
        return f"{self.value:,.0f}" if self.value >= 1000 else f"{self.value:.4g}"

    @property
    def is_missed(self) -> bool:
        if self.goal is None:
            return False
        return self.value < self.goal if self.at_least else self.value > self.goal


def draw_lognormal(rng: np.random.Generator, count: int) -> np.ndarray:
    return rng.lognormal(*LOGNORMAL, count)


def draw_mixture(rng: np.random.Generator, count: int) -> np.ndarray:
    """Four in five are web pages, lognormal around 600; the others are code, Pareto of 1.3."""
    web = rng.lognormal(log(600), 1.0, count)
    code = 150 * rng.random(count) ** (-1 / 1.3)
    return np.where(rng.random(count) < 0.8, web, code)


CORPORA: dict[str, Callable[[np.random.Generator, int], np.ndarray]] = {
    "lognormal": draw_lognormal,
    "web and code": draw_mixture,
}


def draw_lengths(name: str, documents: int) -> np.ndarray:
    """Return synthetic lengths, int32[documents], from fixed seeds."""
    lengths = np.empty(documents, np.int32)
    for begin in range(0, documents, _PART):
        part = lengths[begin : begin + _PART]
        drawn = CORPORA[name](np.random.default_rng(20260101 + begin // _PART), part.size)
        part[:] = np.clip(drawn, 1, 2**24)
    return lengths


def figures(
    documents: int, rounds: int, olmo: str | None, bridge: str | None
) -> Iterator[Figure | str]:
    """Yield the figures, and lines of text about them."""
    yield (
        f"order packed, {num_threads()} threads, sequence length {SEQUENCE_LENGTH}; load of the "
        f"machine {os.getloadavg()[0]:.1f}; synthetic lengths: lognormal of mean 1000 and sigma "
        "1.6; web and code, 80 % lognormal of median 600 and sigma 1.0, 20 % Pareto of shape 1.3 "
        "from 150"
    )
    for name in CORPORA:
        lengths = draw_lengths(name, documents)
        _check(lengths[:20_000])
        arrays = yield from _packing(name, lengths, rounds)
        index = _index(lengths, arrays)
        yield from _locating(name, index, rounds)
        yield from _quality(name, index)
        del arrays, index, lengths
    yield from _planning(rounds)
    yield from _peers(rounds, olmo, bridge)


def table(rows: list[Figure]) -> Table:
    result = Table(title="order packed, medians; red misses the goal")
    for column in ("what", "value", "unit", "goal", "note"):
        result.add_column(column, justify="right" if column in ("value", "goal") else "left")
    for row in rows:
        colour = "" if row.goal is None else "[red]" if row.is_missed else "[green]"
        sign = "≥" if row.at_least else "≤"
        goal = "" if row.goal is None else f"{sign} {row.goal:,g}"
        result.add_row(row.what, f"{colour}{row.text}", row.unit, goal, row.note)
    return result


# ---- packing and locating -----------------------------------------------------------------------


def _pack(lengths: np.ndarray) -> Memory:
    memory = Memory()
    packed.build(lengths, CUTTING, None, memory)
    return memory


def _index(lengths: np.ndarray, memory: Memory) -> PackedIndex:
    return PackedIndex(
        sequence_lengths=lengths,
        documents=range(lengths.size),
        tokens_per_epoch=int(lengths.sum(dtype=np.int64)),
        sequence_length=SEQUENCE_LENGTH,
        seed=1234,
        source_name="benchmark",
        arrays=memory.arrays,
        max_documents=packed.most_documents(None, SEQUENCE_LENGTH),
        num_epochs=10,
    )


def _check(lengths: np.ndarray) -> None:
    """Exit unless arrays are those of the specification and two epochs have every token once."""
    memory = _pack(lengths)
    reference, counts = load("reference"), CUTTING.count(lengths)
    sorted_, starts = (memory.arrays[name] for name in ("piece_documents", "sample_starts"))
    expected = np.empty_like(sorted_), np.empty_like(starts)
    reference.sort_pieces(lengths, SEQUENCE_LENGTH, 1, counts, *expected)
    limit = packed.most_documents(None, SEQUENCE_LENGTH)
    layers, runs = reference.pack_pieces(counts, limit, 1, True)
    pairs = [
        (sorted_, expected[0]),
        (starts, expected[1]),
        (memory.arrays["layers"], layers),
        (memory.arrays["runs"], runs),
    ]
    if not all(np.array_equal(one, other) for one, other in pairs):
        raise SystemExit("packing: the arrays differ from the specification; nothing was timed")
    index = _index(lengths, memory)
    for epoch in range(2):
        spans = index.locate(epoch * index.samples_per_epoch + np.arange(index.samples_per_epoch))
        _check_complete(spans, lengths)


def _check_complete(spans: Spans, lengths: np.ndarray) -> None:
    """Exit unless the spans are every token of the documents, each once as input."""
    inputs = spans.input_lengths(SEQUENCE_LENGTH)
    order = np.lexsort((spans.offset, spans.document))
    document, offset, inputs = spans.document[order], spans.offset[order], inputs[order]
    ends = np.cumsum(inputs)
    tokens = np.concatenate(([0], np.cumsum(lengths, dtype=np.int64)))
    begins = tokens[document] + offset
    if not np.array_equal(begins, ends - inputs) or ends[-1] != tokens[-1]:
        raise SystemExit("packing: an epoch does not have every token once; nothing was timed")


def _packing(name: str, lengths: np.ndarray, rounds: int) -> Iterator[Any]:
    """Yield figures, and return the arrays."""
    what, millions = f"pack {name}, {lengths.size:,} documents", lengths.size / 1e6
    with PeakMemory() as peak:
        memory = _pack(lengths)
    arrays = sum(array.nbytes for array in memory.arrays.values())
    wall, processor = [], []
    for _ in range(rounds):
        memory = Memory()
        start = time.perf_counter(), time.process_time()
        packed.build(lengths, CUTTING, None, memory)
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
    goal = 2 * lengths.size / DOCUMENTS
    seconds = statistics.median(wall)
    yield Figure(
        what=what,
        value=seconds,
        unit="s",
        goal=goal,
        note=f"{millions / seconds:,.0f} M documents/s; best {min(wall):.2f} s",
    )
    yield Figure(
        what="… processor time of all threads", value=statistics.median(processor), unit="s"
    )
    yield Figure(what="… arrays", value=arrays / lengths.size, unit="bytes a document", goal=6)
    yield Figure(
        what="… peak beyond the lengths",
        value=max(peak.bytes, arrays) / lengths.size,
        unit="bytes a document",
        goal=6,
    )
    return memory


def _locating(name: str, index: PackedIndex, rounds: int) -> Iterator[Figure]:
    rng = np.random.default_rng(1)
    batches = [rng.integers(0, index.samples_per_epoch, BATCH) for _ in range(max(5, 4 * rounds))]
    index.locate(batches[0])
    wall, processor, held = [], [], []
    for ids in batches:
        start = time.perf_counter(), time.process_time()
        spans = index.locate(ids)
        wall.append(time.perf_counter() - start[0])
        processor.append(time.process_time() - start[1])
        held.append(len(spans))
    spans_per_sample = sum(held) / len(held) / BATCH
    sample = statistics.median(wall) / BATCH * 1e6
    cpu = statistics.median(processor) / BATCH / spans_per_sample * 1e6
    yield Figure(
        what=f"locate {BATCH} random samples, {name}",
        value=sample,
        unit="µs a sample",
        goal=1,
        note=f"{spans_per_sample:.1f} spans a sample",
    )
    yield Figure(
        what="…",
        value=sample / spans_per_sample,
        unit="µs a span",
        goal=0.2,
        note=f"processor time {cpu:.3f}",
    )
    firsts = []
    for epoch in range(1, index.num_epochs):
        ids = epoch * index.samples_per_epoch + batches[0]
        start = time.perf_counter()
        index.locate(ids)
        firsts.append(time.perf_counter() - start)
    ratio = statistics.median(firsts) / statistics.median(wall)
    yield Figure(
        what="… first batch of a further epoch",
        value=statistics.median(firsts) * 1e3,
        unit="ms",
        note=f"{ratio:.2f} times a batch of the first epoch",
    )


def _quality(name: str, index: PackedIndex) -> Iterator[Figure]:
    packing, size = index.packing, index.sequence_length
    fill = packing.input_tokens / (packing.num_samples * size)
    pieces, samples = packing.pieces
    cut = np.count_nonzero(index.sequence_lengths > size)
    yield Figure(
        what=f"fill, {name}",
        value=100 * fill,
        unit="%",
        note=f"{packing.num_samples:,} samples, {packing.padding:,} padded positions",
    )
    yield Figure(
        what="… documents cut, all longer than a sample",
        unit="%",
        value=100 * cut / index.sequence_lengths.size,
    )
    yield Figure(
        what="… pieces a sample",
        value=float(pieces @ samples) / packing.num_samples,
        unit="",
        note=f"at most {pieces[-1]}",
    )
    yield Figure(
        what="… tokens in lengths of one or two documents",
        unit="%",
        value=100 * packing.rare_tokens / packing.input_tokens,
    )
    yield from _mates(index.sequence_lengths[:COMPARED])


def _mates(lengths: np.ndarray) -> Iterator[Figure]:
    """Count the pairs that share a sample again in the next epoch, here and in fair draws.

    A fair draw fills the places of each length in the same bins with a permutation by NumPy.
    """
    index = _index(lengths, _pack(lengths)).extend(_EPOCHS)
    size, rng = index.samples_per_epoch, np.random.default_rng(3)
    first = index.locate(np.arange(size))
    is_piece = first.input_lengths(SEQUENCE_LENGTH) < SEQUENCE_LENGTH
    places = np.flatnonzero(is_piece)
    places = places[np.argsort(first.length[places], kind="stable")]
    pool = first.document[places]
    ours, fair = [], []
    for epoch in range(_EPOCHS):
        spans = index.locate(np.arange(epoch * size, (epoch + 1) * size))
        ours.append(_pairs(spans.document, spans.row_splits, lengths.size))
        drawn = first.document.copy()
        drawn[places] = pool[np.lexsort((rng.random(pool.size), first.length[places]))]
        fair.append(_pairs(drawn, first.row_splits, lengths.size))
    counts = [
        [np.intersect1d(x, y, assume_unique=True).size for x, y in itertools.pairwise(side)]
        for side in (ours, fair)
    ]
    means = [statistics.mean(side) for side in counts]
    error = sqrt(sum(statistics.variance(side) for side in counts) / (_EPOCHS - 1))
    yield Figure(
        what=f"… pairs that meet again, {lengths.size:,} documents",
        value=means[0] / means[1],
        unit="of fair draws",
        note=f"{means[0]:,.0f} of {ours[0].size:,} pairs, {means[1]:,.0f} in fair draws: "
        f"{(means[0] - means[1]) / error:+.1f} standard errors",
    )


def _pairs(documents: np.ndarray, row_splits: np.ndarray, n: int) -> np.ndarray:
    """Return the pairs of documents that share a sample, as smaller * n + larger."""
    held = np.diff(row_splits)
    place = np.arange(documents.size) - np.repeat(row_splits[:-1], held)
    after = np.repeat(held, held) - place
    found = []
    for apart in range(1, int(held.max())):
        first = np.flatnonzero(after > apart)
        one, other = documents[first], documents[first + apart]
        found.append(np.minimum(one, other) * n + np.maximum(one, other))
    return np.concatenate(found)


def _planning(rounds: int) -> Iterator[Figure]:
    """Time the plan of a histogram of about 10^9 documents, without any document."""
    lengths = np.arange(1, 2**20 + 1)
    below = np.array(
        [
            0.5 + 0.5 * erf((log(x) - LOGNORMAL[0]) / LOGNORMAL[1] / sqrt(2))
            for x in range(1, 2**20 + 2)
        ]
    )
    documents = np.random.default_rng(5).poisson(1e9 * np.diff(below)).astype(np.int64)
    for size in (8192, 131_072):
        seconds = []
        for _ in range(rounds):
            start = time.perf_counter()
            cutting = packed.Cutting(sequence_length=size)
            packing = cutting.pack_histogram(lengths, documents, None)
            seconds.append(time.perf_counter() - start)
        if packing.input_tokens != int(lengths @ documents):
            raise SystemExit("packing: the plan does not have every token")
        yield Figure(
            what=f"plan {documents.sum():,} documents from a histogram, {size}",
            value=statistics.median(seconds),
            unit="s",
            goal=10,
            note=f"{packing.num_samples:,} samples",
        )


# ---- other packers ------------------------------------------------------------------------------

Packer = Callable[[np.ndarray, int], int]
"""Packs lengths into bins of a size and returns their number."""


def _ours(lengths: np.ndarray, size: int, limit: int = 0) -> int:
    """Pack, and list the documents of all bins."""
    backend, threads = active(), num_threads()
    counts = backend.count_pieces(lengths, size, 0, threads)
    layers, runs = backend.pack_pieces(counts, limit, 1, True)
    documents = np.empty(int(counts[:-1].sum()), np.int32)
    starts = np.empty(-(-lengths.size // 64) + 1, np.int64)
    backend.sort_pieces(lengths, size, 0, counts, documents, starts, threads)
    firsts = np.concatenate(([0], np.cumsum(counts[:-1])))
    bins = np.arange(runs[-1, 2])
    found = backend.packed_spans(
        np.zeros(2, np.uint64), lengths, 0, 0, firsts, documents, starts, layers, runs, bins
    )
    if found[0].size != lengths.size or found[2].sum() != lengths.sum():
        raise SystemExit("packing: the bins do not have every document")
    return bins.size


def _olmo(checkout: str) -> Packer:
    path = Path(checkout) / "src/olmo_core/data/utils.py"
    stubs = (
        "olmo_core",
        "olmo_core.aliases",
        "olmo_core.io",
        "olmo_core.utils",
        "olmo_core.data",
        "olmo_core.data.types",
    )
    module = _module(path, "olmo_core.data.utils", stubs)

    def run(lengths: np.ndarray, size: int) -> int:
        ends = np.cumsum(lengths, dtype=np.uint64)
        packer = module.InstancePacker(size)  # a power of two
        instances, _, total = packer.pack_documents(np.stack([ends - lengths, ends], axis=1))
        if total != lengths.sum():
            raise SystemExit("OLMo-core: a token is missing")
        return len(instances)

    return run


def _bridge(checkout: str) -> Packer:
    path = Path(checkout) / "src/megatron/bridge/data/packing/algorithms.py"
    stubs = ("megatron.bridge", "megatron.bridge.utils", "megatron.bridge.utils.safe_pickle")
    module = _module(path, "megatron_bridge_algorithms", stubs)

    def run(lengths: np.ndarray, size: int) -> int:
        ids = list(range(lengths.size))
        bins = module.first_fit_decreasing(ids, size, item_lengths=lengths.tolist())
        if sum(map(len, bins)) != lengths.size:
            raise SystemExit("Megatron-Bridge: a document is missing")
        return len(bins)

    return run


def _module(path: Path, name: str, stubs: tuple[str, ...]) -> ModuleType:
    """Import a single file of a package, with stubs for modules of that package."""
    added = [stub for stub in stubs if stub not in sys.modules]
    sys.modules.update({stub: MagicMock() for stub in added})
    try:
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module  # dataclasses look their module up
        spec.loader.exec_module(module)
    finally:
        for stub in added:
            del sys.modules[stub]
    return module


PEERS: dict[str, tuple[str, str, Callable[[str], Packer]]] = {
    "OLMo-core": ("--olmo", "src/olmo_core/data/utils.py", _olmo),
    "Megatron-Bridge": ("--bridge", "src/megatron/bridge/data/packing/algorithms.py", _bridge),
}
OWN_INPUTS: dict[str, list[tuple[Any, int]]] = {
    # lengths and sizes of tests/data/utils_test.py
    "OLMo-core": [([8, 6, 6, 4, 3], 8), ([8, 6, 6, 4, 3, 2, 3], 8)],
    # of tests/unit_tests/data/packing/test_algorithms.py, those that fit
    "Megatron-Bridge": [
        ([500, 600, 500, 400, 700], 1200),
        *((np.random.RandomState(seed).randint(1, 2048, 5000), 2048) for seed in range(5)),
        (np.random.RandomState(7).randint(1, 2048, 10_000), 2048),
    ],
}


def _peers(rounds: int, olmo: str | None, bridge: str | None) -> Iterator[Figure | str]:
    for (name, (flag, file, make)), checkout in zip(PEERS.items(), (olmo, bridge), strict=True):
        if checkout is None or not (Path(checkout) / file).is_file():
            yield f"{name}: SKIPPED; give {flag} a checkout, which has {file}"
            continue
        command = ["git", "-C", checkout, "rev-parse", "--short=9", "HEAD"]
        commit = subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
        yield f"{name} at {commit or 'an unknown commit'}"
        yield from _against(name, make(checkout), rounds)


def _against(name: str, theirs: Packer, rounds: int) -> Iterator[Figure]:
    own = [(np.array(lengths, np.int32), size) for lengths, size in OWN_INPUTS[name]]
    yield _count_bins(f"bins of {name}'s own {len(own)} inputs", own, theirs)
    rng = np.random.default_rng(11)
    small = [
        (rng.integers(1, 1 + rng.integers(2, size + 1), rng.integers(2, 80)).astype(np.int32), size)
        for size in (16, 64, 1024)
        for _ in range(200)
    ]
    yield _count_bins(f"… of {len(small)} random inputs of 2 to 79 documents", small, theirs)
    for corpus in CORPORA:
        lengths = np.minimum(draw_lengths(corpus, COMPARED), SEQUENCE_LENGTH)
        counts = [
            (_ours(lengths, SEQUENCE_LENGTH, limit), theirs(lengths, SEQUENCE_LENGTH))
            for limit in (0, packed.most_documents(None, SEQUENCE_LENGTH))
        ]
        (bins, peer_bins), (limited, _) = counts
        seconds = alternate(
            lambda lengths=lengths: _ours(lengths, SEQUENCE_LENGTH),
            lambda lengths=lengths: theirs(lengths, SEQUENCE_LENGTH),
            min(rounds, 3),
        )
        ours, peer = (statistics.median(side) for side in seconds)
        yield Figure(
            what=f"… of {lengths.size:,} documents, {corpus}, up to {SEQUENCE_LENGTH}",
            value=bins,
            unit="bins",
            goal=peer_bins,
            note=f"{name} {peer_bins:,}; with max_documents {limited:,}",
        )
        yield Figure(
            what="… documents/s, bins with their documents",
            value=lengths.size / ours,
            unit="documents/s",
            goal=lengths.size / peer,
            at_least=True,
            note=f"{name} {lengths.size / peer:,.0f}; {peer / ours:,.0f} times as many",
        )


def _count_bins(what: str, inputs: list[tuple[np.ndarray, int]], theirs: Packer) -> Figure:
    counts = [(_ours(lengths, size), theirs(lengths, size)) for lengths, size in inputs]
    ours, peer = map(sum, zip(*counts, strict=True))
    fewer, more = sum(a < b for a, b in counts), sum(a > b for a, b in counts)
    return Figure(
        what=what,
        value=ours,
        unit="bins",
        goal=peer,
        note=f"theirs {peer:,}; fewer here in {fewer} of {len(counts)}, there in {more}",
    )
