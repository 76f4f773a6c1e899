"""Locks for publication: what their data are, from a file, and names without folders."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from megaindex.errors import InvalidArgument
from megaindex.io.paths import absolute
from megaindex.lock.lock_file import Lock
from megaindex.lock.pinned_files import Folder
from megaindex.lock.shape import ADDRESS, SOURCE_COLUMNS
from megaindex.settings.yaml_sections import Section, load_mapping
from megaindex.validation import shown

FACTS = ("title", "licence", "version", "address")
"""What the file of --about may say of the run, and of each source."""
_LONGEST = 1000  # characters of a fact
_URL = SOURCE_COLUMNS.index("url")


def with_about(lock: Lock, path: Folder) -> Lock:
    """Return a lock with the facts in a YAML file about its run and its sources.

    The file has ``title``, ``licence``, ``version`` and ``address`` of the run, and ``sources``: by
    the name of a source, or the path of a pair, the same facts, and ``url``, the address of the
    pair without .idx and .bin.

    Raises:
        MissingFile, StorageError: the file cannot be read.
        InvalidArgument: it has another setting or source, or a wrong value.
    """
    top = Section(os.fspath(path), load_mapping(path, "--about"))
    top.known(*FACTS, "sources")
    given = top.section("sources", default={})
    rows = [list(row) for row in lock.content["sources"]["rows"]]
    about: list[dict[str, str] | None] = [None] * len(rows)
    for name in given.values:
        source, row = given.section(name), _row_of(lock, given, name)
        source.known(*FACTS, "url")
        if about[row] is not None:
            raise InvalidArgument(f"{source.where}: is given twice, by two names; give it once")
        about[row] = _facts(source, FACTS)
        rows[row][_URL] = _facts(source, ("url",)).get("url")
    sources = {**lock.content["sources"], "rows": rows}
    described = {"run": _facts(top, FACTS), "sources": about}
    return replace(lock, content={**lock.content, "sources": sources, "about": described})


def _row_of(lock: Lock, given: Section, name: str) -> int:
    """Return the row of the source of a name, or of the pair at a path."""
    rows = {source.path: row for row, source in enumerate(lock.sources)}
    named = {absolute(path): row for path, row in rows.items()}
    for subset, content in lock.content["subsets"].items():
        named |= dict(zip(lock.names(subset), content["sources"], strict=True))
    row = named.get(name, rows.get(absolute(name)))
    if row is None:
        known = ", ".join(list(named)[:8])
        raise InvalidArgument(f"{given.called(name)}: is no source of the run; known are {known}")
    return row


def _facts(section: Section, names: tuple[str, ...]) -> dict[str, str]:
    found = {name: section.text(name).strip() for name in names if name in section.values}
    for name, value in found.items():
        is_address = name in ("address", "url")
        if not 0 < len(value) <= _LONGEST or not value.isprintable():
            raise section.error(name, f"printable text of 1 to {_LONGEST} characters")
        if is_address and not re.fullmatch(ADDRESS, value):
            raise section.error(name, "an address such as https://example.org/data")
    return found


def public_lock(lock: Lock) -> Lock:
    """Return a lock whose pairs and files have names without folders.

    Raises:
        InvalidArgument: another text of it has a folder of the run's files, such as a name that the
            shuffle of a source depends on.
    """
    content, taken = lock.content, set[str]()
    rows = [[_name(row[0], taken), *row[1:]] for row in content["sources"]["rows"]]
    files = [{**file, "path": _name(file["path"], taken)} for file in content["files"]]
    tokenizers = [{**each, "name": _name(each["name"], set())} for each in content["tokenizers"]]
    changed = {
        **content,
        "root": "",
        "sources": {**content["sources"], "rows": rows},
        "files": files,
        "tokenizers": tokenizers,
    }
    paths = [source.path for source in lock.sources] + [file.path for file in lock.files]
    folders = {os.path.expanduser("~"), *(path.rpartition("/")[0] for path in paths)} - {"", "/"}
    for where, text in _texts({k: v for k, v in changed.items() if k != "about"}, ""):
        relative = text.lstrip("./")
        is_end = "/" in relative and any(path.endswith(f"/{relative}") for path in paths)
        if is_end or any(folder in text for folder in folders):
            raise InvalidArgument(
                f"--public: {where}: shows a folder: {shown(text)}; give the source a name or a "
                "shuffle_name without it, and lock the run again"
            )
    return replace(lock, content=changed)


def _name(path: str, taken: set[str]) -> str:
    """Return the last part of a path, with a number if it is taken."""
    stem, suffix = os.path.splitext(path.rstrip("/").rpartition("/")[2])
    name, number = f"{stem}{suffix}", 1
    while name in taken:
        number += 1
        name = f"{stem}-{number}{suffix}"
    taken.add(name)
    return name


def _texts(value: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of all texts and keys in JSON values."""
    if isinstance(value, str):
        yield where, value
    elif isinstance(value, Mapping):
        for key, each in value.items():
            place = f"{where}.{key}".lstrip(".")
            yield place, key
            yield from _texts(each, place)
    elif isinstance(value, list):
        for number, each in enumerate(value):
            yield from _texts(each, f"{where}[{number}]")
