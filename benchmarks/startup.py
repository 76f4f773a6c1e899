"""Benchmark of starting the interpreter with the package, and of ``megaindex.plan`` with files.

Each run is a process of its own; its time includes the interpreter's.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from benchmarks.corpora import write_linked
from benchmarks.timing import Comparison, alternate

BARE = ("-c", "pass")
NUMPY = ("-c", "import numpy")
PLANNED = {"one file": 1, "100 files": 100, "2,000 files": 2000}


def compare(what: str, directory: Path, rounds: int) -> Comparison:
    """Time ``import`` against a bare interpreter, a plan of `PLANNED` against importing numpy."""
    if what == "import":
        ours, peer = ("-c", "import megaindex"), BARE
    else:
        ours, peer = _plan(directory, PLANNED[what]), NUMPY
    seconds = alternate(lambda: _run(ours), lambda: _run(peer), rounds)
    name = "import megaindex" if what == "import" else f"megaindex.plan of {what}"
    return Comparison(
        what=f"{name}, against python {' '.join(peer)}",
        ours=seconds[0],
        peer=seconds[1],
        items=1,
        unit="start",
        output_bytes=1 << 20,
    )


def _plan(directory: Path, sources: int) -> tuple[str, ...]:
    prefixes = write_linked(directory / f"startup-of-{sources}", sources, 10_000)
    shape = ("--seq-length", "2048", "--micro-batch-size", "4", "--data-parallel-size", "8")
    length = ("--gradient-accumulation-steps", "1", "--epochs", "1")
    return ("-m", "megaindex.plan", "--data-path", *prefixes, *shape, *length)


def _run(arguments: tuple[str, ...]) -> None:
    subprocess.run([sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL)
