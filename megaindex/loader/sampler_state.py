"""The position and state of a sampler, and the ranks that it serves.

The state of a sampler holds the number of samples consumed and the values on which the order of
samples depends. It is equal on every rank. A state is refused if continuing would change the
samples served before or after, as with another corpus or another kind of sampler. Each reason has a
name, and ``allow`` takes the names of those to accept.

Megatron's ``cyclic`` sampler is defined here: a new random order of the samples in every epoch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from megaindex._types import I64
from megaindex.errors import InvalidArgument
from megaindex.validation import CheckpointReader, check_between, check_integer, make_plain, shown

VERSION = 1
WITHIN_BALANCED = 2
"""Version of a state within a balanced step, which releases without balance must refuse."""
WITH_SKIPS = 3
"""Version of a state of a run with skips, which releases without skips must refuse."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Micro batch size, rank and number of ranks of a data-parallel process."""

    micro_batch_size: int
    data_parallel_rank: int
    data_parallel_size: int

    def __post_init__(self) -> None:
        make_plain(self, "micro_batch_size", "data_parallel_rank", "data_parallel_size")
        check_between("data_parallel_rank", self.data_parallel_rank, 0, self.data_parallel_size - 1)

    def __str__(self) -> str:
        return (
            f"micro batches of {self.micro_batch_size} for rank {self.data_parallel_rank} of "
            f"{self.data_parallel_size}"
        )

    @property
    def rows_per_round(self) -> int:
        """Rows of one micro batch on every rank."""
        return self.micro_batch_size * self.data_parallel_size


