"""The fuzz targets without a fuzzer: their seeds, and blind mutations of them."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from robustness.fuzz.__main__ import TARGETS

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
NO_NATIVE = os.environ.get("MEGAINDEX_NO_NATIVE") == "1"


AVAILABLE = [target for target in TARGETS if target != "native" or not NO_NATIVE]


def fuzz(targets: list[str], runs: int, folder: Path) -> None:
    """Feed each target with so many inputs, in a process with limits of its own."""
    command = [sys.executable, str(HERE), *targets, "--blind", "--runs", str(runs)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "MEGAINDEX_NUM_THREADS": "2"}
    environment["OPENBLAS_NUM_THREADS"] = "1"  # its threads take address space, which is bounded
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = re.findall(r"fuzz (\w+): (\d+) executions, blind, 0 failures", done.stdout)
    assert found == [(target, str(runs)) for target in targets]
    assert list(folder.iterdir()) == []


def test_targets_survive_their_seeds_and_mutations(tmp_path: Path) -> None:
    fuzz(AVAILABLE, 100, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("target", AVAILABLE)
def test_a_target_survives_many_mutations(target: str, tmp_path: Path) -> None:
    fuzz([target], 100_000, tmp_path)


def test_every_native_function_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    if NO_NATIVE:
        pytest.skip("installed without the native core")
    monkeypatch.syspath_prepend(str(HERE))
    from native_targets import CALLS

    from megaindex.kernels import _native

    functions = {name for name in dir(_native) if callable(getattr(_native, name))}
    functions = {name for name in functions if not isinstance(getattr(_native, name), type)}
    assert functions == set(CALLS), "give each function of the native core a generator of calls"
