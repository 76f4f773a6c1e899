"""What a power loss does to arrays under a framework's names: noticed once, rebuilt or refused."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.array_sets import Request, files_of, fill

from megaindex.cache import npy, sidecar
from megaindex.cache.array_files import (
    ArrayFiles,
    Arrays,
    Identity,
    Listing,
    Sidecar,
)
from megaindex.cache.array_group import ArrayWriter, fetch_together, write_together
from megaindex.cache.sidecar import (
    find_arrays,
    make_sets_durable,
    map_arrays,
    parse_sidecar,
    write_sidecars,
)
from megaindex.errors import FormatError, MissingFile, StorageError

PAGE = 4096
CONTENTS = {"a": np.arange(1, 5000, dtype=np.int32), "b": np.arange(9, 1, -1, dtype=np.int64)}
IDENTITY = Identity(settings=lambda: {"seed": 1}, corpus=lambda: "corpus")


class Machine:
    """One that is booted again and again; what is synced later is synced when a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self._boots = 0
        self.due: list[Callable[[], None]] = []
        self.read: list[str] = []
        real = sidecar.damaged_arrays

        def noted(files: ArrayFiles, found: Sidecar) -> list[str]:
            self.read.append(files.name)
            return real(files, found)

        monkeypatch.setattr(sidecar, "damaged_arrays", noted)
        monkeypatch.setattr(sidecar, "sync_later", self.due.append)
        self.boot()

    def boot(self) -> None:
        self._boots += 1
        self.due.clear()
        self.read.clear()
        self._patch.setattr(sidecar, "boot_id", lambda: f"boot {self._boots}")
        self._patch.setattr(sidecar, "_read_last", None)  # that was another process

    def sync(self) -> None:
        while self.due:
            self.due.pop(0)()


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


def build(folder: Path) -> ArrayFiles:
    files = files_of(folder, CONTENTS, "set")
    with ArrayWriter(files) as writer:
        fill(writer, CONTENTS)
        writer.publish(IDENTITY)
    return files


def refuse(arrays: Arrays) -> None:
    raise AssertionError("known by their sidecar")


def find(files: ArrayFiles, listing: Listing | None = None) -> Sidecar | None:
    return find_arrays(files, IDENTITY, refuse, listing)


def lose_page(path: str, number: int) -> None:
    """A page reads as zeros; size, time and inode are as they were."""
    status = os.stat(path)
    content = bytearray(Path(path).read_bytes())
    page = content[number * PAGE : (number + 1) * PAGE]
    content[number * PAGE : (number + 1) * PAGE] = bytes(len(page))
    with open(path, "r+b") as file:
        file.write(content)
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))


@pytest.mark.parametrize("mapped", [False, True])
def test_what_lost_nothing_is_read_once(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch, mapped: bool
) -> None:
    monkeypatch.setattr(npy, "WORTH_MAPPING", 0 if mapped else 1 << 30)
    files = build(tmp_path)
    assert find(files) is not None
    assert machine.read == []  # of this boot
    machine.boot()
    for _ in range(2):
        found = find(files)
        assert found is not None
        for name, array in map_arrays(files, found).items():
            np.testing.assert_array_equal(array, CONTENTS[name])
    assert machine.read == ["set"]
    machine.sync()
    machine.boot()
    assert find(files) is not None
    assert machine.read == []


def test_a_set_that_is_being_replaced_has_no_sidecar(tmp_path: Path, machine: Machine) -> None:
    """The old record would be that of arrays that are gone."""
    files = build(tmp_path)
    with ArrayWriter(files) as writer:
        assert not os.path.lexists(files.sidecar)
        fill(writer, CONTENTS)
    assert find(files) is None


def test_what_is_not_noted_is_read_again(tmp_path: Path, machine: Machine) -> None:
    files = build(tmp_path)
    for _ in range(2):
        machine.boot()  # before anything was synced
        assert find(files) is not None
        assert machine.read == ["set"]


def test_what_was_synced_is_not_read(tmp_path: Path, machine: Machine) -> None:
    files = build(tmp_path)
    machine.sync()
    lose_page(files.arrays["a"], 1)  # which a disk that keeps its word does not do
    machine.boot()
    assert find(files) is not None
    assert machine.read == []


