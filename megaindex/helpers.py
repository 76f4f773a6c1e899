"""The frameworks' index-building functions, with the frameworks' signatures.

A replacement of ``megatron.core.datasets.helpers`` (megatron-core 0.16.1): all seven functions take
its positional arguments, and those of GPT-NeoX, which are a uint8 ``dataset_index``, five arguments
of ``build_sample_idx_int32`` and eight of ``build_mapping``. Arrays may be unaligned, as those of a
mapped ``.idx`` are, or anything that `numpy.asarray` accepts. Where the frameworks write into a
converted copy, count in float32 or read out of range, these functions raise `InvalidArgument` or
return the exact result; docs/compatibility.md lists each case.

``backend`` is a module with the kernels, by default the one that `megaindex.backend` names. The
native module has the seven functions too: ``megaindex.kernels._native.build_sample_idx`` is
`build_sample_idx` with that module as ``backend``.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, SupportsIndex

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, DatasetIndex, IntArray
from megaindex.arithmetic import INT32_MAX, INT64_MAX, samples_in
from megaindex.errors import InvalidArgument
from megaindex.kernels import active, num_threads

if TYPE_CHECKING:
    from megaindex.kernels.protocol import Backend

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
    *,
    backend: Backend | None = None,
) -> IntArray:
    """Return sample_index [num_samples + 1, 2], int32 if positions and offsets fit, else int64.

    Parameters and errors are those of `build_sample_idx_int32`.
    """
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
        add_extra_token_to_sequence,
        backend=backend,
    )


def build_sample_idx_int32(
    sizes: npt.ArrayLike,
    document_idx: npt.ArrayLike,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
    *,
    backend: Backend | None = None,
) -> IntArray:
    """Return sample_index as int32[num_samples + 1, 2].

    Row k is the position in ``document_idx`` and the offset in that document at which sample k
    begins.

    Args:
        sizes: int32[sequences], tokens of each sequence.
        document_idx: int32[num_epochs * documents], sequence ids in reading order.
        sequence_length: tokens per sample, at least 1.
        num_epochs: number of epochs in ``document_idx``.
        tokens_per_epoch: tokens of one epoch.
        drop_last_partial_sequence: False keeps a shorter last sample, counted exactly.
        add_extra_token_to_sequence: 1 if samples share a token for the shifted label, else 0.

    Raises:
        InvalidArgument: an argument is not of an integer dtype or out of range, or the documents
            hold fewer tokens than ``num_epochs * tokens_per_epoch``.
    """
    return _sample_idx(np.int32, sizes, document_idx, sequence_length, num_epochs,
                       tokens_per_epoch, drop_last_partial_sequence,
                       add_extra_token_to_sequence, backend)  # fmt: skip


def build_sample_idx_int64(
    sizes: npt.ArrayLike,
    document_idx: npt.ArrayLike,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial_sequence: bool = True,
    add_extra_token_to_sequence: int = 1,
    *,
    backend: Backend | None = None,
) -> IntArray:
    """Return sample_index as int64[num_samples + 1, 2]; see `build_sample_idx_int32`."""
    return _sample_idx(np.int64, sizes, document_idx, sequence_length, num_epochs,
                       tokens_per_epoch, drop_last_partial_sequence,
                       add_extra_token_to_sequence, backend)  # fmt: skip


def build_blending_indices(
    dataset_index: DatasetIndex,
    dataset_sample_index: I64,
    weights: npt.ArrayLike,
    num_datasets: int,
    size: int,
    verbose: bool = False,
    *,
    backend: Backend | None = None,
) -> None:
    """Fill both arrays with ``size`` draws, each from the dataset furthest behind its weight.

    Draw n is from the dataset i with the largest ``weights[i] * max(n, 1) - draws of i so far``,
    the lowest i among equals.

    Args:
        dataset_index: int16 or uint8 [at least size], the dataset of each draw.
        dataset_sample_index: int64 [at least size], the number of that dataset's draws before.
        weights: float64[at least num_datasets], finite and not negative; their sum need not be 1.
        num_datasets: number of datasets, at most 32767, or 255 with uint8.
        size: number of draws.
        verbose: ignored, as there is nothing to print.

    Raises:
        InvalidArgument: outputs of another dtype or too small (a converted copy would lose what is
            written), weights that are negative or not finite, or too many datasets for the dtype.
    """
    kernels = backend or active()
    fill = getattr(kernels, "fill_greedy", None)  # of the native core
    if fill and fill(dataset_index, dataset_sample_index, weights, num_datasets, size):
        return
    values = _for_kernels(weights, np.float64, "weights")
    _check_blend(dataset_index, dataset_sample_index, values, num_datasets, size)
    if not np.isfinite(values).all() or (values < 0).any():
        raise InvalidArgument(f"weights must be finite and >= 0, got {values.tolist()}")
    counts = np.zeros(num_datasets, np.int64)
    with _filled(dataset_index[:size], dataset_sample_index[:size]) as out:
        kernels.blend_greedy(values[:num_datasets], 0, size, counts, *out)


def build_exhaustive_blending_indices(
    dataset_index: DatasetIndex,
    dataset_sample_index: I64,
    sizes: npt.ArrayLike,
    num_datasets: int,
    *,
    backend: Backend | None = None,
) -> None:
    """Fill both arrays with draws from dataset i in proportion to ``sizes[i]`` and as many.

    Draws are those of `build_blending_indices` with weights ``sizes / sizes.sum()``, except that a
    dataset is left out after ``sizes[i]`` draws.

    Args:
        dataset_index: int16 or uint8 [at least the sum of sizes], the dataset of each draw.
        dataset_sample_index: int64 of the same length, the number of that dataset's draws before.
        sizes: integers [at least num_datasets], not negative; a dataset of size 0 is never drawn.
        num_datasets: number of datasets, at most 32767, or 255 with uint8.

    Raises:
        InvalidArgument: outputs of another dtype or too small, or sizes that are not integers,
            negative, or reach a sum of 2**63.
    """
    kernels = backend or active()
    fill = getattr(kernels, "fill_exhaustive", None)  # of the native core
    if fill and fill(dataset_index, dataset_sample_index, sizes, num_datasets):
        return
    values = _integers(sizes, "sizes")
    if (values < 0).any() or sum(values.tolist()) > INT64_MAX:
        raise InvalidArgument(f"sizes must be >= 0 with a sum below 2**63, got {values.tolist()}")
    values = _for_kernels(values, np.int64, "sizes")
    size = int(values[:num_datasets].sum())
    _check_blend(dataset_index, dataset_sample_index, values, num_datasets, size)
    counts = np.zeros(num_datasets, np.int64)
    with _filled(dataset_index[:size], dataset_sample_index[:size]) as out:
        kernels.blend_exhaustive(values[:num_datasets], 0, size, counts, *out)


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
    *,
    backend: Backend | None = None,
) -> IntArray:
    """Return samples of BERT and T5: shuffled rows (first sentence, end sentence, target length).

    Args:
        docs: int64[documents + 1]; document d is the sentences ``docs[d]`` to ``docs[d + 1] - 1``.
        sizes: int32[sentences], tokens of each sentence.
        num_epochs: epochs at most.
        max_num_samples: no further epoch is begun once there are this many samples.
        max_seq_length: target length of a sample, in tokens.
        short_seq_prob: from 0 to 1; one target in ``round(1 / short_seq_prob)`` is drawn from
            [2, max_seq_length] instead.
        seed: int32.
        verbose: ignored, as there is nothing to print.
        min_num_sent: documents with fewer sentences are left out. GPT-NeoX's function has no such
            argument and uses 2.

    Returns:
        uint32[samples, 3], or uint64 if there are more than 2**32 - 1 sentences.

    Raises:
        InvalidArgument: an argument is of another kind or out of range.
    """
    bounds, lengths = _array(docs, "docs"), _array(sizes, "sizes")
    check_mapping(bounds, lengths, num_epochs, max_num_samples, max_seq_length, short_seq_prob,
                  seed, min_num_sent)  # fmt: skip
    return (backend or active()).map_sentences(
        _for_kernels(bounds, np.int64, "docs"),
        _for_kernels(lengths, np.int32, "sizes"),
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
    *,
    backend: Backend | None = None,
) -> IntArray:
    """Return blocks of REALM: shuffled rows (first sentence, end sentence, document, block).

    Args:
        titles_sizes: int32[at least documents], tokens of each document's title, for which its
            blocks leave room.
        use_one_sent_blocks: True also allows blocks of one sentence.

    The other arguments and the errors are those of `build_mapping`.

    Returns:
        uint32[blocks, 4], or uint64 if there are more than 2**32 - 1 sentences. Blocks are numbered
        in each epoch.
    """
    bounds, lengths = _array(docs, "docs"), _array(sizes, "sizes")
    titles = _array(titles_sizes, "titles_sizes")
    check_blocks_mapping(bounds, lengths, titles, num_epochs, max_num_samples, max_seq_length, seed)
    return (backend or active()).map_blocks(
        _for_kernels(bounds, np.int64, "docs"),
        _for_kernels(lengths, np.int32, "sizes"),
        _for_kernels(titles, np.int32, "titles_sizes"),
        num_epochs,
        max_num_samples,
        max_seq_length,
        seed,
        _flag("use_one_sent_blocks", use_one_sent_blocks),
    )


def _flag(name: str, value: object) -> bool:
    """Return the truth of a flag, which the frameworks' helpers take of any object with one."""
    try:
        return bool(value)
    except (TypeError, ValueError):  # of an array
        raise InvalidArgument(f"{name} must be True or False, got {value!r}") from None


