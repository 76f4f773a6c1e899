"""Modelled work of a run: against plain loops, in plan, audit and page."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli, plan, plan_json
from support.corpora import write_corpus, write_sparse_corpus
from support.worked_pages import DOCS

import megaindex
from megaindex.audit import audit, run_of_index
from megaindex.audit.balance import BINS, model_balance
from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel
from megaindex.run.run import Run

COST = CostModel(linear=8, attention=1)


@pytest.fixture
def prefix(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "web", np.random.default_rng(4).integers(1, 60, 300))
    return tmp_path / "web"


def run_of(prefix: Path, *more: object) -> list[object]:
    run: list[object] = ["--data-path", prefix, "--seq-length", 16, "--micro-batch-size", 2]
    return [*run, "--data-parallel-size", 3, "--global-batch-size", 12, *more]


def test_against_plain_loops(prefix: Path) -> None:
    stream = twenty_steps(prefix)
    model = model_balance(stream, COST)
    work, documents = [], []
    for sample in range(240):
        lengths = stream.index.locate([sample]).length.tolist()
        documents.append(len(lengths))
        lengths[-1] -= 1  # the label
        work.append(8 * 16 + sum(n**2 for n in lengths))
    by_rank = np.array(work, float).reshape(20, 2, 3, 2).sum(-1)  # step, round, rank
    for lost, ranks in ((model.by_round, by_rank), (model.by_step, by_rank.sum(1))):
        assert lost.in_order == pytest.approx(1 - ranks.mean() / ranks.max(-1).mean())
        assert lost.balanced < 0.5 * lost.in_order
    assert (model.steps, model.steps_modelled, model.rows) == (20, 20, 240)
    assert model.documents_mean == pytest.approx(np.mean(documents))
    assert model.documents_most == max(documents)
    relative = np.array(work) / np.mean(work)
    assert model.work_rows.sum() == 240
    assert model.work_bounds[[0, -1]] == pytest.approx([relative.min(), relative.max()])
    within = (relative >= model.work_bounds[3]) & (relative < model.work_bounds[4])
    assert model.work_rows[3] == within.sum()
    times = by_rank.max(-1).mean(1) / by_rank.mean((1, 2))
    assert model.step_time[:, 0] == pytest.approx(times)
    assert model.step_bounds.tolist() == list(range(21))


def twenty_steps(prefix: Path) -> Run:
    """20 steps of 12 samples, in micro batches of 2 on 3 ranks."""
    index = megaindex.build_index(megaindex.IndexedDataset(prefix), sequence_length=16)
    return run_of_index(
        index, global_batch_size=12, micro_batch_size=2, data_parallel_size=3, num_steps=20
    )


def test_the_curve_of_many_steps_has_their_means(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 20 steps in 3 points: of 6, 7 and 7 steps."""
    stream = twenty_steps(prefix)
    each = model_balance(stream, COST)
    monkeypatch.setattr("megaindex.audit.balance._POINTS", 3)
    model = model_balance(stream, COST)
    assert model.step_bounds.tolist() == [0, 6, 13, 20]
    means = [each.step_time[a:b].mean(0) for a, b in ((0, 6), (6, 13), (13, 20))]
    assert model.step_time == pytest.approx(np.array(means))


