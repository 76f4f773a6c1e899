"""Who holds a claim, as the text of its file tells, and whether that process still lives."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import socket
from pathlib import Path

from megaindex.io.failures import as_storage_error, storage_error
from megaindex.io.json_files import Damaged, parse_object
from megaindex.io.kinds import open_at_once
from megaindex.store.entry import boot_id

logger = logging.getLogger("megaindex")

_LONGEST = 4096  # bytes; a claim has less than two hundred
_MOST_PID = 2**31 - 1


def this_process() -> dict[str, object]:
    """What identifies a process, as far as other processes can tell."""
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
    """The text of a claim; None where there is none.

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


def take_away(path: Path, dead: str, aside: Path) -> None:
    """Remove the claim of a dead process, whose text is ``dead``; of several who try one succeeds.

    Args:
        aside: a name that nobody else uses.
    """
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
            logger.warning("%s: its holder (%s) is gone; taken over", path, who(dead))
        aside.unlink()


def _fields(text: str | None) -> dict[str, object]:
    """Nothing of a text that is no claim: read while its holder was writing, damaged or forged."""
    try:
        return parse_object(text or "{}")
    except Damaged:
        return {}


def token_of(text: str | None) -> object:
    """What distinguishes a claim from every other of the same name."""
    return _fields(text).get("token")


def who(text: str) -> str:
    """The holder, for messages."""
    fields = _fields(text)
    return f"process {fields.get('pid', '?')} on {fields.get('host', '?')}"


def is_gone(text: str) -> bool:
    """Whether the holder ran on this machine and has ended; False where that cannot be told."""
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
