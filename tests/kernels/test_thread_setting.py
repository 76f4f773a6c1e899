"""MEGAINDEX_NUM_THREADS: a bound, and never the cause of an error without a type."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.kernels import num_threads


@for_each(
    "text", ["0", "000000", "-1", "+1", " 1", "1_0", "1.5", "x", "٣", "²", "1000000", "9" * 5000]
)
def test_what_is_no_number_of_threads_is_refused(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("MEGAINDEX_NUM_THREADS", text)
    with pytest.raises(InvalidArgument, match="MEGAINDEX_NUM_THREADS must be .* got") as caught:
        num_threads()
    assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("text", "threads"), [("1", 1), ("007", 7), ("1024", 1024), ("1025", 1024), ("999999", 1024)]
)
def test_threads_are_bounded(monkeypatch: pytest.MonkeyPatch, text: str, threads: int) -> None:
    monkeypatch.setenv("MEGAINDEX_NUM_THREADS", text)
    assert num_threads() == threads


def test_without_the_setting_they_are_the_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    for text in (None, ""):
        monkeypatch.delenv("MEGAINDEX_NUM_THREADS", raising=False)
        if text is not None:
            monkeypatch.setenv("MEGAINDEX_NUM_THREADS", text)
        assert num_threads() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "status"), [("999999", 0), (str(2**31), 2), ("9" * 5000, 2)])
def test_a_build_with_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, status: int
) -> None:
    corpus = write_corpus(tmp_path / "corpus", np.full(200, 37))
    monkeypatch.setenv("MEGAINDEX_NUM_THREADS", text)
    words = ("--data-path", corpus.path_prefix, "--seq-length", 16, "--cache-dir", tmp_path / "c")
    found, _, err = cli("build", *words)
    assert found == status, err
    assert ("MEGAINDEX_NUM_THREADS" in err) == (status == 2)
