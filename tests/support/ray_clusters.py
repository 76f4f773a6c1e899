"""Ray clusters on this machine, whose nodes can come and go."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

_NODE = {"object_store_memory": 80 << 20, "include_dashboard": False}


@contextmanager
def ray_cluster(**head: Any) -> Iterator[Any]:
    """A `ray.cluster_utils.Cluster` with a head node of these settings."""
    with _starting():
        from ray.cluster_utils import Cluster

        cluster = Cluster(initialize_head=True, head_node_args={**_NODE, **head})
    try:
        yield cluster
    finally:
        with quiet():
            cluster.shutdown()


def add_node(cluster: Any, **settings: Any) -> Any:
    """The new node, for `cluster.remove_node`."""
    with _starting():
        return cluster.add_node(**_NODE, **settings)


@contextmanager
def quiet() -> Iterator[None]:
    """Ray warns when it is imported, started and joined; nothing of that is ours."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@contextmanager
def _starting() -> Iterator[None]:
    """Workers import what the tests import."""
    environment = {
        "PYTHONPATH": os.pathsep.join(sys.path),
        "RAY_memory_monitor_refresh_ms": "0",  # others may fill the memory of this machine
    }
    with quiet(), patch.dict(os.environ, environment):
        os.environ.pop("MEGAINDEX_NUM_THREADS", None)
        yield
