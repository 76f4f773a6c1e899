"""Pipes, sockets and folders in place of a file: refused at once, without blocking."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex.corpus import tokenize
from megaindex.corpus.imports.formats import open_columns, open_nanotron, open_numpy
from megaindex.corpus.imports.mds import open_mds
from megaindex.corpus.inspect import PairDescription, inspect
from megaindex.corpus.merge import merge
from megaindex.errors import MegaIndexError, StorageError
from megaindex.verify.verify import verify

Make = Callable[[Path], None]


def a_socket(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(os.path.relpath(path))  # the length of such a name is limited


MAKES = [pytest.param(os.mkfifo, id="pipe"), a_socket, pytest.param(Path.mkdir, id="folder")]


@pytest.fixture(autouse=True)
def nothing_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)

    def late(number: int, frame: object) -> None:
        raise AssertionError("it waited")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(20)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    write_corpus(tmp_path / "c", [3, 4], np.uint16)
    return str(tmp_path / "c")


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("half", [".bin", ".idx"])
@pytest.mark.parametrize("make", MAKES)
def test_half_a_pair_that_is_not_a_file_is_a_finding(
    prefix: str, make: Make, half: str, full: bool
) -> None:
    os.unlink(prefix + half)
    make(Path(prefix + half))
    (finding,) = verify(prefix, full=full).findings
    assert (finding.rule, finding.file) == ("not-a-file", prefix + half)


def test_a_link_to_a_device_is_a_finding(prefix: str) -> None:
    os.unlink(prefix + ".bin")
    os.symlink("/dev/zero", prefix + ".bin")  # it would be read for ever
    (finding,) = verify(prefix, full=True).findings
    assert (finding.rule, finding.found) == ("not-a-file", "a device")
    (described,) = inspect(prefix)
    assert isinstance(described, PairDescription)
    assert described.bin_nbytes is None
    assert "the .bin is a device" in described.faults[0]


@pytest.mark.parametrize("make", MAKES)
def test_a_pair_of_no_files_is_not_merged(prefix: str, make: Make, tmp_path: Path) -> None:
    os.unlink(prefix + ".bin")
    make(Path(prefix + ".bin"))
    with pytest.raises(MegaIndexError, match=r"c\.(bin|idx): "):
        merge(str(tmp_path / "m"), [prefix])
    assert not list(tmp_path.glob("m*"))


@pytest.mark.parametrize("look", [verify, inspect])
@pytest.mark.parametrize("make", MAKES[:2])
def test_a_recipe_that_is_not_a_file(
    tmp_path: Path, make: Make, look: Callable[[Path], None]
) -> None:
    make(tmp_path / "r.yaml")
    with pytest.raises(StorageError, match=r"r\.yaml: is a .*, not a regular file; check the path"):
        look(tmp_path / "r.yaml")


def _inputs(folder: Path) -> dict[str, Callable[[], object]]:
    (folder / "mds").mkdir()
    (folder / "t.jsonl").write_text('{"text": "a"}\n')
    name = str(folder / "x")
    return {
        "x.parquet": lambda: open_columns(f"{name}.parquet"),
        "x.arrow": lambda: open_columns(f"{name}.arrow"),
        "x.npy": lambda: open_numpy(f"{name}.npy", separator=1),
        "x.raw": lambda: open_numpy(f"{name}.raw", stored_dtype="uint16", separator=1),
        "x.ds.index": lambda: open_nanotron(f"{name}.ds"),
        "mds/index.json": lambda: open_mds(str(folder / "mds")),
        "x.json": lambda: tokenize(
            str(folder / "o"), [str(folder / "t.jsonl")], tokenizer=f"{name}.json"
        ),
    }


@pytest.mark.parametrize("make", MAKES[:2])
@for_each(
    "file",
    ["x.parquet", "x.arrow", "x.npy", "x.raw", "x.ds.index", "mds/index.json", "x.json"],
)
def test_an_input_that_is_not_a_file(tmp_path: Path, make: Make, file: str) -> None:
    open_it = _inputs(tmp_path)[file]
    make(tmp_path / file)
    # of a socket the kernel itself says that it cannot be opened
    with pytest.raises(MegaIndexError, match=rf"{Path(file).name}: .*(regular file|cannot)"):
        open_it()
    shutil.rmtree(tmp_path / "mds")
    assert not list(tmp_path.glob("o*"))
