"""The table of GPT-NeoX's names that megaindex replaces; `install` and `uninstall`.

Included are its sampler and the functions of its data_utils that build datasets and loaders.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import megaindex.helpers
from megaindex.adapters.loader_rows import LoaderRows, check_install, rows_of
from megaindex.adapters.neox import arrays, blend, datasets, locks, skips
from megaindex.adapters.neox.datasets import BatchRows, check_exists
from megaindex.adapters.neox.framework import (
    MADE_WITH,
    framework,
    make_dataset,
    open_legacy_index,
    open_mapped,
    read_range,
    read_sequence,
)
from megaindex.adapters.policy import Patches, make_policy
from megaindex.adapters.reports import NEOX
from megaindex.adapters.skipped_dataset import SkippedDataset
from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel, check_sum
from megaindex.index.blended_index import fill_uncounted
from megaindex.index.skips import Skip
from megaindex.index.spans import Index
from megaindex.io.paths import as_storage_error
from megaindex.loader.sampler_state import RankLayout, Step
from megaindex.loader.samplers import assign_by_work
from megaindex.lock.lock_file import Lock
from megaindex.settings.amended import AmendedBlend
from megaindex.validation import check_flag, shown

if TYPE_CHECKING:
    import torch

    from megaindex.loader.torch_dataset import SlotSender

logger = logging.getLogger("megaindex")


def collate(samples: Sequence[Any]) -> Any:
    """Collate as PyTorch's default, without a copy of samples that were read together, or in a
    worker with a copy to shared memory that is reused."""
    import torch

    if isinstance(samples, BatchRows):
        if torch.utils.data.get_worker_info() is not None:
            return _sender().tensors(samples.whole)
        return {name: torch.from_numpy(values) for name, values in samples.whole.items()}
    return torch.utils.data.default_collate(list(samples))


@functools.cache
def _sender() -> SlotSender:
    """Return the slots of this worker."""
    from megaindex.loader.torch_dataset import SlotSender

    return SlotSender()


def make_data_loader(dataset: Any, neox_args: Any) -> Any:
    """``data_utils.make_data_loader``, with `collate`, and with the skips of `install`."""
    import torch

    if dataset is not None and not (hasattr(dataset, "megaindex") or hasattr(dataset, "datasets")):
        reason = "its class is not GPT2Dataset or BlendableDataset"
        NEOX.leave("dataset", type(dataset).__name__, reason)
    given = dataset
    if dataset is not None and framework().policy.skip and skips.is_training(dataset):
        dataset = skips.skipped(dataset, neox_args)
    loader = framework().original("data_utils", "make_data_loader")(dataset, neox_args)
    if loader is not None:
        sampler = loader.batch_sampler
        setattr(sampler, MADE_WITH, framework().settings)
        if framework().policy.lock is not None:
            _check_plain("lock", sampler)
        locks.check(given, loader, neox_args, reshuffles=_reshuffles(given))
    if getattr(loader, "collate_fn", None) is torch.utils.data.default_collate:
        loader.collate_fn = collate
    return loader


def iterate_batches(self: Any) -> Iterator[list[int]]:
    """``DistributedBatchSampler.__iter__``: starts at start_iter without earlier batches."""
    _check_made(self)
    locks.check_placed(self)
    if not _is_plain(self):
        reason = "its sampler is not sequential, or it wraps or keeps its last batch"
        NEOX.leave("sampling", type(self).__name__, reason)
        yield from framework().original("samplers", "DistributedBatchSampler", "__iter__")(self)
        return
    source = self.sampler.data_source
    size = self.batch_size
    steps: _BalancedMicroBatches | None = getattr(self, _BALANCE, None)
    if steps is not None:
        for batch in steps.micro_batches(self, len(source) // size):
            yield batch
            self.start_iter = 0
        return
    first_id = getattr(self, "epoch", 0) * len(source) if _reshuffles(source) else 0
    for number in range(self.start_iter, len(source) // size):
        begin = first_id + number * size
        yield list(self._batch(range(begin, begin + size)))
        self.start_iter = 0


_BALANCE = "megaindex_balance"


@dataclass(kw_only=True)
class _BalancedMicroBatches:
    """Samples of a training sampler, and its place within a step."""

    index: Index
    micro_batches_per_step: int
    phase: int = 0
    """Micro batches of the current step that were served; a step may reach into the next pass."""

    def micro_batches(self, sampler: Any, end: int) -> Iterator[list[int]]:
        """Yield this rank's micro batches from ``start_iter`` to ``end``, a pass over the data."""
        if getattr(sampler, "epoch", 0) and _reshuffles(sampler.sampler.data_source):
            raise InvalidArgument(_NEXT_ORDER)
        size, ranks = sampler.batch_size, sampler.world_size
        layout = RankLayout(
            micro_batch_size=size // ranks,
            data_parallel_rank=sampler.rank,
            data_parallel_size=ranks,
        )
        number = sampler.start_iter
        while number < end:
            count = min(self.micro_batches_per_step - self.phase, end - number)
            check_sum(count * size, self.index.sequence_length)
            step = Step(first=number * size, samples=count * size, rows=count * size)
            for batch in assign_by_work(step, layout, self.index, end * size):
                self.phase = (self.phase + 1) % self.micro_batches_per_step
                yield [position for position in batch if position is not None]
            number += count


