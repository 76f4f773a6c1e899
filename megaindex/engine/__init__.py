"""Engines for tasks that may run anywhere, and twice: local processes, or Ray."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager

from megaindex.engine.local import LocalEngine
from megaindex.engine.tasks import Engine
from megaindex.errors import InvalidArgument

__all__ = ["ENGINES", "Engine", "open_engine"]

ENGINES = ("local", "ray")


@contextmanager
def open_engine(
    name: str = "local", *, workers: int | None = None, address: str | None = None
) -> Iterator[Engine]:
    """Yield the engine ``name``, and close it in the end.

    Args:
        name: ``local`` for processes of this machine, ``ray`` for a Ray cluster.
        workers: tasks at the same time. Default: one for each CPU, here or of the cluster.
        address: of a running Ray cluster. Default: one is started here, and stopped in the end.

    Raises:
        InvalidArgument: a setting is out of range or contradicts another, or Ray is not installed.
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
        raise InvalidArgument(f"address {address!r} is of a Ray cluster; choose engine ray")
    with closing(LocalEngine(workers)) as here:
        yield here
