"""An index from its description: the inverse of `megaindex.index.description`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.arithmetic import samples_in
from megaindex.builders.cached import build_index
from megaindex.builders.single import epoch_index, packed_index, tokens_of
from megaindex.cache.cache import cache_at
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.bins import BinIndex, make_bins
from megaindex.index.blend import draws_by
from megaindex.index.blended_index import BlendedIndex, blend_index
from megaindex.index.documents import Documents, DocumentSubset, WordRange
from megaindex.index.extension import least_seen_index
from megaindex.index.mixing import FixedMixing, Mixing, PerStream, Random, Stratified
from megaindex.index.order_settings import MegatronOrder, PackedOrder
from megaindex.index.orders.blocks import BlockedIndex, PassBlocks
from megaindex.index.orders.epoch import EpochIndex, WindowIndex
from megaindex.index.skips import Skips, read_ids, with_skips
from megaindex.index.spans import Index, exposures_of, pass_counts
from megaindex.index.staged_index import MixedStage, StagedIndex
from megaindex.index.stretches import LossMask, Stretch, StretchedIndex, sequence
from megaindex.settings.mix_changes import MixChanges

Folder = str | os.PathLike[str]
Node = Mapping[str, Any]


def build_described(
    node: Node,
    datasets: Sequence[IndexedDataset],
    *,
    cache_dir: Folder | None = None,
    files: Sequence[str] = (),
    names: Sequence[str] = (),
) -> Index:
    """Return the index that `describe_index` described, or that a lock describes.

    Args:
        node: its result.
        datasets: dataset of each source, by its number in the index.
        cache_dir: cache of built arrays, as for `megaindex.build_index`.
        files: files of skipped documents and mix changes, by their row in the lock.
        names: names of the sources, by which a checkpoint knows their masks; default: numbers.

    Raises:
        InvalidArgument: the description does not fit the datasets.
        KeyError, TypeError, ValueError: it is not a description.
    """
    if node["order"] == "skipped":
        index = build_described(node["index"], datasets, cache_dir=cache_dir, files=files)
        return skipped_index(node, index, [len(dataset) for dataset in datasets], files, names)
    build = partial(build_described, cache_dir=cache_dir, files=files)
    if node["order"] == "sequence":
        parts = [(build(part["index"], datasets), part["ranges"]) for part in node["parts"]]
        passes = _first_passes([part["index"] for part in node["parts"]], parts)
        return StretchedIndex(stretches=tuple(_stretches(parts, passes)))
    if node["order"] not in ("blend", "stages"):
        return _leaf(node, datasets[0], cache_dir, files)
    leaves = [{**node["common"], **own} for own in node["sources"]]
    indices = tuple(build(leaf, [datasets[number]]) for number, leaf in enumerate(leaves))
    if node["order"] == "blend":
        return _blend(node, indices)
    stages = _stages(node["stages"], len(indices), files)
    staged = StagedIndex(sources=indices, stages=tuple(stages))
    return sequence([staged], first=node.get("first_position", 0))


def skipped_index(
    node: Node,
    index: Index,
    documents: Sequence[int],
    files: Sequence[str],
    names: Sequence[str] = (),
) -> Index:
    """Return an index with the skips of a description.

    Args:
        node: description of order ``skipped``.
        index: the samples without skips.
        documents: number of sequences of each source.
        files: files of skipped documents, by their row in the lock.
        names: names of the sources. Default: their numbers.
    """
    names = names or list(map(str, range(len(documents))))
    holes = np.array(node["left_out"], np.int64).reshape(-1, 2)
    moved = [tuple(pair) for pair in node["moved"]]
    is_moved = [tuple(pair) in moved for pair in holes.tolist()]
    if [tuple(pair) for pair in holes[np.array(is_moved, bool)].tolist()] != moved:
        raise InvalidArgument("moved samples must be ranges of those left out; restore the lock")
    masks = tuple(
        LossMask(
            source=names[mask["source"]],
            first=mask["from"],
            documents=None if mask["file"] is None else read_ids(files[mask["file"]]),
            remove=mask.get("remove", False),
        )
        for mask in node["masks"]
    )
    skips = Skips(
        settings=(),
        num_samples=index.num_samples,
        end=node["end"],
        holes=holes,
        is_moved=np.array(is_moved, bool),
        masks=masks,
        num_steps=0,
    )
    return with_skips(index, skips, names, documents)


def _leaf(
    node: Node, dataset: IndexedDataset, cache_dir: Folder | None, files: Sequence[str]
) -> Index:
    """Return the index of one source."""
    begin, end = node["documents"]
    if not 0 <= begin < end <= len(dataset):
        raise InvalidArgument(
            f"{dataset.path_prefix}: the documents of an epoch are {begin} to {end - 1}, and it "
            f"has {len(dataset)}; restore the dataset"
        )
    within = range(begin, end)
    documents: Documents = within
    if "members" in node:
        documents = DocumentSubset.of(WordRange.of_json(node["members"]), within)
    if "without" in node:
        index = _epoch_without(node, dataset, files[node["without"]])
    else:
        index = _KINDS[node["order"]](node, dataset, documents, cache_dir)
    _check_samples(node, dataset, index.num_samples)
    if "least_seen" in node:
        return least_seen_index(index, node["least_seen"], node["samples"] - node["least_seen"])
    return index


def _check_samples(node: Node, dataset: IndexedDataset, samples: int) -> None:
    if samples != node["samples"]:
        begin, end = node["documents"]
        raise InvalidArgument(
            f"{dataset.path_prefix}: {node['epochs']} epochs of its documents {begin} to "
            f"{end - 1} must have {node['samples']} samples, got {samples}; restore the dataset"
        )


def _common(node: Node) -> dict[str, Any]:
    return {
        "sequence_length": node["sequence_length"],
        "seed": node["seed"],
        "source_name": node["name"],
        "add_extra_token": node["extra"],
    }


def _epoch(
    node: Node, dataset: IndexedDataset, documents: Documents, cache_dir: Folder | None
) -> EpochIndex:
    return epoch_index(
        dataset,
        documents,
        cache_at(cache_dir),
        tokens_per_epoch=tokens_of(dataset, documents),
        num_epochs=node["epochs"],
        epochs_mixed=node["epochs_mixed"],
        left_over=node["left_over"],
        **_common(node),
    )


def _epoch_without(node: Node, dataset: IndexedDataset, path: str) -> Index:
    """Return the index of the documents that are not in a file."""
    begin, end = node["documents"]
    read = read_ids(path)
    is_left = np.ones(end - begin, bool)
    is_left[read[(read >= begin) & (read < end)] - begin] = False
    documents = np.flatnonzero(is_left) + begin
    return replace(_epoch(node, dataset, documents.astype(np.int32), None), without=path)


def _blocks(node: Node, dataset: IndexedDataset, documents: Documents, _: Folder | None) -> Index:
    of_epochs = {**node, "epochs_mixed": 1, "left_over": "drop", "epochs": 1}
    blocks = PassBlocks(_epoch(of_epochs, dataset, documents, None), node["block_tokens"])
    return BlockedIndex(
        blocks=blocks, sequence_length=node["sequence_length"], num_epochs=node["epochs"]
    )


def _window(
    node: Node, dataset: IndexedDataset, documents: range | DocumentSubset, _: Folder | None
) -> Index:
    return WindowIndex(
        dataset=dataset, documents=documents, num_epochs=node["epochs"], **_common(node)
    )


def _packed(
    node: Node, dataset: IndexedDataset, documents: Documents, cache_dir: Folder | None
) -> Index:
    order = PackedOrder(
        max_documents=node["max_documents"],
        long_documents=node["long_documents"],
        align=node.get("align", 1),
    )
    tokens = tokens_of(dataset, documents)
    one = packed_index(
        dataset, documents, order, cache_at(cache_dir), tokens_per_epoch=tokens, **_common(node)
    )
    return one.extend(node["epochs"])


def _bins(node: Node, dataset: IndexedDataset, documents: Documents, _: Folder | None) -> Index:
    bins = make_bins(
        dataset.sequence_lengths,
        documents,
        node["capacity"],
        packed=node["packed"],
        long_documents=node["long_documents"],
    )
    return BinIndex(
        bins=bins,
        tokens_per_epoch=tokens_of(dataset, documents),
        num_epochs=node["epochs"],
        datasets=(dataset,),
        **_common(node),
    )


def _arrays(
    node: Node, dataset: IndexedDataset, documents: range, cache_dir: Folder | None
) -> Index:
    """Return the index of a framework's order; all are those of Megatron in these settings."""
    tokens = node["epochs"] * tokens_of(dataset, documents)
    _check_samples(node, dataset, samples_in(tokens, node["sequence_length"], node["extra"]))
    order = MegatronOrder(
        separate_final_epoch="always" if node["final_epoch_apart"] else "never",
        exact_num_epochs=node["epochs"],
    )
    return build_index(
        dataset,
        sequence_length=node["sequence_length"],
        seed=node["seed"],
        num_samples=node["samples"],
        documents=documents,
        add_extra_token=node["extra"],
        order=order,
        cache_dir=cache_dir,
    )


