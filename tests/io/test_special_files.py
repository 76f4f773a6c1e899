"""Pipes, devices and endless files under the names of small files: refused at once, in little
memory."""

from __future__ import annotations

import gzip
import os
import signal
import time
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.array_sets import Request
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each
from support.tokenizing import run

import megaindex
from megaindex.cache import claim as claiming
from megaindex.cache.array_group import fetch_together
from megaindex.cache.claim import Claim
from megaindex.cache.npy import map_npy
from megaindex.cache.sidecar import load_sidecar
from megaindex.corpus.tokenize import reading
from megaindex.errors import FormatError, MegaIndexError, StorageError
from megaindex.index.skips import read_ids
from megaindex.io.atomic import read_named
from megaindex.io.mapping import map_npy_file
from megaindex.recipe.mix_changes import MixChanges

ENDLESS = 1 << 40  # bytes of a sparse file
NAMED = {
    "recipe": ("plan", "--recipe"),
    "neox": ("plan", "--neox-config"),
    "megatron": ("plan", "--megatron-args"),
    "nanotron": ("plan", "--nanotron-config"),
    "lock": ("report",),
    "record": ("prove", "given.lock"),
    "state": ("plan", "--state"),
    "paths": ("build", "--seq-length", 8, "--epochs", 1, "--cache-dir", "x", "--data-paths-file"),
    "tokenizer": ("tokenize", "out", "c.bin", "--format", "lines", "--tokenizer"),
    "histogram": (
        "plan", "--seq-length", 8, "--micro-batch-size", 1, "--data-parallel-size", 1,
        "--gradient-accumulation-steps", 1, "--epochs", 1, "--order", "packed",
        "--length-histogram",
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """End a test that waits for a pipe or reads without end."""

    def late(*_: object) -> None:
        pytest.fail("waited for a special file")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def put(kind: str, path: Path) -> None:
    """Put a special file at a path."""
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        with path.open("wb") as file:
            os.truncate(file.fileno(), ENDLESS)


KINDS = ("pipe", "device", "endless")


@for_each("kind", KINDS)
@for_each("name", NAMED)
def test_files_that_a_flag_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.bin").write_text("a\n")
    put(kind, tmp_path / "given.lock")
    status, out, err = cli(*NAMED[name], "given.lock")
    assert (status, out) == (2, "")
    assert "given.lock" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_that_a_launch_script_sources(tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / "settings.sh")
    script = tmp_path / "launch.sh"
    script.write_text(
        f"source {tmp_path}/settings.sh\n"
        "torchrun pretrain_gpt.py --seq-length $LENGTH --train-iters 2 --data-path a\n"
    )
    status, out, err = cli("plan", "--megatron-args", script)
    assert (status, out) == (2, "")
    assert "line 1" in err


def test_a_substituted_process_is_read_up_to_a_bound(tmp_path: Path) -> None:
    """As for ``--recipe <(command)``; a name in the file system may never get a writer."""
    for size, longest in ((5, 5), (6, 5)):
        read, write = os.pipe()
        os.write(write, b"x" * size)
        os.close(write)
        try:
            if size <= longest:
                assert read_named(f"/dev/fd/{read}", longest=longest) == b"x" * size
            else:
                with pytest.raises(StorageError, match="at most 5 bytes"):
                    read_named(f"/dev/fd/{read}", longest=longest)
        finally:
            os.close(read)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(StorageError, match="a pipe, not a regular file"):
        read_named(str(tmp_path / "pipe"))
    for size in (5, 6):
        (tmp_path / "file").write_bytes(b"x" * size)
        if size == 5:
            assert read_named(str(tmp_path / "file"), longest=5) == b"x" * 5
        else:
            with pytest.raises(StorageError, match="--recipe: .*file: must have at most 5 bytes"):
                read_named(str(tmp_path / "file"), "--recipe", longest=5)


def test_nothing_is_read_of_a_file_that_is_too_long_by_its_size(tmp_path: Path) -> None:
    put("endless", tmp_path / "file")
    tracemalloc.start()
    try:
        with pytest.raises(StorageError, match=f"file: must have at most {1 << 30} bytes"):
            read_named(str(tmp_path / "file"), longest=1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_in_place_of_a_cache_entry_is_replaced(tmp_path: Path, kind: str) -> None:
    corpus = write_corpus(tmp_path / "corpus", np.full(50, 37))

    def build() -> Any:
        return megaindex.build_index(
            corpus, sequence_length=16, seed=1, cache_dir=tmp_path / "cache"
        )

    before = build().shuffle_index.copy()
    (entry,) = (tmp_path / "cache").iterdir()
    entry.rename(tmp_path / "moved")
    put(kind, entry)
    np.testing.assert_array_equal(build().shuffle_index, before)
    assert entry.is_dir()
    assert [path.name for path in (tmp_path / "cache").iterdir()] == [entry.name]


class Sound(Request):
    """A request whose arrays are accepted without a sidecar."""

    def check(self, arrays: Any) -> None:
        np.testing.assert_array_equal(arrays["a"], np.arange(self.size))


@for_each("kind", KINDS)
@for_each("name", ["set-megaindex.json", "set-a.npy"])
def test_files_under_a_frameworks_names(tmp_path: Path, kind: str, name: str) -> None:
    """Arrays whose sidecar is not a small file are checked as if they had none."""
    request = Sound(tmp_path, "set", 3)

    def fetch() -> Any:
        (found,) = fetch_together([request], str(tmp_path), "key", lambda _: None)
        return request.open(found.sidecar)["a"]

    fetch()
    put(kind, tmp_path / name)
    if name.endswith(".npy"):
        with pytest.raises((StorageError, FormatError), match=r"set-a\.npy|set-\*"):
            map_npy(str(tmp_path / name))
    else:
        with pytest.raises(ValueError, match="it is"):
            load_sidecar(str(tmp_path / name))
        np.testing.assert_array_equal(fetch(), np.arange(3))


@pytest.mark.parametrize("kind", ["device", "endless", "pipe"])
def test_a_held_claim_that_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Errors of threads fail tests, and a heartbeat that reads without end does not stop."""
    monkeypatch.setattr(claiming, "_BEATS", 100)
    held = Claim(tmp_path, "key", stale_after=1.0)
    assert held.acquire()
    with held:
        put(kind, tmp_path / "key.claim")
        time.sleep(0.1)
        assert held._beater is not None
        assert held._beater.is_alive()
    assert os.path.lexists(tmp_path / "key.claim")


def npy(header: str) -> bytes:
    return b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode()


FIELDS = "{{'descr': '{}', 'fortran_order': False, 'shape': ({},), }}"


@for_each(
    "content",
    [
        npy("{'descr': '<i8'  "),  # cut short within its tokens
        npy("  (\n x"),
        npy("{" * 60),
        npy("{")[:-1],
        b"",
        b"PK\x03\x04",
        npy(FIELDS.format("<i8", 10**9)),
        npy(FIELDS.format("<i8", 10**30)),
        npy(FIELDS.format("|O", 1)) + bytes(8),
    ],
)
def test_damaged_headers_of_arrays(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.npy"
    path.write_bytes(content)
    for read in (read_ids, MixChanges.read, map_npy):
        with pytest.raises(MegaIndexError, match=r"a\.npy: "):
            read(str(path))
    status, out, err = cli("import", tmp_path / "out", path, "--format", "numpy")
    assert (status, out, err.count("\n")) == (2, "", 1)


@pytest.mark.parametrize("kind", KINDS)
def test_special_files_in_place_of_arrays(tmp_path: Path, kind: str) -> None:
    put(kind, tmp_path / "a.npy")
    for read in (map_npy_file, read_ids, map_npy):
        with pytest.raises((StorageError, ValueError)):
            read(str(tmp_path / "a.npy"))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("part_bytes", [7, 1 << 20])
def test_lines_have_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, suffix: str, part_bytes: int
) -> None:
    monkeypatch.setattr(reading, "LONGEST_LINE", 40)
    for name in ("_BLOCK", "_SHORT", "_UNPACKED"):
        monkeypatch.setattr(reading, name, 16)
    source = tmp_path / f"a.txt{suffix}"
    pack = gzip.compress if suffix else bytes

    def tokenized(longest: int) -> Any:
        lines = (b"a\n", b"b" * (longest - 1) + b"\n", b"c\r", b"d\n")
        source.write_bytes(pack(b"".join(lines)))
        out = tmp_path / f"out{longest}"
        return run(out, [source], part_bytes=part_bytes)

    assert tokenized(40).documents == 4
    with pytest.raises(FormatError, match=r"a\.txt.*: line 2: must have at most 40 bytes"):
        tokenized(41)
