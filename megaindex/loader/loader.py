"""Loader of the batches of one rank, with prefetching threads instead of worker processes.

loader = Loader(index, sampler, options=SampleOptions(eod_id=0, eod_mask_loss=True))
for batch in loader:
    train(batch["tokens"], batch["labels"], batch["loss_mask"], batch["position_ids"])
checkpoint["data"] = loader.state_dict()
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Any, Literal, TypeAlias

import torch

from megaindex._types import IntArray
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.receipts import BlockReceipts
from megaindex.index.skips import skips_of
from megaindex.index.spans import Index
from megaindex.loader.batch import BatchMaker, SampleOptions
from megaindex.loader.batch_reader import (
    Batch,
    BatchReader,
    BufferPool,
    DeviceCopies,
    Prepared,
    ReadAhead,
)
from megaindex.loader.checkpoint import (
    Contents,
    SourceProgress,
    check_content,
    check_contents,
    contents,
    order_facts,
    source_names,
    stored_contents,
)
from megaindex.loader.positional_reader import any_remote, make_reader, reader_of, sources_of
from megaindex.loader.receipts import Counted, Recorder, rounds_of, stored_receipt
from megaindex.loader.sampler_state import decided_samples
from megaindex.loader.samplers import EvaluationSampler
from megaindex.loader.targets import Targets, targets_of
from megaindex.loader.token_readers import TokenReader
from megaindex.loader.torch_dataset import GPTDataset
from megaindex.run.run import Run
from megaindex.validation import CheckpointReader, check_between, shown

VERSION = 2
MicroBatches: TypeAlias = Iterable[Sequence[int | None]]


class Loader:
    """Iterable over the batches of one rank: dicts of torch tensors, the fields of `BatchMaker`.

    Batches may be kept and changed. The memory of a batch is reused only when every tensor of it
    and every view of one is freed.

    The state is that after the last batch returned; prefetched batches do not count. One iteration
    runs at a time; starting another ends it. If the sampler has a state, a new iteration continues
    after the last batch returned, and is refused at the end of the run; any other sampler is
    iterated from its start. An error is raised in place of the batch that caused it, and by each
    later call of that iteration; a new iteration retries that batch.

    Args:
        index: the samples, from build_index, build_blend or a recipe.
        datasets: the index's sources, in the order of the index, or the only one. Default: those
            that the index was built from; ``Loader(index, sampler)`` leaves them out.
        sampler: iterable over lists of sample ids, one list for each micro batch, None for a row of
            padding: `MicroBatchSampler`, `CyclicSampler`, `EvaluationSampler`, or any other. A
            state needs ``state_after`` and ``load_state_dict``, as the first two have.
        options: options of the samples.
        reader: ``mapped``, ``positional``, ``auto`` (times both and keeps the faster) or a
            `TokenReader`. Objects of a store are always read by position.
        read_ahead: maximum number of batches that are ready or in preparation; 0 disables
            prefetching. Default: 4, or 16 if a dataset lies in an object store.
        num_threads: number of prefetching threads. Default: 2, or ``read_ahead`` with an object
            store.
        bytes_ahead: maximum bytes of prefetched batches; lowers ``read_ahead``.
        pin_memory: return batches in page-locked memory. A batch may be dropped while copies of it
            to a device are under way: the device is synchronised before its memory is reused.
            ``device`` is faster.
        device: device of the returned tensors. On CUDA, batches are copied by the prefetching
            threads, on a stream of their own.
        recorder: recorder of the receipts of the samples returned.
        restore_fields: rewrite the fields that are equal in all batches before each reuse of their
            memory, as a receiver may have changed them in place. False saves that time.
        targets: loss targets of the sources that are instruction data.
        content: coverage of the tokens by the content fingerprints of a checkpoint: ``sampled``,
            256 KiB of each source at fixed offsets; ``whole``, all tokens too; None, the lengths
            alone. Labels and loss masks are covered whole, unless it is None. Fingerprints are
            computed here, or for the first checkpoint if sources are opened later.
        evaluation: function that returns the run of one round of an evaluation, for `evaluation`.
        identity: identity of the run, as its lock has, which the states name; None: not known.

    Raises:
        InvalidArgument: an argument is out of range, or the datasets do not belong to the index.
        StorageError: a source cannot be read.
    """

    def __init__(
        self,
        index: Index,
        datasets: IndexedDataset | Sequence[IndexedDataset] | MicroBatches | None = None,
        sampler: MicroBatches | None = None,
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
        evaluation: Callable[[], Run | None] | None = None,
        identity: str | None = None,
    ) -> None:
        if sampler is None:  # Loader(index, sampler)
            datasets, sampler = None, _check_sampler(datasets)
        sources = sources_of(index, datasets)
        check_content(content)
        is_remote = any_remote(sources)
        default = 16 if is_remote else 4
        read_ahead = check_between("read_ahead", default if read_ahead is None else read_ahead, 0)
        default = max(1, read_ahead) if is_remote else 2
        num_threads = check_between(
            "num_threads", default if num_threads is None else num_threads, 1
        )
        bytes_ahead = check_between("bytes_ahead", bytes_ahead, 1)
        self._sampler: Any = sampler
        skipped = getattr(sampler, "skipped", None)
        if skipped is not None:
            index = skipped(index)
        elif not isinstance(sampler, EvaluationSampler):
            _refuse_skips(index, sampler)
        balance_by = getattr(sampler, "balance_by", None)
        if balance_by is not None:
            balance_by(index)
        self._has_state = all(hasattr(sampler, n) for n in ("state_after", "load_state_dict"))
        self._recorder = recorder
        if recorder is not None and recorder.ranks is None:
            recorder.ranks = getattr(sampler, "ranks", None)
        self._reader = make_reader(sources, reader) if isinstance(reader, str) else reader
        fingerprints = None if recorder is None else recorder.state_dict()["fingerprints"]
        self._make = partial(BatchMaker, options=options, targets=targets)
        self._fingerprints = fingerprints
        copies = None if device is None else _copies(device)
        self._source = BatchReader(
            self._make(index, self._reader, fingerprints=fingerprints),
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
        self._content, self._sources, self._targets = content, sources, targets
        self._evaluation, self._identity = evaluation, identity
        self._same: dict[str, Any] = {
            "options": options, "reader": reader if isinstance(reader, str) else "auto",
            "read_ahead": read_ahead, "num_threads": num_threads, "bytes_ahead": bytes_ahead,
            "pin_memory": pin_memory, "device": device, "restore_fields": restore_fields,
        }  # fmt: skip
        if self._has_state and all(dataset.is_open for dataset in sources):
            _ = self._contents
        self._iteration = 0
        self._returned = 0  # batches since the sampler's start
        self._earlier = 0  # batches of this iteration before the sampler's start
        self._exchanged = False  # the next batches must be prepared again
        self._is_over = False  # an iteration came to the end of the run
        self._ledger: SourceProgress | None = None
        self._ahead: ReadAhead[Any, Any] | None = None

    @property
    def reader(self) -> TokenReader:
        """The reader of tokens; with ``auto``, its ``choice`` is the reader that was chosen."""
        return self._reader

    @property
    def index(self) -> Index:
        """The samples, with the skips of the sampler."""
        return self._index

    @property
    def sampler(self) -> Any:
        """The sampler of the micro batches of this rank."""
        return self._sampler

    @property
    def ledger(self) -> SourceProgress:
        """`SourceProgress` of the run, for ``ledger.totals(loader.consumed_samples)``.

        Raises:
            InvalidArgument: the sampler does not serve the samples in the order of the index.
        """
        if self._ledger is None:
            self._ledger = self._progress()
        return self._ledger

    def _progress(self) -> SourceProgress:
        served = getattr(self._sampler, "served", None)
        if served is None:
            raise InvalidArgument(
                f"a loader over a sampler of type {type(self._sampler).__name__} has no progress "
                "by source: it does not serve the samples in the order of the index; use "
                "MicroBatchSampler"
            )
        paths = [dataset.path_prefix for dataset in self._sources]
        return SourceProgress(served(self._index), paths)

    @property
    def samples_consumed(self) -> int:
        """Number of samples served on all ranks together, without skipped ones."""
        return sum(row.samples for row in self.ledger.totals(self.consumed_samples))

    @property
    def tokens_consumed(self) -> int:
        """Number of input tokens of the samples served on all ranks, padding inside samples
        included: samples × sequence_length of their stage."""
        return sum(row.tokens for row in self.ledger.totals(self.consumed_samples))

    @property
    def recorder(self) -> Recorder | None:
        """Recorder of the samples that this rank received; None without one."""
        return self._recorder

    @property
    def identity(self) -> str | None:
        """Identity of the run, as its lock has; None if it is not known."""
        return self._identity

    @property
    def sequence_lengths(self) -> set[int]:
        """Tokens of a sample."""
        return {self._index.sequence_length}

    def dataset(self, *, receipts: bool = False) -> GPTDataset:
        """Return the same samples for a DataLoader with worker processes, whose ``batch_sampler``
        is `sampler`.

        Args:
            receipts: add the field ``receipt``, for `megaindex.loader.receipted`; the loader needs
                a recorder.
        """
        fingerprints = self._fingerprints if receipts else None
        if receipts and fingerprints is None:
            raise InvalidArgument("receipts need a recorder; make the loader with one")
        reader = reader_of(self._index, self._sources)
        maker = self._make(self._index, reader, fingerprints=fingerprints)
        return GPTDataset.from_maker(maker)

    def evaluation(self) -> Iterator[Batch]:
        """Return this rank's batches of one evaluation, in the order of `EvaluationSampler`.

        Raises:
            InvalidArgument: the run has no evaluation whose rounds are all the same.
        """
        run = None if self._evaluation is None else self._evaluation()
        if run is None:
            raise InvalidArgument(
                "the run must have an evaluation, the same in every round; add one to its recipe"
            )
        ranks = self._sampler.ranks
        sampler = EvaluationSampler(
            num_samples=run.num_samples,
            micro_batch_size=run.micro_batch_size or 1,
            data_parallel_rank=ranks.data_parallel_rank,
            data_parallel_size=ranks.data_parallel_size,
        )
        targets = targets_of(run)
        return iter(Loader(run.index, sampler, targets=targets, content=None, **self._same))

    @property
    def batches_left(self) -> int:
        """Number of batches of this rank after the last one returned."""
        return len(self._sampler) - self._returned

    @property
    def consumed_samples(self) -> int:
        """Number of samples returned on all ranks together, ``consumed_samples`` of the state.

        Raises:
            InvalidArgument: the sampler has no state.
        """
        return int(self._sampler_state()["consumed_samples"])

    @property
    def decided_samples(self) -> int:
        """Position after the samples returned, and after those of a balanced step begun."""
        return decided_samples(self._sampler_state())

    def __len__(self) -> int:
        """Return the number of batches from the position where the last iteration began."""
        return self._earlier + len(self._sampler)

    def __repr__(self) -> str:
        kind = type(self._sampler).__name__
        return (
            f"Loader({self._index!r}, {kind}, {self._earlier + self._returned:,} batches returned)"
        )

    def __iter__(self) -> Iterator[Batch]:
        if self._is_over:
            raise InvalidArgument(
                "the run is over: every batch of its sampler was returned; give the sampler more "
                "samples, from an order of more epochs, or load a state"
            )
        state = self._sampler_state() if self._has_state and self._returned else None
        self._restart()
        if state is not None:
            self._sampler.load_state_dict(state)
        return _Iteration(self._batches(self._iteration))

    def _restart(self) -> None:
        self._iteration += 1
        self._returned = self._earlier = 0
        self._exchanged = self._is_over = False
        self._end_ahead()

    def _end_ahead(self) -> None:
        if self._ahead is not None:
            self._ahead.close(0)
            self._ahead = None

    def _batches(self, iteration: int) -> Iterator[Batch]:
        self._exchanged = True
        while self._exchanged:
            self._exchanged = False
            rounds, ahead = rounds_of(self._sampler), self._prepared()
            for prepared in ahead:
                if self._iteration != iteration:
                    raise InvalidArgument(
                        "this iteration has ended: another one was started, or a state was loaded; "
                        "start a new iteration over the loader"
                    )
                batch = self._source.release(prepared)
                self._returned += 1
                if self._recorder is not None:
                    self._recorder.add_rows(batch.pop("receipt").numpy(), next(rounds))
                yield batch
                del prepared, batch  # free the memory before waiting for the next
                if self._exchanged and self._iteration == iteration:
                    ahead.close()
                    break
            else:
                break
        if self._iteration == iteration:
            self._is_over = self._has_state

    def _exchange(self, index: Index, first: int, sampler: Any = None) -> None:
        """Serve the samples of another index from position ``first`` on, in the same iteration.

        Prefetched batches before it stay, others are read again.

        Args:
            index: index of the same sources, with the same samples before ``first``, which is not
                before the samples returned, or in a balanced step begun.
            first: first position that may hold another sample.
            sampler: sampler to go on with; None: the same, with as many samples.
        """
        self._index, self._ledger = index, None
        maker = self._make(index, self._reader, fingerprints=self._fingerprints)
        self._source.exchange(maker)
        # a batch that the old maker reads was begun before
        begun = self._returned if self._ahead is None else self._ahead.begun
        if sampler is None and decided_samples(self._sampler.state_after(begun)) <= first:
            return
        self._end_ahead()
        state = self._sampler_state()
        if sampler is not None:
            self._sampler = sampler
        self._sampler.load_state_dict(state)
        self._earlier += self._returned
        self._returned = 0
        self._exchanged = True

    def _prepared(self) -> Generator[Prepared, None, None]:
        tasks = iter(self._sampler)
        first = next(tasks, None)
        if first is None:
            return
        source = self._source  # threads must not hold a reference to the loader
        every = itertools.chain([first], tasks)
        depth = min(self._read_ahead, max(1, self._bytes_ahead // source.nbytes(len(first))))
        if depth == 0:
            yield from map(source.prepare, every)
            return
        with ReadAhead(every, source.prepare, depth=depth, threads=self._num_threads) as ahead:
            self._ahead = ahead
            yield from ahead

    def state_dict(self) -> dict[str, Any]:
        """Return the state of this rank after the last batch returned, as JSON values.

        ``sampler`` is equal on all ranks that returned the same number of batches; ``receipt`` is
        that of this rank.

        Raises:
            InvalidArgument: the sampler has no state.
        """
        state = self._sampler_state()
        return {
            "version": VERSION,
            "identity": self.identity,
            "consumed_samples": state["consumed_samples"],
            "sampler": state,
            "order": order_facts(self._index, decided_samples(state)),
            "content": self._contents and [each.to_dict() for each in self._contents],
            "receipt": None if self._recorder is None else self._recorder.state_dict(),
        }

    def _sampler_state(self) -> dict[str, Any]:
        state_after = getattr(self._sampler, "state_after", None)
        if state_after is None:
            raise InvalidArgument(
                f"a loader over a sampler of type {type(self._sampler).__name__} has no state; use "
                "a sampler with state_after, such as MicroBatchSampler"
            )
        state: dict[str, Any] = state_after(self._returned)
        return state

    @cached_property
    def _contents(self) -> list[Contents] | None:
        if self._content is None:
            return None
        return contents(self._sources, self._targets, whole=self._content == "whole")

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Continue from `state_dict`, with any number of ranks, batch size or threads.

        With the same number of ranks, each may load its own state. With any number, all may load
        the result of `megaindex.loader.join_states` over the states of all ranks. From the state of
        another rank only the position is taken, not the receipt, and a warning is logged. A refused
        state changes nothing.

        Args:
            state: a result of `state_dict`, or of `join_states`; also one of a
                `megaindex.loader.RecipeLoader`, whose samples and sources are compared.
            allow: names of differences to accept: ``order`` (the index serves other samples than
                the run was served), ``content`` and ``targets`` (a source holds other tokens, or
                other targets of the loss), ``receipt`` (it counts more samples than were consumed),
                and those of the sampler's own ``load_state_dict``.

        Raises:
            InvalidArgument: continuing would change the samples served before or after.
            FormatError: the state is damaged, or not one of `state_dict`.
        """
        self._load(self._without_recipe(state), allow=allow)

    def _without_recipe(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the state of a `Loader` in that of a `RecipeLoader`; others as they are.

        Raises:
            InvalidArgument: the state changes the mix, and is not one of this run.
        """
        stored = CheckpointReader("the state of a loader", state)
        if "recipe" not in stored.values:
            return state
        inner = stored.part("loader", "the state of a loader").values
        if "mix_changes" in stored.values and inner.get("identity") != self.identity:
            raise InvalidArgument(
                "mix_changes: the state changes the mix of its run, which is not the one given "
                f"({self.identity}); continue the recipe with RecipeLoader, or lock the state with "
                "megaindex lock --state and open that"
            )
        rule = "must be a list of mappings"
        given = stored.checked("sources", rule, lambda value: isinstance(value, list))
        sources = [CheckpointReader("a source of it", each).values.get("content") for each in given]
        return {**inner, "content": None if None in sources else sources}

    def _load(
        self,
        state: Mapping[str, Any],
        *,
        allow: Collection[str] = (),
        numbers: IntArray | None = None,
    ) -> None:
        """Load as `load_state_dict`; ``numbers`` holds each source's number in the state."""
        stored = CheckpointReader("the state of a loader", state)
        stored.check_version(VERSION)
        sampler = stored.part("sampler", "the state of a sampler")
        load = getattr(self._sampler, "load_state_dict", None)
        if load is None:
            raise InvalidArgument(
                f"a sampler of type {type(self._sampler).__name__} cannot load a state; use one "
                "with load_state_dict, such as MicroBatchSampler"
            )
        stored.field("identity", "must be text or null")
        consumed = stored.integer("consumed_samples")
        if sampler.integer("consumed_samples") != consumed:
            raise stored.error(
                f"consumed_samples of its sampler must be {consumed}",
                sampler.values["consumed_samples"],
            )
        order = stored.part("order", "the order of a loader")
        names = ("first", "last", "weights") if "weights" in order.values else ("first", "last")
        facts = {name: order.hashed(name) for name in names}
        theirs = stored_contents(stored, self._sources)
        counted = self._stored_receipt(stored.field("receipt", "must be a mapping or null"))
        check_skips = getattr(self._sampler, "check_skips", None)
        if check_skips is not None and "skip" not in allow:
            check_skips(sampler.values)  # before the order, which moved samples change
        if "order" not in allow:
            self._check_order(consumed, decided_samples(sampler.values), facts, numbers)
        if self._contents is not None:
            ours = dict(zip(source_names(self._sources), self._contents, strict=True))
            check_contents(theirs, ours, allow)
        if "receipt" not in allow:
            _check_count(counted.ladder, consumed)
        load(sampler.values, allow=set(allow) - {"order", "content", "targets", "receipt"})
        if self._recorder is not None:  # only here, after every check: a refusal changes nothing
            self._recorder.take(counted)
        self._restart()

    def _stored_receipt(self, receipt: Any) -> Counted:
        if self._recorder is not None:
            return self._recorder.read(receipt)
        if receipt is None:
            return Counted(ladder=BlockReceipts(stride=1, blocks={}))
        return stored_receipt(receipt).counted

    def _check_order(
        self, consumed: int, decided: int, facts: Mapping[str, str], numbers: IntArray | None
    ) -> None:
        ours = order_facts(self._index, decided, numbers)
        if any(facts[name] != ours[name] for name in facts.keys() & ours.keys()):
            raise InvalidArgument(
                f"the index serves other samples than the {consumed} that the run was served: its "
                "seed, order, corpus or blend differs; use those of the checkpoint (orders of "
                "GPT-NeoX with the python_sum of the Python that it began under), or, if the "
                'change is intended, load it with allow=("order",)'
            )

    def __reduce__(self) -> Any:
        raise InvalidArgument(
            "a Loader has threads and cannot be pickled or passed to DataLoader workers; make one "
            "in each process, or use GPTDataset with a DataLoader"
        )


class _Iteration(Iterator[Batch]):
    """Iterator that raises its first error again at each later call."""

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
                f"this iteration was ended by {type(error).__name__}; start a new iteration over "
                "the loader"
            )
            raise


