"""Small runs whose checkpoints, receipts and caches are kept as golden files: see golden/."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import xxhash

import megaindex
from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.corpus import corpus_fingerprint
from megaindex.index.spans import Index, datasets_of
from megaindex.loader import CyclicSampler, Loader, MicroBatchSampler, Recorder, loader_of_recipe
from megaindex.loader.receipts import ReceiptCheck, check_receipts, join_states
from megaindex.recipe import (
    BatchSchedule,
    OpenRecipe,
    Recipe,
    RecipeSource,
    RecipeStage,
    Stream,
    Target,
    open_recipe,
)

RANKS = 2
S = 16


def served_over_a_restart(old: Index, new: Index, consumed: int) -> ReceiptCheck:
    """Serve ``consumed`` samples of an index on two ranks, then the rest of another one on three,
    and return the comparison of the receipts with the second."""

    def loaders(index: Index, ranks: int) -> list[Loader]:
        sources = datasets_of(index)
        return [
            Loader(
                index, sources,
                MicroBatchSampler(
                    num_samples=index.num_samples, micro_batch_size=2, data_parallel_rank=rank,
                    data_parallel_size=ranks, global_batch_size=12, tail="pad",
                ),
                recorder=Recorder([f"{k}" * 32 for k in range(len(sources))]),
            )
            for rank in range(ranks)
        ]  # fmt: skip

    before = loaders(old, 2)
    for loader in before:
        for _ in itertools.islice(loader, consumed // 4):
            pass
    state = join_states([loader.state_dict() for loader in before])
    after = loaders(new, 3)
    for loader in after:
        loader.load_state_dict(state)
        for _ in loader:
            pass
    return check_receipts([loader.state_dict() for loader in after], new)


def write(prefix: Path, documents: Iterable[Any]) -> IndexedDataset:
    with IndexedDatasetWriter(str(prefix), np.int32) as writer:
        for tokens in documents:
            writer.add_document(np.asarray(tokens, np.int32))
    return IndexedDataset(str(prefix))


def write_sources(folder: Path) -> None:
    """Text ``web`` and ``books``, and instruction data ``chat`` with labels and ``qa`` with a mask:
    sizes by formulas, so that they stay the same with every NumPy."""
    for name, count in (("web", 60), ("books", 41)):
        lengths = [1 + (37 * k + len(name)) % 70 for k in range(count)]
        write(folder / name, [np.arange(k, k + n) for k, n in enumerate(lengths)])
    for name in ("chat", "qa"):
        documents = [np.arange(k, k + 2 + 13 * k % 22) for k in range(40)]
        write(folder / name, documents)
        responses = [np.arange(d.size) >= d.size // 2 for d in documents]
        write(folder / f"{name}_mask", responses)
        labels = [np.where(r, d, -100) for d, r in zip(documents, responses, strict=True)]
        write(folder / f"{name}_labels", labels)


def recipe(folder: Path, **changes: Any) -> Recipe:
    sources = (
        RecipeSource(name="web", path=str(folder / "web")),
        RecipeSource(name="chat", path=str(folder / "chat"), kind="finetuning",
               labels=str(folder / "chat_labels")),
        RecipeSource(name="qa", path=str(folder / "qa"), kind="finetuning", packed=False,
               loss_mask=str(folder / "qa_mask"), long_documents="truncate"),
    )  # fmt: skip
    stages = (_stage("one", 6, web=4, chat=2), _stage("two", 5, web=1, chat=1, qa=1))
    settings = {"sequence_length": S, "batch": BatchSchedule.constant(12), "sources": sources}
    return Recipe(**{**settings, "stages": stages, **changes})  # type: ignore[arg-type]


def _stage(name: str, steps: int, **shares: int) -> RecipeStage:
    streams = [Stream(source=s, proportion=Fraction(w)) for s, w in shares.items()]
    length = Target(kind="iterations", value=Fraction(steps))
    return RecipeStage(name=name, streams=tuple(streams), length=length, batching="random")


def opened(folder: Path, cache_dir: Path | None = None) -> OpenRecipe:
    return open_recipe(recipe(folder), cache_dir=cache_dir)


def recipe_loader(folder: Path, rank: int) -> Loader:
    return loader_of_recipe(
        opened(folder), data_parallel_rank=rank, data_parallel_size=RANKS, micro_batch_size=2
    )


def text_loader(folder: Path, rank: int) -> Loader:
    """One source, the order of Megatron, receipts."""
    web = IndexedDataset(str(folder / "web"))
    index = megaindex.build_index(web, sequence_length=S, seed=1, epochs=2)
    recorder = Recorder([corpus_fingerprint(web)], {"seed": 1}, stride=32)
    return Loader(index, web, _sampler(index, rank), recorder=recorder)


def blend_loader(folder: Path, rank: int) -> Loader:
    """Two sources, order epoch, no receipts."""
    index = megaindex.build_blend(
        [folder / "web", folder / "books"], weights=[0.7, 0.3], num_samples=150,
        sequence_length=S, order="epoch", seed=1,
    )  # fmt: skip
    return Loader(index, index.datasets, _sampler(index, rank))


def cyclic_loader(folder: Path, rank: int) -> Loader:
    web = IndexedDataset(str(folder / "web"))
    index = megaindex.build_index(web, sequence_length=S, seed=1, order="window", epochs=1)
    sampler = CyclicSampler(
        num_samples=index.num_samples, micro_batch_size=2, data_parallel_rank=rank,
        data_parallel_size=RANKS, train_samples=1000,
    )  # fmt: skip
    return Loader(index, web, sampler)


LOADERS = {
    "text": text_loader,
    "blend": blend_loader,
    "cyclic": cyclic_loader,
    "recipe": recipe_loader,
}
SERVED = {"text": 7, "blend": 9, "cyclic": 11, "recipe": 10}
"""Batches before the checkpoint; some within a step."""


def _sampler(index: Any, rank: int) -> MicroBatchSampler:
    return MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=2, data_parallel_rank=rank,
        data_parallel_size=RANKS, global_batch_size=12,
    )  # fmt: skip


def take(loader: Iterable[Any], batches: int | None = None) -> Iterator[list[list[int]]]:
    """The tokens of so many batches, or of all."""
    for batch in itertools.islice(loader, batches):
        yield batch["tokens"].tolist()


def digest(batches: list[Any]) -> str:
    """Of the tokens of some batches."""
    return xxhash.xxh3_128_hexdigest(json.dumps(batches).encode())
