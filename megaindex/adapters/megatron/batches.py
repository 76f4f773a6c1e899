"""Samples and batches of Megatron's datasets; its samplers with skipped and balanced steps.

Datasets whose class overrides how a sample is read, or whose tokens do not lie in mapped local
files, are read sample by sample through their own ``__getitem__``.

Megatron counts the samples that it reads. With ``install(skip=…)`` its training dataset is replaced
by one of the samples served, and ``args.train_iters`` is lowered by the steps dropped, on every
rank, after the datasets are built for all of them. The skips are kept in ``args``, which its
checkpoints hold, and a run that continues one with other skips of samples served is refused.

With ``install(balance=…)`` the ``single`` sampler yields the same samples in each step, whose
boundaries are those of Megatron's calculator of microbatches, but assigns them to the ranks by
their work.
"""

from __future__ import annotations

import copy
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megaindex.adapters.loader_rows import LoaderRows
from megaindex.adapters.megatron import locks
from megaindex.adapters.megatron.core import (
    core,
    micro_batches_of_step,
    microbatch_calculator,
)
from megaindex.adapters.megatron.indexed_dataset import mapped
from megaindex.adapters.reports import MEGATRON
from megaindex.adapters.skipped_dataset import (
    RECORD,
    Places,
    SkippedDataset,
    check_resumed,
    end_token,
    lower_iterations,
    skips_of_run,
    whole_iterations,
)
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ArrayIndex
from megaindex.index.balance import check_sum
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.skips import Skips
from megaindex.index.spans import Index, alignments
from megaindex.loader.batch import SampleOptions
from megaindex.loader.sampler_state import RankLayout, Step
from megaindex.loader.samplers import assign_by_work
from megaindex.loader.torch_dataset import GPTDataset, SampleList


def read_gpt_sample(self: Any, idx: int | None) -> Any:
    """``GPTDataset.__getitem__``, with a new loss mask for every sample.

    Megatron shares one loss mask between samples and clears it where the first sample is padded;
    releases up to 0.15 clear it for every padded sample. A class that queries the tokens in a way
    of its own, such as Megatron's for fill-in-the-middle, is queried once and read by Megatron.
    """
    original = core().originals["GPTDataset", "__getitem__"]
    if not core().is_plain(type(self), "GPTDataset", _READING_METHODS[1]):
        return original(self, idx)
    text = self._query_document_sample_shuffle_indices(idx)[0] if _is_bare(self, idx) else None
    if text is not None and not (text == self._pad_token_id).any():
        return _bare_sample(text)
    sample = original(self, idx)
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
    return reader.__getitems__(ids)


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
    return [self[i] for i in ids] if reader is None else reader.__getitems__(ids)


_READ_SINGLY = 2  # samples per source, after which 86 % of equally weighted sources were read
_num_read: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()


def _are_positions(ids: Sequence[Any], length: int) -> bool:
    """Return True if there are ids, all from 0 to length - 1; ``__getitem__`` also takes None."""
    return len(ids) > 0 and all(i is not None and 0 <= i < length for i in ids)


_readers: weakref.WeakKeyDictionary[Any, GPTDataset | None] = weakref.WeakKeyDictionary()


def _reader_of(self: Any, datasets: Sequence[Any]) -> GPTDataset | None:
    if self not in _readers:
        _readers[self] = _make_reader(self, datasets) if _share_settings(datasets) else None
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


