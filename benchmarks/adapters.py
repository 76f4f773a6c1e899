"""Benchmark of BlendedMegatronDatasetBuilder on blends and one corpus, with and without adapter.

Both sides run the same code of megatron-core alternately in one process on the same files.
"""

from __future__ import annotations

import gc
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import megaindex.adapters.megatron as adapter
from benchmarks.corpora import Shape, move_away, write_sparse
from benchmarks.timing import Comparison, installed_or_not, timed

SEQUENCE_LENGTH = 2048
_COMPARED = 200  # samples of every split
_MEAN_TOKENS = 1000


@dataclass(frozen=True, kw_only=True)
class Case:
    """Corpora of equal numbers of documents, with the required ratio of each measured part."""

    sources: int
    documents: int
    asked: dict[str, float]
    epochs: int = 1

    @property
    def name(self) -> str:
        what = f"blend of {self.sources} corpora" if self.sources > 1 else "one corpus"
        epochs = f" × {self.epochs} epochs" if self.epochs > 1 else ""
        return f"Megatron, {what} of {self.documents:,} documents{epochs}"


CASES = (
    Case(sources=500, documents=20_000, asked={"cold": 5.0, "warm": 10.0}),
    Case(sources=500, documents=2_000, asked={"warm": 10.0}),
    # Megatron keeps 11 files of each source open, of which many systems allow 20,000
    Case(sources=1_500, documents=10_000, asked={"first": 10.0}),
    Case(sources=50, documents=20_000, asked={"cold": 5.0, "sample": 1.0, "both": 2.0}),
    Case(sources=50, documents=4_000, asked={"cold": 3.0}),
    Case(sources=1, documents=1_000_000, epochs=4, asked={"warm": 2.0, "sample": 1.0, "both": 1.5}),
)
QUICK = Case(sources=20, documents=5_000, asked={})
PARTS = {
    "cold": "cold",
    "warm": "warm",
    "first": "warm, and a first batch of 16",
    "sample": "the first sample after a warm build",
    "both": "warm, and the first sample",
}


def compare(case: Case, part: str, directory: Path, rounds: int) -> Comparison:
    """Time a part of opening, one of `PARTS`."""
    prefixes = _corpora(directory, case.sources, case.documents)
    samples = case.sources * case.documents * case.epochs * _MEAN_TOKENS // SEQUENCE_LENGTH
    cache = directory / f"cache-of-{case.sources}-{case.documents}"

    moved = directory / "moved-away"

    def build() -> list[Any]:
        return _build(prefixes, samples, cache)

    def empty() -> None:
        move_away([cache], moved)

    if part == "cold":
        _check_equal(build, empty, cache)
    run: dict[str, Callable[[], float]] = {
        "cold": lambda: timed(build),
        "warm": lambda: timed(build),
        "first": lambda: timed(lambda: _first_batch(build()[0])),
        "sample": lambda: _first_sample(build()[0]),
        "both": lambda: timed(lambda: build()[0][5]),
    }
    ours, peer = _alternate(run[part], empty if part == "cold" else (lambda: None), rounds)
    shutil.rmtree(moved, ignore_errors=True)
    return Comparison(
        what=f"{case.name}, {PARTS[part]}",
        ours=ours,
        peer=peer,
        items=case.sources,
        unit="source",
        asked=case.asked.get(part),
        output_bytes=1 << 20,
    )


def _first_sample(dataset: Any) -> float:
    start = time.perf_counter()
    dataset[5]
    return time.perf_counter() - start


def _first_batch(blend: Any) -> list[Any]:
    if hasattr(blend, "__getitems__"):
        batch: list[Any] = blend.__getitems__(range(16))
        return batch
    return [blend[i] for i in range(16)]


def _alternate(
    run: Callable[[], float], prepare: Callable[[], None], rounds: int
) -> tuple[list[float], list[float]]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side, installed in zip(seconds, (True, False), strict=True):
            prepare()
            gc.collect()
            with installed_or_not(adapter, installed):
                elapsed = run()
            if number:  # the first run of each side is a warm-up
                side.append(elapsed)
    return seconds


def _corpora(directory: Path, sources: int, documents: int) -> list[str]:
    folder = directory / f"corpora-of-{documents}"
    folder.mkdir(exist_ok=True)
    first = write_sparse(
        folder, Shape(name="c0", documents=documents, mean_tokens=_MEAN_TOKENS, epochs=1)
    )
    prefixes = [str(first)]
    for number in range(1, sources):  # equal content costs the same
        prefix = folder / f"c{number}"
        if not prefix.with_suffix(".idx").exists():
            with open(prefix.with_suffix(".bin"), "wb") as file:
                file.truncate(first.with_suffix(".bin").stat().st_size)
            shutil.copyfile(first.with_suffix(".idx"), prefix.with_suffix(".idx"))
        prefixes.append(str(prefix))
    return prefixes


def _build(prefixes: list[str], samples: int, cache: Path) -> list[Any]:
    import torch.distributed as dist

    from benchmarks import peer

    if not dist.is_initialized():  # a blend queries its rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights = np.random.default_rng(20260101).lognormal(0, 0.5, len(prefixes)).tolist()
    config = peer.GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE_LENGTH,
        blend=(prefixes, weights if len(prefixes) > 1 else None),
        split="969,30,1",
        tokenizer=peer.Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(cache),
        mid_level_dataset_surplus=0.05,  # Megatron refuses to draw a source beyond its end
    )
    sizes = [samples, samples // 50, samples // 500]
    builder = peer.BlendedMegatronDatasetBuilder(peer.GPTDataset, sizes, lambda: True, config)
    built: list[Any] = builder.build()
    return built


def _check_equal(build: Callable[[], list[Any]], empty: Callable[[], None], cache: Path) -> None:
    """Check that the files and samples of every split of a cold build are equal."""

    def outcome(installed: bool) -> tuple[dict[str, bytes], list[Any]]:
        empty()
        with installed_or_not(adapter, installed):
            built = build()
            read = [
                [{k: np.asarray(v) for k, v in d[i].items()} for i in range(0, len(d), step)]
                for d in built
                for step in [max(1, len(d) // _COMPARED)]
            ]
        paths = [p for p in cache.iterdir() if not p.name.endswith("-megaindex.json")]
        return {path.name: path.read_bytes() for path in paths}, read

    theirs, ours = outcome(False), outcome(True)
    if ours[0] != theirs[0]:
        raise SystemExit("the caches differ")
    for a, b in zip(theirs[1], ours[1], strict=True):
        for x, y in zip(a, b, strict=True):
            if x.keys() != y.keys() or not all(np.array_equal(x[k], y[k]) for k in x):
                raise SystemExit("the samples differ")
