"""Documents of no token, of one, and of 2**31 - 1; corpora of more than 2**31 samples."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus, write_sparse_corpus
from support.inputs import for_each

import megaindex
from megaindex.index.spans import Spans
from megaindex.loader.positional_reader import PositionalTokens
from megaindex.loader.token_readers import MappedTokens

LONGEST = 2**31 - 1
ORDERS = ("megatron", "neox", "megatron-legacy", "paddlenlp", "epoch", "window")


def tokens_of(spans: Spans) -> Counter[tuple[int, int]]:
    """How often each token is read."""
    counts: Counter[tuple[int, int]] = Counter()
    for _, document, offset, length in zip(*spans, strict=True):
        counts.update((int(document), int(offset) + k) for k in range(int(length)))
    return counts


@pytest.mark.parametrize("order", ORDERS)
@given(lengths=st.lists(st.sampled_from([0, 0, 0, 1, 2, 9]), min_size=1, max_size=30))
def test_empty_documents_anywhere(
    order: str, lengths: list[int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Every token of one epoch is read once, up to what fills no sample; labels are shared."""
    total = sum(lengths)
    corpus = write_corpus(tmp_path_factory.mktemp("c") / "c", lengths, np.uint16)
    settings: dict[str, Any] = {"sequence_length": 3, "seed": 5, "order": order}
    if total < 4:
        with pytest.raises(megaindex.InvalidArgument):
            megaindex.build_index(corpus, **settings)
        return
    index = megaindex.build_index(corpus, **settings)
    samples = (total - 1) // 3
    assert index.num_samples == samples
    spans = index.locate(np.arange(samples))
    assert (spans.length >= 1).all()
    counts = tokens_of(spans)
    assert len(counts) == 3 * samples + 1
    assert max(counts.values()) <= 2
    assert sum(counts.values()) == 4 * samples


@for_each("order", ORDERS)
def test_the_shortest_and_the_longest_document_there_are(tmp_path: Path, order: str) -> None:
    corpus = write_sparse_corpus(
        tmp_path / "c", [1, 0, LONGEST, 1, LONGEST, 0, 1], last=[77], dtype=np.uint8
    )
    length = 2**22
    index = megaindex.build_index(corpus, sequence_length=length, seed=1, order=order)
    assert corpus.num_tokens == 2 * LONGEST + 3 > 2**32
    assert index.num_samples == (corpus.num_tokens - 1) // length
    spans = index.locate(np.arange(index.num_samples))
    assert (np.add.reduceat(spans.length, spans.row_splits[:-1]) == length + 1).all()
    assert (spans.offset + spans.length <= corpus.sequence_lengths[spans.document]).all()
    assert int(spans.offset.max()) > LONGEST - 3 * length


def test_both_readers_at_the_far_end(tmp_path: Path) -> None:
    """The last token of the second of two longest documents, near byte 2**32."""
    corpus = write_sparse_corpus(tmp_path / "c", [LONGEST, 1, LONGEST], last=[77], dtype=np.uint8)
    spans = Spans.of_one_source(
        np.array([0, 1, 2]), np.array([LONGEST - 2, 0, LONGEST - 2]), np.array([2, 1, 2]),
        np.array([0, 3]),
    )  # fmt: skip
    positional = PositionalTokens([corpus])
    for reader in (MappedTokens([corpus]), positional):
        out = np.full((1, 6), -1, np.int64)
        reader.read(spans, out, pad_id=9)
        assert out.tolist() == [[0, 0, 0, 0, 77, 9]]
    positional.close()


def test_more_than_two_to_the_31_samples_over_real_files(tmp_path: Path) -> None:
    """Order window with a token a sample: 4.3 thousand million samples, none of them stored."""
    corpus = write_sparse_corpus(tmp_path / "c", [LONGEST, 3, LONGEST], last=[77], dtype=np.uint8)
    index = megaindex.build_index(corpus, sequence_length=1, seed=3, order="window")
    assert index.num_samples == corpus.num_tokens - 1 == 2**32 > 2**31
    ids = np.unique(np.random.default_rng(1).integers(0, 2**32, 100_000))
    spans = index.locate(np.concatenate([ids, [2**32 - 1]]))
    begins = corpus.sequence_pointers[spans.document] + spans.offset
    first = begins[spans.row_splits[:-1]]
    assert np.unique(first).size == np.unique(ids).size + (ids[-1] != 2**32 - 1)
    assert first.max() > 2**31
    out = np.zeros((2, 2), np.int64)
    found = index.locate(ids[:2])
    MappedTokens([corpus]).read(found, out, pad_id=-1)
    assert set(out.ravel().tolist()) <= {0, 77}
    with pytest.raises(megaindex.OutOfRange):
        index.locate([2**32])
