"""The bar while bytes are copied: on a terminal only, and never on stdout."""

from __future__ import annotations

import io
import sys

import pytest

from megaindex.corpus.progress import copying


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "shown"), [(Terminal(), True), (io.StringIO(), False)])
def test_only_a_terminal_gets_a_bar(
    stream: io.StringIO,
    shown: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    with copying("merging 3 pairs") as bar:
        progress = bar(10_000_000)
        progress(4_000_000)
        progress(6_000_000)
    assert ("merging 3 pairs" in stream.getvalue()) == shown
    assert ("10.0/10.0 MB" in stream.getvalue()) == shown
    assert capsys.readouterr().out == ""
