"""Benchmark of the Numba backend against the native core on one thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

import megaindex
from benchmarks.corpora import SHAPES, write_sparse
from benchmarks.kernels import check_equal, weights_of
from benchmarks.timing import Comparison, alternate
from megaindex.arithmetic import samples_in
from megaindex.kernels import load

if TYPE_CHECKING:
    from megaindex.kernels.protocol import Backend

# a ratio of 1/3 means three times slower
SAMPLES, OTHERS = 1 / 3, 1 / 5


def sample_index(directory: Path, rounds: int) -> Comparison:
    shape = SHAPES["40B"]
    dataset = megaindex.IndexedDataset(write_sparse(directory, shape))
    native = load("native")
    documents = np.empty(shape.documents * shape.epochs, np.int32)
    native.shuffled_documents(native.seed_state(1), None, 0, shape.epochs, documents, 2)
    tokens = shape.epochs * dataset.num_tokens
    samples = samples_in(tokens, shape.sequence_length)

    def run(backend: Backend, out: np.ndarray) -> None:
        backend.cut_samples(dataset.sequence_lengths, documents, shape.sequence_length, 1,
                            samples, tokens, out)  # fmt: skip

    return _compare("sample_index, 40B", run, ((samples + 1, 2), "int32"), documents.size,
                    "document", rounds, SAMPLES)  # fmt: skip


def shuffle(rounds: int, size: int = 40_000_000) -> Comparison:
    def run(backend: Backend, out: np.ndarray) -> None:
        backend.shuffled_range(backend.seed_state(1), 0, out)

    return _compare(f"shuffle of {size:,} int32", run, ((size,), "int32"), size, "element",
                    rounds, OTHERS)  # fmt: skip


def blend(count: int, rounds: int) -> Comparison:
    weights, size = weights_of("lognormal", count), 2_000_000

    def run(backend: Backend, out: np.ndarray) -> None:
        backend.blend_greedy(weights, 0, size, np.zeros(count, np.int64), out, None)

    return _compare(f"blend, {count} lognormal weights", run, ((size,), "int16"), size, "draw",
                    rounds, OTHERS)  # fmt: skip


def exhaustive(count: int, rounds: int) -> Comparison:
    sizes = np.maximum((weights_of("lognormal", count) * 1_000_000).astype(np.int64), 1)
    size = int(sizes.sum())

    def run(backend: Backend, out: np.ndarray) -> None:
        backend.blend_exhaustive(sizes, 0, size, np.zeros(count, np.int64), out, None)

    return _compare(f"exhaustive blend, {count} sizes", run, ((size,), "int16"), size, "draw",
                    rounds, OTHERS)  # fmt: skip


def _compare(
    what: str,
    run: Callable[[Backend, np.ndarray], None],
    output: tuple[tuple[int, ...], str],
    items: int,
    unit: str,
    rounds: int,
    asked: float,
) -> Comparison:
    numba, native = load("numba"), load("native")
    outs = np.empty(*output), np.empty(*output)
    run(numba, outs[0])
    run(native, outs[1])
    check_equal(what, outs[0], outs[1])
    seconds = alternate(lambda: run(numba, outs[0]), lambda: run(native, outs[1]), rounds)
    return Comparison(
        what=f"Numba against native, one thread: {what}",
        ours=seconds[0],
        peer=seconds[1],
        items=items,
        unit=unit,
        asked=asked,
        output_bytes=outs[0].nbytes,
    )
