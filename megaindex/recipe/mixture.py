"""The mixture of a stage: streams, shares and samples per epoch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.index.blending import divisor_weights
from megaindex.index.mixing import Mixing, PerStream, Random, Stratified
from megaindex.recipe.recipe import Recipe, RecipeStage, Rounding


@dataclass(kw_only=True)
class Mixture:
    """Streams of a stage that are still drawn."""

    recipe: Recipe
    stage: RecipeStage
    sources: list[int]
    """Number of the source that each stream reads."""
    shares: list[int]
    """What is drawn of each, in samples, or in batches where a batch is of one stream."""
    epoch: int
    """Samples of an epoch of the mixture."""
    period: int | None
    """Samples after which the shares are drawn exactly; None: no such number."""

    def remove(self, stream: int) -> None:
        del self.sources[stream], self.shares[stream]
        self.period = None

    def mixing(self, piece: int) -> Mixing:
        """The draws of the stage's ``piece``-th piece: a new one begins where a stream ends."""
        stage, shares = self.stage, tuple(self.shares)
        if stage.batching == "stratified":
            return Stratified(shares=shares)
        if stage.batching == "random":
            name = f"{stage.name}/{piece}"
            whole = {} if self.period is None else {"period": self.period}
            return Random(shares=shares, seed=self.recipe.seed, name=name, **whole)
        return PerStream(shares=shares, batch_size=self.recipe.batch.final)


def mixture_of(recipe: Recipe, stage: RecipeStage, sizes: Sequence[SourceSize]) -> Mixture:
    """What a stage draws from, none of its streams exhausted.

    Args:
        sizes: one epoch of each source of the recipe.

    Raises:
        InvalidArgument: batching per_stream has several batch sizes, or a stream that fills none.
    """
    sources = [recipe.number(stream.source) for stream in stage.streams]
    drawn = [sizes[i] for i in sources]
    counts = list(samples_per_epoch(stage, drawn, recipe.seed))
    exact = not stage.by_proportion or stage.epoch_size is not None
    shares = counts
    if not exact:
        shares = [int(weight) for weight in divisor_weights(proportions(stage, drawn))]
    unit = 1
    if stage.batching == "per_stream":
        unit = _one_batch_size(recipe, stage)
        shares = _whole_batches(stage, shares, unit) if exact else shares
    epoch = sum(shares) * unit if exact else sum(counts)
    return Mixture(
        recipe=recipe,
        stage=stage,
        sources=sources,
        shares=shares,
        epoch=epoch,
        period=epoch if exact else None,
    )


def _one_batch_size(recipe: Recipe, stage: RecipeStage) -> int:
    if not recipe.batch.is_constant:
        raise InvalidArgument(
            f"stage {stage.name}: batching per_stream needs one batch size, and the batch "
            "schedule has several; use stratified or random"
        )
    return recipe.batch.final


def _whole_batches(stage: RecipeStage, counts: list[int], size: int) -> list[int]:
    """Batches of each stream in an epoch of the mixture; what fills none is not drawn."""
    for stream, count in zip(stage.streams, counts, strict=True):
        if count < size:
            raise InvalidArgument(
                f"stage {stage.name}: stream {stream.source} gives {count} samples to an epoch "
                f"of the mixture, less than one batch of {size}; raise it, or use batching "
                "stratified"
            )
    return [count // size for count in counts]


@dataclass(frozen=True, kw_only=True)
class SourceSize:
    """One epoch of a source."""

    tokens: int
    documents: int
    samples: int
    cut_tokens: int = 0
    """Those of the tokens that are in no sample: cut off or left out with long documents."""


def proportions(stage: RecipeStage, sizes: Sequence[SourceSize]) -> list[Fraction]:
    """Shares of the streams of a stage by proportion; ``sizes`` are those of their sources."""
    if stage.weighting is None:
        return [stream.proportion or Fraction(0) for stream in stage.streams]
    measured = [getattr(size, stage.weighting.by) for size in sizes]
    return [Fraction(float(size) ** stage.weighting.alpha) for size in measured]


def samples_per_epoch(
    stage: RecipeStage, sizes: Sequence[SourceSize], seed: int
) -> tuple[int, ...]:
    """Samples of each stream in one epoch of the mixture.

    Args:
        stage: whose streams are counted.
        sizes: of each stream's source.
        seed: of the draw that rounding "streaming" makes.

    Raises:
        InvalidArgument: a stream gives not even one sample.
    """
    if stage.by_proportion:
        total = stage.epoch_size or sum(size.samples for size in sizes)
        counts = apportion(proportions(stage, sizes), total, stage.rounding, seed)
    else:
        counts = [
            stream.choose or _repeated(stream.repeat or Fraction(1), size.samples, stage.rounding)
            for stream, size in zip(stage.streams, sizes, strict=True)
        ]
    for stream, count in zip(stage.streams, counts, strict=True):
        if count < 1:
            raise InvalidArgument(
                f"stage {stage.name}: stream {stream.source} gives no sample to an epoch of the "
                "mixture; raise its share or epoch_size, or leave it out"
            )
    return tuple(counts)


def _repeated(repeat: Fraction, samples: int, rounding: Rounding) -> int:
    """Whole samples of so many epochs; 0.29 of 100 are 29, in mosaicml-streaming's doubles 28."""
    return int(float(repeat) * samples) if rounding == "streaming" else int(repeat * samples)


def apportion(shares: Sequence[Fraction], total: int, rounding: Rounding, seed: int) -> list[int]:
    """``total`` samples divided in proportion; the counts add up to it.

    largest_remainder: each share rounded down, what is missing given to those cut most, the first
    of equals. streaming: as mosaicml-streaming does, in doubles: rounded down, what is missing
    given to streams that ``numpy.random.default_rng(seed)`` draws.
    """
    if rounding == "streaming":
        fractions = np.array([float(share) for share in shares])
        counts = (total * (fractions / fractions.sum())).astype(np.int64)
        lucky = np.random.default_rng(seed).choice(
            len(shares), total - int(counts.sum()), replace=False
        )
        counts[lucky] += 1
        return [int(count) for count in counts]
    exact = [share * total / sum(shares) for share in shares]
    whole = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def within_limits(
    shares: Sequence[Fraction], total: int, limits: Sequence[int | None]
) -> list[int] | None:
    """``total`` samples in proportion, no stream beyond its limit; the others take what is cut.

    Returns:
        Samples of each stream, or None where all limits together are below ``total``.
    """
    fixed: dict[int, int] = {}
    while True:
        free = [i for i in range(len(shares)) if i not in fixed]
        rest = total - sum(fixed.values())
        if not free:
            return None if rest > 0 else [fixed[i] for i in range(len(shares))]
        counts = apportion([shares[i] for i in free], rest, "largest_remainder", 0)
        over: dict[int, int] = {}
        for i, count in zip(free, counts, strict=True):
            limit = limits[i]
            if limit is not None and count > limit:
                over[i] = limit
        if not over:
            divided = {**fixed, **dict(zip(free, counts, strict=True))}
            return [divided[i] for i in range(len(shares))]
        fixed.update(over)
