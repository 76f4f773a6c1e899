"""The three index arrays of a GPTDataset, under Megatron's own cache names; datasets opened lazily.

A blend of 500 sources over three splits has 1500 datasets. Their settings are checked when they are
made; their 5,500 files are mapped by the processes that read them, on first use.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex._types import I32
from megaindex.adapters.megatron.batches import unbatched_reason
from megaindex.adapters.megatron.core import core
from megaindex.adapters.megatron.indexed_dataset import mapped
from megaindex.adapters.reports import MEGATRON, on_rank_0
from megaindex.arithmetic import epochs_for
from megaindex.cache.array_files import ArrayFiles, Arrays, Identity, Sidecar, megatron_files
from megaindex.cache.array_group import ArrayRequest
from megaindex.cache.fingerprint import (
    array_checksum,
    corpus_fingerprint,
    corpus_stamp,
    documents_setting,
)
from megaindex.cache.sidecar import map_arrays
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import check_arrays
from megaindex.index.documents import count_tokens
from megaindex.index.frameworks import FrameworkRules, as_range, check_total
from megaindex.index.orders import framework
from megaindex.index.orders.framework import ShuffledOrder
from megaindex.validation import check_setting

ARRAYS = ("document_index", "sample_index", "shuffle_index")
FINAL_EPOCH_ATTRIBUTES = ("megaindex_separate_final_epoch", "megaindex_final_epoch_threshold")
"""Attributes of a config that distinguish arrays of another final epoch."""


class LowLevelCorpus:
    """The properties of a low-level dataset that its indices depend on, read on first use.

    While sizes and times of its files are those of a sidecar, the fingerprint of the sidecar is
    used; otherwise the lengths are read and hashed.
    """

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset
        prefix = getattr(dataset, "path_prefix", None)
        self.stamp = [] if prefix is None else corpus_stamp(prefix)
        self._num_sequences: int | None = None
        self._fingerprint: str | None = None
        self._lengths: I32 | None = None

    def take_facts(self, facts: Mapping[str, Any]) -> None:
        """Set the facts of a sidecar that has the stamp of these files."""
        self._num_sequences = facts["sequences"]

    def facts(self) -> dict[str, Any]:
        return {"sequences": self.num_sequences}

    @property
    def num_sequences(self) -> int:
        if self._num_sequences is None:
            self._num_sequences = int(self.dataset.sequence_lengths.shape[0])
        return self._num_sequences

    @property
    def lengths(self) -> I32:
        """int32[sequences]; every sequence was checked."""
        if self._lengths is None:
            reader = mapped(self.dataset)
            if reader is not None:
                reader.validate()
            self._lengths = self.dataset.sequence_lengths
        return self._lengths

    def fingerprint(self) -> str:
        """Return 32 hex digits; of files that are not local, the checksum of the lengths alone."""
        if self._fingerprint is None:
            reader = mapped(self.dataset)
            self._fingerprint = (
                array_checksum(np.asarray(self.dataset.sequence_lengths))
                if reader is None
                else corpus_fingerprint(reader)
            )
        return self._fingerprint


@dataclass(kw_only=True, slots=True)
class DatasetRequest(ArrayRequest):
    """The request for one GPTDataset's arrays."""

    corpus: LowLevelCorpus
    documents: range | I32 | tuple[float, float]
    """Sequence ids of one epoch, or the bounds of the split as fractions of the corpus."""
    num_samples: int | None
    sequence_length: int
    seed: int
    extra: int
    drop_last_partial: bool
    row: FrameworkRules
    """Rules of Megatron's order, with the final epoch of `install`."""
    final_epoch: dict[str, Any]
    """Settings of the final epoch that differ from Megatron's defaults."""
    name: str
    """Name of the dataset in messages."""
    description: str
    files: ArrayFiles | None

    def fill(self, sink: framework.Sink, threads: int | None = None) -> None:
        """Build the arrays into ``sink``; ``threads`` defaults to `num_threads`."""
        order = self.order()
        if len(order.documents) == 0:
            _fill_without_documents(sink)
        else:
            framework.build(order, self.corpus.lengths, sink, threads)

    def order(self) -> ShuffledOrder:
        """Return the order of the samples, with its epochs counted.

        Raises:
            InvalidArgument: the documents hold no token, or the order has too many tokens.
        """
        check_setting("add_extra_token", self.extra, "add_extra_token_to_sequence")
        chosen = self._chosen()
        tokens = count_tokens(self.corpus.lengths, chosen)
        if tokens == 0 and self.num_samples:
            raise InvalidArgument(
                f"{self.name}: {self.num_samples} samples are requested of documents without a "
                "token; leave the corpus out of this split, or give the split more of it"
            )
        order = ShuffledOrder(
            rules=self.row,
            documents=chosen,
            num_samples=self.num_samples or 0,
            num_epochs=(
                1
                if self.num_samples is None or tokens == 0
                else epochs_for(self.num_samples, tokens, self.sequence_length, self.extra)
            ),
            tokens_per_epoch=tokens,
            sequence_length=self.sequence_length,
            seed=self.seed,
            add_extra_token=self.extra,
            drop_last_partial=self.drop_last_partial,
        )
        check_total(self.name, order.total_tokens)
        return order

    def _chosen(self) -> range | I32:
        if not isinstance(self.documents, tuple):
            return self.documents
        count = float(self.corpus.num_sequences)
        begin, end = self.documents
        return range(round(begin * count), round(end * count))

    def _settings(self) -> dict[str, Any]:
        return {
            "documents": documents_setting(self._chosen()),
            "num_samples": self.num_samples,
            "sequence_length": self.sequence_length,
            "seed": self.seed,
            "add_extra_token": self.extra,
            "drop_last_partial": self.drop_last_partial,
            **self.final_epoch,
        }

    @property
    def corpus_nbytes(self) -> int:
        """Bytes of the .idx."""
        return sum(self.corpus.stamp[:1])

    @property
    def identity(self) -> Identity:
        return Identity(
            settings=self._settings,
            corpus=self.corpus.fingerprint,
            stamp=self.corpus.stamp,
            facts=self.corpus.facts,
            learn=self.corpus.take_facts,
        )

    def check(self, arrays: Arrays) -> None:
        order = self.order()
        if len(order.documents):
            check_arrays(order, self.corpus.lengths, **arrays)


