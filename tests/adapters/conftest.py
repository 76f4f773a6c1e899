"""Fixtures of the adapters' tests."""

from __future__ import annotations

import os
import sys
from collections import UserDict
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.megatron_blends import one_process, write_corpora

from megaindex.adapters import policy
from megaindex.cache import sidecar as sidecar_file


@pytest.fixture(autouse=True)
def no_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is synced 2 s later, in the middle of another test."""
    monkeypatch.setattr(sidecar_file, "sync_later", lambda sync: None)


class LikelyModules(UserDict[str, Any]):
    """`sys.modules`, of which those are not listed that hold nothing of a framework."""

    def __init__(self) -> None:
        self.data = sys.modules

    def items(self) -> Any:
        return [item for item in self.data.items() if not item[0].startswith(UNLIKELY)]


# Of 3,700 loaded modules 2,300
UNLIKELY = ("torch.", "sympy.", "networkx.", "numpy.", "mpmath.")


@pytest.fixture(autouse=True)
def likely_modules(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each `install` looks through the modules of the test and the framework, and not, for half of
    the time that tests take, through those of packages that they import."""
    if "all_modules" not in request.fixturenames:
        system = SimpleNamespace(modules=LikelyModules(), meta_path=sys.meta_path)
        monkeypatch.setattr(policy, "sys", system)


@pytest.fixture
def all_modules() -> None:
    """For tests whose `install` looks through all modules."""


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
