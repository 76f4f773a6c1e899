"""Writes locks/: locks of the runs of support/locked_runs.py, by an earlier version.

    python tests/golden/make_locks.py

Each names the version that wrote it. Run again only where the format changes on purpose, and keep
the locks of the versions before.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.command_line import cli
from support.locked_runs import RUNS, write_inputs

TARGET = Path(__file__).with_name("locks").resolve()


def main() -> None:
    TARGET.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder))
        os.chdir(folder)
        for name in ("recipe", "lengths", "past", "neox", "megatron", "skips"):
            status = cli("lock", *RUNS[name].split(), "--out", f"{name}.lock", "--tokens")
            assert status[0] == 0, status
            (TARGET / f"{name}.lock").write_bytes(Path(f"{name}.lock").read_bytes())


if __name__ == "__main__":
    main()
