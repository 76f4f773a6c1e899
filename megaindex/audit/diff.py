"""Differences of two orders, and their causes."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from megaindex._types import U64
from megaindex.arithmetic import INT32_MAX
from megaindex.audit.diff_inputs import Side
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import ArrayIndex
from megaindex.index.frameworks import framework_rules
from megaindex.index.receipts import sample_receipts
from megaindex.index.spans import Index, separates_documents

_SAMPLES_AT_ONCE = 1 << 16
_MOST_ALONE = 6


@dataclass(frozen=True, kw_only=True)
class TokenRun:
    """Consecutive tokens of one document in a sample, the label's extra token included."""

    source: int
    document: int
    offset: int
    length: int | None
    """None: to the end of a document of unknown length."""


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Result of `compare`: two orders compared by position, and as multisets of samples.

    Attributes:
        names: names of the sides A and B.
        num_samples: number of samples of each side.
        first_difference: first position with different samples; None if the shorter order
            begins the longer one.
        samples: token runs of the samples at that position.
        positions_differing: number of positions with different samples, among those of both
            orders.
        samples_in_common: size of the intersection as multisets, whatever the positions.
        causes: causes that were found: settings, or damaged arrays.
        identities: identity of the run of each side; None for a side other than a lock.
        num_sources: number of sources of the side with more of them.
    """

    names: tuple[str, str]
    num_samples: tuple[int, int]
    first_difference: int | None
    samples: tuple[tuple[TokenRun, ...], tuple[TokenRun, ...]] | None
    positions_differing: int
    samples_in_common: int
    causes: tuple[Cause, ...]
    identities: tuple[str | None, str | None] = (None, None)
    num_sources: int = 1

    @property
    def equal(self) -> bool:
        """True if both orders have the same samples at the same positions."""
        return self.positions_differing == 0 and self.num_samples[0] == self.num_samples[1]

    @property
    def relation(self) -> str:
        """equal, prefix, reordered (the same samples at other positions) or other samples."""
        if self.equal:
            return "equal"
        if self.positions_differing == 0:
            return "prefix"
        if self.samples_in_common == self.num_samples[0] == self.num_samples[1]:
            return "reordered"
        return "other samples"

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints."""
        compared = min(self.num_samples)
        return {
            "a": self.names[0],
            "b": self.names[1],
            "identities": list(self.identities),
            "relation": self.relation,
            "num_samples": list(self.num_samples),
            "positions_compared": compared,
            "positions_differing": self.positions_differing,
            "share_differing": self.positions_differing / max(1, compared),
            "samples_in_common": self.samples_in_common,
            "first_difference": self.first_difference,
            "samples": None
            if self.samples is None
            else {
                side: [vars(run) for run in runs]
                for side, runs in zip("ab", self.samples, strict=True)
            },
            "causes": [vars(cause) for cause in self.causes],
        }


def compare(a: Side, b: Side) -> Difference:
    """Return the differences of two orders, and their causes.

    Samples are compared by 64-bit hashes of their token runs: different samples have equal hashes
    with a chance of 2**-64. Sources are known by their fingerprints, the samples of others differ;
    of a side without fingerprints, by their place in the list.

    Args:
        a, b: the orders; a `Side` is an index with the settings that it was built with.

    Raises:
        InvalidArgument: one side is arrays without their dataset, and the other has no arrays.
    """
    first_index, second_index = _comparable(a, b)
    numbers = _source_numbers(a, b)
    first, second = map(sample_hashes, (first_index, second_index), numbers)
    compared = min(first.size, second.size)
    differing = np.flatnonzero(first[:compared] != second[:compared])
    at = int(differing[0]) if differing.size else None
    equal = at is None and first.size == second.size
    return Difference(
        names=(a.name, b.name),
        num_samples=(first.size, second.size),
        first_difference=at,
        samples=None if at is None else (_runs(a.index, at), _runs(b.index, at)),
        positions_differing=int(differing.size),
        samples_in_common=_in_common(first, second),
        causes=explain(a, b, equal=equal),
        identities=(a.identity, b.identity),
        num_sources=max(map(len, numbers)),
    )


