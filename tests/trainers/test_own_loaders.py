"""Trainers with their own loaders: each cell of the table in docs/trainers.md is a run."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from trainers.own_loaders import SAMPLES, STEP, STEPS_BEFORE, Rows
from trainers.test_trainers import CHECKPOINTS, MICRO, NEEDS, need, start

pytestmark = [
    pytest.mark.slow,  # `make trainers` runs them all
    pytest.mark.filterwarnings("ignore"),  # of the trainers
]
HERE = Path(__file__).parent
TABLE = (HERE.parents[1] / "docs/trainers.md").read_text()


def row(name: str) -> list[str]:
    """Return the cells of the only row of the page that begins with this cell."""
    (line,) = (line for line in TABLE.splitlines() if line.startswith(f"| {name} |"))
    return line.strip("| ").split(" | ")[1:]


def steps(rows: Rows) -> Iterator[frozenset[int]]:
    """Return the samples of each whole step."""
    share = STEP // len(rows)
    for begin in range(0, len(rows[0]) - share + 1, share):
        yield frozenset(chain.from_iterable(rank[begin : begin + share] for rank in rows))


def counts(rows: Rows) -> str:
    """Return how many samples are never served, and how often samples are served again."""
    served = list(chain.from_iterable(rows))
    missing, again = SAMPLES - len(set(served)), len(served) - len(set(served))
    words = [f"{missing} never"] * bool(missing) + [f"{again} again"] * bool(again)
    return ", ".join(words) or "each once"


def resumed(before: Rows, after: Rows) -> str:
    share = STEPS_BEFORE * STEP // len(before)
    return counts([rank[:share] for rank in before] + after)


@pytest.mark.parametrize("name", ["lightning", "accelerate", "huggingface"])
def test_trainers_with_their_own_loader(name: str, tmp_path: Path) -> None:
    """Two ranks train for an epoch, and four continue from its seventh step."""
    need(name)
    folder = str(tmp_path / "run")
    two = start(name, 2, **MICRO[2], folder=folder, own=True)
    four = start(
        name, 4, **MICRO[4], folder=folder, own=True, resume=f"{folder}/{CHECKPOINTS[name]}"
    )
    two_steps, four_steps = list(steps(two)), list(steps(four))
    # Lightning begins the epoch anew
    orders = [two_steps[begin : begin + STEPS_BEFORE] for begin in (0, STEPS_BEFORE)]
    same = "yes" if four_steps[:STEPS_BEFORE] in orders else "no"
    assert row(TITLES[name]) == [resumed(two, four), counts(two), same]


TITLES = {
    "lightning": "Lightning, `DataLoader(shuffle=True)`",
    "accelerate": "Accelerate, `skip_first_batches`",
    "huggingface": "Hugging Face Trainer, `train_dataset`",
    "torchtitan": "torchtitan, `HuggingFaceTextDataLoader`",
    "stateful_dataloader": "StatefulDataLoader, `StatefulDistributedSampler`",
    "distributed_sampler": "PyTorch, `DistributedSampler`",
    "torchft": "torchft, its `DistributedSampler`",
    "automodel": "NeMo Automodel, `MegatronPretraining`",
    "megatron": "Megatron-LM, a blend of two corpora",
    "neox": "GPT-NeoX, a blend of two corpora",
}


@pytest.mark.parametrize("name", list(TITLES)[3:])
def test_loaders_without_a_trainer(name: str, tmp_path: Path) -> None:
    """All ranks in one process: an epoch on two and on four, and a change from two to four."""
    if name == "neox" and "NEOX" not in os.environ:
        pytest.skip("NEOX does not name a checkout of GPT-NeoX whose helpers are compiled")
    if name in NEEDS:
        need(name)
    paths = os.pathsep.join(map(str, (HERE.parents[1], HERE.parent)))
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(HERE / "own_loaders.py"), name, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"},
        capture_output=True, text=True, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found: dict[str, Any] = json.loads((tmp_path / "result.json").read_text())
    two, four = found["whole"]["2"], found["whole"]["4"]
    after = found["resumed"]
    change = f"`{after}`" if isinstance(after, str) else resumed(two, after)
    epoch = counts(two)
    if name == "neox":
        assert list(found["served_exact"]) == ["1"]  # with install(exact=True)
        tokens = sum(found["served"].values())
        never, twice = (100 * found["served"][times] / tokens for times in "02")
        epoch = f"{never:.0f} % of the tokens never, {twice:.0f} % twice"
    elif name == "megatron":
        assert list(found["served"]) == ["1"]  # of the blend, each token once
    orders = [list(steps(rows))[:STEPS_BEFORE] for rows in (two, four)]
    assert row(TITLES[name]) == [change, epoch, "yes" if orders[0] == orders[1] else "no"]
