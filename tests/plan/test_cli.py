"""The command line: outputs, exit codes, what it loads, and what every bad input is told."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from support.command_line import plan as cli
from support.command_line import plan_json
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.cli.options import print_json
from megaindex.settings.megatron_args import read_megatron
from megaindex.settings.neox_yaml import read_neox

TOKENS = ["--tokens-per-epoch", 100_000, "--seq-length", 64]
SIZED = [*TOKENS, "--global-batch-size", 8]


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("cli")
    rng = np.random.default_rng(1)
    prefixes = [root / name for name in ("web", "code", "math")]
    for prefix, count in zip(prefixes, (3000, 700, 200), strict=True):
        write_corpus(prefix, rng.integers(1, 300, count))
    return prefixes


def blend(paths: list[Path]) -> list[object]:
    return ["--data-path", 0.7, paths[0], 0.2, paths[1], 0.1, paths[2]]


def test_the_contract_of_json(paths: list[Path]) -> None:
    plan = plan_json(
        *blend(paths), "--split", "90,8,2", "--seq-length", 64, "--micro-batch-size", 2,
        "--data-parallel-size", 4, "--gradient-accumulation-steps", 3, "--train-iters", 100,
        "--eval-interval", 50, "--eval-iters", 2,
    )  # fmt: skip
    for name in (
        "order", "variance_buffer", "train_iters", "global_batch_size", "tokens_per_epoch",
        "samples_per_epoch", "samples_consumed", "samples_built", "samples_left_over",
        "num_epochs_built", "max_train_iters_without_repeat", "max_train_iters_same_epochs",
    ):  # fmt: skip
        assert name in plan, name
    assert plan["global_batch_size"] == 24
    assert plan["samples_consumed"] == 2400
    rows = plan["datasets"]
    assert [row["split"] for row in rows] == ["train"] * 3 + ["valid"] * 3 + ["test"] * 3
    for row in rows:
        assert set(row) >= {"path", "requested", "drawn", "built", "epochs", "coverage_method"}
        assert sum(v for k, v in row["coverage"].items() if k.startswith("seen_")) == (
            pytest.approx(1)
        )
    assert sum(row["drawn"] for row in rows[:3]) == 2400
    assert plan["ranks"] == {
        "data_parallel_size": 4, "samples_per_rank": 600, "micro_batches_per_rank": 300,
    }  # fmt: skip


def test_a_blend_is_a_table_without_colours_in_a_pipe(paths: list[Path]) -> None:
    status, out, err = cli(
        *blend(paths), "--seq-length", 64, "--global-batch-size", 8, "--epochs", 1
    )
    assert (status, err) == (0, "")
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 110
    for text in ("train_iters ", "web", "code", "math", "repeated", "--split 969,30,1"):
        assert text in out


def test_it_loads_neither_torch_nor_numba() -> None:
    code = (
        "import sys; from megaindex.cli import main; main(['plan', *sys.argv[1:]]); "
        "print(sorted({'torch', 'numba', 'yaml'} & set(sys.modules)))"
    )
    words = [str(word) for word in [*SIZED, "--epochs", 1, "--order", "neox"]]
    shown = subprocess.run(
        [sys.executable, "-c", code, *words], capture_output=True, text=True, check=True
    )
    assert shown.stdout.splitlines()[-1] == "[]"


@pytest.mark.slow
def test_a_module_run_exits_with_the_status_and_no_traceback() -> None:
    command = [sys.executable, "-m", "megaindex.plan"]
    for words, status in ((["--epochs", "1"], 0), (["--epochs", "0"], 2), (["--epochs"], 2)):
        given = [*command, *map(str, SIZED), *words]
        shown = subprocess.run(given, capture_output=True, text=True, check=False)
        assert shown.returncode == status
        assert "Traceback" not in shown.stderr


def test_neox_yaml_to_paste_gives_the_same_plan(paths: list[Path], tmp_path: Path) -> None:
    for words in (
        ["--data-path", paths[0], "--split", "90,8,2"],
        [
            "--train-data-path",
            2,
            paths[0],
            1,
            paths[1],
            "--valid-data-path",
            1,
            paths[2],
            "--test-data-path",
            1,
            paths[1],
        ],
    ):
        settings = [
            *words, "--seq-length", 64, "--micro-batch-size", 2, "--data-parallel-size", 4,
            "--gradient-accumulation-steps", 3, "--order", "neox", "--epochs", "1.3", "--seed", 7,
        ]  # fmt: skip
        _, text, _ = cli(*settings, "--print-config", "neox")
        file = tmp_path / "paste.yml"
        file.write_text(text)
        assert read_neox([file]).seed == 7
        pasted = plan_json("--neox-config", file, "--world-size", 4)
        assert pasted["datasets"] == plan_json(
            *settings[:-4], "--train-iters", pasted["train_iters"], "--seed", 7
        )["datasets"]  # fmt: skip


def test_megatron_flags_to_paste_give_the_same_plan(paths: list[Path]) -> None:
    for words in (
        ["--data-path", paths[0], "--split", "90,8,2", "--global-batch-size", 12],
        [*blend(paths), "--variance-buffer", 1.25, "--global-batch-size", 12],
        ["--data-path", paths[0], "--split", "90,8,2", "--batch-schedule", "0:4 9600:12"],
    ):
        settings = [*words, "--seq-length", 64, "--epochs", "1.3"]
        _, text, _ = cli(*settings, "--print-config", "megatron")
        assert read_megatron(text, {}).seq_length == 64
        planned, pasted = plan_json(*settings), plan_json("--megatron-args", text)
        assert pasted["train_iters"] == planned["train_iters"]
        train = [row for row in pasted["datasets"] if row["split"] == "train"]
        assert train == [row for row in planned["datasets"] if row["split"] == "train"]


def test_a_batch_schedule_changes_the_iterations() -> None:
    plan = plan_json(
        *TOKENS, "--batch-schedule", "0:4 640:8 1280:16", "--train-samples", 1000
    )  # fmt: skip
    # 3 x 4 = 12 samples pass 10, 1 x 8 = 20 reach 20, then 62 x 16 pass 1000: Megatron rounds up.
    assert plan["train_iters"] == 3 + 1 + 62
    assert plan["samples_consumed"] == 1012
    assert plan["global_batch_size"] == 16
    assert plan["batch_schedule"] == [[0, 4], [10, 8], [20, 16]]


def test_a_run_under_way_counts_from_what_it_consumed() -> None:
    whole = plan_json(*SIZED, "--epochs", 1)
    rest = plan_json(*TOKENS, "--global-batch-size", 16, "--epochs", 1, "--consumed-samples", 800)
    assert rest["train_iters"] == (whole["samples_per_epoch"] - 800) // 16
    assert rest["samples_consumed"] == 800 + rest["train_iters"] * 16
    assert rest["max_train_iters_without_repeat"] == rest["train_iters"]
    over = plan_json(*SIZED, "--epochs", 1, "--consumed-samples", 5000)
    assert over["train_iters"] == 0


@for_each(
    ("tail", "before", "counts"),
    [
        ("drop", 0, (12, 96, 100)),
        ("pad", 0, (13, 100, 100)),
        ("wrap", 0, (13, 104, 104)),
        ("drop", 160, (0, 160, 100)),
        ("pad", 160, (0, 160, 160)),
        ("wrap", 160, (0, 160, 160)),
    ],
)
def test_a_target_of_samples_that_fills_no_batch(
    tail: str, before: int, counts: tuple[int, int, int]
) -> None:
    """The same where more was consumed before: a target is no reason to give samples back."""
    plan = plan_json(
        "--tokens-per-epoch", 10**5, "--seq-length", 64, "--order", "megatron", "--tail", tail,
        "--global-batch-size", 8, "--train-samples", 100, "--consumed-samples", before,
    )  # fmt: skip
    requested = plan["datasets"][0]["requested"]
    assert (plan["train_iters"], plan["samples_consumed"], requested) == counts


def test_phases_build_their_datasets_anew() -> None:
    plan = plan_json(
        *SIZED, "--train-iters", 300, "--phase-transition-iterations", 100, 250
    )  # fmt: skip
    assert [(p["begin"], p["end"], p["samples"]) for p in plan["phases"]] == [
        (0, 100, 800), (100, 250, 1200), (250, 300, 400),
    ]  # fmt: skip
    rows = plan["datasets"]
    assert [(row["phase"], row["requested"], row["epochs"]) for row in rows] == [
        (1, 800, 1), (2, 1200, 1), (3, 400, 1),
    ]  # fmt: skip
    # An epoch holds 1562 samples, 195 iterations: phase 3 may last until 250 + 195.
    assert plan["max_train_iters_without_repeat"] == 445
    longer = plan_json(
        *SIZED, "--train-iters", 300, "--phase-transition-iterations", 10, 250
    )  # fmt: skip
    assert longer["num_epochs_built"] == 2
    assert longer["max_train_iters_without_repeat"] == 10 + 195
    assert any("each phase builds its datasets anew" in text for text in plan["warnings"])


@pytest.mark.parametrize(
    ("iterations", "transitions", "ends", "last", "without_repeat"),
    [
        (250, (100, 250), [100, 250], 445, 445),
        (251, (100, 250), [100, 250, 251], 445, 445),
        (300, (195,), [195, 300], 390, 390),
        (300, (196,), [196, 300], 196 + 390, 195),
        (300, (391,), [300], 390, 195),
    ],
)
def test_phases_at_the_bounds_of_their_iterations(
    iterations: int, transitions: tuple[int, ...], ends: list[int], last: int, without_repeat: int
) -> None:
    """An epoch holds 195 iterations, two hold 390."""
    plan = plan_json(
        *SIZED, "--train-iters", iterations, "--phase-transition-iterations", *transitions
    )
    assert [phase["end"] for phase in plan["phases"]] == ends
    assert plan["max_train_iters_same_epochs"] == last
    assert plan["max_train_iters_without_repeat"] == without_repeat
    assert [(n["train_iters"], n["begins"]) for n in plan["neighbours"]] == [
        (last, ""), (last + 1, "source 1"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("samples", "masked", "ranks"), [(800, 0, 0), (801, 7, 3), (804, 4, 0), (807, 1, 0)]
)
def test_tails_of_whole_and_partial_batches(samples: int, masked: int, ranks: int) -> None:
    """Batches of 8 on 4 ranks, the first 100 of which are full."""
    plan = plan_json(
        *TOKENS, "--micro-batch-size", 2, "--data-parallel-size", 4, "--train-samples", samples
    )
    names = ("train_iters", "samples_dropped", "samples_masked", "samples_repeated", "ranks_masked")
    steps = 101 if masked else 100
    assert {tail["policy"]: tuple(map(tail.get, names)) for tail in plan["tails"]} == {
        "drop": (100, samples - 800, 0, 0, 0),
        "pad": (steps, 0, masked, 0, ranks),
        "wrap": (steps, 0, 0, masked, 0),
    }


@pytest.mark.parametrize(("samples", "left"), [(1561, 1), (1562, 0), (1563, 1561)])
def test_what_is_left_over_at_the_end_of_an_epoch(samples: int, left: int) -> None:
    plan = plan_json(*TOKENS, "--global-batch-size", 1, "--train-samples", samples)
    assert plan["samples_left_over"] == left


def test_a_target_may_end_one_sample_after_a_ramp() -> None:
    plan = plan_json(*SIZED, "--epochs", 1, "--rampup-batch-size", 4, 4, 1559)
    assert plan["samples_consumed"] == 1560


@pytest.mark.parametrize(("consumed", "iterations"), [(784, 1), (800, 0)])
def test_a_ramped_run_resumed_at_its_end_has_no_iteration(consumed: int, iterations: int) -> None:
    plan = plan_json(
        *TOKENS, "--rampup-batch-size", 8, 8, 400, "--global-batch-size", 16,
        "--train-samples", 800, "--consumed-samples", consumed,
    )  # fmt: skip
    assert (plan["train_iters"], plan["samples_consumed"]) == (iterations, 800)


@pytest.mark.parametrize(("samples", "repeated"), [(1562, 0), (1563, None)])
def test_one_pass_of_a_cyclic_loader_repeats_nothing(samples: int, repeated: int | None) -> None:
    plan = plan_json(
        *TOKENS, "--global-batch-size", 1, "--train-samples", samples, "--dataloader-type", "cyclic"
    )
    assert plan["datasets"][0]["repeated"] == repeated


def test_phases_of_a_target_of_epochs() -> None:
    """The samples of the epochs, divided at the transitions; what repeats is said of the phases."""
    plan = plan_json(*SIZED, "--epochs", 1, "--phase-transition-iterations", 100)
    assert [(p["begin"], p["end"], p["samples"]) for p in plan["phases"]] == [
        (0, 100, 800), (100, 195, 760),
    ]  # fmt: skip
    assert any("each phase builds its datasets anew" in text for text in plan["warnings"])


def test_empty_and_tiny_evaluation_sets_are_forecast(tmp_path: Path) -> None:
    write_corpus(tmp_path / "few", [200] * 40)
    words = ["--data-path", tmp_path / "few", "--seq-length", 64, "--global-batch-size", 8]
    plan = plan_json(*words, "--train-iters", 5, "--split", "97,2,1", "--eval-iters", 1)
    assert any("test: no token in" in text and "without end" in text for text in plan["warnings"])
    assert any("valid: 1 of 1 source is repeated" in text for text in plan["warnings"])
    neox = plan_json(*words, "--train-iters", 5, "--split", "969,30,1", "--order", "neox")
    assert any("no evaluation of it" in text for text in neox["warnings"])


def test_neox_loader_is_one_sample_short(tmp_path: Path) -> None:
    write_corpus(tmp_path / "even", [64 * 80 + 1])
    words = ["--data-path", tmp_path / "even", "--seq-length", 64, "--order", "neox"]
    plan = plan_json(*words, "--global-batch-size", 8, "--epochs", 1)
    assert plan["train_iters"] == 10
    assert any("NeoX counts 79 of 80 samples" in text for text in plan["warnings"])
    plan = plan_json(*words, "--global-batch-size", 9, "--epochs", 1)
    assert not any("NeoX counts" in text for text in plan["warnings"])


@pytest.mark.parametrize(("tokens", "counted"), [(65, 0), (129, 1)])
def test_neox_ends_where_its_loader_counts_no_sample(tokens: int, counted: int) -> None:
    plan = plan_json("--tokens-per-epoch", tokens, "--seq-length", 64, "--order", "neox",
                     "--global-batch-size", 1, "--epochs", 1)  # fmt: skip
    assert plan["loaders"][0]["samples_counted"] == counted
    assert plan["datasets"][0]["repeated"] == counted
    assert ("its loader counts 0 samples" in plan["caution"]) == (counted == 0)


@pytest.mark.parametrize(("iterations", "requested"), [(1, [1, 1]), (3, [2, 1])])
def test_neox_is_asked_for_one_sample_of_a_source_at_least(
    iterations: int, requested: list[int]
) -> None:
    plan = plan_json(
        "--tokens-per-epoch", 1000, 1000, "--seq-length", 64, "--global-batch-size", 1, "--order",
        "neox", "--train-iters", iterations, "--variance-buffer", "exact", "--weights", 2, 1,
    )  # fmt: skip
    assert [row["requested"] for row in plan["datasets"]] == requested


def test_a_source_may_hold_one_sample_or_in_a_framework_one_token() -> None:
    words = ["--seq-length", 64, "--global-batch-size", 1]
    plan = plan_json("--tokens-per-epoch", 65, *words, "--order", "epoch", "--epochs", 1)
    assert plan["datasets"][0]["built"] == 1
    plan = plan_json("--tokens-per-epoch", 1, 1000, *words, "--order", "neox", "--train-iters", 3)
    assert [row["built"] for row in plan["datasets"]] == [2, 15]


def test_our_orders_size_exactly_and_say_what_1_005_would_have_done() -> None:
    words = ["--tokens-per-epoch", *["100K"] * 30, "--weights", *range(1, 31)]
    plan = plan_json(*words, "--seq-length", 64, "--global-batch-size", 8, "--epochs", "1",
                     "--order", "epoch")  # fmt: skip
    assert plan["variance_buffer"] == "exact"
    assert all(row["requested"] == row["drawn"] for row in plan["datasets"])
    assert plan["buffer_effect"]["variance_buffer"] == 1.005


@pytest.mark.parametrize("order", ["epoch", "window"])
def test_plans_of_our_orders_print_no_rules_of_frameworks(paths: list[Path], order: str) -> None:
    words = ["--data-path", paths[1], "--seq-length", 64, "--global-batch-size", 8, "--epochs", 1]
    for name, is_shown in ((order, False), ("megatron", True)):
        status, out, _ = cli(*words, "--order", name)
        assert status == 0
        for text in ("buffer 1.005", "--split is missing"):
            assert (text in out) == is_shown, (name, text)


BAD = [
    ([], "--seq-length is missing"),
    ([*SIZED], "give exactly one of --epochs"),
    ([*SIZED, "--epochs", 1, "--train-iters", 5], "found --epochs and --train-iters"),
    ([*TOKENS, "--epochs", 1], "the batch size is missing"),
    ([*SIZED, "--micro-batch-size", 3, "--data-parallel-size", 1, "--epochs", 1], "multiple of"),
    ([*SIZED, "--weights", 0, "--epochs", 1], "must be positive and finite"),
    ([*SIZED, "--weights", "nan", "--epochs", 1], "must be positive and finite"),
    ([*SIZED, "--epochs", 1, "--order", "x"], "order must be one of"),
    ([*SIZED, "--epochs", 1, "--variance-buffer", 0.5], "--variance-buffer must be a number >= 1"),
    ([*SIZED, "--epochs", 1, "--print-config", "x"], "--print-config must be one of"),
    (["--data-path", "/none", "--seq-length", 8, "--global-batch-size", 1, "--epochs", 1],
     "/none: neither"),
    (["--neox-config", "/none.yml"], "--neox-config: /none.yml does not exist"),
    (["--megatron-args", "/none.sh"], "--megatron-args: /none.sh does not exist"),
    (["--megatron-args", "--seq-length 8", "--neox-config", "x"], "exclude each other"),
    (["--data-path", "/x", "--split", "a,b", "--seq-length", 8, "--global-batch-size", 1,
      "--epochs", 1], "--split must be up to three"),
    (["--tokens-per-epoch", 9, "--seq-length", 64, "--global-batch-size", 1, "--epochs", 1,
      "--order", "epoch"], "holds 9 tokens, one sample needs 65"),
    *((["--tokens-per-epoch", 32, 32, "--seq-length", 64, "--global-batch-size", 1, "--train-iters",
        9, "--order", order], "training data holds 64 tokens, one sample needs 65 (--seq-length 64")
      for order in ("megatron", "neox", "megatron-legacy", "paddlenlp")),
    (["--tokens-per-epoch", 900, 900, "--seq-length", 64, "--global-batch-size", 1, "--epochs",
      "1,1/20"], "--epochs: source 2 gives no sample of 64 tokens"),
    ([*SIZED, "--epochs", 1, "--rampup-batch-size", 4, 4, 1562],
     "ends before the ramp's 1562, where Megatron-LM runs one iteration more"),
    ([*SIZED, "--epochs", 1, "--rampup-batch-size", 4, 4, 1560], "target of 1560 samples ends"),
    (["--order", "neox", "--full-validation", *SIZED, "--epochs", 1],
     "--full-validation is a setting of order megatron, not neox"),
]  # fmt: skip


@for_each(("words", "reason"), BAD)
def test_bad_input_is_one_line_and_status_2(words: list[object], reason: str) -> None:
    status, out, err = cli(*words)
    assert status == 2
    assert out == ""
    assert err.startswith("megaindex plan: ")
    assert reason in err
    assert err.count("\n") == 1


def test_a_bad_split_or_an_empty_train_part_is_refused(paths: list[Path]) -> None:
    words = ["--data-path", paths[0], "--seq-length", 64, "--global-batch-size", 1, "--epochs", 1]
    for split, reason in (("a,b", "--split must be"), ("0,1", "no training data")):
        status, _, err = cli(*words, "--split", split)
        assert status == 2
        assert reason in err


def test_full_validation_needs_what_each_rank_reads(paths: list[Path]) -> None:
    words = ["--data-path", paths[0], "--seq-length", 64, "--epochs", 1, "--split", "90,10,0",
             "--full-validation"]  # fmt: skip
    status, _, err = cli(*words, "--global-batch-size", 8)
    assert (status, "give --micro-batch-size and --world-size" in err) == (2, True)
    batch = ["--micro-batch-size", 2, "--world-size", 4]
    plan = plan_json(*words, *batch)
    status, out, _ = cli(*words, *batch)
    assert status == 0
    samples = f"{plan['evaluation']['valid_samples']:,}"
    assert f"iterations read all {samples} validation samples" in " ".join(out.split())
    twice = plan_json(*words, *batch, "--eval-global-batch-size", 16)
    held = twice["evaluation"]["valid_samples"]
    assert twice["evaluation"]["valid_samples_read"] == 2 * held
    assert any(f"reads {2 * held} samples, the {held} of its" in text for text in twice["warnings"])
    for split, flags, warned in (
        ("90,10,0", [], "without --multiple-validation-sets"),
        ("90,10,0", ["--multiple-validation-sets"], ""),
        ("80,10,10", ["--multiple-validation-sets"], "--multiple-validation-sets with test data"),
    ):
        found = plan_json(*words, *batch, *flags, "--split", split)["warnings"]
        texts = [text for text in found if "--multiple-validation-sets" in text]
        assert [warned in text for text in texts] == [True] * bool(warned)


def test_a_source_without_training_tokens_is_named(paths: list[Path], tmp_path: Path) -> None:
    write_corpus(tmp_path / "empty", [0] * 10)
    for order in ("megatron", "epoch"):
        status, _, err = cli(
            "--train-data-path", 1, paths[0], 1, tmp_path / "empty", "--seq-length", 64,
            "--global-batch-size", 8, "--train-iters", 9, "--order", order,
        )  # fmt: skip
        assert status == 2
        assert f"{tmp_path / 'empty'} holds no tokens for this split; leave it out" in err


def test_what_the_tables_say_of_a_long_run() -> None:
    """What was consumed before, batch sizes, phases, and how many sources are not shown."""
    status, out, _ = cli(*TOKENS, "--global-batch-size", 12, "--rampup-batch-size", 2, 2, 600,
                         "--train-samples", 1200, "--consumed-samples", 20)  # fmt: skip
    assert status == 0
    assert "64 tokens a sample, 2 → 4 → … → 12" in out
    assert [line.split()[-2:] for line in out.splitlines() if "before this run" in line] == [
        ["20", f"{20 * 64:,}"]
    ]
    status, out, _ = cli(*SIZED, "--train-iters", 300, "--phase-transition-iterations", 100,
                         250)  # fmt: skip
    assert status == 0
    for number, text in enumerate(
        ("0 to 100, 800 samples from 0", "100 to 250, 1,200 samples from 800",
         "250 to 300, 400 samples from 2,000"), 1,
    ):  # fmt: skip
        assert f"phase {number}" in out
        assert f"iterations {text} on" in out


@pytest.mark.parametrize("sources", [24, 25])
def test_of_many_sources_the_worst_are_shown(sources: int) -> None:
    words = ["--tokens-per-epoch", *[9000] * sources, "--weights", *range(1, sources + 1)]
    words += ["--seq-length", 64, "--global-batch-size", 8]
    for iterations, worst in ((9, 1), (1200, sources)):  # nothing repeats, and most do
        status, out, _ = cli(*words, "--train-iters", iterations)
        assert status == 0
        lines = out.splitlines()
        head = next(number for number, line in enumerate(lines) if "per epoch" in line)
        shown = [int(line.split()[2]) for line in lines[head + 2 : head + 2 + min(sources, 10)]]
        if sources == 24:
            assert shown == list(range(1, 11))
            assert "more; --json" not in out
            continue
        assert shown[0] == worst
        assert len({*shown}) == 10
        assert out.count("… and 15 more; --json lists all") == 2  # of rows and of coverage
        rows = plan_json(*words, "--train-iters", iterations)["datasets"]
        repeat = sum(row["repeated"] > 0 for row in rows)
        most = max(row["drawn"] / row["samples_per_epoch"] for row in rows)
        text = " ".join(out.split())
        assert (
            f"train: {repeat or 'none'} of 25 sources repeat, at most {most:.2f} epochs are drawn"
        ) in text
        assert "of 25 some tokens stay unseen" in text or iterations > 9
        _, out, _ = cli(*words, "--train-iters", iterations, "--coverage", "none")
        assert out.count("… and 15 more; --json lists all") == 1
        assert "some tokens stay unseen" not in out


@pytest.mark.parametrize(("iterations", "worst"), [(1200, 25), (9, 1)])
def test_of_many_sources_with_bounded_draws_the_worst_are_shown(
    iterations: int, worst: int
) -> None:
    words = ["--tokens-per-epoch", *[9000] * 25, "--weights", *range(1, 26), "--blend-counts"]
    words += ["bounds", "--seq-length", 64, "--global-batch-size", 8, "--coverage", "none"]
    assert plan_json(*words, "--train-iters", iterations)["datasets"][0]["drawn"] is None
    lines = cli(*words, "--train-iters", iterations)[1].splitlines()
    head = next(number for number, line in enumerate(lines) if "per epoch" in line)
    assert int(lines[head + 2].split()[2]) == worst


def test_settings_without_effect_are_printed() -> None:
    script = ("--seq-length 64 --global-batch-size 8 --train-iters 9 --eval-interval 3 "
              "--data-path a --fim-data --num-workers 3")  # fmt: skip
    for words, said in ((script, True), (script.replace("--fim-data --num-workers 3", ""), False)):
        out = cli("--megatron-args", words, "--tokens-per-epoch", 9000)[1]
        lines = [line for line in out.splitlines() if line.split()[:1] == ["ignored"]]
        assert [line.split(maxsplit=1)[1] for line in lines] == ["--fim-data, --num-workers"] * said


def test_every_share_above_none_is_in_the_json() -> None:
    words = ["--tokens-per-epoch", 9000, "--seq-length", 64, "--global-batch-size", 8]
    plan = plan_json(*words, "--train-iters", 1500, "--order", "epoch")
    seen = plan["datasets"][0]["coverage"]
    assert list(seen)[:4] == [f"seen_{times}" for times in range(4)]
    assert seen["seen_0"] < 1e-15
    assert len(seen) < 1 + int(list(seen)[-1].removeprefix("seen_"))
    assert min([*seen.values()][4:]) >= 1e-15
    assert sum(seen.values()) == pytest.approx(1)


@pytest.mark.parametrize("count", [24, 25])
def test_rows_of_a_long_list_are_a_line_each_in_json(
    count: int, capsys: pytest.CaptureFixture[str]
) -> None:
    value = {"a": [{"b": [k, {}]} for k in range(count)], "c": [], "d": {"e": None}}
    print_json(value)
    out = capsys.readouterr().out
    assert json.loads(out) == value
    assert out.count('{"b": ') == (count > 24) * count
    assert (out == json.dumps(value, indent=2) + "\n") == (count == 24)


def test_moved_samples_that_fill_no_step_are_said() -> None:
    words = [*SIZED, "--order", "window", "--epochs", 1, "--skip-steps", "3", "--move-skipped"]
    plan = plan_json(*words)
    status, out, _ = cli(*words)
    assert status == 0
    assert plan["skip"]["samples_moved"] == 8
    assert "1 step moved behind the end, 8 samples" in out


def test_unknown_arguments_are_one_line_too() -> None:
    status, _, err = cli(*SIZED, "--epoch", 1)
    assert status == 2
    assert err.startswith("megaindex plan: unrecognized arguments: --epoch")
    assert err.count("\n") == 1


def test_tokens_given_are_training_tokens_whatever_the_split() -> None:
    plan = plan_json(*SIZED, "--split", "90,10,0", "--epochs", 1)
    assert plan["tokens_per_epoch"] == 100_000
    assert any("divides documents and is not applied" in text for text in plan["warnings"])


def test_long_blends_are_bounded_until_counted() -> None:
    words = ["--tokens-per-epoch", "100B", "30B", "--weights", 2, 1, "--seq-length", 2048,
             "--global-batch-size", 512, "--train-iters", 1000]  # fmt: skip
    counted = plan_json(*words, "--blend-counts", "exact")
    bounded = plan_json(*words, "--blend-counts", "bounds", "--variance-buffer", "exact")
    assert not bounded["max_train_iters_exact"]
    assert any("--blend-counts exact" in text for text in bounded["warnings"])
    assert not any("--blend-counts exact" in text for text in counted["warnings"])
    for row, bound in zip(counted["datasets"], bounded["datasets"], strict=True):
        assert bound["drawn"] is None
        assert bound["drawn_bounds"][0] <= row["drawn"] <= bound["drawn_bounds"][1]
        assert bound["drawn_bounds"][1] - bound["drawn_bounds"][0] == 1  # of two sources
    assert cli(*words, "--blend-counts", "bounds")[0] == 0


def test_a_run_of_very_many_epochs_is_planned_without_coverage() -> None:
    plan = plan_json(*SIZED, "--epochs", "1e9")
    assert plan["num_epochs_built"] == 10**9
    assert plan["datasets"][0]["coverage_method"] == "none"


@pytest.mark.parametrize("sequence", [0, 1])
def test_a_damaged_index_is_named(tmp_path: Path, sequence: int) -> None:
    write_corpus(tmp_path / "c", [5, 6, 7])
    raw = bytearray((tmp_path / "c.idx").read_bytes())
    raw[34 + 4 * sequence : 38 + 4 * sequence] = (-5).to_bytes(4, "little", signed=True)
    (tmp_path / "c.idx").write_bytes(raw)
    status, _, err = cli("--data-path", tmp_path / "c", "--seq-length", 2, "--epochs", 1,
                         "--global-batch-size", 1)  # fmt: skip
    assert status == 2
    assert f"c.idx: sequence {sequence} has the length -5" in err
    assert json.dumps(err).count("\\n") == 1


def test_the_cost_of_a_mixed_final_epoch_is_a_sentence(paths: list[Path]) -> None:
    run = ["--data-path", paths[1], "--seq-length", 32, "--global-batch-size", 4]
    words = [*run, "--coverage", "exact", "--separate-final-epoch"]
    for epochs, apart in (("3.3", "auto"), ("3.85", "always")):
        mixed = plan_json(*words, "never", "--epochs", epochs)
        assert mixed["num_epochs_built"] == 4
        seen = mixed["datasets"][0]["coverage"]
        less = seen["seen_0"] + seen["seen_1"] + seen["seen_2"]
        sentence = (
            f"{less:.1%} of its tokens come fewer than 3 times; under {apart}, the first 3 are"
        )
        assert [text for text in mixed["warnings"] if sentence in text]
        kept = plan_json(*words, apart, "--epochs", epochs)["datasets"][0]["coverage"]
        assert kept["seen_0"] + kept["seen_1"] + kept["seen_2"] < 0.001 < less
    whole = plan_json(*words, "never", "--epochs", 1)
    assert not [text for text in whole["warnings"] if "separate_final_epoch never sh" in text]
    twice = plan_json(*words, "never", "--epochs", "3/2")
    assert [
        text for text in twice["warnings"] if "tokens never come; under auto, the first is" in text
    ]
