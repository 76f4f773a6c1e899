"""Modelled time of balanced steps, against Megatron-LM main's DpBalancedScheduler.

Documents of lognormal lengths are concatenated and cut into rows of S tokens; 64 ranks serve steps
of 8 rounds of one row. The time of a round is that of its slowest rank by the constants of an 8B
model; with one synchronisation a step, the time of a step is that of the rank with the most work.

The peer gets the documents of the same tokens, those of more than S tokens cut into pieces, and
packs them in its own way: whole documents in order, into micro batches of at most S tokens. It pays
for the tokens that they hold, not for padding.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from benchmarks.corpora import SHAPES, write_sparse
from megaindex import IndexedDataset, build_index
from megaindex.index.balance import balanced_rows, lost_time, squared_lengths
from megaindex.index.orders.packed import Cutting
from megaindex.loader import CostModel

COST = CostModel.preset("llama3-8b")
RANKS, ROUNDS, STEPS = 64, 8, 40
ROWS = RANKS * ROUNDS
SIGMA = 1.6
MEANS = (2000, 1000, 500)
LENGTHS = (8192, 32_768, 131_072)
GOALS = {(2000, 8192): 1.0, (2000, 32_768): 3.0}
"""Most lost time in percent, synchronised every round, by mean and sequence length."""
_SPEED_GOAL = 1e6  # rows a second
_MOST_DOCUMENTS = 2_000_000  # packed


@dataclass(frozen=True)
class Documents:
    """Documents that are laid end to end, and the rows cut from them."""

    lengths: np.ndarray
    width: int

    @classmethod
    def drawn(cls, mean: int, width: int) -> Documents:
        generator = np.random.default_rng(20260101)
        drawn, tokens = [], 0
        while tokens < STEPS * ROWS * width:
            more = generator.lognormal(np.log(mean) - SIGMA**2 / 2, SIGMA, 1 << 18)
            drawn.append(np.maximum(1, np.rint(more)).astype(np.int64))
            tokens += int(drawn[-1].sum())
        return cls(np.concatenate(drawn), width)

    def steps(self) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Yield the pieces of each step: row by row, and whole documents for the peer."""
        ends = np.cumsum(self.lengths)
        tokens = ROWS * self.width
        for step in range(STEPS):
            begin, end = step * tokens, (step + 1) * tokens
            first, last = np.searchsorted(ends, [begin, end], side="right")
            bounds = np.clip(ends[first : last + 1], begin, end) - begin
            rows = np.union1d(bounds, np.arange(1, ROWS + 1) * self.width)
            whole = np.diff(np.concatenate(([0], bounds)))
            whole = whole[whole > 0]
            longest = -(-whole // self.width)
            pieces = np.full(int(longest.sum()), self.width, np.int64)
            at = np.cumsum(longest) - 1
            pieces[at] = whole - (longest - 1) * self.width
            yield np.diff(np.concatenate(([0], rows))), pieces


def _squares(pieces: np.ndarray, width: int) -> np.ndarray:
    """Return the sum of squares of each row of ``width`` tokens."""
    rows = (np.cumsum(pieces) - 1) // width
    return np.bincount(rows, pieces.astype(np.float64) ** 2, ROWS).astype(np.int64)


@dataclass(frozen=True, kw_only=True)
class Modelled:
    """Modelled work of the ranks, float64[rounds, ranks] of each step."""

    steps: list[np.ndarray]

    @property
    def lost(self) -> float:
        """Lost time in percent, synchronised every round."""
        return 100 * lost_time(np.concatenate(self.steps))

    @property
    def lost_by_step(self) -> float:
        """Lost time in percent, synchronised once a step."""
        return 100 * lost_time(np.array([work.sum(0) for work in self.steps]))

    @property
    def time(self) -> float:
        """Work of the slowest ranks, round by round."""
        return float(sum(work.max(1).sum() for work in self.steps))


def simulate(mean: int, width: int, schedule: Callable[..., Any] | None) -> dict[str, Modelled]:
    """Return the modelled work of rows in order, balanced, and as the peer schedules them."""
    sides: dict[str, list[np.ndarray]] = {"in order": [], "balanced": [], "peer": []}
    for pieces, documents in Documents.drawn(mean, width).steps():
        squares = _squares(pieces, width)
        work = COST.row_work(squares, width)
        sides["in order"].append(work.reshape(ROUNDS, RANKS))
        rows = balanced_rows(squares, rows=ROWS, ranks=RANKS, micro_batch_size=1)
        assert np.array_equal(np.sort(rows.ravel()), np.arange(ROWS))
        sides["balanced"].append(work[rows[:, :, 0]])
        if schedule is not None:
            sides["peer"].append(_work(schedule(list(enumerate(documents.tolist()))), documents))
            # full rows stay as they are
            alike = _work(schedule(list(enumerate(pieces.tolist()))), pieces)
            np.testing.assert_allclose(alike, sides["in order"][-1])
    return {name: Modelled(steps=steps) for name, steps in sides.items() if steps}


def whole_documents(mean: int, width: int) -> dict[str, float]:
    """Return the lost time in percent of balanced rows of whole documents.

    "packed" are the rows of order packed, "even" rows that no packing makes more equal: documents
    with more work than the mean row are alone, and all other rows have the same work.
    """
    lengths = Documents.drawn(mean, width).lengths[:_MOST_DOCUMENTS].astype(np.int32)
    cutting = Cutting(sequence_length=width)
    counts = cutting.count(lengths)
    packing = cutting.pack(counts, cutting.tokens(lengths), width)  # any number of documents
    squares = np.zeros(len(packing.layers) + 1)  # the last is that of no layer
    for number, (below, _, length, each, _, _) in enumerate(packing.layers.tolist()):
        squares[number] = squares[below] + each * float(length) ** 2
    packed = np.repeat(squares[packing.runs[:-1, 0]], np.diff(packing.runs[:, 2]))
    pieces = np.repeat(np.arange(width + 1.0), counts) ** 2
    alone = pieces[pieces > packed.mean()]
    others = packed.size - alone.size
    even = np.concatenate((alone, np.full(others, (pieces.sum() - alone.sum()) / others)))
    lost = {}
    for name, rows in (("packed", packed), ("even", even)):
        shuffled = np.random.default_rng(1).permutation(rows)[: rows.size // ROWS * ROWS]
        steps = np.sort(shuffled.astype(np.int64).reshape(-1, ROWS))[:, ::-1]
        lost[name] = 100 * lost_time(COST.row_work(steps, width).reshape(-1, RANKS))
    return lost


def _work(groups: list[list[list[int]]], lengths: np.ndarray) -> np.ndarray:
    """Return the work of each round and rank of a schedule of every piece."""
    assert sorted(k for group in groups for ids in group for k in ids) == list(range(lengths.size))
    return np.array(
        [[float(COST.linear) * lengths[ids].sum() + float(COST.attention)
          * float((lengths[ids].astype(np.float64) ** 2).sum()) for ids in group]
         for group in groups]
    )  # fmt: skip


def peer(checkout: str, width: int) -> Callable[..., Any]:
    """Return the scheduling function of a Megatron-LM checkout, for `RANKS` ranks.

    Its module imports others that need GPUs and that scheduling does not use: empty modules stand
    in their place while it is loaded.
    """
    path = Path(checkout) / "megatron/core/datasets/data_schedule.py"
    spec = importlib.util.spec_from_file_location("megatron_data_schedule", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    before = dict(sys.modules)
    for name in (
        "megatron", "megatron.core", "megatron.core.parallel_state",
        "megatron.core.datasets.data_schedule_utils", "megatron.core.packed_seq_params",
        "megatron.core.pipeline_parallel.hybrid_cp_schedule", "megatron.core.process_groups_config",
    ):  # fmt: skip
        sys.modules[name] = _Anything(name)
    try:
        spec.loader.exec_module(module)
    finally:
        sys.modules.clear()
        sys.modules.update(before)
    scheduler = module.DpBalancedScheduler(width, 1, RANKS, None)
    schedule: Callable[..., Any] = scheduler.get_groups_and_subsamples
    return schedule


class _Anything(ModuleType):
    """A module that has every name."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (), {})


def missing(checkout: str | None) -> str | None:
    """Return the missing requirement of the comparison, or None."""
    if checkout is None:
        return "balance: peer skipped; give --megatron the path of a Megatron-LM main checkout"
    if not (Path(checkout) / "megatron/core/datasets/data_schedule.py").is_file():
        return (
            f"balance: peer skipped; {checkout} has no megatron/core/datasets/data_schedule.py: it "
            "must be a checkout of Megatron-LM main"
        )
    return None


def figures(directory: Path, checkout: str | None) -> list[str]:
    """Return the lines of the report."""
    lacks = missing(checkout)
    lines = [] if lacks is None else [lacks]
    lines += [
        f"balance: modelled share of the ranks' time that is lost to waiting, {RANKS} ranks, micro "
        f"batch 1, {ROUNDS} rounds, {STEPS} steps, 8B constants, synthetic documents: lognormal, "
        f"sigma {SIGMA}",
        f"{'mean':>6}{'S':>9} | {'every round':^36} | {'every step':^27} | time of the peer",
        f"{'':15} | {'in order':>9}{'balanced':>9}{'goal':>9}{'peer':>9} | "
        f"{'in order':>9}{'balanced':>9}{'peer':>9} | over balanced",
    ]
    for mean in MEANS:
        for width in LENGTHS:
            schedule = None if lacks else peer(str(checkout), width)
            sides = simulate(mean, width, schedule)
            ours, order, theirs = sides["balanced"], sides["in order"], sides.get("peer")
            goal = GOALS.get((mean, width))
            lines.append(
                f"{mean:6}{width:9} | {order.lost:8.1f}%{ours.lost:8.2f}%"
                f"{'' if goal is None else f'{goal:.0f}%':>9}"
                f"{'' if theirs is None else f'{theirs.lost:.1f}%':>9} | "
                f"{order.lost_by_step:8.1f}%{ours.lost_by_step:8.2f}%"
                f"{'' if theirs is None else f'{theirs.lost_by_step:.1f}%':>9} | "
                + ("" if theirs is None else f"{theirs.time / ours.time:.2f}")
            )
    lines.append(
        f"balance: whole documents at S {LENGTHS[-1]}, balanced, by round: rows of order packed, "
        "and rows as even as documents allow"
    )
    for mean in MEANS:
        lost = whole_documents(mean, LENGTHS[-1])
        lines.append(f"{mean:6}{LENGTHS[-1]:9} | {lost['packed']:.1f}% {lost['even']:.1f}%")
    return [*lines, *_speed(directory)]


def _speed(directory: Path) -> list[str]:
    """Return the rows assigned a second of CPU time, with and without their lengths."""
    shape = SHAPES["10B"]
    prefix = write_sparse(directory, shape)
    index = build_index(IndexedDataset(prefix), sequence_length=8192)
    steps = index.num_samples // ROWS
    before = os.environ.get("MEGAINDEX_NUM_THREADS")
    os.environ["MEGAINDEX_NUM_THREADS"] = "1"
    try:
        located, assigned = [], []
        for _ in range(3):
            start = time.process_time()
            squares = [
                squared_lengths(index, np.arange(step * ROWS, (step + 1) * ROWS))
                for step in range(steps)
            ]
            middle = time.process_time()
            for each in squares:
                balanced_rows(each, rows=ROWS, ranks=RANKS, micro_batch_size=1)
            located.append(middle - start)
            assigned.append(time.process_time() - middle)
    finally:
        if before is None:
            del os.environ["MEGAINDEX_NUM_THREADS"]
        else:
            os.environ["MEGAINDEX_NUM_THREADS"] = before
    rows = steps * ROWS
    alone, both = rows / min(assigned), rows / (min(assigned) + min(located))
    return [
        f"balance: {rows:,} rows in steps of {ROWS} on one core: {alone / 1e6:.2f} M rows/s "
        f"assigned from their work, {both / 1e6:.2f} M rows/s with the work from the spans of an "
        f"index of {shape.documents:,} documents; goal {_SPEED_GOAL / 1e6:.0f} M"
    ]
