"""Every trial of every scenario: ``python tests/faults [SCENARIO …]`` prints one line for each."""

from __future__ import annotations

import logging
import sys
import tempfile
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from faults.checks import check_failures, check_kills
from faults.scenarios import SCENARIOS

FAULTS = ("kill", "ENOSPC", "EIO", "EROFS", "EACCES", "EIO on reading")


def main(names: list[str]) -> None:
    logging.getLogger("megaindex").setLevel(logging.ERROR)
    total = 0
    for fault in FAULTS:
        for name in names or SCENARIOS:
            with tempfile.TemporaryDirectory() as folder:
                place = Path(folder).resolve()
                found = (
                    check_kills(SCENARIOS[name], place)
                    if fault == "kill"
                    else check_failures(SCENARIOS[name], place, fault)
                )
            total += sum(found.values())
            print(f"{fault:15} {name:20} {sum(found.values()):4} trials: {_listed(found)}")
    print(f"{total} trials, every one as it must be")


def _listed(found: Counter[str]) -> str:
    return "; ".join(f"{key}: {count}" for key, count in sorted(found.items()))


if __name__ == "__main__":
    main(sys.argv[1:])
