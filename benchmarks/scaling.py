"""Benchmark of building many datasets into one cache: in a loop, in local processes, with Ray."""

from __future__ import annotations

import filecmp
import itertools
from collections.abc import Callable
from pathlib import Path

from benchmarks.corpora import Shape, write_sparse
from benchmarks.timing import Comparison, remove_cache, timed
from megaindex import BuildSettings, build_many, open_engine
from megaindex.builders.cached import BuildTask

SIDES = (("local", 2), ("ray", 1), ("ray", 2))
DATASETS = 16
DOCUMENTS = 1_000_000  # of each dataset
EPOCHS = 4


def compare(name: str, workers: int, directory: Path, rounds: int) -> Comparison:
    """Check that every file of both caches is equal, then time both sides, each into a new cache.

    A Ray cluster is started before the measurement; starting local processes is part of each run.
    In the loop a dataset has all cores, in a worker its share of them.
    """
    paths = _corpora(directory)
    with open_engine(name, workers=workers) as engine:

        def run_ours(cache: Path) -> None:
            for _ in build_many(paths, _settings(cache), engine):
                pass

        nbytes = _check(run_ours, paths, directory)
        ours: list[float] = []
        loop: list[float] = []
        for _ in range(rounds):
            ours.append(_seconds(run_ours, directory))
            loop.append(_seconds(lambda cache: _loop(paths, cache), directory))
    engine_name = {"local": "processes", "ray": "Ray"}[name]
    return Comparison(
        what=f"{DATASETS} datasets of {DOCUMENTS:,} documents, {EPOCHS} epochs: {engine_name}, "
        f"{workers} worker(s), against a loop",
        ours=ours,
        peer=loop,
        items=DATASETS,
        unit="dataset",
        output_bytes=nbytes,
    )


def _loop(paths: list[str], cache: Path) -> None:
    for path in paths:
        BuildTask(path=path, settings=_settings(cache)).run()


def _settings(cache: Path) -> BuildSettings:
    return BuildSettings(sequence_length=2048, seed=1234, epochs=str(EPOCHS), cache_dir=str(cache))


def _corpora(directory: Path) -> list[str]:
    """Return the prefixes of corpora that differ in their number of documents."""
    shapes = (
        Shape(name=f"scaling-{i:03}", documents=DOCUMENTS + i, mean_tokens=1000, epochs=EPOCHS)
        for i in range(DATASETS)
    )
    return [str(write_sparse(directory, shape)) for shape in shapes]


_numbers = itertools.count()


def _seconds(run: Callable[[Path], None], directory: Path) -> float:
    """Time one run into a new cache, which is removed afterwards."""
    cache = directory / f"cache-{next(_numbers)}"
    try:
        return timed(lambda: run(cache))
    finally:
        remove_cache(cache)


def _check(run: Callable[[Path], None], paths: list[str], directory: Path) -> int:
    """Return the bytes of the cache; exit if those of both sides differ."""
    ours, loop = directory / "checked-ours", directory / "checked-loop"
    run(ours)
    _loop(paths, loop)
    arrays = sorted(path.relative_to(loop) for path in loop.glob("*/*.npy"))
    same = arrays == sorted(path.relative_to(ours) for path in ours.glob("*/*.npy"))
    if not same or not all(filecmp.cmp(ours / a, loop / a, shallow=False) for a in arrays):
        raise SystemExit("scaling: the caches differ")
    nbytes = sum((loop / array).stat().st_size for array in arrays)
    remove_cache(ours)
    remove_cache(loop)
    return nbytes
