"""Rows of micro batches under Megatron and GPT-NeoX are those of the run in our own loaders."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support import neox_stand_in
from support.megatron_training import (
    MegatronPretrainingRandomSampler,
    dataset_of,
    start,
    training,
)
from support.neox_running import arguments, loaders_of

import megaindex
import megaindex.adapters.neox as neox_adapter
from megaindex import AmendedBlend, BlendChange, InvalidArgument, Skip
from megaindex.adapters import megatron
from megaindex.adapters.loader_rows import LoaderRows
from megaindex.loader import NumpyDataset, SampleOptions

__all__ = ["training"]  # a fixture

NAMES = ["sample", "source", "exposure", "key"]


def expected_rows(index: Any) -> tuple[dict[str, np.ndarray], np.ndarray]:
    batch = NumpyDataset(index, options=SampleOptions(keys=True))[:]
    return {name: batch[name] for name in NAMES}, batch["tokens"]


def assert_rows(rows: Any, tokens: Any, expected: Any, positions: list[int]) -> None:
    fields, texts = expected
    assert rows["sample"].tolist() == positions
    for name in NAMES[1:]:
        assert rows[name].tolist() == fields[name][positions].tolist()
        assert rows[name].numpy().dtype == fields[name].dtype
    assert tokens.tolist() == texts[positions].tolist()


@pytest.fixture
def megatron_run(training: Any, tmp_path: Path) -> Any:
    """Megatron's stand-in with DataLoaders, and a dataset of several epochs."""

    def load(dataset: Any, batch_sampler: Any) -> Any:
        return torch.utils.data.DataLoader(
            dataset, batch_sampler=batch_sampler, num_workers=training.args.workers
        )

    training.SimpleNamespace = load
    training.args.workers = 0
    training.args.micro, training.args.size, training.args.rank = 2, 2, 1
    megatron.install(keys=True)
    training.dataset = dataset_of(training, tmp_path, documents=30)
    start(training, 8)
    index = megaindex.build_index(
        str(tmp_path / "c"), sequence_length=16, seed=3, num_samples=100, order="megatron"
    )
    training.expected = expected_rows(index)
    assert set(training.expected[0]["exposure"].tolist()) > {0, 1}
    return training


class Batches:
    """A sampler and a loader that cost nothing."""

    def __init__(self, of: Any) -> None:
        self.batch_sampler = of

    def __iter__(self) -> Any:
        return ([each] for each in self.batch_sampler)


def one_document(folder: Path, sequence_length: int) -> tuple[megaindex.IndexedDataset, Any]:
    """A dataset of 100 tokens, and its index of order window."""
    with megaindex.IndexedDatasetWriter(str(folder / "c"), "uint16") as writer:
        writer.add_document(range(100))
    dataset = megaindex.IndexedDataset(folder / "c")
    return dataset, megaindex.build_index(dataset, sequence_length=sequence_length, order="window")


def test_the_last_65536_micro_batches_are_known(tmp_path: Path) -> None:
    dataset, index = one_document(tmp_path, sequence_length=16)
    loader = Batches(Batches(range(65_537)))
    rows = LoaderRows(
        loader, lambda: (index, [dataset]), first_id=lambda: 0, first_position=0, rows_per_round=1
    )
    iterator = iter(loader)
    batches = list(itertools.islice(iterator, 65_536))
    rows.replay(batches[0])
    assert rows.rows()["sample"].tolist() == [0]
    assert [*rows.rows()] == NAMES  # of keys of 64 bits
    batches.append(next(iterator))
    rows.replay(batches[1])
    assert rows.rows()["sample"].tolist() == [1]
    rows.replay(batches[0])
    with pytest.raises(InvalidArgument):
        rows.rows()


@pytest.mark.parametrize("workers", [0, 2])
def test_rows_of_megatron_are_those_of_the_micro_batch(megatron_run: Any, workers: int) -> None:
    megatron_run.args.workers = workers
    loader = megatron_run.importer.build_pretraining_data_loader(megatron_run.dataset, 8)
    for number, batch in enumerate(itertools.islice(loader, 10)):
        assert not {*NAMES} & {*batch}
        first = 8 + 4 * number + 2
        rows = megatron.rows()
        assert_rows(rows, batch["tokens"], megatron_run.expected, [first, first + 1])


@pytest.mark.usefixtures("short_waits")
def test_rows_of_a_loader_that_begins_again_have_its_ids(tmp_path: Path) -> None:
    """Its workers draw ids ahead, of which an iteration that ends early returns no batch."""
    dataset, index = one_document(tmp_path, sequence_length=8)
    loader = torch.utils.data.DataLoader(range(12), batch_size=1, num_workers=1)  # type: ignore[arg-type]
    rows = LoaderRows(
        loader, lambda: (index, [dataset]), first_id=lambda: 0, first_position=0, rows_per_round=1
    )
    keys = expected_rows(index)[0]["key"]
    for _ in range(2):
        batches = iter(loader)
        for number in range(2):
            assert next(batches).tolist() == [number]
            assert rows.rows()["key"].tolist() == keys[[number]].tolist()


