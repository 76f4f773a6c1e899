"""Plans of Megatron-LM argument strings against vectors of its own programs.

golden/megatron_plan.json says of which versions, and how they were run.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import plan as cli
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.plan import make_plan

VECTORS = json.loads((Path(__file__).parents[1] / "golden" / "megatron_plan.json").read_text())
STOPS = ("stops with", "without end", "too small")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpora of test_megatron.py, which the vectors were made of."""
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(3)
    for name, count in zip("abcd", (300, 120, 60, 30), strict=True):
        write_corpus(folder / name, rng.integers(1, 40, count))
    return folder


def planned(root: Path, version: str, case: dict[str, Any]) -> dict[str, Any] | str:
    """The plan, or why it is refused."""
    args = re.sub(r"(?<= )([a-d])(?= |$)", rf"{root}/\1", case["args"])
    try:
        status, out, err = cli(
            "--megatron-args", args, "--world-size", case["world_size"], "--framework-version",
            version, "--coverage", "none", "--json",
        )  # fmt: skip
    except MegaIndexError as error:
        return str(error)
    return json.loads(out) if status == 0 else err


def as_built(plan: dict[str, Any]) -> list[list[list[int]] | None]:
    """Samples built and epochs of each source, None for a split without any."""
    splits = []
    for split in ("train", "valid", "test"):
        rows = [row for row in plan["datasets"] if row["split"] == split]
        splits.append([[row["built"], row["epochs"]] for row in rows] or None)
    return splits


@pytest.mark.parametrize("version", VECTORS["versions"])
def test_plans_are_what_megatron_builds(root: Path, version: str) -> None:
    outcomes = set()
    for case in VECTORS["versions"][version]["cases"]:
        plan = planned(root, version, case)
        if "error" in case:
            warned = isinstance(plan, str) or any(
                stop in text for text in plan["warnings"] for stop in STOPS
            )
            assert warned, case
            outcomes.add("stops")
            continue
        assert isinstance(plan, dict), (plan, case)
        assert plan["framework_version"] == version
        assert plan["train_iters"] == case["train_iters"], case
        if "--skip-train" not in case["args"]:
            assert plan["samples_consumed"] == case["consumed"], case
        built = as_built(plan)
        assert built == case["splits"], case
        evaluation = plan["evaluation"] or {}
        if built[1] is not None and case["sizes"][1] is None:
            eval_iters = case["eval_iters"]
            several = eval_iters if isinstance(eval_iters, list) else [eval_iters]
            assert evaluation["iterations"] == several, case
            outcomes.add("whole")
        elif built[1] is not None:
            assert evaluation["valid_samples"] == case["sizes"][1], case
        if built[2] is not None:
            assert evaluation["test_samples"] == case["sizes"][2], case
    assert outcomes == {"stops", "whole"}


PHASES = json.loads((Path(__file__).parents[1] / "golden" / "megatron_phases.json").read_text())


@for_each("run", PHASES["runs"])
def test_phases_are_built_and_resumed_as_by_megatron(run: dict[str, Any]) -> None:
    """Each launch asks for the samples of its phase, and reads on where the last one ended."""
    size, samples = run["global_batch_size"], run["train_samples"]
    given = {
        "tokens_per_epoch": 10_000, "sequence_length": 16, "global_batch_size": size,
        "train_samples": samples, "phase_transition_iterations": run["phases"],
    }  # fmt: skip
    served = 0
    for iteration, requested, first, count in run["launches"]:
        plan = make_plan(**given, consumed_samples=iteration * size)
        assert plan.train_iters == samples // size - iteration
        (phase,) = [each for each in plan.phases if each.begin <= iteration < each.end]
        assert iteration * size - phase.first_sample == first
        assert phase.samples >= first + count
        (row,) = [row for row in plan.rows("train") if row.phase == plan.phases.index(phase) + 1]
        assert row.requested == requested
        served += count
    assert served == plan.samples_consumed == sum(phase.samples for phase in plan.phases)


def test_phases_by_one_batch_size() -> None:
    given = {"tokens_per_epoch": 10_000, "sequence_length": 16, "train_samples": 100,
             "phase_transition_iterations": [3]}  # fmt: skip
    with pytest.raises(InvalidArgument, match="counts the samples of a phase by one global batch"):
        make_plan(**given, global_batch_size=8, micro_batch_size=4, data_parallel_size=1,
                  rampup_batch_size=[4, 4, 20])  # fmt: skip
    with pytest.raises(InvalidArgument, match="must be a multiple of the global batch size 8"):
        make_plan(**given, global_batch_size=8, consumed_samples=12)
