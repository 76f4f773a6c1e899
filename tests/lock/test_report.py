"""The exposure report of a lock, and commands that take a lock."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.builders.recipe import open_recipe
from megaindex.cli import main
from megaindex.errors import MegaIndexError
from megaindex.index.balance import CostModel
from megaindex.lock import make_lock, open_run, read_lock, report_run, run_of_lock
from megaindex.recipe import read_recipe
from megaindex.run.from_recipe import run_of_recipe
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.run_settings import Data, RunSettings, Target
from megaindex.settings.sources import Source

RECIPE = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 2}
sources: {web: web, "a|b": code}
stages: {main: {steps: 40, mix: {web: 3, "a|b": 1}}}
"""


@pytest.fixture
def lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path / "web", np.full(60, 40))
    write_corpus(tmp_path / "code", np.append(np.full(9, 33), 0))
    (tmp_path / "run.yaml").write_text(RECIPE)
    make_lock(read_recipe("run.yaml")).write("run.lock")
    return tmp_path / "run.lock"


def test_counts_are_those_of_the_samples(lock: Path) -> None:
    stream = run_of_recipe(read_recipe("run.yaml"))
    report = report_run(lock)
    times = [np.zeros(source.lengths.sum(), np.int64) for source in stream.sources]
    for runs in stream.runs():
        for source, document, offset, length in zip(*runs[1:], strict=True):
            begin = int(stream.sources[source].lengths[:document].sum()) + offset
            times[source][begin : begin + length] += 1
    assert [each.served for each in report.sources] == [int(t.sum()) for t in times]
    assert [each.unseen for each in report.sources] == [int((t == 0).sum()) for t in times]
    again = [int((t - 1).clip(0).sum()) for t in times]
    assert [each.served_again for each in report.sources] == again
    assert again[1] > 0
    assert [each.documents for each in report.sources] == [60, 9]  # not the empty one
    assert (report.steps, report.samples, report.steps_skipped) == (40, 160, 0)
    assert sum(each.share for each in report.sources) == pytest.approx(1)


