"""Map-style PyTorch dataset over an index, and the transfer of its batches in a DataLoader.

``__getitems__`` reads a whole batch into one set of arrays. PyTorch's default collate function
would take its rows, four tensors a sample, and stack them again. A `SampleList` makes its rows on
first access, and ``default_collate`` returns the batch itself unless a row was changed.

PyTorch makes a shared memory file for every tensor of every batch, and passes its descriptor
through a socket: more than half of the cost of a batch. Here a worker keeps a few slots, each a
shared memory file with room for a batch. The first batch in a slot is sent with the descriptor of
the file, later ones as the number of the slot, and the receiver keeps the slot mapped. A slot is in
use while the receiver holds a tensor of it, or a view of one: every field has a byte in the slot,
which the worker sets when it sends the field, and the receiver clears when the field is freed.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import os
import secrets
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.multiprocessing.reductions import reduce_tensor
from torch.utils.data import get_worker_info
from torch.utils.data._utils.collate import collate as torch_collate
from torch.utils.data._utils.collate import default_collate_fn_map

from megaindex.format import IndexedDataset
from megaindex.index.spans import Index
from megaindex.loader.batch import BatchMaker, Buffers, SampleIds, SampleOptions, Shapes
from megaindex.loader.batch_reader import BatchReader, BufferPool
from megaindex.loader.positional_reader import reader_of
from megaindex.loader.token_readers import TokenReader

Batch = dict[str, Any]
_NUMBERS = ("dataset_id",)  # fields that a sample holds as a NumPy number, as in BlendedDataset


class SampleDict(dict[str, Any]):
    """Dict of one sample, of a type for which PyTorch's collate calls `collate_samples`."""

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


class SampleList(list[SampleDict]):
    """List of the samples of ``batch``, as views of it, made on first access."""

    def __init__(self, batch: Batch) -> None:
        super().__init__()
        self.batch = batch
        self._is_filled = False
        self._first: SampleDict | None = None
        self._first_values: list[Any] = []

    @property
    def is_whole(self) -> bool:
        """True unless a sample may have been changed."""
        first = self._first
        return not self._is_filled and (
            first is None
            or (
                len(first) == len(self._first_values)
                and all(a is b for a, b in zip(first.values(), self._first_values, strict=True))
            )
        )

    def __len__(self) -> int:
        return super().__len__() if self._is_filled else len(self.batch["tokens"])

    def __getitem__(self, at: Any) -> Any:
        if self._is_filled or at != 0 or not len(self):
            self._fill()
            return super().__getitem__(at)
        if self._first is None:  # the only row that a collate function reads
            row = [_first(name, field) for name, field in self.batch.items()]
            self._first_values = row
            self._first = SampleDict(zip(self.batch, row, strict=True))
        return self._first

    def __radd__(self, other: list[Any]) -> list[Any]:
        return [*other, *self]

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)

    def _fill(self) -> None:
        if self._is_filled:
            return
        self._is_filled = True
        columns = [_values(name, field) for name, field in self.batch.items()]
        rows = [SampleDict(zip(self.batch, row, strict=True)) for row in zip(*columns, strict=True)]
        if self._first is not None:
            rows[0] = self._first
        super().extend(rows)


def _values(name: str, field: Any) -> Sequence[Any]:
    return list(field.numpy()) if name in _NUMBERS else field.unbind()


def _first(name: str, field: Any) -> Any:
    return field.numpy()[0] if name in _NUMBERS else field.select(0, 0)


