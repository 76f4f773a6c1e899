"""The table of Megatron's names and methods that megaindex replaces; `install`, `uninstall`.

Methods are replaced on Megatron's own classes, so a class that was imported before, or that
inherits from one of them, has them too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import Any, Literal

import megaindex.helpers
from megaindex.adapters.megatron import (
    arrays,
    balance,
    batches,
    blend,
    builder,
    indexed_dataset,
    lazy_datasets,
    skips,
)
from megaindex.adapters.megatron.arrays import FINAL_EPOCH_ATTRIBUTES
from megaindex.adapters.megatron.core import (
    HELPERS,
    METHODS,
    SIZES,
    STANDALONE,
    MegatronCore,
    as_attribute,
    class_of,
    core,
    load_class,
)
from megaindex.adapters.patching import Patches, after_import
from megaindex.adapters.policy import Policy, make_policy
from megaindex.adapters.reports import MEGATRON
from megaindex.builders.extend import AmendedBlend
from megaindex.index.balance import CostModel
from megaindex.index.skips import Skip
from megaindex.lock.lock_file import Lock

SAMPLER_MODULES = ("megatron.training.datasets.data_samplers", "megatron.legacy.data.data_samplers")


def iterate_single(self: Any) -> Iterator[list[int]]:
    """``MegatronPretrainingSampler.__iter__``: this rank's part of each round of micro batches."""
    stride = self.micro_batch_times_data_parallel_size
    begin, end = self.get_start_end_idx()
    whole = (self.total_samples - self.consumed_samples) // stride
    first = self.consumed_samples
    if (steps := balance.balanced_steps(self)) is not None:
        yield from steps.micro_batches(self)
    else:
        for start in range(first, first + whole * stride, stride):
            yield list(range(start + begin, start + end))
    start = first + whole * stride
    if start < self.total_samples and not self.drop_last:
        rest = range(start, self.total_samples)
        yield list(rest[begin:end])


