"""Recipes in YAML files, and Nanotron's."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.command_line import plan, plan_json
from support.inputs import for_each

from megaindex import EpochOrder, MegatronOrder, NeoxOrder, PackedOrder
from megaindex.builders.recipe import plan_recipe
from megaindex.errors import InvalidArgument, MissingFile
from megaindex.plan import make_plan
from megaindex.recipe import BatchSchedule, Past, PastRead, Recipe
from megaindex.settings.nanotron_yaml import read_nanotron
from megaindex.settings.recipe import RecipeEvaluation, RecipeSource, RecipeStage, Stream, Weighting
from megaindex.settings.recipe_file import read_recipe, recipe_of, to_mapping
from megaindex.settings.run_settings import Target

FULL = """
sequence_length: 2048
seed: 7
tail: pad
exhaustion: continue
batch: {micro_batch_size: 4, data_parallel_size: 8, gradient_accumulation_steps: 2}
evaluation: {source: {path: valid, kind: finetuning}, interval: 100, iterations: 5}
sources:
  web: data/web
  code: {path: /abs/code, max_epochs: "7/2", order: window}
  chat: {path: chat, kind: finetuning, labels: chat_labels, packed: false, long_documents: skip}
  books: {path: books, order: packed, max_documents: 9, long_documents: truncate}
  math: {path: math, order: packed, long_documents: split}
stages:
  stable:
    steps: 1000
    mix: {web: 0.7, code: 0.3}
  decay:
    first_step: 1000
    epochs: 1.5
    batching: random
    mix:
      web: {repeat: 0.1}
      chat: {choose: 512, restart: true}
      code:
  last:
    tokens: 1B
    weights: {by: documents, alpha: 0.5}
    epoch_size: 100
    rounding: streaming
    mix: {web: , code: }
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def test_every_setting_is_read(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, FULL))
    assert recipe.sequence_length == 2048
    assert (recipe.seed, recipe.tail, recipe.exhaustion) == (7, "pad", "continue")
    assert (recipe.batch.final, recipe.micro_batch_size, recipe.data_parallel_size) == (64, 4, 8)
    valid = RecipeSource(name="validation", path=str(tmp_path / "valid"), kind="finetuning")
    assert recipe.evaluation == RecipeEvaluation(source=valid, interval=100, iterations=5)
    assert recipe.sources == (
        RecipeSource(name="web", path=str(tmp_path / "data/web")),
        RecipeSource(name="code", path="/abs/code", max_epochs=Fraction(7, 2), order="window"),
        RecipeSource(
            name="chat", path=str(tmp_path / "chat"), kind="finetuning", packed=False,
            labels=str(tmp_path / "chat_labels"), long_documents="skip",
        ),
        RecipeSource(
            name="books", path=str(tmp_path / "books"), order="packed", max_documents=9,
            long_documents="truncate",
        ),
        RecipeSource(name="math", path=str(tmp_path / "math"), order="packed"),
    )  # fmt: skip
    stable, decay, last = recipe.stages
    assert stable == RecipeStage(
        name="stable", length=Target(kind="iterations", value=Fraction(1000)),
        streams=(Stream(source="web", proportion=Fraction(7, 10)),
                 Stream(source="code", proportion=Fraction(3, 10))),
    )  # fmt: skip
    assert decay.length == Target(kind="epochs", value=Fraction(3, 2))
    assert (decay.first_step, decay.batching) == (1000, "random")
    assert decay.streams == (
        Stream(source="web", repeat=Fraction(1, 10)),
        Stream(source="chat", choose=512, restart=True),
        Stream(source="code"),
    )
    assert last.length == Target(kind="tokens", value=Fraction(10**9))
    assert last.weighting == Weighting(by="documents", alpha=0.5)
    assert (last.epoch_size, last.rounding) == (100, "streaming")


@pytest.mark.parametrize(
    ("evaluation", "batches", "samples", "masked"),
    [("", 7, 105, 7), (", iterations: all", 7, 105, 7), (", iterations: 2", 2, 32, 0),
     (", iterations: 3, batch_size: 10", 3, 30, 0)],
)  # fmt: skip
def test_evaluations_are_counted_ahead(
    tmp_path: Path, evaluation: str, batches: int, samples: int, masked: int
) -> None:
    """30 steps, a round every 7 and after the last; 105 samples to score, 16 a batch."""
    text = ("sequence_length: 8\nbatch: {global_batch_size: 16}\nsources: {a: {tokens: 9000}}\n"
            "stages: {one: {steps: 30, mix: {a: 1}}}\n"
            "evaluation: {source: {tokens: 841}, interval: 7" + evaluation + "}")  # fmt: skip
    plan = make_plan(read_recipe(written(tmp_path, text)))
    assert plan.evaluation_rounds == 5
    assert (plan.evaluation_batches, plan.evaluation_samples) == (batches, samples)
    assert (plan.evaluation_masked, plan.evaluation_available) == (masked, 105)
    too_many = text.replace("interval: 7", "interval: 7, batch_size: 200").replace(
        ", iterations: 3, batch_size: 10", ", iterations: 3"
    )
    if "iterations: 2" in text or "iterations: 3" in text:
        with pytest.raises(InvalidArgument, match="holds 105"):
            plan_recipe(read_recipe(written(tmp_path, too_many)))


