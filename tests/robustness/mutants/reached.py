"""Tests that reach a line, and how long each takes: one run of the tests under coverage.py.

As a pytest plugin it gives each test a context of its own. Processes that a test starts are counted
for the test, by the variable that pytest sets.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from coverage import Coverage

_SETTINGS = """
[run]
data_file = {folder}/{data.name}
parallel = true
branch = {branches}
core = {core}
relative_files = true
source = {root}/megaindex
context = ${{PYTEST_CURRENT_TEST-}}
concurrency = multiprocessing,thread
patch = subprocess,_exit
disable_warnings = no-sysmon-context,no-data-collected,module-not-measured
    already-imported,trace-changed
[paths]
source =
    megaindex
    */megaindex
"""
ROOT = Path(__file__).parents[3]
REACHED = ROOT / "build/mutants-reached.data"
REACHED_SLOWLY = ROOT / "build/mutants-slow.data"
_LONG = ("fuzz", "limits", "simulation", "soak")  # tests of many minutes
_PHASE = re.compile(r" \((setup|call|teardown)\)$")
_FOLDER = "MEGAINDEX_MUTANTS_FOLDER"  # variable: where processes of tests write times
_times: dict[str, float] = {}
_failed: set[str] = set()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    from coverage import Coverage

    measured = Coverage.current()
    assert measured is not None
    measured.switch_context(item.nodeid)
    if sys.version_info >= (3, 12):
        sys.monitoring.restart_events()  # each line is reported once until then
    began = time.perf_counter()
    try:
        return (yield)
    finally:
        _times[item.nodeid] = time.perf_counter() - began
        measured.switch_context("")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.outcome != "passed":
        _failed.add(report.nodeid)


def pytest_sessionfinish() -> None:
    passed = {name: spent for name, spent in _times.items() if name not in _failed}
    path = Path(f"{os.environ[_FOLDER]}/{os.getpid()}.json")
    path.write_text(json.dumps(passed))


def collect(data: Path, root: Path, jobs: int, *, branches: bool, slow: bool = False) -> None:
    """Bring ``data`` and the times of tests beside it up to date, of the slow tests or the others.

    All of them are run where there is no data, or code of the package has changed since; otherwise
    the test files that have changed. Without branches, and from Python 3.12 on, this takes little
    longer than the tests.
    """
    date = data.stat().st_mtime if data.exists() else 0
    changed = [
        str(path.relative_to(root))
        for path in sorted(root.glob("tests/**/test_*.py"))
        if path.stat().st_mtime > date
    ]
    if any(path.stat().st_mtime > date for path in root.glob("megaindex/**/*.py")):
        data.unlink(missing_ok=True)
        changed = ["tests"]
    if not changed:
        return
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder, "settings")
        core = "sysmon" if sys.version_info >= (3, 12) and not branches else "ctrace"
        settings.write_text(
            _SETTINGS.format(folder=folder, data=data, root=root, branches=branches, core=core)
        )
        environment = {**os.environ, "PYTHONPATH": f"{root}:{root}/tests", _FOLDER: folder}
        ignored = [f"--ignore=tests/robustness/{name}" for name in _LONG]
        chosen = ["-m", "slow", *ignored] if slow else ["-m", "not slow"]
        for command in (
            ["run", "-m", "pytest", "-q", *chosen, "-n", str(jobs),
             "-p", "no:cacheprovider", "-p", "robustness.mutants.reached", *changed],
            ["combine", "-q", "--append", f"--data-file={data}", folder],
        ):  # fmt: skip
            full = [sys.executable, "-m", "coverage", command[0], f"--rcfile={settings}"]
            subprocess.run([*full, *command[1:]], cwd=root, env=environment, check=False)
        times = _times_of(data)
        if "tests" in changed:
            times.clear()
        times = {name: s for name, s in times.items() if name.partition("::")[0] not in changed}
        for path in Path(folder).glob("*.json"):
            times.update(json.loads(path.read_text()))
        data.with_suffix(".json").write_text(json.dumps(times))


def relative_coverage(data: Path) -> Coverage:
    """Return what ``collect`` has written, with names relative to the working directory."""
    from coverage import Coverage

    found = Coverage(data_file=str(data), config_file=False)
    found.set_option("run:relative_files", True)
    excluded = found.get_option("report:exclude_lines")
    found.set_option("report:exclude_lines", [*excluded, "raise NotImplementedError"])
    found.load()
    return found


def _times_of(data: Path) -> dict[str, float]:
    path = data.with_suffix(".json")
    times: dict[str, float] = json.loads(path.read_text()) if path.exists() else {}
    return times


class Reached:
    """What ``collect`` has written."""

    def __init__(self, data: Path) -> None:
        from coverage import CoverageData

        self._data = CoverageData(basename=str(data))
        self._data.read()
        self._lines: dict[str, dict[int, list[str]]] = {}
        self.times = _times_of(data)

    def tests(self, file: str, source: bytes, line: int) -> tuple[set[str], set[str]]:
        """Return the tests that reach the statement of a line, and those that reach its body."""
        if file not in self._lines:
            self._lines[file] = self._data.contexts_by_lineno(file)
        first, last, inside = statement(ast.parse(source), line)
        return self._of(file, first, last), self._of(file, inside, inside)

    def _of(self, file: str, first: int, last: int) -> set[str]:
        lines = self._lines[file].items()
        found = (name for number, names in lines if first <= number <= last for name in names)
        return {_PHASE.sub("", name) for name in found} & self.times.keys()


def statement(tree: ast.Module, line: int) -> tuple[int, int, int]:
    """Return the first and last line of a simple statement, of the head of a compound one, of the
    body of the function whose signature the line is in, or of the module outside of functions.

    The third number is the first line of the body of a compound statement; otherwise 0.
    """
    around = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.stmt | ast.excepthandler)
        and node.lineno <= line <= (node.end_lineno or line)
    ]
    around.sort(key=lambda node: (node.lineno, -(node.end_lineno or 0)))
    functions = [node for node in around if isinstance(node, ast.FunctionDef)]
    if not functions:
        return 1, sys.maxsize, 0
    inner = around[-1]
    body = getattr(inner, "body", None)
    if inner is functions[-1]:
        return functions[-1].body[0].lineno, inner.end_lineno or line, 0
    if body:
        return inner.lineno, max(inner.lineno, body[0].lineno - 1), body[0].lineno
    return inner.lineno, inner.end_lineno or line, 0
