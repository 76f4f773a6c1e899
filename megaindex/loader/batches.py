"""Prepares batches in pooled buffers, in any thread, and hands them over."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeAlias

import torch

from megaindex.errors import OutOfRange
from megaindex.loader.buffers import Buffers
from megaindex.loader.device import DeviceCopies
from megaindex.loader.fields import BatchMaker
from megaindex.loader.pool import BufferPool

Batch: TypeAlias = dict[str, torch.Tensor]
Prepared: TypeAlias = "tuple[BufferPool, Buffers | Batch]"


class BatchSource:
    """Batches of ``maker``, of any numbers of rows; safe to share between threads.

    Args:
        make_pool: makes a pool of buffers of a number of rows.
        copies: where to, if batches are handed over on a device.
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
        # counted on the host where the batch is handed over: reading it back would wait for the GPU
        receipt = tensors.pop("receipt", None)
        copies = self._copies.copy(tensors)
        if receipt is not None:
            copies["receipt"] = receipt.clone()
        if self._copies.asynchronous:
            pool.give_back(buffers)
        else:  # on the CPU a copy may be the tensor itself
            pool.watch(buffers)
        return pool, copies

    def hand_over(self, prepared: Prepared) -> Batch:
        """The batch, from now on its receiver's."""
        pool, batch = prepared
        if isinstance(batch, Buffers):
            tensors = batch.tensors()
            pool.watch(batch)
            return tensors
        assert self._copies is not None, "only it makes tensors"
        receipt = batch.pop("receipt", None)
        batch = self._copies.hand_over(batch)
        return batch if receipt is None else {**batch, "receipt": receipt}

    def _pool(self, rows: int) -> BufferPool:
        pool = self._pools.get(rows)
        if pool is None:
            new = self._make_pool(self._maker, rows)
            pool = self._pools.setdefault(rows, new)  # another thread may have been quicker
        return pool
