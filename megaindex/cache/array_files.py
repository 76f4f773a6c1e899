"""One set of index arrays under a framework's file names: names, paths, record and file states.

Names are taken from megatron-core 0.16.1 (``MegatronDataset``), GPT-NeoX (main, 2026-05,
``_build_index_mappings``), PaddleNLP 3.0.0b4 (``_build_index_mappings``) and MaxText (pull request
4625, ``compute_index_hash``), one row per framework.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from megaindex._types import IntArray
from megaindex.arithmetic import epochs_for, final_epoch
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.index.frameworks import FRAMEWORK_RULES, FrameworkRules, Split, parse_split
from megaindex.io.paths import storage_error


class Listing:
    """The names and inodes of the files in a directory at one moment.

    A blend of 1500 datasets looks for 7500 files: as many system calls, or messages on a network,
    where a listing takes a few dozen. It does not contain sizes; they are compared when the files
    are mapped.
    """

    def __init__(self, inodes: dict[str, int]) -> None:
        self._inodes = inodes
        self.sidecars: dict[int, dict[str, Sidecar]] = {}
        """Sets by name of each sidecar file that was read, by its inode, since many names are hard
        links to one file."""
        self.accepted: list[tuple[ArrayFiles, Sidecar]] = []
        """Sets written by the framework that were checked and have to be recorded."""
        self.verified: list[tuple[ArrayFiles, Sidecar]] = []
        """Sets recorded under another boot that are complete and have to be marked as durable."""

    @classmethod
    def of(cls, directory: str, at_most: int) -> Listing | None:
        """Return the listing of a directory; None if it has more than ``at_most`` names or cannot
        be listed."""
        inodes: dict[str, int] = {}
        prefix = f"{directory}/"
        try:
            with os.scandir(directory) as entries:
                for entry in entries:
                    inodes[prefix + entry.name] = entry.inode()
                    if len(inodes) > at_most:
                        return None
        except FileNotFoundError:
            return cls({})
        except OSError:
            return None
        return cls(inodes)

    def __contains__(self, path: str) -> bool:
        return path in self._inodes

    def inode(self, path: str) -> int | None:
        """Return the inode of a name; on union file systems it may differ from ``os.stat``'s."""
        return self._inodes.get(path)

    def shows(self, files: ArrayFiles, sidecar: Sidecar) -> bool:
        """Return True if all files exist and have the inodes that the sidecar records."""
        inodes = self._inodes
        return (
            # files of a set in doubt are read, so their state is asked for anyway
            not sidecar.in_doubt
            and (files.marker is None or files.marker in inodes)
            and all(
                inodes.get(path) == sidecar.files[name][-1] for name, path in files.arrays.items()
            )
        )


def current_states(
    files: ArrayFiles, sidecar: Sidecar | None, listing: Listing | None
) -> dict[str, FileState] | None:
    """Return the state of each array file; None if a file is missing.

    With a ``listing`` that has the recorded inodes the recorded states are returned.
    """
    if listing is not None and sidecar is not None and listing.shows(files, sidecar):
        return sidecar.files
    if not files.are_there(os.path.isfile if listing is None else listing.__contains__):
        return None
    try:
        return states_of(files.arrays)
    except MissingFile:  # removed meanwhile by another builder
        return None


Arrays = dict[str, IntArray]
ArrayRecord = tuple[str, tuple[int, ...], int]
"""dtype, shape, and bytes of the header of an .npy file."""
FileState = list[int]
"""Size in bytes, time of the last change in nanoseconds, and inode. Renaming a file keeps them."""
SUFFIX = "-megaindex.json"


