"""build_mapping and build_blocks_mapping, on every backend, against megatron-core's."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.inputs import for_each

from megaindex.errors import InvalidArgument
from megaindex.helpers import (
    build_blocks_mapping,
    build_mapping,
    check_blocks_mapping,
    check_mapping,
)
from megaindex.kernels.reference.mapping import (
    MT19937,
    MT19937_64,
    mersenne_twister,
    short_seq_ratio,
)

INT32_MAX = 2**31 - 1
VERBOSE = False


class Corpus(NamedTuple):
    docs: np.ndarray
    sizes: np.ndarray
    titles: np.ndarray


@pytest.mark.parametrize(
    ("probability", "ratio"),
    [(0, 0), (2.0**-40, 2**32), (2.0**-32, 2**32), (2.0**-31, 2**31), (0.1, 10), (0.4, 3),
     (2 / 3, 2), (1, 1)],
)  # fmt: skip
def test_one_of_how_many_rows_is_short(probability: float, ratio: int) -> None:
    assert short_seq_ratio(probability) == ratio


def corpus_of(documents: list[list[int]], titles: list[int], skip: int = 0) -> Corpus:
    """``skip`` sentences lie before the first document and as many after the last."""
    docs = skip + np.cumsum([0, *map(len, documents)])
    sizes = [*[7] * skip, *(size for document in documents for size in document), *[7] * skip]
    return Corpus(docs.astype(np.int64), np.array(sizes, np.int32), np.array(titles, np.int32))


@st.composite
def corpora(draw: st.DrawFn) -> Corpus:
    ordinary = st.one_of(st.integers(0, 60), st.sampled_from([0, 1, 511, 512]))
    long = st.sampled_from([513, 600, INT32_MAX])
    sentences = st.one_of(ordinary, ordinary, ordinary, ordinary, ordinary, ordinary, long)
    documents = draw(
        st.lists(
            st.one_of(
                st.lists(ordinary, max_size=12),
                st.lists(sentences, max_size=3),
                st.lists(st.just(0), max_size=5),
            ),
            max_size=25,
        )
    )
    count = len(documents) + draw(st.integers(0, 2))  # the peer takes more titles than documents
    titles = draw(st.lists(st.integers(0, 90), min_size=count, max_size=count))
    return corpus_of(documents, titles, draw(st.integers(0, 3)))


EPOCHS = st.integers(0, 5)
MOST = st.one_of(st.integers(0, 80), st.sampled_from([2**31, 2**63 - 1]))
LENGTHS = st.one_of(st.integers(2, 130), st.sampled_from([2, 3, 509, INT32_MAX]))
SEEDS = st.one_of(
    st.integers(-(2**31), INT32_MAX), st.sampled_from([-(2**31), -1, 0, 1, INT32_MAX])
)
PROBABILITIES = st.one_of(
    st.sampled_from([0.0, 1.0, 0.1, 0.4, 2 / 3, 0.5, 0.01]), st.floats(1e-6, 1.0)
)


def assert_same(actual: np.ndarray, expected: np.ndarray) -> None:
    assert actual.dtype == expected.dtype
    assert actual.flags.c_contiguous
    assert actual.shape == expected.shape
    np.testing.assert_array_equal(actual, expected)


@given(corpora(), EPOCHS, MOST, LENGTHS, PROBABILITIES, SEEDS, st.integers(0, 4))
def test_build_mapping_is_the_peers(
    backend: Any,
    megatron_helpers: ModuleType,
    corpus: Corpus,
    epochs: int,
    most: int,
    length: int,
    probability: float,
    seed: int,
    least: int,
) -> None:
    arguments = (corpus.docs, corpus.sizes, epochs, most, length, probability, seed)
    check_mapping(*arguments, least)
    expected = megatron_helpers.build_mapping(*arguments, VERBOSE, least)
    assert_same(backend.map_sentences(*arguments, least), expected)


@given(corpora(), EPOCHS, MOST, LENGTHS, SEEDS, st.booleans())
@example(corpus_of([[5] * 9] * 40, [200] * 40), 3, 2**31, 64, 3, True)  # titles beyond the length
def test_build_blocks_mapping_is_the_peers(
    backend: Any,
    megatron_helpers: ModuleType,
    corpus: Corpus,
    epochs: int,
    most: int,
    length: int,
    seed: int,
    one_sentence: bool,
) -> None:
    arguments = (*corpus, epochs, most, length, seed)
    check_blocks_mapping(*arguments)
    expected = megatron_helpers.build_blocks_mapping(*arguments, VERBOSE, one_sentence)
    assert_same(backend.map_blocks(*arguments, one_sentence), expected)


@pytest.mark.slow_cases("reference")
@for_each("probability", [0.0, 0.1, 0.9, 1.0])
@for_each("least", [1, 2, 3])
def test_thousands_of_documents_refill_the_streams_and_cross_chunks(
    backend: Any,
    megatron_helpers: ModuleType,
    probability: float,
    least: int,
) -> None:
    rng = np.random.default_rng(20260101)
    docs = np.concatenate([[0], np.cumsum(rng.integers(0, 12, 1500))])
    sizes = rng.integers(0, 70, docs[-1]).astype(np.int32)
    sizes[rng.integers(0, len(sizes), 60)] = 513
    arguments = (docs, sizes, 2, 2**40, 100, probability, 1234)
    expected = megatron_helpers.build_mapping(*arguments, VERBOSE, least)
    assert len(expected) > 3000
    assert_same(backend.map_sentences(*arguments, least), expected)

    titles = rng.integers(0, 20, 1500).astype(np.int32)
    arguments = (docs, sizes, titles, 2, 2**40, 100, 1234)
    expected = megatron_helpers.build_blocks_mapping(*arguments, VERBOSE, least == 1)
    assert_same(backend.map_blocks(*arguments, least == 1), expected)


@for_each(
    ("most", "samples"), [(0, 0), (1, 3), (3, 3), (4, 6), (12, 12), (99, 12), (2**63 - 1, 12)]
)
@for_each("probability", [0.0, 0.5])
def test_only_a_new_epoch_asks_whether_there_are_enough_samples(
    backend: Any, most: int, samples: int, probability: float
) -> None:
    corpus = corpus_of([[5, 5], [5, 5], [], [5, 5], [5]], [0] * 5)
    rows = backend.map_sentences(corpus.docs, corpus.sizes, 4, most, 32, probability, 1, 2)
    blocks = backend.map_blocks(*corpus, 4, most, 32, 1, False)
    assert rows.shape == (samples, 3)
    assert blocks.shape == (samples, 4)
    starts, times = np.unique(rows[:, 0], return_counts=True)
    assert starts.tolist() == ([0, 2, 4] if samples else [])
    assert set(times.tolist()) <= {samples // 3}


def test_min_num_sent_is_two_by_default(backend: Any) -> None:
    corpus = corpus_of([[5], [5, 5], [5, 5, 5]], [0] * 3)
    arguments = (corpus.docs, corpus.sizes, 1, 10, 64, 0.0, 1)
    assert_same(backend.map_sentences(*arguments), backend.map_sentences(*arguments, 2))
    assert len(backend.map_sentences(*arguments)) == 2


@for_each("documents", [[], [[]], [[5]], [[600, 5], [], [5, 600]]])
def test_a_corpus_without_a_fitting_document_ends_at_once(
    backend: Any, documents: list[list[int]]
) -> None:
    # The peer goes over the documents num_epochs times; Megatron asks for 2**31 - 2 epochs.
    corpus = corpus_of(documents, [0] * len(documents))
    rows = backend.map_sentences(corpus.docs, corpus.sizes, 2**31 - 2, 10, 64, 0.1, 1, 2)
    assert (rows.dtype, rows.shape) == (np.uint32, (0, 3))
    blocks = backend.map_blocks(*corpus, 2**31 - 2, 10, 64, 1, False)
    assert (blocks.dtype, blocks.shape) == (np.uint32, (0, 4))


def test_one_long_sentence_is_a_sample_but_not_a_block(backend: Any) -> None:
    corpus = corpus_of([[600]], [0])
    rows = backend.map_sentences(corpus.docs, corpus.sizes, 1, 10, 64, 0.0, 1, 1)
    assert rows.tolist() == [[0, 1, 64]]
    assert backend.map_blocks(*corpus, 1, 10, 64, 1, True).shape == (0, 4)


@for_each("length", [2, 1000, INT32_MAX])
@for_each("seed", [0, 1, 2, 3, 12345])
def test_rare_short_samples_are_exact_where_the_peers_ratio_overflows(
    backend: Any, seed: int, length: int
) -> None:
    # One in `word` samples is short: the first draw, `word` itself, makes one. The peer keeps the
    # ratio in 32 signed bits, so from 2**31 on its samples are short only where a word is 0.
    word = next(mersenne_twister(MT19937, seed))
    corpus = corpus_of([[5, 5]], [0])
    target = {}
    for ratio in (word - 1, word, word + 1, 2**32, 2**40):
        rows = backend.map_sentences(corpus.docs, corpus.sizes, 1, 9, length, 1 / ratio, seed, 2)
        target[ratio] = rows[0, 2]
    assert target.pop(word) == 2 + word % (length - 1)
    assert set(target.values()) == {length}


@pytest.mark.not_quick
def test_rows_are_64_bits_wide_beyond_32_bit_sentences(
    backend: Any, megatron_helpers: ModuleType, tmp_path: Path
) -> None:
    # 2**32 sentences of no tokens: a file with a hole, of which only the last page is touched.
    num_sentences = 2**32
    path = tmp_path / "sizes"
    sizes = np.asarray(np.memmap(path, np.int32, "w+", shape=(num_sentences,)))
    sizes[-8:] = 30
    docs = num_sentences - np.array([8, 8, 5, 0])
    titles = np.array([0, 3, 4], np.int32)
    arguments = (docs, sizes, 3, 2**40, 50, 0.5, 5)
    rows = backend.map_sentences(*arguments, 2)
    assert_same(rows, megatron_helpers.build_mapping(*arguments, VERBOSE, 2))
    assert rows.dtype == np.uint64
    assert rows.max() == num_sentences
    arguments = (docs, sizes, titles, 3, 2**40, 50, 5)
    blocks = backend.map_blocks(*arguments, True)
    assert_same(blocks, megatron_helpers.build_blocks_mapping(*arguments, VERBOSE, True))
    assert blocks.dtype == np.uint64
    path.unlink()


def test_the_reference_streams_are_those_of_the_cpp_standard() -> None:
    # [rand.predef]: the 10000th word of the default seed
    assert next(islice(mersenne_twister(MT19937, 5489), 9999, None)) == 4123659995
    assert next(islice(mersenne_twister(MT19937_64, 5489), 9999, None)) == 9981545732273789042


VALID: dict[str, Any] = {
    "docs": np.array([0, 2, 4]),
    "sizes": np.array([5, 5, 5, 5], np.int32),
    "num_epochs": 1,
    "max_num_samples": 10,
    "max_seq_length": 64,
    "seed": 1,
}
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"docs": np.array([], np.int64)}, "docs must hold the first sentence"),
    ({"docs": np.array([0, 5])}, "docs must stay within the 4 sentences of sizes, got 0 to 5"),
    ({"docs": np.array([-1, 2])}, "docs must stay within"),
    ({"docs": np.array([0, 3, 2, 4])}, r"not decrease, got docs\[1\] = 3 and docs\[2\] = 2"),
    ({"docs": np.array([[0, 2]])}, r"docs must have one dimension, got shape \(1, 2\)"),
    ({"docs": np.array([0.5, 2.0])}, "docs must hold integers, got float64"),
    ({"sizes": np.array([5, -1, 5, 5])}, "sizes must be from 0 to 2147483647 tokens, got -1"),
    ({"sizes": np.array([5, 2**31, 5, 5])}, "sizes must be from 0 .* got 2147483648"),
    ({"sizes": np.array([5.0, 5.0, 5.0, 5.0])}, "sizes must hold integers"),
    ({"num_epochs": -1}, "num_epochs must be from 0 to 2147483647, got -1"),
    ({"num_epochs": 1.0}, "num_epochs must be an integer, got 1.0"),
    ({"num_epochs": 2**31}, "num_epochs must be from 0"),
    ({"max_num_samples": -1}, "max_num_samples must be from 0"),
    ({"max_num_samples": 2**64}, "max_num_samples must be from 0"),
    ({"max_seq_length": 0}, "max_seq_length must be from 1"),
    ({"max_seq_length": 2**31}, "max_seq_length must be from 1"),
    ({"seed": 2**31}, "seed must be from -2147483648 to 2147483647, got 2147483648"),
    ({"seed": -(2**31) - 1}, "seed must be from"),
    (
        {
            "sizes": np.broadcast_to(np.int8(1), 2**33),
            "num_epochs": INT32_MAX,
            "max_num_samples": 2**63,
        },
        "more than any memory holds",
    ),
]


@for_each(("change", "message"), REFUSED)
def test_both_functions_refuse(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        build_mapping(**{**VALID, **change}, short_seq_prob=0.1)
    titles = np.array([1, 1, 1], np.int32)
    with pytest.raises(InvalidArgument, match=message):
        build_blocks_mapping(**{**VALID, **change}, titles_sizes=titles, use_one_sent_blocks=True)


@for_each(
    "change",
    [
        {"sizes": np.array([0, 2**31 - 1, 5, 5])},
        {"num_epochs": 0},
        {"num_epochs": INT32_MAX},
        {"max_num_samples": 0},
        {"max_seq_length": INT32_MAX},
        {"seed": 2**31 - 1},
        {"seed": -(2**31)},
        # no memory behind them: samples of 32 bytes that 64 bits can just count
        {
            "sizes": np.broadcast_to(np.int8(1), 2**29 - 4),
            "num_epochs": INT32_MAX,
            "max_num_samples": 2**58 - 1 - (2**29 - 4),
        },
    ],
)
def test_both_functions_take_numbers_up_to_their_bounds(change: dict[str, Any]) -> None:
    check_mapping(**{**VALID, **change}, short_seq_prob=0.1, min_num_sent=0)
    check_blocks_mapping(**{**VALID, **change}, titles_sizes=np.array([1, 2**31 - 1]))


@for_each(
    ("change", "message"),
    [
        ({"short_seq_prob": -0.1}, "short_seq_prob must be from 0 to 1, got -0.1"),
        ({"short_seq_prob": 1.5}, "short_seq_prob must be from 0 to 1"),
        ({"short_seq_prob": np.array([0.1, 0.2])}, "short_seq_prob must be from 0 to 1"),
        ({"short_seq_prob": "0.1"}, "short_seq_prob must be from 0 to 1"),
        ({"short_seq_prob": float("nan")}, "short_seq_prob must be from 0 to 1, got nan"),
        # the peer divides by max_seq_length - 1, and the process ends
        (
            {"short_seq_prob": 0.5, "max_seq_length": 1},
            r"drawn from \[2, max_seq_length\], got "
            r"max_seq_length 1; raise it",
        ),
        ({"min_num_sent": -1}, "min_num_sent must be from 0"),
    ],
)
def test_check_mapping_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        check_mapping(**{**VALID, "short_seq_prob": 0.1, **change})


@for_each(
    ("change", "message"),
    [
        ({"titles_sizes": np.array([1], np.int32)}, "2 documents need as many titles, got 1"),
        ({"titles_sizes": np.array([1, -3])}, "titles_sizes must be from 0 .* got -3"),
        # no memory behind it: one zero, seen 2**32 + 2 times
        ({"docs": np.broadcast_to(np.int64(0), 2**32 + 2)}, "leave out the empty documents"),
        (
            {
                "docs": np.broadcast_to(np.int64(0), 2**32 + 2),
                "sizes": np.broadcast_to(np.int8(1), 2**32 - 1),
            },
            "documents do not fit the 32-bit rows of 4294967295 sentences",
        ),
    ],
)
def test_check_blocks_mapping_refuses(change: dict[str, Any], message: str) -> None:
    titles = np.array([1, 1], np.int32)
    arguments = {**VALID, "titles_sizes": titles, **change}
    with pytest.raises(InvalidArgument, match=message):
        check_blocks_mapping(**arguments)


def test_samples_of_one_token_need_no_draw(backend: Any, megatron_helpers: ModuleType) -> None:
    corpus = corpus_of([[1, 1, 1, 1], [0, 2, 1]], [0, 1])
    arguments = (corpus.docs, corpus.sizes, 2, 2**64 - 1, 1, 0.0, 1)
    check_mapping(*arguments)
    assert_same(
        backend.map_sentences(*arguments, 1),
        megatron_helpers.build_mapping(*arguments, VERBOSE, 1),
    )
    arguments = (*corpus, 2, 2**64 - 1, 1, 1)
    check_blocks_mapping(*arguments)
    assert_same(
        backend.map_blocks(*arguments, True),
        megatron_helpers.build_blocks_mapping(*arguments, VERBOSE, True),
    )
