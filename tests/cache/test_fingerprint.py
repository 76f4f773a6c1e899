"""What identifies a corpus: its shape whole, its tokens sampled or whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.cache import fingerprint as module
from megaindex.cache.fingerprint import (
    CHUNK_BYTES,
    CHUNKS,
    content_fingerprint,
    corpus_fingerprint,
)
from megaindex.errors import StorageError

SAMPLED = CHUNKS * CHUNK_BYTES


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Offsets and lengths that were read of a .bin."""
    seen: list[tuple[int, int]] = []
    read = module.read_ranges

    def noted(facts: Any, ranges: Any) -> None:
        seen.extend((offset, len(into)) for offset, into in ranges)
        read(facts, ranges)

    monkeypatch.setattr(module, "read_ranges", noted)
    return seen


def both(prefix: Path) -> tuple[str, str]:
    dataset = IndexedDataset(str(prefix))
    return content_fingerprint(dataset), content_fingerprint(dataset, whole=True)


@pytest.mark.parametrize("tokens", [0, 1, SAMPLED // 4, SAMPLED // 4 + 1, 200_003])
def test_what_is_read_of_a_file(tmp_path: Path, tokens: int, reads: list[tuple[int, int]]) -> None:
    dataset = write_corpus(tmp_path / "c", [tokens])
    content_fingerprint(dataset)
    assert sum(length for _, length in reads) <= SAMPLED + 8
    if dataset.nbytes <= SAMPLED:
        assert sum(length for _, length in reads) == dataset.nbytes
    else:
        begins, lengths = np.array(reads).T
        assert len(begins) == CHUNKS
        assert begins[0] == 0
        assert begins[-1] + lengths[-1] == dataset.nbytes
        assert np.ptp(np.diff(begins)) <= 16  # at equal distances
        assert (begins[:-1] + lengths[:-1] <= begins[1:]).all()
    reads.clear()
    content_fingerprint(dataset)  # of the same open dataset: known
    assert reads == []
    content_fingerprint(dataset, whole=True)
    assert sum(length for _, length in reads) == dataset.nbytes


def test_pieces_do_not_enter_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_corpus(tmp_path / "c", [70_001, 80_002])
    before = both(tmp_path / "c")
    monkeypatch.setattr(module, "_PIECE", 4096)
    assert both(tmp_path / "c") == before


def test_changed_bytes_are_seen_where_they_are_read(tmp_path: Path) -> None:
    dataset = write_corpus(tmp_path / "c", [200_000])
    sampled, whole = both(tmp_path / "c")
    assert sampled != whole
    path = tmp_path / "c.bin"
    content = path.read_bytes()
    distance = (dataset.nbytes - CHUNK_BYTES) // (CHUNKS - 1)
    for at, is_seen in ((3 * distance + 100, True), (3 * distance + CHUNK_BYTES + 100, False)):
        path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        changed = both(tmp_path / "c")
        assert changed[1] != whole
        assert (changed[0] != sampled) == is_seen
    path.write_bytes(content)
    assert both(tmp_path / "c") == (sampled, whole)


def test_type_and_copies(tmp_path: Path) -> None:
    tokens = np.arange(300) % 100
    found = []
    for name, dtype in (("a", np.int32), ("b", np.float32), ("copy", np.int32)):
        with IndexedDatasetWriter(str(tmp_path / name), dtype) as writer:
            writer.add_document(tokens.astype(dtype) if name != "b" else
                                tokens.astype(np.int32).view(np.float32))  # fmt: skip
        found.append(both(tmp_path / name))
    assert (tmp_path / "a.bin").read_bytes() == (tmp_path / "b.bin").read_bytes()
    assert found[0] == found[2]
    assert found[0][0] != found[1][0]


def test_a_file_that_was_replaced_is_refused(tmp_path: Path) -> None:
    dataset = write_corpus(tmp_path / "c", [500])
    write_corpus(tmp_path / "other", [500])
    os.utime(tmp_path / "other.bin", ns=(1, 1))
    os.replace(tmp_path / "other.bin", tmp_path / "c.bin")
    with pytest.raises(StorageError, match="changed since it was opened"):
        content_fingerprint(dataset)


def test_lengths_of_an_open_dataset_are_hashed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prefix = write_corpus(tmp_path / "c", [5, 9, 2]).path_prefix
    hashed: list[int] = []
    real = module.array_bytes
    monkeypatch.setattr(module, "array_bytes", lambda array: (hashed.append(1), real(array))[1])
    dataset = IndexedDataset(prefix)
    first = corpus_fingerprint(dataset)
    assert corpus_fingerprint(dataset) == first
    assert len(hashed) == 2  # lengths and bounds
    assert corpus_fingerprint(IndexedDataset(prefix)) == first
    assert len(hashed) == 4
