"""Printed settings: what they are read back as, and what the frameworks make of them."""

from __future__ import annotations

import itertools
import json
import re
import shlex
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import plan as cli
from support.command_line import plan_json, shares_by_times
from support.corpora import write_corpus
from support.inputs import for_each
from support.megatron_dataset import Tokenizer

from megaindex import IndexedDatasetWriter
from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import FRAMEWORK_RULES
from megaindex.plan import Plan, make_plan
from megaindex.plan.export import export_settings
from megaindex.recipe import read_recipe
from megaindex.settings.megatron_args import read_megatron
from megaindex.settings.neox_yaml import read_neox
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings, merged

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/neox_runs.json").read_text())
SPLITS = ("train", "valid", "test")
NUMBERS = itertools.count()

# Every reason for which settings are not printed, as docs/planning.md lists them.
REFUSED = (
    "does not run order", "masks no sample", "has one batch size", "as a whole",
    "takes paths for each of train, valid and test", "applies no buffer to", "built for one epoch",
    "builds paths without weights", "rounds up the last batch", "buffer and shuffling are its own",
    "has no batch schedule",
)  # fmt: skip


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder, rng = tmp_path_factory.mktemp("paste"), np.random.default_rng(7)
    paths = [str(folder / name) for name in "abc"]
    for path, count in zip(paths, (40, 25, 60), strict=True):
        write_corpus(Path(path), rng.integers(1, 20, count))
    return paths


@st.composite
def settings(draw: st.DrawFn) -> dict[str, Any]:
    count, weighted = draw(st.integers(1, 3)), draw(st.booleans())
    form = draw(st.sampled_from(["whole", "split", "apart"]))
    batch = draw(st.sampled_from(["factors", "factors", "global", "schedule"]))
    target = draw(st.sampled_from(["epochs", "train_iters", "train_samples", "train_tokens"]))
    values = {"epochs": ["1", "2", "0.7"], "train_iters": [1, 17], "train_samples": ["61", "80"],
              "train_tokens": ["900"]}  # fmt: skip
    return {
        "order": draw(st.sampled_from(sorted(FRAMEWORK_RULES) + ["neox", "megatron"] * 4)),
        "count": count,
        "weights": [draw(st.sampled_from([0.1, 1.0, 0.7, 2.35])) for _ in range(count)] * weighted,
        "form": form,
        "batch": batch,
        "variance_buffer": draw(st.sampled_from([None, "1.0", "1.005", "1.25", "exact"])),
        "tail": draw(st.sampled_from([None, None, "pad", "wrap"])),
        "separate_final_epoch": draw(st.sampled_from([None, None, None, "always"])),
        "seed": draw(st.integers(0, 999)),
        target: draw(st.sampled_from(values[target])),
    }


def settings_of(drawn: dict[str, Any], paths: list[str]) -> Settings:
    given = dict(drawn)
    weights, names = given.pop("weights"), paths[: given.pop("count")]
    words = tuple(names)
    if weights:
        words = tuple(str(w) for pair in zip(weights, names, strict=True) for w in pair)
    form, batch = given.pop("form"), given.pop("batch")
    data = {
        "whole": {"data_path": words},
        "split": {"data_path": words, "split": "70,20,10"},
        "apart": {"train_data_path": words, "valid_data_path": words, "test_data_path": words},
    }[form]
    sizes: dict[str, Any] = {
        "factors": {"micro_batch_size": 2, "data_parallel_size": 2,
                    "gradient_accumulation_steps": 2},
        "global": {"global_batch_size": 6},
        "schedule": {"batch_schedule": "0:2 160:4"},
    }[batch]  # fmt: skip
    return Settings(seq_length=8, eval_interval=5, eval_iters=1, **data, **sizes, **given)


