"""Sides of a comparison that are on disk: entries of the cache, and arrays of frameworks."""

from __future__ import annotations

import re
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from megaindex._types import I32, IntArray
from megaindex.arithmetic import INT32_MAX
from megaindex.audit.diff_inputs import Side
from megaindex.cache.entry import MANIFEST, Manifest, read_manifest
from megaindex.cache.fingerprint import array_checksum, corpus_fingerprint
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ArrayIndex
from megaindex.io.json_files import Damaged, read_object
from megaindex.io.os_errors import as_storage_error, storage_error

Setting = TypeVar("Setting", int, str)

_ARRAYS = ("document_index", "sample_index", "shuffle_index")
# Megatron's names, and those of GPT-NeoX and older Megatrons.
_SUFFIXES = (
    tuple(f"{name}.npy" for name in _ARRAYS),
    ("_doc_idx.npy", "_sample_idx.npy", "_shuffle_idx.npy"),
)
_MEGATRON_KEYS = {
    "random_seed": "seed",
    "sequence_length": "sequence_length",
    "num_samples": "num_samples",
    "split": "split",
    "index_split": "subset",
    "dataset_path": "data_path",
}
_NEOX_NAME = re.compile(
    r"_(?P<subset>[a-z]+(?:_\d+)?)_indexmap_(?P<num_samples>\d+)ns_"
    r"(?P<sequence_length>\d+)sl_(?P<seed>\d+)s"
)


def side_from_arrays(path: Path, dataset: IndexedDataset | None = None) -> Side:
    """Return the order of arrays on disk.

    Args:
        path: a cache entry, a directory with one set of arrays, or the common prefix of their
            names.
        dataset: the dataset of the arrays, for the lengths of token runs; None if unknown.

    Raises:
        FormatError: arrays are missing, or are not index arrays.
        InvalidArgument: the directory has several sets, or the entry is one of order packed, which
            serves every seed.
    """
    with as_storage_error(str(path), "cannot look into it"):
        ours = (path / MANIFEST).is_file()
    if ours:
        manifest = read_manifest(path)
        _check_has_order(path, manifest)
        arrays = {name: _load(path / f"{name}.npy") for name in _ARRAYS}
        settings, damage = dict(manifest.parameters), _damage(path, manifest, arrays)
        recorded = True
    else:
        files = _files(path)
        arrays = {name: _load(file) for name, file in zip(_ARRAYS, files, strict=True)}
        settings, damage, recorded = _framework_settings(files[0]), "", False
    _check(path, arrays)
    if dataset is not None and settings.get("corpus", "") in ("", corpus_fingerprint(dataset)):
        settings["corpus"] = corpus_fingerprint(dataset)
        lengths = dataset.sequence_lengths
    else:
        lengths, dataset = _unknown_lengths(arrays["document_index"]), None
    index = _index(path, arrays, settings, lengths)
    return Side(
        name=str(path),
        index=index,
        settings={**settings, "num_epochs": index.num_epochs},
        has_lengths=dataset is not None,
        recorded=recorded,
        damage=damage,
    )


def _check_has_order(path: Path, manifest: Manifest) -> None:
    """Raise InvalidArgument for an entry of order packed, the documents sorted by length."""
    found = manifest.parameters
    if found.get("order") != "packed":
        return
    names = ("order", "sequence_length", "max_documents", "long_documents")
    settings = ",".join(f"{name}={found[name]}" for name in names if name in found)
    raise InvalidArgument(
        f"{path}: a cache entry of order packed holds documents sorted by length, for every seed "
        "and number of epochs, and no order; give settings in its place: --data-path PREFIX and "
        f"{settings},seed=N,epochs=E"
    )


def _index(
    path: Path, arrays: dict[str, IntArray], settings: dict[str, Any], lengths: I32
) -> ArrayIndex:
    documents = arrays["document_index"]
    if documents.size and int(documents.max()) >= lengths.size:
        raise FormatError(
            f"{path}: document_index has sequence id {int(documents.max())}, the dataset "
            f"{lengths.size} sequences; give the --data-path that the index was built for"
        )
    distinct = np.unique(documents)
    size = min(arrays["shuffle_index"].size, len(arrays["sample_index"]) - 1)
    return ArrayIndex(
        order=_of_type(path, settings, "order", ""),
        document_index=documents,
        sample_index=arrays["sample_index"],
        shuffle_index=arrays["shuffle_index"][:size],
        sequence_lengths=lengths,
        sequence_length=_of_type(path, settings, "sequence_length", 0),
        num_epochs=documents.size // max(1, distinct.size),
        tokens_per_epoch=int(lengths[distinct].sum(dtype=np.int64)),
        add_extra_token=_of_type(path, settings, "add_extra_token", 1),
    )


