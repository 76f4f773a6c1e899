"""What dead builders leave is removed, what living ones need stays, who wakes up does no harm."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from robustness.faults.scenarios import _contents, _files, _fill

from megaindex.cache import claim as leftovers
from megaindex.cache.array_group import ArrayWriter
from megaindex.cache.claim import Claim, build_once, remove_dead, remove_leftovers
from megaindex.cache.sidecar import Identity
from megaindex.errors import MissingFile, StorageError

# From Python 3.12 on, forking warns once anything has started a thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")

KEY, OTHER = "0" * 32, "f" * 32
TOKEN = "0123456789abcdef"
IDENTITY = Identity(settings=dict, corpus=lambda: "new")


@pytest.fixture(autouse=True)
def _looks_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftovers, "_listed", {})


def litter(folder: Path) -> None:
    (folder / f"tmp.{KEY}.{TOKEN}").mkdir()
    (folder / f"tmp.{KEY}.{TOKEN}/a.npy").touch()
    (folder / f"tmp.{OTHER}.{TOKEN}").mkdir()
    for name in (
        f"{KEY}.claim.{TOKEN}",
        f"x-document_index.npy.tmp.{TOKEN}",
        f"x-description.txt.tmp.{TOKEN}",
        f"x-megaindex.json.tmp.{TOKEN}",
    ):
        (folder / name).touch()


THEIRS = ("train.bin", f"train.bin.tmp.{TOKEN}", "tmp.notes", "tmp", "a.npy", f"{KEY}.claim.txt")


def test_all_that_is_left_goes_and_nothing_else(tmp_path: Path) -> None:
    litter(tmp_path)
    for name in THEIRS:
        (tmp_path / name).touch()
    (tmp_path / KEY).mkdir()
    claim = Claim(tmp_path, OTHER)
    assert claim.acquire()
    with claim:
        remove_leftovers(tmp_path, OTHER, at_once=False)
        names = {path.name for path in tmp_path.iterdir()}
        assert names == {*THEIRS, KEY, f"{OTHER}.claim"}


def test_what_others_may_be_writing_stays(tmp_path: Path) -> None:
    litter(tmp_path)
    theirs = Claim(tmp_path, OTHER)
    assert theirs.acquire()
    remove_leftovers(tmp_path, KEY, at_once=False)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(
        [
            f"{OTHER}.claim",
            f"tmp.{OTHER}.{TOKEN}",
            f"x-document_index.npy.tmp.{TOKEN}",
            f"x-description.txt.tmp.{TOKEN}",
            f"x-megaindex.json.tmp.{TOKEN}",
        ]
    )


def test_a_dead_claim_protects_nothing(tmp_path: Path) -> None:
    litter(tmp_path)
    child = os.fork()
    if child == 0:
        os._exit(0 if Claim(tmp_path, OTHER).acquire() else 1)
    assert os.waitpid(child, 0)[1] == 0
    remove_leftovers(tmp_path, KEY, at_once=False)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("reverse", [False, True])
def test_a_dead_claim_is_removed_although_its_guard_is_dead_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reverse: bool
) -> None:
    child = os.fork()
    if child == 0:
        claim = Claim(tmp_path, OTHER)
        guard = Claim(tmp_path, f"{OTHER}.claim.{claim._token}")
        os._exit(0 if claim.acquire() and guard.acquire() else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert len(list(tmp_path.iterdir())) == 2
    listdir = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: sorted(listdir(path), reverse=reverse))
    remove_leftovers(tmp_path, KEY, at_once=False)
    assert listdir(tmp_path) == []


def test_a_directory_is_looked_at_once_a_minute_unless_someone_died(tmp_path: Path) -> None:
    remove_leftovers(tmp_path, KEY, at_once=False)
    litter(tmp_path)
    remove_leftovers(tmp_path, KEY, at_once=False)
    assert len(list(tmp_path.iterdir())) == 6
    remove_leftovers(tmp_path, KEY, at_once=True)
    assert list(tmp_path.iterdir()) == []


def test_links_are_removed_and_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").touch()
    cache = tmp_path / "cache"
    cache.mkdir()
    (cache / f"tmp.{KEY}.{TOKEN}").symlink_to(outside)
    remove_leftovers(cache, KEY, at_once=True)
    assert list(cache.iterdir()) == []
    assert (outside / "keep").exists()


def test_claims_that_are_none_are_not_waited_for(tmp_path: Path) -> None:
    litter(tmp_path)
    os.mkfifo(tmp_path / "a.claim")
    (tmp_path / "b.claim").write_bytes(b"\xff" * 10_000)
    remove_leftovers(tmp_path, KEY, at_once=True)
    assert (tmp_path / f"x-document_index.npy.tmp.{TOKEN}").exists()  # they may be somebody's
    assert not (tmp_path / f"tmp.{KEY}.{TOKEN}").exists()
    (tmp_path / "c.claim").symlink_to("/dev/zero")
    remove_leftovers(tmp_path, KEY, at_once=True)  # tidies nothing, and raises nothing
    with pytest.raises(StorageError, match=r"c\.claim: cannot read the claim"):
        Claim(tmp_path, "c").wait(deadline=0)


def test_waiters_remove_only_the_claim_that_they_read(tmp_path: Path) -> None:
    """The second wakes while the first removes the claim, and again when a builder has the next."""
    dead = Claim(tmp_path, KEY)
    assert dead.acquire()
    path = tmp_path / f"{KEY}.claim"
    text = path.read_text()
    real_unlink = Path.unlink

    def unlink(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            Path.unlink = real_unlink  # type: ignore[method-assign]
            remove_dead(path, text)
            assert path.read_text() == text
        real_unlink(self, missing_ok)

    Path.unlink = unlink  # type: ignore[method-assign]
    try:
        remove_dead(path, text)
    finally:
        Path.unlink = real_unlink  # type: ignore[method-assign]
    builder = Claim(tmp_path, KEY)
    assert builder.acquire()
    remove_dead(path, text)
    assert json.loads(path.read_text())["token"] == builder._token
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_process_that_ended_while_it_removed_a_claim(tmp_path: Path) -> None:
    """What it held for that is removed in the same way, and one waiter gets the key."""
    path = tmp_path / f"{KEY}.claim"
    child = os.fork()
    if child == 0:
        dead = Claim(tmp_path, KEY)
        dead.acquire()
        Path.unlink = lambda *args, **kwargs: os._exit(0)  # type: ignore[method-assign]
        remove_dead(path, path.read_text())
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(list(tmp_path.iterdir())) > 1
    assert build_once(tmp_path, KEY, lambda: None, lambda: "built", timeout=60) == "built"
    assert list(tmp_path.iterdir()) == []


def check_whole(folder: Path) -> None:
    for name, path in _files(folder, 0).arrays.items():
        np.testing.assert_array_equal(np.load(path), _contents(0, "new")[name])


def test_a_builder_that_wakes_up_changes_nothing_for_readers(tmp_path: Path) -> None:
    """It was frozen in the middle, and another has built and published the same set since."""
    frozen, other = ArrayWriter(_files(tmp_path, 0)), ArrayWriter(_files(tmp_path, 0))
    with frozen:
        array = frozen.allocate("a", (20,), "int64")
        with other:
            _fill(0, other, "new")
            other.publish(IDENTITY)
        check_whole(tmp_path)
        array[:] = _contents(0, "new")["a"]
        frozen.seal("a")
        check_whole(tmp_path)
        frozen.allocate("b", (20,), "int64")[:] = _contents(0, "new")["b"]
        frozen.seal("b")
        check_whole(tmp_path)
        frozen.publish(IDENTITY)
    check_whole(tmp_path)
    assert not list(tmp_path.glob("*.tmp.*"))


def test_a_builder_that_was_robbed_of_its_temporaries_tries_again(tmp_path: Path) -> None:
    attempts: list[int] = []

    def build() -> str:
        attempts.append(1)
        with ArrayWriter(_files(tmp_path, 0)) as writer:
            _fill(0, writer, "new")
            if len(attempts) == 1:
                for path in tmp_path.glob("*.tmp.*"):
                    path.unlink()
            writer.publish(IDENTITY)
        return "built"

    assert build_once(tmp_path, "0", lambda: None, build) == "built"
    assert len(attempts) == 2
    check_whole(tmp_path)


def test_a_file_that_is_missing_stays_an_error(tmp_path: Path) -> None:
    attempts: list[int] = []

    def build() -> str:
        attempts.append(1)
        raise MissingFile("train.idx: missing; check the path")

    with pytest.raises(MissingFile, match=r"train\.idx"):
        build_once(tmp_path, "0", lambda: None, build)
    assert len(attempts) == 2
    assert list(tmp_path.iterdir()) == []
