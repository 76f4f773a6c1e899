"""The samples of GPT-NeoX's PairwiseDataset."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from megaindex.adapters.neox.arrays import WholeDocuments
from megaindex.adapters.neox.samples import Samples, packing_index
from megaindex.build.packing import check_packing, pair_order
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

    def open(self, epoch: int) -> NeoxPairwiseDataset:
        """The two sides."""
        num_samples = check_packing(self.pack_impl, num_samples=self.requested)
        (pos, pos_labels, pos_ref), (neg, neg_labels, neg_ref) = self.sides.values()
        assert pos is not None
        assert neg is not None
        make_order = partial(
            pair_order, pos, neg, pack_impl=self.pack_impl, sequence_length=self.seq_length,
            seed=self.seed, num_samples=num_samples, allow_chopped=self.allow_chopped,
            pos_labels=pos_labels, neg_labels=neg_labels, exact=self.exact,
        )  # fmt: skip
        arrays, facts = self.arrays(
            WholeDocuments([pos, neg], make_order),
            epoch,
            "_exact" if self.exact else "",
            [corpus for corpus in (pos, neg, pos_labels, neg_labels) if corpus is not None],
            allow_chopped=self.allow_chopped,
            labels=pos_labels is not None,
        )
        return NeoxPairwiseDataset(
            NeoxDataset(
                packing_index(self, arrays, facts, pos),
                pos,
                label_dataset=pos_labels,
                ref_dataset=pos_ref,
            ),
            NeoxDataset(
                packing_index(self, arrays, facts, neg),
                neg,
                label_dataset=neg_labels,
                ref_dataset=neg_ref,
            ),
        )
