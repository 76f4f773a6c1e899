"""A pass over a validation set: each sample once, over any number of ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus

import megaindex
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import InvalidArgument
from megaindex.index.receipts import fingerprint_keys, planned_receipt
from megaindex.loader import EvaluationSampler, Recorder, receipted

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/samplers.json").read_text())
COUNTS = st.one_of(st.integers(0, 12), st.integers(0, 400))


def samplers(count: int, micro: int, size: int) -> list[EvaluationSampler]:
    return [
        EvaluationSampler(
            num_samples=count, micro_batch_size=micro, data_parallel_rank=rank,
            data_parallel_size=size,
        )
        for rank in range(size)
    ]  # fmt: skip


@given(count=COUNTS, micro=st.integers(1, 5), size=st.integers(1, 6))
def test_every_sample_is_scored_once(count: int, micro: int, size: int) -> None:
    ranks = samplers(count, micro, size)
    dealt = [list(sampler) for sampler in ranks]
    rounds = -(-count // (micro * size))
    assert [len(sampler) for sampler in ranks] == [len(rank) for rank in dealt] == [rounds] * size
    assert all(len(rows) == micro for rank in dealt for rows in rank)
    rows = [row for rank in dealt for rows in rank for row in rows]
    assert sorted(row for row in rows if row is not None) == list(range(count))
    assert rows.count(None) == rounds * micro * size - count
    if micro > 1 and count >= size:
        assert all(rows.count(None) < micro for rank in dealt for rows in rank)
    assert [list(sampler) for sampler in ranks] == dealt  # the next pass is the same


def test_a_dataset_gives_padding_no_loss(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from megaindex.loader.torch_dataset import GPTDataset

    dataset = write_corpus(tmp_path / "c", [7, 90, 31, 50])
    index = megaindex.build_index(dataset, sequence_length=16, seed=1)
    fingerprints = [corpus_fingerprint(dataset)]
    samples = GPTDataset(index, dataset, fingerprints=fingerprints)
    recorder = Recorder(fingerprints)
    scored = 0.0
    for sampler in samplers(index.num_samples, 2, 4):
        loader = torch.utils.data.DataLoader(samples, batch_sampler=sampler)
        for batch in receipted(loader, recorder):
            assert batch["tokens"].shape == (2, 16)
            scored += float(batch["loss_mask"].sum())
    assert index.num_samples == 11  # of 16 rows
    assert scored == 11 * 16
    assert recorder.receipt == planned_receipt(index, 0, 11, fingerprint_keys(fingerprints))


def test_padding_is_spread_and_comes_last() -> None:
    dealt = [list(sampler) for sampler in samplers(5, 2, 2)]
    assert dealt == [[[0, 1], [3, None]], [[2, None], [4, None]]]


@pytest.mark.parametrize(
    "case", [pytest.param(c, id=str(k)) for k, c in enumerate(GOLDEN["full_validation"])]
)
def test_ranks_of_megatrons_full_validation_are_of_different_lengths(case: dict[str, Any]) -> None:
    """They run as long as the longest; one that is short starts over and scores a sample twice."""
    count, size = case["num_samples"], len(case["ranks"])
    dealt = [list(sampler) for sampler in samplers(count, 1, size)]
    assert [[rows for rows in rank if rows != [None]] for rank in dealt] == case["ranks"]
    longest = max(case["lengths"])
    assert {len(rank) for rank in dealt} == {longest}
    short = sum(longest - length for length in case["lengths"])
    assert sum(rank.count([None]) for rank in dealt) == short == -count % size


def test_wrong_numbers_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="num_samples must be at least 0"):
        samplers(-1, 1, 1)
    with pytest.raises(InvalidArgument, match="micro_batch_size must be at least 1"):
        samplers(1, 0, 1)
