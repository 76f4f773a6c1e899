"""The calls of Python's `os` and of its clock, replaced for simulated processes.

Paths below `ROOT`, and descriptors from `_FIRST` on, belong to the simulated file system. Anything
else, and every call of another thread, goes to the real one.
"""

from __future__ import annotations

import _pyio
import builtins
import contextlib
import errno
import functools
import gc
import io
import mmap
import os
import secrets
import socket
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
from robustness.simulation.filesystem import ROOT, Directory, File, Inode, Link, failure
from robustness.simulation.world import Process, Task, World

from megaindex.cache import claim, entry, npy, sidecar
from megaindex.format import pair
from megaindex.io import mapping

_FIRST = 1 << 20
_ABSENT_SECONDS = 30.0
_MEMORY: tuple[tuple[Any, str, Callable[[], Any]], ...] = (
    (claim, "_listed", dict),
    (sidecar, "_read_last", lambda: None),
)
"""Variables of modules that each process has of its own."""


class _Local(threading.local):
    task: Task | None = None


LOCAL = _Local()


@dataclass(eq=False)
class _Open:
    """An open file."""

    number: int
    inode: Any
    path: str
    process: Process
    position: int = 0
    before: bytes | None = None
    """Content before the first write, to which a failed write back at the end returns."""


class _Entry:
    """An entry of a directory, as `os.scandir` yields it."""

    def __init__(self, folder: str, name: str, inode: Inode) -> None:
        self.path, self.name, self._inode = f"{folder}/{name}", name, inode

    def inode(self) -> int:
        return self._inode.number

    def is_dir(self, *, follow_symlinks: bool = True) -> bool:
        return self._inode.is_directory

    def is_file(self, *, follow_symlinks: bool = True) -> bool:
        return isinstance(self._inode, File)

    def is_symlink(self) -> bool:
        return isinstance(self._inode, Link)


class _Entries:
    """The iterator and context manager that `os.scandir` returns."""

    def __init__(self, entries: list[_Entry]) -> None:
        self._entries = iter(entries)
        self._text = f"{[entry.name for entry in entries]}"

    def __repr__(self) -> str:
        return self._text

    def __iter__(self) -> Iterator[_Entry]:
        return self._entries

    def __next__(self) -> _Entry:
        return next(self._entries)

    def __enter__(self) -> _Entries:
        return self

    def __exit__(self, *_: object) -> None:
        """There is nothing to close."""

    close = __exit__


