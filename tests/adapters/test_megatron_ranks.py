"""The Megatron adapter in several processes: who builds, who waits, and who dies."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import warnings
from pathlib import Path
from typing import Any

import pytest
from support.megatron_blends import build, files, installed, places

pytestmark = pytest.mark.slow

WEIGHTS = [1.0, 2.0, 3.0, 2.0, 1.0]
CONFIG = {"split": "60,20,20", "mid_level_dataset_surplus": 1.0}
SIZES = (60, 9, 5)
# Processes that share no state with this one, forked from one that has imported all of it once.
RANKS = multiprocessing.get_context("forkserver")
RANKS.set_forkserver_preload(
    ["torch.distributed", "megatron.core.datasets.blended_megatron_dataset_builder"]
)


def import_core() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import blended_megatron_dataset_builder as builder
        from megatron.core.datasets import gpt_dataset

    class Namespace:
        GPTDataset = gpt_dataset.GPTDataset
        GPTDatasetConfig = gpt_dataset.GPTDatasetConfig
        Builder = builder.BlendedMegatronDatasetBuilder

    return Namespace


def train(rank: int, size: int, store: str, cache: str, out: str, corpora: list[str]) -> None:
    """One rank: builds or waits, and says what it was served and what it built."""
    import torch
    import torch.distributed as dist

    import megaindex.adapters.megatron as adapter
    from megaindex.adapters.megatron.arrays import DatasetRequest

    torch.set_num_threads(1)
    namespace = import_core()
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    filled: list[str] = []
    fill = DatasetRequest.fill

    def counted(self: DatasetRequest, *args: Any) -> None:
        filled.append(self.name)
        fill(self, *args)

    DatasetRequest.fill = counted  # type: ignore[method-assign]
    adapter.install()

    def no_barrier(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a rank waits at a barrier")

    dist.barrier = no_barrier
    made = build(namespace, SIZES, cache, blend=(corpora, WEIGHTS), **CONFIG)
    tokens = [s["tokens"].tolist() for s in made[0].__getitems__(places(made[0]))]
    Path(out, f"{rank}.json").write_text(json.dumps({"tokens": tokens, "filled": filled}))


def die_while_building(cache: str, corpora: list[str]) -> None:
    """A builder that is killed when half of the files are there."""
    import torch.distributed as dist

    import megaindex.adapters.megatron as adapter
    from megaindex.adapters.megatron.arrays import DatasetRequest

    namespace = import_core()
    store = Path(cache).parent / "dying"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    fill, done = DatasetRequest.fill, []

    def counted(self: DatasetRequest, *args: Any) -> None:
        if len(done) == 7:
            os.kill(os.getpid(), signal.SIGKILL)
        done.append(self.name)
        fill(self, *args)

    DatasetRequest.fill = counted  # type: ignore[method-assign]
    adapter.install()
    build(namespace, SIZES, cache, blend=(corpora, WEIGHTS), **CONFIG)


def run(tmp_path: Path, caches: list[Path], corpora: list[str]) -> list[dict[str, Any]]:
    """One process for each of ``caches``."""
    out = tmp_path / "out"
    out.mkdir()
    workers = [
        RANKS.Process(
            target=train,
            args=(rank, len(caches), str(tmp_path / "store"), str(cache), str(out), corpora),
        )
        for rank, cache in enumerate(caches)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(300)
        assert worker.exitcode == 0
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(len(caches))]


def test_one_builder_per_file_system(tmp_path: Path, corpora: list[str]) -> None:
    """Ranks 0 and 1 see one directory, rank 2 another, as if on the disk of another node."""
    shared, own = tmp_path / "shared", tmp_path / "own"
    ranks = run(tmp_path, [shared, shared, own], corpora)
    assert sorted(len(rank["filled"]) for rank in ranks[:2]) == [0, 15]
    assert len(ranks[2]["filled"]) == 15
    assert ranks[0]["tokens"] == ranks[1]["tokens"] == ranks[2]["tokens"]
    assert files(shared) == files(own)


def test_a_killed_builder_is_replaced(core: Any, tmp_path: Path, corpora: list[str]) -> None:
    cache = tmp_path / "cache"
    dying = RANKS.Process(target=die_while_building, args=(str(cache), corpora))
    dying.start()
    dying.join(300)
    assert dying.exitcode == -signal.SIGKILL
    assert list(cache.glob("*.claim"))
    assert not list(cache.glob("*description.txt"))  # nothing that Megatron would take as complete
    [rank] = run(tmp_path, [cache], corpora)
    assert len(rank["filled"]) == 15
    assert not list(cache.glob("*.claim*"))
    clean = tmp_path / "clean"
    with installed():
        made = build(core, SIZES, str(clean), blend=(corpora, WEIGHTS), **CONFIG)
        expected = [s["tokens"].tolist() for s in made[0].__getitems__(places(made[0]))]
    assert rank["tokens"] == expected
    left = {name for name in files(cache) if ".tmp." in name}
    assert {n: b for n, b in files(cache).items() if n not in left} == files(clean)


def build_alone(cache: str, corpora: list[str]) -> None:
    """Without a process group, which releases up to 0.16.1 fail to build a blend in."""
    import megaindex.adapters.megatron as adapter

    namespace = import_core()
    adapter.install()
    made = build(namespace, SIZES, cache, blend=(corpora, WEIGHTS), **CONFIG)
    assert len(made[0].__getitems__(places(made[0]))) == len(places(made[0]))


def test_without_a_process_group(tmp_path: Path, corpora: list[str]) -> None:
    alone = RANKS.Process(target=build_alone, args=(str(tmp_path / "cache"), corpora))
    alone.start()
    alone.join(300)
    assert alone.exitcode == 0
