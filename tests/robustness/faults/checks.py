"""What must hold after every trial: counted, and an AssertionError where it does not."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from robustness.faults.scenarios import CACHES, Tidying
from robustness.faults.trial import ERRORS, Outcome, fail, interrupt, kill, trials


def check_kills(scenario: Any, folder: Path, **calls: int) -> Counter[str]:
    """End the process at each call, or at those of `trials`; counts what readers then find."""
    states: Counter[str] = Counter()
    for outcome, place in trials(scenario, folder, kill, **calls):
        assert outcome.said == "killed", outcome
        states[scenario.state(place)] += 1
        _go_on(scenario, place, outcome)
    return states


def check_failures(scenario: Any, folder: Path, error: str, **calls: int) -> Counter[str]:
    """Let each call, or those of `trials`, fail with ``error``; counts what was raised and what
    readers then find."""
    seen: Counter[str] = Counter()
    reads = error.endswith(" on reading")
    act = fail(ERRORS[error.removesuffix(" on reading")])
    for outcome, place in trials(scenario, folder, act, reads=reads, **calls):
        kind, _, message = outcome.said.partition(": ")
        state = scenario.state(place)
        if kind == "done":  # it could do without that call
            assert state == "new" or "durable" in scenario.name, outcome
        else:
            assert kind in ("StorageError", "MissingFile"), outcome
            assert str(place) in message, outcome
            assert ";" in message, f"no remedy: {outcome}"
        _check_tidy(scenario, place, outcome)
        seen[f"{kind}, {state}"] += 1
        _go_on(scenario, place, outcome)
    return seen


def check_interrupts(scenario: Any, folder: Path, *, after: bool, step: int = 1) -> Counter[str]:
    """Raise KeyboardInterrupt right before or ``after`` each call of the main thread; counts what
    readers then find. Unlike a kill it leaves nothing: no temporary, and no half of a pair."""
    states: Counter[str] = Counter()
    how = {"after": after, "main_only": True}
    for outcome, place in trials(scenario, folder, interrupt, step=step, **how):
        assert outcome.said.startswith("untyped KeyboardInterrupt"), outcome
        assert scenario.strays(place) == [], f"{outcome}: left {scenario.strays(place)}"
        assert _halves(place) == [], f"{outcome}: left {_halves(place)} alone"
        states[scenario.state(place)] += 1
        _go_on(scenario, place, outcome)
    return states


def _halves(place: Path) -> list[str]:
    """Prefixes of which one file of a pair is there."""
    found = [path.with_suffix("") for path in place.iterdir() if path.suffix in (".bin", ".idx")]
    return sorted(prefix.name for prefix in found if found.count(prefix) == 1)


def _check_tidy(scenario: Any, place: Path, outcome: Outcome) -> None:
    """What a failed call left: at most what that very call, or a look at it, was to remove."""
    for name in scenario.strays(place):
        assert name in outcome.call, f"{outcome}: left {scenario.strays(place)}"


def _go_on(scenario: Any, place: Path, outcome: Outcome) -> None:
    """A later run succeeds, and where there are claims the next holder tidies up."""
    scenario.act(place)
    assert scenario.state(place) == "new", outcome
    if scenario.name in CACHES:
        Tidying(place).run()
        assert scenario.strays(place) == [], outcome
