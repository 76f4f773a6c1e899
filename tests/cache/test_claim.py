"""One builder at a time, over processes; a dead one is replaced, a slow one is waited for."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megaindex.cache import claim
from megaindex.cache.claim import (
    Claim,
    build_once,
    build_timeout,
    holder_is_dead,
    remove_dead,
    this_process,
)
from megaindex.errors import InvalidArgument, StorageError

SPAWN = multiprocessing.get_context("spawn")


def append(path: Path, text: str) -> None:
    with open(path, "a") as file:  # O_APPEND: lines of several processes do not mix
        file.write(text + "\n")


def build_slowly(directory: str, number: int, seconds: float) -> None:
    """What one of several processes does that want ``result``."""
    root = Path(directory)

    def find() -> str | None:
        path = root / "result"
        return path.read_text() if path.exists() else None

    def build() -> str:
        append(root / "log", f"built by {number}")
        time.sleep(seconds)
        (root / "tmp").write_text("made")
        os.rename(root / "tmp", root / "result")
        return "made"

    append(root / "log", f"got {build_once(directory, 'key', find, build, timeout=60)}")


def hold(directory: str) -> None:
    with_claim = Claim(directory, "key", stale_after=1.0)
    assert with_claim.acquire()
    with with_claim:
        (Path(directory) / "held").touch()
        time.sleep(600)


def lines(directory: Path) -> list[str]:
    return (directory / "log").read_text().splitlines()


def wait_for(path: Path) -> None:
    for _ in range(3000):
        if path.exists():
            return
        time.sleep(0.01)
    raise AssertionError(f"{path} did not appear")


@pytest.mark.slow
def test_one_of_several_processes_builds(tmp_path: Path) -> None:
    workers = [
        SPAWN.Process(target=build_slowly, args=(str(tmp_path), number, 0.3)) for number in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
        assert worker.exitcode == 0
    assert sum(line.startswith("built") for line in lines(tmp_path)) == 1
    assert lines(tmp_path).count("got made") == 3
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "result"]


@pytest.mark.not_quick
def test_a_killed_builder_is_replaced_at_once(tmp_path: Path) -> None:
    """On the same machine, long before its counter counts as standing still."""
    holder = SPAWN.Process(target=hold, args=(str(tmp_path),))
    holder.start()
    wait_for(tmp_path / "held")
    os.kill(holder.pid or 0, signal.SIGKILL)
    holder.join()
    found = build_once(tmp_path, "key", lambda: None, lambda: "made", timeout=50, stale_after=3600)
    assert found == "made"
    assert not list(tmp_path.glob("*.claim*"))


def ended_process() -> dict[str, Any]:
    """A process of this machine that has ended, as a claim names it."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    os.waitpid(child, 0)
    return {**this_process(), "pid": child}


@pytest.mark.parametrize("field", ["host", "boot", "pids"])
def test_only_processes_that_can_be_seen_are_known_to_have_ended(field: str) -> None:
    """A process number says nothing of another machine, boot or container."""
    ended = ended_process()
    assert holder_is_dead(json.dumps(ended))
    for other in ("another", "", None):
        assert not holder_is_dead(json.dumps({**ended, field: other}))


@pytest.mark.parametrize(("pid", "is_one"), [(0, False), (2**31 - 1, True), (2**31, False)])
def test_only_numbers_of_processes_are_looked_for(pid: int, is_one: bool) -> None:
    """The largest is beyond those that Linux gives."""
    assert holder_is_dead(json.dumps({**this_process(), "pid": pid})) == is_one


