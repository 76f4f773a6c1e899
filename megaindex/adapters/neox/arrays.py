"""The three index arrays of a GPT-NeoX dataset, under GPT-NeoX's own cache names."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import xxhash

from megaindex.arithmetic import ceil_div
from megaindex.builders.single import order_parameters
from megaindex.cache.fingerprint import canonical_json, corpus_fingerprint
from megaindex.cache.framework_files.array_files import ArrayFiles, Arrays, Identity
from megaindex.cache.framework_files.group import ArrayRequest
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.array_index import check_arrays
from megaindex.index.orders import framework, neox_documents
from megaindex.index.orders.framework import Memory, ShuffledOrder, Sink
from megaindex.index.orders.neox_documents import PackingOrder

T = TypeVar("T")


@dataclass(kw_only=True, eq=False)
class NeoxRequest(ArrayRequest, Generic[T]):
    """The request for the arrays of one epoch of a dataset."""

    files: ArrayFiles
    settings: Mapping[str, Any]
    """All values besides the corpora that the arrays depend on."""
    stamp: list[int]
    """Sizes and times of the corpora's files; while they are those of the sidecar, the content is
    taken as unchanged."""
    texts: Sequence[IndexedDataset]
    make_order: Callable[[], T]
    description: str = ""  # GPT-NeoX writes no marker
    _order: T | None = None

    def order(self) -> T:
        """Return the order of the samples, computed once after the corpora were checked."""
        if self._order is None:  # cached_property of Python 3.11 has one lock for all instances
            for text in self.texts:
                text.validate()
            self._order = self.make_order()
        return self._order

    @functools.cached_property
    def identity(self) -> Identity:
        return Identity(
            settings=lambda: self.settings,
            corpus=self.corpus,
            stamp=self.stamp,
            facts=self.facts,
        )

    @property
    def corpus_nbytes(self) -> int:
        return self.stamp[0] if self.stamp else 0

    @abc.abstractmethod
    def corpus(self) -> str:
        """Return a fingerprint of the corpora that the arrays depend on."""

    @abc.abstractmethod
    def facts(self) -> Mapping[str, Any]:
        """Return num_epochs and tokens_per_epoch."""


class PackedRequest(NeoxRequest[ShuffledOrder]):
    """The request for arrays of pack_impl packed, over one corpus."""

    def corpus(self) -> str:
        self.texts[0].validate()
        return corpus_fingerprint(self.texts[0])

    def facts(self) -> Mapping[str, Any]:
        order = self.order()
        return {"num_epochs": order.num_epochs, "tokens_per_epoch": order.tokens_per_epoch}

    @property
    def content(self) -> object:
        order = self.order()
        if not isinstance(order.documents, range):
            return None
        final = order.final if order.final.apart else None
        return (
            self.texts[0],
            order.documents,
            order.sequence_length,
            order.seed,
            order.num_epochs,
            final,
        )

    def fill(self, sink: Sink, threads: int) -> None:
        framework.build(self.order(), self.texts[0].sequence_lengths, sink, threads)

    def check(self, arrays: Arrays) -> None:
        check_arrays(self.order(), self.texts[0].sequence_lengths, **arrays)


class WholeDocumentsRequest(NeoxRequest[PackingOrder]):
    """The request for arrays of the packings of whole documents."""

    def corpus(self) -> str:
        corpora = [corpus_fingerprint(text) for text in self.texts]
        parts = {"corpora": corpora, **order_parameters(self.order())}
        return xxhash.xxh3_128_hexdigest(canonical_json(parts).encode())

    def facts(self) -> Mapping[str, Any]:
        """Return num_epochs and tokens_per_epoch of the documents in the order."""
        order = self.order()
        return {
            "num_epochs": ceil_div(order.num_samples, int(order.takes_part.sum())),
            "tokens_per_epoch": int(order.lengths[order.takes_part].sum(dtype=np.int64)),
        }

    def fill(self, sink: Sink, threads: int) -> None:  # noqa: ARG002
        neox_documents.build(self.order(), sink)

    def check(self, arrays: Arrays) -> None:
        """Compare with newly built arrays; ten million documents take less than a second."""
        memory = Memory()
        neox_documents.build(self.order(), memory)
        for name, expected in memory.arrays.items():
            if arrays[name].dtype != expected.dtype or not np.array_equal(arrays[name], expected):
                raise FormatError(f"{name} is not that of the documents and the seed")