def same(plan: Plan, framework: str) -> dict[str, Any]:
    """What printed settings keep: all but the target's wording, its tail and what is left of it.

    GPT-NeoX weighs paths without weights alike. Of one source the exact buffer is 1.0.
    """
    content = plan.to_json()
    kept = ("train_iters", "global_batch_size", "batch_schedule", "samples_consumed",
            "samples_built", "num_epochs_built", "evaluation", "loaders", "tokens_per_epoch",
            "max_train_iters_without_repeat", "max_train_iters_same_epochs")  # fmt: skip
    rows = content["datasets"]
    for row in rows:
        if framework == "neox" and row["weight"] is None:
            row["weight"] = 1.0
    blended = any(row["source"] > 1 for row in rows)
    buffer = content["variance_buffer"] if blended else None
    return {name: content[name] for name in kept} | {"datasets": rows, "buffer": buffer}


def answer(call: Callable[[], Any]) -> tuple[Any, str]:
    """What it returns, or why it refuses."""
    try:
        return call(), ""
    except InvalidArgument as refusal:
        return None, str(refusal)


@given(settings(), st.sampled_from(["neox", "megatron"]))
def test_printed_settings_are_read_back_as_the_same_plan(
    corpora: list[str], tmp_path_factory: pytest.TempPathFactory, drawn: Any, framework: str
) -> None:
    run, refusal = answer(lambda: resolve(settings_of(drawn, corpora)))
    if run is None:
        assert "--separate-final-epoch is a setting of order" in refusal
        return
    plan = make_plan(run)
    text, refusal = answer(lambda: export_settings(plan, run, framework))
    if text is None:
        assert any(reason in refusal for reason in REFUSED), refusal
        return
    if framework == "neox":
        file = tmp_path_factory.getbasetemp() / f"paste{next(NUMBERS)}.yml"
        file.write_text(text)
        found = read_neox([file])
        assert "split" in text or "valid_data_paths" in text
    else:
        found = merged(read_megatron(text, {}), Settings(data_parallel_size=run.data_parallel_size))
        assert "--split" in text or "--valid-data-path" in text
    assert same(make_plan(resolve(found)), framework) == same(plan, framework)


@for_each("case", GOLDEN["printed"])
def test_neox_reads_what_was_planned(case: dict[str, Any], tmp_path: Path) -> None:
    """golden/neox_runs.json: GPT-NeoX ran the printed text as it stands."""
    for name, sizes in case["corpora"].items():
        write_corpus(tmp_path / name, sizes)
    flags = [word.replace("@", f"{tmp_path}/") for word in case["flags"]]
    status, text, err = cli(*flags, "--print-config", "neox")
    assert status == 0, err
    assert text.replace(f"{tmp_path}/", "@") == case["text"]
    plan = plan_json(*flags)
    assert plan["train_iters"] == case["train_iters"]
    for split in SPLITS:
        rows = [row for row in plan["datasets"] if row["split"] == split]
        ran = case["splits"][split]
        assert [row["built"] for row in rows] == ran["built"]
        assert sum(row["drawn"] for row in rows) == ran["rows"]
        for row, times in zip(rows, ran["served"], strict=True):
            assert_seen(row, times)


def assert_seen(row: dict[str, Any], times: Any) -> None:
    """The coverage is exact, and that of so many tokens by times served."""
    assert row["coverage_method"] in ("closed-form", "built")
    shares = np.array(shares_by_times(row["coverage"]))
    found = np.zeros(max(len(shares), len(times)))
    found[: len(times)] = np.array(times) / sum(times)
    np.testing.assert_allclose(np.pad(shares, (0, len(found) - len(shares))), found, atol=1e-12)


MEGATRON = [
    ["--data-path", "@a", "--split", "70,20,10", "--epochs", "1"],
    ["--data-path", "@a", "--epochs", "1.5"],
    ["--data-path", "0.7", "@a", "0.3", "@b", "--split", "80,10,10", "--epochs", "1"],
    ["--data-path", "0.7", "@a", "0.3", "@b", "--epochs", "1", "--variance-buffer", "1.0"],
    ["--data-path", "0.7", "@a", "0.3", "@b", "--epochs", "2", "--variance-buffer", "1.25"],
    ["--data-path", "0.7", "@a", "0.3", "@b", "--epochs", "2", "--variance-buffer", "exact"],
    ["--data-path", "@a", "@b", "@c", "--epochs", "0.5"],
    ["--train-data-path", "2", "@a", "1", "@b", "--valid-data-path", "@c", "--epochs", "1"],
    ["--data-path", "@a", "@b", "--split", "70,20,10", "--epochs", "1,2"],
    ["--data-path", "@a", "--epochs", "1.5", "--separate-final-epoch", "always"],
]


