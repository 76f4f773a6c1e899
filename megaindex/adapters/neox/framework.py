"""GPT-NeoX's data modules before anything was replaced, and its indexed datasets over mappings.

Files are opened with the checks of `megaindex.IndexedDataset`. Arrays that were read outlive the
dataset, no descriptor stays open, and a range outside its sequence raises OutOfRange; GPT-NeoX
returns the tokens that follow. Files of the old format (``cached``, ``lazy``) are read in the same
way, so GPT2Dataset works with them, unlike in GPT-NeoX's own code.
"""

from __future__ import annotations

import functools
import gc
import importlib
import io
import sys
from dataclasses import dataclass, field
from functools import partial
from types import MethodType, ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

from megaindex.adapters.neox.arrays import open_shared
from megaindex.adapters.policy import Policy, make_policy
from megaindex.adapters.reports import on_rank_0
from megaindex.arithmetic import INT32_MAX
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.format.dataset import PairIdentity
from megaindex.format.header import IndexHeader
from megaindex.format.legacy import open_legacy
from megaindex.format.pair import MappedPair

if TYPE_CHECKING:
    from megaindex.adapters.loader_rows import LoaderRows

_PACKAGE = "megatron.data"


@dataclass(kw_only=True)
class NeoxFramework:
    """The modules of ``megatron.data``."""

    package: ModuleType
    gpt2_dataset: ModuleType
    pairwise_dataset: ModuleType
    blendable_dataset: ModuleType
    indexed_dataset: ModuleType
    samplers: ModuleType
    data_utils: ModuleType
    exact: bool = False
    """See `install`."""
    cache_dir: str | None = None
    """Folder of the arrays; None: beside each corpus, as GPT-NeoX's own."""
    policy: Policy = field(default_factory=functools.partial(make_policy, "neox"))
    """The samples requested of each source, and the shuffling of its epochs."""
    rows: LoaderRows | None = None
    """Rows of the training loader of this process."""
    originals: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """Replaced objects by (module, name) or (module, class, name)."""

    @property
    def settings(self) -> tuple[bool, Policy]:
        """The settings of the last `install`."""
        return self.exact, self.policy

    def check_late(self, what: str, settings: tuple[bool, Policy] | None = None) -> None:
        """Refuse data that was made before `install` with these settings, by default the present
        ones, unless all are GPT-NeoX's own.

        Raises:
            InvalidArgument: a setting has no effect on it.
        """
        if (settings or self.settings) != _NEOX_SETTINGS:
            raise InvalidArgument(
                f"{what} was made before install(), whose settings have no effect on it; call "
                "install() before GPT-NeoX builds its data loaders"
            )

    def check_workers(self, settings: tuple[bool, Policy]) -> None:
        """Refuse settings while worker processes read for loaders that were made without them.

        Raises:
            InvalidArgument: a setting has no effect there.
        """
        loading = sys.modules.get("torch.utils.data.dataloader")
        if loading is None or settings == _NEOX_SETTINGS:
            return
        for each in gc.get_objects():
            if type(each) is not loading._MultiProcessingDataLoaderIter:
                continue
            sampler = each._index_sampler
            is_own = isinstance(sampler, self.samplers.DistributedBatchSampler)
            if is_own and getattr(sampler, MADE_WITH, None) != settings:
                self.check_late("an iterator with worker processes", settings)

    def is_own(self, dataset: Any) -> bool:
        """Return whether a low-level dataset is of GPT-NeoX's classes or a subclass of one."""
        module = self.indexed_dataset
        return isinstance(dataset, (module.MMapIndexedDataset, module.IndexedDataset))

    def print_line(self, text: str) -> None:
        """Print as GPT-NeoX does, on rank 0."""
        theirs = getattr(self.data_utils, "print_rank_0", None)
        if theirs is not None:
            theirs(text)
        elif on_rank_0():
            print(text, flush=True)

    def original(self, *names: str) -> Any:
        """Return GPT-NeoX's own function of that name."""
        if names in self.originals:
            return self.originals[names]
        owner: Any = getattr(self, names[0])
        for name in names[1:]:
            owner = getattr(owner, name)
        return owner


_NEOX_SETTINGS = (False, make_policy("neox"))
MADE_WITH = "megaindex_settings"
"""Attribute of a sampler: the settings of `install` under which its loader was made."""


@functools.cache
def framework() -> NeoxFramework:
    """Return GPT-NeoX's data modules.

    Raises:
        InvalidArgument: they cannot be imported.
    """
    names = (
        "indexed_dataset",
        "gpt2_dataset",
        "pairwise_dataset",
        "blendable_dataset",
        "samplers",
        "data_utils",
    )
    try:
        modules: dict[str, Any] = {
            name: importlib.import_module(f"{_PACKAGE}.{name}") for name in names
        }
        package = importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise InvalidArgument(
            f"{_PACKAGE} cannot be imported ({error}); put a checkout of GPT-NeoX on PYTHONPATH, "
            "and install what it needs"
        ) from error
    return NeoxFramework(package=package, **modules)