_KINDS: dict[str, Callable[..., Index]] = {
    "arrays": _arrays,
    "bins": _bins,
    "blocks": _blocks,
    "epoch": _epoch,
    "packed": _packed,
    "window": _window,
}


def _blend(node: Node, indices: tuple[Index, ...]) -> BlendedIndex:
    draws = draws_by(node["rule"], node["weights"])
    return blend_index(draws, indices, node["samples"], node.get("uncounted", 0))


def _stages(nodes: Sequence[Node], num_sources: int, files: Sequence[str]) -> list[MixedStage]:
    stages: list[MixedStage] = []
    records: dict[int, MixChanges] = {}
    for node in nodes:
        changed = node["rule"] == "changed"
        if changed and node["file"] not in records:
            records[node["file"]] = MixChanges.read(files[node["file"]])
        sources = tuple(node.get("sources", range(num_sources)))
        mixing: Mixing
        if changed:
            first = _mixing(node["first"]) if "first" in node else None
            columns, unit = np.array(node["columns"], np.int64), node.get("batch", 1)
            record = records[node["file"]]
            low, high = node["changes"]
            if high > record.size or columns.max() >= len(record.sources):
                raise InvalidArgument(
                    f"{record.path}: has {record.size} changes of {len(record.sources)} sources, "
                    f"and a stage names changes {low} to {high - 1} and source {columns.max()}; "
                    "restore the file"
                )
            mixing = record.draws(low, high, node["position"], columns, first, unit)
        else:
            mixing = _mixing(node)
        begins = tuple(node["begins"])
        stages.append(
            MixedStage(mixing=mixing, sources=sources, begins=begins, num_samples=node["samples"])
        )
    return stages