@pytest.mark.not_quick
@for_each("words", MEGATRON)
def test_megatron_reads_what_was_planned(words: list[str], tmp_path: Path) -> None:
    """megatron-core builds from the printed flags, with the adapter where a comment calls it."""
    first: dict[str, range] = {}
    rng = np.random.default_rng(11)
    at = 10  # below are end of document and padding
    for name, count in (("a", 60), ("b", 30), ("c", 40)):
        sizes = rng.integers(1, 40, count)
        with IndexedDatasetWriter(tmp_path / name, dtype="int32") as writer:
            for size in sizes:
                writer.add_document(np.arange(at, at + size, dtype=np.int32))
                at += int(size)
        first[name] = range(at - int(sizes.sum()), at)
    flags = [word.replace("@", f"{tmp_path}/") for word in words]
    flags += ["--seq-length", "16", "--micro-batch-size", "2", "--data-parallel-size", "1",
              "--eval-interval", "20", "--eval-iters", "2"]  # fmt: skip
    status, text, err = cli(*flags, "--print-config", "megatron")
    assert status == 0, err
    plan = plan_json(*flags)
    served = tokens_of_megatron(text)
    for row in plan["datasets"]:
        times = [served[row["split"]].get(token, 0) for token in first[Path(row["path"]).name]]
        counted = np.bincount(times)
        if "--split" in text and "100,0,0" not in text:
            counted[0] -= len(times) - row["tokens_per_epoch"]
        assert_seen(row, counted)


def tokens_of_megatron(text: str) -> dict[str, dict[int, int]]:
    """How often each token is an input of what a run of these flags reads, in each split."""
    arguments = flags_in(text)
    iterations = int(arguments["--train-iters"][0])
    batch, evals = int(arguments["--global-batch-size"][0]), int(arguments["--eval-iters"][0])
    rounds = iterations // int(arguments["--eval-interval"][0]) + 1
    sizes = [iterations * batch, rounds * evals * batch, evals * batch]
    calls = re.findall(r"^# megaindex\.adapters\.megatron\.install\((.*)\)$", text, re.MULTILINE)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if calls:
            import megaindex.adapters.megatron as adapter

            adapter.install(**eval(f"dict({calls[0]})"))
        try:
            built = build(arguments, sizes)
            return {
                split: times_of(dataset, size)
                for split, dataset, size in zip(SPLITS, built, sizes, strict=True)
            }
        finally:
            if calls:
                adapter.uninstall()


def build(arguments: dict[str, list[str]], sizes: list[int]) -> Any:
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from megatron.core.datasets.utils import get_blend_from_list

    data: dict[str, Any] = {"split": arguments.get("--split", [None])[0]}
    data["blend"] = get_blend_from_list(arguments.get("--data-path"))
    if "--train-data-path" in arguments:
        paths = [arguments.get(f"--{split}-data-path") for split in SPLITS]
        data = {"blend_per_split": [get_blend_from_list(words) for words in paths]}
    surplus = float(arguments.get("--mid-level-dataset-surplus", ["0.005"])[0])
    config = GPTDatasetConfig(
        random_seed=int(arguments["--seed"][0]), sequence_length=int(arguments["--seq-length"][0]),
        tokenizer=Tokenizer(), reset_position_ids=False, reset_attention_mask=False,
        eod_mask_loss=False, create_attention_mask=False, mid_level_dataset_surplus=surplus, **data,
    )  # fmt: skip
    return BlendedMegatronDatasetBuilder(GPTDataset, sizes, lambda: True, config).build()


def flags_in(text: str) -> dict[str, list[str]]:
    """The printed command as a shell splits it."""
    found: dict[str, list[str]] = {}
    for word in shlex.split(text.replace("\\\n", " "), comments=True):
        if word.startswith("--"):
            found[word] = values = []
        else:
            values.append(word)
    return found


