"""The three arrays of a GPT-NeoX dataset: built by megaindex, under GPT-NeoX's own cache names."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import numpy as np
import xxhash

from megaindex.arithmetic import ceil_div
from megaindex.builders.single import order_parameters
from megaindex.cache.claim import build_once
from megaindex.cache.fingerprint import canonical_json, corpus_fingerprint
from megaindex.cache.framework_files.array_files import (
    SUFFIX,
    ArrayFiles,
    Arrays,
    Identity,
    Sidecar,
    check_unchanged,
)
from megaindex.cache.framework_files.group import Fetched
from megaindex.cache.framework_files.sidecar import find_arrays, map_arrays
from megaindex.cache.framework_files.writer import ArrayWriter
from megaindex.errors import FormatError, MissingFile
from megaindex.format import IndexedDataset
from megaindex.index.array_index import check_arrays
from megaindex.index.orders import framework, neox_documents
from megaindex.index.orders.framework import Memory, ShuffledOrder, Sink
from megaindex.index.orders.neox_documents import PackingOrder
from megaindex.kernels import num_threads

logger = logging.getLogger("megaindex")

_NAMES = {"document_index": "doc_idx", "sample_index": "sample_idx", "shuffle_index": "shuffle_idx"}


class DocumentSource(Protocol):
    """How one set of arrays is made, and told from others; read only as far as is needed."""

    def corpus(self) -> str:
        """A fingerprint of all that the arrays depend on besides settings."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """num_epochs and tokens_per_epoch."""
        ...

    def content(self) -> object:
        """Equal for sources whose arrays are equal; None where that is not known."""
        ...

    def fill(self, sink: Sink, threads: int) -> None:
        """Build the arrays."""
        ...

    def check(self, arrays: Arrays) -> None:
        """Raise FormatError if these, which GPT-NeoX wrote, are not the arrays."""
        ...


class CutDocuments:
    """Arrays of pack_impl packed."""

    def __init__(self, text: IndexedDataset, make_order: Callable[[], ShuffledOrder]) -> None:
        self._text = text
        self._make_order = make_order
        self._made: ShuffledOrder | None = None

    @property
    def _order(self) -> ShuffledOrder:
        if self._made is None:  # a cached_property has one lock for all builders
            self._text.validate()
            self._made = self._make_order()
        return self._made

    def corpus(self) -> str:
        self._text.validate()
        return _fingerprint(self._text)

    def facts(self) -> Mapping[str, Any]:
        return {
            "num_epochs": self._order.num_epochs,
            "tokens_per_epoch": self._order.tokens_per_epoch,
        }

    def content(self) -> object:
        order = self._order
        if not isinstance(order.documents, range):
            return None
        final = order.final if order.final.apart else None
        return (
            self._text,
            order.documents,
            order.sequence_length,
            order.seed,
            order.num_epochs,
            final,
        )

    def fill(self, sink: Sink, threads: int) -> None:
        framework.build(self._order, self._text.sequence_lengths, sink, threads)

    def check(self, arrays: Arrays) -> None:
        check_arrays(self._order, self._text.sequence_lengths, **arrays)


def _fingerprint(text: IndexedDataset) -> str:
    """`corpus_fingerprint`: one for the datasets of all splits."""
    if text not in _fingerprints:
        _fingerprints[text] = corpus_fingerprint(text)
    return _fingerprints[text]


_fingerprints: WeakKeyDictionary[IndexedDataset, str] = WeakKeyDictionary()


class WholeDocuments:
    """Arrays of the packings of whole documents."""

    def __init__(
        self, texts: Sequence[IndexedDataset], make_order: Callable[[], PackingOrder]
    ) -> None:
        self._texts = texts
        self._make_order = make_order

    @functools.cached_property
    def _order(self) -> PackingOrder:
        for text in self._texts:
            text.validate()
        return self._make_order()

    def corpus(self) -> str:
        corpora = [_fingerprint(text) for text in self._texts]
        parts = {"corpora": corpora, **order_parameters(self._order)}
        return xxhash.xxh3_128_hexdigest(canonical_json(parts).encode())

    def facts(self) -> Mapping[str, Any]:
        """Of the documents that take part."""
        order = self._order
        return {
            "num_epochs": ceil_div(order.num_samples, int(order.takes_part.sum())),
            "tokens_per_epoch": int(order.lengths[order.takes_part].sum(dtype=np.int64)),
        }

    def content(self) -> object:
        return None

    def fill(self, sink: Sink, threads: int) -> None:  # noqa: ARG002
        neox_documents.build(self._order, sink)

    def check(self, arrays: Arrays) -> None:
        """They are built again, which takes less than a second for ten million documents."""
        memory = Memory()
        neox_documents.build(self._order, memory)
        for name, expected in memory.arrays.items():
            if arrays[name].dtype != expected.dtype or not np.array_equal(arrays[name], expected):
                raise FormatError(f"{name} is not what the documents and the seed give")


@dataclass(kw_only=True, eq=False)
class NeoxRequest:
    """One set of arrays: where GPT-NeoX keeps it, and what decides it."""

    files: ArrayFiles
    source: DocumentSource
    """How they are made."""
    settings: Mapping[str, Any]
    """What decides them besides the corpora."""
    stamp: list[int]
    """Sizes and times of the corpora's files: they stand for the content while they are those that
    the sidecar has recorded."""

    @functools.cached_property
    def identity(self) -> Identity:
        return Identity(
            settings=lambda: self.settings,
            corpus=self.source.corpus,
            stamp=self.stamp,
            facts=self.source.facts,
        )

    @property
    def directory(self) -> str:
        return os.path.dirname(str(self.files)) or "."

    @property
    def description(self) -> str:
        """GPT-NeoX marks nothing."""
        return ""

    @property
    def corpus_nbytes(self) -> int:
        return self.stamp[0] if self.stamp else 0

    @property
    def content(self) -> object:
        return self.source.content()

    def check(self, arrays: Arrays) -> None:
        self.source.check(arrays)

    def fill(self, sink: Sink, threads: int) -> None:
        self.source.fill(sink, threads)

    def fetch(self) -> Fetched:
        """Look the arrays up, or let one process build them.

        Raises:
            FormatError: files that GPT-NeoX wrote are not the arrays of this request.
            StorageError: the directory cannot be written, or another builder takes too long.
        """
        return build_once(
            self.directory, os.path.basename(str(self.files)), self._find, self._build
        )

    def _find(self) -> Fetched | None:
        sidecar = find_arrays(self.files, self.identity, self.check)
        return None if sidecar is None else Fetched(sidecar, was_built=False)

    def _build(self) -> Fetched:
        with ArrayWriter(self.files) as writer:
            self.fill(writer, num_threads())
            return Fetched(writer.publish(self.identity), was_built=True)

    def open(self, sidecar: Sidecar) -> Arrays:
        """The arrays that ``sidecar`` was found to describe, built again if they were damaged."""
        try:
            check_unchanged(self.files, sidecar)
            return map_arrays(self.files, sidecar)
        except (FormatError, MissingFile) as error:
            logger.warning("%s", error)
            again = self.fetch().sidecar
            if (again.corpus, again.arrays) != (sidecar.corpus, sidecar.arrays):
                raise
            return map_arrays(self.files, again)


def files_of(base: str) -> ArrayFiles:
    """GPT-NeoX's names of one set of arrays, and of the sidecar beside them."""
    return ArrayFiles(
        arrays={ours: f"{base}_{theirs}.npy" for ours, theirs in _NAMES.items()},
        sidecar=f"{base}{SUFFIX}",
    )


def base_name(
    data_prefix: str, name: str, num_samples: int | None, seq_length: int, seed: int, pack_impl: str
) -> str:
    """What the names of a dataset's arrays begin with, allow_chopped's mark not included."""
    return f"{data_prefix}_{name}_indexmap_{num_samples}ns_{seq_length}sl_{seed}s_{pack_impl}pi"
