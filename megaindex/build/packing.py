"""Indices of whole documents, for GPT-NeoX's pack_impl: see `megaindex.index.orders.packing`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megaindex.errors import FormatError, InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.companions import check_in_step
from megaindex.index.orders import packing
from megaindex.index.orders.packing import PackImpl, PackingIndex, PackingOrder
from megaindex.index.orders.shuffled import Memory
from megaindex.kernels.types import I32, IntArray
from megaindex.store.cache import fetch
from megaindex.store.fingerprint import array_checksum, corpus_fingerprint

PACK_IMPLS = ("packed", "unpacked", "pack_until_overflow")


def check_packing(pack_impl: str, *, num_samples: int | None, **given: bool) -> int:
    """Refuses what means nothing for a packing: settings of one are none of the others.

    Args:
        pack_impl: packed, unpacked or pack_until_overflow.
        num_samples: as asked for.
        given: whether a setting was given, by its name.

    Returns:
        ``num_samples``; 0 where epochs are asked for.
    """
    if pack_impl not in PACK_IMPLS:
        raise InvalidArgument(f"pack_impl must be one of {', '.join(PACK_IMPLS)}, got {pack_impl}")
    packed = pack_impl == "packed"
    for setting, is_given in given.items():
        if is_given and packed == (setting in _OF_DOCUMENTS):
            raise InvalidArgument(
                f"{setting} means nothing for pack_impl {pack_impl}; leave it out, or choose "
                + ("unpacked or pack_until_overflow" if packed else "packed")
            )
    if not packed and (num_samples is None or num_samples < 1):
        raise InvalidArgument(
            f"pack_impl {pack_impl} has no epochs: how many samples it shuffles decides the order "
            f"of all; give num_samples, at least 1, not {num_samples}"
        )
    return num_samples or 0


_OF_DOCUMENTS = ("allow_chopped", "label_dataset", "next_token")


def build_packing(
    dataset: IndexedDataset,
    chosen: range | I32,
    *,
    next_token: bool,
    cache_dir: str | os.PathLike[str] | None,
    **settings: Any,
) -> PackingIndex:
    """The index of an open dataset; ``settings`` are those of `packing_order`."""
    order = packing_order(dataset, chosen, **settings)
    arrays = _arrays(order, {"corpus": corpus_fingerprint(dataset)}, cache_dir)
    return packing.index_of(
        order, arrays, sequence_lengths=dataset.sequence_lengths, next_token=next_token
    )


def build_pairs(
    pos: IndexedDataset,
    neg: IndexedDataset,
    *,
    next_token: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> tuple[PackingIndex, PackingIndex]:
    """The indices of the two sides of pairwise data; ``settings`` are those of `pair_order`."""
    order = pair_order(pos, neg, **settings)
    corpora = {"corpus": corpus_fingerprint(pos), "other": corpus_fingerprint(neg)}
    arrays = _arrays(order, corpora, cache_dir)
    return pair_indices(order, arrays, pos, neg, next_token=next_token)


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
    *,
    pack_impl: PackImpl,
    sequence_length: int,
    seed: int,
    num_samples: int,
    allow_chopped: bool = True,
    label_dataset: IndexedDataset | None = None,
) -> PackingOrder:
    """What decides the arrays of a dataset; `megaindex.build_index` says what arguments mean.

    Raises:
        InvalidArgument: no document takes part.
        FormatError: the labels are not one for each token.
    """
    if label_dataset is not None:
        check_in_step(dataset, label_dataset, "labels")
    documents = np.asarray(chosen, np.int64)
    lengths = np.ascontiguousarray(dataset.sequence_lengths[documents])
    order = PackingOrder(
        pack_impl=pack_impl,
        documents=documents,
        lengths=lengths,
        takes_part=packing.documents_taking_part(
            pack_impl,
            documents,
            lengths,
            sequence_length=sequence_length,
            allow_chopped=allow_chopped,
            labels=label_dataset,
        ),
        sequence_length=sequence_length,
        seed=seed,
        num_samples=num_samples,
    )
    packing.check_some_take_part(str(dataset.path_prefix), order)
    return order


def pair_order(
    pos: IndexedDataset,
    neg: IndexedDataset,
    *,
    pack_impl: PackImpl,
    sequence_length: int,
    seed: int,
    num_samples: int,
    allow_chopped: bool = True,
    pos_labels: IndexedDataset | None = None,
    neg_labels: IndexedDataset | None = None,
    exact: bool = False,
) -> PackingOrder:
    """What decides the arrays of pairwise data: pairs take part whose two sides both do.

    Args:
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
    unpacked = pack_impl == "unpacked"
    inverted = not (allow_chopped or unpacked or exact)
    takes_part = np.ones(len(pos), bool)
    for text, labels in sides:
        if labels is not None:
            check_in_step(text, labels, "labels")
        takes_part &= packing.documents_taking_part(
            pack_impl,
            documents,
            text.sequence_lengths,
            sequence_length=sequence_length,
            allow_chopped=allow_chopped or inverted,
            labels=labels,
        )
        if inverted:
            takes_part &= text.sequence_lengths >= sequence_length + 1
    order = PackingOrder(
        pack_impl=pack_impl,
        documents=documents,
        lengths=np.maximum(pos.sequence_lengths, neg.sequence_lengths),
        takes_part=takes_part,
        sequence_length=sequence_length,
        seed=seed,
        num_samples=num_samples,
        shuffled_ids=len(pos) if unpacked and not exact else None,
    )
    packing.check_some_take_part(str(pos.path_prefix), order)
    return order


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
