"""Pairs in a bucket against the same pairs on a disk, token for token."""

from __future__ import annotations

import errno
import logging
import pickle
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import Terminal, stderr_as
from support.corpora import write_corpus
from support.examples import one_in
from support.object_server import Proxy, request, upload

import megaindex
from megaindex.cache.fingerprint import CHUNK_BYTES, CHUNKS, content_fingerprint, corpus_fingerprint
from megaindex.errors import InvalidArgument, MissingFile, OutOfRange, StorageError
from megaindex.format import IndexedDataset
from megaindex.io.paths import FileInfo
from megaindex.objects import files as cache
from megaindex.objects.files import stamp, stat_path
from megaindex.objects.store import read, read_all
from megaindex.verify.verify import verify


def test_a_pair_in_a_bucket_is_the_pair_on_the_disk(store: Any) -> None:
    local, url = store(dtype=np.uint16)
    remote = IndexedDataset(url)
    assert (len(remote), remote.dtype, remote.nbytes) == (len(local), local.dtype, local.nbytes)
    for name in ("sequence_lengths", "sequence_pointers", "document_indices"):
        np.testing.assert_array_equal(getattr(remote, name), getattr(local, name))
    assert remote.num_tokens == local.num_tokens
    for i in (0, 7, -1, len(local) - 1):
        got = remote[i]
        assert got.dtype == local[i].dtype
        assert not got.flags.writeable
        np.testing.assert_array_equal(got, local[i])
    np.testing.assert_array_equal(remote.get(3, 1, 4), local.get(3, 1, 4))
    with pytest.raises(OutOfRange, match="sequence 3"):
        remote.get(3, 1, 10_000)


def test_a_slice_is_one_request(store: Any, proxy: Proxy) -> None:
    local, url = store()
    remote = IndexedDataset(url)
    proxy.seen.clear()
    got = remote[20:180]
    (seen,) = proxy.seen
    assert (seen.method, seen.if_match) == ("GET", remote.bin_info.version)
    for ours, expected in zip(got, local[20:180], strict=True):
        np.testing.assert_array_equal(ours, expected)
    proxy.seen.clear()
    assert remote[5:5] == []
    empty = int(np.flatnonzero(local.sequence_lengths == 0)[0])
    assert remote[empty].size == 0
    assert proxy.seen == []


@one_in(2)
@given(
    ranges=st.lists(st.tuples(st.integers(0, 3 << 20), st.integers(0, 700_000)), max_size=9),
)
def test_ranges_of_an_object_are_its_bytes(
    s3: str, proxy: Proxy, ranges: list[tuple[int, int]]
) -> None:
    content = np.random.default_rng(1).bytes(4 << 20)
    url = f"s3://{s3}/some bytes"
    facts = stat_path(url)
    if facts is None:
        request(proxy.upstream, "PUT", f"/{s3}/some%20bytes", content)
        facts = stat_path(url)
    assert facts is not None
    assert facts.nbytes == len(content)
    ranges = [(begin, min(count, len(content) - begin)) for begin, count in ranges]
    parts = read_all(facts, ranges)
    assert [part.tobytes() for part in parts] == [content[b : b + n] for b, n in ranges]


def test_content_decides_fingerprint_order_and_cache(store: Any, tmp_path: Path) -> None:
    local, url = store()
    remote = IndexedDataset(url)
    assert corpus_fingerprint(remote) == corpus_fingerprint(local)
    for order in ("megatron", "epoch", "window"):
        asked: dict[str, Any] = {"sequence_length": 16, "seed": 3, "order": order}
        if order == "megatron":
            asked["cache_dir"] = tmp_path / "indices"
        ours, theirs = (megaindex.build_index(p, **asked) for p in (url, local))
        assert getattr(ours, "cache_entry", "") == getattr(theirs, "cache_entry", "")
        ids = np.arange(ours.num_samples)
        for a, b in zip(ours.locate(ids), theirs.locate(ids), strict=True):
            np.testing.assert_array_equal(a, b)