def times_of(dataset: Any, size: int) -> dict[int, int]:
    if dataset is None:
        return {}
    tokens = np.concatenate([np.asarray(dataset[k]["tokens"]) for k in range(size)])
    return dict(zip(*map(np.ndarray.tolist, np.unique(tokens, return_counts=True)), strict=True))


def test_an_epoch_that_the_buffer_makes_two_is_said_before_any_number(tmp_path: Path) -> None:
    """GPT-NeoX issue 1164: its paths are train_data_paths."""
    size = ["--seq-length", 2048, "--micro-batch-size", 16, "--data-parallel-size", 8]
    words = ["--order", "neox", "--tokens-per-epoch", 2113896210, "--epochs", 1, *size]
    said = (
        "train 8023 iterations to repeat no sample, or 8063 with "
        'megaindex.adapters.neox.install(variance_buffer="exact")'
    )
    plan = plan_json(*words, "--variance-buffer", 1.005)
    assert plan["caution"].startswith("variance_buffer 1.005 builds 2 epochs of")
    assert plan["caution"].endswith(said)
    assert said in " ".join(cli(*words, "--variance-buffer", 1.005)[1].replace("│", " ").split())
    assert plan_json(*words)["caution"] == ""
    assert plan_json(*words, "--variance-buffer", "exact")["train_iters"] == 8063
    write_corpus(tmp_path / "c", np.full(40, 40))
    paths = [word for split in SPLITS for word in (f"--{split}-data-path", tmp_path / "c")]
    small = ["--order", "neox", *paths, "--epochs", 1, "--seq-length", 16, "--micro-batch-size", 1,
             "--data-parallel-size", 1]  # fmt: skip
    first = cli(*small, "--print-config", "neox")[1].splitlines()[0]
    assert first.startswith("# variance_buffer 1.005 builds 2 epochs of")


@pytest.mark.parametrize(
    ("order", "words", "call"),
    [
        ("megatron", ["--separate-final-epoch", "always"], "(separate_final_epoch='always')"),
        ("neox", [], ""),
        ("neox", ["--separate-final-epoch", "auto"],
         "(separate_final_epoch='auto', final_epoch_threshold=0.5)"),
    ],
)  # fmt: skip
def test_a_threshold_without_effect_is_not_printed(
    corpora: list[str], order: str, words: list[str], call: str
) -> None:
    """install() refuses it."""
    status, out, _ = cli("--data-path", corpora[0], "--seq-length", 8, "--global-batch-size", 6,
                         "--epochs", 1, "--order", order, "--final-epoch-threshold", 0.5, *words,
                         "--print-config", order)  # fmt: skip
    assert status == 0
    assert "".join(re.findall(r"install(.*)", out)).replace('"', "'") == call


@pytest.mark.parametrize(
    ("paths", "buffer", "surplus", "call"),
    [
        ((2, 0, 1, 1), "1.25", ["0.25"], ""),
        ((2, 0, 1, 1), "1.005", None, ""),
        ((0,), "1.25", None, "(variance_buffer=1.25)"),
        ((0,), "1", None, ""),
    ],
)
def test_a_buffer_of_megatron_is_a_surplus_or_an_argument_of_the_adapter(
    corpora: list[str], paths: tuple[int, ...], buffer: str, surplus: Any, call: str
) -> None:
    data = [n if k % 2 == 0 and len(paths) > 1 else corpora[n] for k, n in enumerate(paths)]
    status, out, err = cli("--order", "megatron", "--train-data-path", *data, "--seq-length", 8,
                           "--global-batch-size", 6, "--epochs", 1, "--variance-buffer", buffer,
                           "--eval-iters", 0, "--print-config", "megatron")  # fmt: skip
    assert status == 0, err
    assert flags_in(out).get("--mid-level-dataset-surplus") == surplus
    lines = re.findall(r"^# megaindex.adapters.megatron.install(.*)", out, re.MULTILINE)
    assert "".join(lines) == call


