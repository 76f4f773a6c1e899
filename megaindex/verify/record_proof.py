"""Comparison of two records of a run: they differ by exactly what was skipped.

A record is the state of a run's loaders, with the receipts of what was served, or a lock, with
those of what is to be served. Two records are compared in three parts: each agrees with its own
order and skips, the orders and steps without skips are the same, and what remains is the difference
of the skips.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.arithmetic import INT64_MAX
from megaindex.builders.recipe import open_recipe
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.receipts import (
    DEFAULT_STRIDE,
    LONGEST_STRIDE,
    BlockReceipts,
    fingerprint_keys,
)
from megaindex.index.skips import (
    Skip,
    Skips,
    StoredSkips,
    masked_tokens,
    numbered_masks,
    ranges_without,
    skips_of,
    source_number,
    unskipped,
    with_skips,
)
from megaindex.index.spans import Index
from megaindex.index.stretches import LossMask, StretchedIndex
from megaindex.io.atomic import read_named
from megaindex.io.paths import absolute
from megaindex.loader.receipts import ReceiptCheck, check_receipts, join_states, stored_receipt
from megaindex.loader.recipe_state import StoredRecipe
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.opening import locked_mix, locked_skips, run_of_lock
from megaindex.lock.shape import FORMAT as LOCK_FORMAT
from megaindex.progress import Bar, silent
from megaindex.run.same_until import (
    Compared,
    apart,
    bounds_without_moved,
    compare_receipts,
    first_changed_mix,
    mix_difference,
    other_steps,
    same_until,
    undrawn,
)
from megaindex.settings.mix_changes import MixChanges
from megaindex.validation import CheckpointReader
from megaindex.verify.record_content import (
    ContentCheck,
    HeldContent,
    compare_content,
    held_by_lock,
    held_by_state,
    with_contents,
)

States = Sequence[Mapping[str, Any]]

_LONGEST = 1 << 30  # bytes of the states of all ranks
_MOST_LINES = 8  # differences that are printed


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One record: what was served, or what a lock plans, compared with its order.

    Attributes:
        consumed_samples: position of the run; of a lock, its end.
        check: comparison of the receipts with the plan, skips included.
        samples_skipped: positions before ``consumed_samples`` that were not served.
        samples_moved: moved samples that were served.
        tokens_masked: labels of the samples served that are of masked documents.
        tokens_removed: tokens of them, inputs or labels, that are of removed documents.
        skip: the skips of the run.
        is_lock: True for a lock, which plans samples and has served none.
        first_sample: position of the first sample, behind those of a past in another system.
        identity: identity of the run, of a lock, or as a state names it; None: it names none.
    """

    consumed_samples: int
    check: ReceiptCheck
    samples_skipped: int
    samples_moved: int
    tokens_masked: int
    tokens_removed: int
    skip: tuple[Skip, ...]
    is_lock: bool = False
    first_sample: int = 0
    identity: str | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "record": "lock" if self.is_lock else "checkpoint",
            "identity": self.identity,
            "consumed_samples": self.consumed_samples,
            "samples_served": self.check.served.total.count,
            "receipt": str(self.check.served.total),
            "planned": str(self.check.planned.total),
            "as_planned": self.check.equal,
            "samples_skipped": self.samples_skipped,
            "samples_moved": self.samples_moved,
            "tokens_masked": self.tokens_masked,
            "tokens_removed": self.tokens_removed,
        }

    def __str__(self) -> str:
        counts = (
            (self.samples_skipped, "skipped"),
            (self.samples_moved, "of them served behind the end"),
        )
        more = "".join(f", {count:,} {what}" for count, what in counts if count)
        if self.tokens_masked:
            more += f"; loss of {self.tokens_masked:,} tokens masked"
        if self.tokens_removed:
            more += f"; {self.tokens_removed:,} tokens removed"
        if self.is_lock:
            return (
                f"lock of {self.consumed_samples - self.first_sample:,} samples{more}; its "
                f"receipts are those of the {self.check.planned.total.count:,} planned samples"
            )
        return f"at sample {self.consumed_samples:,}{more}; {self.check}"


