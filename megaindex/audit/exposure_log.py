"""Epoch, unseen share and repeats of each source at any step, for the log of a training run.

log = ExposureLog(stream_of_run(megatron_args="launch.sh", world_size=64))    # once, on one rank
for name, value in log.scalars(iteration).items():
    writer.add_scalar(name, value, iteration)                                 # or wandb.log(…)
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import numpy as np

from megaindex.audit.exposure import count_exposure
from megaindex.audit.streams import AuditStream
from megaindex.index.blending import Progress
from megaindex.validation import check_between

_MOST_COUNTS = 1 << 23
"""Most steps x sources that are counted step by step, 16 bytes each."""


@dataclass(frozen=True, kw_only=True)
class SourceExposure:
    """Tokens of one source, or of all, that the first steps of a run serve as input.

    Attributes:
        source: name of the source, or ``all``.
        tokens: tokens served, repeats included.
        epoch: tokens served over the tokens of the source.
        unseen: share of the tokens of the source that are not served.
        repeats: share of the tokens served that were served by an earlier step, or twice by
            one.
    """

    source: str
    tokens: int
    epoch: float
    unseen: float
    repeats: float


class ExposureLog:
    """Exact exposure of each source after any step of a run, counted once and then looked up.

    Counting takes the time and memory of `megaindex.audit.audit`; one rank does it. A look-up is
    proportional to the number of sources.

    Args:
        stream: the run, from `stream_of_run` (Megatron-LM, GPT-NeoX), `stream_of_recipe`, or
            `stream_of_index` for a training loop of your own.
        points: greatest number of steps, at equal distances, after which the sources are counted;
            other steps return the counts of the last such step. Default: every step, or 2**23
            divided by the number of sources.
        progress: called with (done, total) while samples are located.

    Raises:
        InvalidArgument: ``points`` is below 1.
    """

    def __init__(
        self, stream: AuditStream, *, points: int | None = None, progress: Progress | None = None
    ) -> None:
        self._stream = stream
        self._names = [source.name for source in stream.sources]
        most = max(1, _MOST_COUNTS // len(self._names))
        points = most if points is None else check_between("points", points, 1)
        counts = count_exposure(stream, points=min(points, stream.num_steps), progress=progress)
        self._steps = counts.stretches
        self._sizes = counts.total.tokens.sum(axis=1)
        zero = np.zeros((1, len(self._names)), np.int64)
        self._served = np.concatenate((zero, np.cumsum(counts.composition, axis=0)))
        self._seen = np.concatenate((zero, np.cumsum(counts.fresh, axis=0)))

    @property
    def num_steps(self) -> int:
        """Number of steps of the run."""
        return self._stream.num_steps

    def step_of(self, consumed_samples: int) -> int:
        """Return the number of whole steps in these samples, over all ranks.

        Raises:
            InvalidArgument: the run has fewer samples.
        """
        most = self._stream.num_samples
        consumed = check_between("consumed_samples", consumed_samples, 0, most)
        return int(np.searchsorted(self._stream.step_bounds, consumed, "right")) - 1

    def after(self, step: int) -> list[SourceExposure]:
        """Return the exposure of all sources together, then of each, after ``step`` steps.

        Args:
            step: number of steps done, as trainers count iterations, from 0 to `num_steps`.

        Raises:
            InvalidArgument: the run has fewer steps.
        """
        step = check_between("step", step, 0, self.num_steps, most_is="the steps of the run")
        row = int(np.searchsorted(self._steps, step, "right")) - 1
        columns = (self._served[row], self._seen[row], self._sizes)
        lines = zip(self._names, *(column.tolist() for column in columns), strict=True)
        every = ("all", *(int(column.sum()) for column in columns))
        return [
            SourceExposure(
                source=name,
                tokens=served,
                epoch=served / max(1, size),
                unseen=(size - seen) / max(1, size),
                repeats=(served - seen) / max(1, served),
            )
            for name, served, seen, size in (every, *lines)
        ]

    def scalars(self, step: int, prefix: str = "data") -> dict[str, float]:
        """Return the exposure after ``step`` steps as values for a log.

        Names are ``data/epoch``, ``data/unseen`` and ``data/repeats`` for all sources together, and
        ``data/epoch/web`` for the source ``web`` of several, ``web#2`` if it is listed again.
        """
        every, *sources = self.after(step)
        rows = {"": every}
        if len(sources) > 1:
            counts: Counter[str] = Counter()
            for row in sources:  # a source that is listed again is web#2
                name = row.source.strip("/")
                counts[name] += 1
                rows[f"/{name}" + f"#{counts[name]}" * (counts[name] > 1)] = row
        return {
            f"{prefix}/{value}{name}": getattr(row, value)
            for value in ("epoch", "unseen", "repeats")
            for name, row in rows.items()
        }

    def __len__(self) -> int:
        """Return the number of steps."""
        return self.num_steps

    def __repr__(self) -> str:
        names = ", ".join(self._names[:3]) + " …" * (len(self._names) > 3)
        return f"ExposureLog({self.num_steps:,} steps of {names})"
