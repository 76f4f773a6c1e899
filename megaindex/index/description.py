"""Description of an index as JSON values, from which its samples can be computed again.

docs/lock-format.md specifies how. Pairs appear by the number of their source only, files of mix
changes and of documents left out by their path.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import Any

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.index.array_index import ArrayIndex
from megaindex.index.bins import BinIndex
from megaindex.index.blend import exact_values
from megaindex.index.blended_index import BlendedIndex, LazyIndex
from megaindex.index.documents import Documents, DocumentSubset
from megaindex.index.mixing import ChangedMixing, FixedMixing, Mixing, PerStream, Random
from megaindex.index.orders.blocks import BlockedIndex
from megaindex.index.orders.epoch import EpochIndex, WindowIndex
from megaindex.index.orders.keyed import SeededOrder
from megaindex.index.orders.packed import PackedIndex
from megaindex.index.spans import Index
from megaindex.index.staged_index import MixedStage, StagedIndex
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.validation import shown

Node = dict[str, Any]


def describe_index(index: Index) -> Node:
    """Return the description of an index.

    Raises:
        InvalidArgument: it has arrays of unknown origin, documents other than a range, or samples
            whose order has no description.
    """
    for kind, describe in _KINDS.items():
        if isinstance(index, kind):
            return describe(index)
    raise _unknown(index)


def _unknown(index: Index) -> InvalidArgument:
    return InvalidArgument(
        f"{shown(index)} cannot be described: its arrays were not built from settings; use an "
        "index of megaindex.build_index, build_blend or a recipe"
    )


def _epoch(index: EpochIndex) -> Node:
    own = {"epochs_mixed": index.epochs_mixed, "left_over": index.left_over}
    if index.without:
        every = range(index.sequence_lengths.size)
        return _computed("epoch", index, every, {**own, "without": index.without})
    return _computed("epoch", index, index.documents, own)


def _blocks(index: BlockedIndex) -> Node:
    blocks, epochs = index.blocks, index.blocks.epochs
    node = _computed("blocks", epochs, epochs.documents, {"block_tokens": blocks.block_tokens})
    own = {"sequence_length": index.sequence_length, "samples": index.num_samples}
    return {**node, **own, "epochs": index.num_epochs}


def _window(index: WindowIndex) -> Node:
    return _computed("window", index, index.documents, {})


def _packed(index: PackedIndex) -> Node:
    own = {"max_documents": index.max_documents, "long_documents": index.long_documents}
    if index.align > 1:
        own["align"] = index.align
    return _computed("packed", index, index.documents, own)


def _bins(index: BinIndex) -> Node:
    bins = index.bins
    own = {"capacity": bins.capacity, "packed": bins.packed, "long_documents": bins.long_documents}
    return _computed("bins", index, bins.documents, own)


def _computed(order: str, index: SeededOrder, documents: Documents, own: Node) -> Node:
    return {
        "order": order,
        **_documents(documents),
        "sequence_length": index.sequence_length,
        "extra": index.add_extra_token,
        "seed": index.seed,
        "name": index.source_name,
        **own,
        "epochs": index.num_epochs,
        "samples": index.num_samples,
    }


def _arrays(index: ArrayIndex) -> Node:
    request = index.request
    if request is None:
        raise _unknown(index)
    return {
        "order": "arrays",
        "documents": _bounds(request.documents),
        "sequence_length": request.sequence_length,
        "extra": request.add_extra_token,
        "seed": request.seed,
        "final_epoch_apart": request.final.apart,
        "epochs": request.num_epochs,
        "samples": index.num_samples,
    }


def _documents(documents: Documents) -> Node:
    if isinstance(documents, DocumentSubset):
        return {**_documents(documents.within), "members": documents.words.to_json()}
    return {"documents": _bounds(documents)}


def _bounds(documents: Documents) -> list[int]:
    if not isinstance(documents, range):
        raise InvalidArgument(
            f"documents must be a range to be described, got {len(documents)} ids; use a split, or "
            "megaindex split to write the documents as a pair of their own"
        )
    return [documents.start, documents.stop]


def _blend(index: BlendedIndex) -> Node:
    if index.rule is None:
        raise _unknown(index)
    node: Node = {
        "order": "blend",
        "rule": index.rule,
        "weights": exact_values(np.asarray(index.weights)),
        "samples": index.num_samples,
    }
    if index.uncounted_samples:
        node["uncounted"] = index.uncounted_samples
    return {**node, **_with_common([describe_index(each) for each in index.indices])}


def _staged(index: StagedIndex) -> Node:
    stages = [describe_stage(stage, len(index.sources)) for stage in index.stages]
    common = _with_common([describe_index(each) for each in index.sources])
    return {"order": "stages", "stages": stages, **common}


def described_stages(node: Node) -> list[Node]:
    """Return the stages of the description of a recipe's run, of all lengths, skipped or not."""
    inner = node["index"] if node["order"] == "skipped" else node
    if inner["order"] == "sequence":
        return [stage for part in inner["parts"] for stage in part["index"]["stages"]]
    stages: list[Node] = inner["stages"]
    return stages


