"""GPT-NeoX's sampler, and what of its data_utils decides how samples follow one another."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from megaindex.adapters.neox import blend
from megaindex.adapters.neox.framework import framework
from megaindex.errors import InvalidArgument
from megaindex.index.dialect import dialect
from megaindex.index.weights import request_weights
from megaindex.kernels import active


def iterate_batches(self: Any) -> Iterator[list[int]]:
    """``DistributedBatchSampler.__iter__``: begins at start_iter without counting up to it."""
    if not _is_plain(self):
        yield from framework().original("samplers", "DistributedBatchSampler", "__iter__")(self)
        return
    source = self.sampler.data_source
    size = self.batch_size
    first_id = getattr(self, "epoch", 0) * len(source) if _reshuffles(source) else 0
    for number in range(self.start_iter, len(source) // size):
        begin = first_id + number * size
        yield list(self._batch(range(begin, begin + size)))
        self.start_iter = 0


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
    """``itertools.cycle`` over a data loader, reading the batches again instead of keeping them.

    As there, what comes again is what came: after a resume, the batches from there on. Exactly, it
    is the whole epoch, and of training data in another order each time.
    """
    sampler = getattr(loader, "batch_sampler", None)
    start: int | None = getattr(sampler, "start_iter", None)
    return itertools.cycle(loader) if start is None else _again_and_again(loader, start)


def _again_and_again(loader: Any, start: int) -> Iterator[Any]:
    sampler, exact = loader.batch_sampler, framework().exact
    while True:
        sampler.start_iter = start
        served = 0
        for batch in loader:
            yield batch
            served += 1
        if served == 0:
            return
        if exact:
            start = 0
            sampler.epoch = getattr(sampler, "epoch", 0) + 1


def shift_and_wrap_data_loaders(neox_args: Any, data_loaders: Any, loop: bool = True) -> Any:
    """``data_utils.shift_and_wrap_data_loaders``; exactly, training goes on in its epoch.

    Raises:
        InvalidArgument: training or validation data make not one batch.
    """
    for name in ("train", "valid"):
        loader = data_loaders[name]
        if loader is not None and len(loader) == 0:
            raise InvalidArgument(
                f"{name}: its {len(loader.dataset)} samples make not one batch of "
                f"{loader.batch_sampler.batch_size}, all ranks together; give it more data, or ask "
                "for more iterations"
            )
    train = data_loaders["train"]
    if framework().exact and train is not None:
        micro_batches = neox_args.iteration * neox_args.gradient_accumulation_steps
        train.batch_sampler.epoch = micro_batches // len(train)
    original = framework().original("data_utils", "shift_and_wrap_data_loaders")
    return original(neox_args, data_loaders, loop)


def compile_helper() -> None:
    """``data_utils.compile_helper``: megaindex's helpers need no compiler when training starts."""


def exact_weights_and_num_samples(
    weights: Sequence[float], num_samples: int | None
) -> tuple[list[float], list[int | None]]:
    """``data_utils.get_normalized_weights_and_num_samples``, exactly: what the blend draws.

    In place of ⌈N·w·1.005⌉ samples, which a source of weight w may not be enough, or far more.
    """
    divided = request_weights(weights, dialect("neox"))
    if num_samples is None:
        return divided, [None] * len(divided)
    counts = np.zeros(len(divided), np.int64)
    active().blend_greedy(blend.normalized(divided), 0, num_samples, counts, None, None)
    return divided, [max(1, count) for count in counts.tolist()]
