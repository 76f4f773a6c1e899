"""Megatron's IndexedDataset and its builder over megaindex's mappings and writers.

Files are opened with the checks of `megaindex.IndexedDataset`. Arrays that were read outlive the
dataset, no descriptor stays open, and a range outside its sequence raises OutOfRange; Megatron
returns the tokens that follow. Megatron's own code serves object stores and fast_cache_load, which
skips the header.
"""

from __future__ import annotations

import functools
import inspect
import logging
import weakref
from operator import attrgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.adapters.megatron.core import core
from megaindex.adapters.reports import MEGATRON
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset

logger = logging.getLogger("megaindex")


def initialize(self: Any, *args: Any, **kwargs: Any) -> None:
    """``IndexedDataset.initialize``."""
    original = core().originals["IndexedDataset", "initialize"]
    bound = inspect.signature(original).bind(self, *args, **kwargs)
    bound.apply_defaults()
    settings = {name: value for name, value in bound.arguments.items() if name != "self"}
    reason = unsupported_reason(settings)
    if reason is not None:
        original(self, *args, **kwargs)
        MEGATRON.leave("IndexedDataset", str(settings["path_prefix"]), reason)
        return
    vars(self).update(settings)
    _open(self)
    _open_bin(self)


def unsupported_reason(settings: dict[str, Any]) -> str | None:
    """Return the reason for which Megatron's own code serves a dataset of these settings, or None.

    With the multi-storage client Megatron opens local files through it; the files are the same.
    """
    if settings.get(core().names.object_storage_config) or core().is_object_storage_path(
        settings["path_prefix"]
    ):
        return "it lies in an object store"
    if settings.get("fast_cache_load") or settings.get("sequences_per_dataset"):
        return "fast_cache_load opens it without reading its header"
    return None


def open_lazily(cls: Any, path_prefix: str, mmap: bool) -> Any:
    """Return an IndexedDataset that opens its files on first use."""
    dataset = cls.__new__(cls)
    vars(dataset).update(_defaults(), path_prefix=path_prefix, mmap=mmap)
    _deferred.add(dataset)
    return dataset


_deferred: weakref.WeakSet[Any] = weakref.WeakSet()


def open_deferred() -> None:
    """Open every deferred dataset, before the methods that open it are removed."""
    for dataset in list(_deferred):
        if {"index", "bin_reader"} <= vars(dataset).keys():
            continue
        try:
            _ = dataset.index, dataset.bin_reader
        except Exception:  # the others have to be opened all the same
            logger.warning("%s: left unopened", dataset.path_prefix, exc_info=True)
            dataset.index = dataset.bin_reader = None  # Megatron's __del__ expects them
    _deferred.clear()


@functools.cache
def _defaults() -> dict[str, Any]:
    """Return the attributes that the constructor sets in this version of megatron-core."""
    parameters = inspect.signature(core().originals["IndexedDataset", "initialize"]).parameters
    known = {"multimodal": False, core().names.object_storage_config: None}
    return {
        name: known.get(name, parameter.default)
        for name, parameter in parameters.items()
        if name not in ("self", "path_prefix", "mmap")
    }


def open_on_access(self: Any, name: str) -> Any:
    """``IndexedDataset.__getattr__``: opens the files of a dataset made by `open_lazily`."""
    if "path_prefix" in vars(self):
        if name == "index":
            return _open(self)
        if name == "bin_reader":
            return _open_bin(self)
    raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")


def close_nothing(self: Any) -> None:
    """``IndexedDataset.__del__``: mappings end with their last view, no descriptor is open."""


def read_range(self: Any, idx: Any, offset: Any = 0, length: Any = None) -> Any:
    """``IndexedDataset.get``, within the sequence."""
    reader = mapped(self)
    if reader is None or not self.mmap:
        return core().originals["IndexedDataset", "get"](self, idx, offset, length)
    return reader.get(idx, offset, length)


def mapped(dataset: Any) -> IndexedDataset | None:
    """Return megaindex's dataset behind a Megatron one; None if Megatron's code serves it."""
    return getattr(getattr(dataset, "index", None), "megaindex", None)


def _open(self: Any) -> _IndexReader:
    self.index = index = _IndexReader(IndexedDataset(self.path_prefix, multimodal=self.multimodal))
    return index


