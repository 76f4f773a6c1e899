"""Shows libFuzzer which edges of the native core were taken (a build of run.sh, by GCC)."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

from megaindex.kernels import _native


def connect(atheris: Any) -> None:
    """Register the counters of trace.cpp, linked into the core, with the libFuzzer of atheris."""
    (library,) = Path(atheris.__file__).parent.glob("core_with_libfuzzer*.so")
    fuzzer, core = ctypes.CDLL(str(library)), ctypes.CDLL(_native.__file__)
    core.fuzz_counters.restype = ctypes.c_void_p
    count = core.fuzz_counter_count()
    begin = core.fuzz_counters()
    getattr(fuzzer, "__sanitizer_cov_8bit_counters_init")(
        ctypes.c_void_p(begin), ctypes.c_void_p(begin + count)
    )
    # libFuzzer wants an address and flags for each counter; any that differ will do
    table = (ctypes.c_size_t * (2 * count))(*(x for k in range(count) for x in (begin + k, 0)))
    _kept.append(table)
    getattr(fuzzer, "__sanitizer_cov_pcs_init")(
        ctypes.byref(table), ctypes.c_void_p(ctypes.addressof(table) + ctypes.sizeof(table))
    )


_kept: list[Any] = []
