"""Runs whose weights or splits depend on the version of Python, in locks, plans, caches and states.

``sum`` of doubles is compensated from Python 3.12 on, and GPT-NeoX divides weights and
splits by it.
"""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaindex import IndexedDatasetWriter, InvalidArgument, NeoxOrder, build_blend, make_plan
from megaindex.cli import main
from megaindex.index.frameworks import OWN_PYTHON_SUM, PYTHON_SUMS, sum_as
from megaindex.loader import Loader, MicroBatchSampler
from megaindex.lock import make_lock, open_run, read_lock, verify_lock

OTHER = {"plain": "compensated", "compensated": "plain"}[OWN_PYTHON_SUM]
NAMES = ("a", "b", "c")
SIZES = {"sequence_length": 8, "global_batch_size": 8, "train_iters": 600, "eval_iters": 0}
BLEND = {"order": "neox", "data_path": [0.6, "a", 0.3, "b", 0.1, "c"], "split": "1,0,0", **SIZES}
SPLIT = {"order": "megatron-legacy", "data_path": "a", "split": "0.6,0.3,0.1", **SIZES}
SAME = {**BLEND, "data_path": [0.5, "a", 0.25, "b", 0.25, "c"], "split": "0.5,0.25,0.25"}


@pytest.fixture(autouse=True)
def corpora(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in NAMES:
        with IndexedDatasetWriter(name, dtype="uint16") as writer:
            for length in (40,) * 405:
                writer.add_document(np.zeros(length))


def train_of(rule: str | None, settings: Mapping[str, Any]) -> dict[str, Any]:
    train: dict[str, Any] = make_lock(**settings, python_sum=rule).content["subsets"]["train"]
    return train


def test_compensated_sums_are_exact_where_plain_ones_round() -> None:
    for values, plain, compensated in (
        ([0.1] * 10, 0.9999999999999999, 1.0),
        ([1e16, 1.0, -1e16], 0.0, 1.0),
        ([1.0, 1e16, -1e16], 0.0, 1.0),
        ([2**53, 1, 1, 0.0], 2.0**53 + 2, 2.0**53 + 2),  # integers are summed as integers
        ([1e308, 1e308, -1e308], math.inf, math.inf),
        ([], 0, 0),
    ):
        assert (sum_as("plain", values), sum_as("compensated", values)) == (plain, compensated)


def test_sums_are_those_of_python() -> None:
    rng = np.random.default_rng(5)
    for _ in range(2000):
        values = [*np.round(rng.random(rng.integers(1, 9)), 3).tolist(), 1, 10.0 ** rng.integers(9)]
        rng.shuffle(values)
        values = [int(v) if v == 1 else float(v) for v in values]
        assert sum_as(OWN_PYTHON_SUM, values) == sum(values)
    for weights in ([0.6, 0.3, 0.1], [0.1] * 10):
        assert sum_as("plain", weights) == 0.9999999999999999
        assert sum_as("compensated", weights) == 1.0
    assert sum_as("compensated", [1e308, 1e308]) == sum_as("plain", [1e308, 1e308]) == np.inf


@pytest.mark.parametrize("settings", [BLEND, SPLIT])
def test_a_lock_opens_under_any_python(settings: dict[str, Any]) -> None:
    samples = set()
    for rule in PYTHON_SUMS:
        lock = make_lock(**settings, python_sum=rule)
        lock.write(f"{rule}.lock")
        train = read_lock(f"{rule}.lock").content["subsets"]["train"]
        opened = open_run(f"{rule}.lock")
        assert opened.index.num_samples >= train["samples"]
        report = verify_lock(f"{rule}.lock", whole=True)
        assert report.is_clean
        samples.add(train["receipts"]["total"])
    assert len(samples) == 2
    assert train_of(None, settings) == train_of(OWN_PYTHON_SUM, settings)


def test_a_run_that_depends_on_no_sum_has_one_lock() -> None:
    locks = [make_lock(**SAME, python_sum=rule).content for rule in PYTHON_SUMS]
    assert locks[0] == locks[1]


@pytest.mark.parametrize("settings", [BLEND, SPLIT, SAME])
def test_a_plan_names_the_interpreters_part(settings: dict[str, Any]) -> None:
    named = [text for text in make_plan(**settings).warnings if f"--python-sum {OTHER}" in text]
    assert len(named) == (settings is not SAME)


def test_python_sum_is_a_flag_of_the_orders_that_depend_on_it() -> None:
    flags = "--data-path .6 a .3 b .1 c --seq-length 8 --global-batch-size 8 --train-iters 600"
    assert main(["lock", *flags.split(), "--split", "1,0,0", "--eval-iters", "0", "--order", "neox",
                 "--python-sum", OTHER, "--out", "run.lock"]) == 0  # fmt: skip
    assert read_lock("run.lock").content["subsets"]["train"] == train_of(OTHER, BLEND)
    with pytest.raises(
        InvalidArgument, match=r"python_sum must be one of plain, compensated, got .new."
    ):
        NeoxOrder(python_sum="new")  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match=r"python_sum is a setting of order neox"):
        make_plan(**{**BLEND, "order": "megatron"}, python_sum="plain")


