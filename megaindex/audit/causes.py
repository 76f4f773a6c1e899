"""Why two orders differ, in words: the settings that differ and what each changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaindex.audit.sides import Side
from megaindex.index.dialect import dialect

_ORDERS = {
    "auto": "shuffles the documents of all epochs together, of a last epoch that is used below "
    "the threshold apart",
    "never": "shuffles the documents of all epochs together",
    "epoch": "shuffles every epoch by itself, by a keyed bijection",
    "window": "shuffles contiguous windows of the corpus, not documents",
}
_EFFECTS = {
    "corpus": "the content fingerprint differs: other lengths or document bounds, so document ids "
    "mean other texts and samples are cut elsewhere",
    "data_path": "the indices were built for other files",
    "documents": "other documents are shuffled, as by another split",
    "split": "another split gives other documents",
    "subset": "another part of the split gives other documents",
    "seed": "another random stream: documents are shuffled differently, so samples are cut from "
    "other neighbours and served in another order",
    "sequence_length": "samples have another length and are cut at other places",
    "final_epoch_apart": "the last epoch is shuffled apart on one side only, and among the "
    "others on the other",
    "add_extra_token": "samples read one token more on one side, for the shifted label",
    "drop_last_partial": "one side keeps a shorter last sample",
    "epochs_mixed": "blocks of so many complete epochs are shuffled together",
    "left_over": "the tokens that fill no sample at the end of an epoch are dropped on one side, "
    "carried into the next epoch on the other",
    "source_name": "the order is computed from the seed and this name",
    "num_samples": "it decides how many epochs are built, and whether the last is shuffled apart",
}
_SAME_ALL = (
    "the recorded settings and the content fingerprint are the same, yet the order differs: one "
    "side was damaged after it was built, or built by another version; build both again"
)
_UNRECORDED = (
    "no recorded setting differs, and such arrays record neither all settings nor the content of "
    "the corpus: the files changed under the same path, a setting that is not recorded differs, "
    "or one side is damaged; build both again with megaindex build, which records all of it"
)


@dataclass(frozen=True, kw_only=True)
class Cause:
    """A reason; ``setting`` is empty where none differs."""

    setting: str
    a: Any
    b: Any
    words: str


def causes_of(a: Side, b: Side, *, equal: bool) -> tuple[Cause, ...]:
    """The settings known on both sides that differ; else what else it can be.

    For equal orders these are the differences that had no effect.
    """
    known = [key for key in a.settings if key in b.settings]
    found = [
        Cause(setting=key, a=a.settings[key], b=b.settings[key], words=_words(key, a, b))
        for key in known
        if a.settings[key] != b.settings[key]
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
    return (Cause(setting="", a=None, b=None, words=words),)


def _words(key: str, a: Side, b: Side) -> str:
    if key == "order":
        return "; ".join(f"{side.settings[key]} {_order(side.settings[key])}" for side in (a, b))
    if key == "num_epochs":
        return _epochs(a, b)
    return _EFFECTS.get(key, "it is part of what decides the arrays")


def _order(order: str) -> str:
    return _ORDERS.get(order) or _ORDERS[dialect(order).separate_final_epoch]


def _epochs(a: Side, b: Side) -> str:
    orders = {side.settings.get("order", "megatron") for side in (a, b)}
    if all(dialect(order).is_framework for order in orders):
        return (
            "all epochs are shuffled from one random stream: another number of epochs moves the "
            "samples of the first one too"
        )
    return "more epochs come after the others, which stay as they are"
