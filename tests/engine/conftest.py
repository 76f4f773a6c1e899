"""Every engine is held to the same promises: two workers of this machine, and two of Ray."""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from support.corpora import write_corpus
from support.engine_builds import content, settings
from support.ray_clusters import quiet, ray_cluster

from megaindex.builders.cached import BuildTask
from megaindex.engine import Engine, open_engine

CLUSTERS = ExitStack()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Ray is tested by `make slow` alone, which installs it."""
    for item in items:
        words = (item.path.stem, *re.split(r"\W", item.name))  # the file, and parameters
        if item.path.parent == Path(__file__).parent and {"ray", "test_ray"} & {*words}:
            item.add_marker(pytest.mark.slow)


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(nextitem: pytest.Item | None) -> None:
    """The cluster ends with the last test of this folder: its processes are never idle."""
    if nextitem is None or nextitem.path.parent != Path(__file__).parent:
        CLUSTERS.close()


@pytest.fixture(scope="session")
def ray_address(ray_folder: None) -> str:
    """A Ray cluster of one node with two CPUs, in processes of its own; this one has not joined."""
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("Ray does not run under the sanitizers")
    address: str = CLUSTERS.enter_context(ray_cluster(num_cpus=2)).address
    return address


@pytest.fixture(scope="session", autouse=True)
def ray_folder() -> Iterator[None]:
    """A folder for the files of Ray, among them the address of the latest cluster, which all
    processes of this machine would share. Its path is short, as those of sockets must be."""
    with (
        tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder,
        patch.dict(os.environ, {"RAY_TMPDIR": folder}),
    ):
        yield


@pytest.fixture(params=["local", "ray"], scope="module")
def engine(request: pytest.FixtureRequest) -> Iterator[Engine]:
    """One for all tests of a module: what one of them breaks off must not disturb the next."""
    with ExitStack() as stack:
        if request.param == "local":
            yield stack.enter_context(open_engine(workers=2))
            return
        address = request.getfixturevalue("ray_address")
        with quiet():
            cluster = stack.enter_context(open_engine("ray", address=address))
        yield cluster


@pytest.fixture(scope="session")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prefixes of 12 corpora, no two alike."""
    folder = tmp_path_factory.mktemp("corpora")
    generator = np.random.default_rng(5)
    for number in range(12):
        write_corpus(folder / f"c{number:02}", generator.integers(1, 90, 40 + number), np.uint16)
    return [str(folder / f"c{number:02}") for number in range(12)]


@pytest.fixture(scope="session")
def alone(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What one process builds, one dataset after the other."""
    cache = tmp_path_factory.mktemp("alone")
    for path in paths:
        BuildTask(path=path, settings=settings(cache)).run()
    found = content(cache)
    assert len(found) == 12 * 5  # directory, manifest, three arrays
    return found
