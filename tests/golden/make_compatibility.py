"""Writes compatibility.json: formats, cache keys, receipts and JSON of an earlier version.

    python tests/golden/make_compatibility.py

Run again only where a format, a key or a figure changes on purpose, and read the difference. The
cases are in tests/support/compatibility_runs.py; the file names the commit that it was made of.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import compatibility_runs as runs

import megaindex

TARGET = Path(__file__).with_name("compatibility.json")


def main() -> None:
    made_by = {
        "program": "megaindex",
        "version": f"{megaindex.__version__}, {_commit()}",
        "command": "python tests/golden/make_compatibility.py",
        "python": platform.python_version(),
        "numpy": version("numpy"),
        "megatron-core": version("megatron-core"),
    }
    parts = [f'"made_by": {json.dumps(made_by)}']
    for group in runs.GROUPS:
        with tempfile.TemporaryDirectory() as folder:
            found = runs.run(group, Path(folder))
            assert folder not in json.dumps(found), group
        cases = ",\n".join(f" {json.dumps(k)}: {_short(v)}" for k, v in found.items())
        parts.append(f'"{group}": {{\n{cases}\n}}')
    TARGET.write_text("{\n" + ",\n".join(parts) + "\n}\n")


def _short(value: object) -> str:
    return json.dumps(value, separators=(",", ":"))


def _commit() -> str:
    words = ["git", "-C", str(TARGET.parent), "rev-parse", "--short", "HEAD"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


if __name__ == "__main__":
    main()