_NEXT_ORDER = (
    "balance: training goes on into a second pass over its data, which exact=True serves in "
    "another order; request enough epochs or samples at once, or install without exact or balance"
)


def _balance_training(neox_args: Any, loader: Any) -> None:
    """Balance the sampler of training data if `install` was called with ``balance``.

    Raises:
        InvalidArgument: the lengths of its samples are not known, or it is not sequential.
    """
    balance = framework().policy.balance
    if balance is None or loader is None:
        return
    if not balance.attention:
        NEOX.leave_in_order()
        return
    sampler = loader.batch_sampler
    _check_plain("balance", sampler)
    accumulation = neox_args.gradient_accumulation_steps
    source = sampler.sampler.data_source
    iterations = getattr(neox_args, "train_iters", None) or 0
    if _reshuffles(source) and iterations * accumulation > len(loader):
        raise InvalidArgument(_NEXT_ORDER)
    steps = _BalancedMicroBatches(
        index=skips.samples_index(source), micro_batches_per_step=accumulation
    )
    setattr(sampler, _BALANCE, steps)
    NEOX.balance(len(source), sampler.world_size, balance)


def _check_plain(setting: str, sampler: Any) -> None:
    own = framework().samplers.DistributedBatchSampler
    if not isinstance(sampler, own) or not _is_plain(sampler):
        raise InvalidArgument(
            f"{setting} needs GPT-NeoX's DistributedBatchSampler over samples in order, got "
            f"{type(sampler).__name__}; use it, or install without {setting}"
        )


def _check_made(sampler: Any) -> None:
    """Refuse a loader on which settings of `install` had no effect.

    Raises:
        InvalidArgument: it was made before, or under other settings.
    """
    exact, policy = framework().settings
    made = getattr(sampler, MADE_WITH, None)
    acts_on_loaders = policy.lock is not None or policy.skip or policy.balance is not None
    if made != (exact, policy) and (made is not None or acts_on_loaders):
        raise InvalidArgument(
            "the data loader was made before install(), under other settings of it, or not by "
            "data_utils.make_data_loader; call install() once, before GPT-NeoX builds its loaders"
        )


def _is_plain(self: Any) -> bool:
    from torch.utils.data import SequentialSampler

    return (
        type(self.sampler) is SequentialSampler
        and self.drop_last
        and not self.wrap_last
        and self.wrap_around == 0
    )


def _reshuffles(source: Any) -> bool:
    if hasattr(source, "datasets"):
        return blend.reshuffles(source)
    return bool(getattr(getattr(source, "megaindex", None), "reshuffles", False))


