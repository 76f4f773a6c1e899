"""``python -m megaindex.plan``: the same as ``megaindex plan``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from megaindex.__main__ import main as run


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``megaindex plan`` and return the exit status."""
    return run(["plan", *(sys.argv[1:] if arguments is None else arguments)])


if __name__ == "__main__":
    sys.exit(main())