def iterate_cyclic(self: Any) -> Iterator[list[int]]:
    """``MegatronPretrainingRandomSampler.__iter__``: one epoch, or the rest of it."""
    import torch

    stride, size = self.micro_batch_times_data_parallel_size, self.micro_batch_size
    epoch_samples = self.total_samples - self.last_batch_size
    self.epoch, done = divmod(self.consumed_samples, epoch_samples)
    assert done % stride == 0
    if hasattr(self.dataset, "set_epoch"):
        self.dataset.set_epoch(self.epoch)
    generator = torch.Generator()
    generator.manual_seed(self.epoch)
    if self.data_sharding:
        part = self.total_samples // stride * size
        order = torch.randperm(part, generator=generator).add_(self.data_parallel_rank * part)
        order = order[done // self.data_parallel_size :]
    else:
        part = self.total_samples // size * size
        order = torch.randperm(part, generator=generator)
        order = order[done:][self.data_parallel_rank :: self.data_parallel_size]
    for start in range(0, order.numel() - size + 1, size):
        self.consumed_samples += stride
        yield order[start : start + size].tolist()


def _build_low_level_dataset(dataset_path: str, config: Any) -> Any:
    """``GPTDataset.build_low_level_dataset`` with megaindex's IndexedDataset."""
    theirs = class_of("GPTDataset").build_low_level_dataset(dataset_path, config)
    is_left = indexed_dataset.unsupported_reason(vars(theirs)) is not None
    if is_left or indexed_dataset.mapped(theirs) is not None:
        return theirs
    return load_class("IndexedDataset")(dataset_path, mmap=config.mmap_bin_files)


METHODS.update(
    {
        "IndexedDataset": {
            "initialize": indexed_dataset.initialize,
            "get": indexed_dataset.read_range,
            "__getattr__": indexed_dataset.open_on_access,
            "__del__": indexed_dataset.close_nothing,
        },
        "IndexedDatasetBuilder": {"add_document": indexed_dataset.add_document},
        "_IndexWriter": {"write": indexed_dataset.write_index},
        "GPTDataset": {
            "_build_document_sample_shuffle_indices": arrays.build_document_sample_shuffle_indices,
            "__getattr__": lazy_datasets.get_deferred_array,
            "__getstate__": lazy_datasets.get_complete_state,
            "__len__": lazy_datasets.count_samples,
            "__getitem__": batches.read_gpt_sample,
            "__getitems__": batches.read_gpt_samples,
        },
        "BlendedDataset": {
            "_build_indices": blend.build_indices,
            "__getitems__": batches.read_blend_samples,
        },
        "BlendedMegatronDatasetBuilder": {
            "build": builder.build_datasets,
            "_build_megatron_datasets_parallel": builder.build_megatron_datasets_parallel,
            "_build_megatron_dataset_splits": builder.build_megatron_dataset_splits,
            "build_generic_dataset": builder.build_generic_dataset,
        },
    }
)
STANDALONE["GPTDataset"] = {"build_low_level_dataset": _build_low_level_dataset}


def __getattr__(name: str) -> Any:
    """Return megaindex's subclass of a class of Megatron's, for use without `install`."""
    if name not in METHODS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return load_class(name)


SAMPLERS = {
    "MegatronPretrainingSampler": iterate_single,
    "MegatronPretrainingRandomSampler": iterate_cyclic,
}

_patches = Patches()
_policy_patches = Patches()
_pending_imports: list[Callable[[], None]] = []
"""Functions that cancel replacements in modules that were not imported yet."""


def install(
    *,
    variance_buffer: float | Literal["exact"] | None = None,
    separate_final_epoch: Literal["auto", "always", "never"] | None = None,
    final_epoch_threshold: float | None = None,
    balance: CostModel | None = None,
    skip: Skip | Sequence[Skip] | None = None,
    lock: str | os.PathLike[str] | Lock | None = None,
    amend: str | os.PathLike[str] | AmendedBlend | None = None,
) -> None:
    """Put megaindex under ``megatron.core.datasets``; a second call only changes the settings, for
    datasets that are made afterwards.

    Args:
        variance_buffer: samples requested of each source of a blend, as a multiple of its share: a
            number from 1; ``"exact"``: the samples that the blend draws of it. None: Megatron's
            1 + mid_level_dataset_surplus.
        separate_final_epoch: ``"always"`` or ``"never"`` shuffle the last of several epochs apart;
            ``"auto"`` does if few of its samples are requested. None: Megatron's auto. The arrays
            of another setting have other names.
        final_epoch_threshold: fraction of an epoch below which ``"auto"`` shuffles it apart. None:
            Megatron's 0.8.
        balance: cost model by which the ``single`` sampler assigns each step's training samples to
            the ranks, so that they have equal work. For models that mask documents from each other;
            see docs/balance.md.
        skip: steps that are not trained on, and documents whose loss is masked, see docs/record.md.
            Steps are those of ``--train-iters`` without skips, from 0; the run makes fewer
            iterations by those dropped.
        lock: path of a run.lock of this run, or the lock, that the datasets must agree with: their
            .idx files, and on rank 0 the samples of three blocks of steps. They are compared when
            they are built, and others are refused. Its skips take the place of ``skip``.
        amend: the training data as the run began and the changes of its blend since, or the path of
            a YAML file with them; ``--data-path`` is the blend of today. See
            docs/changing-runs.md.

    Raises:
        InvalidArgument: a setting is out of range; megatron-core cannot be imported, or its release
            is not supported.
        FormatError, StorageError: the lock is damaged, or cannot be read.
    """
    policy = make_policy(
        "megatron",
        variance_buffer,
        separate_final_epoch,
        final_epoch_threshold,
        balance,
        skip,
        lock,
        amend,
    )
    _install_classes()
    _policy_patches.undo()
    core().policy = policy
    if policy.variance_buffer is not None:
        _policy_patches.replace(core().builder, SIZES, blend.sizes_per_dataset)
    if policy.final_epoch:
        gpt = core().gpt_dataset
        values = (policy.row.separate_final_epoch, _threshold(policy))
        for key, value in zip(FINAL_EPOCH_ATTRIBUTES, values, strict=True):
            _policy_patches.replace(gpt.GPTDatasetConfig, key, value)
        named = partial(_key_attributes, gpt.GPTDataset._key_config_attributes)
        _policy_patches.replace(gpt.GPTDataset, "_key_config_attributes", staticmethod(named))
    MEGATRON.begin(f"megatron-core {core().version}", str(policy))


def _threshold(policy: Policy) -> float | None:
    return policy.final_epoch.get("final_epoch_threshold")


def _key_attributes(original: Callable[[], list[str]]) -> list[str]:
    """``GPTDataset._key_config_attributes``, by which Megatron names files, and the settings of the
    final epoch."""
    return [*original(), *FINAL_EPOCH_ATTRIBUTES]


def _install_classes() -> None:
    if _patches:
        return
    for name, methods in METHODS.items():
        for method, replacement in methods.items():
            _patches.replace(class_of(name), method, as_attribute(method, replacement))
    modules = core()
    _patches.replace(
        modules.blended_dataset, "json", blend.DescriptionJson(modules.blended_dataset.json)
    )
    if modules.helpers is None:
        for name in HELPERS:
            _patches.replace_module(name, megaindex.helpers)
    for owner, name, ours in list(_function_places(modules)):
        _patches.replace(owner, name, ours)
    _pending_imports.extend(after_import(module, _patch_samplers) for module in SAMPLER_MODULES)
    _pending_imports.append(after_import(skips.TRAINING, _patch_training))
    _pending_imports.append(after_import(skips.CHECKPOINTING, _patch_checkpointing))


def uninstall() -> None:
    """Undo `install`; datasets made since then keep working unless their files were removed."""
    try:
        indexed_dataset.open_deferred()
        lazy_datasets.load_deferred_arrays()
    finally:
        while _pending_imports:
            _pending_imports.pop()()
        _policy_patches.undo()
        _patches.undo()
        if core.cache_info().currsize:
            core().policy, core().loaded = make_policy("megatron", None, None, None), None
        MEGATRON.end()


def is_installed() -> bool:
    """Return whether `install` was called and not undone."""
    return bool(_patches)


def _function_places(modules: MegatronCore) -> Iterator[tuple[ModuleType, str, object]]:
    """Yield Megatron's helper functions and the one that compiles them, there and in modules that
    imported one by name."""
    names = [name for name in megaindex.helpers.__all__ if hasattr(modules.helpers, name)]
    ours = {id(getattr(modules.helpers, n)): getattr(megaindex.helpers, n) for n in names}
    ours[id(modules.utils.compile_helpers)] = compile_helpers
    for module in list(sys.modules.values()):
        if not getattr(module, "__name__", "").startswith(("megatron.", "__main__")):
            continue
        for name, value in list(vars(module).items()):
            if id(value) in ours and not module.__name__.endswith("helpers_cpp"):
                yield module, name, ours[id(value)]


def compile_helpers() -> None:
    """``utils.compile_helpers``: does nothing, since megaindex's helpers are compiled."""


def _patch_samplers(module: ModuleType) -> None:
    for name, iterate in SAMPLERS.items():
        if hasattr(module, name):
            _patches.replace(getattr(module, name), "__iter__", iterate)
    original = getattr(module, balance.LOADER, None)
    if original is not None:
        ours = balance.build_data_loader(original)
        for place in [module, *_importers(original)]:
            _patches.replace(place, balance.LOADER, ours)


def _patch_training(module: ModuleType) -> None:
    original = getattr(module, skips.LOADERS, None)
    if original is not None:
        _patches.replace(module, skips.LOADERS, skips.build_data_loaders(original))


def _patch_checkpointing(module: ModuleType) -> None:
    original = getattr(module, skips.CHECK_ARGS, None)
    if original is not None:
        _patches.replace(module, skips.CHECK_ARGS, skips.check_checkpoint_args(original))


def _importers(function: object) -> list[ModuleType]:
    """Return Megatron's modules that imported the loader function by its name."""
    return [
        module
        for module in list(sys.modules.values())
        if getattr(module, "__name__", "").startswith(("megatron.", "__main__"))
        and vars(module).get(balance.LOADER) is function
    ]
