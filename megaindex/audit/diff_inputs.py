"""Sides of a comparison: settings to build an index from, entries of the cache, arrays on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from glob import escape
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from megaindex._types import I32, IntArray
from megaindex.arithmetic import INT32_MAX
from megaindex.builders import build_index
from megaindex.cache.entry import MANIFEST, Manifest, read_manifest
from megaindex.cache.fingerprint import array_checksum, corpus_fingerprint
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import IndexedDataset
from megaindex.index.array_index import ArrayIndex
from megaindex.index.description import describe_index
from megaindex.index.documents import members_of
from megaindex.index.frameworks import select_documents
from megaindex.index.order_settings import make_order
from megaindex.index.orders.keyed import shuffle_names
from megaindex.index.spans import Index, separates_documents
from megaindex.io.atomic import Damaged, read_named, read_object
from megaindex.io.mapping import map_npy_file
from megaindex.io.paths import as_storage_error, check_local, storage_error
from megaindex.settings.run_words import is_lock
from megaindex.validation import DEFAULT_SEED

_WORDS = ("data_path", "split", "subset", "epochs", "order", "separate_final_epoch", "left_over",
          "source_name", "long_documents", "document_subset")  # fmt: skip
_INTEGERS = ("sequence_length", "seed", "num_samples", "add_extra_token", "exact_num_epochs",
             "epochs_mixed", "max_documents", "align")  # fmt: skip
_KEYS = (*_WORDS, *_INTEGERS, "final_epoch_threshold", "drop_last_partial")
_OF_ORDERS = ("separate_final_epoch", "final_epoch_threshold", "exact_num_epochs", "epochs_mixed",
              "left_over", "max_documents", "long_documents", "align")  # fmt: skip
_SETTING = re.compile(r"\s*[\w-]+\s*=")
_ALIASES = {"seq_length": "sequence_length"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One side of `compare`: an index, and the settings that it was built with.

    Attributes:
        name: name for messages.
        index: index of the side.
        settings: known settings, under the names of a cache entry's manifest; of a lock, under
            those of the lock, all of them.
        resolved: settings of a lock under the names of a manifest, for other sides.
        has_lengths: False for arrays of an unknown dataset, whose document lengths are unknown.
        recorded: True if the settings determine the arrays.
        damage: first difference from the checksums in the manifest; empty without one.
        identity: identity of the run of a lock; None for other sides.
    """

    name: str
    index: Index
    settings: dict[str, Any]
    resolved: dict[str, Any] | None = None
    has_lengths: bool = True
    recorded: bool = True
    damage: str = ""
    identity: str | None = None

    @property
    def sources(self) -> list[str] | None:
        """Names of the sources by their content: fingerprints, as `shuffle_names` tells equal ones
        apart; None if they are unknown."""
        corpus, count = self.settings.get("corpus"), len(separates_documents(self.index))
        found = [corpus] * count if isinstance(corpus, str) else corpus
        return shuffle_names(found) if isinstance(found, list) and len(found) == count else None


