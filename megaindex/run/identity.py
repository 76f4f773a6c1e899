"""The identity of a run: a hash of its canonical form, which docs/lock-format.md specifies.

Runs of one identity have the same spans at each position, in the same steps.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from megaindex.run.subset import map_leaves

_DECISIVE = ("samples", "steps", "masked_rows")
_GROWS = ("epochs", "samples")  # fields of a keyed order, any of whose samples can be computed


def identity_of(
    subsets: Mapping[str, Mapping[str, Any]],
    fingerprints: Mapping[str, Sequence[str]],
    files: Sequence[str],
) -> str:
    """Return the identity of a run, 32 hex digits.

    Args:
        subsets: each subset, as `megaindex.run.subset.subset_of` returns it.
        fingerprints: fingerprint of each source of each subset.
        files: SHA-256 of the files of documents and mix changes, by their row.
    """
    canonical = {
        name: {
            **{key: subset[key] for key in _DECISIVE},
            "sources": list(fingerprints[name]),
            "index": canonical_index(subset["index"], files),
        }
        for name, subset in subsets.items()
    }
    text = json.dumps(canonical, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def canonical_index(node: Mapping[str, Any], files: Sequence[str]) -> Any:
    """Return the canonical form of the description of an index."""
    named = map_leaves(
        dict(node),
        lambda key, each: files[each] if key in ("file", "without") and type(each) is int else each,
    )
    return _canonical(named)


def _canonical(node: dict[str, Any]) -> dict[str, Any]:
    if node["order"] == "skipped":
        masks = sorted(node["masks"], key=lambda mask: json.dumps(mask, sort_keys=True))
        return {**node, "masks": masks, "index": _canonical(node["index"])}
    if node["order"] == "sequence":
        return _sequence([(part["ranges"], _canonical(part["index"])) for part in node["parts"]])
    if "sources" not in node:
        grows = "name" in node
        return {key: each for key, each in node.items() if not (grows and key in _GROWS)}
    sources = [_canonical({**node["common"], **own}) for own in node["sources"]]
    kept = {key: each for key, each in node.items() if key not in ("common", "sources", "columns")}
    if node["order"] == "blend" and node["rule"] == "divisor":
        stage = {"rule": "stratified", "samples": node["samples"], "shares": node["weights"]}
        kept = {"order": "stages", "stages": [stage]}
    if kept["order"] == "stages":
        kept["stages"] = [_reduced(stage) for stage in kept["stages"]]
    return {**kept, "sources": sources}


def _reduced(stage: dict[str, Any]) -> dict[str, Any]:
    """Return a stratified stage with shares that have no common divisor."""
    if stage["rule"] != "stratified":
        return stage
    shares = [int(share) for share in stage["shares"]]
    divisor = math.gcd(*shares)
    return {**stage, "shares": [share // divisor for share in shares]}


def _sequence(parts: Sequence[tuple[Sequence[Sequence[int]], Any]]) -> dict[str, Any]:
    """Return parts of one index as one, and ranges that continue joined."""
    joined: list[dict[str, Any]] = []
    for ranges, index in parts:
        if not joined or joined[-1]["index"] != index:
            joined.append({"ranges": [], "index": index})
        into = joined[-1]["ranges"]
        for begin, end, times in ranges:
            if into and into[-1][1] == begin and into[-1][2] == times == 1:
                into[-1] = [into[-1][0], end, 1]
            elif begin < end:
                into.append([begin, end, times])
    return {"order": "sequence", "parts": joined}
