"""Real file systems: full, read-only, and overlaid; where this user may mount them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FULL_AND_FIXED = """
mkdir "$1/small" "$1/fixed" && mount -t tmpfs -o size=2m none "$1/small" &&
mount -t tmpfs -o size=2m,ro none "$1/fixed" && exec "$2" "$3/on_mounts.py" "$1"
"""
OVERLAY = """
mount -t tmpfs none "$1" && mkdir "$1/lower" "$1/upper" "$1/work" "$1/cache" &&
mount -t overlay -o "lowerdir=$1/lower,upperdir=$1/upper,workdir=$1/work" none "$1/cache" &&
exec "$2" -m pytest -q -p no:cacheprovider --basetemp="$1/cache/t" -k "builds or replaced" \\
    "$3/test_races.py"
"""


def run_with_mounts(script: str, folder: Path) -> None:
    """The script in a mount namespace of its own, which ends with it."""
    unshare = shutil.which("unshare")
    command = [str(unshare), "-m", "sh", "-c"]
    trial = [*command, 'mount -t tmpfs none "$0"', str(folder)]
    if not unshare or subprocess.call(trial, stderr=subprocess.DEVNULL):
        pytest.skip("mounting is not permitted")
    done = subprocess.run(
        [*command, script, "sh", str(folder), sys.executable, str(HERE)], capture_output=True,
        text=True, timeout=600, check=False, cwd=HERE.parents[2],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE.parents[2]), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_a_full_and_a_read_only_file_system(tmp_path: Path) -> None:
    run_with_mounts(FULL_AND_FIXED, tmp_path)


@pytest.mark.slow
def test_races_on_an_overlay(tmp_path: Path) -> None:
    if "overlay" not in Path("/proc/filesystems").read_text():
        pytest.skip("this kernel has no overlay file system")
    run_with_mounts(OVERLAY, tmp_path)
