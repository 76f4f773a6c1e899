"""What a full disk and a read-only file system really say: run by test_mounts.py, in the folder of
which ``small`` is a file system of 2 MiB and ``fixed`` one that is mounted read-only."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import megaindex
from megaindex.cache import npy
from megaindex.corpus.merge import merge
from megaindex.errors import StorageError


def write(prefix: Path) -> None:
    with megaindex.IndexedDatasetWriter(prefix, np.int64) as writer:
        writer.add_documents(np.zeros(600_000, np.int64), np.full(6_000, 100))


def expect(number: int, place: Path, act: Callable[[], object]) -> None:
    with pytest.raises(StorageError) as raised:
        act()
    message = str(raised.value)
    assert raised.value.errno == number, message
    assert str(place) in message
    assert ";" in message
    assert os.listdir(place) == [], f"{place}: left {os.listdir(place)}"


def main(folder: Path) -> None:
    write(folder / "corpus")
    for number, name in ((errno.ENOSPC, "small"), (errno.EROFS, "fixed")):
        place = folder / name
        for mapped in (1 << 20, 1 << 40):
            npy.WORTH_MAPPING = mapped
            settings = {"sequence_length": 1, "seed": 1, "epochs": 2, "cache_dir": place}
            expect(number, place, partial(megaindex.build_index, folder / "corpus", **settings))
        expect(number, place, partial(write, place / "out"))
        inputs = [str(folder / "corpus")]
        expect(number, place, partial(merge, str(place / "out"), inputs))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
