"""Claims: one builder at a time for each key of a directory.

Whoever finds nothing tries to claim the key by hard-linking a file of its own to ``<key>.claim``,
which succeeds for exactly one process of all that see the directory, on NFS too. So a directory on
a shared file system gets one builder for the whole cluster, a directory on each node's own disk one
per node, without a setting. No barrier, no device and no launcher is involved.

The holder bumps a counter in the claim. A waiter that sees the counter stand still for as long as
``stale_after``, by its own clock, takes the claim away; where holder and waiter run on one machine
it sees at once that the holder is gone.

Everything that is being written belongs to somebody who holds a claim in the directory, which was
there first and goes last. So whatever a listing shows without its claim has been left behind.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import re
import secrets
import shutil
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megaindex.cache.entry import boot_id
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.io.filesystem import look_again
from megaindex.io.json_files import Damaged, parse_object
from megaindex.io.os_errors import as_storage_error, storage_error
from megaindex.io.paths import open_at_once

logger = logging.getLogger("megaindex")

_LONGEST = 4096  # bytes; a claim has less than two hundred
_MOST_PID = 2**31 - 1


def this_process() -> dict[str, object]:
    """Return what identifies a process to others."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pids": _pid_namespace(),
        "pid": os.getpid(),
    }


def _pid_namespace() -> str:
    """Containers of one machine may number their processes alike."""
    try:
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def read_claim(path: Path) -> str | None:
    """Return the text of a claim; None without one.

    Whatever else bears such a name is not waited for, followed or read to its end.
    """
    try:
        descriptor = open_at_once(path, follow=False)
        try:
            return os.read(descriptor, _LONGEST).decode(errors="replace")
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise storage_error(error, str(path), "cannot read the claim") from error


def steal(path: Path, dead: str) -> None:
    """Remove the claim of a dead process, whose text is ``dead``; one of several succeeds."""
    aside = path.with_name(f"{path.name}.{secrets.token_hex(8)}.dead")
    with (
        as_storage_error(str(path), "cannot take over the claim of a dead process"),
        contextlib.suppress(FileNotFoundError),
    ):
        os.rename(path, aside)
        if token_of(read_claim(aside)) != token_of(dead):
            # Another waiter was faster, and this is the claim of who builds now: put it back.
            # If a third has claimed meanwhile both build, which costs time and no more.
            with contextlib.suppress(OSError):
                os.link(aside, path)
        else:
            logger.warning("%s: its holder (%s) is gone; taken over", path, describe_holder(dead))
        aside.unlink()


def _fields(text: str | None) -> dict[str, object]:
    """Return the fields of a claim; {} of a text that is half-written, damaged or forged."""
    try:
        return parse_object(text or "{}")
    except Damaged:
        return {}


def token_of(text: str | None) -> object:
    """Return what distinguishes a claim from every other of the same name."""
    return _fields(text).get("token")


def describe_holder(text: str) -> str:
    """Return the holder, for messages."""
    fields = _fields(text)
    return f"process {fields.get('pid', '?')} on {fields.get('host', '?')}"


def holder_is_dead(text: str) -> bool:
    """Return whether the holder ran here and has ended; False where that cannot be known."""
    fields, here = _fields(text), this_process()
    pid = fields.get("pid")
    alike = all(fields.get(name) == here[name] != "" for name in ("host", "boot", "pids"))
    if not alike or here["boot"] == "unknown":
        return False
    if not isinstance(pid, int) or not 1 <= pid <= _MOST_PID:  # 0 and below are groups of processes
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except OSError:
        return False
    return _is_zombie(pid)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


T = TypeVar("T")

STALE_AFTER = 60.0
_BEATS = 12  # of the counter, in the time after which a holder counts as dead
_DEFAULT_TIMEOUT = 3600.0
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 2.0  # seconds between two looks at a claim


