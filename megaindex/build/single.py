"""From a corpus and a request to index arrays, through the cache."""

from __future__ import annotations

import os
from collections.abc import Mapping
from fractions import Fraction
from functools import partial
from typing import Any, TypeAlias

import numpy.typing as npt

from megaindex.build.packing import build_packing, check_packing
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.arithmetic import epochs_built
from megaindex.index.arrays import ArrayIndex
from megaindex.index.dialect import Split, dialect
from megaindex.index.orders import shuffled
from megaindex.index.orders.epoch import EpochIndex, LeftOver
from megaindex.index.orders.packing import PackImpl, PackingIndex
from megaindex.index.orders.shuffled import ShuffledOrder
from megaindex.index.orders.window import WindowIndex
from megaindex.index.plain import check_integer, check_number, integer_or_none
from megaindex.index.request import (
    check_integers,
    check_one_sample,
    check_settings,
    check_total,
    epochs_asked,
    samples_asked,
)
from megaindex.index.selection import count_tokens, select_documents
from megaindex.kernels.sizes import ceil_div
from megaindex.kernels.types import I32, IntArray
from megaindex.store.cache import fetch
from megaindex.store.fingerprint import corpus_fingerprint, documents_setting, entry_key

BuiltIndex: TypeAlias = ArrayIndex | EpochIndex | PackingIndex | WindowIndex


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
    exact_num_epochs: int | None = None,
    drop_last_partial: bool = True,
    add_extra_token: int = 1,
    epochs_mixed: int = 1,
    left_over: LeftOver | None = None,
    source_name: str | None = None,
    pack_impl: PackImpl = "packed",
    allow_chopped: bool = True,
    label_dataset: str | os.PathLike[str] | IndexedDataset | None = None,
    next_token: bool = True,
    cache_dir: str | os.PathLike[str] | None = None,
) -> BuiltIndex:
    """The index of one dataset: which tokens each sample of the run reads.

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
        order: megatron, neox, megatron-legacy or paddlenlp, which have arrays; or epoch or window,
            which are computed sample by sample.
        separate_final_epoch: auto, always or never. Default: what the framework does.
        final_epoch_threshold: the share of an epoch below which auto shuffles it apart.
        exact_num_epochs: build so many epochs, of whose last ``num_samples`` decides the shuffle,
            as Megatron-DeepSpeed's ``--train-data-exact-num-epochs``.
        drop_last_partial: False keeps a shorter last sample, as Megatron can for validation.
        add_extra_token: 1 (samples overlap by one token, for the shifted label) or 0.
        epochs_mixed: order epoch: complete epochs that are shuffled together.
        left_over: order epoch: "drop" the tokens at the end of an epoch that fill no sample (the
            default), or "carry" them into the next.
        source_name: orders epoch and window: what the order depends on besides the seed. Default:
            a hash of the corpus's lengths, so that a copy elsewhere keeps its order.
        pack_impl: order neox: packed cuts the concatenated documents; unpacked makes each document
            a sample, pack_until_overflow as many as fit. The last two need ``num_samples``.
        allow_chopped: False leaves documents out that are longer than a sample.
        label_dataset: the pair with one label for each token; documents whose labels are all -100,
            as far as a sample reads them, are left out.
        next_token: False serves documents alone, where GPT-NeoX adds the first token of the next
            one as far as there is room.
        cache_dir: where to keep the arrays. Default: in memory only. Computed orders store none.

    Returns:
        The index; ``locate(sample_ids)`` tells where the tokens of samples lie.

    Raises:
        InvalidArgument: an argument is out of range, or the documents hold less than one sample.
        FormatError: the ``.idx`` is damaged.
        StorageError: the dataset cannot be read or the cache not written.
    """
    row = dialect(order)
    sequence_length, seed, add_extra_token = check_integers(sequence_length, seed, add_extra_token)
    num_samples = integer_or_none("num_samples", num_samples)
    exact_num_epochs = integer_or_none("exact_num_epochs", exact_num_epochs)
    epochs_mixed = check_integer("epochs_mixed", epochs_mixed)
    if final_epoch_threshold is not None:
        final_epoch_threshold = check_number("final_epoch_threshold", final_epoch_threshold)
    check_settings(
        order,
        separate_final_epoch=separate_final_epoch is not None,
        final_epoch_threshold=final_epoch_threshold is not None,
        exact_num_epochs=exact_num_epochs is not None,
        drop_last_partial=not drop_last_partial,
        epochs_mixed=epochs_mixed != 1,
        left_over=left_over is not None,
        source_name=source_name is not None,
        pack_impl=pack_impl != "packed",
    )
    whole_samples = check_packing(
        pack_impl,
        num_samples=num_samples,
        separate_final_epoch=separate_final_epoch is not None,
        final_epoch_threshold=final_epoch_threshold is not None,
        exact_num_epochs=exact_num_epochs is not None,
        drop_last_partial=not drop_last_partial,
        add_extra_token=add_extra_token != 1,
        allow_chopped=not allow_chopped,
        label_dataset=label_dataset is not None,
        next_token=not next_token,
    )
    dataset = _open(path_prefix_or_dataset, row.file_dialect)
    name = str(dataset.path_prefix)
    chosen = select_documents(
        len(dataset), name, row, documents=documents, split=split, subset=subset
    )
    common = {
        "sequence_length": sequence_length,
        "seed": seed,
        "add_extra_token": add_extra_token,
    }
    whole = epochs_asked(num_samples, epochs)
    if order == "window":
        window = _window_index(dataset, chosen, source_name, **common)
        return _for_length(window, num_samples, whole)
    dataset.validate()
    if pack_impl != "packed":
        return build_packing(
            dataset,
            chosen,
            pack_impl=pack_impl,
            allow_chopped=allow_chopped,
            label_dataset=None if label_dataset is None else _open(label_dataset, row.file_dialect),
            next_token=next_token,
            sequence_length=sequence_length,
            seed=seed,
            num_samples=whole_samples,
            cache_dir=cache_dir,
        )
    tokens = count_tokens(dataset.sequence_lengths, chosen)
    if order == "epoch" or tokens == 0:
        check_one_sample(name, tokens, sequence_length, add_extra_token)
    if order == "epoch":
        block = EpochIndex(
            sequence_lengths=dataset.sequence_lengths,
            documents=chosen,
            tokens_per_epoch=tokens,
            source_name=corpus_fingerprint(dataset) if source_name is None else source_name,
            num_epochs=epochs_mixed,
            epochs_mixed=epochs_mixed,
            left_over=left_over or "drop",
            **common,
        )
        return _for_length(block, num_samples, whole)
    wanted = samples_asked(num_samples, whole, tokens, sequence_length, add_extra_token)
    built = epochs_built(exact_num_epochs, wanted, tokens, sequence_length, add_extra_token)
    # several epochs may hold a sample where one does not
    check_one_sample(name, built * tokens, sequence_length, add_extra_token)
    request = ShuffledOrder(
        dialect=row,
        documents=chosen,
        num_samples=wanted,
        num_epochs=built,
        tokens_per_epoch=tokens,
        drop_last_partial=drop_last_partial,
        separate_final_epoch=separate_final_epoch or row.final_epoch,
        final_epoch_threshold=(
            row.final_epoch_threshold if final_epoch_threshold is None else final_epoch_threshold
        ),
        **common,
    )
    check_total(name, request.total_tokens)
    return _index(request, dataset, cache_dir)


