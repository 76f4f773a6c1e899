"""Batches prefetched into pooled buffers by a few threads, and their copies on a device."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Generic, TypeAlias, TypeVar

import numpy as np
import torch

from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.loader.batch import BatchMaker, Buffers, SampleOptions, pageable, pinned


class BufferPool:
    """Pool of buffers of one number of rows; safe to share between threads.

    The memory of a batch is reused only when every tensor of it, view of one and NumPy array made
    from one is freed. If every batch is kept, the pool allocates new memory for each.

    Args:
        keep: number of returned buffers that are watched for reuse.
        restore: rewrite before each use the fields that no fill writes, such as position ids that
            do not depend on the tokens: a receiver may have changed them in place.
    """

    def __init__(
        self, maker: BatchMaker, rows: int, *, keep: int, pin: bool = False, restore: bool = True
    ) -> None:
        self._maker = maker
        self._rows = rows
        self._pin = pin
        self._watched: deque[Buffers] = deque(maxlen=keep)
        # No lock, which could be held when the process forks: pop and append are atomic.
        first = self._allocate()
        self._idle = [first]
        self.nbytes = sum(array.nbytes for array in first.arrays.values())
        """Bytes of one batch."""
        self._restores = restore
        self._constant = {name: first.arrays[name].copy() for name in _constant(maker.options)}

    def take(self) -> Buffers:
        """Return buffers that are not in use."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        buffers = self._released()
        if buffers is None:
            return self._allocate()
        self._restore(buffers)
        return buffers

    def put_back(self, buffers: Buffers) -> None:
        """Put back buffers whose tensors were not returned to a receiver."""
        self._idle.append(buffers)

    def watch(self, buffers: Buffers) -> None:
        """Reuse the buffers once their tensors, which a receiver holds, are freed."""
        self._watched.append(buffers)

    def _allocate(self) -> Buffers:
        return self._maker.allocate(self._rows, pinned if self._pin else pageable)

    def _released(self) -> Buffers | None:
        """Return watched buffers whose tensors are freed."""
        for _ in range(len(self._watched)):
            try:
                buffers = self._watched.popleft()
            except IndexError:  # other threads took the rest
                return None
            if not buffers.in_use:
                return buffers
            self._watched.append(buffers)
        return None

    def _restore(self, buffers: Buffers) -> None:
        # A copy to a device, on a stream unknown here, may still read the memory.
        if self._pin and torch.cuda.is_available():
            torch.cuda.synchronize()
        if self._restores:
            for name, values in self._constant.items():
                np.copyto(buffers.arrays[name], values)
            buffers.constant_loss_mask = False


def _constant(options: SampleOptions) -> list[str]:
    """Return the fields that are written when buffers are allocated and by no fill."""
    names = [] if options.resets_positions else ["position_ids"]
    if options.create_attention_mask and not options.reset_attention_mask:
        names.append("attention_mask")
    return names


Batch: TypeAlias = dict[str, torch.Tensor]


class DeviceCopies:
    """Copies of batches on ``device``; on CUDA made on a stream of their own."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.asynchronous = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.asynchronous else None  # type: ignore[no-untyped-call]

    def copy(self, tensors: Batch) -> Batch:
        """Return the tensors on the device, after the copy has completed.

        Meant for a prefetching thread: it blocks without the GIL, and other streams of the device
        continue.
        """
        if self._stream is None:
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}
        with torch.cuda.stream(self._stream):
            copies = {n: t.to(self._device, non_blocking=True) for n, t in tensors.items()}
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()
        return copies

    def release(self, copies: Batch) -> Batch:
        """Mark the copies as used by the calling thread's stream, and return them."""
        if self.asynchronous:
            stream = torch.cuda.current_stream(self._device)
            for tensor in copies.values():
                tensor.record_stream(stream)
        return copies


Prepared: TypeAlias = "tuple[BufferPool, Buffers | Batch]"