def blend(rule: Any, weights: list[float], **more: Any) -> Any:
    order = NeoxOrder(python_sum=rule)
    return build_blend(
        NAMES, weights=weights, num_samples=4000, order=order, sequence_length=8, **more
    )


def test_a_cache_serves_each_python_its_own_blend() -> None:
    weights, split = [0.6, 0.3, 0.1], "0.6,0.3,0.1"
    expected = {rule: blend(rule, weights, split=split) for rule in PYTHON_SUMS}
    assert len({index.num_samples for index in expected.values()}) == 2
    for rule in PYTHON_SUMS * 2:
        found = blend(rule, weights, split=split, cache_dir="cache")
        np.testing.assert_array_equal(found.dataset_index, expected[rule].dataset_index)
        every = np.arange(4000)
        for ours, theirs in zip(found.locate(every), expected[rule].locate(every), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_a_state_of_another_python_is_refused_and_loads_with_its_sum() -> None:
    """Both blends draw the first 100 samples alike."""
    indices = {rule: blend(rule, [0.69, 0.3, 0.01]) for rule in PYTHON_SUMS}
    differ = indices["plain"].dataset_index != indices["compensated"].dataset_index
    assert int(np.argmax(differ)) == 100
    loaders = {}
    for rule, index in indices.items():
        sampler = MicroBatchSampler(
            num_samples=4000, global_batch_size=8, micro_batch_size=8, data_parallel_rank=0,
            data_parallel_size=1,
        )  # fmt: skip
        loaders[rule] = Loader(index, sampler)
    own, other = loaders[OWN_PYTHON_SUM], loaders[OTHER]
    next(iter(other))
    state = other.state_dict()
    with pytest.raises(InvalidArgument, match="python_sum"):
        own.load_state_dict(state)
    other.load_state_dict(state)


def python_of_the_other_sum() -> str | None:
    """Return an interpreter of the path, or of pyenv, whose sum is the other one."""
    pyenv = Path("~/.pyenv/versions").expanduser().glob("*/bin")
    places = [*map(str, pyenv), os.environ.get("PATH", "")]
    names = ("python3.12", "python3.13") if OTHER == "compensated" else ("python3.10", "python3.11")
    found = (shutil.which(name, path=os.pathsep.join(places)) for name in names)
    return next(filter(None, found), None)


@pytest.mark.slow
def test_locks_of_one_python_open_under_another(tmp_path: Path) -> None:
    python = python_of_the_other_sum()
    if python is None:
        pytest.skip("there is no other Python")
    tree = Path(__file__).parents[2]
    kept = shutil.ignore_patterns("*.so", "__pycache__", "build")
    for name in ("megaindex", "csrc"):
        shutil.copytree(tree / name, tmp_path / "tree" / name, ignore=kept)
    for name in ("setup.py", "pyproject.toml", "README.md", "MANIFEST.in", "LICENSE"):
        shutil.copy(tree / name, tmp_path / "tree")
    other = tmp_path / "venv" / "bin" / "python"
    no_core = {**os.environ, "MEGAINDEX_NO_NATIVE": "1"}
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True)
    subprocess.run(
        [other, "-m", "pip", "install", "-q", tmp_path / "tree"], check=True, env=no_core
    )

    def under_the_other(line: str) -> None:
        code = "from megaindex.lock import make_lock, open_run, verify_lock; " + line
        subprocess.run([other, "-c", code], check=True)

    for number, settings in enumerate((BLEND, SPLIT)):
        make_lock(**settings).write(f"own{number}.lock")
        under_the_other(f"assert verify_lock('own{number}.lock', whole=True).is_clean")
        under_the_other(f"make_lock(**{settings}).write('other{number}.lock')")
        assert verify_lock(f"other{number}.lock", whole=True).is_clean
        theirs = read_lock(f"other{number}.lock").content["subsets"]["train"]
        assert theirs == train_of(OTHER, settings)
        assert theirs != train_of(None, settings)
