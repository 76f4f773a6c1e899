"""Settings become a run; contradictions are named with their remedy."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import Data, RunSettings, Target
from megaindex.settings.settings import Settings, merged
from megaindex.settings.sources import Source

GOOD: dict[str, Any] = {
    "tokens_per_epoch": ("1000",),
    "seq_length": 8,
    "global_batch_size": 4,
    "epochs": "1",
}


def run_of(**changes: Any) -> RunSettings:
    return resolve(Settings(**{**GOOD, **changes}))


@pytest.mark.parametrize(
    ("sizes", "batch", "parallel"),
    [
        ({"micro_batch_size": 2, "data_parallel_size": 3, "gradient_accumulation_steps": 5}, 30, 3),
        ({"micro_batch_size": 2, "data_parallel_size": 3}, 6, 3),
        ({"micro_batch_size": 2, "world_size": 48, "tensor_model_parallel_size": 2,
          "pipeline_model_parallel_size": 4, "context_parallel_size": 2}, 6, 3),
        ({"global_batch_size": 12, "micro_batch_size": 2, "world_size": 3}, 12, 3),
        ({"global_batch_size": 12}, 12, None),
    ],
)  # fmt: skip
def test_batch_sizes(sizes: dict[str, int], batch: int, parallel: int | None) -> None:
    run = run_of(**{"global_batch_size": None, **sizes})
    assert run.batch.final == batch
    assert run.data_parallel_size == parallel


@pytest.mark.parametrize(
    ("text", "value"),
    [("1", 1), ("1.5", Fraction(3, 2)), ("3/2", Fraction(3, 2)), ("0.1", Fraction(1, 10))],
)
def test_epochs_are_parsed_exactly(text: str, value: Fraction) -> None:
    assert run_of(epochs=text).target.value == value


def test_a_micro_batch_of_neox_has_a_sample() -> None:
    run = run_of(order="neox", data_parallel_size=4)
    assert (run.micro_batch_size, run.batch.final) == (1, 4)


def test_epochs_of_each_source() -> None:
    run = run_of(tokens_per_epoch=("1K", "2K"), epochs="1,3/2")
    assert run.target.per_source == (1, Fraction(3, 2))


@for_each(
    ("changes", "reason"),
    [
        ({"seq_length": None}, "--seq-length is missing"),
        ({"seq_length": 0}, "--seq-length must be from 1 to 2147483646, got 0"),
        ({"global_batch_size": None}, "batch size is missing: give --global-batch-size"),
        ({"global_batch_size": None, "micro_batch_size": 2}, "GPUs is missing: give --world-size"),
        ({"global_batch_size": 0}, "--global-batch-size must be at least 1"),
        ({"micro_batch_size": -1}, "--micro-batch-size must be at least 1, got -1"),
        ({"micro_batch_size": 0, "data_parallel_size": 1}, "--micro-batch-size must be at least 1"),
        ({"data_parallel_size": 0, "order": "neox"}, "--data-parallel-size must be at least 1"),
        ({"data_parallel_size": 5, "order": "neox"}, "GPT-NeoX ends at a micro batch of no sample"),
        ({"micro_batch_size": 3, "data_parallel_size": 1}, "multiple of --micro-batch-size 3 x"),
        ({"micro_batch_size": 8, "data_parallel_size": 1}, "multiple of --micro-batch-size 8 x"),
        ({"micro_batch_size": 3}, "4 must be a multiple of micro batch x data-parallel size = 3"),
        ({"world_size": 6, "tensor_model_parallel_size": 4}, "--world-size 6 is not a multiple"),
        ({"world_size": 6, "data_parallel_size": 4}, "4 contradicts --world-size 6"),
        ({"batch_schedule": "0:4"}, "--batch-schedule sets the global batch size"),
        ({"batch_schedule": "0:4", "rampup_batch_size": (2, 2, 9), "global_batch_size": None},
         "--batch-schedule and --rampup-batch-size exclude each other"),
        ({"rampup_batch_size": (2, 2)}, "--rampup-batch-size takes three numbers"),
        ({"epochs": None}, "exactly one of --epochs.*; found none"),
        ({"train_iters": 3}, "exactly one of .*; found --epochs and --train-iters"),
        ({"epochs": "two"}, "--epochs must be a positive number such as 1, 1.5 or 3/2, got 'two'"),
        ({"epochs": "1/0"}, "--epochs must be a positive number .* got '1/0'"),
        ({"epochs": "0"}, "--epochs must be a positive number"),
        ({"epochs": "-1"}, "--epochs must be a positive number"),
        ({"epochs": "1,2"}, "--epochs has 2 values for 1 sources"),
        ({"epochs": "1,2", "tokens_per_epoch": ("9", "9"), "weights": ("1", "1")},
         "--epochs per source sets the weights"),
        ({"epochs": None, "train_iters": -1}, "--train-iters: '-1' is not a whole number"),
        ({"epochs": None, "train_tokens": "1.5"}, "--train-tokens: '1.5' is not a whole number"),
        ({"variance_buffer": "x"}, "--variance-buffer must be a number >= 1 or exact, got 'x'"),
        ({"variance_buffer": "0.9"}, "--variance-buffer must be a number >= 1 or exact"),
        ({"variance_buffer": "nan"}, "--variance-buffer must be a number >= 1 or exact"),
        ({"variance_buffer": "inf"}, "--variance-buffer must be a number >= 1 or exact"),
        ({"tokens_per_epoch": None}, "give the data once: .* found none"),
        ({"data_path": ("a",)}, "found --data-path and --tokens-per-epoch"),
        ({"tokens_per_epoch": ("0",)}, "--tokens-per-epoch must be at least 1"),
        ({"tokens_per_epoch": ("lots",)}, "--tokens-per-epoch: 'lots' is not a whole number"),
        ({"weights": ("1", "2")}, "--weights must be 1 number, one for each source, got 2"),
        ({"weights": ("a",)}, r"--weights\[0\] must be positive and finite, got 'a'"),
        ({"weights": ("0",)}, r"--weights\[0\] must be positive and finite, got 0.0"),
        ({"weights": ("-1",)}, r"--weights\[0\] must be positive and finite, got -1.0"),
        ({"weights": ("nan",)}, r"--weights\[0\] must be positive and finite, got nan"),
        ({"weights": ("inf",)}, r"--weights\[0\] must be positive and finite, got inf"),
        ({"order": "random"}, "order must be one of"),
        ({"tail": "cut"}, "--tail must be one of drop, pad, wrap"),
        ({"coverage": "some"}, "--coverage must be one of"),
        ({"blend_counts": "some"}, "--blend-counts must be one of"),
        ({"seed": -1}, r"--seed must be from 0 to 2\*\*32 - 1, got -1"),
        ({"eval_interval": 0}, "--eval-interval must be at least 1"),
        ({"eval_iters": -1}, "--eval-iters must be at least 0, got -1"),
        ({"eval_global_batch_size": 0}, "--eval-global-batch-size must be at least 1"),
        (
            {"order": "megatron", "eval_global_batch_size": 12, "eval_micro_batch_size": 8,
             "global_batch_size": 8, "micro_batch_size": 1, "data_parallel_size": 1},
            "batch of 12 samples must be a multiple of its micro batch 8 x data-parallel size 1",
        ),
        (
            {"order": "megatron", "batch_schedule": "0:4 160:12", "eval_micro_batch_size": 3,
             "global_batch_size": None, "micro_batch_size": 4, "data_parallel_size": 1},
            "batch of 4 samples must be a multiple of its micro batch 3 x data-parallel size 1",
        ),
        ({"phase_transition_iterations": (5, 5)}, "must be positive and rising"),
        ({"phase_transition_iterations": (0,)}, "must be positive and rising"),
        ({"consumed_samples": "x"}, "--consumed-samples: 'x' is not a whole number"),
        (
            {"phase_transition_iterations": (5,), "consumed_samples": "6"},
            "must be a multiple of the global batch size 4 with --phase-transition-iterations",
        ),
    ],
)  # fmt: skip
def test_bad_settings_are_named_with_a_remedy(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason) as caught:
        run_of(**changes)
    assert "\n" not in str(caught.value)


def test_evaluation_micro_batches_of_a_ramp_divide_one_round_of_all_ranks() -> None:
    changes = {"order": "megatron", "batch_schedule": "0:8 160:16", "global_batch_size": None,
               "micro_batch_size": 4, "data_parallel_size": 2}  # fmt: skip
    for size in (2, 4):
        run_of(**changes, eval_micro_batch_size=size)
    with pytest.raises(InvalidArgument, match="batch of 8 samples must be a multiple"):
        run_of(**changes, eval_micro_batch_size=8)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("0.5", "a", "b", "c"), "mixes weights and bare paths"),
        (("0.5", "a", "0.5"), "mixes weights and bare paths"),
    ],
)
def test_half_weighted_paths_are_refused(words: tuple[str, ...], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        run_of(tokens_per_epoch=None, data_path=words)


def test_weights_are_given_once() -> None:
    with pytest.raises(InvalidArgument, match="has weights already"):
        run_of(tokens_per_epoch=None, data_path=("1", "a"), weights=("1",))


def test_flags_replace_what_a_file_says_and_its_alternatives() -> None:
    file = Settings(train_iters=5, train_data_path=("a",), seed=3, world_size=8, notes=("n",))
    over = merged(file, Settings(epochs="2", tokens_per_epoch=("9",), data_parallel_size=2))
    assert (over.train_iters, over.epochs) == (None, "2")
    assert (over.train_data_path, over.tokens_per_epoch) == (None, ("9",))
    assert (over.world_size, over.data_parallel_size) == (None, 2)
    assert (over.seed, over.notes) == (3, ("n",))
    over = merged(Settings(batch_schedule="0:4"), Settings(global_batch_size=8))
    assert (over.batch_schedule, over.global_batch_size) == (None, 8)
    over = merged(Settings(global_batch_size=8), Settings(batch_schedule="0:4"))
    assert (over.batch_schedule, over.global_batch_size) == ("0:4", None)
    over = merged(Settings(mid_level_dataset_surplus="0.01"), Settings(variance_buffer="exact"))
    assert (over.mid_level_dataset_surplus, over.variance_buffer) == (None, "exact")


def test_sizes_that_nobody_gave_are_not_named() -> None:
    """Neither accumulation steps of 0, nor a data-parallel size that follows from the GPUs."""
    settings = Settings(
        seq_length=8, tokens_per_epoch=("1000",), global_batch_size=4, micro_batch_size=2,
        world_size=8, tensor_model_parallel_size=2, epochs="1",
    )  # fmt: skip
    with pytest.raises(InvalidArgument) as caught:
        resolve(settings)
    assert str(caught.value) == (
        "--global-batch-size 4 is not a multiple of --micro-batch-size 2 x data-parallel size 4 "
        "(--world-size 8 / 2) = 8; change one of them"
    )


def made_run(weights: tuple[float | None, ...] = (1, 2), samples: int = 4, **more: Any) -> Any:
    """Settings made without a file and without flags, which check less themselves."""
    return RunSettings(
        order="megatron",
        sequence_length=8,
        data=Data(train=tuple(Source(path=f"s{n}", weight=w) for n, w in enumerate(weights))),
        batch=BatchSchedule.constant(4),
        target=Target(kind="samples", value=Fraction(samples)),
        **more,
    )


@for_each(
    ("given", "reason"),
    [
        ({"weights": ()}, "no training data: give --data-path or --tokens-per-epoch"),
        ({"weights": (None, 1)}, "train data: give every source a weight, or none"),
        ({"weights": (1, None)}, "train data: give every source a weight, or none"),
        ({"samples": -1}, "the target of samples must be at least 0, got -1"),
        ({"surplus": -0.001}, "--mid-level-dataset-surplus must be at least 0, .*got -0.001"),
        ({"surplus": math.inf}, "--mid-level-dataset-surplus must be at least 0, .*got inf"),
    ],
)
def test_settings_that_are_made_are_checked(given: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        made_run(**given)


@pytest.mark.parametrize(
    "given", [{"weights": (None, None)}, {"weights": (1,)}, {"samples": 0}, {"surplus": 0}]
)
def test_settings_beside_these_bounds_are_taken(given: dict[str, Any]) -> None:
    assert made_run(**given).order.name == "megatron"
