"""Order ``window``: contiguous windows of the ``.bin``, shuffled anew every epoch, without arrays.

Window i of a source holds its tokens ``[i * S, i * S + S + extra)``, across documents; an epoch
serves all of them in the order of a keyed bijection.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.arithmetic import INT64_MAX, samples_in
from megaindex.index.orders.arrayless import Arrayless
from megaindex.index.orders.keys import order_key
from megaindex.index.orders.requests import distinct, spans_of, without_runs
from megaindex.index.spans import Spans, check_sample_ids
from megaindex.kernels import active
from megaindex.kernels.sizes import ceil_div
from megaindex.kernels.types import I32, I64


class Tokens(Protocol):
    """The part of an IndexedDataset that tells where tokens lie."""

    @property
    def path_prefix(self) -> str: ...
    @property
    def sequence_lengths(self) -> I32: ...
    @property
    def sequence_pointers(self) -> I64: ...
    @property
    def dtype(self) -> np.dtype[Any]: ...
    @property
    def nbytes(self) -> int: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class WindowIndex(Arrayless):
    """Every window once per epoch. Costs no memory, and is ready at once at any size.

    Sequences must follow each other in the ``.bin`` in the order of their numbers, so that their
    pointers are the sums of the lengths before them. Both ends of the file are checked here, each
    sequence when a window touches it.

    Raises:
        FormatError: the sequences do not fill the ``.bin`` from end to end.
        InvalidArgument: a setting is out of range, or the documents hold less than one sample.
    """

    dataset: Tokens
    documents: range
    """Sequence ids of one epoch."""
    sequence_length: int
    seed: int
    source_name: str
    """What the order depends on besides the seed; by default a hash of the content."""
    num_epochs: int = 1
    add_extra_token: int = 1
    order: Literal["window"] = field(default="window", init=False)

    def __post_init__(self) -> None:
        self._check_ends()
        width = self.sequence_length + self.add_extra_token
        if self.tokens_per_epoch < width:
            raise InvalidArgument(
                f"{self.dataset.path_prefix}: an epoch of {self.tokens_per_epoch} tokens holds "
                f"less than one sample of {width}; lower sequence_length"
            )
        if self.num_epochs < 1 or self.num_epochs * self.samples_per_epoch > INT64_MAX:
            raise InvalidArgument(
                f"epochs must be at least 1, and samples fit in 64 bits, got {self.num_epochs}"
            )

    @property
    def num_samples(self) -> int:
        return self.num_epochs * self.samples_per_epoch

    @property
    def samples_per_epoch(self) -> int:
        return samples_in(self.tokens_per_epoch, self.sequence_length, self.add_extra_token)

    @property
    def tokens_left_over(self) -> int:
        """Tokens of all epochs that are not among the first ``sequence_length`` of a sample."""
        per_epoch = self.tokens_per_epoch - self.samples_per_epoch * self.sequence_length
        return self.num_epochs * per_epoch

    @cached_property
    def tokens_per_epoch(self) -> int:
        last = self.documents.stop - 1
        end = self._token_at(last) + int(self.dataset.sequence_lengths[last])
        return end - self._first_token

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        ids = check_sample_ids(sample_ids, self.num_samples)
        if not ids.size:
            return without_runs()
        epoch, served = np.divmod(ids, self.samples_per_epoch)
        window = np.empty_like(ids)
        for e in distinct(epoch):
            mine = epoch == e
            key = order_key(self.seed, e, self.source_name, "samples")
            window[mine] = active().bijection_apply(key, self.samples_per_epoch, served[mine])
        begin = self._first_token + window * self.sequence_length
        return self._spans(begin, begin + self.sequence_length + self.add_extra_token)

    def epochs_for(self, num_samples: int) -> int:
        """Least number of epochs that hold ``num_samples`` samples."""
        return ceil_div(num_samples, self.samples_per_epoch)

    def extend(self, epochs: int) -> WindowIndex:
        """The same order for ``epochs`` epochs; the samples that both hold are the same."""
        return replace(self, num_epochs=epochs)

    def _no_array(self, name: str) -> str:
        return (
            f"order window has no {name}: its windows are cut from the .bin, in an order that is "
            "computed; use locate(sample_ids)"
        )

    def _spans(self, begin: I64, end: I64) -> Spans:
        """Tokens begin[k] to end[k] of the ``.bin``, as runs within sequences."""
        first, last = np.split(self._sequence_at(np.concatenate((begin, end - 1))), 2)
        counts = last - first + 1
        splits = np.concatenate(([0], np.cumsum(counts)))
        row = np.repeat(np.arange(begin.size), counts)
        sequence = np.repeat(first - splits[:-1], counts) + np.arange(splits[-1])
        start = self.dataset.sequence_pointers[sequence] // self.dataset.dtype.itemsize
        stop = start + self.dataset.sequence_lengths[sequence]
        window_end = np.zeros(sequence.size, np.int64)  # at the last run of each window
        window_end[splits[1:] - 1] = end
        self._check_contiguous(sequence, start, stop, window_end)
        low, high = np.maximum(start, begin[row]), np.minimum(stop, end[row])
        keep = low < high  # empty sequences hold no run
        kept_before = np.concatenate(([0], np.cumsum(keep)))
        return spans_of(
            sequence[keep], (low - start)[keep], (high - low)[keep], kept_before[splits]
        )

    def _sequence_at(self, token: I64) -> I64:
        """The last sequence that begins at or before each token, by bisection.

        In place: numpy's searchsorted would copy the pointers, which a file does not align.
        """
        pointers = self.dataset.sequence_pointers
        byte = token * self.dataset.dtype.itemsize
        low = np.full(token.size, self.documents.start)
        high = np.full(token.size, self.documents.stop)
        for _ in range(len(self.documents).bit_length()):
            middle = (low + high) >> 1
            at_or_before = pointers[middle] <= byte
            low, high = np.where(at_or_before, middle, low), np.where(at_or_before, high, middle)
        return low

    @property
    def _first_token(self) -> int:
        return self._token_at(self.documents.start)

    def _token_at(self, sequence: int) -> int:
        return int(self.dataset.sequence_pointers[sequence]) // self.dataset.dtype.itemsize

    def _check_ends(self) -> None:
        begin, last = int(self.dataset.sequence_pointers[0]), len(self.dataset.sequence_lengths) - 1
        size = int(self.dataset.sequence_lengths[last]) * self.dataset.dtype.itemsize
        end = int(self.dataset.sequence_pointers[last]) + size
        if (begin, end) != (0, self.dataset.nbytes):
            raise FormatError(
                f"{self.dataset.path_prefix}.idx: order window reads the .bin from end to end, its "
                f"sequences must fill bytes 0 to {self.dataset.nbytes}, and they fill {begin} to "
                f"{end}; write the pair again, or use order epoch"
            )

    def _check_contiguous(self, sequence: I64, start: I64, stop: I64, window_end: I64) -> None:
        """Each run's sequence must reach the token where the next begins, or the window ends."""
        begins_next = np.append(start[1:], 0)
        apart = np.where(window_end == 0, stop != begins_next, stop < window_end)
        if apart.any():
            k = int(np.flatnonzero(apart)[0])
            raise FormatError(
                f"{self.dataset.path_prefix}.idx: sequence {sequence[k]} ends at token {stop[k]} "
                f"of the .bin, and the next one does not begin there; order window needs sequences "
                "that follow each other: write the pair again, or use order epoch"
            )
