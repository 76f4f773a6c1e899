"""Order ``epoch``: each epoch a complete pass, in an order that is computed and never stored.

Epoch e reads its documents in the order of one keyed bijection, cuts samples from their
concatenation, and serves the samples in the order of another. Both keys come from (seed, e, source
name) alone, so more epochs never change what came before. With ``epochs_mixed=k`` all this holds
for blocks of k complete epochs.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.index.arithmetic import INT64_MAX, epochs_for, samples_in
from megaindex.index.orders.arrayless import Arrayless
from megaindex.index.orders.keys import order_key
from megaindex.index.orders.materialise import EpochArrays, materialise
from megaindex.index.orders.passes import PassTables
from megaindex.index.orders.requests import Requests, distinct, in_order, without_runs
from megaindex.index.spans import Spans, check_sample_ids
from megaindex.kernels import active
from megaindex.kernels.sizes import ceil_div
from megaindex.kernels.types import I32, I64

STRIDE = 64  # documents between two entries of a pass's table: 8 bytes for 64 documents
MOST_POSITIONS = 2**62  # of a bijection
WORTH_PREPARING = 1 << 16  # positions: a smaller table is made faster than a thread is started

LeftOver = Literal["drop", "carry"]


@dataclass(frozen=True, kw_only=True, eq=False)
class EpochIndex(Arrayless):
    """Every token once per epoch, but for what does not fill a sample.

    Samples of block b are numbers ``samples_before(b)`` to ``samples_before(b + 1) - 1``. Memory:
    8 bytes for every 64 documents of a block, for at most three blocks; the next block's table is
    made in the background as soon as a block is read, unless it is small.

    Raises:
        InvalidArgument: a setting is out of range, or an epoch holds less than one sample.
    """

    sequence_lengths: I32
    """int32[sequences]: of the dataset, shared with it."""
    documents: range | I32
    """Sequence ids of one epoch."""
    tokens_per_epoch: int
    sequence_length: int
    seed: int
    source_name: str
    """What the order depends on besides the seed; by default a hash of the content."""
    num_epochs: int = 1
    epochs_mixed: int = 1
    """Complete epochs shuffled together; ``num_epochs`` is a multiple of it."""
    left_over: LeftOver = "drop"
    """The tokens at the end of a block that fill no sample: dropped and counted, or carried into
    the next block, whose first sample then begins with them."""
    add_extra_token: int = 1
    order: Literal["epoch"] = field(default="epoch", init=False)

    def __post_init__(self) -> None:
        if self.left_over not in ("drop", "carry"):
            raise InvalidArgument(f"left_over must be drop or carry, got {self.left_over!r}")
        if self.epochs_mixed < 1 or self.num_epochs < 1 or self.num_epochs % self.epochs_mixed:
            raise InvalidArgument(
                f"epochs must be a positive multiple of epochs_mixed {self.epochs_mixed}, got "
                f"{self.num_epochs}: blocks are complete, so that more epochs change nothing"
            )
        width = self.sequence_length + self.add_extra_token
        if self.tokens_per_epoch < width:
            raise InvalidArgument(
                f"an epoch of {self.tokens_per_epoch} tokens holds less than one sample of {width}"
            )
        if self._positions > MOST_POSITIONS or self.total_tokens > INT64_MAX:
            raise InvalidArgument(
                f"{self.num_epochs} epochs of {len(self.documents)} documents and "
                f"{self.tokens_per_epoch} tokens cannot be counted in 64 bits; use fewer"
            )

    @property
    def num_samples(self) -> int:
        return self.samples_before(self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Blocks of ``epochs_mixed`` epochs."""
        return self.num_epochs // self.epochs_mixed

    @property
    def tokens_per_block(self) -> int:
        return self.epochs_mixed * self.tokens_per_epoch

    @property
    def total_tokens(self) -> int:
        return self.num_epochs * self.tokens_per_epoch

    @property
    def tokens_left_over(self) -> int:
        """Tokens of all epochs that are not among the first ``sequence_length`` of a sample."""
        return self.total_tokens - self.num_samples * self.sequence_length

    def samples_before(self, block: int) -> int:
        """Samples of the first ``block`` blocks. A sample belongs to the block it ends in."""
        S, extra = self.sequence_length, self.add_extra_token
        if self.left_over == "carry":
            return samples_in(block * self.tokens_per_block, S, extra)
        return block * samples_in(self.tokens_per_block, S, extra)

    def carried(self, block: int) -> int:
        """Tokens before the block that its first sample begins with."""
        if self.left_over == "drop":
            return 0
        return block * self.tokens_per_block - self.samples_before(block) * self.sequence_length

    def epochs_for(self, num_samples: int) -> int:
        """Epochs of the least number of blocks that hold ``num_samples`` samples."""
        if self.left_over == "carry":
            S, extra = self.sequence_length, self.add_extra_token
            return self.epochs_mixed * epochs_for(num_samples, self.tokens_per_block, S, extra)
        return self.epochs_mixed * ceil_div(num_samples, self.samples_before(1))

    def extend(self, epochs: int) -> EpochIndex:
        """The same order for ``epochs`` epochs; the samples that both hold are the same."""
        return replace(self, num_epochs=epochs)

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        ids = check_sample_ids(sample_ids, self.num_samples)
        if not ids.size:
            return without_runs()
        block = self._block_of(ids)
        begin = np.empty_like(ids)
        for b in distinct(block):
            mine = block == b
            begin[mine] = self.begins(b, ids[mine] - self.samples_before(b))
        width = self.sequence_length + self.add_extra_token
        return self._spans(Requests.split(block, begin, begin + width, self.tokens_per_block))

    def begins(self, block: int, served: I64) -> I64:
        """First tokens of the samples served as number 0, 1, … of a block, counted from the
        block's first token: negative where a sample begins in the block before."""
        first = self.samples_before(block)
        count = self.samples_before(block + 1) - first
        key = order_key(self.seed, block, self.source_name, "samples")
        cut = active().bijection_apply(key, count, served)
        return cut * self.sequence_length - self.carried(block)

    def passed(self, block: int, begins: I64, ends: I64) -> tuple[I64, I64, I64, I64]:
        """(sequence, offset, length, splits) of tokens begins[k] to ends[k] of a block's pass."""
        key, lengths = self._document_key(block), self._lengths
        table = self._tables.get(block)
        local, offset, length, splits = active().epoch_spans(
            key, lengths, self.epochs_mixed, STRIDE, table, begins, ends
        )
        return self._sequence_ids(local), offset, length, splits

    def shuffled_samples(self, block: int) -> I64:
        """int64[samples]: which sample, in the order of the pass, is served as number 0, 1, …"""
        first = self.samples_before(block)
        shuffled = np.empty(self.samples_before(block + 1) - first, np.int64)
        key = order_key(self.seed, block, self.source_name, "samples")
        active().bijection_range(key, shuffled.size, 0, shuffled)
        return shuffled

    def permuted_documents(self, block: int) -> I32:
        """int32[epochs_mixed * documents]: sequence ids in the order of a block's pass."""
        positions = np.empty(self._positions, np.int64)
        active().bijection_range(self._document_key(block), self._positions, 0, positions)
        positions %= len(self.documents)
        return self._sequence_ids(positions).astype(np.int32)

    def materialise(self, epoch: int) -> EpochArrays:
        """The three arrays of the block that holds ``epoch``, as the framework orders keep them."""
        if not 0 <= epoch < self.num_epochs:
            raise OutOfRange(f"epoch {epoch} was asked for, there are 0 to {self.num_epochs - 1}")
        return materialise(self, epoch // self.epochs_mixed)

    def _no_array(self, name: str) -> str:
        return (
            f"order epoch keeps no {name}: it is computed, epoch by epoch; use locate(sample_ids), "
            "or materialise(epoch) for the three arrays of one epoch"
        )

    def _block_of(self, ids: I64) -> I64:
        if self.left_over == "drop":
            return ids // self.samples_before(1)
        last_token = ids * self.sequence_length + (self.sequence_length + self.add_extra_token - 1)
        return last_token // self.tokens_per_block

    def _spans(self, requests: Requests) -> Spans:
        parts = []
        for block in distinct(requests.block):
            mine = np.flatnonzero(requests.block == block)
            parts.append((mine, self.passed(block, requests.begin[mine], requests.end[mine])))
            if block + 1 < self.num_blocks and self._positions >= WORTH_PREPARING:
                self._tables.prepare(block + 1)
        return in_order(parts, requests.row_splits)

    def _sequence_ids(self, local: I64) -> I64:
        if isinstance(self.documents, range):
            return local + self.documents.start
        return self.documents[local].astype(np.int64)

    def _document_key(self, block: int) -> npt.NDArray[np.uint64]:
        return order_key(self.seed, block, self.source_name, "documents")

    @property
    def _positions(self) -> int:
        return self.epochs_mixed * len(self.documents)

    @cached_property
    def _lengths(self) -> I32:
        """Of the documents of one epoch; a copy only where they are no range."""
        if isinstance(self.documents, range):
            return self.sequence_lengths[self.documents.start : self.documents.stop]
        return self.sequence_lengths[self.documents]

    @cached_property
    def _tables(self) -> PassTables:
        return PassTables(self._make_table)

    def _make_table(self, block: int, num_threads: int) -> I64:
        table = np.empty(-(-self._positions // STRIDE) + 1, np.int64)
        key = self._document_key(block)
        active().epoch_starts(key, self._lengths, self.epochs_mixed, STRIDE, table, num_threads)
        return table

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in vars(self).items() if name != "_tables"}
