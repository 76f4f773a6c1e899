"""Writes the messages of messages.txt again, each below its command or call.

    python tests/golden/make_messages.py

Run it where a message changes on purpose, or after a command was added; read the difference.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.messages import PAGE, answered

if __name__ == "__main__":
    page = PAGE.read_text()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        page = answered(page)
    PAGE.write_text(page)