def test_rows_of_a_step_that_megatron_runs_again(megatron_run: Any) -> None:
    """Three micro batches, which its iterator replays; those of a checkpoint are refused."""
    rerun = pytest.importorskip("megatron.core.rerun_state_machine")
    loader = megatron_run.importer.build_pretraining_data_loader(megatron_run.dataset, 0)
    rerun.initialize_rerun_state_machine(mode=rerun.RerunMode.VALIDATE_RESULTS)
    try:
        batches = rerun.RerunDataIterator(iter(loader))

        def take() -> list[int]:
            batch, rows = next(batches), megatron.rows()
            positions: list[int] = rows["sample"].tolist()
            assert_rows(rows, batch["tokens"], megatron_run.expected, positions)
            return positions

        for first in (0, 12):
            served = [take() for _ in range(3)]
            assert served[0] == [first + 2, first + 3]
            batches.rewind()
            assert [take() for _ in range(3)] == served
            batches.advance()
        state = batches.state_dict()
        state["saved_microbatches"], state["replaying"] = [{"tokens": torch.zeros(2, 16)}], True
        batches.load_state_dict(state)
        batches.replay_pos = 0
        next(batches)
        with pytest.raises(InvalidArgument, match="rows need"):
            megatron.rows()
    finally:
        rerun.destroy_rerun_state_machine()


def test_rows_of_skipped_steps_have_their_positions(megatron_run: Any) -> None:
    megatron.install(keys="wide", skip=[Skip(steps="1"), Skip(steps="2", move=True)])
    loader = megatron_run.importer.build_pretraining_data_loader(megatron_run.dataset, 0)
    end = len(megatron_run.dataset) // 8 * 8
    found = []
    for batch in loader:
        rows = megatron.rows()
        found += rows["sample"].tolist()
        expected = megatron_run.expected[0]["key"]
        moved = [k - end + 16 if k >= end else k for k in rows["sample"].tolist()]
        assert rows["key"].tolist() == expected[moved].tolist()
        assert batch["tokens"].tolist() == megatron_run.expected[1][moved].tolist()
        assert "key_high" in rows
    kept = [k for k in range(end + 8) if k // 8 not in (1, 2)]
    assert found == [k for k in kept if k % 4 > 1]


def test_rows_need_a_loader_in_order_and_a_micro_batch(megatron_run: Any) -> None:
    with pytest.raises(InvalidArgument, match="rows need install"):
        megatron.rows()
    megatron_run.args.cls = MegatronPretrainingRandomSampler
    with pytest.raises(InvalidArgument, match="keys needs --dataloader-type single"):
        megatron_run.importer.build_pretraining_data_loader(megatron_run.dataset, 0)
    change = BlendChange(consumed_samples=8, weights={"a": 1.0, "b": 1.0})
    amend = AmendedBlend(data_path=["a"], num_samples=9, changes=[change])
    with pytest.raises(InvalidArgument, match="keys and amend exclude each other"):
        megatron.install(keys=True, amend=amend)
    with pytest.raises(InvalidArgument, match="keys must be"):
        megatron.install(keys="narrow")  # type: ignore[arg-type]
    megatron.install()
    megatron_run.args.cls = megatron_run.MegatronPretrainingSampler
    next(iter(megatron_run.importer.build_pretraining_data_loader(megatron_run.dataset, 0)))
    with pytest.raises(InvalidArgument, match="rows need install"):
        megatron.rows()


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("iteration", [0, 4])
def test_rows_of_neox_are_those_of_the_micro_batch(
    neox: Any, tmp_path: Path, blend: bool, iteration: int
) -> None:
    lengths = np.random.default_rng(8).integers(1, 40, 40).tolist()
    sizes = [lengths, lengths[::-1]] if blend else [lengths]
    args = arguments(
        tmp_path, sizes, batch_size=2, train_batch_size=8, gradient_accumulation_steps=2,
        train_iters=12, world_size=2, rank=1, iteration=iteration,
    )  # fmt: skip
    args.weights = [0.75, 0.25] if blend else [1.0]
    args.data_path = None if blend else args.paths[0]
    neox_adapter.install(keys=True)
    settings: Any = {"sequence_length": 16, "num_samples": 96, "seed": 1234, "order": "neox"}
    if blend:
        index: Any = megaindex.build_blend(args.paths, weights=args.weights, **settings)
    else:
        index = megaindex.build_index(args.paths[0], split=args.split, **settings)
    expected = expected_rows(index)
    assert expected[0]["exposure"].max() > 0
    loader = neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders_of(args))[0]
    for number in range(24 - 2 * iteration):
        batch = next(loader)
        first = (2 * iteration + number) * 4 + 2
        rows = neox_adapter.rows()
        assert_rows(rows, batch["text"][:, :-1], expected, [first, first + 1])
        assert not {*NAMES} & {*batch}


def test_positions_go_on_where_neox_reads_its_data_again(neox: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, [[11, 30, 17, 25, 9] * 3], train_iters=9)
    args.data_path = args.paths[0]
    neox_adapter.install(keys=True)
    loaders = loaders_of(args)
    length = len(loaders["train"])
    loader = neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)[0]
    found = []
    for _ in range(length + 2):
        next(loader)
        found.append({name: each.tolist() for name, each in neox_adapter.rows().items()})
    positions = [position for rows in found for position in rows["sample"]]
    assert positions == list(range(4 * (length + 2)))
    for name in NAMES[1:]:
        assert [rows[name] for rows in found[length:]] == [rows[name] for rows in found[:2]]


def test_neox_refuses_keys_of_a_loader_that_keeps_its_last_batch(neox: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, [[11, 30, 17, 25, 9] * 3])
    neox_adapter.install(keys=True)
    loaders = loaders_of(args)
    loaders["train"].batch_sampler.drop_last = False
    shift = neox_stand_in.data_utils().shift_and_wrap_data_loaders
    with pytest.raises(InvalidArgument, match="keys needs .* over samples in order, got Dis"):
        shift(args, loaders)
    loaders["train"].batch_sampler.drop_last = True
    assert next(shift(args, loaders)[0])["text"].shape == (4, 17)


def test_neox_refuses_keys_with_exact(neox: Any) -> None:
    with pytest.raises(InvalidArgument, match="keys and exact=True exclude each other"):
        neox_adapter.install(exact=True, keys=True)