def cycle(loader: Any) -> Iterator[Any]:
    """``itertools.cycle`` over a data loader that reads batches again instead of storing them.

    As in GPT-NeoX a resumed run repeats the batches since it was resumed. With ``exact`` it repeats
    the whole epoch, in another order each time for training data; under a lock, its passes.
    """
    sampler = getattr(loader, "batch_sampler", None)
    start: int | None = getattr(sampler, "start_iter", None)
    if start is None:
        reason = "itertools.cycle keeps its batches: its batch sampler has no start_iter"
        NEOX.leave("cycle", type(loader).__name__, reason)
    return itertools.cycle(loader) if start is None else _repeat(loader, start)


def _repeat(loader: Any, start: int) -> Iterator[Any]:
    sampler, exact = loader.batch_sampler, framework().exact
    as_neox = itertools.chain([start], itertools.repeat(0 if exact else start))
    for begin in getattr(sampler, locks.STARTS, as_neox):
        sampler.start_iter = begin
        served = 0
        for batch in loader:
            yield batch
            served += 1
        if served == 0:
            return
        if exact:
            sampler.epoch = getattr(sampler, "epoch", 0) + 1


def shift_and_wrap_data_loaders(neox_args: Any, data_loaders: Any, loop: bool = True) -> Any:
    """``data_utils.shift_and_wrap_data_loaders``; with ``exact`` training continues in its epoch.

    Raises:
        InvalidArgument: training or validation data are fewer than one batch, training cannot be
            balanced, or the loaders were made before `install` or under other settings.
        FormatError: the run differs from the lock.
    """
    for loader in data_loaders.values():
        if loader is not None:
            _check_made(loader.batch_sampler)
    for name in ("train", "valid"):
        loader = data_loaders[name]
        if loader is not None and len(loader) == 0:
            raise InvalidArgument(
                f"{name}: its {len(loader.dataset)} samples are fewer than one batch of "
                f"{loader.batch_sampler.batch_size} of all ranks together; give it more data, or "
                "request more iterations"
            )
    test = data_loaders["test"]
    if test is not None and len(test) == 0 and neox_args.eval_iters > 0:
        logger.warning(
            "test: its %d samples are fewer than one batch of %d of all ranks together: testing "
            "will end in StopIteration", len(test.dataset), test.batch_sampler.batch_size,
        )  # fmt: skip
    train = data_loaders["train"]
    if framework().exact and train is not None:
        micro_batches = neox_args.iteration * neox_args.gradient_accumulation_steps
        train.batch_sampler.epoch = micro_batches // len(train)
    skips.record_skips(neox_args, train)
    skips.lower_train_iters(neox_args)
    _balance_training(neox_args, train)
    locks.place(neox_args, data_loaders)
    if train is not None:
        NEOX.measure(train, lambda: int(neox_args.gradient_accumulation_steps))
        if framework().policy.keys:
            framework().rows = _follow_rows(neox_args, train)
    original = framework().original("data_utils", "shift_and_wrap_data_loaders")
    return original(neox_args, data_loaders, loop)


def _follow_rows(neox_args: Any, loader: Any) -> LoaderRows:
    """Return the rows of the training loader."""
    dataset, sampler = loader.dataset, loader.batch_sampler
    _check_plain("keys", sampler)
    is_skipped = isinstance(dataset, SkippedDataset)
    datasets = getattr(dataset, "datasets", [dataset])
    policy, size = framework().policy, sampler.batch_size

    def open_index() -> tuple[Index, list[Any]]:
        index = dataset.index if is_skipped else skips.samples_index(dataset)
        texts = [each.megaindex.text for each in datasets]
        return fill_uncounted(index, policy.row.uncounted_samples), texts

    return LoaderRows(
        loader,
        open_index,
        first_id=lambda: sampler.start_iter * size,
        first_position=neox_args.iteration * neox_args.gradient_accumulation_steps * size,
        rows_per_round=size,
        positions=dataset.positions_of if is_skipped else None,
        wide=policy.keys == "wide",
    )


def rows() -> dict[str, torch.Tensor]:
    """Return the rows of the micro batch that this process has taken last, under
    ``install(keys=True)``: the fields ``sample``, ``source``, ``exposure`` and ``key``, on the CPU.

    Raises:
        InvalidArgument: `install` has no keys, or this process has read no training data.
    """
    return rows_of(framework().rows)


