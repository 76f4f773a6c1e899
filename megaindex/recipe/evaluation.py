"""How a recipe evaluates: on which data, how often, and what a round reads."""

from __future__ import annotations

from dataclasses import dataclass

from megaindex.errors import InvalidArgument
from megaindex.index.plain import make_plain
from megaindex.kernels.sizes import ceil_div
from megaindex.recipe.corpus import Corpus


@dataclass(frozen=True, kw_only=True)
class RecipeEvaluation:
    """Evaluation on a source of its own, the same samples in every round."""

    source: Corpus
    interval: int = 1000
    """Steps between two rounds; there is one more after the last step."""
    iterations: int | None = None
    """Batches of a round. None: all samples of the source, each once, over all ranks."""
    batch_size: int | None = None
    """Global batch size; None: that of training at its end."""

    def __post_init__(self) -> None:
        make_plain(self, "interval", optional=["iterations", "batch_size"])
        given = (self.interval, self.iterations, self.batch_size)
        if any(value is not None and value < 1 for value in given):
            raise InvalidArgument(
                "evaluation: interval, iterations and batch_size must be at least 1, got "
                f"{self.interval}, {self.iterations} and {self.batch_size}; leave evaluation out "
                "where there is none"
            )


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """The evaluations of a run."""

    count: int
    batches: int
    """Global batches of a round, the same number on every rank."""
    samples: int
    """Samples that a round scores, each once."""
    masked: int
    """Rows without loss that fill up the last batch, or the last micro batch of every rank."""
    available: int
    """Samples that the source holds."""


def rounds_of(
    evaluation: RecipeEvaluation,
    available: int,
    num_steps: int,
    batch_size: int,
    *,
    rows: int | None = None,
) -> Rounds:
    """What the evaluations of a run of ``num_steps`` steps read.

    Args:
        rows: of one micro batch on every rank, where that is known: a round ends with such.

    Raises:
        InvalidArgument: a round asks for more samples than the source holds.
    """
    size = evaluation.batch_size or batch_size
    samples = available
    if evaluation.iterations is not None:
        samples = evaluation.iterations * size
    if samples > available:
        raise InvalidArgument(
            f"evaluation: {evaluation.iterations} iterations of {size} samples read {samples}, "
            f"source {evaluation.source.name} holds {available}; ask for fewer, or leave "
            "iterations out to read each sample once"
        )
    batches = ceil_div(samples, size)
    return Rounds(
        count=ceil_div(num_steps, evaluation.interval),
        batches=batches,
        samples=samples,
        masked=ceil_div(samples, rows or size) * (rows or size) - samples,
        available=available,
    )
