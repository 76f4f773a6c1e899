"""Stores of arrays: rows of many processes, looked up, merged, damaged and refused."""

from __future__ import annotations

import errno
import json
import multiprocessing
import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.inputs import for_each

from megaindex import FormatError, InvalidArgument, MissingFile, OutOfRange, StorageError
from megaindex.keys import Store, rows_file
from megaindex.keys.rows_file import HEADER_BYTES, KEY_BYTES

SHAPE = (3, 2)
ROW_BYTES = 12


def keys_of(numbers: Any) -> Any:
    """Distinct keys of row numbers, some of which share their first word."""
    numbers = np.asarray(numbers, np.uint64)
    scattered = (numbers // np.uint64(5) + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    return np.stack((scattered, numbers), axis=1)


def values_of(numbers: Any) -> Any:
    return (np.asarray(numbers)[:, None, None] % 2048 + np.arange(6).reshape(SHAPE)).astype("f2")


def write(store: Store, *parts: Any) -> None:
    for numbers in parts:
        with store.writer() as writer:
            for piece in np.array_split(np.asarray(numbers), 3):
                writer.append(keys_of(piece), values_of(piece))


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "store", dtype="float16", shape=SHAPE)


def files_of(store: Store) -> list[Path]:
    return sorted(Path(store.path).glob("*.rows"))


def test_rows_are_found_before_and_after_merging(store: Store) -> None:
    order = np.random.default_rng(0).permutation(1000)
    write(store, order[:10], order[10:400], order[400:])
    assert (store.num_rows, store.num_files) == (1000, 3)
    asked = np.random.default_rng(1).integers(0, 1000, 3000)
    for _ in range(2):
        for opened in (store, Store(store.path), pickle.loads(pickle.dumps(store))):
            found = opened.get(keys_of(asked))
            assert found.dtype == np.float16
            assert np.array_equal(found, values_of(asked))
            assert np.array_equal(opened.get(keys_of(asked).view(np.int64)), found)
            assert opened.get(np.zeros((0, 2), np.int64)).shape == (0, *SHAPE)
        store.verify()
        store.merge()
        assert (store.num_rows, store.num_files) == (1000, 1)
    assert repr(store).endswith("1,000 rows of float16 [3, 2] in 1 files)")


@pytest.mark.slow
@pytest.mark.parametrize("count", [100_000, 1_000_000])
def test_many_rows_are_joined_by_other_ranks(tmp_path: Path, count: int) -> None:
    """Written on 6 ranks, read on 16 in another order; before and after merging."""
    store = Store(tmp_path / "store", dtype="int64", shape=())
    numbers = np.random.default_rng(2).permutation(count)
    for rank in range(6):
        with store.writer() as writer:
            for batch in np.array_split(numbers[rank::6], 20):
                writer.append(keys_of(batch), batch)
    for _ in range(2):
        for rank in range(16):
            asked = np.arange(rank, count, 16)
            assert np.array_equal(store.get(keys_of(asked)), asked)
        store.merge()


def test_missing_keys_are_refused_or_marked(store: Store) -> None:
    write(store, range(10))
    asked = np.array([3, 10, 9, 11])
    with pytest.raises(OutOfRange, match="2 of 4 keys have no payload.* in row 1"):
        store.get(keys_of(asked))
    values, found = store.find(keys_of(asked))
    assert found.tolist() == [True, False, True, False]
    assert np.array_equal(values[found], values_of(asked[found]))
    assert not values[~found].any()
    assert not store.find(np.zeros((1, 2), np.int64))[1].any()


@pytest.mark.parametrize("numbers", [[], [4], [0, 4], range(5), range(0, 50, 5), range(23)])
def test_every_place_of_a_first_word_is_found(store: Store, numbers: Any) -> None:
    write(store, numbers)
    found = store.find(keys_of(range(60)))[1]
    assert np.flatnonzero(found).tolist() == list(numbers)


def test_a_store_without_rows(store: Store) -> None:
    with store.writer() as writer:
        writer.append(keys_of([]), values_of([]))
    store.merge()
    assert files_of(store) == []
    assert store.num_rows == 0


def test_merged_bytes_do_not_depend_on_the_writers(tmp_path: Path) -> None:
    numbers = np.random.default_rng(3).permutation(500)
    contents = []
    for k, bounds in enumerate(([0, 500], [0, 100, 500], [0, 1, 2, 250, 500])):
        store = Store(tmp_path / str(k), dtype="<f2", shape=list(SHAPE))
        order = np.roll(numbers, 100 * k)
        write(store, *(order[low:high] for low, high in pairwise(bounds)), order[:50])
        store.merge()
        (file,) = files_of(store)
        contents.append((file.name, file.read_bytes()))
    assert contents[0] == contents[1] == contents[2]
    size = HEADER_BYTES + 500 * (ROW_BYTES + KEY_BYTES)
    assert len(contents[0][1]) == size


