"""Parts of the sources of a run: what each split uses of them, in tokens, documents and passes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

import numpy as np
import numpy.typing as npt

from megaindex._types import I32
from megaindex.arithmetic import ceil_div
from megaindex.builders.single import further_names, packing_order
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.format.dataset import read_length_histogram
from megaindex.index.documents import DocumentSubset, count_tokens
from megaindex.index.frameworks import SPLITS, FrameworkRules, Split
from megaindex.index.order_settings import NeoxDocumentsOrder
from megaindex.index.orders.framework import PackingOrder
from megaindex.index.orders.packed import Cutting, Packing
from megaindex.index.subset_rule import Reader, check_held_out
from megaindex.settings.run_settings import RunSettings
from megaindex.settings.sources import Source

_CHUNK = 1 << 22


@dataclass(frozen=True, kw_only=True)
class SplitPart:
    """The sequences [begin, end) of one source that one split uses."""

    source: Source
    begin: int
    end: int
    tokens: int
    pass_samples: int | None = None
    """Samples of one pass, for samples of whole documents; the fewest for pack_until_overflow."""
    leaves_out: int = 0
    """Documents that are not served, because they have no label or are too long."""
    packing: Packing | None = None
    """Bins of one epoch, in order packed."""
    long_documents: int = 0
    """Documents longer than a sample, in order packed."""
    shuffle_name: str | None = None
    """Name by which an order of megaindex shuffles the source; None: its fingerprint."""
    members: DocumentSubset | None = None
    """Those of the sequences that are used; None: all."""

    @property
    def sequences(self) -> int:
        return len(self.documents)

    @property
    def documents(self) -> range | DocumentSubset:
        """Sequence ids that the split uses."""
        return range(self.begin, self.end) if self.members is None else self.members


Parts = dict[Split, list[SplitPart]]
Opened = Callable[[str], IndexedDataset]
"""Function that opens a pair once, so that its fingerprint is computed once."""


def parts_of(run: RunSettings) -> Parts:
    """Return the parts of every split that has sources.

    Raises:
        InvalidArgument: the split has no share for training.
        FormatError, StorageError: a dataset cannot be read.
    """
    data, row, packing, sequence_length = run.data, run.row, run.packing, run.sequence_length

    def measured(source: Source) -> list[SplitPart]:
        if row.order == "packed":
            return measure_packed(source, row, data.split, sequence_length)
        if packing is None:
            return measure(source, row, data.split)
        return measure_documents(source, row, data.split, packing, sequence_length)

    opened = cache(partial(open_dataset, row=row))

    def narrowed(part: SplitPart, split: Split) -> SplitPart:
        return _narrowed(part, split, row, sequence_length, opened)

    if data.split is None:
        sources = {split: getattr(data, split) for split in SPLITS}
        if not data.apart and any(source.held_out is not None for source in data.train):
            sources["valid"] = data.train
        alone = ((split, map(measured, each)) for split, each in sources.items())
        own = {
            split: [narrowed(parts[0], split) for parts in _named(list(each), row, opened)]
            for split, each in alone
        }
        check_held_out(_readers(own, SPLITS, opened))
        return own
    shares = row.shares(data.split)
    if shares[0] == 0:
        raise InvalidArgument(f"--split {data.split} has no training data; give train a share")
    divided = _named([measured(source) for source in data.train], row, opened)
    found: Parts = {
        split: [narrowed(parts[i], split) if split == "train" else parts[i] for parts in divided]
        if shares[i] > 0
        else []
        for i, split in enumerate(SPLITS)
    }
    check_held_out(_readers(found, ("train",), opened))  # parts of a split share no document
    return found


def _readers(parts: Parts, splits: Sequence[Split], opened: Opened) -> list[Reader]:
    """Return the sources of splits that have files, for `check_held_out`."""

    def fingerprint(path: str) -> str:
        return corpus_fingerprint(opened(path))

    return [
        Reader(
            label=f"{split} data {part.source.path}",
            fingerprint=partial(fingerprint, part.source.path),
            rule=part.source.subset_rule,
            shuffle_name=part.shuffle_name,
            trains=split == "train",
        )
        for split in splits
        for part in parts[split]
        if part.source.path
    ]


def _narrowed(
    part: SplitPart, split: Split, row: FrameworkRules, sequence_length: int, opened: Opened
) -> SplitPart:
    """Return a part with the documents that the rule of its source chooses."""
    source = part.source
    rule = replace(source.subset_rule, evaluates=split != "train")
    if not rule:
        return part
    where = source.path or source.histogram or "--tokens-per-epoch"
    if source.histogram:
        raise InvalidArgument(
            f"{where}: lengths without numbers do not tell which documents a subset has; give "
            "--data-path, or the tokens of the whole source as --tokens-per-epoch"
        )
    if source.tokens is not None:
        return replace(part, tokens=rule.count(part.tokens))
    dataset = opened(source.path)
    name = part.shuffle_name or corpus_fingerprint(dataset)
    lengths, within = dataset.sequence_lengths, range(part.begin, part.end)
    members = rule.choose(name, lengths, within, where)
    if isinstance(members, range):
        return part
    part = replace(part, members=members, tokens=count_tokens(lengths, members))
    if row.order != "packed":
        return part
    return _packed(part, members.lengths(lengths), row, sequence_length)


def _named(
    measured: list[list[SplitPart]], row: FrameworkRules, opened: Opened
) -> list[list[SplitPart]]:
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
    further = further_names([opened(path) if path else None for path in paths])
    names = [s.shuffle_name or name for s, name in zip(sources, further, strict=True)]
    return [
        [replace(part, shuffle_name=name) for part in parts]
        for parts, name in zip(measured, names, strict=True)
    ]


def measure(source: Source, row: FrameworkRules, split: str | None) -> list[SplitPart]:
    """Return a source as one part, or the train, valid and test parts of ``split``.

    Raises:
        MissingFile, StorageError, FormatError: the pair cannot be read, or a length is negative.
    """
    if source.tokens is not None:
        return [SplitPart(source=source, begin=0, end=0, tokens=source.tokens)]
    dataset = open_dataset(source.path, row)
    bounds = [(0, len(dataset))] if split is None else row.split_bounds(split, len(dataset))
    lengths, path = dataset.sequence_lengths, f"{source.path}.idx"
    return [
        SplitPart(source=source, begin=a, end=b, tokens=_sum(lengths, a, b, path))
        for a, b in bounds
    ]


def _sum(lengths: npt.NDArray[np.int32], begin: int, end: int, path: str) -> int:
    total = 0
    for start in range(begin, end, _CHUNK):  # the sum copies its block as int64
        block = lengths[start : min(start + _CHUNK, end)]
        if int(block.min()) < 0:
            at = int(np.argmax(block < 0))
            raise FormatError(
                f"{path}: sequence {start + at} has the length {int(block[at])}, and lengths must "
                "be at least 0; write the file again"
            )
        total += int(block.sum(dtype=np.int64))
    return total


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
    count = len(open_dataset(source.path, row))
    bounds = [(0, count)] if split is None else row.split_bounds(split, count)
    parts = []
    for size in (end - begin for begin, end in bounds):
        if size == 0:
            parts.append(SplitPart(source=source, begin=0, end=0, tokens=0, pass_samples=0))
            continue
        order = documents_order(source, row, size, packing, sequence_length)
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
        longer = histogram.documents[histogram.lengths > sequence_length].sum()
        part = SplitPart(
            source=source, begin=0, end=0, tokens=histogram.tokens, long_documents=int(longer)
        )
        cutting = _cutting(source, row, sequence_length)
        pack = partial(cutting.pack_histogram, histogram.lengths, histogram.documents)
        return [_packed_part(part, pack, row, source.histogram)]
    dataset = open_dataset(source.path, row)
    parts = []
    for part in measure(source, row, split):  # which refuses negative lengths
        lengths = dataset.sequence_lengths[part.begin : part.end]
        parts.append(_packed(part, lengths, row, sequence_length))
    return parts


def _cutting(source: Source, row: FrameworkRules, sequence_length: int) -> Cutting:
    try:
        return Cutting(
            sequence_length=sequence_length, long_documents=row.long_documents, align=row.align
        )
    except InvalidArgument as error:
        raise InvalidArgument(f"{source.path or source.histogram}: {error}") from None


def _packed(part: SplitPart, lengths: I32, row: FrameworkRules, sequence_length: int) -> SplitPart:
    """Return a part in order packed, whose documents have these lengths."""
    cutting = _cutting(part.source, row, sequence_length)
    part = replace(part, long_documents=int(np.count_nonzero(lengths > sequence_length)))
    return _packed_part(part, partial(cutting.pack_lengths, lengths), row, part.source.path)


def _packed_part(
    part: SplitPart, pack: Callable[[int | None], Packing], row: FrameworkRules, name: str
) -> SplitPart:
    if not part.tokens:
        return replace(part, pass_samples=0)
    try:
        packing = pack(row.max_documents)
    except InvalidArgument as error:
        raise InvalidArgument(f"{name}: {error}") from None
    return replace(part, packing=packing, pass_samples=packing.num_samples)


def documents_order(
    source: Source,
    row: FrameworkRules,
    size: int,
    packing: NeoxDocumentsOrder,
    sequence_length: int,
) -> PackingOrder:
    """Return the order of the first ``size`` documents of a source, which of them take part."""
    text, own = open_dataset(source.path, row), with_labels(packing, source, row)
    return packing_order(
        text, range(size), own, sequence_length=sequence_length, seed=0, num_samples=1
    )


def open_dataset(path: str, row: FrameworkRules) -> IndexedDataset:
    """Return the dataset of a path, as the framework of a run reads it."""
    return IndexedDataset(path, dialect=row.file_dialect)


def with_labels(
    packing: NeoxDocumentsOrder, source: Source, row: FrameworkRules
) -> NeoxDocumentsOrder:
    """Return the order with the dataset of the source's labels, if it has them."""
    labels = open_dataset(source.labels, row) if source.labels else None
    return replace(packing, label_dataset=labels)
