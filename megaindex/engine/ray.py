"""Engine of a Ray cluster."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from megaindex._lazy import library_needed
from megaindex.engine.local import TaskOutcome, TaskQueue, capture
from megaindex.errors import EngineError
from megaindex.io.threads import num_cpus

Task = TypeVar("Task")
Result = TypeVar("Result")

_ANSWERS_WITHIN = 5.0  # seconds; Ray itself tries for minutes
_OBJECT_STORE = 80 << 20  # bytes, about Ray's minimum, since data is exchanged through files
_QUIET = {
    "log_to_driver": False,  # errors of tasks are returned as exceptions
    "logging_level": logging.ERROR,
}

logger = logging.getLogger("megaindex")

_LOOK_AGAIN = 5.0  # seconds between counts of the CPUs
_AHEAD = 2  # submitted tasks per CPU, so that no CPU waits for this process
_GRACE = 5.0  # seconds for the clean-up of cancelled tasks


class RayEngine:
    """Engine with one CPU of the cluster per task; all nodes must have megaindex installed."""

    def __init__(self, *, workers: int | None = None, address: str | None = None) -> None:
        self._ray = import_ray()
        self._wanted = workers
        self._is_ours = join_cluster(self._ray, address, workers)
        self._cpus: int
        self._looked = -_LOOK_AGAIN

    @property
    def workers(self) -> int:
        """Number of workers requested, or of CPUs in the cluster."""
        return self._wanted or max(1, self._count_cpus())

    @property
    def in_flight(self) -> int:
        """Number of tasks submitted at a time."""
        return self._wanted or _AHEAD * self.workers

    def run(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """See `Engine.run`; if a task fails, running tasks are cancelled."""
        run = _RayTasks(self._ray, self, function, tasks)
        try:
            while finished := run.finished():
                yield from finished
        finally:
            run.cancel()

    def close(self) -> None:
        """Stop the cluster if it was started here."""
        if self._is_ours:
            self._ray.shutdown()

    def _count_cpus(self) -> int:
        now = time.monotonic()
        if now - self._looked >= _LOOK_AGAIN:
            self._looked = now
            self._cpus = int(self._ray.cluster_resources().get("CPU", 0))
            if not self._cpus:
                logger.warning("the Ray cluster has no CPUs; waiting for a node to join it")
        return self._cpus


class _RayTasks(Generic[Task, Result]):
    """State of one call of `RayEngine.run`."""

    def __init__(
        self,
        ray: Any,
        engine: RayEngine,
        function: Callable[[Task], Result],
        tasks: Sequence[Task],
    ) -> None:
        from megaindex import __version__

        self._ray = ray
        self._engine = engine
        # Retries are made here and not by Ray, so that all engines count and report them alike.
        self._remote = ray.remote(num_cpus=1, max_retries=0, retry_exceptions=False)(run_on_node)
        self._home = Home(version=__version__, directory=os.getcwd())
        self._function = function
        self._tasks = tasks
        self._queue = TaskQueue(tasks)
        self._running: dict[Any, int] = {}

    def finished(self) -> list[tuple[int, Result]]:
        """Wait for tasks and return their numbers and results; [] if none are left."""
        results: list[tuple[int, Result]] = []
        while not results:
            self._begin()
            if not self._running:
                break
            for reference in self._ended():
                number = self._running.pop(reference)
                outcome = self._outcome(reference, number)
                if outcome is not None:
                    results.append((number, outcome.result()))
        else:
            self._begin()  # before the caller processes the results
        return results

    def cancel(self) -> None:
        """Interrupt running tasks, then end those that do not stop."""
        running = list(self._running)
        with contextlib.suppress(self._ray.exceptions.RayError):  # of a cluster that ended
            for force in (False, True):
                for reference in running:
                    self._ray.cancel(reference, force=force)
                if running:
                    _, running = self._ray.wait(running, num_returns=len(running), timeout=_GRACE)

    def _begin(self) -> None:
        limit = self._engine.in_flight
        while len(self._running) < limit and (number := self._queue.next()) is not None:
            reference = self._remote.remote(self._home, self._function, self._tasks[number])
            self._running[reference] = number

    def _ended(self) -> list[Any]:
        """Return the tasks that ended, or [] after a time."""
        running = list(self._running)
        some, _ = self._ray.wait(running, num_returns=1, timeout=_LOOK_AGAIN)
        if not some:
            return []
        ended: list[Any] = self._ray.wait(running, num_returns=len(running), timeout=0)[0]
        return ended

    def _outcome(self, reference: Any, number: int) -> TaskOutcome[Result] | None:
        """Return the outcome of a task, or None if its worker was lost and it was queued again."""
        errors = self._ray.exceptions
        task = self._tasks[number]
        try:
            outcome: TaskOutcome[Result] = self._ray.get(reference)
            return outcome
        except errors.RayTaskError as error:  # not an exception of the task, which is an outcome
            raise EngineError(
                f"{task}: a node of the cluster cannot run it: {_first_line(error.cause)}; install "
                f"the same megaindex and its dependencies on every node"
            ) from error
        except errors.OutOfMemoryError:
            how = "ended because its node ran out of memory"
        except errors.NodeDiedError:
            how = "gone with its node"
        except errors.WorkerCrashedError:
            how = "killed or crashed"
        except errors.ObjectLostError:
            how = "gone before its result was fetched"
        except errors.RayError as error:
            raise EngineError(
                f"{task}: the Ray cluster failed to run it: {_first_line(error)}; check it with "
                "`ray status`, then start the command again, which continues"
            ) from error
        self._queue.count_loss(number, how)
        return None


def _first_line(error: object) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0].rstrip(".") if lines else type(error).__name__


@dataclass(frozen=True, kw_only=True)
class Home:
    """Version and directory of a command, which its tasks need on every node."""

    version: str
    directory: str

    def enter(self) -> None:
        """Change to the directory; EngineError if it or that version of megaindex is missing."""
        from megaindex import __version__

        node = platform.node()
        if __version__ != self.version:
            raise EngineError(
                f"node {node} has megaindex {__version__}, the command runs {self.version}; "
                "install the same version on every node"
            )
        try:
            os.chdir(self.directory)
        except OSError as error:
            raise EngineError(
                f"{self.directory}: node {node} cannot change to this directory of the command "
                f"({os.strerror(error.errno or 0)}); start it in a directory of the shared file "
                "system"
            ) from error


def run_on_node(home: Home, function: Callable[[Task], Result], task: Task) -> TaskOutcome[Result]:
    """Run a task on one thread of a node, since a node runs one task per CPU."""
    os.environ.setdefault("MEGAINDEX_NUM_THREADS", "1")
    try:
        home.enter()
    except EngineError as error:
        return TaskOutcome(error=error)
    return capture(function, task)


def import_ray() -> Any:
    """Return the module ray without usage reports; InvalidArgument if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # tasks do not use GPUs
    with library_needed("engine ray needs Ray; pip install 'megaindex[ray]', on every node"):
        import ray
    return ray


