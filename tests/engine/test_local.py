"""Processes of this machine: none outlives the one that it works for."""

from __future__ import annotations

import concurrent.futures.process as pools
import errno
import multiprocessing
import multiprocessing.popen_spawn_posix as spawning
import multiprocessing.synchronize as semaphores
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.engine_tasks import Raising, all_tidied, process_id, refuse, square, until

from megaindex.engine import local, open_engine
from megaindex.errors import EngineError, InvalidArgument, MissingFile


def test_one_worker_is_this_process() -> None:
    with open_engine(workers=1) as engine:
        assert list(engine.run(lambda task: (task, os.getpid()), "ab")) == [
            (0, ("a", os.getpid())),
            (1, ("b", os.getpid())),
        ]
        with pytest.raises(MissingFile):
            list(engine.run(refuse, [Raising(number=0, folder="", kind="missing")]))


def test_an_exception_that_would_arrive_with_another_text_is_named_by_its_own() -> None:
    outcome = local.capture(refuse, Raising(number=0, folder=".", kind="prefixed"))
    with pytest.raises(EngineError, match="^a task raised Prefixed: wrong: the file"):
        outcome.result()


@pytest.mark.slow
def test_iterators_may_be_left_open() -> None:
    with open_engine(workers=2) as engine:
        results = engine.run(square, range(9))
        number, result = next(results)
        assert result == number**2
        assert sorted(engine.run(square, [3, 4])) == [(0, 9), (1, 16)]  # beside it
    assert not engine._alive  # type: ignore[attr-defined]


def test_workers_that_are_killed_while_idle_are_replaced(caplog: pytest.LogCaptureFixture) -> None:
    """Between a result and the next task, while the caller takes its time."""
    with open_engine(workers=2) as engine:
        results = engine.run(process_id, range(40))
        found = [next(results)]
        while len({pid for _, pid in found}) < 2:
            found.append(next(results))
        time.sleep(0.2)
        for pid in {pid for _, pid in found}:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.2)
        found += results
    assert sorted(number for number, _ in found) == list(range(40))
    assert "was lost" not in caplog.text


SCRIPT = """
import sys
from support.engine_tasks import note_and_sleep
from megaindex.cli import guarded
from megaindex.engine import open_engine

def body():
    with open_engine(workers=2) as engine:
        list(engine.run(note_and_sleep, [sys.argv[1]] * 9))

if __name__ == "__main__":
    sys.exit(guarded("test", body))
"""


@pytest.mark.slow_cases("2")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_one_it_works_for(tmp_path: Path, number: int) -> None:
    """Ctrl-C reaches all processes of a terminal; a kill only the first."""
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "run").mkdir()
    process = subprocess.Popen(
        [sys.executable, str(tmp_path / "script.py"), str(tmp_path / "run")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert until(lambda: len(list((tmp_path / "run").iterdir())) == 2, 20)
    began = time.monotonic()
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    error = process.communicate(timeout=20)[1]
    assert time.monotonic() - began < 5
    all_tidied(tmp_path / "run")
    if number == signal.SIGINT:
        assert error == "megaindex test: interrupted, nothing half-written was left\n"
        assert process.returncode == 130
    else:
        assert process.returncode == -number


PLAIN = """
from support.engine_tasks import square
from megaindex.engine import open_engine

print("began")
with open_engine(workers=2) as engine:
    print(sorted(engine.run(square, [3, 4])))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["script", "-"])
def test_the_script_of_the_caller_is_not_run_again(tmp_path: Path, how: str) -> None:
    """It may have no guard of __main__, or be no file at all."""
    (tmp_path / "plain.py").write_text(PLAIN)
    process = subprocess.run(
        [sys.executable, "-" if how == "-" else str(tmp_path / "plain.py")],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        input=PLAIN, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert process.stdout == "began\n[(0, 9), (1, 16)]\n", process.stderr
    assert process.returncode == 0


def test_tasks_of_the_callers_script_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(square, "__module__", "__main__")
    with (
        open_engine(workers=2) as engine,
        pytest.raises(InvalidArgument, match="is defined in the script that runs"),
    ):
        list(engine.run(square, [1]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "dask"}, "engine must be local or ray"),
        ({"workers": 0}, "workers must be at least 1"),
        ({"address": "auto"}, "address 'auto' needs engine ray"),
    ],
)
def test_settings_that_contradict(arguments: dict[str, object], message: str) -> None:
    with (
        pytest.raises(InvalidArgument, match=message),
        open_engine(**arguments),  # type: ignore[arg-type]
    ):
        pass


FAILURES = {
    "semaphores": (semaphores.SemLock, "__init__", OSError(errno.EROFS, "Read-only"), "/dev/shm"),
    "full": (semaphores.SemLock, "__init__", OSError(errno.ENOSPC, "No space"), "/dev/shm"),
    "files": (spawning.Popen, "_launch", OSError(errno.EMFILE, "Too many"), "ulimit -n"),
    "processes": (spawning.Popen, "_launch", OSError(errno.EAGAIN, "Try again"), "ulimit -u"),
    "threads": (
        pools._ExecutorManagerThread,  # type: ignore[attr-defined]
        "start", RuntimeError("can't start new thread"), "ulimit -u",
    ),
}  # fmt: skip


@pytest.mark.parametrize("after", [0, 1])
@pytest.mark.parametrize("failure", FAILURES)
def test_processes_that_cannot_be_started(
    monkeypatch: pytest.MonkeyPatch, failure: str, after: int
) -> None:
    """The first of them, or one beside others that run."""
    place, name, error, remedy = FAILURES[failure]
    real, calls = getattr(place, name), iter(range(100))

    def start(*arguments: object, **more: object) -> object:
        if next(calls) < (10 * after if name == "__init__" else after):
            return real(*arguments, **more)
        raise error

    monkeypatch.setattr(local, "_GRACE", 600.0)
    began = time.monotonic()
    with open_engine(workers=4) as engine, monkeypatch.context() as patch:
        patch.setattr(place, name, start)
        with pytest.raises(EngineError, match=rf"cannot start .*{remedy}.*--workers 1"):
            list(engine.run(square, range(9)))
    assert until(lambda: not multiprocessing.active_children(), 60)
    assert time.monotonic() - began < 600  # none was waited for in vain


@pytest.mark.parametrize("limit", [16, 22])
def test_too_few_descriptors_are_named(tmp_path: Path, limit: int) -> None:
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"text": "x"}\n')
    script = f'ulimit -n {limit} && exec "$@"'
    words = ["tokenize", "out", "a.jsonl", "b.jsonl", "--tokenizer", "bytes", "--part-size", "5"]
    for workers in ("2", "1"):
        done = subprocess.run(
            ["sh", "-c", script, "sh", sys.executable, "-m", "megaindex", *words,
             "--workers", workers],
            cwd=tmp_path, capture_output=True, text=True, check=False, timeout=60,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )  # fmt: skip
        if workers == "2":
            assert "cannot start worker processes: [Errno 24] Too many open files" in done.stderr
            assert done.stderr.count("\n") == 1
            assert done.returncode == 2
            assert sorted(os.listdir(tmp_path)) == ["a.jsonl", "b.jsonl"]
        else:
            assert done.returncode == 0, done.stderr
