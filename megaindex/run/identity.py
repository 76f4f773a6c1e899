"""The identity of a run: a hash of its canonical form, which docs/lock-format.md specifies.

Runs of one identity have the same spans at each position, in the same steps. A piece of the form is
a stretch of positions that one rule draws from streams, each of a source, the sample at which the
stream begins, and the node of the source.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

from megaindex.cache.fingerprint import canonical_json
from megaindex.run.subset import map_leaves

Node: TypeAlias = Mapping[str, Any]
Piece: TypeAlias = dict[str, Any]
Streams: TypeAlias = list[list[Any]]
Item = TypeVar("Item")

_IN_ORDER = {"rule": "stratified", "shares": [1]}
_GROWS = ("epochs", "samples")  # fields of a keyed order, any of whose samples can be computed


def canonical_forms(
    subsets: Mapping[str, Node], pairs: Sequence[str], files: Sequence[str]
) -> dict[str, Any]:
    """Return the canonical form of a run, of which `short_hash` is the identity.

    Args:
        subsets: each subset, as `megaindex.run.subset.subset_of` returns it.
        pairs: fingerprints of the pairs, by their row.
        files: SHA-256 of the files of documents and mix changes, by their row.
    """
    return {
        name: {
            "sources": [pairs[row] for row in subset["sources"]],
            "targets": [each and [each[0], pairs[each[1]]] for each in subset["targets"]],
            "rounds": subset["rounds"],
            "every": subset["every"],
            "masked_rows": subset["masked_rows"] if name == "train" else 0,
            **canonical_form(subset, files),
        }
        for name, subset in subsets.items()
    }


def short_hash(value: Node) -> str:
    """Return the first 32 hex digits of the SHA-256 of canonical JSON."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:32]


def canonical_form(subset: Node, files: Sequence[str]) -> dict[str, Any]:
    """Return steps, pieces, holes and masks of a subset in canonical form."""
    node: Any = map_leaves(
        subset["index"],
        lambda key, each: files[each] if key in ("file", "without") and type(each) is int else each,
    )
    skipped = {"end": subset["samples"], "left_out": (), "moved": (), "masks": (), "index": node}
    if node["order"] == "skipped":
        skipped = node
    joined = _merged(_pieces(skipped["index"], [(0, skipped["end"], 1)]), _joined)
    return {
        "steps": _merged(subset["steps"], _same_size),
        "end": skipped["end"],
        "pieces": _merged(joined, _repeated),
        "left_out": _merged(skipped["left_out"], _adjacent),
        "moved": _merged(skipped["moved"], _adjacent),
        "masks": sorted(skipped["masks"], key=canonical_json),
    }


def _merged(items: Iterable[Item], join: Callable[[Item, Item], Item | None]) -> list[Item]:
    """Return items in which neighbours are joined wherever ``join`` returns one for two."""
    merged: list[Item] = []
    for item in items:
        both = join(merged[-1], item) if merged else None
        if both is None:
            merged.append(item)
        else:
            merged[-1] = both
    return merged


def _same_size(steps: Sequence[int], following: Sequence[int]) -> Sequence[int] | None:
    (first, size, number), (_, other, more) = steps, following
    return [first, size, number + more] if size == other else None


def _adjacent(ours: Sequence[int], following: Sequence[int]) -> Sequence[int] | None:
    return [ours[0], following[1]] if ours[1] == following[0] else None


def _pieces(node: Node, ranges: Sequence[Sequence[int]]) -> Iterator[Piece]:
    """Yield the pieces of a node of which ``ranges`` (begin, end, times) are served.

    Stages are served whole.
    """
    if node["order"] == "sequence":
        for part in node["parts"]:
            yield from _pieces(part["index"], part["ranges"])
        return
    leaves = [{**node["common"], **own} for own in node["sources"]] if "sources" in node else [node]
    forms = list(map(_form, leaves))
    if node["order"] == "stages":
        for stage in node["stages"]:
            draws = dict(stage)
            samples, begins = draws.pop("samples"), draws.pop("begins")
            sources = draws.pop("sources", range(len(forms)))
            streams = [[q, begin, forms[q]] for q, begin in zip(sources, begins, strict=True)]
            yield _piece(draws, streams, samples=samples)
        return
    draws = {key: node[key] for key in ("rule", "weights", "uncounted") if key in node}
    streams = [[source, 0, form] for source, form in enumerate(forms)]
    for begin, end, times in ranges:
        if begin < end:
            yield _piece(draws, streams, samples=end - begin, first_draw=begin, times=times)


def _form(node: Node) -> Node:
    """Return a node of one source without what grows with its samples."""
    if node["order"] == "sequence":
        parts = [{**part, "index": _form(part["index"])} for part in node["parts"]]
        return {"order": "sequence", "parts": parts}
    left_out = _GROWS if "name" in node else ()
    return {key: each for key, each in node.items() if key not in left_out}


def _piece(
    draws: Node, streams: Streams, *, samples: int, first_draw: int = 0, times: int = 1
) -> Piece:
    is_in_order = len(streams) == 1 and "uncounted" not in draws
    return {
        "draws": _IN_ORDER if is_in_order else _lowest(draws),
        "streams": streams,
        "first_draw": first_draw,
        "samples": samples,
        "times": times,
    }


def _lowest(draws: Node) -> Node:
    """Return draws with shares in lowest terms, of a blend by divisors as stratified."""
    if draws["rule"] == "divisor":
        return _lowest({"rule": "stratified", "shares": draws["weights"]})
    found = dict(draws)
    if "shares" in draws:
        divisor = math.gcd(*draws["shares"])
        found["shares"] = [share // divisor for share in draws["shares"]]
    if "first" in draws:
        found["first"] = _lowest(draws["first"])
    return found


def _joined(piece: Piece, following: Piece) -> Piece | None:
    """Return two pieces as one if the second goes on where the first ends."""
    if piece["draws"] != following["draws"] or (piece["times"], following["times"]) != (1, 1):
        return None
    period = _period(piece["draws"], len(piece["streams"]))
    behind = piece["first_draw"] + piece["samples"] - following["first_draw"]
    turns, rest = divmod(behind, sum(period)) if any(period) else (0, behind)
    later = [
        [source, begin + turns * drawn, node]
        for (source, begin, node), drawn in zip(piece["streams"], period, strict=True)
    ]
    if rest or later != following["streams"]:
        return None
    return {**piece, "samples": piece["samples"] + following["samples"]}


def _period(draws: Node, streams: int) -> list[int]:
    """Return the draws of each stream until a rule starts over; zeros for one that does not."""
    if draws["rule"] not in ("stratified", "per_stream"):
        return [0] * streams
    shares, batch = draws["shares"], draws.get("batch", 1)
    sizes = batch if isinstance(batch, list) else [batch] * streams
    return [share * size for share, size in zip(shares, sizes, strict=True)]


def _repeated(piece: Piece, following: Piece) -> Piece | None:
    """Return two pieces as one if the second serves the same again."""
    if {**piece, "times": following["times"]} != following:
        return None
    return {**piece, "times": piece["times"] + following["times"]}
