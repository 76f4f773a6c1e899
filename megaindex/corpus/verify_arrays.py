"""The rules of arrays under a framework's own names, as the sidecar beside them has recorded them.

What has no sidecar is the framework's and not judged. A sidecar may describe sets that were built
again since, and have another by now: it is held to those whose sidecar it still is.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, replace

from megaindex.corpus.findings import Collector, Report, Severity
from megaindex.corpus.verify_order import order_faults
from megaindex.errors import FormatError
from megaindex.format.faults import Fault
from megaindex.io.progress import Bar
from megaindex.store.array_set import ArrayFiles, Arrays, Sidecar, state_of
from megaindex.store.fingerprint import array_checksum
from megaindex.store.npy import map_npy
from megaindex.store.sidecar_file import UNREADABLE, OtherFormat, SidecarFile, load_sidecar

_BUILT = "the next run that asks for it builds it again"
_FOUND = "remove all files of that name, they will be built again"
_READ = "the next run that uses its arrays checks them and writes it anew"


def verify_arrays(sidecar: str, *, full: bool, bar: Bar) -> Report:
    """Check the sets that a sidecar describes; with `full` read their arrays."""
    found = Collector()
    sets: list[_Set] = []
    try:
        file = load_sidecar(sidecar)
        sets = [
            _Set(files, file.sets[name], full, found) for name, files in own_sets(sidecar, file)
        ]
    except OtherFormat as error:
        found.add(sidecar, _unreadable("sidecar-format", error), severity="warning")
    except UNREADABLE as error:
        found.add(sidecar, _unreadable("sidecar", error))
    sizes = [state[0] for one in sets for state in one.sidecar.files.values()]
    progress = bar(sum(sizes) if full else 0)
    for one in sets:
        one.check(progress)
    return Report(
        path=sidecar,
        kind="framework arrays",
        full=full,
        findings=found.findings(),
        counted={"sets": len(sets), "arrays": len(sizes), "bytes": sum(sizes)},
    )


def own_sets(sidecar: str, file: SidecarFile) -> list[tuple[str, ArrayFiles]]:
    """The sets whose sidecar this file is: others have been given another since."""
    directory = os.path.dirname(sidecar) or "."
    sets = [(name, file.files(directory, name)) for name in file.sets]
    return [(name, files) for name, files in sets if _is_one_file(files.sidecar, sidecar)]


def _is_one_file(path: str, other: str) -> bool:
    try:
        return os.path.samefile(path, other)
    except FileNotFoundError:
        return False


@dataclass
class _Set:
    """One set while it is checked."""

    files: ArrayFiles
    sidecar: Sidecar
    full: bool
    found: Collector
    differs: bool = False
    """Whether elements are others than those recorded, as far as they were read."""

    def check(self, progress: Callable[[int], None]) -> None:
        remedy = _BUILT if self.sidecar.origin == "built" else _FOUND
        arrays: Arrays = {}
        for name, path in self.files.arrays.items():
            size = self.sidecar.files[name][0]
            severity: Severity = "error"
            fault = _file_fault(path, size)
            if fault is None:
                fault, severity = self._content_fault(name, path, arrays)
            if fault is not None:
                self.found.add(path, replace(fault, remedy=remedy), severity=severity)
            progress(size if self.full else 0)
        marker = self.files.marker
        if marker is not None and not os.path.isfile(marker):
            self.found.add(marker, replace(_missing(), remedy=remedy))
        if self.differs:  # where they are wrong, not only that they are
            for name, fault, count in order_faults(arrays, self.sidecar.settings):
                self.found.add(self.files.arrays[name], replace(fault, remedy=remedy), count=count)

    def _content_fault(self, name: str, path: str, arrays: Arrays) -> tuple[Fault | None, Severity]:
        """What is wrong with an array, which is put into ``arrays`` if it can be read."""
        try:
            array, offset = map_npy(path)
        except FormatError as error:
            text = str(error).partition(": ")[2].partition(";")[0]
            return _fault("array-header", text, "an array that NumPy saved"), "error"
        header = (array.dtype.name, array.shape, offset)
        if header != self.sidecar.arrays[name]:
            return _fault("array-header", str(header), str(self.sidecar.arrays[name])), "error"
        arrays[name] = array
        checksum = array_checksum(array) if self.full else ""
        expected = self.sidecar.checksums[name] if self.full and self.sidecar.checksums else ""
        self.differs |= checksum != expected
        if state_of(os.stat(path)) != self.sidecar.files[name]:
            is_harmless = self.sidecar.origin == "found" or (self.full and checksum == expected)
            return _changed(), "warning" if is_harmless else "error"
        if checksum != expected:
            return _fault("checksum", f"checksum {checksum}", f"checksum {expected}"), "error"
        return None, "error"


def _file_fault(path: str, size: int) -> Fault | None:
    """Whether there is a file of the size recorded."""
    try:
        status = os.stat(path)
    except FileNotFoundError:
        return _missing()
    if not stat.S_ISREG(status.st_mode):
        return _fault("file-kind", "no regular file", "a regular file")
    if status.st_size != size:
        return _fault("file-size", f"{status.st_size} bytes", f"{size} bytes")
    return None


def _missing() -> Fault:
    return _fault("missing-file", "no file", "a file")


def _changed() -> Fault:
    return _fault("changed", "another file, or another time of change", "the file recorded")


def _fault(rule: str, found: str, expected: str) -> Fault:
    return Fault(
        rule=rule,
        where="the file",
        found=found,
        expected=expected,
        text=f"the sidecar promises {expected}, there is {found}",
    )


def _unreadable(rule: str, error: Exception) -> Fault:
    return Fault(
        rule=rule,
        where="the file",
        found=str(error),
        expected="a sidecar as this release writes it",
        text="is no such sidecar",
        remedy=_READ,
    )
