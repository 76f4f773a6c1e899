"""The bar while bytes are copied: on a terminal only, and never on stdout."""

from __future__ import annotations

import io
import threading

import pytest
from support.command_line import Terminal, stderr_as

from megaindex.progress import copying, counting, counting_samples, ignore, polling


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_only_a_terminal_gets_a_bar(
    stream: io.StringIO,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    stderr_as(stream, monkeypatch)
    with copying("merging 3 pairs") as bar:
        progress = bar(10_000_000)
        progress(4_000_000)
        progress(6_000_000)
    assert ("merging 3 pairs" in stream.getvalue()) == shown
    assert ("10.0/10.0 MB" in stream.getvalue()) == shown
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_bars_of_tasks_and_samples(
    stream: io.StringIO, shown: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    stderr_as(stream, monkeypatch)
    with counting("building", 3) as built:
        built(1)
        built(2)
    assert ("building" in stream.getvalue()) == shown
    assert ("3/3" in stream.getvalue()) == shown
    with counting_samples() as told:
        assert (told is not None) == shown
        assert "counting samples" not in stream.getvalue()  # before it is told of any
        if told is not None:
            told(20, 80)
            told(80, 80)
    assert ("counting samples" in stream.getvalue()) == shown
    assert ("0:00:00" in stream.getvalue().partition("counting samples")[2]) == shown


def test_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    stderr_as(stream, monkeypatch)
    for _ in range(2):
        with copying("reading") as outer, copying("downloading c.idx") as inner:
            inner(100)(100)
            outer(50)(50)
    assert "reading" in stream.getvalue()
    assert "downloading" not in stream.getvalue()
    with copying("downloading c.idx") as bar:
        bar(100)(100)
    assert "downloading c.idx" in stream.getvalue()


def test_progress_of_tasks_in_other_processes() -> None:
    """It goes on between the ends of tasks, and back not even where a task begins again."""
    seen: list[int] = []
    processed = iter([30, 80, 20])
    looked = threading.Event()

    def under_way() -> int:
        number = next(processed, 0)
        if number == 0:
            looked.set()
        return number

    with polling(under_way, seen.append, seconds=0.001) as finished:
        assert looked.wait(30)
        assert (sum(seen), min(seen)) == (80, 30)
        finished(70)
        finished(50)
        assert (sum(seen), min(seen)) == (120, 30)
    assert "megaindex-progress" not in {thread.name for thread in threading.enumerate()}
    with polling(under_way, ignore) as finished:
        assert finished is ignore
