"""Locks of runs whose blend changed on the way, or that were extended."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.folders import inside
from support.inputs import for_each
from support.locked_runs import AMEND, RUNS, write_inputs

from megaindex import AmendedBlend, BlendChange, InvalidArgument, amend_run, extend_run
from megaindex.adapters.megatron import install
from megaindex.audit import run_of_settings
from megaindex.builders.described import build_described
from megaindex.index.description import describe_index
from megaindex.index.stretches import StretchedIndex
from megaindex.lock import compare_records, make_lock, open_run, read_lock, run_of_lock, verify_lock
from megaindex.lock.lock_file import lock_text
from megaindex.recipe import read_recipe

ENDS = {"amended": 280, "extended": 480}
SETTINGS: dict[str, Any] = {
    "data_path": ["0.6", "data/web", "0.2", "data/code", "0.2", "data/chat"],
    "sequence_length": 32,
    "train_iters": 70,
    "global_batch_size": 4,
    "split": "90,10,0",
    "eval_iters": 0,
}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    write_inputs(folder)
    with inside(folder):
        for name in ENDS:
            assert cli("lock", *RUNS[name].split(), "--out", f"{name}.lock")[::2] == (0, "")
        yield folder


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def direct(name: str) -> StretchedIndex | Any:
    """The index of the run by `amend_run` or `extend_run`."""
    if name == "amended":
        amend = AmendedBlend.read("amend.yaml")
        return amend_run(
            ["data/web", "data/code"], weights=[0.7, 0.3], num_samples=200, sequence_length=32,
            changes=amend.changes, more_samples=280 - 150, split="90,10,0",
        ).index  # fmt: skip
    return extend_run(
        ["data/web", "data/code"], weights=[2, 1], num_samples=250, sequence_length=32,
        order="neox", consumed_samples=101, more_samples=480 - 101,
    ).index  # fmt: skip


def spans(index: Any, ids: Any) -> list[Any]:
    found = index.locate(ids)
    return [column.tolist() for column in (*found, found.row_splits)]


@pytest.mark.parametrize("name", ENDS)
def test_a_lock_has_the_samples_of_the_changed_run(name: str) -> None:
    lock = read_lock(f"{name}.lock")
    assert "least_seen" in json.dumps(lock.content["subsets"]["train"]["index"])
    run, ids = run_of_lock(lock), np.arange(ENDS[name])
    assert run.num_samples == ENDS[name]
    assert spans(run.index, ids) == spans(direct(name), ids)
    chosen = np.random.default_rng(0).permutation(ids)
    assert spans(run.index, chosen) == spans(direct(name), chosen)
    assert verify_lock(f"{name}.lock", whole=True).is_clean
    assert os.path.getsize(f"{name}.lock") < 20_000


@pytest.mark.parametrize("name", ENDS)
def test_a_changed_run_is_audited_and_traced_by_its_lock(name: str) -> None:
    run = run_of_lock(f"{name}.lock")
    counted = np.bincount(run.index.locate(np.arange(run.num_samples)).source, minlength=3)
    drawn = run.counts(0, run.num_samples)
    assert (drawn > 0).tolist() == (counted[: drawn.size] > 0).tolist()
    assert run.counts(0, run.num_samples).sum() == run.num_samples
    for words in (("audit", f"{name}.lock"), ("trace", f"{name}.lock", "--step", "30")):
        verb, lock, *rest = words
        status, out, err = cli(verb, "--lock", lock, *rest, "--json")
        assert (status, err) == (0, ""), (words, err)
        assert json.loads(out)


def test_the_description_is_that_of_the_index_that_was_built() -> None:
    for name in ENDS:
        node = read_lock(f"{name}.lock").subset("train")["index"]
        run = run_of_lock(f"{name}.lock")
        assert describe_index(run.index) == describe_index(direct(name)) == node


def test_samples_alone_are_arranged_as_those_of_a_part() -> None:
    def leaves(node: Any) -> Iterator[Any]:
        if isinstance(node, dict):
            yield from [node] if "least_seen" in node and "samples" in node else []
            for each in node.values():
                yield from leaves(each)
        for each in node if isinstance(node, list) else []:
            yield from leaves(each)

    run = run_of_lock("extended.lock")
    common = read_lock("extended.lock").subset("train")["index"]
    rows = [{**common["common"], **each} for each in common["sources"]]
    (node, *_) = [leaf for row in rows for leaf in leaves(row)]
    number = next(k for k, row in enumerate(rows) if node in leaves(row))
    dataset = run.index.datasets[number]
    for begin in (0, node["least_seen"], node["samples"]):
        index = build_described({**node, "least_seen": begin}, [dataset])
        plain = build_described({k: v for k, v in node.items() if k != "least_seen"}, [dataset])
        ids = np.arange(begin)
        assert spans(index, ids) == spans(plain, ids)
        every = np.arange(node["samples"])
        ours, theirs = (sorted(each.locate(every).offset) for each in (index, plain))
        assert ours == theirs


@pytest.mark.parametrize("name", ENDS)
def test_another_change_is_found(name: str) -> None:
    content = json.loads(json.dumps(read_lock(f"{name}.lock").content))
    amend = content["settings"]["run"]["amend"]
    assert amend["num_samples"] == (200 if name == "amended" else 250)
    if name == "amended":
        amend["changes"][0]["consumed_samples"] -= 1
    else:
        amend["consumed_samples"] -= 20
    Path("edited.lock").write_bytes(lock_text(content))
    found = [each.where for each in verify_lock("edited.lock").findings]
    assert any(where.startswith("subsets.train.index") for where in found), found


def test_the_proof_of_an_amended_run_names_the_first_sample_of_another_change() -> None:
    amend = AmendedBlend.read("amend.yaml")
    moved = [amend.changes[0], BlendChange(consumed_samples=160, weights=amend.changes[1].weights)]
    other = make_lock(
        **SETTINGS, amend=AmendedBlend(data_path=amend.data_path, num_samples=200, changes=moved)
    ).write("other.lock", overwrite=True)
    ours = make_lock(**SETTINGS, amend="amend.yaml").write("ours.lock", overwrite=True)
    proof = compare_records(ours, other)
    assert not proof.holds
    (sample,) = [text for text in proof.differences if text.startswith("sample ")]
    assert 150 <= int(sample.removeprefix("sample ").partition(":")[0]) < 160
    assert ours.identity != other.identity


@for_each(("change", "settings", "message"), [
    ({}, {"train_iters": 37}, "at sample 150 lies at or beyond the end of the run, sample 148"),
    ({}, {"data_path": ["1", "data/web"]}, "must be that of the last change, 0.6 "),
    ({}, {"order": "epoch"}, "a run of order epoch changes as a recipe"),
    ({}, {"train_iters": None, "epochs": 2}, "must end after iterations or samples"),
    ({}, {"phase_transition_iterations": [50]}, "phase_transition_iterations counts"),
    ({"num_samples": 80}, {}, "sample 90, beyond the 8. samples"),
])  # fmt: skip
def test_runs_that_do_not_change_so_are_refused(change: Any, settings: Any, message: str) -> None:
    amend = AmendedBlend.read("amend.yaml")
    amend = AmendedBlend(
        data_path=amend.data_path, changes=amend.changes, **{"num_samples": 200, **change}
    )
    given = {k: v for k, v in {**SETTINGS, **settings}.items() if v is not None}
    with pytest.raises(InvalidArgument, match=message):
        make_lock(**given, amend=amend)


def test_the_last_change_may_be_the_last_sample() -> None:
    amend = AmendedBlend.read("amend.yaml")
    run = run_of_settings(**{**SETTINGS, "train_iters": 151, "global_batch_size": 1}, amend=amend)
    assert (run.num_samples, run.index.num_samples) == (151, 151)
    with pytest.raises(InvalidArgument, match="at or beyond the end of the run"):
        run_of_settings(**{**SETTINGS, "train_iters": 150, "global_batch_size": 1}, amend=amend)


def test_evaluation_is_that_of_today() -> None:
    settings = {**SETTINGS, "eval_iters": 2}
    ours = make_lock(**settings, amend="amend.yaml").content["subsets"]
    theirs = make_lock(**settings).content["subsets"]
    assert ours["valid"] == theirs["valid"]
    assert ours["train"] != theirs["train"]


def test_whole_epochs_without_weights_are_not_extended_in_a_lock() -> None:
    paths = ["data/web", "data/code"]
    amend = AmendedBlend(data_path=paths, num_samples=150, consumed_samples=100)
    with pytest.raises(InvalidArgument, match="whole epochs go on by another rule"):
        make_lock(**{**SETTINGS, "data_path": paths}, amend=amend)


@pytest.mark.parametrize(("text", "message"), [
    ("data_path: [a]\nnum_samples: 9\n", "changes is missing; it must be a list"),
    ("data_path: [a]\nnum_samples: 9\nchanges: []\n", "changes is empty"),
    ("data_path: [a]\nnum_samples: 9\nconsumed_samples: 10\n", "consumed_samples must be"),
    ("data_path: [a]\nnum_samples: 9\nconsumed_samples: -1\n", "consumed_samples must be"),
    (AMEND + "consumed_samples: 3\n", "and not both"),
])  # fmt: skip
def test_files_of_changes_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "amend.yaml").write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        AmendedBlend.read(tmp_path / "amend.yaml")


def test_an_extension_begins_at_any_sample_of_the_run(tmp_path: Path) -> None:
    for consumed in (0, 9):
        path = tmp_path / "extend.yaml"
        path.write_text(f"{{data_path: a, num_samples: 9, consumed_samples: {consumed}}}")
        assert AmendedBlend.read(path).consumed_samples == consumed


def test_the_lock_of_a_changed_run_is_planned() -> None:
    run = run_of_lock("amended.lock")
    plan = json.loads(cli("plan", "amended.lock", "--json")[1])
    counts = run.counts(0, run.num_samples).tolist()
    assert [row["drawn"] for row in plan["datasets"]] == counts
    assert (plan["train_iters"], plan["max_train_iters_without_repeat"]) == (run.num_steps, None)
    status, _, err = cli("plan", "amended.lock", "--print-config", "megatron")
    assert status == 2
    assert "the blend of the run changed on the way, which no settings say" in err


def test_what_takes_no_changed_run_says_so() -> None:
    with pytest.raises(InvalidArgument, match=r"megaindex\.recipe\.amend"):
        make_lock(read_recipe("run.yaml"), amend="amend.yaml")
    with pytest.raises(InvalidArgument, match="a run whose blend changed on the way"):
        install(lock="amended.lock")
    with pytest.raises(InvalidArgument, match="consumed_samples extends a run"):
        install(amend="extend.yaml")
    run: Any = amend_run(
        ["data/web"], num_samples=80, sequence_length=32,
        changes=[BlendChange(consumed_samples=40, weights={"data/web": 1, "data/chat": 1})],
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="the changes as amend="):
        make_lock(run)


@pytest.mark.parametrize("name", ENDS)
def test_the_loader_of_a_changed_run_resumes_that_of_its_index(name: str) -> None:
    torch = pytest.importorskip("torch")
    loader = import_module("megaindex.loader")
    sampler = loader.MicroBatchSampler(
        num_samples=ENDS[name], micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1,
        global_batch_size=4,
    )  # fmt: skip
    ours = loader.Loader(direct(name), sampler)
    batches = iter(ours)
    for _ in range(30):
        next(batches)
    theirs = open_run(f"{name}.lock", micro_batch_size=4)
    theirs.load_state_dict(ours.state_dict())
    pairs = list(zip(batches, theirs, strict=True))
    assert len(pairs) == ENDS[name] // 4 - 30
    assert all(torch.equal(a["tokens"], b["tokens"]) for a, b in pairs)


def test_the_last_change_is_compared_in_parts_of_each_share() -> None:
    change = BlendChange(consumed_samples=4, weights={"P": 1, "Q": 1e-12})
    amended = AmendedBlend(data_path=["P", "Q"], num_samples=9, changes=[change])
    amended.check_present(["P", "Q"], [2.0, 2e-12])
    with pytest.raises(InvalidArgument, match="must be that of the last change"):
        amended.check_present(["P", "Q"], [1.0, 9e-10])
