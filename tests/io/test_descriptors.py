"""A bounded number of open files, each checked when it is opened again."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.files import open_below

from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.io.mapping import DescriptorCache
from megaindex.io.paths import open_regular


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    paths = [tmp_path / f"{number}.bin" for number in range(20)]
    for number, path in enumerate(paths):
        path.write_bytes(bytes([number]) * (number + 1))
    return [str(path) for path in paths]


@pytest.fixture
def cache() -> Iterator[DescriptorCache]:
    cache = DescriptorCache(4)
    yield cache
    cache.close()


def open_in(files: list[str]) -> list[str]:
    return open_below(os.path.dirname(files[0]))


def test_every_file_is_read_and_few_are_open(cache: DescriptorCache, files: list[str]) -> None:
    for _ in range(3):
        for number, path in enumerate(files):
            with cache.lease(path, number + 1) as descriptor:
                assert os.pread(descriptor, 100, 0) == bytes([number]) * (number + 1)
            assert len(open_in(files)) <= 4
    assert len(cache) == len(open_in(files)) == 4
    cache.close()
    assert open_in(files) == []


def test_the_least_recently_used_is_closed(cache: DescriptorCache, files: list[str]) -> None:
    with cache.lease(files[0]) as first:
        pass
    for path in files[1:4]:
        with cache.lease(path):
            pass
    with cache.lease(files[0]) as descriptor:
        assert descriptor == first
    with cache.lease(files[4]):
        pass
    os.unlink(files[0])
    with cache.lease(files[0]) as descriptor:  # still open
        assert os.pread(descriptor, 1, 0) == b"\0"
    os.unlink(files[1])
    with pytest.raises(MissingFile, match="cannot open again"), cache.lease(files[1]):
        pass


def test_a_file_in_use_stays_open(cache: DescriptorCache, files: list[str]) -> None:
    with cache.lease(files[7]) as descriptor:
        for path in files[8:]:
            with cache.lease(path):
                pass
        cache.forget(files[7])
        assert os.pread(descriptor, 1, 0) == b"\7"
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)


@pytest.mark.parametrize("change", ["replaced", "written to", "longer", "shorter"])
def test_another_file_is_refused_when_reopened(
    cache: DescriptorCache, files: list[str], change: str
) -> None:
    path = files[9]
    with cache.lease(path):
        pass
    cache.forget(path)
    if change == "replaced":
        Path(path + ".new").write_bytes(bytes(10))
        os.replace(path + ".new", path)
    elif change == "written to":
        Path(path).write_bytes(bytes(10))
        os.utime(path, ns=(1, 1))
    else:
        os.truncate(path, 12 if change == "longer" else 3)
    sizes = {"longer": "had 10 bytes and now has 12", "shorter": "had 10 bytes and now has 3"}
    expected = sizes.get(change, "another file has its name, or it was written to")
    message = f"changed since it was opened: .*{expected}"
    with pytest.raises(StorageError, match=message), cache.lease(path):
        pass


def test_the_expected_size_is_checked_at_the_first_opening(
    cache: DescriptorCache, files: list[str]
) -> None:
    message = "had 11 bytes and now has 10"
    with pytest.raises(StorageError, match=message), cache.lease(files[9], 11):
        pass
    assert open_in(files) == []


@pytest.mark.slow
def test_threads_share_it(files: list[str]) -> None:
    cache = DescriptorCache(3)
    wrong: list[object] = []

    def read(seed: int, cache: DescriptorCache) -> None:
        for step in range(300):
            number = (step * (seed + 1) + seed) % 20
            try:
                with cache.lease(files[number]) as descriptor:
                    if os.pread(descriptor, 1, number) != bytes([number]):
                        wrong.append(number)
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=read, args=(seed, cache)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert len(cache) == len(open_in(files)) == 3
    del cache, read, threads  # the last to hold it
    gc.collect()
    assert open_in(files) == []


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_uses_what_is_open(cache: DescriptorCache, files: list[str]) -> None:
    with cache.lease(files[3]):
        pass
    assert cache._lock.acquire()  # as if another thread were opening a file
    child = os.fork()
    if child == 0:
        with cache.lease(files[3]) as descriptor:
            os._exit(0 if os.pread(descriptor, 1, 0) == b"\3" else 1)
    cache._lock.release()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_room_for_one_at_least() -> None:
    with pytest.raises(InvalidArgument, match="capacity must be at least 1"):
        DescriptorCache(0)


def test_what_is_no_regular_file_does_not_stay_open(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="a folder, not a regular file"):
        open_regular(str(tmp_path / "folder"))
    assert open_below(str(tmp_path)) == []
    descriptor = open_regular(str(tmp_path / "file"))
    assert open_below(str(tmp_path)) == [str(tmp_path / "file")]
    os.close(descriptor)
