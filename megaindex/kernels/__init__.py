"""Chooses the backend, once: native where it was compiled, else Numba.

MEGAINDEX_BACKEND=native|numba|reference overrides the choice, MEGAINDEX_NUM_THREADS bounds the
threads of the native core. Results depend on neither.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import re

from megaindex.errors import InvalidArgument
from megaindex.kernels.protocol import Backend

logger = logging.getLogger("megaindex")

_MOST_THREADS = 1024  # beyond them a kernel has less to do than there is to start
_SHOWN = 40  # characters of a wrong setting
_MODULES = {"native": "native", "numba": "jit", "reference": "reference"}


def load(name: str) -> Backend:
    """The backend of that name: native, numba or reference.

    Raises:
        InvalidArgument: no such backend.
        ImportError: the native core was not compiled.
    """
    if name not in _MODULES:
        raise InvalidArgument(f"MEGAINDEX_BACKEND must be native, numba or reference, got {name!r}")
    module: Backend = importlib.import_module(f"megaindex.kernels.{_MODULES[name]}")
    return module


@functools.cache
def backend() -> str:
    """Name of the backend in use: native, numba or reference."""
    wanted = os.environ.get("MEGAINDEX_BACKEND")
    if wanted:
        try:
            load(wanted)
        except ImportError as error:
            raise InvalidArgument(
                f"MEGAINDEX_BACKEND={wanted} is not installed ({error}); reinstall megaindex where "
                "a C++17 compiler is, or unset MEGAINDEX_BACKEND"
            ) from error
        return wanted
    try:
        load("native")
    except ImportError as error:
        logger.warning(
            "megaindex runs on Numba, several times slower: its native core is not installed (%s). "
            "Reinstall where a C++17 compiler is, without MEGAINDEX_NO_NATIVE.",
            error,
        )
        return "numba"
    return "native"


@functools.cache
def active() -> Backend:
    """The backend in use."""
    return load(backend())


def num_threads() -> int:
    """Threads a native kernel may use: MEGAINDEX_NUM_THREADS, else the CPUs of this process."""
    wanted = os.environ.get("MEGAINDEX_NUM_THREADS")
    if not wanted:
        return len(os.sched_getaffinity(0))
    if not re.fullmatch("[0-9]{1,6}", wanted) or int(wanted) < 1:
        shown = wanted if len(wanted) <= _SHOWN else f"{wanted[:_SHOWN]}…"
        raise InvalidArgument(
            f"MEGAINDEX_NUM_THREADS must be an integer from 1 to 999999, got {shown!r}"
        )
    return min(int(wanted), _MOST_THREADS)
