"""Cache entries: published whole, verified before use, rebuilt when damaged."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
import shutil
import threading
import warnings
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex import MegatronOrder
from megaindex.cache import cache as cache_module
from megaindex.cache import entry as entry_module
from megaindex.cache import npy
from megaindex.cache.entry import EntryWriter, make_durable, quarantine
from megaindex.errors import StorageError
from megaindex.format import IndexedDataset
from megaindex.index.orders import framework as shuffled


@pytest.fixture
def corpus(tmp_path: Path) -> IndexedDataset:
    return write_corpus(tmp_path / "corpus", np.full(200, 37))


def build(corpus: Any, cache: Path, **arguments: Any) -> Any:
    settings = {"sequence_length": 16, "seed": 1, "cache_dir": cache, **arguments}
    return megaindex.build_index(corpus, **settings)


def only_entry(cache: Path) -> Path:
    (entry,) = [path for path in cache.iterdir() if path.is_dir()]
    return entry


@pytest.fixture
def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Grows by one with every index that is really built."""
    calls: list[int] = []
    real = shuffled.build

    def counted(*arguments: Any) -> None:
        calls.append(1)
        real(*arguments)

    monkeypatch.setattr(shuffled, "build", counted)
    return calls


def test_what_is_found_equals_what_was_built(
    corpus: IndexedDataset, tmp_path: Path, builds: list[int]
) -> None:
    cache = tmp_path / "deep" / "cache"
    expected = megaindex.build_index(corpus, sequence_length=16, seed=1)
    for _ in range(3):
        index = build(corpus, cache)
        for name in ("document_index", "sample_index", "shuffle_index"):
            array = getattr(index, name)
            np.testing.assert_array_equal(array, getattr(expected, name))
            assert array.dtype == getattr(expected, name).dtype
            assert not array.flags.writeable
    assert len(builds) == 2  # once in memory, once into the cache
    assert sorted(p.name for p in cache.iterdir()) == [only_entry(cache).name]


def test_arrays_of_an_entry_are_numpy_files(corpus: IndexedDataset, tmp_path: Path) -> None:
    index = build(corpus, tmp_path / "cache")
    path = only_entry(tmp_path / "cache") / "sample_index.npy"
    np.testing.assert_array_equal(np.load(path, allow_pickle=False), index.sample_index)


def test_written_and_mapped_entries_hold_the_same_bytes(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(npy, "WORTH_MAPPING", 0)
    build(corpus, tmp_path / "mapped")
    monkeypatch.setattr(npy, "is_local", lambda path: False)
    take = os.write  # a write may take less than it is given
    monkeypatch.setattr(os, "writev", lambda fd, parts: take(fd, b"".join(parts)[:1000]))
    build(corpus, tmp_path / "written")
    mapped, written = only_entry(tmp_path / "mapped"), only_entry(tmp_path / "written")
    for path in mapped.glob("*.*"):  # all but the mark `durable`, which comes later
        assert path.read_bytes() == (written / path.name).read_bytes(), path.name


def test_a_disk_that_fills_while_writing_is_named(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, header: bytes, data: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(npy, "is_local", lambda path: False)
    monkeypatch.setattr(npy, "_write", full)
    with pytest.raises(megaindex.StorageError, match=r"document_index\.npy: cannot write"):
        build(corpus, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def test_datasets_are_built_in_parallel_by_threads(tmp_path: Path) -> None:
    corpora = [write_corpus(tmp_path / str(k), np.full(300 + k, 37)) for k in range(6)]
    with ThreadPoolExecutor(6) as pool:
        futures = [pool.submit(build, each, tmp_path / "cache") for each in corpora]
        for each, future in zip(corpora, futures, strict=True):
            alone = megaindex.build_index(each, sequence_length=16, seed=1)
            np.testing.assert_array_equal(future.result().sample_index, alone.sample_index)
            np.testing.assert_array_equal(future.result().shuffle_index, alone.shuffle_index)


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 2},
        {"sequence_length": 17},
        {"epochs": 2},
        {"order": "neox"},
        {"split": "1,1"},
        {"documents": [3, 1, 2]},
        {"documents": [1, 3, 2]},
        {"add_extra_token": 0},
        {"drop_last_partial": False},
        {"num_samples": 800, "order": MegatronOrder(separate_final_epoch="never")},
    ],
)
def test_whatever_decides_the_arrays_decides_the_entry(
    corpus: IndexedDataset, tmp_path: Path, change: dict[str, Any]
) -> None:
    build(corpus, tmp_path / "cache")
    if "num_samples" in change:
        build(
            corpus,
            tmp_path / "cache",
            num_samples=800,
            order=MegatronOrder(separate_final_epoch="always"),
        )
    before = {path.name for path in (tmp_path / "cache").iterdir()}
    build(corpus, tmp_path / "cache", **change)
    assert len({path.name for path in (tmp_path / "cache").iterdir()} - before) == 1


