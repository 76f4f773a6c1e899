"""Index of one dataset: what decides its arrays, how they are built, and what they give."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from megaindex._types import I32, I64, IntArray
from megaindex.arithmetic import ceil_div, epochs_built, samples_for_epochs
from megaindex.cache.fingerprint import array_checksum, corpus_fingerprint, documents_setting
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ArrayIndex
from megaindex.index.documents import Documents, DocumentSubset, count_tokens, lengths_of
from megaindex.index.frameworks import (
    check_one_sample,
    check_total,
)
from megaindex.index.order_settings import (
    EpochOrder,
    NeoxDocumentsOrder,
    Order,
    PackedOrder,
    WindowOrder,
)
from megaindex.index.orders import framework, packed
from megaindex.index.orders.epoch import STRIDE, EpochIndex, WindowIndex
from megaindex.index.orders.framework import Memory, PackingIndex, PackingOrder, ShuffledOrder, Sink
from megaindex.index.orders.keyed import shuffle_names
from megaindex.index.orders.packed import PackedIndex
from megaindex.index.spans import check_same_lengths
from megaindex.index.subset_rule import no_subset
from megaindex.validation import (
    check_text,
)

Fetch: TypeAlias = Callable[
    [Callable[[], Mapping[str, Any]], Callable[[Sink], None], Mapping[str, Any]],
    tuple[Mapping[str, IntArray], str],
]
"""Function of what decides arrays, of how they are built in a sink, and of their shapes; it returns
the arrays and the directory of the entry that has them."""


def _made(
    fetch: Fetch | None,
    parameters: Callable[[], Mapping[str, Any]],
    build: Callable[[Sink], None],
    expected: Mapping[str, Any],
) -> tuple[Mapping[str, IntArray], str]:
    """Return arrays from a cache, or built in memory, and the directory of their entry."""
    if fetch is not None:
        return fetch(parameters, build, expected)
    memory = Memory()
    build(memory)
    return memory.arrays, ""


def build_packing(
    dataset: IndexedDataset,
    chosen: range | I32,
    order: NeoxDocumentsOrder,
    fetch: Fetch | None = None,
    **common: int,
) -> PackingIndex:
    """Return the index of ``chosen`` documents; ``common``: see `packing_order`."""
    packed = packing_order(dataset, chosen, order, **common)
    arrays = _arrays(packed, dataset, fetch)
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
    order: PackingOrder, dataset: IndexedDataset, fetch: Fetch | None
) -> Mapping[str, IntArray]:
    def parameters() -> dict[str, Any]:
        return {"corpus": corpus_fingerprint(dataset), **order_parameters(order)}

    build = partial(framework.build_packing, order)
    return _made(fetch, parameters, build, order.arrays)[0]


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


def index_of(
    dataset: IndexedDataset,
    documents: Documents,
    order: Order,
    *,
    sequence_length: int,
    seed: int,
    num_samples: int | None = None,
    epochs: Fraction = Fraction(1),
    drop_last_partial: bool = True,
    add_extra_token: int = 1,
    source_name: str | None = None,
    fetch: Fetch | None = None,
) -> BuiltIndex:
    """Return the index of documents; for arguments and errors see `megaindex.build_index`.

    Args:
        fetch: function that takes arrays from a cache or builds them; None: build in memory.
    """
    common: dict[str, Any] = {"sequence_length": sequence_length, "seed": seed}
    name, row = str(dataset.path_prefix), order.row
    if not row.is_framework:
        common["add_extra_token"] = add_extra_token
        if source_name is None:
            source_name = corpus_fingerprint(dataset)
        common["source_name"] = check_text("source_name", source_name)
        epoch = _computed(dataset, documents, order, fetch, **common)
        if num_samples is not None:
            return epoch.extend(epoch.epochs_for(num_samples))
        return epoch.extend(ceil_div(epochs.numerator, epochs.denominator))
    if isinstance(documents, DocumentSubset):
        raise no_subset(order.name)
    dataset.validate()
    if isinstance(order, NeoxDocumentsOrder):
        asked = order.check_num_samples(num_samples)
        return build_packing(dataset, documents, order, fetch, num_samples=asked, **common)
    tokens = tokens_of(dataset, documents)
    if tokens == 0:
        check_one_sample(name, tokens, sequence_length, add_extra_token)
    wanted = num_samples or samples_for_epochs(epochs, tokens, sequence_length, add_extra_token)
    built = epochs_built(row.exact_num_epochs, wanted, tokens, sequence_length, add_extra_token)
    check_one_sample(name, built * tokens, sequence_length, add_extra_token)
    request = ShuffledOrder(
        rules=row,
        documents=documents,
        num_samples=wanted,
        num_epochs=built,
        tokens_per_epoch=tokens,
        drop_last_partial=drop_last_partial,
        add_extra_token=add_extra_token,
        **common,
    )
    check_total(name, request.total_tokens)
    return _index(request, dataset, fetch)


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
    return IndexedDataset(source, dialect=order.row.file_dialect)


def tokens_of(dataset: IndexedDataset, documents: Documents) -> int:
    """Return the tokens of one epoch."""
    if isinstance(documents, range) and len(documents) == len(dataset):
        return dataset.num_tokens
    return count_tokens(dataset.sequence_lengths, documents)


def _computed(
    dataset: IndexedDataset,
    documents: Documents,
    order: Order,
    fetch: Fetch | None,
    **settings: Any,
) -> EpochIndex | PackedIndex | WindowIndex:
    """Return the index of the fewest epochs of an order of megaindex."""
    name = str(dataset.path_prefix)
    if isinstance(order, WindowOrder):
        if not isinstance(documents, (range, DocumentSubset)):
            raise InvalidArgument(
                f"{name}: documents must be a range or a split for order window, which reads the "
                ".bin sequentially; use order epoch for others"
            )
        return WindowIndex(dataset=dataset, documents=documents, **settings)
    dataset.validate()
    tokens = tokens_of(dataset, documents)
    if isinstance(order, PackedOrder):
        return packed_index(dataset, documents, order, fetch, tokens_per_epoch=tokens, **settings)
    assert isinstance(order, EpochOrder), "the orders of megaindex"
    check_one_sample(name, tokens, settings["sequence_length"], settings["add_extra_token"])
    return epoch_index(
        dataset,
        documents,
        fetch,
        tokens_per_epoch=tokens,
        num_epochs=order.epochs_mixed,
        epochs_mixed=order.epochs_mixed,
        left_over=order.left_over,
        **settings,
    )


_WORTH_KEEPING = 1 << 22  # documents of an epoch whose table takes a tenth of a second


def epoch_index(
    dataset: IndexedDataset, documents: Documents, fetch: Fetch | None = None, **settings: Any
) -> EpochIndex:
    """Return an index of order epoch; ``settings`` are those of `EpochIndex`.

    With ``fetch``, tables of many documents are kept in the cache.
    """
    table = None
    if fetch is not None and len(documents) >= _WORTH_KEEPING:
        parameters = {
            "order": "epoch table",
            "corpus": corpus_fingerprint(dataset),
            "documents": documents_setting(documents),
            "seed": settings["seed"],
            "name": settings["source_name"],
            "epochs_mixed": settings["epochs_mixed"],
            "stride": STRIDE,
        }
        table = partial(_fetch_table, fetch, parameters)
    return EpochIndex(
        sequence_lengths=dataset.sequence_lengths,
        documents=documents,
        fetch_table=table,
        datasets=(dataset,),
        **settings,
    )


def _fetch_table(
    fetch: Fetch,
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
    return fetch(lambda: {**parameters, "block": block}, build, arrays)[0]["starts"]


def packed_index(
    dataset: IndexedDataset,
    documents: Documents,
    order: PackedOrder,
    fetch: Fetch | None = None,
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
        arrays, _ = _made(fetch, parameters, build, packed.ARRAYS)
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


def _index(request: ShuffledOrder, dataset: IndexedDataset, fetch: Fetch | None) -> ArrayIndex:
    build = partial(framework.build, request, dataset.sequence_lengths)
    arrays, entry = _made(fetch, partial(_parameters, request, dataset), build, request.arrays)
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
