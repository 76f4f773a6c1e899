"""``python -m megaindex``: the same as the ``megaindex`` command."""

import sys

from megaindex.cli import main

sys.exit(main())