def test_what_is_written_reads_as_the_same_recipe(tmp_path: Path) -> None:
    recipe = read_recipe(written(tmp_path, FULL))
    text = yaml.safe_dump(to_mapping(recipe), sort_keys=False)
    assert read_recipe(written(tmp_path, text)) == recipe
    ramp = FULL.replace("gradient_accumulation_steps: 2", "schedule: '0:32 1M:64'")
    recipe = read_recipe(written(tmp_path, ramp))
    assert recipe.batch.stages == ((0, 32), (488, 64))
    assert recipe_of(to_mapping(recipe), "again", Path("/")) == recipe


@for_each(
    ("old", "new", "says"),
    [
        ("sequence_length: 2048", "", "sequence_length is missing"),
        ("web: data/web", "web: ''", "source web: give either a path or"),
        ("seed: 7", "sed: 7", "unknown setting sed; did you mean seed"),
        ("seed: 7", "seed: true", "seed must be an integer, got True"),
        ("batch: {micro", "batch: {mikro", "run.yaml: batch: unknown setting mikro_batch_size"),
        ("steps: 1000\n    mix: {web: 0.7", "steps: ten\n    mix: {web: 0.7",
         r"run.yaml: stages.stable.steps: 'ten' is not a whole number"),
        ("web: 0.7", "web: heavy", r"stages.stable.mix.web must be a number such as 2, 0.7"),
        ("steps: 1000", "steps:", r"stages.stable.steps must be a number"),
        ("epochs: 1.5", "epochs:", r"stages.decay.epochs must be a number"),
        ("chat, kind: finetuning", "chat, kind: chat", "source chat: kind must be one of"),
        ("packed: false", "packed: 0", "sources.chat.packed must be true or false"),
        ("steps: 1000\n", "steps: 1000\n    epochs: 1\n", "steps and epochs exclude each other"),
        ("web: 0.7", "wet: 0.7", "stage stable: unknown source wet"),
        ("gradient_accumulation_steps: 2", "global_batch_size: 50", "50 is not a multiple"),
        ("mix: {web: 0.7, code: 0.3}", "mix: [web]", "stages.stable.mix must be a mapping"),
        ("mix: {web: 0.7, code: 0.3}", "", "stages.stable.mix is missing; it must be a map"),
        ("mix: {web: 0.7, code: 0.3}", "mix:", "stable.mix must be a mapping, as .*, got None"),
        ("sources:\n", "sources: [\n", "is not YAML"),
        (FULL, "- a", "holds a list; it must be a mapping"),
        ("sequence_length: 2048", "sequence_length: 2k", "be a whole number in digits"),
        ("micro_batch_size: 4", "micro_batch_size: 4K", "micro_batch_size must be a whole number"),
        ("tail: pad", "tail: 3", "run.yaml: tail must be one of"),
        ("  last:\n", "  stable:\n", "line 26: stable is given twice"),
        ("source: {path: valid, kind: finetuning}, ", "", "source is missing: the prefix of"),
        ("interval: 100", "interval: 0", "evaluation.interval must be at least 1"),
        ("iterations: 5", "iterations: 0", "evaluation: iterations must be at least 1"),
        ("steps: 1000\n    mix: {web: 0.7", "steps: 0\n    mix: {web: 0.7", "must be positive"),
        ("choose: 512", "choose: 9007199254740993", "choose must be below 2"),
        ("batch: {", "batch: {rampup: 2, ", "batch.rampup must be three whole numbers: start"),
        ("batch: {", "batch: {rampup: [2, 2, 9K], ", "batch.rampup must be three whole numbers"),
        ("seed: 7", "mix_bounds: {web: 0.5}", r"mix_bounds.web must be two shares, such as \[0.2"),
        ("seed: 7", "mix_bounds: {web: [0, 1, 1]}", "mix_bounds.web must be two shares, such"),
        ("seed: 7", "mix_changes: {sources: [web]}", "mix_changes.file is missing; it must be"),
        ("seed: 7", "mix_changes: {file: m, sources: web}", "changes.sources must be a list of"),
    ],
)  # fmt: skip
def test_an_error_says_where_it_is(tmp_path: Path, old: str, new: str, says: str) -> None:
    assert old in FULL
    with pytest.raises(InvalidArgument, match=says):
        read_recipe(written(tmp_path, FULL.replace(old, new, 1)))
    with pytest.raises(MissingFile, match=r"--recipe: .*/none.yaml does not exist"):
        read_recipe(tmp_path / "none.yaml")


