"""Nanotron's own stages, blends and examples against ours: golden/nanotron.json."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from megaindex.errors import InvalidArgument
from megaindex.index.mixing import BLOCK
from megaindex.recipe.layout import RecipeLayout, resolve_recipe
from megaindex.recipe.mixture import SourceSize
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.nanotron_yaml import read_nanotron
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/nanotron.json").read_text())


def layout_of(case: dict[str, Any]) -> RecipeLayout:
    count = len(case["stages"][0]["weights"])
    stages = []
    for number, stage in enumerate(case["stages"]):
        streams = tuple(
            Stream(source="abcdef"[i], proportion=Fraction(str(weight)))
            for i, weight in enumerate(stage["weights"])
            if weight is not None
        )
        length = Target(kind="iterations", value=Fraction(stage["steps"]))
        stages.append(RecipeStage(name=f"stage {number}", streams=streams, length=length))
    recipe = Recipe(
        sequence_length=GOLDEN["sequence_length"],
        batch=BatchSchedule.constant(case["global_batch_size"]),
        sources=tuple(RecipeSource(name=name, tokens=10**8) for name in "abcdef"[:count]),
        stages=tuple(stages),
    )
    sizes = [SourceSize(tokens=10**8, documents=1, samples=10**6)] * count
    return resolve_recipe(recipe, sizes)


@pytest.mark.parametrize("case", GOLDEN["stages"])
def test_stages_share_out_alike_and_read_on_alike(case: dict[str, Any]) -> None:
    """Counts of each stage within a sample of its weights, here and there; both read every source
    on from where the stage before left it."""
    layout = layout_of(case)
    next_sample = np.zeros(len(case["stages"][0]["weights"]), np.int64)
    theirs_next = next_sample.copy()
    for stage, planned in zip(case["stages"], layout.stages, strict=True):
        weights = np.array([weight or 0 for weight in stage["weights"]])
        exact = weights / weights.sum() * planned.num_samples
        theirs = np.bincount(stage["source"], minlength=weights.size)
        ours = np.zeros(weights.size, np.int64)
        for source, first, end in planned.mixed.reads():
            ours[source] = end - first
        assert theirs.sum() == ours.sum() == planned.num_samples == len(stage["source"])
        assert np.abs(ours - exact).max() < 1
        assert np.abs(theirs - exact).max() < 1
        for source in range(weights.size):
            mine = np.array(stage["sample"])[np.array(stage["source"]) == source]
            assert mine.tolist() == list(
                range(theirs_next[source], theirs_next[source] + mine.size)
            )
        begins = dict(zip(planned.mixed.sources, planned.mixed.begins, strict=True))
        assert all(begins[source] == next_sample[source] for source in begins)
        theirs_next += theirs
        next_sample += ours


def test_where_the_shares_divide_evenly_the_counts_are_equal() -> None:
    case = GOLDEN["stages"][1]
    counts = [list(stage.counts) for stage in layout_of(case).stages]
    assert counts == [np.bincount(stage["source"]).tolist() for stage in case["stages"]]
    assert counts == [[144, 16], [80, 80]]


@pytest.mark.parametrize("case", GOLDEN["nanosets"])
def test_a_nanoset_replays_its_first_epoch(case: dict[str, Any]) -> None:
    """Nanotron issue 237: every epoch in the same order, and what the first leaves out is never
    read. Ours reads a source's second epoch only when the first is complete."""
    epoch, samples = sum(case["lengths"]), case["num_samples"]
    pairs = list(zip(case["source"], case["sample"], strict=True))
    assert pairs[epoch : 2 * epoch] == pairs[:epoch]
    assert pairs[2 * epoch :] == pairs[: samples - 2 * epoch]
    recipe = Recipe(
        sequence_length=16,
        batch=BatchSchedule.constant(samples),
        sources=tuple(
            RecipeSource(name=name, tokens=10**6) for name in "abc"[: len(case["lengths"])]
        ),
        stages=(
            RecipeStage(
                name="one",
                streams=tuple(
                    Stream(source="abc"[i], proportion=Fraction(str(weight)))
                    for i, weight in enumerate(case["weights"] or case["lengths"])
                ),
                length=Target(kind="iterations", value=Fraction(1)),
            ),
        ),
    )
    sizes = [SourceSize(tokens=1, documents=1, samples=n) for n in case["lengths"]]
    (stage,) = resolve_recipe(recipe, sizes).stages
    assert samples <= BLOCK
    drawn = stage.mixing.lookup(np.arange(samples))
    for source, length in enumerate(case["lengths"]):
        ours = drawn.ordinal[drawn.stream == source]
        assert ours.tolist() == list(range(ours.size))
        seen = {sample for which, sample in pairs if which == source}
        assert len(seen) <= min(length, ours.size)


