"""What the sources of a blend were when it was built, so that opening it again reads one file.

A snapshot lies in the cache beside the entries it names, under a hash of what was asked. It holds
for each source the sizes and times of its files, and what building its index told. While those are
the same the files are what they were, and each source is opened when a batch first reads it; if any
differs, every source is opened and looked at again.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

from megaindex.format import IndexedDataset
from megaindex.format.header import IndexHeader
from megaindex.format.reader import PairIdentity
from megaindex.index.arrays import ArrayIndex
from megaindex.index.on_demand import LaterIndex
from megaindex.index.spans import Index
from megaindex.io.json_files import is_size
from megaindex.io.locations import absolute, check_local
from megaindex.io.objects.files import each_of
from megaindex.store.cache import load_entry
from megaindex.store.fingerprint import entry_key
from megaindex.store.records import Record, read_records, stamps_of, write_records

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
    """The sources as a snapshot knows them, or built one by one, which leaves a snapshot.

    Args:
        corpora: prefixes, or open datasets.
        asked: samples asked of each.
        settings: what else decides the indices; those that are no plain values leave no snapshot.
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
            return _later(corpora, asked, records, build, dialect)
    stamps = [] if path is None else stamps_of(prefixes)
    closed = [corpus for corpus in corpora if not isinstance(corpus, IndexedDataset)]
    opened = iter(each_of(partial(IndexedDataset, dialect=dialect), closed))
    datasets = tuple(c if isinstance(c, IndexedDataset) else next(opened) for c in corpora)
    indices = tuple(build(dataset, n) for dataset, n in zip(datasets, asked, strict=True))
    if path is not None and stamps == stamps_of(prefixes):
        _write(path, prefixes, stamps, datasets, indices)
    return Sources(datasets=datasets, indices=indices)


def _later(
    corpora: Sequence[IndexedDataset | str],
    asked: Sequence[int | None],
    records: list[dict[str, Any]],
    build: Build,
    dialect: str,
) -> Sources:
    datasets = tuple(
        corpus if isinstance(corpus, IndexedDataset) else _dataset_later(corpus, record, dialect)
        for corpus, record in zip(corpora, records, strict=True)
    )
    indices = tuple(
        LaterIndex(
            name=record["prefix"],
            has_arrays=bool(record["entry"]),
            open=partial(_open_index, dataset, record, n, build),
            **{name: record[name] for name in _FACTS},
        )
        for dataset, record, n in zip(datasets, records, asked, strict=True)
    )
    return Sources(datasets=datasets, indices=indices)


def _dataset_later(prefix: str, record: Mapping[str, Any], dialect: str) -> IndexedDataset:
    code, sequences, bounds, idx_nbytes, bin_nbytes, *versions = record["identity"]
    header = IndexHeader(dtype_code=code, num_sequences=sequences, num_bounds=bounds)
    return IndexedDataset.later(
        prefix,
        PairIdentity(header, idx_nbytes, bin_nbytes, tuple(versions)),
        dialect=dialect,
    )


def _open_index(
    dataset: IndexedDataset, record: Mapping[str, Any], asked: int | None, build: Build
) -> Index:
    """From the entry that the snapshot names; where that is gone, built again."""
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
    """Where the snapshot of these sources is; None where a setting is no plain value."""
    request = {"prefixes": list(prefixes), "asked": list(asked), "settings": dict(settings)}
    try:
        key = entry_key({"snapshot": 2, **request})
    except (TypeError, ValueError):
        return None
    return Path(cache_dir) / f"blend-{key}-megaindex.json"


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
