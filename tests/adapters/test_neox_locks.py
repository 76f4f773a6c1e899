"""Runs of GPT-NeoX under a lock: the lock's in every sample, or refused before the first step."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import yaml
from support import neox_stand_in
from support.command_line import cli
from support.neox_running import arguments, loaders_of, pairs_of

import megaindex.adapters.neox as adapter
from megaindex import CostModel, Skip
from megaindex.adapters import status
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.neox.locks import STARTS
from megaindex.errors import FormatError, InvalidArgument
from megaindex.lock import Lock, make_lock, open_run

LENGTHS = np.random.default_rng(8).integers(1, 40, 150).tolist()
KINDS = ["split", "blend", "split epochs", "blend epochs"]
DIFFERS = "must be|in several passes"


def settings(folder: Path, kind: str, **given: Any) -> SimpleNamespace:
    """Arguments of a run on two ranks, in steps of two micro batches of four samples."""
    size = {"world_size": 2, "batch_size": 2, "train_batch_size": 8, "split": "60,20,20",
            "gradient_accumulation_steps": 2, "train_iters": 12}  # fmt: skip
    if kind.endswith("epochs"):
        size |= {"train_epochs": 3, "train_iters": None}
    blend = kind.startswith("blend")
    args = arguments(
        folder, [LENGTHS, LENGTHS[40::-1]] if blend else [LENGTHS], **{**size, **given}
    )
    args.data_path = None if blend else args.paths[0]
    return args


def locked(args: SimpleNamespace, **more: Any) -> Lock:
    keys = ("seq_length", "seed", "split", "train_iters", "train_epochs", "eval_interval",
            "eval_iters", "gradient_accumulation_steps", "data_path", "data_impl")  # fmt: skip
    config = {key: getattr(args, key) for key in keys if getattr(args, key) is not None}
    config["train_micro_batch_size_per_gpu"] = args.batch_size
    if not args.data_path:
        config |= {f"{name}_data_paths": args.paths for name in ("train", "valid", "test")}
    folder = Path(args.paths[0]).parent
    (folder / "neox.yml").write_text(yaml.dump(config))
    lock = make_lock(neox_config=folder / "neox.yml", data_parallel_size=args.world_size, **more)
    return lock.write(folder / "run.lock", overwrite=True)


def served(
    args: SimpleNamespace, part: int = 0, count: int | None = None, wrap: Any = None
) -> list[list[list[int]]]:
    """The rows of each step of all ranks, from ``args.iteration`` on, as GPT-NeoX asks for them."""
    wrap, ranks = wrap or neox_stand_in.data_utils().shift_and_wrap_data_loaders, []
    for path in Path(args.paths[0]).parent.glob("*_indexmap_*"):
        path.unlink()
    for rank in range(args.world_size):
        args = SimpleNamespace(**{**vars(args), "rank": rank})
        loaders = loaders_of(args)
        if args.train_epochs:  # as update_iterations does
            args.train_iters = len(loaders["train"]) * args.train_epochs // 2
        iterator = wrap(args, loaders)[part]
        steps = args.train_iters - args.iteration if count is None else count
        ranks.append([batch["text"].tolist() for batch in itertools.islice(iterator, 2 * steps)])
    micro = [[*a, *b] for a, b in zip(*ranks, strict=True)]
    return [[*a, *b] for a, b in zip(micro[::2], micro[1::2], strict=True)]


def rows_of(lock: Lock) -> list[list[list[int]]]:
    """The rows of each step by the loader that reads the lock alone."""
    rows = [
        [*tokens, labels[-1]]
        for batch in open_run(lock, data_parallel_size=1, micro_batch_size=8)
        for tokens, labels in zip(*(batch[n].tolist() for n in ("tokens", "labels")), strict=True)
    ]
    return [rows[begin : begin + 8] for begin in range(0, len(rows), 8)]


def traced(lock: Lock, step: int) -> list[list[int]]:
    """The input tokens of a step, which count on through each corpus, by ``megaindex trace``."""
    status, out, err = cli("trace", "--lock", lock.path, "--step", step, "--json")
    assert status == 0, err
    rows: dict[int, list[int]] = {}
    for span in json.loads(out)["spans"]:
        begin = sum(LENGTHS[: span["document"]]) + span["offset"]
        rows.setdefault(span["sample"], []).extend(range(begin, begin + span["length"]))
    return list(rows.values())


@pytest.mark.slow_cases("blend", "split epochs")
@pytest.mark.parametrize("kind", KINDS)
def test_a_resumed_run_serves_the_lock(neox: Any, tmp_path: Path, kind: str) -> None:
    """Also where GPT-NeoX would repeat the rest of a pass from then on."""
    args = settings(tmp_path, kind)
    lock = locked(args)
    expected = rows_of(lock)
    adapter.install()
    assert served(args) == expected
    for iteration in (1, len(expected) // 2, len(expected) - 1):
        args.iteration = iteration
        adapter.install(lock=lock)
        assert served(args) == expected[iteration:]
    args.iteration = 1
    adapter.install()
    assert (served(args) == expected[1:]) is not kind.endswith("epochs")
    if args.data_path:
        step = len(expected) - 1
        assert traced(lock, step) == [row[:-1] for row in expected[step]]


@pytest.mark.slow_cases("blend")
@pytest.mark.parametrize("kind", KINDS)
def test_another_run_is_refused(neox: Any, tmp_path: Path, kind: str) -> None:
    args = settings(tmp_path, kind)
    lock = locked(args)
    others: list[dict[str, Any]] = [{"seed": 5}, {"batch_size": 4, "train_batch_size": 16}]
    if args.data_path:
        others += [{"seq_length": 17}, {"split": "61,20,19"}]
    else:
        others += [{"weights": [1.0, 1.1]}] if args.train_iters else [{"paths": args.paths[::-1]}]
    if args.train_epochs:
        others += [{"train_epochs": number} for number in (2, 4)]
    else:
        others += [{"train_iters": number} for number in (11, 13)]
        # the same samples in other steps
        others += [{"train_iters": 24, "train_batch_size": 4, "gradient_accumulation_steps": 1}]
    for other, iteration in [*((other, 0) for other in others), (others[-1], 5)]:
        changed = SimpleNamespace(**{**vars(args), **other, "iteration": iteration})
        adapter.install(lock=lock)
        with pytest.raises((FormatError, InvalidArgument), match=DIFFERS):
            served(changed)
    if args.train_epochs:
        adapter.install(True, lock=lock)
        with pytest.raises((FormatError, InvalidArgument), match=DIFFERS):
            served(args)
    else:
        adapter.install(True, lock=lock)
        served_exactly = served(args)
        adapter.install(lock=lock)
        assert served_exactly == served(args)


@pytest.mark.parametrize("iteration", [0, 3, 4, 6, 11])
def test_evaluations_go_on_where_the_lock_does(neox: Any, tmp_path: Path, iteration: int) -> None:
    """GPT-NeoX itself goes on at another batch between two evaluations."""
    args = settings(tmp_path, "split", eval_interval=4, eval_iters=2)
    lock = locked(args)
    adapter.install(lock=lock)
    rounds = served(args, part=1, count=8)
    args.iteration = iteration
    begin = iteration // 4 * 2
    assert served(args, part=1, count=8 - begin) == rounds[begin:]
    for name, value in (("eval_iters", 3), ("eval_interval", 3)):
        other = SimpleNamespace(**{**vars(args), name: value})
        with pytest.raises(FormatError, match=r"valid: samples must be|valid: the receipt"):
            served(other)


def test_a_subset_without_a_loader_is_not_compared(neox: Any, tmp_path: Path) -> None:
    args = settings(tmp_path, "split", eval_interval=4, eval_iters=2)
    adapter.install(lock=locked(args))
    loaders = {**loaders_of(args), "valid": None}
    args.eval_iters = 3  # of which only the loaders of subsets know
    iterators = neox_stand_in.data_utils().shift_and_wrap_data_loaders(
        args, {**loaders, "test": None}
    )
    assert [iterator is None for iterator in iterators] == [False, True, True]
    with pytest.raises(FormatError, match="test: samples requested must be"):
        neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)


def test_pairs_are_refused_under_a_lock(neox: Any, tmp_path: Path) -> None:
    args = settings(tmp_path, "split")
    adapter.install(lock=locked(args))
    pairs, _ = pairs_of(tmp_path)
    with pytest.raises(InvalidArgument, match="lock need the documents .* got PairwiseDataset"):
        neox_stand_in.data_utils().make_data_loader(pairs, args)


def test_a_run_of_which_nothing_was_compared(
    neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = settings(tmp_path, "split")
    adapter.install(lock=locked(args))
    loaders = {**loaders_of(args), "train": None}
    with pytest.raises(InvalidArgument, match="no training data to compare"):
        neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)
    monkeypatch.setenv("RANK", "1")  # which reads with rank 0, of whose model it has a part
    iterators = neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)
    assert iterators[0] is None
    assert not hasattr(loaders["valid"].batch_sampler, STARTS)


def test_a_resumed_loader_that_a_job_wraps_itself(neox: Any, tmp_path: Path) -> None:
    args = settings(tmp_path, "split epochs", rank=0)
    adapter.install(lock=locked(args))
    loader = loaders_of(args)["train"]
    assert len(next(iter(loader))["text"]) == 2
    loader.batch_sampler.start_iter = 3
    with pytest.raises(InvalidArgument, match="needs data_utils.shift_and_wrap_data_loaders"):
        next(iter(loader))


SKIP = [Skip(steps="4"), Skip(steps="7", move=True)]
JOB = """
from megatron.data.data_utils import cycle, make_data_loader as make, shift_and_wrap_data_loaders
"""


class Lazy(ModuleType):
    """A module that must not be touched."""

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError(name)

    @property
    def __dict__(self) -> Any:  # type: ignore[override]
        raise RuntimeError("all of its names are loaded")


@pytest.mark.usefixtures("all_modules")
@pytest.mark.parametrize("name", ["skip", "lock", "balance"])
def test_names_that_a_job_imported_before(
    neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    args = settings(tmp_path, "split", iteration=3)
    lock = locked(args, **({"skip": SKIP} if name == "skip" else {}))
    adapter.install(lock=lock)
    expected = served(args)
    adapter.uninstall()
    job: Any = ModuleType("my_job.data")
    exec(JOB, vars(job))
    own = job.make, job.shift_and_wrap_data_loaders
    monkeypatch.setitem(sys.modules, job.__name__, job)
    monkeypatch.setitem(sys.modules, "my_job.lazy", Lazy("my_job.lazy"))
    monkeypatch.setitem(sys.modules, "my_job.absent", None)
    balance = CostModel(linear=0, attention=1)
    given = {"skip": {"skip": SKIP}, "lock": {"lock": lock}, "balance": {"balance": balance}}
    adapter.install(**given[name])
    assert "function my_job.data.make: replaced" in str(status())
    monkeypatch.setattr(neox.data.data_utils, "make_data_loader", job.make)
    found = served(args, wrap=job.shift_and_wrap_data_loaders)
    assert list(map(sorted, found)) == list(map(sorted, expected))
    assert (found == expected) is (name != "balance")
    adapter.uninstall()
    assert own == (job.make, job.shift_and_wrap_data_loaders)
    assert "my_job" not in str(status())


@pytest.mark.parametrize(
    ("name", "first", "moment"),
    [
        *itertools.product(["", "exact"], [False, True], ["loaders", "iterators"]),
        *((name, first, "iterators" if first else "loaders")
          for name in ("lock", "skip", "balance", "variance_buffer", "separate_final_epoch")
          for first in (False, True)),
    ],
)  # fmt: skip
def test_installed_too_late(
    neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, first: bool, moment: str
) -> None:
    """After data that GPT-NeoX's own code made, or that were made under other settings."""
    args = settings(tmp_path, "split", rank=0)
    given: dict[str, Any] = {
        "": {}, "exact": {"exact": True}, "skip": {"skip": SKIP},
        "lock": {"lock": locked(args) if name == "lock" else None},
        "balance": {"balance": CostModel(linear=0, attention=1)},
        "variance_buffer": {"variance_buffer": 1.1},
        "separate_final_epoch": {"separate_final_epoch": "always"},
    }[name]  # fmt: skip
    utils = neox_stand_in.data_utils()
    loaders: dict[str, Any] = {"train": None, "valid": None, "test": None}
    if first:
        adapter.install()
        loaders["train"] = loaders_of(args)["train"]
    else:
        read = lambda self, idx: {"text": np.full(17, idx)}  # noqa: E731
        monkeypatch.setattr(neox_stand_in.GPT2Dataset, "__getitem__", read)
        monkeypatch.setattr(neox_stand_in.GPT2Dataset, "__len__", lambda self: 124)
        made: Any = object.__new__(neox_stand_in.GPT2Dataset)
        made.name, made.shuffle_idx_len, made.sample_idx_len = "train", 124, 124
        loaders["train"] = utils.make_data_loader(made, args)
    if moment == "iterators":
        iterators = utils.shift_and_wrap_data_loaders(args, loaders)

    def go_on() -> list[int]:
        found = iterators if moment == "iterators" else utils.shift_and_wrap_data_loaders(
            args, loaders
        )  # fmt: skip
        return [int(row[0]) for batch in itertools.islice(found[0], 3) for row in batch["text"]]

    adapter.install(**given)
    if name:
        with pytest.raises(InvalidArgument, match="made before install"):
            go_on()
    elif first:
        assert len(go_on()) == 6
    else:
        assert go_on() == [0, 1, 4, 5, 8, 9]


