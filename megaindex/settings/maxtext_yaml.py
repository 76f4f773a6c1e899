"""MaxText configurations: merged files, batch sizes, and the data files of grain.

Keys are those of MaxText main (2026-08). Files name their base in ``base_config``; words
``key=value``, as on MaxText's command line, replace those of the files.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from megaindex.arithmetic import global_batch_size
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.io.paths import inside
from megaindex.settings.settings import Settings
from megaindex.settings.yaml_sections import TOKENIZE, Section, load_mapping
from megaindex.validation import check_between, check_choice, check_integer

FLAG = "--maxtext-config"
_MOST_FILES = 16
_WORD = re.compile(r"(\w+)=(.*)", re.DOTALL)
_DEFAULTS = {
    "per_device_batch_size": 12.0,
    "gradient_accumulation_steps": 1,
    "max_target_length": 2048,
    "steps": 150_001,
    "learning_rate_schedule_steps": -1,
    "num_epoch": 1,
    "packing": True,
    "dataset_type": "tfds",
    "grain_file_type": "arrayrecord",
    "grain_packing_type": "first_fit",
    "use_truncation": True,
    "enable_data_shuffling": True,
    "data_shuffle_seed": 0,
    "max_segments_per_seq": -1,
    "eval_interval": -1,
    "eval_steps": -1,
    "eval_per_device_batch_size": 0.0,
    "eval_start_step": 0,
    "expansion_factor_real_data": -1,
    "blend_index_dir": "",
}
_TAKEN = (
    *_DEFAULTS, "base_config", "grain_train_files", "grain_eval_files", "mmap_npy_split",
    "grain_train_mixture_config_path", "enable_rampup_batch_size",
)  # fmt: skip
# Similar keys of MaxText itself, which do not matter here.
_OTHERS = ("per_device_batch_size_start", "per_device_batch_size_increment")
_REMEDIES = {
    "hf": TOKENIZE,
    "tfds": TOKENIZE,
    "synthetic": "it reads no files; plan it with `megaindex plan --tokens-per-epoch …`",
    "olmo_grain": "make pairs of the token files with `megaindex import numpy`, then write a "
    "recipe",
}


@dataclass(frozen=True, kw_only=True)
class DataFiles:
    """One entry of grain_train_files, or of a mixture file."""

    name: str
    prefix: str
    """Prefix of the .bin/.idx pair."""
    weight: Fraction | None
    """None of a single entry."""


@dataclass(frozen=True, kw_only=True)
class MaxTextConfig:
    """A merged configuration, on a number of devices."""

    values: Section
    folder: Path
    """Directory that relative paths are relative to."""
    devices: int

    @property
    def is_megatron(self) -> bool:
        """True if the samples are those of Megatron-LM (grain_file_type mmap_npy)."""
        return self.values.text("grain_file_type") == "mmap_npy"

    def number(self, name: str) -> int:
        """Return an integer; MaxText's -1 stands for "not given"."""
        return check_integer(self.values.called(name), self.values.values.get(name), flags=False)

    def count(self, name: str) -> int:
        """Return an integer from 1."""
        return check_between(self.values.called(name), self.number(name), 1)

    @property
    def steps(self) -> int:
        given = self.number("steps") != -1
        return self.count("steps" if given else "learning_rate_schedule_steps")

    @property
    def micro_batch_size(self) -> int | None:
        """Rows of a device in a micro batch; None if it is not whole."""
        rows = self._rows("per_device_batch_size")
        return int(rows) if rows.denominator == 1 else None

    @property
    def accumulation(self) -> int:
        return self.count("gradient_accumulation_steps")

    @property
    def batch(self) -> int:
        """Rows of a step: MaxText's global_batch_size_to_train_on."""
        rows = int(self._rows("per_device_batch_size") * self.devices)
        return global_batch_size(rows, 1, self.accumulation)

    @property
    def eval_batch(self) -> int | None:
        """Rows of a batch of an evaluation; None: those of training."""
        rows = int(self._rows("eval_per_device_batch_size") * self.devices)
        return rows or None

    def _rows(self, name: str) -> Fraction:
        rows = self.values.fraction(name)
        if rows is None or rows < 0:
            raise self.values.error(name, "a number of rows of at least 0")
        if rows < 1 and (rows or name == "per_device_batch_size"):
            # MaxText then loads a row for each device, and drops those over
            raise self.values.error(
                name, "at least 1: below that, hosts read other rows than they train on"
            )
        return rows

    def files(self, name: str) -> list[DataFiles]:
        """Return the entries of ``grain_train_files`` or ``grain_eval_files``."""
        mixture = self.values.text("grain_train_mixture_config_path")
        if name == "grain_train_files" and mixture:
            return self._mixture(mixture)
        parts = [part for part in self.values.text(name).split(";") if part.strip()]
        if not parts:
            raise InvalidArgument(f"{self.values.called(name)} is missing: the files of the data")
        return [self._part(part.strip(), len(parts) > 1, name) for part in parts]

    def _mixture(self, file: str) -> list[DataFiles]:
        """Return the entries of the file that ``grain_train_mixture_config_path`` names."""
        where = self.values.called("grain_train_mixture_config_path")
        if self.values.text("grain_file_type") != "arrayrecord":
            raise InvalidArgument(
                f"{where}: MaxText reads it for grain_file_type arrayrecord alone; write its files "
                "into grain_train_files"
            )
        path = inside(self.folder, file)
        entries = Section(path, load_mapping(path, f"{FLAG}: grain_train_mixture_config_path"))
        files = []
        for key in entries.values:
            section = entries.section(key)
            weight = section.fraction("weight")
            if weight is None:
                raise InvalidArgument(f"{section.called('weight')} is missing: MaxText needs it")
            files.append(self._entry(key, section.text("path"), weight, section.where))
        return files

    def _part(self, part: str, weighted: bool, name: str) -> DataFiles:
        where = self.values.called(name)
        path, comma, weight = part.rpartition(",")
        if not comma:
            path, weight = part, ""
        if weighted and not weight:
            raise InvalidArgument(f"{where}: {part} has no weight; write PATH,WEIGHT;PATH,WEIGHT")
        share = Section(self.values.file, {part: weight}).fraction(part) if weight else None
        return self._entry(path, path, share, where)

    def _entry(self, name: str, path: str, weight: Fraction | None, where: str) -> DataFiles:
        if weight is not None and weight < 0:
            raise InvalidArgument(f"{where}: the weight of {path} must be at least 0, got {weight}")
        if self.is_megatron:
            path = path.rpartition("|")[2]
        elif self.values.text("grain_file_type") == "arrayrecord":
            path = re.split(r"[*?\[]|\.array_?record", path)[0].rstrip("-_.")
        if not path or ":" in path or os.path.isdir(inside(self.folder, path)):
            raise InvalidArgument(
                f"{where}: {name} is not one file; join its shards with `megaindex merge` and "
                "give the prefix of that pair"
            )
        return DataFiles(name=name, prefix=inside(self.folder, path), weight=weight)


