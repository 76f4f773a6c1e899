"""The three arrays against megatron-core's GPTDataset."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each
from support.megatron_dataset import megatron_dataset

import megaindex
from megaindex.errors import FormatError
from megaindex.format import IndexedDataset
from megaindex.index.array_index import check_arrays
from megaindex.index.frameworks import SPLITS, framework_rules


def assert_equal_arrays(index: Any, theirs: Any) -> None:
    for name in ("document_index", "sample_index", "shuffle_index"):
        ours, expected = getattr(index, name), getattr(theirs, name)
        assert ours.dtype == expected.dtype, name
        np.testing.assert_array_equal(ours, expected, err_msg=name)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    generator = np.random.default_rng(1)
    lengths = generator.integers(0, 90, 400)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths)


@given(
    num_samples=st.none() | st.integers(1, 4000),
    sequence_length=st.integers(2, 100),
    seed=st.integers(0, 2**32 - 1),
    split=st.sampled_from(["1", "969,30,1", "8,1,1", "50,50", "99,0,1"]),
    subset=st.sampled_from(SPLITS),
    extra=st.booleans(),
    drop=st.booleans(),
)
def test_arrays_are_gptdatasets(
    corpus: IndexedDataset,
    megatron_datasets: Any,
    num_samples: int | None,
    sequence_length: int,
    seed: int,
    split: str,
    subset: str,
    extra: bool,
    drop: bool,
) -> None:
    begin, end = framework_rules("megatron").split_bounds(split, len(corpus))[SPLITS.index(subset)]
    tokens = int(corpus.sequence_lengths[begin:end].sum())
    if tokens < sequence_length + extra:
        with pytest.raises(megaindex.InvalidArgument, match=r"one sample needs|selects none"):
            megaindex.build_index(
                corpus, sequence_length=sequence_length, seed=seed, split=split, subset=subset,
                add_extra_token=int(extra),
            )  # fmt: skip
        return
    if subset == "valid" and not drop and corpus.sequence_lengths[begin:end].min() == 0 and extra:
        return  # the peer fails its own assertion where empty documents come last
    theirs = megatron_dataset(
        megatron_datasets, corpus.path_prefix, num_samples=num_samples,
        sequence_length=sequence_length, seed=seed, split=split, subset=subset,
        add_extra_token_to_sequence=extra, drop_last_partial_validation_sequence=drop,
    )  # fmt: skip
    ours = megaindex.build_index(
        corpus, num_samples=num_samples, sequence_length=sequence_length, seed=seed, split=split,
        subset=subset, add_extra_token=int(extra),
        drop_last_partial=drop if subset == "valid" else True,
    )  # fmt: skip
    assert_equal_arrays(ours, theirs)
    assert ours.num_samples == len(theirs)


@given(epochs=st.fractions(1, 4), seed=st.integers(0, 9))
def test_locate_reads_what_gptdataset_reads(
    corpus: IndexedDataset, megatron_datasets: Any, epochs: Any, seed: int
) -> None:
    ours = megaindex.build_index(corpus, epochs=epochs, sequence_length=64, seed=seed)
    wanted = int((epochs * corpus.num_tokens - 1) // 64)
    theirs = megatron_dataset(
        megatron_datasets, corpus.path_prefix, num_samples=wanted, sequence_length=64, seed=seed
    )
    assert_equal_arrays(ours, theirs)
    ids = np.random.default_rng(seed).integers(0, ours.num_samples, 20)
    spans = ours.locate(ids)
    for k, sample in enumerate(ids.tolist()):
        expected, _ = theirs._query_document_sample_shuffle_indices(sample)
        rows = slice(spans.row_splits[k], spans.row_splits[k + 1])
        pieces = zip(spans.document[rows], spans.offset[rows], spans.length[rows], strict=True)
        actual = np.concatenate([corpus.get(d, o, n) for d, o, n in pieces])
        np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("backend_name", ["reference", "numba", "native"])
def test_every_backend_builds_the_same(
    corpus: IndexedDataset, backend_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megaindex.index.orders import framework as shuffled
    from megaindex.kernels import load

    expected = megaindex.build_index(corpus, epochs="2.3", sequence_length=32, seed=5)
    monkeypatch.setattr(shuffled, "active", lambda: load(backend_name))
    assert_equal_arrays(
        megaindex.build_index(corpus, epochs="2.3", sequence_length=32, seed=5), expected
    )


def test_locate_refuses_samples_that_do_not_exist(corpus: IndexedDataset) -> None:
    index = megaindex.build_index(corpus, sequence_length=32, seed=1)
    for wrong in (index.num_samples, -1):
        with pytest.raises(megaindex.OutOfRange, match=f"sample {wrong} does not exist"):
            index.locate([0, wrong])
    with pytest.raises(megaindex.OutOfRange, match="integers in one dimension"):
        index.locate([0.5])
    source, document, offset, length = index.locate([])
    assert source.size == document.size == offset.size == length.size == 0


@for_each(
    ("arguments", "message"),
    [
        ({"sequence_length": 0}, "sequence_length must be from 1"),
        ({"seed": -1}, r"seed must be from 0 to 2\*\*32 - 1"),
        ({"num_samples": 0}, "num_samples must be at least 1"),
        ({"num_samples": 5, "epochs": 1}, "num_samples and epochs must not be given together"),
        ({"epochs": "two"}, "epochs must be a positive number"),
        ({"epochs": 0}, "epochs must be a positive number"),
        ({"order": "random"}, "order must be one of megatron, neox"),
        ({"documents": [0, 400]}, "documents must be from 0 to 399, got 400"),
        ({"documents": [0.5]}, "documents must be integers in one dimension"),
        ({"documents": [0, 2**31 - 1]}, "must be from 0 to 399, got 2147483647"),
        ({"documents": [2**31, 0]}, r"documents must be from 0 and below 2\*\*31, got 2147483648"),
        ({"documents": [], "order": "neox"}, "selects none of the 400 sequences"),
        ({"documents": [1], "split": "1"}, "give one of them"),
        ({"split": "1,2,3,4"}, "split must be"),
        ({"split": "1", "subset": "dev"}, "subset must be one of train, valid, test, got 'dev'"),
        ({"documents": range(2)}, "tokens, one sample needs 1025"),
        ({"add_extra_token": 2}, "add_extra_token must be 0 or 1"),
    ],
)
def test_bad_arguments_are_named(
    corpus: IndexedDataset, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(megaindex.InvalidArgument, match=message):
        megaindex.build_index(corpus, **{"sequence_length": 1024, "seed": 1, **arguments})


@for_each("num_samples", [1, 3, 10])
@for_each("extra", [0, 1])
def test_a_sample_may_need_several_epochs(
    tmp_path: Path, megatron_datasets: Any, num_samples: int, extra: int
) -> None:
    """10 tokens, samples of 31: Megatron goes on through the next epochs, and so do we."""
    corpus = write_corpus(tmp_path / "c", [3, 0, 5, 2])
    theirs = megatron_dataset(
        megatron_datasets, corpus.path_prefix, num_samples=num_samples, sequence_length=31, seed=4,
        split="1", subset="train", add_extra_token_to_sequence=bool(extra),
    )  # fmt: skip
    settings: Any = {"sequence_length": 31, "seed": 4, "add_extra_token": extra}
    assert_equal_arrays(megaindex.build_index(corpus, num_samples=num_samples, **settings), theirs)
    with pytest.raises(megaindex.InvalidArgument, match="hold 10 tokens, one sample needs"):
        megaindex.build_index(corpus, epochs=1, **settings)


@pytest.mark.parametrize("documents", [None, range(10, 60), [7, 3, 41, 3, 20]])
def test_arrays_of_several_epochs_are_checked(tmp_path: Path, documents: Any) -> None:
    """A document in the place of another of its length is found by its number alone."""
    corpus = write_corpus(tmp_path / "c", np.full(80, 40))
    index: Any = megaindex.build_index(corpus, sequence_length=16, epochs=3, documents=documents)
    names = ("document_index", "sample_index", "shuffle_index")
    arrays = {name: getattr(index, name).copy() for name in names}
    check_arrays(index.request, corpus.sequence_lengths, **arrays)
    order = arrays["document_index"]
    order[0] = order[order != order[0]][0]
    with pytest.raises(FormatError, match=r"document_index must contain each of \d+ documents 3"):
        check_arrays(index.request, corpus.sequence_lengths, **arrays)


@for_each("order", ["megatron", "neox", "epoch", "window", "packed"])
@for_each("asked", [{}, {"epochs": 3}, {"num_samples": 5}])
def test_documents_without_tokens_are_refused(
    tmp_path: Path, order: str, asked: dict[str, int]
) -> None:
    corpus = write_corpus(tmp_path / "c", np.array([40, 0, 0, 40]))
    with pytest.raises(megaindex.InvalidArgument, match="tokens|no document gives a sample"):
        megaindex.build_index(
            corpus, sequence_length=16, order=order, documents=range(1, 3), **asked
        )
