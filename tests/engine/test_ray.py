"""Ray: clusters that cannot be used are named, and one that was started here is stopped."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.corpora import write_corpus
from support.engine_tasks import Deadly, all_tidied, linger, square, survive, until
from support.ray_clusters import quiet

import megaindex
from megaindex.cli import main
from megaindex.engine import open_engine
from megaindex.errors import EngineError, InvalidArgument


def test_no_more_tasks_at_a_time_than_workers(tmp_path: Path, ray_address: str) -> None:
    tasks = [Deadly(number=i, folder=str(tmp_path)) for i in range(3)]
    with quiet(), open_engine("ray", address=ray_address, workers=1) as engine:
        assert engine.workers == 1
        # one that began before the one in front of it has ended would not come in order
        assert [number for number, _ in engine.run(linger, tasks)] == list(range(3))
        assert [number for number, _ in engine.run(survive, tasks)] == list(range(3))


def test_a_process_that_is_part_of_a_cluster_stays_in_it(ray_address: str) -> None:
    with quiet(), open_engine("ray", address=ray_address):
        import ray

        with open_engine("ray") as engine:
            assert list(engine.run(square, [3])) == [(0, 9)]
        assert ray.is_initialized()
        with (
            pytest.raises(EngineError, match=r"10\.0\.0\.1:6379: this process is part of the Ray"),
            open_engine("ray", address="10.0.0.1:6379"),
        ):
            pass
    assert not ray.is_initialized()


def test_the_environment_names_the_cluster(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", ray_address)
    with quiet(), open_engine("ray") as engine:
        import ray

        assert ray.get_runtime_context().gcs_address == ray_address
        assert engine.workers == 2
        assert engine.in_flight >= engine.workers  # no CPU waits


def look_up(real: Callable[..., Any], host: object, *more: Any, **options: Any) -> Any:
    """As a name server answers; one that is silent takes as long as it is asked to."""
    if str(host).endswith(".invalid"):
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return real(host, *more, **options)


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("127.0.0.1:1", r"^127\.0\.0\.1:1: cannot be reached: .*refused"),
        ("no.such.host.invalid:6379", "cannot be reached: "),
        ("127.0.0.1:99999", "cannot be reached: "),
        ("nonsense", "^nonsense: cannot be used as a Ray cluster: Invalid address format"),
    ],
)
def test_an_address_without_a_cluster(
    address: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", partial(look_up, socket.getaddrinfo))
    began = time.monotonic()
    with pytest.raises(EngineError, match=message), quiet(), open_engine("ray", address=address):
        pass
    assert time.monotonic() - began < 20


def test_a_node_that_has_another_megaindex_is_named(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(megaindex, "__version__", "99.0")
    with (
        quiet(),
        open_engine("ray", address=ray_address) as engine,
        pytest.raises(EngineError, match=r"^node .* has megaindex .*, the command runs 99\.0"),
    ):
        list(engine.run(square, [1]))


def test_a_node_without_the_directory_is_named(
    ray_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getcwd", lambda: "/no/such/directory")
    with quiet(), open_engine("ray", address=ray_address) as engine:
        results = engine.run(square, [1])
        with pytest.raises(EngineError, match=r"/no/such/directory: node .* cannot change to"):
            next(results)


def test_a_node_that_cannot_import_what_a_task_needs(
    ray_address: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "only_here.py").write_text("def task(number):\n    return number\n")
    monkeypatch.syspath_prepend(tmp_path)
    import only_here

    with (
        quiet(),
        open_engine("ray", address=ray_address) as engine,
        pytest.raises(EngineError, match=r"cannot run it: .*No module named 'only_here'"),
    ):
        list(engine.run(only_here.task, [1]))


def test_a_missing_ray_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with (
        pytest.raises(InvalidArgument, match=r"pip install 'megaindex\[ray\]'"),
        open_engine("ray"),
    ):
        pass


SCRIPT = """
import sys
from support.engine_tasks import note_and_sleep
from megaindex.cli import guarded
from megaindex.engine import open_engine

def body():
    with open_engine("ray", address=sys.argv[2]) as engine:
        list(engine.run(note_and_sleep, [sys.argv[1]] * 9))

sys.exit(guarded("test", body))
"""


def test_ctrl_c_ends_a_run_and_its_tasks(tmp_path: Path, ray_address: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path), ray_address],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert until(lambda: len(list(tmp_path.iterdir())) == 2, 30)
    began = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    error = process.communicate(timeout=30)[1]
    assert time.monotonic() - began < 8
    assert error == "megaindex test: interrupted, nothing half-written was left\n"
    assert process.returncode == 130
    all_tidied(tmp_path)


def test_a_cluster_that_was_started_here_is_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    corpora = [write_corpus(tmp_path / name, [90, 40 + i]) for i, name in enumerate("ab")]
    before = _raylets()
    with quiet():
        status = main(
            [
                *("build", "--data-path", *(str(corpus.path_prefix) for corpus in corpora)),
                *("--seq-length", "16", "--cache-dir", str(tmp_path / "cache")),
                *("--engine", "ray", "--workers", "1"),
            ]
        )
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    assert captured.out.startswith("order megatron: 2 datasets, 16 samples of 16 tokens")
    assert "on 1 worker (ray)" in captured.out
    assert until(lambda: _raylets() == before, 10)


def _raylets() -> set[int]:
    """Processes that manage a Ray node and that this one has started."""
    found = set()
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            head, _, rest = (path / "stat").read_text().rpartition(")")
            if head.endswith("(raylet") and int(rest.split()[1]) == os.getpid():
                found.add(int(path.name))
    return found
