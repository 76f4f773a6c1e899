"""Megatron's classes, and the methods of megaindex that go into them."""

from __future__ import annotations

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
from megaindex.adapters.megatron.core import METHODS, STANDALONE, class_of, load_class


def _build_low_level_dataset(dataset_path: str, config: Any) -> Any:
    """``GPTDataset.build_low_level_dataset`` with the IndexedDataset of this module."""
    theirs = class_of("GPTDataset").build_low_level_dataset(dataset_path, config)
    if reading.mapped(theirs) is not None or reading.why_left(vars(theirs)) is not None:
        return theirs
    return load_class("IndexedDataset")(dataset_path, mmap=config.mmap_bin_files)


METHODS.update(
    {
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
)
STANDALONE["GPTDataset"] = {"build_low_level_dataset": _build_low_level_dataset}
