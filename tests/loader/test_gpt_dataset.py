"""The torch dataset against megatron-core's GPTDataset, field by field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.megatron_dataset import EOD, megatron_dataset

import megaindex
from megaindex.format import IndexedDataset
from megaindex.loader import GPTDataset, MicroBatchSampler
from megaindex.loader.batch import SampleOptions


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(2).integers(1, 60, 300)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths, np.uint16, eod=EOD)


@given(
    flags=st.tuples(*[st.booleans()] * 4),
    extra=st.booleans(),
    valid_tail=st.booleans(),
    data=st.data(),
)
def test_fields_are_megatrons(
    corpus: IndexedDataset,
    megatron_datasets: Any,
    flags: tuple[bool, bool, bool, bool],
    extra: bool,
    valid_tail: bool,
    data: st.DataObject,
) -> None:
    eod_mask_loss, reset_position_ids, reset_attention_mask, create_attention_mask = flags
    theirs = megatron_dataset(
        megatron_datasets, corpus.path_prefix, num_samples=None, sequence_length=48, seed=4,
        split="1,1", subset="valid", eod_mask_loss=eod_mask_loss,
        reset_position_ids=reset_position_ids, reset_attention_mask=reset_attention_mask,
        create_attention_mask=create_attention_mask, add_extra_token_to_sequence=extra,
        drop_last_partial_validation_sequence=not valid_tail,
    )  # fmt: skip
    index = megaindex.build_index(
        corpus, sequence_length=48, seed=4, split="1,1", subset="valid",
        add_extra_token=int(extra), drop_last_partial=not valid_tail,
    )  # fmt: skip
    options = SampleOptions(
        eod_id=EOD,
        eod_mask_loss=eod_mask_loss,
        reset_position_ids=reset_position_ids,
        reset_attention_mask=reset_attention_mask,
        create_attention_mask=create_attention_mask,
    )
    ours = GPTDataset(index, corpus, options=options)
    assert len(ours) == len(theirs)
    ids = data.draw(st.lists(st.integers(0, len(ours) - 1), min_size=1, max_size=5))
    # the last sample in the file's order is the padded one
    ids.append(int(np.argmax(index.shuffle_index)))
    for sample_id, sample in zip(ids, ours.__getitems__(ids), strict=True):
        expected = theirs[sample_id]
        assert sorted(sample) == sorted(expected)
        for name, value in expected.items():
            assert sample[name].dtype == value.dtype, name
            assert torch.equal(sample[name], value), name


def test_a_dataloader_serves_every_rank_its_micro_batches(corpus: IndexedDataset) -> None:
    index = megaindex.build_index(corpus, sequence_length=48, seed=4)
    dataset = GPTDataset(index, corpus)
    seen: list[torch.Tensor] = []
    for rank in range(3):
        sampler = MicroBatchSampler(
            num_samples=len(dataset), micro_batch_size=2, data_parallel_rank=rank,
            data_parallel_size=3,
        )  # fmt: skip
        loader = torch.utils.data.DataLoader(dataset, batch_sampler=sampler)  # type: ignore[arg-type]
        batches = [batch["tokens"] for batch in loader]
        assert len(batches) == len(sampler) == len(dataset) // 6
        assert all(batch.shape == (2, 48) for batch in batches)
        seen.extend(batches)
    served = torch.cat(seen)
    assert torch.unique(served, dim=0).shape[0] == served.shape[0] == len(dataset) // 6 * 6


def test_samples_outside_the_index_are_refused(corpus: IndexedDataset) -> None:
    dataset = GPTDataset(megaindex.build_index(corpus, sequence_length=48, seed=4), corpus)
    with pytest.raises(megaindex.OutOfRange, match="does not exist"):
        dataset[len(dataset)]


def test_masks_need_the_end_of_document_id() -> None:
    with pytest.raises(megaindex.InvalidArgument, match="give its id as eod_id"):
        SampleOptions(reset_position_ids=True)


def test_a_pointer_outside_the_bin_is_refused_when_read(tmp_path: Path) -> None:
    dataset = write_corpus(tmp_path / "c", [40, 40])
    index = megaindex.build_index(dataset, sequence_length=16, seed=1)
    raw = bytearray((tmp_path / "c.idx").read_bytes())
    first_pointer = 34 + 4 * 2
    raw[first_pointer : first_pointer + 8] = (4 * 1000).to_bytes(8, "little")
    (tmp_path / "d.idx").write_bytes(raw)
    (tmp_path / "d.bin").write_bytes((tmp_path / "c.bin").read_bytes())
    damaged = GPTDataset(index, IndexedDataset(str(tmp_path / "d")))
    with pytest.raises(
        megaindex.FormatError, match="takes bytes 4000 to .* of the .bin, which has 320"
    ):
        damaged.__getitems__(list(range(index.num_samples)))
