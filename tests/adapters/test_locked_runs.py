"""``install(lock=…)``: datasets that the frameworks build, compared with the lock of their run."""

from __future__ import annotations

import logging
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.locked_runs import assert_receipt
from support.megatron_blends import build, one_process, write_corpora
from support.megatron_training import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    start,
    training,
)
from support.neox_running import arguments, loaders_of

import megaindex.adapters.megatron as adapter
import megaindex.adapters.neox as neox_adapter
from megaindex import Skip
from megaindex.adapters import RunLoader, status
from megaindex.adapters.locked_run import LockedRun
from megaindex.adapters.megatron.patches import _patch_samplers
from megaindex.adapters.reports import Reports
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.balance import CostModel
from megaindex.loader import join_states
from megaindex.lock import Lock, make_lock

__all__ = ["training"]  # a fixture

COST = CostModel(linear=0, attention=1)
SETTINGS = {"sequence_length": 16, "seed": 1, "global_batch_size": 4, "split": "90,10,0"}


def test_a_position_is_counted_through_the_passes_of_a_lock() -> None:
    run: Any = SimpleNamespace(passes=lambda subset: [(0, 10), (4, 7), (0, 5)])
    starts = {position: LockedRun.starts(run, "train", position) for position in (0, 9, 10, 14, 18)}
    assert starts == {0: [0, 4, 0], 9: [9, 4, 0], 10: [4, 0], 14: [1], 18: []}


@pytest.mark.parametrize("passes", [[(0, 160)], [(0, 160), (4, 40)], [(0, 160), (0, 160), (0, 20)]])
def test_a_subset_is_as_long_as_its_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, passes: list[tuple[int, int]]
) -> None:
    """What is long enough is refused for the number of its sources, which is compared next."""
    path = write_corpora(tmp_path)[1]
    run = {"data_path": path, "train_iters": 40, "eval_iters": 0, **SETTINGS}
    locked, reports = LockedRun(make_lock(**run), "megatron"), Reports("Megatron")
    monkeypatch.setattr(LockedRun, "passes", lambda *_: passes)
    whole = None if len(passes) == 1 else 160

    def check(samples: int, limit: int | None) -> str:
        index: Any = SimpleNamespace(num_samples=samples)
        with pytest.raises(FormatError) as caught:
            locked.check("train", index, [], reports, limit=limit)
        return str(caught.value)

    assert "train: sources must be 1, got 0" in check(160, None)
    assert "train: samples must be at least 160, got 159" in check(159, None)
    assert "train: sources must be 1, got 0" in check(200, 160)
    for limit in (159, *([] if whole is None else [161])):
        expected = "at least 160" if whole is None else "160"
        message = f"train: samples of a pass of the loader must be {expected}, got {limit}"
        assert message in check(200, limit)
    if whole is None:
        assert "train: sources must be 1, got 0" in check(200, 161)
    assert reports.rows == {}
    locked.check("test", SimpleNamespace(num_samples=1), [], reports)  # type: ignore[arg-type]
    ((subset, reason),) = [(row.name, row.how) for row in reports.rows.values()]
    assert (subset, reason) == (
        "test", "the lock (not written) has no such subset, so it is unchecked"
    )  # fmt: skip


@pytest.fixture
def core(megatron_datasets: Any, tmp_path: Path) -> Iterator[Any]:
    with one_process(megatron_datasets, tmp_path / "store") as made:
        yield made


@pytest.fixture(autouse=True)
def _uninstalled() -> Iterator[None]:
    yield
    adapter.uninstall()


