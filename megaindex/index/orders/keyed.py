"""Keys of bijections, and the base class of the computed orders.

The samples of a block are cut one after another and served in the order of a keyed bijection: the
k-th served sample is cut sample ``bijection(k)``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from megaindex._types import I32, I64, U64, IntArray
from megaindex.arithmetic import INT64_MAX, ceil_div
from megaindex.errors import InvalidArgument, MissingAttribute
from megaindex.index.array_index import places_among
from megaindex.index.documents import Documents, lengths_of, sequence_ids
from megaindex.index.spans import (
    CHUNK,
    SCATTERED,
    Chunks,
    EpochSizes,
    ShownIndex,
    Spans,
    check_sample_ids,
    iterate_in_order,
    join_spans,
    part_bounds,
)
from megaindex.kernels import active
from megaindex.keys.numbers import key_of

if TYPE_CHECKING:
    from megaindex.format import IndexedDataset

Computed = TypeVar("Computed", bound="BlockOrder")


def shuffle_names(fingerprints: Sequence[str], given: Sequence[str] = ()) -> list[str]:
    """Return the name by which the keyed orders shuffle each source of a run.

    It is the name given, else the fingerprint of the pair; for the k-th further source of the same
    fingerprint, from k = 1, it is ``FINGERPRINT/k``. Sources with a name are not counted.

    Args:
        fingerprints: `corpus_fingerprint` of each source; empty for one without files, which has no
            name unless one is given.
        given: name given to each source, or empty. Default: none.
    """
    found: list[str] = []
    seen: Counter[str] = Counter()
    for fingerprint, name in zip(fingerprints, given or [""] * len(fingerprints), strict=True):
        if name or not fingerprint:
            found.append(name)
            continue
        further = seen[fingerprint]
        found.append(f"{fingerprint}/{further}" if further else fingerprint)
        seen[fingerprint] += 1
    return found


@lru_cache(maxsize=64)
def order_key(
    seed: int, block: int, source_name: str, purpose: Literal["documents", "samples"]
) -> U64:
    """Return the key of a bijection, uint64[2]."""
    # the name comes last because it may contain slashes
    key = key_of(f"megaindex/{seed}/{block}/{purpose}/{source_name}")
    key.flags.writeable = False  # all callers share it
    return key


class Block(NamedTuple):
    """Range of samples that one bijection shuffles."""

    number: int
    first: int
    """First sample id."""
    size: int
    key: U64
    """Key of the bijection from serving order to cutting order."""


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class BlockOrder(ShownIndex):
    """Base class of the computed orders; by default a block is an epoch.

    Samples are located by blocks and iterated in cutting order.
    """

    sequence_length: int
    num_epochs: int = 1
    order: str = field(init=False)

    @property
    def num_samples(self) -> int:
        return self.num_epochs * self.samples_per_epoch

    @property
    def samples_per_epoch(self) -> int:
        raise NotImplementedError

    def epoch_sizes(self) -> EpochSizes:
        """Return the samples of an epoch, see `megaindex.index.spans.epoch_sizes`."""
        return {(0, self.sequence_length): Fraction(self.samples_per_epoch)}

    def samples_before(self, block: int) -> int:
        """Return the samples of the first ``block`` blocks."""
        return block * self.samples_per_epoch

    def extend(self: Computed, epochs: int) -> Computed:
        """Return the index of ``epochs`` epochs, with the same samples in common epochs."""
        return replace(self, num_epochs=epochs)

    def epochs_for(self, num_samples: int) -> int:
        """Return the fewest epochs that have ``num_samples`` samples."""
        return max(1, ceil_div(num_samples, self.samples_per_epoch))

    def _block_of(self, ids: I64) -> I64:
        return ids // self.samples_per_epoch

    def _no_array(self, name: str) -> str:
        """Return the message of the error that an array of that name raises."""
        return f"order {self.order} has no {name}: its samples are computed; use locate(sample_ids)"

    @property
    def document_index(self) -> I32:
        raise MissingAttribute(self._no_array("document_index"))

    @property
    def sample_index(self) -> IntArray:
        raise MissingAttribute(self._no_array("sample_index"))

    @property
    def shuffle_index(self) -> IntArray:
        raise MissingAttribute(self._no_array("shuffle_index"))

    def _cut(self, block: Block, numbers: I64) -> Spans:
        """Return the spans of cut samples; fastest if the numbers increase."""
        raise NotImplementedError

    def locate(self, sample_ids: npt.ArrayLike) -> Spans:
        ids = check_sample_ids(sample_ids, self.num_samples)
        if not ids.size:
            return join_spans([], 0)
        blocks = self._block_of(ids)
        first = int(blocks[0])
        if ids.size == 1 or (blocks == first).all():
            return self._served(first, ids)
        pieces = []
        for block in np.unique(blocks).tolist():
            places = np.flatnonzero(blocks == block)
            pieces.append((places, self._served(block, ids[places])))
        return join_spans(pieces, ids.size)

    def iterate_spans(self, begin: int, end: int, part: int, parts: int) -> Chunks:
        number = int(self._block_of(np.array([begin]))[0])
        while begin < end:
            block = self._block(number)
            stop = min(end, block.first + block.size)
            if (stop - begin) * SCATTERED < block.size:
                yield from iterate_in_order(self, begin, stop, part, parts)
            else:
                low, high = begin - block.first, stop - block.first
                for cut, served in _in_cut_order(block, low, high, part, parts):
                    if cut.size:
                        yield served + block.first, self._cut(block, cut)
            begin, number = stop, number + 1

    def shuffled_samples(self, block: int) -> I64:
        """Return int64[samples]: cut sample of each position in serving order."""
        _, _, size, key = self._block(block)
        shuffled = np.empty(size, np.int64)
        active().bijection_range(key, size, 0, shuffled)
        return shuffled

    def _served(self, number: int, ids: I64) -> Spans:
        block = self._block(number)
        cut = active().bijection_apply(block.key, block.size, ids - block.first)
        return self._cut(block, cut)

    def _serving_order(self, number: int, cut: I64) -> I64:
        """Return the sample ids of cut samples of a block."""
        block = self._block(number)
        served: I64 = active().bijection_invert(block.key, block.size, cut)
        served += block.first
        return served

    @cached_property
    def _block(self) -> Any:
        return lru_cache(maxsize=8)(self._make_block)

    def _make_block(self, number: int) -> Block:
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class SeededOrder(BlockOrder):
    """Base class of the computed orders whose samples are shuffled by the number of a block."""

    seed: int
    source_name: str
    """Part of the keys of the bijections besides the seed."""
    add_extra_token: int = 1

    def __post_init__(self) -> None:
        if self.num_epochs < 1 or self.num_epochs * self.samples_per_epoch > INT64_MAX:
            raise InvalidArgument(
                f"epochs must be at least 1 and have fewer than 2**63 samples, got "
                f"{self.num_epochs}"
            )

    def _make_block(self, number: int) -> Block:
        first = self.samples_before(number)
        count = self.samples_before(number + 1) - first
        return Block(
            number, first, count, order_key(self.seed, number, self.source_name, "samples")
        )


@dataclass(frozen=True, kw_only=True, eq=False, repr=False)
class DocumentOrder(SeededOrder):
    """Base class of the computed orders that permute documents."""

    sequence_lengths: I32
    """int32[sequences] of the dataset, a view."""
    documents: Documents
    """Sequence ids of one epoch."""
    tokens_per_epoch: int
    """Tokens of the documents, including those that no sample reads."""
    datasets: tuple[IndexedDataset, ...] = ()
    """The dataset of the index; empty if it was built from lengths alone."""

    @cached_property
    def _lengths(self) -> I32:
        """Lengths of the documents of one epoch."""
        return lengths_of(self.sequence_lengths, self.documents)

    def _sequence_ids(self, local: I64) -> I64:
        return sequence_ids(self.documents, local)

    def _places_of(self, documents: I64) -> I64:
        """Return the places of sequence ids among those of an epoch; others are left out."""
        return places_among(self.documents, documents, self.sequence_lengths.size)

    def _document_key(self, block: int) -> U64:
        return order_key(self.seed, block, self.source_name, "documents")


def _in_cut_order(
    block: Block, low: int, high: int, part: int, parts: int
) -> Iterator[tuple[I64, I64]]:
    """Yield chunks of (cut, served) numbers of the samples served as ``low`` to ``high - 1``."""
    begin, end = part_bounds(0, block.size, part, parts)
    for first in range(begin, end, CHUNK):
        served = np.empty(min(CHUNK, end - first), np.int64)
        active().bijection_inverse_range(block.key, block.size, first, served)
        cut = np.arange(first, first + served.size)
        if high - low < block.size:
            kept = (low <= served) & (served < high)
            cut, served = cut[kept], served[kept]
        yield cut, served
