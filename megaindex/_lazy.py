"""Lazy public names of a package: each is imported from its defining module on first use.

A package lists its public names once, in the stub ``__init__.pyi`` that type checkers read:

    from megaindex.builders.blend import build_blend as build_blend

A line ``from megaindex import plan as plan`` makes a package of the package available without its
import. It is in `dir`, and not in ``__all__``: ``import *`` loads none of them.
"""

from __future__ import annotations

import contextlib
import importlib
import sys
from collections.abc import Iterator
from types import ModuleType

from megaindex.errors import InvalidArgument


@contextlib.contextmanager
def torch_needed(what: str) -> Iterator[None]:
    """Raise InvalidArgument in place of the ImportError of an environment without torch."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise InvalidArgument(
            f"{what} needs torch, which is not installed; pip install 'megaindex[torch]'"
        ) from None


@contextlib.contextmanager
def library_needed(message: str) -> Iterator[None]:
    """Raise InvalidArgument with a message in place of the ImportError of a missing library."""
    try:
        yield
    except ImportError:
        raise InvalidArgument(message) from None


def lazy_exports(package: str) -> None:
    """Define the names listed in a package's stub, and ``__all__``, on the imported package."""
    module = sys.modules[package]
    with open(f"{module.__path__[0]}/__init__.pyi", encoding="utf-8") as stub:
        text = stub.read().replace("(\n", "")  # a long line is divided after its bracket
    lines = [line.split() for line in text.splitlines()]
    homes = {words[3]: words[1] for words in lines if words[:1] == ["from"]}
    module.__dict__["_homes"] = homes
    own = [words[0][:-1] for words in lines if words and words[0].endswith(":")]  # __version__
    names = [name for name, home in homes.items() if home != package]
    module.__dict__["__all__"] = sorted([*names, *own])
    module.__class__ = _LazyPackage


class _LazyPackage(ModuleType):
    """A package that imports its public names on first use, see PEP 562.

    A submodule may have the name of the function that it defines (``corpus.merge``). The import
    system would set the package's attribute to the module; here the attribute is the function.
    """

    _homes: dict[str, str]

    def __getattr__(self, name: str) -> object:
        if name not in self._homes:
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        if self._homes[name] == self.__name__:
            return importlib.import_module(f"{self.__name__}.{name}")
        with torch_needed(f"{self.__name__}.{name}"):
            home = importlib.import_module(self._homes[name])
        value = getattr(home, name)
        self.__dict__[name] = value
        return value

    def __setattr__(self, name: str, value: object) -> None:
        is_module = isinstance(value, ModuleType) and value.__name__ == f"{self.__name__}.{name}"
        if not (is_module and self._homes.get(name, self.__name__) != self.__name__):
            super().__setattr__(name, value)

    def __dir__(self) -> list[str]:
        return sorted({*self._homes, *self.__dict__["__all__"]})
