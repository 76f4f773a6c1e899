"""A lock as a side of the comparison of two orders."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from typing import Any

import numpy as np

from megaindex.audit.diff_inputs import Side
from megaindex.index.orders.keyed import shuffle_names
from megaindex.index.skips import Skips, skips_of, without_holes
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.opening import locked_skips, run_of_lock
from megaindex.lock.pinned_files import Folder
from megaindex.lock.setting_values import leaves
from megaindex.run.subset import source_nodes, step_bounds_of
from megaindex.validation import shown


def side_from_lock(lock: Folder | Lock) -> Side:
    """Return the training samples of a lock as a side of `megaindex.audit.compare`.

    Those of a run that joined another system's are numbered from its own first sample on.

    Raises:
        MissingFile, StorageError, FormatError: as `megaindex.lock.open_run`.
    """
    lock = read_lock(lock)
    train, index = lock.subset("train"), run_of_lock(lock).index
    skips = skips_of(index)
    first = getattr(index, "first_position", 0)
    if skips is not None or first or index.num_samples > train["samples"]:
        index = without_holes(index, first, train["samples"])
    settings = dict(leaves(lock.content["settings"]))
    of_skips = f"{settings.get('kind')}.skip."
    nodes = list(source_nodes(train["index"]))
    common = {
        "corpus": _one_or_all(lock.fingerprints("train")),
        "source_name": _given_names(nodes, lock.fingerprints("train")),
        **_skipped_and_masked(lock, skips),
    }
    resolved = {
        "add_extra_token" if key == "extra" else key: _one_or_all([node.get(key) for node in nodes])
        for key in _RESOLVED
        if any(key in node for node in nodes)
    }
    if "run.order.name" in settings:
        resolved["order"] = settings["run.order.name"]
    own = {key: each for key, each in settings.items() if not key.startswith(of_skips)}
    return Side(
        name=lock.path,
        index=index,
        settings={**common, **own},
        resolved={**resolved, **common},
        identity=lock.identity,
    )


_RESOLVED = (
    "order", "documents", "sequence_length", "seed", "extra", "final_epoch_apart", "epochs_mixed",
    "left_over", "max_documents", "long_documents", "align", "members",
)  # fmt: skip
"""Settings of one source in the description of an index, by their names there."""


def _given_names(nodes: Sequence[Mapping[str, Any]], fingerprints: Sequence[str]) -> Any:
    """Return the names by which the sources are shuffled; None if they follow from fingerprints."""
    names = [node.get("name") for node in nodes]
    by_fingerprint = cycle(shuffle_names(fingerprints))
    if all(name in (None, own) for name, own in zip(names, by_fingerprint, strict=False)):
        return None
    return _one_or_all(names)


def _one_or_all(values: list[Any]) -> Any:
    """Return the values of all sources, or their only one."""
    return values[0] if all(each == values[0] for each in values) else values


def _skipped_and_masked(lock: Lock, skips: Skips | None) -> dict[str, str | None]:
    """Return what a lock skips, masks and removes as text, in one form for all entries; None:
    nothing."""
    if skips is None:
        return {"skip": None, "mask": None, "removal": None}
    train, masks = lock.content["subsets"]["train"], dict[bool, list[str]]({False: [], True: []})
    for skip, entry in zip(locked_skips(lock), train["skip"], strict=True):
        if not skip.ranges:
            what = "all documents"
            if "documents" in entry:
                digest = lock.content["files"][entry["documents"]]["sha256"]
                what = f"documents of {shown(skip.documents)} (SHA-256 {digest[:8]}…)"
            source = "" if skip.source is None else f" of {shown(skip.source)}"
            masks[skip.remove].append(f"{what}{source} from step {skip.from_step}")
    bounds = step_bounds_of(train)
    steps = [
        f"{first}-{end - 1}" + (" (moved)" if move else "")
        for (first, end), move in zip(
            np.searchsorted(bounds, skips.holes).tolist(), skips.is_moved.tolist(), strict=True
        )
    ]
    return {
        "skip": f"steps {', '.join(steps)}" if steps else None,
        "mask": ", ".join(sorted(masks[False])) or None,
        "removal": ", ".join(sorted(masks[True])) or None,
    }
