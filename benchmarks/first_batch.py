"""Benchmark of the time from the prefixes of a blend with built indices to the first batch."""

from __future__ import annotations

import struct
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.timing import Comparison, alternate

SOURCES = 500
SEQUENCE_LENGTH = 2048
MICRO_BATCH = 8
NUM_SAMPLES = 20_000


def compare(directory: Path, rounds: int) -> Comparison:
    """Time both sides with warm caches; the first 64 batches must be equal."""
    prefixes = _write(directory)
    weights = np.random.default_rng(2).lognormal(0, 0.5, SOURCES).tolist()
    batches = np.arange(64 * MICRO_BATCH).reshape(-1, MICRO_BATCH).tolist()

    def ours() -> Any:
        from megaindex import build_blend
        from megaindex.loader import Loader

        index = build_blend(
            prefixes, num_samples=NUM_SAMPLES, weights=weights, sequence_length=SEQUENCE_LENGTH,
            seed=1, split="1", cache_dir=directory / "blend-cache",
        )  # fmt: skip
        return iter(Loader(index, index.datasets, batches))

    def theirs() -> Any:
        from torch.utils.data import DataLoader

        dataset = _megatron(prefixes, weights, directory / "blend-peer-cache")
        return iter(DataLoader(dataset, batch_sampler=batches))

    for batch, right in zip(ours(), theirs(), strict=True):
        if not np.array_equal(batch["tokens"], right["tokens"]):
            raise SystemExit("first batch of a blend: the batches differ from the peer's")
    seconds = alternate(lambda: _first(ours()), lambda: _first(theirs()), rounds)
    return Comparison(
        what=f"first batch of a blend of {SOURCES} datasets, caches warm",
        ours=seconds[0],
        peer=seconds[1],
        items=SOURCES,
        unit="dataset",
        asked=10.0,
        output_bytes=MICRO_BATCH * SEQUENCE_LENGTH * 8 * 2,
    )


def _first(batches: Any) -> Any:
    """Return the first batch and its iterator, whose end is not timed."""
    return next(batches), batches


@cache
def _write(directory: Path) -> list[str]:
    """Write small, distinct corpora."""
    prefixes = []
    for number in range(SOURCES):
        rng = np.random.default_rng(number)
        lengths = rng.integers(100, 900, 500).astype(np.int32)
        ends = np.cumsum(lengths, dtype=np.int64)
        prefix = directory / f"blend{number}"
        rng.integers(0, 50_000, int(ends[-1]), dtype=np.uint16).tofile(f"{prefix}.bin")
        with open(f"{prefix}.idx", "wb") as file:
            count = lengths.size
            file.write(b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, count, count + 1))
            for array in (lengths, (ends - lengths) * 2, np.arange(count + 1, dtype=np.int64)):
                array.tofile(file)
        prefixes.append(str(prefix))
    return prefixes


def _megatron(prefixes: list[str], weights: list[float], cache_directory: Path) -> Any:
    from torch import distributed

    from benchmarks import peer

    if not distributed.is_initialized():  # the builder queries the rank
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets.blended_megatron_dataset_builder import (
            BlendedMegatronDatasetBuilder,
        )
        from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

        config = GPTDatasetConfig(
            random_seed=1,
            sequence_length=SEQUENCE_LENGTH,
            blend=(prefixes, weights),
            split="1",
            tokenizer=peer.Tokenizer(),
            reset_position_ids=False,
            reset_attention_mask=False,
            eod_mask_loss=False,
            create_attention_mask=False,
            path_to_cache=str(cache_directory),
        )
        sizes = [NUM_SAMPLES, 0, 0]
        builder = BlendedMegatronDatasetBuilder(peer.GPTDataset, sizes, lambda: True, config)
        return builder.build()[0]