def read_maxtext_config(words: Sequence[str], devices: int | None) -> MaxTextConfig:
    """Return the configuration of files and ``key=value`` words, the later ones replacing.

    Args:
        words: YAML files, then words.
        devices: number of devices, which the files do not hold.

    Raises:
        MissingFile, StorageError: a file cannot be read.
        InvalidArgument: a setting is missing or wrong, or has no counterpart here.
    """
    files = [word for word in words if not _WORD.fullmatch(word)]
    if not files:
        raise InvalidArgument(f"{FLAG}: give a YAML file before words such as steps=1000")
    if devices is None:
        raise InvalidArgument(
            f"{FLAG}: per_device_batch_size is of one device; give --world-size, their number"
        )
    given: dict[str, Any] = {}
    for file in files:
        given |= _with_base(file)
    given |= _from_words([word for word in words if _WORD.fullmatch(word)])
    _refuse_typing_errors(given, files)
    values = Section(files[-1], _DEFAULTS | given)
    config = MaxTextConfig(values=values, folder=Path(files[-1]).parent, devices=devices)
    kind = values.text("dataset_type")
    if kind != "grain":
        remedy = _REMEDIES.get(kind, "use grain")
        raise InvalidArgument(f"{values.called('dataset_type')}: {kind} has no pair; {remedy}")
    kinds = ("arrayrecord", "mmap", "mmap_npy")
    if values.text("grain_file_type") not in kinds:
        raise InvalidArgument(
            f"{values.called('grain_file_type')}: {values.text('grain_file_type')} is shuffled by "
            "files and windows; make a pair with `megaindex tokenize` and use mmap"
        )
    check_choice(
        values.called("grain_packing_type"),
        values.text("grain_packing_type"),
        ("first_fit", "best_fit", "concat_then_split"),
    )
    if values.flag("enable_rampup_batch_size", False):
        raise InvalidArgument(
            f"{values.called('enable_rampup_batch_size')}: write a recipe with batch: {{schedule: "
            "…}} for a batch size that grows"
        )
    if values.fraction("expansion_factor_real_data") not in (-1, 1):
        raise values.error(
            "expansion_factor_real_data",
            "-1: with others, hosts read other rows than they train on",
        )
    if not config.is_megatron and not values.flag("enable_data_shuffling"):
        raise values.error("enable_data_shuffling", "true: the order here is always shuffled")
    return config


