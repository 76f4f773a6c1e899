"""Sources of a run: tokens, documents and samples of whole documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.arithmetic import ceil_div
from megaindex.builders.single import (
    build_index,
    build_packing,
    further_names,
    packing_order,
)
from megaindex.configs.run import Buffer, Data, RunSettings, Source
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.format.dataset import read_length_histogram
from megaindex.index.blending import Progress
from megaindex.index.frameworks import SPLITS, FrameworkRules, PythonSum, Split, sum_as
from megaindex.index.order_settings import NeoxDocumentsOrder, order_of_row
from megaindex.index.orders.framework import PackingIndex, PackingOrder
from megaindex.index.orders.packed import count_pieces, pack_counts, pieces_of_histogram
from megaindex.kernels import active, num_threads
from megaindex.plan.coverage import count_served, counted_coverage
from megaindex.plan.model import Coverage, Row
from megaindex.plan.sizing import (
    InputTokens,
    ServedRange,
    Sizing,
    SplitPart,
    is_countable,
    mean_inputs,
    measure,
)


def measure_documents(
    source: Source,
    row: FrameworkRules,
    split: str | None,
    packing: NeoxDocumentsOrder,
    sequence_length: int,
) -> list[SplitPart]:
    """Return the parts of a source, as tokens and samples of the documents that take part.

    For validation and test GPT-NeoX takes the split's numbers of documents, but from the first
    document on.
    """
    count = len(_open(source.path, row))
    bounds = [(0, count)] if split is None else row.split_bounds(split, count)
    parts = []
    for size in (end - begin for begin, end in bounds):
        if size == 0:
            parts.append(SplitPart(source=source, begin=0, end=0, tokens=0, pass_samples=0))
            continue
        order = _order(source, row, size, packing, sequence_length)
        lengths = order.lengths[order.takes_part].astype(np.int64)
        room = sequence_length + 1
        fewest = ceil_div(int(np.minimum(lengths, room).sum()), room)
        parts.append(
            SplitPart(
                source=source,
                begin=0,
                end=size,
                tokens=int(lengths.sum()),
                pass_samples=lengths.size if packing.pack_impl == "unpacked" else fewest,
                leaves_out=size - lengths.size,
            )
        )
    return parts


def measure_packed(
    source: Source, row: FrameworkRules, split: str | None, sequence_length: int
) -> list[SplitPart]:
    """Return the parts of a source in order packed, with the bins of their documents."""
    if source.histogram:
        histogram = read_length_histogram(source.histogram)
        counts = pieces_of_histogram(
            histogram.lengths, histogram.documents, sequence_length, row.long_documents
        )
        longer = histogram.documents[histogram.lengths > sequence_length].sum()
        part = SplitPart(
            source=source, begin=0, end=0, tokens=histogram.tokens, long_documents=int(longer)
        )
        return [_packed_part(part, counts, row, source.histogram)]
    dataset = _open(source.path, row)
    parts = []
    for part in measure(source, row, split):  # which refuses negative lengths
        lengths = dataset.sequence_lengths[part.begin : part.end]
        counts = count_pieces(lengths, sequence_length, row.long_documents)
        part = replace(part, long_documents=int(np.count_nonzero(lengths > sequence_length)))
        parts.append(_packed_part(part, counts, row, source.path))
    return parts


def _packed_part(part: SplitPart, counts: I64, row: FrameworkRules, name: str) -> SplitPart:
    if not part.tokens:
        return replace(part, pass_samples=0)
    try:
        packing = pack_counts(counts, row.max_documents)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return replace(part, packing=packing, pass_samples=packing.num_samples)


def packed_inputs(run: RunSettings, part: SplitPart, row: Row) -> InputTokens:
    """Return the input tokens of the samples drawn of a source in order packed.

    Of a part of an epoch they are those of the counted coverage, or counted in the index where that
    is cheap, else the mean over seeds.
    """
    packing = part.packing
    assert packing is not None
    assert row.drawn is not None, "draws of our orders are always counted"
    mean = mean_inputs(packing, 0, row.drawn)
    if mean.exact:
        return mean
    if row.coverage.tokens_served is not None:
        return InputTokens(row.coverage.tokens_served, True)
    counts = bool(part.source.path) and run.coverage not in ("expected", "none")
    if not (counts and is_countable(packing, part.sequences, 0, row.drawn)):
        return mean
    index: Any = build_index(
        _open(part.source.path, run.row),
        sequence_length=run.sequence_length,
        seed=run.seed,
        num_samples=row.drawn,
        documents=range(part.begin, part.end),
        source_name=part.shuffle_name,
        order=order_of_row(run.row),
    )
    return InputTokens(index.count_inputs(0, row.drawn), True)


def index_of_part(run: RunSettings, part: SplitPart, requested: int) -> PackingIndex:
    """Return the index that GPT-NeoX builds for ``requested`` samples."""
    assert run.packing is not None
    source, packing = part.source, run.packing
    text, labels = _open(source.path, run.row), _open_if(source.labels, run.row)
    common: dict[str, Any] = {
        "sequence_length": run.sequence_length,
        "seed": run.seed,
        "num_samples": max(1, requested),
    }
    order = replace(packing, label_dataset=labels)
    return build_packing(text, range(part.begin, part.end), order, **common)


def samples_of_first_pass(index: PackingIndex, part: SplitPart) -> int:
    """Return the samples of pack_until_overflow that begin in the first pass over the documents."""
    taking_part = part.sequences - part.leaves_out
    return int(np.searchsorted(index.sample_index[:-1, 0], taking_part))


def packing_error(
    run: RunSettings, part: SplitPart, index: PackingIndex, served: Sequence[ServedRange]
) -> str:
    """Return the error with which GPT-NeoX ends on pack_until_overflow, or an empty string.

    It ends with one where the last document of a pass is left out, and where the sample filled last
    is served as the first.
    """
    assert run.packing is not None
    if run.packing.pack_impl == "unpacked":
        return ""
    if part.leaves_out and _reads_beyond_a_pass(run, part, index):
        return "an IndexError: the last document of a pass is left out of training"
    if _last_sample(index) == 0 and any(piece.begin == 0 for piece in served):
        return "a RecursionError: no document follows its first sample"
    return ""


def _reads_beyond_a_pass(run: RunSettings, part: SplitPart, index: PackingIndex) -> bool:
    assert run.packing is not None
    order = _order(part.source, run.row, part.sequences, run.packing, run.sequence_length)
    state = active().seed_state(run.seed)
    active().shuffle(state, np.arange(index.num_samples), num_threads())
    shuffled = np.arange(part.sequences)
    for _ in range(index.num_epochs - 1):
        active().shuffle(state, shuffled, num_threads())
        if not order.takes_part[shuffled[-1]]:
            return True
    return False


def _last_sample(index: PackingIndex) -> int:
    """Return the position of the sample that was filled last."""
    return int(np.argmax(index.shuffle_index == index.num_samples - 1))


def serves_first_again(index: PackingIndex, served: Sequence[ServedRange]) -> bool:
    """Return True if the sample filled last is served, for which GPT-NeoX reads the first."""
    last = _last_sample(index)
    return any(part.begin <= last < part.end for part in served)


def packing_coverage(
    run: RunSettings, part: SplitPart, index: PackingIndex, served: Sequence[ServedRange]
) -> Coverage:
    """Return the counted coverage of a part."""
    lengths = _open(part.source.path, run.row).sequence_lengths[part.begin : part.end]
    served = _with_last_replaced(run, index, served)
    return counted_coverage(*count_served(index, served, lengths, part.begin))


def _with_last_replaced(
    run: RunSettings, index: PackingIndex, served: Sequence[ServedRange]
) -> list[ServedRange]:
    """Return the samples that GPT-NeoX reads: for the one filled last, it reads the first."""
    assert run.packing is not None
    if run.packing.pack_impl == "unpacked":
        return list(served)
    last = _last_sample(index)
    pieces = []
    for part in served:
        if part.begin <= last < part.end:
            around = (replace(part, end=last), replace(part, begin=last + 1))
            pieces += [*around, ServedRange(0, 1, part.times)]
        else:
            pieces.append(part)
    return [part for part in pieces if part.begin < part.end]


def _order(
    source: Source,
    row: FrameworkRules,
    size: int,
    packing: NeoxDocumentsOrder,
    sequence_length: int,
) -> PackingOrder:
    text, labels = _open(source.path, row), _open_if(source.labels, row)
    common: dict[str, Any] = {"sequence_length": sequence_length, "seed": 0, "num_samples": 1}
    return packing_order(text, range(size), replace(packing, label_dataset=labels), **common)


def _open(path: str, row: FrameworkRules) -> IndexedDataset:
    return IndexedDataset(path, dialect=row.file_dialect)


def _open_if(path: str, row: FrameworkRules) -> IndexedDataset | None:
    return _open(path, row) if path else None


Parts = dict[Split, list[SplitPart]]


def parts_of(
    data: Data,
    row: FrameworkRules,
    packing: NeoxDocumentsOrder | None = None,
    *,
    sequence_length: int,
) -> Parts:
    """Return the parts of every split that has sources.

    Raises:
        InvalidArgument: the split has no share for training.
        FormatError, StorageError: a dataset cannot be read.
    """

    def measured(source: Source) -> list[SplitPart]:
        if row.order == "packed":
            return measure_packed(source, row, data.split, sequence_length)
        if packing is None:
            return measure(source, row, data.split)
        return measure_documents(source, row, data.split, packing, sequence_length)

    if data.split is None:
        alone = ((split, map(measured, getattr(data, split))) for split in SPLITS)
        return {split: [parts[0] for parts in _named(list(each), row)] for split, each in alone}
    shares = row.shares(data.split)
    if shares[0] == 0:
        raise InvalidArgument(f"--split {data.split} has no training data; give train a share")
    divided = _named([measured(source) for source in data.train], row)
    return {
        split: [parts[i] for parts in divided] if shares[i] > 0 else []
        for i, split in enumerate(SPLITS)
    }


def _named(measured: list[list[SplitPart]], row: FrameworkRules) -> list[list[SplitPart]]:
    """Return the parts of each source of a blend with the name by which an order of megaindex
    shuffles it: the one given, or that of a further source of a pair. Only sources of equal sizes
    are opened to compare their fingerprints."""
    if row.is_framework:
        return measured
    sources = [parts[0].source for parts in measured]
    sizes = [tuple((part.end, part.tokens) for part in parts) for parts in measured]
    times = Counter(sizes)
    paths = [
        source.path if times[size] > 1 and not source.shuffle_name else ""
        for source, size in zip(sources, sizes, strict=True)
    ]
    opened = {path: _open_if(path, row) for path in paths}
    further = further_names([opened[path] for path in paths])
    names = [s.shuffle_name or name for s, name in zip(sources, further, strict=True)]
    return [
        [replace(part, shuffle_name=name) for part in parts]
        for parts, name in zip(measured, names, strict=True)
    ]


def sizing_of(
    run: RunSettings,
    row: FrameworkRules,
    parts: Sequence[SplitPart],
    split: Split,
    progress: Progress | None,
    train: Sequence[SplitPart] = (),
) -> Sizing:
    """Return the sizing of one split.

    Epochs for each source set the weights, of validation and test too where a corpus is divided:
    those of the sources in ``train``, by default ``parts``.

    Raises:
        InvalidArgument: the training data is shorter than a sample; the frameworks repeat it.
    """
    tokens, needed = sum(part.tokens for part in parts), run.sequence_length + 1
    whole = run.packing is not None or row.order == "packed"
    if split == "train" and not whole and 0 < tokens < needed:
        raise InvalidArgument(
            f"the training data holds {tokens} tokens, one sample needs {needed} (--seq-length "
            f"{run.sequence_length} + 1); lower --seq-length"
        )
    weights: tuple[float | int, ...] | None = _weights([part.source for part in parts])
    if run.target.per_source and (split == "train" or run.data.split is not None):
        samples = _per_source_samples(run, row, train or parts)
        weights = tuple(
            next(s for s, t in zip(samples, run.data.train, strict=True) if t is part.source)
            for part in parts
        )
    if run.data.documents_alpha is not None:
        weights = documents_weights(
            [part.sequences for part in parts], run.data.documents_alpha, row.python_sum
        )
    if row.train_epochs == "reshuffled":
        weights = None  # each sample of each source is drawn
    if split != "train":  # Megatron-DeepSpeed has an exact number of epochs for training alone
        row = replace(row, exact_num_epochs=None)
    return Sizing(
        row=row,
        sequence_length=run.sequence_length,
        names=tuple(part.source.path or f"source {i}" for i, part in enumerate(parts, 1)),
        tokens=tuple(part.tokens for part in parts),
        weights=weights,
        buffer=_buffer(run, row, weights, len(parts)),
        pass_samples=tuple(p.pass_samples or 0 for p in parts) if whole else None,
        pass_samples_vary=run.packing is not None and run.packing.pack_impl != "unpacked",
        asks_one_epoch=run.target.kind == "loader_epochs",
        walk=run.blend_counts,
        progress=progress,
    )


def _per_source_samples(
    run: RunSettings, row: FrameworkRules, parts: Sequence[SplitPart]
) -> tuple[int, ...]:
    """Return the samples of each source's epochs, which are its weights."""
    samples = tuple(
        row.samples_in_epochs(epochs, part.tokens, run.sequence_length)
        if part.packing is None
        else int(epochs * part.packing.num_samples)
        for epochs, part in zip(run.target.per_source, parts, strict=True)
    )
    if min(samples) < 1:
        raise InvalidArgument(
            f"--epochs: source {samples.index(min(samples)) + 1} gives no sample of "
            f"{run.sequence_length} tokens; raise its epochs, or leave it out"
        )
    return samples


