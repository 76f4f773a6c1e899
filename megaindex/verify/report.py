"""Subjects of `megaindex verify` at a path or in a folder, its findings and reports, as data."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from megaindex.cache.array_files import SUFFIX
from megaindex.cache.entry import MANIFEST
from megaindex.cache.fingerprint import is_records_name
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.format.header import Fault
from megaindex.io.paths import as_storage_error, check_file, is_remote, names_folder, plain
from megaindex.objects.files import list_remote, stat_path

_ENTRY_NAME = re.compile(r"[0-9a-f]{32}")

SubjectKind = Literal[
    "pair", "cache entry", "cache", "snapshot", "framework arrays", "recipe", "lock"
]


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
    text = plain(os.fspath(path))
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
    kind = _FILES.get(os.path.splitext(text)[1])
    if kind is not None:
        check_file(text)  # opening a pipe would block
        return [Subject(kind=kind, path=text)]
    raise InvalidArgument(
        f"{text}: must be an .idx, a .bin, a recipe (.yaml), a lock (.lock) or a sidecar "
        f"(…{SUFFIX}); give the prefix of a pair"
    )


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


Severity = Literal["error", "warning"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A rule that a file breaks, at one place or at several.

    Attributes:
        file: path of the file.
        rule: short name of the rule, such as "pointer-order".
        where: the first place: "sequence 3", "byte 34".
        found: value at that place.
        expected: value that the rule requires.
        severity: "error" for unreadable or wrong data; "warning" for data that the format
            allows.
        repair: remedy.
        count: number of places.
    """

    file: str
    rule: str
    where: str
    found: str
    expected: str
    severity: Severity
    repair: str
    count: int = 1


@dataclass(frozen=True, kw_only=True)
class Report:
    """The findings of one check, and the amounts checked.

    Attributes:
        path: path or prefix of the subject.
        kind: kind of the subject, such as a pair or a cache entry.
        full: True if every byte was read.
        findings: rules that are broken, with their places.
        counted: amounts checked: sequences, documents, tokens, bytes.
        compared: of a lock, what was compared with it, in words.
    """

    path: str
    kind: SubjectKind
    full: bool
    findings: tuple[Finding, ...]
    counted: dict[str, int] = field(default_factory=dict)
    compared: tuple[str, ...] = ()

    @property
    def is_clean(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the fields, as ``--json`` prints them."""
        found = asdict(self)
        return found if self.kind == "lock" else {k: v for k, v in found.items() if k != "compared"}


class Collector:
    """Findings of a check in progress; places that break the same rule of a file are combined."""

    def __init__(self) -> None:
        self._findings: dict[tuple[str, str], Finding] = {}

    def add(self, file: str, fault: Fault, *, severity: Severity = "error", count: int = 1) -> None:
        key = (file, fault.rule)
        earlier = self._findings.get(key)
        if earlier is not None:
            self._findings[key] = replace(earlier, count=earlier.count + count)
            return
        self._findings[key] = Finding(
            file=file,
            rule=fault.rule,
            where=fault.where,
            found=fault.found,
            expected=fault.expected,
            severity=severity,
            repair=fault.remedy,
            count=count,
        )

    def has_errors(self) -> bool:
        return any(finding.severity == "error" for finding in self._findings.values())

    def report(
        self,
        path: str,
        kind: SubjectKind,
        *,
        full: bool,
        counted: dict[str, int],
        compared: Sequence[str] = (),
    ) -> Report:
        """Return the report of the finished check."""
        return Report(
            path=path,
            kind=kind,
            full=full,
            findings=tuple(self._findings.values()),
            counted=counted,
            compared=tuple(compared),
        )
