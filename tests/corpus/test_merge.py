"""Merged pairs: bytes equal to Megatron's builder, constant memory, nothing half-written."""

from __future__ import annotations

import errno
import gc
import os
import resource
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.cli import main
from megaindex.corpus.merge import merge
from megaindex.errors import InvalidArgument
from megaindex.format import writer

Documents = list[list[list[int]]]
DOCUMENTS = st.lists(
    st.lists(st.lists(st.integers(0, 100), max_size=5), max_size=3), min_size=1, max_size=5
)


def write_pair(prefix: str, documents: Documents, dtype: Any, multimodal: bool) -> str:
    with IndexedDatasetWriter(prefix, dtype, multimodal=multimodal) as writer:
        for document in documents:
            tokens = [token for sequence in document for token in sequence]
            modes = [len(sequence) % 3 for sequence in document] if multimodal else None
            writer.add_document(tokens, [len(sequence) for sequence in document], modes)
    return prefix


def merge_with_megatron(
    megatron: Any, output: str, inputs: list[str], dtype: Any, multimodal: bool
) -> None:
    builder = megatron.IndexedDatasetBuilder(output + ".bin", dtype, multimodal)
    for prefix in inputs:
        builder.add_index(prefix)
    builder.finalize(output + ".idx")


def same_bytes(left: str, right: str) -> None:
    for suffix in (".bin", ".idx"):
        assert Path(left + suffix).read_bytes() == Path(right + suffix).read_bytes(), suffix


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@given(
    shards=st.lists(DOCUMENTS, min_size=1, max_size=4),
    dtype=st.sampled_from([np.uint8, np.uint16, np.int32, np.int64]),
    multimodal=st.booleans(),
    kernel_bytes=st.sampled_from([1, 1 << 40]),
)
def test_same_bytes_as_megatrons_builder(
    megatron_datasets: Any,
    shards: list[Documents],
    dtype: Any,
    multimodal: bool,
    kernel_bytes: int,
) -> None:
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(writer, "_KERNEL_BYTES", kernel_bytes)
        patch.setattr(gc, "collect", lambda: 0)  # the peer's, 0.1 s a shard with torch
        inputs = [
            write_pair(f"{directory}/{i}", documents, dtype, multimodal)
            for i, documents in enumerate(shards)
        ]
        ours, theirs = f"{directory}/ours", f"{directory}/theirs"
        outcome = merge(ours, inputs)
        merge_with_megatron(megatron_datasets, theirs, inputs, dtype, multimodal)
        same_bytes(ours, theirs)
        assert outcome.documents == sum(map(len, shards))
        assert IndexedDataset(ours).has_modes or not multimodal


@pytest.mark.slow
def test_same_bytes_where_the_kernel_copies(megatron_datasets: Any, tmp_path: Path) -> None:
    """Files above the size for kernel copies, at unaligned offsets."""
    inputs = [
        write_corpus(tmp_path / str(i), np.full(300, 331 + i), np.uint16).path_prefix
        for i in range(3)
    ]
    merge(str(tmp_path / "ours"), inputs)
    merge_with_megatron(megatron_datasets, str(tmp_path / "theirs"), inputs, np.uint16, False)
    same_bytes(str(tmp_path / "ours"), str(tmp_path / "theirs"))


@for_each("refusal", [errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.EPERM, None])
def test_where_the_kernel_does_not_copy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, refusal: int | None
) -> None:
    """Between file systems the kernel raises, or copies 0 bytes as at the end of a file."""
    corpus = write_corpus(tmp_path / "a", np.full(3000, 500), np.int32)
    calls = []

    def copy_file_range(*args: Any, **kwargs: Any) -> int:
        calls.append(args)
        if refusal is None:
            return 0
        raise OSError(refusal, os.strerror(refusal))

    monkeypatch.setattr(os, "copy_file_range", copy_file_range)
    merge(str(tmp_path / "m"), [corpus.path_prefix] * 2)
    assert len(calls) == 2
    data = (tmp_path / "a.bin").read_bytes()
    assert (tmp_path / "m.bin").read_bytes() == data + data


def test_short_copies_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    corpus = write_corpus(tmp_path / "a", np.full(300, 500), np.int32)
    real = os.copy_file_range
    monkeypatch.setattr(
        os, "copy_file_range", lambda s, t, count, **k: real(s, t, min(count, 70_001), **k)
    )
    merge(str(tmp_path / "m"), [corpus.path_prefix])
    same_bytes(str(tmp_path / "m"), corpus.path_prefix)


