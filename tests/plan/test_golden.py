"""GPT-NeoX issue 1164: 2,113,896,210 tokens, S = 2048, G = 128."""

from __future__ import annotations

import pytest
from support.command_line import plan as cli
from support.command_line import plan_json

CASE = [
    "--tokens-per-epoch", 2113896210, "--seq-length", 2048, "--micro-batch-size", 16,
    "--data-parallel-size", 8, "--gradient-accumulation-steps", 1, "--order", "neox",
]  # fmt: skip


@pytest.mark.parametrize("buffer", [None, "1.0", "1.005", "1.1", "exact"])
def test_one_epoch_is_8063_iterations_with_any_buffer(buffer: str | None) -> None:
    plan = plan_json(*CASE, "--epochs", 1, *(["--variance-buffer", buffer] if buffer else []))
    assert plan["samples_per_epoch"] == 1032175
    assert plan["tokens_per_epoch"] == 2113896210
    assert plan["global_batch_size"] == 128
    assert plan["train_iters"] == 8063
    assert plan["samples_consumed"] == 8063 * 128
    assert plan["samples_left_over"] == 111


def test_without_a_buffer_8063_builds_one_epoch_and_8064_two() -> None:
    stays = plan_json(*CASE, "--train-iters", 8063)
    assert stays["num_epochs_built"] == 1
    assert stays["samples_built"] == 1032175
    assert stays["samples_left_over"] == 111
    assert stays["max_train_iters_without_repeat"] == 8063
    assert stays["max_train_iters_same_epochs"] == 8063
    assert stays["variance_buffer"] == 1.0
    begins = plan_json(*CASE, "--train-iters", 8064)
    assert begins["num_epochs_built"] == 2
    assert begins["samples_built"] == 2064351
    assert begins["max_train_iters_without_repeat"] == 8063
    assert [n["train_iters"] for n in stays["neighbours"]] == [8063, 8064]
    assert [n["samples_built"] for n in stays["neighbours"]] == [1032175, 2064351]


def test_the_1_005_buffer_builds_two_epochs_for_8063_iterations() -> None:
    plan = plan_json(*CASE, "--train-iters", 8063, "--variance-buffer", 1.005)
    assert plan["num_epochs_built"] == 2
    assert plan["samples_built"] == 2064351
    assert plan["max_train_iters_without_repeat"] == 8023
    seen = plan["datasets"][0]["coverage"]
    assert [round(seen[f"seen_{k}"], 3) for k in range(3)] == [0.25, 0.5, 0.25]
    assert plan["datasets"][0]["coverage_method"] == "expected"


def test_what_1_005_would_have_done_is_told() -> None:
    effect = plan_json(*CASE, "--epochs", 1)["buffer_effect"]
    assert effect["num_epochs_built"] == 2
    assert effect["max_train_iters_without_repeat"] == 8023


@pytest.mark.parametrize(
    ("iterations", "buffer", "status"),
    [(8063, "1.0", 0), (8064, "1.0", 1), (8062, "1.0", 1), (8063, "1.005", 1)],
)
def test_check_fails_on_repeated_or_unseen_data(iterations: int, buffer: str, status: int) -> None:
    result, _, err = cli(*CASE, "--train-iters", iterations, "--variance-buffer", buffer, "--check")
    assert result == status
    assert err.startswith("check: ") == (status == 1)


@pytest.mark.parametrize(
    ("tail", "iterations", "consumed", "repeated", "masked"),
    [("drop", 8063, 1032064, 0, 0), ("pad", 8064, 1032175, 0, 17), ("wrap", 8064, 1032192, 17, 0)],
)
def test_tail_policies_and_what_they_cost(
    tail: str, iterations: int, consumed: int, repeated: int, masked: int
) -> None:
    plan = plan_json(*CASE, "--epochs", 1, "--tail", tail)
    assert plan["train_iters"] == iterations
    assert plan["samples_consumed"] == consumed
    assert plan["num_epochs_built"] == (2 if tail == "wrap" else 1)
    chosen = next(t for t in plan["tails"] if t["policy"] == tail)
    assert (chosen["samples_repeated"], chosen["samples_masked"]) == (repeated, masked)


def test_table_names_the_answer_and_the_neighbours() -> None:
    status, out, _ = cli(*CASE, "--epochs", 1)
    assert status == 0
    assert "train_iters 8063" in out
    assert "8063 stays in one epoch, 8064 begins a second: 2,064,351 samples built" in out
    assert "\x1b" not in out
    assert all(line == line.rstrip() for line in out.splitlines())


@pytest.mark.parametrize(
    ("words", "exact"),
    [(["--variance-buffer", 1.005], 8063), ([], None), (["--variance-buffer", "exact"], None)],
)
def test_at_8064_both_limits_are_in_the_box(words: list[object], exact: int | None) -> None:
    """The person of the issue uses train_data_paths, which have the buffer."""
    plan = plan_json(*CASE, "--train-iters", 8064, *words)
    assert plan["max_train_iters_with_exact_buffer"] == exact
    box = cli(*CASE, "--train-iters", 8064, *words)[1].partition("╰")[0]
    assert "8063" in box
    assert ("8023" in box) == ("exact" not in words)
