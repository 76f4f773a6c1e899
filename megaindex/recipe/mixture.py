"""The mixture of a stage: streams, shares and samples per epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from operator import mul

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.index.blend import divisor_weights
from megaindex.index.documents import DocumentSubset, WordRange
from megaindex.index.mixing import FixedMixing, PerStream, Random, Stratified
from megaindex.index.orders.blocks import BlockedIndex
from megaindex.index.orders.packed import PackedIndex
from megaindex.index.spans import Index
from megaindex.settings.recipe import Recipe, RecipeStage, Rounding


@dataclass(kw_only=True)
class Mixture:
    """Streams of a stage that are not exhausted, with their shares."""

    recipe: Recipe
    stage: RecipeStage
    sources: list[int]
    """Number of the source that each stream reads."""
    batch_sizes: list[int]
    """Samples of a batch of each stream, under batching per_stream."""
    shares: list[int]
    """Relative draws of each stream, in samples; in batches under batching per_stream."""
    epoch: int
    """Samples of an epoch of the mixture."""
    period: int | None
    """Samples after which the shares are drawn exactly; None if there is no such number."""

    def remove(self, stream: int) -> None:
        del self.sources[stream], self.shares[stream], self.batch_sizes[stream : stream + 1]
        self.period = None

    def mixing(self, piece: int) -> FixedMixing:
        """Return the draws of a piece of the stage; a new piece begins where a stream ends."""
        stage, shares = self.stage, tuple(self.shares)
        if stage.batching == "stratified":
            return Stratified(shares=shares)
        if stage.batching == "random":
            name = f"{stage.name}/{piece}"
            whole = {} if self.period is None else {"period": self.period}
            return Random(shares=shares, seed=self.recipe.seed, name=name, **whole)
        return self.batches

    @property
    def batches(self) -> PerStream:
        """The draws of whole batches, under batching per_stream."""
        return PerStream(shares=tuple(self.shares), batch_sizes=tuple(self.batch_sizes))


def mixture_of(
    recipe: Recipe, stage: RecipeStage, sizes: Sequence[SourceSize], batch_sizes: Sequence[int]
) -> Mixture:
    """Return the mixture at the start of a stage, with all of its streams.

    ``sizes`` are one epoch of each source of the recipe, in samples of the stage.
    """
    sources = [recipe.number(stream.source) for stream in stage.streams]
    drawn = [sizes[i] for i in sources]
    counts = list(samples_per_epoch(stage, drawn, recipe.seed))
    exact = not stage.by_proportion or stage.epoch_size is not None
    own: list[int] = []
    units = [1] * len(counts)
    if stage.batching == "per_stream":
        own = units = _batch_sizes(stage, batch_sizes)
    if exact:
        shares = _whole_batches(stage, counts, units)
    else:
        each = zip(proportions(stage, drawn), units, strict=True)
        shares = divisor_weights([share * units[0] / n for share, n in each])
    epoch = sum(map(mul, shares, units)) if exact else sum(counts)
    return Mixture(
        recipe=recipe,
        stage=stage,
        sources=sources,
        batch_sizes=own,
        shares=shares,
        epoch=epoch,
        period=epoch if exact else None,
    )


def _batch_sizes(stage: RecipeStage, sizes: Sequence[int]) -> list[int]:
    """Return the batch size of each stream: its own, or that of the stage."""
    if len(sizes) > 1 and any(stream.batch_size is None for stream in stage.streams):
        raise InvalidArgument(
            f"stage {stage.name}: batching per_stream needs one batch size, and the batch "
            "schedule has several; give every stream a batch_size, or use stratified or random"
        )
    return [stream.batch_size or sizes[0] for stream in stage.streams]


def _whole_batches(stage: RecipeStage, counts: Sequence[int], sizes: Sequence[int]) -> list[int]:
    """Return the whole batches of each stream in an epoch of the mixture."""
    for stream, count, size in zip(stage.streams, counts, sizes, strict=True):
        if count < size:
            raise InvalidArgument(
                f"stage {stage.name}: stream {stream.source} gives {count} samples to an epoch "
                f"of the mixture, less than one batch of {size}; raise it, or use batching "
                "stratified"
            )
    return [count // size for count, size in zip(counts, sizes, strict=True)]


@dataclass(frozen=True, kw_only=True)
class SourceSize:
    """One epoch of a source."""

    tokens: int
    documents: int
    samples: int
    cut_tokens: int = 0
    """Tokens in no sample: cut off, or left out with long documents."""
    packed: PackedIndex | None = field(default=None, compare=False, repr=False)
    """Index of the epoch in order packed, whose samples hold padding; None in other orders."""
    unread_samples: int | None = None
    """Samples of the documents that were not read before the run joined; None without a list."""
    blocks: BlockedIndex | None = field(default=None, compare=False, repr=False)
    """Index of an epoch in order blocks, in samples of the first stage that reads the source."""
    shuffle_name: str = ""
    """Name by which the source is shuffled; empty for one without files."""
    words: WordRange | None = None
    """Words of its documents, if they are a subset of those of the pair."""
    members: DocumentSubset | None = field(default=None, compare=False, repr=False)
    """These documents, of a source with files."""
    index: Callable[[int, int], Index] | None = field(default=None, compare=False, repr=False)
    """Function of a number of samples and a sequence length that returns their index; None for a
    source without files."""

    def epochs_at(self, sample: int) -> float:
        """Return the epochs before a sample of the source; 1.5 in the middle of the second."""
        return sample / self.samples if self.blocks is None else self.blocks.epochs_read(sample)

    def samples_in(self, epochs: Fraction) -> int:
        """Return the samples of epochs, rounded up; in order blocks they differ in samples."""
        whole = int(epochs)
        before, after = (
            n * self.samples if self.blocks is None else self.blocks.samples_in_epochs(n)
            for n in (whole, whole + 1)
        )
        return before + math.ceil((epochs - whole) * (after - before))

    def at_length(self, sequence_length: int) -> SourceSize:
        """Return the size in samples of another length, which only order blocks has."""
        if self.blocks is None or self.blocks.sequence_length == sequence_length:
            return self
        blocks = self.blocks.at_length(sequence_length)
        return replace(self, samples=blocks.num_samples, blocks=blocks)


def proportions(stage: RecipeStage, sizes: Sequence[SourceSize]) -> list[Fraction]:
    """Return the proportions of a stage's streams; ``sizes`` are those of their sources."""
    if stage.weighting is None:
        return [stream.proportion or Fraction(0) for stream in stage.streams]
    measured = [getattr(size, stage.weighting.by) for size in sizes]
    return [Fraction(float(size) ** stage.weighting.alpha) for size in measured]


