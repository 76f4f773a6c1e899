"""Printed settings, refusals and remedies of plans, compared with the runs that they are of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import yaml
from support.command_line import cli
from support.corpora import write_corpus

from megaindex import open_run
from megaindex.errors import InvalidArgument
from megaindex.lock.opening import run_of_lock
from megaindex.plan import make_plan

SIZE = ("--seq-length", "16", "--global-batch-size", "4")


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(6)
    for name, documents in (("web", 300), ("code", 120), ("few", 8)):
        write_corpus(tmp_path / name, rng.integers(1, 60, documents))


def test_a_source_of_weight_0_is_not_in_the_recipe() -> None:
    for zero, names in (("0", ["web"]), ("0.5", ["web", "code"])):
        words = ("--train-data-path", "0.5", "web", zero, "code", "--train-iters", "9")
        out = cli("plan", *words, *SIZE, "--order", "neox", "--print-config", "recipe")[1]
        recipe = yaml.safe_load(out)
        (stage,) = recipe["stages"].values()
        assert ([*recipe["sources"]], [*stage["mix"]]) == (names, names)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--weights", "0.9", "0.1"), "--weights and --train-data-path exclude each other"),
        (("--split", "90,10,0"), "--split and --train-data-path exclude each other"),
    ],
)
def test_what_paths_of_each_split_exclude(words: tuple[str, ...], message: str) -> None:
    given = ("--train-data-path", "web", "code", "--train-iters", "9", *SIZE)
    assert cli("plan", *given)[0] == 0
    status, _, err = cli("plan", *given, *words)
    assert (status, message in err) == (2, True)


@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_epochs_of_each_source_weigh_the_evaluation_too(order: str) -> None:
    """As Megatron does, by the samples of training."""
    words = ("web", "code", "--split", "80,15,5", "--epochs", "1,3", "--eval-iters", "5",
             "--order", order, *SIZE)  # fmt: skip
    assert cli("lock", *words, "--out", "run.lock")[0] == 0
    plan = json.loads(cli("plan", *words, "--json")[1])
    for subset in ("valid", "test"):
        rows = [row for row in plan["datasets"] if row["split"] == subset]
        run = run_of_lock("run.lock", subset=subset)
        assert run.counts(0, run.num_samples).tolist() == [row["drawn"] for row in rows]


def test_the_surplus_is_printed_beside_a_changed_final_epoch() -> None:
    words = ("0.7", "web", "0.3", "few", "--train-iters", "90", "--variance-buffer", "1.1", *SIZE)
    for more in ((), ("--separate-final-epoch", "never")):
        out = cli("plan", *words, *more, "--print-config", "megatron")[1]
        assert "--mid-level-dataset-surplus 0.1" in out, more


def test_a_blend_of_megatron_deepspeed_has_weights() -> None:
    out = cli("plan", "web", "code", "--order", "megatron-legacy", "--train-iters", "9", *SIZE,
              "--print-config", "megatron")[1]  # fmt: skip
    assert "--data-path 1.0 web 1.0 code" in out
    out = cli("plan", "web", "--order", "megatron-legacy", "--train-iters", "9", *SIZE,
              "--print-config", "megatron")[1]  # fmt: skip
    assert "--data-path web" in out


@pytest.mark.parametrize(("target", "held"), [({"train_samples": 3}, 3), ({"train_tokens": 50}, 3)])
def test_a_target_of_less_than_a_batch_is_named(target: dict[str, int], held: int) -> None:
    plan = make_plan(data_path=["web"], sequence_length=16, global_batch_size=4, **target)
    assert any(f"the target holds {held} samples, one batch 4" in w for w in plan.warnings)


def test_the_remedy_for_a_repeated_evaluation_is_one_of_the_run() -> None:
    words = ("--train-data-path", "web", "--valid-data-path", "few", "--train-iters", "50", *SIZE)
    plan = json.loads(cli("plan", *words, "--json")[1])
    (text,) = [text for text in plan["warnings"] if "evaluate on each sample once" in text]
    assert "or give more valid data to evaluate" in text
    words = ("web", "--split", "99,1,0", "--train-iters", "50", *SIZE)
    plan = json.loads(cli("plan", *words, "--json")[1])
    assert any("or widen --split to evaluate" in text for text in plan["warnings"])


def test_a_loader_is_saved_where_its_evaluation_cannot_be_built(
    caplog: pytest.LogCaptureFixture,
) -> None:
    opened = open_run(
        "few", "code", "web", split="600,300,100", sequence_length=16, micro_batch_size=4,
        data_parallel_size=1, global_batch_size=4, epochs=1, eval_iters=400,
    )  # fmt: skip
    with pytest.raises(
        InvalidArgument, match="valid, .*few: .*follow the advice of `megaindex plan`"
    ):
        opened.lock("run.lock")
    loader = opened.loader(data_parallel_rank=0)
    next(iter(loader))
    assert loader.state_dict().get("identity") is None
    assert "the states of this loader name no identity of the run: valid, " in caplog.text


def test_sources_of_measured_weights_have_no_value() -> None:
    text = (
        "sequence_length: 16\nbatch: {global_batch_size: 4}\nsources: {web: web, code: code}\n"
        "stages: {a: {steps: 9, mix: MIX, weights: {by: tokens, alpha: 0.5}}}\n"
    )
    Path("run.yaml").write_text(text.replace("MIX", "{web: 1, code: 1}"))
    assert "write every source without a value, such as web:" in cli("plan", "run.yaml")[2]
    Path("run.yaml").write_text(text.replace("MIX", "{web: , code: }"))
    assert cli("plan", "run.yaml")[0] == 0
