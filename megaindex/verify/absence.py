"""Documents that a run does not read from a step on, with their last exposures before it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.audit.trace import unordered_runs
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.index.array_index import distinct
from megaindex.index.spans import datasets_of
from megaindex.index.stretches import StretchedIndex
from megaindex.run.run import Run, join_runs

_SHOWN = 10  # documents that are printed
NEVER = -1
NOT_ESTABLISHED = (
    "that no token of a document that is not removed is the last label of a row",
    "that no other document holds a copy or near-duplicate",
    "that weights which were trained on a document have forgotten it",
    "that this order was served, which a checkpoint's receipts show",
    "anything about evaluation data",
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Absence:
    """Result of `absence`; ``str`` describes it.

    Attributes:
        source: name of the source of the documents.
        from_step: step from which on they are to be absent.
        from_sample: its first position.
        documents (int64[n]): sorted sequence ids that are asked for.
        removed: number of them that the run removes from ``from_step`` on.
        outside: number of them in no part of the corpus that the run trains on.
        first_step, last_step, last_sample (int64[n]): the first and the last step whose input has
            tokens of each document, and the last position; -1: none has.
        checkpoints: pairs of the steps that a checkpoint has made, and the documents it was trained
            on.
        elsewhere: steps that another system made, which read what is not known.
    """

    source: str
    from_step: int
    from_sample: int
    documents: I64
    removed: int
    outside: int
    first_step: I64
    last_step: I64
    last_sample: I64
    checkpoints: tuple[tuple[int, int], ...] = ()
    elsewhere: int = 0

    @property
    def not_established(self) -> list[str]:
        """What the result does not say."""
        past = f"what the {self.elsewhere:,} steps of another system read"
        return [*[past] * bool(self.elsewhere), *NOT_ESTABLISHED]

    @property
    def present(self) -> int:
        """Number of documents with tokens in the input of ``from_step`` or a later step."""
        return int((self.last_sample >= self.from_sample).sum())

    @property
    def holds(self) -> bool:
        """True if no token of a document is an input from ``from_step`` on."""
        return not self.present

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints; it has a row for each document."""
        columns = (self.documents, self.first_step, self.last_step, self.last_sample)
        return {
            "holds": self.holds,
            "source": self.source,
            "from_step": self.from_step,
            "from_sample": self.from_sample,
            "num_documents": self.documents.size,
            "removed": self.removed,
            "outside": self.outside,
            "present": self.present,
            "never_read": int((self.last_step == NEVER).sum()),
            "checkpoints": [
                {"step": step, "trained_on": documents} for step, documents in self.checkpoints
            ],
            "columns": ["document", "first_step", "last_step", "last_sample"],
            "documents": np.column_stack(columns).tolist(),
            "not_established": self.not_established,
        }

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        total = self.documents.size
        where = f"from step {self.from_step:,} (sample {self.from_sample:,}) on"
        which = f"{total:,} documents of {self.source}"
        if self.holds:
            yield f"absent: no token of the {which} is an input {where}"
        else:
            yield f"not absent: {self.present:,} of the {which} are read {where}"
        counts = (
            (self.removed, "removed from there on"),
            (self.outside, "in no part of the corpus that is trained on"),
            (int((self.last_step == NEVER).sum()), "never read" + " here" * bool(self.elsewhere)),
        )
        yield from (f"{count:,} {what}" for count, what in counts if count)
        order = np.lexsort((self.documents, -self.last_sample))
        order = order[self.last_step[order] != NEVER]
        if order.size:
            yield f"last exposures of {order.size:,} documents, the latest first:"
        for k in order[:_SHOWN].tolist():
            yield (
                f"  document {self.documents[k]}: step {self.last_step[k]:,}, sample "
                f"{self.last_sample[k]:,}; the first was in step {self.first_step[k]:,}"
            )
        if order.size > _SHOWN:
            yield f"  {order.size - _SHOWN:,} more, see --json"
        here = f", without the {self.elsewhere:,} steps of another system" * bool(self.elsewhere)
        for step, documents in self.checkpoints:
            trained = f"trained on {documents:,} of the documents{here}"
            yield f"checkpoint after {step:,} steps: {trained}"
        yield from (f"not established: {text}" for text in self.not_established)


