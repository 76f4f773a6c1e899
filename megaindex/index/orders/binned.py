"""Order ``epoch`` over bins: every bin once per epoch, in an order that is computed."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.index.arithmetic import INT64_MAX
from megaindex.index.bins import Bins
from megaindex.index.orders.blocks import Block, BlockOrder
from megaindex.index.spans import Spans
from megaindex.kernels.sizes import ceil_div
from megaindex.kernels.types import I64


@dataclass(frozen=True, kw_only=True, eq=False)
class BinIndex(BlockOrder):
    """Samples of whole documents, none crossed; see `megaindex.index.bins`.

    A sample may be shorter than ``sequence_length``: what is missing is padding, without loss.

    Raises:
        InvalidArgument: the number of epochs is out of range.
    """

    bins: Bins
    tokens_per_epoch: int
    """Of the documents, those that are cut off or skipped included."""
    sequence_length: int
    seed: int
    source_name: str
    """What the order depends on besides the seed; by default a hash of the content."""
    num_epochs: int = 1
    add_extra_token: int = 1
    order: Literal["epoch"] = field(default="epoch", init=False)

    def __post_init__(self) -> None:
        if self.num_epochs < 1 or self.num_epochs * self.samples_per_epoch > INT64_MAX:
            raise InvalidArgument(
                f"epochs must be at least 1, and samples fit in 64 bits, got {self.num_epochs}"
            )

    @property
    def samples_per_epoch(self) -> int:
        return self.bins.num_bins

    @property
    def cut_tokens(self) -> int:
        """Tokens of the documents that are in no sample."""
        return self.tokens_per_epoch - self.bins.num_tokens

    @property
    def num_samples(self) -> int:
        return self.num_epochs * self.samples_per_epoch

    def epochs_for(self, num_samples: int) -> int:
        """Least number of epochs that hold ``num_samples`` samples."""
        return max(1, ceil_div(num_samples, self.samples_per_epoch))

    def extend(self, epochs: int) -> BinIndex:
        """The same order for ``epochs`` epochs; the samples that both hold are the same."""
        return replace(self, num_epochs=epochs)

    def samples_before(self, block: int) -> int:
        """Samples of the first ``block`` epochs."""
        return block * self.samples_per_epoch

    def _block_of(self, ids: I64) -> I64:
        return ids // self.samples_per_epoch

    def _cut(self, _: Block, numbers: I64) -> Spans:
        bins = self.bins
        first, end = bins.starts[numbers], bins.starts[numbers + 1]
        counts = end - first
        splits = np.concatenate(([0], np.cumsum(counts)))
        piece = np.repeat(first - splits[:-1], counts) + np.arange(splits[-1])
        return Spans.of_one_source(
            bins.document[piece], bins.offset[piece], bins.length[piece], splits
        )

    def _no_array(self, name: str) -> str:
        return (
            f"samples of whole documents have no {name}: bins are shuffled, in an order that is "
            "computed; use locate(sample_ids)"
        )