def test_the_report_of_the_command(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["report", "run.lock"]) == 0
    page = capsys.readouterr().out
    assert page == report_run(lock).to_markdown()
    assert r"| a\|b " in page
    assert main(["report", "run.lock", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == json.loads(json.dumps(report_run(lock).to_json()))
    assert report["receipt"] in lock.read_text()
    assert main(["report", "no.lock"]) == 2
    assert "no.lock: is no file" in capsys.readouterr().err


def test_copies_of_a_source_are_named(lock: Path) -> None:
    """By the names of the lock; their documents count as different ones."""
    for suffix in (".bin", ".idx"):
        shutil.copy(f"web{suffix}", f"copy{suffix}")
    words = [1, "web", 1, "code", 1, "copy"]
    run = {"sequence_length": 16, "train_iters": 30, "global_batch_size": 4, "eval_iters": 0}
    report = report_run(make_lock(data_path=words, split="1,0,0", **run).write("copies.lock"))
    assert [(each.source, each.same_as) for each in report.sources] == [
        ("web", ("copy",)), ("code", ()), ("copy", ("web",)),
    ]  # fmt: skip
    assert "web, copy have the same fingerprint" in report.to_markdown()
    assert "same fingerprint" not in report_run(lock).to_markdown()


@pytest.mark.parametrize(
    ("groups", "copies", "named", "more"),
    [
        (1, 10, ["web0, web1, web2, web3, web4, web5, web6, web7, web8, web9 have"], []),
        (1, 11, ["web0, web1, web2, web3, web4, web5, web6, web7, web8, web9 and 1 more have"], []),
        (24, 2, [f"web{2 * k}, web{2 * k + 1} have" for k in range(24)], []),
        (25, 2, [f"web{2 * k}, web{2 * k + 1} have" for k in range(10)], ["15"]),
    ],
)
def test_of_many_copies_and_groups_of_them_ten_are_named(
    lock: Path, groups: int, copies: int, named: list[str], more: list[str]
) -> None:
    report = report_run(lock)
    sources = tuple(
        replace(report.sources[0], source=f"web{k}", fingerprint=f"{k // copies:032x}")
        for k in range(groups * copies)
    )
    page = replace(report, sources=sources).to_markdown()
    assert re.findall(r"^(web.* have) the same fingerprint", page, re.MULTILINE) == named
    assert re.findall("So do (.*) more groups of sources; --json lists all", page) == more


@for_each(
    ("words", "samples", "steps", "skipped", "masked"),
    [
        ([], 149, 38, 0, 0),
        (["--skip-steps", "2-4"], 137, 35, 3, 0),
        (["--skip-steps", "2-4", "--move-skipped"], 149, 38, 3, 0),
        (["--skip-documents", "ids"], 149, 38, 0, 120),
    ],
)
def test_skips_and_padding_are_reported(
    lock: Path, words: list[str], samples: int, steps: int, skipped: int, masked: int
) -> None:
    """Of 60 documents of 40 tokens, 149 samples in steps of 4."""
    Path("ids").write_text("3 4 5")
    run = ["web", "--seq-length", "16", "--global-batch-size", "4", "--epochs", "1"]
    run += ["--tail", "pad", "--out", "skips.lock", "--overwrite"]
    assert main(["lock", *run, *words]) == 0
    report = report_run("skips.lock")
    assert (report.samples, report.steps, report.steps_skipped) == (samples, steps, skipped)
    assert (report.padded_rows, report.sources[0].masked) == (3, masked)


def test_audit_and_trace_take_a_lock(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["audit", "--json"], ["trace", "--step", "7", "--json"]):
        assert main([*verb, "--lock", "run.lock"]) == 0
        locked = capsys.readouterr().out
        assert main([*verb, "--recipe", "run.yaml"]) == 0
        assert capsys.readouterr().out == locked
    assert main(["audit", "--lock", "run.lock", "--seed", "3"]) == 2
    assert "--lock has the whole run, also --seed" in capsys.readouterr().err
    with open(lock.parent / "code.idx", "r+b") as file:
        file.seek(60)
        file.write(b"\x01")
    assert main(["trace", "--lock", "run.lock", "--step", "1"]) == 2
    assert "code.idx" in capsys.readouterr().err


def test_the_evaluation_of_a_lock_is_traced(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With the documents of the evaluation's own source."""
    (lock.parent / "eval.yaml").write_text(f"{RECIPE}evaluation: {{source: code, iterations: 2}}")
    make_lock(read_recipe("eval.yaml")).write("eval.lock")
    assert main(["trace", "--lock", "eval.lock", "--subset", "valid", "--step", "0", "--json"]) == 0
    spans = json.loads(capsys.readouterr().out)["spans"]
    stream = run_of_lock("eval.lock", subset="valid")
    assert [source.path_prefix for source in stream.sources] == [str(lock.parent / "code")]
    assert stream.num_samples == 8
    assert {span["sample"] for span in spans} == set(range(8))
    assert sum(span["length"] for span in spans) == 8 * 16
    assert max(span["document"] for span in spans) < 9
    assert main(["trace", "--lock", "run.lock", "--subset", "valid", "--step", "0"]) == 2
    assert "run.lock: has no subset valid, it has train" in capsys.readouterr().err


@pytest.mark.slow_cases("4000")
@pytest.mark.parametrize("steps", [3, 4000])
def test_no_cell_of_a_report_grows_with_the_sources(lock: Path, steps: int) -> None:
    words = [word for number in range(300) for word in (str(1 + number / 7), "web")]
    run = {"sequence_length": 16, "train_iters": steps, "global_batch_size": 64, "eval_iters": 0}
    report = report_run(make_lock(data_path=words, split="1,0,0", **run).write("many.lock"))
    page = report.to_markdown()
    weights = report.settings["weights"].split(", ")
    rows = [line.split("|") for line in page.splitlines() if line.startswith("|")]
    assert max(len(cell) for row in rows for cell in row) < 80
    listed = [row for row in rows if len(row) == 9][2:]
    sign = -1 if steps > 3 else 1  # nothing repeats in 3
    worst = sorted(range(300), key=lambda number: sign * report.sources[number].epochs)[:10]
    assert [row[2].strip() for row in listed] == [weights[number] for number in worst]
    assert len(page.splitlines()) < 66
    repeat = sum(each.served_again > 0 for each in report.sources)
    assert (repeat > 0) == (steps > 3)
    assert f"10 of 300 sources, the worst first; --json lists all. {repeat or 'none'} of" in page
    assert len(report.to_json()["sources"]) == 300


@pytest.mark.parametrize("count", [24, 25])
def test_a_report_of_few_sources_has_all(lock: Path, count: int) -> None:
    words = [word for number in range(count) for word in (str(1 + number / 7), "web")]
    run = {"sequence_length": 16, "train_iters": 3, "global_batch_size": 64, "eval_iters": 0}
    made = make_lock(data_path=words, split="1,0,0", **run).write(f"of-{count}.lock")
    page = report_run(made).to_markdown()
    assert page.count("| web ") == 2 * (24 if count == 24 else 10)
    assert ("the worst first" in page) == (count == 25)


def test_a_run_without_a_recipe_is_balanced(lock: Path) -> None:
    torch = pytest.importorskip("torch")
    make_lock(make_plan_run()).write("plan.lock")
    steps = []
    for balance in (None, CostModel(linear=1, attention=1)):
        ranks = [
            [batch["tokens"] for batch in open_run("plan.lock", balance=balance,
             data_parallel_rank=rank, data_parallel_size=2)]
            for rank in range(2)
        ]  # fmt: skip
        rounds = [torch.cat(batches) for batches in zip(*ranks, strict=True)]
        steps.append([sorted(torch.cat(rounds[k : k + 2]).tolist()) for k in range(0, 40, 2)])
    assert steps[0] == steps[1]


def test_a_checkpoint_of_a_changed_mix_is_locked(
    lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The changes are written beside the lock, as a file that it pins."""
    pytest.importorskip("torch")
    from megaindex.loader import loader_of_recipe

    loader = loader_of_recipe(open_recipe(read_recipe("run.yaml")), data_parallel_size=1)
    loader.set_mix({"web": 1, "a|b": 3}, 20)
    Path("state.json").write_text(json.dumps(loader.state_dict()))
    for status in (0, 2):
        assert main(["lock", "--state", "state.json", "--out", "state.lock"]) == status
    assert main(["verify", "state.lock", "--all"]) == 0
    ids = np.arange(160)
    for ours, theirs in zip(run_of_lock("state.lock").index.locate(ids),
                            loader.index.locate(ids), strict=True):  # fmt: skip
        np.testing.assert_array_equal(ours, theirs)
    assert [file.path for file in read_lock("state.lock").files] == [f"{Path.cwd()}/state-mix.npy"]


def test_the_stream_is_that_of_the_recipe(lock: Path) -> None:
    stream, other = run_of_lock(lock), run_of_recipe(read_recipe("run.yaml"))
    ids = np.arange(stream.num_samples)
    for ours, theirs in zip(stream.index.locate(ids), other.index.locate(ids), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_damaged_arrays_of_a_cache_are_not_served(
    lock: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Only the receipts of all samples tell them from those of the lock."""
    run = make_plan_run()
    make_lock(run, cache_dir="cache").write("run2.lock")
    assert report_run("run2.lock", cache_dir="cache").samples == 80
    assert len(open_run("run2.lock", cache_dir="cache")) == 80
    (array,) = (lock.parent / "cache").glob("*/shuffle_index.npy")
    numbers = np.load(array)
    numbers[[0, 70]] = numbers[[70, 0]]
    np.save(array, numbers)
    for act in (report_run, open_run):
        with pytest.raises(MegaIndexError, match=r"cache: its arrays give samples of receipt"):
            act("run2.lock", cache_dir="cache")
    assert main(["verify", "run2.lock", "--cache-dir", "cache", "--all"]) == 1
    capsys.readouterr()


def make_plan_run() -> RunSettings:
    return RunSettings(
        order="megatron",
        sequence_length=16,
        data=Data(train=(Source(path="web"),)),
        batch=BatchSchedule.constant(4),
        target=Target(kind="iterations", value=Fraction(20)),
    )


def test_wrong_sizes_and_names_are_refused(lock: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(MegaIndexError, match="data_parallel_size must be"):
        open_run(lock, data_parallel_size=0)
    with pytest.raises(MegaIndexError, match="micro_batch_size must be"):
        open_run(lock, micro_batch_size=0)
    assert main(["verify", "run.lock", "--subset", "test", "--step", "0"]) == 2
    assert "has no subset test, only train" in capsys.readouterr().err
    assert main(["lock", "--recipe", "run.yaml", "--out", "run.json"]) == 2
    assert "--out must end in .lock" in capsys.readouterr().err
