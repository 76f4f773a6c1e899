"""Claims and records that nobody wrote: as those of builders that died, and never in the way."""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.cache import claim as claiming
from megaindex.cache import claim as leftovers
from megaindex.cache.claim import (
    Claim,
    build_once,
    describe_holder,
    holder_is_dead,
    read_claim,
    this_process,
    token_of,
)
from megaindex.errors import StorageError

DEEP = "[" * 4000


def forged(**fields: Any) -> str:
    return json.dumps({**this_process(), "token": "x", **fields})


FORGED = {
    "deep": DEEP.encode(),
    "empty": b"",
    "no object": b"[1]",
    "no text": b"\xff\xfe",
    "long": b'{"pid": ' + b"9" * 5000,
    "pid beyond": forged(pid=10**30).encode(),
    "pid just beyond": forged(pid=2**31).encode(),
    "pid 0": forged(pid=0).encode(),
    "pid negative": forged(pid=-1).encode(),
    "pid a list": forged(pid=[1]).encode(),
    "host a list": forged(host=[1]).encode(),
}


@pytest.mark.slow
@for_each("text", FORGED.values())
def test_a_forged_claim_is_taken_over_when_it_shows_no_life(tmp_path: Path, text: bytes) -> None:
    path = tmp_path / "key.claim"
    path.write_bytes(text)
    read = read_claim(path)
    assert read is not None
    assert not holder_is_dead(read)
    assert describe_holder(read)
    with pytest.raises(StorageError, match=r"key\.claim: process .* builds it"):
        build_once(tmp_path, "key", lambda: None, lambda: 1, timeout=0.1)
    assert path.read_bytes() == text  # it is not told from one that lives before its time
    assert build_once(tmp_path, "key", lambda: None, lambda: 1, timeout=30, stale_after=0.2) == 1
    assert not list(tmp_path.glob("key.claim*"))


@pytest.mark.parametrize("kind", ["link", "loop", "folder"])
def test_what_is_no_file_is_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "key.claim"
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(path if kind == "loop" else tmp_path / "elsewhere")
    with pytest.raises(StorageError, match=r"key\.claim: cannot read the claim"):
        build_once(tmp_path, "key", lambda: None, lambda: 1, timeout=30, stale_after=0.2)


@for_each("text", FORGED.values())
def test_a_claim_of_another_key_stops_nobody(tmp_path: Path, text: bytes) -> None:
    (tmp_path / f"{'0' * 32}.claim").write_bytes(text)
    (tmp_path / f"{'1' * 32}.claim").mkdir()
    mine = tmp_path / f"tmp.{'2' * 32}.{'a' * 16}"
    others = [tmp_path / f"tmp.{digit * 32}.{'a' * 16}" for digit in "01"]
    for path in (mine, *others):
        path.mkdir()
    named = tmp_path / f"set-sample_index.npy.tmp.{'a' * 16}"  # of any key
    named.touch()
    leftovers._listed.clear()
    assert build_once(tmp_path, "key", lambda: None, lambda: 1, timeout=30) == 1
    assert not mine.exists()  # nobody claims it
    assert all(path.is_dir() for path in others)
    assert named.exists()


def test_a_claim_that_is_overwritten_does_not_break_its_holder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exceptions of threads fail tests."""
    monkeypatch.setattr(claiming, "_BEATS", 100)
    for text in (b"\xff", DEEP.encode()):
        held = Claim(tmp_path, "key", stale_after=1.0)
        assert held.acquire()
        with held:
            (tmp_path / "key.claim").write_bytes(text)
            held._stop.wait(0.1)
            assert held._beater is not None
            assert held._beater.is_alive()
        assert (tmp_path / "key.claim").read_bytes() == text  # it may be another's
        (tmp_path / "key.claim").unlink()


def test_tokens_of_no_claim_are_alike() -> None:
    assert token_of(DEEP) is token_of("") is token_of("[]") is None


@pytest.mark.parametrize(
    "text",
    ["[" * 100_000, "[]", '{"sources": 7, "checksum": ""}', "9" * 5000, "pipe", "other"],
    ids=["deep", "list", "number", "digits", "pipe", "other"],
)
def test_a_forged_snapshot_of_a_blend_is_looked_past(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    prefixes = [str(write_corpus(tmp_path / name, np.full(50, 37)).path_prefix) for name in "ab"]

    def build() -> Any:
        return megaindex.build_blend(
            prefixes, weights=[1.0, 1.0], sequence_length=16, seed=1, num_samples=40,
            cache_dir=tmp_path / "cache",
        )  # fmt: skip

    expected = [build().locate(np.arange(40))]
    (record,) = (tmp_path / "cache").glob("blend-*-megaindex.json")
    if text == "other":
        from megaindex.cache.fingerprint import write_records

        write_records(record, [{"prefix": "elsewhere", "stamp": []}])
    elif text == "pipe":
        record.unlink()
        os.mkfifo(record)
    else:
        record.write_text(text)
    with caplog.at_level(logging.WARNING):
        found = build().locate(np.arange(40))
    assert "is damaged; all sources are opened again" in caplog.text
    for one, other in zip(vars(expected[0]).values(), vars(found).values(), strict=True):
        assert np.array_equal(one, other)
