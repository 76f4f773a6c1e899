"""Skipped steps and masked documents under Megatron's training loop, for ``install(skip=…)``.

Megatron counts the samples that it reads. Its training dataset is replaced by one of the samples
served, and ``args.train_iters`` is lowered by the steps dropped, on every rank, after the datasets
are built for all of them. The skips are kept in ``args``, which its checkpoints hold, and a run
that continues one with other skips of samples served is refused.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from megaindex.adapters.megatron.batches import samples_index
from megaindex.adapters.megatron.core import core, microbatch_calculator
from megaindex.adapters.reports import MEGATRON
from megaindex.adapters.skipped_dataset import (
    RECORD,
    SkippedDataset,
    check_resumed,
    lower_iterations,
    skips_of_run,
    whole_iterations,
)
from megaindex.errors import InvalidArgument
from megaindex.index.skips import Skips
from megaindex.loader.torch_dataset import SampleList

TRAINING = "megatron.training.training"
CHECKPOINTING = "megatron.training.checkpointing"
CHECK_ARGS = "check_checkpoint_args"
"""Megatron's function that compares the arguments of a checkpoint with which a run goes on."""
LOADERS = "build_train_valid_test_data_loaders"
"""Megatron's function that makes all loaders, which every rank calls."""
_FAR = 2**50  # samples after which no schedule changes


def build_data_loaders(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``build_train_valid_test_data_loaders``, which lowers ``args.train_iters``."""

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
    """Return ``check_checkpoint_args``, which keeps the skips in the arguments of a checkpoint."""

    @functools.wraps(original)
    def check(checkpoint_args: Any, *args: Any, **kwargs: Any) -> Any:
        record = getattr(checkpoint_args, RECORD, None)
        core().loaded = {} if record is None else {RECORD: record}
        return original(checkpoint_args, *args, **kwargs)

    return check


def skipped(dataset: Any, loader_function: Callable[..., Any]) -> SkippedDataset:
    """Return the training data of a run without skipped steps, and with masked documents.

    Args:
        dataset: Megatron's training dataset.
        loader_function: Megatron's function that makes a loader of it.

    Raises:
        InvalidArgument: a skip does not fit the run or its data.
    """
    get_args = getattr(loader_function, "__globals__", {}).get("get_args")
    skips = _skips(None if get_args is None else get_args(), len(dataset))
    lock = core().policy.lock
    if lock is not None:
        lock.check_skips(skips)
    datasets = getattr(dataset, "datasets", [dataset])
    return SkippedDataset(
        dataset,
        skips,
        samples_index,
        without_loss,
        names=[str(getattr(each, "dataset_path", "")) for each in datasets],
        documents=[len(each.dataset) for each in datasets] if skips.masks else [],
    ).log()


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


def without_loss(samples: Any, mask: npt.NDArray[np.bool_]) -> Any:
    """Return the samples of a batch without loss where ``mask``, bool[n, S], is True."""
    if isinstance(samples, SampleList) and samples.is_whole:
        samples.batch["loss_mask"][torch.from_numpy(mask)] = 0
        return samples
    found = []
    for sample, row in zip(samples, mask, strict=True):
        if row.any():  # Megatron shares one loss mask between samples
            loss_mask = sample["loss_mask"].clone()
            loss_mask[torch.from_numpy(row)] = 0
            sample = {**sample, "loss_mask": loss_mask}
        found.append(sample)
    return found
