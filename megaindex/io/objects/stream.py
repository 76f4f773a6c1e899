"""An object as a file, for whoever reads all of it."""

from __future__ import annotations

import io
import os
from typing import Any

from megaindex.io.facts import Facts
from megaindex.io.objects.reading import fill


class ObjectFile(io.RawIOBase):
    """Reads what is asked for, in pieces of which several are under way at a time."""

    def __init__(self, facts: Facts) -> None:
        self._facts = facts
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        origin = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._facts.nbytes}
        self._at = origin[whence] + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")
        view = view[: max(0, self._facts.nbytes - self._at)]
        fill(self._facts, self._at, view)
        self._at += len(view)
        return len(view)
