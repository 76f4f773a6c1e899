"""Every trial of every scenario.

``python tests/robustness/faults [SCENARIO …]`` prints one line for each.
"""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from robustness.faults.checks import check_failures, check_interrupts, check_kills
from robustness.faults.scenarios import INTERRUPTED, SCENARIOS

INTERRUPTS = {"Ctrl-C before": False, "Ctrl-C after": True}
FAULTS = ("kill", "ENOSPC", "EIO", "EROFS", "EACCES", "EIO on reading", *INTERRUPTS)


def main(names: list[str]) -> None:
    logging.getLogger("megaindex").setLevel(logging.ERROR)
    total = 0
    for fault in FAULTS:
        for name in names or (INTERRUPTED if fault in INTERRUPTS else SCENARIOS):
            with tempfile.TemporaryDirectory() as folder:
                found = _found(fault, name, Path(folder).resolve())
            total += sum(found.values())
            print(f"{fault:15} {name:20} {sum(found.values()):4} trials: {_listed(found)}")
    print(f"{total} trials, every one as it must be")


def _found(fault: str, name: str, place: Path) -> Counter[str]:
    if fault in INTERRUPTS:
        return check_interrupts(INTERRUPTED[name], place, after=INTERRUPTS[fault])
    if fault == "kill":
        return check_kills(SCENARIOS[name], place)
    return check_failures(SCENARIOS[name], place, fault)


def _listed(found: Counter[str]) -> str:
    return "; ".join(f"{key}: {count}" for key, count in sorted(found.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