def samples_per_epoch(
    stage: RecipeStage, sizes: Sequence[SourceSize], seed: int
) -> tuple[int, ...]:
    """Return the samples of each stream in one epoch of the mixture.

    ``sizes`` are one epoch of each stream's source; ``seed`` is that of rounding "streaming".
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
    # 0.29 of 100 is 29, and 28 in the doubles of mosaicml-streaming
    return int(float(repeat) * samples) if rounding == "streaming" else int(repeat * samples)


def apportion(shares: Sequence[Fraction], total: int, rounding: Rounding, seed: int) -> list[int]:
    """Divide ``total`` samples in proportion to ``shares``; the counts add up to it.

    Shares are rounded down. The missing samples go to the shares cut most, the first of equals
    (largest_remainder), or to shares that ``numpy.random.default_rng(seed)`` draws (streaming: in
    doubles, as mosaicml-streaming does).
    """
    if rounding == "streaming":
        fractions = np.array([float(share) for share in shares])
        counts = (total * (fractions / fractions.sum())).astype(np.int64)
        lucky = np.random.default_rng(seed).choice(
            len(shares), total - int(counts.sum()), replace=False
        )
        counts[lucky] += 1
        return [int(count) for count in counts]
    whole_share = sum(shares)
    exact = [share * total / whole_share for share in shares]
    whole = [int(value) for value in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: (whole[i] - exact[i], i))
    for i in by_remainder[: total - sum(whole)]:
        whole[i] += 1
    return whole


def within_limits(
    shares: Sequence[Fraction], total: int, limits: Sequence[int | None]
) -> list[int] | None:
    """Divide ``total`` samples in proportion, with no stream beyond its limit.

    Return None if the sum of the limits is below ``total``.
    """
    fixed: dict[int, int] = {}
    while len(fixed) < len(shares):
        free = [i for i in range(len(shares)) if i not in fixed]
        rest = total - sum(fixed.values())
        counts = apportion([shares[i] for i in free], rest, "largest_remainder", 0)
        divided = dict(zip(free, counts, strict=True))
        limited = ((i, limits[i]) for i in free)
        over = {i: most for i, most in limited if most is not None and divided[i] > most}
        if not over:
            divided |= fixed
            return [divided[i] for i in range(len(shares))]
        fixed |= over
    return None if sum(fixed.values()) < total else [fixed[i] for i in range(len(shares))]
