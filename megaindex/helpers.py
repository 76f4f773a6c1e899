"""The kernels in the call forms of the frameworks' own helpers modules.

Stands in for ``megatron.core.datasets.helpers`` (megatron-core 0.16.1, all seven functions with its
positional signatures) and answers GPT-NeoX's forms too: uint8 ``dataset_index``, the five-argument
sample index, the eight-argument ``build_mapping``. Where the frameworks convert an argument of the
wrong kind into a copy, count in float32, or read out of range, these raise InvalidArgument or give
the exact answer; docs/compatibility.md lists each case.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, DatasetIndex, IntArray
from megaindex.arithmetic import INT32_MAX, INT64_MAX, samples_in
from megaindex.errors import InvalidArgument
from megaindex.kernels import active, num_threads
from megaindex.kernels.checks import check_blocks_mapping, check_mapping

__all__ = [
    "build_blending_indices",
    "build_blocks_mapping",
    "build_exhaustive_blending_indices",
    "build_mapping",
    "build_sample_idx",
    "build_sample_idx_int32",
    "build_sample_idx_int64",
]


def build_sample_idx(
    sizes: npt.ArrayLike,
    document_indices: npt.ArrayLike,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: bool = True,
) -> IntArray:
    """sample_index [num_samples + 1, 2], int32 where positions and offsets fit, else int64."""
    lengths, documents = _int32(sizes, "sizes"), _int32(document_indices, "document_indices")
    largest = max(documents.shape[0], int(lengths.max(initial=0)))
    build = build_sample_idx_int32 if largest <= INT32_MAX else build_sample_idx_int64
    return build(
        lengths,
        documents,
        sequence_length,
        num_epochs,
        tokens_per_epoch,
        drop_last_partial_sequence,
        1 if add_extra_token_to_sequence else 0,
    )


def build_sample_idx_int32(
    sizes: npt.ArrayLike,
    document_idx: npt.ArrayLike,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
) -> IntArray:
    """sample_index as int32[num_samples + 1, 2].

    Args:
        sizes: int32[sequences], tokens of each.
        document_idx: int32[num_epochs * documents], sequence ids in reading order.
        sequence_length: tokens per sample, at least 1.
        num_epochs: epochs that ``document_idx`` holds.
        tokens_per_epoch: tokens of one epoch.
        drop_last_partial_sequence: False keeps a shorter last sample, counted exactly.
        add_extra_token_to_sequence: 1 if samples share a token for the shifted label, else 0.

    Raises:
        InvalidArgument: an argument of another dtype or out of range, or missing tokens.
    """
    return _sample_idx(np.int32, sizes, document_idx, sequence_length, num_epochs,
                       tokens_per_epoch, drop_last_partial_sequence,
                       add_extra_token_to_sequence)  # fmt: skip


def build_sample_idx_int64(
    sizes: npt.ArrayLike,
    document_idx: npt.ArrayLike,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
) -> IntArray:
    """As `build_sample_idx_int32`, int64[num_samples + 1, 2]."""
    return _sample_idx(np.int64, sizes, document_idx, sequence_length, num_epochs,
                       tokens_per_epoch, drop_last_partial_sequence,
                       add_extra_token_to_sequence)  # fmt: skip


def build_blending_indices(
    dataset_index: DatasetIndex,
    dataset_sample_index: I64,
    weights: npt.ArrayLike,
    num_datasets: int,
    size: int,
    verbose: bool = False,
) -> None:
    """Fill ``dataset_index`` (int16 or uint8) and ``dataset_sample_index`` (int64) with ``size``
    draws, each from the dataset furthest behind its weight.

    Raises:
        InvalidArgument: outputs of another dtype or size (a silent copy would lose what is
            written), weights that are negative or not finite, more datasets than the dtype holds.
    """
    values = _for_kernels(weights, np.float64)
    _check_blend(dataset_index, dataset_sample_index, values, num_datasets, size)
    if not np.isfinite(values).all() or (values < 0).any():
        raise InvalidArgument(f"weights must be finite and >= 0, got {values.tolist()}")
    counts = np.zeros(num_datasets, np.int64)
    with _filled(dataset_index[:size], dataset_sample_index[:size]) as out:
        active().blend_greedy(values[:num_datasets], 0, size, counts, *out)


def build_exhaustive_blending_indices(
    dataset_index: DatasetIndex, dataset_sample_index: I64, sizes: npt.ArrayLike, num_datasets: int
) -> None:
    """Fill both arrays so that dataset i is drawn exactly ``sizes[i]`` times; empty ones never."""
    values = np.asarray(sizes)
    if values.size and values.dtype.kind not in "iu":
        raise InvalidArgument(f"sizes must be integers, got {values.dtype}")
    if (values < 0).any() or sum(values.tolist()) > INT64_MAX:
        raise InvalidArgument(f"sizes must be >= 0 with a sum below 2**63, got {values.tolist()}")
    values = _for_kernels(values, np.int64)
    size = int(values[:num_datasets].sum())
    _check_blend(dataset_index, dataset_sample_index, values, num_datasets, size)
    counts = np.zeros(num_datasets, np.int64)
    with _filled(dataset_index[:size], dataset_sample_index[:size]) as out:
        active().blend_exhaustive(values[:num_datasets], 0, size, counts, *out)


def build_mapping(
    docs: npt.ArrayLike,
    sizes: npt.ArrayLike,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    verbose: bool = False,
    min_num_sent: int = 2,
) -> IntArray:
    """Samples of sentence pairs (BERT, T5): rows (first sentence, end, target length), shuffled.

    GPT-NeoX's form has no ``min_num_sent``: it is 2 there.
    """
    bounds, lengths = np.asarray(docs), np.asarray(sizes)
    check_mapping(bounds, lengths, num_epochs, max_num_samples, max_seq_length, short_seq_prob,
                  seed, min_num_sent)  # fmt: skip
    return active().build_mapping(
        _for_kernels(bounds, np.int64),
        _for_kernels(lengths, np.int32),
        num_epochs,
        max_num_samples,
        max_seq_length,
        short_seq_prob,
        seed,
        min_num_sent,
    )


def build_blocks_mapping(
    docs: npt.ArrayLike,
    sizes: npt.ArrayLike,
    titles_sizes: npt.ArrayLike,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    verbose: bool = False,
    use_one_sent_blocks: bool = False,
) -> IntArray:
    """Blocks of sentences (REALM): rows (first sentence, end, document, block), shuffled."""
    bounds, lengths, titles = np.asarray(docs), np.asarray(sizes), np.asarray(titles_sizes)
    check_blocks_mapping(bounds, lengths, titles, num_epochs, max_num_samples, max_seq_length,
                         seed, use_one_sent_blocks)  # fmt: skip
    return active().build_blocks_mapping(
        _for_kernels(bounds, np.int64),
        _for_kernels(lengths, np.int32),
        _for_kernels(titles, np.int32),
        num_epochs,
        max_num_samples,
        max_seq_length,
        seed,
        use_one_sent_blocks,
    )


def _sample_idx(
    dtype: type[np.signedinteger],
    sizes: npt.ArrayLike,
    document_idx: npt.ArrayLike,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial: bool,
    extra: int,
) -> IntArray:
    # the lengths may be unaligned, as those of a mapped .idx are: kernels read them byte by byte
    lengths = _int32(sizes, "sizes")
    documents = _for_kernels(_int32(document_idx, "document_idx"), np.int32)
    if not 1 <= sequence_length < INT32_MAX or extra not in (0, 1):
        raise InvalidArgument(
            f"sequence_length must be from 1 to {INT32_MAX - 1} and add_extra_token_to_sequence "
            f"0 or 1, got {sequence_length} and {extra}"
        )
    tokens = num_epochs * tokens_per_epoch
    if num_epochs < 1 or not 0 <= tokens <= INT64_MAX or documents.size == 0:
        raise InvalidArgument(
            f"num_epochs must be >= 1, num_epochs * tokens_per_epoch from 0 to 2**63 - 1 and "
            f"document_idx not empty, got {num_epochs} * {tokens_per_epoch} tokens and "
            f"{documents.size} documents"
        )
    num_samples = samples_in(tokens, sequence_length, extra, drop_last_partial=drop_last_partial)
    if num_samples > int(lengths.max(initial=0)) * documents.size:
        raise InvalidArgument(
            f"{documents.size} documents cannot hold the {tokens} tokens that num_epochs * "
            "tokens_per_epoch promises; count tokens_per_epoch over the documents of one epoch"
        )
    out: IntArray = np.empty((num_samples + 1, 2), dtype)
    if dtype is np.int32 and max(documents.size, int(lengths.max(initial=0))) > INT32_MAX:
        raise InvalidArgument(
            f"{documents.size} documents do not fit int32 rows; use build_sample_idx_int64"
        )
    active().cut_samples(
        lengths, documents, sequence_length, extra, num_samples, tokens, out, num_threads()
    )
    return out


def _int32(values: npt.ArrayLike, name: str) -> I32:
    """As int32 without wrapping: the peers cast what does not fit."""
    array = np.asarray(values)
    if array.dtype == np.int32 and array.ndim == 1:
        return np.ascontiguousarray(array)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{name} must be integers in one dimension, got {array.dtype} of shape {array.shape}"
        )
    if array.size and not (int(array.min()) >= -(2**31) and int(array.max()) <= INT32_MAX):
        raise InvalidArgument(
            f"{name} must fit int32, got {int(array.min())} to {int(array.max())}"
        )
    return np.ascontiguousarray(array, np.int32)


def _for_kernels(values: npt.ArrayLike, dtype: type[np.generic]) -> npt.NDArray[Any]:
    """As a contiguous, aligned array of that dtype: a copy only where it is not one.

    Arrays in an .idx file begin at byte 34, so what Megatron passes is seldom aligned.
    """
    return np.require(np.asarray(values), dtype, ("C_CONTIGUOUS", "ALIGNED"))


@contextlib.contextmanager
def _filled(*outputs: npt.NDArray[Any]) -> Iterator[list[npt.NDArray[Any]]]:
    """Yield arrays that a kernel can fill: ``outputs`` themselves, or arrays that are copied into
    those that are not contiguous and aligned."""
    arrays = [
        array if array.flags.c_contiguous and array.flags.aligned else array.copy()
        for array in outputs
    ]
    yield arrays
    for output, array in zip(outputs, arrays, strict=True):
        if array is not output:
            output[...] = array


def _check_blend(
    dataset_index: DatasetIndex,
    dataset_sample_index: I64,
    weights: IntArray,
    num_datasets: int,
    size: int,
) -> None:
    room = {np.dtype(np.int16): 2**15 - 1, np.dtype(np.uint8): 2**8 - 1}
    if not isinstance(dataset_index, np.ndarray) or dataset_index.dtype not in room:
        raise InvalidArgument(
            "dataset_index must be an int16 or uint8 array to write into, got "
            f"{getattr(dataset_index, 'dtype', type(dataset_index).__name__)}"
        )
    sample_dtype = getattr(dataset_sample_index, "dtype", None)
    if not isinstance(dataset_sample_index, np.ndarray) or sample_dtype != np.int64:
        raise InvalidArgument(
            f"dataset_sample_index must be an int64 array to write into, got {sample_dtype}"
        )
    for name, array in (("index", dataset_index), ("sample_index", dataset_sample_index)):
        if array.ndim != 1 or not array.flags.writeable:
            raise InvalidArgument(
                f"dataset_{name} must be one-dimensional and writeable, got shape {array.shape}; "
                "pass an array made by numpy.zeros(size, dtype)"
            )
    if np.may_share_memory(dataset_index, dataset_sample_index):
        raise InvalidArgument("dataset_index and dataset_sample_index must not share memory")
    if weights.ndim != 1:
        raise InvalidArgument(
            f"weights and sizes must have one dimension, got shape {weights.shape}"
        )
    if not 1 <= num_datasets <= min(room[dataset_index.dtype], weights.size):
        raise InvalidArgument(
            f"num_datasets must be from 1 to {room[dataset_index.dtype]}, what "
            f"{dataset_index.dtype} has room for, and at most the {weights.size} weights given, "
            f"got {num_datasets}"
        )
    if size < 0 or min(dataset_index.size, dataset_sample_index.size) < size:
        raise InvalidArgument(
            f"dataset_index and dataset_sample_index must hold {size} draws, got "
            f"{dataset_index.size} and {dataset_sample_index.size}"
        )
