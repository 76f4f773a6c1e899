"""Joins a Ray cluster, or starts one on this machine."""

from __future__ import annotations

import logging
import os
import socket
from typing import Any

from megaindex.errors import EngineError, InvalidArgument

_ANSWERS_WITHIN = 5.0  # seconds; Ray itself tries for minutes
_OBJECT_STORE = 80 << 20  # bytes, about the least that Ray takes: data goes through files
_QUIET = {
    "log_to_driver": False,  # what tasks have to say comes back as exceptions
    "logging_level": logging.ERROR,
}


def import_ray() -> Any:
    """The module, told to keep still.

    Raises:
        InvalidArgument: Ray is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # no task wants a GPU
    try:
        import ray
    except ImportError:
        raise InvalidArgument(
            "engine ray needs Ray; pip install 'megaindex[ray]', on every node"
        ) from None
    return ray


def join_cluster(ray: Any, address: str | None, workers: int | None) -> bool:
    """Make this process part of a cluster; False if it was already, and is to stay so.

    Args:
        address: where the cluster is; ``auto`` finds one of this machine. Default: RAY_ADDRESS, and
            without it a cluster of this machine alone is started.
        workers: CPUs of the one that is started. Default: those of this process.

    Raises:
        EngineError: no cluster is there, it cannot be joined from here, or this process is in
            another one.
    """
    address = address or os.environ.get("RAY_ADDRESS") or None
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined):
            raise EngineError(
                f"{address}: this process is part of the Ray cluster {joined}; call ray.shutdown() "
                "first, or give no address"
            )
        return False
    if address is None:
        _initialise(
            ray,
            "this machine",
            address="local",
            num_cpus=workers or len(os.sched_getaffinity(0)),
            object_store_memory=_OBJECT_STORE,
            include_dashboard=False,
        )
    else:
        _check_that_it_answers(address)
        _initialise(ray, address, address=address)
    return True


def _initialise(ray: Any, where: str, **settings: Any) -> None:
    try:
        ray.init(**settings, **_QUIET)
    except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        reason = " ".join(str(error).split()).rstrip(".")
        raise EngineError(
            f"{where}: cannot be used as a Ray cluster: {reason}; run the command on a node of it, "
            "with the Python and the Ray that it was started with"
        ) from error
    # Errors of nodes are printed to stdout whatever log_to_driver says, with pages of their logs.
    worker = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


def _check_that_it_answers(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # auto, ray://…: Ray knows at once
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"{address}: nothing answers there: {error}; start a cluster with `ray start --head` "
            "and give the address that it prints, or leave --address out to start one here"
        ) from error
