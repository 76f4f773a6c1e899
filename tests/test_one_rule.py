"""A wrong value breaks the same rule at every door, and is named as it was given there."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.errors import InvalidArgument
from megaindex.loader.samplers import MicroBatchSampler, RandomAccessSampler
from megaindex.plan import make_plan
from megaindex.run.run import run_of_index
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.megatron_args import read_megatron
from megaindex.settings.neox_yaml import neox_settings
from megaindex.settings.recipe import Weighting
from megaindex.settings.recipe_file import recipe_of
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import Data, RunSettings, Target
from megaindex.settings.sources import Source

Door = Callable[[Any, str], Any]
"""Takes a wrong value and the path of a corpus."""


def cli_error(*words: object) -> None:
    status, _, err = cli(*words)
    assert status == 2
    assert err.count("\n") == 1
    raise InvalidArgument(err.strip().partition(": ")[2])


def api(name: str) -> tuple[str, Door]:
    return name, lambda value, path: megaindex.build_index(
        path, **{"sequence_length": 8, name: value}
    )


def blend(name: str) -> tuple[str, Door]:
    return name, lambda value, path: megaindex.build_blend(
        [path, path],
        **{"sequence_length": 8, "num_samples": 9, "weights": [1, 1], "order": "neox", name: value},
    )


def run(name: str, called: str = "") -> tuple[str, Door]:
    def plan(value: Any, path: str) -> Any:
        settings = {"sequence_length": 8, "order": "neox", name: value}
        data = Data(train=(Source(path=path),))
        target = Target(kind="iterations", value=1)
        return RunSettings(data=data, batch=BatchSchedule.constant(4), target=target, **settings)

    return called or name, plan


def command(verb: str, flag: str) -> tuple[str, Door]:
    """The flag of a verb, through the whole command line: status 2 and one line."""

    more = {
        "plan": {"--global-batch-size": 4, "--epochs": 1},
        "build": {"--cache-dir": "cache"},
        "extend": {"--num-samples": 9, "--more-samples": 9},
    }[verb]
    if flag == "--more-epochs":
        del more["--more-samples"]

    def door(value: Any, path: str) -> None:
        words = {"--data-path": path, "--seq-length": 8, **more, flag: value}
        cli_error(verb, *(word for pair in words.items() for word in pair))

    return flag, door


def megatron(flag: str) -> tuple[str, Door]:
    return flag, lambda value, path: resolve(
        read_megatron(
            f"--data-path {path} --seq-length 8 --global-batch-size 4 --train-iters 9 "
            f"--eval-interval 5 {flag} {value}"
        )
    )


def neox(key: str) -> tuple[str, Door]:
    base = {"seq_length": 8, "train_batch_size": 4, "train_iters": 9}
    return key, lambda value, path: resolve(neox_settings({**base, "data_path": path, key: value}))


def recipe(key: str) -> tuple[str, Door]:
    section, _, name = key.rpartition(".")

    def door(value: Any, path: str) -> Any:
        content: dict[str, Any] = {
            "sequence_length": 8,
            "batch": {"micro_batch_size": 2, "data_parallel_size": 2},
            "sources": {"web": path},
            "stages": {"all": {"steps": 4, "mix": {"web": 1}}},
            "evaluation": {"source": path},
        }
        (content[section] if section else content)[name] = value
        text = yaml.safe_load(yaml.safe_dump(content))
        return recipe_of(text, "run.yaml", Path(path).parent)

    return f"run.yaml: {key}", door


def loader(name: str, made: Any = MicroBatchSampler) -> tuple[str, Door]:
    ranks = {"micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 2}
    return name, lambda value, path: made(**{"num_samples": 50, **ranks, name: value})


def audit(name: str) -> tuple[str, Door]:
    def door(value: Any, path: str) -> Any:
        index = megaindex.build_index(path, sequence_length=8)
        return run_of_index(index, [], **{"global_batch_size": 4, name: value})

    return name, door


LENGTH = (api("sequence_length"), blend("sequence_length"), run("sequence_length"),
          command("plan", "--seq-length"), command("build", "--seq-length"),
          command("extend", "--seq-length"), megatron("--seq-length"), neox("seq_length"),
          recipe("sequence_length"))  # fmt: skip
SEED = (api("seed"), blend("seed"), run("seed"), command("plan", "--seed"),
        command("build", "--seed"), command("extend", "--seed"), megatron("--seed"), neox("seed"),
        recipe("seed"))  # fmt: skip
MICRO = (run("micro_batch_size"), command("plan", "--micro-batch-size"),
         megatron("--micro-batch-size"), neox("train_micro_batch_size_per_gpu"),
         recipe("batch.micro_batch_size"), loader("micro_batch_size"),
         loader("micro_batch_size", RandomAccessSampler), audit("micro_batch_size"))  # fmt: skip
RANKS = (run("data_parallel_size"), command("plan", "--data-parallel-size"),
         recipe("batch.data_parallel_size"), loader("data_parallel_size"),
         audit("data_parallel_size"))  # fmt: skip
BATCH = (command("plan", "--global-batch-size"), megatron("--global-batch-size"),
         neox("train_batch_size"), recipe("batch.global_batch_size"), loader("global_batch_size"),
         audit("global_batch_size"))  # fmt: skip
EPOCHS = (api("epochs"), command("plan", "--epochs"), command("build", "--epochs"),
          command("extend", "--more-epochs"))  # fmt: skip
SPLIT = (api("split"), command("plan", "--split"), command("build", "--split"),
         command("extend", "--split"), megatron("--split"), neox("split"))  # fmt: skip
BUFFER = (blend("variance_buffer"), run("variance_buffer"), command("plan", "--variance-buffer"))
ORDER = (api("order"), blend("order"), run("order"), command("plan", "--order"),
         command("build", "--order"), command("extend", "--order"))  # fmt: skip
NOT_COUNTS = "must be at least 1, got 0"
CASES = [
    (LENGTH, 0, "must be from 1 to 2147483646, got 0"),
    (LENGTH, 2**31 - 1, "must be from 1 to 2147483646, got 2147483647"),
    (SEED, -1, r"must be from 0 to 2\*\*32 - 1, got -1"),
    (SEED, 2**32, r"must be from 0 to 2\*\*32 - 1, got 4294967296"),
    (MICRO, 0, NOT_COUNTS),
    (RANKS, 0, NOT_COUNTS),
    (BATCH, 0, NOT_COUNTS),
    ((api("num_samples"), blend("num_samples"), command("build", "--num-samples")), 0, NOT_COUNTS),
    ((command("plan", "--eval-interval"), megatron("--eval-interval"), neox("eval_interval"),
      recipe("evaluation.interval")), 0, NOT_COUNTS),
    (EPOCHS, "two", "must be a positive number such as 1, 1.5 or 3/2, got 'two'"),
    (EPOCHS, "0", "must be a positive number such as 1, 1.5 or 3/2, got '0'"),
    (EPOCHS[:1], "5e-0001", "must be a positive number such as 1, 1.5 or 3/2, got '5e-0001'"),
    (SPLIT, "x,y", "must be up to three non-negative numbers with a positive sum"),
    (SPLIT, "0,0,0", "must be up to three non-negative numbers with a positive sum"),
    (ORDER, "newx", "must be one of megatron, neox, megatron-legacy, paddlenlp, epoch, window, "
     "packed, got 'newx'"),
    ((command("build", "--workers"),), 0, NOT_COUNTS),
    (BUFFER, 0.5, "must be a number >= 1 or exact, got 0.5"),
    ((loader("data_parallel_rank"), loader("data_parallel_rank", RandomAccessSampler)), 2,
     "must be 0 or 1, got 2"),
    ((loader("tail"), command("plan", "--tail"), recipe("tail")), "cut",
     "must be one of drop, pad, wrap, got 'cut'"),
    ((api("add_extra_token"), blend("add_extra_token")), 2, "must be 0 or 1, got 2"),
]  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", [90, 40, 70]).path_prefix


@for_each(
    ("called", "door", "value", "rule"),
    [(called, door, value, rule) for doors, value, rule in CASES for called, door in doors],
)
def test_a_wrong_value_breaks_one_rule(
    corpus: str, called: str, door: Door, value: Any, rule: str
) -> None:
    with pytest.raises(InvalidArgument, match=rf"^(source .*: )?{called} {rule}"):
        door(value, corpus)


AT_BOUNDS = [
    (lambda value, path: Weighting(alpha=value), 0),
    (lambda value, path: Weighting(alpha=value), 1),
    (run("variance_buffer")[1], 1),
    (api("epochs")[1], "5e-001"),
]


@pytest.mark.parametrize(("door", "value"), AT_BOUNDS)
def test_a_value_at_a_bound_is_right(corpus: str, door: Door, value: Any) -> None:
    door(value, corpus)


WEIGHTS = {
    "weights[1]": lambda w, p: megaindex.build_blend(
        [p, p], weights=[1, w], num_samples=9, sequence_length=8
    ),
    "--weights[1]": lambda w, p: cli_error(
        "plan", "--tokens-per-epoch", 900, 900, "--weights", 1, w, "--seq-length", 8,
        "--global-batch-size", 4, "--epochs", 1,
    ),
    "the weight of {path}": lambda w, p: Source(path=p, weight=w),
}  # fmt: skip


@pytest.mark.parametrize("called", WEIGHTS)
@pytest.mark.parametrize("wrong", [0.0, -1.0, float("nan"), float("inf")])
def test_a_wrong_weight_breaks_one_rule(corpus: str, called: str, wrong: float) -> None:
    if wrong == 0 and called != "weights[1]":
        pytest.skip("the order decides: GPT-NeoX builds sources of weight 0")
    with pytest.raises(InvalidArgument) as info:
        WEIGHTS[called](wrong, corpus)
    name = called.format(path=corpus)
    assert str(info.value).startswith(f"{name} must be positive and finite, got {wrong}")


def test_the_seed_is_the_same_everywhere_where_none_is_given(corpus: str) -> None:
    default = megaindex.build_index(corpus, sequence_length=8)
    asked = megaindex.build_index(corpus, sequence_length=8, seed=1234)
    assert default.shuffle_index.tolist() == asked.shuffle_index.tolist()
    blends = [
        megaindex.build_blend([corpus], num_samples=9, weights=[1], sequence_length=8, **seed)
        for seed in ({}, {"seed": 1234})
    ]
    for one, other in zip(*(b.locate(range(9)) for b in blends), strict=True):
        assert one.tolist() == other.tolist()
    runs = [
        megaindex.extend_run(corpus, sequence_length=8, more_epochs=1, **seed)
        for seed in ({}, {"seed": 1234})
    ]
    assert runs[0].index.further_seeds == runs[1].index.further_seeds
    source = Data(train=(Source(tokens=900),))
    run = RunSettings(
        order="neox", sequence_length=8, data=source, batch=BatchSchedule.constant(4),
        target=Target(kind="iterations", value=1),
    )  # fmt: skip
    assert run.seed == 1234
    assert make_plan(run).samples_consumed == 4


@for_each("order", ["epoch", "window", "packed"])
@for_each("epochs", ["0.3", "1", "1.5", "7/3", "2.99"])
def test_a_part_of_an_epoch_is_one_of_all_samples(tmp_path: Path, order: str, epochs: str) -> None:
    """By flags and by a recipe: no sample of each source is lost to rounding."""
    paths = [str(tmp_path / name) for name in "abc"]
    for number, path in enumerate(paths):
        write_corpus(Path(path), [17 + 5 * number, 40, 90 + number] * 9)
    flags = make_plan(
        data_path=paths, order=order, sequence_length=16, global_batch_size=1, epochs=epochs
    )
    sources = {path: {"path": path, "order": order} for path in paths}
    own = make_plan(recipe_of({
        "sequence_length": 16, "sources": sources, "seed": 1234,
        "batch": {"micro_batch_size": 1, "data_parallel_size": 1},
        "stages": {"all": {"epochs": epochs, "mix": dict.fromkeys(paths, 1)}},
    }, "r", tmp_path))  # fmt: skip
    assert (flags.train_iters, flags.samples_consumed) == (own.train_iters, own.samples_consumed)
    assert flags.samples_consumed == int(Fraction(epochs) * flags.samples_per_epoch)


def test_an_epoch_of_each_source_is_in_whole_samples(corpus: str) -> None:
    for epochs, samples in ("1.3", 46), ("1.3,1.3,1.3", 45):  # of 12 samples each
        plan = make_plan(
            data_path=[corpus] * 3, order="epoch", sequence_length=16, global_batch_size=1,
            epochs=epochs,
        )  # fmt: skip
        assert plan.samples_consumed == samples
