"""Fields of batches against megatron-core's GPTDataset, and the fields that it lacks."""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.megatron_dataset import EOD, Tokenizer, megatron_dataset

import megaindex
from megaindex import Skip
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.receipts import Receipt
from megaindex.loader import (
    BatchMaker,
    GPTDataset,
    MappedTokens,
    MicroBatchSampler,
    Recorder,
    SampleOptions,
    collate,
    receipted,
)
from megaindex.loader.batch import pinned

S, SEED = 40, 4
FLAGS = ("eod_mask_loss", "reset_position_ids", "reset_attention_mask", "create_attention_mask")


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(2).integers(1, 50, 120)
    return write_corpus(tmp_path_factory.mktemp("fields") / "c", lengths, np.uint16, eod=EOD)


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    """A corpus in which id -1 occurs, which Megatron takes for padding."""
    directory, rng = tmp_path_factory.mktemp("signed"), np.random.default_rng(3)
    with megaindex.IndexedDatasetWriter(str(directory / "c"), np.int32) as writer:
        for length in rng.integers(1, 50, 120).tolist():
            writer.add_document(rng.integers(-1, 6, length).astype(np.int32))
    return IndexedDataset(str(directory / "c"))


def make_index(corpus: IndexedDataset, extra: int = 1, whole: bool = True) -> Any:
    return megaindex.build_index(
        corpus, sequence_length=S, seed=SEED, split="1,1", subset="valid",
        add_extra_token=extra, drop_last_partial=whole,
    )  # fmt: skip


def megatrons(core: Any, corpus: IndexedDataset, extra: int, whole: bool, **flags: bool) -> Any:
    return megatron_dataset(
        core, corpus.path_prefix, num_samples=None, sequence_length=S, seed=SEED, split="1,1",
        subset="valid", add_extra_token_to_sequence=bool(extra),
        drop_last_partial_validation_sequence=whole, **flags,
    )  # fmt: skip


@pytest.mark.parametrize("extra", [0, 1])
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("source", ["corpus", "signed"])
def test_every_option_gives_megatrons_fields(
    request: pytest.FixtureRequest, megatron_datasets: Any, source: str, extra: int, whole: bool
) -> None:
    corpus = request.getfixturevalue(source)
    index = make_index(corpus, extra, whole)
    ids = [*range(7), int(np.argmax(index.shuffle_index))]  # the last one is padded
    for values in itertools.product([False, True], repeat=len(FLAGS)):
        flags = dict(zip(FLAGS, values, strict=True))
        theirs = megatrons(megatron_datasets, corpus, extra, whole, **flags)
        maker = BatchMaker(index, MappedTokens([corpus]), SampleOptions(eod_id=EOD, **flags))
        buffers = maker.allocate(len(ids))
        expected = {k: read_alone(theirs, k) for k in ids}
        for order in (ids, ids[::-1]):  # what the first fill leaves must not show in the second
            maker.fill(buffers, order)
            for row, k in enumerate(order):
                check_sample(buffers.arrays, row, expected[k])


def read_alone(theirs: Any, k: int | None) -> dict[str, torch.Tensor]:
    """The sample as a dataset gives it that has read no other: see the test below."""
    theirs.masks_and_position_ids_are_cached = False
    return {name: value.clone() for name, value in theirs[k].items()}


def check_sample(arrays: dict[str, np.ndarray], k: int, expected: dict[str, torch.Tensor]) -> None:
    assert sorted(arrays) == sorted(expected)
    for name, value in expected.items():
        np.testing.assert_array_equal(arrays[name][k], value, name)
        assert arrays[name].dtype == value.numpy().dtype


def test_a_padded_sample_leaves_the_others_their_loss(
    corpus: IndexedDataset, megatron_datasets: Any
) -> None:
    """megatron-core keeps the mask of the first sample it reads, and then zeroes its pads in it."""
    index = make_index(corpus, whole=False)
    padded = int(np.argmax(index.shuffle_index))
    theirs = megatrons(megatron_datasets, corpus, 1, False, create_attention_mask=False)
    dataset = GPTDataset(index, corpus)
    others = [k for k in range(len(dataset)) if k != padded]
    tail = float(theirs[padded]["loss_mask"].sum())
    assert 0 < tail == float(dataset[padded]["loss_mask"].sum()) < S
    assert {float(theirs[k]["loss_mask"].sum()) for k in others} == {tail}
    assert {float(dataset[k]["loss_mask"].sum()) for k in others} == {S}


