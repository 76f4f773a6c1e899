"""Index of one dataset, built or loaded from the cache; indices of many, by tasks of an engine."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import partial
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, IntArray
from megaindex.arithmetic import ceil_div, epochs_built, samples_for_epochs
from megaindex.cache.cache import fetch
from megaindex.cache.fingerprint import array_checksum, corpus_fingerprint, documents_setting
from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ArrayIndex
from megaindex.index.frameworks import (
    Split,
    check_one_sample,
    check_total,
    count_tokens,
    lengths_of,
    select_documents,
)
from megaindex.index.order_settings import (
    EpochOrder,
    NeoxDocumentsOrder,
    Order,
    PackedOrder,
    WindowOrder,
    check_parameters,
    order_of,
)
from megaindex.index.orders import framework, packed
from megaindex.index.orders.epoch import STRIDE, EpochIndex, FetchTable, WindowIndex
from megaindex.index.orders.framework import PackingIndex, PackingOrder, ShuffledOrder, Sink
from megaindex.index.orders.keyed import shuffle_names
from megaindex.index.orders.packed import PackedIndex
from megaindex.index.spans import check_same_lengths
from megaindex.validation import (
    DEFAULT_SEED,
    check_epochs,
    check_setting,
    check_text,
    setting_or_none,
)

if TYPE_CHECKING:
    from megaindex.engine import Engine


def build_packing(
    dataset: IndexedDataset,
    chosen: range | I32,
    order: NeoxDocumentsOrder,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    **common: int,
) -> PackingIndex:
    """Return the index of ``chosen`` documents; ``common``: see `packing_order`."""
    packed = packing_order(dataset, chosen, order, **common)
    arrays = _arrays(packed, dataset, cache_dir)
    return framework.index_of(packed, arrays, dataset=dataset, next_token=order.next_token)


def packing_order(
    dataset: IndexedDataset,
    chosen: range | I32,
    order: NeoxDocumentsOrder,
    *,
    sequence_length: int,
    seed: int,
    num_samples: int,
) -> PackingOrder:
    """Return the request for the arrays of a dataset; see `build_index` for the arguments.

    Raises:
        InvalidArgument: no document can be served.
        FormatError: the labels do not match the text.
    """
    labels = order.label_dataset
    if labels is not None:
        labels = open_dataset(labels, order)
        check_same_lengths(dataset, labels, "labels")
    documents = np.asarray(chosen, np.int64)
    lengths = np.ascontiguousarray(dataset.sequence_lengths[documents])
    packed = PackingOrder(
        pack_impl=order.pack_impl,
        documents=documents,
        lengths=lengths,
        takes_part=framework.documents_taking_part(
            order.pack_impl,
            documents,
            lengths,
            sequence_length=sequence_length,
            allow_chopped=order.allow_chopped,
            labels=labels,
        ),
        sequence_length=sequence_length,
        seed=seed,
        num_samples=num_samples,
    )
    framework.check_some_take_part(str(dataset.path_prefix), packed)
    return packed


def _arrays(
    order: PackingOrder, dataset: IndexedDataset, cache_dir: str | os.PathLike[str] | None
) -> Mapping[str, IntArray]:
    def parameters() -> dict[str, Any]:
        return {"corpus": corpus_fingerprint(dataset), **order_parameters(order)}

    return fetch(cache_dir, parameters, partial(framework.build_packing, order), order.arrays)[0]


def order_parameters(order: PackingOrder) -> dict[str, Any]:
    """Return the cache key parameters of a request, without those of the dataset.

    Labels and allow_chopped are included by ``takes_part``.
    """
    return {
        "order": "neox",
        "pack_impl": order.pack_impl,
        "documents": array_checksum(order.documents),
        "lengths": array_checksum(order.lengths),
        "takes_part": array_checksum(order.takes_part),
        "sequence_length": order.sequence_length,
        "seed": order.seed,
        "num_samples": order.num_samples,
    }


BuiltIndex: TypeAlias = ArrayIndex | EpochIndex | PackedIndex | PackingIndex | WindowIndex


def build_index(
    path_prefix_or_dataset: str | os.PathLike[str] | IndexedDataset,
    *,
    sequence_length: int,
    seed: int = DEFAULT_SEED,
    num_samples: int | None = None,
    epochs: int | float | str | Fraction | None = None,
    documents: npt.ArrayLike | range | None = None,
    split: str | None = None,
    subset: Split = "train",
    drop_last_partial: bool = True,
    add_extra_token: int = 1,
    source_name: str | None = None,
    order: str | Order = "megatron",
    cache_dir: str | os.PathLike[str] | None = None,
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
        epochs: number of epochs, also as a fraction (``1.5``, ``"3/2"``). Default: 1.
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
    common: dict[str, Any] = {
        "sequence_length": sequence_length,
        "seed": check_setting("seed", seed),
    }
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
    chosen = select_documents(
        len(dataset), name, row, documents=documents, split=split, subset=subset
    )
    if isinstance(order, NeoxDocumentsOrder):
        asked = order.check_num_samples(num_samples)
        dataset.validate()
        return build_packing(
            dataset, chosen, order, num_samples=asked, cache_dir=cache_dir, **common
        )
    common["add_extra_token"] = extra
    if not row.is_framework:
        if source_name is None:
            source_name = corpus_fingerprint(dataset)
        common["source_name"] = check_text("source_name", source_name)
        epoch = _computed(dataset, chosen, order, cache_dir, **common)
        if num_samples is not None:
            return epoch.extend(epoch.epochs_for(num_samples))
        return epoch.extend(ceil_div(whole.numerator, whole.denominator))
    dataset.validate()
    tokens = tokens_of(dataset, chosen)
    if tokens == 0:
        check_one_sample(name, tokens, sequence_length, extra)
    wanted = num_samples or samples_for_epochs(whole, tokens, sequence_length, extra)
    built = epochs_built(row.exact_num_epochs, wanted, tokens, sequence_length, extra)
    check_one_sample(name, built * tokens, sequence_length, extra)
    request = ShuffledOrder(
        rules=row,
        documents=chosen,
        num_samples=wanted,
        num_epochs=built,
        tokens_per_epoch=tokens,
        drop_last_partial=drop_last_partial,
        **common,
    )
    check_total(name, request.total_tokens)
    return _index(request, dataset, cache_dir)


def further_names(datasets: Sequence[IndexedDataset | None]) -> list[str | None]:
    """Return the `shuffle_names` of sources whose fingerprint one before them has too.

    None stands for the others, which `build_index` shuffles by their fingerprint, and for None.
    """
    fingerprints = ["" if each is None else corpus_fingerprint(each) for each in datasets]
    pairs = zip(shuffle_names(fingerprints), fingerprints, strict=True)
    return [None if name == fingerprint else name for name, fingerprint in pairs]


def open_dataset(source: str | os.PathLike[str] | IndexedDataset, order: Order) -> IndexedDataset:
    """Return the dataset, opened with the dtype codes of the order's framework if necessary."""
    if isinstance(source, IndexedDataset):
        return source
    return IndexedDataset(os.fspath(source), dialect=order.row.file_dialect)


