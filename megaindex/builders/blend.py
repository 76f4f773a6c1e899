"""The index of a blend, built or loaded from the cache, and its snapshot.

A snapshot lies in the cache beside the entries it names, under a hash of what was asked. It holds
for each source the sizes and times of its files, and what building its index told. While those are
the same the files are what they were, and each source is opened when a batch first reads it; if any
differs, every source is opened and looked at again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

from megaindex._types import I64, IntArray
from megaindex.arithmetic import samples_in
from megaindex.builders.single import build_index
from megaindex.cache.cache import fetch, load_entry
from megaindex.cache.fingerprint import (
    Record,
    entry_key,
    read_records,
    records_path,
    stamps_of,
    write_records,
)
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.format.dataset import PairIdentity
from megaindex.format.header import IndexHeader
from megaindex.index.array_index import ArrayIndex
from megaindex.index.blended_index import MOST_SOURCES, BlendedIndex, LazyIndex
from megaindex.index.blending import (
    DivisorDraws,
    GreedyDraws,
    Rule,
    blend_weights,
    divisor_weights,
    exact_values,
    fill_blend,
    request_weights,
)
from megaindex.index.frameworks import FrameworkRules
from megaindex.index.order_settings import Order, order_of
from megaindex.index.orders.framework import Sink
from megaindex.index.spans import Index
from megaindex.io.json_files import is_size
from megaindex.io.paths import absolute, check_local
from megaindex.objects.files import each_of
from megaindex.validation import (
    DEFAULT_SEED,
    check_buffer,
    check_setting,
    check_weights,
    setting_or_none,
)

Build = Callable[[IndexedDataset, int | None], Index]
"""Opens the index of a dataset for so many samples; a snapshot made it before."""

_SIZES = 5  # numbers in the identity of a pair, before its versions
_FACTS = ("num_samples", "num_epochs", "tokens_per_epoch", "sequence_length", "add_extra_token")


@dataclass(frozen=True, kw_only=True)
class Sources:
    """The sources of a blend, open or to be opened later."""

    datasets: tuple[IndexedDataset, ...]
    indices: tuple[Index, ...]


def open_sources(
    corpora: Sequence[IndexedDataset | str],
    asked: Sequence[int | None],
    settings: Mapping[str, Any],
    build: Build,
    *,
    cache_dir: str | os.PathLike[str] | None,
    dialect: str,
) -> Sources:
    """Return the sources as a snapshot knows them, or built one by one, which leaves a snapshot.

    Args:
        corpora: prefixes, or open datasets.
        asked: samples asked of each.
        settings: what else decides the indices; those that JSON cannot hold leave no snapshot.
        build: opens the index of one source.
        cache_dir: where the arrays and the snapshot are; None: nothing is kept.
        dialect: of the files.
    """
    if cache_dir is not None:
        check_local(os.fspath(cache_dir), "give a directory as cache_dir")
    prefixes = [_prefix(corpus) for corpus in corpora]
    # what an open dataset maps may be older than the files of its name
    known = cache_dir is not None and not any(isinstance(c, IndexedDataset) for c in corpora)
    path = _path(cache_dir, prefixes, asked, settings) if known and cache_dir else None
    if path is not None:
        records = read_records(path, prefixes, _is_sound)
        if records is not None:
            return _lazy_sources(corpora, asked, records, build, dialect)
    stamps = [] if path is None else stamps_of(prefixes)
    closed = [corpus for corpus in corpora if not isinstance(corpus, IndexedDataset)]
    opened = iter(each_of(partial(IndexedDataset, dialect=dialect), closed))
    datasets = tuple(c if isinstance(c, IndexedDataset) else next(opened) for c in corpora)
    indices = tuple(build(dataset, n) for dataset, n in zip(datasets, asked, strict=True))
    if path is not None and stamps == stamps_of(prefixes):
        _write(path, prefixes, stamps, datasets, indices)
    return Sources(datasets=datasets, indices=indices)


def _lazy_sources(
    corpora: Sequence[IndexedDataset | str],
    asked: Sequence[int | None],
    records: list[dict[str, Any]],
    build: Build,
    dialect: str,
) -> Sources:
    datasets = tuple(
        corpus if isinstance(corpus, IndexedDataset) else _lazy_dataset(corpus, record, dialect)
        for corpus, record in zip(corpora, records, strict=True)
    )
    indices = tuple(
        LazyIndex(
            name=record["prefix"],
            has_arrays=bool(record["entry"]),
            open=partial(_open_index, dataset, record, n, build),
            **{name: record[name] for name in _FACTS},
        )
        for dataset, record, n in zip(datasets, records, asked, strict=True)
    )
    return Sources(datasets=datasets, indices=indices)


def _lazy_dataset(prefix: str, record: Mapping[str, Any], dialect: str) -> IndexedDataset:
    code, sequences, bounds, idx_nbytes, bin_nbytes, *versions = record["identity"]
    header = IndexHeader(dtype_code=code, num_sequences=sequences, num_bounds=bounds)
    return IndexedDataset.lazy(
        prefix,
        PairIdentity(header, idx_nbytes, bin_nbytes, tuple(versions)),
        dialect=dialect,
    )


def _open_index(
    dataset: IndexedDataset, record: Mapping[str, Any], asked: int | None, build: Build
) -> Index:
    """Open the entry that the snapshot names; where that is gone, build it again."""
    arrays: Any = load_entry(Path(record["entry"])) if record["entry"] else None
    if arrays is None:
        return build(dataset, asked)
    facts = {name: record[name] for name in _FACTS if name != "num_samples"}
    return ArrayIndex(
        order=record["order"],
        sequence_lengths=dataset.sequence_lengths,
        cache_entry=record["entry"],
        **facts,
        **arrays,
    )


def _flat(identity: PairIdentity) -> list[int | str]:
    return [
        *(getattr(identity.header, field.name) for field in fields(identity.header)),
        identity.idx_nbytes,
        identity.bin_nbytes,
        *identity.versions,
    ]


def _is_sound(record: Record) -> bool:
    *sizes, idx_version, bin_version = record["identity"]
    numbers = [*sizes, *(record[name] for name in _FACTS)]
    texts = [idx_version, bin_version, record["order"], record["entry"]]
    are_texts = all(isinstance(text, str) for text in texts)
    return len(sizes) == _SIZES and all(map(is_size, numbers)) and are_texts


def _prefix(corpus: IndexedDataset | str) -> str:
    path = corpus.path_prefix if isinstance(corpus, IndexedDataset) else corpus
    return absolute(path)


def _path(
    cache_dir: str | os.PathLike[str],
    prefixes: Sequence[str],
    asked: Sequence[int | None],
    settings: Mapping[str, Any],
) -> Path | None:
    """Return the path of the snapshot; None where JSON cannot hold a setting."""
    request = {"prefixes": list(prefixes), "asked": list(asked), "settings": dict(settings)}
    try:
        key = entry_key({"snapshot": 2, **request})
    except (TypeError, ValueError):
        return None
    return records_path(cache_dir, "blend", key)


def _write(
    path: Path,
    prefixes: Sequence[str],
    stamps: Sequence[list[int]],
    datasets: Sequence[IndexedDataset],
    indices: Sequence[Index],
) -> None:
    records = [
        {
            "prefix": prefix,
            "stamp": stamp,
            "identity": _flat(dataset.identity),
            "order": getattr(index, "order", ""),
            "entry": getattr(index, "cache_entry", ""),
            **{name: getattr(index, name) for name in _FACTS},
        }
        for prefix, stamp, dataset, index in zip(prefixes, stamps, datasets, indices, strict=True)
    ]
    write_records(path, records)


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
    """Return the index of a blend: source by source what `build_index` gives, and which comes when.

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


