"""Indices of whole documents, for GPT-NeoX's pack_impl: see `megaindex.index.orders.packing`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.companions import check_in_step
from megaindex.index.order_settings import NeoxDocumentsOrder
from megaindex.index.orders import packing
from megaindex.index.orders.packing import PackingIndex, PackingOrder
from megaindex.index.orders.shuffled import Memory
from megaindex.kernels.types import I32, IntArray
from megaindex.store.cache import fetch
from megaindex.store.fingerprint import array_checksum, corpus_fingerprint


def build_packing(
    dataset: IndexedDataset,
    chosen: range | I32,
    order: NeoxDocumentsOrder,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    **common: int,
) -> PackingIndex:
    """The index of an open dataset; ``common`` as for `packing_order`."""
    packed = packing_order(dataset, chosen, order, **common)
    arrays = _arrays(packed, {"corpus": corpus_fingerprint(dataset)}, cache_dir)
    return packing.index_of(
        packed, arrays, sequence_lengths=dataset.sequence_lengths, next_token=order.next_token
    )


def build_pairs(
    pos: IndexedDataset,
    neg: IndexedDataset,
    order: NeoxDocumentsOrder,
    *,
    cache_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> tuple[PackingIndex, PackingIndex]:
    """The indices of the two sides of pairwise data; ``settings`` are those of `pair_order`."""
    packed = pair_order(pos, neg, order, **settings)
    corpora = {"corpus": corpus_fingerprint(pos), "other": corpus_fingerprint(neg)}
    arrays = _arrays(packed, corpora, cache_dir)
    return pair_indices(packed, arrays, pos, neg, next_token=order.next_token)


def pair_indices(
    order: PackingOrder,
    arrays: Mapping[str, IntArray],
    pos: IndexedDataset,
    neg: IndexedDataset,
    *,
    next_token: bool,
) -> tuple[PackingIndex, PackingIndex]:
    """One set of arrays, read with the lengths of either side."""
    index = packing.index_of(
        order, arrays, sequence_lengths=pos.sequence_lengths, next_token=next_token
    )
    return index, replace(index, sequence_lengths=neg.sequence_lengths)


def packing_order(
    dataset: IndexedDataset,
    chosen: range | I32,
    order: NeoxDocumentsOrder,
    *,
    sequence_length: int,
    seed: int,
    num_samples: int,
) -> PackingOrder:
    """What decides the arrays of a dataset; `megaindex.build_index` says what arguments mean.

    Raises:
        InvalidArgument: no document takes part.
        FormatError: the labels are not one for each token.
    """
    labels = order.label_dataset
    if labels is not None and not isinstance(labels, IndexedDataset):
        labels = IndexedDataset(os.fspath(labels), dialect=order.row.file_dialect)
    if labels is not None:
        check_in_step(dataset, labels, "labels")
    documents = np.asarray(chosen, np.int64)
    lengths = np.ascontiguousarray(dataset.sequence_lengths[documents])
    packed = PackingOrder(
        pack_impl=order.pack_impl,
        documents=documents,
        lengths=lengths,
        takes_part=packing.documents_taking_part(
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
    packing.check_some_take_part(str(dataset.path_prefix), packed)
    return packed


def pair_order(
    pos: IndexedDataset,
    neg: IndexedDataset,
    order: NeoxDocumentsOrder,
    *,
    sequence_length: int,
    seed: int,
    num_samples: int,
    pos_labels: IndexedDataset | None = None,
    neg_labels: IndexedDataset | None = None,
    exact: bool = False,
) -> PackingOrder:
    """What decides the arrays of pairwise data: pairs take part whose two sides both do.

    Args:
        order: of both sides; their labels are given apart.
        exact: without it as GPT-NeoX does: unpacked, only as many samples as there are documents
            are shuffled, and then come again; pack_until_overflow, allow_chopped=False leaves out
            the pairs that are too short to be chopped instead of those that would be.

    Raises:
        InvalidArgument: no pair takes part.
        FormatError: the two sides, or text and labels, do not belong together.
    """
    if len(pos) != len(neg):
        raise FormatError(
            f"{neg.path_prefix}.idx: pairwise data has one sequence of either side for each pair; "
            f"{pos.path_prefix} has {len(pos)}, this one {len(neg)}; write them again together"
        )
    sides = ((pos, pos_labels), (neg, neg_labels))
    documents = np.arange(len(pos))
    unpacked = order.pack_impl == "unpacked"
    inverted = not (order.allow_chopped or unpacked or exact)
    takes_part = np.ones(len(pos), bool)
    for text, labels in sides:
        if labels is not None:
            check_in_step(text, labels, "labels")
        takes_part &= packing.documents_taking_part(
            order.pack_impl,
            documents,
            text.sequence_lengths,
            sequence_length=sequence_length,
            allow_chopped=order.allow_chopped or inverted,
            labels=labels,
        )
        if inverted:
            takes_part &= text.sequence_lengths >= sequence_length + 1
    packed = PackingOrder(
        pack_impl=order.pack_impl,
        documents=documents,
        lengths=np.maximum(pos.sequence_lengths, neg.sequence_lengths),
        takes_part=takes_part,
        sequence_length=sequence_length,
        seed=seed,
        num_samples=num_samples,
        shuffled_ids=len(pos) if unpacked and not exact else None,
    )
    packing.check_some_take_part(str(pos.path_prefix), packed)
    return packed


def _arrays(
    order: PackingOrder, corpora: dict[str, Any], cache_dir: str | os.PathLike[str] | None
) -> Mapping[str, IntArray]:
    if cache_dir is None:
        memory = Memory()
        packing.build(order, memory)
        return memory.arrays
    return fetch(
        cache_dir,
        {**corpora, **order_parameters(order)},
        partial(packing.build, order),
        expected=order.arrays,
    )


def order_parameters(order: PackingOrder) -> dict[str, Any]:
    """All but the corpus that decides the arrays: what is missing would be served by mistake.

    Labels and allow_chopped decide nothing but which documents take part.
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
        "shuffled_ids": order.shuffled_ids,
    }
