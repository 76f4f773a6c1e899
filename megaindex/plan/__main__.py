"""``python -m megaindex.plan``: the same as ``megaindex plan``."""

import sys

from megaindex.cli import main

if __name__ == "__main__":
    sys.exit(main(["plan", *sys.argv[1:]]))