def test_megatron_evaluates_only_on_validation_data(corpora: list[str]) -> None:
    """It stops at the first evaluation without any, from 0.14 on."""
    words = ["--order", "megatron", "--seq-length", 8, "--global-batch-size", 6, "--epochs", "1",
             "--print-config", "megatron"]  # fmt: skip
    for data, version, iterations in (
        (["--data-path", corpora[0]], "0.16.1", 0),
        (["--data-path", corpora[0], "--split", "100,0,0"], "main", 0),
        (["--data-path", corpora[0], "--split", "100,0,0"], "0.13.0", 100),
        (["--data-path", corpora[0], "--split", "90,10,0"], "main", 100),
        (["--train-data-path", *corpora[:2]], "0.14.0", 0),
    ):
        status, out, _ = cli(*words, *data, "--framework-version", version)
        assert (status, flags_in(out)["--eval-iters"]) == (0, [str(iterations)]), (data, version)
    status, _, err = cli(*words, "--data-path", corpora[0], "--split", "90,0,10")
    assert status == 2
    assert "stops at its first evaluation without validation data" in err


FLAGS = [
    (["--order", "megatron", "--micro-batch-size", "2", "--phase-transition-iterations", "2", "5"],
     {"--phase-transition-iterations": ["2,5"], "--train-samples": ["42"]}),
    (["--order", "megatron", "--micro-batch-size", "3", "--data-parallel-size", "1",
      "--eval-micro-batch-size", "2", "--eval-global-batch-size", "4", "--start-eval-at-iter", "5"],
     {"--eval-micro-batch-size": ["2"], "--eval-global-batch-size": ["4"],
      "--start-eval-at-iter": ["5"]}),
    (["--order", "megatron", "--micro-batch-size", "3", "--eval-micro-batch-size", "3"],
     {"--micro-batch-size": ["3"]}),
    (["--order", "megatron-legacy"], {"--train-data-exact-num-epochs": ["-1"]}),
    (["--order", "megatron-legacy", "--train-data-exact-num-epochs", "1"],
     {"--train-data-exact-num-epochs": ["1"]}),
]  # fmt: skip
OPTIONAL = {
    "--train-samples",
    "--micro-batch-size", "--phase-transition-iterations", "--eval-micro-batch-size",
    "--eval-global-batch-size", "--start-eval-at-iter", "--train-data-exact-num-epochs",
}  # fmt: skip


@pytest.mark.parametrize(("words", "printed"), FLAGS)
def test_flags_that_only_some_runs_have(
    corpora: list[str], words: list[str], printed: dict[str, list[str]]
) -> None:
    run = [*words, "--data-path", corpora[0], "--split", "80,20,0", "--seq-length", 8,
           "--global-batch-size", 6, "--train-iters", 7]  # fmt: skip
    if "--micro-batch-size" in words:
        run += ["--framework-version", "main"]
        printed = {"--micro-batch-size": [words[words.index("--micro-batch-size") + 1]], **printed}
    status, text, err = cli(*run, "--print-config", "megatron")
    assert status == 0, err
    found = flags_in(text)
    assert {flag: found[flag] for flag in found.keys() & OPTIONAL} == printed
    more = [word for flag in ("--data-parallel-size", "--framework-version") if flag in run
            for word in (flag, run[run.index(flag) + 1])]  # fmt: skip
    planned, pasted = plan_json(*run), plan_json("--megatron-args", text, *more)
    for name in ("order", "train_iters", "phases", "evaluation", "datasets", "samples_consumed"):
        assert planned[name] == pasted[name], name


