"""``pip install`` without a native core: it installs, says so once, and runs on Numba."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

USE = """
import logging; logging.basicConfig(format="%(message)s")
import megaindex
with megaindex.IndexedDatasetWriter("c") as writer:
    for _ in range(9):
        writer.add_document(range(40))
for _ in range(2):
    index = megaindex.build_index("c", sequence_length=16, seed=1)
print(megaindex.__file__, megaindex.backend(), index.shuffle_index.tolist())
"""


def install(target: Path, **environment: str) -> None:
    copy = target.parent / "source"
    ignored = shutil.ignore_patterns(".*", "*.so", "*.egg-info", "demo-data", "tests")
    shutil.copytree(ROOT, copy, ignore=ignored)
    shutil.rmtree(copy / "build", ignore_errors=True)  # of an earlier installation
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-index",
               "--no-build-isolation", "--disable-pip-version-check", "--target", str(target),
               str(copy)]  # fmt: skip
    subprocess.run(command, check=True, env={**os.environ, **environment}, capture_output=True)


@pytest.mark.parametrize(
    "environment",
    [{"MEGAINDEX_NO_NATIVE": "1"}, {"CC": "/bin/false", "CXX": "/bin/false", "MEGAINDEX_DEV": "0"}],
    ids=["left-out", "no-compiler"],
)
def test_without_a_native_core_it_installs_and_runs_on_numba(
    tmp_path: Path, environment: dict[str, str]
) -> None:
    install(tmp_path / "site", **environment)
    result = subprocess.run(
        [sys.executable, "-c", USE], check=True, capture_output=True, text=True, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site"), "MEGAINDEX_BACKEND": ""},
    )  # fmt: skip
    where, backend, arrays = result.stdout.strip().split(" ", 2)
    assert where.startswith(str(tmp_path))
    assert backend == "numba"
    assert result.stderr.count("runs on Numba") == 1
    import megaindex

    native = megaindex.build_index(str(tmp_path / "c"), sequence_length=16, seed=1)
    assert arrays == str(native.shuffle_index.tolist())
