"""Comparison of two records of a run: they differ by exactly what was skipped.

A record is the state of a run's loaders, with the receipts of what was served. Two records are
compared in three parts: each served what its own order and skips plan, the orders without skips are
the same, and what remains is the difference of the skips.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megaindex.builders.recipe import open_recipe
from megaindex.errors import InvalidArgument
from megaindex.index.block_receipts import planned_block_receipts
from megaindex.index.receipts import fingerprint_keys
from megaindex.index.skips import Skip, SkippedIndex, masked_tokens, skips_of
from megaindex.index.spans import Index
from megaindex.loader.receipts import ReceiptCheck, check_receipts, join_states, stored_receipt
from megaindex.loader.recipe_loader import StoredRecipe
from megaindex.validation import CheckpointReader

States = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One record: what was served, compared with its plan.

    Attributes:
        consumed_samples: position of the run.
        check: comparison of the receipts with the plan, skips included.
        samples_skipped: positions before ``consumed_samples`` that were not served.
        samples_moved: moved samples that were served.
        tokens_masked: labels of the samples served that are of masked documents.
        skip: the skips of the run.
    """

    consumed_samples: int
    check: ReceiptCheck
    samples_skipped: int
    samples_moved: int
    tokens_masked: int
    skip: tuple[Skip, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "consumed_samples": self.consumed_samples,
            "samples_served": self.check.served.total.count,
            "receipt": str(self.check.served.total),
            "planned": str(self.check.planned.total),
            "as_planned": self.check.equal,
            "samples_skipped": self.samples_skipped,
            "samples_moved": self.samples_moved,
            "tokens_masked": self.tokens_masked,
        }


@dataclass(frozen=True, kw_only=True)
class RecordProof:
    """Result of `compare_records`; ``str`` describes it.

    Attributes:
        first: the first record.
        second: the second record.
        common_samples: samples of the order, without skips, that were compared: those before the
            position of the shorter run.
        first_difference: positions [begin, end) of the first block in which the orders without
            skips differ; None if they are the same.
        added: skips of the second record that the first does not have.
        removed: skips of the first record that the second does not have.
    """

    first: RunRecord
    second: RunRecord
    common_samples: int
    first_difference: tuple[int, int] | None
    added: tuple[Skip, ...]
    removed: tuple[Skip, ...]

    @property
    def holds(self) -> bool:
        """True if both records are as planned, and differ by exactly their skips."""
        as_planned = self.first.check.equal and self.second.check.equal
        return as_planned and self.first_difference is None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        return {
            "holds": self.holds,
            "common_samples": self.common_samples,
            "first_difference": self.first_difference and list(self.first_difference),
            "first": self.first.to_json(),
            "second": self.second.to_json(),
            "added": [_text(skip) for skip in self.added],
            "removed": [_text(skip) for skip in self.removed],
        }

    def __str__(self) -> str:
        lines = []
        for name, record in (("first", self.first), ("second", self.second)):
            more = "".join(
                f", {count:,} {what}"
                for count, what in (
                    (record.samples_skipped, "skipped"),
                    (record.samples_moved, "of them served behind the end"),
                )
                if count
            )
            more += f"; loss of {record.tokens_masked:,} tokens masked" * bool(record.tokens_masked)
            lines.append(f"{name}: at sample {record.consumed_samples:,}{more}; {record.check}")
        if self.first_difference is None:
            lines.append(f"order: the same without skips, {self.common_samples:,} samples compared")
        else:
            begin, end = self.first_difference
            lines.append(
                f"order: other samples even without skips, first in positions {begin} to {end - 1}"
            )
        lines += [f"skip only in the second: {_text(skip)}" for skip in self.added]
        lines += [f"skip only in the first: {_text(skip)}" for skip in self.removed]
        lines.append(
            "the records differ by exactly their skips"
            if self.holds
            else "the records differ by more than their skips"
        )
        return "\n".join(lines)


def _text(skip: Skip) -> str:
    if skip.ranges:
        return ", ".join(f"{key} {value}" for key, value in skip.to_dict().items())
    what = "all documents" if skip.documents is None else "documents"
    given = f" of {skip.documents}" if isinstance(skip.documents, str) else ""
    source = "" if skip.source is None else f", source {skip.source}"
    return f"{what}{given}{source}, from step {skip.from_step}"


def compare_records(
    first: States, second: States, *, indices: tuple[Index, Index] | None = None
) -> RecordProof:
    """Compare two records of a run, such as the checkpoints before and after a skip.

    Args:
        first: states of all ranks, as for `check_receipts`.
        second: states of all ranks of the other record.
        indices: index of each run, with its skips (`MicroBatchSampler.skipped`). Default, for
            states of `RecipeLoader`: those of the recipes in the states, whose relative paths are
            relative to the current directory.

    Raises:
        InvalidArgument: a rank is missing, or the states hold no recipe and ``indices`` is not
            given.
        FormatError, StorageError: a state is damaged, or a source cannot be read.
    """
    states = [join_states(each) for each in (first, second)]
    opened = [_index_of(each) for each in states] if indices is None else list(indices)
    records = [_record(state, index) for state, index in zip(states, opened, strict=True)]
    raw = [each.index if isinstance(each, SkippedIndex) else each for each in opened]
    common = min(
        *(record.consumed_samples for record in records), *(index.num_samples for index in raw)
    )
    planned = [
        planned_block_receipts(
            index, 0, common, _keys(state), stride=records[0].check.served.stride
        )
        for index, state in zip(raw, states, strict=True)
    ]
    skips = [record.skip for record in records]
    return RecordProof(
        first=records[0],
        second=records[1],
        common_samples=common,
        first_difference=planned[0].first_difference(planned[1]),
        added=tuple(skip for skip in skips[1] if skip not in skips[0]),
        removed=tuple(skip for skip in skips[0] if skip not in skips[1]),
    )


def _index_of(state: Mapping[str, Any]) -> Index:
    if "recipe" not in state:
        raise InvalidArgument(
            "the states must be of a RecipeLoader, which hold their recipe; for those of a Loader "
            "call megaindex.loader.compare_records with the indices of both runs"
        )
    return open_recipe(StoredRecipe.read(state).recipe_here).index


def _inner(state: Mapping[str, Any]) -> Mapping[str, Any]:
    return state["loader"] if isinstance(state.get("loader"), Mapping) else state


def _keys(state: Mapping[str, Any]) -> Any:
    return fingerprint_keys(stored_receipt(_inner(state)["receipt"]).fingerprints)


def _record(state: Mapping[str, Any], index: Index) -> RunRecord:
    check = check_receipts([state], index)
    consumed = CheckpointReader("the state of a loader", _inner(state)).integer("consumed_samples")
    skips = skips_of(index)
    skipped = moved = masked = 0
    if skips is not None:
        served = min(consumed, skips.num_positions)
        skipped = served - skips.served_before(served)
        moved = max(0, min(served, skips.run_end) - skips.end)
    if isinstance(index, SkippedIndex) and index.masks:
        masked = int(masked_tokens(index, max(index.masks) + 1, consumed).sum())
    return RunRecord(
        consumed_samples=consumed,
        check=check,
        samples_skipped=skipped,
        samples_moved=moved,
        tokens_masked=masked,
        skip=() if skips is None else skips.settings,
    )