@pytest.mark.parametrize("name", ["donn\u00e9es", "\U0001f600", "a\x7f\x85b", 'a"b\u2028c\ufeff'])
def test_names_of_any_characters_are_printed_as_yaml(name: str, tmp_path: Path) -> None:
    """Also as NeoX's loader of YAML reads them; an emoji in two escapes is two characters of it."""
    paths = [str(tmp_path / each) for each in (name, "web")]
    for path in paths:
        write_corpus(Path(path), [50] * 20)
    words = ["--seq-length", 16, "--global-batch-size", 4, "--train-iters", 10, "--eval-iters", 0,
             "--data-parallel-size", 1]  # fmt: skip
    weighted = [word for path in paths for word in (1, path)]
    recipe = tmp_path / "run.yaml"
    run = ["--data-path", *weighted, *words, "--order", "megatron", "--split", "100,0,0"]
    status, text, err = cli(*run, "--print-config", "recipe")
    assert status == 0, err
    recipe.write_text(text, encoding="utf-8")
    assert [source.path for source in read_recipe(recipe).sources] == paths
    assert plan_json(recipe)["train_iters"] == 10
    (tmp_path / "again.yaml").write_text(
        cli(recipe, "--print-config", "recipe")[1], encoding="utf-8"
    )
    assert read_recipe(tmp_path / "again.yaml") == read_recipe(recipe)
    own = [word for split in ("train", "valid", "test")
           for word in (f"--{split}-data-path", *weighted)]  # fmt: skip
    status, text, err = cli(*own, *words, "--order", "neox", "--print-config", "neox")
    assert status == 0, err
    assert yaml.safe_load(text)["train_data_paths"] == paths


@pytest.mark.parametrize("schedule", ["0:12", "0:12 800:16"])
@pytest.mark.parametrize("target", ["--train-iters", "--train-samples"])
def test_a_schedule_of_one_size_stays_a_schedule(
    corpora: list[str], schedule: str, target: str
) -> None:
    """Megatron-LM requests and evaluates micro batches on every rank under any schedule."""
    common = ["--micro-batch-size", 1, "--data-parallel-size", 4, "--split", "90,10,0"]
    words = ["--order", "megatron", "--data-path", corpora[0], "--seq-length", 8, *common,
             "--batch-schedule", schedule, target, 30, "--eval-interval", 13]  # fmt: skip
    status, out, err = cli(*words, "--print-config", "megatron")
    assert status == 0, err
    assert flags_in(out)["--step-batch-size-schedule"] == [schedule]
    assert flags_in(out)[target] == ["30"]
    text = " ".join(line.removesuffix("\\") for line in out.splitlines() if line[:1] == "-")
    planned = plan_json(*words)
    again = plan_json("--megatron-args", text, "--world-size", 4)
    names = ("train_iters", "samples_consumed", "batch_schedule", "datasets")
    assert [again[name] for name in names] == [planned[name] for name in names]


def test_the_last_batch_of_a_schedule_that_is_rounded_up(corpora: list[str]) -> None:
    words = ["--order", "megatron", "--data-path", corpora[0], "--seq-length", 8,
             "--batch-schedule", "0:2 160:4", "--tail", "wrap"]  # fmt: skip
    for samples in (61, 64):
        planned = plan_json(*words, "--train-samples", samples)
        assert planned["samples_consumed"] == 64
        status, out, err = cli(*words, "--train-samples", samples, "--print-config", "megatron")
        if samples == 64:
            assert (status, flags_in(out)["--train-samples"]) == (0, ["64"]), err
        else:
            assert (status, out, err) == (
                2, "", "megaindex plan: --print-config megatron: Megatron rounds up the last batch "
                "of a schedule; give --train-samples 64\n",
            )  # fmt: skip


