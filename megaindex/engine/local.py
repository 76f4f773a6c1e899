"""Interface of an engine, the queue that repeats lost tasks, and the engine of local processes."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import pickle
import signal
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from multiprocessing import connection, context, parent_process
from types import FrameType, ModuleType
from typing import Any, Generic, Protocol, TypeVar, cast

from megaindex.errors import EngineError, InvalidArgument
from megaindex.io.threads import num_cpus

Task = TypeVar("Task")
Result = TypeVar("Result")

logger = logging.getLogger("megaindex")

ATTEMPTS = 3
"""Attempts to run a task whose worker is lost each time."""


class Engine(Protocol):
    """Interface of engines, which run a function over tasks in worker processes.

    Function, tasks and results must be picklable and small, and defined in importable modules, not
    in ``__main__``. Tasks must be idempotent: one may run twice, or in two workers at once.
    """

    @property
    def workers(self) -> int:
        """Number of tasks that run at a time."""

    def run(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """Yield ``(number of the task, result)`` as tasks finish, in any order.

        Running tasks of a lost worker (killed, out of memory, node lost) are run again. If a task
        raises an exception, or the iterator is closed, no task is started any more, running tasks
        are ended, and the exception is raised here.

        Raises:
            EngineError: a task lost its worker `ATTEMPTS` times.
        """


class InWorker(Exception):
    """Cause of an exception raised in another process, with its traceback as text."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


@dataclass(frozen=True, kw_only=True)
class TaskOutcome(Generic[Result]):
    """Result of a task, or its exception with the traceback as text."""

    value: Result | None = None
    error: Exception | None = None
    trace: str = ""

    def result(self) -> Result:
        """Return the value or raise the exception of the task."""
        if self.error is not None:
            raise self.error from InWorker(self.trace)
        return cast(Result, self.value)


def capture(function: Callable[[Task], Result], task: Task) -> TaskOutcome[Result]:
    """Run a task and return its result or exception."""
    try:
        return TaskOutcome(value=function(task))
    except Exception as error:
        return TaskOutcome(error=_portable(error), trace=traceback.format_exc())


def _portable(error: Exception) -> Exception:
    """Return ``error``, or an EngineError with its type and text if it cannot be pickled."""
    try:
        copy = pickle.loads(pickle.dumps(error))
        if type(copy) is type(error) and str(copy) == str(error):
            return error
    except Exception:  # of any __reduce__ or __init__
        pass
    return EngineError(f"a task raised {type(error).__name__}: {error}; see the traceback above")


class TaskQueue:
    """Queue of the numbers of tasks to start; those whose worker was lost come first."""

    def __init__(self, tasks: Sequence[object]) -> None:
        self._tasks = tasks
        self._fresh = iter(range(len(tasks)))
        self._again = deque[int]()
        self._losses = Counter[int]()

    def next(self) -> int | None:
        """Return the number of the next task, or None after the last one."""
        return self._again.popleft() if self._again else next(self._fresh, None)

    def put_back(self, number: int) -> None:
        """Queue a task again that was not started."""
        self._again.append(number)

    def count_loss(self, number: int, how: str) -> None:
        """Queue a task again whose worker was lost; EngineError after the last attempt."""
        task = self._tasks[number]
        self._losses[number] += 1
        if self._losses[number] == ATTEMPTS:
            raise EngineError(
                f"{task}: lost its worker {ATTEMPTS} times, the last one {how}; run it alone to "
                "find the reason, and use fewer workers if memory ran out"
            )
        logger.warning("%s: its worker was lost (%s); running it again", task, how)
        self._again.append(number)


_ENDED = 128 + signal.SIGTERM  # exit status of a terminated process
_ALONE_FOR = 5.0  # seconds that a task may run after its parent process ended
_starting = threading.Lock()  # around the replacement of __main__, which threads share
_in_task = False
_GRACE = 5.0  # seconds for the clean-up of a terminated task