def _make_reader(top: Any, datasets: Sequence[Any]) -> GPTDataset:
    """Return the samples of GPTDatasets of equal settings, with all of Megatron's fields."""
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
    readers = [mapped(dataset.dataset) for dataset in datasets]
    index = _joint_index(top, datasets)
    return GPTDataset(index, [r for r in readers if r is not None], options=options)


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
                "lock, keys, balance and skip need the documents of each sample, which only "
                f"GPTDataset and blends of it have, got {type(each).__name__}; install without them"
            )
    if any(each.shuffle_index is None for each in datasets) or (
        dataset is not datasets[0] and dataset.dataset_index is None
    ):
        raise InvalidArgument(
            "lock, keys, balance and skip need the index arrays when the loader is made, and "
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
    """Return the index of a GPTDataset; as of one epoch where no keys need more."""
    length = dataset.config.sequence_length
    num_epochs, tokens = _epochs_of(dataset)
    return ArrayIndex(
        order="megatron",
        document_index=dataset.document_index,
        sample_index=dataset.sample_index,
        shuffle_index=dataset.shuffle_index,
        sequence_lengths=dataset.dataset.sequence_lengths,
        sequence_length=length,
        num_epochs=num_epochs,
        tokens_per_epoch=tokens,
        add_extra_token=int(dataset.config.add_extra_token_to_sequence),
    )


def _epochs_of(dataset: Any) -> tuple[int, int]:
    """Return the number of epochs and the tokens of one. Counting reads all lengths."""
    if not core().policy.keys:
        return 1, dataset.shuffle_index.size * dataset.config.sequence_length
    lengths = dataset.dataset.sequence_lengths[dataset.indices]
    num_epochs = dataset.document_index.size // dataset.indices.size
    return num_epochs, int(lengths.sum(dtype=np.int64))


def _follow_rows(loader: Any, dataset: Any, consumed_samples: int, earlier: int) -> None:
    """Keep the rows of a training loader for ``rows()``."""
    sampler = loader.batch_sampler
    _check_single(sampler, "keys")
    positions = dataset.positions_of if isinstance(dataset, SkippedDataset) else None
    datasets = getattr(dataset, "datasets", [dataset])
    if not all(hasattr(each.dataset, "path_prefix") for each in datasets):
        raise InvalidArgument("keys: mock data has no content; give data, or install without keys")

    def open_index() -> tuple[Index, list[IndexedDataset]]:
        index = dataset.index if isinstance(dataset, SkippedDataset) else samples_index(dataset)
        return index, [IndexedDataset(each.dataset.path_prefix) for each in datasets]

    core().rows = LoaderRows(
        loader,
        open_index,
        first_id=lambda: consumed_samples,
        first_position=consumed_samples + earlier,
        rows_per_round=sampler.micro_batch_times_data_parallel_size,
        positions=positions,
        wide=core().policy.keys == "wide",
    )


_FAR = 2**50  # samples after which no schedule changes


def build_data_loaders(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``build_train_valid_test_data_loaders``, which every rank calls; it lowers
    ``args.train_iters``."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        settings = original.__globals__["get_args"]()
        if core().policy.skip:
            settings.train_iters = whole_iterations(settings)  # datasets are built for all steps
        loaders = original(*args, **kwargs)
        _record(settings, loaders)
        if core().policy.skip:
            lower_iterations(settings, _skips(settings, 0), _global_batch())
        return loaders

    return build


def _record(settings: Any, loaders: Any) -> None:
    """Compare the skips with those of the checkpoint, and put them where the next one holds them.

    Megatron saves all attributes of its arguments.
    """
    train = loaders[0] if isinstance(loaders, (tuple, list)) and loaders else None
    if train is None:  # this rank has no data
        return
    dataset = train.dataset
    served = int(getattr(settings, "consumed_train_samples", 0) or 0)
    loaded = core().loaded
    if loaded is not None:
        check_resumed(loaded.get(RECORD), dataset, served, "the checkpoint")
    elif served and isinstance(dataset, SkippedDataset):
        MEGATRON.leave(
            "skip", "the checkpoint",
            "Megatron-LM did not read it, so what it skipped is not compared with install()",
        )  # fmt: skip
    if isinstance(dataset, SkippedDataset):
        setattr(settings, RECORD, dataset.record)


def check_checkpoint_args(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``check_checkpoint_args``, which compares the arguments of a checkpoint with those of
    the run; it keeps the skips in them."""

    @functools.wraps(original)
    def check(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        record = getattr(checkpoint_args, RECORD, None)
        core().loaded = {} if record is None else {RECORD: record}
        return original(checkpoint_args, *args, **kwargs)

    return check


def skipped(dataset: Any, loader_function: Callable[..., Any]) -> SkippedDataset:
    """Return the training data of a run without skipped steps, with masked and removed documents.

    Raises:
        InvalidArgument: a skip does not fit the run or its data.
    """
    skips = _skips(_arguments(loader_function), len(dataset))
    lock = core().policy.lock
    if lock is not None:
        lock.check_skips(skips)
    datasets = getattr(dataset, "datasets", [dataset])
    return SkippedDataset(
        dataset,
        skips,
        samples_index,
        functools.partial(without_loss, fill=_fill(datasets, skips)),
        names=[str(getattr(each, "dataset_path", "")) for each in datasets],
        documents=[len(each.dataset) for each in datasets] if skips.masks else [],
    ).log()


def _fill(datasets: Sequence[Any], skips: Skips) -> int:
    """Return the end token, which takes the places of removed documents; 0 if none are removed."""
    if not skips.removes:
        return 0
    for each in datasets:
        if not core().is_plain(type(each), "GPTDataset", "__getitem__"):
            raise InvalidArgument(
                f"skip: remove: {type(each).__name__} has a __getitem__ of its own, whose fields "
                "may hold removed tokens; use GPTDataset"
            )
    return end_token(datasets[0].config)


def _skips(args: Any, num_samples: int) -> Skips:
    if getattr(args, "phase_transition_iterations", None):
        raise InvalidArgument(
            "skip: --phase-transition-iterations counts the samples of each phase anew; remove "
            "one of them"
        )
    if getattr(args, "iterations_to_skip", None):
        raise InvalidArgument(
            "skip: --iterations-to-skip names iterations, which are not steps any more; write them "
            "into the skip of install(), as steps from 0"
        )
    batch = _global_batch()
    samples = getattr(args, "train_samples", None)
    iterations = whole_iterations(args)
    if samples:
        iterations = samples // batch
    elif not iterations:
        iterations = num_samples // batch
    return skips_of_run(core().policy.skip, train_iters=iterations, global_batch_size=batch)


def _global_batch() -> int:
    """Return the global batch size, which must not change over the run."""
    calculator = copy.copy(microbatch_calculator())
    sizes = []
    for consumed in (0, _FAR):
        calculator.update(consumed, False)
        sizes.append(int(calculator.get_current_global_batch_size()))
    if sizes[0] != sizes[1]:
        raise InvalidArgument(
            f"skip: the global batch size grows from {sizes[0]} to {sizes[1]}, and Megatron would "
            "change it at other steps, since it does not count skipped samples; use a constant one"
        )
    return sizes[0]


def without_loss(samples: Any, mask: Places, removed: Places | None, fill: int) -> Any:
    """Return the samples of a batch without loss where ``mask``, bool[n, S], is True, and with the
    token ``fill`` where ``removed``, bool[n, S + 1] or None, is True."""
    places = {"loss_mask": (mask, 0)}
    if removed is not None:
        places |= {"tokens": (removed[:, :-1], fill), "labels": (removed[:, 1:], fill)}
    if isinstance(samples, SampleList) and samples.is_whole:
        for name, (where, value) in places.items():
            samples.batch[name][torch.from_numpy(where)] = value
        return samples
    found = []
    for row, sample in enumerate(samples):
        if mask[row].any():  # Megatron shares one loss mask between samples
            changed = {name: sample[name].clone() for name in places}
            for name, (where, value) in places.items():
                changed[name][torch.from_numpy(where[row])] = value
            sample = {**sample, **changed}
        found.append(sample)
    return found


LOADER = "build_pretraining_data_loader"
"""Megatron's function that makes a sampler and a DataLoader of a dataset."""
_ATTRIBUTE = "megaindex_balance"
_SINGLE = "MegatronPretrainingSampler"


@dataclass(frozen=True, kw_only=True)
class BalancedSteps:
    """Samples and step boundaries of a training sampler."""

    index: Index
    offset: int
    """Samples consumed in earlier phases of the run, which the sampler does not count."""

    def micro_batches(self, sampler: Any) -> Iterator[list[int]]:
        """Yield this rank's micro batches, of all whole rounds that the sampler has left."""
        stride = sampler.micro_batch_times_data_parallel_size
        ranks = RankLayout(
            micro_batch_size=sampler.micro_batch_size,
            data_parallel_rank=sampler.data_parallel_rank,
            data_parallel_size=stride // sampler.micro_batch_size,
        )
        first = sampler.consumed_samples
        while rounds := (sampler.total_samples - first) // stride:
            rows = min(rounds, self._micro_batches_at(first)) * stride
            check_sum(rows, self.index.sequence_length)
            step = Step(first=first, samples=rows, rows=rows)
            for batch in assign_by_work(step, ranks, self.index, sampler.total_samples):
                yield [position for position in batch if position is not None]
            first += rows

    def _micro_batches_at(self, consumed_samples: int) -> int:
        """Return the micro batches of a rank in the step that begins there."""
        # a copy, since loaders read ahead of the training whose state this is
        calculator = copy.copy(microbatch_calculator())
        calculator.update(consumed_samples + self.offset, False)
        count = int(calculator.get())
        if count < 1:
            raise InvalidArgument(
                f"balance: Megatron's calculator gives {count} micro batches after "
                f"{consumed_samples + self.offset} samples, at least 1 is needed; change the batch "
                "size or its schedule"
            )
        return count


def measured(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``build_pretraining_data_loader`` of Megatron-Bridge, whose training is measured, and
    compared with a lock."""

    @functools.wraps(original)
    def build(dataset: Any, consumed_samples: int = 0, *args: Any, **kwargs: Any) -> Any:
        for setting in ("skip", "balance"):
            if getattr(core().policy, setting):
                raise InvalidArgument(
                    f"{setting}: Megatron-Bridge has samplers of its own, which are not served "
                    f"with it; install without {setting}, a lock with skips included"
                )
        loader = original(dataset, consumed_samples, *args, **kwargs)
        _measure(loader, dataset)
        if loader is not None and core().policy.lock is not None:
            _compare(loader, dataset, consumed_samples)
        if core().policy.keys and loader is not None and is_training(dataset):
            _follow_rows(loader, dataset, consumed_samples, 0)
        return loader

    return build


def _compare(loader: Any, dataset: Any, consumed_samples: int) -> None:
    """Compare a loader of Megatron-Bridge with the lock, of training alone.

    Raises:
        InvalidArgument: its sampler does not serve the samples in order.
        FormatError: batch sizes or the place of the run differ.
    """
    if not is_training(dataset):
        reason = "Megatron-Bridge reads it in an order of its own, which is not compared"
        MEGATRON.leave("lock", "evaluation", reason)
        return
    _check_training(loader.batch_sampler, None, consumed_samples)


def _measure(loader: Any, dataset: Any) -> None:
    if isinstance(loader, torch.utils.data.DataLoader) and is_training(dataset):
        MEGATRON.measure(loader, micro_batches_of_step)


def read_again(original: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Return ``RerunDataIterator.__next__``, after which the rows are those of what it replays."""

    @functools.wraps(original)
    def read(self: Any) -> Any:
        replays, batch, rows = self.replaying, original(self), core().rows
        if replays and rows is not None:
            rows.replay(batch)
        return batch

    return read


def forget_returned(original: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """Return ``RerunDataIterator.load_state_dict``, whose micro batches are of another process."""

    @functools.wraps(original)
    def load(self: Any, state_dict: Any) -> Any:
        rows = core().rows
        if rows is not None:
            rows.forget()
        return original(self, state_dict)

    return load


def divide_documents(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``get_batch_on_this_cp_rank``, which divides documents that are aligned, where
    Megatron-LM's pretraining divides the row."""
    signature, checked = inspect.signature(original), False
    if "use_per_sequence_balancing" not in signature.parameters:
        return original

    @functools.wraps(original)
    def divide(batch: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal checked
        padded = batch.get("cu_seqlens_padded")
        if padded is None:
            return original(batch, *args, **kwargs)
        bound = signature.bind(batch, *args, **kwargs)
        if not checked:  # of the first batch alone: reading it waits for the device
            checked = True
            _check_aligned(padded, bound.arguments.get("cp_group"))
        bound.arguments["use_per_sequence_balancing"] = False
        return original(*bound.args, **bound.kwargs)

    return divide


def _check_aligned(padded: torch.Tensor, group: Any) -> None:
    ranks = torch.distributed.get_world_size(group)
    if ranks > 1 and bool((padded % (2 * ranks) != 0).any()):
        raise _not_aligned(ranks, "got documents that begin between them")


def _not_aligned(ranks: int, found: str) -> InvalidArgument:
    return InvalidArgument(
        f"align must be a multiple of {2 * ranks}, twice the context-parallel size, so that "
        f"{ranks} ranks can divide each document, {found}; build the dataset with "
        f"PackedOrder(align={2 * ranks})"
    )


def check_documents(dataset: Any, args: Any) -> None:
    """Refuse a dataset of megaindex whose document bounds this Megatron-LM would not read.

    Raises:
        InvalidArgument: it would attend over whole rows.
    """
    if not isinstance(dataset, GPTDataset) or not dataset.options.cu_seqlens or args is None:
        return
    if not hasattr(args, "dataloader_inter_document_masking"):
        raise InvalidArgument(
            "cu_seqlens: this release of Megatron-LM has no masking between documents and would "
            "attend over whole rows; use Megatron-LM main, or a dense mask with "
            "reset_attention_mask and create_attention_mask"
        )
    if not args.dataloader_inter_document_masking and not getattr(args, "sft", False):
        raise InvalidArgument(
            "cu_seqlens: Megatron-LM reads the bounds of documents with "
            "--dataloader-inter-document-masking alone, and would attend over whole rows; give it, "
            "or leave cu_seqlens out"
        )
    ranks, found = getattr(args, "context_parallel_size", 1), alignments(dataset.index)
    if ranks > 1 and any(align % (2 * ranks) for align in found):
        raise _not_aligned(ranks, f"got {', '.join(map(str, sorted(found)))}")


def build_data_loader(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``build_pretraining_data_loader``, which skips and balances training data if `install`
    was called with ``skip`` or ``balance``."""

    @functools.wraps(original)
    def build(dataset: Any, consumed_samples: int, *args: Any, **kwargs: Any) -> Any:
        check_documents(dataset, _arguments(original))
        if dataset is not None and core().policy.skip and is_training(dataset):
            dataset = skipped(dataset, original)
        loader = original(dataset, consumed_samples, *args, **kwargs)
        _measure(loader, dataset)
        sampler: Any = getattr(loader, "batch_sampler", None)
        if loader is not None and core().policy.lock is not None:
            if is_training(dataset):
                _check_training(sampler, _arguments(original), consumed_samples)
            else:
                _check_single(sampler, "lock")
        if isinstance(dataset, SkippedDataset):
            _check_single(sampler, "skip")
        if core().policy.keys and loader is not None and is_training(dataset):
            earlier = _earlier_phases(original, consumed_samples)
            _follow_rows(loader, dataset, consumed_samples, earlier)
        balance = core().policy.balance
        if balance is None or loader is None or not is_training(dataset):
            return loader
        _check_single(sampler, "balance")
        if not balance.attention:
            MEGATRON.leave_in_order()
            return loader
        steps = BalancedSteps(
            index=samples_index(dataset), offset=_earlier_phases(original, consumed_samples)
        )
        setattr(sampler, _ATTRIBUTE, steps)
        ranks = sampler.micro_batch_times_data_parallel_size // sampler.micro_batch_size
        MEGATRON.balance(sampler.total_samples, ranks, balance)
        return loader

    return build


def _check_training(sampler: object, args: Any, consumed_samples: int) -> None:
    """Compare the sampler of training, its batches and its place with the lock."""
    _check_single(sampler, "lock")
    locks.check_batches(args)
    locks.check_resumed(args, consumed_samples)


def _check_single(sampler: object, setting: str) -> None:
    if type(sampler).__name__ != _SINGLE:
        raise InvalidArgument(
            f"{setting} needs --dataloader-type single, whose samples are served in order, got a "
            f"loader with {type(sampler).__name__}; use it, or install without {setting}"
        )


def _earlier_phases(original: Callable[..., Any], consumed_samples: int) -> int:
    """Return the samples consumed before the current ``--phase-transition-iterations`` phase."""
    consumed = getattr(_arguments(original), "consumed_train_samples", consumed_samples)
    return int(consumed) - consumed_samples


def _arguments(function: Callable[..., Any]) -> Any:
    """Return Megatron's arguments, as one of its functions sees them; None if it does not."""
    get_args = getattr(function, "__globals__", {}).get("get_args")
    return None if get_args is None else get_args()


def is_training(dataset: Any) -> bool:
    """Return whether a dataset is of the training split."""
    split = getattr(dataset, "split", getattr(dataset, "index_split", None))
    return getattr(split, "name", "train") == "train"


def balanced_steps(sampler: Any) -> BalancedSteps | None:
    """Return the steps of a sampler that balances; None for another."""
    steps: BalancedSteps | None = getattr(sampler, _ATTRIBUTE, None)
    return steps
