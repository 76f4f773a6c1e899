"""A run of many sources and stages, with its evaluation.

A `Recipe` says what is trained on, in words of samples, steps and epochs;
`megaindex.recipe.layout` turns it into positions once the sizes of its sources are known, and
`megaindex.recipe.recipe_file` reads and writes it as YAML.

>>> Recipe(
...     sequence_length=2048,
...     batch=BatchSchedule.constant(256),
...     sources=(
...         RecipeSource(name="web", path="data/web"),
...         RecipeSource(name="code", path="data/code"),
...     ),
...     stages=(
...         RecipeStage(
...             name="stable",
...             streams=(Stream(source="web", proportion=Fraction(7, 10)),
...                      Stream(source="code", proportion=Fraction(3, 10))),
...             length=Target(kind="iterations", value=Fraction(10_000)),
...         ),
...     ),
... )
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megaindex.arithmetic import ceil_div
from megaindex.configs.batch_schedule import BatchSchedule
from megaindex.configs.run import TAILS, Tail, Target
from megaindex.errors import InvalidArgument
from megaindex.recipe.source import RecipeSource, shown
from megaindex.validation import (
    DEFAULT_SEED,
    check_between,
    check_choice,
    check_fraction,
    check_share,
    make_plain,
)


@dataclass(frozen=True, kw_only=True)
class RecipeEvaluation:
    """Evaluation on a source of its own, the same samples in every round."""

    source: RecipeSource
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


Batching = Literal["stratified", "random", "per_stream"]
Rounding = Literal["largest_remainder", "streaming"]
Exhaustion = Literal["repeat", "stop", "continue", "redistribute", "error"]
EXHAUSTIONS = ("repeat", "stop", "continue", "redistribute", "error")
BATCHINGS = ("stratified", "random", "per_stream")
ROUNDINGS = ("largest_remainder", "streaming")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """What a stage draws from one source: a proportion of it all, or samples of its own count."""

    source: str
    proportion: Fraction | None = None
    """Share of the stage, relative to the other streams'."""
    repeat: Fraction | None = None
    """Epochs of the source in each epoch of the mixture."""
    choose: int | None = None
    """Samples of the source in each epoch of the mixture."""
    restart: bool = False
    """Begin with the source's first sample instead of where the run has got to."""

    def __post_init__(self) -> None:
        given = [k for k in ("proportion", "repeat", "choose") if getattr(self, k) is not None]
        if len(given) > 1:
            raise InvalidArgument(
                f"stream {self.source}: {' and '.join(given)} exclude each other; give one"
            )
        make_plain(self, optional=["choose"])
        for name in given:
            value = check_fraction(f"stream {self.source}: {name}", getattr(self, name))
            if name != "choose":
                object.__setattr__(self, name, value)
            if value <= 0:
                raise InvalidArgument(
                    f"stream {self.source}: {name} must be positive, got {shown(value)}; leave "
                    "out a stream that is not drawn"
                )
            if value >= 2**53 or value < Fraction(1, 2**53):
                raise InvalidArgument(
                    f"stream {self.source}: {name} must be below 2**53 and not below its inverse, "
                    f"got {shown(value)}"
                )


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """Proportions from the sizes of the sources: size ** alpha."""

    by: Literal["tokens", "documents", "samples"] = "tokens"
    alpha: float = 1.0
    """1 keeps the sizes, 0 makes all equal, between flattens (a temperature of 1 / alpha)."""

    def __post_init__(self) -> None:
        check_choice("by", self.by, ("tokens", "documents", "samples"))
        object.__setattr__(self, "alpha", check_share("alpha", self.alpha))


