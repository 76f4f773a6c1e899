"""Writes messages.txt and outputs.txt again: each message or output below its command or call.

    python tests/golden/make_messages.py

Run it where a message or an output changes on purpose, or after a command was added; read the
difference.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support import messages, outputs

if __name__ == "__main__":
    os.environ["COLUMNS"] = "80"
    for page in (messages, outputs):
        text = page.PAGE.read_text()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            text = page.answered(text)
        page.PAGE.write_text(text)