NANOTRON = """
data_stages:
- name: stable
  start_training_step: 1
  data: {dataset: {dataset_folder: [a, b], dataset_weights: [0.9, 0.1]}, seed: 42}
- name: annealing
  start_training_step: 11
  data: {dataset: {dataset_folder: {b: 1, c: 3}}, seed: 6}
parallelism: {dp: 2, tp: 4}
tokens: {sequence_length: 256, train_steps: 15, micro_batch_size: 3,
         batch_accumulation_per_replica: 2, val_check_interval: -1, limit_val_batches: 0}
"""


def test_stages_of_nanotron_are_read(tmp_path: Path) -> None:
    recipe = read_nanotron(written(tmp_path, NANOTRON))
    assert [source.path for source in recipe.sources] == [str(tmp_path / n) for n in "abc"]
    assert [source.name for source in recipe.sources] == ["a", "b", "c"]
    assert (recipe.sequence_length, recipe.batch.final, recipe.seed) == (256, 12, 42)
    stable, annealing = recipe.stages
    assert (stable.first_step, annealing.first_step) == (0, 10)
    assert [s.length.value for s in recipe.stages if s.length] == [10, 5]
    assert [s.proportion for s in stable.streams] == [Fraction(9, 10), Fraction(1, 10)]
    assert [s.proportion for s in annealing.streams] == [1, 3]
    assert recipe.evaluation is None


def test_what_a_nanotron_file_leaves_out(tmp_path: Path) -> None:
    """One rank and one micro batch a step, numbered stages, equal weights; a folder may be named
    twice."""
    text = (
        "data_stages:\n"
        "- {start_training_step: 6, data: {dataset: {dataset_folder: [a, b, a]}, seed: 0}}\n"
        "- {start_training_step: 1, data: {dataset: {dataset_folder: a}, seed: 0}}\n"
        "tokens: {sequence_length: 256, train_steps: 6, micro_batch_size: 3}\n"
    )
    recipe = read_nanotron(written(tmp_path, text))
    assert (recipe.batch.final, recipe.micro_batch_size, recipe.seed) == (3, 3, 0)
    assert (recipe.data_parallel_size, recipe.gradient_accumulation_steps) == (1, 1)
    first, last = recipe.stages
    assert (first.name, last.name, last.first_step) == ("stage 0", "stage 1", 5)
    assert [(each.source, each.proportion) for each in last.streams] == [("a", 2), ("b", 1)]
    assert last.length == Target(kind="iterations", value=Fraction(1))


def test_nanotron_reads_copies_where_they_are(tmp_path: Path) -> None:
    """A folder may end in a slash and be named with and without it; another of its copies is
    missing. A key twice is YAML that Nanotron takes, and so do the files of its older versions."""
    (tmp_path / "copy").mkdir()
    (tmp_path / "copy/a.idx").touch()
    folders = "[s3://bucket/a/, b/], dataset_read_path: [copy/a/, copy/b]"
    text = NANOTRON.replace("[a, b]", folders).replace("tp: 4", "tp: 4, moe_layer_recompute: true")
    recipe = read_nanotron(written(tmp_path, f"{text}model: {{a: {{b: 1}}, a: {{b: 2}}}}\n"))
    assert {source.name: source.path for source in recipe.sources} == {
        "s3://bucket/a": str(tmp_path / "copy/a"),
        "b": str(tmp_path / "b"),
        "c": str(tmp_path / "c"),
    }
    assert [each.source for each in recipe.stages[1].streams] == ["b", "c"]
    one = "a, dataset_read_path: copy/a"
    text = NANOTRON.replace("[a, b], dataset_weights: [0.9, 0.1]", one)
    assert read_nanotron(written(tmp_path, text)).sources[0].path == str(tmp_path / "copy/a")