def test_merging_again_keeps_what_was_merged(store: Store) -> None:
    names = set()
    for count, numbers in (5, range(5)), (8, range(5, 8)), (8, range(2, 6)), (9, [8]):
        write(store, numbers)
        store.merge()
        assert np.array_equal(store.get(keys_of(range(count))), values_of(range(count)))
        assert (store.num_rows, store.num_files) == (count, 1)
        names |= {file.name for file in files_of(store)}
    assert len(names) == 3


def test_equal_rows_again_are_kept_once(store: Store) -> None:
    write(store, [1, 2, 3, 2, 1], [3, 4])
    assert store.num_rows == 5
    store.merge()
    assert store.num_rows == 4
    write(store, [4, 1])
    assert np.array_equal(store.get(keys_of(range(1, 5))), values_of(range(1, 5)))


def test_a_second_payload_is_refused(store: Store) -> None:
    write(store, range(5))
    for numbers in ([7, 3], [7, 0], [6, 8, 6]):
        values = values_of(numbers)
        values[-1, 0, 0] += 1
        with pytest.raises(InvalidArgument, match="one payload"), store.writer() as writer:
            writer.append(keys_of(numbers), values)
        assert len(files_of(store)) == 1


@pytest.mark.parametrize("rows_at_once", [1, 2, 3, 100])
def test_payloads_are_compared_and_copied_in_chunks(
    store: Store, monkeypatch: pytest.MonkeyPatch, rows_at_once: int
) -> None:
    monkeypatch.setattr(rows_file, "_CHUNK_BYTES", rows_at_once * ROW_BYTES)
    assert [len(range(7)[part]) for part in rows_file.chunks(7, ROW_BYTES)] == {
        1: [1] * 7, 2: [2, 2, 2, 1], 3: [3, 3, 1], 100: [7],
    }[rows_at_once]  # fmt: skip
    assert len(list(rows_file.chunks(7, 1000 * ROW_BYTES))) == 7
    write(store, range(10), range(5, 17))
    values = values_of(range(17))
    values[13] += 1
    with pytest.raises(InvalidArgument) as found, store.writer() as writer:
        writer.append(keys_of(range(17)), values)
    assert f"-{13:016x}, which" in str(found.value)
    store.merge()
    store.verify()
    assert np.array_equal(store.get(keys_of(range(17))), values_of(range(17)))


def test_writers_at_the_same_time_are_found_out(tmp_path: Path) -> None:
    stores = []
    for k in range(2):
        stores.append(Store(tmp_path / str(k), dtype="float16", shape=SHAPE))
        with stores[k].writer() as writer:
            writer.append(keys_of(range(5)), values_of(range(5)) + np.float16(k))
    (file,) = files_of(stores[1])
    file.rename(Path(stores[0].path) / file.name)
    both = Store(stores[0].path)
    for ask in (both.merge, lambda: both.get(keys_of([2])), lambda: both.find(keys_of([2]))):
        with pytest.raises(FormatError, match="different payloads"):
            ask()
    assert both.num_files == 2
    assert np.array_equal(stores[0].get(keys_of([2])), values_of([2]))  # it was opened before


def write_of(path: str, rank: int, ranks: int, count: int) -> None:
    write(Store(path, dtype="float16", shape=SHAPE), np.arange(rank, count, ranks))


@pytest.mark.slow
def test_many_processes_write(tmp_path: Path) -> None:
    path = str(tmp_path / "store")
    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=write_of, args=(path, k, 3, 1003)) for k in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    store = Store(path)
    assert (store.num_files, store.num_rows) == (3, 1003)
    assert np.array_equal(store.get(keys_of(range(1003))), values_of(range(1003)))


def test_a_store_sees_files_of_others_when_it_looks_again(store: Store) -> None:
    looking, merging = Store(store.path), Store(store.path)
    write(store, [1])
    assert (store.num_rows, looking.num_rows) == (1, 0)
    looking.refresh()
    assert looking.num_rows == 1
    merging.merge()
    assert merging.num_rows == 1


