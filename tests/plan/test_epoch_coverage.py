"""Coverage of order epoch past its first pass, against counting the tokens it serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.command_line import plan as cli
from support.command_line import plan_json, shares_by_times
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.index.frameworks import LeftOver


@for_each("epochs", ["1.3", "2", "0.4"])
@for_each(("mixed", "left_over"), [(1, "drop"), (2, "drop"), (1, "carry"), (3, "carry")])
def test_coverage_is_that_of_the_tokens_served(
    tmp_path: Path, epochs: str, mixed: int, left_over: LeftOver
) -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 120)
    corpus = write_corpus(tmp_path / "c", lengths)
    plan = plan_json("--data-path", corpus.path_prefix, "--seq-length", 64, "--global-batch-size",
                     8, "--epochs", epochs, "--order", "epoch", "--coverage", "exact",
                     "--epochs-mixed", mixed, "--left-over", left_over)  # fmt: skip
    served = plan["samples_consumed"]
    index = megaindex.build_index(
        corpus, sequence_length=64, seed=1234, num_samples=served,
        order=megaindex.EpochOrder(epochs_mixed=mixed, left_over=left_over),
    )  # fmt: skip
    spans = index.locate(np.arange(served))
    length = spans.length.copy()
    length[spans.row_splits[1:] - 1] -= 1  # the shifted label's token is the next sample's
    begin = corpus.sequence_pointers[spans.document] // 4 + spans.offset
    times = np.zeros(corpus.num_tokens, np.int64)
    for first, count in zip(begin, length, strict=True):
        times[first : first + count] += 1
    (row,) = plan["datasets"]
    assert (row["epochs"], row["built"]) == (index.num_epochs, index.num_samples)
    assert plan["max_train_iters_without_repeat"] == (row["samples_per_epoch"] // 8) * (mixed == 1)
    assert row["coverage_method"] in ("built", "closed-form")
    expected = np.bincount(times) / times.size
    assert shares_by_times(row["coverage"]) == pytest.approx(expected.tolist())
    assert sum(row["coverage"].values()) == pytest.approx(1)


@pytest.mark.slow
@for_each(("mixed", "left_over"), [(1, "drop"), (3, "drop"), (1, "carry"), (3, "carry")])
@for_each("epochs", ["2.4", "6.5"])
def test_the_expected_coverage_is_close_to_the_counted_one(
    tmp_path: Path, epochs: str, mixed: int, left_over: str
) -> None:
    lengths = np.random.default_rng(2).integers(1, 300, 1500)
    corpus = write_corpus(tmp_path / "c", lengths)
    words = ("--data-path", corpus.path_prefix, "--seq-length", 16, "--global-batch-size", 8,
             "--epochs", epochs, "--order", "epoch", "--epochs-mixed", mixed,
             "--left-over", left_over)  # fmt: skip
    counted, expected = (
        plan_json(*words, "--coverage", how)["datasets"][0]["coverage"]
        for how in ("exact", "expected")
    )
    for times in counted.keys() | expected.keys():
        assert counted.get(times, 0) == pytest.approx(expected.get(times, 0), abs=0.02)


def test_an_exact_number_of_epochs_is_built(tmp_path: Path) -> None:
    """Megatron-DeepSpeed's argument: 3 epochs, for samples that 2.2 hold."""
    corpus = write_corpus(tmp_path / "c", np.full(50, 40))
    words = ("--seq-length", 16, "--global-batch-size", 4, "--order", "megatron-legacy",
             "--data-path", corpus.path_prefix, "--train-data-exact-num-epochs", 3)  # fmt: skip
    plan = plan_json(*words, "--train-samples", 300)
    assert (plan["num_epochs_built"], plan["samples_built"]) == (3, 374)
    assert plan["max_train_iters_without_repeat"] == 0
    assert plan["max_train_iters_same_epochs"] == 374 // 4
    rows = plan_json(*words, "--train-samples", 240, "--split", "80,20,0", "--eval-iters", 2)
    assert {row["split"]: row["epochs"] for row in rows["datasets"]} == {"train": 3, "valid": 1}
    status, _, error = cli(*words, "--train-samples", 100)
    assert status == 2
    assert "exact_num_epochs=3: num_samples must be from" in error
    status, _, error = cli("--order", "epoch", *words, "--order", "epoch", "--epochs", 1)
    assert status == 2
    assert "--train-data-exact-num-epochs is a setting of order megatron" in error


def test_the_command_line_of_megatron_deepspeed_is_read(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", np.full(50, 40))
    arguments = (
        f"--data-path {corpus.path_prefix} --split 1,0,0 --seq-length 16 --seed 1 "
        "--global-batch-size 4 --train-iters 60 --train-data-exact-num-epochs"
    )
    plan = plan_json("--megatron-args", f"{arguments} 2")
    assert (plan["order"], plan["num_epochs_built"]) == ("megatron-legacy", 2)
    own = plan_json("--megatron-args", f"{arguments} -1")  # no other framework has the argument
    assert (own["order"], own["num_epochs_built"]) == ("megatron-legacy", 2)
