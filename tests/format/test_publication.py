"""Atomic publication of a pair, without replacing existing files."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import StorageError
from megaindex.io import atomic

FailCall = Callable[[str, int, Callable[[], Any]], None]
OLD, NEW = [1, 1], [2, 2, 2]


def write(prefix: Path, tokens: list[int], **options: Any) -> None:
    with IndexedDatasetWriter(prefix, np.uint8, **options) as writer:
        writer.add_document(tokens)


def read(prefix: Path) -> list[int]:
    tokens: list[int] = IndexedDataset(prefix)[0].tolist()
    return tokens


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def test_nothing_is_visible_before_the_end_and_only_the_pair_after(tmp_path: Path) -> None:
    with IndexedDatasetWriter(tmp_path / "a") as writer:
        writer.add_document([1])
        assert not IndexedDataset.exists(tmp_path / "a")
        assert [name.startswith("a.bin.tmp.") for name in names(tmp_path)] == [True]
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_relative_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(Path("a"), NEW)
    assert read(Path("a")) == NEW


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        write(tmp_path / "a", NEW)
    finally:
        os.umask(before)
    for path in tmp_path.iterdir():
        assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~umask


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit])
def test_an_exception_in_the_body_leaves_nothing(tmp_path: Path, error: type) -> None:
    def stop() -> None:
        with IndexedDatasetWriter(tmp_path / "a") as writer:
            writer.add_document([1])
            raise error

    with pytest.raises(error):
        stop()
    assert names(tmp_path) == []


@pytest.mark.parametrize("there", [".bin", ".idx"])
def test_existing_files_are_refused_before_any_work(tmp_path: Path, there: str) -> None:
    (tmp_path / f"a{there}").write_bytes(b"precious")
    with pytest.raises(StorageError, match=rf"a{there}: already exists.*overwrite=True") as caught:
        IndexedDatasetWriter(tmp_path / "a").__enter__()
    assert caught.value.errno == errno.EEXIST
    assert names(tmp_path) == [f"a{there}"]
    assert (tmp_path / f"a{there}").read_bytes() == b"precious"


def test_overwrite(tmp_path: Path) -> None:
    write(tmp_path / "a", OLD)
    old = IndexedDataset(tmp_path / "a")
    write(tmp_path / "a", NEW, overwrite=True)
    assert read(tmp_path / "a") == NEW
    assert old[0].tolist() == OLD  # its mapping holds the old files
    assert names(tmp_path) == ["a.bin", "a.idx"]
    with pytest.raises(ZeroDivisionError), IndexedDatasetWriter(tmp_path / "a", overwrite=True):
        raise ZeroDivisionError
    assert read(tmp_path / "a") == NEW


def test_an_old_pair_is_hidden_on_the_disk_before_it_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A crash may otherwise keep the new .bin and forget that the old .idx was renamed."""
    write(tmp_path / "a", OLD)
    calls, here = [], threading.get_ident()

    def note(name: str, call: Callable[..., None]) -> None:
        def noted(*arguments: Any) -> None:
            if threading.get_ident() == here:  # other tests' entries are synced in the background
                is_folder = name == "fsync" and stat.S_ISDIR(os.fstat(arguments[0]).st_mode)
                calls.append(name + " folder" * is_folder)
            call(*arguments)

        monkeypatch.setattr(os, name, noted)

    for name in ("rename", "replace", "fsync"):
        note(name, getattr(os, name))
    write(tmp_path / "a", NEW, overwrite=True)
    files = ["fsync", "fsync"]
    hidden, replaced = ["rename", "fsync folder"], ["replace", "fsync folder"]
    assert calls == [*files, *hidden, *replaced, *replaced]


@pytest.mark.parametrize("stays_broken", [False, True])
def test_the_removal_of_the_idx_is_synced_before_that_of_the_bin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stays_broken: bool
) -> None:
    """Else a power loss might bring the .idx back alone."""
    found: list[list[str]] = []

    def sync(directory: str) -> None:
        found.append(names(tmp_path))
        if len(found) == 2 or (stays_broken and len(found) > 2):
            raise StorageError(f"{directory}: cannot sync the directory")

    monkeypatch.setattr(atomic, "sync_directory", sync)
    with pytest.raises(StorageError, match="cannot sync the directory"):
        write(tmp_path / "a", NEW)
    assert found[1:] == [["a.bin", "a.idx"], ["a.bin"]]
    assert names(tmp_path) == []


