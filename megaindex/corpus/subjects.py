"""Subjects of `megaindex verify` and `inspect` at a path, in a folder or in a recipe."""

from __future__ import annotations

import contextlib
import errno
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megaindex.cache.array_files import SUFFIX
from megaindex.cache.entry import MANIFEST
from megaindex.cache.fingerprint import is_records_name
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.format.findings import SubjectKind
from megaindex.io.paths import (
    as_storage_error,
    check_file,
    is_remote,
    names_folder,
    path_text,
    plain,
)
from megaindex.objects.files import list_remote, stat_path
from megaindex.settings.recipe import Recipe
from megaindex.settings.recipe_file import read_recipe
from megaindex.settings.run_words import kinds_of_file

_ENTRY_NAME = re.compile(r"[0-9a-f]{32}")

_FILES: dict[str, SubjectKind] = {".yaml": "recipe", ".yml": "recipe", ".lock": "lock"}


@dataclass(frozen=True, kw_only=True)
class Subject:
    """Something to verify or inspect."""

    kind: SubjectKind
    path: str
    """Prefix of a pair, directory of an entry or of a cache, snapshot, sidecar, recipe or lock."""


def subjects(path: str | os.PathLike[str]) -> list[Subject]:
    """Return the subjects at `path`.

    Args:
        path: prefix or half of a pair, cache entry, cache, snapshot, sidecar, recipe, lock, or a
            folder of pairs and sidecars; the URL of a pair or of a folder of pairs.

    Raises:
        MissingFile: nothing exists at `path`.
        StorageError: a recipe is not a regular file, or the path cannot be read.
        InvalidArgument: the file is of another kind, or the folder holds no subject.
    """
    text = plain(path_text(path))
    if text.endswith((".idx", ".bin")) and not os.path.isdir(text):
        return [Subject(kind="pair", path=text[:-4])]
    is_folder = is_remote(text) and names_folder(text)
    if not is_folder and (_is_there(text, ".idx") or _is_there(text, ".bin")):
        return [Subject(kind="pair", path=text)]
    if is_remote(text):
        return _in_bucket(text)
    if os.path.isdir(text):
        return _in_folder(Path(text))
    if not os.path.lexists(text):
        raise MissingFile(f"{text}: does not exist, nor do {text}.idx and {text}.bin; check it")
    if text.endswith(SUFFIX):
        return [_json_subject(text)]
    check_file(text)  # opening a pipe would block
    kind = _FILES.get(os.path.splitext(text)[1]) or _kind_by_content(text)
    if kind is not None:
        return [Subject(kind=kind, path=text)]
    raise InvalidArgument(
        f"{text}: must be an .idx, a .bin, a recipe (.yaml), a lock (.lock) or a sidecar "
        f"(…{SUFFIX}); give the prefix of a pair"
    )


def _kind_by_content(text: str) -> SubjectKind | None:
    kinds: dict[str, SubjectKind] = {"recipe": "recipe", "lock": "lock"}
    with contextlib.suppress(InvalidArgument):
        found = kinds_of_file(text)
        return kinds.get(found[0]) if len(found) == 1 else None
    return None


def _is_there(text: str, suffix: str) -> bool:
    try:
        return stat_path(text + suffix) is not None
    except StorageError as error:
        # a folder's name may be too long for a pair of that name
        if error.errno == errno.ENAMETOOLONG and os.path.lexists(text):
            return False
        raise


def _in_folder(folder: Path) -> list[Subject]:
    if os.path.lexists(folder / MANIFEST) or _ENTRY_NAME.fullmatch(folder.name):
        return [Subject(kind="cache entry", path=str(folder))]
    with as_storage_error(str(folder), "cannot list"):
        names = sorted(os.listdir(folder))
    found = [_pair(str(folder / name)) for name in names if name.endswith(".idx")]
    if any(_ENTRY_NAME.fullmatch(name) or name.startswith("tmp.") for name in names):
        found.append(Subject(kind="cache", path=str(folder)))
    found += _snapshots_and_sidecars(folder, names)
    if not found:
        raise InvalidArgument(
            f"{folder}: holds no .idx, no cache entry and no sidecar; check the path"
        )
    return found


def _in_bucket(url: str) -> list[Subject]:
    """Return the pairs of a folder in an object store, where caches and recipes are not kept."""
    found = [_pair(each) for each in list_remote(url) if each.endswith(".idx")]
    if not found:
        raise MissingFile(
            f"{url}: neither a pair ({url}.idx, {url}.bin) nor a folder with an .idx right in it; "
            "check the URL"
        )
    return found


def _pair(path: str) -> Subject:
    return Subject(kind="pair", path=path.removesuffix(".idx"))


def _snapshots_and_sidecars(folder: Path, names: list[str]) -> Iterator[Subject]:
    """Yield each file once, by the first of its hard links."""
    seen = set()
    for path in (str(folder / name) for name in names if name.endswith(SUFFIX)):
        with as_storage_error(path, "cannot read the status of"):
            status = os.lstat(path)
        if (status.st_dev, status.st_ino) not in seen:
            seen.add((status.st_dev, status.st_ino))
            yield _json_subject(path)


def _json_subject(path: str) -> Subject:
    is_snapshot = is_records_name(os.path.basename(path))
    return Subject(kind="snapshot" if is_snapshot else "framework arrays", path=path)


def entries(cache: str | os.PathLike[str]) -> list[Path]:
    """Return the directories in a cache that are named as entries."""
    with as_storage_error(os.fspath(cache), "cannot list"):
        names = sorted(os.listdir(cache))
    return [Path(cache) / name for name in names if _ENTRY_NAME.fullmatch(name)]


def pairs_of_recipe(path: str) -> tuple[list[str], list[str]]:
    """Return the prefixes of a recipe's existing pairs of tokens, and of labels and masks.

    Both are empty if the recipe cannot be read.
    """
    try:
        recipe = read_recipe(path)
    except InvalidArgument:
        return [], []
    found = {path: setting for path, setting in prefixes_of(recipe).items() if pair_exists(path)}
    return (
        [path for path, setting in found.items() if setting == "path"],
        [path for path, setting in found.items() if setting != "path"],
    )


def prefixes_of(recipe: Recipe) -> dict[str, str]:
    """Map each distinct prefix to the first setting that names it, tokens before labels."""
    named: dict[str, tuple[str, str]] = {}
    for setting in ("path", "labels", "loss_mask"):
        for corpus in recipe.all_sources:
            prefix = getattr(corpus, setting)
            if prefix:
                named.setdefault(os.path.realpath(prefix), (prefix, setting))
    return dict(named.values())


def pair_exists(prefix: str) -> bool:
    """Return True if at least one half of a pair exists."""
    return os.path.exists(prefix + ".idx") or os.path.exists(prefix + ".bin")
