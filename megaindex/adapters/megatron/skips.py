"""Skipped steps and masked documents under Megatron's training loop, for ``install(skip=…)``.

Megatron counts the samples that it reads. Its training dataset is replaced by one of the samples
served, and ``args.train_iters`` is lowered by the steps dropped, on every rank, after the datasets
are built for all of them.
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
from megaindex.adapters.skipped_dataset import (
    SkippedDataset,
    lower_iterations,
    skips_of_run,
    whole_iterations,
)
from megaindex.errors import InvalidArgument
from megaindex.index.skips import Skips
from megaindex.loader.torch_dataset import SampleList

TRAINING = "megatron.training.training"
LOADERS = "build_train_valid_test_data_loaders"
"""Megatron's function that makes all loaders, which every rank calls."""
_FAR = 2**50  # samples after which no schedule changes


def build_data_loaders(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``build_train_valid_test_data_loaders``, which lowers ``args.train_iters``."""

    @functools.wraps(original)
    def build(*args: Any, **kwargs: Any) -> Any:
        if not core().policy.skip:
            return original(*args, **kwargs)
        settings = original.__globals__["get_args"]()
        settings.train_iters = whole_iterations(settings)  # the datasets are built for all steps
        loaders = original(*args, **kwargs)
        lower_iterations(settings, _skips(settings, 0), _global_batch())
        return loaders

    return build


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
