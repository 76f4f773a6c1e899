"""Findings of the check of a file, and their report."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from megaindex.format.header import Fault

SubjectKind = Literal[
    "pair", "cache entry", "cache", "snapshot", "framework arrays", "recipe", "lock"
]

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
        identity: of a lock that can be read, the identity of its run.
        content: of a lock with hashes of tokens, their identity.
    """

    path: str
    kind: SubjectKind
    full: bool
    findings: tuple[Finding, ...]
    counted: dict[str, int] = field(default_factory=dict)
    compared: tuple[str, ...] = ()
    identity: str = ""
    content: str | None = None

    @property
    def is_clean(self) -> bool:
        """True if nothing was found."""
        return not self.findings

    def to_json(self) -> dict[str, Any]:
        """Return the fields, as ``--json`` prints them."""
        found = asdict(self)
        left_out = () if self.kind == "lock" else ("compared", "identity", "content")
        return {name: value for name, value in found.items() if name not in left_out}


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
        identity: str = "",
        content: str | None = None,
    ) -> Report:
        """Return the report of the finished check."""
        return Report(
            path=path,
            kind=kind,
            full=full,
            findings=tuple(self._findings.values()),
            counted=counted,
            compared=tuple(compared),
            identity=identity,
            content=content,
        )
