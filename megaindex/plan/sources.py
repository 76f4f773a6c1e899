"""Sources of each split, measured, and the sizing that the framework gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaindex.errors import InvalidArgument
from megaindex.index.dialect import SPLITS, Dialect, Split, parse_split
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
    shares = parse_split(data.split)
    if shares[0] == 0:
        raise InvalidArgument(f"--split {data.split} leaves no training data; give train a share")
    divided = [measure(source, row, data.split) for source in data.train]
    return {
        split: [parts[i] for parts in divided] if shares[i] > 0 else []
        for i, split in enumerate(SPLITS)
    }


def sizing_of(
    run: Run,
    row: Dialect,
    parts: Sequence[Part],
    split: Split,
    progress: Progress | None,
    train: Sequence[Part] = (),
) -> Sizing:
    """How the sources of one split are sized; ``train``: the parts of training, if not these.

    Epochs of each source set the weights, of validation and test too where a corpus is divided.
    """
    weights: tuple[float | int, ...] | None = _weights([part.source for part in parts])
    if run.target.per_source and (split == "train" or run.data.split is not None):
        samples = _per_source_samples(run, row, train or parts)
        weights = tuple(
            next(s for s, t in zip(samples, run.data.train, strict=True) if t is part.source)
            for part in parts
        )
    if split != "train":  # an exact number of epochs is for training alone
        row = replace(row, exact_num_epochs=None)
    return Sizing(
        row=row,
        sequence_length=run.sequence_length,
        names=tuple(part.source.path or f"source {i}" for i, part in enumerate(parts, 1)),
        tokens=tuple(part.tokens for part in parts),
        weights=weights,
        buffer=_buffer(run, row, weights, len(parts), own_sources=_own_sources(run)),
        asks_one_epoch=run.target.kind == "loader_epochs",
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
    """The buffer asked for, else the framework's own."""
    if run.target.kind == "loader_epochs":
        return 1.0
    own = _own_buffer(row, weights, num_sources, own_sources=own_sources)
    if own_sources and num_sources == 1 and row.weight_alone == "ignored":
        return own if run.variance_buffer != "exact" else "exact"
    return run.variance_buffer or own


def own_buffers(run: Run) -> list[tuple[int, float]]:
    """Sources, and the buffer that the framework itself applies, of each split that has any."""
    own_sources = _own_sources(run)
    splits = [getattr(run.data, split) for split in SPLITS]
    return [
        (
            len(sources),
            _own_buffer(
                run.row,
                (1.0,) if run.target.per_source else _weights(sources),
                len(sources),
                own_sources=own_sources,
            ),
        )
        for sources in splits
        if sources
    ]


def _own_sources(run: Run) -> bool:
    """Whether each split has sources of its own."""
    return run.data.split is None and bool(run.data.valid or run.data.test)


def _own_buffer(
    row: Dialect, weights: Sequence[float | int] | None, num_sources: int, *, own_sources: bool
) -> float:
    """The buffer that the framework applies.

    Megatron builds several paths without weights for one epoch; the other frameworks weigh them
    alike.
    """
    weighted = weights is not None or (num_sources > 1 and row.request != "megatron")
    if own_sources and num_sources == 1 and row.weight_alone != "as given":
        weighted = row.weight_alone == "always"
    return row.default_buffer(weighted=weighted)
