"""What `install` replaces in Megatron, as one table, and how it is put back.

Methods are replaced on Megatron's own classes, so a class that was imported before, or that
inherits from one of them, has them too.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Literal

import megaindex.helpers
from megaindex.adapters.megatron import blending, deferred, drawing, reading, samplers
from megaindex.adapters.megatron import classes as classes  # registers METHODS
from megaindex.adapters.megatron.core import METHODS, SIZES, as_attribute, class_of, core
from megaindex.adapters.megatron.indexing import KEYS
from megaindex.adapters.megatron.later import after_import
from megaindex.adapters.patching import Patches
from megaindex.adapters.policy import Policy, make_policy
from megaindex.adapters.reports import MEGATRON

SAMPLERS = {
    "MegatronPretrainingSampler": samplers.iterate_single,
    "MegatronPretrainingRandomSampler": samplers.iterate_cyclic,
}

_patches = Patches()
_of_policy = Patches()
_waiting: list[Callable[[], None]] = []
"""Cancel what is to be done when a module is imported."""


def install(
    *,
    variance_buffer: float | Literal["exact"] | None = None,
    separate_final_epoch: Literal["auto", "always", "never"] | None = None,
    final_epoch_threshold: float | None = None,
) -> None:
    """Put megaindex under ``megatron.core.datasets``; a second call only changes the settings, for
    datasets that are made from then on.

    Args:
        variance_buffer: what each source of a blend is asked for, as a multiple of its share: a
            number from 1. ``"exact"``: what the blend draws of it. None: Megatron's own,
            1 + mid_level_dataset_surplus.
        separate_final_epoch: whether the last of several epochs is shuffled apart: ``"always"``,
            ``"never"``, or ``"auto"`` where few of its samples are asked for. None: Megatron's
            own, auto. The arrays of another setting have names of their own.
        final_epoch_threshold: the share of an epoch below which auto shuffles it apart. None:
            Megatron's own, 0.8.

    Raises:
        InvalidArgument: a setting is out of range; or megatron-core cannot be imported, or is of a
            release that is not served.
    """
    policy = make_policy("megatron", variance_buffer, separate_final_epoch, final_epoch_threshold)
    _install_classes()
    _of_policy.undo()
    core().policy = policy
    if policy.variance_buffer is not None:
        _of_policy.replace(core().builder, SIZES, drawing.sizes_per_dataset)
    if policy.final_epoch:
        gpt = core().gpt_dataset
        values = (policy.row.separate_final_epoch, _threshold(policy))
        for key, value in zip(KEYS, values, strict=True):
            _of_policy.replace(gpt.GPTDatasetConfig, key, value)
        named = partial(_named_by, gpt.GPTDataset._key_config_attributes)
        _of_policy.replace(gpt.GPTDataset, "_key_config_attributes", staticmethod(named))
    MEGATRON.begin(f"megatron-core {core().version}", str(policy))


def _threshold(policy: Policy) -> float | None:
    return policy.final_epoch.get("final_epoch_threshold")


def _named_by(original: Callable[[], list[str]]) -> list[str]:
    """``GPTDataset._key_config_attributes``, by which Megatron names files, with what tells another
    final epoch from Megatron's own."""
    return [*original(), *KEYS]


def _install_classes() -> None:
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
        _of_policy.undo()
        _patches.undo()
        if core.cache_info().currsize:
            core().policy = make_policy("megatron", None, None, None)
        MEGATRON.end()


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
