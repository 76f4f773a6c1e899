"""The data loaders that trainers have of their own, read on 2 and 4 ranks, all in one process.

``own_loaders.py NAME FOLDER`` writes a JSON object: ``whole``, the samples of each rank on 2 ranks,
and on 4; ``resumed``, those of 4 ranks that continue from the state of 2 after seven steps, or the
error of the trainer; where documents of several corpora are drawn, ``served``, how many tokens the
run serves how often.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from megaindex import IndexedDatasetWriter

SAMPLES, LENGTH = 487, 64
ROWS = {2: 2, 4: 3}  # of a micro batch, by ranks
STEP, STEPS_BEFORE = 24, 7
SAMPLERS = Path(__file__).parents[1] / "golden/samplers.json"
Rows = list[list[int]]  # numbers of samples by rank


def rounds(loaders: Sequence[Iterable[Any]], limit: int | None = None) -> Iterator[Any]:
    """Yield the batches of all ranks, until one of them has none: the others would wait for it."""
    return itertools.islice(zip(*loaders, strict=False), limit)


def read(
    make: Callable[[int, int], Any],
    numbers: Callable[[Any], list[int]],
    resume: Callable[[list[Any], list[Any]], None],
) -> dict[str, Any]:
    """Read an epoch on 2 ranks and on 4, and the rest of one on 4 after seven steps on 2.

    Args:
        make: returns the loader of a rank, of so many.
        numbers: returns the numbers of the samples of a batch.
        resume: gives four loaders the states of two.
    """

    def samples(loaders: list[Any], limit: int | None = None) -> Rows:
        found: Rows = [[] for _ in loaders]
        for batches in rounds(loaders, limit):
            for rank, batch in enumerate(batches):
                found[rank] += numbers(batch)
        return found

    whole = {size: samples([make(rank, size) for rank in range(size)]) for size in ROWS}
    two = [make(rank, 2) for rank in range(2)]
    before = samples(two, STEPS_BEFORE * STEP // (2 * ROWS[2]))
    assert before == [rank[: len(before[0])] for rank in whole[2]]
    four = [make(rank, 4) for rank in range(4)]
    try:
        resume(two, four)
        resumed: Any = samples(four)
    except Exception as error:
        file = getattr(error, "filename", None)
        resumed = f"{type(error).__name__}: {error if file is None else Path(file).name}"
    return {"whole": whole, "resumed": resumed}


def torchtitan(folder: Path) -> Any:
    """Documents of 1 to 4 samples; DCP saves the states of the ranks as one."""
    from trainers.torchtitan_on_cpu import numbered_loader

    rng = np.random.default_rng(0)
    ends = np.unique([*rng.choice(SAMPLES, SAMPLES // 3, replace=False), SAMPLES])
    with (folder / "documents.jsonl").open("w") as file:
        for begin, end in itertools.pairwise([0, *ends.tolist()]):
            file.write(json.dumps({"text": f"{begin} {end}"}) + "\n")

    def resume(two: list[Any], four: list[Any]) -> None:
        state = {name: value for loader in two for name, value in loader.state_dict().items()}
        for loader in four:
            loader.load_state_dict(state)

    def make(rank: int, ranks: int) -> Any:
        return numbered_loader(folder, LENGTH, rank, ranks, ROWS[ranks])

    return read(make, lambda batch: (batch[0]["input"][:, 0]).tolist(), resume)


class _Sampled(SimpleNamespace):
    """Batches of the numbers that a sampler gives."""

    def __iter__(self) -> Iterator[list[int]]:
        return iter(torch.utils.data.BatchSampler(self.sampler, self.rows, drop_last=False))


def _leave_out(two: list[Any], four: list[Any]) -> None:
    """Leave out the samples of the past, as a script does: the sampler has no position."""
    for each in four:
        each.sampler = itertools.islice(each.sampler, STEPS_BEFORE * STEP // 4, None)


def distributed_sampler(folder: Path) -> Any:
    from torch.utils.data import DistributedSampler

    data = range(SAMPLES)
    return read(
        lambda rank, ranks: _Sampled(
            sampler=DistributedSampler(data, ranks, rank),
            rows=ROWS[ranks],  # type: ignore[arg-type]
        ),
        list,
        _leave_out,
    )


def torchft(folder: Path) -> Any:
    from torchft.data import DistributedSampler

    return read(
        lambda rank, ranks: _Sampled(
            sampler=DistributedSampler(range(SAMPLES), rank, ranks, 0, 1), rows=ROWS[ranks]
        ),
        list,
        _leave_out,
    )


def stateful_dataloader(folder: Path) -> Any:
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    def make(rank: int, ranks: int) -> Any:
        data: Any = range(SAMPLES)
        sampler = StatefulDistributedSampler(data, ranks, rank)
        return StatefulDataLoader(data, ROWS[ranks], sampler=sampler)

    def resume(two: list[Any], four: list[Any]) -> None:
        for loader in four:  # with the state of rank 0, the only one that all can load
            loader.load_state_dict(two[0].state_dict())

    return read(make, torch.Tensor.tolist, resume)


def _corpora(folder: Path, sizes: Sequence[int]) -> list[str]:
    """Write corpora of one document each, whose tokens count on through all of them."""
    begin, prefixes = 0, []
    for number, size in enumerate(sizes):
        prefixes.append(str(folder / f"c{number}"))
        with IndexedDatasetWriter(prefixes[-1], "int32") as writer:
            writer.add_document(np.arange(begin, begin + size * LENGTH + 1))
        begin += size * LENGTH
    return prefixes


def automodel(folder: Path) -> Any:
    """The dataset and the dataloader of its recipes; each rank saves a state of its own."""
    from trainers.automodel_on_cpu import Checkpointer, ConfigNode, RecipeConfig

    dataset = {
        "_target_": "nemo_automodel.components.datasets.llm.megatron_dataset.MegatronPretraining",
        "paths": _corpora(folder, [SAMPLES]),
        "seq_length": LENGTH,
        "split": "100,0,0",
        "splits_to_build": "train",
        "index_mapping_dir": str(folder / "cache"),
    }
    tokenizer = SimpleNamespace(eos_token_id=-1, name_or_path="none", pad_token_id=None)
    _alone()

    def make(rank: int, ranks: int) -> Any:
        steps = {"global_batch_size": STEP, "local_batch_size": ROWS[ranks], "num_epochs": 1}
        config = RecipeConfig(ConfigNode({"dataset": dataset, "step_scheduler": steps}))
        return config.dataloader.build(dp_rank=rank, dp_world_size=ranks, tokenizer=tokenizer)

    def checkpointer(rank: int) -> Any:
        made = object.__new__(Checkpointer)  # with what these calls need
        made.tp_rank, made.pp_rank, made.dp_rank, made.process_group = 0, 0, rank, None
        made.config = SimpleNamespace(allow_legacy_pickle_restore=False)
        return made

    def resume(two: list[Any], four: list[Any]) -> None:
        for rank, loader in enumerate(two):
            checkpointer(rank).save_on_dp_ranks(loader, "dataloader", str(folder))
        for rank, loader in enumerate(four):
            checkpointer(rank).load_on_dp_ranks(loader, "dataloader", str(folder))

    def numbers(batch: Any) -> list[int]:
        found: list[int] = (batch["input_ids"][:, 0] // LENGTH).tolist()
        return found

    return read(make, numbers, resume)


def _served(rows: Iterable[Sequence[int]], sizes: Sequence[int]) -> dict[int, int]:
    """Return how many tokens are an input how often."""
    times = Counter(itertools.chain.from_iterable(rows))
    return dict(sorted(Counter(times[token] for token in range(sum(sizes) * LENGTH)).items()))


class _Numbers(torch.utils.data.Dataset[int]):
    """A dataset of the numbers of its samples."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> int:
        return number