@dataclass(frozen=True, kw_only=True)
class RecordProof:
    """Result of `compare_records`; ``str`` describes it.

    Attributes:
        first: the first record.
        second: the second record.
        common_samples: samples of the order, without skips, that were compared: those before
            ``end``.
        end: position up to which the records were compared, that of the shorter one.
        first_difference: positions [begin, end) of the first block in which the orders without
            skips differ; None if they are the same.
        added: skips of the second record that the first does not have.
        removed: skips of the first record that the second does not have.
        content: comparison of tokens, loss targets and evaluation.
        behind: differences of the runs behind ``end``, which the records do not have.
        differences: other differences than those of the skips, the first of each kind.
        beside: of two locks, what differs and does not enter the identity: tokenizers, provenance,
            about; None: one record is a checkpoint.
        order_compared: False if a checkpoint names no order of its own, and its receipts are not
            those of the lock.
    """

    first: RunRecord
    second: RunRecord
    common_samples: int
    end: int
    first_difference: tuple[int, int] | None
    added: tuple[Skip, ...]
    removed: tuple[Skip, ...]
    content: ContentCheck
    behind: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()
    beside: tuple[str, ...] | None = None
    order_compared: bool = True

    @property
    def holds(self) -> bool:
        """True if both records are as planned, and differ by exactly their skips."""
        as_planned = self.first.check.equal and self.second.check.equal
        return as_planned and self.first_difference is None and not self.differences

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "holds": self.holds,
            "common_samples": self.common_samples,
            "up_to_sample": self.end,
            "tokens": self.content.tokens,
            "not_compared": list(self.content.not_compared),
            "behind": list(self.behind),
            "order_compared": self.order_compared,
            "first_difference": self.first_difference and list(self.first_difference),
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "added": [_text(skip) for skip in self.added],
            "removed": [_text(skip) for skip in self.removed],
            "differences": list(self.differences),
            "beside": None if self.beside is None else list(self.beside),
        }

    def __str__(self) -> str:
        lines = [f"first: {self.first}", f"second: {self.second}", *self._identities()]
        if not self.order_compared:
            lines.append(
                "order: not compared, the checkpoint names none of its own, and its receipts are "
                "others than the lock's"
            )
        elif self.first_difference is None:
            lines.append(f"order: the same without skips, {self.common_samples:,} samples compared")
        else:
            begin, end = self.first_difference
            lines.append(
                f"order: other samples even without skips, first in positions {begin} to {end - 1}"
            )
        lines += [f"difference: {text}" for text in self.differences[:_MOST_LINES]]
        more = len(self.differences) - _MOST_LINES
        lines += [f"difference: {more} more, see --json"] if more > 0 else []
        lines += [f"skip only in the second: {_text(skip)}" for skip in self.added]
        lines += [f"skip only in the first: {_text(skip)}" for skip in self.removed]
        lines += [f"behind sample {self.end:,} the runs differ: {text}" for text in self.behind]
        lines += self.content.not_compared
        if self.content.tokens == "sampled":
            lines.append("tokens: compared in 256 KiB of each source")
        if not self.holds:
            lines.append("the records differ by more than their skips")
        else:
            what = "the records have the same skips, and no other difference"
            if self.added or self.removed:
                what = "the records differ by exactly their skips"
            lacking = (text.partition(":")[0] for text in self.content.not_compared)
            lines.append("; ".join((f"{what}, up to sample {self.end:,}", *lacking)))
        return "\n".join(lines)

    def _identities(self) -> list[str]:
        """Return the line with the identities of the records; none if neither names one."""
        ours, theirs = self.first.identity, self.second.identity
        if ours is None and theirs is None:
            return []
        if ours == theirs:
            compared = f"{self.common_samples:,} samples of it compared"
            lines = [f"identity: {ours} in both, {compared}"]
        else:
            names = (f"{name or 'not known'} in the" for name in (ours, theirs))
            lines = [f"identity: {next(names)} first, {next(names)} second"]
        if self.beside is not None:
            other = ", ".join(self.beside) or "no other tokenizer, provenance or about"
            lines.append(f"beside it: {f'other {other}' if self.beside else other}")
        return lines