def _buffer(given: object | None, row: FrameworkRules) -> float | Literal["exact"]:
    """Return the variance buffer; megaindex's own orders are exact."""
    buffer = row.buffer_weighted if given is None else check_buffer("variance_buffer", given)
    return buffer if row.is_framework else "exact"


def _plain_weights(weights: Sequence[float], count: int) -> list[Any]:
    """Return the weights as Python numbers of the same value."""
    if isinstance(weights, (Mapping, Set, str, bytes)):
        raise InvalidArgument(
            f"weights must be a list in the order of the corpora, got a {type(weights).__name__}"
        )
    return check_weights("weights", list(weights), count)


_DTYPES = {"dataset_index": "int16", "dataset_sample_index": "int64"}


@dataclass(frozen=True, eq=False)
class _Draws:
    """The rule by which a blend draws its sources."""

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
        """Return dataset_index and dataset_sample_index."""

        def parameters() -> dict[str, Any]:
            values = exact_values(self.values)
            return {"order": "blend", "rule": self.rule, "values": values, "size": size}

        expected = {name: ((size,), dtype) for name, dtype in _DTYPES.items()}
        return fetch(cache_dir, parameters, partial(self._build, size), expected)[0]

    def _build(self, size: int, sink: Sink) -> None:
        index, samples = (sink.allocate(name, (size,), dtype) for name, dtype in _DTYPES.items())
        fill_blend(self.rule, self.values, index, samples)
        sink.seal("dataset_index")
        sink.seal("dataset_sample_index")


def next_draws(
    weights: Sequence[float] | None,
    row: FrameworkRules,
    indices: Sequence[Index],
    begin: int,
    count: int,
    drawn: I64,
) -> tuple[IntArray, I64]:
    """Return the sources of positions ``begin`` on of a blend, and their sample numbers.

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
    """Return the samples that the index of one epoch has."""
    if index.num_epochs == 1:
        return index.num_samples
    return samples_in(index.tokens_per_epoch, index.sequence_length, index.add_extra_token)


def _unweighted(
    sizes: list[int], row: FrameworkRules, num_samples: int | None
) -> tuple[_Draws, int]:
    """One epoch of each source: all of it, or the first samples of a blend by size."""
    if num_samples is None:
        return _Draws("exhaustive", np.array(sizes, np.int64)), sum(sizes)
    weights = blend_weights(sizes, row, explicit=False)
    return _Draws("greedy", weights), min(num_samples, sum(sizes))


def _weighted(weights: Sequence[float], row: FrameworkRules, *, explicit: bool) -> _Draws:
    if row.is_framework:
        return _Draws("greedy", blend_weights(weights, row, explicit=explicit))
    return _Draws("divisor", divisor_weights(weights))


def _asked(
    weights: Sequence[float], row: FrameworkRules, num_samples: int, buffer: float
) -> list[int]:
    """Return the samples asked of each source with a buffer that is a number."""
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
    row: FrameworkRules,
    num_samples: int,
    asked: Sequence[int],
    indices: Sequence[Index],
    *,
    exact: bool,
) -> int:
    """Return the positions of the blend, see `FrameworkRules.blend_size`."""
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
