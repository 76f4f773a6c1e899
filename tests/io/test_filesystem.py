"""Detection of local file systems, and copies between files."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path

import pytest
from support.inputs import for_each

from megaindex.errors import StorageError
from megaindex.io import paths
from megaindex.io.mapping import map_readonly


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


@for_each("kernel", ["copies", "cannot", "copies less"])
@for_each(("offset", "nbytes"), [(0, 30), (7, 20), (10, 10), (13, 1), (90, 30)])
def test_a_range_of_a_file_is_copied(
    kernel: str, offset: int, nbytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind what the target holds, in pieces, and not a byte further; 10 are left at 90."""
    monkeypatch.setattr(paths, "_PIECE", 8)
    monkeypatch.setattr(paths, "_BUFFER", 3)
    copy = os.copy_file_range

    def copied(source: int, target: int, count: int, offset_src: int) -> int:
        if kernel == "cannot":
            raise OSError(errno.EXDEV, "not here")
        return copy(source, target, min(count, 5) if kernel == "copies less" else count, offset_src)

    monkeypatch.setattr(os, "copy_file_range", copied)
    content = bytes(range(100))
    (tmp_path / "from").write_bytes(content)
    done: list[int] = []
    with open(tmp_path / "from", "rb") as source, open(tmp_path / "to", "wb", 0) as target:
        target.write(b"head")
        end = min(offset + nbytes, 100)
        found = paths.copy_range(source.fileno(), target.fileno(), offset, nbytes, done.append)
    assert (found, sum(done)) == (end - offset, end - offset)
    assert (tmp_path / "to").read_bytes() == b"head" + content[offset:end]


def test_a_file_that_the_system_does_not_map(tmp_path: Path) -> None:
    path = tmp_path / "large"
    path.touch()
    os.truncate(path, 1 << 43)  # sparse
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (1 << 42, limits[1]))
    try:
        with pytest.raises(StorageError, match=os.strerror(errno.ENOMEM)):
            map_readonly(str(path))
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
