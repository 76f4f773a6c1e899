"""Each rule that a pair can break: error type, file, rule, values and remedy."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format import IndexedDataset, pair

RawPair = Callable[..., str]
TOO_MANY = 2**64 - 1


def refuses(kind: type[Exception], prefix: str, *parts: str, **options: Any) -> None:
    """Opening must fail with `kind` and say each of `parts`."""
    with pytest.raises(kind) as caught:
        IndexedDataset(prefix, **options)
    says(caught.value, *parts)


def says(error: Exception, *parts: str) -> None:
    for part in parts:
        assert part in str(error), f"{part!r} is not in {str(error)!r}"


@pytest.mark.parametrize(("gone", "there"), [(".bin", ".idx"), (".idx", ".bin")])
def test_half_a_pair_is_missing(raw_pair: RawPair, gone: str, there: str) -> None:
    prefix = raw_pair()
    Path(prefix + gone).unlink()
    refuses(
        MissingFile,
        prefix,
        f"train{gone}: missing, although",
        f"train{there} exists",
        "put the missing file beside it",
    )


def test_both_files_are_missing(tmp_path: Path) -> None:
    refuses(MissingFile, str(tmp_path / "no"), "no.bin nor", "no.idx exists", "check the path")


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_path_of_a_file_instead_of_the_prefix(raw_pair: RawPair, suffix: str) -> None:
    prefix = raw_pair()
    refuses(InvalidArgument, prefix + suffix, "must be the common prefix", f"{prefix!r}, got")


def test_unknown_dialect(raw_pair: RawPair) -> None:
    parts = ("dialect must be one of megatron, neox, paddlenlp", "got 'fairseq'")
    refuses(InvalidArgument, raw_pair(), *parts, dialect="fairseq")


def test_not_a_regular_file(raw_pair: RawPair) -> None:
    prefix = raw_pair()
    Path(prefix + ".bin").unlink()
    Path(prefix + ".bin").mkdir()
    refuses(StorageError, prefix, "train.bin: cannot map: not a regular file", "check the path")


def test_wrong_magic(raw_pair: RawPair) -> None:
    refuses(
        FormatError,
        raw_pair(magic=b"PK\3\4....."),
        "train.idx: must begin with b'MMIDIDX\\x00\\x00'",
        "got b'PK\\x03\\x04.....'",
        "check the path",
    )


def test_the_old_format_is_named(raw_pair: RawPair) -> None:
    prefix = raw_pair(magic=b"TNTIDX\0\0\1")
    refuses(FormatError, prefix, "the old 'lazy'/'cached' format", "--dataset-impl mmap")


def test_wrong_version(raw_pair: RawPair) -> None:
    prefix = raw_pair(version=2)
    refuses(FormatError, prefix, "train.idx: must have format version 1, got 2", "restore")


@pytest.mark.parametrize("code", [0, 11, 255])
def test_unknown_dtype_code(raw_pair: RawPair, code: int) -> None:
    parts = ("train.idx: dtype code must be one of", "8 uint16", f"got {code}", "restore the file")
    refuses(FormatError, raw_pair(code=code), *parts)


def test_dtype_code_of_another_dialect(raw_pair: RawPair) -> None:
    refuses(
        FormatError, raw_pair(code=9), "dtype code", "got 9", "open it with dialect='paddlenlp'"
    )


@pytest.mark.parametrize("size", [0, 1, 33])
def test_index_shorter_than_its_header(raw_pair: RawPair, size: int) -> None:
    refuses(FormatError, raw_pair(cut=size), "a header of 34 bytes", f"got {size} bytes", "restore")


@pytest.mark.parametrize("change", [{"cut": 60}, {"cut": -1}, {"tail": b"x"}, {"tail": b"1234"}])
def test_truncated_or_over_long_index(raw_pair: RawPair, change: dict[str, Any]) -> None:
    prefix = raw_pair([3, 0, 2], **change)
    refuses(
        FormatError,
        prefix,
        "train.idx: header declares 3 sequences and 4 document bounds",
        "(34 + 12·3 + 8·4 = 102 bytes, or 105 with modes)",
        f"file has {Path(prefix + '.idx').stat().st_size}",
        "restore the file or write the pair again",
    )


@pytest.mark.parametrize("counts", [(TOO_MANY, 4), (3, TOO_MANY), (2**62, 2**61), (2, 4), (3, 5)])
def test_counts_that_the_file_cannot_hold(raw_pair: RawPair, counts: tuple[int, int]) -> None:
    declared = f"declares {counts[0]} sequences and {counts[1]} document bounds"
    refuses(FormatError, raw_pair([3, 0, 2], counts=counts), declared, "file has 102")


def test_no_document_bounds(raw_pair: RawPair) -> None:
    refuses(
        FormatError,
        raw_pair([], bounds=[]),
        "train.idx: header must declare at least 1 document bound",
    )


def test_first_document_bound(raw_pair: RawPair) -> None:
    refuses(FormatError, raw_pair(bounds=[1, 3]), "train.idx: document bound 0 must be 0, got 1")


@pytest.mark.parametrize("last", [2, 4, -1])
def test_last_document_bound(raw_pair: RawPair, last: int) -> None:
    prefix = raw_pair(bounds=[0, last])
    refuses(
        FormatError,
        prefix,
        "last document bound must be 3, the number of sequences",
        f"got {last}",
        "dialect='neox'",
    )


@pytest.mark.parametrize("last", [4, -1])
def test_last_document_bound_of_neox(raw_pair: RawPair, last: int) -> None:
    prefix = raw_pair(bounds=[0, last])
    refuses(
        FormatError, prefix, f"bound must be 3, the number of sequences, got {last}", dialect="neox"
    )


def test_multimodal_without_modes(raw_pair: RawPair) -> None:
    parts = ("train.idx: must hold 3 modes", "ends after the document bounds", "multimodal=False")
    refuses(FormatError, raw_pair(), *parts, multimodal=True)


def test_truncated_bin(raw_pair: RawPair) -> None:
    refuses(
        FormatError,
        raw_pair([3, 0, 2], data=bytes(19)),
        "train.idx: sequence 2 takes bytes 12 to 12 + 2·4 = 20 of the .bin, which has 19",
        "restore",
    )


def test_empty_bin(raw_pair: RawPair) -> None:
    refuses(FormatError, raw_pair([1], data=b""), "= 4 of the .bin, which has 0")


BAD_ENTRIES = [
    ({"lengths": [1, -1, 2]}, "sequence 1 must have a length of at least 0"),
    ({"pointers": [0, -4, 4]}, "sequence 1 takes bytes -4 to -4 + 1·4 = 0 of the .bin"),
    ({"pointers": [0, 16, 4]}, "sequence 1 takes bytes 16 to 16 + 1·4 = 20"),
    ({"pointers": [0, 2**63 - 1, 4]}, f"sequence 1 takes bytes {2**63 - 1} to"),
    ({"pointers": [0, 2**63 - 4, 4]}, f"sequence 1 takes bytes {2**63 - 4} to"),
    ({"pointers": [0, 2, 4]}, "sequence 1 begins at byte 2 of the .bin, inside a token"),
]


@pytest.mark.parametrize(("change", "rule"), BAD_ENTRIES)
def test_bad_entries_are_found_by_validate_and_by_reading(
    raw_pair: RawPair, change: dict[str, Any], rule: str
) -> None:
    prefix = raw_pair(**{"lengths": [1, 1, 2], "pointers": [0, 4, 8], "data": bytes(16), **change})
    dataset = IndexedDataset(prefix)  # opening costs O(1) and cannot see the middle
    assert dataset[0].tolist() == [0]
    for trust in (dataset.validate, dataset.validate, lambda: dataset.num_tokens):
        with pytest.raises(FormatError, match=re.escape(f"train.idx: {rule}")) as caught:
            trust()
        says(caught.value, "restore the file or write the pair again")
    for read in (lambda: dataset[1], lambda: dataset[:], lambda: dataset.get(1, 0, 0)):
        with pytest.raises(FormatError, match=re.escape(rule)):
            read()


def test_the_first_of_several_bad_entries_is_named(raw_pair: RawPair) -> None:
    """Of whatever rule."""
    faults = [(1, 16), (-1, 4), (1, 2)]  # length and pointer: outside, negative, inside a token
    for turn in range(3):
        lengths, pointers = zip((1, 0), *faults[turn:], *faults[:turn], (2, 8), strict=True)
        prefix = raw_pair(lengths, pointers=pointers, data=bytes(16), name=f"train{turn}")
        with pytest.raises(FormatError, match="sequence 1 "):
            IndexedDataset(prefix).validate()


def test_bad_last_sequence_is_found_at_open(raw_pair: RawPair) -> None:
    refuses(
        FormatError,
        raw_pair([1, -5], data=bytes(4)),
        "sequence 1 must have a length of at least 0, got -5",
    )


@pytest.mark.parametrize(
    ("bounds", "rule", "found"),
    [
        ([0, 2, 1, 3], "document bound 2 must be from 2", "got 1"),
        ([0, 4, 3], "document bound 1 must be from 0", "got 4"),
        ([0, -1, 3], "document bound 1 must be from 0", "got -1"),
    ],
)
def test_bad_document_bounds(raw_pair: RawPair, bounds: list[int], rule: str, found: str) -> None:
    dataset = IndexedDataset(raw_pair(bounds=bounds))
    with pytest.raises(FormatError) as caught:
        dataset.validate()
    says(caught.value, f"train.idx: {rule}", "3, the number of sequences", found, "restore")


def test_bad_entries_beyond_the_first_chunk(raw_pair: RawPair) -> None:
    """Validation goes in chunks of 2^17: numbers in messages count from the beginning."""
    count, bad = (1 << 17) + 10, (1 << 17) + 5
    lengths = np.zeros(count, dtype=np.int32)
    lengths[bad] = -7
    zeros = np.zeros(count, dtype=np.int64)
    with pytest.raises(FormatError, match=rf"sequence {bad} must have"):
        IndexedDataset(raw_pair(lengths, pointers=zeros, data=b"")).validate()
    bounds = np.arange(count + 1)
    bounds[1 << 17] = 3  # the first of its chunk: compared with the last of the one before
    prefix = raw_pair(zeros, pointers=zeros, bounds=bounds, data=b"")
    with pytest.raises(FormatError, match=rf"bound {1 << 17} must be from {(1 << 17) - 1}"):
        IndexedDataset(prefix).validate()


def test_success_is_remembered(raw_pair: RawPair) -> None:
    prefix = raw_pair()
    dataset = IndexedDataset(prefix)
    dataset.validate()
    with Path(prefix + ".idx").open("r+b") as stream:  # the mapping sees this
        stream.seek(34)
        stream.write(np.int32(-1).tobytes())
    assert dataset.sequence_lengths[0] == -1
    dataset.validate()
    assert dataset.num_tokens == 5


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
def test_every_entry_is_checked_however_many_there_are(
    raw_pair: RawPair, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    monkeypatch.setattr(pair, "_CHECKED", at_once)
    prefix = raw_pair()
    dataset = IndexedDataset(prefix)
    dataset.validate()
    assert dataset.num_tokens == int(dataset.sequence_lengths.sum())
    whole, count = Path(prefix + ".idx").read_bytes(), len(dataset)
    for sequence in range(count - 1):
        data = bytearray(whole)
        data[34 + 4 * sequence : 38 + 4 * sequence] = b"\xff" * 4  # a length of -1
        Path(prefix + ".idx").write_bytes(data)
        with pytest.raises(
            FormatError, match=f"sequence {sequence} must have a length of at least"
        ):
            IndexedDataset(prefix).validate()


def test_a_pair_that_is_replaced_again_and_again_is_refused(
    raw_pair: RawPair, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix, seen = raw_pair(), iter([False] * 4 + [True] + [False] * 5)
    monkeypatch.setattr(pair, "_is_in_place", lambda _: next(seen))
    pair.map_pair(prefix, "megatron", multimodal=False)
    with pytest.raises(
        StorageError, match="was replaced 5 times while it was opened; wait for the"
    ):
        pair.map_pair(prefix, "megatron", multimodal=False)
