"""Arrays written under one sharding and read under another, by the keys of real batches."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megaindex
from megaindex.keys import Store, content, uniform

pytest.importorskip("torch")
from megaindex.loader import Loader, MicroBatchSampler, SampleOptions

WEIGHTS = np.random.default_rng(0).integers(1, 2**62, 8)


def of_tokens(tokens: Any) -> Any:
    """A number that only these tokens give: int64[n]."""
    return (tokens.numpy() * WEIGHTS).sum(axis=1)


def batches(index: Any, ranks: int, micro_batch: int, **sampling: Any) -> Iterator[Any]:
    for rank in range(ranks):
        sampler = MicroBatchSampler(
            num_samples=index.num_samples, micro_batch_size=micro_batch,
            data_parallel_rank=rank, data_parallel_size=ranks, tail="pad", **sampling,
        )  # fmt: skip
        yield from Loader(index, sampler, options=SampleOptions(keys="wide"))


def wide(batch: Any) -> Any:
    return content(batch["key"], batch["exposure"], batch["key_high"])


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    found = []
    for name in ("web", "code"):
        found.append(str(tmp_path / name))
        rng = np.random.default_rng(len(name))
        with megaindex.IndexedDatasetWriter(found[-1], "uint16") as writer:
            for length in rng.integers(5, 60, 300):
                writer.add_document(rng.integers(0, 50_000, length))
    return found


@pytest.mark.slow
def test_one_pass_of_a_teacher_serves_all_passes_on_other_ranks(
    tmp_path: Path, prefixes: list[str]
) -> None:
    store = Store(tmp_path / "store", dtype="int64", shape=())
    for prefix in prefixes:
        index = megaindex.build_index(prefix, sequence_length=8, epochs=1, order="window", seed=3)
        with store.writer() as writer:
            for batch in batches(index, ranks=6, micro_batch=5):
                real = batch["sample"] >= 0
                writer.append(wide(batch)[real], of_tokens(batch["tokens"])[real])
    store.merge()
    blend = megaindex.build_blend(
        prefixes, weights=[0.6, 0.4], num_samples=3000, sequence_length=8, order="window", seed=3
    )
    joined, exposures = 0, set()
    for batch in batches(blend, ranks=16, micro_batch=3):
        values, found = store.find(wide(batch))
        real = batch["sample"].numpy() >= 0
        assert np.array_equal(found[real], np.ones(real.sum(), bool))
        assert not found[~real].any()
        assert np.array_equal(values[real], of_tokens(batch["tokens"])[real])
        joined += int(real.sum())
        exposures |= set(batch["exposure"].tolist())
    assert joined == 3000
    assert exposures == {-1, 0, 1}


@pytest.mark.slow
def test_masks_of_rows_do_not_depend_on_the_ranks(prefixes: list[str]) -> None:
    blend = megaindex.build_blend(
        prefixes, weights=[0.6, 0.4], num_samples=700, sequence_length=8, seed=3
    )
    masks = []
    for ranks, micro_batch in ((1, 7), (6, 5), (16, 2)):
        found = np.zeros((700, 8), bool)
        for batch in batches(blend, ranks, micro_batch):
            real = batch["sample"] >= 0
            found[batch["sample"][real]] = (uniform(batch["key"], 8, "mlm") < 0.3)[real]
        masks.append(found)
    assert np.array_equal(masks[0], masks[1])
    assert np.array_equal(masks[0], masks[2])
    assert 0.25 < masks[0].mean() < 0.35
