"""Benchmark of warm reads in one process, against GPTDataset under a DataLoader."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megaindex
from benchmarks.timing import Comparison, timed_after
from megaindex.loader import BatchMaker, GPTDataset, MappedTokens, collate

SEED = 1234
MEAN_TOKENS = 1000
FIELDS = ("tokens", "labels", "loss_mask", "position_ids")
WARM_UP = 16  # batches: worker processes start, pages come in, buffers are made
Batches = list[list[int]]


def compare(
    directory: Path, rounds: int, *, length: int, sources: int, ours: str, workers: int
) -> Comparison:
    """Time the same collated samples on both sides; the first batches are compared.

    ``ours`` is "buffers", batches in reused buffers without a DataLoader, or "DataLoader".
    """
    sides = _sides(directory, length, sources)
    batches = sides.batches(64 if length > 10_000 else 400)
    _check(sides, ours, batches[:4])
    seconds: tuple[list[float], list[float]] = ([], [])
    for measured in range(rounds + 1):
        for side, times in zip((ours, "peer"), seconds, strict=True):
            taken = timed_after(
                sides.read(side, batches, workers if side == "peer" else 0), WARM_UP
            )
            if measured:
                times.append(taken)
    samples = sum(map(len, batches[WARM_UP:]))
    return Comparison(
        what=f"warm, S {length}, {sources} datasets, {ours} against {workers} workers",
        ours=seconds[0],
        peer=seconds[1],
        items=samples,
        unit="sample",
        asked=10.0 if ours == "buffers" and length == 2048 and workers == 0 else None,
        output_bytes=samples * length * (8 + 8 + 4 + 8),
    )


def against_memcpy(directory: Path, rounds: int, *, length: int) -> Comparison:
    """Time reading located batches against a copy of the same number of bytes."""
    sides = _sides(directory, length, 1)
    rows = sides.micro_batch
    spans = [sides.index.locate(batch) for batch in sides.batches(64 if length > 10_000 else 400)]
    pair = np.empty((2, rows, length), np.int64)
    copied = np.ones_like(pair), np.empty_like(pair)
    seconds: tuple[list[float], list[float]] = ([], [])
    for measured in range(rounds + 1):
        start = time.perf_counter()
        for each in spans:
            sides.reader.read(each, pair[0], pair[1], pad_id=-1)
        between = time.perf_counter()
        for _ in spans:
            np.copyto(copied[1], copied[0])
        if measured:
            seconds[0].append(between - start)
            seconds[1].append(time.perf_counter() - between)
    return Comparison(
        what=f"tokens and labels, S {length}, {rows} rows, against memcpy of the same bytes",
        ours=seconds[0],
        peer=seconds[1],
        items=len(spans) * rows,
        unit="sample",
        asked=0.6 if length == 8192 else None,
        output_bytes=pair.nbytes,
    )


class _Sides:
    """One corpus, or a blend of several, open on both sides."""

    def __init__(self, directory: Path, length: int, sources: int) -> None:
        from benchmarks import peer

        prefixes = [str(write_corpus(directory, sources, k)) for k in range(sources)]
        datasets = [megaindex.IndexedDataset(prefix) for prefix in prefixes]
        tokens = sum(dataset.num_tokens for dataset in datasets)
        # within one epoch of each source
        samples = int(0.9 * tokens) // length
        settings: dict[str, Any] = {"sequence_length": length, "seed": SEED}
        weights = [1.0] * sources
        self.index: Any
        if sources == 1:
            self.index = megaindex.build_index(datasets[0], num_samples=samples, **settings)
        else:
            self.index = megaindex.build_blend(
                datasets, weights=weights, num_samples=samples, **settings
            )
        self.peer = peer.megatron_blend(
            prefixes, None if sources == 1 else weights, samples, length, SEED, directory / "cache"
        )
        self.micro_batch = 1 if length > 100_000 else 8
        self.reader = MappedTokens(datasets)
        self._maker = BatchMaker(self.index, self.reader)
        self._dataset = GPTDataset(self.index, self.reader)

    def batches(self, count: int) -> Batches:
        ids = np.arange(min(count, self.index.num_samples // self.micro_batch) * self.micro_batch)
        batches: Batches = ids.reshape(-1, self.micro_batch).tolist()
        return batches

    def read(self, side: str, batches: Batches, workers: int = 0) -> Iterator[dict[str, Any]]:
        if side == "buffers":
            buffers = self._maker.allocate(self.micro_batch)
            for batch in batches:
                self._maker.fill(buffers, batch)
                yield buffers.arrays
        elif side == "DataLoader":
            yield from torch.utils.data.DataLoader(
                self._dataset, batch_sampler=batches, collate_fn=collate
            )
        else:
            yield from torch.utils.data.DataLoader(
                self.peer, batch_sampler=batches, num_workers=workers
            )


_sides = cache(_Sides)


def _check(sides: _Sides, ours: str, batches: Batches) -> None:
    both = zip(sides.read(ours, batches), sides.read("peer", batches), strict=True)
    for mine, theirs in both:
        for name in FIELDS:
            if not np.array_equal(np.asarray(mine[name]), theirs[name].numpy()):
                raise SystemExit(f"{name} of a batch differ from megatron-core's")


@cache
def write_corpus(directory: Path, sources: int, number: int) -> Path:
    """Write part ``number`` of about 32 M random tokens, or of more if a sample is long."""
    prefix = directory / f"loading-{sources}-{number}"
    rng = np.random.default_rng(number)
    left = max(1 << 25, sources * 300_000) // sources
    with megaindex.IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        while left > 0:
            drawn = int(rng.lognormal(np.log(MEAN_TOKENS) - 0.5, 1.0)) + 1
            writer.add_document(rng.integers(0, 50_000, drawn, dtype=np.uint16))
            left -= drawn
    return prefix
