"""Skipped steps and masked documents under GPT-NeoX, for ``install(skip=…)``.

GPT-NeoX counts iterations. Its training dataset is replaced by one of the samples served, and
``neox_args.train_iters`` is lowered by the steps dropped, on every rank.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.adapters.neox.datasets import BatchRows
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.neox.samples import NeoxTextSamples
from megaindex.adapters.skipped_dataset import (
    SkippedDataset,
    lower_iterations,
    skips_of_run,
    whole_iterations,
)
from megaindex.errors import InvalidArgument
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.labels import IGNORED_LABEL
from megaindex.index.skips import Skips
from megaindex.index.spans import Index


def is_training(dataset: Any) -> bool:
    """Return whether a dataset is of the training data, by the names that GPT-NeoX gives."""
    first = getattr(dataset, "datasets", [dataset])[0]
    return str(getattr(first, "name", "")).startswith("train")


def skipped(dataset: Any, neox_args: Any) -> SkippedDataset:
    """Return the training data of a run without skipped steps, and with masked documents.

    Raises:
        InvalidArgument: a skip does not fit the run or its data.
    """
    skips = skips_of_args(neox_args)
    if skips.masks:
        _check_masks(dataset)
    datasets = getattr(dataset, "datasets", [dataset])
    return SkippedDataset(
        dataset,
        skips,
        samples_index,
        without_loss,
        names=[str(each.megaindex.data_prefix) for each in datasets] if skips.masks else [],
        documents=[len(each.megaindex.text) for each in datasets] if skips.masks else [],
    ).log()


def skips_of_args(neox_args: Any) -> Skips:
    """Return the skips of a run in positions.

    Raises:
        InvalidArgument: they do not fit the run, whose length must be train_iters.
    """
    iterations = whole_iterations(neox_args)
    if getattr(neox_args, "train_epochs", None) or not iterations:
        raise InvalidArgument(
            "skip: train_epochs reads the data again in passes, in which steps have no fixed "
            "samples; give train_iters"
        )
    return skips_of_run(
        framework().policy.skip,
        train_iters=iterations,
        global_batch_size=neox_args.train_batch_size,
    )


def lower_train_iters(neox_args: Any) -> None:
    """Lower ``train_iters`` by the steps dropped."""
    if framework().policy.skip:
        lower_iterations(neox_args, skips_of_args(neox_args), neox_args.train_batch_size)


def _check_masks(dataset: Any) -> None:
    for each in getattr(dataset, "datasets", [dataset]):
        samples = getattr(each, "megaindex", None)
        if not isinstance(samples, NeoxTextSamples) or samples.pack_impl != "packed":
            raise InvalidArgument(
                "skip: documents are masked in GPT2Dataset with pack_impl packed, got "
                f"{type(each).__name__} with pack_impl {getattr(each, 'pack_impl', None)}; skip "
                "steps instead"
            )
        if samples.companions["label"] is None:
            raise InvalidArgument(
                "skip: GPT-NeoX reads the loss of a document from its labels, which the training "
                "data does not have; give train_label_data_paths, such as a copy of the text, or "
                "skip steps instead"
            )


def without_loss(samples: Any, mask: npt.NDArray[np.bool_]) -> Any:
    """Return the samples of a batch without loss where ``mask``, bool[n, S], is True."""
    rows = [{**sample, "label": np.array(sample["label"])} for sample in samples]
    for row, masked in zip(rows, mask, strict=True):
        row["label"][1:][masked] = IGNORED_LABEL
    whole = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    return BatchRows(whole)


def samples_index(dataset: Any) -> Index:
    """Return the index of a GPT2Dataset of cut documents, or of a blend of them.

    Raises:
        InvalidArgument: it is another dataset.
    """
    if isinstance(dataset, SkippedDataset):
        return dataset.served_index()
    datasets = getattr(dataset, "datasets", [dataset])
    for each in datasets:
        samples = getattr(each, "megaindex", None)
        if not isinstance(samples, NeoxTextSamples) or samples.pack_impl != "packed":
            raise InvalidArgument(
                "balance needs the lengths of the documents in each sample, which GPT2Dataset with "
                f"pack_impl packed has, got {type(each).__name__} with pack_impl "
                f"{getattr(each, 'pack_impl', None)}; install without balance"
            )
    indices: tuple[Index, ...] = tuple(each.megaindex.lazy_index() for each in datasets)
    if not hasattr(dataset, "datasets"):
        return indices[0]
    return BlendedIndex(
        indices=indices,
        dataset_index=dataset.dataset_index,
        dataset_sample_index=dataset.dataset_sample_index,
    )