def test_megatron_builds_what_was_locked(
    core: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "megaindex")
    prefixes = write_corpora(tmp_path)[1:4]
    words = [word for pair in zip("325", prefixes, strict=True) for word in pair]
    run = {"train_iters": 40, "eval_iters": 1, "eval_interval": 40, **SETTINGS}
    lock = str(tmp_path / "run.lock")
    identity = make_lock(data_path=words, **run).write(lock).identity
    blend = (prefixes, [3.0, 2.0, 5.0])
    adapter.install(lock=lock)
    build(core, (160, 8, 0), None, blend=blend, split="90,10,0")
    (line,) = status().installed.values()
    assert line.endswith(f", checked by lock {lock}, identity {identity}")
    assert caplog.messages[0] == line
    for given, message in (
        ({"random_seed": 2}, r"run\.lock: train: the receipt of steps 0 to"),
        ({"blend": (prefixes, [3.0, 2.0, 4.0])}, "the receipt of steps"),
        ({"blend": (prefixes[:2], [3.0, 2.0])}, "sources must be 3, got 2"),
        ({"split": "80,20,0"}, "the receipt of steps"),
    ):
        with pytest.raises(FormatError, match=message):
            build(core, (160, 8, 0), None, **{"blend": blend, "split": "90,10,0", **given})
    for sizes in ((80, 8, 0), (159, 8, 0), (164, 8, 0), (320, 8, 0), (160, 4, 0), (160, 12, 0)):
        with pytest.raises(FormatError, match=r"(train|valid): samples requested must be (160|8)"):
            build(core, sizes, None, blend=blend, split="90,10,0")
    build(core, (163, 8, 0), None, blend=blend, split="90,10,0")  # of as many steps
    for suffix in (".idx", ".bin"):  # other data under the same path
        shutil.copy(f"{prefixes[0]}{suffix}", f"{prefixes[1]}{suffix}")
    with pytest.raises(FormatError, match=r"c2\.(bin|idx): .* as in .*run\.lock \(source 1\)"):
        build(core, (160, 8, 0), None, blend=blend, split="90,10,0")


def test_an_evaluation_that_is_left_out_is_requested_too(tmp_path: Path) -> None:
    """Of validation Megatron-LM then requests more samples than the lock has."""
    path = write_corpora(tmp_path)[1]
    run = {"data_path": path, "train_iters": 40, "eval_iters": 1, "eval_interval": 20, **SETTINGS}
    for skipped, accepted in ([], False), ([19], True):
        locked = LockedRun(make_lock(**run, iterations_to_skip=skipped or None), "megatron")
        read = locked.end("valid")
        assert read == 4 * (3 - len(skipped))
        locked.check_samples("valid", read)
        if accepted:
            locked.check_samples("valid", read + 4)
            continue
        with pytest.raises(FormatError, match="samples requested"):
            locked.check_samples("valid", read + 4)


def test_the_lock_of_another_framework_is_refused(core: Any, tmp_path: Path) -> None:
    prefixes = write_corpora(tmp_path)
    for order, more in (
        ("epoch", {}),
        ("megatron", {"phase_transition_iterations": [2]}),
    ):
        lock = make_lock(data_path=prefixes[4], order=order, train_iters=4, **SETTINGS, **more)
        with pytest.raises(InvalidArgument, match=r"order megatron, got epoch|phase by phase"):
            adapter.install(lock=lock)
    lock = make_lock(data_path=prefixes[4], order="megatron", train_iters=4, **SETTINGS)
    with pytest.raises(InvalidArgument, match="lock and skip exclude each other"):
        adapter.install(lock=lock, skip=Skip(steps="1"))


def neox_run(args: Any, **data: Any) -> dict[str, Any]:
    """Return the settings of a run of GPT-NeoX's arguments, by default of a blend of all paths."""
    words = [word for path in args.paths for word in ("1.0", path)]
    return {
        "order": "neox", "sequence_length": args.seq_length, "seed": args.seed,
        "train_iters": args.train_iters, "eval_iters": args.eval_iters,
        "eval_interval": args.eval_interval, "micro_batch_size": args.batch_size,
        "data_parallel_size": 1,
        **(data or {f"{name}_data_path": words for name in ("train", "valid", "test")}),
    }  # fmt: skip