def _beside(first: Lock, second: Lock) -> Iterator[str]:
    """Yield what two locks say of the data of training that differs beside their identity."""
    kinds: dict[str, list[Any]] = {"token type": [], "tokenizer": [], "provenance": []}
    for lock in (first, second):
        tokenizers = lock.content["tokenizers"]
        used = [lock.sources[row] for row in lock.content["subsets"]["train"]["sources"]]
        kinds["token type"].append([each.token_type for each in used])
        kinds["tokenizer"].append([[tokenizers[row] for row in s.tokenizers] for s in used])
        kinds["provenance"].append([each.provenance for each in used])
    for kind, (ours, theirs) in kinds.items():
        pairs = enumerate(itertools.zip_longest(ours, theirs))
        for number in [number for number, (a, b) in pairs if a != b][:_MOST_LINES]:
            yield f"{kind} of source {number}"
    if first.content["about"] != second.content["about"]:
        yield "about"


def _text(skip: Skip) -> str:
    if skip.ranges:
        return ", ".join(f"{key} {value}" for key, value in skip.to_dict().items())
    what = "all documents" if skip.documents is None else "documents"
    given = f" of {skip.documents}" if isinstance(skip.documents, str) else ""
    source = "" if skip.source is None else f", source {skip.source}"
    return f"{what}{given}{source}, from step {skip.from_step}" + ", removed" * skip.remove


