"""Ten thousand datasets within the default limit on open files."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus
from support.files import open_below

from megaindex.format import IndexedDataset
from megaindex.index.spans import Spans
from megaindex.loader.positional_reader import PositionalTokens
from megaindex.loader.token_readers import MappedTokens, PrefetchingTokens, TokenReader

COUNT = 3_000


@pytest.fixture
def default_limit() -> Iterator[None]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(1024, hard), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.slow
@pytest.mark.usefixtures("default_limit")
def test_ten_thousand_datasets_take_a_few_descriptors(tmp_path: Path) -> None:
    for k in range(4):
        write_corpus(tmp_path / f"written{k}", [20 + k] * 5, np.uint16)
    for number in range(COUNT):
        for suffix in (".bin", ".idx"):
            os.link(tmp_path / f"written{number % 4}{suffix}", tmp_path / f"{number}{suffix}")
    datasets = [IndexedDataset(str(tmp_path / str(number))) for number in range(COUNT)]
    assert open_below(tmp_path) == []

    source = np.random.default_rng(3).permutation(COUNT).astype(np.int32)
    # 20 tokens of sequence 2, which begins at token 2 * (20 + k)
    spans = Spans(
        source=source,
        document=np.full(COUNT, 2),
        offset=np.zeros(COUNT, np.int64),
        length=np.full(COUNT, 20),
        row_splits=np.arange(COUNT + 1),
    )
    right = 2 * (20 + source % 4)[:, None] + np.arange(20)
    mapped = MappedTokens(datasets)
    positional = PositionalTokens(datasets)
    readers: list[TokenReader] = [mapped, PrefetchingTokens(datasets), positional]
    for reader in readers:
        out = np.zeros((COUNT, 20), np.int64)
        reader.read(spans, out, pad_id=-1)
        np.testing.assert_array_equal(out, right)
        assert len(open_below(tmp_path)) <= 64
    positional.close()
    assert open_below(tmp_path) == []