def _sample_idx(
    dtype: type[np.signedinteger],
    sizes: npt.ArrayLike,
    document_idx: npt.ArrayLike,
    sequence_length: int,
    num_epochs: int,
    tokens_per_epoch: int,
    drop_last_partial: bool,
    extra: int,
    backend: Backend | None,
) -> IntArray:
    # cut_samples reads unaligned lengths, so that those of a mapped .idx need no copy
    lengths = _int32(sizes, "sizes")
    documents = _for_kernels(_int32(document_idx, "document_idx"), np.int32, "document_idx")
    if documents.size == 0:
        raise InvalidArgument("document_idx must hold at least one document, got an empty array")
    check_integer("sequence_length", sequence_length, 1, INT32_MAX - 1)
    check_integer("add_extra_token_to_sequence", extra, 0, 1)
    check_integer("num_epochs", num_epochs, 1, INT64_MAX)
    check_integer("tokens_per_epoch", tokens_per_epoch, 0, INT64_MAX)
    tokens = int(num_epochs) * int(tokens_per_epoch)
    if tokens > INT64_MAX:
        raise InvalidArgument(
            f"num_epochs * tokens_per_epoch must be below 2**63, got {num_epochs} * "
            f"{tokens_per_epoch}"
        )
    drops = _flag("drop_last_partial_sequence", drop_last_partial)
    num_samples = samples_in(tokens, sequence_length, extra, drop_last_partial=drops)
    if num_samples > int(lengths.max(initial=0)) * documents.size:
        raise InvalidArgument(
            f"document_idx: its {documents.size} documents cannot hold the {tokens} tokens of "
            "num_epochs * tokens_per_epoch; count tokens_per_epoch over the documents of one epoch"
        )
    out: IntArray = np.empty((num_samples + 1, 2), dtype)
    if dtype is np.int32 and documents.size > INT32_MAX:
        raise InvalidArgument(
            f"document_idx: {documents.size} documents do not fit int32 rows; use "
            "build_sample_idx_int64"
        )
    (backend or active()).cut_samples(
        lengths, documents, sequence_length, extra, num_samples, tokens, out, num_threads()
    )
    return out


