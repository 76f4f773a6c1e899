"""Modelled work of a run's rows, and the time that ranks wait, in order and balanced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex._types import F64, I64
from megaindex.errors import InvalidArgument
from megaindex.index.balance import (
    CostModel,
    balanced_rows,
    check_sum,
    lost_time,
    rank_squares,
    squares_and_documents,
)
from megaindex.index.spans import sequence_lengths_at
from megaindex.run.run import Run

BINS = 12
"""Bins of the histogram of rows by work."""
_MOST_ROWS = 1 << 20
_POINTS = 400  # of the curve of times
_LEAST_SPREAD = 1e-9  # of the work of rows that are not shown as equal


@dataclass(frozen=True)
class LostTime:
    """Shares of the ranks' time that they wait for the slowest."""

    in_order: float
    balanced: float


@dataclass(frozen=True, kw_only=True, eq=False)
class BalanceModel:
    """Modelled work of the rows of whole steps, by a cost model."""

    cost_model: CostModel
    steps: int
    """Steps of the run."""
    steps_modelled: int
    """Steps of which the rows were counted, spread evenly over the run."""
    rows: int
    """Rows of these steps."""
    data_parallel_size: int
    micro_batch_size: int
    by_round: LostTime
    """If ranks, data-parallel x context-parallel, synchronise after every round of micro batches,
    as with sharded weights."""
    by_step: LostTime
    """If ranks synchronise once a step, as with replicated weights."""
    work_bounds: F64
    """float64[BINS + 1]: bounds of the bins, in multiples of the mean work of a row."""
    work_rows: I64
    """int64[BINS]: rows in each bin."""
    step_bounds: I64
    """int64[stretches + 1]: first steps of stretches of the run, and the number of steps."""
    step_time: F64
    """float64[stretches, 2]: mean time of a step in order and balanced, synchronised every round,
    in multiples of that with even work."""
    documents_mean: float
    """Mean number of documents in a sample, parts included."""
    documents_most: int

    def to_json(self) -> dict[str, Any]:
        """Return the object of ``--json``."""
        return {
            "cost_model": self.cost_model.to_dict(),
            "steps": self.steps,
            "steps_modelled": self.steps_modelled,
            "rows": self.rows,
            "data_parallel_size": self.data_parallel_size,
            "micro_batch_size": self.micro_batch_size,
            "lost_time": {"by_round": vars(self.by_round), "by_step": vars(self.by_step)},
            "work_of_rows": {"bounds": self.work_bounds.tolist(), "rows": self.work_rows.tolist()},
            "step_time": {
                "first_step": self.step_bounds[:-1].tolist(),
                "in_order": self.step_time[:, 0].tolist(),
                "balanced": self.step_time[:, 1].tolist(),
            },
            "documents_per_sample": {"mean": self.documents_mean, "most": self.documents_most},
        }


def model_balance(run: Run, cost: CostModel) -> BalanceModel:
    """Return the modelled work of a run, of at most about a million rows.

    A last step of fewer samples than rows is left out.

    Raises:
        InvalidArgument: micro batch size or data-parallel size are unknown, or no step is whole.
    """
    micro, ranks = run.micro_batch_size, run.data_parallel_size
    if micro is None or ranks is None:
        raise InvalidArgument(
            "--balance needs the rows of each rank; give --micro-batch-size and "
            "--data-parallel-size with the flags of the run, a recipe its micro_batch_size and "
            "data_parallel_size, or lock a run that names them"
        )
    if isinstance(sequence_lengths_at(run.index, np.arange(1)), np.ndarray):
        raise InvalidArgument(
            "--balance compares rows of one sequence length, and the stages of the recipe have "
            "several; audit a recipe of one stage"
        )
    sizes = np.diff(run.step_bounds)
    whole = np.flatnonzero((sizes > 0) & (sizes % (micro * ranks) == 0))
    if run.masked_rows:
        whole = whole[whole != sizes.size - 1]
    if run.skips is not None:
        whole = whole[~run.skips.is_hole(run.step_bounds[whole])]
    if not whole.size:
        raise InvalidArgument(
            f"--balance: no step has whole micro batches of {micro} rows on {ranks} ranks; change "
            "the batch or the ranks"
        )
    count = max(1, min(whole.size, _MOST_ROWS // int(sizes[whole].max())))
    chosen = whole[np.arange(count) * whole.size // count]
    width = run.index.sequence_length
    check_sum(int(sizes[chosen].max()), width)
    bounds_of = [run.step_bounds[step : step + 2].tolist() for step in chosen.tolist()]
    rows_of = [squares_and_documents(run.index, np.arange(*pair)) for pair in bounds_of]
    squares, documents = zip(*rows_of, strict=True)
    in_order = [np.arange(each.size).reshape(-1, ranks, micro) for each in squares]
    balanced = [
        balanced_rows(each, rows=each.size, ranks=ranks, micro_batch_size=micro) for each in squares
    ]
    shared = [
        rank_squares(run.index, np.arange(*pair), each, cost)
        for pair, each in zip(bounds_of, squares, strict=True)
    ]
    sides = [  # work of each round and rank, float64[rounds, ranks], of each step
        [
            cost.row_work(s[o], width).sum(2).reshape(len(o), -1)
            for s, o in zip(shared, orders, strict=True)
        ]
        for orders in (in_order, balanced)
    ]
    work = cost.row_work(np.concatenate(shared), width).sum(1)
    rows, bounds = _histogram(work / work.mean())
    held = np.concatenate(documents)
    times = np.array(
        [[each.max(1).mean() / each.mean() for each in pair] for pair in zip(*sides, strict=True)]
    )
    starts = np.unique(np.linspace(0, count, _POINTS, endpoint=False).astype(np.int64))
    length = np.diff(starts, append=count)
    return BalanceModel(
        cost_model=cost,
        steps=run.num_steps,
        steps_modelled=count,
        rows=work.size,
        data_parallel_size=ranks,
        micro_batch_size=micro,
        by_round=LostTime(*(lost_time(np.concatenate(side)) for side in sides)),
        by_step=LostTime(*(lost_time(np.array([r.sum(0) for r in side])) for side in sides)),
        work_bounds=bounds,
        work_rows=rows,
        step_bounds=np.array([0, *chosen[starts[1:]].tolist(), run.num_steps], np.int64),
        step_time=np.add.reduceat(times, starts) / length[:, None],
        documents_mean=float(held.mean()),
        documents_most=int(held.max()),
    )


def _histogram(relative: F64) -> tuple[I64, F64]:
    """Return the rows in each bin, and the bounds of the bins."""
    low, high = float(relative.min()), float(relative.max())
    if high - low < _LEAST_SPREAD:
        relative, low, high = np.ones_like(relative), 0.5, 1.5
    rows, bounds = np.histogram(relative, BINS, (low, high))
    return rows.astype(np.int64), bounds