@pytest.mark.parametrize("hard_links", [True, False])
def test_the_second_of_two_writers_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hard_links: bool
) -> None:
    if not hard_links:

        def refuse(*paths: str) -> None:
            raise OSError(errno.EPERM, "no hard links here")

        monkeypatch.setattr(os, "link", refuse)
    late = IndexedDatasetWriter(tmp_path / "a", np.uint8)
    late.__enter__()
    late.add_document(OLD)
    write(tmp_path / "a", NEW)
    with pytest.raises(StorageError, match=r"a\.bin: already exists"):
        late.__exit__(None, None, None)
    assert read(tmp_path / "a") == NEW
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_a_writer_that_loses_between_look_and_link_is_refused(
    tmp_path: Path, fail_call: FailCall
) -> None:
    """What a check before a rename cannot see: the link itself refuses."""

    def lose() -> None:
        (tmp_path / "a.bin").write_bytes(b"theirs")
        raise FileExistsError(errno.EEXIST, "File exists")

    fail_call("link", 1, lose)
    with pytest.raises(StorageError, match=r"a\.bin: already exists"):
        write(tmp_path / "a", NEW)
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"theirs"


def raise_after_link(monkeypatch: pytest.MonkeyPatch, half: str, error: BaseException) -> None:
    """Let os.link raise an error once it has made the name of this half of a pair."""
    real = os.link

    def link(source: str, target: str) -> None:
        real(source, target)
        if target.endswith(half):
            raise error

    monkeypatch.setattr(os, "link", link)


@pytest.mark.parametrize("lost", [".bin", ".idx"])
def test_a_link_whose_reply_is_lost_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    """As on NFS: the request is repeated, and finds the name that it has made."""
    raise_after_link(monkeypatch, lost, FileExistsError(errno.EEXIST, "File exists"))
    write(tmp_path / "a", NEW)
    assert read(tmp_path / "a") == NEW
    assert names(tmp_path) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("half", [".bin", ".idx"])
def test_a_ctrl_c_when_a_file_has_just_got_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, half: str
) -> None:
    raise_after_link(monkeypatch, half, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "a", NEW)
    assert names(tmp_path) == []


def test_what_another_put_in_our_place_is_not_taken_back(
    tmp_path: Path, fail_call: FailCall
) -> None:
    def theirs() -> None:
        (tmp_path / "theirs").write_bytes(b"theirs")
        os.rename(tmp_path / "theirs", tmp_path / "a.bin")
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    fail_call("link", 2, theirs)
    with pytest.raises(StorageError, match="Input/output error"):
        write(tmp_path / "a", NEW)
    assert names(tmp_path) == ["a.bin"]
    assert (tmp_path / "a.bin").read_bytes() == b"theirs"


def test_overwriting_that_fails_early_gives_the_old_pair_back(
    tmp_path: Path, fail_call: FailCall
) -> None:
    def no_space() -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    write(tmp_path / "a", OLD)
    fail_call("replace", 1, no_space)
    with pytest.raises(StorageError, match="No space left"):
        write(tmp_path / "a", NEW, overwrite=True)
    assert read(tmp_path / "a") == OLD
    assert names(tmp_path) == ["a.bin", "a.idx"]


@pytest.mark.parametrize("half", [".bin", ".idx"])
def test_what_is_no_file_is_never_replaced(tmp_path: Path, half: str) -> None:
    os.mkfifo(tmp_path / f"a{half}")
    with pytest.raises(StorageError, match=rf"a{half}: must be a file"):
        write(tmp_path / "a", NEW, overwrite=True)
    assert names(tmp_path) == [f"a{half}"]
    assert stat.S_ISFIFO((tmp_path / f"a{half}").stat().st_mode)
