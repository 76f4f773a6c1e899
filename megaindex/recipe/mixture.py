"""The mixture of a stage: which streams, in which shares, and what draws from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megaindex.errors import InvalidArgument
from megaindex.index.mixing import Mixing, PerStream, Random, Stratified
from megaindex.index.weights import divisor_weights
from megaindex.recipe.model import Recipe, RecipeStage
from megaindex.recipe.streams import SourceSize, proportions, samples_per_epoch


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