def test_the_rows_of_many_steps_are_spread_over_the_run(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of 107 rows in steps of 12, 8 steps of 20."""
    stream = twenty_steps(prefix)
    each = model_balance(stream, COST)
    monkeypatch.setattr("megaindex.audit.balance._MOST_ROWS", 107)
    model = model_balance(stream, COST)
    assert (model.steps_modelled, model.rows) == (8, 96)
    assert model.step_bounds.tolist() == [0, 2, 5, 7, 10, 12, 15, 17, 20]
    chosen = each.step_time[[0, 2, 5, 7, 10, 12, 15, 17]] * each.rows
    assert model.step_time * each.rows == pytest.approx(chosen)


@pytest.mark.parametrize("move", [[], ["--move-skipped"]])
def test_steps_that_are_not_made_are_left_out(prefix: Path, move: list[str]) -> None:
    words = run_of(prefix, "--train-iters", 30, "--skip-steps", "2-4", *move, "--cost-model", "8:1")
    status, out, err = cli("audit", *words, "--json")
    assert status == 0, err
    report = json.loads(out)["balance"]
    assert report["steps_modelled"] == (30 if move else 27)
    assert report["rows"] == 12 * report["steps_modelled"]


def test_a_last_step_of_fewer_samples_is_left_out(prefix: Path) -> None:
    report = plan_json(*run_of(prefix, "--epochs", 1, "--tail", "pad", "--balance"))
    steps = report["train_iters"]
    assert (report["balance"]["steps"], report["balance"]["steps_modelled"]) == (steps, steps - 1)
    # also where its samples fill whole rounds: half of its micro batches are padding
    words = run_of(prefix, "--train-samples", 12 * 4 + 6, "--tail", "pad", "--balance")
    report = plan_json(*words)
    assert (report["balance"]["steps"], report["balance"]["steps_modelled"]) == (5, 4)


def test_plan_and_audit_show_the_same(prefix: Path) -> None:
    words = run_of(prefix, "--train-iters", 30, "--cost-model", "8:1")
    report = plan_json(*words)["balance"]
    status, out, err = cli("audit", *words, "--json")
    assert status == 0, err
    assert json.loads(out)["balance"] == report
    assert report["cost_model"] == {"linear": 8, "attention": 1}
    assert len(report["work_of_rows"]["rows"]) == BINS
    status, out, _ = plan(*words)
    assert status == 0
    assert "every round" in out
    plain = run_of(prefix, "--train-iters", 30)
    assert "balance" not in plan_json(*plain)
    assert "balance" not in json.loads(cli("audit", *plain, "--json")[1])
    # without a cost model, that of an 8B model
    report = plan_json(*plain, "--balance")["balance"]
    assert report["cost_model"] == CostModel.preset("llama3-8b").to_dict()


@pytest.mark.parametrize("cost", ["8:1", "1e6:1", "1e14:1", "1e16:1", "1:0"])
def test_bounds_of_the_histogram_differ(prefix: Path, cost: str) -> None:
    """However small the differences between rows are."""
    status, out, err = plan(*run_of(prefix, "--train-iters", 30, "--cost-model", cost))
    assert status == 0, err
    lines = re.findall(r"^ *([0-9.]+) … ([0-9.]+) +([0-9]+)\b", out, re.M)
    assert len(lines) == BINS
    assert sum(int(rows) for _, _, rows in lines) == 360
    bounds = [lines[0][0], *(high for _, high, _ in lines)]
    assert [low for low, _, _ in lines] == bounds[:-1]
    numbers = [float(bound) for bound in bounds]
    assert numbers == sorted(set(numbers))
    assert len(bounds[0]) == 4 or cost == "1e6:1"


def test_the_page_shows_it(prefix: Path, tmp_path: Path) -> None:
    words = run_of(prefix, "--train-iters", 30, "--cost-model", "8:1", "--html")
    status, _, err = cli("audit", *words, tmp_path / "page.html")
    assert status == 0, err
    text = (tmp_path / "page.html").read_text()
    assert "Waiting for the slowest rank" in text
    assert 'aria-label="Time of a step"' in text
    (drawn,) = re.findall(r'aria-label="Work of rows".*?<path [^>]*d="([^"]*)"', text, re.DOTALL)
    assert max(map(float, re.findall(r"H([\d.]+)", drawn))) == 1000  # of an inner width of 1000
    assert "nan" not in text.partition('aria-label="Time of a step"')[2].partition("</svg>")[0]


def test_a_recipe(prefix: Path, tmp_path: Path) -> None:
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "sequence_length: 16\n"
        "batch: {micro_batch_size: 2, data_parallel_size: 3, gradient_accumulation_steps: 2}\n"
        f"sources:\n  web: {{path: {prefix}}}\n"
        "stages:\n  one: {steps: 20, mix: {web: 1}}\n"
    )
    report = plan_json("--recipe", recipe, "--cost-model", "8:1")["balance"]
    assert report["rows"] == 240
    assert report["lost_time"]["by_round"]["balanced"] < report["lost_time"]["by_round"]["in_order"]
    status, out, err = plan("--recipe", recipe, "--balance")
    assert status == 0, err
    assert "every step" in out


def test_both_pictures_of_the_docs_show_the_same() -> None:
    light, dark = (DOCS / f"balance-time{kind}.svg" for kind in ("", "-dark"))
    restyled = runpy.run_path(str(DOCS / "audit_sample.py"))["dark"]
    assert restyled(light.read_text()) == dark.read_text()
    for picture in (light, dark):
        assert picture.name in (DOCS / "balance.md").read_text()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--cost-model", "9B"], "llama3-8b"),
        (["--cost-model", "-1:2"], "linear must be >= 0"),
        (["--cost-model", "1:-2"], "--cost-model: attention must be >= 0"),
        (["--cost-model", "gpt9"], "--cost-model must be one of"),
        (["--cost-model", "0:0"], "must not both be 0"),
        (["--cost-model", "1:nan"], "attention must be a finite number"),
    ],
)
def test_bad_cost_models(prefix: Path, words: list[str], message: str) -> None:
    words = [f"{words[0]}={words[1]}"]
    for command in ("plan", "audit"):
        status, _, err = cli(command, *run_of(prefix, "--train-iters", 3), *words)
        assert status == 2
        assert message in err


def test_what_is_refused(prefix: Path) -> None:
    words: list[Any] = ["--data-path", prefix, "--seq-length", 16, "--global-batch-size", 12]
    status, _, err = plan(*words, "--train-iters", 3, "--balance")
    assert status == 2
    assert "--micro-batch-size" in err
    status, _, err = cli("audit", *run_of(prefix, "--train-iters", 3), "--step", 1, "--balance")
    assert status == 2
    assert "not a look-up" in err
    status, _, err = cli("audit", *words, "--train-iters", 3, "--micro-batch-size", 2, "--balance")
    assert status == 2
    assert "--balance needs the rows of each rank" in err
    index = megaindex.build_index(megaindex.IndexedDataset(prefix), sequence_length=16)
    stream = run_of_index(
        index, global_batch_size=4, micro_batch_size=3, data_parallel_size=1, num_steps=2
    )
    with pytest.raises(InvalidArgument, match="no step has whole micro batches"):
        audit(stream, cost_model=COST)


@pytest.mark.parametrize("rows", [7, 8])
def test_squares_of_a_step_fit_64_bits(tmp_path: Path, rows: int) -> None:
    corpus = write_sparse_corpus(tmp_path / "c", [2**31 - 1] * 5)
    index = megaindex.build_index(corpus, sequence_length=2**30)
    stream = run_of_index(
        index, global_batch_size=rows, micro_batch_size=1, data_parallel_size=1, num_steps=1
    )
    if rows == 7:
        assert audit(stream, cost_model=COST).balance is not None
    else:
        with pytest.raises(InvalidArgument, match=r"8 rows of .* less than 2\*\*63"):
            audit(stream, cost_model=COST)


def test_ranks_that_share_a_row(prefix: Path) -> None:
    """Two ranks a row: time is lost to the slowest of all six."""
    stream = twenty_steps(prefix)
    shared = {
        name: model_balance(
            stream, CostModel(linear=8, attention=1, context_parallel_size=2, partition=name)
        )
        for name in ("document", "row")
    }
    alone = model_balance(stream, COST)
    assert shared["document"].by_round == alone.by_round
    work = np.zeros((240, 2))
    for sample in range(240):
        spans = stream.index.locate([sample])
        for begin, end in zip(*(each.tolist() for each in spans.bounds_in_samples()), strict=True):
            for place in range(begin, min(end, 16)):
                work[sample, int(4 <= place < 12)] += 2 * (place - begin) + 1
    by_rank = (8 * 8 + work).reshape(20, 2, 3, 2, 2).sum(3).reshape(20, 2, 6)
    for lost, ranks in ((shared["row"].by_round, by_rank), (shared["row"].by_step, by_rank.sum(1))):
        assert lost.in_order == pytest.approx(1 - ranks.mean() / ranks.max(-1).mean())
    assert shared["row"].work_bounds == pytest.approx(alone.work_bounds)


def test_the_command_line_divides_rows(prefix: Path) -> None:
    words = run_of(prefix, "--train-iters", 30, "--cost-model", "8:1")
    words += ["--context-parallel-size", 2]
    found = {}
    for name in ("document", "row"):
        given = [*words, "--context-parallel-partition", name]
        found[name] = plan_json(*given)["balance"]
        assert json.loads(cli("audit", *given, "--json")[1])["balance"] == found[name]
        assert f"each of 2 that divide every {name}" in " ".join(plan(*given)[1].split())
    assert plan_json(*words)["balance"] == found["document"]
    lost = {name: each["lost_time"]["by_round"]["in_order"] for name, each in found.items()}
    assert lost["row"] > lost["document"] > 0
    for given in (
        run_of(prefix, "--train-iters", 3, "--balance", "--context-parallel-partition", "row"),
        [*run_of(prefix, "--train-iters", 3, "--context-parallel-size", 2),
         "--context-parallel-partition", "row"],
    ):  # fmt: skip
        status, _, err = plan(*given)
        assert status == 2
        assert "--context-parallel-partition" in err
