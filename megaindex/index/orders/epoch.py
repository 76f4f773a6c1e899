"""Orders ``epoch`` and ``window``, computed on demand.

Order ``epoch``: every epoch is a complete pass over the documents. Epoch e concatenates its
documents in the order of a keyed bijection, cuts samples, and serves them in the order of a second
keyed bijection. The keys depend only on (seed, e, source name), so more epochs do not change
earlier ones. With ``epochs_mixed=k`` the same applies to blocks of k epochs.

Order ``window``: window i of a source consists of its tokens ``[i * S, i * S + S + extra)``, across
documents; an epoch serves all windows in the order of a keyed bijection.
"""

from __future__ import annotations

import logging
import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Generic, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, IntArray
from megaindex.arithmetic import (
    INT32_MAX,
    INT64_MAX,
    ceil_div,
    epochs_for,
    samples_in,
    shuffle_dtype,
)
from megaindex.errors import FormatError, InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.array_index import (
    ServedTokens,
    cut_in_samples,
    join_blocks,
    join_served,
    places_among,
)
from megaindex.index.documents import DocumentSubset, sequence_ids
from megaindex.index.exposures import MOST_PASSES, PassRuns
from megaindex.index.frameworks import LeftOver
from megaindex.index.orders.keyed import Block, DocumentOrder, SeededOrder
from megaindex.index.spans import EpochSizes, Spans, join_spans
from megaindex.kernels import active, num_threads

logger = logging.getLogger("megaindex")

STRIDE = 64  # documents between two entries (8 bytes) of the table of a pass
MOST_POSITIONS = 2**62  # of a bijection
WORTH_PREPARING = 1 << 16  # positions; building a smaller table is faster than starting a thread
_KEPT = 3  # tables: of the previous pass (for carried tokens), the current and the next


FetchTable = Callable[[int, int, Callable[[I64], None]], I64]
Key = TypeVar("Key", bound=Hashable)
Table = TypeVar("Table")


class PassTables(Generic[Key, Table]):
    """Tables of the last passes used, built by ``make(block, num_threads)``.

    Safe to share between threads. A forked process starts without tables, because the parent's
    threads that build them do not exist in it.
    """

    def __init__(self, make: Callable[[Key, int], Table], kept: int = _KEPT) -> None:
        self._make = make
        self._kept = kept
        self._reset()

    def _reset(self) -> None:
        self._lock = threading.Lock()
        self._tables: OrderedDict[Key, Future[Table]] = OrderedDict()
        # process, block and table of the last request, which is mostly repeated
        self._latest: tuple[int, Key, Table] | None = None
        self._prepared: tuple[int, Key] | None = None
        self._process = os.getpid()  # set last: other threads test it without the lock

    def get(self, block: Key) -> Table:
        """Return the table of a block; wait if it is being built."""
        process, latest = os.getpid(), self._latest
        if latest is not None and latest[:2] == (process, block):
            return latest[2]
        entry, is_new = self._entry(block)
        if is_new:
            self._fill(block, entry, num_threads())
        table = entry.result()
        self._latest = process, block, table
        return table

    def prepare(self, block: Key) -> None:
        """Begin to build the table of a block in the background, unless it exists."""
        if self._prepared == (os.getpid(), block):
            return
        table, is_new = self._entry(block)
        self._prepared = os.getpid(), block
        if is_new:
            # No daemon: the interpreter must not end before the kernel returns.
            name = f"megaindex-epoch-{block}"
            try:
                threading.Thread(target=self._fill, args=(block, table, 1), name=name).start()
            except RuntimeError as error:  # no more threads; `get` builds the table
                logger.info("%s is not prepared ahead: %s", name, error)
                with self._lock:
                    self._tables.pop(block, None)

    def _entry(self, block: Key) -> tuple[Future[Table], bool]:
        if self._process != os.getpid():
            self._reset()
        with self._lock:
            is_new = block not in self._tables
            if is_new:
                self._tables[block] = Future()
            self._tables.move_to_end(block)
            table = self._tables[block]
            while len(self._tables) > self._kept:
                self._tables.popitem(last=False)
        return table, is_new

    def _fill(self, block: Key, table: Future[Table], threads: int) -> None:
        try:
            table.set_result(self._make(block, threads))
        except BaseException as error:
            with self._lock:
                self._tables.pop(block, None)  # the next call tries again
            table.set_exception(error)


