"""Skips under Megatron: samples served are numbered on, masked documents keep their place."""

from __future__ import annotations

import pickle
import sys
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.megatron_blends import build, one_process, write_corpora
from support.megatron_dataset import Tokenizer
from support.megatron_training import (
    MegatronPretrainingRandomSampler,
    MegatronPretrainingSampler,
    dataset_of,
    ranks,
    start,
    training,
)

import megaindex.adapters.megatron as adapter
from megaindex import InvalidArgument, Skip
from megaindex.adapters import status
from megaindex.adapters.megatron.patches import WRAPPERS
from megaindex.index.balance import CostModel

__all__ = ["training"]  # a fixture

(TRAINING, LOADERS, _), (CHECKPOINTING, CHECK_ARGS, _), *_ = WRAPPERS


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


def test_removed_documents_are_end_tokens_without_loss(training: Any, tmp_path: Path) -> None:
    with one_process(training.core, tmp_path / "store") as core:
        corpora = write_corpora(tmp_path)
        adapter.install()
        train, *_ = build(
            core, (60, 9, 0), tmp_path / "cache", blend=(corpora, [1.0, 2.0, 3.0, 2.0, 1.0]),
            split="80,20,0", mid_level_dataset_surplus=1.0,
        )  # fmt: skip
        from megaindex.adapters.megatron.batches import samples_index

        index, end = samples_index(train), train.config.tokenizer.eod
        start(training, 12)
        adapter.install(skip=[
            Skip(source=corpora[2], from_step=2, remove=True),
            Skip(documents=[0, 3], source=corpora[1], remove=True),
            Skip(source=corpora[1]),
        ])  # fmt: skip
        served = loader_of(training, train).dataset
        ids = list(range(len(served)))
        for batch in ([served[k] for k in ids], served.__getitems__(ids)):
            found = 0
            for k, sample in zip(ids, batch, strict=True):
                spans, plain = index.locate([k]), train[k]
                kinds = [
                    ("removed" if document in (0, 3) else "masked") if source == 1
                    else "removed" if source == 2 and k >= 24 else ""
                    for source, document in zip(*map(list, list(spans)[:2]), strict=True)
                ]  # fmt: skip
                kind = np.repeat(kinds, spans.length)
                gone = kind == "removed"
                found += int(gone.sum())
                expected = np.where(gone[:-1], end, plain["tokens"])
                assert sample["tokens"].tolist() == expected.tolist()
                expected = np.where(gone[1:], end, plain["labels"])
                assert sample["labels"].tolist() == expected.tolist()
                assert sample["loss_mask"].tolist() == ((kind[1:] == "") & ~gone[:-1]).tolist()
                assert sample["position_ids"].tolist() == plain["position_ids"].tolist()
                assert plain["loss_mask"].all()
            assert found > 100
        train.datasets[0].config.tokenizer = SimpleNamespace()
        with pytest.raises(InvalidArgument, match="remove: .* eod"):
            loader_of(training, train)


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
    start(training, 1)
    adapter.install(skip=Skip(documents=[1]))
    args.train_iters = args.megaindex_train_iters = 1
    getattr(module, LOADERS)(None)
    assert args.train_iters == 1
    args.train_iters = args.megaindex_train_iters = 0
    with pytest.raises(InvalidArgument, match="lies beyond the end of the run"):
        getattr(module, LOADERS)(None)
    args.iterations_to_skip = [4]
    with pytest.raises(InvalidArgument, match="write them into the skip of install"):
        getattr(module, LOADERS)(None)