def compare_records(
    first: States | Lock,
    second: States | Lock,
    *,
    indices: tuple[Index, Index] | None = None,
    search: str | os.PathLike[str] | None = None,
    bar: Bar = silent,
) -> RecordProof:
    """Compare two records of a run, such as the checkpoints or the locks before and after a skip.

    Args:
        first: states of all ranks, as for `check_receipts`, or a lock.
        second: states of all ranks of the other record, or a lock.
        indices: index of each run, with its skips (`MicroBatchSampler.skipped`), for states. By
            default those of the recipes in the states, whose relative paths are relative to the
            current directory; for states of a `Loader`, that of the other record, if it is a lock.
        search: folder in which files of a lock are sought that are not at their paths.
        bar: function of the total bytes of the .bin files that returns a function called with the
            bytes read. They are read for a lock with hashes of tokens and a checkpoint with
            content fingerprints, which are compared by the files of the lock.

    Raises:
        InvalidArgument: a rank is missing, or the states hold no recipe, and neither ``indices``
            nor a lock is given.
        FormatError, StorageError: a state or a lock is damaged, a source cannot be read, or a file
            of skipped documents or of tokens is not what it was.
    """
    chosen: Sequence[Index | None] = (None, None) if indices is None else indices
    records: list[Any] = [
        each if isinstance(each, Lock) else join_states(each) for each in (first, second)
    ]
    locks = [_plan_of_lock(each, search) if isinstance(each, Lock) else None for each in records]
    locked = locks[0] or locks[1]
    ours, theirs = (
        _plan_of_state(each, index, locked) if plan is None else plan
        for each, index, plan in zip(records, chosen, locks, strict=True)
    )
    plans = (ours, theirs)
    common = min(min(plan.position, plan.order.num_samples) for plan in plans)
    is_whole = ours.lock is not None and theirs.lock is not None
    found = same_until(
        ours.compared,
        theirs.compared,
        0,
        common,
        stride=min(ours.stride, theirs.stride),
        end_of_steps=INT64_MAX if is_whole else None,
    )
    first_sample = min(plan.record.first_sample for plan in plans)
    unknown = [
        f"steps and what follows not compared: the {which} record names no run of known steps"
        for which, plan in zip(("first", "second"), plans, strict=True)
        if plan.step_bounds is None
    ]
    content = compare_content(
        *(
            with_contents(plan.held, plan.lock, search, bar)
            if plan.lock is not None and plan.held.chunk_bytes != 0 and other.held.has_contents
            else plan.held
            for plan, other in ((ours, theirs), (theirs, ours))
        )
    )
    compared = all(plan.record.check.equal or not plan.borrows for plan in plans)
    causes = found.causes if compared else (*found.sources, *found.steps)
    return RecordProof(
        first=ours.record,
        second=theirs.record,
        common_samples=max(0, common - first_sample),
        end=common,
        first_difference=found.where and (found.where[0], min(found.where[1], common)),
        order_compared=compared,
        added=tuple(_skips_without(theirs, ours)),
        removed=tuple(_skips_without(ours, theirs)),
        content=replace(content, not_compared=(*content.not_compared, *unknown[:1])),
        behind=tuple(_behind(plans, common)),
        differences=(*causes, *content.differences),
        beside=None if not is_whole else tuple(_beside(*records)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """A record with its order."""

    record: RunRecord
    index: Index
    """With skips."""
    fingerprints: Sequence[str]
    step_bounds: I64 | None
    """First sample of each step without skips, and the end; None: not known."""
    held: HeldContent
    stride: int = DEFAULT_STRIDE
    lock: Lock | None = None
    mix: MixChanges | None = None
    """Changes of the mix; None without any."""
    borrows: bool = False
    """True for a checkpoint that is compared with the order of a lock."""

    @property
    def order(self) -> Index:
        """The index without skips."""
        return unskipped(self.index)

    @property
    def compared(self) -> Compared:
        """The positions of the run, without skips."""
        return Compared(
            index=self.order,
            fingerprints=self.fingerprints,
            step_bounds=self.step_bounds,
            mix=self.mix,
        )

    @property
    def position(self) -> int:
        """Samples of the order, without skips, before the position of the record."""
        skips, consumed = skips_of(self.index), self.record.consumed_samples
        return consumed if skips is None else min(consumed, skips.end)


def _plan_of_lock(lock: Lock, search: str | os.PathLike[str] | None) -> _Plan:
    """Return the plan of a lock, whose receipts are compared with its samples."""
    run, train = run_of_lock(lock, search=search), lock.subset("train")
    fingerprints = lock.fingerprints("train")
    total, other = compare_receipts(train, run.index, fingerprint_keys(fingerprints))
    if other is not None:
        raise FormatError(
            f"{lock.path}: the receipt of steps from {other.first_step} on must be {other.ours}, "
            f"that of its samples, got {other.theirs}; restore the lock"
        )
    planned = BlockReceipts(stride=LONGEST_STRIDE, blocks={0: total})
    check = ReceiptCheck(served=planned, planned=planned, in_place=planned.total.count, misplaced=0)
    skip = locked_skips(lock)
    return _Plan(
        record=_record(train["samples"], check, run.index, skip, lock.identity, is_lock=True),
        index=run.index,
        fingerprints=fingerprints,
        step_bounds=bounds_without_moved(run),
        held=held_by_lock(lock),
        lock=lock,
        mix=locked_mix(lock, search),
    )


def _plan_of_state(state: Mapping[str, Any], index: Index | None, locked: _Plan | None) -> _Plan:
    bounds = mix = opened = None
    stored = None if state.get("recipe") is None else StoredRecipe.read(state)
    borrows = index is None and stored is None
    if index is None and stored is not None:
        opened = open_recipe(stored.recipe_here)
        _check_masked(state, opened.layout.skips)
        index, mix = opened.index, opened.layout.recipe.mix_changes
        bounds = opened.layout.steps().bounds
    elif index is None and locked is not None:
        index = _index_by_lock(state, locked)
        if locked.record.identity == _stored_identity(state):
            bounds, mix = locked.step_bounds, locked.mix
    elif index is None:
        raise InvalidArgument(
            "the states must hold their recipe, as those of loader_of_recipe; compare others with "
            "the lock of the run, or call megaindex.lock.compare_records with the indices of both "
            "runs"
        )
    consumed = CheckpointReader("the state of a loader", state).integer("consumed_samples")
    check, skips = check_receipts([state], index), skips_of(index)
    fingerprints = stored_receipt(state["receipt"]).fingerprints
    facts = None if stored is None else list(stored.sources.values())
    return _Plan(
        record=_record(
            consumed,
            check,
            index,
            () if skips is None else skips.settings,
            _stored_identity(state),
        ),
        index=index,
        fingerprints=fingerprints,
        step_bounds=bounds,
        held=held_by_state(state, index, fingerprints, facts, opened),
        stride=check.served.stride,
        mix=mix,
        borrows=borrows,
    )


def _stored_identity(state: Mapping[str, Any]) -> str | None:
    """Return the identity that a state names; None for one without."""
    if state.get("identity") is None:
        return None
    return CheckpointReader("the state of a loader", state).hashed("identity")


def _stored_skips(state: Mapping[str, Any]) -> StoredSkips | None:
    stored = CheckpointReader("the state of a loader", state)
    return StoredSkips.read(stored.part("sampler", "the state of a sampler").values)


def _check_masked(state: Mapping[str, Any], skips: Skips | None) -> None:
    """Refuse a checkpoint whose files of skipped documents hold others now.

    Raises:
        FormatError: a file holds other documents than the checkpoint masks.
    """
    stored = _stored_skips(state)
    if stored is None or skips is None:
        return
    masking = [skip for skip in skips.settings if not skip.ranges]
    for theirs, mask, skip in zip(stored.masked, skips.masks, masking, strict=False):
        ours = mask.record
        if theirs["digest"] != ours["digest"]:
            raise FormatError(
                f"{skip.documents}: must hold the {theirs['documents']} documents that the "
                f"checkpoint masks, of hash {theirs['digest']}, got {ours['documents']} of hash "
                f"{ours['digest']}; restore the file"
            )


def _index_by_lock(state: Mapping[str, Any], locked: _Plan) -> Index:
    """Return the index of the state of a `Loader`: the order of a lock, with the state's skips."""
    stored = _stored_skips(state)
    if stored is None:
        return locked.order
    theirs, bounds = skips_of(locked.index), locked.step_bounds
    assert bounds is not None, "of a lock"
    ids = {mask.record["digest"]: mask.documents for mask in (theirs.masks if theirs else ())}
    unknown = [each for each in stored.masked if each["digest"] not in {None, *ids}]
    if unknown:
        raise InvalidArgument(
            f"the checkpoint masks {unknown[0]['documents']} documents that the lock does not "
            "name; call megaindex.lock.compare_records with the indices of both runs"
        )
    holes = sorted(
        (*pair, move)
        for move, pairs in ((False, stored.dropped), (True, stored.moved))
        for pair in pairs
    )
    steps = np.searchsorted(bounds, [pair[:2] for pair in holes]).reshape(-1, 2)
    if bounds[steps].tolist() != [list(pair[:2]) for pair in holes]:
        raise InvalidArgument(
            "the checkpoint skips samples that are not whole steps of the lock; compare it with "
            "the lock of its own run"
        )
    assert locked.lock is not None, "of a lock"
    names = locked.lock.names("train")
    masks = [
        LossMask(
            source=_source_in(names, each),
            first=each["from"],
            documents=ids.get(each["digest"]),
            remove=each.get("remove", False),
        )
        for each in stored.masked
    ]
    settings = [
        Skip(steps=((first, end - 1),), move=bool(move))
        for (first, end), (_, _, move) in zip(steps.tolist(), holes, strict=True)
    ]
    for mask in masks:
        step = int(np.searchsorted(bounds, mask.first))
        name = None if mask.source is None else names[source_number(mask.source, names)]
        settings.append(
            Skip(documents=mask.documents, source=name, from_step=step, remove=mask.remove)
        )
    skips = Skips(
        settings=tuple(settings),
        num_samples=locked.order.num_samples,
        end=stored.end,
        holes=np.array([pair[:2] for pair in holes], np.int64).reshape(-1, 2),
        is_moved=np.array([move for _, _, move in holes], bool),
        masks=tuple(masks),
        num_steps=bounds.size - 1,
    )
    return with_skips(locked.order, skips, names)


def _source_in(names: Sequence[str], mask: Mapping[str, Any]) -> str | None:
    """Return the source of a mask in a state as a lock names it."""
    source, number = named_in(names, mask["source"]), mask.get("number", -1)
    if source in names or not 0 <= number < len(names):
        return source
    return names[number] if names.count(names[number]) == 1 else str(number)


def named_in(names: Sequence[str], source: str | None) -> str | None:
    """Return a source of a state or a user as a lock names it, whose paths are absolute."""
    if source is None or source in names or absolute(source) not in names:
        return source
    return absolute(source)


def _record(
    consumed: int,
    check: ReceiptCheck,
    index: Index,
    skip: Sequence[Skip],
    identity: str | None,
    *,
    is_lock: bool = False,
) -> RunRecord:
    skips = skips_of(index)
    skipped = moved = masked = removed = 0
    if skips is not None:
        served = min(consumed, skips.num_positions)
        skipped = served - skips.served_before(served)
        moved = max(0, min(served, skips.run_end) - skips.end)
    if isinstance(index, StretchedIndex) and index.masks:
        counts = masked_tokens(index, max(index.masks) + 1, consumed).sum(axis=1)
        masked, removed = counts.tolist()
    return RunRecord(
        consumed_samples=consumed,
        check=check,
        samples_skipped=skipped,
        samples_moved=moved,
        tokens_masked=masked,
        tokens_removed=removed,
        skip=tuple(skip),
        is_lock=is_lock,
        first_sample=getattr(index, "first_position", 0),
        identity=identity,
    )


def _behind(plans: tuple[_Plan, _Plan], common: int) -> Iterator[str]:
    """Yield the first differences of two runs behind the samples that their records hold."""
    first, second = (plan.compared for plan in plans)
    if first.step_bounds is None or second.step_bounds is None or all(p.lock for p in plans):
        return  # the run of an index that is given is not known; locks are compared to their end
    ends = [int(first.step_bounds[-1]), int(second.step_bounds[-1])]
    stop = min(*ends, first.index.num_samples, second.index.num_samples)
    if common < stop:
        changed = first_changed_mix(first, second, stop)
        if changed is not None and changed >= common:
            yield mix_difference(first, second, changed)
        elif first.description != second.description:
            yield from same_until(first, second, common, stop).samples[:1]
        if not any(other_steps(first, second, common)):
            yield from other_steps(first, second, stop)
    for number in sorted(undrawn(first, second, 0, common)):
        which = "first" if number < len(first.fingerprints) else "second"
        yield f"source {number} is one of the {which} alone"
    if common < max(ends):
        yield from apart("samples", *ends)


def _skips_without(plan: _Plan, other: _Plan) -> Iterator[Skip]:
    """Yield what a plan skips and another does not, whatever entries it is written in."""
    for move in (False, True):
        ours, theirs = (_skipped_steps(each, move) for each in (plan, other))
        steps = [(begin, end - 1) for begin, end in ranges_without(ours, theirs)]
        if steps:
            yield Skip(steps=tuple(steps), move=move)
    known = {identity for identity, _ in _masks(other)}
    yield from (skip for identity, skip in _masks(plan) if identity not in known)


def _skipped_steps(plan: _Plan, move: bool) -> list[tuple[int, int]]:
    """Return the skipped steps as sorted ranges [begin, end)."""
    entries = (skip for skip in plan.record.skip if skip.move == move)
    return sorted((first, last + 1) for skip in entries for first, last in skip.ranges)


def _masks(plan: _Plan) -> Iterator[tuple[tuple[Any, ...], Skip]]:
    """Yield source, first position, documents and kind of each mask, and its entry."""
    masks = numbered_masks(plan.index)
    entries = [skip for skip in plan.record.skip if not skip.ranges] if masks else []
    for (number, mask), skip in zip(masks, entries, strict=True):
        yield (number, mask.first, mask.record["digest"], mask.remove), skip


def read_record(path: str) -> Lock | list[Mapping[str, Any]]:
    """Return the lock, or the states of all ranks, in a file."""
    if path.endswith(".lock"):
        return read_lock(path)
    raw = read_named(path, longest=_LONGEST)
    try:
        content = json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: not a record in JSON ({error}); write the state with json.dump"
        ) from None
    if isinstance(content, Mapping) and content.get("format") == LOCK_FORMAT:
        return read_lock(path)
    states = content if isinstance(content, list) else [content]
    if not states or not all(isinstance(state, Mapping) for state in states):
        raise FormatError(
            f"{path}: must hold the state of a loader, or a list of those of all ranks"
        )
    return states