@given(data=st.data())
def test_a_lost_page_is_noticed(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture, data: st.DataObject
) -> None:
    machine.boot()
    files = build(tmp_path)
    path = files.arrays[data.draw(st.sampled_from(sorted(CONTENTS)))]
    pages = -(-os.path.getsize(path) // PAGE)
    if data.draw(st.booleans()):
        machine.boot()
        assert find(files) is not None  # verified once, not synced: the next boot looks again
    lose_page(path, data.draw(st.integers(0, pages - 1)))
    machine.boot()
    caplog.clear()
    with caplog.at_level(logging.WARNING, "megaindex"):
        assert find(files) is None
    assert "lost what was written; rebuilt" in caplog.text
    build(tmp_path)
    found = find(files)
    assert found is not None
    np.testing.assert_array_equal(map_arrays(files, found)["a"], CONTENTS["a"])


def test_a_set_that_is_replaced_while_it_is_read_is_found(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = build(tmp_path)
    machine.boot()
    real = sidecar.damaged_arrays

    def replaced(files: ArrayFiles, found: Sidecar) -> list[str]:
        monkeypatch.setattr(sidecar, "damaged_arrays", real)
        build(tmp_path)
        return real(files, found)

    monkeypatch.setattr(sidecar, "damaged_arrays", replaced)
    found = find(files)
    assert found is not None
    np.testing.assert_array_equal(map_arrays(files, found)["a"], CONTENTS["a"])


def test_what_the_framework_wrote_is_refused(tmp_path: Path, machine: Machine) -> None:
    files = build(tmp_path)
    os.unlink(files.sidecar)
    checked: list[Any] = []
    found = find_arrays(files, IDENTITY, checked.append)
    assert found is not None
    assert found.origin == "found"
    assert len(checked) == 1
    machine.boot()
    assert find(files) is not None
    lose_page(files.arrays["a"], 2)
    before = Path(files.arrays["a"]).read_bytes()
    machine.boot()
    with pytest.raises(FormatError, match=r"set-a\.npy: the content is not that"):
        find(files)
    assert Path(files.arrays["a"]).read_bytes() == before


def test_sets_of_one_sidecar_are_noted_one_by_one(tmp_path: Path, machine: Machine) -> None:
    """Who verified one set says nothing of the others."""
    files = [files_of(tmp_path, CONTENTS, name) for name in "xyz"]
    writers = [(ArrayWriter(each), IDENTITY, "") for each in files]
    write_together(writers, lambda _, writer: fill(writer, CONTENTS))
    machine.boot()
    assert find(files[1]) is not None
    machine.sync()
    assert parse_sidecar(Path(files[0].sidecar).read_bytes()).durable == "010"
    lose_page(files[2].arrays["a"], 1)
    machine.boot()
    listing = Listing.of(str(tmp_path), at_most=100)
    assert listing is not None
    assert [find(each, listing) is None for each in files] == [False, False, True]
    assert machine.read == ["x", "z"]
    assert [each.name for each, _ in listing.verified] == ["x"]
    make_sets_durable(listing.verified)
    assert parse_sidecar(Path(files[0].sidecar).read_bytes()).durable == "110"


def test_only_what_was_recorded_is_noted(tmp_path: Path, machine: Machine) -> None:
    """Files that came in the place of those that were to be synced."""
    files = build(tmp_path)
    first = find(files)
    assert first is not None
    with open(files.arrays["b"], "r+b") as file:
        file.write(b"\x93")
    make_sets_durable([(files, first)])
    assert parse_sidecar(Path(files.sidecar).read_bytes()).durable == "0"
    build(tmp_path)
    make_sets_durable([(files, first)])
    assert parse_sidecar(Path(files.sidecar).read_bytes()).durable == "0"
    machine.sync()
    assert parse_sidecar(Path(files.sidecar).read_bytes()).durable == "1"


def test_a_set_that_is_being_replaced_is_not_noted(tmp_path: Path, machine: Machine) -> None:
    """Its new sidecar stands before its new arrays, which are not synced yet."""
    files = build(tmp_path)
    first = find(files)
    assert first is not None
    with ArrayWriter(files) as writer:
        fill(writer, CONTENTS)
        write_sidecars([(files, writer.sidecar(IDENTITY))])
        make_sets_durable([(files, first)])
        assert parse_sidecar(Path(files.sidecar).read_bytes()).durable == "0"


def test_sets_that_are_looked_up_together_are_read_once(tmp_path: Path, machine: Machine) -> None:
    requests = [Request(tmp_path, name, 5) for name in "xyz"]
    fetch_together(requests, str(tmp_path), "key", repr)
    machine.boot()  # before anything was synced
    for read in (["x", "y", "z"], []):
        found = fetch_together(requests, str(tmp_path), "key", repr)
        assert not any(each.was_built for each in found)
        assert machine.read == read
        machine.sync()
        machine.boot()


def test_an_error_while_sets_are_marked_ends_no_thread(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network file system may report a failed write when the sidecar is closed."""
    build(tmp_path)
    close, failed = os.close, []

    def fail(descriptor: int) -> None:
        name = os.readlink(f"/proc/self/fd/{descriptor}")
        close(descriptor)
        if name.endswith("-megaindex.json"):
            failed.append(name)
            raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "close", fail)
    machine.sync()
    assert failed


@pytest.mark.parametrize("page", [b"(20,\0), }", b"{(20,), \0}"])
def test_a_lost_header_is_a_typed_error(tmp_path: Path, page: bytes) -> None:
    """NumPy raises an error of Python's tokenizer for some damaged headers."""
    path = tmp_path / "a.npy"
    np.save(path, np.arange(20))
    content = path.read_bytes()
    path.write_bytes(content.replace(b"(20,), }", page[: len(b"(20,), }")].ljust(8, b"\0")))
    with pytest.raises(FormatError, match=r"a\.npy: not an array that NumPy saved"):
        npy.map_npy(str(path))


def test_an_array_in_column_order_is_refused(tmp_path: Path) -> None:
    """Its bytes, read row by row, would be another array."""
    np.save(tmp_path / "a.npy", np.asfortranarray(np.arange(10).reshape(5, 2)))
    objects = np.array([None, 3], object)
    np.save(tmp_path / "b.npy", objects, allow_pickle=True)
    for name in "ab":
        with pytest.raises(FormatError) as caught:
            npy.map_npy(f"{tmp_path}/{name}.npy")
        assert str(caught.value) == (
            f"{tmp_path}/{name}.npy: not an array that NumPy saved: it must be C-contiguous and "
            "without objects"
        )


def test_an_array_of_another_version_of_the_format_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "a.npy")
    for version in ((1, 0), (2, 0)):
        with open(path, "wb") as file:
            np.lib.format.write_array(file, np.arange(5), version=version)
        if version == (1, 0):
            assert npy.map_npy(path)[0].tolist() == [0, 1, 2, 3, 4]
    with pytest.raises(FormatError) as caught:
        npy.map_npy(path)
    assert str(caught.value) == (
        f"{path}: not an array that NumPy saved: its format version must be 1.0"
    )


def test_an_array_that_is_removed_before_it_is_mapped(tmp_path: Path) -> None:
    path = str(tmp_path / "a.npy")
    with pytest.raises(MissingFile) as caught:
        npy.map_npy(path)
    assert str(caught.value) == f"{path}: was removed while being read; try again"


def test_a_header_that_cannot_be_read_is_a_typed_error(tmp_path: Path) -> None:
    (tmp_path / "a.npy").mkdir()
    with pytest.raises(StorageError, match=r"a\.npy: .*not a regular file"):
        npy.map_npy(str(tmp_path / "a.npy"))


def test_a_set_that_is_built_while_it_is_checked_is_found(tmp_path: Path) -> None:
    """Arrays without their sidecar, and then others: what was checked is not recorded."""
    files = build(tmp_path)
    os.unlink(files.sidecar)

    def check(arrays: Arrays) -> None:
        build(tmp_path)
        raise FormatError("the first are those of another corpus")

    found = find_arrays(files, IDENTITY, check)
    assert found is not None
    assert found.origin == "built"


@pytest.mark.parametrize("damage", ["format 2", "a page", "cut", "marks", "checksums"])
def test_a_sidecar_that_cannot_be_read(
    tmp_path: Path, machine: Machine, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """The arrays are checked anew, as those without one, and recorded in this format."""
    files = build(tmp_path)
    body = json.loads(Path(files.sidecar).read_text())
    if damage == "format 2":
        body = {"sidecar_format": 2, "sets": body["sets"]}
    elif damage == "marks":
        body["durable"] = "00"
    elif damage == "checksums":
        body["checksums"] = body["checksums"][1:]
    text = json.dumps(body)
    if damage == "a page":
        text = "\0" * len(text)
    Path(files.sidecar).write_text(text[: len(text) // 2] if damage == "cut" else text)
    machine.boot()
    checked: list[Any] = []
    with caplog.at_level(logging.WARNING, "megaindex"):
        found = find_arrays(files, IDENTITY, checked.append)
    assert "the arrays are checked anew" in caplog.text
    assert found is not None
    assert found.origin == "found"
    assert len(checked) == 1
    assert find(files) is not None
    machine.sync()
    machine.boot()
    assert find(files) is not None
    assert machine.read == []


def test_a_directory_without_hard_links(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def link(*_: Any, **__: Any) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "link", link)
    files = [files_of(tmp_path, CONTENTS, name) for name in "xy"]
    writers = [(ArrayWriter(each), IDENTITY, "") for each in files]
    write_together(writers, lambda _, writer: fill(writer, CONTENTS))
    machine.sync()
    machine.boot()
    assert all(find(each) is not None for each in files)
    assert machine.read == []


def test_a_boot_that_cannot_be_told_is_always_another(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "boot_id", lambda: "unknown")
    files = build(tmp_path)
    assert find(files) is not None
    assert machine.read == ["set"]
