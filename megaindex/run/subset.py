"""A run as JSON values: a subset of a lock without its receipts.

docs/lock-format.md specifies them. Pairs and other files appear by the number of their row.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from megaindex._types import I64
from megaindex.builders.described import build_described
from megaindex.format import IndexedDataset
from megaindex.index.description import describe_index
from megaindex.index.documents import members_of
from megaindex.index.skips import Skip, read_skips, skips_of, source_number, unskipped
from megaindex.index.source_targets import SourceTargets
from megaindex.index.spans import datasets_of, sources_of
from megaindex.index.stretches import StretchedIndex
from megaindex.io.paths import absolute
from megaindex.run.run import Run, RunSource, StepShape
from megaindex.settings.batch_schedule import Steps


def rows_of(paths: Sequence[str]) -> dict[str, int]:
    """Return the row of each path in the lock."""
    return {path: number for number, path in enumerate(paths)}


def paths_of(run: Run) -> list[str]:
    """Return the prefixes of the pairs of a run, those of labels and loss masks too."""
    companions = [each.targets.companion for each in run.sources if each.targets is not None]
    pairs = [*datasets_of(run.index), *(pair for pair in companions if pair is not None)]
    return list(dict.fromkeys(absolute(pair.path_prefix) for pair in pairs))


def subset_of(run: Run, rows: Mapping[str, int], files: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a subset without its receipts, with the rows of pairs and files."""
    skips = run.skips
    node = map_leaves(
        _node_of(run, files),
        lambda key, each: (
            files[each] if key in ("file", "without") and isinstance(each, str) else each
        ),
    )
    return {
        "samples": run.num_samples,
        "sources": [rows[absolute(dataset.path_prefix)] for dataset in datasets_of(run.index)],
        "index": node,
        "steps": _steps(run.steps),
        "past_steps": run.past_steps,
        "masked_rows": run.masked_rows,
        "shapes": [list(shape) for shape in run.shapes],
        "targets": [
            None if source.targets is None else _named_targets(source.targets, rows)
            for source in run.sources
        ],
        "rounds": run.rounds,
        "every": run.every,
        "skip": None if skips is None else skip_settings(skips.settings, files),
        "note": {
            "order": run.order,
            "names": [
                None if source.name == source.path_prefix else source.name for source in run.sources
            ],
            "settings": [[name, value] for name, value in run.settings.items()],
        },
    }


def _named_targets(targets: SourceTargets, rows: Mapping[str, int]) -> list[Any]:
    """Return the kind of loss targets, and the row of their pair."""
    assert targets.companion is not None, "targets without a pair follow from the order"
    return [targets.kind, rows[absolute(targets.companion.path_prefix)]]


def _node_of(run: Run, files: Mapping[str, int]) -> dict[str, Any]:
    """Return the description of the index of a run, with its skips."""
    skips, order = run.skips, describe_index(unskipped(run.index))
    if skips is None:
        return order
    names = [source.name for source in run.sources]
    masking = [skip for skip in skips.settings if skip.from_step is not None]
    return {
        "order": "skipped",
        "end": skips.end,
        "left_out": skips.holes.tolist(),
        "moved": skips.holes[skips.is_moved].tolist(),
        "masks": [
            {
                "source": source_number(mask.source, names),
                "from": mask.first,
                "file": files[skip.documents] if isinstance(skip.documents, str) else None,
                **({"remove": True} if mask.remove else {}),
            }
            for mask, skip in zip(skips.masks, masking, strict=True)
        ],
        "index": order,
    }


