"""A file system in memory that records which of its content a power loss may take.

Every file has two contents, the current one and the one on the disk; every directory has its
current names, those on the disk, and the changes in between. A sync of a file or a directory copies
the current state to the disk. A power loss keeps a drawn part of what was not synced: pages of
files one by one, sizes, and changes of names one by one, in their order or a subset of them, since
POSIX promises no more.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from typing import Any

PAGE = 64  # bytes, so that small files have several
ROOT = "/simulated"

Draw = Callable[[int], int]
"""Return a number below the argument, decided by the seed."""


def failure(number: int, path: object) -> OSError:
    return OSError(number, os.strerror(number), path)


class Inode:
    """A file, directory or symbolic link."""

    def __init__(self, number: int, mode: int, time: int) -> None:
        self.number = number
        self.mode = mode
        self.links = 0
        self.opened = 0
        self.modified = self.changed = time

    @property
    def is_directory(self) -> bool:
        return stat.S_ISDIR(self.mode)

    def status(self) -> os.stat_result:
        seconds = self.modified // 10**9
        fields = (self.mode, self.number, 77, max(1, self.links), 0, 0, self.size())
        more = {"st_mtime_ns": self.modified, "st_ctime_ns": self.changed, "st_blksize": 4096}
        return os.stat_result((*fields, seconds, seconds, seconds), more)

    def size(self) -> int:
        return 0


class File(Inode):
    """Bytes, those on the disk, and the pages that a failed sync has dropped."""

    def __init__(self, number: int, time: int) -> None:
        super().__init__(number, stat.S_IFREG | 0o644, time)
        self.data = bytearray()
        self.disk = b""
        self._dropped: bytes | None = None

    def size(self) -> int:
        return len(self.data)

    def write(self, data: Any, offset: int, time: int) -> int:
        data = bytes(data)
        self.resize(max(len(self.data), offset + len(data)), time)
        self.data[offset : offset + len(data)] = data
        return len(data)

    def resize(self, size: int, time: int) -> None:
        self.modified = self.changed = time
        if size == len(self.data):
            return
        try:
            self.data[size:] = bytes(max(0, size - len(self.data)))
        except BufferError:  # it is mapped
            self.data = self.data[:size] + bytes(max(0, size - len(self.data)))

    def sync(self) -> None:
        if self._dropped is None:
            self.disk = bytes(self.data)
            return
        # pages that a failed sync has dropped count as written
        kept = bytearray(self.disk[: len(self.data)].ljust(len(self.data), b"\0"))
        for begin in range(0, len(kept), PAGE):
            page = self.data[begin : begin + PAGE]
            if page != self._dropped[begin : begin + PAGE]:
                kept[begin : begin + PAGE] = page
        self.disk = bytes(kept)

    def fail_to_sync(self) -> None:
        self._dropped = bytes(self.data)

    def lose(self, draw: Draw) -> None:
        """Keep what is on the disk, and a drawn part of the rest."""
        new, old, kind = bytes(self.data), self.disk, draw(3)
        self._dropped = None
        if new != old and kind:
            size = len(old) if kind == 1 else (len(old), len(new))[draw(2)]
            kept = bytearray(old[:size].ljust(size, b"\0"))
            for begin in range(0, size, PAGE):
                if kind == 2 and draw(2):
                    page = new[begin : begin + PAGE][: size - begin]
                    kept[begin : begin + len(page)] = page
            new = bytes(kept)
        self.data, self.disk = bytearray(new), new


class Link(Inode):
    """A symbolic link."""

    def __init__(self, number: int, time: int, target: str) -> None:
        super().__init__(number, stat.S_IFLNK | 0o777, time)
        self.target = target


class Directory(Inode):
    """Names, those on the disk, and the changes that lead from these to those."""

    def __init__(self, number: int, time: int) -> None:
        super().__init__(number, stat.S_IFDIR | 0o755, time)
        self.names: dict[str, Inode] = {}
        self.disk: dict[str, Inode] = {}
        self._changes: list[dict[str, Inode | None]] = []

    def change(self, change: dict[str, Inode | None], time: int) -> None:
        """Give names to inodes, or take them (None), all at once."""
        for name, inode in change.items():
            _set(self.names, name, inode)
        self._changes.append(change)
        self.modified = self.changed = time

    def sync(self) -> None:
        self.disk = dict(self.names)
        self._changes.clear()

    def lose(self, draw: Draw) -> None:
        """Keep what is on the disk, and a drawn part of the changes since."""
        count = len(self._changes)
        kind, first_lost = draw(3), draw(count + 1)
        self.names = self.disk
        for number, change in enumerate(self._changes):
            if (True, number < first_lost, draw(2))[kind]:
                for name, inode in change.items():
                    _set(self.names, name, inode)
        self.sync()


def _set(names: dict[str, Inode], name: str, inode: Inode | None) -> None:
    names.pop(name, None)
    if inode is not None:
        names[name] = inode


class FileSystem:
    """Directories below `ROOT`, changed by the operations of POSIX, each of which is atomic.

    ``draw`` decides what a power loss takes, and whether a new file gets the number of a removed
    one. ``clock`` returns the time of changes in nanoseconds.
    """

    def __init__(self, draw: Draw, clock: Callable[[], int]) -> None:
        self._draw = draw
        self.clock = clock
        self._last = 10
        self._free: list[int] = []
        self.held: dict[str, Inode] = {}
        """Open directories, by the names under which paths relative to them begin."""
        self.root = Directory(2, clock())

    def lookup(self, path: str, *, follow: bool = True) -> Inode:
        """Return the inode of a path; FileNotFoundError, or ENOTDIR, ELOOP."""
        inode: Inode = self.root
        for name in path[len(ROOT) :].strip("/").split("/"):
            if not isinstance(inode, Directory):
                raise failure(errno.ENOTDIR, path)
            if name in ("", "."):
                continue
            following = self.held.get(name) or inode.names.get(name)
            if following is None:
                raise failure(errno.ENOENT, path)
            inode = following
        if isinstance(inode, Link) and follow:
            target = os.path.join(os.path.dirname(path), inode.target)
            return self.lookup(target)
        return inode

    def _place(self, path: str) -> tuple[Directory, str]:
        folder, _, name = path.rstrip("/").rpartition("/")
        directory = self.lookup(folder)
        if not isinstance(directory, Directory):
            raise failure(errno.ENOTDIR, path)
        return directory, name

    def _number(self) -> int:
        if self._free and self._draw(2):
            return self._free.pop()
        self._last += 1
        return self._last

    def create(self, path: str) -> File:
        directory, name = self._place(path)
        file = File(self._number(), self.clock())
        self._give(directory, name, file)
        return file

    def nameless(self) -> File:
        return File(self._number(), self.clock())

    def _give(self, directory: Directory, name: str, inode: Inode) -> None:
        if name in directory.names:
            raise failure(errno.EEXIST, name)
        inode.links += 1
        inode.changed = self.clock()
        directory.change({name: inode}, self.clock())

    def _take(self, inode: Inode) -> None:
        inode.links -= 1
        inode.changed = self.clock()
        self.release(inode)

    def release(self, inode: Inode) -> None:
        """Free the number of an inode without names and descriptors."""
        if inode.links <= 0 and not inode.opened:
            self._free.append(inode.number)

    def mkdir(self, path: str) -> None:
        directory, name = self._place(path)
        self._give(directory, name, Directory(self._number(), self.clock()))

    def symlink(self, target: str, path: str) -> None:
        directory, name = self._place(path)
        self._give(directory, name, Link(self._number(), self.clock(), target))

    def link(self, source: str, target: str) -> None:
        inode = self.lookup(source, follow=False)
        if inode.is_directory:
            raise failure(errno.EPERM, source)
        self._give(*self._place(target), inode)

    def unlink(self, path: str) -> None:
        directory, name = self._place(path)
        inode = self.lookup(path, follow=False)
        if inode.is_directory:
            raise failure(errno.EISDIR, path)
        directory.change({name: None}, self.clock())
        self._take(inode)

    def rmdir(self, path: str) -> None:
        directory, name = self._place(path)
        inode = self.lookup(path, follow=False)
        if not isinstance(inode, Directory):
            raise failure(errno.ENOTDIR, path)
        if inode.names:
            raise failure(errno.ENOTEMPTY, path)
        directory.change({name: None}, self.clock())
        self._take(inode)

    def rename(self, source: str, target: str) -> None:
        (old_place, old_name), (place, name) = self._place(source), self._place(target)
        inode = self.lookup(source, follow=False)
        replaced = place.names.get(name)
        if replaced is inode:
            return
        if replaced is not None:
            if inode.is_directory and not isinstance(replaced, Directory):
                raise failure(errno.ENOTDIR, target)
            if isinstance(replaced, Directory):
                if not inode.is_directory:
                    raise failure(errno.EISDIR, target)
                if replaced.names:
                    raise failure(errno.ENOTEMPTY, target)
        if place is old_place:
            place.change({old_name: None, name: inode}, self.clock())
        else:
            old_place.change({old_name: None}, self.clock())
            place.change({name: inode}, self.clock())
        inode.changed = self.clock()
        if replaced is not None:
            self._take(replaced)

    def sync(self) -> None:
        """Sync everything, as sync(2)."""
        for inode in self._walk(lambda inode: inode.sync()):
            assert inode.links or inode is self.root

    def replace_content(self, path: str, change: Callable[[bytes], bytes]) -> None:
        """Change the bytes of a file, as a disk does that lost some: no time tells of it."""
        file = self.lookup(path)
        assert isinstance(file, File)
        before = bytes(file.data)
        after = change(before)
        assert len(after) == len(before)
        assert after != before
        file.data, file.disk = bytearray(after), after

    def lose_power(self) -> None:
        """Keep what was synced, and a drawn part of the rest."""
        for inode in self._walk(lambda inode: inode.lose(self._draw)):
            inode.links = inode.opened = 0
        for directory in self._walk(lambda _: None):
            if isinstance(directory, Directory):
                for inode in directory.names.values():
                    inode.links += 1
        self._free.clear()

    def _walk(self, visit: Callable[[Any], object]) -> list[Inode]:
        """Visit each inode once, directories before what they name."""
        seen: dict[int, Inode] = {}
        waiting: list[Inode] = [self.root]
        while waiting:
            inode = waiting.pop()
            if id(inode) in seen:
                continue
            seen[id(inode)] = inode
            if isinstance(inode, (File, Directory)):
                visit(inode)
            if isinstance(inode, Directory):
                waiting.extend(inode.names[name] for name in sorted(inode.names))
        return list(seen.values())

    def tree(self) -> dict[str, bytes | None]:
        """Return the content of every file by its path below the root, None for directories."""
        found: dict[str, bytes | None] = {}
        waiting: list[tuple[str, Inode]] = [("", self.root)]
        while waiting:
            path, inode = waiting.pop()
            if isinstance(inode, Directory):
                waiting.extend((f"{path}/{name}", child) for name, child in inode.names.items())
            if path:
                found[path[1:]] = bytes(inode.data) if isinstance(inode, File) else None
        return found
