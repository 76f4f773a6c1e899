"""What `install` replaces in Megatron, as one table, and how it is put back.

Methods are replaced on Megatron's own classes, so a class that was imported before, or that
inherits from one of them, has them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import ModuleType

import megaindex.helpers
from megaindex.adapters.megatron import blending, deferred, reading, samplers
from megaindex.adapters.megatron.classes import METHODS, as_attribute, class_of
from megaindex.adapters.megatron.core import core
from megaindex.adapters.megatron.later import after_import
from megaindex.adapters.patching import Patches

SAMPLERS = {
    "MegatronPretrainingSampler": samplers.iterate_single,
    "MegatronPretrainingRandomSampler": samplers.iterate_cyclic,
}

_patches = Patches()
_waiting: list[Callable[[], None]] = []
"""Cancel what is to be done when a module is imported."""


def install() -> None:
    """Put megaindex under ``megatron.core.datasets``; a second call does nothing.

    Raises:
        InvalidArgument: megatron-core cannot be imported.
    """
    if _patches:
        return
    for name, methods in METHODS.items():
        for method, replacement in methods.items():
            _patches.replace(class_of(name), method, as_attribute(method, replacement))
    modules = core()
    _patches.replace(modules.blended_dataset, "json", blending.Json(modules.blended_dataset.json))
    for owner, name, ours in list(_helpers(modules.helpers)):
        _patches.replace(owner, name, ours)
    _waiting.extend(after_import(module, _patch_samplers) for module in samplers.MODULES)


def uninstall() -> None:
    """Put back everything that `install` replaced; datasets made since go on working, but for
    those whose files are gone."""
    try:
        reading.open_now()
        deferred.fill_in_now()
    finally:
        while _waiting:
            _waiting.pop()()
        _patches.undo()


def is_installed() -> bool:
    """Whether `install` was called and not undone."""
    return bool(_patches)


def _helpers(theirs: ModuleType) -> Iterator[tuple[ModuleType, str, object]]:
    """Megatron's helper functions, there and in every module that imported one by name."""
    ours = {id(getattr(theirs, name)): getattr(megaindex.helpers, name) for name in _names(theirs)}
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith("megatron."):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in ours and not module.__name__.endswith("helpers_cpp"):
                yield module, name, ours[id(value)]


def _names(theirs: ModuleType) -> list[str]:
    return [name for name in megaindex.helpers.__all__ if hasattr(theirs, name)]


def _patch_samplers(module: ModuleType) -> None:
    for name, iterate in SAMPLERS.items():
        if hasattr(module, name):
            _patches.replace(getattr(module, name), "__iter__", iterate)
