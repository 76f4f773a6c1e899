"""Fixtures of the adapters' tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest


@pytest.fixture
def neox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for GPT-NeoX, as ``megatron``."""
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("torch does not run under the sanitizers")
    import neox_stand_in

    import megaindex.adapters.neox as adapter

    for name in [n for n in sys.modules if n.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in neox_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    adapter.uninstall()
    yield sys.modules["megatron"]
    adapter.uninstall()
