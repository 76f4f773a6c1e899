"""The lock of ``install(lock=…)`` under GPT-NeoX.

GPT-NeoX's loader starts over where its data ends, and after a resume it repeats the rest of the
pass in which it was resumed. Under a lock it starts over where the lock does.
"""

from __future__ import annotations

from typing import Any

from megaindex.adapters.neox.framework import framework
from megaindex.adapters.neox.skips import is_training, samples_index
from megaindex.adapters.reports import NEOX, on_rank_0
from megaindex.adapters.skipped_dataset import SkippedDataset, whole_iterations
from megaindex.errors import InvalidArgument

STARTS = "megaindex_starts"
"""Attribute of a sampler: the first micro batch of each pass that is left."""


def check(dataset: Any, loader: Any, neox_args: Any, *, reshuffles: bool) -> None:
    """Compare the samples of all passes of a loader, and the steps of training, with the lock.

    Args:
        dataset: the loader's, without skips.
        loader: loader of training, validation or test data.
        neox_args: GPT-NeoX's arguments.
        reshuffles: whether a further pass has another order.

    Raises:
        InvalidArgument: its samples are not known, or a further pass has another order.
        FormatError: they differ.
    """
    lock = framework().policy.lock
    if lock is None:
        return
    index = samples_index(dataset)
    datasets = getattr(dataset, "datasets", [dataset])
    subset = datasets[0].name.partition("_")[0]
    if is_training(dataset):
        lock.check_steps(_iterations(neox_args, loader), lambda _: neox_args.train_batch_size)
        if reshuffles and len(lock.passes(subset)) > 1:
            raise InvalidArgument(
                f"{lock}: training reads its data in several passes, which exact=True serves in "
                "other orders; install without exact, or without lock"
            )
    is_skipped = isinstance(loader.dataset, SkippedDataset)  # which ends with the run
    limit = None if is_skipped else len(loader) * loader.batch_sampler.batch_size
    lock.check(subset, index, [each.megaindex.data_prefix for each in datasets], NEOX, limit=limit)


def check_placed(sampler: Any) -> None:
    """Refuse a resumed loader of several passes that `place` has not set.

    Raises:
        InvalidArgument: it would start over where GPT-NeoX does.
    """
    lock = framework().policy.lock
    if lock is None or not sampler.start_iter or hasattr(sampler, STARTS):
        return
    if is_training(sampler.sampler.data_source) and len(lock.passes("train")) > 1:
        raise InvalidArgument(
            f"{lock}: a resumed run of several passes needs "
            "data_utils.shift_and_wrap_data_loaders; wrap the loaders with it"
        )


def _iterations(neox_args: Any, train: Any) -> int:
    """Return the iterations of a run without skips, see ``training.update_iterations``."""
    epochs = getattr(neox_args, "train_epochs", None)
    if not epochs:
        return int(whole_iterations(neox_args))
    micro_batches = neox_args.train_batch_size // train.batch_sampler.batch_size
    return int(len(train) * epochs // micro_batches)


def place(neox_args: Any, data_loaders: Any) -> None:
    """Set the passes of the loaders of a run that begins, or goes on, after ``iteration``.

    Raises:
        InvalidArgument: no training data was compared with the lock.
        FormatError: the number of evaluated samples differs.
    """
    lock, train = framework().policy.lock, data_loaders["train"]
    if lock is None:
        return
    if train is None:
        if on_rank_0():
            raise InvalidArgument(
                f"{lock}: the run has no training data to compare; give it that of the lock, or "
                "install without lock"
            )
        return
    batch, interval = neox_args.train_batch_size, neox_args.eval_interval
    round_samples = neox_args.eval_iters * batch
    rounds = _iterations(neox_args, train) // interval + 1
    for subset, samples in (("valid", rounds * round_samples), ("test", round_samples)):
        if data_loaders[subset] is not None and samples:
            lock.check_samples(subset, samples)
    served = {
        "train": neox_args.iteration * batch,
        "valid": neox_args.iteration // interval * round_samples,
    }
    for subset, position in served.items():
        if data_loaders[subset] is not None and lock.has(subset):
            sampler = data_loaders[subset].batch_sampler
            starts = lock.starts(subset, position)
            setattr(sampler, STARTS, [start // sampler.batch_size for start in starts])
