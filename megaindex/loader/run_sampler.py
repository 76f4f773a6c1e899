"""A run as one rank loads it: the sampler of its micro batches, and what is known beside it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel
from megaindex.loader.checkpoint import Contents
from megaindex.loader.samplers import MicroBatchSampler
from megaindex.run.run import Run, StepShape
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.validation import check_between

if TYPE_CHECKING:
    from megaindex.loader.run_recipe import RunRecipe

MicroBatches: TypeAlias = int | list[tuple[int, int | None]]


@dataclass(frozen=True, kw_only=True, eq=False)
class LoadedRun:
    """What a loader knows of its run beside the samples.

    Attributes:
        names: name of each source.
        sampler_of: function that returns the sampler of this rank of a run.
        identity: function that returns the identity, as a lock has it; None: not known.
        evaluation: function that returns one round of the evaluation; None without one.
        contents: function that returns content fingerprints of the sources, of all tokens too for
            True; None: the loader reads them.
        recipe: the recipe, whose mix can change; None without one.
    """

    names: Sequence[str]
    sampler_of: Callable[[Run], MicroBatchSampler]
    identity: Callable[[], str | None]
    evaluation: Callable[[], Run | None]
    contents: Callable[[bool], list[Contents]] | None = None
    recipe: RunRecipe | None = None


def ranks_of(shapes: Sequence[StepShape], given: int | None) -> int:
    """Return the number of ranks: as given, or that of all steps, or 1."""
    named = {shape.data_parallel_size for shape in shapes}
    if given is None and len(named) > 1:
        raise InvalidArgument(
            "data_parallel_size is missing: the stages are for different numbers of ranks; give "
            "that of this process"
        )
    return check_between("data_parallel_size", _first_of(given, *named, 1), 1)


def micro_batches_of(
    shapes: Sequence[StepShape], batch: BatchSchedule, given: int | None, ranks: int
) -> MicroBatches:
    """Return the rows of a micro batch from each change of shape on.

    None stands for steps that are for another number of ranks and whose batches these do not
    divide.
    """
    several = len({shape.data_parallel_size for shape in shapes}) > 1
    changes: list[tuple[int, int | None]] = []
    for k, shape in enumerate(shapes):
        size = _first_of(given, shape.micro_batch_size, 1)
        rows = check_between("micro_batch_size", size, 1)
        end = shapes[k + 1].first if k + 1 < len(shapes) else None
        divides = all(size % (rows * ranks) == 0 for size in batch.sizes(shape.first, end))
        is_other = several and shape.data_parallel_size != ranks and not divides
        changes.append((shape.first, None if is_other else rows))
    if all(rows is None for _, rows in changes):
        raise InvalidArgument(
            f"data_parallel_size: no stage is for {ranks} ranks, and none has batches that they "
            "divide; start with the number of ranks of the stage"
        )
    first_rows = changes[0][1]
    return changes if len(changes) > 1 or first_rows is None else first_rows


def sampler_of(
    run: Run,
    *,
    data_parallel_rank: int = 0,
    data_parallel_size: int | None = None,
    micro_batch_size: int | None = None,
    balance: CostModel | None = None,
) -> MicroBatchSampler:
    """Return the sampler of one rank of a run, behind its past steps.

    Args:
        run: the run.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks. Default: that of the run, or 1.
        micro_batch_size: rows of one micro batch of a rank. Default: that of each step, or 1.
        balance: cost model by which each step's samples are assigned to the ranks.

    Raises:
        InvalidArgument: a batch is not a multiple of micro batch size × ranks.
    """
    ranks = ranks_of(run.shapes, data_parallel_size)
    return MicroBatchSampler(
        num_samples=run.index.num_samples,
        train_samples=run.num_samples if run.skips is None else run.skips.end,
        micro_batch_size=micro_batches_of(run.shapes, run.batch, micro_batch_size, ranks),
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=ranks,
        consumed_samples=run.steps.samples_after(run.past_steps),
        global_batch_size=run.batch,
        tail="pad" if run.masked_rows else "drop",
        balance=balance,
        index=run.index,
    )


def with_micro_batches(run: Run | None, given: int | None) -> Run | None:
    """Return the run of one shape with micro batches of the given size, if one is given."""
    if run is None or given is None:
        return run
    return replace(run, shapes=(StepShape(0, given, run.data_parallel_size),))


def _first_of(*values: int | None) -> int:
    """Return the first that is not None."""
    return next(value for value in values if value is not None)
