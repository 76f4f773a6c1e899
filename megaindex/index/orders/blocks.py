"""Order ``blocks``: epochs of fixed blocks of whole documents, for stages of several lengths.

An epoch puts its documents in the order of a keyed bijection, that of order ``epoch``, and divides
them into blocks of at least ``block_tokens`` tokens. Each block is cut into samples and served in
the order of a bijection of its own. A stage of another sequence length begins at the next block, so
no token is served twice in an epoch, and blocks not begun are whole documents at any length.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ServedTokens, cut_in_samples, join_blocks, join_served
from megaindex.index.documents import Documents
from megaindex.index.exposures import PassRuns
from megaindex.index.orders.epoch import EpochIndex
from megaindex.index.orders.keyed import Block, BlockOrder
from megaindex.index.spans import Spans
from megaindex.keys.numbers import key_of

MOST_EPOCHS = 2**20
_PARTS = 16
"""Candidates for a bound, on average, in a block; a bound lies up to 1/16 block late."""
_MOST_APART = 64
"""Most documents between two candidates."""


class PassBlocks:
    """Bounds of the blocks of each epoch of a source, computed once and shared by all lengths."""

    def __init__(self, epochs: EpochIndex, block_tokens: int) -> None:
        self.epochs = epochs
        self.block_tokens = block_tokens
        self._starts: dict[int, I64] = {}

    def starts(self, epoch: int) -> I64:
        """Return int64[blocks + 1]: tokens of the epoch before each block, and all of them."""
        if epoch not in self._starts:
            self._starts[epoch] = self._bounds(self.epochs.document_starts(epoch, self.apart))
        return self._starts[epoch]

    @cached_property
    def apart(self) -> int:
        """Documents between two candidates for the bound of a block, a power of two up to 64."""
        documents = len(self.epochs.documents) * self.block_tokens
        wanted = documents // (self.epochs.tokens_per_epoch * _PARTS)
        return min(_MOST_APART, 1 << max(0, wanted.bit_length() - 1))

    def _bounds(self, candidates: I64) -> I64:
        """Return every first candidate at least ``block_tokens`` after the bound before.

        The last block has the tokens that are left, so it may be longer.
        """
        total, bounds = int(candidates[-1]), [0]
        while total - bounds[-1] >= 2 * self.block_tokens:
            at = np.searchsorted(candidates, bounds[-1] + self.block_tokens)
            bound = int(candidates[at])
            if total - bound < self.block_tokens:
                break
            bounds.append(bound)
        return np.array([*bounds, total], np.int64)


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockedIndex(BlockOrder):
    """Index of order blocks: whole epochs of samples of one length.

    Memory is that of order epoch, and 16 bytes a block.

    Raises:
        InvalidArgument: an epoch has 0 samples, or too many epochs are asked for.
    """

    blocks: PassBlocks
    order: Literal["blocks"] = field(default="blocks", init=False)

    def __post_init__(self) -> None:
        if self.num_epochs > MOST_EPOCHS:
            raise InvalidArgument(
                f"order blocks: {self.num_epochs} epochs of {self.tokens_per_epoch} tokens need "
                f"too many tables; draw at most {MOST_EPOCHS} epochs of the source"
            )
        if self.num_samples < 1:
            raise InvalidArgument(
                f"order blocks: a block must have at least {self.sequence_length} tokens and "
                f"{self.add_extra_token} more, one sample, and with block_tokens "
                f"{self.blocks.block_tokens} none has; raise it, or lower sequence_length"
            )

    @property
    def add_extra_token(self) -> int:
        return self.blocks.epochs.add_extra_token

    @property
    def documents(self) -> Documents:
        """Sequence ids of one epoch."""
        return self.blocks.epochs.documents

    @property
    def tokens_per_epoch(self) -> int:
        return self.blocks.epochs.tokens_per_epoch

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """The dataset of the index; empty if it was built from lengths alone."""
        return self.blocks.epochs.datasets

    @cached_property
    def num_samples(self) -> int:
        return int(self._firsts[-1])

    @property
    def samples_per_epoch(self) -> int:
        """Number of samples of the first epoch; others may have some more or less."""
        return int(self._firsts[self._first_blocks[1]])

    @property
    def num_blocks(self) -> int:
        """Number of blocks of all epochs."""
        return int(self._first_blocks[-1])

    @cached_property
    def _first_blocks(self) -> I64:
        """int64[epochs + 1]: blocks before each epoch, and of all epochs."""
        counts = [self.blocks.starts(epoch).size - 1 for epoch in range(self.num_epochs)]
        return np.concatenate(([0], np.cumsum(counts, dtype=np.int64)))

    @cached_property
    def _firsts(self) -> I64:
        """int64[blocks + 1]: samples before each block of all epochs."""
        counts = [self._samples_of(epoch) for epoch in range(self.num_epochs)]
        return np.concatenate(([0], np.cumsum(np.concatenate(counts), dtype=np.int64)))

    @cached_property
    def pass_runs(self) -> PassRuns:
        """The samples in runs of one pass, see `megaindex.index.spans.ShownIndex.pass_runs`."""
        starts = self._firsts[self._first_blocks[:-1]]
        return PassRuns(starts, np.arange(self.num_epochs), self.num_samples)

    def _samples_of(self, epoch: int) -> I64:
        """Return int64[blocks]: samples of each block of an epoch."""
        tokens = np.diff(self.blocks.starts(epoch))
        whole: I64 = np.maximum(tokens - self.add_extra_token, 0) // self.sequence_length
        return whole

    def at_length(self, sequence_length: int) -> BlockedIndex:
        """Return the index of the same blocks in samples of another length."""
        if sequence_length == self.sequence_length:
            return self
        return replace(self, sequence_length=sequence_length)

    def extend(self, epochs: int) -> BlockedIndex:
        """Return the index of ``epochs`` epochs, with the same samples in common epochs."""
        return self if epochs == self.num_epochs else replace(self, num_epochs=epochs)

    def epochs_for(self, num_samples: int) -> int:
        """Return the fewest epochs that have ``num_samples`` samples."""
        epochs = samples = 0
        while samples < num_samples and epochs <= MOST_EPOCHS:
            samples += int(self._samples_of(epochs).sum())
            epochs += 1
        return max(1, epochs)

    def reaching(self, num_samples: int) -> BlockedIndex:
        """Return the index of the epochs that hold ``num_samples`` samples."""
        return self.extend(max(self.num_epochs, self.epochs_for(num_samples)))

    def epochs_read(self, num_samples: int) -> float:
        """Return the epochs that the first ``num_samples`` samples are; 1.5 in mid-second."""
        index = self.extend(self.epochs_for(num_samples))
        before = index.samples_in_epochs(index.num_epochs - 1)
        of_last = index.num_samples - before
        return index.num_epochs - 1 + (num_samples - before) / of_last

    def samples_in_epochs(self, epochs: int) -> int:
        """Return the samples of the first epochs, whether or not the index has as many."""
        return sum(int(self._samples_of(epoch).sum()) for epoch in range(epochs))

    def blocks_begun(self, num_samples: int) -> int:
        """Return the blocks that the first ``num_samples`` samples of the index lie in."""
        return int(np.searchsorted(self._firsts, num_samples))

    def next_block(self, num_samples: int, sequence_length: int) -> tuple[int, int]:
        """Return where a stage of another length goes on after the first samples of the index.

        Returns:
            The first sample of the next block at that length, and the samples of this length that
            are left of the block in progress.
        """
        read = self.reaching(num_samples)
        block = read.blocks_begun(num_samples)
        other = self.at_length(sequence_length).extend(read.num_epochs)
        return other.samples_before(block), read.samples_before(block) - num_samples

    def first_again(self, begin: int, end: int, read: BlockedIndex, first: int, last: int) -> int:
        """Return the first of samples ``begin`` to ``end - 1`` with an input token of ``read``'s.

        ``read`` has the same blocks in samples of another length, of which ``first`` to ``last -
        1`` were served. ``end`` if there is none.
        """
        ours, theirs = self.reaching(end), read.reaching(last)
        stop = min(ours.blocks_begun(end), theirs.blocks_begun(last))
        for number in range(int(ours._block_of(np.array([begin]))[0]), stop):
            served = np.sort(theirs._inputs(number, first, last))
            begins = ours._inputs(number, begin, end)
            at = np.searchsorted(served, begins + self.sequence_length) - 1
            again = (at >= 0) & (np.append(served, 0)[at] + read.sequence_length > begins)
            if again.any():
                return max(begin, ours.samples_before(number)) + int(again.argmax())
        return end

    def _inputs(self, number: int, begin: int, end: int) -> I64:
        """Return the first token, in a block, of each of its samples from ``begin`` to ``end``."""
        first = self.samples_before(number)
        cut = self.shuffled_samples(number)[max(0, begin - first) : max(0, end - first)]
        return cut * self.sequence_length

    def samples_before(self, block: int) -> int:
        """Return the samples of the first ``block`` blocks."""
        return int(self._firsts[block])

    def tokens_before(self, block: int) -> int:
        """Return the tokens of the first ``block`` blocks."""
        epoch, within = self._place_of(block)
        of_epoch = 0 if epoch == self.num_epochs else int(self.blocks.starts(epoch)[within])
        return epoch * self.tokens_per_epoch + of_epoch

    def _block_of(self, ids: I64) -> I64:
        return np.searchsorted(self._firsts, ids, "right") - 1

    def _make_block(self, number: int) -> Block:
        epoch, within = self._place_of(number)
        epochs = self.blocks.epochs
        key = key_of(f"megaindex/{epochs.seed}/{epoch}/{within}/samples/{epochs.source_name}")
        first = self.samples_before(number)
        return Block(number, first, self.samples_before(number + 1) - first, key)

    def _place_of(self, number: int) -> tuple[int, int]:
        """Return the epoch of a block and its number in the epoch."""
        epoch = int(np.searchsorted(self._first_blocks, number, "right")) - 1
        return epoch, number - int(self._first_blocks[epoch])

    def _cut(self, block: Block, numbers: I64) -> Spans:
        epoch, within = self._place_of(block.number)
        begins = numbers * self.sequence_length + self.blocks.starts(epoch)[within]
        ends = begins + (self.sequence_length + self.add_extra_token)
        return self.blocks.epochs.locate_tokens(epoch, begins, ends)

    def served_tokens(self, documents: I64, _source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        return join_blocks(lambda epoch: self._served_of(epoch, documents), self.num_epochs)

    def _served_of(self, epoch: int, documents: I64) -> ServedTokens:
        """Return the samples of the documents in one epoch."""
        document, begins, lengths = self.blocks.epochs.document_places(epoch, documents)
        starts = self.blocks.starts(epoch)
        within = np.searchsorted(starts, begins, "right") - 1
        run, cut, offset, length = cut_in_samples(
            begins - starts[within], lengths, self.sequence_length
        )
        found = ServedTokens(cut, document[run], offset, length)
        block = within[run] + self._first_blocks[epoch]
        parts = []
        for number in np.unique(block).tolist():
            kept = np.flatnonzero((block == number) & (cut < self._block(number).size))
            sample = self._serving_order(number, cut[kept])
            parts.append(found.select(kept)._replace(sample=sample))
        return join_served(parts)
