"""Benchmark of building and saving document, sample and shuffle arrays."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

import megaindex
from benchmarks.corpora import SHAPES, Shape, write_sparse
from benchmarks.timing import Comparison, PeakMemory, alternate, remove_cache

SEED = 1234
NAMES = ("document_index", "sample_index", "shuffle_index")
ASKED = {"1B": 4.0, "10B": 5.0, "40B": 10.0, "100k-long": 4.0}


def compare(name: str, directory: Path, rounds: int) -> Comparison:
    """Check that all three arrays are equal, then time both sides building and saving them.

    Each run begins without a cache.
    """
    from benchmarks import peer

    shape = SHAPES[name]
    prefix = write_sparse(directory, shape)
    theirs, ours = peer.open_megatron(prefix), megaindex.IndexedDataset(prefix)
    samples = _num_samples(ours, shape)

    def run_peer() -> object:
        return peer.megatron_index(
            theirs, samples, shape.sequence_length, SEED, directory / "peer-cache"
        )

    def run_ours() -> object:
        return _ours(ours, shape, samples, directory / "our-cache")

    _remove_caches(directory)
    expected, actual = run_peer(), run_ours()
    nbytes = 0
    for array in NAMES:
        mine, other = getattr(actual, array), getattr(expected, array)
        if mine.dtype != other.dtype or not np.array_equal(mine, other):
            raise SystemExit(f"{name}: {array} differs from megatron-core's")
        nbytes += mine.nbytes
    del expected, actual
    seconds = alternate(run_ours, run_peer, rounds, prepare=lambda: _remove_caches(directory))
    return Comparison(
        what=f"index, {name}: {shape.documents:,} documents x {shape.epochs}",
        ours=seconds[0],
        peer=seconds[1],
        items=shape.documents * shape.epochs,
        unit="document",
        asked=ASKED.get(name),
        output_bytes=nbytes,
    )


def memory(name: str, directory: Path) -> dict[str, float]:
    """Print the peak memory of each side, in a process of its own, without the arrays."""
    report = {}
    for side in ("ours", "peer"):
        command = [sys.executable, "-m", "benchmarks.index_build", side, name, str(directory)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        report[side] = json.loads(output.splitlines()[-1])
    return report


def _num_samples(dataset: megaindex.IndexedDataset, shape: Shape) -> int:
    return (shape.epochs * dataset.num_tokens - 1) // shape.sequence_length


def _ours(dataset: megaindex.IndexedDataset, shape: Shape, samples: int, cache: Path) -> object:
    return megaindex.build_index(
        dataset,
        sequence_length=shape.sequence_length,
        seed=SEED,
        num_samples=samples,
        cache_dir=cache,
    )


def _remove_caches(directory: Path) -> None:
    for cache in directory.glob("*-cache"):
        remove_cache(cache)


def _measure(side: str, name: str, directory: Path) -> None:
    """Print the peak of one side, as a share of its arrays."""
    shape = SHAPES[name]
    prefix = write_sparse(directory, shape)
    dataset = megaindex.IndexedDataset(prefix)
    _remove_caches(directory)
    samples = _num_samples(dataset, shape)
    if side == "ours":
        megaindex.backend()
        with PeakMemory() as peak:
            index = _ours(dataset, shape, samples, directory / "our-cache")
        held = 0  # the arrays are mapped files
    else:
        from benchmarks import peer

        theirs = peer.open_megatron(prefix)
        with PeakMemory() as peak:
            index = peer.megatron_index(
                theirs, samples, shape.sequence_length, SEED, directory / "peer-cache"
            )
        held = sum(getattr(index, array).nbytes for array in NAMES)
    outputs = sum(getattr(index, array).nbytes for array in NAMES)
    beyond = max(0, peak.bytes - held)
    print(json.dumps({"outputs": outputs, "beyond": beyond, "share": beyond / outputs}))


if __name__ == "__main__":
    _measure(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