def test_a_merge_elsewhere_leaves_an_open_store_as_it_was(store: Store) -> None:
    write(store, range(5), range(5, 9))
    Store(store.path).merge()
    assert np.array_equal(store.get(keys_of(range(9))), values_of(range(9)))
    store.merge()
    assert store.num_files == 1


def test_a_file_that_disappears_while_the_store_is_opened(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, range(5))
    listed, gone = os.listdir(store.path), "0" * 32 + ".rows"
    listings = [[*listed, gone], listed]
    monkeypatch.setattr(os, "listdir", lambda path: listings.pop(0))
    assert Store(store.path).num_rows == 5
    monkeypatch.setattr(os, "listdir", lambda path: [gone])
    with pytest.raises(StorageError, match="keep being replaced"):
        Store(store.path)


def test_a_merge_that_was_made_meanwhile(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    write(store, range(5), range(5, 9))
    unlink = os.unlink
    monkeypatch.setattr(os, "unlink", lambda path: None if path.endswith(".rows") else unlink(path))
    Store(store.path).merge()
    monkeypatch.undo()
    assert len(files_of(store)) == 3  # as after a kill between publishing and removing
    assert np.array_equal(Store(store.path).get(keys_of(range(9))), values_of(range(9)))
    store._files = store._files[:2]
    monkeypatch.setattr(Store, "refresh", lambda self: None)
    store.merge()  # of the two, whose merged file is there
    assert len(files_of(store)) == 1


def test_a_merge_without_room_keeps_its_files(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(store, range(5), range(5, 9))

    def full(*_: Any) -> None:
        raise StorageError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megaindex.keys.store.write_file", full)
    with pytest.raises(StorageError, match="No space left"):
        store.merge()
    assert len(files_of(store)) == 2
    assert np.array_equal(Store(store.path).get(keys_of(range(9))), values_of(range(9)))


def test_a_block_that_raises_leaves_no_file(store: Store) -> None:
    writer = store.writer()

    def add() -> None:
        writer.append(keys_of([1]), values_of([1]))

    def add_and_fail() -> None:
        with writer:
            add()
            raise KeyError

    with pytest.raises(KeyError):
        add_and_fail()
    assert os.listdir(store.path) == ["store.json"]
    with pytest.raises(InvalidArgument, match="with block"):
        store.writer().append(keys_of([1]), values_of([1]))
    for again, rule in (add, "with block"), (add_and_fail, "entered already"):
        with pytest.raises(InvalidArgument, match=rule):
            again()


def test_an_append_that_failed_is_not_published(store: Store) -> None:
    def fail() -> None:
        with store.writer() as writer:
            writer.append(keys_of([1, 2]), values_of([1, 2]))
            writer._keys = [keys_of([1])]

    with pytest.raises(StorageError, match="append failed"):
        fail()
    assert files_of(store) == []


def test_keys_and_values_of_the_wrong_kind(store: Store) -> None:
    right = keys_of([1, 2])
    with store.writer() as writer:
        for keys in (
            right[:, 0], right[:, :1], right[:, [0, 1, 1]], right.astype(float),
            right.astype(np.uint32), "k",
        ):  # fmt: skip
            with pytest.raises(InvalidArgument, match=r"keys must be uint64\[n, 2\]"):
                writer.append(keys, values_of([1, 2]))
            with pytest.raises(InvalidArgument, match=r"keys must be uint64\[n, 2\]"):
                store.get(keys)
        for values in (values_of([1, 2]).astype("f4"), values_of([1, 2])[:, 0], 1.0, [[1], [1, 2]]):
            with pytest.raises(InvalidArgument, match="values must be"):
                writer.append(right, values)
        with pytest.raises(InvalidArgument, match="values must be 2, one a key, got 1"):
            writer.append(right, values_of([1]))
        with pytest.raises(InvalidArgument, match="keys must not be 0.* in row 1"):
            writer.append([[0, 1], [0, 0]], values_of([1, 2]))
        writer.append(np.array([[0, 1], [1, 0]]), values_of([1, 2]))
    assert store.num_rows == 2


def test_one_number_a_key(tmp_path: Path) -> None:
    store = Store(tmp_path / "scores", dtype="float64", shape=())
    with store.writer() as writer:
        writer.append(keys_of([1, 2]), [0.5, 0.25])
        with pytest.raises(InvalidArgument, match="values must be"):
            writer.append(keys_of([3]), 0.5)
    assert store.get(keys_of([2, 1, 2])).tolist() == [0.25, 0.5, 0.25]


def test_tensors_are_taken(store: Store) -> None:
    torch = pytest.importorskip("torch")
    keys, values = keys_of([1, 2]).view(np.int64), values_of([1, 2])
    with store.writer() as writer:
        writer.append(torch.from_numpy(keys), torch.from_numpy(values))
        with pytest.raises(InvalidArgument, match="values must be an array"):
            writer.append(torch.from_numpy(keys), torch.zeros(2, *SHAPE, dtype=torch.bfloat16))
    assert np.array_equal(store.get(torch.from_numpy(keys)), values)


@for_each("dtype", ["bool", "int8", "uint16", "int64", "float32", "float64"])
def test_dtypes(tmp_path: Path, dtype: str) -> None:
    store = Store(tmp_path / "store", dtype=dtype, shape=5)
    values = np.arange(15).reshape(3, 5).astype(dtype)
    with store.writer() as writer:
        writer.append(keys_of(range(3)), values)
    found = Store(store.path).get(keys_of([2, 0, 1]))
    assert found.dtype == dtype
    assert np.array_equal(found, values[[2, 0, 1]])


def test_what_a_store_can_hold(tmp_path: Path) -> None:
    Store(tmp_path / "most", dtype="uint8", shape=1 << 40)
    Store(tmp_path / "deep", dtype="uint8", shape=(1,) * 32)
    for k, (dtype, shape, text) in enumerate(
        (
            ("uint8", (1 << 40) + 1, "bytes of a payload must be"),
            ("float16", 1 << 40, "bytes of a payload must be"),
            ("uint8", (1,) * 33, "dimensions of shape must be"),
            ("uint8", (3, 0), r"shape\[1\] must be at least 1"),
            ("uint8", "ab", r"shape\[0\] must be an integer"),
            ("uint8", 1.5, "dtype and shape must be"),
            ("object", 1, "dtype must be one of"),
            ("complex64", 1, "dtype must be one of"),
            ("bfloat16", 1, "dtype and shape must be"),
        )
    ):
        with pytest.raises(InvalidArgument, match=text):
            Store(tmp_path / str(k), dtype=dtype, shape=shape)
        assert not (tmp_path / str(k)).exists()


def test_a_store_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="file/store.json: cannot create: Not a dir"):
        Store(tmp_path / "file", dtype="int64", shape=())


def test_opening_with_another_dtype_or_none(tmp_path: Path, store: Store) -> None:
    for dtype, shape in (("float32", SHAPE), ("float16", (2, 3))):
        with pytest.raises(InvalidArgument, match="must be those of the store"):
            Store(store.path, dtype=dtype, shape=shape)
    for given in ({"dtype": "float16"}, {"shape": SHAPE}):
        with pytest.raises(InvalidArgument, match="given together"):
            Store(store.path, **given)  # type: ignore[arg-type]
    with pytest.raises(MissingFile, match="holds no store"):
        Store(tmp_path / "other")
    with pytest.raises(StorageError, match="cannot"):
        Store(tmp_path / "no/parent", dtype="int8", shape=1)
    with pytest.raises(InvalidArgument, match="object store"):
        Store("s3://bucket/store")


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{}", "version must be 1, got None"),
        ('{"version": 2, "dtype": "int8", "shape": [1]}', "version must be 1, got 2"),
        ('{"version": 1, "shape": [1]}', "dtype"),
        ('{"version": 1, "dtype": "object", "shape": [1]}', "dtype must be one of"),
        ('{"version": 1, "dtype": "int8", "shape": [0]}', "shape"),
        ('{"version": 1, "dtype": "int8", "shape": null}', "dtype and shape must be"),
    ],
)
def test_a_damaged_declaration(store: Store, text: str, rule: str) -> None:
    (Path(store.path) / "store.json").write_text(text)
    with pytest.raises(FormatError, match=rule):
        Store(store.path)