def _fill_without_documents(sink: framework.Sink) -> None:
    """Fill the arrays of one epoch without documents or samples."""
    for name, shape, dtype in (
        ("document_index", (0,), "int32"),
        ("sample_index", (1, 2), "int32"),
        ("shuffle_index", (0,), "uint32"),
    ):
        sink.allocate(name, shape, dtype)[...] = 0
        sink.seal(name)


def request_of(self: Any, corpus: LowLevelCorpus) -> DatasetRequest:
    """Return the request for a GPTDataset's arrays.

    Raises:
        InvalidArgument: its class names files without the settings of the final epoch.
    """
    if core().policy.final_epoch and FINAL_EPOCH_ATTRIBUTES[0] not in self.unique_identifiers:
        raise InvalidArgument(
            f"{type(self).__name__} names its files without the attributes that GPTDataset names "
            f"them by: under separate_final_epoch {core().policy.row.separate_final_epoch} they "
            "would have the names of Megatron's own; let its _key_config_attributes begin with "
            "those of its base"
        )
    documents = np.asarray(self.indices)
    return DatasetRequest(
        corpus=corpus,
        documents=as_range(documents) if documents.size else range(0),
        num_samples=None if self.num_samples is None else int(self.num_samples),
        name=str(self.dataset_path),
        description=self.unique_description,
        files=megatron_files(
            cache_directory(self.config, getattr(self.dataset, "path_prefix", None), type(self)),
            f"{self.unique_description_hash}-{type(self).__name__}-{self.index_split.name}",
        ),
        **settings_of(self.config, self.index_split),
    )


def settings_of(config: Any, split: Any) -> dict[str, Any]:
    """Return the arguments of a request that all datasets of a split share."""
    return {
        "sequence_length": check_setting("sequence_length", config.sequence_length),
        "seed": check_setting("seed", config.random_seed, "random_seed"),
        "extra": int(config.add_extra_token_to_sequence),
        "drop_last_partial": (
            split.name != "valid" or bool(config.drop_last_partial_validation_sequence)
        ),
        "row": core().policy.row,
        "final_epoch": core().policy.final_epoch,
    }


