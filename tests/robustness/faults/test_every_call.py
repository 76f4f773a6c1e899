"""A process ends, or a call fails, at each place where files change: old, none or new, no mixture.

``python tests/robustness/faults`` runs all of it and prints how many trials there were.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from robustness.faults.checks import check_failures, check_interrupts, check_kills
from robustness.faults.scenarios import INTERRUPTED, SCENARIOS, TRACED

# From Python 3.12 on, forking warns once anything has started a thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


# the slow tests strike all calls of a scenario
@pytest.mark.parametrize("step", [7, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_every_call(tmp_path: Path, name: str, step: int) -> None:
    states = check_kills(SCENARIOS[name], tmp_path, step=step)
    assert sum(states.values()) >= 1
    assert set(states) <= {"old", "none", "new"}


def test_provenance_goes_with_its_pair(tmp_path: Path) -> None:
    states = check_kills(TRACED["traced-overwriting"], tmp_path, first=3, step=5)
    assert set(states) <= {"old", "none", "new"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_provenance_goes_with_its_pair_at_every_call(tmp_path: Path, name: str) -> None:
    assert set(check_kills(TRACED[name], tmp_path)) <= {"old", "none", "new"}
    assert sum(check_failures(TRACED[name], tmp_path, "ENOSPC").values()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("error", ["ENOSPC", "EIO", "EROFS", "EACCES", "EIO on reading"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_failure_at_every_call(tmp_path: Path, name: str, error: str) -> None:
    assert sum(check_failures(SCENARIOS[name], tmp_path, error).values()) >= 3


# the slow test has each both before and after the call
@pytest.mark.slow_cases("writer-2-False")
@pytest.mark.parametrize(
    ("name", "step", "after"),
    [
        ("writer", 2, False),
        ("merge-overwriting", 5, True),
        ("split-in-two", 7, False),
        ("cache", 3, True),
    ],
)
def test_ctrl_c_leaves_nothing(tmp_path: Path, name: str, step: int, after: bool) -> None:
    found = check_interrupts(INTERRUPTED[name], tmp_path, after=after, step=step)
    assert sum(found.values()) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_at_every_call(tmp_path: Path, name: str, after: bool) -> None:
    assert sum(check_interrupts(INTERRUPTED[name], tmp_path, after=after).values()) >= 3
