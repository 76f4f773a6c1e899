"""Fixtures that every test folder shares."""

from __future__ import annotations

import functools
import gc
import importlib.util
import os
import signal
import stat
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings

from megaindex.kernels import load

_COMMON: Any = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    "database": None,  # the seed alone decides what is tried
}
_EXAMPLES = os.environ.get("MEGAINDEX_TEST_EXAMPLES")
settings.register_profile(
    "megaindex", derandomize=True, max_examples=int(_EXAMPLES or 15), **_COMMON
)
# `make explore` passes it, with a seed
settings.register_profile(
    "explore", derandomize=False, max_examples=int(_EXAMPLES or 300), **_COMMON
)
settings.register_profile("quick", derandomize=True, max_examples=int(_EXAMPLES or 5), **_COMMON)
settings.load_profile("megaindex")

# Several processes run tests, and their arrays are small. Torch reads it when it is imported.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# The width of tables and help in the outputs that tests expect.
os.environ.pop("COLUMNS", None)

# Collecting makes a million objects, none of which is garbage.
gc.disable()

# What a shell starts in the background ignores Ctrl-C, and so do its children: tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)


def _without_the_disk(file: Any, sync: Any = os.fsync) -> None:
    mode = os.fstat(file).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        sync(file)  # fails


# No test loses its power, and disks would be waited for tens of thousands of times. Which syncs
# there are, and in which order, is tested by functions in the place of this one.
os.fsync = _without_the_disk

# Numbers of modules loaded when the garbage collector was told to leave them out.
_frozen = [0]

BACKENDS = ("reference", "numba", "native")

# ``pytest --quick`` runs these folders alone; it needs pytest, hypothesis and megaindex.
QUICK = ("cache", "settings", "format", "index", "io", "kernels", "plan", "recipe")
OPTIONAL = (
    "torch", "megatron", "torchdata", "streaming", "grain", "ray", "moto", "obstore", "pyarrow",
    "zstandard", "tokenizers", "sentencepiece",
)  # fmt: skip
# Folders of long tests: with several processes they come first, so that no process works on one
# of them while the others have ended.
FIRST = ("engine", "robustness", "adapters", "test_install.py", "objects", "kernels")
# Folders whose tests share a Ray cluster, or a server of objects
SHARED = ("engine", "objects")
# Words of files whose tests import megatron.core
MEGATRON = ("from megatron.core", "megatron_datasets", "support.megatron_", 'skip("megatron')


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--quick",
        action="store_true",
        help="the tests of the core alone, without torch, megatron-core and Ray",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.option.markexpr == "not slow" and _has_room(Path("/dev/shm")):
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", "/dev/shm")
    if config.getoption("--quick"):
        sys.modules.update(dict.fromkeys(OPTIONAL))  # type: ignore[arg-type]  # None: not found
        settings.load_profile("quick")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    if not config.getoption("--quick"):
        return None
    below = collection_path.relative_to(Path(__file__).parent).parts
    return True if below and below[0] not in QUICK else None


@pytest.hookimpl(wrapper=True)
def pytest_pycollect_makeitem() -> Iterator[Any]:
    """Mark the cases of a test that ``slow_cases`` names, each of which must be there, as slow."""
    found = yield
    cases = found if isinstance(found, list) else []
    for mark in cases[0].iter_markers("slow_cases") if cases else ():
        for name in mark.args:
            named = [case for case in cases if f"-{name}-" in f"-{case.callspec.id}-"]
            assert named, f"{cases[0].nodeid}: slow_cases names {name!r}, no case of it"
            for case in named:
                case.add_marker("slow")
    return found


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        left_out = [item for item in items if _needs_more_than_the_core(item)]
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if not _needs_more_than_the_core(item)]
    if hasattr(config, "workerinput"):  # one of several processes
        items.sort(key=_place)


def pytest_collection_finish() -> None:
    """Garbage that tests leave is not looked for among all modules and tests each time."""
    gc.freeze()
    gc.enable()
    _frozen.append(len(sys.modules))