def _mixing(node: Node) -> FixedMixing:
    shares = tuple(node["shares"])
    if node["rule"] == "per_stream":
        batch = node["batch"]
        sizes = tuple(batch) if isinstance(batch, list) else (batch,) * len(shares)
        return PerStream(shares=shares, batch_sizes=sizes)
    if node["rule"] == "random":
        own = {name: node[name] for name in ("seed", "name", "period")}
        return Random(shares=shares, **own)
    if node["rule"] != "stratified":
        raise ValueError(f"unknown rule {node['rule']!r}")
    return Stratified(shares=shares)


_Part = tuple[Index, Sequence[Sequence[int]]]


def _first_passes(nodes: Sequence[Node], parts: Sequence[_Part]) -> Iterator[I64]:
    """Yield the passes of each source before those of each part.

    A part of another seed has further epochs, one without some documents the rest of an epoch.
    """
    position, passes = 0, pass_counts(parts[0][0])
    for node, (index, ranges) in zip(nodes, parts, strict=True):
        if _seed(node) != _seed(nodes[0]):
            counts = pass_counts(index)
            passes = np.pad(passes, (0, max(0, counts.size - passes.size)))
            yield passes[: counts.size].copy()
            passes[: counts.size] += counts
        elif "without" in node:
            yield exposures_of(parts[0][0], np.array([position]))
        else:
            yield np.zeros(1, np.int64)
        position += sum((end - begin) * times for begin, end, times in ranges)


def _seed(node: Node) -> int:
    """Return the seed of the first source of a description."""
    while "seed" not in node:
        if node["order"] == "sequence":
            node = node["parts"][0]["index"]
        else:
            node = {**node["common"], **node["sources"][0]}
    seed: int = node["seed"]
    return seed


def _stretches(parts: Iterable[_Part], first_passes: Iterable[I64]) -> Iterator[Stretch]:
    """Yield the stretches (begin, end, times) of parts."""
    for (index, ranges), passes in zip(parts, first_passes, strict=True):
        for begin, end, times in ranges:
            samples = range(begin, end)
            yield Stretch(index=index, samples=samples, times=times, first_passes=passes)
