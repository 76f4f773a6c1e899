"""A file system that shows what others did only after some time, as network mounts may."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path
from typing import Any

# what processes look for in a cache
_SHARED = re.compile(r"[0-9a-f]{32}(\.claim(\.[0-9a-f]{16}\.claim)*)?")


class Delayed:
    """Lets this process see entries and claims of others late; names it gives it sees at once.

    Looking is delayed; changes are not, as the server makes them whatever a client has cached: so
    a name that seems to be free can be refused.
    """

    def __init__(self, root: Path, seconds: float) -> None:
        self._root = os.fspath(root) + os.sep
        self._seconds = seconds
        self._noticed: dict[tuple[str, int], float] = {}
        self._own: set[str] = set()
        self._stat = os.stat

    def install(self) -> None:
        """For good: meant for a child process."""
        for name in ("stat", "lstat", "open"):
            setattr(os, name, self._looking(getattr(os, name)))
        for name in ("rename", "link"):
            setattr(os, name, self._naming(getattr(os, name)))
        real = os.listdir

        def listdir(path: Any = ".") -> list[str]:
            return [name for name in real(path) if not self._is_hidden(os.path.join(path, name))]

        os.listdir = listdir  # type: ignore[assignment]

    def _looking(self, real: Any) -> Any:
        def look(path: Any, *args: Any, **kwargs: Any) -> Any:
            if not isinstance(path, int) and self._is_hidden(os.fspath(path)):
                raise FileNotFoundError(2, "No such file or directory", path)
            return real(path, *args, **kwargs)

        return look

    def _naming(self, real: Any) -> Any:
        def name(source: Any, target: Any, **kwargs: Any) -> None:
            real(source, target, **kwargs)
            self._own.add(os.fspath(target))

        return name

    def _is_hidden(self, path: str) -> bool:
        if not path.startswith(self._root):
            return False
        name = path.removeprefix(self._root).partition(os.sep)[0]
        if not _SHARED.fullmatch(name) or self._root + name in self._own:
            return False
        try:
            number = self._stat(self._root + name).st_ino
        except FileNotFoundError:
            return False
        now = time.monotonic()
        return now - self._noticed.setdefault((name, number), now) < self._seconds
