"""Descriptors, pickles, forks, spawned processes and threads."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.files import open_below

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import FormatError, MissingFile, StorageError
from megaindex.io.mapping import map_readonly

RawPair = Callable[..., str]


def mappings_of(path: str) -> int:
    return Path("/proc/self/maps").read_text().count(path + "\n")


def test_no_descriptor_stays_open(raw_pair: RawPair) -> None:
    prefix = raw_pair()
    datasets = [IndexedDataset(prefix) for _ in range(300)]
    assert [dataset[2][1] for dataset in datasets] == [104] * 300
    assert open_below(os.path.dirname(prefix)) == []


def test_mappings_end_with_their_last_view(raw_pair: RawPair) -> None:
    prefix = raw_pair()
    dataset = IndexedDataset(prefix)
    view = dataset[0]
    assert (mappings_of(prefix + ".idx"), mappings_of(prefix + ".bin")) == (1, 1)
    del dataset
    gc.collect()
    assert (mappings_of(prefix + ".idx"), mappings_of(prefix + ".bin")) == (0, 1)
    del view
    gc.collect()
    assert mappings_of(prefix + ".bin") == 0


def test_failed_opens_leave_nothing(raw_pair: RawPair) -> None:
    prefix = raw_pair([3, 0, 2], data=bytes(3))
    for _ in range(20):
        with pytest.raises(ValueError, match="restore"):
            IndexedDataset(prefix)
    gc.collect()
    assert open_below(os.path.dirname(prefix)) == []
    assert mappings_of(prefix + ".bin") == 0


def test_mapping_of_any_file(tmp_path: Path) -> None:
    path = tmp_path / "f"
    path.write_bytes(b"abc")
    mapped = map_readonly(str(path))
    assert (mapped.tobytes(), mapped.dtype, mapped.flags.writeable) == (b"abc", np.uint8, False)
    path.write_bytes(b"")
    empty = map_readonly(str(path))
    assert (empty.size, empty.flags.writeable) == (0, False)
    with pytest.raises(MissingFile, match=r"none: cannot open"):
        map_readonly(str(tmp_path / "none"))


@pytest.mark.parametrize("multimodal", [False, True])
def test_pickle_reopens_by_path(raw_pair: RawPair, multimodal: bool) -> None:
    prefix = raw_pair([3, 0, 2], modes=[1, 2, 3], code=6)
    dataset = IndexedDataset(prefix, multimodal=multimodal, dialect="neox")
    blob = pickle.dumps(dataset)
    assert len(blob) < 500
    again = pickle.loads(blob)
    assert (again.dialect, again.path_prefix, len(again)) == ("neox", prefix, 3)
    assert (again.sequence_modes is None) == (not multimodal)


@pytest.mark.parametrize("change", [{"lengths": [3, 2]}, {"data": bytes(24)}, {"modes": [1, 2, 3]}])
def test_pickle_refuses_files_that_changed(raw_pair: RawPair, change: dict[str, object]) -> None:
    prefix = raw_pair([3, 0, 2])
    blob = pickle.dumps(IndexedDataset(prefix))
    raw_pair(**{"lengths": [3, 0, 2], **change})
    with pytest.raises(StorageError, match=r"train: changed since it was opened"):
        pickle.loads(blob)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_pickle_refuses_files_of_the_same_sizes(raw_pair: RawPair, suffix: str) -> None:
    prefix = raw_pair([3, 2])
    blob = pickle.dumps(IndexedDataset(prefix))
    raw_pair([2, 3])
    os.utime(prefix + suffix, ns=(1, 1))
    with pytest.raises(StorageError, match=r"changed since it was .* of 0\.000000001"):
        pickle.loads(blob)


def test_pickle_of_a_vanished_pair(raw_pair: RawPair) -> None:
    prefix = raw_pair()
    blob = pickle.dumps(IndexedDataset(prefix))
    Path(prefix + ".idx").unlink()
    with pytest.raises(MissingFile, match=r"train\.idx: missing"):
        pickle.loads(blob)


def read_everything(dataset: IndexedDataset) -> list[list[int]]:
    return [sequence.tolist() for sequence in dataset]


# From Python 3.12 on, forking warns once anything has started a thread.
forks = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.slow_cases("spawn")
@forks
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.not_quick)])
def test_other_processes_read_the_same(raw_pair: RawPair, method: str) -> None:
    dataset = IndexedDataset(raw_pair())
    with multiprocessing.get_context(method).Pool(2) as pool:
        results = pool.map(read_everything, [dataset] * 4)
    assert results == [read_everything(dataset)] * 4


@forks
def test_a_forked_child_inherits_the_mapping_and_may_drop_it(raw_pair: RawPair) -> None:
    dataset = IndexedDataset(raw_pair())
    child = os.fork()
    if child == 0:
        good = dataset[2].tolist() == [103, 104]
        del dataset
        gc.collect()
        os._exit(0 if good else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert dataset[2].tolist() == [103, 104]


def test_threads_share_one_dataset(tmp_path: Path) -> None:
    lengths = np.random.default_rng(2).integers(0, 50, 500)
    ends = np.cumsum(lengths)
    with IndexedDatasetWriter(tmp_path / "a", np.int32) as writer:
        writer.add_documents(np.arange(ends[-1]), lengths)
    dataset = IndexedDataset(tmp_path / "a")

    def check(seed: int) -> bool:
        picks = np.random.default_rng(seed).integers(0, 500, 300)
        right = all(
            np.array_equal(dataset[i], np.arange(ends[i] - lengths[i], ends[i])) for i in picks
        )
        return right and dataset.num_tokens == ends[-1]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, range(32)))


def test_interpreter_exit_with_views_alive(raw_pair: RawPair) -> None:
    code = (
        "import sys; from megaindex.format import IndexedDataset\n"
        f"dataset = IndexedDataset({raw_pair()!r}); sys.kept = [dataset, dataset[0]]\n"
        "print(dataset[0].tolist())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("[100, 101, 102]\n", "")


def test_reading_and_writing_load_no_heavy_modules() -> None:
    code = (
        "import sys, megaindex.format, megaindex.io.atomic\n"
        "print(sorted({'torch', 'numba', 'megatron'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_a_dataset_for_later_opens_when_it_is_read(raw_pair: RawPair) -> None:
    prefix = raw_pair([3, 0, 2])
    now = IndexedDataset(prefix)
    later = IndexedDataset.lazy(prefix, now.identity)
    assert (len(later), later.dtype, later.nbytes, later.is_open) == (
        3,
        now.dtype,
        now.nbytes,
        False,
    )
    assert later[0].tolist() == now[0].tolist()
    assert later.is_open
    assert later.num_tokens == 5
    assert not IndexedDataset.lazy(prefix + "-gone", now.identity).is_open


def test_a_dataset_for_later_has_a_known_dtype(raw_pair: RawPair) -> None:
    prefix = raw_pair([3, 0, 2])
    identity = IndexedDataset(prefix).identity
    with open(f"{prefix}.idx", "r+b") as file:
        file.seek(17)
        file.write(bytes([77]))
    with pytest.raises(FormatError) as now:
        IndexedDataset(prefix)
    header = replace(identity.header, dtype_code=77)
    later = IndexedDataset.lazy(prefix, identity._replace(header=header))
    with pytest.raises(FormatError) as then:
        _ = later.dtype
    assert str(then.value) == str(now.value)


def test_a_dataset_for_later_refuses_files_that_changed(raw_pair: RawPair) -> None:
    prefix = raw_pair([3, 0, 2])
    later = IndexedDataset.lazy(prefix, IndexedDataset(prefix).identity)
    raw_pair([3, 2])
    with pytest.raises(StorageError, match="it had 3 sequences"):
        _ = later.sequence_lengths
