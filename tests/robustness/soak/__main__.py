"""Random operations against a model for some time.

``python tests/robustness/soak --seconds 3600``
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from robustness.soak.running import soak


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=int(time.time()))
    options = parser.parse_args()
    logging.getLogger("megaindex").setLevel(logging.CRITICAL)
    print(f"soak: seed {options.seed}, {options.seconds:g} seconds", flush=True)
    counts: Counter[str] = Counter()
    end, world = time.monotonic() + options.seconds, 0
    while time.monotonic() < end:  # a world a minute, so that none grows without bound
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            seconds = min(60.0, end - time.monotonic())
            counts += soak(Path(folder).resolve(), options.seed + world, seconds=seconds)
        world += 1
    for name, count in sorted(counts.items()):
        print(f"{name:36} {count:10,}")
    print(f"{world} worlds, no divergence")


if __name__ == "__main__":
    main()
