"""Sources of each split, measured, and the sizing that the framework gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaindex.errors import InvalidArgument
from megaindex.index.dialect import SPLITS, Dialect, Split
from megaindex.index.draws import Progress
from megaindex.plan.corpus import Part, measure
from megaindex.plan.sizing import Sizing
from megaindex.recipe.run import Buffer, Data, Run, Source

Parts = dict[Split, list[Part]]


def parts_of(data: Data, row: Dialect) -> Parts:
    """Parts of every split that has sources.

    Raises:
        InvalidArgument: the split leaves nothing to train on.
        FormatError, StorageError: a dataset cannot be read.
    """
    if data.split is None:
        return {
            split: [measure(source, row, None)[0] for source in getattr(data, split)]
            for split in SPLITS
        }
    shares = row.shares(data.split)
    if shares[0] == 0:
        raise InvalidArgument(f"--split {data.split} leaves no training data; give train a share")
    divided = [measure(source, row, data.split) for source in data.train]
    return {
        split: [parts[i] for parts in divided] if shares[i] > 0 else []
        for i, split in enumerate(SPLITS)
    }


def sizing_of(
    run: Run, row: Dialect, parts: Sequence[Part], split: Split, progress: Progress | None
) -> Sizing:
    """How the sources of one split are sized."""
    weights: tuple[float | int, ...] | None = _weights([part.source for part in parts])
    if split == "train" and run.target.per_source:
        weights = _per_source_samples(run, row, parts)
    if split != "train":  # an exact number of epochs is for training alone
        row = replace(row, exact_num_epochs=None)
    own_sources = run.data.apart
    return Sizing(
        row=row,
        sequence_length=run.sequence_length,
        names=tuple(part.source.path or f"source {i}" for i, part in enumerate(parts, 1)),
        tokens=tuple(part.tokens for part in parts),
        weights=weights,
        buffer=_buffer(run, row, weights, len(parts), own_sources=own_sources),
        walk=run.blend_counts,
        progress=progress,
    )


def _per_source_samples(run: Run, row: Dialect, parts: Sequence[Part]) -> tuple[int, ...]:
    """Epochs of each source as weights: the samples they hold."""
    samples = tuple(
        row.samples_in_epochs(epochs, part.tokens, run.sequence_length)
        for epochs, part in zip(run.target.per_source, parts, strict=True)
    )
    if min(samples) < 1:
        raise InvalidArgument(
            f"--epochs: source {samples.index(min(samples)) + 1} gives no sample of "
            f"{run.sequence_length} tokens; ask for more of it, or leave it out"
        )
    return samples


def _weights(sources: Sequence[Source]) -> tuple[float, ...] | None:
    weights = [source.weight for source in sources if source.weight is not None]
    return tuple(weights) if weights else None


def _buffer(
    run: Run,
    row: Dialect,
    weights: tuple[float | int, ...] | None,
    num_sources: int,
    *,
    own_sources: bool,
) -> Buffer:
    """The buffer asked for, else the framework's own.

    Megatron ignores the weight of a single path that one split has to itself; the other frameworks
    weigh several paths alike where they are told nothing.
    """
    if run.variance_buffer is not None:
        return run.variance_buffer
    if row.order == "megatron":
        alone = own_sources and num_sources == 1
        return row.default_buffer(weighted=weights is not None and not alone)
    return row.default_buffer(weighted=weights is not None or num_sources > 1)