def build_once(
    directory: str | os.PathLike[str],
    key: str,
    find: Callable[[], T | None],
    build: Callable[[], T],
    *,
    timeout: float | None = None,
    stale_after: float = STALE_AFTER,
) -> T:
    """Return what ``find`` finds, or what ``build`` returns in the one process that builds.

    Args:
        directory: where the claim is put; created if it is missing.
        key: names what is built; equal in all processes that want it.
        find: looks it up; None where it is not there. Called again after a wait.
        build: makes it and publishes it where ``find`` looks.
        timeout: seconds to wait for another process; default MEGAINDEX_BUILD_TIMEOUT or 3600.
        stale_after: seconds without a sign of life after which another builder is replaced.

    Raises:
        StorageError: another process was still building when the time was over, or the directory
            cannot be written.
    """
    deadline = time.monotonic() + (build_timeout() if timeout is None else timeout)
    taken_over = robbed = False
    while True:
        found = find()
        if found is not None:
            return found
        claim = Claim(directory, key, stale_after=stale_after)
        try:
            if not claim.acquire():
                taken_over |= claim.wait(deadline)
                continue
            with claim:
                found = find()  # it may have been published since we looked
                if found is not None:
                    return found
                remove_leftovers(Path(directory), key, at_once=taken_over)
                try:
                    return build()
                except MissingFile:
                    # Frozen for so long that another took over, it finds its temporaries removed.
                    if robbed:
                        raise
                    robbed = True
        finally:
            claim.give_up()


def build_timeout() -> float:
    """Seconds that MEGAINDEX_BUILD_TIMEOUT sets."""
    text = os.environ.get("MEGAINDEX_BUILD_TIMEOUT", "")
    try:
        seconds = float(text) if text else _DEFAULT_TIMEOUT
    except ValueError:
        seconds = -1.0
    if not seconds > 0:
        raise InvalidArgument(
            f"MEGAINDEX_BUILD_TIMEOUT must be a positive number of seconds, got {text!r}"
        )
    return seconds


class Claim:
    """The right to build ``key`` in a directory; held inside ``with`` after `acquire`.

    A Ctrl-C may come between the two: `give_up` in a ``finally`` around both leaves nothing.
    """

    def __init__(
        self, directory: str | os.PathLike[str], key: str, *, stale_after: float = STALE_AFTER
    ) -> None:
        self._directory = Path(directory)
        self._path = self._directory / f"{key}.claim"
        self._stale_after = stale_after
        self._token = secrets.token_hex(8)
        self._own = self._directory / f"{key}.claim.{self._token}"
        self._stop = threading.Event()
        self._beater: threading.Thread | None = None
        self._may_be_there = False  # the file of our own
        self._may_be_ours = False  # the claim

    def acquire(self) -> bool:
        """Return whether the claim is ours now; False where another process holds it."""
        with as_storage_error(str(self._path), "cannot claim the right to build"):
            self._directory.mkdir(parents=True, exist_ok=True)
            if self._path.exists():
                return False
            try:
                self._may_be_there = self._may_be_ours = True
                self._own.write_text(self._text(0))
                self._may_be_ours = self._link()
                return self._may_be_ours
            finally:
                self._remove_own()

    def __enter__(self) -> Claim:
        self._beater = threading.Thread(target=self._beat, name="megaindex-claim", daemon=True)
        self._beater.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.give_up()

    def give_up(self) -> None:
        """Let others build; harmless when repeated, and where the claim is not ours."""
        self._stop.set()
        if self._beater is not None:
            # Ctrl-C inside start() leaves a thread that cannot be joined; it has yet to look at
            # `_stop`, so it writes nothing.
            with contextlib.suppress(RuntimeError):
                self._beater.join()
        self._remove_own()
        if self._may_be_ours:
            # What was built is built: a claim that cannot be removed no longer moves, and is
            # replaced.
            with contextlib.suppress(OSError):
                ours = token_of(read_claim(self._path)) == self._token  # not if it was taken away
                if ours:
                    self._path.unlink()
            self._may_be_ours = False

    def _remove_own(self) -> None:
        if self._may_be_there:
            with contextlib.suppress(OSError):  # what stays is removed by the next holder
                self._own.unlink()
            self._may_be_there = False

    def wait(self, deadline: float) -> bool:
        """Return when the claim is free: given up by its holder, or taken from a dead one.

        Returns:
            Whether it was taken from a dead one.

        Raises:
            StorageError: ``deadline``, of the monotonic clock, passed while the holder was alive.
        """
        last, since, pause = read_claim(self._path), time.monotonic(), _FIRST_PAUSE
        if last is not None:
            logger.info(
                "%s: another process builds (%s); waiting", self._path, describe_holder(last)
            )
        while (seen := read_claim(self._path)) is not None:
            now = time.monotonic()
            if seen != last:
                last, since = seen, now
            if holder_is_dead(seen) or now - since > self._stale_after:
                steal(self._path, seen)
                return True
            if now > deadline:
                raise StorageError(
                    f"{self._path}: waited for the process that builds ({describe_holder(seen)}), "
                    "and it is still at work; set MEGAINDEX_BUILD_TIMEOUT to more seconds, build "
                    "the cache before the run, or end that process"
                )
            time.sleep(min(pause, max(0.0, deadline - now) + _FIRST_PAUSE))
            pause = min(2 * pause, _LONGEST_PAUSE, self._stale_after / 4)
        look_again(self._directory)
        return False

    def _link(self) -> bool:
        try:
            os.link(self._own, self._path)
        except FileExistsError:
            # The answer to a link() that succeeded can get lost on a network, and the repeated
            # request then finds the name taken: by us, if our file has two names.
            with contextlib.suppress(FileNotFoundError):
                return self._own.stat().st_nlink == 2
            return False
        except FileNotFoundError:  # a holder that tidied up took it for a leftover
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return self._create()
        return True

    def _create(self) -> bool:
        """Without hard links: exclusive creation, which is as good on all but old NFS."""
        try:
            with open(self._path, "x") as file:
                file.write(self._text(0))
        except FileExistsError:
            return False
        return True

    def _text(self, count: int) -> str:
        return json.dumps({**this_process(), "token": self._token, "count": count})

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(self._stale_after / _BEATS):
            count += 1
            # In place and only if it is there: a claim that was taken away is not put back.
            with (
                contextlib.suppress(OSError),
                open(self._path, "r+", encoding="utf-8", errors="replace") as file,
            ):
                if token_of(file.read()) == self._token:
                    file.seek(0)
                    file.write(self._text(count))