def tokens_of(dataset: IndexedDataset, documents: range | I32) -> int:
    """Return the tokens of one epoch."""
    if isinstance(documents, range) and len(documents) == len(dataset):
        return dataset.num_tokens
    return count_tokens(dataset.sequence_lengths, documents)


def _computed(
    dataset: IndexedDataset,
    documents: range | I32,
    order: Order,
    cache_dir: str | os.PathLike[str] | None,
    **settings: Any,
) -> EpochIndex | PackedIndex | WindowIndex:
    """Return the index of the fewest epochs of an order of megaindex."""
    name = str(dataset.path_prefix)
    if isinstance(order, WindowOrder):
        if not isinstance(documents, range):
            raise InvalidArgument(
                f"{name}: documents must be a range or a split for order window, which reads the "
                ".bin sequentially; use order epoch for others"
            )
        return WindowIndex(dataset=dataset, documents=documents, **settings)
    dataset.validate()
    tokens = tokens_of(dataset, documents)
    if isinstance(order, PackedOrder):
        return packed_index(
            dataset, documents, order, cache_dir, tokens_per_epoch=tokens, **settings
        )
    assert isinstance(order, EpochOrder), "the orders of megaindex"
    check_one_sample(name, tokens, settings["sequence_length"], settings["add_extra_token"])
    return EpochIndex(
        sequence_lengths=dataset.sequence_lengths,
        documents=documents,
        tokens_per_epoch=tokens,
        fetch_table=epoch_tables(
            dataset,
            documents,
            cache_dir,
            settings["seed"],
            settings["source_name"],
            order.epochs_mixed,
        ),
        num_epochs=order.epochs_mixed,
        epochs_mixed=order.epochs_mixed,
        left_over=order.left_over,
        datasets=(dataset,),
        **settings,
    )