def _source_numbers(a: Side, b: Side) -> list[list[int]]:
    """Return a number for each source of both sides, the same for the same content."""
    ours, theirs = a.sources, b.sources
    if ours is None or theirs is None:
        return [list(range(len(separates_documents(side.index)))) for side in (a, b)]
    numbers = {name: number for number, name in enumerate(dict.fromkeys([*ours, *theirs]))}
    return [[numbers[name] for name in names] for names in (ours, theirs)]


def sample_hashes(index: Index, sources: Sequence[int]) -> U64:
    """Return uint64[num_samples], a hash of the token runs of each sample, in order."""
    keys = np.array([(2 * number, 2 * number + 1) for number in sources], np.uint64)
    parts = [np.zeros(0, np.uint64)]
    for begin in range(0, index.num_samples, _SAMPLES_AT_ONCE):
        ids = np.arange(begin, min(index.num_samples, begin + _SAMPLES_AT_ONCE))
        spans = replace(index.locate(ids), masked=None, removed=None)
        parts.append(sample_receipts(np.zeros_like(ids), spans, keys)[:, 2].view(np.uint64))
    return np.concatenate(parts)


def _comparable(a: Side, b: Side) -> tuple[Index, Index]:
    """Return both indices, both without document lengths if one side has none."""
    if a.has_lengths and b.has_lengths:
        return a.index, b.index
    plain = []
    for side in (a, b):
        if not isinstance(side.index, ArrayIndex):
            raise InvalidArgument(
                f"{side.name} has no index arrays, and the lengths of the other side's documents "
                "are unknown; add --data-path"
            )
        unknown = np.full(side.index.sequence_lengths.size, INT32_MAX, np.int32)
        plain.append(replace(side.index, sequence_lengths=unknown))
    return plain[0], plain[1]


def _runs(index: Index, sample: int) -> tuple[TokenRun, ...]:
    spans = index.locate([sample])
    last = len(spans) - 1
    rows = zip(*(column.tolist() for column in spans), strict=True)
    return tuple(
        TokenRun(
            source=source,
            document=document,
            offset=offset,
            length=None if k < last and offset + length == INT32_MAX else length,
        )
        for k, (source, document, offset, length) in enumerate(rows)
    )


def _in_common(first: U64, second: U64) -> int:
    values, counts = np.unique(first, return_counts=True)
    others, other_counts = np.unique(second, return_counts=True)
    _, left, right = np.intersect1d(values, others, assume_unique=True, return_indices=True)
    return int(np.minimum(counts[left], other_counts[right]).sum())


