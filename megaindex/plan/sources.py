"""Sources of each split, measured, and the sizing that the framework gives them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from megaindex.errors import InvalidArgument
from megaindex.index.dialect import SPLITS, Dialect, Split
from megaindex.index.draws import Progress
from megaindex.index.order_settings import NeoxDocumentsOrder
from megaindex.plan.corpus import Part, measure
from megaindex.plan.sizing import Sizing
from megaindex.recipe.run import Buffer, Data, Run, Source

Parts = dict[Split, list[Part]]


def parts_of(
    data: Data, row: Dialect, packing: NeoxDocumentsOrder | None = None, sequence_length: int = 0
) -> Parts:
    """Parts of every split that has sources.

    Raises:
        InvalidArgument: the split leaves nothing to train on.
        FormatError, StorageError: a dataset cannot be read.
    """

    def measured(source: Source) -> list[Part]:
        if packing is None:
            return measure(source, row, data.split)
        from megaindex.plan.packing import measure_documents

        return measure_documents(source, row, data.split, packing, sequence_length)

    if data.split is None:
        return {split: [measured(source)[0] for source in getattr(data, split)] for split in SPLITS}
    shares = row.shares(data.split)
    if shares[0] == 0:
        raise InvalidArgument(f"--split {data.split} leaves no training data; give train a share")
    divided = [measured(source) for source in data.train]
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
    if run.data.documents_alpha is not None:
        weights = documents_weights([part.sequences for part in parts], run.data.documents_alpha)
    if split != "train":  # an exact number of epochs is for training alone
        row = replace(row, exact_num_epochs=None)
    return Sizing(
        row=row,
        sequence_length=run.sequence_length,
        names=tuple(part.source.path or f"source {i}" for i, part in enumerate(parts, 1)),
        tokens=tuple(part.tokens for part in parts),
        weights=weights,
        buffer=_buffer(run, row, weights, len(parts), own_sources=own_sources(run)),
        pass_samples=None if run.packing is None else tuple(p.pass_samples or 0 for p in parts),
        pass_samples_vary=run.packing is not None and run.packing.pack_impl != "unpacked",
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


def documents_weights(documents: Sequence[int], alpha: float) -> tuple[float, ...]:
    """GPT-NeoX's weights by the numbers of documents, in its own double expressions: shares to the
    power of alpha, times what they lack of 1.
    """
    if len(documents) == 1:
        return (1.0,)
    shares = [count / sum(documents) for count in documents]
    powers = [share**alpha for share in shares]
    total = sum(powers)
    scaled = [power / total * (1 - share) for power, share in zip(powers, shares, strict=True)]
    return tuple(weight / sum(scaled) for weight in scaled)


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
    splits = [getattr(run.data, split) for split in SPLITS]
    return [
        (
            len(sources),
            _own_buffer(
                run.row,
                (1.0,) if run.target.per_source else _weights(sources),
                len(sources),
                own_sources=own_sources(run),
            ),
        )
        for sources in splits
        if sources
    ]


def own_sources(run: Run) -> bool:
    """Whether each split has sources of its own; in Megatron's order, be it train alone."""
    if run.row.order == "megatron":
        return run.data.apart
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