def compile_helper() -> None:
    """``data_utils.compile_helper``: does nothing, since megaindex's helpers are compiled."""


def weights_and_num_samples(
    weights: Sequence[float], num_samples: int | None
) -> tuple[list[float], list[int | None]]:
    """``data_utils.get_normalized_weights_and_num_samples`` under a variance buffer.

    GPT-NeoX requests ⌈N·w·1.005⌉ samples of a source of weight w.
    """
    policy = framework().policy
    blend = policy.blend(weights, explicit=True)
    if num_samples is None:
        return blend.shares, [None] * len(weights)
    asked = blend.requests(num_samples)
    assert asked is not None, "counted exactly"
    return blend.shares, [max(1, count) for count in asked]


def build_the_dataset(*args: Any, **kwargs: Any) -> Any:
    """``data_utils.build_the_dataset``, which also checks that the named pairs exist.

    Reference values may be missing: GPT-NeoX continues without them.

    Raises:
        MissingFile: a pair of text, labels or rewards is missing.
    """
    original = framework().original("data_utils", "build_the_dataset")
    given = _signature(original).bind(*args, **kwargs).arguments if args else kwargs
    for name in ("data_prefix", "label_prefix", "reward_prefix"):
        path = given.get(name)
        if path is not None:
            _check_pair(path)
    return original(*args, **kwargs)


def build_train_valid_test_datasets(*args: Any, **kwargs: Any) -> Any:
    """``data_utils.build_train_valid_test_datasets``, with the surplus of `install`.

    Raises:
        MissingFile: the pair does not exist.
    """
    original = framework().original("data_utils", "build_train_valid_test_datasets")
    bound = _signature(original).bind(*args, **kwargs)
    blend.refuse_split(str(bound.arguments["data_prefix"]))
    _check_pair(bound.arguments["data_prefix"])
    name = "train_valid_test_num_samples"
    bound.arguments[name] = [framework().policy.enlarged(n) for n in bound.arguments[name]]
    return original(*bound.args, **bound.kwargs)


def build_weighted_datasets(*args: Any, **kwargs: Any) -> Any:
    """``data_utils.build_weighted_datasets``."""
    return framework().original("data_utils", "build_weighted_datasets")(*args, **kwargs)


_signature = functools.cache(inspect.signature)


def _check_pair(path: str) -> None:
    if not framework().indexed_dataset.IndexedDataset.exists(path):
        check_exists(path, None)


