"""Batches of one rank, read ahead by threads: no worker processes, nothing to pickle.

loader = Loader(index, dataset, sampler, options=SampleOptions(eod_id=0, eod_mask_loss=True))
for batch in loader:
    train(batch["tokens"], batch["labels"], batch["loss_mask"], batch["position_ids"])
checkpoint["data"] = loader.state_dict()
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal

import torch

from megaindex._types import IntArray
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.block_receipts import BlockReceipts
from megaindex.index.spans import Index
from megaindex.loader.batch import BatchMaker, SampleOptions
from megaindex.loader.batch_reader import Batch, BatchReader, BufferPool, DeviceCopies, Prepared
from megaindex.loader.checkpoint import (
    Contents,
    check_content,
    check_contents,
    contents,
    order_facts,
    source_names,
    stored_contents,
)
from megaindex.loader.prefetch import ReadAhead
from megaindex.loader.reader_choice import any_remote, as_datasets, make_reader
from megaindex.loader.receipts import Counted, Recorder, rounds_of, stored_receipt
from megaindex.loader.targets import Targets
from megaindex.loader.token_readers import TokenReader
from megaindex.validation import CheckpointReader, check_between

VERSION = 1


class Loader:
    """Iterates over the batches of one rank, dicts of tensors with the fields of `BatchMaker`.

    A batch is its receiver's for as long as any tensor of it, or a view of one, is alive; then its
    memory is filled anew. Batches may be kept and changed at will.

    Batches that are read ahead are not counted: `state_dict` stands after the batch that was
    returned last. One iteration runs at a time; a new one ends the one before. With a sampler that
    has a state, it goes on after the batch that was returned last, and none begins where the run
    is over. Any other sampler is iterated anew. An error is raised where its batch would have been,
    and again by the iteration it ended; a new one asks for that batch again.

    Args:
        index: what to read in which order.
        datasets: the index's sources, in its order; one may be given by itself.
        sampler: yields lists of sample ids, None for a row of padding: `MicroBatchSampler` and its
            kin. Any iterable will do, without `state_dict`.
        options: of the samples.
        reader: ``mapped``, ``positional``, ``auto`` which times both, or a `TokenReader`. Objects
            are read by position.
        read_ahead: batches ready or being prepared; 0 prepares each when it is asked for. Default:
            4, or 16 if a dataset lies in an object store, where each read is waited for.
        num_threads: threads that prepare batches. Default: 2, or as many as those 16.
        bytes_ahead: bound of all those batches together, which lowers ``read_ahead``.
        pin_memory: return batches in page-locked memory. Copies to a device may be asked for
            and the batch dropped; it is written again once the device is idle. ``device`` is
            better.
        device: where batches are returned. On CUDA they are copied ahead of their use, on a
            stream of their own.
        recorder: adds up receipts of the samples returned, of one of the sampler's ranks.
        restore_fields: write the fields again before each use that hold the same in every batch,
            but that a batch's receiver may have changed in place. False saves that time where
            batches are not written to.
        targets: of the sources that are instruction data.
        content: what of the tokens a checkpoint covers: ``sampled``, 256 KiB of each source at
            fixed places; ``whole``, all of them, too; None: their lengths alone. Labels and loss
            masks are covered whole, unless it is None. It is read when the loader is made, or with
            the first checkpoint where sources are opened later; see `content_fingerprint`.

    Raises:
        InvalidArgument: an argument is out of range, or the datasets are not those of the index.
        StorageError: a source cannot be read.
    """

    def __init__(
        self,
        index: Index,
        datasets: IndexedDataset | Sequence[IndexedDataset],
        sampler: Iterable[Sequence[int | None]],
        *,
        options: SampleOptions | None = None,
        reader: str | TokenReader = "auto",
        read_ahead: int | None = None,
        num_threads: int | None = None,
        bytes_ahead: int = 1 << 30,
        pin_memory: bool = False,
        device: torch.device | str | None = None,
        recorder: Recorder | None = None,
        restore_fields: bool = True,
        targets: Targets | None = None,
        content: Literal["sampled", "whole"] | None = "sampled",
    ) -> None:
        given = as_datasets(datasets)
        check_content(content)
        waits = any_remote(given)
        default = 16 if waits else 4
        read_ahead = check_between("read_ahead", default if read_ahead is None else read_ahead, 0)
        default = max(1, read_ahead) if waits else 2
        num_threads = check_between(
            "num_threads", default if num_threads is None else num_threads, 1
        )
        bytes_ahead = check_between("bytes_ahead", bytes_ahead, 1)
        self._sampler: Any = sampler
        self._has_state = all(hasattr(sampler, n) for n in ("state_after", "load_state_dict"))
        self._recorder = recorder
        if recorder is not None and recorder.ranks is None:
            recorder.ranks = getattr(sampler, "ranks", None)
        self._reader = make_reader(given, reader) if isinstance(reader, str) else reader
        fingerprints = None if recorder is None else recorder.state_dict()["fingerprints"]
        maker = BatchMaker(index, self._reader, options, fingerprints=fingerprints, targets=targets)
        copies = None if device is None else _copies(device)
        self._source = BatchReader(
            maker,
            make_pool=partial(
                BufferPool,
                keep=read_ahead + num_threads + 2,
                pin=pin_memory or (copies is not None and copies.asynchronous),
                restore=restore_fields,
            ),
            copies=copies,
        )
        self._read_ahead, self._num_threads = read_ahead, num_threads
        self._bytes_ahead = bytes_ahead
        self._index = index
        self._content, self._sources, self._targets = content, given, targets
        if self._has_state and all(dataset.is_open for dataset in given):
            _ = self._contents
        self._iteration = 0
        self._returned = 0
        """Batches since the sampler's start."""
        self._is_over = False
        """True once an iteration came to the end of the run."""
        self._ahead: ReadAhead[Any, Any] | None = None

    @property
    def reader(self) -> TokenReader:
        """The reader of tokens; `AutoTokens.choice` is what ``auto`` chose."""
        return self._reader

    @property
    def consumed_samples(self) -> int:
        """Samples served on all ranks together, as ``consumed_samples`` of the state.

        Raises:
            InvalidArgument: the sampler has no state.
        """
        return int(self._sampler_state()["consumed_samples"])

    def __len__(self) -> int:
        """Batches from the place on where the last iteration began."""
        return len(self._sampler)

    def __iter__(self) -> Iterator[Batch]:
        if self._is_over:
            raise InvalidArgument(
                "the run is over: every batch of its sampler was handed over; give the sampler "
                "more samples, from an order of more epochs, or load a state"
            )
        state = self._sampler_state() if self._has_state and self._returned else None
        self._restart()
        if state is not None:
            self._sampler.load_state_dict(state)
        return _Iteration(self._batches(self._iteration))

    def _restart(self) -> None:
        self._iteration += 1
        self._returned = 0
        self._is_over = False
        if self._ahead is not None:
            self._ahead.close(0)
            self._ahead = None

    def _batches(self, iteration: int) -> Iterator[Batch]:
        rounds = rounds_of(self._sampler)
        for prepared in self._prepared():
            if self._iteration != iteration:
                raise InvalidArgument(
                    "this iteration has ended: another one was begun, or a state was loaded; "
                    "iterate over the loader anew"
                )
            batch = self._source.release(prepared)
            self._returned += 1
            if self._recorder is not None:
                self._recorder.add_rows(batch.pop("receipt").numpy(), next(rounds))
            yield batch
            del prepared, batch  # not held while the next is waited for
        if self._iteration == iteration:
            self._is_over = self._has_state

    def _prepared(self) -> Iterator[Prepared]:
        """Batches that are ready, in order."""
        tasks = iter(self._sampler)
        first = next(tasks, None)
        if first is None:
            return
        source = self._source  # threads must not keep the loader alive
        every = itertools.chain([first], tasks)
        depth = min(self._read_ahead, max(1, self._bytes_ahead // source.nbytes(len(first))))
        if depth == 0:
            yield from map(source.prepare, every)
            return
        with ReadAhead(every, source.prepare, depth=depth, threads=self._num_threads) as ahead:
            self._ahead = ahead
            yield from ahead

    def state_dict(self) -> dict[str, Any]:
        """Return the place of this rank, after the batch that was returned last: JSON values.

        ``sampler`` is the same on all ranks that got equally many batches, ``receipt`` is each
        rank's own.

        Raises:
            InvalidArgument: the sampler has no state.
        """
        state = self._sampler_state()
        return {
            "version": VERSION,
            "consumed_samples": state["consumed_samples"],
            "sampler": state,
            "order": order_facts(self._index, state["consumed_samples"]),
            "content": None
            if self._contents is None
            else [each.to_dict() for each in self._contents],
            "receipt": None if self._recorder is None else self._recorder.state_dict(),
        }

    def _sampler_state(self) -> dict[str, Any]:
        """Return the sampler's state after the batch that was returned last."""
        state_after = getattr(self._sampler, "state_after", None)
        if state_after is None:
            raise InvalidArgument(
                f"a sampler of type {type(self._sampler).__name__} has no state_after, so this "
                "loader has no state; use MicroBatchSampler or one of its kin"
            )
        state: dict[str, Any] = state_after(self._returned)
        return state

    @cached_property
    def _contents(self) -> list[Contents] | None:
        if self._content is None:
            return None
        return contents(self._sources, self._targets, whole=self._content == "whole")

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from `state_dict`, with any number of ranks, batch size, threads or host.

        With the same number of ranks each may load its own state. With any number all may load the
        one that `megaindex.loader.join_states` makes of the states of all ranks; of the state of
        another rank the place is taken and its receipt left to that rank, which a warning says.
        What is refused changes nothing.

        Args:
            allow: differences that are meant: ``order``, where this index serves other samples
                than the run was served; ``content`` and ``targets``, where a source's tokens are
                others, or others of them carry loss; ``receipt``, where it counts more samples
                than were consumed; and those of `Resumable.load_state_dict`.

        Raises:
            InvalidArgument: going on would change what was served or what comes next.
            FormatError: not what `state_dict` gives.
        """
        self.load(state, allow=allow)

    def load(
        self,
        state: Mapping[str, Any],
        *,
        allow: Collection[str] = (),
        numbers: IntArray | None = None,
    ) -> None:
        """As `load_state_dict`, where the sources of the index may have been numbered anew.

        Args:
            numbers: of each source, its number when the state was made.
        """
        stored = CheckpointReader("the state of a loader", state)
        stored.check_version(VERSION)
        sampler = stored.part("sampler", "the state of a sampler")
        load = getattr(self._sampler, "load_state_dict", None)
        if load is None:
            raise InvalidArgument(
                f"a sampler of type {type(self._sampler).__name__} cannot go on from a state; use "
                "MicroBatchSampler or one of its kin"
            )
        consumed = stored.integer("consumed_samples")
        if sampler.integer("consumed_samples") != consumed:
            raise stored.error(
                f"consumed_samples must be {consumed} in the state of its sampler too",
                sampler.values["consumed_samples"],
            )
        order = stored.part("order", "the order of a loader")
        facts = {name: order.hashed(name) for name in ("first", "last")}
        theirs = stored_contents(stored, self._sources)
        counted = self._stored_receipt(stored.field("receipt", "must be a mapping or null"))
        if "order" not in allow:
            self._check_order(consumed, facts, numbers)
        if self._contents is not None:
            ours = dict(zip(source_names(self._sources), self._contents, strict=True))
            check_contents(theirs, ours, allow)
        if "receipt" not in allow:
            _check_count(counted.ladder, consumed)
        load(sampler.values, allow=set(allow) - {"order", "content", "targets", "receipt"})
        if self._recorder is not None:  # nothing was refused, and nothing had changed before
            self._recorder.take(counted)
        self._restart()

    def _stored_receipt(self, receipt: Any) -> Counted:
        """Of the receipt in a checkpoint, which may have none."""
        if self._recorder is not None:
            return self._recorder.read(receipt)
        if receipt is None:
            return Counted(ladder=BlockReceipts(stride=1, blocks={}))
        return stored_receipt(receipt).counted

    def _check_order(
        self, consumed: int, facts: Mapping[str, str], numbers: IntArray | None
    ) -> None:
        if facts != order_facts(self._index, consumed, numbers):
            raise InvalidArgument(
                f"this index serves other samples than the {consumed} that the run was served: "
                "another seed, order, corpus or blend; go on with those of the checkpoint, or, if "
                'it is meant, load it with allow=("order",)'
            )

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a Loader has threads and is not pickled or given to DataLoader workers; it needs no "
            "workers: make one in each process, or use GPTDataset with a DataLoader"
        )


class _Iteration(Iterator[Batch]):
    """An iterator that raises the same error again once it has raised one."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self._error: Exception | None = None

    def __next__(self) -> Batch:
        if self._error is not None:
            raise self._error
        try:
            return next(self._batches)
        except StopIteration:
            raise
        except Exception as error:
            self._error = error
            raise
        except BaseException as error:
            self._error = InvalidArgument(
                f"this iteration was ended by {type(error).__name__}; iterate over the loader anew"
            )
            raise


def _check_count(ladder: BlockReceipts, consumed: int) -> None:
    count = ladder.total.count
    if count > consumed:
        raise InvalidArgument(
            f"the receipt counts {count} samples, more than the {consumed} that were consumed: it "
            "is of another run, or some were served again; take an intact checkpoint, or, if it is "
            'meant, load it with allow=("receipt",)'
        )


def _copies(device: torch.device | str) -> DeviceCopies:
    try:
        return DeviceCopies(torch.device(device))
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidArgument(
            f"device={device!r}: {reason}; give one that torch has here, such as 'cuda' or 'cpu'"
        ) from None
