"""Processes of this machine: every result once, whoever is killed; nothing outlives a run."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_tasks import Deadly, Raising, note_and_sleep, refuse, runs_of, square, survive

from megaindex.engine import open_engine
from megaindex.engine.losses import ATTEMPTS
from megaindex.errors import EngineError, InvalidArgument, MissingFile


@pytest.mark.parametrize("workers", [1, 2])
def test_every_task_once(workers: int) -> None:
    with open_engine(workers=workers) as engine:
        assert engine.workers == workers
        assert sorted(engine.run(square, range(50))) == [(i, i * i) for i in range(50)]
        assert list(engine.run(square, [])) == []
        assert list(engine.run(square, [7])) == [(0, 49)]


def test_a_killed_worker_costs_its_task_alone(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaths = {3: 1, 8: ATTEMPTS - 1}
    tasks = [Deadly(number=i, folder=str(tmp_path), deaths=deaths.get(i, 0)) for i in range(12)]
    with caplog.at_level(logging.WARNING), open_engine(workers=2) as engine:
        assert sorted(engine.run(survive, tasks)) == [(i, i) for i in range(12)]
    runs = {i: runs_of(tmp_path, i) for i in range(12)}
    assert runs == {i: 1 + deaths.get(i, 0) for i in range(12)}
    assert "deadly task 3: its worker was lost (killed by SIGKILL)" in caplog.text


def test_a_task_that_always_kills_its_worker_is_named(tmp_path: Path) -> None:
    tasks = [Deadly(number=i, folder=str(tmp_path), deaths=99 * (i == 1)) for i in range(4)]
    with (
        open_engine(workers=2) as engine,
        pytest.raises(EngineError, match=rf"^deadly task 1: lost its worker {ATTEMPTS} times"),
    ):
        list(engine.run(survive, tasks))
    assert runs_of(tmp_path, 1) == ATTEMPTS


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize(
    ("kind", "raised", "message"),
    [
        ("missing", MissingFile, r"^/data/x.idx: does not exist; check the path$"),
        ("value", ValueError, "^no number$"),
    ],
)
def test_what_a_task_raises_is_raised_and_nothing_is_begun_after(
    tmp_path: Path, workers: int, kind: str, raised: type[Exception], message: str
) -> None:
    tasks = [Raising(number=i, folder=str(tmp_path), kind=kind * (i == 1)) for i in range(40)]
    with open_engine(workers=workers) as engine, pytest.raises(raised, match=message):
        list(engine.run(refuse, tasks))
    assert len(list(tmp_path.iterdir())) < 10


def test_an_exception_that_cannot_be_sent_is_told(tmp_path: Path) -> None:
    tasks = [Raising(number=i, folder=str(tmp_path), kind="picky") for i in range(2)]
    with (
        open_engine(workers=2) as engine,
        pytest.raises(EngineError, match="a task raised Picky: 1 and 2"),
    ):
        list(engine.run(refuse, tasks))


def test_a_closed_iterator_ends_what_runs(tmp_path: Path) -> None:
    with open_engine(workers=2) as engine:
        left_open = engine.run(note_and_sleep, [str(tmp_path)] * 9)
        with pytest.raises(TimeoutError):
            _interrupted(lambda: next(left_open))
    _all_tidied(tmp_path)


def _interrupted(call: object) -> None:
    """Call, and raise TimeoutError in it after a second."""

    def stop(*_: object) -> None:
        raise TimeoutError

    earlier = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, 2)
    try:
        call()  # type: ignore[operator]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, earlier)


def _all_tidied(folder: Path) -> None:
    names = [path.name for path in folder.iterdir()]
    pids = [int(name.rpartition("-")[2]) for name in names]
    assert len(pids) == 2
    assert all(name.startswith("tidied") for name in names)
    deadline = time.monotonic() + 5
    while any(map(_is_alive, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(_is_alive, pids))


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


SCRIPT = """
import sys
from engine_tasks import note_and_sleep
from megaindex.cli.run import guarded
from megaindex.engine import open_engine

def body():
    with open_engine(workers=2) as engine:
        list(engine.run(note_and_sleep, [sys.argv[1]] * 9))

if __name__ == "__main__":
    sys.exit(guarded("test", body))
"""


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
    deadline = time.monotonic() + 20
    while len(list((tmp_path / "run").iterdir())) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)
    else:
        process.send_signal(number)
    began = time.monotonic()
    error = process.communicate(timeout=20)[1]
    assert time.monotonic() - began < 5
    deadline = time.monotonic() + 5
    while len(list((tmp_path / "run").glob("tidied*"))) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    _all_tidied(tmp_path / "run")
    assert process.returncode == (130 if number == signal.SIGINT else -number)
    if number == signal.SIGINT:
        assert error == "megaindex test: interrupted, nothing half-written was left\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "dask"}, "engine must be local or ray, got 'dask'"),
        ({"workers": 0}, "workers must be at least 1, got 0"),
        ({"address": "auto"}, "address 'auto' is of a Ray cluster; choose engine ray"),
    ],
)
def test_settings_that_contradict(arguments: dict[str, object], message: str) -> None:
    with (
        pytest.raises(InvalidArgument, match=message),
        open_engine(**arguments),  # type: ignore[arg-type]
    ):
        pass
