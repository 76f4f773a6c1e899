"""GPT-NeoX's packings of whole documents against what its own code built."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each
from support.neox_corpora import GOLDEN, write_corpus_and_companions, write_pair

import megaindex
from megaindex.errors import FormatError, InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index import spans as spans_module
from megaindex.index.order_settings import NeoxDocumentsOrder, PackImpl
from megaindex.index.orders import framework as packing

PACK_IMPLS: tuple[PackImpl, ...] = ("unpacked", "pack_until_overflow")
ARRAYS = ("document_index", "sample_index", "shuffle_index")


def built(folder: Path, case: dict[str, Any], **more: Any) -> Any:
    parts = write_corpus_and_companions(folder / "c", case["sizes"], case["prompts"])
    order: str | NeoxDocumentsOrder = "neox"
    if case["pack_impl"] != "packed":
        order = NeoxDocumentsOrder(
            pack_impl=case["pack_impl"],
            allow_chopped=case["allow_chopped"],
            label_dataset=parts["label"] if case["prompts"] else None,
        )
    return megaindex.build_index(
        parts["text"], sequence_length=case["sequence_length"], seed=case["seed"], order=order,
        num_samples=case["num_samples"], documents=range(case["num_documents"]), **more,
    )  # fmt: skip


@for_each(("k", "case"), [(k, c) for k, c in enumerate(GOLDEN["indices"]) if "error" not in c])
def test_arrays_are_the_frameworks(
    backend: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, k: int, case: dict[str, Any]
) -> None:
    monkeypatch.setattr(packing, "active", lambda: backend)
    folder = tmp_path / str(k)
    folder.mkdir()
    index = built(folder, case)
    for name in ARRAYS:
        assert str(getattr(index, name).dtype) == case[name]["dtype"]
        np.testing.assert_array_equal(getattr(index, name), case[name]["values"], err_msg=name)


@pytest.mark.parametrize("case", [c for c in GOLDEN["indices"] if "error" in c])
def test_a_last_document_that_is_passed_over_ends_no_pass_in_an_error(
    case: dict[str, Any], tmp_path: Path
) -> None:
    """GPT-NeoX reads one past its shuffled documents there."""
    index = built(tmp_path, case)
    S, sizes = case["sequence_length"], case["sizes"]
    limit = S + 1
    prompts = case["prompts"] or [0] * len(sizes)
    fits = {
        d
        for d in range(case["num_documents"])
        if min(sizes[d], limit) > prompts[d] and (case["allow_chopped"] or sizes[d] <= limit)
    }
    assert set(index.document_index.tolist()) <= fits
    begins = index.sample_index[:, 0].tolist()
    for begin, end in itertools.pairwise(begins[:-1]):
        tokens = sum(sizes[d] for d in index.document_index[begin:end])
        assert tokens <= limit or end == begin + 1
        assert tokens + sizes[index.document_index[end]] > limit  # the next one did not fit
    assert begins[-1] == begins[-2] + 1 == index.document_index.size


@given(
    sizes=st.lists(st.integers(0, 30), min_size=1, max_size=20).filter(any),
    sequence_length=st.integers(1, 20),
    num_samples=st.integers(1, 30),
    pack_impl=st.sampled_from(["unpacked", "pack_until_overflow"]),
    next_token=st.booleans(),
)
def test_samples_are_whole_documents(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], sequence_length: int,
    num_samples: int, pack_impl: Any, next_token: bool,
) -> None:  # fmt: skip
    corpus = write_corpus(tmp_path_factory.mktemp("c") / "c", sizes)
    index = megaindex.build_index(
        corpus, sequence_length=sequence_length, seed=3, num_samples=num_samples,
        order=NeoxDocumentsOrder(pack_impl=pack_impl, next_token=next_token),
    )  # fmt: skip
    width = sequence_length + 1
    spans = index.locate(np.arange(num_samples))
    assert (spans.length > 0).all()
    for k in range(num_samples):
        row = int(index.shuffle_index[k])
        begin, end = index.sample_index[row : row + 2, 0]
        documents = index.document_index[begin:end].tolist()
        text = [(d, t) for d in documents for t in range(sizes[d])]
        if next_token and end < index.document_index.size and sizes[index.document_index[end]]:
            text.append((int(index.document_index[end]), 0))
        runs = slice(spans.row_splits[k], spans.row_splits[k + 1])
        read = [
            (d, o + t)
            for d, o, n in zip(
                spans.document[runs].tolist(), spans.offset[runs].tolist(),
                spans.length[runs].tolist(), strict=True,
            )
            for t in range(n)
        ]  # fmt: skip
        assert read == text[:width]


@given(
    rows=st.lists(st.lists(st.sampled_from([-100, 0, 5]), max_size=70), min_size=1, max_size=12),
    limit=st.integers(1, 80),
)
def test_documents_with_labels(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[int]], limit: int
) -> None:
    labels = write_pair(str(tmp_path_factory.mktemp("c") / "c"), np.int16, rows)
    documents = np.arange(len(rows))[::-1].copy()
    found = spans_module.documents_with_labels(labels, documents, limit)
    expected = [any(label != -100 for label in rows[d][:limit]) for d in documents]
    assert found.tolist() == expected


def test_labels_are_looked_at_in_bounded_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [[-100] * n + [1] * (n % 3 == 0) for n in range(60)]
    labels = write_pair(str(tmp_path / "c"), np.int64, rows)
    monkeypatch.setattr(spans_module, "_MOST_LABELS", 64)
    found = spans_module.documents_with_labels(labels, np.arange(60), 100)
    assert np.flatnonzero(found).tolist() == list(range(0, 60, 3))


def test_a_part_of_a_split_holds_its_own_documents(tmp_path: Path) -> None:
    """GPT-NeoX counts them from 0: its validation split is the head of the training split."""
    corpus = write_corpus(tmp_path / "c", [6] * 10)
    for pack_impl in PACK_IMPLS:
        index = megaindex.build_index(
            corpus, sequence_length=15, seed=1, num_samples=30, split="60,40", subset="valid",
            order=NeoxDocumentsOrder(pack_impl=pack_impl),
        )  # fmt: skip
        assert set(index.document_index.tolist()) == {6, 7, 8, 9}


def test_what_decides_the_arrays_is_in_the_cache_key(tmp_path: Path) -> None:
    parts = write_corpus_and_companions(tmp_path / "c", [9, 30, 4, 12], [0, 0, 4, 3])
    others = write_pair(str(tmp_path / "o"), np.int32, [[7] * n for n in (9, 30, 4, 12)])

    def entries(**settings: Any) -> int:
        order = NeoxDocumentsOrder(**settings) if settings else "neox"
        index = megaindex.build_index(
            parts["text"], sequence_length=10, seed=1, order=order, num_samples=6,
            cache_dir=tmp_path / "cache",
        )  # fmt: skip
        plain = megaindex.build_index(
            parts["text"], sequence_length=10, seed=1, order=order, num_samples=6
        )
        for name in ARRAYS:
            np.testing.assert_array_equal(getattr(index, name), getattr(plain, name))
        return len(list((tmp_path / "cache").iterdir()))

    counts = [
        entries(),
        entries(pack_impl="unpacked"),
        entries(pack_impl="pack_until_overflow"),
        entries(pack_impl="unpacked", label_dataset=parts["label"]),
        entries(pack_impl="unpacked", allow_chopped=False),
        entries(pack_impl="unpacked", label_dataset=others),  # all take part: the arrays of before
        entries(pack_impl="unpacked", next_token=False),
    ]
    assert counts == [1, 2, 3, 4, 5, 5, 5]


@for_each(
    ("given", "message"),
    [
        ({"num_samples": None}, "num_samples must be at least 1 with pack_impl unpacked"),
        ({"num_samples": None, "epochs": 2}, "give it in place of epochs"),
        ({"add_extra_token": 0}, "the order is neox with pack_impl unpacked"),
        ({"drop_last_partial": False}, "drop_last_partial is a setting of order megatron, neox"),
        ({"source_name": "a"}, "a setting of order epoch, window and packed, the order is"),
        (
            {
                "order": NeoxDocumentsOrder(pack_impl="unpacked", allow_chopped=False),
                "sequence_length": 2,
            },
            "none of the 4 documents can be served",
        ),
    ],
)
def test_what_cannot_be_asked(given: dict[str, Any], message: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [9, 30, 4, 12])
    order = NeoxDocumentsOrder(pack_impl="unpacked")
    settings = {"sequence_length": 10, "seed": 1, "order": order, "num_samples": 6, **given}
    with pytest.raises(InvalidArgument, match=message):
        megaindex.build_index(corpus, **settings)


def test_labels_of_another_text_are_refused(tmp_path: Path) -> None:
    parts = write_corpus_and_companions(tmp_path / "c", [9, 30, 4], [0, 30, 4])
    settings: dict[str, Any] = {"sequence_length": 10, "seed": 1, "num_samples": 6}
    for sizes, message in [([9, 30], "must have 3 sequences"), ([9, 29, 4], "sequence 1")]:
        labels = write_pair(str(tmp_path / f"l{sizes[1]}"), np.int32, [[1] * n for n in sizes])
        with pytest.raises(FormatError, match=message):
            megaindex.build_index(
                parts["text"],
                order=NeoxDocumentsOrder(pack_impl="unpacked", label_dataset=labels),
                **settings,
            )


def test_ids_beyond_the_samples_are_refused(tmp_path: Path) -> None:
    index = megaindex.build_index(
        write_corpus(tmp_path / "c", [9, 30, 4]), sequence_length=10, seed=1,
        num_samples=6, order=NeoxDocumentsOrder(pack_impl="unpacked"),
    )  # fmt: skip
    for wrong in (-1, 6):
        with pytest.raises(OutOfRange, match="the index holds samples 0 to 5"):
            index.locate([0, wrong])


def test_open_datasets_and_paths_are_the_same(tmp_path: Path) -> None:
    parts = write_corpus_and_companions(tmp_path / "c", [9, 30, 4], [0, 3, 4])
    prefix = str(tmp_path / "c")

    def build(text: Any, labels: Any) -> Any:
        order = NeoxDocumentsOrder(pack_impl="unpacked", label_dataset=labels)
        return megaindex.build_index(text, sequence_length=10, seed=1, num_samples=6, order=order)

    one = build(prefix, prefix + "_label")
    other = build(IndexedDataset(prefix, dialect="neox"), parts["label"])
    np.testing.assert_array_equal(one.document_index, other.document_index)


@pytest.mark.parametrize("pack_impl", PACK_IMPLS)
def test_a_pass_that_is_not_complete_is_an_epoch(tmp_path: Path, pack_impl: PackImpl) -> None:
    corpus = write_corpus(tmp_path / "c", np.full(10, 17))
    order = NeoxDocumentsOrder(pack_impl=pack_impl)
    for num_samples in range(1, 31):
        index: Any = megaindex.build_index(
            corpus, sequence_length=16, order=order, num_samples=num_samples
        )
        passes = index.num_epochs
        assert 10 * (passes - 1) < index.document_index.size <= 10 * passes