def join_cluster(ray: Any, address: str | None, workers: int | None) -> bool:
    """Connect this process to a cluster; return False if it was connected before.

    Args:
        address: address of the cluster, see `megaindex.open_engine`.
        workers: CPUs of a cluster that is started. Default: those of this process.

    Raises:
        EngineError: the cluster cannot be reached or joined, or this process is in another one.
    """
    if ray.is_initialized():
        joined = ray.get_runtime_context().gcs_address
        if address not in (None, "auto", joined):
            raise EngineError(
                f"{address}: this process is part of the Ray cluster {joined}; call ray.shutdown() "
                "first, or omit the address"
            )
        return False
    address = address or os.environ.get("RAY_ADDRESS")
    if not address:
        _initialise(
            ray,
            "this machine",
            address="local",
            num_cpus=workers or num_cpus(),
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
            "with the versions of Python and Ray that it was started with"
        ) from error
    # Errors of nodes are printed to stdout with their logs even if log_to_driver is False.
    worker: Any = getattr(getattr(ray, "_private", None), "worker", None)
    if hasattr(worker, "_worker_logs_enabled"):
        worker._worker_logs_enabled = False


def _check_that_it_answers(address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or "/" in host:
        return  # auto or ray://…, for which Ray reports errors at once
    try:
        socket.create_connection((host, int(port)), timeout=_ANSWERS_WITHIN).close()
    except (OSError, OverflowError) as error:
        raise EngineError(
            f"{address}: cannot be reached: {error}; start a cluster with `ray start --head` and "
            "give the address that it prints, or omit --address to start one here"
        ) from error