def _refuse_typing_errors(given: Mapping[str, Any], files: Sequence[str]) -> None:
    """Refuse unknown keys similar to those read here, as MaxText refuses every unknown key."""
    for key in given:
        near = difflib.get_close_matches(key, _TAKEN, 1, cutoff=0.8)
        if near and key not in (*_TAKEN, *_OTHERS):
            raise InvalidArgument(
                f"{FLAG}: {', '.join(files)}: MaxText has no setting {key}; did you mean {near[0]}?"
            )


def _with_base(path: str) -> dict[str, Any]:
    """Return the keys of a file over those of its base."""
    chain: list[dict[str, Any]] = []
    while path:
        if len(chain) == _MOST_FILES:
            raise InvalidArgument(
                f"{FLAG}: {path}: base_config names more than {_MOST_FILES} files"
            )
        content = load_mapping(path, FLAG, last_wins=True)
        chain.append(content)
        base = content.get("base_config")
        path = inside(Path(path).parent, base) if isinstance(base, str) and base else ""
    return {
        key: value
        for content in reversed(chain)
        for key, value in content.items()
        if value is not None  # an empty value leaves that of the base
    }


def _from_words(words: Sequence[str]) -> Mapping[str, Any]:
    import yaml

    given: dict[str, Any] = {}
    for word in words:
        key, _, text = word.partition("=")
        if not text.strip():
            raise InvalidArgument(f"{FLAG}: {word} has no value; give one, or leave the word out")
        try:
            given[key] = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:
            reason = " ".join(str(error).split())
            raise InvalidArgument(f"{FLAG}: {word}: {reason}") from None
    return given


def read_maxtext(words: Sequence[str], devices: int | None) -> Settings | None:
    """Return the settings of a run in Megatron's order, or None if the run is a recipe.

    With ``grain_file_type: mmap_npy`` MaxText reads the indices that Megatron-LM builds for the
    samples of all steps. Its evaluation, which begins its samples anew in each round, is not
    planned.
    """
    config = read_maxtext_config(words, devices)
    if not config.is_megatron:
        return None
    values = config.values
    train = _blend(config)
    split = values.values.get("mmap_npy_split")
    shares = [share for share in str(split or "").split(",") if share.strip()]
    if len(shares) > 3 or any(share.strip("0. ") for share in shares[2:]):
        raise values.error("mmap_npy_split", "two shares, of training and evaluation, then 0")
    if len(train) > 1 and values.text("blend_index_dir"):
        raise InvalidArgument(
            f"{values.called('blend_index_dir')}: a blend that was built before is not read; "
            "remove it to plan the blend that MaxText builds"
        )
    notes: tuple[str, ...] = ()
    if config.number("eval_interval") > 0:
        notes = ("the evaluation is not planned: MaxText begins its samples anew in each round",)
    return Settings(
        order="megatron",
        seq_length=config.count("max_target_length"),
        seed=config.number("data_shuffle_seed"),
        micro_batch_size=config.micro_batch_size,
        data_parallel_size=None if config.micro_batch_size is None else config.devices,
        global_batch_size=config.batch,
        train_iters=config.steps,
        eval_iters=0,
        data_path=train,
        split=",".join([*shares[:2], "0"]) if shares else "1,0,0",
        notes=notes,
    )


def _blend(config: MaxTextConfig) -> tuple[str, ...]:
    """Return the words of the blend of training; entries of weight 0 are left out."""
    files = config.files("grain_train_files")
    for each in files:
        _check_documents(each.prefix)
    if len(files) == 1:
        return (files[0].prefix,)
    drawn = [each for each in files if each.weight]
    if not drawn:
        raise all_weights_are_0(config)
    return tuple(word for each in drawn for word in (str(float(each.weight or 0)), each.prefix))


def _check_documents(prefix: str) -> None:
    """Refuse a pair with documents of several sequences, which MaxText orders as a whole.

    Raises:
        FormatError, StorageError: the pair is damaged, or cannot be read.
    """
    if not os.path.exists(f"{prefix}.idx"):
        return  # the plan names it
    pair = IndexedDataset(prefix)
    if len(pair.document_indices) - 1 != len(pair):
        raise InvalidArgument(
            f"{FLAG}: {prefix} has documents of several sequences: MaxText shuffles the documents, "
            "Megatron-LM's order the sequences; write it anew with a sequence a document"
        )


def all_weights_are_0(config: MaxTextConfig) -> InvalidArgument:
    """Return the error of files of training none of which is read."""
    name = config.values.called("grain_train_files")
    return InvalidArgument(f"{name}: all weights are 0; raise one of them")
