"""The three arrays of a GPT-NeoX dataset: built by megaindex, under GPT-NeoX's own cache names."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import xxhash

from megaindex.adapters.reports import find_or_build
from megaindex.build.packing import order_parameters
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.acceptance import check_arrays
from megaindex.index.orders import packing, shuffled
from megaindex.index.orders.packing import PackingOrder
from megaindex.index.orders.shuffled import Memory, ShuffledOrder, Sink
from megaindex.kernels.sizes import ceil_div
from megaindex.store.array_set import SUFFIX, ArrayFiles, Arrays, Identity, Sidecar
from megaindex.store.array_writer import ArrayWriter
from megaindex.store.fingerprint import canonical_json, corpus_fingerprint, corpus_stamp
from megaindex.store.sidecar import find_arrays, map_arrays

_NAMES = {"document_index": "doc_idx", "sample_index": "sample_idx", "shuffle_index": "shuffle_idx"}


class Source(Protocol):
    """How one set of arrays is made, and told from others; read only as far as is needed."""

    def corpus(self) -> str:
        """A fingerprint of all that the arrays depend on besides settings."""
        ...

    def facts(self) -> Mapping[str, Any]:
        """num_epochs and tokens_per_epoch."""
        ...

    def fill(self, sink: Sink) -> None:
        """Build the arrays."""
        ...

    def check(self, arrays: Arrays) -> None:
        """Raise FormatError if these, which GPT-NeoX wrote, are not the arrays."""
        ...


class CutDocuments:
    """Arrays of pack_impl packed."""

    def __init__(self, text: IndexedDataset, make_order: Callable[[], ShuffledOrder]) -> None:
        self._text = text
        self._order = functools.cache(make_order)

    def corpus(self) -> str:
        return corpus_fingerprint(self._text)

    def facts(self) -> Mapping[str, Any]:
        order = self._order()
        return {"num_epochs": order.num_epochs, "tokens_per_epoch": order.tokens_per_epoch}

    def fill(self, sink: Sink) -> None:
        shuffled.build(self._order(), self._text.sequence_lengths, sink)

    def check(self, arrays: Arrays) -> None:
        check_arrays(self._order(), self._text.sequence_lengths, **arrays)


class WholeDocuments:
    """Arrays of the packings of whole documents."""

    def __init__(
        self, texts: Sequence[IndexedDataset], make_order: Callable[[], PackingOrder]
    ) -> None:
        self._texts = texts
        self._order = functools.cache(make_order)

    def corpus(self) -> str:
        corpora = [corpus_fingerprint(text) for text in self._texts]
        parts = {"corpora": corpora, **order_parameters(self._order())}
        return xxhash.xxh3_128_hexdigest(canonical_json(parts).encode())

    def facts(self) -> Mapping[str, Any]:
        """Of the documents that take part."""
        order = self._order()
        return {
            "num_epochs": ceil_div(order.num_samples, int(order.takes_part.sum())),
            "tokens_per_epoch": int(order.lengths[order.takes_part].sum(dtype=np.int64)),
        }

    def fill(self, sink: Sink) -> None:
        packing.build(self._order(), sink)

    def check(self, arrays: Arrays) -> None:
        """They are built again, which takes less than a second for ten million documents."""
        memory = Memory()
        self.fill(memory)
        for name, expected in memory.arrays.items():
            if arrays[name].dtype != expected.dtype or not np.array_equal(arrays[name], expected):
                raise FormatError(f"{name} is not what the documents and the seed give")


def fetch(
    files: ArrayFiles,
    source: Source,
    settings: Mapping[str, Any],
    corpora: Sequence[IndexedDataset],
) -> tuple[Arrays, Mapping[str, Any], str]:
    """The arrays, their facts, and ``opened`` or ``built``: from the files, or built into them by
    one process.

    Args:
        files: where GPT-NeoX keeps them.
        source: how they are made.
        settings: what decides them besides the corpora.
        corpora: whose content decides them; sizes and times of their files stand for it while they
            are those that the sidecar has recorded.

    Raises:
        FormatError: files that GPT-NeoX wrote are not the arrays of this request.
        StorageError: the directory cannot be written, or another builder takes too long.
    """
    identity = Identity(
        settings=lambda: settings,
        corpus=functools.cache(source.corpus),
        stamp=[number for corpus in corpora for number in corpus_stamp(corpus.path_prefix)],
        facts=source.facts,
    )

    def find() -> Sidecar | None:
        return find_arrays(files, identity, source.check)

    def build() -> Sidecar:
        with ArrayWriter(files) as writer:
            source.fill(writer)
            return writer.publish(identity)

    directory, base = os.path.split(str(files))
    sidecar, how = find_or_build(directory or ".", base, find, build)
    return map_arrays(files, sidecar), sidecar.facts, how


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
