"""Benchmark of the orders of megaindex: first batch, bijection, receipts and `locate`."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import megaindex
from benchmarks.corpora import SHAPES, write_sparse
from benchmarks.kernels import check_equal
from benchmarks.timing import Comparison, alternate
from megaindex import Index, Spans
from megaindex.index.array_index import ServedTokens, scan, served_tokens
from megaindex.index.spans import join_spans
from megaindex.kernels import load
from megaindex.loader import Receipt, fingerprint_keys, planned_receipt

BATCH = 512


def first_batch(directory: Path, rounds: int) -> Comparison:
    """Time order epoch from opening files to locating the first batch, against the peer's index.

    The orders differ, so only a property is checked: the batch holds whole, disjoint samples.
    """
    from benchmarks import peer

    shape = SHAPES["40B"]
    prefix = write_sparse(directory, shape)
    theirs = peer.open_megatron(prefix)
    samples = shape.epochs * int(megaindex.IndexedDataset(prefix).num_tokens) // 2048 - 1

    def ours() -> object:
        index = megaindex.build_index(
            str(prefix), sequence_length=2048, seed=1, epochs=shape.epochs, order="epoch"
        )
        return index.locate(np.arange(BATCH))

    def megatron() -> object:
        return peer.megatron_index(theirs, samples, 2048, 1, directory / "peer-cache")

    _check_batch(ours(), theirs.sequence_lengths)
    seconds = alternate(ours, megatron, rounds)
    return Comparison(
        what="order epoch, first batch of 512, against megatron-core's 4-epoch index, 40B",
        ours=seconds[0],
        peer=seconds[1],
        items=shape.documents,
        unit="document",
        asked=20.0,
        output_bytes=BATCH * 16,
    )


def _check_batch(spans: object, lengths: np.ndarray) -> None:
    _, document, offset, length = spans  # type: ignore[misc]
    if int(length.sum()) != BATCH * 2049 or (offset + length > lengths[document]).any():
        raise SystemExit("order epoch: the first batch is not one of whole samples")
    order = np.lexsort((offset, document))
    same = document[order][1:] == document[order][:-1]
    overlap = (offset + length)[order][:-1] - offset[order][1:]
    if (overlap[same] > 1).any():  # adjacent samples share the token of the shifted label
        raise SystemExit("order epoch: tokens of the first batch are served twice")


def bijection(rounds: int, size: int = 40_000_000) -> Comparison:
    """Time a permutation of 40 M documents against NumPy's shuffle."""
    native, key = load("native"), np.array([1, 2], np.uint64)
    out = np.empty(size, np.int32)

    def ours() -> None:
        native.bijection_range(key, size, 0, out)

    def numpy_shuffle() -> np.ndarray:
        array = np.arange(size, dtype=np.int32)
        np.random.RandomState(1).shuffle(array)
        return array

    ours()
    check_equal("bijection", np.sort(out), np.arange(size, dtype=np.int32))
    seconds = alternate(ours, numpy_shuffle, rounds)
    return Comparison(
        what=f"keyed bijection of {size:,}, one thread, against numpy's shuffle",
        ours=seconds[0],
        peer=seconds[1],
        items=size,
        unit="index",
        output_bytes=out.nbytes,
    )


def receipts(name: str, order: str, directory: Path, rounds: int) -> Comparison:
    """Time the receipt of an epoch by all threads against one thread in the training order."""
    index = _blend(name, directory) if order == "blend" else _one_epoch(name, order, directory)
    keys = fingerprint_keys(["0123456789abcdef" * 2, "fedcba9876543210" * 2])
    end = index.num_samples

    def ours() -> Receipt:
        return planned_receipt(index, 0, end, keys)

    def in_order() -> Receipt:
        parts = (
            Receipt.of(ids, index.locate(ids), keys)
            for ids in (np.arange(a, min(end, a + 2**15)) for a in range(0, end, 2**15))
        )
        return sum(parts, Receipt())

    if ours() != in_order():
        raise SystemExit(f"order {order}: the receipts of a walk and of the training order differ")
    seconds = alternate(ours, in_order, rounds)
    runs = len(index.locate(np.arange(BATCH))) / BATCH
    return Comparison(
        what=f"receipt, order {order}, {runs:.1f} runs a sample, {end:,} samples",
        ours=seconds[0],
        peer=seconds[1],
        items=end,
        unit="sample",
        output_bytes=16,
    )


def locate(name: str, order: str, directory: Path, rounds: int) -> Comparison:
    """Time locating random samples of an epoch in one call, against one call each."""
    index = _one_epoch(name, order, directory)
    ids = np.random.default_rng(1).integers(0, index.num_samples, BATCH)

    def together() -> Spans:
        return index.locate(ids)

    def one_by_one() -> list[Spans]:
        return [index.locate([sample]) for sample in ids.tolist()]

    pieces = [(np.array([k]), spans) for k, spans in enumerate(one_by_one())]
    for one, other in zip(together(), join_spans(pieces, BATCH), strict=True):
        check_equal(f"locate, order {order}", one, other)
    seconds = alternate(together, one_by_one, rounds)
    return Comparison(
        what=f"locate, order {order}, {name}: 512 at once against one by one",
        ours=seconds[0],
        peer=seconds[1],
        items=BATCH,
        unit="sample",
        output_bytes=BATCH * 16,
    )


def served(order: str, directory: Path, rounds: int) -> Comparison:
    """Time finding the samples of a thousandth of the documents, against reading all samples."""
    index = _one_epoch("40B", order, directory)
    documents = np.arange(0, SHAPES["40B"].documents, 1000)

    def find() -> ServedTokens:
        return served_tokens(index, documents)

    def read_all() -> ServedTokens:
        return scan(index, documents)

    ours, theirs = (found.select(np.lexsort(found[::-1])) for found in (find(), read_all()))
    for one, other in zip(ours, theirs, strict=True):
        check_equal(f"samples of documents, order {order}", one, other)
    seconds = alternate(find, read_all, rounds)
    return Comparison(
        what=f"samples of {documents.size:,} documents, order {order}, against a scan",
        ours=seconds[0],
        peer=seconds[1],
        items=documents.size,
        unit="document",
        output_bytes=sum(column.nbytes for column in ours),
    )


def _blend(name: str, directory: Path) -> Index:
    prefix = str(write_sparse(directory, SHAPES[name]))
    samples = int(megaindex.IndexedDataset(prefix).num_tokens) // 2048
    blend: Index = megaindex.build_blend(
        [prefix, prefix], weights=[0.7, 0.3], sequence_length=2048, seed=1, num_samples=samples
    )
    return blend


def _one_epoch(name: str, order: str, directory: Path) -> Index:
    prefix = write_sparse(directory, SHAPES[name])
    index: Index = megaindex.build_index(
        str(prefix), sequence_length=2048, seed=1, epochs=1, order=order
    )
    index.locate([0])
    return index
