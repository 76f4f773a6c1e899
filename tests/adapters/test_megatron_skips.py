"""Skips under Megatron: samples served are numbered on, masked documents keep their place."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.megatron_blends import build, one_process, write_corpora
from support.megatron_training import (
    MegatronPretrainingRandomSampler,
    dataset_of,
    ranks,
    start,
    training,
)

import megaindex.adapters.megatron as adapter
from megaindex import InvalidArgument, Skip
from megaindex.adapters.megatron.skips import LOADERS, TRAINING
from megaindex.index.balance import CostModel

__all__ = ["training"]  # a fixture


def loader_of(training: Any, dataset: Any, consumed: int = 0) -> Any:
    return training.importer.build_pretraining_data_loader(dataset, consumed)


def rows(dataset: Any, ids: list[int]) -> list[list[int]]:
    read = getattr(dataset, "__getitems__", None)
    samples = [dataset[k] for k in ids] if read is None else read(ids)
    return [sample["tokens"].tolist() for sample in samples]


def test_steps_are_dropped_and_moved(training: Any, tmp_path: Path) -> None:
    dataset = dataset_of(training, tmp_path)
    steps = len(dataset) // 8
    plain = rows(dataset, list(range(8 * steps)))
    training.args.micro, training.args.size = 2, 2
    start(training, 8)
    adapter.install(skip=[Skip(steps="2-3 5"), Skip(steps="4", move=True)])
    served = loader_of(training, dataset).dataset
    kept = [k for k in range(8 * steps) if k // 8 not in (2, 3, 4, 5)] + list(range(32, 40))
    assert len(served) == len(kept) == 8 * (steps - 3)
    assert rows(served, list(range(len(kept)))) == [plain[k] for k in kept]
    assert [served[k]["tokens"].tolist() for k in (0, 17)] == [plain[0], plain[kept[17]]]
    # a run that is resumed by the samples it has read goes on with the step after them
    resumed = ranks(training, dataset, 24)
    first = [sample for batch in resumed[0] for sample in batch]
    assert rows(served, first) == [plain[k] for k in kept[24:28]]
    assert len(pickle.loads(pickle.dumps(served))) == len(served)


def test_masked_documents_keep_their_place(training: Any, tmp_path: Path) -> None:
    with one_process(training.core, tmp_path / "store") as core:
        corpora = write_corpora(tmp_path)
        weights = [1.0, 2.0, 3.0, 2.0, 1.0]
        adapter.install()
        train, valid, _ = build(
            core, (60, 9, 0), tmp_path / "cache", blend=(corpora, weights), split="80,20,0",
            mid_level_dataset_surplus=1.0,
        )  # fmt: skip
        from megaindex.adapters.megatron.batches import samples_index

        index = samples_index(train)
        start(training, 12)
        skip = [Skip(source=corpora[2], from_step=2), Skip(documents=[0, 3], source=corpora[1])]
        adapter.install(skip=skip)
        served = loader_of(training, train).dataset
        assert loader_of(training, valid).dataset is valid
        ids = list(range(len(served)))
        one_by_one = [served[k] for k in ids]
        for chunk in (ids[:12], ids):  # singly, and at once when every source was read often
            batch = served.__getitems__(chunk)
            found = 0
            for k, sample in zip(chunk, batch, strict=True):
                spans = index.locate([k])
                owners = np.repeat(np.arange(len(spans)), spans.length)[1:]
                masked = [
                    (source == 2 and k >= 24) or (source == 1 and document in (0, 3))
                    for source, document in zip(
                        spans.source.tolist(), spans.document.tolist(), strict=True
                    )
                ]
                expected = [0.0 if masked[owner] else 1.0 for owner in owners]
                found += sum(masked)
                assert sample["loss_mask"].tolist() == expected
                assert one_by_one[k]["loss_mask"].tolist() == expected
                plain = train[k]
                assert sample["tokens"].tolist() == plain["tokens"].tolist()
                assert sample["labels"].tolist() == plain["labels"].tolist()
                assert plain["loss_mask"].all()
            assert found or chunk == ids[:12]


def test_balanced_steps_are_those_that_are_served(training: Any, tmp_path: Path) -> None:
    dataset = dataset_of(training, tmp_path)
    training.args.micro, training.args.size = 1, 2
    start(training, 8)
    adapter.install(skip=Skip(steps="1"))
    plain = ranks(training, dataset)
    adapter.install(skip=Skip(steps="1"), balance=CostModel(linear=0, attention=1))
    balanced = ranks(training, dataset)
    assert plain != balanced
    for first in range(0, len(plain), 4):
        step, same = (
            sorted(k for row in rounds[first : first + 4] for batch in row for k in batch)
            for rounds in (plain, balanced)
        )
        assert step == same


def test_the_run_makes_fewer_iterations_on_every_rank(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Datasets are built for all steps, also for each model chunk of a virtual pipeline."""
    module: Any = ModuleType(TRAINING)
    args = SimpleNamespace(train_iters=11, train_samples=None)
    seen: list[int] = []
    module.get_args = lambda: args
    module.seen = seen
    exec(f"def {LOADERS}(provider):\n    seen.append(get_args().train_iters)", vars(module))
    monkeypatch.setitem(__import__("sys").modules, TRAINING, module)
    start(training, 8)
    adapter.install(skip=[Skip(steps="3-4"), Skip(steps=6, move=True)])
    for _ in range(2):
        getattr(module, LOADERS)(None)
        assert args.train_iters == 9
    assert seen == [11, 11]
    vars(training.args).update(vars(args))
    dataset = dataset_of(training, tmp_path)
    assert len(loader_of(training, dataset).dataset) == 72
    args.iterations_to_skip = [4]
    with pytest.raises(InvalidArgument, match="write them into the skip of install"):
        getattr(module, LOADERS)(None)


def test_what_is_refused(training: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="skip must be a megaindex.Skip"):
        adapter.install(skip="3")
    dataset = dataset_of(training, tmp_path)
    start(training, 24, [4, 4, 40])
    adapter.install(skip=Skip(steps="1"))
    with pytest.raises(InvalidArgument, match="the global batch size grows from 4 to 24"):
        loader_of(training, dataset)
    start(training, 8)
    training.args.train_iters = 1000
    with pytest.raises(InvalidArgument, match="the run reads 8000 samples and its data has"):
        loader_of(training, dataset)
    training.args.train_iters = 0
    training.args.cls = MegatronPretrainingRandomSampler
    with pytest.raises(InvalidArgument, match="skip needs --dataloader-type single"):
        loader_of(training, dataset)
    adapter.install(skip=Skip(steps="900"))
    with pytest.raises(InvalidArgument, match="step 900 lies beyond the end"):
        loader_of(training, dataset)
    adapter.install(skip=Skip(documents=[2000]))
    with pytest.raises(InvalidArgument, match="document 2000 does not exist"):
        loader_of(training, dataset)