UNWEIGHTED = ["--order", "megatron", "--data-path", "@a", "@b", "--variance-buffer"]
REASONS = [
    ("neox", ["--data-path", "@a", "@b", "--split", "8,1,1"], "`megaindex split`"),
    ("neox", ["--train-data-path", "@a", "--valid-data-path", "@b"], "--test-data-path too"),
    ("neox", ["--tokens-per-epoch", "9000"], "--data-path in place of --tokens-per-epoch"),
    ("neox", ["--data-path", "@a", "--variance-buffer", "1.1"], "no buffer to data_path"),
    ("neox", ["--data-path", "@a", "--consumed-samples", "12"], "plan the whole run"),
    ("neox", ["--data-path", "@a", "--eval-global-batch-size", "3"], "batch of training"),
    ("neox", ["--data-path", "@a", "--tail", "pad"], "masks no sample"),
    (
        "neox",
        ["--data-path", "@a", "--rampup-batch-size", "2", "2", "12"],
        "GPT-NeoX has one batch size",
    ),
    ("neox", ["--data-path", "@a", "--phase-transition-iterations", "2"], "has no phases"),
    ("neox", ["--data-path", "@a", "--micro-batch-size", "2"], "accumulates 1 step unless"),
    ("megatron", ["--data-path", "@a"], "Megatron does not run order neox"),
    ("megatron", [*UNWEIGHTED, "exact"], "for one epoch"),
    ("megatron", [*UNWEIGHTED, "1.25"], "no buffer to paths without weights"),
    (
        "megatron",
        ["--data-path", "@a", "--order", "megatron-legacy", "--variance-buffer", "1.1"],
        "Megatron-DeepSpeed's buffer and shuffling are its own",
    ),
    (
        "megatron",
        ["--data-path", "@a", "--order", "megatron-legacy", "--eval-global-batch-size", "3"],
        "has no batch schedule, phases or evaluation batch size",
    ),
    ("recipe", ["--data-path", "@a", "@b"], "sources of a mix have weights"),
    ("recipe", ["--data-path", "@a", "--rampup-batch-size", "2", "2", "12"], "one batch size here"),
    ("recipe", ["--data-path", "@a", "@b", "@b", "--order", "megatron"], "of a mix have weights"),
]


@for_each(("framework", "words", "reason"), REASONS)
def test_what_a_framework_cannot_say_is_refused(
    corpora: list[str], framework: str, words: list[str], reason: str
) -> None:
    given = [word.replace("@a", corpora[0]).replace("@b", corpora[1]) for word in words]
    status, out, err = cli("--order", "neox", *given, "--seq-length", 8, "--global-batch-size", 6,
                           "--epochs", "1", "--print-config", framework)  # fmt: skip
    assert (status, out) == (2, "")
    assert f"--print-config {framework}: " in err
    assert reason in err


def test_a_target_of_samples_is_printed_as_one(corpora: list[str]) -> None:
    """Unless the tail fills the last batch: then Megatron-LM is told its iterations."""
    words = ["--data-path", corpora[0], "--seq-length", 8, "--global-batch-size", 6, "--order",
             "megatron", "--print-config", "megatron"]  # fmt: skip
    for target, tail, printed in (
        (["--train-samples", 20], "drop", {"--train-samples": ["20"]}),
        (["--train-samples", 24], "wrap", {"--train-samples": ["24"]}),
        (["--train-samples", 20], "wrap", {"--train-iters": ["4"]}),
        (["--train-iters", 4], "drop", {"--train-iters": ["4"]}),
    ):
        status, out, _ = cli(*words, *target, "--tail", tail)
        flags = flags_in(out)
        lengths = {
            name: flags[name] for name in ("--train-samples", "--train-iters") if name in flags
        }
        assert (status, lengths) == (0, printed), (target, tail)


def test_what_is_printed_without_weights(corpora: list[str]) -> None:
    """One path, or epochs for each of several, which are their weights."""
    words = ["--seq-length", 8, "--global-batch-size", 6, "--order", "megatron"]
    one, two = ["--data-path", corpora[0], "--epochs", 1], ["--data-path", *corpora[:2]]
    for more in ([], ["--variance-buffer", "exact"]):
        assert cli(*words, *one, *more, "--print-config", "megatron")[0] == 0
    assert cli(*words, *two, "--train-iters", 3, "--print-config", "megatron")[0] == 0
    epochs = [*two, "--epochs", "2,1"]
    unreached = [*epochs, "--phase-transition-iterations", 1000]
    for words_of, name in ((one, "all"), (epochs, "all"), (unreached, "phase_1")):
        status, text, err = cli(*words, *words_of, "--print-config", "recipe")
        assert status == 0, err
        (stage,) = yaml.safe_load(text)["stages"].items()
        weights = [row.get("weight") or 1 for row in plan_json(*words, *words_of)["datasets"]]
        assert (stage[0], list(stage[1]["mix"].values())) == (name, weights)