class BatchReader:
    """Reader of batches of any number of rows; safe to share between threads.

    Args:
        make_pool: makes the pool of buffers for a number of rows.
        copies: to the device on which batches are returned; None: host memory.
    """

    def __init__(
        self,
        maker: BatchMaker,
        *,
        make_pool: Callable[[BatchMaker, int], BufferPool],
        copies: DeviceCopies | None = None,
    ) -> None:
        self._maker = maker
        self._make_pool = make_pool
        self._copies = copies
        self._pools: dict[tuple[int, int], BufferPool] = {}

    def exchange(self, maker: BatchMaker) -> None:
        """Read the batches that are prepared from now on with another maker of the same fields."""
        self._maker = maker

    def nbytes(self, rows: int) -> int:
        """Return the bytes of a batch; of the longest ones, if the index has several lengths."""
        return self._pool(self._maker, rows).nbytes

    def prepare(self, sample_ids: Sequence[int | None]) -> Prepared:
        """Read a batch and copy it to the device."""
        if any(sample is not None and sample < 0 for sample in sample_ids):
            raise OutOfRange(
                "sample ids must be at least 0, or None for a row of padding, got "
                f"{min(s for s in sample_ids if s is not None)}"
            )
        maker = self._maker.for_samples(sample_ids)
        pool = self._pool(maker, len(sample_ids))
        buffers = pool.take()
        maker.fill(buffers, sample_ids)
        if self._copies is None:
            return pool, buffers
        tensors = buffers.tensors()
        # receipts are counted on the host: reading them back would wait for the GPU
        receipt = tensors.pop("receipt", None)
        copies = self._copies.copy(tensors)
        if receipt is not None:
            copies["receipt"] = receipt.clone()
        if self._copies.asynchronous:
            pool.put_back(buffers)
        else:  # on the CPU a copy may be the tensor itself
            pool.watch(buffers)
        return pool, copies

    def release(self, prepared: Prepared) -> Batch:
        """Return the tensors of a prepared batch."""
        pool, batch = prepared
        if isinstance(batch, Buffers):
            tensors = batch.tensors()
            pool.watch(batch)
            return tensors
        assert self._copies is not None, "tensors are made by it alone"
        receipt = batch.pop("receipt", None)
        batch = self._copies.release(batch)
        return batch if receipt is None else {**batch, "receipt": receipt}

    def _pool(self, maker: BatchMaker, rows: int) -> BufferPool:
        shape = rows, maker.sequence_length
        pool = self._pools.get(shape)
        if pool is None:
            new = self._make_pool(maker, rows)
            pool = self._pools.setdefault(shape, new)  # another thread may have made one meanwhile
        return pool


Task = TypeVar("Task")
Result = TypeVar("Result")

_EXIT_SECONDS = 2.0  # the interpreter must end even if a thread hangs in a read