_WORTH_KEEPING = 1 << 22  # documents of an epoch whose table takes a tenth of a second


def epoch_tables(
    dataset: IndexedDataset,
    documents: range | I32,
    cache_dir: str | os.PathLike[str] | None,
    seed: int,
    name: str,
    epochs_mixed: int,
) -> FetchTable | None:
    """Return the function that keeps the tables of order epoch in the cache; None if they are small
    or without a cache."""
    if cache_dir is None or len(documents) < _WORTH_KEEPING:
        return None
    parameters = {
        "order": "epoch table",
        "corpus": corpus_fingerprint(dataset),
        "documents": documents_setting(documents),
        "seed": seed,
        "name": name,
        "epochs_mixed": epochs_mixed,
        "stride": STRIDE,
    }
    return partial(_fetch_table, cache_dir, parameters)


def _fetch_table(
    cache_dir: str | os.PathLike[str],
    parameters: Mapping[str, Any],
    block: int,
    size: int,
    fill: Callable[[I64], None],
) -> I64:
    """Return the table of a block of order epoch."""

    def build(sink: Sink) -> None:
        fill(sink.allocate("starts", (size,), "int64"))
        sink.seal("starts")

    arrays = {"starts": ((size,), "int64")}
    return fetch(cache_dir, lambda: {**parameters, "block": block}, build, arrays)[0]["starts"]


def packed_index(
    dataset: IndexedDataset,
    documents: range | I32,
    order: PackedOrder,
    cache_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> PackedIndex:
    """Return the index of one epoch of order packed; ``settings`` are those of `PackedIndex`."""
    lengths = dataset.sequence_lengths
    sequence_length = settings["sequence_length"]
    limit = packed.most_documents(order.max_documents, sequence_length)

    def parameters() -> dict[str, Any]:
        return {
            "corpus": corpus_fingerprint(dataset),
            "order": "packed",
            "documents": documents_setting(documents),
            "sequence_length": sequence_length,
            "max_documents": limit,
            "long_documents": order.long_documents,
            **({} if order.align == 1 else {"align": order.align}),
        }

    try:
        cutting = packed.Cutting(
            sequence_length=sequence_length,
            long_documents=order.long_documents,
            align=order.align,
        )
        build = partial(packed.build, lengths_of(lengths, documents), cutting, limit)
        arrays, _ = fetch(cache_dir, parameters, build, packed.ARRAYS)
    except InvalidArgument as error:
        raise InvalidArgument(f"{dataset.path_prefix}: {error}") from None
    return PackedIndex(
        sequence_lengths=lengths,
        documents=documents,
        arrays=arrays,
        max_documents=limit,
        long_documents=order.long_documents,
        align=order.align,
        datasets=(dataset,),
        **settings,
    )


def _parameters(request: ShuffledOrder, dataset: IndexedDataset) -> dict[str, Any]:
    """Return the cache key parameters: everything that decides the arrays."""
    return {
        "corpus": corpus_fingerprint(dataset),
        "order": request.rules.order,
        "documents": documents_setting(request.documents),
        "sequence_length": request.sequence_length,
        "seed": request.seed,
        "num_epochs": request.num_epochs,
        "final_epoch_apart": request.final.apart,
        "drop_last_partial": request.drop_last_partial,
        "add_extra_token": request.add_extra_token,
    }


def _index(
    request: ShuffledOrder, dataset: IndexedDataset, cache_dir: str | os.PathLike[str] | None
) -> ArrayIndex:
    build = partial(framework.build, request, dataset.sequence_lengths)
    arrays, entry = fetch(cache_dir, partial(_parameters, request, dataset), build, request.arrays)
    return ArrayIndex(
        order=request.rules.order,
        **arrays,
        sequence_lengths=dataset.sequence_lengths,
        sequence_length=request.sequence_length,
        num_epochs=request.num_epochs,
        tokens_per_epoch=request.tokens_per_epoch,
        add_extra_token=request.add_extra_token,
        cache_entry=entry,
        request=request,
        datasets=(dataset,),
    )


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
    tasks = [BuildTask(path=path, settings=settings) for path in dict.fromkeys(paths)]
    for _, built in engine.run(BuildTask.run, tasks):
        yield built
