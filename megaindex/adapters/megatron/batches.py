"""``__getitem__`` and ``__getitems__`` of GPTDataset and BlendedDataset: samples and batches.

Datasets whose class overrides how a sample is read, or whose tokens do not lie in mapped local
files, are read sample by sample through their own ``__getitem__``.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megaindex.adapters.megatron.core import core
from megaindex.adapters.megatron.indexed_dataset import mapped
from megaindex.adapters.skipped_dataset import SkippedDataset
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import ArrayIndex
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.spans import Index
from megaindex.loader.batch import SampleOptions
from megaindex.loader.torch_dataset import GPTDataset


def read_gpt_sample(self: Any, idx: int | None) -> Any:
    """``GPTDataset.__getitem__``, with a new loss mask for every sample.

    Megatron shares one loss mask between samples and clears it where the first sample is padded;
    releases up to 0.15 clear it for every padded sample.
    """
    text = self._query_document_sample_shuffle_indices(idx)[0] if _is_bare(self, idx) else None
    if text is not None and not (text == self._pad_token_id).any():
        return _bare_sample(text)
    sample = core().originals["GPTDataset", "__getitem__"](self, idx)
    if self.masks_and_position_ids_are_cached:
        self.cached_loss_mask = self.cached_loss_mask.new_ones(self.cached_loss_mask.shape)
    return sample


def _is_bare(self: Any, idx: int | None) -> bool:
    """Return True if samples without padding differ only in their tokens."""
    config = self.config
    return (
        idx is not None
        and self.masks_and_position_ids_are_cacheable
        and config.add_extra_token_to_sequence
        and not config.create_attention_mask
        and not getattr(config, "inter_document_masking", False)
    )


def _bare_sample(text: npt.NDArray[Any]) -> dict[str, torch.Tensor]:
    """Return Megatron's fields of a sample without padding."""
    text = np.asarray(text, np.int64)
    size = text.size - 1
    return {  # NumPy slices an array in half the time that PyTorch takes
        "tokens": torch.from_numpy(text[:-1]),
        "labels": torch.from_numpy(text[1:]),
        "loss_mask": torch.from_numpy(np.ones(size, np.float32)),
        "position_ids": torch.from_numpy(np.arange(size)),
    }


def read_gpt_samples(self: Any, ids: Sequence[Any]) -> list[Any]:
    """``GPTDataset.__getitems__``."""
    reader = _reader_of(self, [self])
    if reader is None or not _are_positions(ids, len(self)):
        return [self[i] for i in ids]
    return reader.read(ids)


def read_blend_samples(self: Any, ids: Sequence[Any]) -> list[Any]:
    """``BlendedDataset.__getitems__``.

    Reading a batch at once needs all sources open, which delays the first batch: samples are read
    one by one until about every source has been read.
    """
    is_plain = core().is_plain(type(self), "BlendedDataset", "__getitem__")
    if not is_plain or not _are_positions(ids, len(self)):
        return [self[i] for i in ids]
    _num_read[self] = _num_read.get(self, 0) + len(ids)
    if _num_read[self] <= _READ_SINGLY * len(self.datasets):
        return [self[i] for i in ids]
    reader = _reader_of(self, self.datasets)
    if reader is None:
        return [self[i] for i in ids]
    return reader.read(ids)


_READ_SINGLY = 2  # samples per source, after which 86 % of equally weighted sources were read
_num_read: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _are_positions(ids: Sequence[Any], length: int) -> bool:
    """Return True if all ids are from 0 to length - 1; ``__getitem__`` also takes None."""
    return all(i is not None and 0 <= i < length for i in ids)


_readers: weakref.WeakKeyDictionary[Any, _Reader | None] = weakref.WeakKeyDictionary()


def _reader_of(self: Any, datasets: Sequence[Any]) -> _Reader | None:
    if self not in _readers:
        _readers[self] = _Reader(self, datasets) if _share_settings(datasets) else None
    return _readers[self]


_READING_METHODS = ("__getitem__", "_query_document_sample_shuffle_indices")