def test_a_machine_without_a_boot_id_is_not_known_by_its_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Containers of several machines may have one host name, and processes of equal numbers."""
    ended = ended_process()
    monkeypatch.setattr(claim, "boot_id", lambda: "unknown")
    assert not holder_is_dead(json.dumps({**this_process(), "pid": ended["pid"]}))


def test_a_process_that_is_gone_is_no_zombie() -> None:
    assert [claim._is_zombie(pid) for pid in (os.getpid(), 2**31 - 1)] == [False, False]


def test_a_process_that_its_parent_has_not_waited_for_has_ended() -> None:
    """A builder that was killed under a launcher keeps its number until the launcher looks."""
    child = os.fork()
    if child == 0:
        os._exit(0)
    try:
        os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)
        assert holder_is_dead(json.dumps({**this_process(), "pid": child}))
    finally:
        os.waitpid(child, 0)
    assert not holder_is_dead(json.dumps(this_process()))


def test_a_builder_of_another_machine_is_replaced(tmp_path: Path) -> None:
    """It is known by its counter alone, which no longer moves."""
    other = Claim(tmp_path, "key")
    assert other.acquire()
    path = tmp_path / "key.claim"
    path.write_text(json.dumps({**json.loads(path.read_text()), "host": "elsewhere"}))
    assert build_once(tmp_path, "key", lambda: None, lambda: 7, stale_after=0.2) == 7
    with other:  # it was only slow: it neither frees nor moves what it no longer holds
        mine = Claim(tmp_path, "key")
        assert mine.acquire()
        held = path.read_text()
    assert path.read_text() == held


def test_a_living_builder_keeps_its_claim(tmp_path: Path) -> None:
    other = Claim(tmp_path, "key", stale_after=0.4)
    assert other.acquire()
    path = tmp_path / "key.claim"
    with other:
        before = path.read_text()
        with pytest.raises(StorageError, match=r"time limit; set MEGAINDEX_BUILD_TIMEOUT to"):
            build_once(tmp_path, "key", lambda: None, lambda: 7, timeout=1.0, stale_after=0.4)
        assert path.read_text() != before  # its counter moved
    assert not path.exists()


def test_waiting_ends_with_what_was_built(tmp_path: Path) -> None:
    """Freed between looking and waiting."""
    results = iter([None, "theirs"])
    other = Claim(tmp_path, "key")
    assert other.acquire()
    os.unlink(tmp_path / "key.claim")
    with_claim = build_once(tmp_path, "key", lambda: next(results), lambda: "mine")
    assert with_claim == "theirs"


def test_a_result_that_a_client_does_not_see_yet_is_not_built_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Clients of network file systems remember that a name was missing until they list it."""
    listed: list[str] = []
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: (listed.append(str(path)), real(path))[1])
    found = build_once(tmp_path, "key", lambda: "found" if listed else None, lambda: "built")
    assert found == "found"
    assert listed[0] == str(tmp_path)


def test_a_failed_build_frees_the_claim(tmp_path: Path) -> None:
    def fail() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        build_once(tmp_path, "key", lambda: None, fail)
    assert build_once(tmp_path, "key", lambda: None, lambda: 1) == 1


@pytest.mark.parametrize("begun", [False, True])
def test_ctrl_c_while_the_heartbeat_starts_frees_the_claim(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, begun: bool
) -> None:
    """Before the thread exists, and while start() waits for its first sign."""
    start, wait = threading.Thread.start, threading.Event.wait

    def interrupted(thread: threading.Thread) -> None:
        if begun:
            monkeypatch.setattr(threading.Event, "wait", interrupted_wait)
            start(thread)
        raise KeyboardInterrupt

    def interrupted_wait(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt
        return wait(event, timeout)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        build_once(tmp_path, "key", lambda: None, lambda: "built")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("late", [False, True])
def test_the_claim_of_the_next_builder_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, late: bool
) -> None:
    """A waiter read the claim of a process that ended; meanwhile another removed it and builds:
    before the waiter looks again, or, ``late``, after."""
    dead = Claim(tmp_path, "key")
    assert dead.acquire()
    path = tmp_path / "key.claim"
    text = path.read_text()
    fast, acquire = Claim(tmp_path, "key"), Claim.acquire

    def build_next(guard: Claim | None = None) -> bool:
        monkeypatch.setattr(Claim, "acquire", acquire)
        path.unlink()
        return fast.acquire() and (guard is None or guard.acquire())

    if late:
        monkeypatch.setattr(Claim, "acquire", build_next)
    else:
        assert build_next()
    remove_dead(path, text)
    assert json.loads(path.read_text())["token"] == fast._token
    assert sorted(p.name for p in tmp_path.iterdir()) == ["key.claim"]