def _int32(values: npt.ArrayLike, name: str) -> I32:
    """Return a contiguous int32 array; the frameworks cast values that do not fit."""
    array = _integers(values, name)
    if array.dtype == np.int32:
        return np.ascontiguousarray(array)
    if array.size and not (int(array.min()) >= -(2**31) and int(array.max()) <= INT32_MAX):
        raise InvalidArgument(
            f"{name} must fit int32, got {int(array.min())} to {int(array.max())}"
        )
    return np.ascontiguousarray(array, np.int32)


def _integers(values: npt.ArrayLike, name: str) -> IntArray:
    array = _array(values, name)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"{name} must be integers in one dimension, got {array.dtype} of shape {array.shape}"
        )
    return array


def _array(values: npt.ArrayLike, name: str) -> npt.NDArray[Any]:
    try:
        return np.asarray(values)
    except ValueError as error:  # of nested lists of different lengths
        raise InvalidArgument(f"{name} must be an array: {error}") from None


def _for_kernels(values: npt.ArrayLike, dtype: type[np.generic], name: str) -> npt.NDArray[Any]:
    """Return a contiguous, aligned array of that dtype, which is a copy only if needed.

    Arrays in an .idx file begin at byte 34, so those that Megatron passes are seldom aligned.
    """
    array = _array(values, name)
    if array.dtype.kind == "c":
        raise InvalidArgument(f"{name} must be real numbers, got {array.dtype}")
    try:
        return np.require(array, dtype, ("C_CONTIGUOUS", "ALIGNED"))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"{name} must be numbers: {error}") from None


