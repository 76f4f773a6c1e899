"""`megaindex verify` and `inspect` of arrays under a framework's names."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.array_sets import files_of, fill
from support.examples import times

from megaindex.cache import sidecar as sidecar_file
from megaindex.cache.array_files import Identity
from megaindex.cache.array_group import ArrayWriter, write_together
from megaindex.cache.sidecar import find_arrays, make_sets_durable, map_arrays
from megaindex.cli import main
from megaindex.corpus.inspect import EntryDescription, inspect
from megaindex.errors import InvalidArgument, MegaIndexError
from megaindex.format.findings import Finding
from megaindex.verify.verify import order_faults, verify, verify_all

CONTENTS = {
    "document_index": np.array([11, 10, 12], np.int32),
    "sample_index": np.array([[0, 0], [0, 4], [1, 2], [2, 5]], np.int32),
    "shuffle_index": np.array([2, 0, 1], np.uint32),
}
IDENTITY = Identity(settings=lambda: {"documents": [10, 13]}, corpus=lambda: "corpus")


@pytest.fixture(autouse=True)
def no_background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sidecar_file, "sync_later", lambda sync: None)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Build two sets with one sidecar."""
    writers = [(ArrayWriter(files_of(tmp_path, CONTENTS, name)), IDENTITY, name) for name in "xy"]
    write_together(writers, lambda _, writer: fill(writer, CONTENTS))
    return tmp_path


def as_found(folder: Path) -> None:
    """Return the same sets as written by the framework and accepted."""
    for name in "xy":
        os.unlink(folder / f"{name}-megaindex.json")
        find_arrays(files_of(folder, CONTENTS, name), IDENTITY, lambda arrays: None)


def overwrite(path: Path, array: np.ndarray, *, same_time: bool) -> None:
    """Overwrite elements of an array."""
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(128)
        file.write(array.tobytes())
    os.utime(path, ns=(0, status.st_mtime_ns if same_time else 0))


def only(path: Path, **options: bool) -> Finding:
    (finding,) = verify(path, **options).findings
    return finding


@pytest.mark.parametrize("full", [False, True])
def test_sound_sets_are_one_report(folder: Path, full: bool) -> None:
    report = verify(folder, full=full)
    assert report.is_clean
    assert report.kind == "framework arrays"
    assert report.path == str(folder / "x-megaindex.json")
    assert report.counted == {"sets": 2, "arrays": 6, "bytes": 2 * (3 * 128 + 12 + 32 + 12)}
    assert verify(folder / "y-megaindex.json", full=full).is_clean


def test_sets_that_were_built_again_belong_to_their_own_sidecar(folder: Path) -> None:
    with ArrayWriter(files_of(folder, CONTENTS, "x")) as writer:
        fill(writer, CONTENTS)
        writer.publish(IDENTITY)
    (folder / "y-shuffle_index.npy").unlink()
    x, y = verify_all(folder)
    assert x.is_clean
    assert [finding.file for finding in y.findings] == [str(folder / "y-shuffle_index.npy")]


@pytest.mark.parametrize("origin", ["built", "found"])
def test_missing_cut_and_foreign_files(folder: Path, origin: str) -> None:
    if origin == "found":
        as_found(folder)
    (folder / "x-description.txt").unlink()
    (folder / "x-document_index.npy").unlink()
    os.truncate(folder / "x-sample_index.npy", 130)
    shuffle = folder / "x-shuffle_index.npy"
    shuffle.write_bytes(shuffle.read_bytes().replace(b"<u4", b"<i4"))
    found = {Path(f.file).name: f for report in verify_all(folder) for f in report.findings}
    assert {name: f.rule for name, f in found.items()} == {
        "x-description.txt": "missing-file",
        "x-document_index.npy": "missing-file",
        "x-sample_index.npy": "file-size",
        "x-shuffle_index.npy": "array-header",
    }
    assert {f.severity for f in found.values()} == {"error"}
    remedy = "builds it again" if origin == "built" else "remove all files of that name"
    assert all(remedy in f.repair for f in found.values())