def at(offset: int, data: bytes) -> Callable[[bytes], bytes]:
    return lambda content: content[:offset] + data + content[offset + len(data) :]


@pytest.mark.parametrize(
    ("change", "rule"),
    [
        (lambda content: b"", "must have a header of 128 bytes, got 0"),
        (lambda content: content[:127], "must have a header of 128 bytes, got 127"),
        (lambda content: content[:128], "must have 344 bytes, got 128"),
        (lambda content: content[:-1], "must have 344 bytes, got 343"),
        (lambda content: content + b"\0", "must have 344 bytes, got 345"),
        (at(0, b"X"), "must begin with"),
        (at(8, b"\2"), "version must be 1, got 2"),
        (at(16, b"\7"), "header is damaged"),
        (at(120, b"\0" * 8), "header is damaged"),
    ],
)
def test_a_damaged_file_is_refused(store: Store, change: Any, rule: str) -> None:
    write(store, range(6))
    (file,) = files_of(store)
    file.write_bytes(change(file.read_bytes()))
    with pytest.raises(FormatError, match=rule):
        Store(store.path)


def test_every_flipped_byte_behind_the_header_is_found(store: Store) -> None:
    write(store, range(6))
    (file,) = files_of(store)
    content = file.read_bytes()
    assert len(content) == HEADER_BYTES + 6 * (ROW_BYTES + KEY_BYTES)
    for place in range(HEADER_BYTES, len(content), 5):
        file.write_bytes(at(place, bytes([content[place] ^ 0x80]))(content))
        damaged = Store(store.path)
        for check in (damaged.verify, damaged.merge):
            with pytest.raises(FormatError, match="XXH3-128"):
                check()
    file.write_bytes(at(len(content) - 1, b"\1")(content))  # the last place
    with pytest.raises(FormatError, match="a payload must be below 6"):
        Store(store.path).get(keys_of(range(6)))


