"""`RunLoader`: the fields and labels of each trainer, its length, its state on other ranks."""

from __future__ import annotations

import importlib
import itertools
import json
import logging
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

pytest.importorskip("torch")
import torch

import megaindex
from megaindex._lazy import torch_needed
from megaindex.adapters import RunLoader, automodel, run_loader
from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.loader import MicroBatchSampler, SampleOptions, join_states
from megaindex.loader.row_fields import row_fields
from megaindex.lock import Lock, make_lock, read_lock
from megaindex.recipe import read_recipe


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Lock:
    """The lock of ten steps of 24 samples, of 16 tokens."""
    folder = tmp_path_factory.mktemp("locked")
    prefix = folder / "c"
    write_corpus(prefix, np.random.default_rng(0).integers(5, 60, 200).tolist(), eod=7)
    made = make_lock(
        data_path=str(prefix),
        order="epoch",
        sequence_length=16,
        train_iters=10,
        micro_batch_size=3,
        data_parallel_size=4,
        global_batch_size=24,
    )
    return made.write(str(folder / "run.lock"))


def test_labels_are_those_of_each_trainer(lock: Lock) -> None:
    plain = next(iter(RunLoader(lock)))
    found = next(iter(RunLoader(lock, fields="huggingface")))
    assert list(found) == ["input_ids", "labels", "shift_labels"]
    assert torch.equal(found["input_ids"], plain["tokens"])
    assert torch.equal(found["shift_labels"], plain["labels"])
    options = SampleOptions(reset_position_ids=True, boundaries="documents")
    fields, labels = next(iter(RunLoader(lock, fields="torchtitan", options=options)))
    assert torch.equal(fields["input"], plain["tokens"])
    assert torch.equal(labels, plain["labels"])
    assert not torch.equal(fields["positions"], plain["position_ids"])
    again = next(iter(RunLoader(lock, fields="huggingface", options=options)))
    assert torch.equal(again["position_ids"], fields["positions"])


def test_a_label_without_loss_is_ignored(lock: Lock) -> None:
    options = SampleOptions(eod_id=7, eod_mask_loss=True)
    plain = next(iter(RunLoader(lock, options=options)))
    masked = plain["loss_mask"] == 0
    assert masked.any()
    for fields in ("huggingface", "torchtitan"):
        batch = next(iter(RunLoader(lock, fields=fields, options=options)))
        labels = batch["shift_labels"] if fields == "huggingface" else batch[1]
        assert torch.equal(labels == -100, masked)
        assert torch.equal(labels[~masked], plain["labels"][~masked])


def test_the_length_is_that_of_the_run_after_a_resume(lock: Lock) -> None:
    first = RunLoader(lock, micro_batch_size=6)
    assert (len(first), first.returned, first.micro_batches_per_step) == (40, 0, 4)
    batches = iter(first)
    for _ in range(5):
        next(batches)
    assert (len(first), first.returned) == (40, 5)
    again = RunLoader(lock, micro_batch_size=2)
    again.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert (len(again), again.returned, again.consumed_samples) == (120, 15, 30)
    assert sum(1 for _ in again) == 105


