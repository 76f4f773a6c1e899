"""The mutations of a few lines, the statements they are in, and those that change no result."""

from __future__ import annotations

import ast
import contextlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from robustness.mutants import __main__ as tool
from robustness.mutants.__main__ import all_mutants, draw_sample
from robustness.mutants.operators import cpp_edits, python_edits
from robustness.mutants.reached import statement

ROOT = Path(__file__).parents[3]

PYTHON = '''"""Text of 3 words."""
def f(a: int = 1) -> bool:
    assert a < 7
    if not a <= min(a, 2):
        raise ValueError(f"must be {a + 1}, got {3}")
    logger.info("%d", 5)
    a += 4
    return a in (6,)
class G(Protocol):
    def g(self, b: int = 5) -> None: ...
'''
CPP = """// at most 3 < 4
for (int64_t k = 0; k < n; ++k) {
  if (k == 1 && "5 < 6") return;
  total += values[k];
}
"""


def test_each_python_mutation_changes_what_a_line_does() -> None:
    source = PYTHON.encode()
    changed = [edit.applied_to(source).decode() for edit in python_edits(source)]
    lines = [
        (old.strip(), new.strip())
        for text in changed
        for old, new in zip(PYTHON.splitlines(), text.splitlines(), strict=False)
        if old != new
    ]
    assert {new for _, new in lines} >= {
        "def f(a: int = 2) -> bool:", "if a <= min(a, 2):", "if not a < min(a, 2):",
        "if not a <= max(a, 2):", "if not a <= min(a, 3):", "pass", "return a not in (6,)",
        "return a in (7,)",
    }  # fmt: skip
    kept = ('"""', "assert", "logger", "def g")  # texts, assertions, messages and protocols
    assert not [old for old, _ in lines if old.startswith(kept)]
    assert PYTHON not in changed


def test_each_cpp_mutation_changes_code_alone() -> None:
    changed = [edit.applied_to(CPP.encode()).decode() for edit in cpp_edits(CPP.encode())]
    for old, new in [
        ("k = 0;", "k = 1;"), ("k < n", "k <= n"), ("k == 1", "k != 1"), ("k == 1", "k == 2"),
        ("1 && ", "1 || "), ("total += values[k];", ";"),
        ('if (k == 1 && "5 < 6") return;', ";"),
    ]:  # fmt: skip
        changed.remove(CPP.replace(old, new, 1) if old != "k < n" else CPP.replace("k < n", new))
    assert changed == []


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        (1, (1, sys.maxsize, 0)),  # of the module
        (2, (3, 9, 0)),  # a parameter
        (4, (4, 4, 5)),
        (6, (5, 6, 0)),  # inside a message
        (7, (7, 7, 0)),
    ],
)
def test_a_line_is_reached_with_its_statement(line: int, lines: tuple[int, int, int]) -> None:
    source = PYTHON.replace("raise ValueError(", "raise ValueError(\n")
    assert statement(ast.parse(source), line) == lines


def test_lines_of_equivalent_mutants_are_in_the_code() -> None:
    rows = json.loads((ROOT / "tests/robustness/mutants/equivalent.json").read_text())
    for row in rows:
        assert row["old"] in (ROOT / row["file"]).read_text(), row["file"]
        assert row["new"] != row["old"]
        assert row["reason"]


def test_a_sample_stays_while_the_code_changes() -> None:
    mutants = all_mutants(["megaindex/io/*", "megaindex/cache/*"])
    sample = draw_sample(mutants, 40, seed=3)
    assert {mutant.package for mutant in sample} == {"io", "cache"}
    gone = [mutant for mutant in mutants if mutant not in sample[:20:4]]
    assert len([mutant for mutant in draw_sample(gone, 40, seed=3) if mutant in sample]) >= 35
    assert draw_sample(mutants[::-1], 40, seed=3) == sample
    assert draw_sample(mutants, 40, seed=4) != sample


class FailingTree:
    """Tests of numbers: some fail with the mutation, some always from the third test on."""

    def __init__(self, noticing: set[str], always: set[str]) -> None:
        self._noticing, self._always = noticing, always
        self._is_changed = False
        self._failed = ""

    @contextlib.contextmanager
    def changed(self, mutant: object) -> Iterator[bool]:
        self._is_changed = True
        yield True
        self._is_changed = False

    def test(self, tests: list[str], seconds: float) -> int:
        wrong = self._always & {*tests[2:]} | (self._noticing if self._is_changed else set())
        self._failed = next((name for name in tests if name in wrong), "")
        return int(self._failed != "")

    def failed(self) -> str:
        return self._failed


@pytest.mark.parametrize(
    ("noticing", "always", "expected", "left_out"),
    [
        ({"d"}, set(), ("killed", "d"), set()),
        (set(), {"c"}, ("survived", ""), {"c"}),  # the tests before it are needed to make it fail
        ({"d"}, {"c"}, ("killed", "d"), {"c"}),
        ({"f"}, {"d"}, ("killed", "f"), {"d"}),  # a slow one
    ],
)
def test_a_test_that_fails_without_the_mutation_notices_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, noticing: set[str], always: set[str],
    expected: tuple[str, str], left_out: set[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(tool, "tests_of", lambda mutant, reached: [*reached.times])
    reached: list[Any] = [
        SimpleNamespace(times=dict.fromkeys(names, 0.1)) for names in ("abcd", "ef")
    ]
    run = tool.Run([], tmp_path / "results", 60, reached)
    tree: Any = FailingTree(noticing, always)
    assert run._try(tree, all_mutants(["megaindex/io/*"])[0]) == expected
    assert run.unreliable == left_out
