"""`make_plan` with the names of the command, and plans as text and HTML."""

from __future__ import annotations

import inspect
import re
import shlex
from fractions import Fraction
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import plan as cli
from support.command_line import plan_json
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.index.draws import GreedyDraws
from megaindex.plan import make_plan
from megaindex.plan.model import MaskEffect, SkipEffect, epochs_text, sizes_text
from megaindex.recipe import read_recipe

SIZED = {"tokens_per_epoch": 100_000, "sequence_length": 64, "global_batch_size": 8}
SIZED_FLAGS = "--tokens-per-epoch 100000 --seq-length 64 --global-batch-size 8"


@pytest.fixture(scope="module", autouse=True)
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Any:
    root = tmp_path_factory.mktemp("make_plan")
    rng = np.random.default_rng(1)
    for name, count in (("web", 3000), ("code", 700), ("<i>math", 200)):
        write_corpus(root / name, rng.integers(1, 300, count))
    (root / "neox.yml").write_text(
        "{data_path: web, seq_length: 64, train_micro_batch_size_per_gpu: 4, train_iters: 30}"
    )
    (root / "run.yaml").write_text(
        "{sequence_length: 64, batch: {global_batch_size: 8}, sources: {web: {path: web}},"
        " stages: {<b>main: {epochs: 1, mix: {web: 1}}}}"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        yield


CASES: list[tuple[str, dict[str, Any]]] = [
    (
        "--tokens-per-epoch 2113896210 --seq-length 2048 --micro-batch-size 4 --world-size 32 "
        "--tensor-model-parallel-size 4 --gradient-accumulation-steps 4 --epochs 1 --order neox",
        {
            "tokens_per_epoch": 2113896210,
            "seq_length": np.int64(2048),
            "micro_batch_size": 4,
            "world_size": 32,
            "tensor_model_parallel_size": 4,
            "gradient_accumulation_steps": 4,
            "epochs": 1,
            "order": "neox",
        },
    ),
    (
        "--data-path 0.7 web 0.3 code --seq-length 64 --global-batch-size 8 --epochs 3/2 "
        "--variance-buffer 1.005 --split 90,8,2 --eval-interval 9 --eval-iters 2",
        {
            "data_path": [0.7, Path("web"), 0.3, "code"],
            "sequence_length": 64,
            "global_batch_size": 8,
            "epochs": Fraction(3, 2),
            "variance_buffer": 1.005,
            "split": (90, 8, 2),
            "eval_interval": 9,
            "eval_iters": 2,
        },
    ),
    (
        "--data-path web code --weights 2 1 --seq-length 64 --global-batch-size 8 "
        "--train-samples 1000 --order neox --consumed-samples 96",
        {
            "data_path": ("web", "code"),
            "weights": [2, 1],
            "sequence_length": 64,
            "global_batch_size": 8,
            "train_samples": 1000,
            "order": megaindex.NeoxOrder(),
            "consumed_samples": 96,
        },
    ),
    (
        "--train-data-path web --valid-data-path code --seq-length 64 --global-batch-size 8 "
        "--epochs 4 --order epoch --epochs-mixed 2 --tail wrap --coverage expected --seed 3",
        {
            "train_data_path": "web",
            "valid_data_path": ["code"],
            "sequence_length": 64,
            "global_batch_size": 8,
            "epochs": 4.0,
            "order": megaindex.EpochOrder(epochs_mixed=2),
            "tail": "wrap",
            "coverage": "expected",
            "seed": 3,
        },
    ),
    (
        "--tokens-per-epoch 100K 50000 --seq-length 64 --global-batch-size 32 --epochs 1,2 "
        "--rampup-batch-size 8 8 96 --framework-version 0.16.1 --separate-final-epoch never",
        {
            "tokens_per_epoch": ["100K", 50000],
            "sequence_length": 64,
            "global_batch_size": 32,
            "epochs": [1, "2"],
            "rampup_batch_size": np.array([8, 8, 96]),
            "framework_version": "0.16.1",
            "separate_final_epoch": "never",
        },
    ),
    (
        "--tokens-per-epoch 100000 --seq-length 64 --train-tokens 90K --micro-batch-size 2 "
        "--batch-schedule '0:8 25600:16' --skip-train --dataloader-type cyclic",
        {
            "tokens_per_epoch": 100_000,
            "sequence_length": 64,
            "train_tokens": 90_000,
            "micro_batch_size": 2,
            "batch_schedule": "0:8 25600:16",
            "skip_train": True,
            "dataloader_type": "cyclic",
        },
    ),
    (
        "--neox-config neox.yml --world-size 2 --train-iters 20",
        {"neox_config": Path("neox.yml"), "world_size": 2, "train_iters": 20},
    ),
    (
        "--megatron-args '--data-path web --seq-length 64 --micro-batch-size 2' --world-size 4 "
        "--train-iters 10",
        {
            "megatron_args": ["--data-path", "web", "--seq-length", 64, "--micro-batch-size", 2],
            "world_size": 4,
            "train_iters": 10,
        },
    ),
]


@for_each(("flags", "settings"), CASES)
def test_the_plan_is_that_of_the_command(flags: str, settings: dict[str, Any]) -> None:
    assert make_plan(**settings).to_json() == plan_json(*shlex.split(flags))


def test_a_resumed_run_has_the_coverage_of_the_whole_run() -> None:
    common: dict[str, Any] = {"data_path": [0.6, "web", 0.4, "code"], "sequence_length": 64,
                              "global_batch_size": 8, "order": "neox"}  # fmt: skip
    whole = make_plan(train_iters=30, **common)
    resumed = make_plan(train_iters=20, consumed_samples=80, **common)
    for one, other in zip(whole.rows("train"), resumed.rows("train"), strict=True):
        assert one.coverage == other.coverage
        assert one.distinct == other.distinct


def test_rows_leave_out_what_dropped_steps_do_not_serve() -> None:
    settings: dict[str, Any] = {"order": "window", "sequence_length": 16, "tokens_per_epoch": 1700,
                                "global_batch_size": 8, "train_iters": 12}  # fmt: skip
    for skip, drawn in (
        (megaindex.Skip(steps="3 8-9"), 72),
        (megaindex.Skip(steps="3 8-9", move=True), 96),
        (megaindex.Skip(source="source 1", from_step=5), 96),
    ):
        plan = make_plan(**settings, skip=skip)
        (row,) = plan.rows("train")
        assert row.drawn == drawn
        assert row.coverage.tokens[1] == pytest.approx(drawn * 16 / 1700)
        assert not any("skipped samples included" in text for text in plan.warnings)


def test_moved_samples_that_fill_no_batch_are_left_out() -> None:
    """Steps of 4 samples at the end of the run, after a step of 2 was moved."""
    plan = make_plan(
        order="window", sequence_length=8, tokens_per_epoch=1000, batch_schedule="0:2 160:4",
        train_samples=80, skip=megaindex.Skip(steps=3, move=True),
    )  # fmt: skip
    assert plan.skip is not None
    assert (plan.skip.samples_left_over, plan.rows("train")[0].drawn) == (2, 78)
    assert list(plan.skip.lines()) == [
        "1 step moved behind the end, 2 samples",
        "2 moved samples of an incomplete last step not served; tail pad serves them",
        "24 steps made in all",
    ]


def test_phases_count_what_is_served_with_skips() -> None:
    settings: dict[str, Any] = {**SIZED, "order": "megatron", "train_iters": 12,
                                "phase_transition_iterations": [5]}  # fmt: skip
    plain, skipped = make_plan(**settings), make_plan(**settings, skip=megaindex.Skip(steps=3))
    first, second = skipped.datasets
    assert first.drawn == (plain.datasets[0].drawn or 0) - skipped.global_batch_size
    assert (second, skipped.warnings) == (plain.datasets[1], plain.warnings)
    assert skipped.skip is not None
    assert (skipped.skip.steps_dropped, skipped.skip.steps_made) == (1, 11)


def test_iterations_that_are_not_counted_are_not_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the next epoch, where only the draws of this one are within the work of a plan."""
    settings: dict[str, Any] = {
        "order": "neox", "tokens_per_epoch": [400, 300], "sequence_length": 8, "weights": [2, 1],
        "variance_buffer": "exact", "train_samples": 50, "tail": "pad", "global_batch_size": 100,
    }  # fmt: skip
    counted = make_plan(**settings)
    assert [each.train_iters for each in counted.neighbours] == [0, 1]
    monkeypatch.setattr(GreedyDraws, "_may_count", lambda _, samples: samples < 100)
    plan = make_plan(**settings)
    assert plan.neighbours == ()
    assert plan.datasets == counted.datasets


def test_numbers_of_epochs_as_text() -> None:
    assert [epochs_text(n) for n in (1, 3, None)] == ["one epoch", "3 epochs", "? epochs"]


def test_names_are_those_of_the_flags() -> None:
    status, out, _ = cli("--help-all")
    assert status == 0
    flags = {flag.replace("-", "_") for flag in re.findall(r"^  --([a-z-]+)", out, re.MULTILINE)}
    own = {"recipe", "lock", "nanotron_config", "llm_foundry_config", "json", "print_config",
           "check", "help", "help_all", "as", "balance", "cost_model", "state", "mix_bounds",
           "context_parallel_partition", "skip_steps", "move_skipped", "skip_documents",
           "skip_from_step", "remove_skipped", "scale", "out", "overwrite"}  # fmt: skip
    names = set(inspect.signature(megaindex.make_plan).parameters) - {"run", "progress"}
    assert names == flags - own - {"seq_length"} | {"sequence_length"}


@for_each(
    ("settings", "message"),
    [
        ({"seqence_length": 64}, "unknown setting seqence_length; did you mean sequence_length"),
        ({"xyz": 1}, "unknown setting xyz"),
        ({**SIZED, "epochs": 0}, "^epochs must be a positive number"),
        ({**SIZED, "epochs": 1, "micro_batch_size": 3, "world_size": 2},
         r"^global_batch_size 8 is not a multiple of micro_batch_size 3 x data-parallel size 2 "
         r"\(world_size 2 / 1\)"),
        ({**SIZED}, "exactly one of epochs, train_iters, train_samples and train_tokens"),
        ({"epochs": 1, "global_batch_size": 8, "tokens_per_epoch": 9}, "^sequence_length is missi"),
        ({**SIZED, "epochs": 1, "sequence_length": "64"}, "^sequence_length must be an integer"),
        ({**SIZED, "epochs": 1, "seq_length": 64}, "sequence_length and seq_length are the same"),
        ({**SIZED, "epochs": 1, "skip_train": 1}, "^skip_train must be True or False"),
        ({**SIZED, "epochs": 1, "phase_transition_iterations": [1.5]}, "^phase_transition_iterat"),
        ({**SIZED, "epochs": 1, "order": "nox"}, "^order must be one of"),
        ({**SIZED, "epochs": 1, "order": megaindex.EpochOrder(epochs_mixed=2), "epochs_mixed": 2},
         "^epochs_mixed is a setting of the order too"),
        ({"recipe": "run.yaml"}, "megaindex.make_plan"),
        ({"neox_config": ["neox.yml"], "megatron_args": "x"}, "--neox-config and --megatron-args"),
        ({"data_path": "none", "sequence_length": 8, "global_batch_size": 1, "epochs": 1}, "none"),
    ],
)  # fmt: skip
def test_wrong_settings_are_refused_by_their_names(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(megaindex.MegaIndexError, match=message) as error:
        make_plan(**settings)
    assert "neox" in message or "--" not in str(error.value)


def test_a_run_takes_no_settings_besides() -> None:
    from megaindex.plan import Settings, resolve

    run = resolve(Settings(tokens_per_epoch=("100000",), seq_length=64, global_batch_size=8,
                           epochs="1"))  # fmt: skip
    assert make_plan(run).to_json() == make_plan(**SIZED, epochs=1).to_json()
    with pytest.raises(
        megaindex.InvalidArgument, match="RunSettings hold all settings, also epochs"
    ):
        make_plan(run, epochs=1)


@pytest.mark.parametrize("wrong", ["web", {"epochs": 1}, 3])
def test_a_path_in_place_of_a_run_is_refused(wrong: Any) -> None:
    for settings in ({}, {"sequence_length": 64}):
        with pytest.raises(megaindex.InvalidArgument, match="^run must be RunSettings"):
            make_plan(wrong, **settings)


def test_a_plan_prints_as_the_command_prints_it() -> None:
    plan = make_plan(**SIZED, epochs=1)
    _, out, _ = cli(*SIZED_FLAGS.split(), "--epochs", 1)
    text = repr(plan)
    assert str(plan) == text
    assert max(map(len, text.splitlines())) <= 100
    words = [re.sub(r"[─╭╮╰╯│\s]+", " ", each).split() for each in (text, out)]
    assert words[0] == words[1]  # wrapped at another width
    assert f"train_iters {plan.train_iters}" in text


class Cells(HTMLParser):
    """Text of all cells, and the tags."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.cells: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.tags.add(tag)
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.cells.append(data)


@pytest.mark.parametrize("kind", ["plan", "recipe"])
def test_a_plan_in_a_notebook_is_a_table_with_every_text_escaped(kind: str) -> None:
    if kind == "plan":
        plan: Any = make_plan(data_path=["web", "<i>math"], sequence_length=64,
                              global_batch_size=8, epochs=1)  # fmt: skip
        shown = ["<i>math", f"train_iters {plan.train_iters}", f"{plan.samples_consumed:,}"]
    else:
        plan = make_plan(read_recipe("run.yaml"))
        shown = ["<b>main", f"train_iters {plan.train_iters}"]
    page = Cells()
    page.feed(plan._repr_html_())
    assert page.open == []
    assert page.tags <= {"p", "br", "table", "thead", "tbody", "tr", "th", "td"}
    assert set(shown) <= set(page.cells)
    assert all(text in repr(plan) for text in shown)


@pytest.mark.parametrize("order", ["megatron", "neox"])
@pytest.mark.parametrize("weight", [1e-300, 5e-324])
def test_the_least_weights_are_planned(order: str, weight: float) -> None:
    plan = make_plan(
        tokens_per_epoch=[10_000, 10_000], weights=[weight, 1], sequence_length=16,
        global_batch_size=2, train_iters=50, order=order,
    )  # fmt: skip
    assert [row.drawn for row in plan.rows("train")] in ([0, 100], [1, 99])
    assert plan.max_train_iters_without_repeat is not None


@for_each(("sources", "more"), [(10, ""), (11, " and 1 more"), (13, " and 3 more")])
def test_sources_without_loss_are_counted_beyond_the_tenth(sources: int, more: str) -> None:
    masked = tuple(MaskEffect(source=f"s{k}", tokens=k + 1) for k in range(sources))
    effect = SkipEffect(
        steps_dropped=0, samples_dropped=0, steps_moved=0, samples_moved=0, samples_left_over=0,
        steps_made=9, samples_to_read=9, samples_padded=0, first_masked_step=3,
        first_removed_step=None, masked_documents=1, masked=masked,
    )  # fmt: skip
    total = sources * (sources + 1) // 2
    (line,) = effect.lines()
    assert line.startswith(
        f"loss of {total} tokens masked from step 3 on: s{sources - 1} {sources}, "
    )
    assert line.endswith(f"s{sources - 10} {sources - 9}{more}")


def test_up_to_three_sizes_are_named() -> None:
    assert sizes_text([8, 8]) == "8"
    assert sizes_text([32, 8, 16]) == "8 or 16 or 32"
    assert sizes_text([32, 8, 16, 64]) == "8 … 64"
