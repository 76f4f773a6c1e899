"""Receipts of the batches of a DataLoader with workers and prefetching."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.index.receipts import (
    BlockReceipts,
    Receipt,
    fingerprint_keys,
    planned_block_receipts,
)
from megaindex.loader.samplers import MicroBatchSampler

torch = pytest.importorskip("torch")

from megaindex.loader.receipts import Recorder, receipted  # noqa: E402
from megaindex.loader.torch_dataset import GPTDataset  # noqa: E402


@pytest.fixture
def run(tmp_path: Path) -> Any:
    """Dataset, index, fingerprints, and a function that gives a rank's loader."""
    lengths = np.random.default_rng(6).integers(1, 90, 200)
    dataset = write_corpus(tmp_path / "c", lengths)
    index = megaindex.build_index(dataset, sequence_length=32, seed=1)
    fingerprints = [corpus_fingerprint(dataset)]
    samples = GPTDataset(index, dataset, fingerprints=fingerprints)

    def loader(rank: int, ranks: int, workers: int = 0, **more: Any) -> Any:
        batches = MicroBatchSampler(
            num_samples=index.num_samples, micro_batch_size=4, data_parallel_rank=rank,
            data_parallel_size=ranks, **more,
        )  # fmt: skip
        return torch.utils.data.DataLoader(samples, batch_sampler=batches, num_workers=workers)

    return dataset, index, fingerprints, loader


def test_ranks_add_up_to_the_plan(run: Any) -> None:
    _, index, fingerprints, loader = run
    ladders = []
    for rank in range(3):
        recorder = Recorder(fingerprints, stride=16)
        for batch in receipted(loader(rank, 3), recorder):
            assert set(batch) == {"tokens", "labels", "loss_mask", "position_ids"}
        ladders.append(recorder.ladder)
    total = sum(ladders[1:], ladders[0])
    end = index.num_samples // 12 * 12
    assert total == planned_block_receipts(index, 0, end, fingerprint_keys(fingerprints), stride=16)


def test_batches_read_ahead_do_not_count(run: Any) -> None:
    _, index, fingerprints, loader = run
    recorder = Recorder(fingerprints)
    batches = receipted(loader(0, 1, workers=1), recorder)
    handed = list(itertools.islice(batches, 5))  # the worker has read two batches more
    assert len(handed) == 5
    keys = fingerprint_keys(fingerprints)
    assert recorder.ladder == planned_block_receipts(index, 0, 20, keys)


def test_a_resumed_run_ends_with_the_receipt_of_an_unbroken_one(run: Any) -> None:
    _, index, fingerprints, loader = run
    first = Recorder(fingerprints, {"seed": 1}, stride=32)
    for _ in itertools.islice(receipted(loader(0, 1), first), 6):
        pass
    state = json.loads(json.dumps(first.state_dict()))
    assert len(json.dumps(state)) < 1000
    second = Recorder(fingerprints, {"seed": 1}, stride=32)
    second.load_state_dict(state)
    for _ in receipted(loader(0, 1, consumed_samples=24), second):
        pass
    end = index.num_samples // 4 * 4
    planned = planned_block_receipts(index, 0, end, fingerprint_keys(fingerprints), stride=32)
    assert second.ladder == planned

    skipped = Recorder(fingerprints, {"seed": 1}, stride=32)
    skipped.load_state_dict(state)
    for _ in receipted(loader(0, 1, consumed_samples=28), skipped):  # one batch too far
        pass
    assert skipped.ladder.first_difference(planned) == (0, 32)
    assert skipped.receipt.count == end - 4


def test_a_dataset_that_serves_another_sample_is_caught(
    run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt is of what was located and read, not of what the sampler asked for."""
    _, index, fingerprints, loader = run
    planned = planned_block_receipts(
        index, 0, index.num_samples // 4 * 4, fingerprint_keys(fingerprints), stride=8
    )
    right = type(index).locate

    def wrong(self: Any, ids: Any) -> Any:
        return right(self, np.where(np.asarray(ids) == 41, 40, ids))

    monkeypatch.setattr(type(index), "locate", wrong)
    recorder = Recorder(fingerprints, stride=8)
    for _ in receipted(loader(0, 1), recorder):
        pass
    assert recorder.ladder.first_difference(planned) == (40, 48)
    assert recorder.receipt.count == planned.total.count


def test_loops_without_torch_add_spans(run: Any) -> None:
    _, index, fingerprints, _ = run
    recorder = Recorder(fingerprints, stride=4)
    for ids in ([9, 8, 2], [0, 1]):
        recorder.add(ids, index.locate(ids))
    assert isinstance(recorder.ladder, BlockReceipts)
    assert {b: r.count for b, r in recorder.ladder.blocks.items()} == {0: 3, 2: 2}
    positions = np.array([0, 1, 2, 8, 9])
    keys = fingerprint_keys(fingerprints)
    assert recorder.receipt == Receipt.of(positions, index.locate(positions), keys)


def test_checkpoints_of_other_corpora_or_settings_are_refused(run: Any) -> None:
    _, index, fingerprints, _ = run
    state = Recorder(fingerprints, {"seed": 1}).state_dict()
    with pytest.raises(
        megaindex.InvalidArgument, match="parameters must be {'seed': 1}, as in the checkpoint"
    ):
        Recorder(fingerprints, {"seed": 2}).load_state_dict(state)
    with pytest.raises(megaindex.InvalidArgument, match="fingerprints must be"):
        Recorder(["0" * 32], {"seed": 1}).load_state_dict(state)
    recorder = Recorder(fingerprints)
    recorder.add([0], index.locate([0]))
    damaged = {**recorder.state_dict(), "receipt": "0" * 32}
    with pytest.raises(megaindex.FormatError, match="must be the sum of its ladder"):
        Recorder(fingerprints).load_state_dict(damaged)


def test_batches_without_receipts_are_refused() -> None:
    with pytest.raises(megaindex.InvalidArgument, match="make its GPTDataset with fingerprints"):
        next(receipted([{"tokens": 1}], Recorder(["0" * 32])))
