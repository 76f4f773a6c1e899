"""Many sets of arrays at once: the collector while they are made, and files that are replaced."""

import gc
import json
import os
import shutil
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.array_sets import Request, files_of, fill

from megaindex.cache.array_files import ArrayFiles, Identity, Listing, current_states
from megaindex.cache.array_group import (
    ArrayWriter,
    fetch_together,
    uncollected,
    write_together,
)
from megaindex.cache.sidecar import find_arrays, map_arrays, parse_sidecar, read_sidecar
from megaindex.errors import FormatError, StorageError

CONTENTS = {"a": np.arange(5, dtype=np.int32), "b": np.arange(3, dtype=np.int64)}
IDENTITY = Identity(settings=dict, corpus=str)


def published(folder: Path) -> ArrayFiles:
    files = files_of(folder, CONTENTS, "set")
    with ArrayWriter(files) as writer:
        fill(writer, CONTENTS)
        writer.publish(IDENTITY, "text")
    return files


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


def test_a_sidecar_of_other_arrays_of_that_name_is_not_used(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As of a program that kept fewer arrays: those beside it are checked."""
    fewer, files = (files_of(tmp_path, each, "set") for each in ({"a": 0}, CONTENTS))
    with ArrayWriter(fewer) as writer:
        fill(writer, {"a": CONTENTS["a"]})
        writer.publish(IDENTITY)
    np.save(files.arrays["b"], CONTENTS["b"])
    checked = []
    assert find_arrays(files, IDENTITY, checked.append) is not None
    assert [sorted(arrays) for arrays in checked] == [["a", "b"]]
    assert "cannot be read (it describes other arrays); the arrays are checked anew" in caplog.text


def test_requests_of_unknown_content_are_built_each_by_itself(tmp_path: Path) -> None:
    requests = [Request(tmp_path, name, size) for name, size in (("x", 3), ("y", 4), ("z", 5))]
    missing: list[int] = []
    for was_built in (True, False):
        found = fetch_together(requests, str(tmp_path), "key", missing.append)
        assert [each.was_built for each in found] == [was_built] * 3
        for request, each in zip(requests, found, strict=True):
            np.testing.assert_array_equal(request.open(each.sidecar)["a"], np.arange(request.size))
    assert missing == [3]


@pytest.mark.parametrize("nbytes", [2**18 - 1, 2**18])
def test_large_corpora_are_built_in_threads(
    tmp_path: Path, nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MEGAINDEX_NUM_THREADS", "2")
    builders: dict[str, tuple[str, int]] = {}

    class LargeRequest(Request):
        corpus_nbytes = nbytes

        def fill(self, sink: Any, threads: int) -> None:
            builders[self.corpus] = threading.current_thread().name.split("_")[0], threads
            super().fill(sink, threads)

    requests = [LargeRequest(tmp_path, name, 3 + k, name) for k, name in enumerate("xyzx")]
    found = fetch_together(requests, str(tmp_path), "key", lambda _: None)
    assert [each.was_built for each in found] == [True] * 3 + [False]
    for request, each in zip(requests[:3], found, strict=False):
        np.testing.assert_array_equal(request.open(each.sidecar)["a"], np.arange(request.size))
    builder = ("megaindex-build", 1) if nbytes == 2**18 else ("MainThread", 2)
    assert builders == dict.fromkeys("xyz", builder)


def test_an_array_that_is_gone_since_its_folder_was_listed(tmp_path: Path) -> None:
    """Removed by another builder, or with another error, such as that of a link to itself."""
    files = published(tmp_path)
    listing = Listing.of(str(tmp_path), at_most=10)
    assert list(current_states(files, None, listing) or {}) == ["a", "b"]
    os.unlink(files.arrays["b"])
    assert current_states(files, None, listing) is None
    os.symlink(files.arrays["b"], files.arrays["b"])
    with pytest.raises(StorageError) as caught:
        current_states(files, None, listing)
    text = f"{files.arrays['b']}: cannot read the status of: Too many levels of symbolic links"
    assert str(caught.value).startswith(text)


def test_a_link_in_place_of_a_sidecar_is_not_followed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    files = published(tmp_path)
    assert read_sidecar(files) is not None
    Path(files.sidecar).rename(tmp_path / "copy")
    Path(files.sidecar).symlink_to(tmp_path / "copy")
    assert read_sidecar(files) is None
    assert "symbolic link" in caplog.text


@pytest.mark.parametrize("marks", ["", "11"])
def test_a_sidecar_has_one_mark_of_durability_for_each_set(tmp_path: Path, marks: str) -> None:
    files = published(tmp_path)
    body = json.loads(Path(files.sidecar).read_text())
    assert len(body["durable"]) == len(parse_sidecar(json.dumps(body).encode()).sets) == 1
    with pytest.raises(ValueError, match="one mark for each set"):
        parse_sidecar(json.dumps({**body, "durable": marks}).encode())


def test_arrays_of_a_corpus_that_changed_since_are_not_mapped_in_their_place(
    tmp_path: Path,
) -> None:
    """Another process built those of the new corpus after this one looked the old ones up."""
    request = Request(tmp_path, "x", 5)
    sidecar = request.fetch().sidecar
    Request(tmp_path, "x", 6, "second").fetch()
    request.size, request.corpus = 6, "second"
    with pytest.raises(FormatError, match="not the files"):
        request.open(sidecar)


@pytest.mark.parametrize("listed", [False, True])
def test_a_set_without_its_marker_is_built_again(tmp_path: Path, listed: bool) -> None:
    """The framework does not find it."""
    request = Request(tmp_path, "x", 5)
    request.fetch()
    assert request.files is not None
    assert request.files.marker is not None
    assert Path(request.files.marker).read_text() == "text"
    os.unlink(request.files.marker)
    listing = Listing.of(str(tmp_path), at_most=100) if listed else None
    assert request.find(listing) is None


@pytest.mark.parametrize("together", [False, True])
def test_a_set_whose_builder_ended_after_its_last_file_is_known_as_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """So that it is rebuilt, not refused, when the corpus changes."""
    files, rename = files_of(tmp_path, CONTENTS, "set"), ArrayWriter.rename_into_place

    def end(writer: ArrayWriter, text: str = "") -> None:
        rename(writer, text)
        raise KeyboardInterrupt

    monkeypatch.setattr(ArrayWriter, "rename_into_place", end)

    def build() -> None:
        if together:
            write_together([(ArrayWriter(files), IDENTITY, "")], lambda _, w: fill(w, CONTENTS))
            return
        with ArrayWriter(files) as writer:
            fill(writer, CONTENTS)
            writer.publish(IDENTITY)

    with pytest.raises(KeyboardInterrupt):
        build()
    found = find_arrays(files, IDENTITY, lambda arrays: pytest.fail("known by its sidecar"))
    assert found is not None
    assert found.origin == "built"


@pytest.mark.parametrize("renamed", range(3))
def test_a_set_is_absent_until_its_last_file_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renamed: int
) -> None:
    """A framework would read arrays of the old and of the new corpus together."""
    files, rename = files_of(tmp_path, CONTENTS, "set"), os.rename
    with ArrayWriter(files) as writer:
        fill(writer, CONTENTS)
        writer.publish(IDENTITY)
    assert files.are_there()
    left = [*[True] * renamed, False]

    def fail(source: str, target: str) -> None:
        if target in files.paths and not left.pop(0):
            raise OSError(28, "No space left on device")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with ArrayWriter(files) as writer:
        fill(writer, CONTENTS)
        with pytest.raises(StorageError, match="cannot publish: No space left"):
            writer.publish(IDENTITY)
    assert not files.are_there()


def test_a_file_of_another_size_is_rebuilt_if_it_is_ours(tmp_path: Path) -> None:
    """A file of another inode was written by the framework, whose arrays are never replaced."""
    request = Request(tmp_path, "x", 5)
    request.fetch()
    assert request.files is not None
    path = request.files.arrays["a"]
    os.truncate(path, os.path.getsize(path) - 4)
    assert request.find() is None
    assert request.fetch().was_built
    np.save(tmp_path / "other.npy", np.arange(6, dtype=np.int32))
    os.replace(tmp_path / "other.npy", path)
    with pytest.raises(FormatError, match="written by the framework, not by megaindex"):
        request.fetch()
    np.testing.assert_array_equal(np.load(path), np.arange(6))
