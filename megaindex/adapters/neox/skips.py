"""Skipped steps, masked and removed documents under GPT-NeoX, for ``install(skip=…)``.

GPT-NeoX counts iterations. Its training dataset is replaced by one of the samples served, and
``neox_args.train_iters`` is lowered by the steps dropped, on every rank. The skips are written into
the folder ``configs`` of its checkpoints, and a run that continues one with other skips of samples
served is refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np

from megaindex.adapters.neox.datasets import BatchRows
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.neox.samples import NeoxSamples
from megaindex.adapters.reports import on_rank_0
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
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.array_index import distinct
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.skips import Skips
from megaindex.index.spans import IGNORED_LABEL, Index
from megaindex.io.atomic import Damaged, read_object
from megaindex.io.paths import as_storage_error


def is_training(dataset: Any) -> bool:
    """Return whether a dataset is of the training data, by the names that GPT-NeoX gives."""
    first = getattr(dataset, "datasets", [dataset])[0]
    return str(getattr(first, "name", "")).startswith("train")


def skipped(dataset: Any, neox_args: Any) -> SkippedDataset:
    """Return the training data of a run without skipped steps, with masked and removed documents.

    Raises:
        InvalidArgument: a skip does not fit the run or its data.
    """
    skips = skips_of_args(neox_args)
    lock = framework().policy.lock
    if lock is not None:
        lock.check_skips(skips)
    if skips.masks:
        _check_masks(dataset, skips, neox_args)
    fill = end_token(neox_args) if skips.removes else None
    datasets = getattr(dataset, "datasets", [dataset])
    return SkippedDataset(
        dataset,
        skips,
        samples_index,
        partial(without_loss, fill=fill),
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


def record_skips(neox_args: Any, loader: Any) -> None:
    """Compare the skips with those of the checkpoint, and put them where the next one holds them.

    GPT-NeoX writes ``config_files`` into the folder ``configs`` of a checkpoint, on rank 0.
    ``neox_args`` are its arguments after it has read a checkpoint.

    Raises:
        InvalidArgument: the run skips, or does not skip, samples that were served.
        FormatError, StorageError: the record is damaged, or cannot be read.
    """
    if loader is None or not on_rank_0():
        return
    dataset = loader.dataset
    iteration = int(getattr(neox_args, "iteration", 0) or 0)
    folder = getattr(neox_args, "load", None)
    if iteration and folder:
        path = os.path.join(folder, f"global_step{iteration}", "configs", _FILE)
        served = iteration * neox_args.train_batch_size
        check_resumed(_read_record(path), dataset, served, path)
    if isinstance(dataset, SkippedDataset):
        neox_args.config_files = {
            **(getattr(neox_args, "config_files", None) or {}),
            _FILE: json.dumps(dataset.record),
        }


_FILE = f"{RECORD}.json"


def _read_record(path: str) -> Any:
    """Return the skips of a checkpoint; None if it was written without any."""
    if not os.path.exists(path):
        return None
    try:
        with as_storage_error(path, "cannot read"):
            return read_object(path)
    except Damaged as error:
        raise FormatError(f"{path}: {error}; restore it from the checkpoint") from None


def _packed_samples(dataset: Any, what: str, remedy: str) -> Iterator[NeoxSamples]:
    """Yield the samples of GPT2Datasets of cut documents, or raise InvalidArgument for another."""
    for each in getattr(dataset, "datasets", [dataset]):
        samples = getattr(each, "megaindex", None)
        if not isinstance(samples, NeoxSamples) or samples.pack_impl != "packed":
            raise InvalidArgument(
                f"{what}, got {type(each).__name__} with pack_impl "
                f"{getattr(each, 'pack_impl', None)}; {remedy}"
            )
        yield samples


def _check_masks(dataset: Any, skips: Skips, neox_args: Any) -> None:
    what = "skip: documents are masked in GPT2Dataset with pack_impl packed"
    for samples in _packed_samples(dataset, what, "skip steps instead"):
        if samples.companions["label"] is not None:
            continue
        if not all(mask.remove for mask in skips.masks):
            raise InvalidArgument(
                "skip: GPT-NeoX reads the loss of a document from its labels, which the training "
                "data does not have; give train_label_data_paths, such as a copy of the text, or "
                "skip steps instead"
            )
        if not neox_args.eod_mask_loss:
            raise InvalidArgument(
                "skip: remove: without labels, GPT-NeoX takes the loss from end tokens alone, and "
                "only with eod_mask_loss; set it, or give train_label_data_paths"
            )
        some = np.linspace(0, len(samples.text) - 1, _LOOKED_AT).astype(np.int64)
        lengths, end = samples.text.sequence_lengths, end_token(neox_args)
        for document in distinct(some[lengths[some] > 0]).tolist():
            if samples.text.get(document, lengths[document] - 1)[0] != end:
                raise _loss_remains(end)


_LOOKED_AT = 1000  # documents whose last token is compared before the first step


def _loss_remains(end: int) -> InvalidArgument:
    return InvalidArgument(
        "skip: remove: without labels, GPT-NeoX takes the loss from end tokens alone, so each "
        f"document must end with one, {end}, got another token; write the corpus with "
        "--append-eod, or give train_label_data_paths"
    )


def without_loss(samples: Any, mask: Places, removed: Places | None, fill: int | None) -> Any:
    """Return the samples of a batch without loss where ``mask``, bool[n, S], is True, and with the
    token ``fill`` where ``removed``, bool[n, S + 1] or None, is True.

    Raises:
        InvalidArgument: there are no labels, and a token without loss is not ``fill``.
    """
    whole = {name: np.stack([row[name] for row in samples]) for name in samples[0]}
    if removed is not None:
        whole["text"][removed] = fill
    if "label" in whole:
        whole["label"][:, 1:][mask] = IGNORED_LABEL
        if removed is not None:
            whole["label"][removed] = IGNORED_LABEL
    elif (whole["text"][:, :-1][mask] != fill).any():
        assert fill is not None, "documents are masked in labels alone"
        raise _loss_remains(fill)
    return BatchRows(whole)


def samples_index(dataset: Any) -> Index:
    """Return the index of a GPT2Dataset of cut documents, or of a blend of them.

    Raises:
        InvalidArgument: it is another dataset.
    """
    if isinstance(dataset, SkippedDataset):
        return dataset.served_index()
    what = (
        "balance and lock need the documents of each sample, which GPT2Dataset with pack_impl "
        "packed has, if it was made after install()"
    )
    found = list(_packed_samples(dataset, what, "install without them"))
    return joint_index(dataset, found) if hasattr(dataset, "datasets") else found[0].lazy_index()


def joint_index(blend: Any, samples: Iterable[NeoxSamples]) -> BlendedIndex:
    """Return the index of a BlendableDataset of these samples."""
    return BlendedIndex(
        indices=tuple(one.lazy_index() for one in samples),
        dataset_index=blend.dataset_index,
        dataset_sample_index=blend.dataset_sample_index,
    )
