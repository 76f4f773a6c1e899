"""Batches read into pooled buffers, and their copies on a device."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from megaindex.errors import OutOfRange
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