def unbatched_reason(cls: type, low_level: type, config: Any) -> str | None:
    """Return the reason for which samples are read one by one through the dataset's own
    ``__getitem__``; None where batches are read at once."""
    if not config.mmap_bin_files:
        return "mmap_bin_files is off"
    # Megatron-LM main counts empty documents in cu_seqlens, which our fields leave out
    if getattr(config, "inter_document_masking", False):
        return "inter_document_masking is on"
    for base, owner, methods in (
        ("GPTDataset", cls, _READING_METHODS),
        ("IndexedDataset", low_level, ("__getitem__", "get")),
    ):
        for method in methods:
            if not core().is_plain(owner, base, method):
                return f"{owner.__name__} has a {method} of its own"
    return None


def _share_settings(datasets: Sequence[Any]) -> bool:
    config = datasets[0].config
    return all(
        isinstance(dataset, core().gpt_dataset.GPTDataset)
        and unbatched_reason(type(dataset), type(dataset.dataset), config) is None
        and dataset.config is config
        and dataset._pad_token_id == datasets[0]._pad_token_id
        and dataset.shuffle_index is not None
        and mapped(dataset.dataset) is not None
        for dataset in datasets
    )


class _Reader:
    """A reader of samples of GPTDatasets of equal settings, with all of Megatron's fields."""

    def __init__(self, top: Any, datasets: Sequence[Any]) -> None:
        config = datasets[0].config
        with_mask = bool(config.create_attention_mask)
        options = SampleOptions(
            eod_id=config.tokenizer.eod,
            pad_id=datasets[0]._pad_token_id,
            eod_mask_loss=bool(config.eod_mask_loss),
            reset_position_ids=bool(config.reset_position_ids),
            reset_attention_mask=bool(config.reset_attention_mask) and with_mask,
            create_attention_mask=with_mask,
            dataset_id=top is not datasets[0],
        )
        index = _joint_index(top, datasets)
        readers = [mapped(dataset.dataset) for dataset in datasets]
        self._dataset = GPTDataset(index, [r for r in readers if r is not None], options=options)

    def read(self, ids: Sequence[Any]) -> list[Any]:
        return self._dataset.__getitems__(ids) if len(ids) else []


def samples_index(dataset: Any) -> Index:
    """Return the index of a GPTDataset or a BlendedDataset of them.

    Raises:
        InvalidArgument: it is of another class, or cuts its samples in a way of its own.
    """
    if isinstance(dataset, SkippedDataset):
        return dataset.served_index()
    datasets = getattr(dataset, "datasets", [dataset])
    for each in datasets:
        if not isinstance(each, core().gpt_dataset.GPTDataset) or not core().is_plain(
            type(each), "GPTDataset", "_query_document_sample_shuffle_indices"
        ):
            raise InvalidArgument(
                "balance and skip need the documents of each sample, which only GPTDataset "
                f"and blends of it have, got {type(each).__name__}; install without them"
            )
    if any(each.shuffle_index is None for each in datasets) or (
        dataset is not datasets[0] and dataset.dataset_index is None
    ):
        raise InvalidArgument(
            "balance and skip need the index arrays when the loader is made, and "
            "--dataloader-defer-npy-index-mmap leaves them for the first sample; remove that flag, "
            "or install without them"
        )
    return _joint_index(dataset, datasets)


def _joint_index(top: Any, datasets: Sequence[Any]) -> Index:
    indices = [index_of(dataset) for dataset in datasets]
    if top is datasets[0]:
        return indices[0]
    return BlendedIndex(
        indices=tuple(indices),
        dataset_index=top.dataset_index,
        dataset_sample_index=top.dataset_sample_index,
    )


def index_of(dataset: Any) -> ArrayIndex:
    """Return the index of a GPTDataset, as of one epoch."""
    length = dataset.config.sequence_length
    return ArrayIndex(
        order="megatron",
        document_index=dataset.document_index,
        sample_index=dataset.sample_index,
        shuffle_index=dataset.shuffle_index,
        sequence_lengths=dataset.dataset.sequence_lengths,
        sequence_length=length,
        # as of one epoch: reading needs neither, and counting would read all lengths
        num_epochs=1,
        tokens_per_epoch=dataset.shuffle_index.size * length,
        add_extra_token=int(dataset.config.add_extra_token_to_sequence),
    )
