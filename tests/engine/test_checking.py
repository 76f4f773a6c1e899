"""`megaindex verify` on an engine: the same reports in the same order and words as alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus
from support.ray_clusters import quiet

import megaindex
from megaindex.cli import main


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Pairs, some of them damaged, and a cache."""
    for number in range(8):
        write_corpus(tmp_path / f"c{number}", [5, 9, 200 * (8 - number)], np.uint16)
    (tmp_path / "c3.bin").write_bytes(b"1")
    (tmp_path / "c5.idx").write_bytes(b"MMIDIDX\0\0")
    megaindex.build_index(tmp_path / "c0", sequence_length=16, seed=1, cache_dir=tmp_path / "cache")
    next((tmp_path / "cache").glob("*/shuffle_index.npy")).write_bytes(b"")
    return tmp_path


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_reports_are_those_of_one_process(
    kind: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    where = ["--workers", "2"]
    if kind == "ray":
        where = ["--engine", "ray", "--address", request.getfixturevalue("ray_address")]
    paths = [str(folder / "cache"), str(folder), str(folder / "c7.idx")]
    with quiet():
        assert main(["verify", *paths, "--full", *where]) == 1
        there = capsys.readouterr()
        assert main(["verify", *paths, "--full", "--workers", "1"]) == 1
        here = capsys.readouterr()
    assert there == here
    assert here.out.count("c3.bin") >= 1
    assert here.err == ""
