"""Guards `make sanitize` against testing another build of the core than it means to."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


def test_the_loaded_core_has_the_sanitizers() -> None:
    if os.environ.get("MEGAINDEX_SANITIZE") != "1":
        pytest.skip("only under `make sanitize`")
    from megaindex.kernels import _native

    core = Path(_native.__file__).read_bytes()
    assert b"__asan_init" in core or b"__tsan_init" in core
