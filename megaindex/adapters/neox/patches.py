"""Which names of GPT-NeoX are replaced by what, and how they are put back."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import megaindex.helpers
from megaindex.adapters.neox import batches, blend, datasets, files, loaders
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.patching import Patches

# Methods are replaced on the classes, so that classes imported by name before, and subclasses,
# have them too.
METHODS: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {
    ("gpt2_dataset", "GPT2Dataset"): {
        "__init__": datasets.init_gpt2,
        "__len__": datasets.length,
        "__getitem__": datasets.get_item,
        "__getitems__": datasets.get_items,
    },
    ("pairwise_dataset", "PairwiseDataset"): {
        "__init__": datasets.init_pairwise,
        "__len__": datasets.length,
        "__getitem__": datasets.get_item,
        "__getitems__": datasets.get_items,
    },
    ("blendable_dataset", "BlendableDataset"): {
        "__init__": blend.init_blend,
        "__getitem__": blend.get_item,
        "__getitems__": blend.get_items,
    },
    ("indexed_dataset", "MMapIndexedDataset"): {
        "_do_init": files.open_mapped,
        "__getitem__": files.get_item,
        "get": files.get,
    },
    ("indexed_dataset", "IndexedDataset"): {
        "read_index": files.open_legacy_index,
        "__getitem__": files.get_item,
        "get": files.get,
    },
    ("indexed_dataset", "IndexedCachedDataset"): {"__getitem__": files.get_item},
    ("samplers", "DistributedBatchSampler"): {"__iter__": loaders.iterate_batches},
}
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("indexed_dataset", "make_dataset"): files.make_dataset,
    ("data_utils", "compile_helper"): loaders.compile_helper,
    ("data_utils", "cycle"): loaders.cycle,
    ("data_utils", "make_data_loader"): batches.make_data_loader,
    ("data_utils", "shift_and_wrap_data_loaders"): loaders.shift_and_wrap_data_loaders,
}
EXACT_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("data_utils", "get_normalized_weights_and_num_samples"): loaders.exact_weights_and_num_samples,
}

_patches = Patches()


def install(exact: bool = False) -> None:
    """Put megaindex under GPT-NeoX's ``megatron.data``; see `megaindex.adapters.neox`.

    A second call only changes ``exact``, for datasets that are made from then on.

    Raises:
        InvalidArgument: GPT-NeoX's modules cannot be imported.
    """
    uninstall()
    neox = framework()
    neox.exact = exact
    for (module, cls), methods in METHODS.items():
        owner = getattr(getattr(neox, module), cls)
        for name, function in methods.items():
            neox.originals[module, cls, name] = getattr(owner, name, None)
            _patches.replace(owner, name, function)
    for (module, name), function in {**FUNCTIONS, **(EXACT_FUNCTIONS if exact else {})}.items():
        original = getattr(getattr(neox, module), name)
        neox.originals[module, name] = original
        for place, alias in _places_of(original, getattr(neox, module), name):
            _patches.replace(place, alias, function)
    _patches.replace(neox.package, "helpers", megaindex.helpers)
    _patches.replace_module("megatron.data.helpers", megaindex.helpers)


def uninstall() -> None:
    """Put back what `install` replaced. Make datasets anew: those made meanwhile need what was."""
    _patches.undo()
    framework.cache_clear()


def _places_of(original: Any, home: ModuleType, name: str) -> list[tuple[ModuleType, str]]:
    """Where GPT-NeoX has a function of its own: its home, and modules that imported it."""
    if getattr(original, "__module__", None) != home.__name__:
        return [(home, name)]  # of the standard library: everybody else keeps it
    return [
        (module, alias)
        for module_name, module in list(sys.modules.items())
        if module_name.split(".")[0] in _GPT_NEOX and isinstance(module, ModuleType)
        for alias, value in list(vars(module).items())
        if value is original
    ]


_GPT_NEOX = ("megatron", "tools", "__main__")