def absence(
    run: Run,
    documents: npt.ArrayLike,
    *,
    from_step: int,
    source: int = 0,
    checkpoints: Sequence[int] = (),
) -> Absence:
    """Return whether a run reads documents from a step on, and when it read them before.

    Args:
        run: the run.
        documents: sequence ids in their source, in any order.
        from_step: the step, from 0.
        source: number of the source in `Run.sources`.
        checkpoints: steps that checkpoints have made.

    Raises:
        OutOfRange: the step does not exist, or another system made it.
        InvalidArgument: a document does not exist.
    """
    elsewhere = run.steps_elsewhere
    least = elsewhere + (elsewhere > 0)
    for step in checkpoints:
        if not least <= step <= run.num_steps:
            raise OutOfRange(f"--checkpoints must be from {least} to {run.num_steps}, got {step}")
    if not elsewhere <= from_step < run.num_steps:
        why = "; what the steps of another system read is not known" * (0 <= from_step < elsewhere)
        raise OutOfRange(
            f"--from-step must be from {elsewhere} to {run.num_steps - 1}, got {from_step}{why}"
        )
    ids = distinct(np.asarray(documents, np.int64).ravel())
    mine = _trained_on(run, ids, source)
    found = join_runs([unordered_runs(run, ids[mine], k) for k in _of_same_pair(run, source)])
    at = np.searchsorted(ids, found.document)
    never = np.iinfo(np.int64).max
    first, last = np.full(ids.size, never), np.full(ids.size, NEVER)
    np.minimum.at(first, at, found.sample)
    np.maximum.at(last, at, found.sample)
    first[last == NEVER] = NEVER
    first_step, last_step = (np.where(last == NEVER, NEVER, run.step_of(n)) for n in (first, last))
    begin = int(run.step_bounds[from_step])
    read = last != NEVER
    return Absence(
        source=run.sources[source].name,
        from_step=from_step,
        from_sample=begin,
        documents=ids,
        removed=_removed(run, ids, source, begin),
        outside=int((~mine).sum()),
        first_step=first_step,
        last_step=last_step,
        last_sample=last,
        elsewhere=elsewhere,
        checkpoints=tuple(
            (step, int((first_step[read] < step).sum())) for step in sorted(checkpoints)
        ),
    )


def _of_same_pair(run: Run, source: int) -> list[int]:
    """Return the sources that read the documents of one: those of the same lengths."""
    datasets = datasets_of(run.index)
    if not datasets:
        return [source]
    same = corpus_fingerprint(datasets[source])
    return [k for k, each in enumerate(datasets) if corpus_fingerprint(each) == same]


def _trained_on(run: Run, ids: I64, source: int) -> npt.NDArray[np.bool_]:
    """Return bool[n]: True for documents of the part of the corpus that a run reads."""
    own = run.sources[source]
    end = own.first_document + own.sequence_lengths.size
    datasets = datasets_of(run.index)
    sequences = len(datasets[source]) if datasets else end
    if ids.size and ids[-1] >= sequences:
        raise InvalidArgument(
            f"--absent: document {ids[-1]} does not exist, {own.name} has sequences 0 to "
            f"{sequences - 1}; check the ids and their source"
        )
    return np.asarray((ids >= own.first_document) & (ids < end))


def _removed(run: Run, ids: I64, source: int, begin: int) -> int:
    """Return the number of documents that a run removes at positions from ``begin`` on."""
    sets = run.index.masks.get(source, ()) if isinstance(run.index, StretchedIndex) else ()
    removed = np.zeros(ids.size, bool)
    for each in sets:
        if each.mask.remove and each.first <= begin:
            removed |= each.marks(ids)
    return int(removed.sum())
