"""Extension of a run beyond its planned end, and changes of its blend before that.

run = extend_run("/data/web", sequence_length=2048, seed=1234, order="neox", num_samples=1_000_000,
                 more_epochs="0.5")
run = amend_run(["/data/web", "/data/code"], weights=[0.8, 0.2], sequence_length=2048,
                num_samples=1_000_000, changes=[BlendChange(consumed_samples=400_000,
                weights={"/data/web": 0.5, "/data/code": 0.2, "/data/math": 0.3})])
loader = Loader(run.index, sampler)
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from megaindex.arithmetic import samples_for_epochs
from megaindex.builders.blend import build_blend, next_draws
from megaindex.builders.cached import build_index
from megaindex.builders.single import open_dataset
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.blend import divisor_weights
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.counts import source_counts
from megaindex.index.extension import check_extension, extend_index
from megaindex.index.mixing import Stratified
from megaindex.index.order_settings import Order, order_of
from megaindex.index.orders.packed import PackedIndex
from megaindex.index.spans import Index
from megaindex.index.staged_index import MixedStage, StagedIndex
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.io.paths import absolute
from megaindex.settings.amended import BlendChange
from megaindex.validation import DEFAULT_SEED, check_epochs, check_setting

Corpus = str | os.PathLike[str] | IndexedDataset


@dataclass(frozen=True, kw_only=True, eq=False)
class ExtendedRun:
    """Index of a run as it was planned, and its extension."""

    old: Index
    """Index of the run as it was planned."""
    index: StretchedIndex | BlendedIndex
    """Index of the extended run; its first ``consumed_samples`` samples are those of ``old``."""
    consumed_samples: int
    served: tuple[int, ...]
    """Consumed samples of each source."""
    sources: tuple[Index, ...]
    """Index of each source, a `StretchedIndex` if further samples of it are drawn."""
    datasets: tuple[IndexedDataset, ...]
    """Dataset of each source."""
    stages: tuple[MixedStage, ...] = ()
    """Draws after each change of an amended run."""

    @property
    def num_samples(self) -> int:
        """Number of samples of the extended run, its new ``train_samples``."""
        return self.index.num_samples

    @property
    def built(self) -> list[int]:
        """Samples that the index of each source of the run as planned has."""
        indices = self.old.indices if isinstance(self.old, BlendedIndex) else (self.old,)
        return [index.num_samples for index in indices]

    @property
    def reads(self) -> list[tuple[int, int]]:
        """Samples of each source that are read after a change, as (begin, end)."""
        return reads_of(self.stages, self.served, len(self.sources))

    @property
    def old_reaches(self) -> bool:
        """True if the old index has as many samples, including those drawn of each source."""
        if self.num_samples > self.old.num_samples:
            return False
        return bool((source_counts(self.old, 0, self.num_samples) <= self.built).all())


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
            return _one_epoch(dataset, common, seed)

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


def _one_epoch(dataset: IndexedDataset, common: dict[str, Any], seed: int) -> Index:
    """Return a further epoch of a source, with a seed of its own."""
    return build_index(dataset, seed=seed, epochs=1, **common)


def _extended_blend(
    old: BlendedIndex,
    weights: Sequence[float] | None,
    consumed: int,
    more: int,
    seed: int,
    common: dict[str, Any],
) -> ExtendedRun:
    check_extension("the blend", old.num_samples, consumed, more)
    served = source_counts(old, 0, consumed)
    drawn, ordinals = next_draws(weights, common["order"].row, old.indices, consumed, more, served)
    wanted = np.bincount(drawn, minlength=len(old.indices))
    sources = []
    for source, dataset, begin, count in zip(
        old.indices, old.datasets, served.tolist(), wanted.tolist(), strict=True
    ):
        if count == 0:
            sources.append(source)
            continue
        check_built(dataset.path_prefix, source, begin)
        further = partial(_one_epoch, dataset, common)
        sources.append(
            extend_index(
                source, consumed_samples=begin, more_samples=count, seed=seed, further=further
            )
        )
    # without weights, Megatron's blend of whole epochs goes on by another rule than it began
    goes_on = weights is not None or common["order"].row.request != "megatron"
    index = BlendedIndex(
        indices=tuple(sources),
        dataset_index=np.concatenate((old.dataset_index[:consumed], drawn)),
        dataset_sample_index=np.concatenate((old.dataset_sample_index[:consumed], ordinals)),
        datasets=old.datasets,
        rule=old.rule if goes_on else None,
        weights=old.weights if goes_on else None,
    )
    return ExtendedRun(
        old=old,
        index=index,
        consumed_samples=consumed,
        served=tuple(served.tolist()),
        sources=tuple(sources),
        datasets=old.datasets,
    )


def amend_run(
    corpora: Corpus | Sequence[Corpus],
    *,
    changes: Sequence[BlendChange],
    sequence_length: int,
    num_samples: int | None,
    seed: int = DEFAULT_SEED,
    order: str | Order = "megatron",
    weights: Sequence[float] | None = None,
    variance_buffer: float | Literal["exact"] | None = None,
    more_samples: int | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> ExtendedRun:
    """Return the index of a run in a framework's order whose blend changes on the way.

    Samples before the first change are those of the framework. After it, sources are drawn evenly
    by the weights of the change, each from where it was left: first the samples of its index that
    were not served, those with the least-seen tokens before others, then whole epochs with seeds
    of their own. So nothing is repeated before its epoch ends, and a later change keeps what came
    before it.

    Args:
        corpora: the sources of the run as it was planned; one of them for a run without a blend.
        changes: the changes, in order.
        sequence_length: input tokens per sample of the run.
        num_samples: samples requested when the run was planned, see `build_blend`.
        seed: seed of the run.
        order: order of the run, one of a framework.
        weights: weights as the run was planned.
        variance_buffer: that of the run as it was planned.
        more_samples: samples after the last change. Default: up to ``num_samples``.
        cache_dir: cache directory of the framework's index, see `build_index`.
        settings: other arguments of `build_index` that the run was planned with; new sources are
            split in the same way.

    Returns:
        The amended run, whose ``index`` a loader reads. Its sources are those of the run, then new
        ones in the order of the changes.

    Raises:
        InvalidArgument: the changes are not in order or lie beyond the run, or the order is epoch,
            window or packed: change a recipe with `megaindex.recipe.amend`.
        FormatError, StorageError: see `build_index`.
    """
    order = order_of(order)
    if not order.row.is_framework:
        raise InvalidArgument(
            f"amend_run changes runs in the order of a framework, got order {order}; write a "
            "recipe and change it with megaindex.recipe.amend"
        )
    common = {"sequence_length": sequence_length, "order": order, **settings}
    given = [corpora] if isinstance(corpora, (str, os.PathLike, IndexedDataset)) else list(corpora)
    blended = len(given) > 1 or weights is not None
    old: Any
    if blended:
        old = build_blend(
            given, num_samples=num_samples, weights=weights, seed=seed, cache_dir=cache_dir,
            variance_buffer=variance_buffer, **common,
        )  # fmt: skip
    else:
        dataset = open_dataset(given[0], order)
        old = build_index(
            dataset, seed=seed, num_samples=num_samples, cache_dir=cache_dir, **common
        )
    planned = old.num_samples if num_samples is None else min(num_samples, old.num_samples)
    end = end_of_changes(changes, old.num_samples, planned, more_samples)
    first = changes[0].consumed_samples
    indices = old.indices if blended else (old,)
    datasets = list(old.datasets)
    served = source_counts(old, 0, first).tolist()
    names = [dataset.path_prefix for dataset in datasets]
    stages = draw_changes(changes, names, served, end)
    datasets += [open_dataset(path, order) for path in names[len(datasets) :]]
    sources = []
    for number, (begin, stop) in enumerate(reads_of(stages, served, len(names))):
        further = partial(_one_epoch, datasets[number], common)
        source = indices[number] if number < len(indices) else further(seed)
        if stop > begin:
            source = read_on(names[number], source, begin, stop - begin, seed, further)
        sources.append(source)
    index = StretchedIndex(
        stretches=(
            Stretch(index=old, samples=range(first)),
            Stretch(
                index=StagedIndex(sources=tuple(sources), stages=stages),
                samples=range(end - first),
            ),
        )
    )
    return ExtendedRun(
        old=old,
        index=index,
        consumed_samples=first,
        served=(*served, *[0] * (len(names) - len(served))),
        sources=tuple(sources),
        datasets=tuple(datasets),
        stages=stages,
    )


def end_of_changes(
    changes: Sequence[BlendChange], num_samples: int, planned: int, more_samples: int | None
) -> int:
    """Return the end of a run with changes, at ``planned`` or ``more_samples`` after the last;
    InvalidArgument unless the changes are in order and lie in the run."""
    if not changes:
        raise InvalidArgument("changes is empty; give at least one BlendChange")
    positions = [change.consumed_samples for change in changes]
    for before, after in pairwise(positions):
        if after <= before:
            raise InvalidArgument(
                f"the change at sample {after} follows the one at sample {before}; give changes in "
                "the order of their samples, one for each position"
            )
    if positions[0] > num_samples:
        raise InvalidArgument(
            f"the first change is at sample {positions[0]}, beyond the {num_samples} samples of "
            "the run as it was planned; give the num_samples of that run"
        )
    end = planned
    if more_samples is not None:
        end = positions[-1] + check_setting("more_samples", more_samples)
    if positions[-1] >= end:
        raise InvalidArgument(
            f"the change at sample {positions[-1]} lies at or beyond the end of the run, sample "
            f"{end}; give more_samples, the samples after it"
        )
    return end


def draw_changes(
    changes: Sequence[BlendChange], names: list[str], served: Sequence[int], end: int
) -> tuple[MixedStage, ...]:
    """Return the draws after each change, and append new sources to ``names``.

    Args:
        changes: the changes, in order.
        names: path prefix of each source before the first change.
        served: samples served of each of these before the first change.
        end: end of the run.

    Raises:
        InvalidArgument: a change names a source that the run has twice.
    """
    cursors, known = list(served), [absolute(name) for name in names]
    ends = [change.consumed_samples for change in changes[1:]] + [end]
    stages = []
    for change, stop in zip(changes, ends, strict=True):
        numbers = []
        for path in map(os.fspath, change.weights):
            name = absolute(path)
            if known.count(name) > 1:
                raise InvalidArgument(
                    f"{path} is listed twice in the blend of the run, so that the change at sample "
                    f"{change.consumed_samples} does not say which of them it means; list it under "
                    "another path, such as a link"
                )
            if name not in known:
                names.append(path)
                known.append(name)
                cursors.append(0)
            numbers.append(known.index(name))
        shares = divisor_weights(list(change.weights.values()))
        mixing = Stratified(shares=tuple(shares))
        stage = MixedStage(
            mixing=mixing,
            sources=tuple(numbers),
            begins=tuple(cursors[number] for number in numbers),
            num_samples=stop - change.consumed_samples,
        )
        stages.append(stage)
        for number, first, last in stage.reads():
            cursors[number] += last - first
    return tuple(stages)


def reads_of(
    stages: Sequence[MixedStage], served: Sequence[int], num_sources: int
) -> list[tuple[int, int]]:
    """Return the samples of each source that the stages read, as (begin, end)."""
    begins = [*served, *[0] * (num_sources - len(served))]
    ends = begins.copy()
    for stage in stages:
        for source, begin, end in stage.reads():
            ends[source] += end - begin
    return list(zip(begins, ends, strict=True))


def check_built(name: str, source: Index, served: int) -> None:
    """Raise InvalidArgument if more samples were served of a source than were built."""
    if served > source.num_samples:
        raise InvalidArgument(
            f"{name}: the run must have drawn at most {source.num_samples} samples, the number "
            f"built, got {served}; the framework repeated some of them: continue from fewer "
            "consumed samples"
        )


def read_on(
    name: str,
    source: Index,
    begin: int,
    count: int,
    seed: int,
    further: Callable[[int], Index],
) -> Index:
    """Return the index of a source from which ``count`` samples are read after ``begin``."""
    check_built(name, source, begin)
    if source.num_epochs == 1 and begin + count <= source.num_samples:
        return source  # its samples share no token, so that their order stays
    return extend_index(
        source, consumed_samples=begin, more_samples=count, seed=seed, further=further
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
