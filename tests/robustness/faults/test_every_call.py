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


# the calls of a scenario are numbered from 1; the slow tests strike all of them
ALL = pytest.param({"first": 1, "step": 1}, id="all", marks=pytest.mark.slow)


@pytest.mark.parametrize("calls", [pytest.param({"first": 1, "step": 5}, id="some"), ALL])
@pytest.mark.parametrize("name", SCENARIOS)
def test_killed_at_every_call(tmp_path: Path, name: str, calls: dict[str, int]) -> None:
    states = check_kills(SCENARIOS[name], tmp_path, **calls)
    assert sum(states.values()) >= 1
    assert set(states) <= {"old", "none", "new"}


@pytest.mark.parametrize("calls", [pytest.param({"first": 2, "step": 5}, id="some"), ALL])
@pytest.mark.parametrize("name", SCENARIOS)
def test_a_full_disk_at_every_call(tmp_path: Path, name: str, calls: dict[str, int]) -> None:
    assert sum(check_failures(SCENARIOS[name], tmp_path, "ENOSPC", **calls).values()) >= 1


def test_provenance_goes_with_its_pair(tmp_path: Path) -> None:
    states = check_kills(TRACED["traced-overwriting"], tmp_path, first=3, step=5)
    assert set(states) <= {"old", "none", "new"}


@pytest.mark.slow
@pytest.mark.parametrize("name", TRACED)
def test_provenance_goes_with_its_pair_at_every_call(tmp_path: Path, name: str) -> None:
    assert set(check_kills(TRACED[name], tmp_path)) <= {"old", "none", "new"}
    assert sum(check_failures(TRACED[name], tmp_path, "ENOSPC").values()) >= 1


@pytest.mark.slow
@pytest.mark.parametrize("error", ["EIO", "EROFS", "EACCES", "EIO on reading"])
@pytest.mark.parametrize("name", SCENARIOS)
def test_other_failures_at_every_call(tmp_path: Path, name: str, error: str) -> None:
    assert sum(check_failures(SCENARIOS[name], tmp_path, error).values()) >= 3


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(
    ("name", "step"),
    [("writer", 2), ("merge-overwriting", 5), ("split-in-two", 7), ("cache", 3)],
)
def test_ctrl_c_leaves_nothing(tmp_path: Path, name: str, step: int, after: bool) -> None:
    found = check_interrupts(INTERRUPTED[name], tmp_path, after=after, step=step)
    assert sum(found.values()) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("name", INTERRUPTED)
def test_ctrl_c_at_every_call(tmp_path: Path, name: str, after: bool) -> None:
    assert sum(check_interrupts(INTERRUPTED[name], tmp_path, after=after).values()) >= 3
