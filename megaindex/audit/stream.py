"""What a run serves, step by step: an index, its sources, and where each step begins."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument
from megaindex.index.plain import check_between, check_setting, setting_or_none
from megaindex.index.spans import Index
from megaindex.kernels.types import I32, I64
from megaindex.recipe.schedule import BatchSchedule

_SAMPLES_AT_ONCE = 1 << 16


@dataclass(frozen=True, kw_only=True, eq=False)
class AuditSource:
    """The documents of one source that an epoch holds."""

    name: str
    lengths: I32
    """int32[documents]: tokens of consecutive sequences; 0 takes one out of the counts."""
    first_document: int = 0
    """Sequence id of the first of them."""
    cut_tokens: int = 0
    """Those of the tokens that no sample of an epoch holds: left out with long documents."""
    cut_by: str = ""
    """The setting that leaves them out."""


class Runs(NamedTuple):
    """Runs of tokens that samples serve as input; the extra token of the label is not counted."""

    sample: I64
    source: I32
    document: I64
    """Sequence ids in the source."""
    offset: I64
    length: I64


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """The samples of a run in order of training, cut into steps.

    Steps count from 0: step k is the iteration that trainers log as k + 1.
    """

    index: Index
    sources: tuple[AuditSource, ...]
    step_bounds: I64
    """int64[steps + 1]: step k serves the samples [step_bounds[k], step_bounds[k + 1])."""
    past_steps: int = 0
    """Steps that the run has made already."""
    masked_rows: int = 0
    """Rows of the last step that are padding without loss."""
    order: str = ""
    micro_batch_size: int | None = None
    data_parallel_size: int | None = None

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise InvalidArgument(
                "the run makes no step: its target holds fewer samples than one global batch"
            )
        last = int(self.step_bounds[-1])
        if last > self.index.num_samples:
            raise InvalidArgument(
                f"the steps consume {last} samples, the index holds {self.index.num_samples}; "
                "build it for more samples or audit fewer steps"
            )

    @property
    def num_steps(self) -> int:
        return self.step_bounds.size - 1

    @property
    def num_samples(self) -> int:
        """Samples served by all steps."""
        return int(self.step_bounds[-1])

    @cached_property
    def document_base(self) -> I64:
        """int64[sources + 1]: number of a source's first document when all are counted through."""
        return _cumulated([source.lengths.size for source in self.sources])

    @cached_property
    def token_base(self) -> I64:
        """int64[documents + 1]: number of a document's first token when all are counted through."""
        return _cumulated(np.concatenate([source.lengths for source in self.sources]))

    def step_of(self, samples: npt.ArrayLike) -> I64:
        """The step that serves each sample."""
        return np.asarray(np.searchsorted(self.step_bounds, samples, "right") - 1, np.int64)

    def runs(self, first: int = 0, last: int | None = None) -> Iterator[Runs]:
        """What the samples [first, last) serve, in blocks of samples; default: all of them."""
        last = self.num_samples if last is None else last
        for begin in range(first, last, _SAMPLES_AT_ONCE):
            yield self._served(np.arange(begin, min(last, begin + _SAMPLES_AT_ONCE)))

    def _served(self, ids: I64) -> Runs:
        spans = self.index.locate(ids)
        length = spans.input_lengths(self.index.sequence_length)
        sample = np.repeat(ids, np.diff(spans.row_splits))
        kept = length > 0
        return Runs(
            sample=sample[kept],
            source=spans.source[kept],
            document=spans.document[kept],
            offset=spans.offset[kept],
            length=length[kept],
        )


def stream_of_index(
    index: Index,
    sources: Sequence[AuditSource],
    *,
    global_batch_size: int,
    num_steps: int | None = None,
    consumed_samples: int = 0,
    micro_batch_size: int | None = None,
    data_parallel_size: int | None = None,
) -> Stream:
    """The stream of any index, such as `megaindex.build_index` returns.

    Args:
        index: anything that locates samples.
        sources: what ``Spans.source`` counts; one for an index of one dataset.
        global_batch_size: samples of a step.
        num_steps: steps in all. Default: the whole batches that the index holds.
        consumed_samples: samples that were served before now; they divide past from future.
        micro_batch_size: of one rank; with ``data_parallel_size`` it tells ranks apart.
        data_parallel_size: ranks that share a step.

    Raises:
        InvalidArgument: a number is out of range.
    """
    global_batch_size = check_setting("global_batch_size", global_batch_size)
    num_steps = setting_or_none("num_steps", num_steps)
    consumed_samples = check_setting("consumed_samples", consumed_samples)
    if num_steps is None:
        num_steps = index.num_samples // global_batch_size
    schedule = BatchSchedule.constant(global_batch_size)
    bounds, past = step_bounds(schedule, consumed_samples, num_steps * global_batch_size)
    return Stream(
        index=index,
        sources=tuple(sources),
        step_bounds=bounds,
        past_steps=past,
        order=str(getattr(index, "order", "")),
        micro_batch_size=setting_or_none("micro_batch_size", micro_batch_size),
        data_parallel_size=setting_or_none("data_parallel_size", data_parallel_size),
    )


def step_bounds(schedule: BatchSchedule, consumed: int, total: int) -> tuple[I64, int]:
    """Where each step begins and ends, and how many steps lie before ``consumed``.

    The past is cut by the schedule from sample 0, the future from ``consumed`` on; the last step
    of each may be short. Batches of 4, 6 consumed of 12: bounds 0 4 6 10 12, 2 steps past.
    """
    check_between("--consumed-samples", consumed, 0, total, most_is="the samples of the run")
    past = _walk(schedule, 0, consumed)
    future = _walk(schedule, consumed, total)
    return np.array([*past, *future, total], np.int64), len(past)


def _walk(schedule: BatchSchedule, begin: int, end: int) -> list[int]:
    """First samples of the steps from ``begin`` until ``end`` is reached."""
    starts: list[int] = []
    stages = [*schedule.stages[1:], (end, 0)]
    for (_, size), (until, _) in zip(schedule.stages, stages, strict=True):
        steps = range(begin, min(until, end), size)
        starts += steps
        if steps:
            begin = steps[-1] + size
    return starts


def _cumulated(counts: npt.ArrayLike) -> I64:
    counts = np.asarray(counts)
    sums = np.zeros(counts.size + 1, np.int64)
    np.cumsum(counts, dtype=np.int64, out=sums[1:])
    return sums
