"""Batches of Megatron's datasets under PyTorch's DataLoader, and a single corpus that is opened."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from support.inputs import for_each
from support.megatron_blends import assert_equal, build, files, installed, samples

SPLIT = {"split": "60,20,20"}
SIZES = (60, 9, 5)


@for_each(
    ("workers", "single", "mask"),
    [(0, True, True), (0, False, False), (2, True, False), (2, False, True)],
)
def test_a_dataloader_gives_megatrons_batches(
    core: Any, corpora: list[str], tmp_path: Path, workers: int, single: bool, mask: bool
) -> None:
    blend = (corpora[:1], None) if single else (corpora, [1.0] * len(corpora))
    config = {"blend": blend, "create_attention_mask": mask, **SPLIT}
    ids = [[5, 3, 8, 0], [1, 2, 4, 7], [6, 9, 11, 10]] * 3
    read: list[list[dict[str, torch.Tensor]]] = []
    for name in ("theirs", "ours"):
        with installed() if name == "ours" else contextlib.nullcontext():
            dataset = build(core, SIZES, tmp_path / name, **config)[0]
            loader = torch.utils.data.DataLoader(
                dataset, batch_sampler=ids, num_workers=workers, timeout=60 if workers else 0
            )
            read.append(list(loader))
    for theirs, ours in zip(*read, strict=True):
        assert type(ours) is dict
        assert list(ours) == list(theirs)
        for field, value in theirs.items():
            assert ours[field].dtype == value.dtype
            assert torch.equal(ours[field], value), field


def test_a_single_corpus_is_opened_when_it_is_built(
    core: Any, corpora: list[str], tmp_path: Path
) -> None:
    config = {"blend": (corpora[:1], None), **SPLIT}
    theirs = samples(build(core, SIZES, tmp_path / "theirs", **config))
    with installed():
        build(core, SIZES, tmp_path / "ours", **config)
        assert files(tmp_path / "ours") == files(tmp_path / "theirs")
        warm = build(core, SIZES, tmp_path / "ours", **config)
        assert all("index" in vars(dataset.dataset) for dataset in warm)
        assert all("shuffle_index" in vars(dataset) for dataset in warm)
        assert_equal(samples(warm), theirs)