class ReadAhead(Generic[Task, Result]):
    """Iterator over ``prepare(task)`` for each task, in order, computed ahead by threads.

    An error of ``prepare`` or ``tasks`` is raised in place of its result and at each later call;
    nothing further is prepared.

    The threads end when the iterator is exhausted, closed or freed, and before the interpreter
    exits. Use in a forked child is refused.

    Args:
        tasks: taken one at a time, by any of the threads.
        prepare: called by several threads at once. It must not refer to this object, or freeing
            this object would not end the threads.
        depth: maximum number of results in preparation or waiting, at least 1.
        threads: number of threads, at least 1.
    """

    def __init__(
        self,
        tasks: Iterator[Task],
        prepare: Callable[[Task], Result],
        *,
        depth: int,
        threads: int,
    ) -> None:
        if depth < 1 or threads < 1:
            raise InvalidArgument(
                f"depth and threads must be at least 1, got depth={depth}, threads={threads}"
            )
        self._pid = os.getpid()
        self._queue = queue = _Queue(tasks, prepare, depth)
        self._threads = [
            threading.Thread(target=queue.work, name=f"megaindex-ahead-{number}", daemon=True)
            for number in range(min(threads, depth))
        ]
        _running.add(self)
        # A forked child has this object, but not its threads, and must not take its lock.
        self._finalizer = weakref.finalize(self, _stop_in, self._pid, weakref.ref(queue))
        self._finalizer.atexit = False
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> ReadAhead[Task, Result]:
        return self

    def __next__(self) -> Result:
        if self._pid != os.getpid():
            raise InvalidArgument(
                "an iteration must be used in the process that started it, got a forked child, "
                "which lacks its threads; start a new iteration in the child"
            )
        return self._queue.take()

    def close(self, timeout: float | None = None) -> None:
        """End the threads and wait for them, at most ``timeout`` seconds."""
        if self._pid != os.getpid():
            return
        self._queue.stop()
        deadline = None if timeout is None else time.monotonic() + timeout
        for thread in self._threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))

    @property
    def begun(self) -> int:
        """Number of tasks whose preparation was begun."""
        return self._queue.begun

    def __enter__(self) -> ReadAhead[Task, Result]:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(_EXIT_SECONDS)  # bounded: a thread may hang in a read


class _Queue(Generic[Task, Result]):
    """The state that the threads share, without a reference to the `ReadAhead`."""

    def __init__(
        self, tasks: Iterator[Task], prepare: Callable[[Task], Result], depth: int
    ) -> None:
        self._tasks = tasks
        self._prepare = prepare
        self._depth = depth
        # Re-entrant: garbage collection inside may free the ReadAhead, which stops this queue.
        self._lock = threading.RLock()
        self._room = threading.Condition(self._lock)
        self._ready = threading.Condition(self._lock)
        self.begun = 0
        self._taken = 0
        self._over = False  # no further task is started
        self._results: dict[int, Result] = {}
        self._errors: dict[int, BaseException] = {}

    def work(self) -> None:
        while (begun := self._begin()) is not None:
            number, task = begun
            try:
                result = self._prepare(task)
            except BaseException as error:  # raised where the result is taken
                self._fail(number, error)
                return
            with self._lock:
                self._results[number] = result
                del begun, task, result
                if number == self._taken:
                    self._ready.notify()

    def take(self) -> Result:
        with self._lock:
            number = self._taken
            while number not in self._results:
                if number in self._errors:
                    raise self._errors[number]
                if self._over and number >= self.begun:
                    raise StopIteration
                self._ready.wait()
            self._taken += 1
            self._room.notify()
            return self._results.pop(number)

    def stop(self) -> None:
        with self._lock:
            self._over = True
            self._room.notify_all()
            self._ready.notify_all()

    def _begin(self) -> tuple[int, Task] | None:
        with self._lock:
            while self.begun - self._taken >= self._depth and not self._over:
                self._room.wait()
            if self._over:
                return None
            try:
                task = next(self._tasks)
            except StopIteration:
                self.stop()
                return None
            except BaseException as error:
                self._fail(self.begun, error)
                return None
            number, self.begun = self.begun, self.begun + 1
            return number, task

    def _fail(self, number: int, error: BaseException) -> None:
        with self._lock:
            self._errors[number] = error
            self.stop()


_running: weakref.WeakSet[ReadAhead[Any, Any]] = weakref.WeakSet()


def _stop_in(pid: int, queue: weakref.ref[_Queue[Any, Any]]) -> None:
    # A weak reference: a raised error holds its frames, and they hold the ReadAhead.
    alive = queue()
    if alive is not None and pid == os.getpid():
        alive.stop()


@atexit.register
def _close_all() -> None:
    """End the threads at exit: one that copies from a mapping must not outlive it."""
    deadline = time.monotonic() + _EXIT_SECONDS
    for ahead in list(_running):
        ahead.close(max(0.0, deadline - time.monotonic()))
