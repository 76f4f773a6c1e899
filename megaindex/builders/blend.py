"""Index of a blend, built or loaded from the cache, and its snapshot.

A snapshot is a file of the cache, named by a hash of the request, with the file stamps and index
sizes of every source. If all stamps are unchanged, a source is opened when a batch first reads it;
otherwise all sources are opened and validated again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from megaindex._types import I64, IntArray
from megaindex.arithmetic import samples_in
from megaindex.builders.cached import build_index
from megaindex.builders.single import further_names
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
from megaindex.index.blend import Blend, exact_values
from megaindex.index.blended_index import MOST_SOURCES, BlendedIndex, LazyIndex
from megaindex.index.draws import BlendArrays, BlendDraws, ExhaustiveDraws
from megaindex.index.frameworks import FrameworkRules
from megaindex.index.order_settings import Order, order_of
from megaindex.index.orders.framework import Sink
from megaindex.index.spans import Index
from megaindex.io.atomic import is_size
from megaindex.io.paths import absolute, check_local
from megaindex.objects.files import each_of
from megaindex.validation import (
    DEFAULT_SEED,
    check_buffer,
    check_setting,
    check_weights,
    setting_or_none,
)

Build = Callable[[IndexedDataset, int | None, str | None], Index]
"""Function that builds or loads the index of a dataset for a number of samples and a shuffle name;
None: that of its fingerprint."""

_SIZES = 5  # numbers in the identity of a pair, before its versions
_FACTS = ("num_samples", "num_epochs", "tokens_per_epoch", "sequence_length", "add_extra_token")


Sources = tuple[tuple[IndexedDataset, ...], tuple[Index, ...]]
"""Datasets and indices of the sources of a blend, open or opened at their first read."""


def open_sources(
    corpora: Sequence[IndexedDataset | str],
    asked: Sequence[int | None],
    settings: Mapping[str, Any],
    build: Build,
    *,
    cache_dir: str | os.PathLike[str] | None,
    dialect: str,
    counts_copies: bool,
) -> Sources:
    """Return the sources of a valid snapshot, or open all and write a snapshot.

    Args:
        corpora: prefixes or open datasets; open datasets are not written to a snapshot.
        asked: samples requested of each.
        settings: other settings of the indices; without a snapshot if JSON cannot represent them.
        build: function that builds the index of one source.
        cache_dir: directory of the snapshot, or None.
        dialect: dtype codes of the files.
        counts_copies: shuffle further sources of one fingerprint by names of their own, see
            `further_names`.
    """
    if cache_dir is not None:
        check_local(os.fspath(cache_dir), "give a directory as cache_dir")
    paths = (c.path_prefix if isinstance(c, IndexedDataset) else c for c in corpora)
    prefixes = [absolute(path) for path in paths]
    # an open dataset may map files that were replaced since
    has_files = not any(isinstance(c, IndexedDataset) for c in corpora)
    path = _path(cache_dir, prefixes, asked, settings) if has_files and cache_dir else None
    if path is not None:
        records = read_records(path, prefixes, _is_sound)
        if records is not None:
            return _lazy_sources(corpora, asked, records, build, dialect)
    stamps = [] if path is None else stamps_of(prefixes)
    closed = [corpus for corpus in corpora if not isinstance(corpus, IndexedDataset)]
    opened = iter(each_of(partial(IndexedDataset, dialect=dialect), closed))
    datasets = tuple(c if isinstance(c, IndexedDataset) else next(opened) for c in corpora)
    names = further_names(datasets) if counts_copies else [None] * len(datasets)
    indices = tuple(map(build, datasets, asked, names))
    if path is not None and stamps == stamps_of(prefixes):
        _write(path, prefixes, stamps, datasets, indices, names)
    return datasets, indices


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
            order=record["order"],
            open=partial(_open_index, dataset, record, n, build),
            **{name: record[name] for name in _FACTS},
        )
        for dataset, record, n in zip(datasets, records, asked, strict=True)
    )
    return datasets, indices


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
    """Load the cache entry named by the snapshot, or build the index if the entry is missing."""
    arrays: Any = load_entry(Path(record["entry"])) if record["entry"] else None
    if arrays is None:
        return build(dataset, asked, record["shuffle_name"])
    facts = {name: record[name] for name in _FACTS if name != "num_samples"}
    return ArrayIndex(
        order=record["order"],
        sequence_lengths=dataset.sequence_lengths,
        cache_entry=record["entry"],
        datasets=(dataset,),
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
    are_texts = all(isinstance(text, str) for text in (*texts, record["shuffle_name"] or ""))
    return len(sizes) == _SIZES and all(map(is_size, numbers)) and are_texts


def _path(
    cache_dir: str | os.PathLike[str],
    prefixes: Sequence[str],
    asked: Sequence[int | None],
    settings: Mapping[str, Any],
) -> Path | None:
    """Return the path of the snapshot, or None if JSON cannot represent a setting."""
    request = {"prefixes": list(prefixes), "asked": list(asked), "settings": dict(settings)}
    try:
        key = entry_key({"snapshot": 3, **request})
    except (TypeError, ValueError):
        return None
    return records_path(cache_dir, "blend", key)


def _write(
    path: Path,
    prefixes: Sequence[str],
    stamps: Sequence[list[int]],
    datasets: Sequence[IndexedDataset],
    indices: Sequence[Index],
    names: Sequence[str | None],
) -> None:
    each = zip(prefixes, stamps, datasets, indices, names, strict=True)
    records = [
        {
            "prefix": prefix,
            "stamp": stamp,
            "identity": _flat(dataset.identity),
            "order": getattr(index, "order", ""),
            "entry": getattr(index, "cache_entry", ""),
            "shuffle_name": shuffle_name,
            **{name: getattr(index, name) for name in _FACTS},
        }
        for prefix, stamp, dataset, index, shuffle_name in each
    ]
    write_records(path, records)


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
    """Return the index of a blend of several datasets.

    The samples requested of each source, the length of the blend and the draws are those of the
    framework of ``order``: `BlendedMegatronDatasetBuilder` and `BlendedDataset` of megatron-core
    0.16.1, ``get_normalized_weights_and_num_samples`` and ``BlendableDataset`` of GPT-NeoX (main,
    2026-05), and those of Megatron-DeepSpeed and PaddleNLP. Differences: docs/compatibility.md.

    Args:
        corpora: prefixes of ``.bin``/``.idx`` pairs, or open datasets; at most 32767.
        num_samples: samples requested of the blend. None: one epoch of each source; only in order
            megatron without weights.
        weights: positive weight of each source. None: proportional to the samples of the sources
            in orders megatron (which then builds one epoch of each), epoch, window and packed;
            equal in the others.
        order: name or order object, see `build_index`. Orders epoch, window and packed blend by the
            divisor method, the others by the greedy rule of the frameworks.
        variance_buffer: factor, at least 1, by which more samples are requested of each source than
            its share, in a framework order. ``"exact"``: request the samples that the blend draws,
            also of unweighted sources. Default: the factor of the framework.
        cache_dir: cache directory, see `build_index`. A blend found there opens without opening
            its sources; each of them is opened when a batch first reads it.
        settings: ``sequence_length``, ``seed``, ``split`` and other arguments of `build_index`.
            Without ``source_name``, orders epoch, window and packed shuffle the k-th further
            dataset of one fingerprint, in the order of ``corpora``, by ``FINGERPRINT/k``.

    Returns:
        The index, with ``dataset_index`` int16[n], ``dataset_sample_index`` int64[n], ``indices``
        and ``datasets`` of the sources, and ``locate(sample_ids)``. In order neox n is the sum of
        the sources' samples, as in GPT-NeoX; ``num_samples`` of the index ends where one is spent.

    Raises:
        InvalidArgument: the weights do not fit the corpora, or a source has fewer samples than the
            blend draws (where Megatron fails too).
        FormatError, StorageError: see `build_index`.
    """
    order = order_of(order)
    row = order.row
    _check_corpora(corpora)
    num_samples = setting_or_none("num_samples", num_samples)
    if weights is not None:
        weights = _plain_weights(weights, len(corpora), row)
    if num_samples is None and (weights is not None or row.request != "megatron"):
        raise InvalidArgument("num_samples must be given, except in order megatron without weights")
    buffer: float | Literal["exact"] = row.buffer_weighted
    if variance_buffer is not None:
        buffer = check_buffer("variance_buffer", variance_buffer)
    given = [c if isinstance(c, IndexedDataset) else os.fspath(c) for c in corpora]
    settings.setdefault("seed", DEFAULT_SEED)
    for name in {"sequence_length", "seed", "add_extra_token"} & settings.keys():
        settings[name] = check_setting(name, settings[name])  # also for the key of the snapshot
    open_for = partial(
        open_sources,
        given,
        settings={**settings, **order.changed_settings, "order": order.name},
        build=partial(_build, {**settings, "order": order}, cache_dir),
        cache_dir=cache_dir,
        dialect=row.file_dialect,
        counts_copies=not row.is_framework and settings.get("source_name") is None,
    )
    sizes: list[int] = []
    if weights is None and row.blends_by_size:
        datasets, indices = open_for([None] * len(given))
        sizes = [index.num_samples for index in indices]
    blend = Blend.of_sources(
        weights, lambda: sizes, len(given), row, buffer=buffer, counting="exact"
    )
    draws = blend.draws
    if num_samples is None:
        draws, size = ExhaustiveDraws(np.array(sizes, np.int64)), sum(sizes)
    elif not blend.explicit and not blend.exact:  # one epoch of each source
        size = min(num_samples, sum(sizes))
    else:
        asked = _asked(blend, num_samples)
        datasets, indices = open_for([max(1, count) for count in asked])
        size = _size(blend, num_samples, asked, indices)
    arrays = cached_blend(draws, size, cache_dir).arrays
    return BlendedIndex(
        indices=indices,
        datasets=datasets,
        dataset_index=arrays.dataset_index,
        dataset_sample_index=arrays.dataset_sample_index,
        end=_end(draws, arrays, indices, refuse=row.blend_size != "built"),
        rule=draws.rule,
        weights=draws.values,
    )


def _build(
    settings: Mapping[str, Any],
    cache_dir: str | os.PathLike[str] | None,
    dataset: IndexedDataset,
    num_samples: int | None,
    shuffle_name: str | None,
) -> Index:
    if shuffle_name is not None:
        settings = {**settings, "source_name": shuffle_name}
    return build_index(dataset, num_samples=num_samples, cache_dir=cache_dir, **settings)


def _check_corpora(corpora: Sequence[Any]) -> None:
    if isinstance(corpora, str) or not isinstance(corpora, Sequence) or not len(corpora):
        raise InvalidArgument("corpora must be a list of at least one prefix or dataset")
    if len(corpora) > MOST_SOURCES:
        raise InvalidArgument(
            f"a blend must have at most {MOST_SOURCES} sources, got {len(corpora)}"
        )


def _plain_weights(weights: Sequence[float], count: int, row: FrameworkRules) -> list[Any]:
    unordered = isinstance(weights, (Mapping, Set, str, bytes))
    if unordered or not isinstance(weights, Iterable):
        raise InvalidArgument(
            f"weights must be a list in the order of the corpora, got a {type(weights).__name__}"
        )
    return check_weights("weights", list(weights), count, zero=row.zero_weights)


class CachedBlend(NamedTuple):
    """Arrays of a blend, and the cache entry that holds them."""

    arrays: BlendArrays
    entry: str
    """Directory of the entry; empty without a cache."""
    was_built: bool
    """False if the entry was found."""


def cached_blend(
    draws: BlendDraws, size: int, folder: str | os.PathLike[str] | None, dtype: str = "int16"
) -> CachedBlend:
    """Return the first ``size`` draws, with a dataset_index of ``dtype``."""
    types: dict[str, tuple[tuple[int, ...], str]] = {
        "dataset_index": ((size,), dtype),
        "dataset_sample_index": ((size,), "int64"),
        "counts": ((draws.values.size,), "int64"),
    }
    built = []

    def build(sink: Sink) -> None:
        which, samples, counts = (sink.allocate(name, *types[name]) for name in types)
        counts[...] = draws.fill(which, samples)
        for name in types:
            sink.seal(name)
        built.append(True)

    def parameters() -> dict[str, Any]:
        values = exact_values(draws.values)
        return {
            "order": "blend",
            "rule": draws.rule,
            "values": values,
            "size": size,
            "dtype": dtype,
        }

    arrays: Any
    arrays, entry = fetch(folder, parameters, build, types)
    return CachedBlend(BlendArrays(**arrays), entry, bool(built))


def next_draws(
    weights: Sequence[float] | None,
    row: FrameworkRules,
    indices: Sequence[Index],
    begin: int,
    count: int,
    drawn: I64,
) -> tuple[IntArray, I64]:
    """Return dataset_index and dataset_sample_index of ``count`` positions from ``begin`` on.

    An unweighted blend of whole epochs continues in proportion to the samples of its sources.

    Args:
        weights, row: those that the blend was built with.
        indices: of its sources.
        drawn: int64[sources], draws of each source before ``begin``.
    """
    if weights is not None:
        weights = _plain_weights(weights, len(indices), row)
    sizes = [_of_one_epoch(index) for index in indices]
    draws = Blend.of_sources(weights, lambda: sizes, len(indices), row).draws
    index, samples = np.empty(count, np.int16), np.empty(count, np.int64)
    draws.fill(index, samples, begin, drawn.copy())
    return index, samples


def _of_one_epoch(index: Index) -> int:
    """Return the number of samples of one epoch."""
    if index.num_epochs == 1:
        return index.num_samples
    return samples_in(index.tokens_per_epoch, index.sequence_length, index.add_extra_token)


def _asked(blend: Blend, num_samples: int) -> list[int]:
    """Return the samples requested of each source."""
    if not blend.exact and num_samples * float(blend.buffer) >= 2**62:
        raise InvalidArgument(
            f"num_samples {num_samples} with a variance_buffer of {blend.buffer} cannot be counted "
            "in 64 bits; request fewer"
        )
    asked = blend.requests(num_samples)
    assert asked is not None, "counted exactly"
    return asked


def _size(blend: Blend, num_samples: int, asked: Sequence[int], indices: Sequence[Index]) -> int:
    """Return the length of the blend, see `FrameworkRules.blend_size`."""
    if blend.row.blend_size == "built":
        return sum(index.num_samples - blend.row.uncounted_samples for index in indices)
    if blend.row.blend_size == "buffered" and not blend.exact:
        return sum(asked)
    return blend.size(num_samples)


def _end(draws: BlendDraws, arrays: BlendArrays, indices: Sequence[Index], *, refuse: bool) -> int:
    """Return the positions before the first draw of a sample that its source does not have;
    InvalidArgument if there is one, with ``refuse``."""
    samples = np.array([index.num_samples for index in indices], np.int64)
    end = draws.end(arrays, samples)
    if refuse and end < arrays.dataset_index.size:
        source = int(arrays.dataset_index[end])
        raise InvalidArgument(
            f"source {source} of the blend must have {arrays.counts[source]} samples, the number "
            f"drawn, got {samples[source]}; raise variance_buffer"
        )
    return end
