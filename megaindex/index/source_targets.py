"""Labels and loss masks of a source."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset

LossKind = Literal["labels", "loss_mask", "all"]


@dataclass(frozen=True, kw_only=True)
class SourceTargets:
    """Loss targets of one source of instruction data.

    Attributes:
        kind: labels: the companion holds the label of each token, -100 if it is not a target;
            loss_mask: it holds 1 for each token that is a target, else 0; all: every token but
            the first of a document is a target.
        companion: dataset with the sequence lengths of the source.

    Raises:
        InvalidArgument: a companion is missing, or given with kind ``all``.
    """

    kind: LossKind
    companion: IndexedDataset | None = None

    def __post_init__(self) -> None:
        if (self.kind == "all") != (self.companion is None):
            raise InvalidArgument(f"targets {self.kind}: labels and masks need a companion dataset")
