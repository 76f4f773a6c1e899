"""From several corpora and their weights to one index, of the samples the framework draws."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import numpy as np

from megaindex.build.single import build_index
from megaindex.build.snapshot import open_sources
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.arithmetic import samples_in
from megaindex.index.blended import MOST_SOURCES, BlendedIndex
from megaindex.index.dialect import Dialect
from megaindex.index.draws import DivisorDraws, GreedyDraws, Rule, exact_values, fill_blend
from megaindex.index.order_settings import Order, order_of
from megaindex.index.orders.shuffled import Memory, Sink
from megaindex.index.plain import (
    DEFAULT_SEED,
    check_buffer,
    check_setting,
    check_weights,
    setting_or_none,
)
from megaindex.index.spans import Index
from megaindex.index.weights import blend_weights, divisor_weights, request_weights
from megaindex.kernels.types import I64, IntArray
from megaindex.store.cache import fetch

_BY_SIZE = ("megatron", "exact")  # how sources without weights are blended there


def build_blend(
    corpora: Sequence[str | os.PathLike[str] | IndexedDataset],
    *,
    num_samples: int | None,
    weights: Sequence[float] | None = None,
    order: str | Order = "megatron",
    variance_buffer: float | Literal["exact"] | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    **settings: Any,
) -> BlendedIndex:
    """The index of a blend: source by source what `build_index` gives, and which comes when.

    Sources are asked for as many samples, and the blend made as long, as the framework of ``order``
    does: see docs/compatibility.md. For order megatron the samples are those of
    ``BlendedMegatronDatasetBuilder``.

    Args:
        corpora: prefixes of ``.bin``/``.idx`` pairs, or open datasets.
        num_samples: samples asked of the blend. None: all of one epoch of each source, without
            weights and in order megatron only.
        weights: of the sources, positive. None: by their samples in orders megatron (of one epoch,
            which is all it then builds), epoch and window; evenly in the others.
        order: of every source; for the orders epoch and window sources are blended by the divisor
            rule, for the others by the frameworks' greedy one.
        variance_buffer: surplus asked of each source in a framework order, a number from 1; 1 is
            none. ``"exact"``: each source is asked for what the blend draws of it, sources without
            weights too. Default: the framework's own.
        cache_dir: where to keep the arrays, as in `build_index`. A blend that was built there
            before opens at once, and each of its sources when a batch first reads it; ``datasets``
            of the index holds them, for the loader.
        settings: sequence_length, seed, split and what else `build_index` takes for each source.

    Raises:
        InvalidArgument: the weights do not fit the corpora; or a source runs short before the blend
            ends, where Megatron fails too.
        FormatError, StorageError: as `build_index`.
    """
    order = order_of(order)
    row = order.row
    _check_corpora(corpora)
    num_samples = setting_or_none("num_samples", num_samples)
    if weights is not None:
        weights = _plain_weights(weights, len(corpora))
    if num_samples is None and (weights is not None or row.request != "megatron"):
        raise InvalidArgument(
            "num_samples is needed: only order megatron without weights serves all there is"
        )
    buffer = _buffer(variance_buffer, row)
    exact = buffer == "exact"
    given = [c if isinstance(c, IndexedDataset) else os.fspath(c) for c in corpora]
    settings.setdefault("seed", DEFAULT_SEED)
    for name in {"sequence_length", "seed", "add_extra_token"} & settings.keys():
        settings[name] = check_setting(name, settings[name])  # for the name of the snapshot, too
    open_for = partial(
        open_sources,
        given,
        settings={**settings, **order.changed_settings, "order": order.name},
        build=partial(_build, {**settings, "order": order}, cache_dir),
        cache_dir=cache_dir,
        dialect=row.file_dialect,
    )
    if weights is None and row.request in _BY_SIZE:
        sources = open_for([None] * len(given))
        by_size = [index.num_samples for index in sources.indices]
    if weights is None and row.request == "megatron" and not (exact and num_samples):
        draws, size = _unweighted(by_size, row, num_samples)
    else:
        assert num_samples is not None, "checked"
        by_weight = weights is not None or row.request != "megatron"
        if weights is None:
            weights = by_size if row.request in _BY_SIZE else [1.0] * len(corpora)
        draws = _weighted(weights, row, explicit=by_weight)
        if isinstance(buffer, str):
            asked = draws.counts(num_samples)
        else:
            asked = _asked(weights, row, num_samples, buffer)
        sources = open_for([max(1, count) for count in asked])
        size = _size(weights, row, num_samples, asked, sources.indices, exact=exact)
    arrays = draws.arrays(size, cache_dir)
    if row.blend_size != "built":  # the others' blends run short where theirs do: when it is read
        _check_drawn(arrays["dataset_index"], sources.indices)
    return BlendedIndex(
        indices=sources.indices,
        datasets=sources.datasets,
        dataset_index=arrays["dataset_index"],
        dataset_sample_index=arrays["dataset_sample_index"],
    )


def _build(
    settings: Mapping[str, Any],
    cache_dir: str | os.PathLike[str] | None,
    dataset: IndexedDataset,
    num_samples: int | None,
) -> Index:
    return build_index(dataset, num_samples=num_samples, cache_dir=cache_dir, **settings)


def _check_corpora(corpora: Sequence[Any]) -> None:
    if isinstance(corpora, (str, os.PathLike, IndexedDataset)) or not len(corpora):
        raise InvalidArgument("corpora must be a list of at least one prefix or dataset")
    if len(corpora) > MOST_SOURCES:
        raise InvalidArgument(f"a blend has at most {MOST_SOURCES} sources, got {len(corpora)}")


def _buffer(given: object | None, row: Dialect) -> float | Literal["exact"]:
    """The variance buffer; megaindex's own orders are exact."""
    buffer = row.buffer_weighted if given is None else check_buffer("variance_buffer", given)
    return buffer if row.is_framework else "exact"