def pytest_runtest_logfinish() -> None:
    """Nor among the modules that a test was the first to need, megatron.core most of all."""
    if len(sys.modules) > _frozen[-1] + 300:
        gc.collect()
        gc.freeze()
        _frozen.append(len(sys.modules))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Give each file to one process, but the files of a folder that share a server, and those that
    import megatron.core, which takes seconds, to the same one."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # type: ignore[misc]
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            for folder in SHARED:
                if file.startswith(f"tests/{folder}/"):
                    return folder
            return "megatron" if _imports_megatron(file) else file

    config.option.loadscopereorder = False  # not those of the most tests first, but those of FIRST
    return ByFile(config, log)


@functools.cache
def _imports_megatron(file: str) -> bool:
    text = (Path(__file__).parents[1] / file).read_text()
    return any(words in text for words in MEGATRON)


def _has_room(memory: Path) -> bool:
    """Return True if a folder in memory takes what all tests but the slow ones write, 0.1 GB each
    process, and runs the programs among it."""
    if not memory.is_dir() or not os.access(memory, os.W_OK):
        return False
    found = os.statvfs(memory)
    return found.f_bavail * found.f_frsize >= 4 << 30 and not found.f_flag & os.ST_NOEXEC


def _needs_more_than_the_core(item: pytest.Item) -> bool:
    fixtures = set(getattr(item, "fixturenames", ())) - {"megatron_helpers"}
    peers = any(name.startswith(("megatron_", "their_")) for name in fixtures)
    return peers or any(map(item.get_closest_marker, ("slow", "not_quick")))


def _place(item: pytest.Item) -> int:
    folder = item.path.relative_to(Path(__file__).parent).parts[0]
    return FIRST.index(folder) if folder in FIRST else len(FIRST)


@pytest.fixture
def short_waits(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Torch waits 0.1 seconds, not 5, for each worker of a DataLoader whose iteration failed or was
    left: here, and not in a later test, where it would be collected."""
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)
    yield
    gc.collect()


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request: pytest.FixtureRequest) -> Any:
    """Every kernel test runs on each backend."""
    return _loaded(request.param)


@pytest.fixture(params=BACKENDS[1:], scope="session")
def compiled(request: pytest.FixtureRequest) -> Any:
    """Each backend that is compared with the reference, or with what takes the reference long."""
    return _loaded(request.param)


def _loaded(name: str) -> Any:
    if name == "native" and os.environ.get("MEGAINDEX_NO_NATIVE") == "1":
        pytest.skip("installed without the native core")
    return load(name)


def _skip_without_peers() -> None:
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("torch does not run under the sanitizers")


@pytest.fixture(scope="session")
def megatron_helpers(pytestconfig: pytest.Config) -> ModuleType:
    """megatron-core's compiled helpers; with --quick those of the fastest backend, which the other
    backends are then compared with."""
    if pytestconfig.getoption("--quick"):
        return importlib.import_module("megaindex.helpers")
    _skip_without_peers()
    name = "megatron.core.datasets.helpers_cpp"
    if name not in sys.modules:  # megatron.core itself takes seconds to import
        (file,) = Path(_folder_of("megatron"), "core", "datasets").glob("helpers_cpp.*.so")
        spec = importlib.util.spec_from_file_location(name, file)
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def _folder_of(package: str) -> str:
    """The folder of a package, which is not imported."""
    spec = importlib.util.find_spec(package)
    assert spec is not None, f"{package} is not installed"
    assert spec.submodule_search_locations is not None
    return next(iter(spec.submodule_search_locations))


@pytest.fixture(scope="session")
def megatron_datasets() -> Any:
    """megatron-core's dataset modules, with the names used here."""
    _skip_without_peers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import gpt_dataset, helpers, indexed_dataset, utils

    class Namespace:
        GPTDataset = gpt_dataset.GPTDataset
        GPTDatasetConfig = gpt_dataset.GPTDatasetConfig
        IndexedDataset = indexed_dataset.IndexedDataset
        IndexedDatasetBuilder = indexed_dataset.IndexedDatasetBuilder
        Split = utils.Split

    Namespace.helpers = helpers
    return Namespace


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(20260101)
