"""Rules of the frameworks as data, and their selection of documents.

Float expressions here are the frameworks' own, kept to the bit because their rounding decides how
many samples are built: megatron-core 0.16.1 (``_get_size_per_split_per_dataset``, ``normalize``,
``convert_split_vector_to_split_matrix``), GPT-NeoX (``get_normalized_weights_and_num_samples``,
``get_train_valid_test_split_``), Megatron-DeepSpeed and PaddleNLP
(``get_datasets_weights_and_num_samples``, ``get_train_valid_test_split_``).
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, IntArray
from megaindex.arithmetic import (
    INT32_MAX,
    INT64_MAX,
    ceil_div,
    epochs_built,
    epochs_for,
    samples_for_epochs,
)
from megaindex.errors import InvalidArgument
from megaindex.validation import check_choice

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
FinalEpochPolicy = Literal["auto", "always", "never"]
LeftOver = Literal["drop", "carry"]
DEFAULT_SPLIT = "969,30,1"


@dataclass(frozen=True, kw_only=True)
class FrameworkRules:
    """How one framework turns a request into index arrays."""

    order: str
    """Name of the order in megaindex."""
    framework: str
    """Framework and version the row was read from."""
    request: Literal["megatron", "neox", "paddlenlp", "exact"]
    """Samples asked of a source of weight w for N samples; see `samples_requested`."""
    buffer_weighted: float
    """variance_buffer the framework applies to sources with explicit weights."""
    buffer_single: float = 1.0
    """variance_buffer it applies to one path without a weight."""
    separate_final_epoch: FinalEpochPolicy = "never"
    """auto: the last epoch is shuffled apart below the threshold; always; never: all together."""
    final_epoch_threshold: float = 0.80
    split_rule: Literal["megatron", "neox"] = "megatron"
    blend_size: Literal["requested", "buffered", "built", "samples"] = "samples"
    """Length of a weighted blend: sum of the unbuffered requests (megatron), of the buffered ones
    (megatron-legacy), of what the sources built (neox, one less for each source, since its `len`
    is one short), or exactly N (paddlenlp, ours)."""
    weight_sum: Literal["numpy", "python", "loop", "exact"] = "numpy"
    """How weights are summed: numpy's pairwise sum, Python's `sum` (compensated from 3.12 on), or
    one plain addition after the other."""
    width_rule: Literal["megatron", "neox", "int64"] = "megatron"
    """When sample_index is int32: if the entries of document_index are few enough (megatron), if
    the samples are (neox), or never."""
    file_dialect: Literal["megatron", "neox", "paddlenlp"] = "megatron"
    """Which dtypes the codes 6, 7, 9 and 10 of an .idx stand for."""
    left_over: LeftOver = "carry"
    """Tokens at the end of an epoch that fill no sample: a sample may span two epochs, or not."""
    epochs_mixed: int = 1
    """Complete epochs that order epoch shuffles together; it builds whole blocks of them."""
    exact_num_epochs: int | None = None
    """So many epochs are built for training, whatever is asked (Megatron-DeepSpeed's option)."""
    uncounted_samples: int = 0
    """Samples of each dataset that its length leaves out. The loader serves whole micro batches of
    what it counts, then starts over; a blend that draws a sample of a source beyond the last gets
    the one at its number modulo the length."""
    weight_alone: Literal["as given", "ignored", "always"] = "as given"
    """Whether a path that a split has to itself counts as weighted, for the variance buffer."""

    @property
    def is_framework(self) -> bool:
        return self.request != "exact"

    def default_buffer(self, *, weighted: bool) -> float:
        return self.buffer_weighted if weighted else self.buffer_single

    def samples_requested(
        self, num_samples: int, weight: float, buffer: float, num_sources: int
    ) -> int:
        """Return the samples asked of a source whose normalised weight is ``weight``."""
        if self.request == "megatron":
            return math.ceil(math.ceil(num_samples * weight) * buffer)
        if self.request == "paddlenlp":
            surplus = 20 if num_sources > 1 else 0
            return math.ceil(num_samples * weight * buffer) + surplus
        return math.ceil(num_samples * weight * buffer)

    def samples_in_epochs(
        self, epochs: Fraction | int, tokens_per_epoch: int, sequence_length: int
    ) -> int:
        """Return the samples that so many epochs of a source hold."""
        block = self.epochs_mixed
        return samples_for_epochs(
            Fraction(epochs) / block,
            block * tokens_per_epoch,
            sequence_length,
            carry_left_over=self.left_over == "carry",
        )

    def epochs_for(self, num_samples: int, tokens_per_epoch: int, sequence_length: int) -> int:
        """Epochs that are built so that ``num_samples`` samples of a source are there.

        Raises:
            InvalidArgument: ``exact_num_epochs`` do not hold them.
        """
        block = self.epochs_mixed
        if self.is_framework:
            exact = self.exact_num_epochs
            return epochs_built(exact, num_samples, tokens_per_epoch, sequence_length)
        if self.left_over == "carry":
            return block * epochs_for(num_samples, block * tokens_per_epoch, sequence_length)
        per_block = self.samples_in_epochs(block, tokens_per_epoch, sequence_length)
        return block * max(1, ceil_div(num_samples, per_block))

    @property
    def fewest_epochs(self) -> int:
        """Epochs that are built for a single sample."""
        return self.exact_num_epochs or self.epochs_mixed

    def sample_index_dtype(self, num_documents: int, tokens: int, sequence_length: int) -> str:
        """Width of sample_index for ``num_documents`` entries of document_index (all epochs)."""
        if self.width_rule == "int64":
            return "int64"
        if self.width_rule == "megatron":
            return "int32" if num_documents <= INT32_MAX else "int64"
        return "int32" if 2 * ((tokens - 1) / sequence_length + 1) < INT32_MAX else "int64"

    def split_bounds(self, split: str, num_sequences: int) -> list[tuple[int, int]]:
        """[begin, end) of train, valid and test among ``num_sequences`` sequences."""
        if self.split_rule == "neox":
            return _neox_bounds(self.shares(split), num_sequences)
        return _megatron_bounds(self.shares(split), num_sequences)

    def shares(self, split: str) -> list[float]:
        """Weights of train, valid and test, read as the framework reads them.

        Raises:
            InvalidArgument: not up to three numbers with a positive sum.
        """
        return parse_split(split, self.order)


FRAMEWORK_RULES: dict[str, FrameworkRules] = {
    row.order: row
    for row in (
        FrameworkRules(
            order="megatron",
            framework="Megatron-LM (megatron-core 0.16.1)",
            request="megatron",
            buffer_weighted=1 + 0.005,
            separate_final_epoch="auto",
            blend_size="requested",
            weight_alone="ignored",
        ),
        FrameworkRules(
            order="neox",
            framework="GPT-NeoX (main, 2026-05)",
            request="neox",
            buffer_weighted=1.005,
            split_rule="neox",
            blend_size="built",
            weight_sum="python",
            width_rule="neox",
            file_dialect="neox",
            uncounted_samples=1,
            weight_alone="always",
        ),
        FrameworkRules(
            order="megatron-legacy",
            framework="Megatron-DeepSpeed (main, 2025-07)",
            request="neox",
            buffer_weighted=1.005,
            separate_final_epoch="auto",
            split_rule="neox",
            blend_size="buffered",
            weight_sum="loop",
            width_rule="int64",
        ),
        FrameworkRules(
            order="paddlenlp",
            framework="PaddleNLP (3.0.0b4)",
            request="paddlenlp",
            buffer_weighted=1.005,
            separate_final_epoch="auto",
            split_rule="neox",
            blend_size="samples",
            weight_sum="loop",
            file_dialect="paddlenlp",
        ),
        FrameworkRules(
            order="epoch",
            framework="megaindex",
            request="exact",
            buffer_weighted=1.0,
            weight_sum="exact",
            left_over="drop",
        ),
        FrameworkRules(
            order="window",
            framework="megaindex",
            request="exact",
            buffer_weighted=1.0,
            weight_sum="exact",
            left_over="drop",
        ),
    )
}


def framework_rules(order: str) -> FrameworkRules:
    """Return the row of an order.

    Raises:
        InvalidArgument: no such order.
    """
    return FRAMEWORK_RULES[check_choice("order", order, tuple(FRAMEWORK_RULES))]


def parse_split(split: str, order: str = "", name: str = "split") -> list[float]:
    """``"969,30,1"`` as three non-negative weights, missing ones 0; ``/`` separates too.

    Megatron-LM takes every run of digits and points for a number, whatever lies between them.

    Raises:
        InvalidArgument: not numbers, more than three, or a sum of zero.
    """
    words = re.findall(r"[.0-9]+", split) if order == "megatron" else re.split(r"[,/]", split)
    try:
        parts = [float(part) for part in words]
    except ValueError:
        parts = []
    parts += [0.0] * (len(SPLITS) - len(parts))
    if len(parts) != len(SPLITS) or not sum(parts) > 0 or min(parts) < 0 or math.isinf(sum(parts)):
        raise InvalidArgument(
            f"{name} must be up to three non-negative numbers with a positive sum, such as "
            f"{DEFAULT_SPLIT!r}, got {split!r}"
        )
    return parts


def _megatron_bounds(weights: Sequence[float], num_sequences: int) -> list[tuple[int, int]]:
    """Each boundary of the normalised, cumulated split is rounded by itself."""
    values = np.array(weights, np.float64)
    cumulated = [0.0]
    for part in (values / np.sum(values)).tolist():
        cumulated.append(cumulated[-1] + part)
    rounded = [round(bound * float(num_sequences)) for bound in cumulated]
    return list(itertools.pairwise(rounded))


def _neox_bounds(weights: Sequence[float], num_sequences: int) -> list[tuple[int, int]]:
    """Each part is rounded by itself; what they exceed together is taken off every boundary."""
    total = sum(weights)
    bounds = [0]
    for weight in weights:
        bounds.append(bounds[-1] + round(weight / total * float(num_sequences)))
    excess = bounds[-1] - num_sequences
    bounds[1:] = [bound - excess for bound in bounds[1:]]
    return list(itertools.pairwise(bounds))


def select_documents(
    num_sequences: int,
    name: str,
    row: FrameworkRules,
    *,
    documents: npt.ArrayLike | range | None = None,
    split: str | None = None,
    subset: str = "train",
) -> range | I32:
    """Return the sequence ids of one epoch: a range where possible, since it costs no memory.

    Args:
        num_sequences: sequences of the dataset.
        name: of the dataset, for messages.
        row: decides how a split is rounded.
        documents: the ids themselves; or
        split: ``"969,30,1"``, of which ``subset`` names the part.

    Raises:
        InvalidArgument: both given, ids out of range or not integers, or nothing selected.
    """
    chosen: range | I32
    if split is not None and documents is not None:
        raise InvalidArgument("documents and split both choose documents; give one of them")
    check_choice("subset", subset, SPLITS)
    if split is not None:
        chosen = range(*row.split_bounds(split, num_sequences)[SPLITS.index(subset)])
    elif documents is None:
        chosen = range(num_sequences)
    elif isinstance(documents, range) and documents.step == 1:
        chosen = documents
    else:
        chosen = _as_ids(documents)
    _check_inside(chosen, num_sequences, name, f"the {subset} part of split {split}")
    return chosen


def count_tokens(lengths: I32, documents: range | I32) -> int:
    """Return the tokens of one epoch."""
    if isinstance(documents, range):
        return int(lengths[documents.start : documents.stop].sum(dtype=np.int64))
    return int(lengths[documents].sum(dtype=np.int64))


def check_one_sample(name: str, tokens: int, sequence_length: int, extra: int) -> None:
    """Refuse documents that together hold less than one sample."""
    if tokens < sequence_length + extra:
        raise InvalidArgument(
            f"{name}: the documents hold {tokens} tokens, one sample needs "
            f"{sequence_length + extra} (sequence_length {sequence_length} + {extra} for the "
            "shifted label); use more documents or a smaller sequence_length"
        )


def check_total(name: str, tokens: int) -> None:
    """Refuse more tokens than any array can count."""
    if tokens > INT64_MAX:
        raise InvalidArgument(
            f"{name}: the epochs asked for hold {tokens} tokens, more than 2**63 - 1; ask for fewer"
        )


_COUNTING = np.arange(1 << 15, dtype=np.int32)


def as_range(ids: IntArray) -> range | IntArray:
    """Return consecutive ids as a range, which takes no memory, and others as they are."""
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or not ids.size:
        return ids
    first = int(ids[0])
    if int(ids[-1]) - first != ids.size - 1:
        return ids
    for begin in range(0, ids.size, _COUNTING.size):
        part = ids[begin : begin + _COUNTING.size]
        if (part - _COUNTING[: part.size] != first + begin).any():
            return ids
    return range(first, first + ids.size)


def _as_ids(documents: npt.ArrayLike) -> I32:
    ids = np.asarray(documents)
    if ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        raise InvalidArgument(
            f"documents must be integers in one dimension, got {ids.dtype} of shape {ids.shape}"
        )
    if ids.size and int(ids.max()) > INT32_MAX:
        raise InvalidArgument(f"documents must be below 2**31, got {int(ids.max())}")
    return np.ascontiguousarray(ids, np.int32)


def _check_inside(chosen: range | I32, num_sequences: int, name: str, part: str) -> None:
    if len(chosen) == 0:
        raise InvalidArgument(
            f"{name}: {part} holds none of the {num_sequences} sequences; choose more of them"
        )
    low, high = (
        (chosen.start, chosen.stop - 1)
        if isinstance(chosen, range)
        else (int(chosen.min()), int(chosen.max()))
    )
    if low < 0 or high >= num_sequences:
        raise InvalidArgument(
            f"{name}: documents must be from 0 to {num_sequences - 1}, its sequences, got "
            f"{low if low < 0 else high}"
        )
