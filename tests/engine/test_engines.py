"""What every engine promises: each result once, whoever is killed; errors as they were raised."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest
from support.engine_tasks import (
    Deadly,
    Raising,
    all_tidied,
    interrupted,
    note_and_sleep,
    refuse,
    runs_of,
    square,
    survive,
    where_and_what,
)

from megaindex.engine import Engine, open_engine
from megaindex.engine.local import ATTEMPTS, LocalEngine
from megaindex.errors import EngineError, FormatError, InvalidArgument, MissingFile


def test_every_task_once(engine: Engine) -> None:
    assert engine.workers == 2
    assert sorted(engine.run(square, range(50))) == [(i, i * i) for i in range(50)]
    assert list(engine.run(square, [])) == []
    assert list(engine.run(square, [7])) == [(0, 49)]


def test_an_engine_of_another_name_is_refused() -> None:
    with (
        pytest.raises(InvalidArgument, match="engine must be local or ray, got 'dask'"),
        open_engine("dask"),  # type: ignore[arg-type]
    ):
        pass
    with open_engine("local", workers=1) as here:
        assert here.workers == 1


@pytest.mark.slow
def test_a_killed_worker_costs_its_task_alone(
    engine: Engine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaths = {8: ATTEMPTS - 1}
    tasks = [Deadly(number=i, folder=str(tmp_path), deaths=deaths.get(i, 0)) for i in range(12)]
    with caplog.at_level(logging.WARNING):
        assert sorted(engine.run(survive, tasks)) == [(i, i) for i in range(12)]
    runs = {i: runs_of(tmp_path, i) for i in range(12)}
    assert runs == {i: 1 + deaths.get(i, 0) for i in range(12)}
    assert "deadly task 8: its worker was lost (killed" in caplog.text


def test_a_task_that_always_kills_its_worker_is_named(engine: Engine, tmp_path: Path) -> None:
    tasks = [Deadly(number=i, folder=str(tmp_path), deaths=99 * (i == 1)) for i in range(4)]
    with pytest.raises(EngineError, match=rf"^deadly task 1: lost its worker {ATTEMPTS} times"):
        list(engine.run(survive, tasks))
    assert runs_of(tmp_path, 1) == ATTEMPTS


@pytest.mark.parametrize(
    ("kind", "raised", "message"),
    [
        ("missing", MissingFile, r"^/data/x.idx: does not exist; check the path$"),
        ("format", FormatError, r"^x.idx: byte 0; rewrite it$"),
        ("value", ValueError, "^no number$"),
        ("picky", EngineError, "a task raised Picky: 1 and 2"),  # it cannot be pickled
    ],
)
def test_what_a_task_raises_is_raised_and_nothing_is_begun_after(
    engine: Engine, tmp_path: Path, kind: str, raised: type[Exception], message: str
) -> None:
    tasks = [Raising(number=i, folder=str(tmp_path), kind=kind * (i == 1)) for i in range(400)]
    with pytest.raises(raised, match=message) as caught:
        list(engine.run(refuse, tasks))
    assert type(caught.value) is raised
    assert "in refuse" in str(caught.value.__cause__)
    assert len(list(tmp_path.iterdir())) < 200  # a busy machine notices late


def test_an_iterator_that_is_interrupted_ends_what_runs(engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        interrupted(lambda: list(engine.run(note_and_sleep, [str(tmp_path)] * 9)), tmp_path)
    all_tidied(tmp_path)


def test_an_iterator_that_is_closed_begins_nothing_more(engine: Engine, tmp_path: Path) -> None:
    tasks = [Raising(number=i, folder=str(tmp_path)) for i in range(400)]
    results = iter(engine.run(refuse, tasks))
    next(results)
    results.close()  # type: ignore[attr-defined]
    assert len(list(tmp_path.iterdir())) < 200


def test_a_task_runs_where_the_command_was_started_on_few_threads(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ((_, (directory, threads)),) = engine.run(where_and_what, [None])
    assert directory == str(tmp_path)
    share = str(max(1, len(os.sched_getaffinity(0)) // engine.workers))
    local = os.environ.get("MEGAINDEX_NUM_THREADS", share)
    assert threads == (local if isinstance(engine, LocalEngine) else "1")
    if isinstance(engine, LocalEngine):  # workers inherit the variable
        monkeypatch.setenv("MEGAINDEX_NUM_THREADS", "7")
        ((_, (_, threads)),) = engine.run(where_and_what, [None])
        assert threads == "7"
