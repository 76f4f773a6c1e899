"""Parts of a pair: whole documents of equal shares, whose merge is the original."""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.cli import main
from megaindex.corpus.merge import merge
from megaindex.corpus.split import TokenCounts, cut_at, cut_evenly, cut_ranges, split
from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format.pair import map_pair

LENGTHS = st.lists(st.lists(st.integers(0, 9), max_size=3), min_size=1, max_size=20)


def write_documents(prefix: str, documents: list[list[int]], *, multimodal: bool = False) -> str:
    """Write documents of sequences of these lengths; tokens and modes count up."""
    position = number = 0
    with IndexedDatasetWriter(prefix, np.uint16, multimodal=multimodal) as writer:
        for lengths in documents:
            tokens = np.arange(position, position + sum(lengths))
            modes = [(number + i) % 100 for i in range(len(lengths))] if multimodal else None
            writer.add_document(tokens, lengths, modes)
            position += sum(lengths)
            number += len(lengths)
    return prefix


def names(directory: Path) -> list[str]:
    return sorted(entry.name for entry in directory.iterdir())


@given(documents=LENGTHS, multimodal=st.booleans(), data=st.data())
def test_parts_merged_again_are_the_same_bytes(
    documents: list[list[int]], multimodal: bool, data: st.DataObject
) -> None:
    parts = data.draw(st.integers(1, len(documents)))
    by = data.draw(st.sampled_from(["tokens", "documents"]))
    with tempfile.TemporaryDirectory() as directory:
        prefix = write_documents(f"{directory}/a", documents, multimodal=multimodal)
        outcomes = split(prefix, [f"{directory}/p{{}}"], lambda pair: cut_evenly(pair, parts, by))
        assert sum(outcome.documents for outcome in outcomes) == len(documents)
        merge(f"{directory}/m", [outcome.path_prefix for outcome in outcomes])
        for suffix in (".bin", ".idx"):
            assert Path(f"{directory}/m{suffix}").read_bytes() == Path(prefix + suffix).read_bytes()


@given(documents=LENGTHS, data=st.data())
def test_equal_tokens_against_brute_force(documents: list[list[int]], data: st.DataObject) -> None:
    """Compare with a search for the boundaries nearest to equal shares, the first of equals."""
    parts = data.draw(st.integers(1, len(documents)))
    before = [sum(map(sum, documents[:d])) for d in range(len(documents) + 1)]
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules["megaindex.corpus.split"], "_STEP", 4)
        write_documents(f"{directory}/a", documents)
        found = cut_evenly(
            map_pair(f"{directory}/a", "megatron", multimodal=False), parts, "tokens"
        )
    last = 0
    for k in range(1, parts):
        allowed = range(last + 1, len(documents) - (parts - k) + 1)
        wanted = [abs(parts * tokens - k * before[-1]) for tokens in before]
        cut = found[k - 1][1]
        assert cut in allowed
        assert wanted[cut] == min(wanted[d] for d in allowed)
        last = cut
    assert (found[0][0], found[-1][1]) == (0, len(documents))


def test_of_two_boundaries_as_near_the_first_is_taken(tmp_path: Path) -> None:
    """Half of 3 tokens lies between the first two of three documents of one token."""
    write_documents(str(tmp_path / "a"), [[1], [1], [1]])
    pair = map_pair(str(tmp_path / "a"), "megatron", multimodal=False)
    assert cut_evenly(pair, 2, "tokens") == [(0, 1), (1, 3)]


def test_token_counts_across_steps(tmp_path: Path) -> None:
    lengths = np.random.default_rng(3).integers(0, 30, 40_000)
    pair = map_pair(
        write_corpus(tmp_path / "a", lengths, np.int32).path_prefix, "megatron", multimodal=False
    )
    counts = TokenCounts(pair)
    assert counts.total == lengths.sum()
    for sequence in (0, 1, 16_383, 16_384, 16_385, 32_768, 39_999, 40_000):
        assert counts.before(sequence) == lengths[:sequence].sum()


def test_documents_of_several_sequences_stay_whole(tmp_path: Path) -> None:
    prefix = write_documents(str(tmp_path / "a"), [[3, 0, 2], [], [4]], multimodal=True)
    split(prefix, [str(tmp_path / "p{}")], lambda pair: cut_at(pair, [2]))
    first = IndexedDataset(tmp_path / "p0", multimodal=True)
    assert first.document_indices.tolist() == [0, 3, 3]
    assert first.sequence_lengths.tolist() == [3, 0, 2]
    assert first.sequence_pointers.tolist() == [0, 6, 6]
    second = IndexedDataset(tmp_path / "p1", multimodal=True)
    assert (second[0][0].tolist(), second[0][1]) == ([5, 6, 7, 8], 3)