def test_the_identity_of_the_run_is_logged_once(
    lock: Lock, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level(logging.INFO, "megaindex")
    version = megaindex.__version__
    assert RunLoader(lock).identity == lock.identity
    named = f"{lock.path}, identity {lock.identity}"
    assert caplog.messages == [f"megaindex {version} serves the run of {named}"]
    RunLoader(lock, joined=False, data_parallel_rank=1, data_parallel_size=2)
    monkeypatch.setenv("RANK", "2")  # of two processes of the first data-parallel rank
    RunLoader(lock, joined=False, data_parallel_rank=0, data_parallel_size=2)
    assert len(caplog.messages) == 1
    monkeypatch.setenv("RANK", "0")
    RunLoader(Lock(path="", content={**lock.content, "root": str(Path(lock.path).parent)}))
    assert "serves the run of a lock, identity" in caplog.messages[1]


@pytest.mark.slow
def test_eight_then_six_then_twelve_ranks(lock: Lock) -> None:
    """The second change lies within a step; the receipts are those of the lock."""
    state: Any = None
    for size, micro, batches in ((8, 1, 6), (6, 2, 3), (12, 1, None)):
        states = []
        for rank in range(size):
            ranks = {"data_parallel_rank": rank, "data_parallel_size": size}
            loader = RunLoader(lock, micro_batch_size=micro, joined=False, **ranks)
            if state is not None:
                loader.load_state_dict(state)
            left = iter(loader)
            for _ in range(len(loader) - loader.returned if batches is None else batches):
                next(left)
            states.append(loader.state_dict())
        state = join_states(states)
    assert state["consumed_samples"] == 240
    receipt = state["receipt"]
    assert receipt["receipt"] == lock.content["subsets"]["train"]["receipts"]["total"]
    assert (receipt["in_place"], receipt["misplaced"]) == (240, 0)


def test_ranks_are_joined_once(lock: Lock) -> None:
    def states(size: int, count: int) -> list[Any]:
        made = []
        for rank in range(size):
            ranks = {"data_parallel_rank": rank, "data_parallel_size": size}
            loader = RunLoader(lock, joined=False, **ranks)
            batches = iter(loader)
            for _ in range(count):
                next(batches)
            made.append(loader.state_dict())
        return made

    two = states(2, 2)
    assert run_loader._join_ranks([two[0], two[0], two[1], two[1]]) == join_states(two)
    with pytest.raises(InvalidArgument, match=r"receipts of 2 ranks"):
        run_loader._join_ranks(two[:1])
    with pytest.raises(InvalidArgument, match="rank 0 returned other batches"):
        run_loader._join_ranks([two[0], states(2, 3)[0], two[1]])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"fields": "keras"}, "fields"),
        ({"sequence_length": 32}, r"run\.lock: has samples of 16 tokens, and the trainer 32"),
        ({"micro_batches_per_step": 4}, "steps of 24 samples, and the trainer 12, 4 of 3"),
        ({"data_parallel_rank": 1}, "must be given together"),
        (
            {
                "fields": "huggingface",
                "options": SampleOptions(create_attention_mask=True, eod_id=1),
            },
            "create_attention_mask must be off",
        ),
    ],
)
def test_settings_that_contradict_the_lock(
    lock: Lock, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        RunLoader(lock, **settings)


def test_processes_that_are_not_connected(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(InvalidArgument, match="4 processes were started, and torch.distributed"):
        RunLoader(lock)


def test_a_process_without_the_files_fails_on_all(
    lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if process 1 did not see the lock, or saw another."""

    def gathered(other: tuple[Any, ...]) -> Any:
        def gather(every: list[Any], mine: Any) -> None:
            every[:] = [mine, other]

        return gather

    monkeypatch.setattr(run_loader, "processes", lambda: 2)
    ranks = {"data_parallel_rank": 0, "data_parallel_size": 2}
    gather = "megaindex.adapters.run_loader.distributed.all_gather_object"
    monkeypatch.setattr(gather, gathered(("node-2", "MissingFile: no.lock: does not exist", None)))
    with pytest.raises(StorageError, match=r"process 1 on node-2 failed: .* same file system"):
        RunLoader(lock, **ranks)
    with pytest.raises(MissingFile):  # its own error comes first
        RunLoader(str(lock.path) + ".other", **ranks)
    monkeypatch.setattr(gather, gathered(("node-2", None, "another digest")))
    with pytest.raises(InvalidArgument, match="process 1 on node-2 has another digest"):
        RunLoader(lock, **ranks)


def test_a_result_of_the_first_process_is_that_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(objects: list[Any], src: int) -> None:
        assert (objects, src) == ([None, None], 0)
        objects[:] = sent

    distributed = "megaindex.adapters.run_loader.distributed"
    monkeypatch.setattr(run_loader, "processes", lambda: 2)
    monkeypatch.setattr(f"{distributed}.get_rank", lambda: 1)
    monkeypatch.setattr(f"{distributed}.broadcast_object_list", receive)
    sent = [7, None]
    assert run_loader.from_first_rank(lambda: 3) == 7
    sent = [None, MissingFile("no.lock")]
    with pytest.raises(MissingFile, match=r"no\.lock"):
        run_loader.from_first_rank(lambda: 3)


def test_the_first_process_sends_its_result_or_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[Any] = []

    def send(objects: list[Any], src: int) -> None:
        sent[:] = [*objects, src]

    def act() -> int:
        if error is not None:
            raise error
        return 3

    distributed = "megaindex.adapters.run_loader.distributed"
    monkeypatch.setattr(run_loader, "processes", lambda: 2)
    monkeypatch.setattr(f"{distributed}.get_rank", lambda: 0)
    monkeypatch.setattr(f"{distributed}.broadcast_object_list", send)
    error: Exception | None = None
    assert (run_loader.from_first_rank(act), sent) == (3, [3, None, 0])
    error = MissingFile("no.lock")
    with pytest.raises(MissingFile):
        run_loader.from_first_rank(act)
    assert sent == [None, error, 0]
    error = KeyError("key")
    with pytest.raises(KeyError):
        run_loader.from_first_rank(act)
    assert type(sent[1]) is InvalidArgument
    assert str(sent[1]) == "process 0 failed: KeyError: 'key'"


def test_connected_ranks_have_one_state(lock: Lock, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are those of torch.distributed; the first gathers the states of all."""
    apart = [RunLoader(lock, joined=False, data_parallel_rank=rank, data_parallel_size=2)
             for rank in range(2)]  # fmt: skip
    states = [loader.state_dict() for loader in apart]
    gathered: list[Any] = []

    def gather(state: Any, every: list[Any] | None, dst: int) -> None:
        assert dst == 0
        gathered.append(every if every is None else list(every))
        if every is not None:
            every[:] = [state, states[1]]

    distributed = "megaindex.adapters.run_loader.distributed"
    monkeypatch.setattr(run_loader, "processes", lambda: 2)
    monkeypatch.setattr(f"{distributed}.gather_object", gather)
    monkeypatch.setattr(f"{distributed}.all_gather_object", lambda every, mine: every.__setitem__(
        slice(None), [mine, mine]))  # fmt: skip
    monkeypatch.setattr(f"{distributed}.broadcast_object_list", lambda objects, src: objects)
    monkeypatch.setattr(f"{distributed}.get_rank", lambda: 0)
    first = RunLoader(lock)
    assert first.loader.sampler.ranks == apart[0].loader.sampler.ranks
    assert first.state_dict() == join_states(states)
    monkeypatch.setattr(f"{distributed}.get_rank", lambda: 1)
    assert RunLoader(lock).loader.sampler.ranks == apart[1].loader.sampler.ranks
    assert run_loader._join_all(states[1]) is None
    assert gathered == [[None, None], None]


def test_rows_are_those_of_the_batch_that_was_returned(lock: Lock) -> None:
    loader = RunLoader(lock, keys="wide")
    assert repr(loader) == f"RunLoader({lock.path!r}, {loader.loader!r})"
    with pytest.raises(InvalidArgument, match="rows need keys=True, and a micro batch"):
        loader.rows()
    names = row_fields(wide=True)
    for batch in itertools.islice(loader, 2):
        rows = loader.rows()
        assert rows.keys() == {*names}
        taken = run_loader.take_rows(batch)
        assert all(torch.equal(taken[name], rows[name]) for name in names)
        assert not {*names} & {*batch}
    plain = RunLoader(lock)
    next(iter(plain))
    with pytest.raises(InvalidArgument, match="give keys=True to the adapter"):
        plain.rows()


def test_a_missing_module_of_torch_itself_is_not_hidden() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module"), torch_needed("a loader"):
        importlib.import_module("no_such_module")


def test_batches_of_a_rank_are_not_divided_again() -> None:
    """Trainers that divide batches between ranks ask for the batch size."""
    for size, expected in ((1, 4), (2, None)):
        sampler = MicroBatchSampler(
            num_samples=64, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=size
        )
        if expected is not None:
            assert sampler.batch_size == expected
            continue
        with pytest.raises(InvalidArgument, match=r"rank 0 of 2.* accelerator.prepare"):
            getattr(sampler, "batch_size", None)


@pytest.mark.parametrize(
    ("adapter", "package"),
    [
        ("torchtitan", "torchtitan"),
        ("huggingface", "transformers"),
        ("lightning", "lightning"),
        ("automodel", "nemo_automodel"),
    ],
)
def test_a_missing_trainer_is_named(
    adapter: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"megaindex.adapters.{adapter}", raising=False)
    with pytest.raises(InvalidArgument, match="needs .*, which cannot be imported"):
        importlib.import_module(f"megaindex.adapters.{adapter}").install()
    assert f"megaindex.adapters.{adapter}" not in sys.modules or adapter == "automodel"


def test_another_torchtitan_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    monkeypatch.delitem(sys.modules, "megaindex.adapters.torchtitan", raising=False)
    with pytest.raises(InvalidArgument, match="has no such module: releases up to 0.3 are served"):
        importlib.import_module("megaindex.adapters.torchtitan")


def test_the_compiler_of_automodel_gives_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before and after it is imported, wherever it is named; `uninstall` gives theirs back."""
    names = [automodel.HOME, *automodel.USERS, "nemo_automodel"]
    modules = {name: ModuleType(name) for name in names}
    modules["nemo_automodel"].__spec__ = ModuleSpec("nemo_automodel", None)
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)

    def theirs() -> ModuleType:
        raise AssertionError("it compiles")

    for name in (automodel.HOME, automodel.USERS[0]):
        modules[name].compile_helper = theirs  # type: ignore[attr-defined]
    modules[automodel.USERS[1]].compile_helper = None  # type: ignore[attr-defined]
    automodel.install()
    automodel.install()
    try:
        for name in (automodel.HOME, automodel.USERS[0]):
            assert modules[name].compile_helper() is megaindex.helpers
        assert modules[automodel.USERS[1]].compile_helper is None
    finally:
        automodel.uninstall()
    assert modules[automodel.HOME].compile_helper is theirs
    theirs.__annotations__["return"] = None
    for _ in range(2):
        with pytest.raises(InvalidArgument, match="is for Automodel 0.7 on"):
            automodel.install()


def test_a_missing_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    for package, name in (("adapters", "RunLoader"), ("loader", "Loader")):
        facade = sys.modules[f"megaindex.{package}"]
        monkeypatch.delitem(sys.modules, f"megaindex.{package}.{name.lower()}", raising=False)
        monkeypatch.delitem(sys.modules, "megaindex.adapters.run_loader", raising=False)
        monkeypatch.delitem(vars(facade), name, raising=False)
        with pytest.raises(InvalidArgument, match=r"need.? torch, .*pip install 'megaindex\[torch"):
            getattr(facade, name)


def test_torchtitan_steps_are_checked_beside_other_hooks(
    lock: Lock, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first update is compared with the lock, of two loaders and with a hook of another."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    class Base:
        class Config:
            pass

    home = SimpleNamespace(BaseDataLoader=Base)
    for name in ("torchtitan", "torchtitan.components", "torchtitan.components.dataloader"):
        monkeypatch.setitem(sys.modules, name, home)
    monkeypatch.delitem(sys.modules, "megaindex.adapters.torchtitan", raising=False)
    adapter = importlib.import_module("megaindex.adapters.torchtitan")
    del sys.modules["megaindex.adapters.torchtitan"]  # of a stand-in
    run = {"dp_world_size": 4, "dp_rank": 0, "seq_len": 16, "local_batch_size": 3}
    loaders = [
        adapter.LockedDataLoader(adapter.LockedDataLoader.Config(lock=lock.path), **run)
        for _ in range(2)
    ]
    weight = torch.nn.Parameter(torch.zeros(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=1.0)
    calls: list[object] = []
    of_another = register_optimizer_step_pre_hook(lambda *_: calls.append(1))
    try:
        batches = [iter(loader) for loader in loaders]
        for taken in (2, 2, 1):  # the check is made once
            for _ in range(taken):
                for each in batches:
                    next(each)
            optimizer.step()
        assert (len(calls), weight.item()) == (3, -3.0)
        wrong = iter(loaders[0])
        next(wrong)
        with pytest.raises(InvalidArgument, match="steps of 24 samples, and the trainer 12"):
            optimizer.step()
        for each in (*batches, wrong):
            each.close()
        optimizer.step()
    finally:
        of_another.remove()


def test_a_trainer_stops_with_the_run(lock: Lock) -> None:
    """Ten steps: more, or further epochs, are refused."""
    loader = RunLoader(lock)
    for steps, epochs in ((10, 3), (None, 1), (-1, 0.5), (0, 1.0)):
        loader.check_length(steps, "epochs", epochs)
    for steps, epochs in ((11, 1), (None, None), (None, -1), (-1, 3.0)):
        with pytest.raises(InvalidArgument, match=r"10 steps, .* epochs=.*set epochs=1"):
            loader.check_length(steps, "epochs", epochs)


def test_the_lock_is_given_by_path(lock: Lock) -> None:
    assert len(RunLoader(Path(lock.path))) == len(RunLoader(read_lock(lock.path))) == 80


def test_a_state_is_one_text_for_dcp(lock: Lock) -> None:
    """A checkpoint of another dataloader, which has none, is refused with the trainer's remedy."""
    first, other = RunLoader(lock), RunLoader(lock)
    next(iter(first))
    state = first.text_state_dict()
    assert [type(value) for value in state.values()] == [str]
    other.load_text_state_dict(state, "leave it out")
    assert other.returned == first.returned == 1
    with pytest.raises(InvalidArgument, match=r"no state of megaindex"):
        RunLoader(lock).load_text_state_dict({"position": 1}, "leave it out")
    (text,) = state.values()
    for damaged in ("", text[: len(text) // 2], text[:-1], "[" * 10**5, "3", None):
        with pytest.raises(FormatError, match="the state of megaindex in the checkpoint is damag"):
            other.load_text_state_dict({"megaindex": damaged}, "leave it out")
    assert other.returned == 1


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Lock:
    """The lock of a recipe of two sources, 10 steps of 8 samples."""
    folder = tmp_path_factory.mktemp("mixed")
    for number, name in enumerate(("web", "code")):
        write_corpus(folder / name, np.random.default_rng(number).integers(5, 60, 200).tolist())
    recipe = folder / "run.yaml"
    recipe.write_text(
        "sequence_length: 16\nbatch: {micro_batch_size: 2, global_batch_size: 8}\n"
        "sources: {web: web, code: code}\nstages: {main: {steps: 10, mix: {web: 1, code: 1}}}\n"
    )
    return make_lock(read_recipe(recipe)).write(str(folder / "run.lock"))


def test_steps_of_two_sizes_have_no_number_of_micro_batches(mixed: Lock) -> None:
    assert RunLoader(mixed).micro_batches_per_step == 4
    folder = Path(mixed.path).parent
    text = (folder / "run.yaml").read_text()
    (folder / "two.yaml").write_text(text.replace("global_batch_size: 8", "schedule: '0:4 16:8'"))
    two = make_lock(read_recipe(folder / "two.yaml")).write(str(folder / "two.lock"))
    with pytest.raises(InvalidArgument, match="has steps of 4 and 8 samples"):
        _ = RunLoader(two).micro_batches_per_step


def test_the_mix_of_a_lock_changes(mixed: Lock) -> None:
    options = SampleOptions(dataset_id=True)
    run = RunLoader(mixed, options=options)
    batches = iter(run)
    next(batches)
    assert run.set_mix({"web": 1}) == 1
    assert run.set_mix({"code": 1}, at=2) == 2
    served = [next(batches)["dataset_id"].tolist() for _ in range(11)]
    assert all(row == [0, 0] for row in served[3:7])
    assert all(row == [1, 1] for row in served[7:])
    run.report_loss("web", 2.0)
    step = run.control_mix(lambda found: {each.source: each.loss or 1 for each in found})
    assert step == 3
    assert run.control_mix(lambda _: None) is None
    assert run.wait.steps == 3
    again = RunLoader(mixed, options=options)
    again.load_state_dict(json.loads(json.dumps(run.state_dict())))
    assert [each["dataset_id"].tolist() for each in again] == [
        each["dataset_id"].tolist() for each in batches
    ]


def test_ranks_that_are_not_connected_are_controlled_by_set_mix(mixed: Lock) -> None:
    run = RunLoader(mixed, data_parallel_rank=0, data_parallel_size=2)
    with pytest.raises(InvalidArgument, match=r"control_mix.* set_mix"):
        run.control_mix(lambda _: {"web": 1})
