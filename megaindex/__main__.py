"""``python -m megaindex``: the same as the ``megaindex`` command."""

from __future__ import annotations

import sys

from megaindex.cli import main as main

if __name__ == "__main__":
    sys.exit(main())
