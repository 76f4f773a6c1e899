"""Balanced steps under Megatron: its calculators of microbatches, its datasets, any rank."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_sparse_corpus
from support.megatron_blends import build, one_process, write_corpora
from support.megatron_dataset import megatron_dataset
from support.megatron_training import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    dataset_of,
    ranks,
    start,
    training,
)

import megaindex.adapters.megatron as adapter
from megaindex.adapters import status
from megaindex.adapters.megatron.__main__ import main as run_script
from megaindex.adapters.megatron.batches import samples_index
from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel, lost_time, squared_lengths

__all__ = ["training"]  # a fixture

COST = CostModel(linear=0, attention=1)


def steps(training: Any, rounds: list[list[list[int]]], consumed: int) -> list[list[int]]:
    """The samples of each step, as Megatron's training loop reads them: it asks the calculator
    before each step and counts what it has consumed."""
    calculators, args = training.calculators, training.args
    found, left = [], list(rounds)
    while left:
        calculators.update_num_microbatches(consumed, consistency_check=False)
        count = calculators.get_num_microbatches()
        now, left = left[:count], left[count:]
        found.append(sorted(sample for batches in now for batch in batches for sample in batch))
        consumed += args.micro * args.size * count
    return found


RAMPS = [
    None,
    [4, 4, 40],
    [12, 12, 20],
    "0:4 20:12 44:24",
]


@pytest.mark.parametrize("ramp", RAMPS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 4), (2, 2), (4, 1)])
def test_steps_are_those_of_the_training_loop(
    training: Any, tmp_path: Path, ramp: list[int] | str | None, shape: tuple[int, int]
) -> None:
    training.args.micro, training.args.size = shape
    dataset = dataset_of(training, tmp_path)
    total = len(dataset)
    start(training, 24, ramp)
    plain = ranks(training, dataset)
    expected = steps(training, plain, 0)
    assert (len({len(step) for step in expected[:-1]}) > 1) == (ramp is not None)
    adapter.install(balance=COST)
    start(training, 24, ramp)
    balanced = ranks(training, dataset)
    assert training.calculators.get_num_microbatches() * shape[0] * shape[1] == (
        24 if ramp is None else 4 if isinstance(ramp, str) else ramp[0]
    )  # the loaders read ahead and leave the state of training
    start(training, 24, ramp)
    assert steps(training, balanced, 0) == expected
    assert [len(batch) for row in balanced for batch in row] == [
        len(batch) for row in plain for batch in row
    ]
    # a run resumed at the end of a step goes on as if nothing had happened
    begun = len(expected[0]) + len(expected[1])
    start(training, 24, ramp)
    rounds = begun // (shape[0] * shape[1])
    assert ranks(training, dataset, begun) == balanced[rounds:]
    # the largest of each step first, and even rounds
    squares = squared_lengths(samples_index(dataset), np.arange(total)).astype(float)

    def lost(rounds: list[list[list[int]]]) -> float:
        return lost_time(np.array([[squares[b].sum() for b in row] for row in rounds]))

    if shape not in ((4, 1), (1, 1)):
        assert lost(balanced) < 0.6 * lost(plain)


@pytest.mark.parametrize("batch", [4, 7, 22, 40])
def test_a_decreased_batch(training: Any, tmp_path: Path, batch: int) -> None:
    """--decrease-batch-size-if-needed: steps of as many whole rounds as fit."""
    training.args.micro, training.args.size = 1, 4
    dataset = dataset_of(training, tmp_path)
    adapter.uninstall()
    start(training, batch, decrease_batch_size_if_needed=True)
    expected = steps(training, ranks(training, dataset), 0)
    adapter.install(balance=COST)
    assert steps(training, ranks(training, dataset), 0) == expected


def test_phases_count_from_the_start_of_the_run(training: Any, tmp_path: Path) -> None:
    """A sampler of the second phase begins with 0; Megatron's calculator knows of the first."""
    training.args.size = 2
    dataset = dataset_of(training, tmp_path)
    ramp = [4, 4, 40]
    training.args.consumed_train_samples = 48
    adapter.install(balance=COST)
    start(training, 24, ramp)
    assert steps(training, ranks(training, dataset), 48)[0] == list(range(24))
    training.args.consumed_train_samples = 0
    start(training, 24, ramp)
    assert steps(training, ranks(training, dataset), 0)[0] == list(range(4))


def test_a_blend(training: Any, tmp_path: Path) -> None:
    with one_process(training.core, tmp_path / "store") as core:
        corpora = write_corpora(tmp_path)
        weights = [1.0, 2.0, 3.0, 2.0, 1.0]
        config = {"split": "80,20,0", "mid_level_dataset_surplus": 1.0}
        adapter.install(balance=COST)
        train, valid, _ = build(
            core, (60, 9, 0), tmp_path / "cache", blend=(corpora, weights), **config
        )
        training.args.size = 2
        start(training, 12)
        rounds = ranks(training, train)
        assert steps(training, rounds, 0)[:5] == [list(range(k, k + 12)) for k in range(0, 60, 12)]
        assert rounds != [[[k], [k + 1]] for k in range(0, 60, 2)]
        # evaluations are left in order
        assert ranks(training, valid) == [[[k], [k + 1]] for k in range(0, len(valid) - 1, 2)]


