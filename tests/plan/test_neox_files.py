"""GPT-NeoX's configuration files as its own NeoXArgs, data_utils and helpers take them.

The expected numbers and refusals are those of GPT-NeoX (ea7aefd8) on the same files;
`make neox-runs` compares random ones.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.command_line import cli, plan_json
from support.command_line import plan as plan_of
from support.corpora import write_corpus

from megaindex.errors import InvalidArgument
from megaindex.plan import make_plan

SPLITS = ("train", "valid", "test")
TWO = {f"{split}_data_paths": ["@a", "@b"] for split in SPLITS}
ODD_BATCH = {**TWO, "train_batch_size": 3, "gradient_accumulation_steps": 1}
ONE = {"data_path": "@a", "split": "80,10,10"}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_corpus(tmp_path / "a", [10] * 30)
    write_corpus(tmp_path / "b", [12] * 30)
    write_corpus(tmp_path / "one", [1])
    return tmp_path


def file_of(folder: Path, keys: dict[str, Any]) -> Path:
    base = {"seq_length": 8, "seed": 1, "global_num_gpus": 1, "train_iters": 10, "eval_iters": 1,
            "train_micro_batch_size_per_gpu": 2, "eval_interval": 5, "data_impl": "mmap",
            **keys}  # fmt: skip
    given = {key: value for key, value in base.items() if value != "absent"}
    text = json.dumps(given).replace('"@', f'"{folder}/')
    (folder / "c.yml").write_text(text)
    return folder / "c.yml"


@pytest.mark.parametrize(
    ("words", "left"),
    [(["--consumed-samples", 8], 6), (["--consumed-samples", 20], 0),
     (["--consumed-samples", 8, "--train-iters", 12], 8), ([], 10)],
)  # fmt: skip
def test_a_resumed_run_ends_where_the_file_says(folder: Path, words: list[Any], left: int) -> None:
    plan = plan_json("--neox-config", file_of(folder, TWO), *words)
    total = 24 if "--train-iters" in words else 20
    assert (plan["train_iters"], plan["samples_consumed"]) == (left, total)
    assert [row["requested"] for row in plan["datasets"][:2]] == [-(-total * 1005 // 2000)] * 2


def test_flags_alone_count_iterations_from_the_resume_on(folder: Path) -> None:
    run = ["--data-path", folder / "a", "--order", "neox", "--seq-length", 8, "--train-iters", 6]
    plan = plan_json(*run, "--global-batch-size", 2, "--consumed-samples", 8)
    assert (plan["train_iters"], plan["samples_consumed"]) == (6, 20)


def test_the_iterations_of_a_launch_script_are_those_of_the_whole_run(folder: Path) -> None:
    flags = "--train-iters 10 --seq-length 8 --global-batch-size 2 --data-path"
    words = ["--megatron-args", f"{flags} {folder / 'a'}", "--consumed-samples", 8]
    plan = plan_json(*words)
    assert (plan["train_iters"], plan["samples_consumed"]) == (6, 20)


@pytest.mark.parametrize(("consumed", "rule"), [(22, "ends after"), (7, "within an iteration")])
def test_a_resume_that_the_file_has_not(folder: Path, consumed: int, rule: str) -> None:
    words = ["--neox-config", file_of(folder, TWO), "--consumed-samples", consumed]
    status, _, said = plan_of(*words)
    assert (status, rule in said) == (2, True)


@pytest.mark.parametrize(
    ("keys", "rule"),
    [
        ({**TWO, "train_data_weights": []}, "train_data_weights has 0 entries"),
        ({**TWO, "valid_data_weights": ["0.5", "0.5"]}, "valid_data_weights must hold numbers"),
        ({**TWO, "test_data_weights": [1, None]}, "test_data_weights must hold numbers"),
        ({**TWO, "train_data_weights": [0, 0.0]}, "all train data has weight 0"),
        ({**TWO, "eval_interval": None}, "eval_interval: null"),
        ({**TWO, "eval_iters": None}, "eval_iters: null"),
        ({"data_path": "@a", "train_data_paths": []}, "data_path"),
        ({**ONE, **{f"{split}_data_paths": [] for split in SPLITS}}, "data_path"),
        ({**TWO, "valid_data_paths": []}, "valid_data_paths"),
        ({**ONE, "train_epochs": 2}, "train_iters and train_epochs: GPT-NeoX stops with a Value"),
        ({**ONE, "train_epochs": 2, "train_iters": 0}, "GPT-NeoX trains nothing; remove one"),
        ({**ONE, "train_epochs": 0, "train_iters": "absent"}, "train_epochs"),
        ({**TWO, "train_epochs": 0, "train_data_weights": [1, 2]}, "train_data_weights"),
        ({**ONE, "split": "8/1,1"}, "split"),
        ({**ONE, "split": "8,1,1,"}, "split"),
        ({**ONE, "split": 100}, "split must be text"),
    ],
)
def test_what_neox_refuses_is_refused(folder: Path, keys: dict[str, Any], rule: str) -> None:
    status, out, said = plan_of("--neox-config", file_of(folder, keys))
    assert (status, out) == (2, "")
    assert rule in said


@pytest.mark.parametrize(
    ("keys", "built"),
    [
        ({**TWO, "train_epochs": 0}, [37, 44, 37, 44, 37, 44]),
        ({**ONE, "pos_train_data_paths": []}, [29, 7, 3]),
        ({**ONE, "split": "50,25,25,100"}, [34, 9, 9]),
        ({**ONE, "split": "8/1/1/1"}, [29, 7, 3]),
        ({**ONE, "split": "8,1"}, [33, 7]),
        ({**TWO, "train_data_weights": [True, 1]}, [37, 44, 37, 44, 37, 44]),
    ],
)
def test_what_neox_runs_is_planned(folder: Path, keys: dict[str, Any], built: list[int]) -> None:
    plan = plan_json("--neox-config", file_of(folder, keys))
    assert [row["built"] for row in plan["datasets"]] == built
    assert (plan["train_iters"], plan["caution"]) == (10, "")


@pytest.mark.parametrize("iterations", [0, 1])
def test_a_run_of_no_iteration_ends_before_step_1(folder: Path, iterations: int) -> None:
    plan = plan_json("--neox-config", file_of(folder, {**TWO, "train_iters": iterations}))
    assert ("ValueError" in plan["caution"]) == (not iterations)
    assert not any("one batch" in text for text in plan["warnings"])


@pytest.mark.parametrize(("size", "aborts"), [(1, True), (2, False)])
def test_a_source_of_one_token_aborts_the_helpers(folder: Path, size: int, aborts: bool) -> None:
    """Assertion `tokens_per_epoch > 1' of GPT-NeoX's compiled helpers."""
    write_corpus(folder / "small", [size])
    plan = plan_json("--neox-config", file_of(folder, {**TWO, "test_data_paths": ["@small"]}))
    assert ("abort" in plan["caution"]) == aborts


@pytest.mark.parametrize(
    ("weights", "drawn"), [([1.0, 0.0], [20, 0]), ([0.0, 1.0], [1, 19]), ([0, 2], [1, 19])]
)
def test_a_source_of_weight_0_is_built(
    folder: Path, weights: list[float], drawn: list[int]
) -> None:
    """GPT-NeoX's greedy rule draws one sample of a first source of weight 0, as of equal need."""
    file = file_of(folder, {**TWO, "train_data_weights": weights})
    for counting in ("exact", "bounds"):
        plan = plan_json("--neox-config", file, "--blend-counts", counting)
        rows = plan["datasets"][:2]
        assert [row["built"] for row in rows] == [37, 44]
        for row, count in zip(rows, drawn, strict=True):
            assert row["drawn"] in (count, None)
            assert row["drawn_bounds"][0] <= count <= row["drawn_bounds"][1]
    lock = folder / "run.lock"
    assert cli("lock", "--neox-config", file, "--out", lock)[0] == 0
    status, out, _ = cli("verify", lock)
    assert (status, "no findings" in out) == (0, True)


@pytest.mark.parametrize(("size", "last"), [(18, 0), (26, 3)])
def test_iterations_at_which_neox_ends_are_not_named(folder: Path, size: int, last: int) -> None:
    """Three iterations have one evaluation: validation is built for 2 samples, of which 1 counts.

    GPT-NeoX ends with a ZeroDivisionError at 3 iterations, and runs 10, whose data is longer.
    """
    write_corpus(folder / "c", [*[8] * 8, size, 100])
    keys = {"data_path": "@c", "split": "80,10,10"}
    plan = plan_json("--neox-config", file_of(folder, keys))
    assert (plan["caution"], plan["max_train_iters_without_repeat"]) == ("", last)
    assert ("up to 3 iterations" in plan_of("--neox-config", folder / "c.yml")[1]) == bool(last)
    three = plan_json("--neox-config", file_of(folder, {**keys, "train_iters": 3}))
    assert ("ZeroDivisionError" in three["caution"]) == (not last)


def test_a_source_of_weight_0_ends_packings(folder: Path) -> None:
    keys = {**TWO, "train_data_weights": [1, 0], "pack_impl": "pack_until_overflow"}
    plan = plan_json("--neox-config", file_of(folder, keys))
    assert "ends with a ValueError before step 1" in plan["caution"]
    assert plan["max_train_iters_without_repeat"] == 0


def test_a_packed_source_that_is_not_drawn_is_unseen(folder: Path) -> None:
    keys = {**TWO, "train_data_weights": [1, 0.001], "pack_impl": "pack_until_overflow"}
    one = {"train_iters": 1, "train_micro_batch_size_per_gpu": 1}
    plan = plan_json("--neox-config", file_of(folder, {**keys, **one}))
    drawn, left = (row for row in plan["datasets"] if row["split"] == "train")
    assert (drawn["drawn"] > 0, left["drawn"]) == (True, 0)
    assert left["coverage_method"] == drawn["coverage_method"] == "built"
    assert left["coverage"]["seen_0"] == 1


@pytest.mark.parametrize(("seed", "repeated"), [(1, 0), (2, 1)])
def test_the_first_packed_sample_is_served_again(folder: Path, seed: int, repeated: int) -> None:
    """In place of the one filled last, which is not among the 5 of 6 that seed 1 draws."""
    keys = {**TWO, "seq_length": 10, "train_micro_batch_size_per_gpu": 1, "seed": seed,
            "pack_impl": "pack_until_overflow"}  # fmt: skip
    row = plan_json("--neox-config", file_of(folder, keys))["datasets"][0]
    assert (row["built"], row["drawn"], row["repeated"]) == (6, 5, repeated)
    once, twice = (row["coverage"].get(f"seen_{times}", 0) * 30 for times in (1, 2))
    assert (once, twice) == pytest.approx((5 - 2 * repeated, repeated))


def test_draws_that_are_not_counted_are_no_loader_without_a_batch() -> None:
    run = [
        "--tokens-per-epoch",
        10**12,
        10**12,
        "--weights",
        3,
        2,
        "--order",
        "neox",
        "--epochs",
        1,
    ]
    size = ["--seq-length", 2048, "--global-batch-size", 128, "--variance-buffer", "exact"]
    plan = plan_json(*run, *size)
    assert (plan["caution"], plan["loaders"]) == ("", [])


@pytest.mark.parametrize("order", ["megatron", "epoch", "neox"])
def test_only_neox_builds_sources_of_weight_0(folder: Path, order: str) -> None:
    run = ["--data-path", 1, folder / "a", 0, folder / "b", "--order", order, "--seq-length", 8]
    status, _, said = plan_of(*run, "--global-batch-size", 2, "--train-iters", 3)
    assert (status == 0) == (order == "neox")
    assert ("must be positive" in said) == (order != "neox")


@pytest.mark.parametrize(
    ("keys", "words", "named"),
    [
        ({**TWO, "seq_length": "absent"}, [], "seq_length is missing"),
        (ODD_BATCH, [], "train_batch_size 3"),
        (ODD_BATCH, ["--micro-batch-size", 2], "--micro-batch-size 2"),
        ({**TWO, "global_num_gpus": "absent"}, [], "give global_num_gpus"),
        ({**ONE, "split": "0,1,1"}, [], "split 0,1,1 has no training data"),
    ],
)  # fmt: skip
def test_errors_name_the_keys_of_the_file(
    folder: Path, keys: dict[str, Any], words: list[Any], named: str
) -> None:
    file = file_of(folder, keys)
    export = ["export", "--to", "neox", "--order", "neox"]
    for verb in (
        ["plan"],
        ["audit"],
        ["trace", "--step", 0],
        ["lock", "--out", folder / "a.lock"],
        export,
    ):
        status, _, said = cli(*verb, "--neox-config", file, *words)
        assert (status, named in said) == (2, True), said
    if not words:
        assert f"--{named.split(maxsplit=1)[0].replace('_', '-')}" not in said
        with pytest.raises(InvalidArgument, match=named):
            make_plan(neox_config=file)


def test_warnings_name_the_keys_of_the_file(folder: Path) -> None:
    file = file_of(folder, {**ONE, "eval_iters": 40})
    for warnings in (plan_json("--neox-config", file)["warnings"],
                     make_plan(neox_config=file).warnings):  # fmt: skip
        said = "\n".join(warnings)
        assert "lower eval_iters" in said, said
        assert "--eval-iters" not in said
    given = "\n".join(plan_json("--neox-config", file, "--eval-iters", 40)["warnings"])
    assert "lower --eval-iters" in given
