"""Benchmark of the time from the prefixes of a blend with built indices to the first batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.corpora import write_linked
from benchmarks.timing import Comparison, alternate

SEQUENCE_LENGTH = 2048
MICRO_BATCH = 8


class Case(NamedTuple):
    """Size of a blend, and the required ratio."""

    sources: int
    documents: int
    mean_tokens: int
    num_samples: int
    asked: float


CASES = (
    Case(500, 500, 500, 20_000, 10.0),
    Case(2000, 10_000, 1000, 5_000_000, 10.0),
)


def compare(case: Case, directory: Path, rounds: int) -> Comparison:
    """Time both sides with warm caches; the first 64 batches must be equal."""
    name = f"first-of-{case.sources}"
    prefixes = write_linked(directory / name, case.sources, case.documents, case.mean_tokens)
    weights = np.random.default_rng(2).lognormal(0, 0.5, case.sources).tolist()
    batches = np.arange(64 * MICRO_BATCH).reshape(-1, MICRO_BATCH).tolist()

    def ours() -> Any:
        from megaindex import build_blend
        from megaindex.loader import Loader

        index = build_blend(
            prefixes, num_samples=case.num_samples, weights=weights,
            sequence_length=SEQUENCE_LENGTH, seed=1, split="1",
            cache_dir=directory / f"{name}-cache",
        )  # fmt: skip
        return iter(Loader(index, index.datasets, batches))

    def theirs() -> Any:
        from torch.utils.data import DataLoader

        from benchmarks import peer

        dataset = peer.megatron_blend(
            prefixes, weights, case.num_samples, SEQUENCE_LENGTH, 1,
            directory / f"{name}-peer-cache",
        )  # fmt: skip
        return iter(DataLoader(dataset, batch_sampler=batches))

    for batch, right in zip(ours(), theirs(), strict=True):
        if not np.array_equal(batch["tokens"], right["tokens"]):
            raise SystemExit("first batch of a blend: the batches differ from the peer's")
    seconds = alternate(lambda: _first(ours()), lambda: _first(theirs()), rounds)
    return Comparison(
        what=f"first batch of a blend of {case.sources:,} datasets of {case.documents:,} "
        "documents, caches warm",
        ours=seconds[0],
        peer=seconds[1],
        items=case.sources,
        unit="dataset",
        asked=case.asked,
        output_bytes=MICRO_BATCH * SEQUENCE_LENGTH * 8 * 2,
    )


def _first(batches: Any) -> Any:
    """Return the first batch and its iterator, whose end is not timed."""
    return next(batches), batches