class LocalEngine:
    """Engine of ``workers`` processes of this machine; a single worker is this process itself.

    Processes are spawned for a run and end with it. They share the CPUs: MEGAINDEX_NUM_THREADS is
    set in them unless it is set here.
    """

    def __init__(self, workers: int | None = None) -> None:
        self._workers = num_cpus() if workers is None else workers
        self._threads = max(1, num_cpus() // self._workers)
        self._alive: set[Worker] = set()

    @property
    def workers(self) -> int:
        return self._workers

    def run(
        self, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> Iterator[tuple[int, Result]]:
        """See `Engine.run`; if a task fails, running tasks are terminated."""
        if self._workers == 1:
            yield from ((number, function(task)) for number, task in enumerate(tasks))
            return
        _check_importable(function)
        run = _LocalTasks(self, function, tasks)
        try:
            while finished := run.finished():
                yield from finished
        finally:
            self._end(run.workers)

    def close(self) -> None:
        """Terminate the workers of iterators that were left open."""
        self._end(set(self._alive))

    def new_worker(self) -> Worker:
        worker = Worker(self._threads)
        self._alive.add(worker)
        return worker

    def drop(self, worker: Worker) -> str:
        """Remove a lost worker and return how it ended."""
        self._alive.discard(worker)
        return worker.post_mortem()

    def _end(self, workers: Iterable[Worker]) -> None:
        """Terminate workers together, with one time limit for their clean-up."""
        ended = [worker for worker in workers if worker in self._alive]
        self._alive.difference_update(ended)
        for worker in ended:
            worker.end()
        deadline = time.monotonic() + _GRACE
        for worker in ended:
            worker.join(deadline)


class _LocalTasks(Generic[Task, Result]):
    """State of one call of `LocalEngine.run`."""

    def __init__(
        self, engine: LocalEngine, function: Callable[[Task], Result], tasks: Sequence[Task]
    ) -> None:
        self._engine = engine
        self._function = function
        self._tasks = tasks
        self._queue = TaskQueue(tasks)
        self._running: dict[Future[TaskOutcome[Result]], tuple[Worker, int]] = {}
        self.workers = {engine.new_worker() for _ in range(min(engine.workers, len(tasks)))}
        self._idle = list(self.workers)

    def finished(self) -> list[tuple[int, Result]]:
        """Wait for tasks and return their numbers and results; [] if none are left.

        Each worker has one task and no queue, so a lost worker loses one task, and few tasks are
        pickled at a time.
        """
        results: list[tuple[int, Result]] = []
        while not results:
            self._begin()
            if not self._running:
                break
            done, _ = wait(self._running, return_when=FIRST_COMPLETED)
            for future in done:
                worker, number = self._running.pop(future)
                try:
                    results.append((number, future.result().result()))
                    self._idle.append(worker)
                except BrokenProcessPool:
                    self._replace(worker)
                    self._queue.count_loss(number, self._engine.drop(worker))
        else:
            self._begin()  # before the caller processes the results
        return results

    def _begin(self) -> None:
        """Start a task on every idle worker."""
        while self._idle and (number := self._queue.next()) is not None:
            worker = self._idle.pop()
            try:
                future = worker.submit(self._function, self._tasks[number])
            except BrokenProcessPool:  # killed while idle, which is not counted for the task
                self._replace(worker)
                self._engine.drop(worker)
                self._queue.put_back(number)
            else:
                self._running[future] = (worker, number)

    def _replace(self, worker: Worker) -> None:
        fresh = self._engine.new_worker()
        self.workers.discard(worker)
        self.workers.add(fresh)
        self._idle.append(fresh)


def _check_importable(function: Callable[..., object]) -> None:
    """Raise InvalidArgument for a function of ``__main__``, which crashes its worker."""
    if getattr(function, "__module__", None) == "__main__":
        raise InvalidArgument(
            f"{function}: is defined in the script that runs, which workers do not import; "
            "define it in a module, or pass workers=1"
        )


class Worker:
    """Executor of a single process.

    A pool of several breaks as a whole when one process is killed, without the number of its task.
    """

    def __init__(self, threads: int) -> None:
        self._spawn = _Spawn()
        with _as_engine_error():
            self._executor = ProcessPoolExecutor(
                1, mp_context=self._spawn, initializer=_prepare, initargs=(threads,)
            )
        self._future: Future[Any] | None = None

    def submit(self, function: Callable[[Task], Result], task: Task) -> Future[TaskOutcome[Result]]:
        """Start a task in the process.

        Raises:
            BrokenProcessPool: the process ended; also raised by the future.
            EngineError: descriptors, processes or threads are exhausted.
        """
        # Ctrl-C on a terminal interrupts all processes, and one that still imports modules would
        # print a traceback. A child inherits the signals blocked here.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            with _as_engine_error():
                future = self._executor.submit(_run, function, task)
        except EngineError:
            self._terminate()  # the process may have started before the error
            raise
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        self._future = future
        return future

    def end(self) -> None:
        """Terminate the process; a running task is interrupted and cleans up."""
        if self._future is not None and not self._future.done():
            self._terminate()
        self._executor.shutdown(wait=False, cancel_futures=True)

    def join(self, deadline: float) -> None:
        """Wait for the process until ``deadline`` of the monotonic clock, then kill it."""
        for process in self._processes():
            if not connection.wait([process.sentinel], max(0.0, deadline - time.monotonic())):
                process.kill()
                connection.wait([process.sentinel])

    def post_mortem(self) -> str:
        """Return how a lost process ended, for messages."""
        self._executor.shutdown(wait=True, cancel_futures=True)
        codes = [process.exitcode for process in self._spawn.started]
        if not codes or codes[-1] is None:
            return "gone"
        if codes[-1] < 0:
            return f"killed by {signal.Signals(-codes[-1]).name}"
        return f"ended with status {codes[-1]}"

    def _terminate(self) -> None:
        for process in self._processes():
            process.terminate()

    def _processes(self) -> list[context.SpawnProcess]:
        return [process for process in self._spawn.started if process.pid is not None]


class _Process(context.SpawnProcess):
    """Process that does not import the caller's ``__main__``, which may lack a guard or a file."""

    @staticmethod
    def _Popen(process_obj: Any) -> Any:
        with _starting:
            main = sys.modules["__main__"]
            sys.modules["__main__"] = ModuleType("__main__")
            try:
                return context.SpawnProcess._Popen(process_obj)
            finally:
                sys.modules["__main__"] = main


class _Spawn(context.SpawnContext):
    """Spawn context that lists its processes, which an executor does not."""

    def __init__(self) -> None:
        super().__init__()
        self.started: list[context.SpawnProcess] = []

    def Process(self, *args: Any, **kwargs: Any) -> context.SpawnProcess:  # type: ignore[override]
        process = _Process(*args, **kwargs)
        self.started.append(process)
        return process


@contextlib.contextmanager
def _as_engine_error() -> Iterator[None]:
    """Convert failures to start a process to EngineError with a remedy."""
    try:
        yield
    except BrokenProcessPool:
        raise
    except (OSError, RuntimeError) as error:
        # closes files of the failed call, so that clean-up code can open files
        traceback.clear_frames(error.__traceback__)
        number = error.errno if isinstance(error, OSError) else None
        if number in (errno.EMFILE, errno.ENFILE):
            remedy = "raise the limit on open files (ulimit -n)"
        elif number in (errno.EAGAIN, errno.ENOMEM) or "start new thread" in str(error):
            remedy = "raise the limits on processes (ulimit -u) and memory (ulimit -v)"
        else:
            remedy = "semaphores need a writable /dev/shm with room in it"
        raise EngineError(
            f"cannot start worker processes: {error}; {remedy}, or use one worker (--workers 1, "
            f"workers=1)"
        ) from error


class _Ended(BaseException):
    """Interruption of a task by SIGTERM."""


def _run(function: Callable[[Task], Result], task: Task) -> TaskOutcome[Result]:
    global _in_task  # noqa: PLW0603
    _in_task = True
    try:
        return capture(function, task)
    except _Ended:
        os._exit(_ENDED)
    finally:
        _in_task = False


def _prepare(threads: int) -> None:
    """Initialise a worker process."""
    os.environ.setdefault("MEGAINDEX_NUM_THREADS", str(threads))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # handled by the parent
    signal.signal(signal.SIGTERM, _end)
    threading.Thread(target=_end_with_parent, name="megaindex-parent", daemon=True).start()


def _end(_number: int, _frame: FrameType | None) -> None:
    """End an idle process, or interrupt its task, which removes incomplete files."""
    if not _in_task:
        os._exit(_ENDED)
    raise _Ended


def _end_with_parent() -> None:
    """Terminate this process when its parent ends."""
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_ALONE_FOR)
    os._exit(_ENDED)
