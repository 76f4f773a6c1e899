"""What audits, traces, reports and proofs say of steps and samples that they cannot see, or that
serve nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus

from megaindex import IndexedDatasetWriter, open_run
from megaindex.loader import SampleOptions

RUN = """
sequence_length: 16
batch: {micro_batch_size: 1, data_parallel_size: 2, global_batch_size: 4}
sources: {web: web, code: code}
"""
MIX = "mix: {web: 3, code: 1}"


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(4)
    for name in ("web", "code", "math"):
        write_corpus(tmp_path / name, rng.integers(1, 40, 120))
    Path("read.txt").write_text("3 5 8")


def said(*words: str, status: int = 0) -> str:
    found, out, err = cli(*words)
    assert found == status, (out, err)
    return " ".join((out + err).split())


def recipe(stages: str, more: str = "", name: str = "run.yaml", run: str = RUN) -> str:
    Path(name).write_text(f"{run}stages:\n{stages}\n{more}")
    return name


def states(path: str, steps: int, name: str) -> str:
    """Write the state of a loader after some steps."""
    loader = open_run(path).loader(data_parallel_rank=0, data_parallel_size=1, micro_batch_size=4)
    for _ in zip(range(steps), loader, strict=False):
        pass
    Path(name).write_text(json.dumps(loader.state_dict()))
    return name


def test_what_another_system_read_is_not_known() -> None:
    past = "past: {steps: 100, read: {web: {tokens: 200}, code: {documents: read.txt}}}\n"
    run = recipe(f"  a: {{steps: 20, {MIX}}}", past)
    words = ("prove", run, "--absent", "read.txt:code", "--from-step")
    assert "--from-step must be from 100 to 119, got 99; what the steps of another" in said(
        *words, "99", status=2
    )
    for step in ("100", "0"):
        assert f"--checkpoints must be from 101 to 120, got {step}" in said(
            *words, "100", "--checkpoints", step, status=2
        )
    found = json.loads(cli(*words, "100", "--checkpoints", "101,120", "--json")[1])
    assert found["not_established"][0] == "what the 100 steps of another system read"
    text = cli(*words, "100", "--checkpoints", "101,120")[1]
    assert "of the documents, without the 100 steps of another system" in text
    text = said("audit", run)
    assert "120 steps, 100 of them in another system, whose reading is not counted" in text
    assert "so far" not in text
    assert "step 98-99 was made in another system" in said("audit", run, "--step", "98-99")


def test_a_step_of_removed_documents_alone_is_made() -> None:
    batching = f"batching: per_stream, {MIX}"
    skips = "skip:\n- {source: code, from_step: 2, remove: true}\n- {steps: [9, 10], move: true}\n"
    run = recipe(f"  a: {{steps: 40, {batching}}}", skips)
    assert cli("lock", run, "--out", "run.lock")[0] == 0
    loader = open_run(run).loader(
        data_parallel_rank=0, data_parallel_size=1, micro_batch_size=4,
        options=SampleOptions(eod_id=0),
    )  # fmt: skip
    batches = [np.asarray(batch["loss_mask"]) for batch in loader]
    empty = [step for step, mask in enumerate(batches) if not mask.any()]
    assert empty
    report = said("report", "run.lock")
    assert "| samples served | 160 |" in report
    assert "| steps made | 40 | | steps skipped | 2 |" in report
    for verb in ("trace", "audit"):
        text = said(verb, "run.lock", "--step", str(empty[0] if empty[0] < 9 else empty[0] + 2))
        assert "has removed documents alone: all its rows are padding" in text
        text = said(verb, "run.lock", "--step", "9-11")
        assert "step 9-10 is skipped; the samples of moved steps are served behind" in text


def test_ranks_are_those_of_the_shape_at_a_step() -> None:
    """Micro batches of 1 row on 2 ranks, then of 2 rows on 2 ranks."""
    later = "batch: {micro_batch_size: 2, global_batch_size: 4}"
    run = recipe(f"  a: {{steps: 5, {MIX}}}\n  b: {{steps: 5, {later}, {MIX}}}")
    for step, expected in ((4, [0, 1, 0, 1]), (5, [0, 0, 1, 1])):
        content = json.loads(cli("audit", run, "--step", str(step), "--json")[1])
        ranks = {each["sample"]: each["rank"] for each in content["servings"]}
        assert [ranks[step * 4 + row] for row in range(4)] == expected
        content = json.loads(cli("audit", run, "--step", str(step), "--rank", "1", "--json")[1])
        rows = [row for row in range(4) if expected[row] == 1]
        assert {each["sample"] - step * 4 for each in content["servings"]} == {*rows}
    assert "rank must be 0 or 1, got 2" in said(
        "audit", run, "--step", "5", "--rank", "2", status=2
    )


def test_one_round_of_an_evaluation_is_said_to_be_one() -> None:
    evaluation = "evaluation: {source: math, interval: 5, iterations: 2}\n"
    run = recipe(f"  a: {{steps: 20, {MIX}}}", evaluation)
    text = said("audit", run, "--subset", "valid")
    assert "8 samples of 16 tokens in 1 step, one of 4 rounds that are alike" in text
    assert "Each of the 4 rounds serves the same tokens, each once." in text
    assert json.loads(cli("audit", run, "--subset", "valid", "--json")[1])["rounds"] == 4
    flags = ("--seq-length", "16", "--global-batch-size", "8", "--train-iters", "60", "--split",
             "60,40,0", "--eval-iters", "6", "--eval-interval", "6", "web")  # fmt: skip
    text = said("audit", *flags, "--subset", "valid")
    assert "training loss" not in text
    assert "Tokens served again" in text


def test_documents_without_tokens_are_said_to_be_empty() -> None:
    Path("rows.jsonl").write_text('{"text": "ab"}\n{"text": ""}\n{"text": "cd"}\n' * 20)
    assert cli("tokenize", "news", "rows.jsonl", "--tokenizer", "bytes")[0] == 0
    flags = ("--seq-length", "8", "--global-batch-size", "2", "--epochs", "1")
    text = said("trace", "news", *flags, "--rows", "rows.jsonl:2", status=2)
    assert "their documents are empty" in text


def test_an_order_that_a_checkpoint_does_not_name_is_not_compared() -> None:
    stages = f"  a: {{steps: 20, {MIX}}}"
    run = recipe(stages)
    for name, seed in (("run.lock", 1), ("other.lock", 2)):
        recipe(stages, f"seed: {seed}\n", name="seeded.yaml")
        assert cli("lock", "seeded.yaml", "--out", name)[0] == 0
    state = json.loads(Path(states(run, 5, "state.json")).read_text())
    state["recipe"] = None
    Path("state.json").write_text(json.dumps(state))
    text = said("prove", "other.lock", "state.json", status=1)
    assert "order: not compared, the checkpoint names none of its own" in text
    assert "the same without skips" not in text
    content = json.loads(cli("prove", "other.lock", "state.json", "--json")[1])
    assert (content["order_compared"], content["holds"]) == (False, False)


def test_a_source_that_joins_later_leaves_the_past_as_it_was() -> None:
    stages = f"  a: {{steps: 10, {MIX}}}\n"
    sources = RUN.replace("code: code}", "code: code, math: math}")
    ours = states(recipe(f"{stages}  b: {{steps: 10, {MIX}}}"), 5, "state.json")
    joined = "  b: {steps: 10, mix: {web: 1, math: 1}}"
    recipe(stages + joined, name="joined.yaml", run=sources)
    assert cli("lock", "joined.yaml", "--out", "joined.lock")[0] == 0
    text = said("prove", ours, "joined.lock")
    assert "behind sample 20 the runs differ: source 2 is one of the second alone" in text
    assert "no other difference, up to sample 20" in text
    later = "  b: {steps: 10, batch: {global_batch_size: 8}, mix: {web: 3, code: 1}}"
    recipe(stages + later, name="larger.yaml")
    assert cli("lock", "larger.yaml", "--out", "larger.lock")[0] == 0
    text = said("prove", ours, "larger.lock")
    assert "behind sample 20 the runs differ: samples before step 11: 44 in the first, 48" in text
    recipe("  a: {steps: 20, mix: {web: 2, code: 1, math: 1}}", name="early.yaml", run=sources)
    assert cli("lock", "early.yaml", "--out", "early.lock")[0] == 0
    assert "fingerprint of source 2: 'nothing'" in said("prove", ours, "early.lock", status=1)


def test_orders_are_compared_by_the_content_of_their_sources() -> None:
    stages = f"  a: {{steps: 20, {MIX}}}"
    run = recipe(stages)
    swapped = RUN.replace("{web: web, code: code}", "{code: code, web: web}")
    other = recipe(stages, name="swapped.yaml", run=swapped)
    text = said("diff-order", run, other)
    assert "equal: 80 samples, the same in every position; tokens not compared" in text
    assert "the same sources in another order" in text
    more = recipe(stages, name="more.yaml", run=RUN.replace("code: code}", "code: code, x: math}"))
    text = said("diff-order", run, more)
    assert "equal: 80 samples" in text
    assert "source 2 is one of B alone; the others are in both" in text
    else_ = recipe(stages, name="else.yaml", run=RUN.replace("web: web", "web: math"))
    text = said("diff-order", run, else_, status=1)
    assert "source 0 is one of A alone, source 0 is one of B alone; the others are in" in text
    assert "A source 0, document" in text
    assert "A document" in said("diff-order", "--seq-length", "16", "--epochs", "1",
                                "data_path=web", "data_path=code", status=1)  # fmt: skip


def test_other_corpora_have_no_sample_in_common() -> None:
    for name, count in (("few", 30), ("many", 40)):
        with IndexedDatasetWriter(name, dtype="uint16") as pair:
            for _ in range(count):
                pair.add_document(np.arange(16))
    text = said("diff-order", "--seq-length", "16", "--order", "window", "--epochs", "1",
                "data_path=few", "data_path=many", status=1)  # fmt: skip
    assert "0 samples are in both" in text