@dataclass(kw_only=True, slots=True)
class ArrayFiles:
    """Paths of one set of arrays."""

    arrays: Mapping[str, str]
    """Path of the .npy file of each array."""
    sidecar: str
    """Path of the sidecar, which ends in ``-megaindex.json``."""
    marker: str | None = None
    """Path of a text file without which the framework does not find the arrays; None where it
    writes no such file."""

    @property
    def paths(self) -> list[str]:
        """Paths of all files that the framework looks for."""
        return [*self.arrays.values(), *([self.marker] if self.marker else [])]

    @property
    def name(self) -> str:
        """Name of the set in the sidecar."""
        return self.sidecar.rpartition("/")[2].removesuffix(SUFFIX)

    @property
    def endings(self) -> tuple[dict[str, str], str | None]:
        """Endings of the names of its arrays, and of its marker, after the name of the set."""
        base = str(self)
        arrays = {name: path.removeprefix(base) for name, path in self.arrays.items()}
        return arrays, self.marker and self.marker.removeprefix(base)

    def are_there(self, is_there: Callable[[str], bool] = os.path.isfile) -> bool:
        """Return True if the framework would find the arrays."""
        return all(map(is_there, self.paths))

    def __str__(self) -> str:
        return self.sidecar.removesuffix(SUFFIX)


@dataclass(kw_only=True)
class Sidecar:
    """The record of one set of arrays."""

    origin: str
    """``built`` by megaindex; ``found``: written by the framework, then checked and accepted;
    ``exported``: another order, for the framework's own reader."""
    settings: Mapping[str, Any]
    """All values besides the corpus that the arrays depend on."""
    corpus: str
    """Fingerprint of the corpus; empty where the arrays depend on none."""
    stamp: list[int]
    """Sizes and times of the corpus's files when the fingerprint was taken."""
    facts: Mapping[str, Any]
    """Derived values, so that they need not be computed again."""
    arrays: Mapping[str, ArrayRecord]
    files: dict[str, FileState]
    """State of each file when it was recorded; the record does not hold for files of another
    state."""
    checksums: Mapping[str, str] | None
    """XXH3-128 of the elements of each array; None for a sidecar that was read and is not in
    doubt."""
    in_doubt: bool = False
    """True for a set recorded under another boot and not marked as durable: a power loss may have
    taken pages of its files. Not part of the record."""


@dataclass(kw_only=True, slots=True)
class Identity:
    """The inputs of a request, as functions that are called only if a sidecar leaves them open."""

    settings: Callable[[], Mapping[str, Any]]
    corpus: Callable[[], str]
    stamp: list[int] = field(default_factory=list)
    facts: Callable[[], Mapping[str, Any]] = dict
    learn: Callable[[Mapping[str, Any]], object] = dict
    """Called with the facts of a sidecar whose stamp is that of the corpus."""

    def is_of(self, sidecar: Sidecar) -> bool:
        """Return True if the sidecar records the corpus and the settings of this request."""
        known = bool(self.stamp) and sidecar.stamp == self.stamp
        if known:
            self.learn(sidecar.facts)
        return (known or sidecar.corpus == self.corpus()) and sidecar.settings == self.settings()

    def sidecar(
        self,
        origin: str,
        arrays: Mapping[str, ArrayRecord],
        files: dict[str, FileState],
        checksums: Mapping[str, str],
    ) -> Sidecar:
        """Return the record of arrays that are those of this identity."""
        return Sidecar(
            origin=origin,
            settings=self.settings(),
            corpus=self.corpus(),
            stamp=self.stamp,
            facts=self.facts(),
            arrays=arrays,
            files=files,
            checksums=checksums,
        )


def states_of(paths: Mapping[str, str]) -> dict[str, FileState]:
    """Return the state of each file; MissingFile if one is not there."""
    states = {}
    path = ""
    try:
        for name, path in paths.items():
            states[name] = state_of(os.stat(path))
    except OSError as error:
        raise storage_error(error, path, "cannot read the status of") from error
    return states


def state_of(status: os.stat_result) -> FileState:
    return [status.st_size, status.st_mtime_ns, status.st_ino]


def changed(files: ArrayFiles) -> FormatError:
    """Return the error for files that are not those that were recorded."""
    return FormatError(
        f"{files}-*: these are not the files that {files.sidecar} was written for; remove all "
        "files of that name, they will be built again"
    )


_SHORT_NAMES = {
    "document_index": "doc_idx",
    "sample_index": "sample_idx",
    "shuffle_index": "shuffle_idx",
}