def cache_directory(config: Any, path_prefix: str | None, cls: type) -> str | None:
    """Return the directory of a dataset's arrays; None where Megatron keeps them in memory."""
    if config.path_to_cache is not None or config.mock or path_prefix is None:
        return config.path_to_cache or None
    return os.path.join(path_prefix, "cache", f"{cls.__name__}_indices")


def build_document_sample_shuffle_indices(self: Any) -> tuple[Any, ...]:
    """``GPTDataset._build_document_sample_shuffle_indices``."""
    if isinstance(self.indices, DatasetRequest):  # the builder sets the arrays later
        return None, None, None
    name = f"{self.dataset_path} ({self.index_split.name})"
    reason = unsupported_reason(type(self), self.config)
    if reason is not None:
        MEGATRON.leave(type(self).__name__, name, reason)
        original = core().originals["GPTDataset", "_build_document_sample_shuffle_indices"]
        return tuple(original(self))
    started = time.perf_counter()
    request = request_of(self, LowLevelCorpus(self.dataset))
    if request.files is None:
        memory = framework.Memory()
        request.fill(memory)
        arrays, how = memory.arrays, "built"
    else:
        fetched = request.fetch()
        arrays = map_arrays(request.files, fetched.sidecar)
        how = "built" if fetched.was_built else "opened"
    samples = int(arrays["shuffle_index"].size)
    epochs = epochs_in(int(arrays["document_index"].size), len(self.indices))
    MEGATRON.serve(
        type(self).__name__,
        name,
        how,
        samples=samples,
        epochs=epochs,
        seconds=time.perf_counter() - started,
        cache=None if request.files is None else str(request.files),
    )
    log_as_megatron([(samples, epochs)])
    reason = unbatched_reason(type(self), type(self.dataset), self.config)
    if reason is not None:
        MEGATRON.leave("reading", type(self).__name__, reason)
    return tuple(arrays[name] for name in ARRAYS)


def epochs_in(entries: int, documents: int) -> int:
    """Return the number of epochs in a document_index of that many entries."""
    return entries // documents if documents else 1


def log_as_megatron(sizes: Iterable[tuple[int, int]]) -> None:
    """Log samples and epochs of datasets in Megatron's own lines."""
    theirs = core().gpt_dataset.logger
    if theirs.isEnabledFor(logging.INFO) and on_rank_0():
        lines = [
            f"> total number of samples: {samples}\n> total number of epochs: {epochs}"
            for samples, epochs in sizes
        ]
        theirs.info("%s", "\n".join(lines))


def unsupported_reason(cls: type, config: Any) -> str | None:
    """Return the reason for which Megatron's own code builds the arrays of this class, or None.

    Raises:
        InvalidArgument: the class cannot have the final epoch of `install`.
    """
    reason = unchecked_cache_reason(config)
    if reason is not None:
        return reason
    for method in ("_get_num_epochs", "_get_num_tokens_per_epoch"):
        if not core().is_plain(cls, "GPTDataset", method):
            if core().policy.final_epoch:
                raise InvalidArgument(
                    f"{cls.__name__} has a {method} of its own, so its arrays are built by "
                    "Megatron's code, which has no separate_final_epoch; leave that setting out "
                    "of install()"
                )
            return f"{cls.__name__} has a {method} of its own"
    return None


def unchecked_cache_reason(config: Any) -> str | None:
    """Return the reason for which Megatron's own code maps caches unchecked, or None."""
    for name in ("fast_cache_load", "defer_npy_index_mmap"):
        if getattr(config, name, False):
            return f"{name} has Megatron map the cache unchecked"
    return None


logger = logging.getLogger("megaindex")

_PENDING = "_megaindex"
_COPIED_ATTRIBUTES = {
    "dataset", "dataset_path", "indices", "num_samples", "index_split", "config",
    "unique_identifiers", "unique_description", "unique_description_hash", "_pad_token_id",
    "masks_and_position_ids_are_cacheable", "masks_and_position_ids_are_cached",
    "cached_attention_mask", "cached_loss_mask", "cached_position_ids",
    "built_anew_on_cache_miss", *ARRAYS,
}  # fmt: skip


class DatasetIdentifiers(dict[str, Any]):
    """``unique_identifiers`` of a dataset, with their JSON text.

    They never change, since the files of the dataset are named by them.
    """

    __slots__ = ("description",)
    description: str