def test_a_changed_corpus_is_another_entry_and_a_moved_one_is_not(
    corpus: IndexedDataset, tmp_path: Path, builds: list[int]
) -> None:
    cache = tmp_path / "cache"
    build(corpus, cache)
    for suffix in (".bin", ".idx"):
        shutil.copy(f"{corpus.path_prefix}{suffix}", tmp_path / f"moved{suffix}")
    build(IndexedDataset(tmp_path / "moved"), cache)
    assert len(builds) == 1
    lengths = np.full(200, 37)
    lengths[:2] = 36, 38  # the same number of tokens and files of the same size
    build(write_corpus(tmp_path / "other", lengths), cache)
    assert len(builds) == 2


def damage_truncate(entry: Path) -> None:
    with open(entry / "sample_index.npy", "r+b") as file:
        file.truncate(500)


def damage_longer(entry: Path) -> None:
    with open(entry / "sample_index.npy", "ab") as file:
        file.write(bytes(8))


def damage_remove(entry: Path) -> None:
    (entry / "shuffle_index.npy").unlink()


def damage_manifest(entry: Path) -> None:
    text = (entry / "manifest.json").read_text()
    (entry / "manifest.json").write_text(text.replace('"shape":[', '"shape":[1,', 1))


def damage_no_manifest(entry: Path) -> None:
    (entry / "manifest.json").unlink()


def damage_pickle(entry: Path) -> None:
    (entry / "manifest.json").write_bytes(pickle.dumps({"key": entry.name}))


def damage_not_an_object(entry: Path) -> None:
    (entry / "manifest.json").write_text("[1, 2]")


