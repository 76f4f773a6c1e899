"""How a recipe evaluates: on which data, how often, and what a round reads."""

from __future__ import annotations

from dataclasses import dataclass

from megaindex.errors import InvalidArgument
from megaindex.index.plain import check_between, make_plain
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
        word = "evaluation: {}".format
        make_plain(self, "interval", optional=["iterations", "batch_size"], called=word)
        if self.iterations is not None:
            check_between(word("iterations"), self.iterations, 1)


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