_TOKEN = "[0-9a-f]{16}"
_ENTRY = re.compile(rf"tmp\.([0-9a-f]{{32}})\.{_TOKEN}")
_NAMED = re.compile(rf".+(\.npy|-megaindex\.json|-description\.txt)\.tmp\.{_TOKEN}")
_TO_BE_LINKED = re.compile(rf".+\.claim\.{_TOKEN}")
_SET_ASIDE = re.compile(rf".+\.claim\.{_TOKEN}\.dead")
_AGAIN_AFTER = 60.0  # seconds; datasets of a blend may be built, and claimed, one by one

_looked: dict[str, float] = {}


def remove_leftovers(directory: Path, key: str, *, at_once: bool) -> None:
    """Tidy up, as the holder of the claim on ``key``.

    Args:
        at_once: a builder is known to have died; else a directory is looked at once a minute.
    """
    last, now = _looked.get(os.fspath(directory)), time.monotonic()
    if last is not None and now - last < _AGAIN_AFTER and not at_once:
        return
    _looked[os.fspath(directory)] = now
    with contextlib.suppress(OSError):
        names = os.listdir(directory)
        held = _held(directory, names, key)
        for name in names:
            if _is_left_over(directory / name, held):
                logger.info("%s: left by a builder that died, removed", directory / name)
                _remove(directory / name)


def _held(directory: Path, names: list[str], key: str) -> set[str]:
    """Return the keys that others claim; claims of processes known to be dead are removed."""
    held = set()
    for name in names:
        if not name.endswith(".claim") or name == f"{key}.claim":
            continue
        try:
            text = read_claim(directory / name)
        except StorageError:  # then it cannot be told: whoever wants that key learns of it
            held.add(name.removesuffix(".claim"))
            continue
        if text is None:
            continue
        if holder_is_dead(text):
            steal(directory / name, text)
        else:
            held.add(name.removesuffix(".claim"))
    return held


def _is_left_over(path: Path, held: set[str]) -> bool:
    """Return whether nobody needs what a listing showed, by a holder who has not begun to write.

    A temporary entry tells its key, and nobody writes it unless that key is claimed. Temporaries of
    a framework's names do not, so they stay where anybody else is at work. The file that a claim is
    to be linked from may go at any time: whoever misses it tries again.
    """
    name = path.name
    if entry := _ENTRY.fullmatch(name):
        return entry[1] not in held
    if _NAMED.fullmatch(name):
        return not held
    if _SET_ASIDE.fullmatch(name):
        return holder_is_dead(read_claim(path) or "")
    return _TO_BE_LINKED.fullmatch(name) is not None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