@pytest.mark.parametrize("flags", [{}, dict.fromkeys(FLAGS, True)])
@pytest.mark.parametrize("padding", [None, -1])
def test_a_padding_row_has_no_loss(
    corpus: IndexedDataset, megatron_datasets: Any, flags: dict[str, bool], padding: int | None
) -> None:
    index = make_index(corpus)
    maker = BatchMaker(index, MappedTokens([corpus]), SampleOptions(eod_id=EOD, **flags))
    given = {"create_attention_mask": False, **flags}
    theirs = megatrons(megatron_datasets, corpus, 1, True, **given)
    buffers = maker.allocate(3)
    for ids in ([padding, 5, padding], [2, padding, 7], [padding] * 3, [1, 2, 3]):
        maker.fill(buffers, ids)
        for k, sample_id in enumerate(ids):
            if sample_id != padding:
                check_sample(buffers.arrays, k, read_alone(theirs, sample_id))
                continue
            empty = read_alone(theirs, None)
            assert sorted(empty) == sorted(buffers.arrays)
            np.testing.assert_array_equal(buffers.arrays["loss_mask"][k], empty["loss_mask"])
            assert not buffers.arrays["loss_mask"][k].any()
            assert not buffers.arrays["tokens"][k].any()
            assert not buffers.arrays["labels"][k].any()
            np.testing.assert_array_equal(buffers.arrays["position_ids"][k], np.arange(S))


@given(boundaries=st.sampled_from(["eod", "documents"]), data=st.data())
def test_cu_seqlens_are_the_documents(
    corpus: IndexedDataset, boundaries: Any, data: st.DataObject
) -> None:
    """As Megatron-LM's inter-document masking: padded with S, positions anew in each document."""
    extra = data.draw(st.integers(0, 1))
    index = make_index(corpus, extra, whole=False)
    options = SampleOptions(
        eod_id=EOD if boundaries == "eod" else None, cu_seqlens=True, boundaries=boundaries
    )
    maker = BatchMaker(index, MappedTokens([corpus]), options)
    ids = data.draw(st.lists(st.integers(0, index.num_samples - 1), min_size=1, max_size=6))
    ids.append(int(np.argmax(index.shuffle_index)))
    buffers = maker.allocate(len(ids))
    maker.fill(buffers, ids)
    batch, spans = buffers.arrays, index.locate(ids)
    assert batch["cu_seqlens"].dtype == batch["max_seqlen"].dtype == np.int32
    for k in range(len(ids)):
        runs = spans.length[spans.row_splits[k] : spans.row_splits[k + 1]].tolist()
        if boundaries == "documents":
            ends = np.cumsum(runs[:-1]).tolist()
        else:
            ends = (np.flatnonzero(batch["tokens"][k] == EOD) + 1).tolist()
        bounds = sorted({0, *(end for end in ends if end < S), S})
        assert batch["cu_seqlens"][k].tolist() == bounds + [S] * (S + 1 - len(bounds))
        assert batch["max_seqlen"][k] == max(np.diff(bounds))
        positions = np.concatenate([np.arange(size) for size in np.diff(bounds)])
        np.testing.assert_array_equal(batch["position_ids"][k], positions)


def test_documents_of_the_index_bound_the_attention(corpus: IndexedDataset) -> None:
    """Documents end with their token here, so both ways to know them agree."""
    index = make_index(corpus)
    common = {"reset_attention_mask": True, "create_attention_mask": True}
    by_token = GPTDataset(index, corpus, options=SampleOptions(eod_id=EOD, **common))
    by_run = GPTDataset(index, corpus, options=SampleOptions(boundaries="documents", **common))
    for k in range(8):
        torch.testing.assert_close(by_token[k]["attention_mask"], by_run[k]["attention_mask"])


