"""Descriptors of this process; its background threads open and close files of their own."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path


def open_below(folder: str | Path) -> list[str]:
    """Paths of open files that lie in a folder, one for each descriptor."""
    found = []
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
    return [path for path in found if path.startswith(f"{folder}/")]
