"""Batches of one rank, read ahead by threads: no worker processes, nothing to pickle.

loader = Loader(index, dataset, sampler, options=SampleOptions(eod_id=0, eod_mask_loss=True))
for batch in loader:
    train(batch["tokens"], batch["labels"], batch["loss_mask"], batch["position_ids"])
checkpoint["data"] = loader.state_dict()
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch

from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.ladder import Ladder
from megaindex.index.plain import check_integer
from megaindex.index.spans import Index
from megaindex.index.stored import Stored
from megaindex.loader.batches import Batch, BatchSource, Prepared
from megaindex.loader.choice import any_remote, make_reader
from megaindex.loader.device import DeviceCopies
from megaindex.loader.fields import BatchMaker
from megaindex.loader.fit import order_facts
from megaindex.loader.options import SampleOptions
from megaindex.loader.pool import BufferPool
from megaindex.loader.readahead import ReadAhead
from megaindex.loader.receipts import Recorder, stored_ladder
from megaindex.loader.targets import Targets
from megaindex.loader.tokens import TokenReader

VERSION = 1


class Loader:
    """Iterates over the batches of one rank, dicts of tensors with the fields of `BatchMaker`.

    A batch is its receiver's for as long as any tensor of it, or a view of one, is alive; then its
    memory is filled anew. Batches may be kept and changed at will.

    What is read ahead is not counted: `state_dict` stands after the batch that was handed over
    last. One iteration runs at a time; a new one ends the one before and starts where the sampler
    was set to start. An error is raised where its batch would have been.

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
        pin_memory: hand over batches in page-locked memory. Copies to a device may be asked for
            and the batch dropped; it is written again once the device is idle. ``device`` is
            better.
        device: where batches are handed over. On CUDA they are copied ahead of their use, on a
            stream of their own.
        recorder: adds up receipts of what is handed over.
        restore_fields: whether fields that a batch's receiver may have changed in place, but that
            hold the same in every batch, are written again before the next use. False saves that
            time where nobody writes into a batch.
        targets: of the sources that are instruction data.

    Raises:
        InvalidArgument: an argument is out of range.
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
    ) -> None:
        given = [datasets] if isinstance(datasets, IndexedDataset) else list(datasets)
        waits = any_remote(given)
        default = 16 if waits else 4
        read_ahead = check_integer("read_ahead", default if read_ahead is None else read_ahead)
        default = max(1, read_ahead) if waits else 2
        num_threads = check_integer("num_threads", default if num_threads is None else num_threads)
        bytes_ahead = check_integer("bytes_ahead", bytes_ahead)
        if read_ahead < 0 or num_threads < 1 or bytes_ahead < 1:
            raise InvalidArgument(
                f"read_ahead={read_ahead} must not be negative, num_threads={num_threads} and "
                f"bytes_ahead={bytes_ahead} must be at least 1"
            )
        self._sampler = sampler
        self._recorder = recorder
        self._reader = make_reader(given, reader) if isinstance(reader, str) else reader
        fingerprints = None if recorder is None else recorder.state_dict()["fingerprints"]
        maker = BatchMaker(index, self._reader, options, fingerprints=fingerprints, targets=targets)
        copies = None if device is None else _copies(device)
        self._source = BatchSource(
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
        self._iteration = 0
        self._handed_over = 0
        """Batches of this iteration."""
        self._ahead: ReadAhead[Any, Any] | None = None

    @property
    def reader(self) -> TokenReader:
        """How tokens are read; `AutoTokens.choice` tells what ``auto`` chose."""
        return self._reader

    def __len__(self) -> int:
        return len(self._sampler)  # type: ignore[arg-type]

    def __iter__(self) -> Iterator[Batch]:
        self._restart()
        return self._hand_over(self._iteration)

    def _restart(self) -> None:
        self._iteration += 1
        self._handed_over = 0
        if self._ahead is not None:
            self._ahead.close(0)
            self._ahead = None

    def _hand_over(self, iteration: int) -> Iterator[Batch]:
        for prepared in self._prepared():
            if self._iteration != iteration:
                raise InvalidArgument(
                    "this iteration has ended: another one was begun, or a state was loaded; "
                    "iterate over the loader anew"
                )
            batch = self._source.hand_over(prepared)
            self._handed_over += 1
            if self._recorder is not None:
                self._recorder.add_rows(batch.pop("receipt").numpy())
            yield batch
            del prepared, batch  # not held while the next is waited for

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
        """Where this rank stands, after the batch that was handed over last: JSON values.

        ``sampler`` is the same on all ranks that were handed equally many batches, ``receipt`` is
        each rank's own.

        Raises:
            InvalidArgument: the sampler has no state.
        """
        state_after = getattr(self._sampler, "state_after", None)
        if state_after is None:
            raise InvalidArgument(
                f"a sampler of type {type(self._sampler).__name__} has no state_after, so this "
                "loader has no state; use MicroBatchSampler or one of its kin"
            )
        state = state_after(self._handed_over)
        return {
            "version": VERSION,
            "consumed_samples": state["consumed_samples"],
            "sampler": state,
            "order": order_facts(self._index, state["consumed_samples"]),
            "receipt": None if self._recorder is None else self._recorder.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Go on from `state_dict`, with any number of ranks, batch size, threads or host.

        With another number of ranks, the receipts of all the old ones go to one of the new; the
        others take the state with ``receipt`` None, and begin theirs anew. What is refused changes
        nothing.

        Args:
            allow: differences that are meant: ``order``, where this index serves other samples
                than the run was served; ``receipt``, where it counts more of them than were
                consumed, as that of a loader which was iterated anew; and those of
                `Resumable.load_state_dict`.

        Raises:
            InvalidArgument: going on would change what was served or what comes next.
            FormatError: not what `state_dict` gives.
        """
        stored = Stored("the state of a loader", state)
        stored.check_version(VERSION)
        sampler = stored.part("sampler", "the state of a sampler")
        load = getattr(self._sampler, "load_state_dict", None)
        if load is None:
            raise InvalidArgument(
                f"a sampler of type {type(self._sampler).__name__} cannot go on from a state; use "
                "MicroBatchSampler or one of its kin"
            )
        consumed = stored.whole("consumed_samples")
        if sampler.whole("consumed_samples") != consumed:
            raise stored.wrong(
                f"consumed_samples must be {consumed} in the state of its sampler too",
                sampler.values["consumed_samples"],
            )
        order = stored.part("order", "the order of a loader")
        facts = {name: order.hashed(name) for name in ("first", "last")}
        ladder = self._stored_ladder(stored.field("receipt", "must be a mapping or null"))
        if "order" not in allow:
            self._check_order(consumed, facts)
        if "receipt" not in allow:
            _check_count(ladder, consumed)
        load(sampler.values, allow=set(allow) - {"order", "receipt"})
        if self._recorder is not None:  # nothing was refused, and nothing had changed before
            self._recorder.take(ladder)
        self._restart()

    def _stored_ladder(self, receipt: Any) -> Ladder:
        """Of the receipt in a checkpoint, which may have none."""
        if self._recorder is not None:
            return self._recorder.read(receipt)
        return Ladder(stride=1, blocks={}) if receipt is None else stored_ladder(receipt)

    def _check_order(self, consumed: int, facts: Mapping[str, str]) -> None:
        if facts != order_facts(self._index, consumed):
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


def _check_count(ladder: Ladder, consumed: int) -> None:
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