def test_what_neox_made_before_install_is_read_by_its_own_code(
    neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in = neox_stand_in
    monkeypatch.setattr(stand_in.BlendableDataset, "__getitem__", lambda self, idx: ("its", idx))
    blend: Any = object.__new__(stand_in.BlendableDataset)
    blend.size = 4
    ways = {"__getitem__": lambda self, idx: [idx], "get": lambda self, *given: list(given)}
    for name, read in ways.items():
        monkeypatch.setattr(stand_in.MMapIndexedDataset, name, read)
        monkeypatch.setattr(stand_in.IndexedDataset, "__getitem__", lambda self, idx: ["old", idx])
    monkeypatch.setattr(stand_in.MMapIndexedDataset, "__del__", lambda self: None)
    pair: Any = object.__new__(stand_in.MMapIndexedDataset)
    old: Any = object.__new__(stand_in.IndexedDataset)
    adapter.install()
    assert (blend[2], blend.__getitems__([1, 0])) == (("its", 2), [("its", 1), ("its", 0)])
    assert (pair[3], pair.get(3, 1, 2), old[1]) == ([3], [3, 1, 2], ["old", 1])
    own = framework().original("blendable_dataset", "BlendableDataset", "__len__")
    assert own is stand_in.BlendableDataset.__len__  # which stays
    adapter.install(exact=True)
    with pytest.raises(InvalidArgument, match="a BlendableDataset was made before install"):
        blend[2]


def test_installed_too_late_for_worker_processes(neox: Any, tmp_path: Path) -> None:
    args = settings(tmp_path, "split", rank=0, num_workers=1)
    adapter.install()
    iterator = iter(loaders_of(args)["train"])
    adapter.install()
    with pytest.raises(InvalidArgument, match="worker processes was made before install"):
        adapter.install(exact=True)
    assert "exact" not in str(status())
    assert len(next(iterator)["text"]) == 2
    del iterator
    adapter.install(exact=True)


def test_a_loader_that_keeps_its_last_batch_is_refused(neox: Any, tmp_path: Path) -> None:
    args = settings(tmp_path, "split")
    lock, utils = locked(args), neox_stand_in.data_utils()
    own = utils.make_data_loader

    def make_data_loader(dataset: Any, neox_args: Any) -> Any:
        loader = own(dataset, neox_args)
        loader.batch_sampler.drop_last = False
        return loader

    utils.make_data_loader = make_data_loader
    adapter.install(lock=lock)
    with pytest.raises(InvalidArgument, match=r"lock needs .* over samples in order, got Distrib"):
        loaders_of(args)
