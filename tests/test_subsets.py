"""Subsets of the sources of recipes, in plans, loaders and states, and recipes of a share."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from support.command_line import cli, plan_json
from support.corpora import write_corpus
from support.folders import inside
from support.inputs import for_each

from megaindex.errors import FormatError, InvalidArgument
from megaindex.loader import loader_of_recipe
from megaindex.lock import read_lock
from megaindex.recipe import open_recipe, plan_recipe, read_recipe, scale_recipe
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe_file import recipe_of, to_mapping

LENGTHS = np.random.default_rng(11).integers(2, 40, 900)


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path) -> Any:
    for name, lengths in (("web", LENGTHS), ("code", LENGTHS[:300])):
        write_corpus(tmp_path / name, lengths, dtype=np.uint16)
    with inside(tmp_path):
        yield


def recipe(web: dict[str, Any], evaluation: Any = None, **more: Any) -> Any:
    content = {
        "sequence_length": 16, "batch": {"global_batch_size": 4},
        "sources": {"web": {"path": "web", **web}, "code": "code"},
        "stages": {"all": {"steps": 40, "mix": {"web": 3, "code": 1}}}, **more,
    }  # fmt: skip
    if evaluation is not None:
        content["evaluation"] = {"source": evaluation}
    return recipe_of(content, "run.yaml", Path())


def read_ids(opened: Any) -> set[int]:
    spans = opened.index.locate(np.arange(opened.index.num_samples))
    return {int(d) for d, s in zip(spans.document, spans.source, strict=True) if s == 0}


def test_training_never_reads_what_the_evaluation_does() -> None:
    rule = {"held_out": "1/10", "shuffle_name": "w"}
    opened = open_recipe(recipe({"subset": "1/3", **rule}, {"path": "web", **rule}))
    assert opened.validation is not None
    held = opened.validation.index(opened.validation.size.samples)
    spans = held.locate(np.arange(held.num_samples))
    tested, trained = set(spans.document.tolist()), read_ids(opened)
    assert tested
    assert trained
    assert not tested & trained
    tokens = [int(LENGTHS[sorted(ids)].sum()) for ids in (tested, trained)]
    pool = int(LENGTHS.sum()) - opened.validation.size.tokens
    assert 0 <= opened.validation.size.tokens - int(LENGTHS.sum()) / 10 < 40
    assert 0 <= opened.sources[0].size.tokens - pool / 3 < 40
    assert tokens[1] <= opened.sources[0].size.tokens


@for_each(
    ("web", "evaluation", "more"),
    [
        ({"held_out": "1/10"}, "web", {}),
        ({}, {"path": "web", "held_out": "1/10"}, {}),
        ({"held_out": "1/9"}, {"path": "web", "held_out": "1/10"}, {}),
        ({"held_out": "1/10", "subset_seed": 1}, {"path": "web", "held_out": "1/10"}, {}),
        ({"held_out": "1/10", "shuffle_name": "a"}, {"path": "web", "held_out": "1/10"}, {}),
        ({"held_out": "1/10"}, None, {"sources": {
            "web": {"path": "web", "held_out": "1/10"}, "code": "web"}}),
    ],
)  # fmt: skip
def test_shares_that_overlap_are_refused(web: Any, evaluation: Any, more: Any) -> None:
    made = recipe(web, evaluation, **more)
    for opening in (open_recipe, plan_recipe):
        with pytest.raises(InvalidArgument, match="reads documents that .* holds out"):
            opening(made)


@for_each(
    ("web", "message"),
    [
        ({"subset": 0}, "run.yaml: sources.web|source web: subset"),
        ({"subset": "9/8"}, "source web: subset"),
        ({"subset": "0x00000000000000ff"}, "subset 0x00000000000000ff is a threshold"),
        ({"held_out": 1}, "held_out"),
        ({"subset_seed": -1}, "subset_seed"),
        ({"subset": 0xFF}, "web.subset must be a share up to 1, or a threshold in quotes"),
        ({"subset": 2}, "web.subset must be a share up to 1, or a threshold in quotes, got 2"),
        ({"subset": True}, "subset must be"),
        ({"held_out": "0x0000000000000000"}, "leaves no document"),
        ({"subset_seed": 3}, "subset_seed 3: has no effect"),
        ({"path": "", "tokens": 900, "held_out": "0x00000000000000ff"}, "is a threshold"),
    ],
)
def test_settings_are_checked(web: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        recipe(web)


def test_a_threshold_pins_the_documents_of_a_corpus_that_grew() -> None:
    words = {"subset": "1/4", "held_out": "1/10", "shuffle_name": "w"}
    Path("run.yaml").write_text(yaml.safe_dump(to_mapping(recipe(words))))
    (shown,) = plan_json("--recipe", "run.yaml")["subsets"]
    pinned = {"subset": shown["threshold"], "held_out": shown["held_from"], "shuffle_name": "w"}
    before = read_ids(open_recipe(recipe(words)))
    assert read_ids(open_recipe(recipe(pinned))) == before
    more = np.random.default_rng(1).integers(2, 40, 600)
    write_corpus(Path("grown"), np.concatenate((LENGTHS, more)), dtype=np.uint16)
    grown = open_recipe(recipe({**pinned, "path": "grown"}))
    members: Any = grown.sources[0].epoch.documents  # type: ignore[attr-defined]
    ids = members.sequence_ids(np.arange(len(members)))
    old = open_recipe(recipe(pinned)).sources[0].epoch.documents  # type: ignore[attr-defined]
    np.testing.assert_array_equal(ids[ids < 900], old.sequence_ids(np.arange(len(old))))
    # YAML reads a threshold without quotes as a number
    text = f"{{path: web, shuffle_name: w, subset: {shown['threshold']}}}"
    with pytest.raises(InvalidArgument, match="in quotes"):
        recipe(yaml.safe_load(text))


def test_a_subset_is_the_same_by_flags_recipe_and_lock() -> None:
    common = ["--seq-length", 16, "--global-batch-size", 4, "--order", "epoch", "--eval-iters", 0]
    words = ["web", *common, "--train-iters", 50, "--subset", "1/3", "--subset-seed", 7]
    assert cli("lock", *words, "--out", "a.lock")[0] == 0
    Path("run.yaml").write_text(yaml.safe_dump({
        "sequence_length": 16, "batch": {"global_batch_size": 4},
        "sources": {"web": {"path": "web", "subset": "1/3", "subset_seed": 7}},
        "stages": {"all": {"steps": 50, "mix": {"web": 1}}},
    }))  # fmt: skip
    assert cli("lock", "run.yaml", "--out", "b.lock")[0] == 0
    one, other = read_lock("a.lock"), read_lock("b.lock")
    assert one.identity == other.identity
    assert one.content["subsets"]["train"]["index"]["members"]["seed"] == 7
    status, out, _ = cli("verify", "b.lock")
    assert status == 0
    assert "no findings" in out
    subsets = [plan_json(*each)["subsets"][0] for each in (words, ["--recipe", "run.yaml"])]
    assert subsets[0] == {**subsets[1], "source": "web"}
    (decided,) = plan_json("--lock", "b.lock")["subsets"]
    assert decided["threshold"] == subsets[0]["threshold"]
    assert (decided["tokens"], decided["share"]) == (subsets[0]["tokens"], "1/3")
    assert "subsets" not in plan_json("web", *common, "--train-iters", 50)
    status, _, err = cli("plan", *words[:5], "--order", "megatron", *words[-6:])
    assert status == 2
    assert "order is megatron" in err


def test_a_pair_that_is_given_twice_holds_out_the_same_or_is_refused() -> None:
    for ending in ("bin", "idx"):
        Path(f"link.{ending}").symlink_to(f"web.{ending}")
    common = ["--seq-length", 16, "--global-batch-size", 4, "--order", "epoch", "--train-iters", 9]
    common += ["--held-out", "1/10"]
    for words in (
        ["1", "web", "1", "web"],
        ["1", "web", "1", "link"],
        ["--train-data-path", "web", "--valid-data-path", "link"],
    ):
        status, _, err = cli("plan", *words, *common)
        assert status == 2
        assert "holds out" in err
    named = ["1", "web", "1", "link", *common, "--shuffle-names", "w", "w"]
    assert cli("plan", *named)[0] == 0
    with pytest.raises(InvalidArgument, match="holds out"):
        open_recipe(recipe({"held_out": "1/10"}, {"path": "link"}))


def test_an_evaluation_without_files_has_what_is_held_out() -> None:
    made = recipe(
        {"path": "", "tokens": 100_000, "held_out": "1/100"},
        {"tokens": 100_000, "held_out": "1/100"},
        stages={"all": {"steps": 40, "mix": {"web": 1}}},
        sources={"web": {"tokens": 100_000, "held_out": "1/100"}},
    )
    layout = plan_recipe(made)
    assert layout.validation is not None
    assert (layout.sizes[0].tokens, layout.validation.tokens) == (99_000, 1_000)


def test_plans_without_files_count_the_share() -> None:
    words = ["--seq-length", 16, "--global-batch-size", 4, "--order", "epoch", "--epochs", 1]
    found = plan_json("--tokens-per-epoch", 10_001, *words, "--subset", "1/4", "--held-out", "1/10")
    assert found["tokens_per_epoch"] == 2_250  # a quarter of 10,001 - 1,001


def state_after(batches: int, web: dict[str, Any], **more: Any) -> dict[str, Any]:
    loader = loader_of_recipe(open_recipe(recipe(web, **more)), micro_batch_size=4)
    for number, _ in enumerate(loader, 1):
        if number == batches:
            return json.loads(json.dumps(loader.state_dict()))
    raise AssertionError("the loader ended")


def test_a_state_goes_on_with_its_subset_alone() -> None:
    state = state_after(9, {"subset": "1/3"})
    whole = loader_of_recipe(open_recipe(recipe({"subset": "1/3"})), micro_batch_size=4)
    rest = [batch["tokens"] for batch in whole][9:]
    loader = loader_of_recipe(open_recipe(recipe({"subset": "1/3"})), micro_batch_size=4)
    loader.load_state_dict(state)
    for ours, theirs in zip(loader, rest, strict=True):
        np.testing.assert_array_equal(ours["tokens"], theirs)
    for web in ({"subset": "1/4"}, {}, {"subset": "1/3", "subset_seed": 1}, {"held_out": "1/9"}):
        loader = loader_of_recipe(open_recipe(recipe(web)), micro_batch_size=4)
        with pytest.raises(InvalidArgument, match="subsets"):
            loader.load_state_dict(state)
    part = next(each for each in state["recipe"]["sources"] if each["name"] == "web")
    part["members"]["last"] = "0x1"
    part["members"]["first"] = "0x2"
    with pytest.raises(FormatError, match="members of source 'web'"):
        loader_of_recipe(
            open_recipe(recipe({"subset": "1/3"})), micro_batch_size=4
        ).load_state_dict(state)


def exposures(scaled: Any, points: int) -> np.ndarray:
    """Epochs of each source before each part of a run."""
    layout = plan_recipe(scaled)
    ends = [layout.end_sample * part // points for part in range(1, points + 1)]
    read = np.zeros((points, len(layout.sizes)))
    for part, end in enumerate(ends):
        for source, _, _first, last in layout.ranges_drawn(0, end):
            read[part, source] = max(read[part, source], last)
    return read / [size.samples for size in layout.sizes]


def test_a_scaled_recipe_has_the_exposures_of_the_whole() -> None:
    rng = np.random.default_rng(4)
    for name, count in (("big", 60_000), ("small", 9_000)):
        write_corpus(Path(name), rng.integers(2, 30, count), dtype=np.uint16)
    whole = recipe_of({
        "sequence_length": 8, "batch": {"schedule": "0:16 80K:32"},
        "sources": {"big": "big", "small": {"path": "small", "order": "packed"}},
        "stages": {"a": {"steps": 9_001, "mix": {"big": 4, "small": 3}},
                   "b": {"epochs": "1/3", "mix": {"big": {"choose": 4_003}, "small": None}}},
        "evaluation": {"source": "web", "interval": 100},
        "skip": [{"documents": "ids", "source": "big", "from_step": 801}, {"steps": "3-9"}],
    }, "run.yaml", Path())  # fmt: skip
    Path("ids").write_text("1 2 3")
    scaled = scale_recipe(whole, "1/8")
    theirs, ours = exposures(whole, 100), exposures(scaled.recipe, 100)
    sample = 1 / np.array([size.samples for size in plan_recipe(scaled.recipe).sizes])
    assert (np.abs(ours - theirs) <= 0.005 * theirs[-1] + sample).all()
    changes = {name: (before, after) for name, before, after in scaled.changes}
    assert changes["stage a: steps"] == ("9001", "1125 ≈ 1125.1250")
    assert changes["stage b: choose big"] == ("4003", "500 ≈ 500.3750")
    assert changes["batch: sample of size 32"] == ("10000", "1250")
    assert changes["evaluation: interval"] == ("100", "13 ≈ 12.5000")
    assert changes["skip: from_step"] == ("801", "100 ≈ 100.1250")
    assert scaled.dropped == ("skip: steps 3-9",)
    assert {source.subset for source in scaled.recipe.sources} == {Fraction(1, 8)}
    again = scale_recipe(scaled.recipe, 0.5)
    assert {source.subset for source in again.recipe.sources} == {Fraction(1, 16)}


def test_sizes_of_stages_are_scaled_and_their_first_steps_dropped() -> None:
    def ramp(before: int) -> BatchSchedule:
        return BatchSchedule(stages=((0, 4), (before, 8)))

    mix = {"steps": 80, "mix": {"web": 3, "code": 1}}
    documents = {"documents": "ids", "source": "web"}
    whole = recipe({}, stages={"a": {**mix, "epoch_size": 804}, "b": mix}, skip=[documents])
    a, b = whole.stages
    whole = replace(
        whole,
        stages=(replace(a, batch=ramp(79), planned_samples=301), replace(b, first_step=80)),
    )
    scaled = scale_recipe(whole, "1/8")
    changes = {name: (before, after) for name, before, after in scaled.changes}
    assert changes["stage a: epoch_size"] == ("804", "101 ≈ 100.5000")
    assert changes["stage a: planned_samples"] == ("301", "38 ≈ 37.6250")
    assert changes["stage a: batch: sample of size 8"] == ("79", "10 ≈ 9.8750")
    assert scaled.dropped == ("stage b: first_step 80",)
    a, b = scaled.recipe.stages
    assert (a.epoch_size, a.planned_samples, a.batch) == (101, 38, ramp(10))
    assert (b.epoch_size, b.planned_samples, b.first_step) == (None, None, None)
    assert scaled.recipe.skip == whole.skip


@pytest.mark.parametrize("order", ["epoch", "window", "packed"])
def test_a_subset_of_a_source_without_tokens_is_refused_as_the_source_is(order: str) -> None:
    write_corpus(Path("empty"), [0, 0, 0], dtype=np.uint16)
    words = ["plan", "--data-path", "empty", "--order", order, "--seq-length", 16,
             "--global-batch-size", 4, "--epochs", 1]  # fmt: skip
    (status, out, err), subset = (cli(*words, *more) for more in ((), ("--subset", "1/2")))
    assert (status, out) == (2, "")
    assert "empty holds no tokens for this split; leave it out, or change --split" in err
    assert subset == (status, out, err)


def test_what_cannot_be_scaled_is_refused() -> None:
    name = {"shuffle_name": "w", "subset": "0x00ffffffffffffff"}
    for made, share, message in (
        (recipe({}), "0", "--scale"),
        (recipe({}), "0x00000000000000ff", "--scale"),
        (recipe(name), "1/4", "threshold"),
        (recipe({}, past={"steps": 9, "read": {"web": {"epochs": 1}}}), "1/4", "past"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            scale_recipe(made, share)


def test_the_command_writes_the_scaled_recipe() -> None:
    Path("in").mkdir()
    Path("in/run.yaml").write_text(yaml.safe_dump(
        {**to_mapping(recipe({})), "sources": {"web": "../web", "code": "../code"}}))  # fmt: skip
    status, out, err = cli("plan", "in/run.yaml", "--scale", "1/4")
    assert status == 0, err
    assert "wrote run-1-4.yaml" in out
    for said in ("left as they are", "stage all: steps", "code", "source code: its exposure"):
        assert said in out
    assert "source web: its exposure" not in out  # 0.1 % from that of the whole run
    small = read_recipe("run-1-4.yaml")
    assert {source.path for source in small.sources} == {"web", "code"}
    assert open_recipe(small).sources[1].size.tokens >= LENGTHS.sum() / 4
    assert cli("plan", "in/run.yaml", "--scale", "1/4")[0] == 2  # the file is there
    text = Path("run-1-4.yaml").read_text()
    status, out, _ = cli("plan", "in/run.yaml", "--scale", "1/4", "--print-config", "recipe")
    assert status == 0
    assert yaml.safe_load(out)["stages"] == yaml.safe_load(text)["stages"]
    assert yaml.safe_load(out)["sources"]["web"]["subset"] == "1/4"
    printed = ("plan", "in/run.yaml", "--scale", "1/4", "--print-config", "recipe", "--check")
    assert cli(*printed)[0] == 1
    found = plan_json("in/run.yaml", "--scale", "1/4", "--out", "in/small.yaml")
    assert found["scale"]["share"] == "1/4"
    assert found["recipe"] == "in/small.yaml"
    assert read_recipe("in/small.yaml").sources[1].path == "in/../web"
    for words, message in (
        (["web", "--scale", "1/4", "--seq-length", 16], "--scale is of a recipe"),
        (["in/run.yaml", "--out", "x"], "--out is the file of a scaled recipe"),
        (["in/run.yaml", "--overwrite"], "--overwrite replaces it"),
        (["in/run.yaml", "--scale", "1/4", "--balance"], "--scale is of a recipe alone"),
        (["in/run.yaml", "--scale", "1/4", "--mix-bounds"], "--scale is of a recipe alone"),
        (["in/run.yaml", "--scale", "1/4", "--print-config", "recipe", "--out", "x"], "--out"),
        (["in/run.yaml", "--scale", "1/4", "--print-config", "recipe", "--overwrite"], "--out"),
        (["--state", "x.json", "--scale", "1/4"], "leave --lock, --state"),
    ):
        status, _, err = cli("plan", *words)
        assert status == 2
        assert message in err