def test_int32_tokens_are_the_same_tokens(corpus: IndexedDataset) -> None:
    index, ids = make_index(corpus, whole=False), list(range(8))
    flags = {"eod_id": EOD, "eod_mask_loss": True, "reset_position_ids": True}
    wide = GPTDataset(index, corpus, options=SampleOptions(**flags))
    narrow = GPTDataset(index, corpus, options=SampleOptions(token_dtype="int32", **flags))
    for a, b in zip(wide.__getitems__(ids), narrow.__getitems__(ids), strict=True):
        assert b["tokens"].dtype == b["labels"].dtype == torch.int32
        for name in a:
            torch.testing.assert_close(a[name], b[name].to(a[name].dtype))


def test_a_pad_id_that_the_corpus_holds(corpus: IndexedDataset, megatron_datasets: Any) -> None:
    """Where padding is the end of a document, every such label is without loss."""

    class PaddingTokenizer(Tokenizer):
        pad = EOD

    index = make_index(corpus)
    theirs = megatrons(
        megatron_datasets, corpus, 1, True, create_attention_mask=False, reset_position_ids=True
    )
    theirs._pad_token_id = PaddingTokenizer.pad
    options = SampleOptions(eod_id=EOD, pad_id=EOD, reset_position_ids=True)
    maker = BatchMaker(index, MappedTokens([corpus]), options)
    buffers = maker.allocate(10)
    maker.fill(buffers, list(range(10)))
    assert not (buffers.arrays["tokens"] == EOD).any()
    for k in range(10):
        check_sample(buffers.arrays, k, read_alone(theirs, k))


def test_a_batch_keeps_its_values_while_it_is_held(corpus: IndexedDataset) -> None:
    dataset = GPTDataset(make_index(corpus), corpus)
    ids = [[k, k + 1, k + 2] for k in range(len(dataset) - 2)]
    held = [dataset.__getitems__(three) for three in ids]
    alone = [dataset[k]["tokens"].clone() for k in range(len(dataset))]
    for three, samples in zip(ids, held, strict=True):
        for k, sample in zip(three, samples, strict=True):
            assert torch.equal(sample["tokens"], alone[k])


def test_changes_to_a_batch_do_not_show_in_later_ones(corpus: IndexedDataset) -> None:
    dataset = GPTDataset(make_index(corpus), corpus)
    before = {name: value.clone() for name, value in dataset[3].items()}
    for _ in range(6):
        sample = dataset[3]
        for value in sample.values():
            value.fill_(77)
        del sample, value
    for name, value in dataset[3].items():
        torch.testing.assert_close(value, before[name])


def test_collate_returns_the_batch_that_default_collate_copies(corpus: IndexedDataset) -> None:
    dataset = GPTDataset(make_index(corpus), corpus)
    for workers in (0, 1):
        batches = [
            list(torch.utils.data.DataLoader(dataset, 4, num_workers=workers, collate_fn=function))
            for function in (None, collate)
        ]
        for theirs, ours in zip(*batches, strict=True):
            for name in theirs:
                torch.testing.assert_close(ours[name], theirs[name])
    assert sorted(collate([dataset[0], dataset[1]])) == sorted(dataset[0])


def test_several_sources_in_one_batch(corpus: IndexedDataset, signed: IndexedDataset) -> None:
    index = megaindex.build_blend(
        [corpus, signed], weights=[1, 1], num_samples=30, sequence_length=S, seed=SEED
    )
    together = GPTDataset(index, [corpus, signed]).__getitems__(list(range(30)))
    for k, sample in enumerate(together):
        which, at = int(index.dataset_index[k]), int(index.dataset_sample_index[k])
        alone = GPTDataset(index.indices[which], [corpus, signed][which])[at]
        for name in alone:
            assert torch.equal(sample[name], alone[name]), name