def test_a_recipe_has_the_sources_weights_and_steps(corpora: list[str], tmp_path: Path) -> None:
    """A stage for each phase; what a recipe cannot read is refused."""
    batch = ("--micro-batch-size", 1, "--data-parallel-size", 2, "--global-batch-size", 6)
    words = ["--data-path", 3, corpora[0], 1, corpora[1], "--seq-length", 8, *batch,
             "--train-samples", 61]  # fmt: skip
    phases = ["--phase-transition-iterations", 2, 5]
    for more, steps in ((phases, (2, 3, 5)), ([], (10,))):
        (tmp_path / "run.yaml").write_text(cli(*words, *more, "--print-config", "recipe")[1])
        recipe = read_recipe(tmp_path / "run.yaml")
        assert tuple(stage.length and stage.length.value for stage in recipe.stages) == steps
        names = ["phase_1", "phase_2", "phase_3"] if more else ["all"]
        assert [stage.name for stage in recipe.stages] == names
        planned, printed = plan_json(*words, *more), plan_json("--recipe", tmp_path / "run.yaml")
        consumed = planned["samples_consumed"]
        assert (printed["train_iters"], printed["samples_consumed"]) == (10, consumed)
        assert [(source.name, source.path) for source in recipe.sources] == [
            (Path(path).name, path) for path in corpora[:2]
        ]
        assert {s.proportion for stage in recipe.stages for s in stage.streams} == {3, 1}
        assert (recipe.seed, recipe.micro_batch_size, recipe.data_parallel_size) == (1234, 1, 2)
    twice = ("--train-data-path", 3, corpora[0], 1, corpora[1], 2, corpora[0])
    twice += ("--valid-data-path", corpora[2], *words[5:], "--print-config", "recipe")
    text = cli(*twice)[1]
    (tmp_path / "run.yaml").write_text(text)
    recipe = read_recipe(tmp_path / "run.yaml")
    assert [s.path for s in recipe.sources] == corpora[:2]
    assert [s.proportion for s in recipe.stages[0].streams] == [5, 1]
    assert text.startswith("# without validation and test data")
    twins = [str(tmp_path / folder / "c") for folder in "ab"]  # names do not tell them apart
    for path in map(Path, twins):
        path.parent.mkdir()
        write_corpus(path, [9] * 20)
    (tmp_path / "run.yaml").write_text(cli("--data-path", 1, twins[0], 2, twins[1], *words[5:],
                                           "--print-config", "recipe")[1])  # fmt: skip
    recipe = read_recipe(tmp_path / "run.yaml")
    assert [(s.name, s.path) for s in recipe.sources] == [(path, path) for path in twins]
    for more, reason in (
        (["--split", "9,1,0"], "trains on all documents"),
        (["--consumed-samples", 6], "plan the whole run"),
        (["--train-samples", 5], "plan the whole run"),
        (["--skip-steps", "3"], "add skip to the recipe"),
        (["--order", "epoch"], "or with --order megatron"),
    ):
        status, _, error = cli(*words, *more, "--print-config", "recipe")
        assert (status, reason in error) == (2, True), error


def test_evaluations_under_a_schedule_keep_their_batch_without_ranks(corpora: list[str]) -> None:
    """Without sizes of ranks Megatron-LM's nominal batch is not known, so it is printed."""
    words = ["--order", "megatron", "--data-path", corpora[0], "--seq-length", 8, "--split",
             "90,10,0", "--batch-schedule", "0:4 40:8", "--train-iters", 12,
             "--eval-interval", 5]  # fmt: skip
    for more, sizes in (((), ["8"]), (("--eval-global-batch-size", 16), ["16"])):
        status, out, err = cli(*words, *more, "--print-config", "megatron")
        assert status == 0, err
        assert flags_in(out)["--eval-global-batch-size"] == sizes
    status, out, err = cli(*words, "--micro-batch-size", 1, "--data-parallel-size", 4,
                           "--print-config", "megatron")  # fmt: skip
    assert status == 0, err
    assert "--eval-global-batch-size" not in flags_in(out)
