"""Rules of the frameworks as data, and the selection of documents.

The float expressions are those of the frameworks, because their rounding decides how many samples
are built: megatron-core 0.16.1 (``_get_size_per_split_per_dataset``, ``normalize``,
``convert_split_vector_to_split_matrix``), GPT-NeoX (``get_normalized_weights_and_num_samples``,
``get_train_valid_test_split_``), Megatron-DeepSpeed and PaddleNLP
(``get_datasets_weights_and_num_samples``, ``get_train_valid_test_split_``).
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

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
from megaindex.validation import check_choice, shown

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")
FinalEpochPolicy = Literal["auto", "always", "never"]
LeftOver = Literal["drop", "carry"]
LongDocuments = Literal["truncate", "split", "skip"]
LONG_DOCUMENTS: tuple[LongDocuments, ...] = ("truncate", "split", "skip")
DEFAULT_SPLIT = "969,30,1"
PythonSum = Literal["plain", "compensated"]
"""Rounding of Python's ``sum`` of doubles: plain additions up to Python 3.11, compensated from 3.12
on."""
PYTHON_SUMS: tuple[PythonSum, ...] = ("plain", "compensated")
OWN_PYTHON_SUM: PythonSum = "compensated" if sys.version_info >= (3, 12) else "plain"
"""That of the interpreter that runs."""


@dataclass(frozen=True, kw_only=True)
class FrameworkRules:
    """Rules by which one framework builds index arrays."""

    order: str
    """Name of the order in megaindex."""
    framework: str
    """Framework and version that the rules were taken from."""
    request: Literal["megatron", "neox", "paddlenlp", "exact"]
    """Formula of `samples_requested`."""
    buffer_weighted: float
    """Variance buffer of sources with explicit weights."""
    buffer_single: float = 1.0
    """Variance buffer of one path without a weight."""
    separate_final_epoch: FinalEpochPolicy = "never"
    """Shuffle of the last epoch: always separate, never, or (auto) separate if less than
    ``final_epoch_threshold`` of its samples are requested."""
    final_epoch_threshold: float = 0.80
    split_rule: Literal["megatron", "neox"] = "megatron"
    blend_size: Literal["requested", "buffered", "built", "samples"] = "samples"
    """Length of a weighted blend for N samples: sum of the requests without a variance buffer
    (requested), with it (buffered), sum of the dataset lengths (built), or N (samples)."""
    weight_sum: Literal["numpy", "python", "loop", "exact"] = "numpy"
    """Sum of weights: NumPy's pairwise sum, Python's `sum` (see ``python_sum``), a loop of
    additions, or exact."""
    python_sum: PythonSum = OWN_PYTHON_SUM
    """Python's `sum` of the interpreter under which the framework runs."""
    width_rule: Literal["megatron", "neox", "int64"] = "megatron"
    """Condition for an int32 sample_index: few enough entries of document_index (megatron), few
    enough samples (neox), or never (int64)."""
    file_dialect: Literal["megatron", "neox", "paddlenlp"] = "megatron"
    """Meaning of dtype codes 6, 7, 9 and 10 of an .idx."""
    left_over: LeftOver = "carry"
    """Tokens at the end of an epoch that fill no sample: dropped, or carried into the next."""
    epochs_mixed: int = 1
    """Complete epochs that order epoch shuffles together."""
    long_documents: LongDocuments = "split"
    """Treatment of documents longer than a sample in order packed."""
    max_documents: int | None = None
    """Most pieces of documents in a sample of order packed; None: see `PackedOrder`."""
    align: int = 1
    """Multiple of tokens at which documents begin in samples of order packed."""
    exact_num_epochs: int | None = None
    """Number of epochs built for training (``--train-data-exact-num-epochs`` of
    Megatron-DeepSpeed)."""
    uncounted_samples: int = 0
    """Samples of each dataset that its ``len`` omits (1 in GPT-NeoX). The loader starts over after
    the counted ones; a blend that draws a later sample reads the one at its number modulo ``len``.
    """
    train_epochs: Literal["none", "repeated", "reshuffled"] = "none"
    """Passes of a loader that starts over: in one order (repeated), or those of training in another
    order each, in which a blend has each sample of its sources once (reshuffled)."""
    weight_alone: Literal["as given", "ignored", "always"] = "as given"
    """Rule by which the only path of a split counts as weighted, for the variance buffer."""
    zero_weights: bool = False
    """True if sources of weight 0 are built; the greedy rule may draw one sample of them."""

    @property
    def is_framework(self) -> bool:
        return self.request != "exact"

    @property
    def blends_by_size(self) -> bool:
        """True if sources without weights are blended by their sizes, not equally."""
        return self.request in ("megatron", "exact") or self.train_epochs == "reshuffled"

    def default_buffer(self, *, weighted: bool) -> float:
        return self.buffer_weighted if weighted else self.buffer_single

    def samples_requested(
        self, num_samples: int, weight: float, buffer: float, num_sources: int
    ) -> int:
        """Return the samples requested of a source with normalised weight ``weight``."""
        if self.request == "megatron":
            return math.ceil(math.ceil(num_samples * weight) * buffer)
        if self.request == "paddlenlp":
            surplus = 20 if num_sources > 1 else 0
            return math.ceil(num_samples * weight * buffer) + surplus
        return math.ceil(num_samples * weight * buffer)

    def samples_in_epochs(
        self, epochs: Fraction | int, tokens_per_epoch: int, sequence_length: int
    ) -> int:
        """Return the number of samples in ``epochs`` epochs of a source."""
        block = self.epochs_mixed
        return samples_for_epochs(
            epochs if block == 1 else Fraction(epochs) / block,
            block * tokens_per_epoch,
            sequence_length,
            carry_left_over=self.left_over == "carry",
        )

    def epochs_for(self, num_samples: int, tokens_per_epoch: int, sequence_length: int) -> int:
        """Return the epochs built for ``num_samples``; InvalidArgument if ``exact_num_epochs`` have
        fewer samples."""
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
        """Number of epochs built for a single sample."""
        return self.exact_num_epochs or self.epochs_mixed

    def sample_index_dtype(self, num_documents: int, tokens: int, sequence_length: int) -> str:
        """Return the dtype of sample_index for ``num_documents`` entries of document_index."""
        if self.width_rule == "int64":
            return "int64"
        if self.width_rule == "megatron":
            return "int32" if num_documents <= INT32_MAX else "int64"
        return "int32" if 2 * ((tokens - 1) / sequence_length + 1) < INT32_MAX else "int64"

    def split_bounds(self, split: str, num_sequences: int) -> list[tuple[int, int]]:
        """Return the sequences [begin, end) of train, valid and test."""
        if self.split_rule == "neox":
            shares = self.shares(split)
            return _neox_bounds(shares, sum_as(self.python_sum, shares), num_sequences)
        return _megatron_bounds(self.shares(split), num_sequences)

    def shares(self, split: str) -> list[float]:
        """Return the weights of train, valid and test, see `parse_split`."""
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
            train_epochs="repeated",
            weight_alone="always",
            zero_weights=True,
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
        *(
            FrameworkRules(
                order=own,
                framework="megaindex",
                request="exact",
                buffer_weighted=1.0,
                weight_sum="exact",
                left_over="drop",
            )
            for own in ("epoch", "window", "packed")
        ),
    )
}


