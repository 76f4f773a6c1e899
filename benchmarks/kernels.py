"""Benchmark of single kernels against megatron-core's compiled ones, after a check of results."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np

import megaindex
from benchmarks.corpora import SHAPES, write_sparse
from benchmarks.timing import Comparison, alternate
from megaindex import helpers
from megaindex.kernels import active, num_threads

ASKED_SAMPLE_INDEX = {"40B": 4.0, "100k-long": 3.0}
ASKED_GREEDY = {2: 2.0, 3: 2.0, 8: 1.3, 100: 3.0, 1000: 10.0, 4000: 20.0}
ASKED_EXHAUSTIVE = {2: 2.0, 8: 2.0, 100: 12.0, 1000: 50.0, 4000: 100.0}


def check_equal(what: str, ours: np.ndarray, theirs: np.ndarray) -> None:
    if ours.dtype != theirs.dtype or not np.array_equal(ours, theirs):
        raise SystemExit(f"{what}: the answer differs from megatron-core's; nothing was timed")


def sample_index(name: str, directory: Path, rounds: int) -> Comparison:
    from benchmarks import peer

    shape = SHAPES[name]
    dataset = megaindex.IndexedDataset(write_sparse(directory, shape))
    lengths = dataset.sequence_lengths.copy()  # the dtypes that GPTDataset passes
    documents = np.empty(shape.documents * shape.epochs, np.int32)
    state = active().seed_state(1)
    active().shuffled_documents(state, None, 0, shape.epochs, documents, num_threads())
    arguments = (lengths, documents, shape.sequence_length, shape.epochs, dataset.num_tokens)

    def ours() -> np.ndarray:
        return helpers.build_sample_idx_int32(*arguments, True, 1)

    def theirs() -> np.ndarray:
        return peer.helpers_cpp.build_sample_idx_int32(*arguments, True, 1)

    actual = ours()
    check_equal(f"sample_index {name}", actual, theirs())
    seconds = alternate(ours, theirs, rounds)
    return Comparison(
        what=f"sample_index, {name}: {shape.documents:,} documents x {shape.epochs}",
        ours=seconds[0],
        peer=seconds[1],
        items=documents.size,
        unit="document",
        asked=ASKED_SAMPLE_INDEX.get(name),
        output_bytes=actual.nbytes,
    )


def shuffle(rounds: int, size: int = 40_000_000) -> Comparison:
    """Time the legacy shuffle against RandomState.shuffle, the largest cost of the peer."""

    def ours() -> np.ndarray:
        out = np.empty(size, np.int32)
        active().shuffled_range(active().seed_state(1), 0, out, num_threads())
        return out

    def numpy_shuffle() -> np.ndarray:
        out = np.arange(size, dtype=np.int32)
        np.random.RandomState(1).shuffle(out)
        return out

    actual = ours()
    check_equal("shuffle", actual, numpy_shuffle())
    seconds = alternate(ours, numpy_shuffle, rounds)
    return Comparison(
        what=f"shuffle of {size:,} int32, against numpy",
        ours=seconds[0],
        peer=seconds[1],
        items=size,
        unit="element",
        output_bytes=actual.nbytes,
    )


def weights_of(family: str, count: int) -> np.ndarray:
    generator = np.random.default_rng(count)
    drawn = {
        "lognormal": lambda: generator.lognormal(0, 1, count),
        "equal": lambda: np.ones(count),
        "nearly equal": lambda: 1 + generator.normal(0, 1e-9, count),
        "zipf": lambda: 1 / np.arange(1, count + 1),
        "Dirichlet": lambda: generator.dirichlet(np.ones(count)),
        "linear": lambda: np.arange(1, count + 1),
        "doubled linear": lambda: np.arange(1, count + 1),
    }[family]()
    weights: np.ndarray = drawn / drawn.sum() * (2 if family.startswith("doubled") else 1)
    return weights


FAMILIES = (
    "lognormal", "equal", "nearly equal", "zipf", "Dirichlet", "linear", "doubled linear",
)  # fmt: skip


def greedy(family: str, count: int, rounds: int) -> Comparison:
    from benchmarks import peer

    weights = weights_of(family, count)
    size = max(100_000, 80_000_000 // count) if count > 8 else 10_000_000
    outputs = [(np.empty(size, np.int16), np.empty(size, np.int64)) for _ in range(2)]

    def ours() -> None:
        helpers.build_blending_indices(*outputs[0], weights, count, size, False)

    def theirs() -> None:
        peer.helpers_cpp.build_blending_indices(*outputs[1], weights, count, size, False)

    return _blend(f"blend, {count} {family} weights", ours, theirs, outputs, size,
                  rounds, ASKED_GREEDY.get(count))  # fmt: skip


def exhaustive(count: int, rounds: int) -> Comparison:
    from benchmarks import peer

    size = max(100_000, 40_000_000 // count) if count > 8 else 5_000_000
    sizes = np.maximum((weights_of("lognormal", count) * size).astype(np.int64), 1)
    size = int(sizes.sum())
    outputs = [(np.empty(size, np.int16), np.empty(size, np.int64)) for _ in range(2)]

    def ours() -> None:
        helpers.build_exhaustive_blending_indices(*outputs[0], sizes, count)

    def theirs() -> None:
        peer.helpers_cpp.build_exhaustive_blending_indices(*outputs[1], sizes, count)

    return _blend(f"exhaustive blend, {count} lognormal sizes", ours, theirs, outputs, size,
                  rounds, ASKED_EXHAUSTIVE.get(count))  # fmt: skip


def short_blends(count: int, draws: int, rounds: int, calls: int = 10_000) -> Comparison:
    """Time calls for so few draws that most of each is its checks."""
    from benchmarks import peer

    weights = weights_of("Dirichlet", count)
    outputs = [(np.zeros(draws, np.int16), np.zeros(draws, np.int64)) for _ in range(2)]

    def ours() -> None:
        for _ in range(calls):
            helpers.build_blending_indices(*outputs[0], weights, count, draws, False)

    def theirs() -> None:
        for _ in range(calls):
            peer.helpers_cpp.build_blending_indices(*outputs[1], weights, count, draws, False)

    what = f"calls for {draws} draws of a blend of {count}"
    compared = _blend(what, ours, theirs, outputs, calls, rounds, 1.0)
    return replace(compared, unit="call")


def _blend(
    what: str,
    ours: Callable[[], None],
    theirs: Callable[[], None],
    outputs: list[tuple[np.ndarray, np.ndarray]],
    size: int,
    rounds: int,
    asked: float | None,
) -> Comparison:
    ours()
    theirs()
    for mine, other in zip(*outputs, strict=True):
        check_equal(what, mine, other)
    seconds = alternate(ours, theirs, rounds)
    return Comparison(
        what=what,
        ours=seconds[0],
        peer=seconds[1],
        items=size,
        unit="draw",
        asked=asked,
        output_bytes=sum(array.nbytes for array in outputs[0]),
    )
