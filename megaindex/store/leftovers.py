"""Removes what builders that died left in a directory.

Everything that is being written belongs to somebody who holds a claim in the directory, which was
there first and goes last. So whatever a listing shows without its claim has been left behind.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from megaindex.errors import StorageError
from megaindex.store.holder import is_gone, read_claim, take_away

logger = logging.getLogger("megaindex")

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
    """The keys that others claim; claims of processes known to be dead are removed."""
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
        if is_gone(text):
            aside = f"{name}.{secrets.token_hex(8)}.dead"
            take_away(directory / name, text, directory / aside)
        else:
            held.add(name.removesuffix(".claim"))
    return held


def _is_left_over(path: Path, held: set[str]) -> bool:
    """Whether nobody needs what a listing showed, by a holder who has not begun to write.

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
        return is_gone(read_claim(path) or "")
    return _TO_BE_LINKED.fullmatch(name) is not None


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