class Launches:
    """Launches of a run: Megatron's arguments, its checkpoints, and what its ranks read."""

    def __init__(self, training: Any, dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.training, self.dataset = training, dataset
        self.checkpoint: Any = None  # pickled, as Megatron saves its arguments
        for name, source in (
            (TRAINING, f"def {LOADERS}(make):\n    return (make(), None, None)"),
            (CHECKPOINTING, f"def {CHECK_ARGS}(checkpoint_args, skip_args=None):\n    pass"),
        ):
            module: Any = ModuleType(name)
            module.get_args = lambda: training.args
            exec(source, vars(module))
            monkeypatch.setitem(__import__("sys").modules, name, module)

    def launch(
        self,
        skip: Any,
        iterations: int,
        ranks: tuple[int, int] = (2, 2),
        reads: bool = True,
        anew: bool = False,
    ) -> list[Any]:
        """Continue for so many iterations, save, and return what was read by iteration.

        ``anew`` is Megatron's ``--finetune``: the samples are read from the first on.
        """
        modules, training = __import__("sys").modules, self.training
        adapter.uninstall()
        args = training.args
        vars(args).clear()
        vars(args).update(
            micro=ranks[0], rank=0, size=ranks[1], cls=MegatronPretrainingSampler, train_iters=11,
            train_samples=None, iteration=0, consumed_train_samples=0,
        )  # fmt: skip
        start(training, 8)
        adapter.install(skip=skip)
        if self.checkpoint is not None:
            checkpoint = pickle.loads(self.checkpoint)
            if reads:
                getattr(modules[CHECKPOINTING], CHECK_ARGS)(checkpoint, skip_args=None)
            args.consumed_train_samples = 0 if anew else checkpoint.consumed_train_samples
        found: list[list[Any]] = [[] for _ in range(iterations)]
        for rank in range(ranks[1]):
            args.rank, args.train_iters = rank, 11
            make = partial(loader_of, training, self.dataset, args.consumed_train_samples)
            loader = getattr(modules[TRAINING], LOADERS)(make)[0]
            batches = list(loader.batch_sampler)
            for k in range(iterations):
                each = 8 // (ranks[0] * ranks[1])
                for batch in batches[k * each : (k + 1) * each]:
                    found[k] += rows(loader.dataset, batch)
        args.consumed_train_samples += 8 * iterations
        self.checkpoint = pickle.dumps(args)
        return [sorted(step) for step in found]


def test_a_checkpoint_holds_the_skips(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run goes on with the same skips and with more of them, on any ranks; others are refused."""
    dataset = dataset_of(training, tmp_path)
    plain = [sorted(rows(dataset, [*range(8 * k, 8 * k + 8)])) for k in range(11)]
    run = Launches(training, dataset, monkeypatch)
    assert run.launch(None, 2) == plain[:2]
    first = [Skip(steps="3"), Skip(steps="4", move=True)]
    # of a checkpoint without skips, the steps served cannot be skipped any more
    for wrong, reason in (
        (Skip(steps="1"), "samples 8 to 15 are to be skipped, and 16 samples were served"),
        (
            Skip(source="0"),
            "all documents of 0 from sample 0 on, and 16 samples were served",
        ),
    ):
        with pytest.raises(InvalidArgument, match=f"the checkpoint: skip: {reason}"):
            run.launch(wrong, 1)
    assert run.launch(first, 2, (4, 1)) == [plain[2], plain[5]]
    for wrong, reason in (
        (None, "skips samples 24 to 31 .dropped., and this one does not; give the recipe, the"),
        (Skip(steps="3"), "skips samples 32 to 39 .moved., and this one does not"),
        ([*first, Skip(steps="5")], "samples 40 to 47 are to be skipped, and 32 samples were"),
        (
            [*first, Skip(documents=[1], from_step=5)],
            "1 documents of 0 from sample 40 on, and 32",
        ),
    ):
        with pytest.raises(InvalidArgument, match=f"the checkpoint: .*{reason}"):
            run.launch(wrong, 1)
    mask = Skip(documents=[1, 7], from_step=6)
    more = [*first, mask, Skip(steps="7-8")]
    assert run.launch(more, 1, (1, 4)) == [plain[6]]
    # by whatever name and in whatever entries
    named = Skip(documents=[7, 1, 7], source=str(tmp_path / "c"), from_step=6)
    assert run.launch([named, *first, Skip(steps=7), Skip(steps=8)], 2) == plain[9:]
    with pytest.raises(InvalidArgument, match="masks 2 documents of 0 from sample 48"):
        run.launch([*first, Skip(steps="7-8"), Skip(documents=[1, 8], from_step=6)], 1)
    assert run.launch(more, 1, (8, 1)) == [plain[4]]  # the moved step, at the end
    assert run.launch(None, 2, anew=True) == plain[:2]  # nothing was served of this run


def test_a_checkpoint_that_megatron_did_not_read_is_reported(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Launches(training, dataset_of(training, tmp_path), monkeypatch)
    run.launch(Skip(steps="3"), 2)
    run.launch(Skip(steps="1"), 1, reads=False)
    assert "Megatron-LM did not read it" in str(status())


def test_a_growing_batch_is_refused(training: Any, tmp_path: Path) -> None:
    dataset = dataset_of(training, tmp_path)
    start(training, 24, [4, 4, 40])
    adapter.install(skip=Skip(steps="1"))
    with pytest.raises(InvalidArgument, match="the global batch size grows from 4 to 24"):
        loader_of(training, dataset)


def test_a_run_of_samples_has_their_whole_steps(training: Any, tmp_path: Path) -> None:
    dataset = dataset_of(training, tmp_path)
    start(training, 8)
    training.args.train_iters, training.args.train_samples = None, 87  # 10 steps, and 7 samples
    adapter.install(skip=Skip(steps=9))
    assert len(loader_of(training, dataset).dataset) == 72
    adapter.install(skip=Skip(steps=10))
    with pytest.raises(InvalidArgument, match="step 10 lies beyond the end"):
        loader_of(training, dataset)


def test_what_is_refused(training: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="skip must be a megaindex.Skip"):
        adapter.install(skip="3")
    dataset = dataset_of(training, tmp_path)
    adapter.install(skip=Skip(steps="1"))
    start(training, 8)
    training.args.train_iters = 1000
    with pytest.raises(InvalidArgument, match="the run reads 8000 samples"):
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
    training.args.cls = MegatronPretrainingSampler
    adapter.install(skip=Skip(steps="1"))
    training.args.phase_transition_iterations = [2]
    with pytest.raises(InvalidArgument, match="skip: --phase-transition-iterations counts the sam"):
        loader_of(training, dataset)
    training.args.phase_transition_iterations = None
    loader_of(training, dataset)

    class Marked(training.core.GPTDataset):  # type: ignore[misc, name-defined]
        def __getitem__(self, idx: int | None) -> Any:
            return {**super().__getitem__(idx), "mark": idx}

    dataset.__class__ = Marked
    dataset.config.tokenizer = Tokenizer()
    for remove in (True, False):
        adapter.install(skip=Skip(documents=[3], remove=remove))
        if not remove:
            assert loader_of(training, dataset).dataset[0]["mark"] == 0
            continue
        with pytest.raises(InvalidArgument, match="skip: remove: Marked has a __getitem__ of its"):
            loader_of(training, dataset)


def test_megatron_bridges_loader_is_measured_and_followed(
    training: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils.data import DataLoader

    bridge: Any = ModuleType("megatron.bridge.data.samplers")

    def build_pretraining_data_loader(dataset: Any, consumed: int = 0, micro: int = 2) -> Any:
        made = MegatronPretrainingSampler(len(dataset), consumed, micro, 0, 1)
        return DataLoader(dataset, batch_sampler=made)

    bridge.build_pretraining_data_loader = build_pretraining_data_loader
    monkeypatch.setitem(sys.modules, bridge.__name__, bridge)
    dataset = dataset_of(training, tmp_path)
    training.args.micro = 4
    start(training, 8)
    for keys in (True, False):
        adapter.install(keys=keys)
        loader = bridge.build_pretraining_data_loader(dataset, 8, 4)
        assert len([loader_rows(keys) for _ in loader]) == len(dataset) // 4 - 2
        assert status().waits["Megatron"].steps == (len(dataset) // 4 - 2) // 2
    assert bridge.build_pretraining_data_loader is not build_pretraining_data_loader
    adapter.uninstall()
    assert bridge.build_pretraining_data_loader is build_pretraining_data_loader


def loader_rows(keys: bool) -> Any:
    if keys:
        return adapter.rows()["sample"]
    with pytest.raises(InvalidArgument, match="rows need install"):
        adapter.rows()
    return None


def test_the_loader_of_training_is_measured(training: Any, tmp_path: Path) -> None:
    from torch.utils.data import DataLoader

    dataset = dataset_of(training, tmp_path)
    training.args.micro = 2
    start(training, 8)
    training.SimpleNamespace = lambda dataset, batch_sampler: DataLoader(
        dataset, batch_sampler=batch_sampler
    )
    plain = loader_of(training, dataset)
    adapter.install()
    loader = loader_of(training, dataset)
    assert isinstance(loader, DataLoader)
    assert type(loader).__name__ == "DataLoader"
    ours = [batch["tokens"].tolist() for batch in loader]
    assert ours == [batch["tokens"].tolist() for batch in plain]
    assert isinstance(loader.batch_sampler, MegatronPretrainingSampler)
    assert status().waits["Megatron"].steps == len(ours) // 4
    assert plain.__class__ is DataLoader