@dataclass(frozen=True, kw_only=True)
class Step:
    """Rows that are assigned together: those of a global batch, or the rest of one."""

    first: int
    """Position of the first sample in the order of training."""
    samples: int
    """Number of rows that hold a sample, at positions first ... first + samples - 1."""
    rows: int
    """Number of rows: a multiple of the rows of a round, at least ``samples``."""
    served: int = 0
    """Number of samples that were served; those with the most work in a balanced step."""
    rows_served: int = 0
    """Number of rows that were served."""

    @property
    def end(self) -> int:
        """Position after the last sample."""
        return self.first + self.samples

    @property
    def rows_left(self) -> int:
        """Number of rows that are not served yet."""
        return self.rows - self.rows_served

    def begin(self, micro_batch: int, micro_batch_size: int) -> int:
        """Return the number of samples consumed before a micro batch of the rows left; past the
        last, the end of the step."""
        left = self.samples - self.served
        each, longer = divmod(left, self.rows_left // micro_batch_size)
        return self.first + self.served + micro_batch * each + min(micro_batch, longer)


@dataclass(frozen=True)
class LoaderPosition:
    """Position of a run, over all ranks."""

    consumed_samples: int = 0
    """Number of samples served, padding not counted; the position of the next sample, except
    within a balanced step."""
    rows_left: int = 0
    """Number of rows of the current step that are not served yet; 0 between steps."""
    step: Step | None = None
    """The balanced step of which rows are left."""


class Resumable(ABC):
    """Sampler with torch's ``state_dict`` protocol, as torchdata's StatefulDataLoader uses it.

    An iteration starts at the position given by the arguments or by `load_state_dict`.
    """

    kind: ClassVar[str]
    _ranks: RankLayout
    _start: LoaderPosition
    _position: LoaderPosition

    @property
    def ranks(self) -> RankLayout:
        """Micro batch size, rank and number of ranks."""
        return self._ranks

    @property
    def batch_size(self) -> int:
        """Rows of a micro batch, where there is one rank.

        Trainers that divide batches between ranks ask for it, as accelerate's `prepare` does.

        Raises:
            InvalidArgument: the batches are those of one rank of several.
        """
        ranks = self._ranks
        if ranks.data_parallel_size > 1:
            raise InvalidArgument(
                f"these batches are those of rank {ranks.data_parallel_rank} of "
                f"{ranks.data_parallel_size}, and would be divided between the ranks once more; "
                "give accelerator.prepare(), or Lightning's Trainer, a "
                "megaindex.adapters.RunLoader, which they leave as it is"
            )
        return ranks.micro_batch_size

    @property
    @abstractmethod
    def _order(self) -> dict[str, Any]:
        """JSON values by name on which the order of samples depends."""

    @abstractmethod
    def _check_fields(self, stored: CheckpointReader) -> None:
        """Raise FormatError if a state of this kind holds a value that no such sampler writes."""

    @abstractmethod
    def _check_position(self, position: LoaderPosition) -> None:
        """Raise InvalidArgument if this sampler cannot start at ``position``."""

    @abstractmethod
    def _refusals(
        self, position: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        """Yield name and reason of each difference from the run of order ``stored`` that forbids
        continuing at ``position``."""

    @abstractmethod
    def _position_after(self, micro_batches: int) -> LoaderPosition:
        """Return the position after ``micro_batches`` were served on every rank."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of micro batches of an iteration, equal on every rank."""

    @abstractmethod
    def _micro_batches(self) -> Iterator[list[int | None]]:
        """Yield the micro batches from the start on; set ``_position`` before each."""

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self._ranks}, {self._position.consumed_samples:,} of "
            f"{self._order['train_samples']:,} samples consumed)"
        )

    def __iter__(self) -> Iterator[list[int | None]]:
        self._position = self._start
        return self._micro_batches()

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last micro batch yielded, as JSON values.

        StatefulDataLoader stores one for each prefetched batch, and returns that of the last batch
        it yielded. A plain DataLoader with workers does not: use `state_after` with it.
        """
        return self._state(self._position)

    def state_after(self, micro_batches: int) -> dict[str, Any]:
        """Return the state after ``micro_batches`` micro batches, counted from the start.

        Raises:
            InvalidArgument: an iteration has fewer.
        """
        micro_batches = check_between("micro_batches", micro_batches, 0, len(self))
        return self._state(self._position_after(micro_batches))

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Start at the position of a state, with the ranks and batch sizes of this sampler.

        Args:
            state: a result of `state_dict` or `state_after`, of any rank.
            allow: names of differences to accept: ``kind`` and the keys of the state.

        Raises:
            InvalidArgument: continuing would change the samples served before or after; the message
                states reason and name.
            FormatError: the state is damaged, or not one of `state_dict`.
        """
        position = self._parse(state)
        unknown = sorted(set(allow) - {"kind", "skip", *self._order})
        if unknown or isinstance(allow, str):
            raise InvalidArgument(
                f"allow must hold names among kind, skip, {', '.join(self._order)}, got {allow!r}"
            )
        for name, reason in self._differences(position, state):
            if name not in allow:
                raise InvalidArgument(
                    f"{reason}; use the settings of the checkpoint, or, if the change is intended, "
                    f'load it with allow=("{name}",)'
                )
        self._check_position(position)
        self._start = self._position = position

    def _state(self, position: LoaderPosition) -> dict[str, Any]:
        state = {
            "version": VERSION,
            "kind": self.kind,
            "consumed_samples": position.consumed_samples,
            "rows_left": position.rows_left,
            **self._order,
        }
        step = position.step
        if step is None:
            return state
        begun = {"first": step.first, "samples": step.samples, "rows": step.rows}
        return {**state, "version": WITHIN_BALANCED, "step": begun}

    def _differences(
        self, position: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        if stored["kind"] != self.kind:
            yield (
                "kind",
                f"the sampler must be of kind {shown(stored['kind'])}, as in the checkpoint, got "
                f"{self.kind!r}, which has another order",
            )
        ours = self._order["fingerprint"]
        if stored["fingerprint"] != ours:
            yield (
                "fingerprint",
                f"the fingerprint of the order must be {shown(stored['fingerprint'])}, as in the "
                f"checkpoint, got {ours!r}",
            )
        yield from self._refusals(position, {**self._order, **stored})

    def _parse(self, state: Mapping[str, Any]) -> LoaderPosition:
        """Check every field of a state of any kind, and return its position."""
        stored = CheckpointReader("the state of a sampler", state)
        stored.check_version(VERSION, WITHIN_BALANCED, WITH_SKIPS)
        kind = stored.text("kind")
        if stored.field("fingerprint", "must be text or null") is not None:
            stored.text("fingerprint")
        stored.integer("num_samples")
        stored.integer("train_samples")
        if kind == self.kind:
            self._check_fields(stored)
        consumed, rows = stored.integer("consumed_samples"), stored.integer("rows_left")
        step = stored_step(stored)
        if kind == self.kind:
            return LoaderPosition(consumed, rows, step)
        if step is not None:
            raise InvalidArgument(
                "the checkpoint lies within a balanced step, which a sampler of kind "
                f"{self.kind!r} cannot finish; use MicroBatchSampler with the balance of the "
                "checkpoint, or continue from the end of a step"
            )
        # the rows left of another kind's step are samples like all that follow
        return LoaderPosition(consumed)


def stored_step(stored: CheckpointReader) -> Step | None:
    """Return the balanced step within which the state of a sampler lies; None outside of one.

    Raises:
        FormatError: the state is damaged.
    """
    version, has_step = stored.values["version"], "step" in stored.values
    if version != WITH_SKIPS and has_step != (version == WITHIN_BALANCED):
        raise stored.error(
            f"it must have a step if and only if its version is {WITHIN_BALANCED}", stored.values
        )
    if ("skip" in stored.values) != (version == WITH_SKIPS):
        raise stored.error(
            f"it must have skips if and only if its version is {WITH_SKIPS}", stored.values
        )
    if "step" not in stored.values:
        return None
    step = stored.part("step", "the step of a sampler's state")
    consumed = stored.integer("consumed_samples")
    rows = step.integer("rows", least=2, most=2**31)
    left = stored.integer("rows_left", least=1, most=rows - 1)
    samples = step.integer("samples", most=rows)
    first = step.integer("first", most=consumed)
    begun = Step(
        first=first, samples=samples, rows=rows, served=consumed - first, rows_served=rows - left
    )
    if not 0 <= samples - begun.served <= left or begun.served > begun.rows_served:
        raise step.error(
            f"its {samples} samples must be those of {begun.rows_served} rows served and {left} "
            "rows left",
            begun.served,
        )
    return begun


def decided_samples(state: Mapping[str, Any]) -> int:
    """Return the position before which the order decides the samples served, or to be served in
    the step begun: the end of a balanced step, else the number of samples consumed."""
    stored = CheckpointReader("the state of a sampler", state)
    consumed = stored.integer("consumed_samples")
    if "step" not in stored.values:
        return consumed
    step = stored.part("step", "the step of a sampler's state")
    return max(consumed, step.integer("first") + step.integer("samples", most=2**31))


class CyclicSampler(Resumable):
    """Micro batches of one rank in the order of Megatron's ``--dataloader-type cyclic``.

    Equal to Megatron-LM's MegatronPretrainingRandomSampler, which shuffles with torch's generator,
    seeded by the number of the epoch. Its order depends on the micro batch size and the number of
    ranks: an epoch is cut to whole rounds, the samples that are shuffled are cut too, and with
    ``data_sharding`` each rank shuffles a part of its own. So a run can continue only with the
    same, unless the difference is allowed by name. `MicroBatchSampler` over a shuffled order has
    no such dependence.

    Without ``data_sharding``, Megatron's ranks can differ in the end of an epoch: 5 samples, 2
    ranks and micro batches of 1 give rank 0 a third micro batch while rank 1 starts the next epoch,
    unless the run was resumed there. Here every rank ends it after 2, as the resumed ones do.

    Requires torch.

    Args:
        num_samples: samples of the dataset, with ids 0 ... num_samples - 1.
        micro_batch_size: rows of one micro batch of a rank.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks.
        train_samples: samples to serve in all, ``consumed_samples`` included, over any number of
            epochs; those that do not fill a last round are not served.
        consumed_samples: samples served before the start, over all ranks.
        data_sharding: each rank reads from a part of its own, Megatron's default.
        fingerprint: fingerprint of the dataset; a state with another one is refused.

    Raises:
        InvalidArgument: a size is out of range, or a run cannot start at ``consumed_samples``.
    """

    kind = "cyclic"

    def __init__(
        self,
        *,
        num_samples: int,
        micro_batch_size: int,
        data_parallel_rank: int,
        data_parallel_size: int,
        train_samples: int,
        consumed_samples: int = 0,
        data_sharding: bool = True,
        fingerprint: str | None = None,
    ) -> None:
        self._ranks = RankLayout(
            micro_batch_size=micro_batch_size,
            data_parallel_rank=data_parallel_rank,
            data_parallel_size=data_parallel_size,
        )
        self._num_samples = num_samples = check_integer("num_samples", num_samples)
        self._train_samples = train_samples = check_integer("train_samples", train_samples)
        consumed_samples = check_between(
            "consumed_samples", consumed_samples, 0, train_samples, most_is="train_samples"
        )
        self._data_sharding = bool(data_sharding)
        self._fingerprint = fingerprint
        self._epoch_samples = num_samples // self._ranks.rows_per_round * self._ranks.rows_per_round
        if self._epoch_samples < 1:
            raise InvalidArgument(
                f"num_samples must be at least {self._ranks.rows_per_round}, a micro batch on "
                f"every rank, got {num_samples}"
            )
        self._start = self._position = LoaderPosition(consumed_samples)
        self._check_position(self._start)

    def __len__(self) -> int:
        left = self._train_samples - self._start.consumed_samples
        return max(0, left) // self._ranks.rows_per_round

    def _micro_batches(self) -> Iterator[list[int | None]]:
        size, stride = self._ranks.micro_batch_size, self._ranks.rows_per_round
        epoch, order = -1, np.empty(0, np.int64)
        first = self._start.consumed_samples
        for consumed in range(first, first + len(self) * stride, stride):
            if consumed // self._epoch_samples != epoch:
                epoch = consumed // self._epoch_samples
                order = self._epoch(epoch)
            begin = consumed % self._epoch_samples // stride * size
            self._position = LoaderPosition(consumed + stride)
            yield order[begin : begin + size].tolist()

    def _epoch(self, epoch: int) -> I64:
        """Return the samples of this rank in an epoch, int64."""
        ranks, micro = self._ranks, self._ranks.micro_batch_size
        if self._data_sharding:
            part = self._epoch_samples // ranks.data_parallel_size
            return ranks.data_parallel_rank * part + _permutation(part, epoch)
        shuffled = _permutation(self._num_samples // micro * micro, epoch)
        return shuffled[ranks.data_parallel_rank : self._epoch_samples : ranks.data_parallel_size]

    def _position_after(self, micro_batches: int) -> LoaderPosition:
        return LoaderPosition(
            self._start.consumed_samples + micro_batches * self._ranks.rows_per_round
        )

    @property
    def _order(self) -> dict[str, Any]:
        return {
            "fingerprint": self._fingerprint,
            "num_samples": self._num_samples,
            "micro_batch_size": self._ranks.micro_batch_size,
            "world_size": self._ranks.data_parallel_size,
            "data_sharding": self._data_sharding,
            "train_samples": self._train_samples,
        }

    def _check_fields(self, stored: CheckpointReader) -> None:
        stored.integer("micro_batch_size", least=1)
        stored.integer("world_size", least=1)
        stored.flag("data_sharding")
        stored.integer("rows_left", most=0)  # positions within a step do not occur

    def _check_position(self, position: LoaderPosition) -> None:
        consumed, stride = position.consumed_samples, self._ranks.rows_per_round
        if consumed % stride:
            raise InvalidArgument(
                f"consumed_samples must be whole rounds of {stride} samples in epochs of "
                f"{self._epoch_samples}, got {consumed}; use the micro batch size and number of "
                "ranks with which they were consumed"
            )

    def _refusals(
        self, position: LoaderPosition, stored: Mapping[str, Any]
    ) -> Iterator[tuple[str, str]]:
        for name in ("num_samples", "micro_batch_size", "world_size", "data_sharding"):
            theirs, ours = stored.get(name), self._order[name]
            if theirs != ours:
                yield (
                    name,
                    f"{name} must be {theirs}, as in the checkpoint, since the order of a cyclic "
                    f"sampler depends on it, got {ours}",
                )
        if position.consumed_samples > self._train_samples:
            yield (
                "train_samples",
                f"the checkpoint is at {position.consumed_samples} samples, past the end of this "
                f"run, {self._train_samples}",
            )


def _permutation(size: int, seed: int) -> I64:
    import torch

    order: I64 = torch.randperm(size, generator=torch.Generator().manual_seed(seed)).numpy()
    return order