@for_each(
    ("old", "new", "says"),
    [
        ("[a, b],", "[a, b], dataset_read_path: [c],", "read_path must be one path for each of 2"),
        ("[a, b],", "[a, b], dataset_read_path: {a: b},", "must be one path for each of 2 folders"),
        ("start_training_step: 11", "start_training_step: 16", "annealing begins with step 16"),
        ("start_training_step: 1\n", "start_training_step: 2\n", "must have start_training_step 1"),
        ("dataset_weights: [0.9, 0.1]", "dataset_weights: [0.9]", "one weight for each of the 2"),
        ("{b: 1, c: 3}", "", "must name the token files of the stage"),
        ("{b: 1, c: 3}", "[]", "must name the token files of the stage"),
        ("{b: 1, c: 3}", "5", "must name the token files of the stage"),
        ("{b: 1, c: 3}", "{b: 1, 5: 3}", "5 with weight 3: folders are text"),
        (
            "dataset_folder: {b: 1, c: 3}",
            "hf_dataset_or_datasets: c4",
            "megaindex tokenize PREFIX FILE",
        ),
        ("{b: 1, c: 3}", "{b: null}", "folders are text, weights numbers of at least 0"),
        ("{b: 1, c: 3}", "{b: -1, c: 3}", "folders are text, weights numbers of at least 0"),
        ("data_stages:", "data_stages: 3\ngeneral:", "data_stages must be a list with a stage"),
        ("data_stages:", "data_stages: []\ngeneral:", "data_stages must be a list with a stage"),
        ("train_steps: 15", "train_steps: 0", "tokens.train_steps must be at least 1"),
        ("dp: 2", "dp: 0", "parallelism.dp must be at least 1"),
        ("replica: 2", "replica: 0", "batch_accumulation_per_replica must be at least 1"),
        ("dataset_weights: [0.9", "dataset_wieghts: [0.9",
         r"data_stages\[0\].data.dataset: .*dataset_wieghts; did you mean dataset_weights"),
        ("dataset_weights: [0.9, 0.1]", "dataset_weights: []", "one weight for each of the 2"),
        ("  start_training_step: 11\n", "  start_training_step: 11\n  end_training_step: 13\n",
         r"data_stages\[1\]: .*end_training_step; did you mean start_training_step"),
        ("seed: 42", "sede: 42", r"data_stages\[0\].data: .*sede; did you mean seed"),
        ("micro_batch", "train_step: 9, micro_batch", "tokens: .*train_step; did you mean train_s"),
        ("tp: 4", "dpp: 4", "parallelism: unknown setting dpp; did you mean"),
        ("parallelism:", "paralellism:", "paralellism; did you mean parallelism"),
    ],
)  # fmt: skip
def test_a_nanotron_file_that_cannot_be_is_refused(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    assert old in NANOTRON
    with pytest.raises(InvalidArgument, match=says):
        read_nanotron(written(tmp_path, NANOTRON.replace(old, new, 1)))


SOURCE = RecipeSource(name="a", path="a")
STAGE = RecipeStage(
    name="s", streams=(Stream(source="a"),), length=Target(kind="iterations", value=5)
)
NUMBERS: list[tuple[Any, dict[str, Any]]] = [
    (RecipeSource, {"name": "a", "tokens": 900}),
    (RecipeSource, {"name": "a", "path": "a", "block_tokens": 700, "max_epochs": 3}),
    (RecipeSource, {"name": "a", "path": "a", "max_fraction": 0.5}),
    (RecipeSource, {"name": "a", "path": "a", "order": "packed", "max_documents": 4}),
    (RecipeEvaluation, {"source": SOURCE, "interval": 10, "iterations": 2}),
    (Stream, {"source": "a", "proportion": 0.5, "batch_size": 4}),
    (Stream, {"source": "a", "repeat": 2}),
    (Stream, {"source": "a", "choose": 30}),
    (Weighting, {"alpha": 0.5}),
    (RecipeStage, {"name": "s", "streams": (Stream(source="a"),), "first_step": 7}),
    (RecipeStage, {"name": "s", "streams": (Stream(source="a"),), "sequence_length": 64}),
    (Past, {"steps": 5, "mix": (("a", 1),), "global_batch_size": 4, "sequence_length": 32}),
    (PastRead, {"source": "a", "tokens": 7}),
    (PastRead, {"source": "a", "samples": 7}),
    (PastRead, {"source": "a", "epochs": 2}),
    (Target, {"kind": "iterations", "value": 12}),
    (Target, {"kind": "epochs", "value": 1, "per_source": (1, 0.5)}),
    (EpochOrder, {"epochs_mixed": 3}),
    (PackedOrder, {"max_documents": 4}),
    (NeoxOrder, {"final_epoch_threshold": 0.5, "separate_final_epoch": "auto"}),
    (MegatronOrder, {"exact_num_epochs": 2}),
    (BatchSchedule, {"stages": ((0, 4), (40, 8))}),
    (
        Recipe,
        {
            "sources": (SOURCE,), "stages": (STAGE,), "sequence_length": 64, "seed": 3,
            "batch": BatchSchedule.constant(8), "micro_batch_size": 4, "data_parallel_size": 2,
        },
    ),
]  # fmt: skip


def as_numpy(value: Any) -> Any:
    if isinstance(value, tuple):
        return tuple(map(as_numpy, value))
    kinds = {int: np.int64, float: np.float64}
    return kinds[type(value)](value) if type(value) in kinds else value


def of_numpy(value: Any) -> bool:
    if isinstance(value, tuple):
        return any(map(of_numpy, value))
    if is_dataclass(value):
        return any(of_numpy(getattr(value, field.name)) for field in fields(value))
    if isinstance(value, Fraction):
        return of_numpy(value.numerator) or of_numpy(value.denominator)
    return isinstance(value, np.generic)


@for_each(("kind", "values"), NUMBERS)
def test_numbers_of_numpy_are_stored_as_pythons(kind: Any, values: dict[str, Any]) -> None:
    """A lock or cache key would not be the same, and JSON refuses them."""
    made = kind(**{name: as_numpy(value) for name, value in values.items()})
    assert made == kind(**values)
    assert [field.name for field in fields(made) if of_numpy(getattr(made, field.name))] == []


@for_each(("sources", "shown"), [(24, 24), (25, 10)])
def test_the_past_of_many_sources_fits_a_page(sources: int, shown: int, tmp_path: Path) -> None:
    listed, read, mix = (
        ", ".join(f"s{number}: {text}" for number in range(sources))
        for text in ("{tokens: 9000}", "{tokens: 1000}", "1")
    )
    path = tmp_path / "run.yaml"
    path.write_text(
        "sequence_length: 16\nbatch: {global_batch_size: 8}\n"
        f"sources: {{{listed}}}\npast: {{steps: 100, read: {{{read}}}}}\n"
        f"stages: {{a: {{steps: 400, mix: {{{mix}}}}}}}\n"
    )
    status, out, err = plan("--recipe", path)
    assert status == 0, err
    assert out.count("tokens 1,000") == shown
    assert (f"… and {sources - shown} more; --json lists all" in out) == (sources > shown)


@pytest.mark.parametrize("sources", [24, 25])
def test_the_plan_of_many_sources_fits_a_page(sources: int, tmp_path: Path) -> None:
    names = [f"s{number}" for number in range(sources)]
    listed = ", ".join(f"{name}: {{tokens: {1000 * (number + 1)}}}"
                       for number, name in enumerate(names))  # fmt: skip
    mix = ", ".join(f"{name}: 1" for name in names)
    path = tmp_path / "run.yaml"
    path.write_text(
        "sequence_length: 16\nbatch: {global_batch_size: 8}\n"
        f"sources: {{{listed}}}\nstages: {{a: {{steps: 400, mix: {{{mix}}}}}, "
        f"b: {{steps: 3, mix: {{s0: 1, s1: 1}}}}}}\n"
    )
    status, out, err = plan("--recipe", path)
    assert status == 0, err
    lines = [line.split() for line in out.splitlines()]
    shown = [line[0] for line in lines if line[1:2] == ["pretraining"]]
    assert [line[-3] for line in lines if line[:1] == ["b"] or line[:1] == ["s1"]]
    if sources == 24:
        assert shown == names
        return
    assert shown == names[:10]  # the smallest are read most often
    total = plan_json("--recipe", path)
    repeat = {draw["source"] for draw in total["draws"] if draw["first_repeat"] is not None}
    first = min(draw["first_repeat"] for draw in total["draws"] if draw["source"] in repeat)
    stage = next(line for line in out.splitlines() if line.split()[:1] == ["a"])
    assert "25 sources" in stage
    mixed = plan("--recipe", path, "--mix-bounds")[1].split("any mix")[1].splitlines()[2:12]
    steps = {row["source"]: row["first_step"] for row in plan_json(
        "--recipe", path, "--mix-bounds")["mix_bounds"]}  # fmt: skip
    last = [name for name in names if steps[name] is None]
    assert [line.split()[0] for line in mixed] == sorted(
        names, key=lambda name: (name in last, steps[name])
    )[:10]
    assert stage.endswith(f"step {first:,}")
    assert "… and 15 more; --json lists all" in out
    assert f"{len(repeat)} of 25 sources repeat, at most " in out
    assert 0 < len(repeat) < 25