@pytest.mark.parametrize("blend", [False, True])
def test_neox_builds_what_was_locked(neox: Any, tmp_path: Path, blend: bool) -> None:
    lengths = np.random.default_rng(8).integers(1, 40, 150).tolist()
    sizes = [lengths, lengths[::-1], lengths[:70]] if blend else [lengths]
    args = arguments(
        tmp_path, sizes, split="60,20,20", train_batch_size=4, batch_size=4, world_size=1
    )
    args.data_path = None if blend else args.paths[0]
    data = {} if blend else {"data_path": args.paths[0], "split": "60,20,20"}
    lock = make_lock(**neox_run(args, **data))
    neox_adapter.install(lock=lock)
    assert f", checked by lock (not written), identity {lock.identity}" in str(status())
    loaders_of(args)
    for path in Path(args.paths[0]).parent.glob("*_indexmap_*"):
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    args.seed += 1
    with pytest.raises(FormatError, match="train: the receipt of steps 0 to"):
        loaders_of(args)


@pytest.mark.slow
@pytest.mark.parametrize("framework", ["megatron", "neox"])
def test_the_loader_of_all_trainers_serves_the_samples_of_a_framework(
    request: pytest.FixtureRequest, tmp_path: Path, framework: str
) -> None:
    """Of the same lock: what the framework's own datasets serve, on two ranks, then on four."""
    if framework == "megatron":
        core = request.getfixturevalue("core")
        prefixes = write_corpora(tmp_path)[1:4]
        words = [word for pair in zip("325", prefixes, strict=True) for word in pair]
        run = {"train_iters": 40, "eval_iters": 1, "eval_interval": 40, **SETTINGS}
        lock = make_lock(data_path=words, **{**run, "global_batch_size": 12})
        adapter.install(lock=lock)
        blend = (prefixes, [3.0, 2.0, 5.0])
        train, *_ = build(core, (480, 24, 0), None, blend=blend, split="90,10,0")
        rows = [(row["tokens"], row["labels"]) for row in map(train.__getitem__, range(480))]
    else:
        request.getfixturevalue("neox")
        lengths = np.random.default_rng(8).integers(1, 40, 150).tolist()
        settings = {"train_batch_size": 12, "batch_size": 12, "world_size": 1, "train_iters": 40}
        args = arguments(tmp_path, [lengths, lengths[::-1]], **settings)
        lock = make_lock(**neox_run(args))
        neox_adapter.install(lock=lock)
        train = loaders_of(args)["train"].dataset
        texts = [torch.as_tensor(train[number]["text"]) for number in range(480)]
        rows = [(text[:-1], text[1:]) for text in texts]
    state = serve(lock, rows, None, until=84, size=2, micro=2)
    assert_receipt(serve(lock, rows, state, until=480, size=4, micro=3), lock, 480)


def serve(lock: Lock, rows: list[Any], state: Any, *, until: int, size: int, micro: int) -> Any:
    """Compare the samples of all ranks with these rows, and return the joined state."""
    loaders = [
        RunLoader(
            lock, data_parallel_rank=rank, data_parallel_size=size, micro_batch_size=micro,
            joined=False,
        )
        for rank in range(size)
    ]  # fmt: skip
    if state is not None:
        for loader in loaders:
            loader.load_state_dict(state)
    first = loaders[0].consumed_samples
    assert first == (0 if state is None else 84)
    iterators = [iter(loader) for loader in loaders]
    for start_of_round in range(first, until, size * micro):
        batches = [next(iterator) for iterator in iterators]
        expected = rows[start_of_round : start_of_round + size * micro]
        for field, values in zip(("tokens", "labels"), zip(*expected, strict=True), strict=True):
            found = torch.cat([batch[field] for batch in batches])
            assert torch.equal(found, torch.stack(values).to(found.dtype))
    return join_states([loader.state_dict() for loader in loaders])


