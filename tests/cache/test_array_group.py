"""Many sets of arrays at once: the collector while they are made, and files that are replaced."""

import gc
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megaindex.cache import array_group
from megaindex.cache.array_files import ArrayFiles, Identity, Listing
from megaindex.cache.array_group import ArrayWriter, uncollected
from megaindex.cache.sidecar import find_arrays, map_arrays
from megaindex.errors import FormatError


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """No call has seen frozen objects so far."""
    monkeypatch.setattr(array_group._Frozen, "are_known", False)


@pytest.mark.usefixtures("unknown")
def test_what_is_made_counts_as_old() -> None:
    gc.collect()
    with uncollected():
        assert not gc.isenabled()
        made = [[number] for number in range(10_000)]
        lists = [made]
    assert gc.isenabled()
    assert gc.get_freeze_count() == 0
    assert not any(object_ is lists for object_ in gc.get_objects(generation=0))


@pytest.mark.usefixtures("unknown")
def test_what_was_frozen_stays_so(monkeypatch: pytest.MonkeyPatch) -> None:
    count = gc.get_freeze_count
    counts: list[int] = []
    monkeypatch.setattr(gc, "get_freeze_count", lambda: counts.append(count()) or counts[-1])
    with uncollected():
        pass
    gc.freeze()
    try:
        before = count()
        for _ in range(3):
            with uncollected():
                made = [[number] for number in range(100)]
        assert made
        assert 0 < count() <= before
    finally:
        gc.unfreeze()
    assert len(counts) == 2  # counting takes milliseconds for 100,000 objects
    assert counts[0] < 1000 < counts[1]


def test_a_disabled_collector_stays_disabled() -> None:
    gc.disable()
    try:
        with uncollected():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


@pytest.mark.parametrize("change", ["replaced", "written"])
def test_files_changed_since_they_were_recorded_are_not_mapped(tmp_path: Path, change: str) -> None:
    path = tmp_path / "set-a.npy"
    files = ArrayFiles(arrays={"a": str(path)}, sidecar=str(tmp_path / "set-megaindex.json"))
    with ArrayWriter(files) as writer:
        writer.allocate("a", (5,), "int32")[...] = range(5)
        writer.seal("a")
        sidecar = writer.publish(Identity(settings=dict, corpus=str))
    np.testing.assert_array_equal(map_arrays(files, sidecar)["a"], range(5))
    if change == "replaced":
        other = tmp_path / "other"
        shutil.copy2(path, other)
        os.replace(other, path)
    else:
        with open(path, "r+b") as file:
            file.write(file.read(1))
        os.utime(path, ns=(0, 0))
    with pytest.raises(FormatError, match="not the files"):
        map_arrays(files, sidecar)


def test_a_reused_inode_is_looked_at(tmp_path: Path) -> None:
    """A listing shows inodes alone, and those of removed files are given to new ones."""
    path = tmp_path / "set-a.npy"
    files = ArrayFiles(arrays={"a": str(path)}, sidecar=str(tmp_path / "set-megaindex.json"))

    def identity(corpus: str) -> Identity:
        return Identity(settings=dict, corpus=lambda: corpus)

    checked = []
    np.save(path, np.arange(5, dtype=np.int32))
    assert find_arrays(files, identity("first"), checked.append) is not None
    inode = path.stat().st_ino
    with open(path, "r+b") as file:  # another array, in a file of that number
        np.save(file, np.arange(6, dtype=np.int32))
    assert path.stat().st_ino == inode
    listing = Listing.of(str(tmp_path), at_most=100)
    assert listing is not None
    assert find_arrays(files, identity("second"), checked.append, listing) is not None
    assert [list(arrays["a"]) for arrays in checked] == [list(range(5)), list(range(6))]
