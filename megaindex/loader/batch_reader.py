"""Batches read into pooled buffers by any thread, and their copies on a device.

The copies run on a CUDA stream of their own, from page-locked memory, ahead of the batches' use.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np
import torch

from megaindex.errors import OutOfRange
from megaindex.loader.batch import BatchMaker, SampleOptions
from megaindex.loader.buffers import Buffers, ordinary, pinned


class BufferPool:
    """Buffers of one number of rows; safe to share between threads.

    A batch stays its receiver's as long as any of its tensors lives, or a view of one, or a NumPy
    array made from one: its memory is written again only after the last of them is gone. A receiver
    that keeps every batch makes the pool allocate anew for each.

    Args:
        keep: buffers that are watched for reuse; more are left to whoever holds them.
        restore: write the fields again that no fill writes, such as position ids that do not
            depend on the tokens. Without it, a holder that changed them in place would find that
            change in later batches.
    """

    def __init__(
        self, maker: BatchMaker, rows: int, *, keep: int, pin: bool = False, restore: bool = True
    ) -> None:
        self._maker = maker
        self._rows = rows
        self._pin = pin
        self._watched: deque[Buffers] = deque(maxlen=keep)
        # pops and appends of both are atomic: a lock could be held when the process forks
        first = self._allocate()
        self._idle = [first]
        self.nbytes = sum(array.nbytes for array in first.arrays.values())
        """Bytes of one batch."""
        self._restores = restore
        self._constant = {name: first.arrays[name].copy() for name in _never_filled(maker.options)}

    def take(self) -> Buffers:
        """Return buffers that are not in use, to be filled."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        buffers = self._dropped()
        if buffers is None:
            return self._allocate()
        self._restore(buffers)
        return buffers

    def give_back(self, buffers: Buffers) -> None:
        """Put back buffers that were copied and never returned to a receiver."""
        self._idle.append(buffers)

    def watch(self, buffers: Buffers) -> None:
        """Use the buffers again once their tensors, which a receiver holds now, are gone."""
        self._watched.append(buffers)

    def _allocate(self) -> Buffers:
        return self._maker.allocate(self._rows, pinned if self._pin else ordinary)

    def _dropped(self) -> Buffers | None:
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
        if self._pin:
            _finish_copies()
        if self._restores:
            for name, values in self._constant.items():
                np.copyto(buffers.arrays[name], values)
            buffers.constant_loss_mask = False


def _never_filled(options: SampleOptions) -> list[str]:
    """Return the fields that are written when buffers are allocated, and not with each batch."""
    names = [] if options.resets_positions else ["position_ids"]
    if options.create_attention_mask and not options.reset_attention_mask:
        names.append("attention_mask")
    return names


def _finish_copies() -> None:
    """A copy to a device may still read the memory of a batch that was dropped after asking for it,
    on a stream that is not known here."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


Batch: TypeAlias = dict[str, torch.Tensor]


class DeviceCopies:
    """Copies of batches on ``device``; on one without CUDA an ordinary copy, on the CPU none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.asynchronous = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.asynchronous else None  # type: ignore[no-untyped-call]

    def copy(self, tensors: Batch) -> Batch:
        """The tensors on the device, complete; their memory may be written again afterwards.

        Meant for a thread that reads ahead: it waits for the copy, without holding up other
        threads, and the device goes on with what it computes.
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
        """Return the copies; their memory is not given to another copy before the work of the
        calling thread's stream on them is done."""
        if self.asynchronous:
            stream = torch.cuda.current_stream(self._device)
            for tensor in copies.values():
                tensor.record_stream(stream)
        return copies


Prepared: TypeAlias = "tuple[BufferPool, Buffers | Batch]"


class BatchReader:
    """Batches of ``maker``, of any numbers of rows; safe to share between threads.

    Args:
        make_pool: makes a pool of buffers of a number of rows.
        copies: to a device, if batches are returned there.
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
        self._pools: dict[int, BufferPool] = {}

    def nbytes(self, rows: int) -> int:
        """Bytes of a batch."""
        return self._pool(rows).nbytes

    def prepare(self, sample_ids: Sequence[int | None]) -> Prepared:
        """Read a batch, and copy it to the device."""
        if any(sample is not None and sample < 0 for sample in sample_ids):
            raise OutOfRange(
                f"sample {min(s for s in sample_ids if s is not None)} was asked for; ids count "
                "from 0, and None is a row of padding"
            )
        pool = self._pool(len(sample_ids))
        buffers = pool.take()
        self._maker.fill(buffers, sample_ids)
        if self._copies is None:
            return pool, buffers
        tensors = buffers.tensors()
        # counted on the host where the batch is returned: reading it back would wait for the GPU
        receipt = tensors.pop("receipt", None)
        copies = self._copies.copy(tensors)
        if receipt is not None:
            copies["receipt"] = receipt.clone()
        if self._copies.asynchronous:
            pool.give_back(buffers)
        else:  # on the CPU a copy may be the tensor itself
            pool.watch(buffers)
        return pool, copies

    def release(self, prepared: Prepared) -> Batch:
        """Return the batch, from now on its receiver's."""
        pool, batch = prepared
        if isinstance(batch, Buffers):
            tensors = batch.tensors()
            pool.watch(batch)
            return tensors
        assert self._copies is not None, "only it makes tensors"
        receipt = batch.pop("receipt", None)
        batch = self._copies.release(batch)
        return batch if receipt is None else {**batch, "receipt": receipt}

    def _pool(self, rows: int) -> BufferPool:
        pool = self._pools.get(rows)
        if pool is None:
            new = self._make_pool(self._maker, rows)
            pool = self._pools.setdefault(rows, new)  # another thread may have been quicker
        return pool