class Calls:
    """System calls on the files of one world, named as in `os`."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._files = world.files
        self._table: dict[int, _Open] = {}
        self._next = _FIRST

    def perform(self, task: Task, name: str, args: tuple[Any, ...], kwargs: Any) -> Any:
        """Perform a call: at once if it concerns no other process, else after others."""
        target: Any = args[0] if args else "."
        if isinstance(target, int):
            target = self._table.get(target)
            if target is None or target.process is not task.process:
                if name == "close":  # a file of a process that has ended, freed by another
                    return None
                raise failure(errno.EBADF, args[0])
            path = target.path
        else:
            path = target = self._path(target, kwargs.pop("dir_fd", None))
        act = functools.partial(getattr(self, name), target, *args[1:], **kwargs)
        if name in _OWN:
            return act()
        if name == "open" and args[1] & os.O_CREAT:
            name = "create"
        if name in _TWO_NAMES:
            path = f"{path} {os.fspath(args[1])}"
        fail = functools.partial(self._fail, name, target, *args[1:])
        return self._world.call(task, name, path, act, fail)

    def _path(self, path: Any, directory: int | None) -> str:
        text = str(os.fspath(path))
        if directory is not None and not text.startswith("/"):
            return f"{ROOT}/@{directory}/{text}"  # whatever name the directory has by now
        return text

    def _fail(self, name: str, target: Any, *args: Any) -> None:
        """Do what a call has done when it fails: write a half, or drop what was to be written."""
        if name in ("write", "pwrite"):
            half = bytes(args[0])[: len(args[0]) // 2]
            self._store(target, half, args[1] if name == "pwrite" else target.position)
        elif name == "fsync" and isinstance(target.inode, File):
            target.inode.fail_to_sync()
        elif name == "close":
            if target.before is not None and self._world.shared:
                target.inode.data = bytearray(target.before)
            self.close(target)

    # --- names ---------------------------------------------------------------------------------

    def _lookup(self, path: str, *, follow: bool = True) -> Inode:
        """Return the inode of a path, which the client of a network file system may not see yet."""
        world = self._world
        if not world.shared:
            return self._files.lookup(path, follow=follow)
        folder, _, name = path.rpartition("/")
        place = self._files.lookup(folder), name
        absent = LOCAL.task.process.machine.absent  # type: ignore[union-attr]
        if absent.get(place, 0.0) > world.now:
            raise failure(errno.ENOENT, path)
        try:
            return self._files.lookup(path, follow=follow)
        except FileNotFoundError:
            if world.decisions.draw(2):
                absent[place] = world.now + _ABSENT_SECONDS
            raise

    def _named(self, path: str) -> None:
        """Forget that a name was missing: this machine has given it, or listed it."""
        folder, _, name = path.rpartition("/")
        absent = LOCAL.task.process.machine.absent  # type: ignore[union-attr]
        if absent:
            absent.pop((self._files.lookup(folder), name), None)

    def open(self, path: str, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            self._files.lookup(path)
            return self._opened(self._files.nameless(), f"{path}/(nameless)")
        if flags & os.O_CREAT:
            try:
                self._named(path)
                inode = self._files.lookup(path, follow=not flags & os.O_NOFOLLOW)
                if flags & os.O_EXCL:
                    raise failure(errno.EEXIST, path)
            except FileNotFoundError:
                inode = self._files.create(path)
        else:
            inode = self._lookup(path, follow=not flags & os.O_NOFOLLOW)
        if isinstance(inode, Link):
            raise failure(errno.ELOOP, path)
        if flags & os.O_DIRECTORY and not inode.is_directory:
            raise failure(errno.ENOTDIR, path)
        if inode.is_directory and flags & (os.O_WRONLY | os.O_RDWR):
            raise failure(errno.EISDIR, path)
        if flags & os.O_TRUNC and isinstance(inode, File):
            inode.resize(0, self._files.clock())
        return self._opened(inode, path)

    def _opened(self, inode: Inode, path: str) -> int:
        self._next += 1
        process = LOCAL.task.process  # type: ignore[union-attr]
        self._table[self._next] = _Open(self._next, inode, path, process)
        inode.opened += 1
        if inode.is_directory:
            self._files.held[f"@{self._next}"] = inode
        return self._next

    def stat(self, target: Any, *, follow_symlinks: bool = True) -> os.stat_result:
        if isinstance(target, _Open):
            return target.inode.status()  # type: ignore[no-any-return]
        return self._lookup(target, follow=follow_symlinks).status()

    def lstat(self, path: str) -> os.stat_result:
        return self._lookup(path, follow=False).status()

    def readlink(self, path: str) -> str:
        inode = self._lookup(path, follow=False)
        if not isinstance(inode, Link):
            raise failure(errno.EINVAL, path)
        return inode.target

    def _children(self, target: Any) -> tuple[str, dict[str, Inode]]:
        path = target.path if isinstance(target, _Open) else target
        inode = target.inode if isinstance(target, _Open) else self._lookup(path)
        if not isinstance(inode, Directory):
            raise failure(errno.ENOTDIR, path)
        for name in inode.names:
            self._named(f"{path}/{name}")
        return path, inode.names

    def listdir(self, target: Any) -> list[str]:
        return list(self._children(target)[1])

    def scandir(self, target: Any) -> Any:
        path, names = self._children(target)
        entries = [_Entry(path, name, inode) for name, inode in names.items()]
        return _Entries(entries)

    def mkdir(self, path: str, mode: int = 0o777) -> None:
        self._files.mkdir(path)
        self._named(path)

    def rmdir(self, path: str) -> None:
        self._files.rmdir(path)

    def unlink(self, path: str) -> None:
        self._files.unlink(path)

    remove = unlink

    def rename(self, path: str, target: Any) -> None:
        self._files.rename(path, os.fspath(target))
        self._named(os.fspath(target))

    replace = rename

    def link(self, path: str, target: Any) -> None:
        self._files.link(path, os.fspath(target))
        self._named(os.fspath(target))

    def symlink(self, source: str, path: Any) -> None:
        self._files.symlink(source, os.fspath(path))
        self._named(os.fspath(path))

    # --- content -------------------------------------------------------------------------------

    def _store(self, opened: _Open, data: Any, offset: int) -> int:
        if opened.before is None:
            opened.before = bytes(opened.inode.data)
        return opened.inode.write(data, offset, self._files.clock())  # type: ignore[no-any-return]

    def read(self, opened: _Open, count: int) -> bytes:
        data = self.pread(opened, count, opened.position)
        opened.position += len(data)
        return data

    def pread(self, opened: _Open, count: int, offset: int) -> bytes:
        if opened.inode.is_directory:
            raise failure(errno.EISDIR, opened.path)
        return bytes(opened.inode.data[offset : offset + count])

    def write(self, opened: _Open, data: Any) -> int:
        count = self._store(opened, memoryview(data).cast("B"), opened.position)
        opened.position += count
        return count

    def writev(self, opened: _Open, buffers: Any) -> int:
        """Write all but the last byte of the second buffer, which the caller has to complete."""
        data = b"".join(bytes(memoryview(buffer).cast("B")) for buffer in buffers)
        return self.write(opened, data[: max(len(buffers[0]), len(data) - 1)])

    def pwrite(self, opened: _Open, data: Any, offset: int) -> int:
        return self._store(opened, data, offset)

    def lseek(self, opened: _Open, offset: int, whence: int) -> int:
        base = (0, opened.position, len(opened.inode.data))[whence]
        opened.position = base + offset
        return opened.position

    def fsync(self, opened: _Open) -> None:
        opened.inode.sync()

    def ftruncate(self, opened: _Open, size: int) -> None:
        opened.inode.resize(size, self._files.clock())

    def posix_fallocate(self, opened: _Open, offset: int, size: int) -> None:
        if offset + size > len(opened.inode.data):
            opened.inode.resize(offset + size, self._files.clock())

    def copy_file_range(
        self, source: _Open, target: int, count: int, offset_src: int | None = None
    ) -> int:
        raise failure(errno.EXDEV, source.path)  # the caller copies through memory

    def fstat(self, opened: _Open) -> os.stat_result:
        return opened.inode.status()  # type: ignore[no-any-return]

    def close(self, opened: _Open) -> None:
        del self._table[opened.number]
        self._files.held.pop(f"@{opened.number}", None)
        opened.inode.opened -= 1
        self._files.release(opened.inode)

    def isatty(self, opened: _Open) -> bool:
        return False

    def set_inheritable(self, opened: _Open, inheritable: bool) -> None:
        """Do nothing: there is no exec."""

    def posix_fadvise(self, *_: Any) -> None:
        """Do nothing: there is no cache."""

    def content(self, descriptor: int) -> Any:
        """Return the bytes that a mapping of a file shows."""
        return self._table[descriptor].inode.data


_NAMES = (
    "close", "copy_file_range", "fstat", "fsync", "ftruncate", "isatty", "link", "listdir", "lseek",
    "lstat", "mkdir", "open", "posix_fadvise", "posix_fallocate", "pread", "pwrite", "read",
    "readlink", "remove", "rename", "replace", "rmdir", "scandir", "set_inheritable", "stat",
    "symlink", "unlink", "write", "writev",
)  # fmt: skip
_TWO_NAMES = {"link", "rename", "replace", "symlink"}
_OWN = {"fstat", "isatty", "lseek", "posix_fadvise", "set_inheritable"}


def _is_ours(target: Any, directory: object) -> bool:
    if isinstance(target, int):
        return target >= _FIRST
    if isinstance(directory, int) and directory >= _FIRST:
        return True
    return isinstance(target, (str, os.PathLike)) and os.fspath(target).startswith(ROOT)


def _dispatched(name: str, real: Any) -> Any:
    place = 1 if name == "symlink" else 0

    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) <= place or not _is_ours(args[place], kwargs.get("dir_fd")):
            if name == "readlink" and args[0] == "/proc/self/ns/pid" and LOCAL.task is not None:
                return f"pid:[{LOCAL.task.process.machine.name}]"
            return real(*args, **kwargs)
        task = LOCAL.task
        if task is None:  # a file of an earlier run is freed
            if name == "close":
                return None
            raise failure(errno.EBADF, args[0])
        return task.process.world.calls.perform(task, name, args, kwargs)

    return call


def _opening(real: Any) -> Any:
    def call(file: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_ours(file, None):
            return _pyio.open(file, *args, **kwargs)
        task, text = LOCAL.task, str(file)
        if task is not None and text.startswith("/proc/") and text.endswith("/stat"):
            world = task.process.world
            alike = [p for p in world.processes if f"/proc/{p.pid}/stat" == text]
            return io.StringIO(f"1 (python) {'Z' if alike[-1].is_zombie else 'S'} 1")
        return real(file, *args, **kwargs)

    return call


def _in_process(simulated: Callable[..., Any], real: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that simulated processes see as ``simulated(task, …)``."""

    def call(*args: Any, **kwargs: Any) -> Any:
        task = LOCAL.task
        return real(*args, **kwargs) if task is None else simulated(task, *args, **kwargs)

    return call


