"""Simulated processes, disks and power losses under the code that publishes files, for some time.

``python tests/robustness/simulation --seconds 3600`` runs new seeds; ``--seed 7 --scenario pairs``
runs one and prints its calls; ``--planted`` searches the planted bugs, ``--interleavings`` all
orders of the calls of two builders, then of three, any of which may be killed.
"""

from __future__ import annotations

import argparse
import gc
import logging
import sys
import time
import traceback
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from robustness.simulation.calls import installed
from robustness.simulation.interleavings import Search
from robustness.simulation.planted import BUGS
from robustness.simulation.scenarios import SCENARIOS, simulate
from robustness.simulation.world import World


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=60.0, help="of the clock")
    parser.add_argument("--first", type=int, default=int(time.time()) << 12, help="first seed")
    parser.add_argument("--seed", type=int, help="run this seed alone and print its calls")
    parser.add_argument("--scenario", choices=SCENARIOS, help="only this one")
    parser.add_argument("--planted", action="store_true", help="search the planted bugs")
    parser.add_argument("--interleavings", action="store_true", help="of builders")
    options = parser.parse_args()
    logging.getLogger("megaindex").setLevel(logging.CRITICAL)
    names = [options.scenario] if options.scenario else list(SCENARIOS)
    with installed():
        if options.planted:
            return _planted()
        if options.interleavings:
            return _interleavings(options.seconds)
        if options.seed is not None:
            return max(_report(name, options.seed, always=True) for name in names)
        return _seeds(names, options.first, options.seconds)


def _seeds(names: list[str], first: int, seconds: float) -> int:
    """Run seeds from ``first`` on until one fails or the time is over."""
    begin, counts, calls, seed = time.monotonic(), Counter[str](), 0, first
    while time.monotonic() - begin < seconds:
        for name in names:
            world = simulate(name, seed)
            calls += len(world.trace)
            counts.update([name, *(f"  with {kind}" for kind in world.happened)])
            if world.error is not None:
                return _report(name, seed)
        if seed % 32 == 0:
            gc.collect()
        seed += 1
    took = time.monotonic() - begin
    for name, count in sorted(counts.items()):
        print(f"{name:20} {count:12,}")
    total = sum(counts[name] for name in names)
    print(
        f"seeds {first} to {seed - 1}: {total:,} schedules, {calls:,} calls, nothing found; "
        f"{total / took * 3600:,.0f} schedules an hour"
    )
    return 0


def _report(name: str, seed: int, *, always: bool = False) -> int:
    world: World = simulate(name, seed)
    if always or world.error is not None:
        print(world.transcript())
    if world.error is None:
        return 0
    traceback.print_exception(world.error)
    print(f"{name}: {world.error}\nto repeat: make simulate SEED={seed} SCENARIO={name}")
    return 1


def _planted() -> int:
    missed = 0
    for bug in BUGS:
        seed = bug.search()
        missed += seed is None
        text = "NOT FOUND" if seed is None else f"found by {seed}"
        print(f"{bug.name:56} {bug.scenario:13} {text}", flush=True)
    return int(missed > 0)


def _interleavings(seconds: float) -> int:
    """Search all of two builders and of three, of which some may be killed, for some time."""
    end = time.monotonic() + seconds
    for builders, kills in ((2, 2), (3, 0), (3, 1), (3, 2), (3, 3)):
        search = Search(builders, kills)
        while not search.run(search.runs + 100) and time.monotonic() < end:
            pass
        print(
            f"{builders} builders, {kills} killed: {search.runs:,} runs, {len(search.states):,} "
            f"states, nothing found; {'not all' if search.waiting else 'all'} interleavings",
            flush=True,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