@contextlib.contextmanager
def _filled(*outputs: npt.NDArray[Any]) -> Iterator[list[npt.NDArray[Any]]]:
    """Yield contiguous, aligned arrays for a kernel to fill; copies are copied back at the end."""
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
    check_integer("num_datasets", num_datasets, 0, INT64_MAX)
    check_integer("size", size, 0, INT64_MAX)
    if weights.ndim != 1:
        raise InvalidArgument(
            f"weights and sizes must have one dimension, got shape {weights.shape}"
        )
    if not 1 <= num_datasets <= min(room[dataset_index.dtype], weights.size):
        raise InvalidArgument(
            f"num_datasets must be from 1 to {room[dataset_index.dtype]} ({dataset_index.dtype}) "
            f"and at most the {weights.size} weights given, got {num_datasets}"
        )
    if min(dataset_index.size, dataset_sample_index.size) < size:
        raise InvalidArgument(
            f"dataset_index and dataset_sample_index must hold {size} draws, got "
            f"{dataset_index.size} and {dataset_sample_index.size}"
        )


UINT32_MAX = 2**32 - 1
UINT64_MAX = 2**64 - 1


def check_mapping(
    docs: IntArray,
    sizes: IntArray,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int = 2,
) -> None:
    """Raise InvalidArgument for arguments that map_sentences cannot take."""
    _check_counts(sizes, num_epochs, max_num_samples, max_seq_length, seed)
    _check_corpus(docs, sizes)
    check_integer("min_num_sent", min_num_sent, 0, INT32_MAX)
    try:
        is_share = bool(0 <= short_seq_prob <= 1)  # also refuses NaN
    except (TypeError, ValueError):  # of text, or an array
        is_share = False
    if not is_share:
        raise InvalidArgument(f"short_seq_prob must be from 0 to 1, got {short_seq_prob!r}")
    if short_seq_prob > 0 and max_seq_length < 2:
        raise InvalidArgument(
            f"short samples are drawn from [2, max_seq_length], got max_seq_length "
            f"{max_seq_length}; raise it, or set short_seq_prob ({short_seq_prob}) to 0"
        )