def _steps(steps: Steps) -> list[list[int]]:
    """Return (first sample, samples, number) of steps of one size that follow each other."""
    if steps.size:
        count, rest = divmod(steps.end, steps.size)
        rows = [[0, steps.size, count], [count * steps.size, rest, 1]]
        return [row for row in rows if row[1] * row[2]]
    bounds = steps.bounds
    sizes = np.diff(bounds)
    firsts = np.flatnonzero(np.diff(sizes, prepend=-1))
    counts = np.diff(firsts, append=sizes.size)
    columns = (bounds[firsts], sizes[firsts], counts)
    return [list(row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def run_of_subset(
    subset: Mapping[str, Any],
    pair: Callable[[int], IndexedDataset],
    files: Sequence[str],
    *,
    cache_dir: str | os.PathLike[str] | None = None,
) -> Run:
    """Return the run that `subset_of` described.

    Args:
        subset: its result.
        pair: function that returns the dataset of a row.
        files: files of documents and mix changes, by their row.
        cache_dir: cache of built arrays, as for `megaindex.build_index`.

    Raises:
        InvalidArgument: the description does not fit the datasets.
    """
    steps = _steps_of(subset)
    datasets = [pair(row) for row in subset["sources"]]
    names = [name or str(number) for number, name in enumerate(subset["note"]["names"])]
    index = build_described(
        subset["index"], datasets, cache_dir=cache_dir, files=files, names=names
    )
    nodes = [next(source_nodes(each)) for each in _sources(subset["index"])]
    sources = [
        RunSource(
            name=name or dataset.path_prefix,
            sequence_lengths=dataset.sequence_lengths[slice(*node["documents"])],
            first_document=node["documents"][0],
            cut_tokens=getattr(leaf, "cut_tokens", 0),
            cut_by=f"long_documents {node.get('long_documents')}",
            path_prefix=dataset.path_prefix,
            targets=targets and SourceTargets(kind=targets[0], companion=pair(targets[1])),
            members=members_of(leaf),
        )
        for name, node, dataset, leaf, targets in zip(
            subset["note"]["names"],
            nodes,
            datasets,
            sources_of(index),
            subset["targets"],
            strict=True,
        )
    ]
    skips = skips_of(index)
    if isinstance(index, StretchedIndex) and skips is not None:
        entries = with_files(subset["skip"], files)
        skips = replace(
            skips,
            settings=read_skips(entries, "skip", "/"),
            num_steps=int(np.searchsorted(steps.bounds, skips.end)),
        )
        index = replace(index, skips=skips)
    return Run(
        index=index,
        sources=tuple(sources),
        steps=steps,
        past_steps=subset["past_steps"],
        masked_rows=subset["masked_rows"],
        order=subset["note"]["order"],
        shapes=tuple(StepShape(*shape) for shape in subset["shapes"]),
        rounds=subset["rounds"],
        every=subset["every"],
        settings=dict(subset["note"]["settings"]),
    )


def first_part(node: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the description of the first part of an index, without skips."""
    while node["order"] in ("skipped", "sequence"):
        node = node["index"] if node["order"] == "skipped" else node["parts"][0]["index"]
    return node


def _sources(node: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the descriptions of the sources of an index, of its first part that has all."""
    if node["order"] == "skipped":
        return _sources(node["index"])
    if node["order"] == "sequence":
        return max((_sources(part["index"]) for part in node["parts"]), key=len)
    if "sources" not in node:
        return [node]
    return [{**node["common"], **each} for each in node["sources"]]


def source_nodes(node: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield the descriptions of the sources of an index, of each length."""
    if node["order"] == "skipped":
        yield from source_nodes(node["index"])
    elif node["order"] == "sequence":
        for part in node["parts"]:
            yield from source_nodes(part["index"])
    elif "sources" in node:
        for each in node["sources"]:
            yield from source_nodes({**node["common"], **each})
    else:
        yield node


def _steps_of(subset: Mapping[str, Any]) -> Steps:
    (first, size, _), *others = subset["steps"]
    shorter = all(samples < size and count == 1 for _, samples, count in others)
    if first == 0 and size and len(others) < 2 and shorter:
        return Steps(end=subset["samples"], size=size)
    return Steps.of(step_bounds_of(subset))


def step_bounds_of(subset: Mapping[str, Any]) -> I64:
    """Return int64[steps + 1], the first sample of each step, and the number of samples."""
    pieces = [first + size * np.arange(count) for first, size, count in subset["steps"]]
    return np.append(np.concatenate(pieces), subset["samples"]).astype(np.int64)


def first_step(bounds: I64) -> int:
    """Return the first step that has samples: 0, or behind the steps of a past elsewhere."""
    return int(np.searchsorted(bounds, bounds[0], "right")) - 1


def block_bounds(bounds: I64, block_steps: int) -> list[int]:
    """Return the first sample of each block of steps from `first_step` on, and the last end."""
    return [*bounds[first_step(bounds) : -1 : block_steps].tolist(), int(bounds[-1])]


def map_leaves(value: Any, leaf: Callable[[str, Any], Any], key: str = "") -> Any:
    """Return JSON values with ``leaf(key, value)`` in place of each value that holds no others."""
    if isinstance(value, dict):
        return {name: map_leaves(each, leaf, name) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [map_leaves(each, leaf) for each in value]
    return leaf(key, value)


def skip_settings(skips: Sequence[Skip], files: Mapping[str, int]) -> list[dict[str, Any]]:
    """Return skips as JSON values, with the row of each file in place of its path."""
    return with_files([skip.to_dict() for skip in skips], files)


def with_files(entries: Sequence[Mapping[str, Any]], files: Any) -> list[dict[str, Any]]:
    """Return entries of skips with ``files[documents]`` in place of documents."""
    found: list[dict[str, Any]] = map_leaves(
        entries, lambda key, each: files[each] if key == "documents" else each
    )
    return found


def differences(theirs: Any, ours: Any, where: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the places in JSON values that differ, with both values."""
    if isinstance(theirs, dict) and isinstance(ours, dict):
        for key in dict.fromkeys([*theirs, *ours]):
            yield from differences(theirs.get(key), ours.get(key), f"{where}.{key}".lstrip("."))
    elif isinstance(theirs, list) and isinstance(ours, list) and len(theirs) == len(ours):
        for number, pair in enumerate(zip(theirs, ours, strict=True)):
            yield from differences(*pair, f"{where}[{number}]")
    elif theirs != ours or type(theirs) is not type(ours):
        yield where, theirs, ours
