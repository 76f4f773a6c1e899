"""Checks of the arguments of map_sentences and map_blocks, which those kernels do not repeat.

Each check takes its kernel's arguments, with arrays of any integer dtype. The cost is O(documents)
for docs and O(sentences) for sizes.
"""

from __future__ import annotations

import operator
from typing import SupportsIndex

import numpy as np

from megaindex._types import IntArray
from megaindex.arithmetic import INT32_MAX, INT64_MAX
from megaindex.errors import InvalidArgument

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
    use_one_sent_blocks: bool,  # noqa: ARG001 - an argument of the kernel
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