def test_a_slow_removal_is_not_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The claim under which another one is removed counts on while the file system takes long."""
    dead = Claim(tmp_path, "key")
    assert dead.acquire()
    path, unlink = tmp_path / "key.claim", Path.unlink
    seen: list[int] = []

    def slow_unlink(self: Path, missing_ok: bool = False) -> None:
        if self == path:
            (guard,) = (p for p in tmp_path.glob("key.claim.*") if p.name.endswith(".claim"))
            deadline = time.monotonic() + 10
            while len({*seen}) < 3 and time.monotonic() < deadline:
                seen.append(json.loads(guard.read_text() or '{"count": 0}')["count"])
        unlink(self, missing_ok)

    monkeypatch.setattr(Path, "unlink", slow_unlink)
    remove_dead(path, path.read_text(), stale_after=0.12)
    assert len({*seen}) == 3
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_another_machine_left_undone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is finished even where the time to wait for the builder has passed."""
    text = json.dumps({"token": "0" * 16, "host": "elsewhere", "pid": 1, "count": 0})
    (tmp_path / "key.claim").write_text(text)
    (tmp_path / f"key.claim.{'0' * 16}.claim").write_text(text.replace("0" * 16, "1" * 16))
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    monkeypatch.setattr(claim, "time", SimpleNamespace(monotonic=lambda: now, sleep=sleep))
    assert Claim(tmp_path, "key", stale_after=60).wait(deadline=61)
    assert 120 < now < 125
    assert list(tmp_path.iterdir()) == []


def test_a_dead_claim_is_removed_with_the_guard_of_its_removal(tmp_path: Path) -> None:
    """Both processes ended; the next build of another key removes what they left."""
    ended = ended_process()
    for name, token in (("key.claim", "0" * 16), (f"key.claim.{'0' * 16}.claim", "1" * 16)):
        (tmp_path / name).write_text(json.dumps({**ended, "token": token}))
    assert build_once(tmp_path, "other", lambda: None, lambda: 1) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [errno.EPERM, errno.ENOTSUP, errno.ENOSYS, errno.EMLINK])
def test_without_hard_links(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def refuse(*args: Any) -> None:
        raise OSError(error, os.strerror(error))

    monkeypatch.setattr(claim.os, "link", refuse)
    first, second = Claim(tmp_path, "key"), Claim(tmp_path, "key")
    assert first.acquire()
    assert not second.acquire()
    assert not second._create()  # another process was faster
    with first:
        pass
    assert not list(tmp_path.iterdir())


def test_a_claim_that_could_not_be_written_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Others would wait until an empty claim is stale."""

    def full(*_: Any) -> str:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Claim, "_text", full)
    with pytest.raises(OSError, match="No space left"):
        Claim(tmp_path, "key")._create()
    assert not list(tmp_path.iterdir())


def test_a_lost_answer_to_link(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link was made, and the repeated request says that the name is taken."""
    link = os.link

    def link_and_fail(source: Any, target: Any) -> None:
        link(source, target)
        raise FileExistsError(errno.EEXIST, "exists")

    monkeypatch.setattr(claim.os, "link", link_and_fail)
    assert Claim(tmp_path, "key").acquire()


def test_directories(tmp_path: Path) -> None:
    assert build_once(tmp_path / "a/b", "key", lambda: None, lambda: 1) == 1
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="cannot create the claim"):
        build_once(tmp_path / "file/b", "key", lambda: None, lambda: 1)


def test_timeout_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MEGAINDEX_BUILD_TIMEOUT", raising=False)
    assert build_timeout() == 3600
    for text in ("2.5", "0.5"):
        monkeypatch.setenv("MEGAINDEX_BUILD_TIMEOUT", text)
        assert build_timeout() == float(text)
    for text in ("0", "-1", "soon", "nan"):
        monkeypatch.setenv("MEGAINDEX_BUILD_TIMEOUT", text)
        with pytest.raises(InvalidArgument, match="must be a positive number"):
            build_timeout()