def check_blocks_mapping(
    docs: IntArray,
    sizes: IntArray,
    titles_sizes: IntArray,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
) -> None:
    """Raise InvalidArgument for arguments that map_blocks cannot take."""
    # Rows also hold document numbers, in a width chosen by the number of sentences.
    if sizes.size <= UINT32_MAX < docs.size - 2:
        raise InvalidArgument(
            f"docs: {docs.size - 1} documents do not fit the 32-bit rows of {sizes.size} "
            "sentences; leave out the empty documents"
        )
    _check_counts(sizes, num_epochs, max_num_samples, max_seq_length, seed)
    _check_corpus(docs, sizes)
    _check_lengths("titles_sizes", titles_sizes)
    if len(titles_sizes) < len(docs) - 1:
        raise InvalidArgument(
            f"titles_sizes: {len(docs) - 1} documents need as many titles, got {len(titles_sizes)}"
        )


def _check_corpus(docs: IntArray, sizes: IntArray) -> None:
    _check_array("docs", docs)
    _check_lengths("sizes", sizes)
    if len(docs) == 0:
        raise InvalidArgument(
            "docs must hold the first sentence of every document and the end of the last, "
            "got an empty array"
        )
    if docs[0] < 0 or docs[-1] > len(sizes):
        raise InvalidArgument(
            f"docs must stay within the {len(sizes)} sentences of sizes, "
            f"got {docs[0]} to {docs[-1]}"
        )
    falls = docs[1:] < docs[:-1]
    if falls.any():
        at = int(falls.argmax())
        raise InvalidArgument(
            f"docs must not decrease, got docs[{at}] = {docs[at]} and "
            f"docs[{at + 1}] = {docs[at + 1]}; pass the documents in the order of the corpus"
        )


def _check_counts(
    sizes: IntArray, num_epochs: int, max_num_samples: int, max_seq_length: int, seed: int
) -> None:
    check_integer("num_epochs", num_epochs, 0, INT32_MAX)
    check_integer("max_num_samples", max_num_samples, 0, UINT64_MAX)
    check_integer("max_seq_length", max_seq_length, 1, INT32_MAX)
    check_integer("seed", seed, -INT32_MAX - 1, INT32_MAX)
    # An epoch has at most one sample per sentence, and an epoch that was begun is finished.
    most = min(num_epochs * sizes.size, max_num_samples + sizes.size)
    if most > INT64_MAX // 32:  # 4 numbers of 8 bytes each
        raise InvalidArgument(
            f"num_epochs {num_epochs} and max_num_samples {max_num_samples} allow {most} samples "
            f"of {sizes.size} sentences, more than any memory holds; lower one of them"
        )


def _check_array(name: str, array: IntArray) -> None:
    if array.ndim != 1:
        raise InvalidArgument(f"{name} must have one dimension, got shape {array.shape}")
    if array.size and array.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{name} must hold integers, got {array.dtype}; convert it with astype"
        )


def _check_lengths(name: str, lengths: IntArray) -> None:
    _check_array(name, lengths)
    if lengths.size == 0:
        return
    least = int(lengths.min())
    # an int32 cannot exceed the limit, so most corpora need no second pass
    most = 0 if np.can_cast(lengths.dtype, np.int32) else int(lengths.max())
    if least < 0 or most > INT32_MAX:
        wrong = least if least < 0 else most
        raise InvalidArgument(f"{name} must be from 0 to {INT32_MAX} tokens, got {wrong}")


def check_integer(name: str, value: SupportsIndex, least: int, most: int) -> None:
    """Raise InvalidArgument unless value is an integer from least to most."""
    try:
        number = operator.index(value)
    except TypeError:
        raise InvalidArgument(f"{name} must be an integer, got {value!r}") from None
    if not least <= number <= most:
        raise InvalidArgument(f"{name} must be from {least} to {most}, got {number}")
