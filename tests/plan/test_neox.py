"""Against what GPT-NeoX's own code built; tests/golden/neox_plan.json says how it was made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import plan_json
from support.corpora import write_corpus
from support.inputs import for_each
from support.neox_corpora import GOLDEN as PACKED
from support.neox_corpora import write_corpus_and_companions

from megaindex import NeoxDocumentsOrder
from megaindex.index.blend import request_weights
from megaindex.index.frameworks import framework_rules
from megaindex.plan import make_plan

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/neox_plan.json").read_text())


@for_each("case", GOLDEN["datasets"])
def test_one_dataset(case: dict[str, Any], tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", case["sizes"])
    plan = plan_json(
        "--data-path", tmp_path / "c", "--seq-length", case["seq_length"], "--seed", case["seed"],
        "--global-batch-size", 1, "--order", "neox", "--train-iters", case["num_samples"],
        "--coverage", "exact",
    )  # fmt: skip
    assert plan["num_epochs_built"] == case["num_epochs"]
    assert plan["samples_built"] == case["samples_built"]
    row = plan["datasets"][0]
    assert row["coverage_method"] == "built"
    shares = [row["coverage"].get(f"seen_{k}", 0.0) for k in range(len(case["served"]))]
    np.testing.assert_allclose(shares, np.array(case["served"]) / sum(case["served"]), atol=1e-15)


@for_each("case", GOLDEN["blends"])
def test_blend(case: dict[str, Any]) -> None:
    plan = plan_json(
        "--tokens-per-epoch", *case["tokens"], "--weights", *case["weights"],
        "--seq-length", case["seq_length"], "--global-batch-size", 1, "--order", "neox",
        "--train-iters", case["num_samples"],
    )  # fmt: skip
    assert plan["variance_buffer"] == 1.005
    rows = plan["datasets"]
    assert [row["requested"] for row in rows] == case["requested"]
    assert [row["epochs"] for row in rows] == case["num_epochs"]
    assert [row["built"] for row in rows] == case["built"]
    assert [row["drawn"] for row in rows] == case["drawn"]


@for_each("case", GOLDEN["splits"])
def test_split(case: dict[str, Any]) -> None:
    bounds = framework_rules("neox").split_bounds(case["split"], case["size"])
    assert [0, *[end for _, end in bounds]] == case["bounds"]


def test_paths_without_weights_are_weighed_alike() -> None:
    assert request_weights([1.0] * 3, framework_rules("neox")) == [1 / 3] * 3
    plan = plan_json(
        "--tokens-per-epoch", 5000, 5000, "--seq-length", 10, "--global-batch-size", 1,
        "--order", "neox", "--train-iters", 100,
    )  # fmt: skip
    assert [row["requested"] for row in plan["datasets"]] == [51, 51]


def test_whole_documents_are_read_once_as_far_as_the_loader_reads(tmp_path: Path) -> None:
    """Of 40 documents requested by the factor, the loader reads all but one of each source."""
    write_corpus(tmp_path / "c", [20] * 40)
    paths = {f"{split}_data_paths": [str(tmp_path / "c")] for split in ("train", "valid", "test")}
    labels = {name.replace("data", "label_data"): path for name, path in paths.items()}
    keys = {**paths, **labels, "pack_impl": "unpacked", "seq_length": 32, "train_batch_size": 1,
            "train_iters": 39, "eval_iters": 1}  # fmt: skip
    (tmp_path / "c.yml").write_text(json.dumps(keys))
    plan = plan_json("--neox-config", tmp_path / "c.yml")
    assert [row["requested"] for row in plan["datasets"] if row["split"] == "train"] == [40]
    assert plan["max_train_iters_without_repeat"] == 39


@pytest.mark.parametrize(("iterations", "over"), [(43, False), (44, True)])
def test_a_loader_starts_over_after_all_but_one_sample(
    iterations: int, over: bool, tmp_path: Path
) -> None:
    """An epoch has 44; the next epoch is not built, since no more are requested."""
    write_corpus(tmp_path / "c", [353])
    plan = make_plan(data_path=[str(tmp_path / "c")], order="neox", sequence_length=8,
                     global_batch_size=1, train_iters=iterations, split="100,0,0")  # fmt: skip
    assert plan.datasets[0].built == 44
    assert plan.max_train_iters_without_repeat == 43
    assert ("the loader starts over after 43 samples" in plan.check_failures) == over
    said = "loader starts over after 43 and serves 1 of them again: train 43 iterations"
    assert any(said in text for text in plan.warnings) == over


@pytest.mark.parametrize("split", ["80,10,10", "100,0,0"])
def test_parts_of_whole_documents_begin_at_the_first_one(split: str, tmp_path: Path) -> None:
    """GPT-NeoX shuffles the numbers 0 to n - 1 of a part of n documents."""
    write_corpus(tmp_path / "c", [20] * 40)
    keys = {"data_path": str(tmp_path / "c"), "split": split, "pack_impl": "pack_until_overflow",
            "seq_length": 16, "train_batch_size": 2, "train_iters": 5, "eval_iters": 1}  # fmt: skip
    (tmp_path / "c.yml").write_text(json.dumps(keys))
    plan = plan_json("--neox-config", tmp_path / "c.yml")
    said = [text for text in plan["warnings"] if "which is training data" in text]
    assert len(said) == (split == "80,10,10")


@for_each(
    "case",
    [
        case
        for case in PACKED["indices"]
        if case["pack_impl"] == "pack_until_overflow"
        and case["num_documents"] == len(case["sizes"])  # a plan of whole files
        and (case["prompts"] or not case["allow_chopped"])
    ],
)
def test_packings_of_which_neox_builds_no_index(case: dict[str, Any], tmp_path: Path) -> None:
    write_corpus_and_companions(tmp_path / "c", case["sizes"], case["prompts"])
    keys = {"train_batch_size": 1, "train_iters": case["num_samples"] - 1, "eval_iters": 1,
            "seq_length": case["sequence_length"], "seed": case["seed"],
            "pack_impl": case["pack_impl"], "allow_chopped": case["allow_chopped"]}  # fmt: skip
    for split in ("train", "valid", "test"):
        keys[f"{split}_data_paths"] = [str(tmp_path / "c")]
        if case["prompts"] is not None:
            keys[f"{split}_label_data_paths"] = [str(tmp_path / "c_label")]
    (tmp_path / "c.yml").write_text(json.dumps(keys))
    plan = plan_json("--neox-config", tmp_path / "c.yml")
    assert plan["datasets"][0]["requested"] == case["num_samples"]
    ends = "ends with an IndexError: the last document of a pass is left out of training"
    found = [text for text in plan["warnings"] if text.startswith("train, ") and ends in text]
    assert len(found) == (case.get("error") == "IndexError")


def test_the_last_document_of_every_pass_but_the_last_takes_part(tmp_path: Path) -> None:
    """Else GPT-NeoX reads beyond the pass; the last pass is read in part. NumPy shuffles the
    samples, then the documents of each pass, two of which are a sample each."""
    write_corpus(tmp_path / "c", [9, 10, 9])
    order = NeoxDocumentsOrder(pack_impl="pack_until_overflow", allow_chopped=False)
    errors = set()
    for seed, samples in ((0, 2), (0, 3), (1, 3), (2, 5), (3, 5)):
        plan = make_plan(data_path=[str(tmp_path / "c")], sequence_length=8, global_batch_size=1,
                         train_iters=samples, order=order, seed=seed)  # fmt: skip
        random, documents, last = np.random.RandomState(seed), np.arange(3), []
        random.shuffle(np.arange(samples))
        for _ in range((samples - 1) // 2):
            random.shuffle(documents)
            last.append(documents[-1])
        assert ("IndexError" in plan.rows("train")[0].error) == (1 in last)
        errors.add(1 in last)
    assert errors == {True, False}
