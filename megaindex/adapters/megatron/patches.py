"""The table of Megatron's names and methods that megaindex replaces; `install`, `uninstall`.

Methods are replaced on Megatron's own classes, so a class that was imported before, or that
inherits from one of them, has them too. BlendedMegatronDatasetBuilder builds all datasets of a
blend at once: one process per file system builds missing arrays (`megaindex.cache.claim`), so ranks
do not wait for rank 0 at a barrier, which would need a device.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, cast

import megaindex.helpers
from megaindex.adapters.loader_rows import check_install, rows_of
from megaindex.adapters.megatron import arrays, batches, blend, indexed_dataset, locks
from megaindex.adapters.megatron.arrays import (
    FINAL_EPOCH_ATTRIBUTES,
    DatasetFactory,
    DatasetRequest,
    LowLevelCorpus,
    defer_arrays,
    epochs_in,
    log_as_megatron,
    unchecked_cache_reason,
    unsupported_reason,
)
from megaindex.adapters.megatron.batches import samples_index, unbatched_reason
from megaindex.adapters.megatron.core import (
    HELPERS,
    METHODS,
    SIZES,
    STANDALONE,
    MegatronCore,
    as_attribute,
    class_of,
    core,
    is_built_here,
    load_class,
    rerun_iterator,
)
from megaindex.adapters.policy import Patches, after_import, make_policy
from megaindex.adapters.reports import MEGATRON, ServedDataset
from megaindex.cache.array_files import Sidecar
from megaindex.cache.array_group import Fetched, fetch_together, uncollected
from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel
from megaindex.index.frameworks import SPLITS
from megaindex.index.skips import Skip
from megaindex.lock.lock_file import Lock
from megaindex.settings.amended import AmendedBlend

if TYPE_CHECKING:
    import torch

_CLASS = "BlendedMegatronDatasetBuilder"


def build_megatron_datasets_parallel(
    self: Any, prefixes: Sequence[str], split: Sequence[Any], sizes_per_dataset: Sequence[Any]
) -> list[list[Any]]:
    """``BlendedMegatronDatasetBuilder._build_megatron_datasets_parallel``."""
    split = blend.kept_splits(self, split)
    if not is_built_here(self.is_built_on_rank) and coordinates(self.cls, self.config):
        return [[None] * len(prefixes) for _ in split]
    factories = _factories(self, prefixes, split)
    if factories is None:
        original = core().originals[_CLASS, "_build_megatron_datasets_parallel"]
        columns = cast("list[list[Any]]", original(self, prefixes, split, sizes_per_dataset))
    else:
        columns = _build(self, factories, prefixes, sizes_per_dataset)
    _check_enough(self, columns, split, sizes_per_dataset)
    return columns


def _build(
    self: Any,
    factories: Sequence[DatasetFactory | None],
    prefixes: Sequence[str],
    sizes_per_dataset: Sequence[Any],
) -> list[list[Any]]:
    """Return the datasets of each split; they open their files on first use."""
    started = time.perf_counter()
    with uncollected():
        made = _make(self, factories, prefixes, sizes_per_dataset)
        pairs = [pair for row in made for pair in row if pair is not None]
    fetched = _fetch_arrays(pairs, self.config.path_to_cache)
    what = "a blend" if len(prefixes) > 1 else prefixes[0]
    built, seconds = sum(one.was_built for one in fetched), time.perf_counter() - started
    summary = f"{len(fetched)} datasets of {what}, {built} of them built, in {seconds:.2f} s"
    MEGATRON.serve_each(_records([each for _, each in pairs], fetched), summary)
    log_as_megatron(_size_of(one.sidecar) for one in fetched)
    if pairs:
        kind, low_level = type(pairs[0][0]), type(pairs[0][0].dataset)
        reason = unbatched_reason(kind, low_level, self.config)
        if reason is not None:
            MEGATRON.leave("reading", kind.__name__, reason)
    return [
        [None if pair is None else pair[0] for pair in column] for column in zip(*made, strict=True)
    ]


def _records(requests: Sequence[DatasetRequest], fetched: Sequence[Fetched]) -> list[ServedDataset]:
    rows = []
    for request, one in zip(requests, fetched, strict=True):
        samples, epochs = _size_of(one.sidecar)
        files = str(request.files)
        _, kind, split = files.rsplit("-", 2)
        name, how = f"{request.name} ({split})", "built" if one.was_built else "opened"
        served = (MEGATRON.framework, kind, name, "megaindex", how, samples, epochs, None, files)
        rows.append(ServedDataset(*served))
    return rows


def _size_of(sidecar: Sidecar) -> tuple[int, int]:
    """Return the samples and epochs of arrays of a range of documents."""
    begin, end = sidecar.settings["documents"]
    samples, entries = (
        int(sidecar.arrays[name][1][0]) for name in ("shuffle_index", "document_index")
    )
    return samples, epochs_in(entries, end - begin)


def _check_enough(
    self: Any, columns: Sequence[Sequence[Any]], split: Sequence[Any], asked: Sequence[Any]
) -> None:
    """Check that a blend without weights is as long as requested under a variance buffer.

    Raises:
        InvalidArgument: one epoch of all sources holds fewer samples.
    """
    weighted = any(size is not None for sizes in asked for size in sizes)
    if core().policy.variance_buffer is None or weighted:
        return
    if core().policy.variance_buffer != "exact":
        MEGATRON.leave(
            "sizes", "a blend without weights",
            "one epoch of each source is built, and variance_buffer has no effect",
        )  # fmt: skip
        return
    for name, size, share, column in zip(
        core().builder.Split, self.sizes, split, columns, strict=True
    ):
        if share is None or size is None or any(dataset is None for dataset in column):
            continue
        total = sum(len(dataset) for dataset in column)
        if total < size:
            raise InvalidArgument(
                f"{name.name}: {size} samples are requested of sources without weights, whose one "
                f"epoch holds {total}; Megatron would serve only those. Give weights, or leave "
                "variance_buffer out"
            )


def _make(
    builder: Any,
    factories: Sequence[DatasetFactory | None],
    prefixes: Sequence[str],
    sizes: Sequence[Any],
) -> list[list[tuple[Any, DatasetRequest] | None]]:
    """Return, for each corpus and split, a dataset and the request for its arrays."""
    low_level, mmap = _patched("IndexedDataset"), builder.config.mmap_bin_files
    made = []
    for prefix, asked in zip(prefixes, sizes, strict=True):
        corpus = LowLevelCorpus(indexed_dataset.open_lazily(low_level, prefix, mmap))
        row = zip(factories, asked, strict=True)
        made.append([None if f is None else f.make(corpus, prefix, size) for f, size in row])
    return made


def _factories(
    self: Any, prefixes: Sequence[str], split: Sequence[Any]
) -> list[DatasetFactory | None] | None:
    """Return a factory of the datasets of each split; None where Megatron's own code makes them."""
    config = self.config
    plain = self.cls is _patched("GPTDataset")
    if not plain or not coordinates(self.cls, config):
        return None  # each dataset reports the reason
    if any(indexed_dataset.unsupported_reason({"path_prefix": prefix}) for prefix in prefixes):
        return None
    factories = [
        None if share is None else DatasetFactory(self.cls, config, name, share)
        for name, share in zip(core().builder.Split, split, strict=True)
    ]
    return factories if all(one is None or one.is_possible for one in factories) else None


