"""One builder at a time for what several processes want to find in a directory.

Whoever finds nothing tries to claim the key by hard-linking a file of its own to ``<key>.claim``,
which succeeds for exactly one process of all that see the directory, on NFS too. So a directory on
a shared file system gets one builder for the whole cluster, a directory on each node's own disk one
per node, and nobody has to be told which it is. No barrier, no device and no launcher is involved.

The holder bumps a counter in the claim. A waiter that sees the counter stand still for as long as
``stale_after``, by its own clock, takes the claim away; where holder and waiter run on one machine
it sees at once that the holder is gone.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TextIO, TypeVar

from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.io.failures import as_storage_error
from megaindex.io.filesystem import look_again
from megaindex.store.holder import is_gone, read_claim, take_away, this_process, token_of, who
from megaindex.store.leftovers import remove_leftovers

logger = logging.getLogger("megaindex")

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
    """What ``find`` finds, or what ``build`` returns in the one process that builds.

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
        """Whether the claim is ours now; False where another process holds it."""
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
            logger.info("%s: another process builds (%s); waiting", self._path, who(last))
        while (seen := read_claim(self._path)) is not None:
            now = time.monotonic()
            if seen != last:
                last, since = seen, now
            if is_gone(seen) or now - since > self._stale_after:
                self._take_away(seen)
                return True
            if now > deadline:
                raise StorageError(
                    f"{self._path}: waited for the process that builds ({who(seen)}), and it is "
                    "still at work; set MEGAINDEX_BUILD_TIMEOUT to more seconds, build the cache "
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
            with contextlib.suppress(OSError), self._opened() as file:
                if token_of(file.read()) == self._token:
                    file.seek(0)
                    file.write(self._text(count))

    def _opened(self) -> TextIO:
        return open(self._path, "r+", encoding="utf-8", errors="replace")

    def _take_away(self, dead: str) -> None:
        take_away(self._path, dead, self._own.with_name(f"{self._own.name}.dead"))
