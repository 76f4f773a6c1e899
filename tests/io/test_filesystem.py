"""Detection of local file systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from megaindex.io import paths


def test_this_machine_is_told() -> None:
    assert paths.file_system_type("/proc") == "proc"
    assert not paths.is_local("/proc")
    assert paths.file_system_type("/no/such/directory") == ""
    assert not paths.is_local("/no/such/directory")


def test_the_longest_mount_point_that_holds_the_path_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inner = tmp_path / "share d" / "cache"
    inner.mkdir(parents=True)
    escaped = str(tmp_path / "share d").replace(" ", "\\040")
    table = (
        "1 0 250:7 / / rw - ext4 /dev/x rw\n"
        f"2 1 0:99 / {escaped} rw shared:1 - nfs4 server:/x rw\n"
        f"3 1 0:98 / {tmp_path}/sha rw - lustre x rw\n"
    )
    real = Path.read_text

    def read_text(self: Path) -> str:
        return table if str(self) == "/proc/self/mountinfo" else real(self)

    monkeypatch.setattr(Path, "read_text", read_text)
    assert paths.file_system_type(inner) == "nfs4"
    assert paths.file_system_type(tmp_path) == "ext4"
