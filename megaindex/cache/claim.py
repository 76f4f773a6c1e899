"""Claims: locks of a directory that allow one builder at a time for each key.

A process claims a key by hard-linking a file of its own to ``<key>.claim``, which succeeds for
exactly one process, on NFS too. A directory on a shared file system thus has one builder in the
cluster, and a directory on a local disk one per node, without barriers or settings.

The holder increments a counter in the claim. A waiter removes a claim whose counter has not changed
for ``stale_after`` seconds of its own clock, or at once if the holder ran on the same machine and
ended.

Files are only written under a claim, which is created before and removed after them. Temporary
files without a claim were therefore left by a process that ended, and are removed.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import secrets
import socket
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from megaindex.cache.entry import boot_id, opened, remove_entry
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.io.atomic import Damaged, parse_object
from megaindex.io.paths import as_storage_error, look_again, storage_error

logger = logging.getLogger("megaindex")

STALE_AFTER = 60.0
_LONGEST = 4096  # bytes read of a claim, which has about 200
_MOST_PID = 2**31 - 1


def this_process() -> dict[str, object]:
    """Return the fields that identify this process in a claim."""
    return {
        "host": socket.gethostname(),
        "boot": boot_id(),
        "pids": _pid_namespace(),
        "pid": os.getpid(),
    }


def _pid_namespace() -> str:
    try:  # containers of one machine may have equal process numbers
        return os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def read_claim(path: Path) -> str | None:
    """Return the text of a claim, without following links or pipes; None if it does not exist."""
    try:
        with opened(path) as descriptor:
            return os.read(descriptor, _LONGEST).decode(errors="replace")
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ESTALE):
            return None
        raise storage_error(error, str(path), "cannot read the claim") from error


def remove_dead(
    path: Path, dead: str, *, deadline: float | None = None, stale_after: float = STALE_AFTER
) -> None:
    """Remove the claim with the text ``dead`` of a process that ended, if it is still there.

    Under a claim named after its token, so that a waiter that read the text earlier cannot remove
    the claim of the next builder. If another process holds that, wait for it until ``deadline``.
    """
    guard = Claim(path.parent, f"{path.name}.{_token_in_names(dead)}", stale_after=stale_after)

    def is_there() -> bool:
        text = read_claim(path)
        return text is not None and token_of(text) == token_of(dead)

    try:
        while is_there():
            if not guard.acquire():
                if deadline is None:
                    return
                guard.wait(deadline)
                continue
            with guard:  # a file system may take longer than a minute
                if is_there():
                    with as_storage_error(
                        str(path), "cannot remove the claim of a process that ended"
                    ):
                        path.unlink(missing_ok=True)
                    holder = describe_holder(dead)
                    logger.warning("%s: its holder (%s) ended; claim removed", path, holder)
    finally:
        guard.give_up()


def _fields(text: str | None) -> dict[str, object]:
    """Return the fields of a claim; {} if the text is incomplete or damaged."""
    try:
        return parse_object(text or "{}")
    except Damaged:
        return {}


def token_of(text: str | None) -> object:
    """Return the random token of a claim."""
    return _fields(text).get("token")


def _token_in_names(text: str) -> str:
    """Return the token of a claim, or for a damaged one 16 digits that its text determines."""
    token = token_of(text)
    if isinstance(token, str) and re.fullmatch(_TOKEN, token):
        return token
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def describe_holder(text: str) -> str:
    fields = _fields(text)
    return f"process {fields.get('pid', '?')} on {fields.get('host', '?')}"


def holder_is_dead(text: str) -> bool:
    """Return True if the holder is known to have run on this machine and ended."""
    fields, here = _fields(text), this_process()
    pid = fields.get("pid")
    # a number says nothing about processes of other machines, boots and containers
    alike = all(fields.get(name) == here[name] != "" for name in ("host", "boot", "pids"))
    if not alike or here["boot"] == "unknown":
        return False
    if not isinstance(pid, int) or not 1 <= pid <= _MOST_PID:  # others are process groups
        return False
    try:
        # signal 0 tests the process and sends nothing
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

_BEATS = 12  # increments of the counter in the time after which a claim is stale
_DEFAULT_TIMEOUT = 3600.0
_NO_HARD_LINKS = {errno.EPERM, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EMLINK}
_FIRST_PAUSE, _LONGEST_PAUSE = 0.005, 2.0  # seconds between two reads of a claim


def build_once(
    directory: str | os.PathLike[str],
    key: str,
    find: Callable[[], T | None],
    build: Callable[[], T],
    *,
    timeout: float | None = None,
    stale_after: float = STALE_AFTER,
) -> T:
    """Return the result of ``find``, or of ``build`` in the one process that builds.

    Args:
        directory: directory of the claim; created if it is missing.
        key: name of the result, equal in all processes that need it.
        find: function that returns the published result or None; called again after a wait.
        build: function that builds and publishes the result.
        timeout: seconds to wait for another process. Default: MEGAINDEX_BUILD_TIMEOUT or 3600.
        stale_after: seconds with an unchanged counter after which a claim is removed.

    Raises:
        StorageError: another process was still building after ``timeout``, or the directory cannot
            be written.
    """
    deadline = time.monotonic() + (build_timeout() if timeout is None else timeout)
    taken_over = lost_files = False
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
                look_again(directory)
                found = find()  # may have been published since the first call
                if found is not None:
                    return found
                # under the claim, as files without one are left over by definition
                remove_leftovers(Path(directory), key, at_once=taken_over)
                try:
                    return build()
                except MissingFile:
                    # Another process removed the claim, then the files, while this one was stopped.
                    if lost_files:
                        raise
                    lost_files = True
        finally:
            claim.give_up()


def build_timeout() -> float:
    """Return the seconds of MEGAINDEX_BUILD_TIMEOUT."""
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
    """Claim of ``key`` in a directory, held in a ``with`` block after `acquire`.

    Call `give_up` in a ``finally`` around both, so that Ctrl-C between them leaves no file.
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
        self._may_be_there = False  # the file that is linked
        self._may_be_ours = False  # the claim

    def acquire(self) -> bool:
        """Return True if the claim is acquired, False if another process holds it."""
        with as_storage_error(str(self._path), "cannot create the claim"):
            self._directory.mkdir(parents=True, exist_ok=True)
            # saves two names written and removed for each look of a waiter
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
        """Release the claim if it is held."""
        self._stop.set()
        if self._beater is not None:
            # Ctrl-C inside start() leaves a thread that cannot be joined; it has not tested `_stop`
            # yet, so it writes nothing.
            with contextlib.suppress(RuntimeError):
                self._beater.join()
        self._remove_own()
        if self._may_be_ours:
            # a claim that cannot be removed becomes stale
            with contextlib.suppress(OSError):
                if token_of(read_claim(self._path)) == self._token:
                    self._path.unlink()
            self._may_be_ours = False

    def _remove_own(self) -> None:
        if self._may_be_there:
            with contextlib.suppress(OSError):  # the next holder removes it
                self._own.unlink()
            self._may_be_there = False

    def wait(self, deadline: float) -> bool:
        """Wait until the claim is free; return True if its holder ended and it was removed.

        Raises:
            StorageError: ``deadline``, of the monotonic clock, passed while the holder was alive.
        """
        # clocks of machines differ, so the age of a claim is measured by this one's own
        last, since, pause = read_claim(self._path), time.monotonic(), _FIRST_PAUSE
        if last is not None:
            logger.info("%s: waiting for another builder (%s)", self._path, describe_holder(last))
        while (seen := read_claim(self._path)) is not None:
            now = time.monotonic()
            if seen != last:
                last, since = seen, now
            if holder_is_dead(seen) or now - since > self._stale_after:
                # another waiter that removed it may have died too, perhaps on another machine
                patience = max(deadline, now + 1.5 * self._stale_after)
                remove_dead(self._path, seen, deadline=patience, stale_after=self._stale_after)
                return True
            if now > deadline:
                raise StorageError(
                    f"{self._path}: {describe_holder(seen)} builds it and did not finish within "
                    "the time limit; set MEGAINDEX_BUILD_TIMEOUT to more seconds, build the cache "
                    "before the run, or end that process"
                )
            time.sleep(min(pause, max(0.0, deadline - now) + _FIRST_PAUSE))
            pause = min(2 * pause, _LONGEST_PAUSE, self._stale_after / 4)
        look_again(self._directory)
        return False

    def _link(self) -> bool:
        try:
            os.link(self._own, self._path)
        except FileExistsError:
            # On a network the reply to a successful link() can be lost and the request repeated,
            # which then fails; the link exists if the file has two names.
            with contextlib.suppress(FileNotFoundError):
                return self._own.stat().st_nlink == 2
            return False
        except FileNotFoundError:  # removed as a leftover by a holder
            return False
        except OSError as error:
            if error.errno not in _NO_HARD_LINKS:
                raise
            return self._create()
        return True

    def _create(self) -> bool:
        """Create the claim exclusively, for file systems without hard links."""
        is_created = False
        try:
            with open(self._path, "x") as file:
                is_created = True
                file.write(self._text(0))
        except FileExistsError:
            return False
        except OSError:
            if is_created:  # on a full disk: others would wait until an empty claim is stale
                with contextlib.suppress(OSError):
                    self._path.unlink()
            raise
        return True

    def _text(self, count: int) -> str:
        return json.dumps({**this_process(), "token": self._token, "count": count})

    def _beat(self) -> None:
        count = 0
        while not self._stop.wait(self._stale_after / _BEATS):
            count += 1
            # written in place, so that a removed claim is not created again
            with contextlib.suppress(OSError), opened(self._path, mode=os.O_RDWR) as descriptor:
                text = os.pread(descriptor, _LONGEST, 0).decode(errors="replace")
                if token_of(text) == self._token:
                    os.pwrite(descriptor, self._text(count).encode(), 0)


