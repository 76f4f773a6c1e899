"""Sides of a comparison: settings to build an index from, or index arrays on disk."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from glob import escape
from pathlib import Path
from typing import Any

import yaml

from megaindex.arithmetic import final_epoch, samples_for_epochs, samples_in
from megaindex.builders import build_index
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.format import IndexedDataset
from megaindex.index.frameworks import select_documents
from megaindex.index.order_settings import make_order
from megaindex.index.spans import Index
from megaindex.io.os_errors import as_storage_error, storage_error
from megaindex.io.paths import check_local
from megaindex.validation import DEFAULT_SEED

_WORDS = ("data_path", "split", "subset", "epochs", "order", "separate_final_epoch", "left_over",
          "source_name", "long_documents")  # fmt: skip
_INTEGERS = ("sequence_length", "seed", "num_samples", "add_extra_token", "exact_num_epochs",
             "epochs_mixed", "max_documents")  # fmt: skip
_KEYS = (*_WORDS, *_INTEGERS, "final_epoch_threshold", "drop_last_partial")
_OF_ORDERS = ("separate_final_epoch", "final_epoch_threshold", "exact_num_epochs", "epochs_mixed",
              "left_over", "max_documents", "long_documents")  # fmt: skip
_SETTING = re.compile(r"\s*[\w-]+\s*=")
_ALIASES = {"seq_length": "sequence_length"}


@dataclass(frozen=True, kw_only=True, eq=False)
class Side:
    """One side of `compare`: an index, and the settings that it was built with.

    Attributes:
        name: name for messages.
        index: index of the side.
        settings: known settings, under the names of a cache entry's manifest.
        has_lengths: False for arrays of an unknown dataset, whose document lengths are unknown.
        recorded: True if the settings determine the arrays.
        damage: first difference from the checksums in the manifest; empty without one.
    """

    name: str
    index: Index
    settings: dict[str, Any]
    has_lengths: bool = True
    recorded: bool = True
    damage: str = ""


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
        raise InvalidArgument(
            f"{text}: unknown setting {', '.join(unknown)}; use {', '.join(_KEYS)}"
        )
    base = dict(common)
    if "epochs" in given or "num_samples" in given:  # alternatives
        base = {key: value for key, value in base.items() if key not in ("epochs", "num_samples")}
    return _typed(text, {**base, **given})


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
        known["final_epoch_apart"] = _final_epoch_apart(index, values)
    else:
        of_block = {"epochs_mixed": row.epochs_mixed, "left_over": row.left_over}
        known |= values["order"].settings if row.order == "packed" else of_block
        known["source_name"] = values.get("source_name")
    return known


def _final_epoch_apart(index: Index, values: Mapping[str, Any]) -> bool:
    row = values["order"].row
    size = (index.tokens_per_epoch, index.sequence_length, index.add_extra_token)
    wanted = values.get("num_samples")
    if wanted is None:
        epochs = Fraction(values["epochs"]) if "epochs" in values else None
        wanted = samples_in(*size) if epochs is None else samples_for_epochs(epochs, *size)
    threshold, policy = row.final_epoch_threshold, row.separate_final_epoch
    return final_epoch(wanted, index.num_epochs, *size, policy=policy, threshold=threshold).apart


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
    try:
        with as_storage_error(path, "cannot read the settings"):
            content = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
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


def _typed(text: str, values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _typed_value(text, key, value) for key, value in values.items()}


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
        MissingFile: the text has no ``=``, and there is no such file.
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
