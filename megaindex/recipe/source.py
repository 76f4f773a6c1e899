"""A source of a recipe: one corpus, and how samples are made of it."""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from megaindex.errors import InvalidArgument
from megaindex.index.bins import LONG_DOCUMENTS, LongDocuments
from megaindex.validation import check_between, check_choice, check_fraction

Kind = Literal["pretraining", "finetuning"]


@dataclass(frozen=True, kw_only=True)
class RecipeSource:
    """A source: one .bin/.idx pair and how samples are made of it."""

    name: str
    """What streams, plans and orders call it: renaming changes its shuffle, moving does not."""
    path: str = ""
    """Prefix of the pair; empty where only ``tokens`` are known, for planning."""
    kind: Kind = "pretraining"
    """pretraining: documents are concatenated and cut every sequence_length tokens. finetuning:
    samples of whole documents, of whose tokens some carry loss."""
    order: Literal["epoch", "window"] = "epoch"
    labels: str = ""
    """finetuning: prefix of a pair with the label of every token, -100 where there is no loss."""
    loss_mask: str = ""
    """finetuning: prefix of a pair with 1 for every token that is trained on, such as those of a
    response, and 0 for the others. Neither: all tokens are trained on."""
    packed: bool = True
    """finetuning: several documents a sample where they fit, none crossed; else one a sample."""
    long_documents: LongDocuments = "truncate"
    """finetuning: documents longer than a sample are truncated, split or skipped."""
    max_epochs: Fraction | None = None
    """Epochs of it that the run may draw; None: one, where the exhaustion policy sets a limit."""
    max_fraction: Fraction | None = None
    """Share of that, up to 1, that the run may draw: max_epochs x max_fraction of its samples, as
    in OLMo-core. It bounds how much is drawn, not which samples are."""
    tokens: int | None = None
    """Tokens of one epoch, where there is no file to read."""

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgument(f"source {self.path}: has no name; give it one")
        where = f"source {self.name}"
        if (self.tokens is None) == (not self.path):
            raise InvalidArgument(f"{where}: give either a path or, to plan without files, tokens")
        if self.tokens is not None:
            tokens = check_between(f"{where}: tokens", self.tokens, 1, 2**62 - 1)
            object.__setattr__(self, "tokens", tokens)
        if self.labels and self.loss_mask:
            raise InvalidArgument(f"{where}: labels and loss_mask both say what is trained on")
        self._check_kind(where)
        for setting in ("max_epochs", "max_fraction"):
            if getattr(self, setting) is None:
                continue
            value = check_fraction(f"{where}: {setting}", getattr(self, setting))
            object.__setattr__(self, setting, value)
            if not 0 < value <= 2**31:
                raise InvalidArgument(f"{where}: {setting} must be positive, got {shown(value)}")
        if self.max_fraction is not None and self.max_fraction > 1:
            raise InvalidArgument(
                f"{where}: max_fraction must be at most 1, got {self.max_fraction}; max_epochs "
                "allows more than one epoch"
            )

    def _check_kind(self, where: str) -> None:
        check_choice(f"{where}: kind", self.kind, ("pretraining", "finetuning"))
        check_choice(f"{where}: long_documents", self.long_documents, LONG_DOCUMENTS)
        if self.order not in ("epoch", "window"):
            raise InvalidArgument(
                f"{where}: order must be epoch or window, got {self.order!r}; the orders of the "
                "frameworks have no stages"
            )
        if self.kind == "pretraining" and (self.labels or self.loss_mask):
            raise InvalidArgument(f"{where}: labels and loss_mask are for kind finetuning")
        if self.kind == "finetuning" and self.order == "window":
            raise InvalidArgument(f"{where}: order window cuts documents; use order epoch")
        if self.kind == "finetuning" and self.tokens is not None:
            raise InvalidArgument(
                f"{where}: tokens alone do not tell how many samples whole documents make; give a "
                "path"
            )


def shown(value: Fraction | int) -> str:
    """A number in a message, however long it is."""
    return reprlib.repr(str(value)).strip("'")
