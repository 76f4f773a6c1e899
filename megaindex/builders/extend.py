"""Extension of a run beyond its planned end, for one source or a blend.

run = extend_run("/data/web", sequence_length=2048, seed=1234, order="neox", num_samples=1_000_000,
                 more_epochs="0.5")
loader = Loader(run.index, sampler)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from megaindex.arithmetic import samples_for_epochs
from megaindex.builders.blend import build_blend, next_draws
from megaindex.builders.single import build_index, open_dataset
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.extended_index import ExtendedIndex, check_extension, extend_index
from megaindex.index.order_settings import Order, order_of
from megaindex.index.orders.packed import PackedIndex
from megaindex.index.spans import Index
from megaindex.validation import DEFAULT_SEED, check_epochs, check_setting

Corpus = str | os.PathLike[str] | IndexedDataset


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtendedRun:
    """Index of a run as it was planned, and its extension."""

    old: Index
    """Index of the run as it was planned."""
    index: ExtendedIndex | BlendedIndex
    """Index of the extended run; its first ``consumed_samples`` samples are those of ``old``."""
    consumed_samples: int
    served: tuple[int, ...]
    """Consumed samples of each source."""
    sources: tuple[Index, ...]
    """Index of each source, an `ExtendedIndex` if further samples of it are drawn."""
    datasets: tuple[IndexedDataset, ...]
    """Dataset of each source."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the extended run, its new ``train_samples``."""
        return self.index.num_samples

    @property
    def old_reaches(self) -> bool:
        """True if the old index has as many samples, including those drawn of each source."""
        if self.num_samples > self.old.num_samples:
            return False
        if not isinstance(self.old, BlendedIndex):
            return True
        indices = self.old.indices
        drawn = np.bincount(self.old.dataset_index[: self.num_samples], minlength=len(indices))
        built = [index.num_samples for index in indices]
        return bool((drawn <= built).all())