@pytest.mark.parametrize(
    "damage",
    [damage_truncate, damage_longer, damage_remove, damage_manifest, damage_no_manifest,
     damage_pickle, damage_not_an_object],
)  # fmt: skip
def test_a_damaged_entry_is_reported_and_rebuilt(
    corpus: IndexedDataset, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    cache = tmp_path / "cache"
    expected = megaindex.build_index(corpus, sequence_length=16, seed=1)  # not mapped from it
    build(corpus, cache)
    damage(only_entry(cache))
    index = build(corpus, cache)
    np.testing.assert_array_equal(index.sample_index, expected.sample_index)
    assert "it is rebuilt" in caplog.text
    assert str(only_entry(cache)) in caplog.text


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no list of mapped files")
@pytest.mark.parametrize("cut", ["shuffle_index.npy", None])
def test_a_damaged_entry_is_not_mapped_when_it_is_removed(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cut: str | None
) -> None:
    """NFS keeps a removed file that is still open, and so its directory."""
    cache, removed, remove = tmp_path / "cache", [], shutil.rmtree

    def rmtree(path: Path, **options: Any) -> None:
        removed.append(str(cache) in Path("/proc/self/maps").read_text())
        remove(path, **options)

    build(corpus, cache)
    entry = only_entry(cache)
    if cut:
        os.truncate(entry / cut, 500)
    monkeypatch.setattr(shutil, "rmtree", rmtree)
    cache_module.load_entry(entry, {})  # whole, its arrays are not those that are expected
    assert removed == [False]


def test_what_is_set_aside_and_cannot_be_examined_stays(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A failing disk does not end the build: a later builder removes it."""
    real = os.stat

    def stat(path: Any, *arguments: Any, **options: Any) -> os.stat_result:
        if "tmp." in str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return real(path, *arguments, **options)

    cache = tmp_path / "cache"
    build(corpus, cache)
    damage_truncate(only_entry(cache))
    with monkeypatch.context() as failing:
        failing.setattr(os, "stat", stat)
        quarantine(only_entry(cache))
    (left,) = cache.iterdir()
    assert left.name.startswith("tmp.")


def test_after_a_reboot_bytes_are_verified_until_they_were_synced(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setattr(entry_module, "make_durable_later", lambda entry: None)
    cache = tmp_path / "cache"
    build(corpus, cache)
    path = only_entry(cache) / "document_index.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1  # a page that never reached the disk
    path.write_bytes(data)
    monkeypatch.setattr("megaindex.cache.cache.boot_id", lambda: "another boot")
    monkeypatch.setattr("megaindex.cache.cache.make_durable_later", lambda entry: None)
    build(corpus, cache)
    assert len(builds) == 2
    assert "document_index.npy: the manifest promises checksum" in caplog.text


def test_an_entry_is_verified_at_every_opening_on_a_machine_without_a_boot_id(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int]
) -> None:
    """Two boots without an id look like one."""
    for module in ("cache", "entry"):
        monkeypatch.setattr(f"megaindex.cache.{module}.boot_id", lambda: "unknown")
        monkeypatch.setattr(f"megaindex.cache.{module}.make_durable_later", lambda entry: None)
    cache = tmp_path / "cache"
    build(corpus, cache)
    path = only_entry(cache) / "document_index.npy"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    build(corpus, cache)
    assert len(builds) == 2


def test_after_a_reboot_an_entry_is_verified_once(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Reading an index of 100 GB at each start would take minutes."""
    monkeypatch.setattr(entry_module, "make_durable_later", lambda entry: None)
    monkeypatch.setattr("megaindex.cache.cache.make_durable_later", make_durable)
    cache, verified = tmp_path / "cache", []
    build(corpus, cache)
    real = cache_module.checksum_fault
    monkeypatch.setattr(
        cache_module, "checksum_fault", lambda *given: verified.append(1) or real(*given)
    )
    for number in range(3):
        monkeypatch.setattr("megaindex.cache.cache.boot_id", lambda number=number: f"boot {number}")
        build(corpus, cache)
    assert len(verified) == 3  # arrays, once each


@pytest.mark.parametrize("error", [errno.ENOTEMPTY, errno.EEXIST, errno.EACCES, None])
def test_an_entry_that_another_process_published_first(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, builds: list[int],
    error: int | None,
) -> None:  # fmt: skip
    """It is taken, also where a network file system shows it late, and not built again."""
    cache, rename = tmp_path / "cache", os.rename
    shown = 0

    def publish_before(source: Any, target: Any) -> None:
        shutil.copytree(source, target)
        if error is None:  # the file system's own answer
            rename(source, target)
        raise OSError(error, "refused")

    def show_late(entry: Path, expected: Any = None) -> Any:
        nonlocal shown
        shown += (entry / "manifest.json").exists()
        return load(entry, expected) if shown > 2 else None

    load = cache_module.load_entry
    monkeypatch.setattr(cache_module, "load_entry", show_late)
    monkeypatch.setattr(os, "rename", publish_before)
    index = build(corpus, cache)
    monkeypatch.undo()
    expected = megaindex.build_index(corpus, sequence_length=16, seed=1)
    np.testing.assert_array_equal(index.shuffle_index, expected.shuffle_index)
    assert len(builds) == 1
    assert [path.name for path in cache.iterdir()] == [only_entry(cache).name]


def test_a_key_that_is_taken_is_told_from_one_that_cannot_be_published(tmp_path: Path) -> None:
    """Also while the manifest of the other process is not visible yet."""
    cache = tmp_path / "made" / "with its parent"
    with EntryWriter(cache, "taken") as writer:
        (cache / "taken").mkdir()
        (cache / "taken" / "document_index.npy").touch()
        assert not writer.publish({})
    with EntryWriter(cache, "file") as writer:
        (cache / "file").touch()
        with pytest.raises(StorageError, match="file: cannot publish the cache entry"):
            writer.publish({})
    assert sorted(path.name for path in cache.iterdir()) == ["file", "taken"]


def test_a_forked_process_syncs_its_entries(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread of its parent that does so does not exist in it."""
    monkeypatch.setattr(entry_module, "_DELAY_SECONDS", 0.0)
    monkeypatch.setattr(
        entry_module, "_worker", entry_module._SyncThread()
    )  # without earlier tasks
    done = threading.Event()
    entry_module.sync_later(done.set)
    assert done.wait(30)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if child == 0:
        synced = threading.Event()
        entry_module.sync_later(synced.set)
        os._exit(0 if synced.wait(30) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.parametrize("again", [False, True])
def test_a_removal_that_is_interrupted_goes_on(
    tmp_path: Path, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first Ctrl-C leaves nothing behind; the second ends the removal."""
    (tmp_path / "entry").mkdir()
    (tmp_path / "entry" / "a.npy").write_text("")
    remove, interrupts = shutil.rmtree, [KeyboardInterrupt("first")]
    if again:
        interrupts.append(KeyboardInterrupt("second"))

    def rmtree(path: Path, *, ignore_errors: bool) -> None:
        if interrupts:
            raise interrupts.pop(0)
        remove(path, ignore_errors=ignore_errors)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    with pytest.raises(KeyboardInterrupt, match="second" if again else "first"):
        quarantine(tmp_path / "entry")
    assert len(list(tmp_path.rglob("a.npy"))) == again
    assert not (tmp_path / "entry").exists()


@pytest.mark.parametrize("header", [0, 1])
def test_a_disk_that_is_full_within_a_header(
    tmp_path: Path, header: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linux then writes what there is room for, and reports no error."""
    writev = os.writev
    array = np.arange(1000, dtype=np.int32)
    size = len(npy.npy_header(array.shape, "int32"))

    def write_some(fd: int, parts: Any) -> int:
        first, _ = parts
        return writev(fd, (first[: size - header], b""))

    monkeypatch.setattr(os, "writev", write_some)
    path = str(tmp_path / "a.npy")
    if header:
        with pytest.raises(StorageError, match="cannot write"):
            npy.write_new(path, array)
    else:  # the rest is written by the next call
        npy.write_new(path, array)
        np.testing.assert_array_equal(np.load(path), array)


def test_a_failing_build_leaves_nothing(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels = shuffled.active()

    class Failing:
        def __getattr__(self, name: str) -> Any:
            return getattr(kernels, name)

        def cut_samples(self, *arguments: Any) -> None:
            raise RuntimeError("killed")

    monkeypatch.setattr(shuffled, "active", Failing)
    with pytest.raises(RuntimeError, match="killed"):
        build(corpus, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


@pytest.mark.parametrize("mapped", [0, 1 << 40])
def test_arrays_of_a_build_that_is_interrupted_are_freed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mapped: int
) -> None:
    """Also while the exception lives, as in a notebook: mapped ones keep their disk space."""
    monkeypatch.setattr(npy, "WORTH_MAPPING", mapped)
    monkeypatch.setattr(npy, "_WORTH_A_THREAD", 1)

    def interrupt(file: Future[Any]) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Future, "cancel", lambda file: False)

    made = []

    def build() -> None:
        with entry_module.EntryWriter(tmp_path, "key") as writer:
            made.append(weakref.ref(writer.allocate("a", (1000,), "int32")))
            writer.seal("a")
            writer.publish({})

    monkeypatch.setattr(Future, "result", interrupt)
    with pytest.raises(KeyboardInterrupt) as caught:
        build()
    assert caught.value.__traceback__ is not None
    assert [array() for array in made] == [None]


def test_a_cache_that_cannot_be_written_is_named(corpus: IndexedDataset, tmp_path: Path) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    with pytest.raises(megaindex.StorageError, match=r"file.*cannot"):
        build(corpus, blocked / "cache")


def test_a_full_disk_is_an_error_before_any_kernel_runs(
    corpus: IndexedDataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, offset: int, size: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(npy, "WORTH_MAPPING", 0)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(megaindex.StorageError, match=r"document_index\.npy.*No space left"):
        build(corpus, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []


def _race(prefix: str, cache: str, barrier: Any, results: Any) -> None:
    barrier.wait()
    index = build(prefix, Path(cache))
    results.put(int(np.dot(index.shuffle_index.astype(np.int64), np.arange(index.num_samples))))


@pytest.mark.slow
def test_processes_racing_for_one_entry_get_the_same(
    corpus: IndexedDataset, tmp_path: Path
) -> None:
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(3), context.Queue()
    arguments = (corpus.path_prefix, str(tmp_path / "cache"), barrier, results)
    processes = [context.Process(target=_race, args=arguments) for _ in range(3)]
    for process in processes:
        process.start()
    answers = {results.get(timeout=60) for _ in processes}
    for process in processes:
        process.join()
        assert process.exitcode == 0
    assert len(answers) == 1
    manifest = json.loads((only_entry(tmp_path / "cache") / "manifest.json").read_text())
    assert manifest["parameters"]["order"] == "megatron"
