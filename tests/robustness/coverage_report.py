"""Lines and branches that tests reach, of the native headers and of Python packages.

``make coverage`` runs the C++ driver of ``make sanitize`` and the kernel tests on a build for gcov,
then all tests that are not slow under coverage.py, or those in files that changed since the last
such run. Each line that is not reached has a reason here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from robustness.mutants.reached import ROOT, collect, relative_coverage

DATA = ROOT / "build/coverage.data"
PACKAGES = ("index", "plan", "cache", "format")
REASONS = {
    "blending.hpp": "without AVX2: make sanitize",
    "blending_vector.hpp": "without AVX2: make sanitize",
    "epoch.hpp": "documents beyond int32: make slow",
    "gather.hpp": "without AVX2: make sanitize",
    "mapped_file.hpp": "arrays of a framework: tests/cache; a file cut short while it is mapped",
    "masks.hpp": "without AVX2: make sanitize",
    "packed_spans.hpp": "beyond int32: make slow; arrays of others: make fuzz",
    "pieces.hpp": "no code: the first line of a class",
    "shuffle.hpp": "without AVX2: make sanitize; a thread that waits long; beyond int32: make slow",
}
"""Why lines of a header are not reached here."""
_RACE = "another process removed or replaced it meanwhile: make simulate"
REASONS_OF_FUNCTIONS = {
    "cache/cache:fetch.build_and_publish": _RACE,
    "cache/claim:_is_zombie": "the process ended between two reads",
    "cache/claim:Claim._create": "another process was faster: make simulate",
    "cache/claim:_held": _RACE,
    "cache/claim:_is_left_over": _RACE,
    "cache/npy:MappedArrays.write": "64 MB or more: make slow",
    "cache/sidecar:_verified": _RACE,
    "format/pair:map_pair": _RACE,
    "index/draws:BlendDraws.end": "an assertion",
    "index/draws:GreedyDraws.longest": "an assertion",
}
"""Why lines of a function are not reached by the tests that are not slow."""
_COUNTED = ("num_statements", "covered_lines", "num_branches", "covered_branches")
_FLAGS = "-g -O1 --coverage -ffp-contract=off"
Counts = dict[str, dict[tuple[int, int], int]]
"""Executions by file, then by line and number of a branch, -1 for the line itself."""


def main() -> int:
    with tempfile.TemporaryDirectory() as folder:
        counts = native_counts(Path(folder))
    print(f"{'header':28} {'lines':>6} {'reached':>8} {'branches':>9} {'taken':>6}  not reached")
    for name in sorted(counts):
        print(row(name, counts[name]))
        if any(not count for key, count in counts[name].items() if key[-1] == -1):
            print(f"{'':28} {REASONS.get(name, 'NO REASON')}")
    print(row("all headers", {(n, *key): c for n in counts for key, c in counts[n].items()}))
    DATA.parent.mkdir(exist_ok=True)
    collect(DATA, ROOT, os.cpu_count() or 1, branches=True)
    print_packages()
    return 0


def print_packages() -> None:
    """Print lines and branches of each package, and the functions with lines not reached."""
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/report.json"
        measured = [f"megaindex/{package}/*" for package in PACKAGES]
        relative_coverage(DATA).json_report(outfile=path, include=measured)
        files: dict[str, Any] = json.loads(Path(path).read_text())["files"]
    print(f"\n{'package':28} {'lines':>6} {'reached':>8} {'branches':>9} {'taken':>6}")
    for package in PACKAGES:
        counts = Counter[str]()
        for file, found in files.items():
            if file.startswith(f"megaindex/{package}/"):
                counts.update({key: found["summary"].get(key, 0) for key in _COUNTED})
        lines, covered, branches, covered_branches = (counts[key] for key in _COUNTED)
        reached, taken = covered / lines, covered_branches / max(1, branches)
        print(f"{package:28} {lines:6} {reached:8.1%} {branches:9} {taken:6.1%}")
    print("\nlines not reached")
    for file, found in files.items():
        for function, part in found["functions"].items():
            if part["missing_lines"]:
                place = f"{file.removeprefix('megaindex/').removesuffix('.py')}:{function}"
                numbers = " ".join(map(str, part["missing_lines"]))
                print(f"{place} {numbers}: {REASONS_OF_FUNCTIONS.get(place, 'NO REASON')}")


def native_counts(folder: Path) -> Counts:
    """Return the executions of all headers by the driver and by the kernel tests."""
    compiler = os.environ.get("CXX", "g++")
    driver = folder / "driver"
    source = ROOT / "tests/robustness/sanitize/driver.cpp"
    flags = [*_FLAGS.split(), "-std=c++17", f"-I{ROOT / 'csrc'}", "-pthread"]
    subprocess.run([compiler, *flags, str(source), "-o", str(driver)], cwd=folder, check=True)
    subprocess.run([str(driver)], cwd=folder, check=True)
    build = ["build", "--build-base", f"{folder}/objects", "--build-lib", f"{folder}/lib"]
    settings = {"MEGAINDEX_DEV": "1", "MEGAINDEX_CXXFLAGS": _FLAGS, "MEGAINDEX_LDFLAGS": _FLAGS}
    environment = {**os.environ, **settings, "PYTHONPATH": f"{folder}/lib"}
    command = [sys.executable, "setup.py", "-q", *build]
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    # not `python -m pytest`, which would import the package of this folder
    pytest = [str(Path(sys.executable).with_name("pytest")), "tests/kernels", "-q", "-k"]
    subprocess.run([*pytest, "not numba"], cwd=ROOT, env=environment, check=True)
    return merged(folder.rglob("*.gcda"))


def merged(data: Iterable[Path]) -> Counts:
    """Return the executions of the headers in all files that gcov's runs have written."""
    counts: Counts = defaultdict(lambda: defaultdict(int))
    for path in data:
        command = ["gcov", "--branch-probabilities", "--json-format", "--stdout", path.name]
        text = subprocess.run(
            command, cwd=path.parent, check=True, capture_output=True, text=True
        ).stdout
        for line in text.splitlines():
            for file in json.loads(line)["files"]:
                if "csrc/megaindex/" in file["file"]:
                    _add(counts[Path(file["file"]).name], file["lines"])
    return counts


def _add(counts: dict[tuple[int, int], int], lines: list[dict[str, Any]]) -> None:
    """Add the executions of lines, and of branches that no exception takes."""
    for line in lines:
        counts[line["line_number"], -1] += line["count"]
        branches = [branch for branch in line["branches"] if not branch["throw"]]
        for number, branch in enumerate(branches):
            counts[line["line_number"], number] += branch["count"]


def row(name: str, counts: dict[Any, int]) -> str:
    """Return a line of the table."""
    lines = {key[:-1]: count for key, count in counts.items() if key[-1] == -1}
    branches = [count for key, count in counts.items() if key[-1] != -1]
    reached = sum(count > 0 for count in lines.values()) / max(1, len(lines))
    taken = sum(count > 0 for count in branches) / max(1, len(branches))
    missing = sorted(key[-1] for key, count in lines.items() if not count)
    text = " ".join(map(str, missing)) if name.endswith(".hpp") else f"{len(missing)} lines"
    return f"{name:28} {len(lines):6} {reached:8.1%} {len(branches):9} {taken:6.1%}  {text}"


if __name__ == "__main__":
    sys.exit(main())
