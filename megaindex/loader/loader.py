"""Loader of the batches of one rank, with prefetching threads instead of worker processes.

loader = Loader(index, sampler, options=SampleOptions(eod_id=0, eod_mask_loss=True))
for batch in loader:
    train(batch["tokens"], batch["labels"], batch["loss_mask"], batch["position_ids"])
checkpoint["data"] = loader.state_dict()
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import torch

from megaindex._types import IntArray
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.balance import CostModel
from megaindex.index.receipts import BlockReceipts
from megaindex.index.skips import named_as, numbered, skips_of
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
    STATE,
    STATE_VERSION,
    Contents,
    SourceProgress,
    check_content,
    check_contents,
    contents,
    order_facts,
    other_mix,
    source_names,
    stored_contents,
)
from megaindex.loader.positional_reader import any_remote, make_reader, reader_of, sources_of
from megaindex.loader.receipts import Counted, Recorder, rounds_of, stored_receipt
from megaindex.loader.run_sampler import LoadedRun, sampler_of, with_micro_batches
from megaindex.loader.sampler_state import decided_samples
from megaindex.loader.samplers import EvaluationSampler
from megaindex.loader.targets import Targets, targets_of
from megaindex.loader.token_readers import TokenReader
from megaindex.loader.torch_dataset import GPTDataset
from megaindex.loader.waits import TimedBatches, Waits
from megaindex.run.run import Run
from megaindex.validation import CheckpointReader, check_between, shown

if TYPE_CHECKING:
    from megaindex.builders.recipe import OpenRecipe
    from megaindex.loader.run_recipe import MixController, RunRecipe, SourceStatistics
    from megaindex.recipe.layout import RecipeLayout
    from megaindex.settings.recipe import Recipe

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
        run: what is known of the run beside its samples, of a recipe or a lock.

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
        run: LoadedRun | None = None,
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
        self._run, self._recipe = run, None if run is None else run.recipe
        self._has_dataset = False
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
        self._wait = Waits()

    @property
    def wait(self) -> Waits:
        """Time that the receiver of the batches waited for them, since the loader was made or since
        `Waits.take`; no part of the state."""
        return self._wait

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
        index, run, recipe = served(self._index), self._run, self._recipe
        if run is None:
            return SourceProgress(index, [dataset.path_prefix for dataset in self._sources])
        return SourceProgress(index, run.names, [] if recipe is None else recipe.stages)

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
        """Identity of the run, as its lock has; None if it is not known, and with changes of the
        mix set by `set_mix`."""
        is_changed = self._recipe is not None and self._recipe.is_changed
        return None if is_changed else self._given_identity

    @cached_property
    def _given_identity(self) -> str | None:
        return None if self._run is None else self._run.identity()

    @property
    def sequence_lengths(self) -> set[int]:
        """Tokens of a sample, of each stage."""
        index = self._index
        return {*getattr(index, "part_lengths", (index.sequence_length,))}

    def dataset(self, *, receipts: bool = False) -> GPTDataset:
        """Return the same samples for a DataLoader with worker processes, whose ``batch_sampler``
        is `sampler`; the mix of a recipe cannot change from then on.

        Args:
            receipts: add the field ``receipt``, for `megaindex.loader.receipted`; the loader needs
                a recorder.
        """
        fingerprints = self._fingerprints if receipts else None
        if receipts and fingerprints is None:
            raise InvalidArgument("receipts need a recorder; make the loader with one")
        self._has_dataset = True
        reader = reader_of(self._index, self._sources)
        maker = self._make(self._index, reader, fingerprints=fingerprints)
        return GPTDataset.from_maker(maker)

    def evaluation(self) -> Iterator[Batch]:
        """Return this rank's batches of one evaluation, in the order of `EvaluationSampler`.

        Raises:
            InvalidArgument: the run has no evaluation whose rounds are all the same.
        """
        run = None if self._run is None else self._run.evaluation()
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

    @property
    def recipe(self) -> Recipe:
        """The recipe of the run, with the changes of its mix.

        Raises:
            InvalidArgument: the run is not that of a recipe.
        """
        return self._mix.recipe

    @property
    def layout(self) -> RecipeLayout:
        """The layout of the recipe, with the changes of its mix."""
        return self._mix.opened.layout

    @property
    def _mix(self) -> RunRecipe:
        if self._recipe is None:
            raise InvalidArgument(
                "the run must be that of a recipe, or of the lock of one, to have a mix; make the "
                "loader with megaindex.loader.loader_of_recipe or megaindex.lock.open_run"
            )
        return self._recipe

    @property
    def next_step(self) -> int:
        """The first step, from 0, of which no sample was returned; the earliest for `set_mix`."""
        return self._mix.next_step(self.decided_samples)

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
            for prepared in TimedBatches(ahead, self._wait, self._batches_left_of_step):
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

    def _batches_left_of_step(self) -> int:
        left: Callable[[int], int] | None = getattr(self._sampler, "batches_left_of_step", None)
        return 1 if left is None else left(self._returned)

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

    def set_mix(self, weights: Mapping[str, Any], at: int | None = None) -> int:
        """Draw with other weights from a step on, in the same iteration.

        The sources go on where they are, so none repeats before its epoch ends; sources without a
        weight, those of other stages too, have none until they are given one. The weights hold to
        the end of the stage, or to the next change. Batches are drawn evenly, also under batching
        random; under per_stream they stay of one source each. What rounding leaves of a weight is
        carried over to the next weights.

        Call it on every rank with the same weights between the same batches. Prefetched batches of
        the step and after it are read again; those before it are not.

        Args:
            weights: weight of each source by name, from 0; only their ratios count.
            at: step, from 0, that is the first with these weights; a later call for the same step
                replaces them. Default: `next_step`, or, where one is begun, the step after it.

        Returns:
            The step.

        Raises:
            InvalidArgument: a source is unknown, a weight is not a number from 0 or beyond
                ``mix_bounds``, the weights sum to 0; the step was begun, or is beyond the end of
                the run; the stage draws by repeat and choose; a source would be exhausted under
                exhaustion error; `dataset` was called. The loader stays as it was.
        """
        step, position, opened = self._mix.with_mix(weights, at, self.decided_samples)
        self._serve(opened, position)
        self._mix.losses.clear()
        return step

    def _serve(self, opened: OpenRecipe, first: int) -> None:
        """Serve the samples of a recipe with another mix from position ``first`` on."""
        self._check_without_dataset()
        if not self._needs_sampler(opened.index):
            self._exchange(opened.index, first)
        else:
            assert self._run is not None, "as it has a recipe"
            run = self._mix.run(opened)
            self._exchange(run.index, first, self._run.sampler_of(run))
        self._mix.serve(opened)

    def _needs_sampler(self, index: Index) -> bool:
        """Return True if this sampler, which users may hold, cannot serve another index."""
        return index.num_samples != self._index.num_samples or self._sampler.balance is not None

    def _check_without_dataset(self) -> None:
        if self._has_dataset:
            raise InvalidArgument(
                "the mix cannot change after dataset(), whose samples are those of the mix before; "
                "iterate over the loader, or set the mix or load the state before dataset()"
            )

    def report_loss(self, source: str | int, loss: float, tokens: int = 1) -> None:
        """Record a loss of a source, for the next `mix_statistics`.

        Args:
            source: its name, or its number as in the field ``dataset_id`` of a batch.
            loss: mean loss of the tokens.
            tokens: number of tokens, the weight of the loss.

        Raises:
            InvalidArgument: the source is unknown, or the loss not a finite number.
        """
        self._mix.report_loss(source, loss, tokens)

    def mix_statistics(self) -> tuple[SourceStatistics, ...]:
        """Return what a controller of the mix needs of every source, in the order of the recipe.

        Samples and tokens are those of all ranks; losses those reported on this rank since the mix
        was last changed.
        """
        decided = self.decided_samples
        return self._mix.statistics(decided, self.ledger.totals(decided))

    def control_mix(
        self,
        controller: MixController,
        *,
        broadcast: Callable[[Any], Any] | None = None,
        at: int | None = None,
    ) -> int | None:
        """Set the mix that a controller returns on rank 0.

        Args:
            controller: called on rank 0 with `mix_statistics`; it returns the weights of
                `set_mix`, or None for no change.
            broadcast: called on every rank, with the weights on rank 0 and None on others; returns
                those of rank 0. It may be left out with one rank.
            at: as for `set_mix`.

        Returns:
            The first step with the weights; None without a change.

        Raises:
            InvalidArgument: as `set_mix`; or several ranks have no ``broadcast``.
        """
        ranks = self.sampler.ranks
        if broadcast is None and ranks.data_parallel_size > 1:
            raise InvalidArgument(
                f"control_mix: broadcast must be given with {ranks.data_parallel_size} ranks, "
                "which need the weights of rank 0; such as one of "
                "torch.distributed.broadcast_object_list"
            )
        weights = None
        if ranks.data_parallel_rank == 0:
            weights = controller(self.mix_statistics())
        if broadcast is not None:
            weights = broadcast(weights)
        return None if weights is None else self.set_mix(weights, at=at)

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
            "version": STATE_VERSION,
            "identity": self.identity,
            "consumed_samples": state["consumed_samples"],
            "sampler": numbered(state, self._index),
            "order": order_facts(self._index, decided_samples(state)),
            "content": self._contents and [each.to_dict() for each in self._contents],
            "receipt": None if self._recorder is None else self._recorder.state_dict(),
            "recipe": None if self._recipe is None else self._recipe.state(),
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
        whole = self._content == "whole"
        if self._run is not None and self._run.contents is not None:
            return self._run.contents(whole)
        return contents(self._sources, self._targets, whole=whole)

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Continue from `state_dict`, with any number of ranks, batch size or threads.

        With the same number of ranks, each may load its own state. With any number, all may load
        the result of `megaindex.loader.join_states` over the states of all ranks. From the state of
        another rank only the position is taken, not the receipt, and a warning is logged. A refused
        state changes nothing.

        Args:
            state: a result of `state_dict`, or of `join_states`. That of a recipe's loader
                continues under its lock and the reverse, and under a recipe changed since.
            allow: names of differences to accept: ``order`` (the index serves other samples than
                the run was served), ``past`` (the recipe would have served other samples before,
                or shuffles a source by another name), ``content`` and ``targets`` (a source holds
                other tokens, or other targets of the loss), ``receipt`` (it counts more samples
                than were consumed), and those of the sampler's own ``load_state_dict``.

        Raises:
            InvalidArgument: continuing would change the samples served before or after.
            FormatError: the state is damaged, or not one of `state_dict`.
        """
        stored = CheckpointReader(STATE, state)
        stored.check_version(STATE_VERSION)
        if stored.field("identity", "must be text or null") is not None:
            stored.hashed("identity")
        recipe, allow = self._recipe, set(allow)
        if recipe is None:
            if other_mix(stored, self.identity):
                raise InvalidArgument(
                    "mix_changes: the state changes the mix of its run, which is not the one given "
                    f"({self.identity}); continue it under its recipe, or under the lock of that"
                )
            self._load(stored, allow)
            return
        opened, numbers, receipt = recipe.continued(stored, self._given_identity, allow)
        if "past" in allow or (numbers is not None and "content" in allow):
            allow.add("order")
        allow.discard("past")
        stored = replace(stored, values={**stored.values, "receipt": receipt})
        if opened is None:
            self._load(stored, allow, numbers)
            return
        self._check_without_dataset()
        assert self._run is not None, "as it has a recipe"
        run, before = self._mix.run(opened), (self._index, self._sampler)
        if self._needs_sampler(run.index):
            self._sampler = self._run.sampler_of(run)
        self._index, self._ledger = run.index, None
        try:
            self._load(stored, allow, numbers)
        except BaseException:
            self._index, self._sampler, self._ledger = *before, None
            raise
        self._source.exchange(self._make(run.index, self._reader, fingerprints=self._fingerprints))
        self._mix.serve(opened)

    def _load(
        self, stored: CheckpointReader, allow: Collection[str], numbers: IntArray | None = None
    ) -> None:
        """Load the state of the samples served now; ``numbers`` are those of the sources in it."""
        sampler = stored.part("sampler", "the state of a sampler")
        load = getattr(self._sampler, "load_state_dict", None)
        if load is None:
            raise InvalidArgument(
                f"a sampler of type {type(self._sampler).__name__} cannot load a state; use one "
                "with load_state_dict, such as MicroBatchSampler"
            )
        consumed = stored.integer("consumed_samples")
        if sampler.integer("consumed_samples") != consumed:
            raise stored.error(
                f"consumed_samples of its sampler must be {consumed}",
                sampler.values["consumed_samples"],
            )
        order = stored.part("order", "the order of a loader")
        names = ("first", "last", "weights") if "weights" in order.values else ("first", "last")
        facts = {name: order.hashed(name) for name in names}
        theirs = stored_contents(stored, self._source_names, numbers)
        counted = self._stored_receipt(stored.field("receipt", "must be a mapping or null"))
        check_skips = getattr(self._sampler, "check_skips", None)
        if check_skips is not None:
            theirs_here = None if numbers is None else numbers.tolist()
            masked = named_as(sampler.values, self._index, theirs_here)
            sampler = replace(sampler, values=masked)
        if check_skips is not None and "skip" not in allow:
            check_skips(sampler.values)  # before the order, which moved samples change
        if "order" not in allow:
            self._check_order(consumed, decided_samples(sampler.values), facts, numbers)
        if self._contents is not None:
            ours = dict(zip(self._source_names, self._contents, strict=True))
            check_contents(theirs, ours, allow)
        if "receipt" not in allow:
            _check_count(counted.ladder, consumed)
        load(sampler.values, allow=set(allow) - {"order", "content", "targets", "receipt"})
        if self._recorder is not None:  # only here, after every check: a refusal changes nothing
            self._recorder.take(counted)
        self._restart()

    @property
    def _source_names(self) -> list[str]:
        """Name of each source in messages."""
        if self._run is not None and self._recipe is not None and self._recipe.is_given:
            return list(self._run.names)
        return source_names(self._sources)

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