def _fetch_arrays(
    pairs: Sequence[tuple[Any, DatasetRequest]], directory: str | None
) -> list[Fetched]:
    """Find or build the arrays of all datasets."""
    requests = [request for _, request in pairs]
    if directory is None:  # every corpus has its own
        fetched = [request.fetch() for request in requests]
    else:
        names = "".join(str(request.files) for request in requests)
        key = f"{hashlib.md5(names.encode(), usedforsecurity=False).hexdigest()}-megaindex-blend"
        fetched = fetch_together(requests, directory, key)
    with uncollected():
        for (dataset, request), one in zip(pairs, fetched, strict=True):
            defer_arrays(dataset, request, one.sidecar)
    return fetched


def build_megatron_dataset_splits(
    self: Any, dataset_path: str | None, split: Any, sizes: Any, synchronize_ranks: bool = True
) -> list[Any]:
    """``BlendedMegatronDatasetBuilder._build_megatron_dataset_splits``, without its barriers."""
    original = core().originals[_CLASS, "_build_megatron_dataset_splits"]
    split = blend.kept_splits(self, split)
    if synchronize_ranks and dataset_path is not None:  # a path in no blend: those have theirs
        sizes = [core().policy.enlarged(size) for size in sizes]
    factories = None if dataset_path is None else _factories(self, [dataset_path], split)
    if factories is not None and dataset_path is not None and is_built_here(self.is_built_on_rank):
        datasets = [column[0] for column in _build(self, factories, [dataset_path], [sizes])]
        for dataset in datasets:
            if dataset is not None:  # opening one corpus takes less than deferring it
                _ = dataset.shuffle_index, dataset.dataset.index
        return datasets
    wait = synchronize_ranks and not coordinates(self.cls, self.config)
    return cast("list[Any]", original(self, dataset_path, split, sizes, wait))