def extend_run(
    corpora: Corpus | Sequence[Corpus],
    *,
    sequence_length: int,
    seed: int = DEFAULT_SEED,
    order: str | Order = "megatron",
    num_samples: int | None = None,
    epochs: int | float | str | None = None,
    weights: Sequence[float] | None = None,
    variance_buffer: float | Literal["exact"] | None = None,
    consumed_samples: int | None = None,
    more_samples: int | None = None,
    more_epochs: int | float | str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> ExtendedRun:
    """Return the index of a run as it was planned and its extension.

    Consumed samples stay as they are. In one source the unserved samples of its index follow, those
    with the least-seen tokens first, then whole epochs. A blend continues to draw by its weights
    and extends each of its sources in this way.

    Args:
        corpora: a prefix or open dataset, or a list of them for a blend.
        sequence_length: input tokens per sample of the run.
        seed: seed of the run.
        order: order of the run, a name or an object; see `build_index`.
        num_samples: samples requested when the run was planned.
        epochs: epochs in place of ``num_samples``, for one source.
        weights: weights of the blend as it was planned, see `build_blend`.
        variance_buffer: that of the blend as it was planned, see `build_blend`.
        consumed_samples: samples served so far. Default: all planned.
        more_samples: samples to add.
        more_epochs: epochs in place of ``more_samples``, also as a fraction (``"0.5"``); for a
            blend, epochs of the tokens of all sources.
        cache_dir: cache directory of the old index, see `build_index`.
        settings: other arguments of `build_index` that the run was planned with.

    Returns:
        The extended run, whose ``index`` a loader reads.

    Raises:
        InvalidArgument: a number is out of range, or the order of a blend is epoch, window or
            packed; build a longer blend in that case, because it begins with the shorter one.
        FormatError, StorageError: see `build_index`.
    """
    order = order_of(order)
    common = {"sequence_length": sequence_length, "order": order, **settings}
    if isinstance(corpora, (str, os.PathLike, IndexedDataset)):
        if weights is not None or variance_buffer is not None:
            raise InvalidArgument(
                "weights and variance_buffer are settings of a blend; give its corpora as a list"
            )
        dataset = open_dataset(corpora, order)
        old: Any = build_index(
            dataset,
            seed=seed,
            num_samples=num_samples,
            epochs=epochs,
            cache_dir=cache_dir,
            **common,
        )
        consumed = _consumed(old, num_samples, epochs, consumed_samples)

        def further(seed: int) -> Any:
            if not order.row.is_framework:  # nothing that it stores depends on the seed
                return replace(old, seed=seed).extend(1)
            return build_index(dataset, seed=seed, epochs=1, **common)

        index = extend_index(
            old,
            consumed_samples=consumed,
            more_samples=_more(old, more_samples, more_epochs),
            seed=seed,
            further=further,
        )
        return ExtendedRun(
            old=old,
            index=index,
            consumed_samples=consumed,
            served=(consumed,),
            sources=(index,),
            datasets=(dataset,),
        )
    if epochs is not None:
        raise InvalidArgument("epochs cannot be given for a blend; give num_samples")
    if not order.row.is_framework:
        raise InvalidArgument(
            f"a blend of order {order} cannot be extended, because a longer one begins with the "
            "same samples; build it with build_blend and a larger num_samples"
        )
    old = build_blend(
        corpora, num_samples=num_samples, weights=weights, seed=seed, cache_dir=cache_dir,
        variance_buffer=variance_buffer, **common,
    )  # fmt: skip
    consumed = _consumed(old, num_samples, None, consumed_samples)
    more = _more(old, more_samples, more_epochs)
    return _extended_blend(old, weights, consumed, more, seed, common)


def _extended_blend(
    old: BlendedIndex,
    weights: Sequence[float] | None,
    consumed: int,
    more: int,
    seed: int,
    common: dict[str, Any],
) -> ExtendedRun:
    check_extension("the blend", old.num_samples, consumed, more)
    served = np.bincount(old.dataset_index[:consumed], minlength=len(old.indices))
    drawn, ordinals = next_draws(weights, common["order"].row, old.indices, consumed, more, served)
    wanted = np.bincount(drawn, minlength=len(old.indices))
    sources = []
    for source, dataset, begin, count in zip(
        old.indices, old.datasets, served.tolist(), wanted.tolist(), strict=True
    ):
        if count == 0:
            sources.append(source)
            continue
        if begin > source.num_samples:
            raise InvalidArgument(
                f"{dataset.path_prefix}: the run must have drawn at most {source.num_samples} "
                f"samples, the number built, got {begin}; the framework repeated some of them: "
                "extend from fewer consumed samples"
            )

        def further(seed: int, dataset: IndexedDataset = dataset) -> Index:
            return build_index(dataset, seed=seed, epochs=1, **common)

        sources.append(
            extend_index(
                source, consumed_samples=begin, more_samples=count, seed=seed, further=further
            )
        )
    index = BlendedIndex(
        indices=tuple(sources),
        dataset_index=np.concatenate((old.dataset_index[:consumed], drawn)),
        dataset_sample_index=np.concatenate((old.dataset_sample_index[:consumed], ordinals)),
        datasets=old.datasets,
    )
    return ExtendedRun(
        old=old,
        index=index,
        consumed_samples=consumed,
        served=tuple(served.tolist()),
        sources=tuple(sources),
        datasets=old.datasets,
    )


def _consumed(
    old: Index, num_samples: int | None, epochs: int | float | str | None, given: int | None
) -> int:
    if given is not None:
        return check_setting("consumed_samples", given)
    if num_samples is not None:
        return check_setting("num_samples", num_samples)
    if epochs is None:
        return old.num_samples
    count = check_epochs("epochs", epochs)
    if isinstance(old, PackedIndex):  # whose samples hold padding
        return min(int(count * old.samples_per_epoch), old.num_samples)
    planned = samples_for_epochs(
        count,
        old.tokens_per_epoch,
        old.sequence_length,
        old.add_extra_token,
    )
    return min(planned, old.num_samples)


def _more(old: Index, samples: int | None, epochs: int | float | str | None) -> int:
    if (samples is None) == (epochs is None):
        raise InvalidArgument("more_samples or more_epochs must be given; give one of them")
    if samples is not None:
        return check_setting("more_samples", samples)
    count = check_epochs("more_epochs", epochs)
    if isinstance(old, PackedIndex):
        return int(count * old.samples_per_epoch)
    return int(count * old.tokens_per_epoch // old.sequence_length)