def _check_sampler(argument: Any) -> MicroBatches:
    """Return the sampler of ``Loader(index, sampler)``."""
    first = argument[:1] if isinstance(argument, (list, tuple)) else [argument]
    is_iterable = hasattr(argument, "__iter__") or hasattr(argument, "__getitem__")
    if not is_iterable or isinstance(first and first[0], (str, bytes, IndexedDataset)):
        raise InvalidArgument(
            "the sampler is missing: give an iterable over lists of sample ids, as in "
            f"Loader(index, MicroBatchSampler(…)), got {shown(argument)}"
        )
    sampler: MicroBatches = argument
    return sampler


def _refuse_skips(index: Index, sampler: object) -> None:
    if skips_of(index) is not None:
        raise InvalidArgument(
            f"skip: the index has skips, and a sampler of type {type(sampler).__name__} serves "
            "the skipped samples too; use MicroBatchSampler(…, index=index)"
        )


def _check_count(ladder: BlockReceipts, consumed: int) -> None:
    count = ladder.total.count
    if count > consumed:
        raise InvalidArgument(
            f"the receipt counts {count} samples, and at most the {consumed} consumed are allowed: "
            "it is of another run, or samples were served again; use an intact checkpoint, or, if "
            'the difference is intended, load it with allow=("receipt",)'
        )


def _copies(device: torch.device | str) -> DeviceCopies:
    try:
        return DeviceCopies(torch.device(device))
    except (RuntimeError, TypeError, AssertionError) as error:
        reason = str(error).partition("\n")[0]
        raise InvalidArgument(
            f"device={device!r}: {reason}; use a device of this torch, such as 'cuda' or 'cpu'"
        ) from None