def test_what_is_no_array_is_named(folder: Path) -> None:
    shuffle, rows = folder / "x-shuffle_index.npy", folder / "x-sample_index.npy"
    content = shuffle.read_bytes()
    shuffle.write_bytes(b"\0" + content[1:])
    rows.unlink()
    rows.mkdir()
    header, kind = sorted(verify(folder / "x-megaindex.json").findings, key=lambda f: f.rule)
    assert (header.rule, header.severity) == ("array-header", "error")
    assert header.expected == "an array that NumPy saved"
    assert "magic" in header.found
    assert (kind.rule, kind.found) == ("file-kind", "not a regular file")
    assert kind.expected == "a regular file"


def test_documents_without_bounds_may_be_any(folder: Path) -> None:
    of_bounds: Any = [10, 13]
    for known in (of_bounds, "digest", [10, 13, 14], [10, True]):
        least, most = (10, 13) if known is of_bounds else (0, 2**31)
        arrays = {"document_index": np.array([least, most - 1, most], np.int64)}
        ((name, fault, count),) = order_faults(arrays, {"documents": known})
        assert (name, fault.rule, fault.where, count) == (
            "document_index", "document-range", "entry 2", 1
        )  # fmt: skip


@pytest.mark.parametrize(
    ("origin", "quick", "full"), [("built", "error", "warning"), ("found", "warning", "warning")]
)
def test_a_file_with_another_time_of_change(
    folder: Path, origin: str, quick: str, full: str
) -> None:
    """Equal bytes only lead to a further check."""
    if origin == "found":
        as_found(folder)
    os.utime(folder / "y-sample_index.npy", (1, 1))
    finding = only(folder / "y-megaindex.json")
    assert (finding.rule, finding.severity) == ("changed", quick)
    assert only(folder / "y-megaindex.json", full=True).severity == full


@pytest.mark.parametrize(
    ("name", "values", "rule", "where"),
    [
        ("document_index", [11, 13, 12], "document-range", "entry 1"),
        ("sample_index", [[0, 0], [0, 4], [0, 4], [2, 5]], "sample-order", "entry 2"),
        ("sample_index", [[0, 0], [0, 4], [1, 2], [4, 5]], "sample-range", "entry 3"),
        ("shuffle_index", [2, 0, 2], "shuffle-repeat", "entry 2"),
        ("shuffle_index", [2, 0, 3], "shuffle-range", "entry 2"),
    ],
)
@pytest.mark.parametrize("same_time", [False, True])
def test_other_elements_are_found_and_located(
    folder: Path, name: str, values: list[int], rule: str, where: str, same_time: bool
) -> None:
    array = np.array(values, CONTENTS[name].dtype)
    overwrite(folder / f"x-{name}.npy", array, same_time=same_time)
    if same_time:
        assert verify(folder).is_clean
    findings = verify(folder, full=True).findings
    assert [f.rule for f in findings] == ["checksum" if same_time else "changed", rule]
    assert findings[1].where == where
    assert {f.severity for f in findings} == {"error"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("{", "sidecar"),
        ("[]", "sidecar"),
        ('{"sidecar_format":2,"sets":{}}', "sidecar-format"),
        ('{"sidecar_format":3}', "sidecar"),
    ],
)
def test_a_sidecar_that_cannot_be_read(folder: Path, text: str, rule: str) -> None:
    (folder / "x-megaindex.json").unlink()
    (folder / "x-megaindex.json").write_text(text)
    finding = only(folder / "x-megaindex.json")
    assert finding.rule == rule
    assert finding.severity == ("warning" if rule == "sidecar-format" else "error")
    assert "checks them" in finding.repair
    assert inspect(folder / "x-megaindex.json")[0].faults


@pytest.mark.parametrize("change", ["name", "ending", "state", "link", "pipe"])
def test_a_forged_sidecar_is_refused(folder: Path, change: str) -> None:
    path = folder / "x-megaindex.json"
    body = json.loads(path.read_text())
    if change == "name":
        body["sets"] = {"../x": body["sets"]["x"], "../y": body["sets"]["y"]}
    elif change == "ending":
        body["endings"]["sample_index"] = "/../../secret.npy"
    elif change == "state":
        body["sets"]["x"]["files"]["sample_index"][0] = "many"
    path.unlink()
    if change == "link":
        path.symlink_to(folder / "y-megaindex.json")
    elif change == "pipe":
        os.mkfifo(path)
    else:
        path.write_text(json.dumps(body))
    assert only(path).rule == "sidecar"