class DatasetFactory:
    """A factory of the GPTDatasets of one split, which differ in corpus and number of samples.

    Megatron's own constructor makes a template, of which the datasets are copies. Their
    descriptions, by which Megatron names the files, differ in these two values alone.
    """

    def __init__(self, cls: Any, config: Any, split: Any, share: tuple[float, float]) -> None:
        self._cls = cls
        self._config = config
        self._share = share
        self._settings = settings_of(config, split)
        self._directory = config.path_to_cache
        self._suffix = f"-{cls.__name__}-{split.name}"
        nothing: Any = object.__new__(DatasetRequest)  # in place of documents: no arrays are built
        marks = cls(None, "\0path", nothing, "\0samples", split, config)
        self._common = {
            name: vars(marks)[name] for name in vars(marks).keys() - {*ARRAYS, "indices"}
        }
        self.is_possible = vars(marks).keys() <= _COPIED_ATTRIBUTES
        begin, rest = marks.unique_description.split(json.dumps("\0path"))
        middle, end = rest.split(json.dumps("\0samples"))
        self._pieces = begin, middle, end
        self._identifiers = dict(marks.unique_identifiers)

    def make(
        self, corpus: LowLevelCorpus, path: str, num_samples: int | None
    ) -> tuple[Any, DatasetRequest]:
        """Return a dataset and the request for its arrays."""
        num_samples = None if num_samples is None else int(num_samples)
        begin, middle, end = self._pieces
        samples = "null" if num_samples is None else str(num_samples)
        description = f"{begin}{json.dumps(path)}{middle}{samples}{end}"
        digest = hashlib.md5(description.encode(), usedforsecurity=False).hexdigest()
        identifiers = DatasetIdentifiers(self._identifiers)
        identifiers["dataset_path"], identifiers["num_samples"] = path, num_samples
        identifiers.description = description
        directory = self._directory or cache_directory(self._config, path, self._cls)
        request = DatasetRequest(
            corpus=corpus,
            documents=self._share,
            num_samples=num_samples,
            name=path,
            description=description,
            files=megatron_files(directory, digest + self._suffix),
            **self._settings,
        )
        dataset = object.__new__(self._cls)
        dataset.__dict__ = {
            **self._common,
            "dataset": corpus.dataset,
            "dataset_path": path,
            "num_samples": num_samples,
            "unique_identifiers": identifiers,
            "unique_description": description,
            "unique_description_hash": digest,
        }
        return dataset, request


_waiting: weakref.WeakSet[Any] = weakref.WeakSet()


def defer_arrays(dataset: Any, request: DatasetRequest, sidecar: Sidecar) -> None:
    """Make ``dataset`` map its arrays on first access."""
    vars(dataset)[_PENDING] = request, sidecar
    _waiting.add(dataset)


def load_deferred_arrays() -> None:
    """Complete every deferred dataset, before the methods that do it are removed."""
    for dataset in list(_waiting):
        try:
            vars(dataset).update(get_complete_state(dataset))
        except Exception:  # the others have to be completed all the same
            logger.warning("%s: left incomplete", dataset.dataset_path, exc_info=True)
        vars(dataset).pop(_PENDING, None)
    _waiting.clear()


def get_deferred_array(self: Any, name: str) -> Any:
    """``GPTDataset.__getattr__``: maps the arrays of a deferred dataset."""
    pending = vars(self).get(_PENDING)
    if pending is None or name not in (*ARRAYS, "indices"):
        raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
    request, sidecar = pending
    if name == "indices":
        begin, end = sidecar.settings["documents"]
        self.indices = np.arange(begin, end, dtype=np.int32)
    else:
        vars(self).update(request.open(sidecar))
    return vars(self)[name]


def count_samples(self: Any) -> int:
    """``GPTDataset.__len__``."""
    if _PENDING in vars(self):
        _, sidecar = vars(self)[_PENDING]
        return int(sidecar.arrays["shuffle_index"][1][0])
    original: Callable[[Any], int] = core().originals["GPTDataset", "__len__"]
    return original(self)


def get_complete_state(self: Any) -> dict[str, Any]:
    """``GPTDataset.__getstate__``: the complete state, for processes without megaindex."""
    if _PENDING in vars(self):
        for name in (*ARRAYS, "indices"):
            getattr(self, name)
    return {name: value for name, value in vars(self).items() if name != _PENDING}