def _after_filling(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def call(self: SampleList, *args: Any, **kwargs: Any) -> Any:
        for each in (self, *args):
            if isinstance(each, SampleList):
                each._fill()
        return method(self, *args, **kwargs)

    return call


# the methods of list that read or change its elements
_UNRELATED = {"__new__", "__init__", "__getattribute__", "__class_getitem__", "__sizeof__"}
for _name in vars(list).keys() - _UNRELATED - vars(SampleList).keys():
    if callable(getattr(list, _name)):
        setattr(SampleList, _name, _after_filling(getattr(list, _name)))


def collate_samples(samples: Sequence[SampleDict], *, collate_fn_map: Any = None) -> Batch:
    """Return the batch of unchanged samples without a copy; else collate them as dicts."""
    if isinstance(samples, SampleList) and samples.is_whole:
        return samples.batch
    return {
        name: torch_collate([sample[name] for sample in samples], collate_fn_map=collate_fn_map)
        for name in samples[0]
    }


default_collate_fn_map[SampleDict] = collate_samples


_LINE = 64  # bytes to which fields are aligned
_MOST_SLOTS = 16  # for batches of one number of rows; each keeps a descriptor open
_SENT, _FREE = 1, 0
_Key = tuple[int, str]
_numbers = itertools.count()
_process_names: dict[int, str] = {}  # random, since process ids are reused


class SharedBuffers(Buffers):
    """Fields of ``rows`` samples in one shared memory file.

    Args:
        as_slot: send them as a slot, to be reused when the receiver has freed them; else they are
            sent once, as PyTorch sends tensors.
    """

    def __init__(self, rows: int, shapes: Shapes, *, as_slot: bool) -> None:
        self.shapes = shapes
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
            {
                name: memory[begin:end].view(dtype).reshape(shape)
                for name, (begin, end, dtype, shape) in self._places.items()
            },
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
        """Mark a field as sent, and return the call by which the receiver makes the tensor."""
        begin, end, dtype, shape = self._places[name]
        byte = list(self._places).index(name) - len(self._places)
        self._sent[byte] = _SENT
        shared = None if self._was_sent else self._shared
        self._was_sent = True
        key = os.getpid(), _process_names.setdefault(os.getpid(), secrets.token_hex(8))
        return _receive, (key, self._number, shared, byte, begin, end, dtype, shape)


class SlotPool(BufferPool):
    """Pool of the buffers that a DataLoader worker sends.

    If the receiver keeps more batches than there are slots, further batches are sent once.
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


class SlotSender:
    """Slots of a DataLoader worker for batches of arrays that were read into other memory."""

    def __init__(self) -> None:
        self._slots: deque[SharedBuffers] = deque()
        ForkingPickler.register(torch.Tensor, _reduce)

    def tensors(self, arrays: Mapping[str, npt.NDArray[Any]]) -> dict[str, torch.Tensor]:
        """Return a copy of a batch in a slot; if the receiver keeps them all, in other memory."""
        slot = self._free_slot({name: (a.shape, a.dtype.name) for name, a in arrays.items()})
        for name, array in arrays.items():
            slot.arrays[name][...] = array
        return slot.tensors()

    def _free_slot(self, shapes: Shapes) -> SharedBuffers:
        for _ in range(len(self._slots)):
            self._slots.rotate(1)
            slot = self._slots[0]
            if slot.shapes == shapes and not slot.in_use:
                return slot
        rows = max(shape[0] for shape, _ in shapes.values())
        slot = SharedBuffers(rows, shapes, as_slot=len(self._slots) < _MOST_SLOTS)
        if slot.is_slot:
            self._slots.appendleft(slot)
        return slot


_fields: dict[int, tuple[weakref.ref[torch.Tensor], SharedBuffers, str]] = {}  # by id of the tensor


def _reduce(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Reduce a tensor for another process: fields of slots as such, others as PyTorch does."""
    found, buffers, name = _fields.pop(id(tensor), (None, None, ""))
    if found is None or buffers is None or found() is not tensor:
        reduced: tuple[Any, ...] = reduce_tensor(tensor)  # type: ignore[no-untyped-call]
        return reduced
    return buffers.send(name)


class _Lease:
    """Field of a slot that is marked as free when this object, the base of its array, is freed."""

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


_slots: dict[tuple[_Key, int], npt.NDArray[np.uint8]] = {}  # of other processes, mapped here


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
    """Unmap the slots of workers that ended; fields that are still referenced stay mapped."""
    alive = {sender, *(child.pid for child in multiprocessing.active_children())}
    for key, number in list(_slots):
        if key[0] not in alive:
            del _slots[key, number]


Sample = dict[str, torch.Tensor]


def collate(samples: Sequence[Sample]) -> Sample:
    """Return the batch of samples of `GPTDataset`, a ``collate_fn`` for DataLoader.

    The same as ``torch.utils.data.default_collate``: a batch that was read at once is not copied.
    """
    batch: Sample = torch.utils.data.default_collate(samples)  # type: ignore[arg-type]
    return batch


class GPTDataset(torch.utils.data.Dataset[Sample]):
    """Map-style PyTorch dataset of the samples of an index, each a dict of tensors.

    ``tokens`` and ``labels`` are int64[S], labels one token ahead; ``loss_mask`` is float32[S];
    ``position_ids`` int64[S]; ``attention_mask`` bool[1, S, S] if set in the options. Values equal
    those of GPTDataset of megatron-core 0.16.1 for the same index and options. `BatchMaker` lists
    the other fields. Sample id None, with which Megatron's samplers fill up a batch, gives a sample
    without loss.

    A DataLoader fetches whole batches (``__getitems__``), and its default ``collate_fn`` does not
    copy them. Workers send them in shared memory, which is reused.

    Args:
        index: the samples, from build_index, build_blend or a recipe.
        dataset: dataset from which the index was built, a list of one for each source, or a reader.
            Default: the datasets that the index holds.
        pad_id: overrides ``options.pad_id``.
        options: options of the samples.
        fingerprints: fingerprint of each source, 32 hex digits; adds the field ``receipt``,
            int64[3], for `megaindex.loader.receipted`.

    Raises:
        InvalidArgument: the datasets do not belong to the index, or hold tokens that do not fit
            ``token_dtype``.
        OutOfRange: by indexing, if the index does not hold a sample id.
    """

    _maker: BatchMaker
    _of_worker: BatchReader | None

    def __init__(
        self,
        index: Index,
        dataset: IndexedDataset | Sequence[IndexedDataset] | TokenReader | None = None,
        *,
        pad_id: int | None = None,
        options: SampleOptions | None = None,
        fingerprints: Sequence[str] | None = None,
    ) -> None:
        options = options or SampleOptions()
        if pad_id is not None:
            options = replace(options, pad_id=pad_id)
        self._set_maker(
            BatchMaker(index, reader_of(index, dataset), options, fingerprints=fingerprints)
        )

    @classmethod
    def from_maker(cls, maker: BatchMaker) -> GPTDataset:
        """Return the dataset of the samples that ``maker`` fills in."""
        dataset = cls.__new__(cls)
        dataset._set_maker(maker)
        return dataset

    @property
    def index(self) -> Index:
        """The index that samples are located in."""
        return self._maker.index

    @property
    def options(self) -> SampleOptions:
        """Options of the samples."""
        return self._maker.options

    def __len__(self) -> int:
        return self._maker.index.num_samples

    def __repr__(self) -> str:
        return f"GPTDataset({self._maker.index!r})"

    def __getitem__(self, sample_id: int | None) -> Sample:
        sample: Sample = self.__getitems__([sample_id])[0]
        return sample

    def __getitems__(self, sample_ids: SampleIds) -> SampleList:
        """Return the samples of one batch, as views of it, whose memory is reused when all are
        freed."""
        ids = sample_ids.tolist() if isinstance(sample_ids, np.ndarray) else list(sample_ids)
        source = self._source
        if get_worker_info() is not None:
            if self._of_worker is None:
                self._of_worker = BatchReader(self._maker, make_pool=SlotPool)
            source = self._of_worker
        return SampleList(source.release(source.prepare(ids)))

    def __getstate__(self) -> dict[str, Any]:
        return {"maker": self._maker}  # each process makes its own buffers

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._set_maker(state["maker"])

    def _set_maker(self, maker: BatchMaker) -> None:
        self._maker = maker
        self._source = BatchReader(maker, make_pool=partial(BufferPool, keep=2))
        self._of_worker = None
