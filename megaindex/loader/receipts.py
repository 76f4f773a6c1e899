"""Receipts of the samples that a trainer received, counted when each batch leaves the loader.

A dataset made with ``fingerprints`` adds a row ``receipt`` to every sample: its position, and the
hash of the spans that were read for it. `receipted` removes the rows from each batch when it yields
the batch, so batches that are prefetched and dropped do not count:

    recorder = Recorder([corpus_fingerprint(dataset)])
    for batch in receipted(loader, recorder):
        train(batch)
    checkpoint["data"] = recorder.state_dict()
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.receipts import (
    DEFAULT_STRIDE,
    BlockReceipts,
    Receipt,
    fingerprint_keys,
    keys_for,
    planned_block_receipts,
    sample_receipts,
)
from megaindex.index.skips import Skips, skips_of
from megaindex.index.spans import Index, Spans
from megaindex.loader.sampler_state import RankLayout
from megaindex.loader.samplers import MicroBatchSampler
from megaindex.settings.mix_changes import MixChanges
from megaindex.validation import CheckpointReader, check_integer, differ, shown

logger = logging.getLogger("megaindex")

Batch = TypeVar("Batch", bound=MutableMapping[str, Any])


class Round(NamedTuple):
    """Positions begin ... end - 1, of which every rank receives a micro batch at the same time.

    With balance these are the positions of the whole step, which are served in any of its rounds.
    """

    begin: int
    end: int
    num_samples: int
    """Samples of the order; without skips positions of a wrapped step are taken modulo this."""
    skips: Skips | None = None
    """Skips of the run; a wrapped last step then serves its first samples that are not skipped."""

    def count(self, positions: I64) -> int:
        """Return the number of these positions that are in the round."""
        size = max(1, self.num_samples)
        if self.skips is not None:
            beyond = np.arange(max(self.begin, size), self.end) - size
            inside = (positions >= self.begin) & (positions < self.end)
            return int((inside | np.isin(positions, self.skips.positions_of(beyond))).sum())
        within = (positions - self.begin % size) % size
        return int((within < self.end - self.begin).sum())


@dataclass(frozen=True, kw_only=True)
class Counted:
    """Sums of a recorder."""

    ladder: BlockReceipts
    in_place: int = 0
    """Number of samples served in the round of micro batches that holds their position."""
    misplaced: int = 0
    """Number of samples served in another round."""

    def __add__(self, other: Counted) -> Counted:
        return Counted(
            ladder=self.ladder + other.ladder,
            in_place=self.in_place + other.in_place,
            misplaced=self.misplaced + other.misplaced,
        )


class Recorder:
    """Receipts of one rank's samples by blocks of positions; over all ranks they sum to the plan's.

    A receipt binds each sample to its position in the order, whenever it is served. `Loader` also
    counts the samples served in the round of micro batches that holds their position
    (``in_place``) and those served in another (``misplaced``).

    Args:
        fingerprints: fingerprint of each source, 32 hex digits.
        parameters: other values that must be equal when a run continues, such as seed and order;
            JSON values.
        stride: positions of one block, a power of two.
        ranks: rank and number of ranks, kept in the state, so that a receipt that all ranks load
            counts once. `Loader` takes them from its sampler.

    Raises:
        InvalidArgument: a fingerprint is not 32 hex digits, or ``stride`` not a power of two.
    """

    def __init__(
        self,
        fingerprints: Sequence[str],
        parameters: Mapping[str, Any] | None = None,
        *,
        stride: int = DEFAULT_STRIDE,
        ranks: RankLayout | None = None,
    ) -> None:
        self._keys = fingerprint_keys(fingerprints)
        self._identity: dict[str, Any] = {
            "fingerprints": list(fingerprints),
            "parameters": dict(parameters or {}),
        }
        self._nothing = Counted(ladder=BlockReceipts(stride=stride, blocks={}))
        self._counted = self._nothing
        self.ranks = ranks

    @property
    def ladder(self) -> BlockReceipts:
        """Receipts by blocks of ``stride`` positions."""
        return self._counted.ladder

    @property
    def receipt(self) -> Receipt:
        """Receipt of all samples added."""
        return self.ladder.total

    def add(self, positions: npt.ArrayLike, spans: Spans) -> None:
        """Add samples at ``positions``, int64[n], that read ``spans``."""
        self.add_rows(sample_receipts(np.asarray(positions, np.int64), spans, self._keys))

    def add_rows(self, rows: npt.ArrayLike, round_of: Round | None = None) -> None:
        """Add rows of samples, the field ``receipt``; rows at position -1 are padding.

        Args:
            rows: int64[n, 3]: position and two words of hash.
            round_of: the round of micro batches in which they were served, if recorded.
        """
        added: I64 = np.asarray(rows, np.int64).reshape(-1, 3)
        added = added[added[:, 0] != -1]
        stride = self.ladder.stride
        numbers = added[:, 0] >> (stride.bit_length() - 1)  # one may be 2**63
        blocks = {
            number: Receipt.from_rows(added[numbers == number])
            for number in np.unique(numbers).tolist()
        }
        placed = 0 if round_of is None else round_of.count(added[:, 0])
        self._counted += Counted(
            ladder=BlockReceipts(stride=stride, blocks=blocks),
            in_place=placed,
            misplaced=0 if round_of is None else len(added) - placed,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return receipts, fingerprints and parameters as JSON values, a few kilobytes."""
        counted = self._counted
        state = {**self.receipt.to_dict(), "ladder": counted.ladder.to_dict(), **self._identity}
        state |= {"in_place": counted.in_place, "misplaced": counted.misplaced}
        if self.ranks is not None:
            state |= {
                "data_parallel_rank": self.ranks.data_parallel_rank,
                "data_parallel_size": self.ranks.data_parallel_size,
            }
        return state

    def take(self, counted: Counted) -> None:
        """Continue from sums returned by `read`."""
        self._counted = counted

    def read(self, state: Mapping[str, Any] | None) -> Counted:
        """Return the sums of `state_dict`, or zero sums for None, without changing the recorder."""
        if state is None:
            return self._nothing
        stored = stored_receipt(state)
        for name, ours in self._identity.items():
            if name == "fingerprints":  # sources that joined since follow those of the state
                ours = ours[: len(stored.fingerprints)]
            if differ(state[name], ours):
                raise InvalidArgument(
                    f"{name} must be {shown(state[name])}, as in the checkpoint, got "
                    f"{shown(ours)}; use the same corpora and settings, or start a new receipt"
                )
        return stored.counted if self._is_mine(stored) else self._nothing

    def _is_mine(self, stored: StoredReceipt) -> bool:
        """Return True if this rank continues the receipt; each rank does if it records no rank."""
        if stored.rank is None or stored.size is None or self.ranks is None:
            return True
        rank, size = self.ranks.data_parallel_rank, self.ranks.data_parallel_size
        if stored.size != 1 and (stored.rank, stored.size) != (rank, size):
            logger.warning(
                "rank %d of %d loads the receipt of rank %d of %d: it is counted once, by rank %d, "
                "and the receipts of the other ranks are missing; use join_states over the states "
                "of all ranks to continue with any number of ranks",
                rank, size, stored.rank, stored.size, stored.rank % size,
            )  # fmt: skip
        return rank == stored.rank % size

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict`.

        Raises:
            InvalidArgument: the state has other fingerprints or parameters.
            FormatError: the state is damaged, or its receipt is not the sum of its ladder.
        """
        CheckpointReader(_WHAT, state)
        self._counted = self.read(state)


_WHAT = "the state of a recorder"


@dataclass(frozen=True, kw_only=True)
class StoredReceipt:
    """State of a `Recorder`, of any corpora and parameters."""

    counted: Counted
    fingerprints: list[str]
    parameters: Mapping[str, Any]
    rank: int | None
    """None in states of recorders without ranks."""
    size: int | None


def stored_receipt(state: Mapping[str, Any]) -> StoredReceipt:
    """Return the parsed state, or raise FormatError as `Recorder.load_state_dict`."""
    stored = CheckpointReader(_WHAT, state)
    fingerprints = stored.checked(
        "fingerprints",
        "must be a list of text",
        lambda value: isinstance(value, list) and all(isinstance(each, str) for each in value),
    )
    parameters = stored.part("parameters", "the parameters of a receipt").values
    receipt = Receipt.from_dict(state)
    ladder = BlockReceipts.from_dict(stored.field("ladder", "must be a mapping"))
    if ladder.total != receipt:
        raise FormatError(
            "the stored receipt must be the sum of its ladder; take it from an intact checkpoint"
        )
    misplaced = stored.integer("misplaced", most=receipt.count)
    placed = stored.integer("in_place", most=receipt.count - misplaced)
    rank = size = None
    if "data_parallel_rank" in state or "data_parallel_size" in state:
        size = stored.integer("data_parallel_size", least=1)
        rank = stored.integer("data_parallel_rank", most=size - 1)
    return StoredReceipt(
        counted=Counted(ladder=ladder, in_place=placed, misplaced=misplaced),
        fingerprints=fingerprints,
        parameters=parameters,
        rank=rank,
        size=size,
    )


def join_states(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one state for any number of ranks, with the sum of the receipts of all ranks.

    Every rank of a continued run may load it: rank 0 continues the receipt, the others start at
    zero.

    Args:
        states: `state_dict` of a `Loader` or a `Recorder`, one of each rank.

    Raises:
        InvalidArgument: a rank is missing or occurs twice, or the states differ in more than their
            receipts.
        FormatError: a state is damaged.
    """
    if not isinstance(states, Sequence) or not states:
        raise InvalidArgument("states must be a list with the state of each rank")
    first = CheckpointReader("the state of a rank", states[0]).values
    if "ladder" in first:
        return _joined(states)
    if not isinstance(first.get("receipt"), Mapping):
        if any(dict(state) != dict(first) for state in states):
            raise InvalidArgument(_NOT_ONE)
        return dict(first)  # loaders without receipts
    parts = [
        CheckpointReader("the state of a rank", state).part("receipt", "its receipt")
        for state in states
    ]
    _check_one_mix(states)
    if any({**state, "receipt": None} != {**first, "receipt": None} for state in states):
        raise InvalidArgument(_NOT_ONE)
    return {**first, "receipt": _joined([part.values for part in parts])}


def _check_one_mix(states: Sequence[Mapping[str, Any]]) -> None:
    """Raise InvalidArgument if ranks changed the mix of their run in different ways."""
    given = [
        part.get("mix_changes") if isinstance(part, Mapping) else None
        for part in (state.get("recipe") for state in states)
    ]
    if all(each == given[0] for each in given):
        return
    number = next(k for k, each in enumerate(given) if each != given[0])
    records = [
        MixChanges.empty(())
        if each is None
        else MixChanges.from_dict(CheckpointReader("the changes of the mix", each))
        for each in (given[0], given[number])
    ]
    sample = records[0].first_difference(records[1], 2**62)
    raise InvalidArgument(
        f"the states of ranks 0 and {number} differ in the weights of their mix, first from sample "
        f"{sample} on: set_mix was called with other weights, or at another step; call it on every "
        "rank with those of rank 0"
    )


_NOT_ONE = (
    "the states must be of one step of one run, but they differ in more than their receipts; take "
    "them on all ranks after the same number of batches"
)


def _joined(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Join states of recorders."""
    stored = [stored_receipt(state) for state in states]
    first = stored[0]
    if any(
        differ(each.fingerprints, first.fingerprints) or differ(each.parameters, first.parameters)
        for each in stored
    ):
        raise InvalidArgument(
            "the receipts must have the same corpora and settings; join those of one run"
        )
    _check_ranks(stored)
    recorder = Recorder(first.fingerprints, first.parameters, ranks=_ALONE)
    recorder.take(sum((each.counted for each in stored[1:]), first.counted))
    return recorder.state_dict()


_ALONE = RankLayout(micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1)


def _check_ranks(stored: Sequence[StoredReceipt]) -> None:
    """Raise InvalidArgument if a rank is missing or occurs twice, where states record ranks."""
    if all(each.size is not None for each in stored):
        found = sorted((each.size, each.rank) for each in stored)
        if found != [(len(stored), rank) for rank in range(len(stored))]:
            ranks = ", ".join(f"{rank} of {size}" for size, rank in found[:8])
            raise InvalidArgument(
                f"the receipts must be one of every rank, got those of {ranks}; give each once"
            )
    served = [each.counted.ladder.total for each in stored if each.counted.ladder.total.count]
    if len(set(served)) != len(served):
        raise InvalidArgument(
            "the same receipt occurs twice; give that of every rank once, not one rank's for all"
        )


@dataclass(frozen=True, kw_only=True)
class ReceiptCheck:
    """Comparison of the receipts of all ranks with the plan; ``str`` describes the result."""

    served: BlockReceipts
    planned: BlockReceipts
    in_place: int
    """Number of samples served in the round of micro batches that holds their position."""
    misplaced: int
    """Number of samples served in another round."""

    @property
    def equal(self) -> bool:
        """True if each planned sample was served exactly once, and in its round if recorded."""
        return self.served == self.planned and not self.misplaced

    def __str__(self) -> str:
        served, planned = self.served.total.count, self.planned.total.count
        where = self.served.first_difference(self.planned)
        if where is not None:
            return (
                f"{served} samples were served of the {planned} planned; the first difference lies "
                f"in positions {where[0]} to {where[1] - 1}"
            )
        if self.misplaced:
            return (
                f"the {planned} planned samples were served once each, {self.misplaced} of them in "
                "another round of micro batches than planned"
            )
        unknown = served - self.in_place
        return f"the {planned} planned samples were served once each, {self.in_place} of them " + (
            f"in their round of micro batches; of {unknown} that is not recorded"
            if unknown
            else "in their round of micro batches"
        )


def check_receipts(
    states: Sequence[Mapping[str, Any]], index: Index, *, end: int | None = None
) -> ReceiptCheck:
    """Compare the sum of the receipts of all ranks with that of the samples the index plans.

    Args:
        states: as for `join_states`, or its result as the only one.
        index: index of the run.
        end: number of samples to compare, from the first of the run. Default: the samples
            consumed according to the states, which those of recorders do not hold.

    Raises:
        InvalidArgument: as `join_states`; or the states hold no receipts, or ``end`` is missing.
        FormatError: a state is damaged.
        OutOfRange: the index holds fewer samples.
    """
    state: Mapping[str, Any] = join_states(states)
    if end is None:
        if "consumed_samples" not in state:
            raise InvalidArgument(
                "end must be given, the number of samples served: states of recorders lack it"
            )
        end = CheckpointReader("the state of a loader", state).integer("consumed_samples")
    receipt = state if "ladder" in state else state.get("receipt")
    if receipt is None:
        raise InvalidArgument("the states hold no receipts; make the loader with a Recorder")
    stored = stored_receipt(receipt)
    served, keys = stored.counted.ladder, keys_for(index, stored.fingerprints)
    end = check_integer("end", end)
    planned = BlockReceipts(stride=served.stride, blocks={})
    size = index.num_samples
    beyond = max(0, end - size) if end < 2 * size else 0  # samples of a wrapped last step
    skips = skips_of(index)
    wrapped = beyond
    if skips is not None and beyond:
        wrapped = int(skips.positions_of(beyond - 1)) + 1
    for stop in (end - beyond, wrapped):
        planned += planned_block_receipts(index, 0, stop, keys, stride=served.stride)
    return ReceiptCheck(
        served=served,
        planned=planned,
        in_place=stored.counted.in_place,
        misplaced=stored.counted.misplaced,
    )


def receipted(
    batches: Iterable[Batch], recorder: Recorder, sampler: object = None
) -> Iterator[Batch]:
    """Yield the batches without their field ``receipt``, which is added to the recorder.

    Args:
        batches: mappings with the field ``receipt``, in host memory.
        recorder: recorder of this rank.
        sampler: the `MicroBatchSampler` of the batches, at the start of its iteration; with it,
            samples outside their round are counted as misplaced.

    Raises:
        InvalidArgument: a batch has no field ``receipt``.
    """
    rounds = rounds_of(sampler)
    for batch in batches:
        rows = batch.pop("receipt", None)
        if rows is None:
            raise InvalidArgument(
                "a batch must have the field receipt; make its GPTDataset with fingerprints=[…]"
            )
        recorder.add_rows(rows, next(rounds))
        yield batch


def rounds_of(sampler: Any, first: int = 0) -> Iterator[Round | None]:
    """Yield the rounds of a sampler from number ``first``; None without end after the last, and
    for a sampler that does not serve samples in the order of their positions."""
    state_after: Any = getattr(sampler, "state_after", None)
    state = None if state_after is None else state_after(first)
    while state is not None and state.get("kind") == MicroBatchSampler.kind:
        first, before = first + 1, state
        skips = getattr(sampler, "skips", None)
        size = state["num_samples"] if skips is None else skips.num_positions
        if first > len(sampler):
            break
        state = state_after(first)
        step = before.get("step", state.get("step"))
        if step is None:
            yield Round(before["consumed_samples"], state["consumed_samples"], size, skips)
        else:  # balanced: the samples of a step are served in any of its rounds
            yield Round(step["first"], step["first"] + step["samples"], size, skips)
    while True:
        yield None
