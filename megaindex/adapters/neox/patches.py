"""The table of GPT-NeoX's names that megaindex replaces; `install` and `uninstall`."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, Literal

import megaindex.helpers
from megaindex.adapters.neox import amend as amended_data
from megaindex.adapters.neox import blend, datasets, files, group, loaders
from megaindex.adapters.neox.framework import framework
from megaindex.adapters.patching import Patches
from megaindex.adapters.policy import Policy, make_policy
from megaindex.adapters.reports import NEOX
from megaindex.builders.extend import AmendedBlend
from megaindex.index.balance import CostModel
from megaindex.index.skips import Skip
from megaindex.lock.lock_file import Lock

# replaced on the classes, for classes that were imported by name before, and for subclasses
METHODS: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {
    ("gpt2_dataset", "GPT2Dataset"): {
        "__init__": datasets.init_gpt2,
        "__getattr__": datasets.get_deferred,
        "__getstate__": datasets.get_complete_state,
        "__len__": datasets.count_samples,
        "__getitem__": datasets.read_sample,
        "__getitems__": datasets.read_samples,
    },
    ("pairwise_dataset", "PairwiseDataset"): {
        "__init__": datasets.init_pairwise,
        "__getattr__": datasets.get_deferred,
        "__getstate__": datasets.get_complete_state,
        "__len__": datasets.count_samples,
        "__getitem__": datasets.read_sample,
        "__getitems__": datasets.read_samples,
    },
    ("blendable_dataset", "BlendableDataset"): {
        "__init__": amended_data.init_blend,
        "__getstate__": blend.get_blend_state,
        "__getitem__": blend.read_blend_sample,
        "__getitems__": blend.read_blend_samples,
    },
    ("indexed_dataset", "MMapIndexedDataset"): {
        "_do_init": files.open_mapped,
        "__getitem__": files.read_sequence,
        "get": files.read_range,
    },
    ("indexed_dataset", "IndexedDataset"): {
        "read_index": files.open_legacy_index,
        "__getitem__": files.read_sequence,
        "get": files.read_range,
    },
    ("indexed_dataset", "IndexedCachedDataset"): {"__getitem__": files.read_sequence},
    ("samplers", "DistributedBatchSampler"): {"__iter__": loaders.iterate_batches},
}
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("indexed_dataset", "make_dataset"): files.make_dataset,
    ("data_utils", "compile_helper"): loaders.compile_helper,
    ("data_utils", "cycle"): loaders.cycle,
    ("data_utils", "make_data_loader"): loaders.make_data_loader,
    ("data_utils", "shift_and_wrap_data_loaders"): loaders.shift_and_wrap_data_loaders,
    ("data_utils", "build_the_dataset"): loaders.build_the_dataset,
    ("data_utils", "build_train_valid_test_datasets"): group.grouped(
        loaders.build_train_valid_test_datasets
    ),
    ("data_utils", "build_weighted_datasets"): group.grouped(loaders.build_weighted_datasets),
}
BUFFER_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("data_utils", "get_normalized_weights_and_num_samples"): loaders.weights_and_num_samples,
}

_patches = Patches()


def install(
    exact: bool = False,
    *,
    variance_buffer: float | Literal["exact"] | None = None,
    separate_final_epoch: Literal["auto", "always", "never"] | None = None,
    final_epoch_threshold: float | None = None,
    balance: CostModel | None = None,
    skip: Skip | Sequence[Skip] | None = None,
    lock: str | os.PathLike[str] | Lock | None = None,
    amend: str | os.PathLike[str] | AmendedBlend | None = None,
) -> None:
    """Put megaindex under GPT-NeoX's ``megatron.data``; see `megaindex.adapters.neox`.

    A second call only changes the settings, for datasets that are made afterwards.

    Args:
        exact: make the changes listed in `megaindex.adapters.neox`. Implies variance_buffer
            ``"exact"``, unless another is given.
        variance_buffer: samples requested of each source, as a multiple of its share: a number from
            1; ``"exact"``: the samples that the blend draws of it. None: GPT-NeoX's 1.005 for
            sources of train_data_paths and 1 for data_path.
        separate_final_epoch: ``"always"`` or ``"never"`` shuffle the last of several epochs apart;
            ``"auto"`` does if few of its samples are requested. None: GPT-NeoX's never. The arrays
            of another setting have other names.
        final_epoch_threshold: fraction of an epoch below which ``"auto"`` shuffles it apart, 0.8 by
            default.
        balance: cost model by which each step's training samples, ``gradient_accumulation_steps``
            micro batches on every rank, are assigned to the ranks, so that they have equal work.
            For models that mask documents from each other; see docs/balance.md.
        skip: steps that are not trained on, and documents whose loss is masked, see docs/record.md.
            Steps are those of ``train_iters`` without skips, from 0; the run makes fewer iterations
            by those dropped. Documents are masked in their labels, so they need
            train_label_data_paths.
        lock: path of a run.lock of this run, or the lock, that the datasets must agree with: their
            .idx files, and on rank 0 the samples of three blocks of steps. They are compared when
            they are built, and others are refused. Its skips take the place of ``skip``.
        amend: the training data as the run began and the changes of its blend since, or the path of
            a YAML file with them; train_data_paths and train_data_weights are the blend of today.
            See docs/changing-runs.md.

    Raises:
        InvalidArgument: a setting is out of range, or GPT-NeoX's modules cannot be imported.
        FormatError, StorageError: the lock is damaged, or cannot be read.
    """
    if exact and variance_buffer is None:
        variance_buffer = "exact"
    policy = make_policy(
        "neox", variance_buffer, separate_final_epoch, final_epoch_threshold, balance, skip, lock,
        amend,
    )  # fmt: skip
    _restore()
    neox = framework()
    neox.exact, neox.policy = exact, policy
    for (module, cls), methods in METHODS.items():
        owner = getattr(getattr(neox, module), cls)
        for name, function in methods.items():
            neox.originals[module, cls, name] = getattr(owner, name, None)
            _patches.replace(owner, name, function)
    for (module, name), function in _functions(policy).items():
        if not hasattr(getattr(neox, module), name):
            continue
        original = getattr(getattr(neox, module), name)
        neox.originals[module, name] = original
        for place, alias in _places_of(original, getattr(neox, module), name):
            _patches.replace(place, alias, function)
    _patches.replace(neox.package, "helpers", megaindex.helpers)
    _patches.replace_module("megatron.data.helpers", megaindex.helpers)
    NEOX.begin("GPT-NeoX", f"{', exact' if exact else ''}{policy}")


def uninstall() -> None:
    """Undo `install`. Datasets that were made since then have to be made again."""
    _restore()
    NEOX.end()


def _restore() -> None:
    datasets.complete_all()
    _patches.undo()
    framework.cache_clear()


def _functions(policy: Policy) -> dict[tuple[str, str], Callable[..., Any]]:
    """Return the replaced functions; GPT-NeoX's own surplus stays where no buffer is given."""
    return FUNCTIONS if policy.variance_buffer is None else {**FUNCTIONS, **BUFFER_FUNCTIONS}


def _places_of(original: Any, home: ModuleType, name: str) -> list[tuple[ModuleType, str]]:
    """Return the modules and names under which a function was defined and imported."""
    if getattr(original, "__module__", None) != home.__name__:
        return [(home, name)]  # a function of the standard library, which other modules keep
    return [
        (module, alias)
        for module_name, module in list(sys.modules.items())
        if module_name.split(".")[0] in _GPT_NEOX and isinstance(module, ModuleType)
        for alias, value in list(vars(module).items())
        if value is original
    ]


_GPT_NEOX = ("megatron", "tools", "__main__")
