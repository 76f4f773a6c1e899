"""One data-parallel rank of a small training run, in a process of its own."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import distributed

import megaindex
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.index.receipts import BlockReceipts, Receipt
from megaindex.loader import CostModel, GPTDataset, MicroBatchSampler, Recorder, receipted

GLOBAL_BATCH = 24
SAVE_EVERY = 2  # steps


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What all ranks of one start of the run have in common."""

    folder: Path
    """Holds the corpus ``c``, the checkpoint, and the result of a run that ends."""
    name: str
    ranks: int
    micro_batch_size: int
    workers: int = 0
    dies: tuple[int, int] | None = None
    """Rank and micro batch at which a rank kills itself, no warning given."""
    swapped: tuple[int, int] | None = None
    """Two samples that are served in each other's place."""
    balance: CostModel | None = None


class Swapping:
    """An index that serves two samples in each other's place."""

    def __init__(self, index: Any, pair: tuple[int, int]) -> None:
        self._index, self._other = index, dict([pair, pair[::-1]])

    def __getattr__(self, name: str) -> Any:
        return getattr(self._index, name)

    def locate(self, sample_ids: Any) -> Any:
        ids = np.asarray(sample_ids).tolist()
        return self._index.locate([self._other.get(k, k) for k in ids])


def run_index(folder: Path) -> tuple[Any, Any, list[str]]:
    """The index of the run, its dataset and the fingerprints of its sources."""
    dataset = megaindex.IndexedDataset(folder / "c")
    index = megaindex.build_index(dataset, sequence_length=16, seed=3, order="epoch")
    return index, dataset, [corpus_fingerprint(dataset)]


def train(launch: Launch, rank: int) -> None:
    """Steps over the index from the last checkpoint on, to the end or to this rank's death."""
    distributed.init_process_group(
        "gloo", f"file://{launch.folder}/{launch.name}.rendezvous",
        rank=rank, world_size=launch.ranks,
    )  # fmt: skip
    index, dataset, fingerprints = run_index(launch.folder)
    if launch.swapped is not None:
        index = Swapping(index, launch.swapped)
    sampler = MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=launch.micro_batch_size,
        data_parallel_rank=rank, data_parallel_size=launch.ranks, global_batch_size=GLOBAL_BATCH,
        tail="pad", fingerprint=fingerprints[0], balance=launch.balance, index=index,
    )  # fmt: skip
    recorder = Recorder(fingerprints, {"seed": 3}, stride=64)
    losses = resume(launch.folder, sampler, recorder, rank)
    loader = torch.utils.data.DataLoader(
        GPTDataset(index, dataset, fingerprints=fingerprints), batch_sampler=sampler,
        num_workers=launch.workers,
        # its workers end with the process that forked them, however that ends
        multiprocessing_context="fork" if launch.workers else None,
    )  # fmt: skip
    accumulation = GLOBAL_BATCH // (launch.micro_batch_size * launch.ranks)
    loss = torch.zeros(1, dtype=torch.int64)
    positions: list[int] = []
    steps: list[list[list[int]]] = []
    for done, batch in enumerate(receipted(noted(loader, positions), recorder, sampler), 1):
        if launch.dies == (rank, done):
            os.kill(os.getpid(), signal.SIGKILL)
        loss += (batch["labels"] * batch["loss_mask"].long()).sum()
        if done % accumulation:
            continue
        distributed.all_reduce(loss)
        losses.append(int(loss))
        loss.zero_()
        steps.append(of_every_rank(positions))
        positions.clear()
        if len(losses) % SAVE_EVERY == 0:
            save(launch.folder, sampler.state_after(done), recorder, losses, rank)
    placed = of_every_rank((recorder.state_dict()["in_place"], len(losses)))
    finish(launch, recorder.receipt, {"losses": losses, "steps": steps, "placed": placed}, rank)
    distributed.destroy_process_group()


def noted(batches: Iterable[Any], positions: list[int]) -> Iterator[Any]:
    """The batches; the positions of their samples are added to a list."""
    for batch in batches:
        positions += batch["receipt"][:, 0].tolist()
        yield batch


def of_every_rank(value: Any) -> list[Any]:
    everything: list[Any] = [None] * distributed.get_world_size()
    distributed.all_gather_object(everything, value)
    return everything


def resume(folder: Path, sampler: Any, recorder: Recorder, rank: int) -> list[int]:
    """Losses of the steps so far; what was served so far is kept by one rank."""
    path = folder / "checkpoint"
    if not path.exists():
        return []
    state = torch.load(path, weights_only=True)
    sampler.load_state_dict(state["sampler"])
    if rank == 0:
        recorder.load_state_dict(state["receipts"])
    losses: list[int] = state["losses"]
    return losses


def save(
    folder: Path, sampler: dict[str, Any], recorder: Recorder, losses: list[int], rank: int
) -> None:
    parts: Any = [None] * distributed.get_world_size() if rank == 0 else None
    distributed.gather_object(recorder.state_dict(), parts)
    if rank:
        return
    ladders = [BlockReceipts.from_dict(part["ladder"]) for part in parts]
    ladder = sum(ladders[1:], ladders[0])
    receipts = {**parts[0], **ladder.total.to_dict(), "ladder": ladder.to_dict()}
    torch.save(
        {"sampler": sampler, "receipts": receipts, "losses": losses}, folder / "checkpoint.new"
    )
    (folder / "checkpoint.new").replace(folder / "checkpoint")


def finish(launch: Launch, receipt: Receipt, served: dict[str, Any], rank: int) -> None:
    limbs = torch.from_numpy(receipt.limbs())
    distributed.all_reduce(limbs)
    if rank == 0:
        result = {**Receipt.from_limbs(limbs.numpy()).to_dict(), **served}
        (launch.folder / f"{launch.name}.json").write_text(json.dumps(result))
