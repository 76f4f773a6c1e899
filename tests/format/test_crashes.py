"""Failures and crashes at every step of a publication: a reader sees a whole pair or none."""

from __future__ import annotations

import errno
import os
import resource
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import MissingFile, StorageError
from megaindex.io.paths import as_storage_error

# From Python 3.12 on, forking warns once anything has started a thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

FailCall = Callable[[str, int, Callable[[], Any]], None]
InChild = Callable[[Callable[[], Any]], str]
OLD, NEW = [1, 1], [2, 2, 2]


def write(prefix: Path, tokens: list[int], **options: Any) -> None:
    with IndexedDatasetWriter(prefix, np.uint8, **options) as writer:
        writer.add_document(tokens)


def read(prefix: Path) -> list[int]:
    tokens: list[int] = IndexedDataset(prefix)[0].tolist()
    return tokens


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def no_space() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def crash() -> None:
    os._exit(7)


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", 1), ("fsync", 2), ("fsync", 3), ("link", 1), ("link", 2)]
)
def test_a_failed_publication_leaves_nothing(
    tmp_path: Path, fail_call: FailCall, call: str, number: int
) -> None:
    fail_call(call, number, no_space)
    with pytest.raises(StorageError, match=r"No space left on device") as caught:
        write(tmp_path / "a", NEW)
    assert str(tmp_path) in str(caught.value)
    assert caught.value.errno == errno.ENOSPC
    assert names(tmp_path) == []


def test_a_crash_while_writing_shows_nothing(tmp_path: Path, in_child: InChild) -> None:
    def die() -> None:
        with IndexedDatasetWriter(tmp_path / "a", np.int64) as writer:
            for _ in range(1000):
                writer.add_document(range(500))
            crash()

    assert in_child(die) == "exit 7"
    assert not any(name.endswith((".bin", ".idx")) for name in names(tmp_path))
    write(tmp_path / "a", NEW)  # what it left is in nobody's way
    assert read(tmp_path / "a") == NEW


@pytest.mark.parametrize(
    ("call", "number"), [("fsync", 1), ("fsync", 2), ("link", 1), ("unlink", 1), ("link", 2)]
)
def test_a_crash_while_publishing_shows_no_pair(
    tmp_path: Path, in_child: InChild, fail_call: FailCall, call: str, number: int
) -> None:
    def die() -> None:
        fail_call(call, number, crash)
        write(tmp_path / "a", NEW)

    assert in_child(die) == "exit 7"
    assert "a.idx" not in names(tmp_path)  # the .idx comes last: without it there is no pair
    with pytest.raises(MissingFile):
        read(tmp_path / "a")


@pytest.mark.parametrize(("call", "number"), [("unlink", 1), ("replace", 1), ("replace", 2)])
def test_a_crash_while_overwriting_never_mixes_old_and_new(
    tmp_path: Path, in_child: InChild, fail_call: FailCall, call: str, number: int
) -> None:
    write(tmp_path / "a", OLD)

    def die() -> None:
        fail_call(call, number, crash)
        write(tmp_path / "a", NEW, overwrite=True)

    assert in_child(die) == "exit 7"
    if IndexedDataset.exists(tmp_path / "a"):
        assert read(tmp_path / "a") == OLD
    else:
        with pytest.raises(MissingFile, match=r"a\.idx: missing"):
            read(tmp_path / "a")
    write(tmp_path / "a", NEW, overwrite=True)
    assert read(tmp_path / "a") == NEW


def limited_write(prefix: Path, swallow: bool) -> None:
    """Files may grow to 1 MB, and 8 MB are written: a real error from the kernel."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
    with IndexedDatasetWriter(prefix, np.int64) as writer:
        try:
            writer.add_document(np.zeros(1 << 20, dtype=np.int64))
        except StorageError:
            if not swallow:
                raise


def failing_on(path: Path, real: Callable[..., Any]) -> Callable[..., Any]:
    def call(first: Any, *args: Any, **kwargs: Any) -> Any:
        if os.fspath(path) in (first, *args):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(first, *args, **kwargs)

    return call


def test_an_old_idx_is_hidden_although_it_cannot_be_looked_at(
    tmp_path: Path, in_child: InChild, fail_call: FailCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", OLD)

    def die() -> None:
        monkeypatch.setattr(os, "lstat", failing_on(tmp_path / "a.idx", os.lstat))
        fail_call("replace", 2, crash)
        write(tmp_path / "a", NEW, overwrite=True)

    assert in_child(die) == "exit 7"
    assert "a.idx" not in names(tmp_path)
    write(tmp_path / "a", NEW, overwrite=True)
    assert read(tmp_path / "a") == NEW


def test_an_old_idx_that_cannot_be_restored_is_kept(
    tmp_path: Path, fail_call: FailCall, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "a", OLD)
    with monkeypatch.context() as patch:
        fail_call("replace", 1, no_space)
        patch.setattr(os, "link", failing_on(tmp_path / "a.idx", os.link))
        with pytest.raises(StorageError, match=r"a\.idx: cannot restore it from .*: Input/output"):
            write(tmp_path / "a", NEW, overwrite=True)
    (aside,) = tmp_path.glob("a.idx.tmp.*")
    aside.rename(tmp_path / "a.idx")
    assert read(tmp_path / "a") == OLD


@pytest.mark.parametrize(
    ("swallow", "message"),
    [
        (False, "File too large; raise the limit on file sizes"),
        (True, "cannot publish: an earlier"),
    ],
)
def test_a_failed_write_is_never_published(
    tmp_path: Path, in_child: InChild, swallow: bool, message: str
) -> None:
    said = in_child(lambda: limited_write(tmp_path / "a", swallow))
    assert said.startswith(f"StorageError: {tmp_path}/a.bin: ")
    assert message in said
    assert names(tmp_path) == []


def test_no_such_directory(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match=r"no/a\.bin: cannot create"):
        write(tmp_path / "no" / "a", NEW)


def test_a_file_as_directory(tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    with pytest.raises(StorageError, match=r"f/a\.bin: cannot create"):
        write(tmp_path / "f" / "a", NEW)


def test_an_unwritable_directory_and_an_unreadable_file(in_child: InChild) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as name:  # others may enter it, unlike tmp_path
        directory = Path(name)
        write(directory / "a", NEW)
        (directory / "a.bin").chmod(0)
        directory.chmod(0o555)

        def unprivileged(function: Callable[[], Any]) -> Callable[[], None]:
            def run() -> None:
                if os.geteuid() == 0:
                    try:
                        os.setuid(65534)
                    except OSError:  # a container may forbid it, or not know that user
                        os._exit(77)
                function()

            return run

        said = in_child(unprivileged(lambda: write(directory / "b", NEW)))
        if said == "exit 77":
            pytest.skip("this root may not become another user")
        assert said.startswith(f"StorageError: {directory}/b.bin: cannot create: Permission denied")
        assert "check the permissions" in said
        said = in_child(unprivileged(lambda: read(directory / "a")))
        assert said.startswith(f"StorageError: {directory}/a.bin: cannot open: Permission denied")
        directory.chmod(0o755)
        assert names(directory) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, None])
def test_every_failure_names_file_action_reason_and_remedy(number: int | None) -> None:
    cause = OSError(number, os.strerror(number)) if number else OSError("odd")
    with pytest.raises(StorageError) as caught, as_storage_error("x.bin", "cannot write"):
        raise cause
    reason = os.strerror(number) if number else "odd"
    assert str(caught.value).startswith(f"x.bin: cannot write: {reason}; ")
    assert caught.value.errno == number
    assert caught.value.__cause__ is cause
