"""Batches of DataLoader workers in shared memory that is used again.

PyTorch makes a shared memory file for every tensor of every batch, and passes its descriptor
through a socket: more than half of what a batch costs. Here a worker keeps a few slots, each a
shared memory file with room for a batch. The first batch in a slot is sent with the descriptor of
the file, later ones as the number of the slot, and the receiver keeps the slot mapped. A slot is in
use while the receiver holds a tensor of it, or a view of one: every field has a byte in the slot,
which the worker sets when it sends the field, and the receiver clears when its last holder is gone.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import os
import secrets
import weakref
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor

from megaindex.loader.buffers import Buffers, Shapes
from megaindex.loader.fields import BatchMaker
from megaindex.loader.pool import BufferPool

_LINE = 64  # bytes to which fields are aligned
_MOST_SLOTS = 16  # of batches of one number of rows; each keeps a descriptor open
_SENT, _FREE = 1, 0
_Key = tuple[int, str]
_numbers = itertools.count()
_tokens: dict[int, str] = {}
"""A name for each process, since process ids come again."""


class SharedBuffers(Buffers):
    """The fields of ``rows`` samples in one shared memory file.

    Args:
        as_slot: send them to the receiver as a slot, and take them again when it holds them no
            more; else they are sent as PyTorch sends tensors, once.
    """

    def __init__(self, rows: int, shapes: Shapes, *, as_slot: bool) -> None:
        end, self._places = 0, {}
        for name, (shape, dtype) in shapes.items():
            begin = -(-end // _LINE) * _LINE
            end = begin + math.prod(shape) * np.dtype(dtype).itemsize
            self._places[name] = begin, end, np.dtype(dtype), shape
        self._shared = torch.empty(end + len(shapes), dtype=torch.uint8)
        self._shared.share_memory_()  # type: ignore[no-untyped-call]
        memory: npt.NDArray[np.uint8] = self._shared.numpy()
        self._sent = memory[end:]
        self._sent[:] = _FREE
        self.is_slot = as_slot
        self._number = next(_numbers)
        self._was_sent = False
        super().__init__(
            rows,
            {name: _field(memory, *place) for name, place in self._places.items()},
        )

    @property
    def in_use(self) -> bool:
        return bool(self._sent.any()) or super().in_use

    def tensors(self) -> dict[str, torch.Tensor]:
        if not self.is_slot:
            return {
                name: self._shared[begin:end].view(getattr(torch, dtype.name)).view(shape)
                for name, (begin, end, dtype, shape) in self._places.items()
            }
        tensors = super().tensors()
        for name, tensor in tensors.items():
            _fields[id(tensor)] = weakref.ref(tensor), self, name
        return tensors

    def send(self, name: str) -> tuple[Any, ...]:
        """Mark a field as sent; how its receiver makes the tensor."""
        begin, end, dtype, shape = self._places[name]
        byte = list(self._places).index(name) - len(self._places)
        self._sent[byte] = _SENT
        shared = None if self._was_sent else self._shared
        self._was_sent = True
        token = _tokens.setdefault(os.getpid(), secrets.token_hex(8))
        return _receive, (
            (os.getpid(), token),
            self._number,
            shared,
            byte,
            begin,
            end,
            dtype,
            shape,
        )


def _field(
    memory: npt.NDArray[np.uint8], begin: int, end: int, dtype: Any, shape: tuple[int, ...]
) -> npt.NDArray[Any]:
    field: npt.NDArray[Any] = memory[begin:end].view(dtype).reshape(shape)
    return field


class SlotPool(BufferPool):
    """Buffers of batches of one number of rows that a worker of a DataLoader sends.

    Where the receiver keeps more batches than there are slots, the others are sent once.
    """

    def __init__(self, maker: BatchMaker, rows: int) -> None:
        super().__init__(maker, rows, keep=_MOST_SLOTS)
        ForkingPickler.register(torch.Tensor, _reduce)

    def watch(self, buffers: Buffers) -> None:
        if isinstance(buffers, SharedBuffers) and buffers.is_slot:
            super().watch(buffers)

    def _allocate(self) -> Buffers:
        as_slot = len(self._watched) < _MOST_SLOTS
        return self._maker.allocate(self._rows, partial(SharedBuffers, as_slot=as_slot))


_fields: dict[int, tuple[weakref.ref[torch.Tensor], SharedBuffers, str]] = {}
"""Tensors that were handed out of slots, by their id."""


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """How a process sends a tensor to another: a field of a slot as that, all others as PyTorch
    does."""
    found, buffers, name = _fields.pop(id(tensor), (None, None, ""))
    if found is None or buffers is None or found() is not tensor:
        reduced: tuple[Any, ...] = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        return reduced
    return buffers.send(name)


class _Lease:
    """A field of a slot for as long as anything holds it in this process."""

    def __init__(self, memory: npt.NDArray[np.uint8], begin: int, end: int, byte: int) -> None:
        self._memory = memory
        self._byte = byte
        self._process = os.getpid()
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "shape": (end - begin,),
            "data": (memory.ctypes.data + begin, False),
        }

    # The default argument keeps the function alive while the interpreter tears its modules down.
    def __del__(self, process: Any = os.getpid) -> None:
        if process() == self._process:  # not in a process that was forked from the holder
            self._memory[self._byte] = _FREE


_slots: dict[tuple[_Key, int], npt.NDArray[np.uint8]] = {}
"""The slots of other processes that are mapped here."""


def _receive(
    key: _Key,
    number: int,
    shared: torch.Tensor | None,
    byte: int,
    begin: int,
    end: int,
    dtype: Any,
    shape: tuple[int, ...],
) -> torch.Tensor:
    if shared is not None:
        _forget_ended(key[0])
        _slots[key, number] = shared.numpy()
    lease = np.asarray(_Lease(_slots[key, number], begin, end, byte))
    return torch.from_numpy(lease.view(dtype).reshape(shape))


def _forget_ended(sender: int) -> None:
    """Unmap the slots of workers that are gone; what is held of them stays."""
    alive = {sender, *(child.pid for child in multiprocessing.active_children())}
    for key, number in list(_slots):
        if key[0] not in alive:
            del _slots[key, number]
