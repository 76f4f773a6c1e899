"""Processes of this machine: none outlives the one that it works for."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from engine_tasks import Raising, all_tidied, refuse, square, until

from megaindex.engine import open_engine
from megaindex.errors import InvalidArgument, MissingFile


def test_one_worker_is_this_process() -> None:
    with open_engine(workers=1) as engine:
        assert list(engine.run(lambda task: (task, os.getpid()), "ab")) == [
            (0, ("a", os.getpid())),
            (1, ("b", os.getpid())),
        ]
        with pytest.raises(MissingFile):
            list(engine.run(refuse, [Raising(number=0, folder="", kind="missing")]))


def test_iterators_may_be_left_open() -> None:
    with open_engine(workers=2) as engine:
        results = engine.run(square, range(9))
        number, result = next(results)
        assert result == number**2
        assert sorted(engine.run(square, [3, 4])) == [(0, 9), (1, 16)]  # beside it
    assert not engine._alive  # type: ignore[attr-defined]


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
from engine_tasks import square
from megaindex.engine import open_engine

print("began")
with open_engine(workers=2) as engine:
    print(sorted(engine.run(square, [3, 4])))
"""


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