def _open_bin(self: Any) -> Any:
    """Set the reader of the .bin, which only Megatron's own code uses."""
    reader, module = self.index.megaindex, core().indexed_dataset
    self.bin_reader = (
        _bin_reader_class()(reader.tokens.view(np.uint8), reader.path_prefix)
        if self.mmap
        else module._FileBinReader(module.get_bin_path(self.path_prefix))
    )
    return self.bin_reader


class _IndexReader:
    """The interface of Megatron's ``_IndexReader``, over one mapping that its arrays own."""

    def __init__(self, reader: IndexedDataset) -> None:
        self.megaindex = reader

    dtype = property(attrgetter("megaindex.dtype.type"))
    dtype_size = property(attrgetter("megaindex.dtype.itemsize"))
    sequence_count = property(lambda self: len(self.megaindex))
    document_count = property(attrgetter("megaindex.document_indices.size"))
    sequence_lengths = property(attrgetter("megaindex.sequence_lengths"))
    sequence_pointers = property(attrgetter("megaindex.sequence_pointers"))
    document_indices = property(attrgetter("megaindex.document_indices"))
    sequence_modes = property(attrgetter("megaindex.sequence_modes"))

    def __len__(self) -> int:
        return len(self.megaindex)

    def __getitem__(self, idx: int) -> tuple[np.int64, np.int32, np.int8 | None]:
        mode = None if self.sequence_modes is None else self.sequence_modes[idx]
        return self.sequence_pointers[idx], self.sequence_lengths[idx], mode


@functools.cache
def _bin_reader_class() -> Any:
    """Return a subclass of Megatron's reader of mapped files, for tests by isinstance."""

    class MappedBinReader(core().indexed_dataset._MMapBinReader):  # type: ignore[misc]
        """A reader of a mapping that the arrays it returns own."""

        def __init__(self, data: npt.NDArray[np.uint8], path_prefix: str) -> None:
            self._data = data
            self._path_prefix = path_prefix

        def read(self, dtype: Any, count: int, offset: int) -> npt.NDArray[Any]:
            end = int(offset) + int(count) * np.dtype(dtype).itemsize
            if not 0 <= offset <= end <= self._data.size:
                raise OutOfRange(
                    f"{self._path_prefix}.bin: bytes {offset} to {end} were requested, the file "
                    f"has {self._data.size}"
                )
            return self._data[int(offset) : end].view(dtype)

        def __del__(self) -> None:
            """Nothing to close."""

    return MappedBinReader


_LONGEST = np.iinfo(np.int32).max


def write_index(
    self: Any, sequence_lengths: Any, sequence_modes: Any, document_indices: Any
) -> None:
    """``_IndexWriter.write``.

    Raises:
        InvalidArgument: a sequence is too long for the format, which Megatron lets wrap.
    """
    lengths = np.asarray(sequence_lengths, np.int64)
    if lengths.size and not 0 <= lengths.min() <= lengths.max() <= _LONGEST:
        raise InvalidArgument(
            f"{self.idx_path}: sequences hold 0 to {_LONGEST} tokens, got {int(lengths.min())} to "
            f"{int(lengths.max())}; divide longer documents into several sequences"
        )
    bounds = np.asarray(document_indices, np.int64)
    pointers = np.zeros(lengths.size, np.int64)
    np.cumsum(lengths[:-1], out=pointers[1:])
    pointers *= np.dtype(self.dtype).itemsize
    parts: list[npt.NDArray[Any]] = [
        np.array([lengths.size, bounds.size], "<u8"),
        lengths.astype("<i4"),
        pointers,
        bounds,
    ]
    if sequence_modes is not None:
        parts.append(np.asarray(sequence_modes, np.int8))
    for part in parts:
        self.idx_writer.write(part.tobytes())


def add_document(self: Any, tensor: Any, lengths: Any, modes: Any = None) -> None:
    """``IndexedDatasetBuilder.add_document``, with mode 0 for each sequence if none is given, as
    Megatron documents."""
    if self.multimodal and modes is None:
        modes = [0] * len(lengths)
    core().originals["IndexedDatasetBuilder", "add_document"](self, tensor, lengths, modes)
