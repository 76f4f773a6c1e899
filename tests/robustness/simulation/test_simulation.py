"""Simulated processes, disks and power losses; `make simulate` does the same for any time."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterator

import pytest
from robustness.simulation.calls import installed
from robustness.simulation.interleavings import Search
from robustness.simulation.planted import BUGS, Bug
from robustness.simulation.scenarios import SCENARIOS, simulate
from support.inputs import for_each

# few seeds find them; most have no other test
CHEAP = (
    "files are not synced",
    "a claim is not exclusive",
    "a short write is not completed",
    "a pair is mapped while it is replaced",
    "a set replaced in part by another writer is left",
)


@pytest.fixture(autouse=True)
def simulation(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    caplog.set_level(logging.CRITICAL, "megaindex")
    with installed():
        yield


@pytest.mark.parametrize(
    "seeds", [range(16), pytest.param(range(16, 3000), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", SCENARIOS)
def test_the_guarantees_hold(name: str, seeds: range) -> None:
    for seed in seeds:
        if seed % 32 == 0:
            gc.collect()
        world = simulate(name, seed)
        assert world.error is None, f"seed {seed}: {world.error!r}\n{world.transcript()}"


@pytest.mark.parametrize("name", SCENARIOS)
def test_a_seed_repeats(name: str) -> None:
    first, second = simulate(name, 5), simulate(name, 5)
    assert first.transcript() == second.transcript()
    assert first.files.tree() == second.files.tree()
    assert first.transcript() != simulate(name, 6).transcript()


@for_each("bug", BUGS)
def test_a_bug_can_be_planted(bug: Bug) -> None:
    """Its place is still in the code: the search itself is slow."""
    original = bug.function.__code__
    with bug.planted():
        assert bug.function.__code__ is not original
    assert bug.function.__code__ is original


@pytest.mark.parametrize(
    "bug",
    [pytest.param(b, marks=() if b.name in CHEAP else pytest.mark.slow, id=b.name) for b in BUGS],
)
def test_a_planted_bug_is_found(bug: Bug) -> None:
    assert bug.search() is not None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("builders", "kills"),
    [
        (2, 2),
        pytest.param(3, 0, marks=pytest.mark.slow),
        pytest.param(3, 1, marks=pytest.mark.slow),
    ],
)
def test_builders_exclude_each_other(builders: int, kills: int) -> None:
    """In every order of their calls."""
    search = Search(builders, kills)
    assert search.run()
    assert search.completed


@pytest.mark.slow
@pytest.mark.parametrize("kills", [0, 2])
def test_states_that_are_taken_for_one_go_on_alike(kills: int) -> None:
    """A search that tells apart all results of calls reaches no other states."""
    search, longer = Search(2, kills), Search(2, kills, by_history=True)
    assert search.run()
    assert longer.run()
    assert longer.runs > 10 * search.runs
    assert longer.states == search.states


@pytest.mark.slow
def test_the_search_finds_a_claim_that_is_not_exclusive() -> None:
    (bug,) = (bug for bug in BUGS if bug.name == "a claim is not exclusive")
    with bug.planted(), pytest.raises(AssertionError, match="two processes build|FileExists"):
        Search(2).run()