@dataclass(frozen=True, kw_only=True)
class NamedDataset:
    """The values of a dataset by which a framework names its arrays."""

    path: str
    """Prefix of the pair, as the framework's configuration spells it."""
    subset: Split
    num_samples: int | None
    """Samples that the framework requests; None: it asks for one epoch."""
    sequence_length: int
    seed: int
    split: str | None
    """Shares of train, valid and test; None: the subset has a path of its own, or all documents."""
    apart: bool
    """True if each subset has paths of its own."""
    tokens: int
    """Tokens of one epoch."""
    template: str = ""
    """Text of a description that Megatron-LM wrote for a dataset with the same tokenizer."""
    template_path: str = ""


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """A framework that reads index arrays from files."""

    order: str
    """Order of megaindex with its rules for splits and requests."""
    files: Callable[[NamedDataset, str | None], tuple[ArrayFiles, str]]
    """Function of a dataset and of the folder of ``--cache-dir`` that returns the paths, and the
    text of the marker."""
    folder: Literal["required", "optional", "none"]
    pads: bool
    """True if its reader completes samples of fewer tokens, without loss."""
    length: Literal["rows", "shuffle"]
    """The array that decides the length of its dataset."""
    subsets: tuple[Split, ...] = ("train", "valid", "test")
    """Subsets whose number of samples follows from the settings of a run."""
    one_document_each: bool = False
    """True if sequences and documents must be the same."""
    missed: str
    """Words of its log if it does not find the files and builds its own."""
    setting: str
    """Its setting for the folder."""

    @property
    def rules(self) -> FrameworkRules:
        """Rules of its own order."""
        return FRAMEWORK_RULES[self.order]


def neox_base(
    data_prefix: str, name: str, num_samples: int | None, seq_length: int, seed: int, pack_impl: str
) -> str:
    """Return the common prefix of the names of a dataset's arrays, without allow_chopped's mark."""
    return f"{data_prefix}_{name}_indexmap_{num_samples}ns_{seq_length}sl_{seed}s_{pack_impl}pi"


def short_files(base: str, marker: str | None = None) -> ArrayFiles:
    """Return the paths of one set as GPT-NeoX and PaddleNLP name them, and of their sidecar."""
    return ArrayFiles(
        arrays={ours: f"{base}_{theirs}.npy" for ours, theirs in _SHORT_NAMES.items()},
        sidecar=f"{base}{SUFFIX}",
        marker=marker,
    )


def megatron_files(directory: str | None, base: str) -> ArrayFiles | None:
    """Return the paths of one dataset's files, as Megatron names them; None in memory."""
    return None if directory is None else _long_files(directory, base, "-description.txt")


def _long_files(directory: str, base: str, marker: str | None) -> ArrayFiles:
    path = f"{directory}/{base}"
    return ArrayFiles(
        arrays={name: f"{path}-{name}.npy" for name in _SHORT_NAMES},
        sidecar=f"{path}{SUFFIX}",
        marker=marker and f"{path}{marker}",
    )


def _md5(text: str) -> str:
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def _neox(dataset: NamedDataset, _: str | None) -> tuple[ArrayFiles, str]:
    name = f"{dataset.subset}_0" if dataset.apart else dataset.subset
    shape = (dataset.num_samples, dataset.sequence_length, dataset.seed)
    return short_files(neox_base(dataset.path, name, *shape, "packed") + "_ac"), ""


def _megatron(dataset: NamedDataset, folder: str | None) -> tuple[ArrayFiles, str]:
    described = _described(dataset)
    described |= {
        "dataset_path": dataset.path,
        "num_samples": dataset.num_samples,
        "index_split": dataset.subset,
        "random_seed": dataset.seed,
        "sequence_length": dataset.sequence_length,
    }
    text = json.dumps(described, indent=4)
    base = f"{_md5(text)}-{described['class']}-{dataset.subset}"
    return _long_files(folder or ".", base, "-description.txt"), text