_OF_SAMPLES: dict[str, Callable[..., Any]] = {
    "__getattr__": datasets.get_deferred,
    "__getstate__": datasets.get_complete_state,
    "__len__": datasets.count_samples,
    "__getitem__": datasets.read_sample,
    "__getitems__": datasets.read_samples,
}
# replaced on the classes, for classes that were imported by name before, and for subclasses
METHODS: dict[tuple[str, str], dict[str, Callable[..., Any]]] = {
    ("gpt2_dataset", "GPT2Dataset"): {"__init__": datasets.init_gpt2, **_OF_SAMPLES},
    ("pairwise_dataset", "PairwiseDataset"): {"__init__": datasets.init_pairwise},
    ("blendable_dataset", "BlendableDataset"): {
        "__init__": blend.init_blend,
        "__getstate__": blend.get_blend_state,
        "__getitem__": blend.read_blend_sample,
        "__getitems__": blend.read_blend_samples,
    },
    ("indexed_dataset", "MMapIndexedDataset"): {
        "_do_init": open_mapped,
        "__getitem__": read_sequence,
        "get": read_range,
    },
    ("indexed_dataset", "IndexedDataset"): {
        "read_index": open_legacy_index,
        "__getitem__": read_sequence,
        "get": read_range,
    },
    ("indexed_dataset", "IndexedCachedDataset"): {"__getitem__": read_sequence},
    ("samplers", "DistributedBatchSampler"): {"__iter__": iterate_batches},
}
FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("indexed_dataset", "make_dataset"): make_dataset,
    ("data_utils", "compile_helper"): compile_helper,
    ("data_utils", "cycle"): cycle,
    ("data_utils", "make_data_loader"): make_data_loader,
    ("data_utils", "shift_and_wrap_data_loaders"): shift_and_wrap_data_loaders,
    ("data_utils", "build_the_dataset"): build_the_dataset,
    ("data_utils", "build_train_valid_test_datasets"): arrays.grouped(
        build_train_valid_test_datasets
    ),
    ("data_utils", "build_weighted_datasets"): arrays.grouped(build_weighted_datasets),
}
BUFFER_FUNCTIONS: dict[tuple[str, str], Callable[..., Any]] = {
    ("data_utils", "get_normalized_weights_and_num_samples"): weights_and_num_samples,
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
    cache_dir: str | os.PathLike[str] | None = None,
    keys: bool | Literal["wide"] = False,
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
            train_label_data_paths; to be removed, eod_mask_loss is enough, see docs/removal.md.
        lock: path of a run.lock of this run, or the lock, that the run must agree with: steps and
            batch sizes, the .idx files, and on rank 0 all samples. They are compared when datasets
            and loaders are made, and others are refused. Its skips take the place of ``skip``.
        amend: the training data as the run began and the changes of its blend since, or the path of
            a YAML file with them; train_data_paths and train_data_weights are the blend of today.
            See docs/changing-runs.md.
        cache_dir: folder for the arrays and the draws of blends, for corpora that are read-only;
            it is made if it is missing. None: beside each corpus, under GPT-NeoX's names.
        keys: True or ``"wide"``: `rows` has the fields that say what the rows of a micro batch are,
            see docs/rows.md. Not with ``exact`` or ``amend``.

    Raises:
        InvalidArgument: a setting is out of range, or GPT-NeoX's modules cannot be imported.
        FormatError, StorageError: the lock is damaged, or cannot be read.
    """
    exact = check_flag("exact", exact)
    check_install(keys, exact=exact, amend=amend)
    if cache_dir is not None:
        if not isinstance(cache_dir, (str, os.PathLike)) or not os.fspath(cache_dir):
            raise InvalidArgument(f"cache_dir must be the path of a folder, got {shown(cache_dir)}")
        cache_dir = os.path.abspath(os.fspath(cache_dir))
        with as_storage_error(cache_dir, "cannot be made"):
            os.makedirs(cache_dir, exist_ok=True)
    if exact and variance_buffer is None:
        variance_buffer = "exact"
    policy = make_policy(
        "neox", variance_buffer, separate_final_epoch, final_epoch_threshold, balance, skip, lock,
        amend, keys,
    )  # fmt: skip
    framework().check_workers((exact, policy))
    _restore()
    neox = framework()
    neox.exact, neox.policy, neox.cache_dir = exact, policy, cache_dir
    for (module, cls), methods in METHODS.items():
        owner = getattr(getattr(neox, module), cls)
        for name, function in methods.items():
            neox.originals[module, cls, name] = getattr(owner, name, None)
            _patches.replace(owner, name, function)
    # GPT-NeoX's own surplus stays where no buffer is given
    functions = FUNCTIONS | ({} if policy.variance_buffer is None else BUFFER_FUNCTIONS)
    ours = {}
    for (module, name), function in functions.items():
        home = getattr(neox, module)
        if hasattr(home, name):
            neox.originals[module, name] = original = getattr(home, name)
            if getattr(original, "__module__", None) == home.__name__:
                ours[id(original)] = function
            else:  # of the standard library, which other modules keep
                _patches.replace(home, name, function)
    elsewhere = _patches.replace_all(ours)
    _patches.replace(neox.package, "helpers", megaindex.helpers)
    _patches.replace_module("megatron.data.helpers", megaindex.helpers)
    NEOX.begin("GPT-NeoX", f"{', exact' if exact else ''}{policy}")
    NEOX.replace(name for name in elsewhere if name.split(".")[0] not in _GPT_NEOX)


def uninstall() -> None:
    """Undo `install`. Datasets that were made since then have to be made again."""
    _restore()
    NEOX.end()


def _restore() -> None:
    datasets.complete_all()
    _patches.undo()
    framework.cache_clear()


_GPT_NEOX = ("megatron", "tools")
