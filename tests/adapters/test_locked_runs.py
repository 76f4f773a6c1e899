"""``install(lock=…)``: datasets that the frameworks build, compared with the lock of their run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.megatron_blends import build, one_process, write_corpora
from support.neox_running import arguments, loaders_of

import megaindex.adapters.megatron as adapter
import megaindex.adapters.neox as neox_adapter
from megaindex import Skip
from megaindex.adapters import status
from megaindex.errors import FormatError, InvalidArgument
from megaindex.lock import make_lock

SETTINGS = {"sequence_length": 16, "seed": 1, "global_batch_size": 4, "split": "90,10,0"}


@pytest.fixture
def core(megatron_datasets: Any, tmp_path: Path) -> Iterator[Any]:
    with one_process(megatron_datasets, tmp_path / "store") as made:
        yield made


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    adapter.uninstall()


def test_megatron_builds_what_was_locked(core: Any, tmp_path: Path) -> None:
    prefixes = write_corpora(tmp_path)[1:4]
    words = [word for pair in zip("325", prefixes, strict=True) for word in pair]
    run = {"train_iters": 40, "eval_iters": 1, "eval_interval": 40, **SETTINGS}
    lock = str(tmp_path / "run.lock")
    make_lock(data_path=words, **run).write(lock)
    blend = (prefixes, [3.0, 2.0, 5.0])
    adapter.install(lock=lock)
    build(core, (160, 8, 0), None, blend=blend, split="90,10,0")
    assert "checked by lock" in str(status())
    for given, message in (
        ({"random_seed": 2}, r"run\.lock: train: the receipt of steps 0 to"),
        ({"blend": (prefixes, [3.0, 2.0, 4.0])}, "the receipt of steps"),
        ({"blend": (prefixes[:2], [3.0, 2.0])}, "sources must be 3, got 2"),
        ({"split": "80,20,0"}, "the receipt of steps"),
    ):
        with pytest.raises(FormatError, match=message):
            build(core, (160, 8, 0), None, **{"blend": blend, "split": "90,10,0", **given})
    with pytest.raises(FormatError, match="samples must be at least 160"):
        build(core, (80, 8, 0), None, blend=blend, split="90,10,0")
    for suffix in (".idx", ".bin"):  # other data under the same path
        shutil.copy(f"{prefixes[0]}{suffix}", f"{prefixes[1]}{suffix}")
    with pytest.raises(FormatError, match=r"c2\.(bin|idx): .* as in .*run\.lock \(source 1\)"):
        build(core, (160, 8, 0), None, blend=blend, split="90,10,0")


def test_the_lock_of_another_framework_is_refused(core: Any, tmp_path: Path) -> None:
    prefixes = write_corpora(tmp_path)
    others: dict[str, Any] = {"skip": [Skip(steps="1")]}
    for order, more in (
        ("epoch", {}),
        ("megatron", {"phase_transition_iterations": [2]}),
        ("megatron", others),
    ):
        lock = make_lock(data_path=prefixes[4], order=order, train_iters=4, **SETTINGS, **more)
        with pytest.raises(
            InvalidArgument, match=r"order megatron, got epoch|phase by phase|with skips"
        ):
            adapter.install(lock=lock)


@pytest.mark.parametrize("blend", [False, True])
def test_neox_builds_what_was_locked(neox: Any, tmp_path: Path, blend: bool) -> None:
    lengths = np.random.default_rng(8).integers(1, 40, 150).tolist()
    sizes = [lengths, lengths[::-1], lengths[:70]] if blend else [lengths]
    args = arguments(
        tmp_path, sizes, split="60,20,20", train_batch_size=4, batch_size=4, world_size=1
    )
    args.data_path = None if blend else args.paths[0]
    data: dict[str, Any] = {"data_path": args.paths[0], "split": "60,20,20"}
    if blend:
        words = [word for path in args.paths for word in ("1.0", path)]
        data = {f"{name}_data_path": words for name in ("train", "valid", "test")}
    run = {
        "order": "neox", "sequence_length": args.seq_length, "seed": args.seed,
        "train_iters": args.train_iters, "eval_iters": args.eval_iters,
        "eval_interval": args.eval_interval, "micro_batch_size": 4, "data_parallel_size": 1,
    }  # fmt: skip
    lock = make_lock(**data, **run)
    neox_adapter.install(lock=lock)
    loaders_of(args)
    for path in Path(args.paths[0]).parent.glob("*_indexmap_*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    args.seed += 1
    with pytest.raises(FormatError, match="train: the receipt of steps 0 to"):
        loaders_of(args)