def test_ranges_may_overlap_and_leave_out(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [1, 2, 3, 4], np.int32).path_prefix
    outcomes = split(
        prefix,
        [str(tmp_path / "x"), str(tmp_path / "y")],
        lambda pair: cut_ranges(pair, [(2, 4), (1, 3)]),
    )
    assert [outcome.tokens for outcome in outcomes] == [7, 5]
    assert IndexedDataset(tmp_path / "y")[0].tolist() == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--at", "0"], "must rise from at least 1 to at most 2"),
        (["--at", "2,1"], "has 3 documents, and a part at least one"),
        (["--at", "3"], "got [3]: "),
        (
            ["--at", "1,x"],
            "--at: must be document numbers, separated by commas",
        ),
        (["--parts", "0"], "the number of parts must be from 1 to 3, the number of documents of "),
        (["--parts", "4"], "the number of parts must be from 1 to 3"),
        (["--documents", "1:1"], "a range of documents a:b must have 0 <= a < b <= 3"),
        (["--documents", "0:4"], "a.idx, got 0:4"),
        (["--documents", "1"], "--documents: must be A:B ranges, separated by commas"),
        (["--parts", "3"], "3 parts need as many outputs, or one with {}"),
    ],
)
def test_cuts_that_do_not_fit(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    prefix = write_corpus(tmp_path / "a", [1, 2, 3], np.int32).path_prefix
    assert main(["split", prefix, str(tmp_path / "x"), str(tmp_path / "y"), *arguments]) == 2
    assert message in capsys.readouterr().err
    assert names(tmp_path) == ["a.bin", "a.idx"]


def test_outputs_and_inputs_are_checked_first(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "a", [1, 2, 3], np.int32).path_prefix
    (tmp_path / "p2.idx").write_bytes(b"precious")
    before = names(tmp_path)

    def in_three(outputs: list[str], **options: Any) -> None:
        paths = [str(tmp_path / name) for name in outputs]
        split(prefix, paths, lambda pair: cut_evenly(pair, 3, "documents"), **options)

    with pytest.raises(StorageError, match=r"p2\.idx: already exists"):
        in_three(["p{}"])
    with pytest.raises(InvalidArgument, match="is also an input or another output"):
        in_three(["x", "y", "x"])
    with pytest.raises(InvalidArgument, match="is also an input or another output"):
        in_three(["x", "y", "a"], overwrite=True)
    with pytest.raises(InvalidArgument, match="by must be one of"):
        split(prefix, ["x"], lambda pair: cut_evenly(pair, 1, "bytes"))
    with pytest.raises(MissingFile, match="nowhere"):
        split(str(tmp_path / "nowhere"), ["x"], lambda pair: cut_at(pair, [1]))
    with open(f"{prefix}.bin", "r+b") as stream:
        stream.truncate(20)
    with pytest.raises(FormatError, match="cut short"):
        in_three(["x", "y", "z"])
    assert names(tmp_path) == before


@pytest.mark.parametrize("number", [1, 2, 3])
def test_a_failure_leaves_no_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    prefix = write_corpus(tmp_path / "a", np.full(300, 500), np.int32).path_prefix
    real, calls = os.copy_file_range, []

    def fail(*args: Any, **kwargs: Any) -> int:
        calls.append(args)
        if len(calls) == number:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(*args, **kwargs)

    monkeypatch.setattr(os, "copy_file_range", fail)
    with pytest.raises(StorageError, match="No space left on device"):
        split(prefix, [str(tmp_path / "p{}")], lambda pair: cut_evenly(pair, 3, "tokens"))
    assert names(tmp_path) == ["a.bin", "a.idx"]


@pytest.mark.slow
def test_memory_does_not_depend_on_the_size(tmp_path: Path) -> None:
    peaks = []
    for sequences in (1 << 20, 1 << 21):
        prefix = str(tmp_path / str(sequences))
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            writer.add_documents(np.zeros(8 * sequences, np.uint16), np.full(sequences, 8))
        tracemalloc.start()
        split(prefix, [f"{prefix}-{{}}"], lambda pair: cut_evenly(pair, 2, "tokens"))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + (1 << 16) < 1 << 25


def test_the_verb(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prefix = write_corpus(tmp_path / "a", np.full(24, 5), np.uint16).path_prefix
    assert main(["split", prefix, "--parts", "12", str(tmp_path / "p-{}")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 12
    assert lines[3].startswith(f"{tmp_path}/p-03: 2 documents, 10 tokens, uint16, copied, ")
    assert main(["split", "--at", "4", prefix, str(tmp_path / "x"), str(tmp_path / "y")]) == 0
    assert len(IndexedDataset(tmp_path / "y")) == 20
    assert main(["split", prefix, str(tmp_path / "z"), "--documents", "3:7"]) == 0
    assert IndexedDataset(tmp_path / "z")[0].tolist() == list(range(15, 20))