def build_generic_dataset(
    cls: Any, is_built_on_rank: Any, synchronize_ranks: bool, *args: Any
) -> Any:
    """``BlendedMegatronDatasetBuilder.build_generic_dataset``: a static method."""
    if args and isinstance(args[0], list) and args[0][:1] == [None]:
        return None  # of a split that an amended run builds apart
    if cls is core().blended_dataset.BlendedDataset:
        cls = _patched("BlendedDataset")
    if coordinates(cls, args[-1] if args else None):
        return cls(*args) if is_built_here(is_built_on_rank) else None
    _report_unserved(cls, args)
    original = core().originals[_CLASS, "build_generic_dataset"]
    return original(cls, is_built_on_rank, synchronize_ranks, *args)


def _patched(name: str) -> Any:
    """Return Megatron's class where it has megaindex's methods, else the subclass with them."""
    theirs = class_of(name)
    is_patched = all(vars(theirs).get(method) is ours for method, ours in METHODS[name].items())
    return theirs if is_patched else load_class(name)


def coordinates(cls: Any, config: Any) -> bool:
    """Return True if datasets of this class are built under a claim, without barriers."""
    if not isinstance(cls, type):
        return False
    build = getattr(cls, "_build_document_sample_shuffle_indices", None)
    if build is arrays.build_document_sample_shuffle_indices:
        return unsupported_reason(cls, config) is None
    is_blend = getattr(cls, "_build_indices", None) is blend.build_indices
    return is_blend and build is None and unchecked_cache_reason(config) is None


def _report_unserved(cls: Any, args: Sequence[Any]) -> None:
    """Report a class that builds its arrays itself."""
    owns = not isinstance(cls, type) or not (
        getattr(cls, "_build_indices", None) is blend.build_indices
        or getattr(cls, "_build_document_sample_shuffle_indices", None)
        is arrays.build_document_sample_shuffle_indices
    )
    if owns:
        split = next((f" ({a.name})" for a in args if isinstance(a, core().builder.Split)), "")
        name = f"{next((a for a in args if isinstance(a, str)), '')}{split}"
        reason = "it builds and reads its arrays itself; the .idx and .bin it opens are megaindex's"
        MEGATRON.leave(getattr(cls, "__name__", str(cls)), name, reason)


def build_datasets(self: Any) -> Any:
    """``BlendedMegatronDatasetBuilder.build``, with the changes or the lock of `install`."""
    original = core().originals[_CLASS, "build"]
    amended = core().policy.amend
    if amended is not None:
        return blend.build(self, original, amended)
    lock = core().policy.lock
    if lock is not None and getattr(self.config, "mock", False):
        raise InvalidArgument(
            "lock: mock data has no files, and no lock is of it; give the data, or leave lock out"
        )
    made = original(self)
    if lock is None:
        return made
    locks.check_batches(is_built=True)
    here = is_built_here(self.is_built_on_rank)
    for name, dataset, size in zip(SPLITS, made, self.sizes, strict=True):
        if isinstance(dataset, list):  # several validation sets, which no lock has
            MEGATRON.leave("lock", name, "several sets are not compared with a lock")
        elif dataset is not None:
            lock.check_samples(name, size)
            datasets = getattr(dataset, "datasets", [dataset])
            prefixes = [each.dataset.path_prefix for each in datasets]
            lock.check(name, samples_index(dataset), prefixes, MEGATRON)
        elif here and lock.has(name):
            if name == "train":
                raise InvalidArgument("lock: the run builds no training data; give the lock's")
            MEGATRON.leave("lock", name, "the lock has it, and the run builds none")
    return made


SAMPLER_MODULES = ("megatron.training.datasets.data_samplers", "megatron.legacy.data.data_samplers")