def _alone() -> None:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)


def megatron(folder: Path) -> Any:
    """megatron-core's blend of two corpora, and the samplers of Megatron-Bridge, which are those of
    Megatron-LM; a checkpoint has the number of consumed samples."""
    from megatron.core.datasets.blended_megatron_dataset_builder import (
        BlendedMegatronDatasetBuilder,
    )
    from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig
    from support.megatron_dataset import Tokenizer
    from trainers.bridge_on_cpu import build_pretraining_data_loader

    sizes = [300, 187]
    paths = _corpora(folder, sizes)
    config = GPTDatasetConfig(
        random_seed=1, sequence_length=LENGTH, blend=(paths, [float(n) for n in sizes]), split="1",
        path_to_cache=str(folder / "cache"), tokenizer=Tokenizer(), reset_position_ids=False,
        reset_attention_mask=False, eod_mask_loss=False, create_attention_mask=False,
    )  # fmt: skip
    _alone()
    data, *_ = BlendedMegatronDatasetBuilder(
        GPTDataset, [SAMPLES, 0, 0], lambda: True, config
    ).build()
    served = _served((data[number]["tokens"].tolist() for number in range(SAMPLES)), sizes)

    for case in json.loads(SAMPLERS.read_text())["single"]:  # of Megatron-LM's own sampler
        total, micro, ranks = case["num_samples"], case["micro_batch_size"], len(case["ranks"])
        for rank, batches in enumerate(case["ranks"]):
            built = build_pretraining_data_loader(
                range(total), case["consumed_samples"], "single", micro, 0, False,
                pin_memory=False, data_parallel_rank=rank, data_parallel_size=ranks,
                drop_last=case["drop_last"],
            )  # fmt: skip
            assert list(built.batch_sampler) == batches

    def loader(rank: int, ranks: int, consumed: int = 0) -> Any:
        return build_pretraining_data_loader(
            _Numbers(), consumed, "single", ROWS[ranks], 0, False, pin_memory=False,
            data_parallel_rank=rank, data_parallel_size=ranks,
        )  # fmt: skip

    def resume(two: list[Any], four: list[Any]) -> None:
        four[:] = [loader(rank, 4, STEPS_BEFORE * STEP) for rank in range(4)]

    return {**read(loader, torch.Tensor.tolist, resume), "served": served}


