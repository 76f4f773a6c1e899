"""Samples as GPT-NeoX's own datasets serve them, companions included."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each
from support.neox_corpora import GOLDEN, write_corpus_and_companions, write_pair

import megaindex
from megaindex import NeoxDocumentsOrder
from megaindex.errors import FormatError, OutOfRange, StorageError
from megaindex.index.blended_index import BlendedIndex
from megaindex.loader import neox_dataset
from megaindex.loader.neox_dataset import NeoxDataset, TextRows
from megaindex.loader.token_readers import MappedTokens


def single(folder: Path, case: dict[str, Any], **more: Any) -> NeoxDataset:
    folder.mkdir(exist_ok=True)
    parts = write_corpus_and_companions(folder / "c", case["sizes"], case["prompts"])
    companions = {"label": case["prompts"], "reward": case["reward"], "ref": case["ref"]}
    order: str | NeoxDocumentsOrder = "neox"
    if case["pack_impl"] != "packed":
        order = NeoxDocumentsOrder(
            pack_impl=case["pack_impl"],
            allow_chopped=case["allow_chopped"],
            label_dataset=parts["label"] if case["prompts"] else None,
            **more,
        )
    index = megaindex.build_index(
        parts["text"], sequence_length=case["sequence_length"], seed=case["seed"], order=order,
        num_samples=case["num_samples"], documents=range(case["num_documents"]),
    )  # fmt: skip
    return NeoxDataset(
        index, parts["text"], **{f"{n}_dataset": parts[n] for n, is_given in companions.items()
                                 if is_given}
    )  # fmt: skip


def assert_serves(dataset: Any, rows: list[dict[str, list[float]] | None]) -> None:
    """Where the framework serves another sample than asked for (None), nothing is compared."""
    assert len(dataset) == len(rows)
    ids = [k for k, row in enumerate(rows) if row is not None]
    together = dataset.__getitems__(ids)
    for k, sample in zip(ids, together, strict=True):
        expected, alone = rows[k], dataset[k]
        assert expected is not None
        assert set(sample) == set(alone) == set(expected)
        for name, values in expected.items():
            dtype = np.float32 if "ref" in name or name == "reward" else np.int64
            for row in (sample[name], alone[name]):
                assert row.dtype == dtype
                np.testing.assert_array_equal(row, np.asarray(values, dtype), err_msg=name)


@for_each("case", [c for c in GOLDEN["indices"] if "error" not in c])
def test_samples_are_the_frameworks(case: dict[str, Any], tmp_path: Path) -> None:
    assert_serves(single(tmp_path, case), case["served"])


def test_the_vectors_hold_every_companion() -> None:
    names = {name for c in GOLDEN["indices"] for row in c.get("served", []) for name in row or ()}
    assert names == {"text", "label", "reward", "ref"}


PACKED_DOCUMENTS = {
    "sizes": [3, 4, 2, 5], "prompts": [1, 0, 1, 2], "num_documents": 4, "sequence_length": 8,
    "seed": 7, "num_samples": 6, "allow_chopped": True, "reward": True, "ref": True,
}  # fmt: skip


@pytest.mark.parametrize("pack_impl", ["unpacked", "pack_until_overflow"])
def test_documents_alone_lose_the_first_token_of_the_next(pack_impl: str, tmp_path: Path) -> None:
    """GPT-NeoX lets it follow, with label, reward and reference value, where there is room."""
    case = {**PACKED_DOCUMENTS, "pack_impl": pack_impl}
    theirs = single(tmp_path / "theirs", case)
    alone = single(tmp_path / "alone", case, next_token=False)
    begin_of = np.cumsum([0, *case["sizes"]])
    added = 0
    for k in range(6):
        row = theirs.index.shuffle_index[k]
        begin, end = theirs.index.sample_index[row : row + 2, 0]
        size = sum(case["sizes"][d] for d in theirs.index.document_index[begin:end])
        ours, sample = alone[k], theirs[k]
        assert (ours["text"][size:] == 0).all()
        assert (ours["label"][size:] == -100).all()
        assert (ours["reward"][size:] == 0).all()
        for name in sample:
            np.testing.assert_array_equal(sample[name][:size], ours[name][:size])
        if end < theirs.index.document_index.size and size < 9:
            follower = theirs.index.document_index[end]
            assert sample["text"][size] == begin_of[follower]
            assert sample["reward"][size] == follower / 4 - 1
            assert sample["ref"][size] == -begin_of[follower] / 8
            added += 1
    assert added >= 2


@pytest.mark.parametrize("pack_impl", ["packed", "unpacked", "pack_until_overflow"])
def test_no_id_is_served_as_another(pack_impl: str, tmp_path: Path) -> None:
    dataset = single(tmp_path, {**PACKED_DOCUMENTS, "pack_impl": pack_impl})
    for wrong in (-1, len(dataset), 10**12):
        with pytest.raises(OutOfRange):
            dataset[wrong]


def test_the_last_sample_until_overflow_holds_the_document_it_began_with(tmp_path: Path) -> None:
    """GPT-NeoX finds no document after it, and serves another sample."""
    dataset = single(tmp_path, {**PACKED_DOCUMENTS, "pack_impl": "pack_until_overflow"})
    last = int(np.flatnonzero(dataset.index.shuffle_index == 5)[0])
    document = int(dataset.index.document_index[-1])
    begin, size = sum(PACKED_DOCUMENTS["sizes"][:document]), PACKED_DOCUMENTS["sizes"][document]
    expected = [*range(begin, begin + size), *[0] * (9 - size)]
    assert dataset[last]["text"].tolist() == expected


def test_labels_that_cannot_be_negative_are_padded_all_the_same(tmp_path: Path) -> None:
    text = write_pair(str(tmp_path / "t"), np.uint16, [[5, 6, 7]] * 2)
    labels = write_pair(str(tmp_path / "l"), np.uint16, [[1, 2, 3]] * 2)
    index = megaindex.build_index(
        text, sequence_length=5, seed=1, num_samples=2,
        order=NeoxDocumentsOrder(pack_impl="unpacked", label_dataset=labels, next_token=False),
    )  # fmt: skip
    sample = NeoxDataset(index, text, label_dataset=labels)[0]
    assert sample["text"].tolist() == [5, 6, 7, 0, 0, 0]
    assert sample["label"].tolist() == [1, 2, 3, -100, -100, -100]


def test_companions_that_do_not_belong_to_the_text(tmp_path: Path) -> None:
    text = write_pair(str(tmp_path / "t"), np.int32, [[5, 6, 7], [8]])
    index = megaindex.build_index(text, sequence_length=2, seed=1, order="neox", num_samples=1)
    short = write_pair(str(tmp_path / "s"), np.int32, [[5, 6], [8]])
    hollow = write_pair(str(tmp_path / "h"), np.float32, [[0.5], []])
    single_one = write_pair(str(tmp_path / "o"), np.float32, [[0.5]])
    for name, companion in [
        ("label_dataset", short), ("ref_dataset", short), ("reward_dataset", hollow),
        ("reward_dataset", single_one),
    ]:  # fmt: skip
        with pytest.raises(FormatError):
            NeoxDataset(index, text, **{name: companion})


def test_under_a_data_loader(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    dataset = single(tmp_path, {**PACKED_DOCUMENTS, "pack_impl": "unpacked"})
    loader = torch.utils.data.DataLoader(dataset, batch_size=4)
    batches = list(loader)
    assert [len(batch["text"]) for batch in batches] == [4, 2]
    whole = dataset.read(np.arange(6))
    for name, values in whole.items():
        got = torch.cat([batch[name] for batch in batches])
        np.testing.assert_array_equal(got.numpy(), values)


LENGTH = 16


def text_blend(folder: Path) -> tuple[BlendedIndex, list[megaindex.IndexedDataset]]:
    """A blend of three corpora whose tokens differ, of 99 samples."""
    corpora = [
        write_corpus(folder / f"t{k}", np.arange(1, 60 + k), np.uint16 if k else np.int32)
        for k in range(3)
    ]
    indices = tuple(
        megaindex.build_index(corpus, sequence_length=LENGTH, seed=k, order="neox")
        for k, corpus in enumerate(corpora)
    )
    blend = BlendedIndex(
        indices=indices,
        dataset_index=np.tile(np.arange(3), 33).astype(np.uint8),
        dataset_sample_index=np.repeat(np.arange(33), 3),
    )
    return blend, corpora


def located(index: Any, corpora: list[Any], ids: Any) -> np.ndarray:
    rows = np.empty((len(ids), LENGTH + 1), np.int64)
    MappedTokens(corpora).read(index.locate(ids), rows, pad_id=0)
    return rows


@for_each("most_files", [0, 2, 3])
@for_each("kind", ["blend", "index"])
def test_rows_of_text_are_the_located_ones(
    kind: str, most_files: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(neox_dataset, "_most_files", lambda: most_files)
    index: Any
    index, corpora = text_blend(tmp_path)
    if kind == "index":
        index, corpora = index.indices[0], corpora[:1]
    expected = located(index, corpora, np.arange(99))
    texts = TextRows(index, corpora)
    batches = np.arange(99).reshape(-1, 3)
    first = [texts.read(batches[0].tolist()), texts.read(batches[1].tolist())]
    with monkeypatch.context() as patch:  # from now on one kernel call reads a batch
        patch.setattr(type(index), "locate", None)
        read = [*first, *(texts.read(ids.tolist()) for ids in batches[2:])]
        np.testing.assert_array_equal(np.concatenate(read), expected)
    for wrong in ([0, 10**6], [-1], [True], [1, True], [np.True_, 1]):
        with pytest.raises(OutOfRange):
            texts.read(wrong)
    again = pickle.loads(pickle.dumps(texts))
    np.testing.assert_array_equal(again.read([7, 8]), expected[7:9])


def test_rows_of_an_order_without_arrays_are_read_in_two_steps(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    corpus = write_corpus(tmp_path / "c", [70] * 10)
    index = megaindex.build_index(corpus, sequence_length=LENGTH, order="epoch")
    texts = TextRows(index, [corpus])
    with caplog.at_level("INFO"):
        for ids in ([0, 1], [2, 3], [4, 5]):
            np.testing.assert_array_equal(texts.read(ids), located(index, [corpus], ids))
    assert caplog.text == ""


def test_a_draw_beyond_its_source_is_refused(tmp_path: Path) -> None:
    index, corpora = text_blend(tmp_path)
    index.dataset_sample_index[50] = index.indices[2].num_samples
    texts = TextRows(index, corpora)
    for _ in range(9):
        texts.read([0, 1, 2])
        with pytest.raises(OutOfRange, match="does not exist"):
            texts.read([0, 50])


def test_a_bin_that_is_cut_short_while_it_is_read_is_an_error(tmp_path: Path) -> None:
    """Through a mapping it would end the process."""
    index, corpora = text_blend(tmp_path)
    texts = TextRows(index, corpora)
    texts.read(list(range(9)))
    os.truncate(tmp_path / "t1.bin", 0)
    texts.read([0, 2])
    with pytest.raises(StorageError, match="t1.bin.*was cut short"):
        texts.read([1])


def test_a_bin_that_was_replaced_before_it_is_read_by_position(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The mapping holds the file that was opened."""
    caplog.set_level("INFO", "megaindex")
    index, corpora = text_blend(tmp_path)
    expected = located(index, corpora, np.arange(9))
    (tmp_path / "new").write_bytes(bytes((tmp_path / "t1.bin").stat().st_size))
    (tmp_path / "new").replace(tmp_path / "t1.bin")
    texts = TextRows(index, corpora)
    for _ in range(3):
        np.testing.assert_array_equal(texts.read(list(range(9))), expected)
    assert caplog.text.count("t1.bin: changed since it was opened") == 1


def test_a_damaged_idx_is_refused_as_before(tmp_path: Path) -> None:
    index, corpora = text_blend(tmp_path)
    texts = TextRows(index, corpora)
    texts.read(list(range(9)))
    with (tmp_path / "t2.idx").open("r+b") as file:  # mapped by the dataset
        file.seek(34 + 4 * len(corpora[2]))
        file.write(np.full(len(corpora[2]), 10**12).tobytes())
    with pytest.raises(FormatError, match="t2"):
        texts.read([2])
