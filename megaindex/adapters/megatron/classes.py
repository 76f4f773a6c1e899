"""Megatron's classes, and the methods of megaindex that go into them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from megaindex.adapters.megatron import (
    batching,
    blending,
    building,
    deferred,
    indexing,
    reading,
    writing,
)
from megaindex.adapters.megatron.core import core

METHODS: dict[str, dict[str, Callable[..., Any]]] = {
    "IndexedDataset": {
        "initialize": reading.initialize,
        "get": reading.get,
        "__getattr__": reading.get_attribute,
        "__del__": reading.delete,
    },
    "IndexedDatasetBuilder": {"add_document": writing.add_document},
    "_IndexWriter": {"write": writing.write_index},
    "GPTDataset": {
        "_build_document_sample_shuffle_indices": indexing.build_document_sample_shuffle_indices,
        "__getattr__": deferred.get_attribute,
        "__getstate__": deferred.get_state,
        "__len__": deferred.length,
        "__getitem__": batching.get_item,
        "__getitems__": batching.get_items,
    },
    "BlendedDataset": {
        "_build_indices": blending.build_indices,
        "__getitems__": batching.get_items_of_blend,
    },
    "BlendedMegatronDatasetBuilder": {
        "_build_megatron_datasets_parallel": building.build_megatron_datasets_parallel,
        "_build_megatron_dataset_splits": building.build_megatron_dataset_splits,
        "build_generic_dataset": building.build_generic_dataset,
    },
}
_STATIC = {"build_generic_dataset"}


def class_of(name: str) -> Any:
    """Megatron's class of that name."""
    modules = core()
    for module in (
        modules.indexed_dataset,
        modules.gpt_dataset,
        modules.blended_dataset,
        modules.builder,
    ):
        cls = getattr(module, name, None)
        if cls is not None and cls.__module__ == module.__name__:
            return cls
    raise AttributeError(name)


def as_attribute(method: str, replacement: Callable[..., Any]) -> Any:
    """What is put into a class to make ``replacement`` its method."""
    return staticmethod(replacement) if method in _STATIC else replacement


@functools.cache
def load_class(name: str) -> Any:
    """A subclass of Megatron's class with megaindex's methods, for use without `install`.

    Of the same name, since Megatron names its cache files by it.
    """
    base = class_of(name)
    methods = {method: as_attribute(method, function) for method, function in METHODS[name].items()}
    if name == "GPTDataset":
        methods["build_low_level_dataset"] = staticmethod(_build_low_level_dataset)
    return type(name, (base,), {**methods, "__module__": __name__, "__doc__": base.__doc__})


def _build_low_level_dataset(dataset_path: str, config: Any) -> Any:
    """``GPTDataset.build_low_level_dataset`` with the IndexedDataset of this module."""
    theirs = class_of("GPTDataset").build_low_level_dataset(dataset_path, config)
    if reading.mapped(theirs) is not None or reading.why_left(vars(theirs)) is not None:
        return theirs
    return load_class("IndexedDataset")(dataset_path, mmap=config.mmap_bin_files)
