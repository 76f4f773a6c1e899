"""More than 2^31 tokens and 2^32 bytes: sparse files, so nothing large is written."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_sparse_corpus

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import InvalidArgument
from megaindex.format.sink import IndexSpool

RawPair = Callable[..., str]
LONGEST = 2**31 - 1


def test_reading_past_two_to_the_31(tmp_path: Path, megatron_datasets: Any) -> None:
    """Two sequences of uint16: one of 2^31 - 1 tokens, then 20 that begin near 4 GiB."""
    begin = 2 * LONGEST
    dataset = write_sparse_corpus(tmp_path / "train", [LONGEST, 20], last=range(20))
    assert dataset.num_tokens == 2**31 + 19
    assert dataset.sequence_pointers.tolist() == [0, begin]
    assert dataset[1].tolist() == list(range(20))
    assert dataset.get(1, 15).tolist() == [15, 16, 17, 18, 19]
    assert dataset.get(0, LONGEST - 3).tolist() == [0, 0, 0]
    peer = megatron_datasets.IndexedDataset(str(tmp_path / "train"))
    np.testing.assert_array_equal(peer[1], dataset[1])
    np.testing.assert_array_equal(peer.get(1, 15), dataset.get(1, 15))


def test_pointers_past_two_to_the_31(tmp_path: Path) -> None:
    spool = IndexSpool(str(tmp_path), multimodal=False)
    spool.open()
    lengths = np.full(5, LONGEST)
    spool.add_sequences(lengths, None)
    spool.add_bounds(np.array([5]))
    out = io.BytesIO()
    spool.assemble(out, dtype_code=5, itemsize=8)
    spool.close()
    pointers = np.frombuffer(out.getvalue(), dtype=np.int64, count=5, offset=34 + 5 * 4)
    assert pointers.tolist() == [i * LONGEST * 8 for i in range(5)]


def test_totals_past_two_to_the_32_are_exact(raw_pair: RawPair) -> None:
    """Sequences may share their bytes, so a small .bin can hold a large sum."""
    count = 70_000
    tokens = 65_536
    prefix = raw_pair(
        np.full(count, tokens, dtype=np.int32),
        pointers=np.zeros(count, dtype=np.int64),
        code=1,
        data=bytes(tokens),
    )
    assert IndexedDataset(prefix).num_tokens == count * tokens > 2**32


def test_a_sequence_has_at_most_two_to_the_31_minus_1_tokens(tmp_path: Path) -> None:
    huge = np.broadcast_to(np.uint8(1), 2**31)  # one byte of memory
    with pytest.raises(InvalidArgument, match=r"lengths\[0\] must be from 0 to 2147483647"):  # noqa: SIM117
        with IndexedDatasetWriter(tmp_path / "a", np.uint8) as writer:
            writer.add_document(huge)
    assert list(tmp_path.iterdir()) == []
