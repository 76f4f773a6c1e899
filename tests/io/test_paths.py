"""Errors of paths: missing, or not examined, with the reason."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.corpus import tokenize
from megaindex.corpus.imports.formats import open_columns, open_nanotron, open_numpy, open_tntidx
from megaindex.corpus.imports.mds import open_mds
from megaindex.corpus.inspect import inspect
from megaindex.corpus.merge import merge
from megaindex.corpus.repair import repair
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.objects.files import stat_path
from megaindex.verify.verify import verify


def test_nothing_is_there(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.utime(tmp_path / "file", ns=(0, 7_000_000_000))
    (tmp_path / "loop").symlink_to("loop")
    for name in ("no", "no/file", "file/below", "loop", "loop/below"):
        assert stat_path(str(tmp_path / name)) is None
    assert stat_path(str(tmp_path / "file")) == (str(tmp_path / "file"), 0, "of 7.000000000")


@for_each(
    ("number", "reason", "remedy"),
    [
        (errno.EACCES, "Permission denied", "check the permissions"),
        (errno.EIO, "Input/output error", "check the device"),
    ],
)
@for_each("act", ["open", "merge", "verify", "inspect", "repair"])
def test_what_cannot_be_looked_at_is_not_called_missing(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    reason: str,
    remedy: str,
    act: str,
) -> None:
    prefix = str(tmp_path / "shut" / "c")
    real = os.stat

    def stat(path: object, **options: object) -> os.stat_result:
        if str(path).startswith(prefix):
            raise OSError(number, os.strerror(number), path)
        return real(path, **options)  # type: ignore[call-overload, no-any-return]

    actions: dict[str, Callable[[], object]] = {
        "open": lambda: megaindex.IndexedDataset(prefix),
        "merge": lambda: merge(str(tmp_path / "m"), [prefix]),
        "verify": lambda: verify(prefix),
        "inspect": lambda: inspect(prefix),
        "repair": lambda: repair(prefix, tmp_path / "r"),
    }
    monkeypatch.setattr(os, "stat", stat)
    file = r"shut/c\.(bin|idx|provenance)"
    with pytest.raises(StorageError, match=rf"{file}: .*{reason}; {remedy}") as raised:
        actions[act]()
    assert not isinstance(raised.value, MissingFile)
    assert raised.value.errno == number


def test_a_name_that_is_too_long_asks_for_a_shorter_one(tmp_path: Path) -> None:
    name = str(tmp_path / ("x" * 300))
    for act in (megaindex.IndexedDataset, verify, inspect):
        with pytest.raises(StorageError, match="File name too long"):
            act(name)


def test_a_long_name_that_is_there_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / ("f" * 253)  # no .idx beside it can have that name
    folder.mkdir()
    prefix = folder / ("c" * 251)  # nor can what goes with this pair
    write_corpus(folder / "c", [3], np.uint16)  # temporaries have longer names
    for half in (".bin", ".idx"):
        os.rename(folder / f"c{half}", f"{prefix}{half}")
    assert [len(found) for found in (inspect(folder), inspect(prefix))] == [1, 1]
    assert not verify(prefix).findings


ZERO = "a\0b"


@for_each(
    "act",
    [
        lambda: merge("o", [ZERO]),
        lambda: merge(ZERO, ["a"]),
        lambda: tokenize("o", [ZERO], tokenizer="bytes"),
        lambda: tokenize(ZERO, [__file__], tokenizer="bytes", format="lines"),
        lambda: tokenize("o", [__file__], tokenizer=ZERO, format="lines"),
        lambda: open_nanotron(ZERO),
        lambda: open_numpy(f"{ZERO}.npy", separator=1),
        lambda: open_numpy(ZERO, stored_dtype="uint16", separator=1),
        lambda: open_tntidx(ZERO, "megatron"),
        lambda: open_mds(ZERO),
        lambda: open_columns(f"{ZERO}.parquet"),
        lambda: verify(ZERO),
        lambda: repair(ZERO, "o"),
        lambda: megaindex.IndexedDataset(ZERO),
    ],
)
def test_a_zero_byte_in_a_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InvalidArgument, match=r"a\\x00b.*: must not hold a zero byte"):
        act()
    assert os.listdir(tmp_path) == []
