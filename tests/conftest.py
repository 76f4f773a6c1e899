"""Fixtures that every test folder shares."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from support.ray_clusters import ray_cluster

from megaindex.kernels import load

_COMMON: Any = {
    "deadline": None,
    "suppress_health_check": [HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    "database": None,  # the seed alone decides what is tried
}
_EXAMPLES = os.environ.get("MEGAINDEX_TEST_EXAMPLES")
settings.register_profile(
    "megaindex", derandomize=True, max_examples=int(_EXAMPLES or 50), **_COMMON
)
# `make explore` passes it, with a seed
settings.register_profile(
    "explore", derandomize=False, max_examples=int(_EXAMPLES or 300), **_COMMON
)
settings.load_profile("megaindex")

# What a shell starts in the background ignores Ctrl-C, and so do its children: tests send it.
signal.signal(signal.SIGINT, signal.default_int_handler)

BACKENDS = ("reference", "numba", "native")


@pytest.fixture(params=BACKENDS, scope="session")
def backend(request: pytest.FixtureRequest) -> Any:
    """Every kernel test runs on each backend."""
    if request.param == "native" and os.environ.get("MEGAINDEX_NO_NATIVE") == "1":
        pytest.skip("installed without the native core")
    return load(request.param)


def _skip_without_peers() -> None:
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("torch does not run under the sanitizers")


@pytest.fixture(scope="session")
def megatron_helpers() -> ModuleType:
    """megatron-core's compiled helpers."""
    _skip_without_peers()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import helpers_cpp
    return helpers_cpp


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


@pytest.fixture(scope="session")
def ray_address() -> Iterator[str]:
    """A Ray cluster of one node with two CPUs, in processes of its own; this one has not joined."""
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("Ray does not run under the sanitizers")
    with ray_cluster(num_cpus=2) as cluster:
        yield cluster.address