def _kill(task: Task, pid: int, number: int) -> None:
    assert number == 0, "the package sends no signals"

    def act() -> None:
        here = [p for p in task.process.world.processes if p.machine is task.process.machine]
        if not any(p.pid == pid and (not p.dead or p.is_zombie) for p in here):
            raise failure(errno.ESRCH, pid)

    task.process.world.call(task, "kill", str(pid), act)


def _token_hex(task: Task, count: int) -> str:
    process = task.process
    process.tokens += 1
    return f"{process.number:04x}{process.tokens:04x}".rjust(2 * count, "0")[-2 * count :]


def _names(task: Task) -> Iterator[str]:
    while True:
        yield _token_hex(task, 4)


def _sleep(task: Task, seconds: float) -> None:
    world = task.process.world
    world.wait(world.now + max(seconds, 1e-6))


class _Event:
    """As `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        self._is_set = True

    def wait(self, timeout: float) -> bool:
        world = LOCAL.task.process.world  # type: ignore[union-attr]
        world.wait(world.now + timeout, lambda: self._is_set)
        return self._is_set


class _Thread:
    """As `threading.Thread`."""

    def __init__(self, *, target: Callable[[], object], **_: object) -> None:
        self._target = target

    def start(self) -> None:
        process = LOCAL.task.process  # type: ignore[union-attr]
        self._task = process.world.spawn(process, self._target, first=False)

    def join(self) -> None:
        world = LOCAL.task.process.world  # type: ignore[union-attr]
        world.wait(None, lambda: self._task.ended)


def _sync_later(sync: Callable[[], None]) -> None:
    def later() -> None:
        time.sleep(entry._DELAY_SECONDS)
        sync()

    _Thread(target=later).start()


def _mapped(descriptor: int, size: int) -> Any:
    task = LOCAL.task
    if task is None or descriptor < _FIRST:
        return _MAP(descriptor, size)
    data = np.frombuffer(task.process.world.calls.content(descriptor), np.uint8, size)
    data.flags.writeable = False
    return data


_MAP = mapping._map_descriptor


def _mapped_new(descriptor: int, size: int) -> Any:
    if LOCAL.task is None or descriptor < _FIRST:
        return mmap.mmap(descriptor, size)
    return LOCAL.task.process.world.calls.content(descriptor)


def restore(old: Process | None, new: Process) -> None:
    """Exchange the variables of modules when another process runs."""
    for module, name, initial in _MEMORY:
        if old is not None:
            old.memory[name] = getattr(module, name)
        setattr(module, name, new.memory[name] if name in new.memory else initial())


@contextlib.contextmanager
def installed() -> Iterator[None]:
    """Replace the calls inside the ``with`` block."""
    real_boot = entry.boot_id
    modules = [module for name, module in sys.modules.items() if name.startswith("megaindex.")]

    def boot_id() -> str:
        task = LOCAL.task
        machine = None if task is None else task.process.machine
        return real_boot() if machine is None else f"{machine.name}, boot {machine.boot}"

    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore", ResourceWarning)
        for module, name, initial in _MEMORY:
            stack.enter_context(mock.patch.object(module, name, initial()))

        def replace(module: Any, name: str, value: Any) -> None:
            stack.enter_context(mock.patch.object(module, name, value))

        for name in _NAMES:
            replace(os, name, _dispatched(name, getattr(os, name)))
        for module in (builtins, io):
            replace(module, "open", _opening(open))
        for module in modules:
            if getattr(module, "boot_id", None) is real_boot:
                replace(module, "boot_id", boot_id)
        replace(os, "getpid", _in_process(lambda task: task.process.pid, os.getpid))
        replace(os, "kill", _in_process(_kill, os.kill))
        replace(
            socket, "gethostname", _in_process(lambda t: t.process.machine.name, socket.gethostname)
        )
        replace(secrets, "token_hex", _in_process(_token_hex, secrets.token_hex))
        replace(
            tempfile, "_get_candidate_names", _in_process(_names, tempfile._get_candidate_names)
        )
        replace(time, "sleep", _in_process(_sleep, time.sleep))
        replace(time, "monotonic", _in_process(lambda t: t.process.world.now, time.monotonic))
        replace(claim, "threading", SimpleNamespace(Thread=_Thread, Event=_Event))
        replace(entry, "_worker", SimpleNamespace(schedule=_sync_later))
        replace(sidecar, "file_mapper", lambda: None)
        replace(pair, "file_mapper", lambda: None)
        replace(mapping, "_map_descriptor", _mapped)
        replace(npy, "is_local", lambda path: True)
        replace(npy, "WORTH_MAPPING", npy.WORTH_MAPPING)  # scenarios set it
        replace(npy, "mmap", SimpleNamespace(mmap=_mapped_new, PAGESIZE=mmap.PAGESIZE))
        replace(sys, "unraisablehook", lambda _: None)
        was_enabled = gc.isenabled()
        gc.disable()  # files that ended processes left open are not closed in the midst of a run
        try:
            yield
        finally:
            gc.collect()
            if was_enabled:
                gc.enable()
