"""The samples of GPT-NeoX's PairwiseDataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from megaindex.adapters.neox.arrays import Request, WholeDocuments
from megaindex.adapters.neox.samples import Samples, packing_index
from megaindex.build.packing import pair_order
from megaindex.format import IndexedDataset
from megaindex.loader.neox_dataset import NeoxDataset, NeoxPairwiseDataset


@dataclass(kw_only=True)
class Pairs(Samples):
    """Of a PairwiseDataset."""

    sides: Mapping[str, list[IndexedDataset | None]]
    """Text, labels and references of pos and neg."""

    def tokens(self) -> int:
        """Of the side pos."""
        pos = self.sides["pos"][0]
        assert pos is not None
        return int(pos.sequence_lengths.sum(dtype=np.int64))

    def make_request(self, epoch: int) -> Request:
        order = self.whole_documents
        num_samples = order.check_num_samples(self.requested)
        (pos, pos_labels, _), (neg, neg_labels, _) = self._sides()
        make_order = partial(
            pair_order, pos, neg, order, sequence_length=self.seq_length,
            seed=self.seed, num_samples=num_samples,
            pos_labels=pos_labels, neg_labels=neg_labels, exact=self.exact,
        )  # fmt: skip
        return self.request_of(
            WholeDocuments([pos, neg], make_order),
            epoch,
            "_exact" if self.exact else "",
            [corpus for corpus in (pos, neg, pos_labels, neg_labels) if corpus is not None],
            allow_chopped=self.allow_chopped,
            labels=pos_labels is not None,
        )

    def open(self, arrays: Mapping[str, Any], facts: Mapping[str, Any]) -> NeoxPairwiseDataset:
        """The two sides."""
        pos, neg = (
            NeoxDataset(
                packing_index(self, arrays, facts, text),
                text,
                label_dataset=labels,
                ref_dataset=ref,
            )
            for text, labels, ref in self._sides()
        )
        return NeoxPairwiseDataset(pos, neg)

    def _sides(self) -> list[tuple[IndexedDataset, IndexedDataset | None, IndexedDataset | None]]:
        sides = []
        for text, labels, ref in self.sides.values():
            assert text is not None
            sides.append((text, labels, ref))
        return sides