def test_a_packing_may_serve_a_sample_again(tmp_path: Path) -> None:
    """The arrays of GPT-NeoX's packings of whole documents, one of them damaged."""
    files = files_of(tmp_path, CONTENTS, "p")
    with ArrayWriter(files) as writer:
        for name, values in CONTENTS.items():
            array = np.array([0, 1, 0] if name == "shuffle_index" else values, np.int64)
            writer.allocate(name, array.shape, "int64")[...] = array
            writer.seal(name)
        writer.publish(IDENTITY)
    changed = np.array([12, 10, 11], np.int64)
    overwrite(tmp_path / "p-document_index.npy", changed, same_time=True)
    assert only(tmp_path, full=True).rule == "checksum"


def test_arrays_without_a_sidecar_are_not_checked(folder: Path) -> None:
    for name in "xy":
        (folder / f"{name}-megaindex.json").unlink()
    with pytest.raises(InvalidArgument, match="no sidecar"):
        verify(folder)


def test_the_command(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["verify", str(folder), "--full"]) == 0
    assert "framework arrays, 2 sets, 6 arrays" in capsys.readouterr().out
    overwrite(folder / "y-shuffle_index.npy", np.zeros(3, np.uint32), same_time=True)
    assert main(["verify", str(folder), "--full", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert [finding["rule"] for finding in report["findings"]] == ["checksum", "shuffle-repeat"]


def test_inspect(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = files_of(folder, CONTENTS, "y")
    found = find_arrays(files, IDENTITY, lambda arrays: None)
    assert found is not None
    make_sets_durable([(files, found)])
    x, y = inspect(folder)
    assert isinstance(x, EntryDescription)
    assert isinstance(y, EntryDescription)
    assert (x.path, x.durable, y.path, y.durable) == (f"{folder}/x", False, f"{folder}/y", True)
    assert x.arrays["sample_index"] == {"dtype": "int32", "shape": (4, 2), "bytes": 32}
    assert main(["inspect", str(folder)]) == 0
    out = capsys.readouterr().out
    assert "documents = [10, 13]" in out
    assert 'origin = "built"' in out
    assert "synced to disk" in out


LEAVES = st.sampled_from(
    [None, -1, 0, 2**70, 1.5, "", "1", "x", "../x", [], [1], {}, {"a": 1}, True, "float64", [[0]]]
)


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


@times(4)
@given(data=st.data())
def test_any_value_in_a_sidecar(folder: Path, data: st.DataObject) -> None:
    """Every value is reported and described; readers get the written arrays or a typed error."""
    with ArrayWriter(files_of(folder, CONTENTS, "x")) as writer:
        fill(writer, CONTENTS)
        writer.publish(IDENTITY)
    path = folder / "x-megaindex.json"
    body = json.loads(path.read_text())
    body["boot"] = data.draw(st.sampled_from([body["boot"], "another"]))
    place = data.draw(st.sampled_from([each for each in places(body) if each]))
    inner = body
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = data.draw(LEAVES)
    path.write_text(json.dumps(body))
    quick, full = (verify(path, full=full) for full in (False, True))
    assert (quick.path, full.path) == (str(path), str(path))
    assert {f.rule for f in quick.findings} <= {f.rule for f in full.findings}
    assert all(Path(f.file).parent == folder and f.rule for f in full.findings)
    (described,) = inspect(path)
    assert isinstance(described, EntryDescription)
    assert described.path == (str(path) if described.faults else f"{folder}/x")
    files = files_of(folder, CONTENTS, "x")
    with contextlib.suppress(MegaIndexError):
        found = find_arrays(files, IDENTITY, lambda arrays: None)
        if found is not None:
            for name, array in map_arrays(files, found).items():
                np.testing.assert_array_equal(array, CONTENTS[name], strict=True)
