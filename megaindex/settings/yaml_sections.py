"""YAML files of settings, with errors that name file and key."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from fractions import Fraction
from typing import Any

from megaindex.errors import InvalidArgument, StorageError
from megaindex.index.subset_rule import Share
from megaindex.io.atomic import read_named
from megaindex.io.paths import path_text
from megaindex.validation import check_integer, check_setting, parse_fraction, shown

TOKENIZE = "write it as JSONL or Parquet, then `megaindex tokenize PREFIX FILE --tokenizer …`"
"""Remedy for a dataset that a configuration names and that has no token files."""

COUNTS = (
    "tokens", "samples", "steps", "choose", "epoch_size", "block_tokens", "num_samples",
    "consumed_samples",
)  # fmt: skip
"""Settings that may end in K, M, B or T, powers of 1000; of others 2K may be meant as 2048."""
_MERGE = "tag:yaml.org,2002:merge"
_MOST_MERGED = 100_000


def load_mapping(
    path: str | os.PathLike[str], what: str, *, last_wins: bool = False
) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Args:
        path: the file.
        what: flag that names the file, such as ``--recipe``, for messages.
        last_wins: take the last of equal keys, as YAML's own loader does, instead of refusing them.

    Raises:
        MissingFile, StorageError: the file cannot be read.
        InvalidArgument: it is a URL, is not YAML, is not a mapping, or has a key twice.
    """
    content = load_yaml(path, what, last_wins=last_wins)
    if not isinstance(content, Mapping):
        raise InvalidArgument(
            f"{what}: {os.fspath(path)} holds a {type(content).__name__}; it must be a mapping of "
            "settings to values"
        )
    return {str(key): value for key, value in content.items()}


def read_text(path: str, what: str) -> str:
    """Return the text of a file that the flag or key ``what`` names.

    Raises:
        MissingFile, StorageError: the file cannot be read.
    """
    raw = read_named(path, what)
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise StorageError(f"{what}: {path} cannot be read: {error}") from None
    return text.replace("\r\n", "\n").replace("\r", "\n")


def load_yaml(path: str | os.PathLike[str], what: str, *, last_wins: bool = False) -> Any:
    """Return the content of a YAML file, see `load_mapping`."""
    name = path_text(path)
    return parse_yaml(read_named(name, what), name, what, last_wins=last_wins)


def parse_yaml(raw: bytes, name: str, what: str, *, last_wins: bool = False) -> Any:
    """Return the content of the bytes of a YAML file called ``name``, see `load_mapping`."""
    import yaml

    try:
        return yaml.load(raw.decode(), _loader(last_wins=last_wins))
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # 2001-02-30; [[[[...
        reason = " ".join(str(error).split())
        raise InvalidArgument(f"{what}: {name} is not YAML: {reason}") from None


@functools.cache
def _loader(*, last_wins: bool) -> Any:
    """Return a safe loader that limits expanded merge keys, and may refuse equal keys."""
    import yaml

    class Loader(yaml.SafeLoader):
        def flatten_mapping(self, node: Any) -> None:
            """Expand merge keys, of whose mappings the first wins, in every release of PyYAML."""
            merged: list[Any] = []
            for each in _merged_nodes(node):
                self.flatten_mapping(each)
                merged += each.value
                if len(node.value) + len(merged) > _MOST_MERGED:
                    line = node.start_mark.line + 1
                    raise yaml.YAMLError(
                        f"line {line}: the merge keys (<<) of one mapping expand to more than "
                        f"{_MOST_MERGED} entries; merge fewer"
                    )
            node.value = merged + [pair for pair in node.value if not _merges_mappings(*pair)]
            super().flatten_mapping(node)  # which refuses the merge keys that are left

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if not last_wins and isinstance(node, yaml.MappingNode):
                _refuse_equal_keys(node)
            return super().construct_mapping(node, deep)

    return Loader


def _merged_nodes(node: Any) -> list[Any]:
    """Return the mapping nodes that the merge keys of a mapping node name; later ones win."""
    named = [_nodes(value) for key, value in node.value if _merges_mappings(key, value)]
    return [each for nodes in named for each in reversed(nodes)]