def framework_rules(order: str) -> FrameworkRules:
    """Return the rules of an order; InvalidArgument if its name is unknown."""
    return FRAMEWORK_RULES[check_choice("order", order, tuple(FRAMEWORK_RULES))]


def sum_as(rule: PythonSum, values: Sequence[float]) -> float:
    """Return ``sum(values)`` as Python rounds it by a rule."""
    if rule == OWN_PYTHON_SUM:
        return sum(values)
    if rule == "plain":
        return functools.reduce(operator.add, values, 0)
    total: Any = 0  # CPython 3.12: Neumaier's sum from the first double on
    error = 0.0
    for value in values:
        if isinstance(total, float) and isinstance(value, float):
            larger, smaller = (total, value) if abs(total) >= abs(value) else (value, total)
            total += value
            error += (larger - total) + smaller
        else:
            total += value
    found: float = total + error if error and math.isfinite(error) else total
    return found


def sums_differ(values: Sequence[float]) -> bool:
    """Return True if the sum of values depends on the version of Python."""
    return sum_as("plain", values) != sum_as("compensated", values)


def parse_split(split: str, order: str = "", name: str = "split") -> list[float]:
    """Return three weights from ``"969,30,1"`` or ``"969/30/1"``; missing ones are 0.

    Megatron-LM reads every sequence of digits and points as a number, whatever separates them.
    GPT-NeoX separates by commas, without any by slashes, and reads the first three numbers.

    Raises:
        InvalidArgument: the text is not up to three non-negative numbers with a positive sum.
    """
    if not isinstance(split, str):
        raise InvalidArgument(f"{name} must be text such as {DEFAULT_SPLIT!r}, got {shown(split)}")
    words = re.findall(r"[.0-9]+", split) if order == "megatron" else re.split(r"[,/]", split)
    if order == "neox":
        words = split.split("," if "," in split else "/")
    try:
        parts = [float(part) for part in words]
    except ValueError:
        parts = []
    if order == "neox":
        parts = parts[: len(SPLITS)]
    parts += [0.0] * (len(SPLITS) - len(parts))
    if len(parts) != len(SPLITS) or not sum(parts) > 0 or min(parts) < 0 or math.isinf(sum(parts)):
        raise InvalidArgument(
            f"{name} must be up to three non-negative numbers with a positive sum, such as "
            f"{DEFAULT_SPLIT!r}, got {split!r}"
        )
    return parts