_TOKEN = "[0-9a-f]{16}"
_ENTRY = re.compile(rf"tmp\.([0-9a-f]{{32}})\.{_TOKEN}")
_NAMED = re.compile(rf".+(\.npy|-megaindex\.json|-description\.txt)\.tmp\.{_TOKEN}")
_TO_BE_LINKED = re.compile(rf".+\.claim\.{_TOKEN}")
_AGAIN_AFTER = 60.0  # seconds; a blend claims the keys of many datasets in one directory

_listed: dict[str, float] = {}


def remove_leftovers(directory: Path, key: str, *, at_once: bool) -> None:
    """Remove files of builders that ended, as the holder of the claim on ``key``.

    A directory is listed once a minute, or ``at_once`` if a builder is known to have ended.
    """
    last, now = _listed.get(os.fspath(directory)), time.monotonic()
    if last is not None and now - last < _AGAIN_AFTER and not at_once:
        return
    _listed[os.fspath(directory)] = now
    with contextlib.suppress(OSError):
        names = os.listdir(directory)
        held = _held(directory, names, key)
        for name in names:
            if _is_left_over(directory / name, held):
                logger.info("%s: left by a builder that ended; removed", directory / name)
                remove_entry(directory / name)


def _held(directory: Path, names: list[str], key: str) -> set[str]:
    """Return the keys claimed by others; claims of processes known to have ended are removed."""
    held = set()
    for name in sorted(names, key=len, reverse=True):  # a guard before what it guards
        if not name.endswith(".claim") or name == f"{key}.claim":
            continue
        try:
            text = read_claim(directory / name)
        except StorageError:  # unknown: a process that needs the key raises the error
            held.add(name.removesuffix(".claim"))
            continue
        if text is None:
            continue
        if holder_is_dead(text):
            remove_dead(directory / name, text)
        else:
            held.add(name.removesuffix(".claim"))
    return held


def _is_left_over(path: Path, held: set[str]) -> bool:
    """Return True if no running process uses a listed file.

    The name of a temporary entry contains its key, which is claimed while it is written. Names of
    temporary framework files do not, so these are kept while any key is claimed. A file to link a
    claim from can be removed at any time: its process tries again.
    """
    name = path.name
    if entry := _ENTRY.fullmatch(name):
        return entry[1] not in held
    if _NAMED.fullmatch(name):
        return not held
    return _TO_BE_LINKED.fullmatch(name) is not None