def loader_of(
    run: Run,
    *,
    fingerprints: Sequence[str],
    identity: Callable[[], str | None],
    evaluation: Callable[[], Run | None],
    contents: Callable[[bool], list[Contents]] | None = None,
    recipe: RunRecipe | None = None,
    data_parallel_rank: int = 0,
    data_parallel_size: int | None = None,
    micro_batch_size: int | None = None,
    balance: CostModel | None = None,
    **loading: Any,
) -> Loader:
    """Return the loader of one rank of a run, behind its past steps.

    Args:
        run: the run.
        fingerprints: fingerprint of each source, for receipts.
        identity, evaluation, contents, recipe: as for `LoadedRun`.
        data_parallel_rank, data_parallel_size, micro_batch_size, balance: as for `sampler_of`.
        loading: other arguments of `Loader`.

    Raises:
        InvalidArgument: a batch is not a multiple of micro batch size × ranks.
        StorageError: a source cannot be read.
    """
    make_sampler = partial(
        sampler_of,
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        micro_batch_size=micro_batch_size,
        balance=balance,
    )
    loaded = LoadedRun(
        names=[source.name for source in run.sources],
        sampler_of=make_sampler,
        identity=identity,
        evaluation=lambda: with_micro_batches(evaluation(), micro_batch_size),
        contents=contents,
        recipe=recipe,
    )
    loading = {"recorder": Recorder(fingerprints), **loading}
    return Loader(run.index, make_sampler(run), targets=targets_of(run), run=loaded, **loading)


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
