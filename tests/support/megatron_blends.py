"""Blends built by megatron-core, with and without the adapter, and how they are compared."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from support.corpora import write_corpus
from support.megatron_dataset import EOD, Tokenizer

import megaindex.adapters.megatron as adapter

SOURCES = 5


@contextlib.contextmanager
def one_process(core: Any, store: Path) -> Iterator[Any]:
    """The fixture megatron_datasets with a process group of one, as Megatron's blends need it."""
    import torch
    import torch.distributed as dist
    from megatron.core.datasets import blended_dataset, blended_megatron_dataset_builder

    logging.getLogger("megatron").setLevel(logging.ERROR)
    torch.set_num_threads(1)  # samples are small
    core.BlendedDataset = blended_dataset.BlendedDataset
    core.Builder = blended_megatron_dataset_builder.BlendedMegatronDatasetBuilder
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    try:
        yield core
    finally:
        dist.destroy_process_group()


def write_corpora(directory: Path) -> list[str]:
    """Prefixes of corpora of 20 to 100 documents, some of them empty; each ends with eod."""
    generator = np.random.default_rng(5)
    prefixes = []
    for number in range(SOURCES):
        lengths = generator.integers(0, 60, 20 * (number + 1))
        lengths[[0, -1]] = 30  # megatron-core fails where a partial last sample ends in nothing
        dtype = np.uint16 if number % 2 else np.int32
        write_corpus(directory / f"c{number}", lengths, dtype, eod=EOD if number % 2 == 0 else 7)
        prefixes.append(str(directory / f"c{number}"))
    return prefixes


@contextlib.contextmanager
def installed() -> Iterator[None]:
    adapter.install()
    try:
        yield
    finally:
        adapter.uninstall()


def build(
    core: Any,
    sizes: Sequence[int | None],
    cache: str | Path | None,
    *,
    cls: Any = None,
    builder: Any = None,
    tokenizer: Any = None,
    config_cls: Any = None,
    **config: Any,
) -> list[Any]:
    masks = dict.fromkeys(("reset_position_ids", "reset_attention_mask", "eod_mask_loss"), False)
    if config_cls not in (None, core.GPTDatasetConfig):
        masks = {}
    for name in ("multiple_validation_sets", "mid_level_dataset_surplus"):  # 0.14, 0.13
        if name not in core.GPTDatasetConfig.__dataclass_fields__:
            config.pop(name, None)
    made = (config_cls or core.GPTDatasetConfig)(
        path_to_cache=None if cache is None else str(cache),
        tokenizer=tokenizer or Tokenizer(),
        **{"random_seed": 1, "sequence_length": 16, **masks, **config},
    )
    cls, builder = cls or core.GPTDataset, builder or core.Builder
    result: list[Any] = builder(cls, list(sizes), lambda: True, made).build()
    return result


def flat(datasets: Sequence[Any]) -> list[Any]:
    """The datasets that there are: several validation sets come as a list."""
    return [
        d for top in datasets for d in (top if isinstance(top, list) else [top]) if d is not None
    ]


def places(dataset: Any) -> list[int]:
    """The first samples, and the last."""
    return sorted({*range(min(len(dataset), 24)), *range(max(0, len(dataset) - 8), len(dataset))})


def samples(datasets: Sequence[Any]) -> list[list[Any]]:
    return [[read(dataset, i) for i in places(dataset)] for dataset in flat(datasets)]


def read(dataset: Any, place: int) -> Any:
    """A sample with a loss mask of its own: Megatron clears those of others with it, see
    test_the_loss_mask_of_one_sample_is_its_own."""
    for source in getattr(dataset, "datasets", [dataset]):
        source.masks_and_position_ids_are_cached = False
    return dataset[place]


def assert_equal(ours: Any, theirs: Any) -> None:
    """Samples, in lists of any depth: same fields in the same order, dtypes, shapes and values."""
    import torch

    if isinstance(theirs, list):
        assert len(ours) == len(theirs)
        for pair in zip(ours, theirs, strict=True):
            assert_equal(*pair)
        return
    assert list(ours) == list(theirs)
    for name, expected in theirs.items():
        value = ours[name]
        if isinstance(expected, torch.Tensor):
            assert value.dtype == expected.dtype
            assert torch.equal(value, expected), name
        else:
            assert type(value) is type(expected)
            assert value == expected


def files(cache: str | Path) -> dict[str, bytes]:
    """What Megatron finds in a cache directory."""
    names = sorted(name for name in os.listdir(cache) if not name.endswith("-megaindex.json"))
    return {name: (Path(cache) / name).read_bytes() for name in names}