def test_megatron_makes_the_steps_of_the_lock(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_process(training.core, tmp_path / "store") as core:
        prefixes = write_corpora(tmp_path)[1:4]
        words = [word for pair in zip("325", prefixes, strict=True) for word in pair]
        run = {"train_iters": 40, "eval_iters": 1, "eval_interval": 40, **SETTINGS}
        adapter.install(lock=make_lock(data_path=words, **run))
        blend = (prefixes, [3.0, 2.0, 5.0])
        train, *_ = build(core, (160, 8, 0), None, blend=blend, split="90,10,0")
        assert "the global batch size is unknown until" in str(status())
        args, monkey = training.args, monkeypatch

        def loader(batch: int = 4, consumed: int = 0, **given: Any) -> Any:
            for name, value in {"train_iters": 40, "iteration": consumed // 4, **given}.items():
                monkey.setattr(args, name, value, raising=False)
            start(training, batch, given.get("ramp"))
            return training.importer.build_pretraining_data_loader(train, consumed)

        for consumed in (0, 4, 156, 160):
            (first,) = list(loader(consumed=consumed).batch_sampler)[:1] or [[160]]
            assert first == [consumed]
        for given, message in (
            ({"batch": 2}, "global batch size of step 0 must be 4, got 2"),
            ({"batch": 2, "train_iters": 80}, "iterations must be 40, got 80"),
            ({"batch": 8, "train_iters": 20}, "iterations must be 40, got 20"),
            ({"train_iters": 39}, "iterations must be 40, got 39"),
            ({"train_iters": 41, "consumed": 80}, "iterations must be 40, got 41"),
            ({"ramp": [2, 2, 20]}, "global batch size of step 0 must be 4, got 2"),
            ({"consumed": 6}, "samples consumed by 1 iterations must be 4, got 6"),
            ({"consumed": 80, "iteration": 40}, "by 40 iterations must be 160, got 80"),
            ({"consumed": 80, "iteration": 10}, "by 10 iterations must be 40, got 80"),
        ):
            with pytest.raises(FormatError, match=message):
                loader(**given)
        start(training, 2)
        with pytest.raises(FormatError, match="global batch size of step 0 must be 4"):
            build(core, (160, 8, 0), None, blend=blend, split="90,10,0")
        training.calculators.destroy_num_microbatches_calculator()
        with pytest.raises(InvalidArgument, match="not initialised"):
            training.importer.build_pretraining_data_loader(train, 0)
        monkey.setattr(args, "cls", MegatronPretrainingRandomSampler)
        with pytest.raises(InvalidArgument, match="lock needs --dataloader-type single"):
            loader()


def test_megatron_builds_the_subsets_of_the_lock(training: Any, tmp_path: Path) -> None:
    from megatron.core.datasets.gpt_dataset import MockGPTDataset

    with one_process(training.core, tmp_path / "store") as core:
        first, second, held = write_corpora(tmp_path)[1:4]
        run = {"train_iters": 20, "eval_iters": 1, "eval_interval": 10, **SETTINGS, "split": None}
        lock = make_lock(
            train_data_path=["0.5", first, "0.5", second], valid_data_path=[held], **run
        )
        train, valid = ([first, second], [0.5, 0.5]), ([held], None)
        adapter.install(lock=lock)
        for subsets, left in (([train, valid, None], False), ([train, None, None], True)):
            adapter.install(lock=lock)
            build(core, (80, 12, 4), None, blend_per_split=subsets)
            said = "lock valid: left to Megatron, the lock has it, and the run builds none"
            assert (said in str(status())) == left
        with pytest.raises(InvalidArgument, match="lock: the run builds no training data"):
            build(core, (80, 12, 4), None, blend_per_split=[None, valid, None])
        with pytest.raises(InvalidArgument, match="lock: mock data has no files"):
            build(core, (80, 12, 4), None, cls=MockGPTDataset, split="90,10,0")
        adapter.install(keys=True)
        mock, *_ = build(core, (80, 12, 4), None, cls=MockGPTDataset, split="90,10,0")
        start(training, 4)
        with pytest.raises(InvalidArgument, match="keys: mock data has no content"):
            training.importer.build_pretraining_data_loader(mock, 0)


def test_a_path_that_a_blend_has_twice_has_two_rows(training: Any, tmp_path: Path) -> None:
    with one_process(training.core, tmp_path / "store") as core:
        first, second = write_corpora(tmp_path)[1:3]
        blend = ([first, second, first], [0.2, 0.3, 0.5])
        for _ in range(2):
            adapter.install()
            build(core, (100, 0, 0), tmp_path / "cache", blend=blend, split="100,0,0")
            rows = [row for row in status().datasets if row.kind == "GPTDataset"]
            assert [row.name for row in rows].count(f"{first} (train)") == 2
            assert len(rows) == 3


def test_megatron_bridge_makes_the_steps_of_the_lock(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its samplers are its own: their order is checked, skips and balance are refused."""
    bridge: Any = ModuleType("megatron.bridge.data.samplers")

    def build_pretraining_data_loader(dataset: Any, consumed: int, cls: Any) -> Any:
        return SimpleNamespace(dataset=dataset, batch_sampler=cls(len(dataset), consumed, 1, 0, 1))

    bridge.build_pretraining_data_loader = build_pretraining_data_loader
    monkeypatch.setitem(sys.modules, bridge.__name__, bridge)
    single, cyclic = MegatronPretrainingSampler, MegatronPretrainingRandomSampler
    with one_process(training.core, tmp_path / "store") as core:
        prefixes = write_corpora(tmp_path)[1:2]
        run = {"train_iters": 40, "eval_iters": 1, "eval_interval": 40, **SETTINGS}
        sizes, config = (160, 8, 0), {"blend": (prefixes, None), "split": "90,10,0"}
        adapter.install(lock=make_lock(data_path=prefixes, **run))
        train, valid, _ = build(core, sizes, None, **config)
        start(training, 4)
        loader = bridge.build_pretraining_data_loader(train, 8, single)
        assert next(iter(loader.batch_sampler)) == [8]
        with pytest.raises(InvalidArgument, match="lock needs --dataloader-type single"):
            bridge.build_pretraining_data_loader(train, 0, cyclic)
        with pytest.raises(FormatError, match="samples consumed by whole steps must be"):
            bridge.build_pretraining_data_loader(train, 6, single)
        assert bridge.build_pretraining_data_loader(valid, 0, cyclic) is not None
        assert "evaluation: left to Megatron" in str(status())
        start(training, 8)
        with pytest.raises(FormatError, match="global batch size of step 0 must be 4, got 8"):
            bridge.build_pretraining_data_loader(train, 0, single)
        skips = [Skip(steps="3")]
        locked = make_lock(data_path=prefixes, **run, skip=skips)
        for given in ({"skip": skips}, {"lock": locked}, {"balance": COST}):
            adapter.install(**given)
            name = "balance" if "balance" in given else "skip"
            with pytest.raises(InvalidArgument, match=f"{name}: Megatron-Bridge has samplers"):
                bridge.build_pretraining_data_loader(train, 0, single)


@pytest.mark.usefixtures("all_modules")
def test_a_loader_function_that_a_job_imported_before(
    training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job: Any = ModuleType("my_job.data")
    job.build = own = training.build_pretraining_data_loader
    monkeypatch.setitem(sys.modules, job.__name__, job)
    for _ in range(2):
        adapter.install()
        assert job.build is training.build_pretraining_data_loader is not own
        assert "function my_job.data.build: replaced" in str(status())
    adapter.uninstall()
    assert job.build is training.build_pretraining_data_loader is own
    with monkeypatch.context() as patch:  # Megatron's module is imported after install
        patch.delitem(sys.modules, training.__name__)
        patch.setattr(training.importer, "build_pretraining_data_loader", None)
        patch.setattr(job, "build", None)
        adapter.install()
    assert "my_job" not in str(status())
    _patch_samplers(training)
    assert job.build is training.build_pretraining_data_loader is not own
    assert "function my_job.data.build: replaced" in str(status())
    adapter.uninstall()
    assert job.build is own


SKIPS = [Skip(steps="3 5-6"), Skip(steps="8", move=True), Skip(source="1", from_step=9)]


def test_megatron_skips_what_the_lock_skips(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with one_process(training.core, tmp_path / "store") as core:
        prefixes = write_corpora(tmp_path)[1:4]
        words = [word for pair in zip("325", prefixes, strict=True) for word in pair]
        (tmp_path / "bad.ids").write_text("3 1")
        bad = Skip(documents=str(tmp_path / "bad.ids"), source=prefixes[2], from_step=2)
        run = {"data_path": words, "train_iters": 19, "eval_iters": 1, "eval_interval": 10}
        lock = make_lock(**run, **SETTINGS, skip=[*SKIPS, bad])
        blend = (prefixes, [3.0, 2.0, 5.0])
        served = {}
        for name, given in (("lock", {"lock": lock}), ("skip", {"skip": [*SKIPS, bad]})):
            adapter.install(**given)
            train, valid, _ = build(core, (76, 8, 0), None, blend=blend, split="90,10,0")
            training.args.train_iters = 19
            start(training, 4)
            loader = training.importer.build_pretraining_data_loader(train, 0)
            served[name] = [
                (sample["tokens"].tolist(), sample["loss_mask"].tolist())
                for sample in loader.dataset.__getitems__(list(range(len(loader.dataset))))
            ]
            locked = lock.content["subsets"]["valid"]["samples"]
            assert len(valid) >= locked == 8  # evaluations of 19 steps, without the moved one
        assert served["lock"] == served["skip"]
        assert len(served["lock"]) == 4 * 16
        adapter.install(lock=lock)
        training.args.train_iters = 18  # as the run makes it, or with another batch size
        with pytest.raises(FormatError, match=r"train: skip: end must be 76"):
            training.importer.build_pretraining_data_loader(train, 0)
        with pytest.raises(FormatError, match="the receipt of steps"):
            build(core, (76, 8, 0), None, blend=blend, split="90,10,0", random_seed=3)
        (tmp_path / "bad.ids").write_text("3 2")
        with pytest.raises(FormatError, match=r"bad\.ids: SHA-256 of its content: must be"):
            adapter.install(lock=lock)


@pytest.mark.slow_cases("True")
@pytest.mark.parametrize("blend", [False, True])
def test_neox_skips_what_the_lock_skips(neox: Any, tmp_path: Path, blend: bool) -> None:
    lengths = np.random.default_rng(8).integers(1, 40, 150).tolist()
    sizes = [lengths, lengths[::-1], lengths[:70]] if blend else [lengths]
    settings: dict[str, Any] = {
        "train_batch_size": 4, "batch_size": 4, "world_size": 1, "train_iters": 12, "labels": blend,
    }  # fmt: skip
    skip = SKIPS if blend else SKIPS[:2]
    args = arguments(tmp_path, sizes, split="60,20,20", **settings)
    args.data_path = None if blend else args.paths[0]
    data = {} if blend else {"data_path": args.paths[0], "split": "60,20,20"}
    lock = make_lock(**neox_run(args, **data), skip=skip)
    texts = []
    for given in ({"lock": lock}, {"skip": skip}):
        neox_adapter.install(**given)
        dataset = loaders_of(args)["train"].dataset
        rows = dataset.__getitems__(list(range(len(dataset))))
        texts.append([[row[name].tolist() for name in row] for row in rows])
        assert len(rows) == 4 * 9
    assert texts[0] == texts[1]
    neox_adapter.install(lock=lock)
    args.train_iters = 11
    with pytest.raises(FormatError, match=r"samples must be at least|skip: end must be 48"):
        loaders_of(args)