def _described(dataset: NamedDataset) -> dict[str, Any]:
    """Return the description that Megatron-LM wrote for another dataset."""
    where = dataset.template_path
    needed = ("class", "dataset_path", "num_samples", "index_split", "random_seed",
              "sequence_length", "split", "split_matrix", "tokenizer")  # fmt: skip
    try:
        found: Any = json.loads(dataset.template)
        missing = [name for name in needed if name not in found]
        if missing or json.dumps(found, indent=4) != dataset.template:
            raise ValueError(f"without {missing[0]}" if missing else "not written as by it")
    except (ValueError, TypeError, RecursionError) as error:
        raise FormatError(
            f"{where}: is not a description of a GPTDataset of Megatron-LM: {error}; give a "
            "…-description.txt that it wrote beside index arrays"
        ) from None
    theirs, ours = found["split"], dataset.split
    shares = [
        None if text is None else parse_split(str(text), "megatron") for text in (theirs, ours)
    ]
    if shares[0] != shares[1]:
        raise InvalidArgument(
            f"{where}: its run has the split {theirs}, this one {ours}; give --split as there, or "
            "the description of a run with this split"
        )
    return dict(found)


def _paddlenlp(dataset: NamedDataset, folder: str | None) -> tuple[ArrayFiles, str]:
    if dataset.split is None:
        raise InvalidArgument(
            "--split is missing: PaddleNLP names its arrays by the text of its --split; give the "
            "same text, 949,50,1 by default"
        )
    text = (
        f"GPT Dataset\n\nData prefix {dataset.path}\nDataset name {dataset.subset}\n"
        f"Number of samples {dataset.num_samples}\nSequence length {dataset.sequence_length}\n"
        f"Random seed {dataset.seed}\nSplit {dataset.split}\n"
    )
    name = _md5(text)
    beside = os.path.join(os.path.dirname(dataset.path), "index-cache")
    first = short_files(f"{beside}/{name}", f"{beside}/{name}.dsc")
    if folder is None or os.path.realpath(folder) == os.path.realpath(beside):
        return first, text
    if first.are_there():
        raise FormatError(
            f"{first}_*: PaddleNLP reads these index arrays, which lie beside the data, and does "
            f"not look into {folder}; remove them, or leave --cache-dir out"
        )
    return short_files(f"{folder}/{name}", f"{folder}/{name}.dsc"), text


def _maxtext(dataset: NamedDataset, folder: str | None) -> tuple[ArrayFiles, str]:
    assert dataset.num_samples is not None, "MaxText trains for a number of steps"
    shape = (dataset.tokens, dataset.sequence_length, 1)
    epochs = epochs_for(dataset.num_samples, *shape)
    last = final_epoch(dataset.num_samples, epochs, *shape, policy="auto", threshold=0.80)
    values: Mapping[str, Any] = {
        "class": "MegatronNpyDataSource",
        "input_paths": [dataset.path],
        "num_epochs": epochs,
        "separate_final_epoch": last.apart,
        "seed": dataset.seed,
        "sequence_length": dataset.sequence_length,
        "split": dataset.split,
        "split_index": 0,
        "add_extra_token": 1,
    }
    return _long_files(folder or ".", _md5(json.dumps(values, indent=4)), None), ""


EXPORT_FORMATS: Mapping[str, ExportFormat] = {
    "megatron": ExportFormat(
        order="megatron",
        files=_megatron,
        folder="required",
        pads=True,
        length="rows",
        missed="Build and save the GPTDataset",
        setting="--data-cache-path",
    ),
    "neox": ExportFormat(
        order="neox",
        files=_neox,
        folder="none",
        pads=False,
        length="rows",
        missed="could not find index map files",
        setting="",
    ),
    "maxtext": ExportFormat(
        order="megatron",
        files=_maxtext,
        folder="required",
        pads=True,
        length="shuffle",
        subsets=("train",),
        one_document_each=True,
        missed="Cache miss: building npy indices",
        setting="grain_train_files=DIR|PREFIX",
    ),
    "paddlenlp": ExportFormat(
        order="paddlenlp",
        files=_paddlenlp,
        folder="optional",
        pads=False,
        length="rows",
        subsets=("train", "valid"),
        missed="build_indices=True",
        setting="--data_cache",
    ),
}