def test_the_index_is_downloaded_once(store: Any, proxy: Proxy) -> None:
    _, url = store()
    IndexedDataset(url)
    assert len(proxy.gets(".idx")) == 1
    for _ in range(3):
        IndexedDataset(url).validate()
    assert len(proxy.gets(".idx")) == 1
    assert proxy.gets(".bin") == []


def test_a_download_shows_itself_on_a_terminal(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, url = store()
    terminal = Terminal()
    stderr_as(terminal, monkeypatch)
    IndexedDataset(url)
    shown = terminal.getvalue()
    assert "downloading corpus.idx" in shown
    IndexedDataset(url)
    assert terminal.getvalue() == shown


@pytest.mark.parametrize("harm", ["flip", "cut", "record", "no record", "no copy", "list", "deep"])
def test_a_damaged_copy_of_the_index_is_read_again(
    store: Any, proxy: Proxy, tmp_path: Path, harm: str, caplog: pytest.LogCaptureFixture
) -> None:
    local, url = store()
    IndexedDataset(url)
    (copy,), (record,) = (list((tmp_path / "cache").glob(f"*.{s}")) for s in ("object", "json"))
    content = bytearray(copy.read_bytes())
    if harm == "flip":
        content[60] ^= 1
        copy.write_bytes(content)
    elif harm == "cut":
        copy.write_bytes(content[:-8])
    elif harm == "record":
        record.write_text("{")
    elif harm == "no record":
        record.unlink()
    elif harm == "no copy":
        copy.unlink()
    else:
        record.write_text("[]" if harm == "list" else "[" * 100_000)
    remote = IndexedDataset(url)
    np.testing.assert_array_equal(remote.sequence_lengths, local.sequence_lengths)
    assert len(proxy.gets(".idx")) == 2
    IndexedDataset(url)
    assert len(proxy.gets(".idx")) == 2
    assert not [p for p in (tmp_path / "cache").iterdir() if "tmp" in p.name]
    assert ("again" in caplog.text) == (harm[:2] != "no")


@pytest.mark.slow
@pytest.mark.parametrize("locks", [True, False])
def test_many_that_start_together(
    store: Any, proxy: Proxy, monkeypatch: pytest.MonkeyPatch, locks: bool
) -> None:
    """One downloads for all; where there are no locks several do, and all get the same."""
    if not locks:
        monkeypatch.setattr(cache.fcntl, "flock", _no_locks)
    local, url = store()
    proxy.latency = 0.02
    with ThreadPoolExecutor(12) as threads:
        got = list(threads.map(IndexedDataset, [url] * 24))
    for dataset in got:
        np.testing.assert_array_equal(dataset.sequence_lengths, local.sequence_lengths)
    assert (len(proxy.gets(".idx")) == 1) == locks
    IndexedDataset(url)
    assert (len(proxy.gets(".idx")) == 1) == locks


def _no_locks(descriptor: int, operation: int) -> None:
    raise OSError(errno.ENOSYS, "not here")


def test_another_index_under_the_same_name_is_another_copy(
    store: Any, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    _, url = store()
    IndexedDataset(url)
    write_corpus(tmp_path / "other", [5, 6, 7])
    upload(proxy.upstream, s3, "data/corpus", tmp_path / "other")
    assert IndexedDataset(url).sequence_lengths.tolist() == [5, 6, 7]


def test_pickles_open_the_same_objects_or_refuse(
    store: Any, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    local, url = store()
    pickled = pickle.dumps(IndexedDataset(url))
    np.testing.assert_array_equal(pickle.loads(pickled)[4], local[4])
    content = (tmp_path / "corpus.bin").read_bytes()
    request(proxy.upstream, "PUT", f"/{s3}/data/corpus.bin", content[:-4] + b"\1\2\3\4")
    with pytest.raises(StorageError, match=f"{url}: changed since it was opened"):
        pickle.loads(pickled)


def test_what_needs_the_whole_file_says_so(store: Any, tmp_path: Path) -> None:
    _, url = store()
    with pytest.raises(InvalidArgument, match=r"corpus\.bin: lies in an object store.*loader"):
        _ = IndexedDataset(url).tokens
    from megaindex.corpus.merge import merge

    with pytest.raises(InvalidArgument, match=r"corpus\.bin: lies in an object store"):
        merge(str(tmp_path / "merged"), [url, url])
    assert not list(tmp_path.glob("merged*"))


def test_nothing_is_written_to_a_url(store: Any) -> None:
    from megaindex.corpus.merge import merge

    local, url = store()
    out = "s3://elsewhere/out"
    for write in (
        lambda: megaindex.IndexedDatasetWriter(out, np.int32).__enter__(),
        lambda: merge(out, [local.path_prefix]),
        lambda: megaindex.build_index(url, sequence_length=8, seed=1, cache_dir=out),
        lambda: megaindex.build_blend(
            [url], num_samples=9, sequence_length=8, seed=1, order="epoch", cache_dir=out
        ),
    ):
        with pytest.raises(InvalidArgument, match=rf"{out}.* lies in an object store"):
            write()
    assert not Path("s3:").exists()


@pytest.mark.parametrize("slashes", ["/", "///"])
def test_a_file_url_is_the_path(tmp_path: Path, slashes: str) -> None:
    path = tmp_path / "a corpus"
    local = write_corpus(path, [5, 6, 7])
    url = f"file:{slashes}{str(path).lstrip('/')}"
    dataset = IndexedDataset(url)
    assert dataset.path_prefix == str(path)
    assert dataset.tokens.tolist() == local.tokens.tolist()
    assert pickle.loads(pickle.dumps(dataset)).identity == local.identity
    assert IndexedDataset.exists(url)
    assert verify(url, full=True).path == str(path)
    with pytest.raises(InvalidArgument, match="is a URL"):
        megaindex.build_index(url, sequence_length=8, seed=1, cache_dir=f"file://{tmp_path}/c")


@pytest.mark.parametrize("tag", ["", 'W/"weak"'])
def test_a_store_without_strong_tags_is_refused(store: Any, proxy: Proxy, tag: str) -> None:
    _, url = store()
    proxy.etag = tag
    with pytest.raises(StorageError, match=rf"^{url}\.bin: the store must give a strong ETag"):
        IndexedDataset(url)


def test_a_copy_is_checked_once(
    store: Any, proxy: Proxy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until something of it changes; and again while it may change without another time."""
    checked = []
    sum_of = cache._checksum
    monkeypatch.setattr(cache, "_checksum", lambda path: checked.append(path) or sum_of(path))
    _, url = store()
    age = 10**9  # ns since the copy was written

    def now() -> int:
        return max(path.stat().st_ctime_ns for path in (tmp_path / "cache").glob("*.object")) + age

    monkeypatch.setattr(cache, "time", SimpleNamespace(time_ns=now))
    for _ in range(3):
        IndexedDataset(url)
    assert len(checked) == 2
    age = 3 * 10**9
    for _ in range(3):
        IndexedDataset(url)
    assert len(checked) == 3
    (copy,) = (tmp_path / "cache").glob("*.object")
    before = stamp(str(copy))
    while stamp(str(copy)) == before:  # clocks of file systems tick in milliseconds
        copy.write_bytes(copy.read_bytes()[:-1] + b"\x07")
    IndexedDataset(url)
    assert len(checked) == 5  # and once more alone
    assert len(proxy.gets(".idx")) == 2


def test_a_full_cache_is_left_as_it_was(
    store: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing stays of a download whose record cannot be written, nor of one that was killed."""
    _, url = store()

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "full")

    with monkeypatch.context() as patched:
        patched.setattr(cache.json, "dump", full)
        with pytest.raises(StorageError, match="free some space"):
            IndexedDataset(url)
    (lock,) = (tmp_path / "cache").iterdir()
    for left in (".0.object", ".0.object.tmp.1", ".0.object.1.json"):
        lock.with_suffix(left).touch()
    IndexedDataset(url)
    names = sorted(path.name.count(".") for path in (tmp_path / "cache").iterdir())
    assert names == [1, 1, 2]


def test_a_cache_is_a_directory_here(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, url = store()
    monkeypatch.setenv("MEGAINDEX_OBJECT_CACHE", "s3://bucket/cache")
    with pytest.raises(InvalidArgument, match="give MEGAINDEX_OBJECT_CACHE a directory"):
        IndexedDataset(url)


def test_exists(store: Any) -> None:
    _, url = store()
    assert IndexedDataset.exists(url)
    assert not IndexedDataset.exists(url + "x")


@pytest.mark.parametrize("half", ["bin", "idx"])
def test_a_missing_half_is_named(store: Any, s3: str, proxy: Proxy, half: str) -> None:
    _, url = store()
    request(proxy.upstream, "DELETE", f"/{s3}/data/corpus.{half}")
    with pytest.raises(MissingFile, match=rf"^{url}\.{half}: missing, although"):
        IndexedDataset(url)


def test_a_missing_bucket_or_object_is_named(store: Any) -> None:
    store()
    for url in ("s3://no-such-bucket/corpus", "s3://bucket-0/other"):
        with pytest.raises(MissingFile, match=rf"^{url}: neither {url}\.bin nor"):
            IndexedDataset(url)


def test_gone_between_look_and_read(store: Any, s3: str, proxy: Proxy) -> None:
    _, url = store()
    remote = IndexedDataset(url)
    request(proxy.upstream, "DELETE", f"/{s3}/data/corpus.bin")
    with pytest.raises(MissingFile, match=rf"^{url}\.bin: does not exist"):
        _ = remote[3]


def test_a_cut_object_is_refused_when_opened(
    store: Any, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    _, url = store()
    for half, message in (("bin", "cut short"), ("idx", "header declares")):
        content = (tmp_path / f"corpus.{half}").read_bytes()
        request(proxy.upstream, "PUT", f"/{s3}/data/corpus.{half}", content[:-8])
        with pytest.raises(megaindex.FormatError, match=rf"{url}\.idx: .*{message}"):
            IndexedDataset(url)
        request(proxy.upstream, "PUT", f"/{s3}/data/corpus.{half}", content)


def test_a_reader_of_facts_takes_no_other_version(store: Any, proxy: Proxy) -> None:
    """Also from a store that does not know preconditions."""
    _, url = store()
    found = IndexedDataset(url).bin_info
    proxy.drops_conditions = True
    with pytest.raises(StorageError, match=r"corpus\.bin: changed since it was opened"):
        read_all(FileInfo(found.path, found.nbytes, '"another"'), [(0, 8)])
    assert read_all(found, [(0, 8)])[0].size == 8
    assert logging.getLogger("megaindex").handlers == []


def test_content_is_fingerprinted_by_ranges(store: Any, proxy: Proxy) -> None:
    """As that of the copy on a disk; sampled, little of an object is read, and nothing is kept."""
    local, url = store(lengths=[400_000])
    dataset = IndexedDataset(url)
    for whole, most in ((False, CHUNKS * CHUNK_BYTES + 8), (True, local.nbytes)):
        proxy.seen.clear()
        found = content_fingerprint(dataset, whole=whole)
        assert found == content_fingerprint(local, whole=whole)
        ranges = [str(seen.range) for seen in proxy.gets(".bin")]
        assert ranges
        bounds = [text.removeprefix("bytes=").split("-") for text in ranges]
        assert sum(int(end) + 1 - int(begin) for begin, end in bounds) <= most


def test_no_bytes_need_no_request(s3: str, proxy: Proxy) -> None:
    request(proxy.upstream, "PUT", f"/{s3}/some", b"0123")
    facts = stat_path(f"s3://{s3}/some")
    assert facts is not None
    before = len(proxy.gets())
    for offset in (0, 4):
        read(facts, offset, memoryview(bytearray()))
    assert len(proxy.gets()) == before
    piece = bytearray(1)
    read(facts, 3, memoryview(piece))
    assert piece == b"3"
