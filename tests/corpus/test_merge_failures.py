"""Refused merges, and merges that fail or crash: half a pair is never left."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex.corpus.merge import merge
from megaindex.errors import FormatError, InvalidArgument, StorageError
from megaindex.format import IndexedDataset


def write_pair(prefix: Path, lengths: list[int]) -> str:
    return write_corpus(prefix, lengths, np.int32).path_prefix


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


def cut_bin(prefix: Path) -> None:
    with open(f"{prefix}.bin", "r+b") as stream:
        stream.truncate(7)


def break_a_pointer(prefix: Path) -> None:
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(34 + 4 * 2 + 1)
        stream.write(b"\xff")


def end_documents_early(prefix: Path) -> None:
    with open(f"{prefix}.idx", "r+b") as stream:
        stream.seek(-8, os.SEEK_END)
        stream.write((1).to_bytes(8, "little"))


@pytest.mark.parametrize(
    ("damage", "dialect"),
    [(cut_bin, "megatron"), (break_a_pointer, "megatron"), (end_documents_early, "neox")],
)
def test_every_input_is_checked_before_anything_is_written(
    tmp_path: Path, damage: Callable[[Path], None], dialect: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [write_pair(tmp_path / name, [2, 1]) for name in "abc"]
    damage(tmp_path / "c")
    before = names(tmp_path)

    def no_file(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a file was created")

    monkeypatch.setattr(sys.modules[merge.__module__], "PairSink", no_file)
    with pytest.raises(FormatError, match=r"c\.idx: "):
        merge(str(tmp_path / "m"), inputs, dialect=dialect)
    assert names(tmp_path) == before


def test_outputs_that_must_not_be_written(tmp_path: Path) -> None:
    a, b = write_pair(tmp_path / "a", [1]), write_pair(tmp_path / "b", [2])
    (tmp_path / "same.idx").symlink_to(tmp_path / "a.idx")
    with pytest.raises(StorageError, match=r"b\.bin: already exists"):
        merge(b, [a])
    for output in (a, str(tmp_path / "same")):
        with pytest.raises(InvalidArgument, match="is also an input or another output"):
            merge(output, [a, b], overwrite=True)
    with pytest.raises(InvalidArgument, match="must be the common prefix"):
        merge(f"{b}.bin", [a])
    with pytest.raises(InvalidArgument, match="must name at least one pair"):
        merge(str(tmp_path / "m"), [])
    assert [IndexedDataset(prefix)[0].tolist() for prefix in (a, b)] == [[0], [0, 1]]
    merge(b, [a, a], overwrite=True)
    assert [s.tolist() for s in IndexedDataset(b)] == [[0], [0]]


@pytest.mark.parametrize("call", ["copy_file_range", "fsync", "replace"])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    old = write_corpus(tmp_path / "m", [3], np.int32)
    corpus = write_corpus(tmp_path / "a", np.full(300, 500), np.int32)
    real, calls = getattr(os, call), []

    def fail_second(*args: Any, **kwargs: Any) -> Any:
        if threading.current_thread().name == "megaindex-durable":  # of an entry of another test
            return real(*args, **kwargs)
        calls.append(call)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, call, fail_second)
    with pytest.raises(StorageError, match="No space left on device"):
        merge(str(tmp_path / "m"), [corpus.path_prefix] * 2, overwrite=True)
    monkeypatch.undo()
    if call == "replace":  # the .bin had its name already: no pair is left, and no mixture
        assert names(tmp_path) == ["a.bin", "a.idx"]
    else:
        assert names(tmp_path) == ["a.bin", "a.idx", "m.bin", "m.idx"]
        assert IndexedDataset(old.path_prefix)[0].tolist() == [0, 1, 2]


def test_a_pair_that_cannot_be_read_back_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        assert names(tmp_path) == ["a.bin", "a.idx", "m.bin", "m.idx"]
        raise StorageError("m.bin: cannot be read")

    corpus = write_corpus(tmp_path / "a", [3], np.int32)
    monkeypatch.setattr(sys.modules["megaindex.corpus.merge"], "checked_outcome", fail)
    with pytest.raises(StorageError, match="cannot be read"):
        merge(str(tmp_path / "m"), [corpus.path_prefix])
    assert names(tmp_path) == ["a.bin", "a.idx"]


# From Python 3.12 on, forking warns once anything has started a thread.
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_crash_while_copying_shows_no_pair(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "a", np.full(300, 500), np.int32)
    child = os.fork()
    if child == 0:
        real, calls = os.copy_file_range, iter(range(9))
        os.copy_file_range = (  # type: ignore[assignment]
            lambda *args, **options: real(*args, **options) if next(calls) < 1 else os._exit(7)
        )
        merge(str(tmp_path / "m"), [corpus.path_prefix] * 3)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    assert not IndexedDataset.exists(tmp_path / "m")
    merge(str(tmp_path / "m"), [corpus.path_prefix] * 3)  # what it left is in nobody's way
    assert len(IndexedDataset(tmp_path / "m")) == 900


def test_an_input_that_shrinks_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "a", np.full(300, 500), np.int32)
    real = os.copy_file_range

    def shrink(*args: Any, **kwargs: Any) -> int:
        os.truncate(tmp_path / "a.bin", 100_000)
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "copy_file_range", shrink)
    with pytest.raises(StorageError, match=r"a\.bin: changed while it was copied"):
        merge(str(tmp_path / "m"), [corpus.path_prefix])
    assert names(tmp_path) == ["a.bin", "a.idx"]