def iterate_single(self: Any) -> Iterator[list[int]]:
    """``MegatronPretrainingSampler.__iter__``: this rank's part of each round of micro batches."""
    stride = self.micro_batch_times_data_parallel_size
    begin, end = self.get_start_end_idx()
    whole = (self.total_samples - self.consumed_samples) // stride
    first = self.consumed_samples
    if (steps := batches.balanced_steps(self)) is not None:
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
            "__getattr__": arrays.get_deferred_array,
            "__getstate__": arrays.get_complete_state,
            "__len__": arrays.count_samples,
            "__getitem__": batches.read_gpt_sample,
            "__getitems__": batches.read_gpt_samples,
        },
        "BlendedDataset": {
            "_build_indices": blend.build_indices,
            "__getitems__": batches.read_blend_samples,
        },
        "BlendedMegatronDatasetBuilder": {
            "build": build_datasets,
            "_build_megatron_datasets_parallel": build_megatron_datasets_parallel,
            "_build_megatron_dataset_splits": build_megatron_dataset_splits,
            "build_generic_dataset": build_generic_dataset,
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

WRAPPERS = (
    ("megatron.training.training", "build_train_valid_test_data_loaders",
     batches.build_data_loaders),
    ("megatron.training.checkpointing", "check_checkpoint_args", batches.check_checkpoint_args),
    ("megatron.bridge.data.samplers", "build_pretraining_data_loader", batches.measured),
    ("megatron.core.utils", "get_batch_on_this_cp_rank", batches.divide_documents),
)  # fmt: skip
"""Modules and functions of Megatron that are wrapped, and the wrappers."""

_patches = Patches()
_policy_patches = Patches()
_elsewhere: list[str] = []
"""Replaced names outside Megatron's modules."""
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
    keys: bool | Literal["wide"] = False,
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
        lock: path of a run.lock of this run, or the lock, that the run must agree with: steps and
            batch sizes, the .idx files, and on rank 0 all samples. They are compared when datasets
            and loaders are made, and others are refused. Its skips take the place of ``skip``.
        amend: the training data as the run began and the changes of its blend since, or the path of
            a YAML file with them; ``--data-path`` is the blend of today. See
            docs/changing-runs.md.
        keys: True or ``"wide"``: `rows` has the fields that say what the rows of a micro batch are,
            see docs/rows.md. The loader must be ``single``.

    Raises:
        InvalidArgument: a setting is out of range; megatron-core cannot be imported, or its release
            is not supported.
        FormatError, StorageError: the lock is damaged, or cannot be read.
    """
    check_install(keys, exact=False, amend=amend)
    policy = make_policy(
        "megatron",
        variance_buffer,
        separate_final_epoch,
        final_epoch_threshold,
        balance,
        skip,
        lock,
        amend,
        keys,
    )
    _install_classes()
    _policy_patches.undo()
    core().policy, core().rows = policy, None
    if keys:
        reruns = rerun_iterator()
        if reruns is not None:
            _policy_patches.replace(reruns, "__next__", batches.read_again(reruns.__next__))
            load = batches.forget_returned(reruns.load_state_dict)
            _policy_patches.replace(reruns, "load_state_dict", load)
    if policy.variance_buffer is not None:
        _policy_patches.replace(core().builder, SIZES, blend.sizes_per_dataset)
    if policy.final_epoch:
        gpt = core().gpt_dataset
        threshold = policy.final_epoch.get("final_epoch_threshold")
        values = (policy.row.separate_final_epoch, threshold)
        for key, value in zip(FINAL_EPOCH_ATTRIBUTES, values, strict=True):
            _policy_patches.replace(gpt.GPTDatasetConfig, key, value)
        named = partial(_key_attributes, gpt.GPTDataset._key_config_attributes)
        _policy_patches.replace(gpt.GPTDataset, "_key_config_attributes", staticmethod(named))
    MEGATRON.begin(f"megatron-core {core().version}", str(policy))
    MEGATRON.replace(_elsewhere)


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
    for module, name, wrap in WRAPPERS:
        _pending_imports.append(after_import(module, partial(_wrap, name, wrap)))


def uninstall() -> None:
    """Undo `install`; datasets made since then keep working unless their files were removed."""
    try:
        indexed_dataset.open_deferred()
        arrays.load_deferred_arrays()
    finally:
        while _pending_imports:
            _pending_imports.pop()()
        _policy_patches.undo()
        _patches.undo()
        _elsewhere.clear()
        if core.cache_info().currsize:
            core().policy, core().loaded, core().rows = make_policy("megatron"), None, None
        MEGATRON.end()


def rows() -> dict[str, torch.Tensor]:
    """Return the rows of the micro batch that this process has taken last, under
    ``install(keys=True)``: the fields ``sample``, ``source``, ``exposure`` and ``key``, on the CPU.

    Raises:
        InvalidArgument: `install` has no keys, or this process has read no training data.
    """
    return rows_of(core().rows)


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
    _wrap(batches.LOADER, batches.build_data_loader, module)


def _wrap(name: str, wrap: Callable[[Any], Any], module: ModuleType) -> None:
    """Replace a function of a module, there and where it was imported by name."""
    original = getattr(module, name, None)
    if original is None:
        return
    found = _patches.replace_all({id(original): wrap(original)})
    outside = [each for each in found if not each.startswith("megatron.")]
    _elsewhere.extend(outside)
    if MEGATRON.active is not None:
        MEGATRON.replace(outside)