def read_settings(text: str, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``key=value,key=value``, or of a YAML or JSON file, over ``common``.

    Raises:
        InvalidArgument: a key is unknown, or a value of the wrong kind.
        FormatError: the file is not a mapping in YAML or JSON.
    """
    given = _from_file(text) if _is(text, Path.is_file) else _from_text(text)
    given = {_ALIASES.get(key, key): value for key, value in given.items() if value is not None}
    unknown = sorted(set(given) - set(_KEYS))
    if unknown:
        near = get_close_matches(unknown[0], _KEYS, 1)
        hint = f"did you mean {near[0]}?" if near else f"use {', '.join(_KEYS)}"
        raise InvalidArgument(f"{text}: unknown setting {', '.join(unknown)}; {hint}")
    base = dict(common)
    if "epochs" in given or "num_samples" in given:  # alternatives
        base = {key: value for key, value in base.items() if key not in ("epochs", "num_samples")}
    return {key: _typed_value(text, key, value) for key, value in {**base, **given}.items()}


def side_from_settings(name: str, settings: Mapping[str, Any]) -> Side:
    """Build the index that the settings describe, in memory.

    Raises:
        InvalidArgument: a setting is missing or out of range.
        FormatError, StorageError: the dataset cannot be read.
    """
    values = {"seed": DEFAULT_SEED, "order": "megatron", "subset": "train", **settings}
    for key, flag in (("data_path", "--data-path"), ("sequence_length", "--seq-length")):
        if key not in values:
            raise InvalidArgument(f"{name}: {key} is missing; add {key}=… or {flag}")
    loose = {key: values.pop(key) for key in _OF_ORDERS if key in values}
    order = values["order"] = make_order(values["order"], loose)
    dataset = IndexedDataset(values.pop("data_path"), dialect=order.row.file_dialect)
    index: Index = build_index(dataset, **values)
    return Side(name=name, index=index, settings=_described(dataset, index, values))


def _described(dataset: IndexedDataset, index: Index, values: Mapping[str, Any]) -> dict[str, Any]:
    row = values["order"].row
    documents = select_documents(
        len(dataset),
        str(dataset.path_prefix),
        row,
        split=values.get("split"),
        subset=values["subset"],
    )
    known = {
        "corpus": corpus_fingerprint(dataset),
        "order": row.order,
        "documents": [documents.start, documents.stop] if isinstance(documents, range) else None,
        "sequence_length": index.sequence_length,
        "seed": values["seed"],
        "num_epochs": index.num_epochs,
        "drop_last_partial": values.get("drop_last_partial", True),
        "add_extra_token": index.add_extra_token,
    }
    if row.is_framework:
        known["final_epoch_apart"] = describe_index(index)["final_epoch_apart"]
    else:
        of_block = {"epochs_mixed": row.epochs_mixed, "left_over": row.left_over}
        known |= values["order"].settings if row.order == "packed" else of_block
        known["source_name"] = values.get("source_name")
        members = members_of(index)
        known["members"] = None if members is None else members.words.to_json()
    return known


def _from_text(text: str) -> dict[str, Any]:
    """Return the settings of a text; commas before ``key=`` separate: ``split=969,30,1,seed=1``."""
    given: dict[str, Any] = {}
    for part in re.split(r",(?=\s*\w+=)", text):
        key, equals, value = part.partition("=")
        if not equals:
            raise InvalidArgument(
                f"{text!r} is neither a directory, nor a file, nor settings; write settings as "
                "order=neox,seed=1"
            )
        given[key.strip().replace("-", "_")] = value.strip()
    return given


def _from_file(path: str) -> dict[str, Any]:
    return _parsed(read_named(path, "settings"), path)


def _parsed(raw: bytes, path: str) -> dict[str, Any]:
    try:
        content = yaml.safe_load(raw.decode())
    except (ValueError, yaml.YAMLError, RecursionError) as error:
        reason = " ".join(str(error).split())
        raise FormatError(f"{path}: settings must be YAML or JSON, but {reason}") from error
    if not isinstance(content, dict):
        raise FormatError(f"{path}: settings must be a mapping such as 'order: neox'")
    return {str(key).replace("-", "_"): value for key, value in content.items()}


def _is(text: str, kind: Callable[[Path], bool]) -> bool:
    """Return True if a path is of a kind; settings too long for a path are not."""
    try:
        return kind(Path(text))
    except OSError as error:
        if _SETTING.match(text):
            return False
        raise storage_error(error, text, "cannot read its status") from error


def _begins_arrays(path: Path) -> bool:
    return path.parent.is_dir() and any(path.parent.glob(f"{escape(path.name)}*.npy"))


def _typed_value(text: str, key: str, value: Any) -> Any:
    try:
        if key in _WORDS:
            return str(value)
        if key in _INTEGERS:
            return int(str(value))
        if key == "final_epoch_threshold":
            return float(value)
        return {"true": True, "false": False}[str(value).lower()]
    except (ValueError, TypeError, KeyError):
        raise InvalidArgument(f"{text}: {key} cannot be {value!r}") from None


def existing(path: str) -> Path | None:
    """Return the path of a directory, or of array files by common prefix; None for settings.

    Raises:
        MissingFile: the file does not exist, and the text has no ``=`` of a setting.
        InvalidArgument: it is a URL.
        StorageError: its status cannot be read.
    """
    check_local(path, "copy it to a disk: a side is a local file or directory, or settings")
    if _is(path, Path.is_dir) or _is(path, _begins_arrays):
        return Path(path)
    if "=" not in path and not _is(path, Path.is_file):
        raise MissingFile(
            f"{path}: no such directory or file; give a cache entry, a directory with index "
            "arrays, a settings file, or settings such as order=neox,seed=1"
        )
    return None


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
    else:  # lengths beyond every offset, with which token runs still differ by their offsets
        ends = int(arrays["document_index"].max(initial=0)) + 1
        lengths, dataset = np.full(ends, INT32_MAX, np.int32), None
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
    names = ("order", "sequence_length", "max_documents", "long_documents", "align")
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
        array: IntArray = map_npy_file(str(path))
    except ValueError as error:
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


def is_settings(path: str) -> bool:
    """Return True for a YAML or JSON file whose keys are all settings of a side."""
    raw = read_named(path, "settings")
    if is_lock(raw):  # which takes seconds to parse as YAML
        return False
    try:
        return {_ALIASES.get(key, key) for key in _parsed(raw, path)} <= {*_KEYS}
    except FormatError:
        return False
