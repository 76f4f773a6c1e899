"""Cache entries made by someone who means harm: refused, left alone outside, and rebuilt."""

from __future__ import annotations

import json
import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.corpora import write_corpus

import megaindex
from megaindex.cache.cache import map_array
from megaindex.cache.entry import Manifest, make_durable, quarantine, read_manifest
from megaindex.cache.fingerprint import canonical_json
from megaindex.errors import FormatError, StorageError
from megaindex.io.mapping import map_readonly


@pytest.fixture
def corpus(tmp_path: Path) -> megaindex.IndexedDataset:
    return write_corpus(tmp_path / "corpus", np.full(200, 37))


def build(corpus: Any, cache: Path) -> Any:
    return megaindex.build_index(corpus, sequence_length=16, seed=1, cache_dir=cache)


@pytest.fixture
def entry(corpus: Any, tmp_path: Path) -> Path:
    build(corpus, tmp_path / "cache")
    (path,) = [path for path in (tmp_path / "cache").iterdir() if path.is_dir()]
    return path


def forge(entry: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite the manifest, its own checksum included: that one keeps nobody out."""
    path = entry / "manifest.json"
    body = json.loads(path.read_text())
    del body["checksum"]
    change(body)
    text = canonical_json(body)
    path.write_text(canonical_json({**body, "checksum": xxhash.xxh3_128_hexdigest(text.encode())}))


def in_array(**fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda body: body["arrays"]["document_index"].update(fields)


def renamed(name: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    def change(body: dict[str, Any]) -> None:
        record = body["arrays"].pop("document_index")
        body["arrays"][name] = {**record, "file": f"{name}.npy", **fields}

    return change


FORGERIES = {
    "a path upwards": renamed("../../corpus"),
    "an absolute path": renamed("/etc/passwd", file="/etc/passwd"),
    "another file": in_array(file="sample_index.npy"),
    "a folder": in_array(file="."),
    "a zero byte": renamed("a\0b", shape=[0], offset=0),
    "a lone surrogate": renamed("\ud800", shape=[0], offset=0),
    "another array": renamed("other_index"),
    "another shape": in_array(shape=[100, 2]),
    "another type": in_array(dtype="uint8", shape=[800]),
    "objects": in_array(dtype="object"),
    "a structure": in_array(dtype=[["a", "<i4"]]),
    "text": in_array(dtype="U8"),
    "another byte order": in_array(dtype=">i4"),
    "floats": in_array(dtype="float64"),
    "a negative size": in_array(shape=[-200]),
    "a size that overflows": in_array(shape=[2**62, 2**62]),
    "a size that overflows beside 0": in_array(shape=[0, 2**61]),
    "many dimensions": in_array(shape=[1] * 100),
    "a fraction": in_array(shape=[200.0]),
    "a truth value": in_array(shape=[True]),
    "a negative offset": in_array(offset=-128),
    "an offset inside an element": in_array(offset=129, shape=[0]),
    "no shape": in_array(shape=None),
    "a field too many": in_array(pickle=True),
    "arrays in a list": lambda body: body.update(arrays=[1]),
    "no parameters": lambda body: body.update(parameters=[]),
    "other parameters": lambda body: body["parameters"].update(seed=2),
    "another key": lambda body: body.update(key="0" * 32),
    "another format": lambda body: body.update(cache_format=0),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused_and_the_entry_rebuilt(
    corpus: Any, entry: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = megaindex.build_index(corpus, sequence_length=16, seed=1)
    if name == "another array":
        (entry / "document_index.npy").rename(entry / "other_index.npy")
    forge(entry, FORGERIES[name])
    index = build(corpus, entry.parent)
    assert "it is rebuilt" in caplog.text
    np.testing.assert_array_equal(index.document_index, expected.document_index)


@pytest.mark.parametrize("offset", [120, 121])
def test_an_array_that_kernels_cannot_read_aligned_is_rebuilt(
    corpus: Any, entry: Path, offset: int, caplog: pytest.LogCaptureFixture
) -> None:
    """All else is right: the elements, their checksum, and the size of the file."""
    path = entry / "document_index.npy"
    path.write_bytes(bytes(offset) + path.read_bytes()[-200 * 4 :])
    forge(entry, in_array(offset=offset))
    index = build(corpus, entry.parent)
    assert f"has offset {offset}, not a multiple of 16" in caplog.text
    assert index.document_index.flags.aligned


@pytest.mark.parametrize(
    "text",
    ["", "[", "null", "[" * 100_000, '{"a":' * 100_000, "9" * 5000, '{"checksum": 1}', "\xff\xfe"],
    ids=["empty", "open", "null", "nested", "nested objects", "long number", "short", "no text"],
)
def test_a_manifest_that_is_none(entry: Path, text: str) -> None:
    (entry / "manifest.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(FormatError, match=r"manifest\.json.*it will be rebuilt"):
        read_manifest(entry)


def test_a_manifest_without_end_is_not_read(entry: Path) -> None:
    os.truncate(entry / "manifest.json", 1 << 40)  # sparse
    with pytest.raises(FormatError, match="not a regular file of at most"):
        read_manifest(entry)


def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_bytes(bytes(1000))
    return path


@pytest.mark.parametrize("name", ["manifest.json", "document_index.npy"])
def test_links_out_of_the_entry_are_not_followed(
    corpus: Any, entry: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    target = secret(tmp_path)
    real = entry / name
    copy = tmp_path / "copy"
    copy.write_bytes(real.read_bytes())  # the very bytes, so that nothing else is wrong
    for goal in (copy, target, tmp_path / "none"):
        real.unlink()
        real.symlink_to(goal)
        caplog.clear()
        build(corpus, entry.parent)
        assert "symbolic link" in caplog.text
        assert not real.is_symlink()
    assert target.read_bytes() == bytes(1000)
    assert copy.exists()


def test_a_link_in_place_of_the_entry_is_replaced_and_its_target_left(
    corpus: Any, entry: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "keep").write_text("mine")
    for goal in (outside, tmp_path / "none"):
        quarantine(entry)
        entry.symlink_to(goal)
        build(corpus, entry.parent)
        assert entry.is_dir()
        assert not entry.is_symlink()
    assert (outside / "keep").read_text() == "mine"
    assert sorted(path.name for path in entry.parent.iterdir()) == [entry.name]


def test_a_file_in_place_of_the_entry_is_replaced(corpus: Any, entry: Path) -> None:
    quarantine(entry)
    entry.write_text("x")
    build(corpus, entry.parent)
    assert entry.is_dir()


@pytest.mark.parametrize("name", ["manifest.json", "document_index.npy"])
def test_a_pipe_is_not_waited_for(corpus: Any, entry: Path, name: str) -> None:
    (entry / name).unlink()
    os.mkfifo(entry / name)
    done = threading.Event()

    def load() -> None:
        build(corpus, entry.parent)
        done.set()

    threading.Thread(target=load, daemon=True).start()
    assert done.wait(60)


def test_a_pipe_in_place_of_a_corpus_is_refused(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [3])
    (tmp_path / "c.idx").unlink()
    os.mkfifo(tmp_path / "c.idx")
    with pytest.raises(StorageError, match="not a regular file"):
        megaindex.IndexedDataset(tmp_path / "c")


def test_syncing_follows_no_link_and_waits_for_no_pipe(tmp_path: Path) -> None:
    entry = tmp_path / "entry"
    entry.mkdir()
    os.mkfifo(entry / "pipe")
    make_durable(entry)  # returns
    (entry / "pipe").unlink()
    (entry / "durable").symlink_to(tmp_path / "made elsewhere")
    make_durable(entry)
    assert not (tmp_path / "made elsewhere").exists()


def test_a_file_that_becomes_a_link_after_the_look_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"x")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert map_readonly(str(tmp_path / "link")).size == 1
    with pytest.raises(StorageError, match="link: cannot open"):
        map_readonly(str(tmp_path / "link"), follow_symlinks=False)


def test_no_array_is_ever_unpickled(entry: Path) -> None:
    """The bytes are taken as numbers of the manifest's dtype, whatever a .npy header says."""
    manifest = read_manifest(entry)
    record = manifest.arrays["document_index"]
    path = entry / record.file
    data = bytearray(path.read_bytes())
    data[:10] = b"\x80\x04cos\nsyst"  # how a pickle that calls os.system begins
    path.write_bytes(bytes(data))
    array = map_array(entry, record)
    assert array.dtype == np.int32
    assert not array.flags.writeable


def test_values_that_lead_outside_are_refused_when_they_are_used(corpus: Any, entry: Path) -> None:
    """On the boot that wrote an entry its checksums are not read again; kernels still check."""
    path = entry / "sample_index.npy"
    data = bytearray(path.read_bytes())
    data[-16:] = np.full(4, 2**31 - 1, np.int32).tobytes()
    path.write_bytes(bytes(data))
    index = build(corpus, entry.parent)
    with pytest.raises(megaindex.MegaIndexError):
        index.locate(np.arange(index.num_samples))


@pytest.mark.parametrize(("umask", "allowed"), [(0o022, 0o755), (0o077, 0o700), (0o002, 0o775)])
def test_modes_of_what_is_created_follow_the_umask(
    tmp_path: Path, umask: int, allowed: int
) -> None:
    before = os.umask(umask)
    try:
        corpus = write_corpus(tmp_path / "c", [30, 40])
        build(corpus, tmp_path / "deep/cache")
    finally:
        os.umask(before)
    made = [path for path in tmp_path.rglob("*") if path.name != "durable"]
    assert len(made) >= 8
    for path in made:
        mode = stat.S_IMODE(path.lstat().st_mode)
        assert mode & ~allowed == 0, f"{path}: {mode:o}"
        assert path.is_dir() or not mode & 0o111, f"{path} is executable: {mode:o}"


def test_a_manifest_says_again_what_it_was_written_from(entry: Path) -> None:
    manifest = read_manifest(entry)
    assert isinstance(manifest, Manifest)
    (entry / "manifest.json").write_text(manifest.dumps())
    assert read_manifest(entry) == manifest