def describe_stage(stage: MixedStage, num_sources: int) -> Node:
    """Return the description of a stage of a run of so many sources."""
    node: Node = {"samples": stage.num_samples, **_mixing(stage.mixing)}
    if stage.sources != tuple(range(num_sources)):
        node["sources"] = list(stage.sources)
    return {**node, "begins": list(stage.begins)}


def _mixing(mixing: Mixing) -> Node:
    node: Node
    if isinstance(mixing, ChangedMixing):
        node = {"rule": "changed", "file": mixing.path, "changes": list(mixing.rows)}
        node |= {"position": mixing.piece, "columns": list(mixing.columns)}
        if mixing.table.unit > 1:
            node["batch"] = mixing.table.unit
        return node if mixing.first is None else {**node, "first": _mixing(mixing.first)}
    assert isinstance(mixing, FixedMixing), "of one of two kinds"
    node = {"rule": "stratified", "shares": list(mixing.shares)}
    if isinstance(mixing, PerStream):
        batch = mixing.batch_size
        sizes = list(mixing.batch_sizes) if batch is None else batch
        return {**node, "rule": "per_stream", "batch": sizes}
    if isinstance(mixing, Random):
        own = {"seed": mixing.seed, "name": mixing.name, "period": mixing.period}
        return {**node, "rule": "random", **own}
    return node


def _with_common(nodes: Sequence[Node]) -> Node:
    """Return the nodes, and apart from them the values that all of them have."""
    first, *others = nodes
    common = {
        key: value
        for key, value in first.items()
        if all(key in node and node[key] == value for node in others)
    }
    own = [{key: node[key] for key in node if key not in common} for node in nodes]
    return {"common": common, "sources": own}


def _stretched(index: StretchedIndex) -> Node:
    """Return the parts, each in its own positions; those before the first one belong to it."""
    if index.least_seen is not None:
        return {**describe_index(index.stretches[0].index), "least_seen": index.least_seen}
    before, stretches = 0, [each for each in index.stretches if each.num_samples]
    if stretches[0].first < 0:
        before, stretches = stretches[0].num_samples, stretches[1:]
    parts: list[Node] = []
    for _, group in groupby(stretches, lambda each: id(each.index)):
        same = list(group)
        if any(each.hole for each in same):
            raise _unknown(index)
        ranges = [each for stretch in same for each in _ranges(stretch)]
        node = describe_index(same[0].index)
        if node["order"] == "blend":  # of which the first draws do not depend on the others
            node["samples"] = max(end for _, end, _ in ranges)
        parts.append({"ranges": ranges, "index": node})
    if before:
        parts[0]["index"] = {**parts[0]["index"], "first_position": before}
        parts[0]["ranges"][0][1] += before
        if len(parts) == 1:
            return dict(parts[0]["index"])
    return {"order": "sequence", "parts": parts}


def _ranges(stretch: Stretch) -> list[list[int]]:
    """Return (begin, end, times) of consecutive samples, those that repeat at once together."""
    samples = stretch.samples
    if isinstance(samples, range):
        return [[samples.start, samples.stop, stretch.times]]
    seams = np.flatnonzero(np.diff(samples) != 1) + 1
    firsts = samples[np.concatenate(([0], seams))].tolist() if samples.size else []
    lasts = samples[np.concatenate((seams - 1, [-1]))].tolist() if samples.size else []
    ranges: list[list[int]] = []
    for first, last in zip(firsts, lasts, strict=True):
        if ranges and ranges[-1][:2] == [first, last + 1]:
            ranges[-1][2] += 1
        else:
            ranges.append([first, last + 1, 1])
    return ranges


_KINDS: dict[type, Callable[[Any], Node]] = {
    ArrayIndex: _arrays,
    BinIndex: _bins,
    BlendedIndex: _blend,
    BlockedIndex: _blocks,
    EpochIndex: _epoch,
    LazyIndex: lambda index: describe_index(index.index),
    PackedIndex: _packed,
    StagedIndex: _staged,
    StretchedIndex: _stretched,
    WindowIndex: _window,
}
