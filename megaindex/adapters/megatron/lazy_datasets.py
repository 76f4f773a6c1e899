"""GPTDatasets of a blend that open their files on first use.

A blend of 500 sources over three splits has 1500 datasets. Their settings are checked when they are
made; their 5,500 files are mapped by the processes that read them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from megaindex.adapters.megatron.arrays import (
    ARRAYS,
    DatasetRequest,
    LowLevelCorpus,
    cache_directory,
    settings_of,
)
from megaindex.adapters.megatron.core import core
from megaindex.cache.framework_files.array_files import Sidecar
from megaindex.cache.framework_files.names import megatron_files

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