def _of_type(path: Path, settings: dict[str, Any], name: str, default: Setting) -> Setting:
    """Return a setting of the type of its default; integers must be at least 0."""
    value = settings.get(name, default)
    if type(value) is not type(default) or (isinstance(value, int) and not 0 <= value < INT32_MAX):
        raise FormatError(
            f"{path}: {name} must be of type {type(default).__name__}, and at least 0 if a number, "
            f"got {value!r}; build the index again"
        )
    return value


def _unknown_lengths(document_index: IntArray) -> I32:
    """Return lengths beyond every offset, with which token runs still differ by their offsets."""
    return np.full(int(document_index.max(initial=0)) + 1, INT32_MAX, np.int32)


def _files(path: Path) -> list[Path]:
    directory, beginning = (path, "") if path.is_dir() else (path.parent, path.name)
    sets = []
    for suffixes in _SUFFIXES:
        for first in sorted(directory.glob(f"{escape(beginning)}*{suffixes[0]}")):
            stem = str(first).removesuffix(suffixes[0])
            sets.append([Path(stem + suffix) for suffix in suffixes])
    if not sets:
        raise FormatError(
            f"{path}: has neither {MANIFEST} nor document, sample and shuffle index arrays "
            "(*-document_index.npy or *_doc_idx.npy); give the directory of such files"
        )
    if len(sets) > 1:
        names = ", ".join(files[0].name for files in sets[:4])
        raise InvalidArgument(
            f"{path}: holds {len(sets)} indices ({names}); give the common prefix of one's files"
        )
    return sets[0]


def _load(path: Path) -> IntArray:
    try:
        array: IntArray = np.load(path, mmap_mode="r", allow_pickle=False)
    except PermissionError as error:
        raise storage_error(error, str(path), "cannot read") from error
    except (OSError, ValueError, EOFError, OverflowError, RecursionError) as error:
        raise FormatError(f"{path}: must be a .npy file of integers, but {error}") from error
    return array


def _check(path: Path, arrays: dict[str, IntArray]) -> None:
    documents, samples, shuffle = (arrays[name] for name in _ARRAYS)
    kinds = all(array.dtype.kind in "iu" for array in arrays.values())
    if not kinds or documents.ndim != 1 or shuffle.ndim != 1 or samples.shape[1:] != (2,):
        shapes = ", ".join(f"{name} {a.dtype}{list(a.shape)}" for name, a in arrays.items())
        raise FormatError(
            f"{path}: must have integers document_index[n], sample_index[m + 1, 2] and "
            f"shuffle_index[m], found {shapes}"
        )
    for name, values, limit in (
        ("document_index", documents, INT32_MAX),
        ("sample_index", samples[:, 0], documents.size),
        ("sample_index", samples[:, 1], INT32_MAX),
        ("shuffle_index", shuffle, len(samples) - 1),
    ):
        if values.size and not (int(values.min()) >= 0 and int(values.max()) < limit):
            raise FormatError(
                f"{path}: values of {name} must be in [0, {limit}), got {int(values.min())} to "
                f"{int(values.max())}; build the index again"
            )
    if (np.diff(samples[:, 0].astype(np.int64)) < 0).any():
        raise FormatError(f"{path}: sample_index must not decrease; build the index again")


def _damage(path: Path, manifest: Manifest, arrays: dict[str, IntArray]) -> str:
    for name, record in manifest.arrays.items():
        if array_checksum(arrays[name]) != record.checksum:
            return f"{path / record.file} does not match the checksum in {MANIFEST}"
    return ""


def _framework_settings(first: Path) -> dict[str, Any]:
    """Return the settings in Megatron's description file, or in NeoX's file names."""
    description = Path(str(first).removesuffix("document_index.npy") + "description.txt")
    if description.is_file():
        try:
            with as_storage_error(str(description), "cannot read"):
                content = read_object(description)
        except Damaged as error:
            raise FormatError(
                f"{description}: must be the JSON that Megatron writes, but {error}; let Megatron "
                f"build the index again"
            ) from error
        return {ours: content[key] for key, ours in _MEGATRON_KEYS.items() if key in content}
    name = _NEOX_NAME.search(first.name)
    if name is None:
        return {}
    return {key: v if key == "subset" else int(v) for key, v in name.groupdict().items()}
