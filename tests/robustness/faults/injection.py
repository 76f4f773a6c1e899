"""Numbers every call of this process that touches the files below a directory, and lets one fail.

Everything Python does to files goes through the module `os` once its buffered files are those of
`_pyio`, the interpreter's own file objects written in Python. What is not seen are stores through
a memory mapping: they are no calls, and nothing can fail there but the disk (a SIGBUS).
"""

from __future__ import annotations

import _pyio
import builtins
import io
import os
import tempfile
import threading
from collections.abc import Callable
from typing import Any

# What changes something: the places at which a process may die, and a disk may be full.
CHANGES = (
    "write", "writev", "pwrite", "fsync", "rename", "replace", "link", "symlink", "mkdir", "rmdir",
    "unlink", "remove", "posix_fallocate", "ftruncate", "truncate", "copy_file_range",
)  # fmt: skip
READS = ("read", "pread", "stat", "lstat", "fstat", "listdir", "scandir")

Act = Callable[[str, str], None]


class Injector:
    """Counts calls; at the one numbered ``at`` (from 1) calls ``act(name, path)`` before it.

    With ``reads`` the calls that only look are counted instead of those that change something; with
    ``after`` ``act`` is called when a call has returned, and only those that return are counted;
    with ``main_only`` those of other threads are not, as where Python handles signals.
    """

    def __init__(
        self,
        root: str,
        at: int,
        act: Act,
        *,
        reads: bool = False,
        after: bool = False,
        main_only: bool = False,
    ) -> None:
        self._root = os.path.realpath(root)
        self._at = at
        self._act = act
        self._reads = reads
        self._after = after
        self._main_only = main_only
        self._lock = threading.Lock()
        self.count = 0
        self.fired: str | None = None
        """The call that was let fail, for messages."""

    def install(self) -> None:
        """For good: meant for a child process that ends soon."""
        for name in READS if self._reads else CHANGES:
            setattr(os, name, self._wrapped(name, getattr(os, name)))
        os.open = self._opening(os.open)  # type: ignore[assignment]
        builtins.open = io.open = _pyio.open  # type: ignore[assignment]
        tempfile._io = _pyio  # type: ignore[attr-defined]

    def _wrapped(self, name: str, real: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            target = args[0] if args else "."
            return self._passing(name, target, kwargs.get("dir_fd"), lambda: real(*args, **kwargs))

        return call

    def _opening(self, real: Any) -> Any:
        def call(path: Any, flags: int, *args: Any, **kwargs: Any) -> Any:
            changes = bool(flags & (os.O_CREAT | os.O_WRONLY | os.O_RDWR))
            if changes == self._reads:
                return real(path, flags, *args, **kwargs)
            return self._passing(
                "open", path, kwargs.get("dir_fd"), lambda: real(path, flags, *args, **kwargs)
            )

        return call

    def _passing(self, name: str, target: Any, directory: int | None, real: Any) -> Any:
        path = _path_of(target, directory)
        elsewhere = path != self._root and not path.startswith(self._root + os.sep)
        is_main = threading.current_thread() is threading.main_thread()
        if elsewhere or (self._main_only and not is_main):
            return real()
        if not self._after:
            self._pass(name, path)
            return real()
        result = real()
        self._pass(name, path)
        return result

    def _pass(self, name: str, path: str) -> None:
        with self._lock:
            self.count += 1
            mine = self.count == self._at
            if mine:
                self.fired = f"{name} of {path}"
        if mine:
            self._act(name, path)


def _path_of(target: Any, directory: int | None) -> str:
    if isinstance(target, int):
        return os.readlink(f"/proc/self/fd/{target}")
    path = os.fspath(target)
    if isinstance(path, bytes):
        path = os.fsdecode(path)
    if directory is not None:
        path = os.path.join(os.readlink(f"/proc/self/fd/{directory}"), path)
    return os.path.abspath(path)