_ORDERS = {
    "auto": "shuffles the documents of all epochs together, those of the last one separately if "
    "its share used is below the threshold",
    "never": "shuffles the documents of all epochs together",
    "epoch": "shuffles every epoch separately, by a keyed bijection",
    "window": "shuffles contiguous windows of the corpus, not documents",
    "packed": "puts whole documents into samples by best-fit decreasing",
    "blocks": "shuffles every epoch in blocks of documents, for stages of several lengths",
    "bins": "puts whole instruction documents into rows",
}
_EFFECTS = {
    "corpus": "the content fingerprint differs: lengths or document bounds differ, so document ids "
    "stand for other texts and samples are cut at other positions",
    "data_path": "the indices were built for different files",
    "documents": "different documents are shuffled, as by another split",
    "split": "another split selects other documents",
    "subset": "another part of the split has other documents",
    "seed": "the random stream differs: documents are shuffled differently, so samples are cut "
    "from other neighbours and served in another order",
    "sequence_length": "samples have another length and are cut at other positions",
    "final_epoch_apart": "the last epoch is shuffled separately on one side, and with the others "
    "on the other side",
    "add_extra_token": "samples read one token more on one side, for the shifted label",
    "drop_last_partial": "one side keeps a shorter last sample",
    "members": "an epoch has other documents of the same source",
    "epochs_mixed": "different numbers of complete epochs are shuffled together",
    "left_over": "tokens of an incomplete sample at the end of an epoch are dropped on one side, "
    "carried into the next epoch on the other",
    "source_name": "the order is computed from the seed and this name, the fingerprint of the pair "
    "where none is given",
    "max_documents": "samples may hold different numbers of documents",
    "long_documents": "documents longer than a sample are split, truncated or skipped differently",
    "align": "documents begin at other multiples of tokens, and are padded otherwise",
    "num_samples": "it decides the number of epochs, and with it the shuffle of the last one",
    "skip": "samples of these steps are left out, or served behind the end",
    "mask": "the loss differs, the order does not: these documents are read without loss",
    "removal": "inputs and loss differ, the order does not: the places of these documents are "
    "padding",
}
_OF_SKIPS = ("skip", "mask", "removal")
_SAME_ALL = (
    "the recorded settings and the content fingerprint are the same, but the order differs: one "
    "side was damaged after it was built, or built by another version; build both again"
)
_UNRECORDED = (
    "no recorded setting differs, but such arrays do not record all settings nor the content of "
    "the corpus: the files changed under the same path, a setting that is not recorded differs, "
    "or one side is damaged; build both again with megaindex build, which records both"
)
_UNLIKE = (
    "no setting that both sides state differs, and others were not compared; compare locks of one "
    "kind, of recipes or of other runs"
)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A cause of differences; ``setting`` is empty for causes other than a setting."""

    setting: str
    a: Any
    b: Any
    words: str


def explain(a: Side, b: Side, *, equal: bool) -> tuple[Cause, ...]:
    """Return the settings of both sides that differ, or other causes if none does.

    For equal orders these are differences without effect on the order.
    """
    kinds = [side.settings.get("kind") for side in (a, b)]
    if kinds[0] != kinds[1]:  # of locks of two kinds, or of a lock and another side
        a, b = (replace(side, settings=side.resolved or side.settings) for side in (a, b))
    complete = kinds[0] is not None and kinds[0] == kinds[1]
    known = [
        key
        for key in dict.fromkeys([*a.settings, *b.settings])
        if complete or key in _OF_SKIPS or (key in a.settings and key in b.settings)
    ]
    found = [
        Cause(setting=key, a=values[0], b=values[1], words=_words(key, a, b))
        for key in known
        for values in [(a.settings.get(key), b.settings.get(key))]
        if values[0] != values[1]
    ]
    if equal:
        return tuple(found)
    damage = [
        Cause(setting="", a=a.damage or None, b=b.damage or None, words=f"{side.damage}: damaged")
        for side in (a, b)
        if side.damage
    ]
    if found or damage:
        return tuple(damage + found)
    words = _SAME_ALL if a.recorded and b.recorded else _UNRECORDED
    if kinds[0] != kinds[1]:
        words = _UNLIKE
    return (Cause(setting="", a=None, b=None, words=words),)


def _words(key: str, a: Side, b: Side) -> str:
    if key in _OF_SKIPS and a.resolved and b.resolved:
        names = shlex.join([a.name, b.name])
        return f"{_EFFECTS[key]}; megaindex prove {names} compares the runs without their skips"
    if key == "order":
        return "; ".join(f"{side.settings[key]} {_order(side.settings[key])}" for side in (a, b))
    if key == "corpus" and a.sources and b.sources:
        return _corpora(a.sources, b.sources)
    if key == "num_epochs":
        return _epochs(a, b)
    return _EFFECTS.get(key, "it is part of what decides the arrays")


def _corpora(ours: Sequence[str], theirs: Sequence[str]) -> str:
    """Return how the sources of two sides differ."""
    if sorted(ours) == sorted(theirs):
        return "the same sources in another order"
    alone = [
        f"source {number} is one of {side} alone"
        for side, names, others in (("A", ours, theirs), ("B", theirs, ours))
        for number, name in enumerate(names)
        if name not in others
    ]
    if len(alone) == len(ours) + len(theirs):
        return _EFFECTS["corpus"]
    rest = f", and {len(alone) - _MOST_ALONE} more" * (len(alone) > _MOST_ALONE)
    return f"{', '.join(alone[:_MOST_ALONE])}{rest}; the others are in both"


def _order(order: str | list[str]) -> str:
    if isinstance(order, list):
        return "reads its sources in several orders"
    return _ORDERS.get(order) or _ORDERS[framework_rules(order).separate_final_epoch]


def _epochs(a: Side, b: Side) -> str:
    orders = {side.settings.get("order", "megatron") for side in (a, b)}
    if all(framework_rules(order).is_framework for order in orders):
        return (
            "all epochs are shuffled from one random stream: another number of epochs also moves "
            "the samples of the first epoch"
        )
    return "further epochs follow the others, which stay as they are"
