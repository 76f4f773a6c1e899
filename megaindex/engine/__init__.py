"""Engines that run idempotent tasks in local processes or on a Ray cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from megaindex.engine.local import Engine, LocalEngine
from megaindex.errors import InvalidArgument

__all__ = ["ENGINES", "Engine", "open_engine"]

ENGINES = ("local", "ray")


@contextmanager
def open_engine(
    name: str = "local", *, workers: int | None = None, address: str | None = None
) -> Iterator[Engine]:
    """Open an engine for a ``with`` block.

    Args:
        name: ``"local"`` for processes of this machine, ``"ray"`` for a Ray cluster.
        workers: number of tasks at a time, at least 1. Default: the CPUs of the machine or cluster.
        address: address of a running Ray cluster, ``"auto"`` for one of this machine. Default:
            RAY_ADDRESS; if it is not set, a cluster of this machine is started for the block.

    Yields:
        The engine, see `megaindex.engine.local.Engine`.

    Raises:
        InvalidArgument: a setting is out of range or not one of the engine, or Ray is not
            installed.
        EngineError: the cluster cannot be reached.
    """
    if name not in ENGINES:
        raise InvalidArgument(f"engine must be {' or '.join(ENGINES)}, got {name!r}")
    if workers is not None and workers < 1:
        raise InvalidArgument(f"workers must be at least 1, got {workers}")
    if name == "ray":
        from megaindex.engine.ray import RayEngine

        with closing(RayEngine(workers=workers, address=address)) as cluster:
            yield cluster
        return
    if address is not None:
        raise InvalidArgument(f"address {address!r} needs engine ray; choose it")
    with closing(LocalEngine(workers)) as here:
        yield here