def test_reused_buffers_keep_nothing_of_the_batch_before(corpus: IndexedDataset) -> None:
    """Neither the loss that was masked in a row, nor its source."""
    blend = megaindex.build_blend(
        [corpus, corpus], weights=[1, 1], num_samples=24, sequence_length=S, seed=SEED
    )
    sampler = MicroBatchSampler(
        num_samples=24, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1,
        index=blend, skip=Skip(documents=list(range(0, 120, 2)), source="1", from_step=3),
    )  # fmt: skip
    options = SampleOptions(dataset_id=True)
    maker = BatchMaker(sampler.skipped(blend), MappedTokens([corpus, corpus]), options)
    assert {0, 1} == set(blend.dataset_index[12:16].tolist())
    buffers = maker.allocate(4)
    maker.fill(buffers, [12, 13, 14, 15])
    assert 0 < buffers.arrays["loss_mask"].sum() < 4 * S
    for ids in ([0, 1, 2, 3], [12, 13, 14, 15], [None] * 4, [12, 13, 14, 15], [3, 2, None, 0]):
        fresh = maker.allocate(4)
        maker.fill(buffers, ids)
        maker.fill(fresh, ids)
        for name, values in fresh.arrays.items():
            np.testing.assert_array_equal(buffers.arrays[name], values, name)
    maker.fill(buffers, [None, 1, None, 3])
    assert buffers.arrays["dataset_id"].tolist() == [
        0,
        blend.dataset_index[1],
        0,
        blend.dataset_index[3],
    ]


def test_receipts_skip_rows_of_padding(corpus: IndexedDataset) -> None:
    index, fingerprints = make_index(corpus), [corpus_fingerprint(corpus)]
    dataset = GPTDataset(index, corpus, fingerprints=fingerprints)
    recorders = Recorder(fingerprints), Recorder(fingerprints)
    for recorder, batches in zip(recorders, ([[0, 1], [2, None]], [[0, 1, 2]]), strict=True):
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=batches)  # type: ignore[arg-type]
        assert all("receipt" not in batch for batch in receipted(loader, recorder))
    assert recorders[0].receipt == recorders[1].receipt
    assert recorders[0].receipt.count == 3
    assert recorders[0].receipt != Receipt()


def test_a_dataset_is_pickled(corpus: IndexedDataset) -> None:
    dataset = GPTDataset(make_index(corpus), corpus, options=SampleOptions(eod_id=EOD))
    dataset[0]
    other = pickle.loads(pickle.dumps(dataset))
    for name, value in dataset[5].items():
        torch.testing.assert_close(other[5][name], value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cu_seqlens": True}, "give its id as eod_id"),
        ({"eod_mask_loss": True, "boundaries": "documents"}, "give its id as eod_id"),
        ({"boundaries": "lines"}, "boundaries must be one of"),
        ({"token_dtype": "int16"}, "token_dtype must be one of"),
        ({"token_dtype": "int32", "pad_id": 2**31}, "pad_id must fit int32"),
        ({"token_dtype": "int32", "eod_id": -(2**31) - 1}, "eod_id must fit int32"),
    ],
)
def test_options_that_do_not_go_together(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SampleOptions(**options)
    for fitting in (-(2**31), 2**31 - 1):
        assert SampleOptions(token_dtype="int32", pad_id=fitting, eod_id=fitting).pad_id == fitting


def test_wrong_batches_are_refused(corpus: IndexedDataset) -> None:
    index = make_index(corpus)
    maker = BatchMaker(index, MappedTokens([corpus]))
    buffers = maker.allocate(2)
    with pytest.raises(InvalidArgument, match="sample_ids must be 2, one for each"):
        maker.fill(buffers, [1])
    with pytest.raises(InvalidArgument, match="rows must be at least 1"):
        maker.allocate(0)
    for wrong in ([0, index.num_samples], [-2, 0], [0, 1.5]):
        with pytest.raises(OutOfRange):
            maker.fill(buffers, wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="datasets must be 1, one for each"):
        BatchMaker(index, MappedTokens([]))


def test_page_locked_buffers_are_ordinary_ones_without_cuda() -> None:
    buffers = pinned(2, {"tokens": ((2, 3), "int64"), "loss_mask": ((2, 3), "float32")})
    found = {name: (array.shape, array.dtype.name) for name, array in buffers.arrays.items()}
    assert found == {"tokens": ((2, 3), "int64"), "loss_mask": ((2, 3), "float32")}


def test_the_padding_of_a_dataset_is_that_of_its_options_or_its_own(corpus: IndexedDataset) -> None:
    index = make_index(corpus)
    for own, pad_id in (({"pad_id": 5}, 5), ({}, 3), ({"pad_id": 0}, 0)):
        options = SampleOptions(pad_id=3, eod_id=EOD)
        dataset = GPTDataset(index, corpus, options=options, **own)
        assert dataset._maker.options == replace(options, pad_id=pad_id)