def _merges_mappings(key: Any, value: Any) -> bool:
    import yaml

    is_mapping = (isinstance(each, yaml.MappingNode) for each in _nodes(value))
    return key.tag == _MERGE and all(is_mapping)


def _nodes(value: Any) -> list[Any]:
    """Return the nodes of a sequence node, or the node itself."""
    import yaml

    return value.value if isinstance(value, yaml.SequenceNode) else [value]


def _refuse_equal_keys(node: Any) -> None:
    import yaml

    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
            if key.value in seen:
                line = key.start_mark.line + 1
                raise yaml.YAMLError(f"line {line}: {key.value} is given twice")
            seen.add(key.value)


@dataclass(frozen=True)
class Section:
    """A mapping in a file, with its place for messages: ``run.yaml: stages.decay``."""

    file: str
    values: Mapping[str, Any]
    path: str = ""

    @property
    def where(self) -> str:
        return f"{self.file}: {self.path}" if self.path else self.file

    def called(self, name: str) -> str:
        """Return the place of a key of this mapping, for messages."""
        return f"{self.where}{'.' if self.path else ': '}{name}"

    def known(self, *names: str) -> None:
        """Refuse keys other than ``names``."""
        for key in self.values:
            if key not in names:
                near = difflib.get_close_matches(str(key), names, 1)
                hint = f"; did you mean {near[0]}?" if near else f"; known are {', '.join(names)}"
                raise InvalidArgument(f"{self.where}: unknown setting {key}{hint}")

    def section(self, name: str, *, default: Mapping[str, Any] | None = None) -> Section:
        """Return a mapping inside this one."""
        value = self.values.get(name, default)
        if not isinstance(value, Mapping):
            raise self.error(name, f"a mapping, as {name}: {{KEY: VALUE}} on one line or several")
        path = f"{self.path}.{name}" if self.path else name
        return Section(self.file, {str(key): item for key, item in value.items()}, path)

    def given(self, kind: type[Any], *left_out: str) -> dict[str, Any]:
        """Return the values of the fields of a dataclass, read by their types; without None."""
        readers = {
            "int": self.integer,
            "int | None": self.integer,
            "float": self.fraction,
            "Fraction | None": self.fraction,
            "Share | None": self.share,
            "bool": self.flag,
        }
        found = {
            field.name: readers.get(str(field.type), self.text)(field.name)
            for field in fields(kind)
            if field.name in self.values and field.name not in left_out
        }
        return {name: value for name, value in found.items() if value is not None}

    def items(self) -> Iterable[tuple[str, Any]]:
        return self.values.items()

    def text(self, name: str, default: str = "") -> str:
        value = self.values.get(name, default)
        if not isinstance(value, str):
            raise self.error(name, "text")
        return value

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.error(name, "true or false")
        return value

    def integer(self, name: str) -> int | None:
        """Return an integer, given as such or as text, of a count also such as 250B; None if it is
        missing."""
        from megaindex.settings.batch_schedule import parse_count

        value = self.values.get(name)
        if value is None:
            return None
        word = self.called(name)
        if isinstance(value, str):
            if name not in COUNTS and not value.strip()[-1:].isdigit():
                raise self.error(name, "a whole number in digits")
            value = parse_count(value, word)
        return check_setting(name, check_integer(word, value, flags=False), word)

    def fraction(self, name: str) -> Fraction | None:
        """Return a number exactly as written: 0.1 is 1/10, "1/3" a third."""
        value = self.values.get(name)
        if value is None:
            return None
        try:
            return parse_fraction(value if isinstance(value, str) else repr(value))
        except ValueError:
            raise self.error(name, 'a number such as 2, 0.7 or "1/3"') from None

    def share(self, name: str) -> Share | None:
        """Return a share of tokens, or a threshold in quotes, of which YAML makes no number."""
        value = self.values.get(name)
        if type(value) is int and value > 1:
            raise self.error(name, "a share up to 1, or a threshold in quotes")
        if isinstance(value, str) and value.startswith("0x"):
            return value
        return self.fraction(name)

    def error(self, name: str, kind: str) -> InvalidArgument:
        if name not in self.values:
            return InvalidArgument(f"{self.called(name)} is missing; it must be {kind}")
        found = shown(self.values[name])
        return InvalidArgument(f"{self.called(name)} must be {kind}, got {found}")
