"""GPT-NeoX's samples of whole documents: how many a pass gives, and what a run serves of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megaindex.build.packing import build_packing, build_pairs, packing_order, pair_order
from megaindex.format import IndexedDataset
from megaindex.index.dialect import Dialect
from megaindex.index.order_settings import NeoxDocumentsOrder
from megaindex.index.orders.packing import PackingIndex, PackingOrder
from megaindex.kernels import active, num_threads
from megaindex.kernels.sizes import ceil_div
from megaindex.plan.corpus import Part
from megaindex.plan.counting import count_served
from megaindex.plan.model import Coverage
from megaindex.plan.serving import Served
from megaindex.recipe.run import Run, Source


def measure_documents(
    source: Source,
    row: Dialect,
    split: str | None,
    packing: NeoxDocumentsOrder,
    sequence_length: int,
) -> list[Part]:
    """Parts of a source, of the documents that take part.

    Of a divided source GPT-NeoX takes as many documents for validation and test as the split
    gives, but counts them from the first one on.
    """
    count = len(_open(source.path, row))
    bounds = [(0, count)] if split is None else row.split_bounds(split, count)
    parts = []
    for size in (end - begin for begin, end in bounds):
        if size == 0:
            parts.append(Part(source=source, begin=0, end=0, tokens=0, pass_samples=0))
            continue
        order = _order(source, row, size, packing, sequence_length)
        lengths = order.lengths[order.takes_part].astype(np.int64)
        room = sequence_length + 1
        fewest = ceil_div(int(np.minimum(lengths, room).sum()), room)
        parts.append(
            Part(
                source=source,
                begin=0,
                end=size,
                tokens=int(lengths.sum()),
                pass_samples=lengths.size if packing.pack_impl == "unpacked" else fewest,
                leaves_out=size - lengths.size,
            )
        )
    return parts


def index_of_part(run: Run, part: Part, requested: int) -> PackingIndex:
    """The index that GPT-NeoX builds for so many samples."""
    assert run.packing is not None
    source, packing = part.source, run.packing
    text, labels = _open(source.path, run.row), _open_if(source.labels, run.row)
    common: dict[str, Any] = {
        "sequence_length": run.sequence_length,
        "seed": run.seed,
        "num_samples": max(1, requested),
    }
    if source.rejected:
        sides = build_pairs(
            text, _open(source.rejected, run.row), packing, pos_labels=labels,
            neg_labels=_open_if(source.rejected_labels, run.row), **common,
        )  # fmt: skip
        return sides[0]
    order = replace(packing, label_dataset=labels)
    return build_packing(text, range(part.begin, part.end), order, **common)


def samples_of_first_pass(index: PackingIndex, part: Part) -> int:
    """Samples of pack_until_overflow that begin in the first pass over the documents."""
    taking_part = part.sequences - part.leaves_out
    return int(np.searchsorted(index.sample_index[:-1, 0], taking_part))


def packing_error(run: Run, part: Part, index: PackingIndex, served: Sequence[Served]) -> str:
    """How GPT-NeoX ends on pack_until_overflow: reading on where the last document of a pass is
    left out, or looking for a document after the last sample.
    """
    assert run.packing is not None
    if run.packing.pack_impl == "unpacked":
        return ""
    if part.leaves_out and _reads_beyond_a_pass(run, part, index):
        return "an IndexError: the last document of a pass is one that is left out"
    last = _last_sample(index)
    if last == 0 and any(piece.begin == 0 for piece in served):
        return "a RecursionError: its first sample has no document after it"
    return ""


def _reads_beyond_a_pass(run: Run, part: Part, index: PackingIndex) -> bool:
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
    """Where the sample that was filled last is served."""
    return int(np.argmax(index.shuffle_index == index.num_samples - 1))


def packing_coverage(
    run: Run, part: Part, index: PackingIndex, served: Sequence[Served]
) -> Coverage:
    """Coverage of the documents of a part, counted; of pairwise data, of the preferred side."""
    lengths = _open(part.source.path, run.row).sequence_lengths[part.begin : part.end]
    tokens, documents = count_served(index, _instead(run, index, served), lengths, part.begin)
    return Coverage(
        method="built",
        tokens=tuple(float(share) for share in tokens / tokens.sum()),
        documents=tuple(float(share) for share in documents / documents.sum()),
    )


def _instead(run: Run, index: PackingIndex, served: Sequence[Served]) -> list[Served]:
    """For the last sample that pack_until_overflow fills, GPT-NeoX finds no document after it, and
    serves its first sample.
    """
    assert run.packing is not None
    if run.packing.pack_impl == "unpacked":
        return list(served)
    last = _last_sample(index)
    pieces = []
    for part in served:
        if not part.begin <= last < part.end:
            pieces.append(part)
            continue
        around = (replace(part, end=last), replace(part, begin=last + 1))
        pieces += [*around, Served(0, 1, part.times)]
    return [part for part in pieces if part.begin < part.end]


def _order(
    source: Source, row: Dialect, size: int, packing: NeoxDocumentsOrder, sequence_length: int
) -> PackingOrder:
    text, labels = _open(source.path, row), _open_if(source.labels, row)
    common: dict[str, Any] = {"sequence_length": sequence_length, "seed": 0, "num_samples": 1}
    if source.rejected:
        return pair_order(
            text, _open(source.rejected, row), packing, pos_labels=labels,
            neg_labels=_open_if(source.rejected_labels, row), **common,
        )  # fmt: skip
    return packing_order(text, range(size), replace(packing, label_dataset=labels), **common)


def _open(path: str, row: Dialect) -> IndexedDataset:
    return IndexedDataset(path, dialect=row.file_dialect)


def _open_if(path: str, row: Dialect) -> IndexedDataset | None:
    return _open(path, row) if path else None