def test_half_of_a_light_source_is_never_read_there() -> None:
    """Weights 8 and 2 of 60 and 40 samples: 50 draws of the second give 20 samples, ours 40."""
    case = GOLDEN["nanosets"][0]
    pairs = list(zip(case["source"], case["sample"], strict=True))
    assert len({sample for which, sample in pairs if which == 1}) == 20
    assert sum(which == 1 for which, _ in pairs) == 48


@pytest.mark.parametrize("example", GOLDEN["examples"], ids=lambda example: example["file"])
def test_examples_are_read_as_nanotron_reads_them(example: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(example["content"]))
    recipe = read_nanotron(path)
    tokens, parallelism = example["content"]["tokens"], example["content"]["parallelism"]
    assert recipe.sequence_length == tokens["sequence_length"]
    assert recipe.batch.final == (
        tokens["micro_batch_size"] * tokens["batch_accumulation_per_replica"] * parallelism["dp"]
    )
    assert recipe.evaluation is None
    assert recipe.seed == example["stages"][0]["seed"]
    for stage, theirs in zip(recipe.stages, example["stages"], strict=True):
        assert stage.name == theirs["name"]
        assert stage.first_step == theirs["start_training_step"] - 1
        assert [stream.source for stream in stage.streams] == theirs["folders"]
        assert [stream.proportion for stream in stage.streams] == [
            Fraction(str(weight)) for weight in theirs["weights"]
        ]
    steps = sum(stage.length.value for stage in recipe.stages if stage.length)
    assert steps == tokens["train_steps"]


BASE = """
data_stages:
- {name: late, start_training_step: 11, data: {dataset: {dataset_folder: b}, seed: null}}
- {name: early, start_training_step: 1, data: {dataset: {dataset_folder: a}, seed: null}}
tokens: {sequence_length: 256, train_steps: 15, micro_batch_size: 3}
"""


def test_stages_may_come_in_any_order_and_without_a_seed(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(BASE)
    recipe = read_nanotron(path)
    assert [stage.name for stage in recipe.stages] == ["early", "late"]
    assert recipe.seed == GOLDEN["seed"]


def test_a_folder_of_weight_0_is_no_source(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    for blend in ("{dataset_folder: {b: 2, c: 0}}",
                  "{dataset_folder: [b, c], dataset_weights: [2, 0]}"):  # fmt: skip
        path.write_text(BASE.replace("{dataset_folder: b}", blend))
        recipe = read_nanotron(path)
        assert [source.name for source in recipe.sources] == ["a", "b"]
        assert [stream.source for stream in recipe.stages[1].streams] == ["b"]


def test_stages_may_have_a_sequence_length_of_their_own(tmp_path: Path) -> None:
    """Nanotron raises NotImplementedError for them."""
    path = tmp_path / "config.yaml"
    late = "start_training_step: 11"
    path.write_text(BASE.replace(late, f"{late}, sequence_length: 512"))
    recipe = read_nanotron(path)
    assert recipe.stage_lengths == (256, 512)
    assert [recipe.order_of(source) for source in recipe.sources] == ["blocks", "blocks"]


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("start_training_step: 11", "start_training_step: 11, sequence_length: many",
         r"data_stages\[0\].sequence_length"),
        ("{dataset_folder: b}", "{dataset_folder: b, dataset_max_tokens: [100]}",
         "dataset_max_tokens: a limit on tokens has no counterpart in recipes"),
    ],
)  # fmt: skip
def test_what_would_change_the_run_unseen_is_refused(
    tmp_path: Path, old: str, new: str, says: str
) -> None:
    path = tmp_path / "config.yaml"
    assert old in BASE
    path.write_text(BASE.replace(old, new))
    with pytest.raises(InvalidArgument, match=says):
        read_nanotron(path)
