"""Benchmark of megatron-core's datasets under PyTorch's DataLoader, with and without adapter.

The DataLoader has the settings of Megatron's ``build_pretraining_data_loader``: a batch sampler,
the default collate function and persistent workers.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

import megaindex.adapters.megatron as adapter
from benchmarks.loading import write_corpus
from benchmarks.timing import Comparison, installed_or_not, timed_after

MICRO_BATCH = 8
WARM_UP = 16  # batches: worker processes start, files are opened, pages come in
ASKED = {0: 5.0, 2: 2.0}  # with workers


def compare(
    directory: Path, rounds: int, *, length: int, sources: int, workers: int, mask: bool = False
) -> Comparison:
    """Time the same batches on both sides; the first are compared."""
    prefixes = [str(write_corpus(directory, sources, k)) for k in range(sources)]
    samples = int(0.9 * sum(Path(f"{p}.bin").stat().st_size // 2 for p in prefixes)) // length
    count = min(WARM_UP + (64 if mask else 400), samples // MICRO_BATCH)
    ids = np.random.default_rng(0).permutation(samples)[: count * MICRO_BATCH]
    batches = ids.reshape(count, MICRO_BATCH).tolist()

    def loader(count: int) -> Iterator[Any]:
        dataset = _dataset(prefixes, samples, length, directory / "dataloader-cache", mask=mask)
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=batches[:count],
            num_workers=workers,
            pin_memory=torch.cuda.is_available(),
            persistent_workers=workers > 0,
        )
        return iter(loader)

    seconds: tuple[list[float], list[float]] = ([], [])
    checked: list[list[dict[str, torch.Tensor]]] = []
    for number in range(rounds + 1):
        for side, installed in zip(seconds, (True, False), strict=True):
            with installed_or_not(adapter, installed):
                if number:
                    side.append(timed_after(loader(count), WARM_UP))
                else:
                    checked.append([{k: v.clone() for k, v in b.items()} for b in loader(4)])
    _check_equal(*checked)
    read = (count - WARM_UP) * MICRO_BATCH
    what = "one corpus" if sources == 1 else f"a blend of {sources}"
    return Comparison(
        what=f"Megatron, {what} under a DataLoader with {workers} workers, S {length}"
        + (", attention masks" if mask else ""),
        ours=seconds[0],
        peer=seconds[1],
        items=read,
        unit="sample",
        asked=ASKED.get(workers),
        output_bytes=read * length * (8 + 8 + 4 + 8),
    )


def _dataset(prefixes: list[str], samples: int, length: int, cache: Path, *, mask: bool) -> Any:
    from benchmarks import peer

    weights = None if len(prefixes) == 1 else [1.0] * len(prefixes)
    return peer.megatron_blend(prefixes, weights, samples, length, 1234, cache, with_mask=mask)


def _check_equal(
    ours: list[dict[str, torch.Tensor]], theirs: list[dict[str, torch.Tensor]]
) -> None:
    for one, other in zip(ours, theirs, strict=True):
        same = list(one) == list(other) and all(
            one[name].dtype == other[name].dtype and torch.equal(one[name], other[name])
            for name in one
        )
        if not same:
            raise SystemExit("the batches differ")