def _megatron_bounds(weights: Sequence[float], num_sequences: int) -> list[tuple[int, int]]:
    """Round each boundary of the normalised, cumulated weights."""
    values = np.array(weights, np.float64)
    cumulated = [0.0]
    for part in (values / np.sum(values)).tolist():
        cumulated.append(cumulated[-1] + part)
    rounded = [round(bound * float(num_sequences)) for bound in cumulated]
    return list(itertools.pairwise(rounded))


def _neox_bounds(
    weights: Sequence[float], total: float, num_sequences: int
) -> list[tuple[int, int]]:
    """Round each part, then subtract their total excess from every boundary."""
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
    """Return the sequence ids of one epoch, as a range if they are consecutive and given so.

    Args:
        num_sequences: sequences of the dataset.
        name: of the dataset, for messages.
        row: rules for the rounding of a split.
        documents: sequence ids; or
        split: ``"969,30,1"``, with ``subset`` the name of the part.

    Raises:
        InvalidArgument: both are given, ids are out of range or not integers, or none is selected.
    """
    chosen: range | I32
    if split is not None and documents is not None:
        raise InvalidArgument("documents and split must not be given together; give one of them")
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


def check_one_sample(name: str, tokens: int, sequence_length: int, extra: int) -> None:
    """Raise InvalidArgument if the documents have fewer tokens than one sample."""
    if tokens < sequence_length + extra:
        raise InvalidArgument(
            f"{name}: the documents hold {tokens} tokens, one sample needs "
            f"{sequence_length + extra} (sequence_length {sequence_length} + {extra} for the "
            "shifted label); use more documents or a smaller sequence_length"
        )


def check_total(name: str, tokens: int) -> None:
    """Raise InvalidArgument if the epochs have more than 2**63 - 1 tokens."""
    if tokens > INT64_MAX:
        raise InvalidArgument(
            f"{name}: the epochs must have at most 2**63 - 1 tokens, got {tokens}; request fewer"
        )


_COUNTING = np.arange(1 << 15, dtype=np.int32)


def as_range(ids: IntArray) -> range | IntArray:
    """Return consecutive ids as a range, others unchanged."""
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
    for limit in (int(ids.min()), int(ids.max())) if ids.size else ():
        if abs(limit) > INT32_MAX:  # as int32 it could be an id that exists
            raise InvalidArgument(f"documents must be from 0 and below 2**31, got {limit}")
    return np.ascontiguousarray(ids, np.int32)


def _check_inside(chosen: range | I32, num_sequences: int, name: str, part: str) -> None:
    if len(chosen) == 0:
        raise InvalidArgument(
            f"{name}: {part} selects none of the {num_sequences} sequences; select at least one"
        )
    low, high = (
        (chosen.start, chosen.stop - 1)
        if isinstance(chosen, range)
        else (int(chosen.min()), int(chosen.max()))
    )
    if low < 0 or high >= num_sequences:
        raise InvalidArgument(
            f"{name}: documents must be from 0 to {num_sequences - 1}, got "
            f"{low if low < 0 else high}"
        )
