"""Order ``window``: contiguous windows of the ``.bin``, shuffled anew every epoch, without arrays.

Window i of a source holds its tokens ``[i * S, i * S + S + extra)``, across documents; an epoch
serves all of them in the order of a keyed bijection.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np

from megaindex._types import I32, I64
from megaindex.arithmetic import samples_in
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.orders.keyed import Block, BlockOrder
from megaindex.index.spans import Spans
from megaindex.kernels import active


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
class WindowIndex(BlockOrder):
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
        self._check_epochs()

    @cached_property
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

    def extend(self, epochs: int) -> WindowIndex:
        """Return the same order for ``epochs`` epochs; the samples that both hold are the same."""
        return replace(self, num_epochs=epochs)

    def _no_array(self, name: str) -> str:
        return (
            f"order window has no {name}: its windows are cut from the .bin, in an order that is "
            "computed; use locate(sample_ids)"
        )

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
                f"{self.dataset.path_prefix}.idx: {error}; order window needs sequences that "
                "follow each other: write the pair again, or use order epoch"
            ) from None
        return Spans.of_one_source(*runs)

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
                f"{self.dataset.path_prefix}.idx: order window reads the .bin from end to end, its "
                f"sequences must fill bytes 0 to {self.dataset.nbytes}, and they fill {begin} to "
                f"{end}; write the pair again, or use order epoch"
            )