def forged(content: bytes, columns: list[list[int]]) -> bytes:
    """A file of the same payloads with other columns, whose checksums are right."""
    payload = content[HEADER_BYTES : len(content) - len(columns[0]) * KEY_BYTES]
    rows = np.array(columns, np.uint64).tobytes()
    head = bytearray(content[:HEADER_BYTES])
    head[56:72] = xxhash.xxh3_128_digest(payload + rows)
    head[120:] = xxhash.xxh3_64_intdigest(bytes(head[:120])).to_bytes(8, "little")
    return bytes(head) + payload + rows


@pytest.mark.parametrize(
    ("columns", "rule"),
    [
        ([[1, 1], [5, 6], [0, 1]], ""),
        ([[1, 2], [6, 5], [1, 1]], ""),
        ([[1, 1], [6, 5], [0, 1]], "keys must increase, but not at row 1"),
        ([[1, 1], [5, 5], [0, 1]], "keys must increase"),
        ([[2, 1], [5, 6], [0, 1]], "keys must increase"),
        ([[1, 1], [5, 6], [0, 2]], "a payload must be below 2, got 2"),
        ([[1, 1], [5, 6], [2**64 - 1, 1]], "a payload must be below 2"),
    ],
)
def test_columns_that_somebody_else_wrote(store: Store, columns: Any, rule: str) -> None:
    write(store, range(2))
    (file,) = files_of(store)
    file.write_bytes(forged(file.read_bytes(), columns))
    other = Store(store.path)
    if not rule:
        other.verify()
        assert other.find([[1, 5], [1, 6], [2, 5]])[1].any()
        return
    for check in (other.verify, other.merge):
        with pytest.raises(FormatError, match=rule):
            check()


def test_a_file_of_another_store_is_refused(tmp_path: Path, store: Store) -> None:
    other = Store(tmp_path / "other", dtype="float16", shape=(6,))
    with other.writer() as writer:
        writer.append(keys_of([1]), np.zeros((1, 6), "f2"))
    (file,) = files_of(other)
    file.rename(Path(store.path) / file.name)
    with pytest.raises(FormatError, match="another dtype or shape"):
        Store(store.path)


def test_odd_files_are_refused_at_once(store: Store) -> None:
    """A pipe in place of a file, and a link."""
    path = Path(store.path) / ("0" * 32 + ".rows")
    os.mkfifo(path)
    with pytest.raises(StorageError, match="not a regular file"):
        Store(store.path)
    path.unlink()
    path.symlink_to("store.json")
    with pytest.raises(StorageError):
        Store(store.path)


def test_the_declaration_is_plain_json(store: Store) -> None:
    fields = json.loads((Path(store.path) / "store.json").read_text())
    assert fields == {"dtype": "float16", "shape": [3, 2], "version": 1}


def test_threads_share_a_writer(tmp_path: Path) -> None:
    """Payloads stay with their keys: each payload is its key."""
    store = Store(tmp_path / "s", dtype="int64", shape=(2000,))
    rows = np.column_stack((np.arange(1, 201), np.arange(1, 201))).astype(np.uint64)

    def write(part: int) -> None:
        for number in range(part, 200, 4):
            writer.append(rows[number : number + 1], np.full((1, 2000), number + 1))

    with store.writer() as writer, ThreadPoolExecutor(4) as pool:
        list(pool.map(write, range(4)))
    assert np.array_equal(store.get(rows), np.repeat(np.arange(1, 201)[:, None], 2000, axis=1))
    store.verify()