def test_gaps_and_unordered_pointers_are_followed(tmp_path: Path) -> None:
    """Pointers may be in any order; bytes outside every sequence are dropped."""
    write_pair(str(tmp_path / "a"), [[[1, 2, 3]], [[4]], [[5, 6]]], np.int32, False)
    raw = bytearray((tmp_path / "a.idx").read_bytes())
    at = 34 + 4 * 3
    raw[at : at + 24] = np.array([12, 0, 4], np.int64).tobytes()
    (tmp_path / "a.bin").write_bytes(np.arange(10, 19, dtype=np.int32).tobytes())
    (tmp_path / "a.idx").write_bytes(bytes(raw))
    merge(str(tmp_path / "m"), [str(tmp_path / "a")] * 2)
    merged = IndexedDataset(tmp_path / "m")
    assert [s.tolist() for s in merged] == [[13, 14, 15], [10], [11, 12]] * 2
    assert merged.nbytes == 2 * 6 * 4


def test_mixed_types_are_refused_with_the_remedy_that_works(tmp_path: Path) -> None:
    inputs = [
        write_pair(str(tmp_path / "a"), [[[1, 60_000]]], np.uint16, False),
        write_pair(str(tmp_path / "b"), [[[-1, 2]]], np.int16, False),
    ]
    with pytest.raises(
        InvalidArgument, match=r"b: holds int16, and .*a holds uint16.*--dtype int32"
    ):
        merge(str(tmp_path / "m"), inputs)
    assert names(tmp_path) == ["a.bin", "a.idx", "b.bin", "b.idx"]
    assert merge(str(tmp_path / "m"), inputs, dtype="int32").dtype == "int32"
    assert [s.tolist() for s in IndexedDataset(tmp_path / "m")] == [[1, 60_000], [-1, 2]]


@pytest.mark.parametrize(
    ("stored", "dtype", "message"),
    [
        (np.int32, "uint16", "a: holds int32, whose values do not all fit uint16"),
        (np.int64, "float64", "a: holds int64, whose values do not all fit float64"),
        (np.int32, "uint32", "has no code in the megatron dialect"),
    ],
)
def test_only_widening(tmp_path: Path, stored: Any, dtype: str, message: str) -> None:
    prefix = write_pair(str(tmp_path / "a"), [[[1]]], stored, False)
    with pytest.raises(InvalidArgument, match=message):
        merge(str(tmp_path / "m"), [prefix], dtype=dtype)


def test_modes_with_and_without(tmp_path: Path) -> None:
    inputs = [
        write_pair(str(tmp_path / "a"), [[[1], [2, 3]]], np.int32, True),
        write_pair(str(tmp_path / "empty"), [[]], np.int32, False),
        write_pair(str(tmp_path / "b"), [[[4, 5]]], np.int32, False),
    ]
    with pytest.raises(InvalidArgument, match=r"a: has sequence modes, unlike .*b"):
        merge(str(tmp_path / "m"), inputs)
    merge(str(tmp_path / "m"), [*inputs[:2], inputs[0]])
    modes = IndexedDataset(tmp_path / "m", multimodal=True).sequence_modes
    assert modes is not None
    assert modes.tolist() == [1, 2, 1, 2]


def peak_of_merging(directory: Path, sequences: int) -> int:
    """Return the peak of allocated bytes for a pair of this many sequences of 32 tokens."""
    prefix = str(directory / str(sequences))
    with IndexedDatasetWriter(prefix, np.uint16) as writer:
        writer.add_documents(np.zeros(32 * sequences, np.uint16), np.full(sequences, 32))
    tracemalloc.start()
    merge(f"{prefix}-merged", [prefix, prefix])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


@pytest.mark.slow
def test_memory_does_not_depend_on_the_size(tmp_path: Path) -> None:
    small, large = (peak_of_merging(tmp_path, 1 << power) for power in (18, 20))
    assert (tmp_path / f"{1 << 20}.bin").stat().st_size == 1 << 26
    assert large < small + (1 << 16) < 1 << 25


def test_any_number_of_inputs_with_few_descriptors(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [5, 6], np.int32).path_prefix
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = max(map(int, os.listdir("/proc/self/fd")))
    resource.setrlimit(resource.RLIMIT_NOFILE, (used + 12, limits[1]))
    try:
        outcome = merge(str(tmp_path / "m"), [prefix] * 500)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert (outcome.documents, outcome.tokens) == (1000, 5500)


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_corpus(tmp_path / "a", [5, 6], np.uint16).path_prefix
    merged = str(tmp_path / "m")
    assert main(["merge", merged, prefix, prefix]) == 0
    printed = capsys.readouterr()
    assert printed.out.startswith(f"{merged}: 4 documents, 22 tokens, uint16, copied, 0.0 MB in ")
    assert (printed.out.count("\n"), printed.err) == (1, "")
    assert main(["merge", merged, prefix]) == 2
    assert "already exists" in capsys.readouterr().err
    assert main(["merge", merged, prefix, "--overwrite", "--dtype", "int32"]) == 0
    assert "2 documents, 11 tokens, int32" in capsys.readouterr().out