def _open(source: str | os.PathLike[str] | IndexedDataset, file_dialect: str) -> IndexedDataset:
    if isinstance(source, IndexedDataset):
        return source
    return IndexedDataset(os.fspath(source), dialect=file_dialect)


def _window_index(
    dataset: IndexedDataset, documents: range | I32, name: str | None, **settings: Any
) -> WindowIndex:
    if not isinstance(documents, range):
        raise InvalidArgument(
            f"{dataset.path_prefix}: order window reads the .bin as it lies, so documents must be "
            "a range or a split; use order epoch for any others"
        )
    return WindowIndex(
        dataset=dataset,
        documents=documents,
        source_name=corpus_fingerprint(dataset) if name is None else name,
        **settings,
    )


def _for_length(
    index: EpochIndex | WindowIndex, num_samples: int | None, epochs: Fraction
) -> EpochIndex | WindowIndex:
    """Of so many whole epochs that what is asked for is in them."""
    if num_samples is not None:
        return index.extend(index.epochs_for(num_samples))
    return index.extend(ceil_div(epochs.numerator, epochs.denominator))


def _parameters(request: ShuffledOrder, dataset: IndexedDataset) -> dict[str, Any]:
    """All that decides the arrays: whatever is missing here would be served by mistake."""
    return {
        "corpus": corpus_fingerprint(dataset),
        "order": request.dialect.order,
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
    build, entry = partial(shuffled.build, request, dataset.sequence_lengths), ""
    arrays: Mapping[str, IntArray]
    if cache_dir is None:
        memory = shuffled.Memory()
        build(memory)
        arrays = memory.arrays
    else:
        parameters = _parameters(request, dataset)
        arrays = fetch(cache_dir, parameters, build, expected=request.arrays)
        entry = os.path.abspath(os.path.join(cache_dir, entry_key(parameters)))
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
        cache_entry=entry,
    )
