"""Kernels and the choice of their backend: native if it was compiled, else Numba.

MEGAINDEX_BACKEND=native|numba|reference overrides the choice, and MEGAINDEX_NUM_THREADS limits the
threads of native kernels. Results do not depend on either.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megaindex.errors import InvalidArgument
from megaindex.io.threads import num_cpus
from megaindex.kernels.protocol import NATIVE_INTERFACE

if TYPE_CHECKING:
    from megaindex.kernels.protocol import Backend

logger = logging.getLogger("megaindex")

_MOST_THREADS = 1024  # starting more would take longer than the work of any kernel
_SHOWN = 40  # characters of an invalid setting in a message
_REASON = Path(__file__).with_name("no_native.txt")  # setup.py writes it
_REINSTALL = (
    "reinstall megaindex with a C++17 compiler, without MEGAINDEX_NO_NATIVE and with pip's "
    "--force-reinstall --no-cache-dir"
)
_MODULES = {"native": "_native", "numba": "jit", "reference": "reference"}


def load(name: str) -> Backend:
    """Return the backend of that name: native, numba or reference.

    Raises:
        InvalidArgument: the name is not one of a backend.
        ImportError: the native core was not compiled, or for another version of megaindex.
    """
    if name not in _MODULES:
        raise InvalidArgument(f"MEGAINDEX_BACKEND must be native, numba or reference, got {name!r}")
    module: Any = importlib.import_module(f"megaindex.kernels.{_MODULES[name]}")
    if name == "native" and getattr(module, "INTERFACE", 0) != NATIVE_INTERFACE:
        raise ImportError(f"{module.__file__} was built for another version of megaindex")
    backend: Backend = module
    return backend


@functools.cache
def backend() -> str:
    """Return the name of the backend in use, with a warning if Numba replaces a missing core."""
    name = choose()
    if name == "numba" and (reason := why_not_native()) is not None and not _wanted():
        logger.warning(
            "megaindex runs on Numba, several times slower: its native core cannot be used (%s); "
            "megaindex --version prints the details. To install it, %s.",
            reason.partition("\n")[0],
            _REINSTALL,
        )
    return name


def choose() -> str:
    """Return the name in MEGAINDEX_BACKEND, else that of the fastest installed backend.

    Raises:
        InvalidArgument: MEGAINDEX_BACKEND names an unknown backend or one that cannot be used.
    """
    wanted = _wanted()
    if wanted not in ("", "native"):
        load(wanted)
        return wanted
    reason = why_not_native()
    if wanted and reason is not None:
        raise InvalidArgument(
            f"MEGAINDEX_BACKEND=native cannot be used ({reason.splitlines()[0]}); {_REINSTALL}, "
            "or unset MEGAINDEX_BACKEND"
        )
    return "native" if reason is None else "numba"


def _wanted() -> str:
    return os.environ.get("MEGAINDEX_BACKEND", "")


def why_not_native() -> str | None:
    """Return why the native core is missing, from its build or its import, or None if it is not."""
    try:
        load("native")
    except ImportError as error:
        return _reason(error)
    return None


def _reason(error: ImportError) -> str:
    if isinstance(error, ModuleNotFoundError):  # other errors come from a core that cannot load
        try:
            return _REASON.read_text(encoding="utf-8", errors="replace").strip() or str(error)
        except OSError:
            return f"{error}: the core was not built"
    return str(error)


@functools.cache
def active() -> Backend:
    """Return the backend in use."""
    return load(backend())


@functools.cache
def file_mapper() -> Any | None:
    """Return the native core, which maps all files of a dataset in one call; None where it is not
    in use and files are mapped one by one."""
    is_wanted = _wanted() in ("", "native")
    return load("native") if is_wanted and why_not_native() is None else None


def num_threads() -> int:
    """Return the number of threads for a native kernel.

    MEGAINDEX_NUM_THREADS, or by default the number of CPUs that this process may use.
    """
    wanted = os.environ.get("MEGAINDEX_NUM_THREADS")
    if not wanted:
        return num_cpus()
    if not re.fullmatch("[0-9]{1,6}", wanted) or int(wanted) < 1:
        shown = wanted if len(wanted) <= _SHOWN else f"{wanted[:_SHOWN]}…"
        raise InvalidArgument(
            f"MEGAINDEX_NUM_THREADS must be an integer from 1 to 999999, got {shown!r}"
        )
    return min(int(wanted), _MOST_THREADS)
