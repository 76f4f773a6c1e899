"""Order ``window``: contiguous windows of the ``.bin``, shuffled in every epoch.

Window i of a source consists of its tokens ``[i * S, i * S + S + extra)``, across documents; an
epoch serves all windows in the order of a keyed bijection.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from megaindex._types import I32, I64
from megaindex.arithmetic import samples_in
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.inverse import ServedTokens, cut_in_samples, join_blocks
from megaindex.index.orders.keyed import Block, BlockOrder
from megaindex.index.spans import Spans
from megaindex.kernels import active


class Tokens(Protocol):
    """Attributes of an IndexedDataset that locate its tokens."""

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


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WindowIndex(BlockOrder):
    """Index of order window: every window once per epoch, without memory or preparation.

    Sequences must lie in the ``.bin`` one after another in the order of their numbers. Both ends of
    the file are checked here, each sequence when a window reads it.

    Raises:
        FormatError: the sequences do not fill the ``.bin``.
        InvalidArgument: a setting is out of range, or the documents have less than one sample.
    """

    dataset: Tokens
    documents: range
    """Sequence ids of one epoch."""
    sequence_length: int
    seed: int
    source_name: str
    """Part of the key of the bijection besides the seed."""
    num_epochs: int = 1
    add_extra_token: int = 1
    order: Literal["window"] = field(default="window", init=False)

    def __post_init__(self) -> None:
        self._check_ends()
        width = self.sequence_length + self.add_extra_token
        if self.tokens_per_epoch < width:
            raise InvalidArgument(
                f"{self.dataset.path_prefix}: an epoch must have at least {width} tokens, one "
                f"sample, got {self.tokens_per_epoch}; lower sequence_length"
            )
        self._check_epochs()

    @cached_property
    def samples_per_epoch(self) -> int:
        return samples_in(self.tokens_per_epoch, self.sequence_length, self.add_extra_token)

    @property
    def tokens_left_over(self) -> int:
        """Number of tokens of all epochs that no sample has as input."""
        per_epoch = self.tokens_per_epoch - self.samples_per_epoch * self.sequence_length
        return self.num_epochs * per_epoch

    @cached_property
    def tokens_per_epoch(self) -> int:
        last = self.documents.stop - 1
        end = self._token_at(last) + int(self.dataset.sequence_lengths[last])
        return end - self._first_token

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """The dataset of the index."""
        return (self.dataset,) if isinstance(self.dataset, IndexedDataset) else ()

    def extend(self, epochs: int) -> WindowIndex:
        """Return the index of ``epochs`` epochs, with the same samples in common epochs."""
        return replace(self, num_epochs=epochs)

    def _no_array(self, name: str) -> str:
        return f"order window has no {name}: its samples are computed; use locate(sample_ids)"

    def _cut(self, _: Block, numbers: I64) -> Spans:
        begins = numbers * self.sequence_length
        begins += self._first_token
        try:
            runs = active().window_spans(
                self.dataset.sequence_pointers,
                self.dataset.sequence_lengths,
                self.dataset.dtype.itemsize,
                self.documents.start,
                self.documents.stop,
                begins,
                begins + (self.sequence_length + self.add_extra_token),
            )
        except InvalidArgument as error:
            raise FormatError(
                f"{self.dataset.path_prefix}.idx: {error}; order window needs contiguous "
                "sequences: write the pair again, or use order epoch"
            ) from None
        return Spans.of_one_source(*runs)

    def served_tokens(self, documents: I64, source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.inverse.served_tokens`."""
        del source
        inside = (documents >= self.documents.start) & (documents < self.documents.stop)
        ids = documents[inside]
        begins = self.dataset.sequence_pointers[ids] // self.dataset.dtype.itemsize
        lengths = self.dataset.sequence_lengths[ids].astype(np.int64)
        run, number, offset, length = cut_in_samples(
            begins - self._first_token, lengths, self.sequence_length
        )
        served = ServedTokens(number, ids[run], offset, length)
        served = served.select(number < self.samples_per_epoch)
        return join_blocks(
            lambda epoch: served._replace(sample=self._serving_order(epoch, served.sample)),
            self.num_epochs,
        )

    @cached_property
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
                f"{self.dataset.path_prefix}.idx: the sequences must fill bytes 0 to "
                f"{self.dataset.nbytes} of the .bin for order window, got {begin} to {end}; write "
                "the pair again, or use order epoch"
            )
