"""From a corpus and a request to index arrays, through the cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any

import numpy.typing as npt
import xxhash

from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.arithmetic import INT32_MAX, epochs_for, samples_for_epochs, samples_in
from megaindex.index.arrays import ArrayIndex
from megaindex.index.dialect import Split, dialect
from megaindex.index.orders import shuffled
from megaindex.index.orders.shuffled import ShuffledOrder
from megaindex.index.selection import count_tokens, select_documents
from megaindex.kernels.types import IntArray
from megaindex.store.cache import fetch
from megaindex.store.fingerprint import array_bytes, corpus_fingerprint


def build_index(
    path_prefix_or_dataset: str | os.PathLike[str] | IndexedDataset,
    *,
    sequence_length: int,
    seed: int,
    num_samples: int | None = None,
    epochs: int | float | str | Fraction | None = None,
    documents: npt.ArrayLike | range | None = None,
    split: str | None = None,
    subset: Split = "train",
    order: str = "megatron",
    separate_final_epoch: str | None = None,
    final_epoch_threshold: float | None = None,
    drop_last_partial: bool = True,
    add_extra_token: int = 1,
    cache_dir: str | os.PathLike[str] | None = None,
) -> ArrayIndex:
    """The document, sample and shuffle index of one dataset.

    Args:
        path_prefix_or_dataset: prefix of the ``.bin``/``.idx`` pair, or the open dataset.
        sequence_length: tokens per sample, at least 1; a sample reads ``add_extra_token`` more.
        seed: of the order's random stream, 0 to 2**32 - 1.
        num_samples: samples that must be available; the index holds all samples of the epochs
            this takes. Not together with ``epochs``.
        epochs: epochs instead, also as a fraction (``1.5``, ``"3/2"``). Default: one epoch.
        documents: sequence ids to use, a range or integers in [0, sequences). Default: all.
        split: ``"969,30,1"`` instead of ``documents``: use the part named by ``subset``.
        subset: train, valid or test.
        order: megatron, neox, megatron-legacy or paddlenlp.
        separate_final_epoch: auto, always or never. Default: what the framework does.
        final_epoch_threshold: the share of an epoch below which auto shuffles it apart.
        drop_last_partial: False keeps a shorter last sample, as Megatron can for validation.
        add_extra_token: 1 (samples overlap by one token, for the shifted label) or 0.
        cache_dir: where to keep the arrays. Default: in memory only.

    Returns:
        The index; ``locate(sample_ids)`` tells where the tokens of samples lie.

    Raises:
        InvalidArgument: an argument is out of range, or the documents hold less than one sample.
        FormatError: the ``.idx`` is damaged.
        StorageError: the dataset cannot be read or the cache not written.
    """
    row = dialect(order)
    if not row.is_framework:
        raise InvalidArgument(f"order {order!r} has no index arrays to build; it is computed")
    _check_integers(sequence_length, seed, add_extra_token)
    dataset = _open(path_prefix_or_dataset)
    dataset.validate()
    name = str(dataset.path_prefix)
    chosen = select_documents(
        len(dataset), name, row, documents=documents, split=split, subset=subset
    )
    tokens = count_tokens(dataset.sequence_lengths, chosen)
    _check_one_sample(name, tokens, sequence_length, add_extra_token)
    wanted = _num_samples(num_samples, epochs, tokens, sequence_length, add_extra_token)
    request = ShuffledOrder(
        dialect=row,
        documents=chosen,
        sequence_length=sequence_length,
        seed=seed,
        num_samples=wanted,
        num_epochs=epochs_for(wanted, tokens, sequence_length, add_extra_token),
        tokens_per_epoch=tokens,
        add_extra_token=add_extra_token,
        drop_last_partial=drop_last_partial,
        separate_final_epoch=separate_final_epoch or row.final_epoch,
        final_epoch_threshold=(
            row.final_epoch_threshold if final_epoch_threshold is None else final_epoch_threshold
        ),
    )
    return _index(request, dataset, _arrays(request, dataset, cache_dir))


def _open(source: str | os.PathLike[str] | IndexedDataset) -> IndexedDataset:
    return source if isinstance(source, IndexedDataset) else IndexedDataset(os.fspath(source))


def _check_integers(sequence_length: int, seed: int, add_extra_token: int) -> None:
    if not 1 <= sequence_length < INT32_MAX:
        raise InvalidArgument(
            f"sequence_length must be from 1 to {INT32_MAX - 1}, got {sequence_length}"
        )
    if not 0 <= seed < 2**32:
        raise InvalidArgument(f"seed must be from 0 to 2**32 - 1, got {seed}")
    if add_extra_token not in (0, 1):
        raise InvalidArgument(f"add_extra_token must be 0 or 1, got {add_extra_token!r}")


def _check_one_sample(name: str, tokens: int, sequence_length: int, extra: int) -> None:
    if tokens < sequence_length + extra:
        raise InvalidArgument(
            f"{name}: the documents hold {tokens} tokens, one sample needs "
            f"{sequence_length + extra} (sequence_length {sequence_length} + {extra} for the "
            "shifted label); use more documents or a smaller sequence_length"
        )


def _num_samples(
    num_samples: int | None,
    epochs: int | float | str | Fraction | None,
    tokens: int,
    sequence_length: int,
    extra: int,
) -> int:
    if num_samples is not None and epochs is not None:
        raise InvalidArgument("num_samples and epochs both set the length; give one of them")
    if num_samples is not None:
        if num_samples < 1:
            raise InvalidArgument(f"num_samples must be at least 1, got {num_samples}")
        return num_samples
    if epochs is None:
        return samples_in(tokens, sequence_length, extra)
    try:
        wanted = Fraction(str(epochs))
    except (ValueError, ZeroDivisionError):
        wanted = Fraction(0)
    if wanted <= 0:
        raise InvalidArgument(
            f"epochs must be a positive number such as 1, 1.5 or 3/2, got {epochs!r}"
        )
    return samples_for_epochs(wanted, tokens, sequence_length, extra)


def _arrays(
    request: ShuffledOrder, dataset: IndexedDataset, cache_dir: str | os.PathLike[str] | None
) -> Mapping[str, IntArray]:
    build = partial(shuffled.build, request, dataset.sequence_lengths)
    if cache_dir is None:
        memory = shuffled.Memory()
        build(memory)
        return memory.arrays
    return fetch(cache_dir, _parameters(request, dataset), build)


def _parameters(request: ShuffledOrder, dataset: IndexedDataset) -> dict[str, Any]:
    """All that decides the arrays: whatever is missing here would be served by mistake."""
    documents = request.documents
    return {
        "corpus": corpus_fingerprint(dataset),
        "order": request.dialect.order,
        "documents": (
            [documents.start, documents.stop]
            if isinstance(documents, range)
            else xxhash.xxh3_128_hexdigest(array_bytes(documents))
        ),
        "sequence_length": request.sequence_length,
        "seed": request.seed,
        "num_epochs": request.num_epochs,
        "final_epoch_apart": request.final.apart,
        "drop_last_partial": request.drop_last_partial,
        "add_extra_token": request.add_extra_token,
    }


def _index(
    request: ShuffledOrder, dataset: IndexedDataset, arrays: Mapping[str, IntArray]
) -> ArrayIndex:
    return ArrayIndex(
        order=request.dialect.order,
        document_index=arrays["document_index"],
        sample_index=arrays["sample_index"],
        shuffle_index=arrays["shuffle_index"],
        sequence_lengths=dataset.sequence_lengths,
        sequence_length=request.sequence_length,
        num_epochs=request.num_epochs,
        tokens_per_epoch=request.tokens_per_epoch,
        add_extra_token=request.add_extra_token,
    )