def neox(folder: Path) -> Any:
    """The data loaders of the checkout of GPT-NeoX that NEOX names, its helpers compiled; and their
    samples with the adapter, compared with those of a lock."""
    import megaindex.adapters.neox as adapter
    from benchmarks.neox import load_data_utils
    from megaindex.lock import make_lock, open_run

    utils = load_data_utils(os.environ["NEOX"])
    sizes = [300, 187]
    names = ("train", "valid", "test")
    kinds = ("label", "reward")
    nothing = [f"{side}{name}_data_paths" for side in ("pos_", "neg_") for name in names]
    nothing += [f"{name}_{kind}_data_paths" for name in names for kind in kinds]
    nothing += [f"{side}{name}_label_data_paths" for side in ("pos_", "neg_") for name in names]
    nothing += [f"{name}_data_{what}" for name in names[1:] for what in ("paths", "weights")]
    args = SimpleNamespace(
        **dict.fromkeys(nothing), train_data_paths=_corpora(folder, sizes),
        train_data_weights=[float(n) for n in sizes], train_iters=SAMPLES, train_epochs=None,
        train_batch_size=1, batch_size=1, eval_interval=1000, eval_iters=0, seq_length=LENGTH,
        seed=1, data_impl="mmap", pack_impl="packed", dataset_impl="gpt2", allow_chopped=True,
        mmap_warmup=False, weight_by_num_documents=False, precompute_model_name=None,
        is_pipe_parallel=False, use_shared_fs=True, num_workers=0, iteration=0,
    )  # fmt: skip
    args.valid_data_paths = args.test_data_paths = args.train_data_paths
    args.valid_data_weights = args.test_data_weights = args.train_data_weights

    def texts() -> list[list[int]]:
        data = utils.build_train_valid_test_data_loaders(args)["train"].dataset
        return [data[number]["text"].tolist() for number in range(SAMPLES)]

    def with_adapter(**settings: Any) -> list[list[int]]:
        for path in folder.glob("*_indexmap_*"):
            path.unlink()
        adapter.install(**settings)
        try:
            return texts()
        finally:
            adapter.uninstall()

    own = texts()
    words = [f"{word}" for pair in zip(sizes, args.train_data_paths, strict=True) for word in pair]
    lock = make_lock(
        order="neox", sequence_length=LENGTH, seed=1, train_iters=SAMPLES, eval_iters=0,
        eval_interval=1000, micro_batch_size=1, data_parallel_size=1, train_data_path=words,
        valid_data_path=words, test_data_path=words,
    )  # fmt: skip
    locked = [
        [*tokens.tolist(), labels[-1].item()]
        for batch in open_run(lock, micro_batch_size=1)
        for tokens, labels in zip(batch["tokens"], batch["labels"], strict=True)
    ]
    assert with_adapter(lock=lock) == locked == own
    exact = with_adapter(exact=True)
    served, served_exact = (_served((row[:-1] for row in rows), sizes) for rows in (own, exact))

    def loader(rank: int, ranks: int) -> Any:
        utils.mpu.get_data_parallel_rank = lambda: rank
        utils.mpu.get_data_parallel_world_size = lambda: ranks
        args.batch_size = ROWS[ranks]
        return utils.make_data_loader(_Numbers(), args)

    def resume(two: list[Any], four: list[Any]) -> None:
        args.iteration, args.gradient_accumulation_steps = STEPS_BEFORE, STEP // (4 * ROWS[4])
        for each in four:
            utils.shift_and_wrap_data_loaders(args, {"train": each, "valid": None, "test": None})

    found = read(loader, torch.Tensor.tolist, resume)
    return {**found, "served": served, "served_exact": served_exact}


if __name__ == "__main__":
    Path(sys.argv[2]).mkdir(exist_ok=True)
    result = globals()[sys.argv[1]](Path(sys.argv[2]))
    (Path(sys.argv[2]) / "result.json").write_text(json.dumps(result))