class LegacyDataset(IndexedDataset):
    """A pair of the old format with the interface of the new one.

    Raises:
        MissingFile: one or both files are missing.
        FormatError: a rule of the format is broken.
    """

    def __init__(self, path_prefix: str) -> None:
        pair = open_legacy(path_prefix)
        if pair.sizes.size and int(pair.sizes.max()) > INT32_MAX:
            raise FormatError(
                f"{pair.idx_path}: sequence {int(pair.sizes.argmax())} has {int(pair.sizes.max())} "
                f"tokens, at most {INT32_MAX} can be indexed; split it"
            )
        mapped = MappedPair(
            bin_path=pair.bin_path,
            idx_path=pair.idx_path,
            header=IndexHeader(
                dtype_code=0, num_sequences=pair.sizes.size, num_bounds=pair.bounds.size
            ),
            dtype=pair.dtype,
            lengths=pair.sizes.astype(np.int32),
            pointers=pair.byte_offsets,
            bounds=pair.bounds,
            modes=None,
            mapped_tokens=pair.tokens,
            idx_nbytes=pair.sizes.nbytes,
            bin_nbytes=pair.tokens.nbytes,
        )
        identity = PairIdentity(mapped.header, mapped.idx_nbytes, mapped.bin_nbytes)
        self._hold(path_prefix, "neox", False, mapped, identity)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._pair.dtype  # the old format has codes of its own

    def __reduce__(self) -> tuple[Any, ...]:
        return LegacyDataset, (self._path_prefix,)


def mapped(dataset: Any) -> IndexedDataset | None:
    """Return megaindex's dataset under one of GPT-NeoX's; None for other classes and for None.

    Subclasses that override reading methods count as other classes.
    """
    if dataset is None:
        return None
    reader = _reader(dataset)
    kind = type(dataset)
    reads_as_we_do = getattr(kind, "get", None) is read_range and kind.__getitem__ is read_sequence
    return reader if isinstance(reader, IndexedDataset) and reads_as_we_do else None


def make_dataset(path: str, impl: str, skip_warmup: bool = False) -> Any:
    """``indexed_dataset.make_dataset``: also opens files of ``infer`` and ``lazy``; mapped corpora
    are shared by the datasets of a group."""
    if impl == "mmap":
        return open_shared(path, partial(_make, path, impl, skip_warmup))
    return _make(path, impl, skip_warmup)


def _make(path: str, impl: str, skip_warmup: bool) -> Any:
    module = framework().indexed_dataset
    if module.IndexedDataset.exists(path):
        if impl == "mmap":
            return module.MMapIndexedDataset(path, skip_warmup)
        if impl == "infer":
            impl = module.infer_dataset_impl(path)
        if impl == "lazy":
            return module.IndexedDataset(path)
    return framework().original("indexed_dataset", "make_dataset")(path, impl, skip_warmup)


class _MMapIndex:
    """The interface of ``MMapIndexedDataset.Index``, over a mapping that its arrays own."""

    def __init__(self, reader: IndexedDataset) -> None:
        self.megaindex = reader
        self.dtype = reader.dtype.type
        self.sizes = self._sizes = reader.sequence_lengths
        self._pointers = reader.sequence_pointers
        self._doc_idx = reader.document_indices

    @property
    def doc_idx(self) -> Any:
        return self._doc_idx

    def __len__(self) -> int:
        return len(self.megaindex)

    def __getitem__(self, i: int) -> tuple[Any, Any]:
        return self._pointers[i], self._sizes[i]


def open_mapped(self: Any, path: str, skip_warmup: bool = True) -> None:
    """``MMapIndexedDataset._do_init``."""
    module = framework().indexed_dataset
    if not skip_warmup:
        module._warmup_mmap_file(module.index_file_path(path))
        module._warmup_mmap_file(module.data_file_path(path))
    self._path = path
    self._index = _MMapIndex(IndexedDataset(path, dialect="neox"))
    self._bin_buffer = self._index.megaindex.tokens.view(np.uint8).data
    # GPT-NeoX's __del__ closes this; mappings end with their last view
    self._bin_buffer_mmap = SimpleNamespace(_mmap=io.BytesIO())


def open_legacy_index(self: Any, path: str) -> None:
    """``IndexedDataset.read_index``, of the old format."""
    reader = LegacyDataset(path)
    self.megaindex = reader
    self.dtype = reader.dtype.type
    self.element_size = reader.dtype.itemsize
    self._len = self.s = len(reader)
    self.doc_count = (reader.document_indices.size,)
    self.dim_offsets = np.arange(len(reader) + 1)
    begins = reader.sequence_pointers // self.element_size
    self.data_offsets = np.append(begins, reader.tokens.size)
    self.sizes = reader.sequence_lengths.astype(np.int64)
    self.doc_idx = reader.document_indices


def read_sequence(self: Any, idx: Any) -> Any:
    """``__getitem__``: a sequence, or a list of them."""
    reader = _reader(self)
    return _own_method(self, "__getitem__")(self, idx) if reader is None else reader[idx]


def read_range(self: Any, idx: Any, offset: int = 0, length: int | None = None) -> Any:
    """``get``, within the sequence."""
    reader = _reader(self)
    if reader is None:
        return _own_method(self, "get")(self, idx, offset, length)
    return reader.get(idx, offset, length)


def read_as_neox(dataset: Any) -> None:
    """Set ``get`` of a dataset to GPT-NeoX's own, which reads beyond a sequence."""
    owner = framework().indexed_dataset.MMapIndexedDataset
    if isinstance(dataset, owner):
        own = framework().original("indexed_dataset", "MMapIndexedDataset", "get")
        dataset.get = MethodType(own, dataset)


def _own_method(dataset: Any, method: str) -> Any:
    """Return GPT-NeoX's method of a low-level dataset that was opened before `install`."""
    neox = framework()
    names = ("MMapIndexedDataset", "IndexedCachedDataset", "IndexedDataset")
    owners = (name for name in names if isinstance(dataset, getattr(neox.indexed_dataset, name)))
    found = (neox.original("indexed_dataset", owner, method) for owner in owners)
    return next(each for each in found if each is not None)


def _reader(dataset: Any) -> Any:
    return getattr(getattr(dataset, "_index", dataset), "megaindex", None)
