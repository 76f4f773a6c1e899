"""Who holds a claim, as the text of its file tells, and whether that process still lives."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

from megaindex.store.entry import boot_id


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


def _fields(text: str | None) -> dict[str, object]:
    try:
        fields = json.loads(text or "{}")
    except ValueError:  # read while its holder was writing
        return {}
    return fields if isinstance(fields, dict) else {}


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
    if not alike or here["boot"] == "unknown" or not isinstance(pid, int):
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