@dataclass(frozen=True, kw_only=True)
class RecipeStage:
    """A mixture of streams, for a while."""

    name: str
    streams: tuple[Stream, ...]
    length: Target | None = None
    """How long; epochs are those of the mixture. None: one epoch of it."""
    first_step: int | None = None
    """The step it must begin with, from 0, where that is to be checked."""
    planned_samples: int | None = None
    """Samples it was to have, where it was ended early (see `megaindex.recipe.amend`): what
    exhaustion redistribute divided. None: those it has."""
    epoch_size: int | None = None
    """Samples of an epoch of the mixture, for proportions. None: those of all its sources."""
    weighting: Weighting | None = None
    """Proportions by size, in place of the streams' own."""
    batching: Batching = "stratified"
    rounding: Rounding = "largest_remainder"
    """How proportions of an epoch_size, and repeats, become whole samples; "streaming": as that
    library does."""

    def __post_init__(self) -> None:
        where = f"stage {self.name}"
        optional = ["first_step", "planned_samples", "epoch_size"]
        make_plain(self, optional=optional, called=f"{where}: {{}}".format)
        if not self.streams:
            raise InvalidArgument(f"{where}: has no stream")
        names = [stream.source for stream in self.streams]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidArgument(f"{where}: source {twice[0]} is listed twice; list it once")
        by_share = [stream.proportion is not None for stream in self.streams]
        if any(by_share) and not all(by_share):
            raise InvalidArgument(
                f"{where}: {names[by_share.index(False)]} has no proportion and "
                f"{names[by_share.index(True)]} has one; give all streams one, or none"
            )
        own = [s.proportion or s.repeat or s.choose for s in self.streams]
        if self.weighting is not None and any(own):
            raise InvalidArgument(
                f"{where}: weights by {self.weighting.by} take the place of proportion, repeat "
                f"and choose; remove {own[0]} or the weights"
            )
        size = self.epoch_size
        if size is not None and (not self.by_proportion or not 1 <= size < 2**53):
            raise InvalidArgument(
                f"{where}: epoch_size, a number of samples from 1 to 2**53, is divided by "
                "proportions"
            )
        check_choice(f"{where}: batching", self.batching, BATCHINGS)
        check_choice(f"{where}: rounding", self.rounding, ROUNDINGS)
        self._check_length(where)

    def _check_length(self, where: str) -> None:
        length = self.length
        if length is None:
            return
        whole = length.kind == "epochs" or length.value.denominator == 1
        if length.per_source or not whole or not 0 < length.value <= 2**62:
            raise InvalidArgument(
                f"{where}: its length must be a positive number, whole but for epochs, got "
                f"{shown(length.value)} {length.kind}"
            )

    @property
    def by_proportion(self) -> bool:
        """Whether streams share the stage, and not each gives samples of its own count."""
        return self.weighting is not None or self.streams[0].proportion is not None


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides which token is trained on at which step."""

    sequence_length: int
    batch: BatchSchedule
    sources: tuple[RecipeSource, ...]
    stages: tuple[RecipeStage, ...]
    seed: int = DEFAULT_SEED
    tail: Tail = "drop"
    """Of the run's last batch."""
    exhaustion: Exhaustion = "repeat"
    """What happens where a source has given all that its limits allow: begin its next epoch
    (without limits), stop the run on all ranks together, continue with the remaining sources,
    draw less of it from the start of the stage (redistribute), or refuse to plan (error)."""
    evaluation: RecipeEvaluation | None = None
    micro_batch_size: int | None = None
    data_parallel_size: int | None = None
    gradient_accumulation_steps: int | None = None

    def __post_init__(self) -> None:
        factors = ("micro_batch_size", "data_parallel_size", "gradient_accumulation_steps")
        make_plain(self, "sequence_length", "seed", optional=factors)
        check_choice("tail", self.tail, TAILS)
        check_choice("exhaustion", self.exhaustion, EXHAUSTIONS)
        self.batch.check_multiple_of((self.micro_batch_size or 1) * (self.data_parallel_size or 1))
        self._check_names()
        self._check_limits()

    def _check_names(self) -> None:
        if not self.sources or not self.stages:
            raise InvalidArgument("a recipe needs at least one source and one stage")
        for what, names in (
            ("sources", [source.name for source in self.sources]),
            ("stages", [stage.name for stage in self.stages]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise InvalidArgument(f"two {what} are called {', '.join(twice)}; rename one")
        known = {source.name for source in self.sources}
        for stage in self.stages:
            unknown = [s.source for s in stage.streams if s.source not in known]
            if unknown:
                raise InvalidArgument(
                    f"stage {stage.name}: there is no source {unknown[0]}; the sources are "
                    f"{', '.join(sorted(known))}"
                )

    def _check_limits(self) -> None:
        limited = [s.name for s in self.sources if s.max_epochs or s.max_fraction]
        if self.exhaustion == "repeat" and limited:
            raise InvalidArgument(
                f"source {limited[0]} has a limit, which exhaustion repeat ignores; choose "
                "exhaustion stop, continue, redistribute or error"
            )

    @property
    def rows_per_round(self) -> int | None:
        """Rows of one micro batch on every rank; None where the recipe does not say."""
        if self.micro_batch_size is None or self.data_parallel_size is None:
            return None
        return self.micro_batch_size * self.data_parallel_size

    def number(self, name: str) -> int:
        """Number of the source of that name."""
        return [source.name for source in self.sources].index(name)
