"""Index of one dataset, built or loaded from the cache; indices of many, by tasks of an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import TYPE_CHECKING

import numpy.typing as npt

from megaindex.builders.single import BuiltIndex, index_of, open_dataset
from megaindex.cache.cache import cache_at
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.format import IndexedDataset
from megaindex.index.documents import Documents, DocumentSubset
from megaindex.index.frameworks import Split, select_documents
from megaindex.index.order_settings import Order, check_parameters, order_of
from megaindex.index.subset_rule import SubsetRule, no_subset
from megaindex.io.paths import listed_paths
from megaindex.validation import DEFAULT_SEED, check_epochs, check_setting, setting_or_none, shown

if TYPE_CHECKING:
    from megaindex.engine import Engine


def build_index(
    path_prefix_or_dataset: str | os.PathLike[str] | IndexedDataset,
    *,
    sequence_length: int,
    seed: int = DEFAULT_SEED,
    num_samples: int | None = None,
    epochs: int | float | str | Fraction | None = None,
    documents: npt.ArrayLike | range | DocumentSubset | None = None,
    split: str | None = None,
    subset: Split = "train",
    drop_last_partial: bool = True,
    add_extra_token: int = 1,
    source_name: str | None = None,
    order: str | Order = "megatron",
    cache_dir: str | os.PathLike[str] | None = None,
    document_subset: SubsetRule | Fraction | float | str | None = None,
) -> BuiltIndex:
    """Return the index of one dataset: the samples of a run and the tokens that each reads.

    With a framework order the arrays are those of ``GPTDataset`` of megatron-core 0.16.1 (order
    megatron), ``GPT2Dataset`` of GPT-NeoX (main, 2026-05), Megatron-DeepSpeed (main, 2025-07) or
    PaddleNLP (3.0.0b4), for the same documents, seed and number of samples.

    Args:
        path_prefix_or_dataset: prefix of the ``.bin``/``.idx`` pair, or an open dataset.
        sequence_length: input tokens per sample, at least 1.
        seed: seed of the order, 0 to 2**32 - 1.
        num_samples: samples requested, at least 1; the index has all samples of the epochs that
            contain them. Not together with ``epochs``.
        epochs: number of epochs; of a fraction (``1.5``, ``"3/2"``) the whole epochs that hold it
            are built and counted, 2 of 1.5. Default: 1.
        documents: sequence ids of an epoch, a range or int[n]. Default: all.
        split: ``"969,30,1"``, in place of ``documents``: use the part ``subset``.
        subset: ``"train"``, ``"valid"`` or ``"test"``.
        drop_last_partial: False keeps a shorter last sample
            (``drop_last_partial_validation_sequence=False`` of Megatron).
        add_extra_token: 1 if a sample reads one more token for the shifted label, else 0.
        source_name: name by which orders epoch, window and packed shuffle, besides the seed.
            Default: the fingerprint of the lengths, so that a copy of the dataset has the same
            order.
        order: name ``"megatron"``, ``"neox"``, ``"megatron-legacy"``, ``"paddlenlp"``, ``"epoch"``
            ``"window"`` or ``"packed"`` for default settings, or an order object: `MegatronOrder`,
            `NeoxOrder`, `NeoxDocumentsOrder`, `MegatronLegacyOrder`, `PaddleOrder`, `EpochOrder`,
            `WindowOrder`, `PackedOrder`.
        cache_dir: directory to keep the arrays in; an entry found there is verified and mapped.
            Default: memory. Order window has no arrays, and order epoch tables of 4 million
            documents and more; those of order packed are the documents sorted by length, for any
            seed and number of epochs.
        document_subset: share of their tokens that an epoch has, as ``"1/16"``, or a `SubsetRule`;
            of a range or a split, in the orders of megaindex.

    Returns:
        An index with ``num_samples``, ``num_epochs``, ``tokens_per_epoch``, ``datasets`` and
        ``locate(sample_ids)``. Framework orders also have ``document_index`` int32
        [epochs * documents], ``sample_index`` int32 or int64 [num_samples + 1, 2] and
        ``shuffle_index`` uint32 or int64 [num_samples]; all are int64 with `NeoxDocumentsOrder`.

    Raises:
        InvalidArgument: an argument is out of range or not one of the order, or the documents have
            fewer tokens than one sample.
        MissingFile: the pair does not exist.
        FormatError: the ``.idx`` is damaged.
        StorageError: the dataset cannot be read, or the cache cannot be read or written.
    """
    order = order_of(order)
    sequence_length = check_setting("sequence_length", sequence_length)
    seed = check_setting("seed", seed)
    extra = check_setting("add_extra_token", add_extra_token)
    num_samples = setting_or_none("num_samples", num_samples)
    check_parameters(
        order,
        source_name=source_name is not None,
        drop_last_partial=not drop_last_partial,
        add_extra_token=extra != 1,
    )
    if num_samples is not None and epochs is not None:
        raise InvalidArgument("num_samples and epochs must not be given together; give one of them")
    whole = Fraction(1) if epochs is None else check_epochs("epochs", epochs)
    row = order.row
    dataset = open_dataset(path_prefix_or_dataset, order)
    name = str(dataset.path_prefix)
    chosen: Documents
    if isinstance(documents, DocumentSubset):
        chosen = _of_this(dataset, documents, _name_of(dataset, source_name))
    else:
        chosen = select_documents(
            len(dataset), name, row, documents=documents, split=split, subset=subset
        )
    if document_subset is not None:
        rule = document_subset
        if not isinstance(rule, SubsetRule):
            rule = SubsetRule(share=rule)  # type: ignore[arg-type]  # which it checks
        chosen = _narrowed(dataset, chosen, order, source_name, rule)
    return index_of(
        dataset,
        chosen,
        order,
        sequence_length=sequence_length,
        seed=seed,
        num_samples=num_samples,
        epochs=whole,
        drop_last_partial=drop_last_partial,
        add_extra_token=extra,
        source_name=source_name,
        fetch=cache_at(cache_dir),
    )


def _name_of(dataset: IndexedDataset, source_name: str | None) -> str:
    """Return the name by which the documents of a subset are chosen."""
    return corpus_fingerprint(dataset) if source_name is None else source_name


def _of_this(dataset: IndexedDataset, documents: DocumentSubset, name: str) -> DocumentSubset:
    """Return a subset; InvalidArgument for one of another source."""
    if documents.words.name != name or documents.within.stop > len(dataset):
        raise InvalidArgument(
            f"{dataset.path_prefix}: documents are a subset of another source, "
            f"{shown(documents.words.name)}; give document_subset in their place"
        )
    return documents


def _narrowed(
    dataset: IndexedDataset,
    documents: Documents,
    order: Order,
    source_name: str | None,
    rule: SubsetRule,
) -> Documents:
    """Return those of a range of documents that a rule chooses."""
    if not rule:
        return documents
    where = str(dataset.path_prefix)
    if order.row.is_framework:
        raise no_subset(order.name)
    if not isinstance(documents, range):
        raise InvalidArgument(
            f"{where}: documents must be a range or a split where a subset of them is read; leave "
            "document_subset out, or choose a range"
        )
    dataset.validate()
    name = _name_of(dataset, source_name)
    return rule.choose(name, dataset.sequence_lengths, documents, where)


@dataclass(frozen=True, kw_only=True)
class BuildSettings:
    """Settings common to all datasets of `build_many`: arguments of `build_index`.

    Attributes:
        sequence_length: tokens of a sample, without the extra one of the shifted label.
        cache_dir: folder of the cache entries, one of each dataset.
        seed: seed of the shuffles.
        num_samples: samples of each index; None: those of ``epochs``.
        epochs: epochs of each index, as text such as ``"2"`` or ``"3/2"``; None: one, or those
            that ``num_samples`` need.
        split: shares of train, valid and test, such as ``"969,30,1"``; None: all documents.
        subset: part of the split that is built.
        order: name of an order, or an order object.
    """

    sequence_length: int
    cache_dir: str
    seed: int = DEFAULT_SEED
    num_samples: int | None = None
    epochs: str | None = None
    split: str | None = None
    subset: Split = "train"
    order: str | Order = "megatron"

    def build(self, path: str) -> BuiltIndex:
        """Build the index of the dataset at a prefix."""
        return build_index(path, **vars(self))

    def built(self, path: str) -> Built:
        """Build the index of the dataset at a prefix, or find it, and return its size."""
        start = time.perf_counter()
        index = self.build(path)
        return Built(
            path=path,
            order=index.order,
            num_samples=index.num_samples,
            num_epochs=index.num_epochs,
            tokens_per_epoch=index.tokens_per_epoch,
            seconds=time.perf_counter() - start,
        )


@dataclass(frozen=True, kw_only=True)
class Built:
    """Size of the index of one dataset, whose arrays are in the cache."""

    path: str
    order: str
    num_samples: int
    num_epochs: int
    tokens_per_epoch: int
    seconds: float
    """Time to build or find the index."""


@dataclass(frozen=True, kw_only=True)
class BuildTask:
    """Task to build the index of one dataset."""

    path: str
    settings: BuildSettings

    def __str__(self) -> str:
        return self.path

    def run(self) -> Built:
        """Build the index or find it in the cache; errors name the dataset."""
        try:
            return self.settings.built(self.path)
        except (MegaIndexError, MemoryError) as error:
            if str(error).startswith(self.path):
                raise
            raise type(error)(f"{self.path}: {error}") from error


def build_many(paths: Sequence[str], settings: BuildSettings, engine: Engine) -> Iterator[Built]:
    """Build the indices of many datasets and yield their sizes as they finish, in any order.

    Array files do not depend on the engine. Finished indices stay in the cache if a dataset fails.

    Args:
        paths: prefixes; repeated ones are built once.
        settings: arguments of `build_index` for all of them.
        engine: of `megaindex.open_engine`.

    Raises:
        MegaIndexError: the error of the first dataset that fails; running tasks are cancelled.
    """
    tasks = [BuildTask(path=path, settings=settings) for path in dict.fromkeys(listed_paths(paths))]
    for _, built in engine.run(BuildTask.run, tasks):
        yield built