def test_what_is_refused(training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = dataset_of(training, tmp_path)
    with pytest.raises(InvalidArgument, match="balance must be a CostModel"):
        adapter.install(balance="llama3-8b")
    adapter.install(balance=COST)
    assert training.build_pretraining_data_loader(None, 0) is None
    training.calculators.destroy_num_microbatches_calculator()
    loader = training.build_pretraining_data_loader(dataset, 0)
    with pytest.raises(InvalidArgument, match="not initialised"):
        next(iter(loader.batch_sampler))
    training.args.cls = MegatronPretrainingRandomSampler
    with pytest.raises(InvalidArgument, match="--dataloader-type single"):
        training.build_pretraining_data_loader(dataset, 0)
    training.args.cls = MegatronPretrainingSampler
    with pytest.raises(InvalidArgument, match="which only GPTDataset"):
        training.build_pretraining_data_loader(list(range(50)), 0)

    class Rearranging(training.core.GPTDataset):  # type: ignore[misc, name-defined]
        def _query_document_sample_shuffle_indices(self, idx: int) -> Any:
            raise AssertionError

    start(training, 8)
    shuffle, dataset.shuffle_index = dataset.shuffle_index, None  # which Megatron leaves for later
    with pytest.raises(InvalidArgument, match="remove that flag, or install without them"):
        training.build_pretraining_data_loader(dataset, 0)
    dataset.shuffle_index = shuffle
    calculator = training.calculators._GLOBAL_NUM_MICROBATCHES_CALCULATOR
    batches = iter(training.build_pretraining_data_loader(dataset, 0).batch_sampler)
    next(batches)
    for count in (1, 0):
        monkeypatch.setattr(type(calculator), "get", lambda _, count=count: count)
        batches = iter(training.build_pretraining_data_loader(dataset, 16).batch_sampler)
        if count:
            next(batches)
            continue
        with pytest.raises(InvalidArgument, match="gives 0 micro batches after 16 samples, at lea"):
            next(batches)
    dataset.__class__ = Rearranging
    with pytest.raises(InvalidArgument, match="got Rearranging"):
        training.build_pretraining_data_loader(dataset, 0)


def test_squares_of_a_step_fit_64_bits(training: Any, tmp_path: Path) -> None:
    write_sparse_corpus(tmp_path / "c", [2**31 - 1] * 5)
    dataset = megatron_dataset(
        training.core, str(tmp_path / "c"), num_samples=9, sequence_length=2**30, seed=3
    )
    adapter.install(balance=COST)
    training.args.micro, training.args.size = 1, 1
    start(training, 7)
    batches = iter(training.build_pretraining_data_loader(dataset, 0).batch_sampler)
    assert sorted(next(batches)[0] for _ in range(7)) == list(range(7))
    start(training, 8)
    with pytest.raises(InvalidArgument, match=r"8 rows of .* less than 2\*\*63"):
        next(iter(training.build_pretraining_data_loader(dataset, 0).batch_sampler))


def test_without_balance_nothing_changes(training: Any, tmp_path: Path) -> None:
    dataset = dataset_of(training, tmp_path)
    original = training.build_pretraining_data_loader
    training.args.size = 2
    plain = ranks(training, dataset)
    adapter.install(balance=COST)
    adapter.install()
    assert ranks(training, dataset) == plain
    adapter.install(balance=CostModel(linear=1, attention=0))
    assert ranks(training, dataset) == plain
    adapter.uninstall()
    assert training.build_pretraining_data_loader is original
    assert training.importer.build_pretraining_data_loader is original


def test_a_balanced_loader_is_reported(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Once, although Megatron makes a loader for every part of a virtual pipeline."""
    caplog.set_level("INFO", "megaindex")
    training.args.micro, training.args.size = 2, 2
    dataset = dataset_of(training, tmp_path)
    adapter.install(balance=COST)
    for _ in "12":
        training.build_pretraining_data_loader(dataset, 0)
    text = f"data loader train: balanced {len(dataset)} samples, 2 ranks, cost model 0:1"
    assert caplog.text.count(f"megaindex: {text}") == 1
    (served,) = (each for each in status().datasets if each.kind == "data loader")
    assert str(served) == text
    assert (served.served_by, served.how) == ("megaindex", "balanced")
    adapter.install(balance=CostModel(linear=1, attention=0))
    for _ in "12":
        training.build_pretraining_data_loader(dataset, 0)
    assert caplog.text.count("data loader train: left to Megatron, all rows are equal work") == 1
    adapter.install(balance=COST)
    with pytest.raises(InvalidArgument):
        training.build_pretraining_data_loader(list(range(50)), 0)
    assert "data loader" not in str(status())


def test_the_command_installs_it(
    training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(sys, "path", list(sys.path))  # it puts the folder of the script first
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    script = tmp_path / "script.py"
    script.write_text("")
    with caplog.at_level("INFO", "megaindex"):
        assert run_script(["--balance", "llama3-8b", "--", str(script)]) == 0
    assert "balance 45027950592:786432" in caplog.text
    assert run_script(["--balance", "llama9", "--", str(script)]) == 2
    assert "llama3-8b" in capsys.readouterr().err
