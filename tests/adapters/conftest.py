"""Fixtures of the adapters' tests."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from support.megatron_blends import one_process, write_corpora

from megaindex.cache import sidecar as sidecar_file


@pytest.fixture(autouse=True)
def no_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is synced 2 s later, in the middle of another test."""
    monkeypatch.setattr(sidecar_file, "sync_later", lambda sync: None)


@pytest.fixture(scope="module")
def core(megatron_datasets: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """megatron-core in a process group of one."""
    with one_process(megatron_datasets, tmp_path_factory.mktemp("store") / "store") as core:
        yield core


@pytest.fixture(scope="module")
def corpora(megatron_datasets: Any, tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prefixes of the corpora of `write_corpora`; skips where megatron-core is not there."""
    return write_corpora(tmp_path_factory.mktemp("corpora"))


@pytest.fixture
def neox(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The stand-in for GPT-NeoX, as ``megatron``."""
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("torch does not run under the sanitizers")
    from support import neox_stand_in

    import megaindex.adapters.neox as adapter

    for name in [n for n in sys.modules if n.split(".")[0] == "megatron"]:
        monkeypatch.delitem(sys.modules, name)
    for name, module in neox_stand_in.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    adapter.uninstall()
    yield sys.modules["megatron"]
    adapter.uninstall()