class EpochArrays(NamedTuple):
    """Arrays of one block, as in `megaindex.index.array_index.ArrayIndex`."""

    document_index: I32
    """int32[n]: sequence ids in the order of the pass, after those of carried tokens."""
    sample_index: IntArray
    """int32 or int64 [samples + 1, 2]: position in document_index, offset in the sequence."""
    shuffle_index: IntArray
    """uint32 or int64 [samples]."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class EpochIndex(DocumentOrder):
    """Index of order epoch: every token once per epoch, except those that fill no sample.

    Memory is 8 bytes for every 64 documents of a block, for at most three blocks; reading a block
    starts to build the table of the next one in the background.

    Raises:
        InvalidArgument: a setting is out of range, or an epoch has less than one sample.
    """

    epochs_mixed: int = 1
    """Number of complete epochs shuffled together, a divisor of ``num_epochs``."""
    left_over: LeftOver = "drop"
    """Tokens at the end of a block that fill no sample: dropped, or carried into the next block."""
    without: str = ""
    """File of the sequence ids of the dataset that ``documents`` leaves out, for a description."""
    fetch_table: FetchTable | None = field(default=None, repr=False)
    """Function of the number of a block, the length of its table and a function that fills it,
    which returns the table, perhaps from a cache; None: tables are computed in memory."""
    order: Literal["epoch"] = field(default="epoch", init=False)

    def __post_init__(self) -> None:
        if self.epochs_mixed < 1 or self.num_epochs < 1 or self.num_epochs % self.epochs_mixed:
            raise InvalidArgument(
                f"epochs must be a positive multiple of epochs_mixed {self.epochs_mixed}, got "
                f"{self.num_epochs}"
            )
        width = self.sequence_length + self.add_extra_token
        if self.tokens_per_epoch < width:
            raise InvalidArgument(
                f"an epoch must have at least {width} tokens, one sample, got "
                f"{self.tokens_per_epoch}; lower sequence_length"
            )
        if self._positions > MOST_POSITIONS or self.total_tokens > INT64_MAX:
            raise InvalidArgument(
                f"{self.num_epochs} epochs of {len(self.documents)} documents and "
                f"{self.tokens_per_epoch} tokens cannot be counted in 64 bits; use fewer epochs"
            )

    @cached_property
    def num_samples(self) -> int:
        return self.samples_before(self.num_blocks)

    @property
    def num_blocks(self) -> int:
        """Number of blocks of ``epochs_mixed`` epochs."""
        return self.num_epochs // self.epochs_mixed

    @property
    def tokens_per_block(self) -> int:
        return self.epochs_mixed * self.tokens_per_epoch

    @property
    def total_tokens(self) -> int:
        return self.num_epochs * self.tokens_per_epoch

    @property
    def tokens_left_over(self) -> int:
        """Number of tokens of all epochs that no sample has as input."""
        return self.total_tokens - self.num_samples * self.sequence_length

    def samples_before(self, block: int) -> int:
        """Return the samples of the first ``block`` blocks, in which they end."""
        S, extra = self.sequence_length, self.add_extra_token
        if self.left_over == "carry":
            return samples_in(block * self.tokens_per_block, S, extra)
        return block * samples_in(self.tokens_per_block, S, extra)

    def epoch_sizes(self) -> EpochSizes:
        """Return the samples of an epoch, see `megaindex.index.spans.epoch_sizes`."""
        S, whole = self.sequence_length, self.left_over == "drop"
        samples = self.samples_before(1) if whole else Fraction(self.tokens_per_block, S)
        return {(0, S): samples / Fraction(self.epochs_mixed)}

    @cached_property
    def pass_runs(self) -> PassRuns:
        """The samples in runs of one pass, see `megaindex.index.spans.ShownIndex.pass_runs`.

        The sample that begins with carried tokens belongs to the pass before.
        """
        if self.left_over == "drop" or self.epochs_mixed > 1 or self.num_epochs > MOST_PASSES:
            return super().pass_runs
        runs = []
        for block in range(self.num_epochs):
            first = self.samples_before(block)
            runs.append((first, block))
            if self.carried(block):
                at = int(self._serving_order(block, np.zeros(1, np.int64))[0])
                runs += [(at, block - 1), (at + 1, block)]
        starts, passes = np.array(runs, np.int64).T
        return PassRuns(starts.copy(), passes.copy(), self.num_samples)

    def carried(self, block: int) -> int:
        """Return the tokens carried into a block from the one before."""
        if self.left_over == "drop":
            return 0
        return block * self.tokens_per_block - self.samples_before(block) * self.sequence_length

    def epochs_for(self, num_samples: int) -> int:
        """Return the epochs of the fewest blocks that have ``num_samples`` samples."""
        if self.left_over == "carry":
            S, extra = self.sequence_length, self.add_extra_token
            return self.epochs_mixed * epochs_for(num_samples, self.tokens_per_block, S, extra)
        return self.epochs_mixed * ceil_div(num_samples, self.samples_before(1))

    def permuted_documents(self, block: int) -> I32:
        """Return int32[epochs_mixed * documents]: sequence ids in the order of a pass."""
        positions = np.empty(self._positions, np.int64)
        active().bijection_range(self._document_key(block), self._positions, 0, positions)
        # epochs that are mixed are one permutation over copies of the documents
        positions %= len(self.documents)
        return self._sequence_ids(positions).astype(np.int32)

    def materialise(self, epoch: int) -> EpochArrays:
        """Return the arrays of the block of an epoch, in the format of the framework orders.

        Raises:
            OutOfRange: ``epoch`` is not from 0 to ``num_epochs - 1``.
        """
        if not 0 <= epoch < self.num_epochs:
            raise OutOfRange(f"epoch must be from 0 to {self.num_epochs - 1}, got {epoch}")
        block = epoch // self.epochs_mixed
        document_index, skipped = self._documents_read(block)
        # The first document is cut as if it began at its first carried token.
        lengths = self.sequence_lengths[document_index]
        lengths[0] -= skipped
        num_samples = self.samples_before(block + 1) - self.samples_before(block)
        wide = document_index.size > INT32_MAX
        sample_index = np.empty((num_samples + 1, 2), np.int64 if wide else np.int32)
        active().cut_samples(
            lengths,
            np.arange(document_index.size, dtype=np.int32),
            self.sequence_length,
            self.add_extra_token,
            num_samples,
            int(lengths.sum(dtype=np.int64)),
            sample_index,
            num_threads(),
        )
        sample_index[sample_index[:, 0] == 0, 1] += skipped
        shuffle_index = self.shuffled_samples(block).astype(shuffle_dtype(num_samples))
        return EpochArrays(document_index, sample_index, shuffle_index)

    def _documents_read(self, block: int) -> tuple[I32, int]:
        """Return document_index of a block, and the tokens skipped in its first document.

        With 5 carried tokens, after a block that ends in documents of 7, 3 and 4 tokens, those of 3
        and 4 come first, and 2 tokens of the former are skipped.
        """
        documents, carried = self.permuted_documents(block), self.carried(block)
        if carried == 0:
            return documents, 0
        before = self.permuted_documents(block - 1)
        # from the end, since carried tokens are the last of the block before
        tail = np.cumsum(self.sequence_lengths[before[::-1]], dtype=np.int64)
        count = int(np.searchsorted(tail, carried)) + 1
        return np.concatenate((before[-count:], documents)), int(tail[count - 1]) - carried

    def _no_array(self, name: str) -> str:
        return f"{super()._no_array(name)}, or materialise(epoch) for the arrays of one epoch"

    def _block_of(self, ids: I64) -> I64:
        if self.left_over == "drop":
            return ids // self.samples_before(1)
        # a sample belongs to the block in which it ends, label included
        last_token = ids * self.sequence_length + (self.sequence_length + self.add_extra_token - 1)
        return last_token // self.tokens_per_block

    def _cut(self, block: Block, numbers: I64) -> Spans:
        begins = numbers * self.sequence_length
        carried = self.carried(block.number)
        if carried:
            begins -= carried
            if (before := begins < 0).any():
                return self._with_carried(block.number, begins, before)
        return self._passed(block.number, begins)

    def served_tokens(self, documents: I64, _source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        local = self._places_of(documents)
        served = join_blocks(lambda block: self._served_of(block, local), self.num_blocks)
        return served._replace(document=self._sequence_ids(served.document))

    def document_places(self, block: int, documents: I64) -> tuple[I64, I64, I64]:
        """Return sequence ids, first tokens and lengths of documents in a pass, int64[n] each."""
        local, begins, lengths = self._local_places(block, self._places_of(documents))
        return self._sequence_ids(local), begins, lengths

    def _local_places(self, block: int, local: I64) -> tuple[I64, I64, I64]:
        count = len(self.documents)
        entries = (local + np.arange(self.epochs_mixed)[:, None] * count).reshape(-1)
        key, table = self._document_key(block), self._tables.get(block)
        begins = active().epoch_begins(
            key, self._lengths, self.epochs_mixed, STRIDE, table, entries, num_threads()
        )
        document = np.tile(local, self.epochs_mixed)
        return document, begins, self._lengths[document].astype(np.int64)

    def _served_of(self, block: int, local: I64) -> ServedTokens:
        """Return the samples of the documents in one pass, which may end in the next block."""
        document, begins, lengths = self._local_places(block, local)
        run, number, offset, length = cut_in_samples(
            begins + self.carried(block), lengths, self.sequence_length
        )
        end = self.samples_before(block + 1) - self.samples_before(block)
        following = np.flatnonzero(number >= end)  # these tokens are dropped or carried
        own = np.flatnonzero(number < end)
        served = ServedTokens(number, document[run], offset, length)
        parts = [served.select(own)._replace(sample=self._serving_order(block, number[own]))]
        if self.left_over == "carry" and block + 1 < self.num_blocks:
            sample = self._serving_order(block + 1, np.zeros(following.size, np.int64))
            parts.append(served.select(following)._replace(sample=sample))
        return join_served(parts)

    def _with_carried(self, block: int, begins: I64, before: npt.NDArray[np.bool_]) -> Spans:
        """Locate samples of which some are the first one, which begins in the block before.

        With blocks of 10 tokens, tokens -2 to 3 are 8 to 10 of the block before, and 0 to 3.
        """
        heads, others = np.flatnonzero(before), np.flatnonzero(~before)
        size, width = self.tokens_per_block, self.sequence_length + self.add_extra_token
        begin = begins[heads[:1]]
        tail = self.locate_tokens(block - 1, begin + size, np.array([size]))
        rest = self.locate_tokens(block, np.zeros(1, np.int64), begin + width)
        _, document, offset, length = (
            np.concatenate(pair) for pair in zip(tail, rest, strict=True)
        )
        first = Spans.of_one_source(document, offset, length, np.array([0, document.size]))
        pieces = [(heads[k : k + 1], first) for k in range(heads.size)]
        return join_spans([*pieces, (others, self._passed(block, begins[others]))], begins.size)

    def _passed(self, block: int, begins: I64) -> Spans:
        """Locate the samples of a pass that begin at these tokens."""
        ends = begins + (self.sequence_length + self.add_extra_token)
        return self.locate_tokens(block, begins, ends)

    def locate_tokens(self, block: int, begins: I64, ends: I64) -> Spans:
        """Return the spans of tokens begins[k] to ends[k] of a pass, int64[n] each."""
        local, offset, length, splits = active().epoch_spans(
            self._document_key(block),
            self._lengths,
            self.epochs_mixed,
            STRIDE,
            self._table(block),
            begins,
            ends,
        )
        return Spans.of_one_source(self._sequence_ids(local), offset, length, splits)

    @property
    def _positions(self) -> int:
        return self.epochs_mixed * len(self.documents)

    def _table(self, block: int) -> I64:
        table = self._tables.get(block)
        if block + 1 < self.num_blocks and self._positions >= WORTH_PREPARING:
            self._tables.prepare(block + 1)
        return table

    @cached_property
    def _tables(self) -> PassTables[int, I64]:
        return PassTables(self._make_table)

    def document_starts(self, block: int, stride: int) -> I64:
        """Return the tokens of a pass before every ``stride``-th document, and all of them."""
        if stride == STRIDE:
            return self._tables.get(block)
        starts = np.empty(ceil_div(self._positions, stride) + 1, np.int64)
        key = self._document_key(block)
        active().epoch_starts(key, self._lengths, self.epochs_mixed, stride, starts, num_threads())
        return starts

    def _make_table(self, block: int, num_threads: int) -> I64:
        def fill(table: I64) -> None:
            key = self._document_key(block)
            active().epoch_starts(key, self._lengths, self.epochs_mixed, STRIDE, table, num_threads)

        size = ceil_div(self._positions, STRIDE) + 1
        if self.fetch_table is not None:
            return self.fetch_table(block, size, fill)
        table = np.empty(size, np.int64)
        fill(table)
        return table


class _TokenLine(NamedTuple):
    """Tokens one after another that windows cut: arguments of the kernel ``window_spans``."""

    pointers: I64
    """Byte at which each document begins."""
    lengths: I32
    item_size: int
    first: int
    """First document."""
    stop: int

    @property
    def begin(self) -> int:
        """First token, of all of the ``.bin``."""
        return int(self.pointers[self.first]) // self.item_size

    @property
    def tokens(self) -> int:
        last = self.stop - 1
        return int(self.pointers[last]) // self.item_size + int(self.lengths[last]) - self.begin


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class WindowIndex(SeededOrder):
    """Index of order window: every window once per epoch.

    Of a range of documents it needs neither memory nor preparation: sequences must lie in the
    ``.bin`` one after another in the order of their numbers. Both ends of the file are checked
    here, each sequence when a window reads it. Of a subset, windows cut its documents in their
    order, and their lengths and first tokens are kept, 12 bytes a document.

    Raises:
        FormatError: the sequences do not fill the ``.bin``.
        InvalidArgument: a setting is out of range, or the documents have less than one sample.
    """

    dataset: IndexedDataset
    documents: range | DocumentSubset
    """Sequence ids of one epoch."""
    order: Literal["window"] = field(default="window", init=False)

    def __post_init__(self) -> None:
        if isinstance(self.documents, range):
            self._check_ends()
        width = self.sequence_length + self.add_extra_token
        if self.tokens_per_epoch < width:
            raise InvalidArgument(
                f"{self.dataset.path_prefix}: an epoch must have at least {width} tokens, one "
                f"sample, got {self.tokens_per_epoch}; lower sequence_length"
            )
        super().__post_init__()

    @cached_property
    def _line(self) -> _TokenLine:
        data, documents = self.dataset, self.documents
        if isinstance(documents, range):
            return _TokenLine(
                data.sequence_pointers,
                data.sequence_lengths,
                data.dtype.itemsize,
                documents.start,
                documents.stop,
            )
        lengths = documents.lengths(data.sequence_lengths)
        pointers = np.concatenate(([0], np.cumsum(lengths[:-1], dtype=np.int64)))
        return _TokenLine(pointers, lengths, 1, 0, lengths.size)

    @cached_property
    def samples_per_epoch(self) -> int:
        return samples_in(self.tokens_per_epoch, self.sequence_length, self.add_extra_token)

    @property
    def tokens_left_over(self) -> int:
        """Number of tokens of all epochs that no sample has as input."""
        per_epoch = self.tokens_per_epoch - self.samples_per_epoch * self.sequence_length
        return self.num_epochs * per_epoch

    @property
    def tokens_per_epoch(self) -> int:
        return self._line.tokens

    @property
    def datasets(self) -> tuple[IndexedDataset, ...]:
        """The dataset of the index."""
        return (self.dataset,)

    def _cut(self, _: Block, numbers: I64) -> Spans:
        begins = numbers * self.sequence_length
        begins += self._line.begin
        ends = begins + (self.sequence_length + self.add_extra_token)
        try:
            documents, *runs = active().window_spans(*self._line, begins, ends)
        except InvalidArgument as error:
            raise FormatError(
                f"{self.dataset.path_prefix}.idx: {error}; order window needs contiguous "
                "sequences: write the pair again, or use order epoch"
            ) from None
        if isinstance(self.documents, DocumentSubset):
            documents = self.documents.sequence_ids(documents)
        return Spans.of_one_source(documents, *runs)

    def served_tokens(self, documents: I64, _source: int = 0) -> ServedTokens:
        """Return where documents are input, see `megaindex.index.array_index.served_tokens`."""
        line, places = self._line, places_among(self.documents, documents, len(self.dataset))
        ids, places = sequence_ids(self.documents, places), places + line.first
        run, number, offset, length = cut_in_samples(
            line.pointers[places] // line.item_size - line.begin,
            line.lengths[places].astype(np.int64),
            self.sequence_length,
        )
        served = ServedTokens(number, ids[run], offset, length)
        served = served.select(number < self.samples_per_epoch)
        return join_blocks(
            lambda epoch: served._replace(sample=self._serving_order(epoch, served.sample)),
            self.num_epochs,
        )

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
