"""Replacement of a framework's names, now or when a module is imported."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import ModuleType
from typing import Any

_ABSENT: Any = object()


class Patches:
    """Replacements that are undone together; false if empty."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a module or a class, where `undo` restores or deletes it."""
        before = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._undo.append(partial(_restore, owner, name, before))

    def replace_module(self, name: str, module: ModuleType) -> None:
        """Make ``import name`` give another module."""
        before = sys.modules.get(name, _ABSENT)
        sys.modules[name] = module
        self._undo.append(partial(_restore_module, name, before))

    def undo(self) -> None:
        """Undo the replacements in reverse order."""
        while self._undo:
            self._undo.pop()()


def _restore(owner: Any, name: str, before: object) -> None:
    if before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _restore_module(name: str, before: Any) -> None:
    if before is _ABSENT:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = before


def after_import(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``callback(module)`` when the module ``name`` is imported, or now if it was.

    Returns:
        A function that cancels the call.
    """
    if name in sys.modules:
        callback(sys.modules[name])
        return lambda: None
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)
    return finder.withdraw


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that asks the other finders for one module and wraps its loader."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        self.withdraw()  # so that the search below does not come back here
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self._callback)
        return spec

    def withdraw(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _Loader(importlib.abc.Loader):
    def __init__(
        self, loader: importlib.abc.Loader, callback: Callable[[ModuleType], None]
    ) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)