def _plain_weights(weights: Sequence[float], count: int) -> list[Any]:
    """The weights, each as plain as it is exact."""
    if isinstance(weights, (Mapping, Set, str, bytes)):
        raise InvalidArgument(
            f"weights must be a list in the order of the corpora, got a {type(weights).__name__}"
        )
    return check_weights("weights", list(weights), count)


_DTYPES = {"dataset_index": "int16", "dataset_sample_index": "int64"}


@dataclass(frozen=True, eq=False)
class _Draws:
    """Which source serves each position of a blend."""

    rule: Rule
    values: IntArray
    """See `fill_blend`."""

    def counts(self, samples: int) -> list[int]:
        """Draws of each source among the first ``samples``."""
        if self.rule == "divisor":
            return DivisorDraws(self.values).counts(samples)
        counted = GreedyDraws(self.values, "exact").counts(samples)
        assert counted is not None, "unbounded"
        return counted

    def arrays(self, size: int, cache_dir: str | os.PathLike[str] | None) -> Mapping[str, IntArray]:
        """dataset_index and dataset_sample_index."""
        if cache_dir is None:
            memory = Memory()
            self._build(size, memory)
            return memory.arrays
        values = exact_values(self.values)
        parameters = {"order": "blend", "rule": self.rule, "values": values, "size": size}
        expected = {name: ((size,), dtype) for name, dtype in _DTYPES.items()}
        return fetch(cache_dir, parameters, lambda sink: self._build(size, sink), expected=expected)

    def _build(self, size: int, sink: Sink) -> None:
        index, samples = (sink.allocate(name, (size,), dtype) for name, dtype in _DTYPES.items())
        fill_blend(self.rule, self.values, index, samples)
        sink.done("dataset_index")
        sink.done("dataset_sample_index")


def next_draws(
    weights: Sequence[float] | None,
    row: Dialect,
    indices: Sequence[Index],
    begin: int,
    count: int,
    drawn: I64,
) -> tuple[IntArray, I64]:
    """Which source serves positions ``begin`` on of a blend, and which of its samples.

    An unweighted blend of whole epochs goes on by the samples of its sources.

    Args:
        weights, row: as the blend was built with.
        indices: of its sources.
        drawn: how often each was drawn before.
    """
    explicit = weights is not None or row.request != "megatron"
    if weights is None:
        weights = [1.0] * len(indices) if explicit else [_of_one_epoch(index) for index in indices]
    else:
        weights = _plain_weights(weights, len(indices))
    draws = _weighted(weights, row, explicit=explicit)
    index, samples = np.empty(count, np.int16), np.empty(count, np.int64)
    fill_blend(draws.rule, draws.values, index, samples, begin=begin, counts=drawn.copy())
    return index, samples


def _of_one_epoch(index: Index) -> int:
    """Samples that the index of one epoch has."""
    if index.num_epochs == 1:
        return index.num_samples
    return samples_in(index.tokens_per_epoch, index.sequence_length, index.add_extra_token)


def _unweighted(sizes: list[int], row: Dialect, num_samples: int | None) -> tuple[_Draws, int]:
    """One epoch of each source: all of it, or the first samples of a blend by size."""
    if num_samples is None:
        return _Draws("exhaustive", np.array(sizes, np.int64)), sum(sizes)
    weights = blend_weights(sizes, row, explicit=False)
    return _Draws("greedy", weights), min(num_samples, sum(sizes))


def _weighted(weights: Sequence[float], row: Dialect, *, explicit: bool) -> _Draws:
    if row.is_framework:
        return _Draws("greedy", blend_weights(weights, row, explicit=explicit))
    return _Draws("divisor", divisor_weights(weights))


def _asked(weights: Sequence[float], row: Dialect, num_samples: int, buffer: float) -> list[int]:
    """Samples asked of each source with a buffer that is a number."""
    count = len(weights)
    if num_samples * buffer >= 2**62:
        raise InvalidArgument(
            f"num_samples {num_samples} with a variance_buffer of {buffer} cannot be counted in "
            "64 bits; ask for fewer"
        )
    return [
        row.samples_requested(num_samples, weight, buffer, count)
        for weight in request_weights(weights, row)
    ]


def _size(
    weights: Sequence[float],
    row: Dialect,
    num_samples: int,
    asked: Sequence[int],
    indices: Sequence[Index],
    *,
    exact: bool,
) -> int:
    """Positions of the blend: each framework has its own idea of it, see `Dialect.blend_size`."""
    if row.blend_size == "built":
        return sum(index.num_samples - row.uncounted_samples for index in indices)
    if exact or row.blend_size == "samples":
        return num_samples
    return sum(asked if row.blend_size == "buffered" else _asked(weights, row, num_samples, 1.0))


def _check_drawn(dataset_index: IntArray, indices: Sequence[Index]) -> None:
    drawn = np.bincount(dataset_index, minlength=len(indices)).tolist()
    for number, (count, index) in enumerate(zip(drawn, indices, strict=True)):
        if count > index.num_samples:
            raise InvalidArgument(
                f"source {number} of the blend: {count} of its samples are drawn, and "
                f"{index.num_samples} were built: the run fails there; raise variance_buffer"
            )
