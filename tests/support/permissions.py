"""What another user may not do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_NOBODY = 65534


@contextmanager
def closed(folder: Path) -> Iterator[None]:
    """Inside ``with`` nobody may enter or list the folder; root, whom that does not bind, becomes
    another user for the time."""
    as_root = os.geteuid() == 0
    if as_root:
        try:
            os.seteuid(_NOBODY)
        except OSError:  # a container may forbid it, or not know that user
            pytest.skip("this root may not become another user")
        os.seteuid(0)
    folder.chmod(0)
    if as_root:
        os.seteuid(_NOBODY)
    try:
        yield
    finally:
        if as_root:
            os.seteuid(0)
        folder.chmod(0o755)
