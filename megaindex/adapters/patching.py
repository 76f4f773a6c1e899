"""Names of a framework replaced, and put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

_ABSENT: Any = object()


class Patches:
    """What was replaced, so that all of it can be put back; true while there is any."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a module or a class; one that it only inherits is put into it."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._undo.append(partial(_set_back, owner, name, before))

    def replace_module(self, name: str, module: ModuleType) -> None:
        """Let ``import name`` give another module."""
        before = sys.modules.get(name, _ABSENT)
        sys.modules[name] = module
        self._undo.append(partial(_import_again, name, before))

    def undo(self) -> None:
        """Put everything back, the last first."""
        while self._undo:
            self._undo.pop()()


def _set_back(owner: Any, name: str, before: object) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _import_again(name: str, before: Any) -> None:
    if before is _ABSENT:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = before