def documents_weights(documents: Sequence[int], alpha: float, rule: PythonSum) -> tuple[float, ...]:
    """Return GPT-NeoX's weights by numbers of documents, in its own double expressions.

    The weights are share ** alpha · (1 - share), normalised by sums of the rule.

    Raises:
        InvalidArgument: they are beyond the range of doubles.
    """
    if len(documents) == 1:
        return (1.0,)
    shares = [count / sum(documents) for count in documents]
    try:
        powers = [share**alpha for share in shares]
        total = sum_as(rule, powers)
        scaled = [power / total * (1 - share) for power, share in zip(powers, shares, strict=True)]
        whole = sum_as(rule, scaled)
        return tuple(weight / whole for weight in scaled)
    except (OverflowError, ZeroDivisionError):
        raise InvalidArgument(
            f"weighted_sampler_alpha {alpha} gives weights beyond the range of doubles; give one "
            "from 0 to 1"
        ) from None


def _weights(sources: Sequence[Source]) -> tuple[float, ...] | None:
    weights = [source.weight for source in sources if source.weight is not None]
    return tuple(weights) if weights else None


def _buffer(
    run: RunSettings, row: FrameworkRules, weights: Sequence[float | int] | None, num_sources: int
) -> Buffer:
    """Return the run's buffer, else the framework's own."""
    if run.target.kind == "loader_epochs":
        return 1.0
    own = _own_buffer(run, row, weights, num_sources)
    if own_sources(run) and num_sources == 1 and row.weight_alone == "ignored":
        return own if run.variance_buffer != "exact" else "exact"
    return run.variance_buffer or own


def own_buffers(run: RunSettings) -> list[tuple[int, float]]:
    """Return the number of sources, and the framework's own buffer, of each split with sources."""
    found = []
    for sources in filter(None, (getattr(run.data, split) for split in SPLITS)):
        weights = (1.0,) if run.target.per_source else _weights(sources)
        found.append((len(sources), _own_buffer(run, run.row, weights, len(sources))))
    return found


def own_sources(run: RunSettings) -> bool:
    """Return True if each split has its own sources; for Megatron, train alone suffices."""
    if run.row.order == "megatron":
        return run.data.apart
    return run.data.split is None and bool(run.data.valid or run.data.test)


def _own_buffer(
    run: RunSettings, row: FrameworkRules, weights: Sequence[float | int] | None, num_sources: int
) -> float:
    """Return the buffer that the framework applies.

    Megatron builds one epoch of several paths without weights; other frameworks give them equal
    weights.
    """
    weighted = weights is not None or (num_sources > 1 and row.request != "megatron")
    if own_sources(run) and num_sources == 1 and row.weight_alone != "as given":
        weighted = row.weight_alone == "always"
    return row.default_buffer(weighted=weighted)
