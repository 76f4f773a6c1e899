"""Runs of GPT-NeoX that end before their first step, in plans and elsewhere."""

from __future__ import annotations

import contextlib
import json
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex.audit import run_of_settings
from megaindex.errors import InvalidArgument
from megaindex.plan import make_plan

BATCHES: tuple[dict[str, Any], ...] = (
    {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2},
    {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 1},
    {"train_batch_size": 4},
)


@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_validation_loader_without_a_micro_batch_stops_the_run(
    tmp_path: Path, monkeypatch: Any, step: int
) -> None:
    """The plan says so, and the run is refused; with one micro batch it is neither."""
    monkeypatch.chdir(tmp_path)
    for name, tokens in (("web", 650), ("none", 10), ("one", 18), ("two", 40), ("nine", 150)):
        write_corpus(tmp_path / name, np.full(tokens // 5, 5))
    lengths: tuple[dict[str, Any], ...] = ({"train_epochs": 2}, {"train_iters": 4})
    data = [
        *({"train_data_paths": ["web"], "valid_data_paths": [*valid], "test_data_paths": ["web"]}
          for valid in (("none",), ("one",), ("two",), ("nine",), ("one", "nine"),
                        ("none", "nine"))),
        *({"data_path": "web", "split": split} for split in ("98,1,1", "94,4,2", "80,20,0")),
    ]  # fmt: skip
    found = set()
    for number, (length, batch, paths, iters, exact) in enumerate(
        [*product(lengths, BATCHES, data, (0, 1), ("", "exact=True"))][::step]
    ):
        if exact and "train_iters" in length:
            continue
        keys = {**length, **batch, **paths, "eval_iters": iters, "eval_interval": 2,
                "seq_length": 16, "data_impl": "mmap"}  # fmt: skip
        file = f"{number}.yml"
        Path(file).write_text(f"# megaindex.adapters.neox.install({exact})\n{json.dumps(keys)}")
        plan = make_plan(neox_config=[file], world_size=1)
        stops = any(text.startswith("valid: GPT-NeoX ends") for text in plan.warnings)
        stops |= plan.caution.startswith("valid: GPT-NeoX ends")
        refused = pytest.raises(InvalidArgument, match="less than one micro batch")
        with refused if stops else contextlib.nullcontext():
            run_of_settings(neox_config=[file], world_size=1)
        found.add(stops)
    assert found == {False, True}
