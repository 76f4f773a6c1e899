"""``python -m benchmarks.overlap``: time that a GPU waits for batches.

A step multiplies matrices for some milliseconds. It is timed with a batch that stays on the device
(the lower bound), with a `Loader` that copies ahead, and with megatron-core's GPTDataset in a
DataLoader. All sides serve the same samples; their first batches are compared.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from rich.console import Console
from rich.table import Table

import megaindex
from megaindex.loader import GPTDataset, Loader, MicroBatchSampler

SEED = 1
Batch = dict[str, torch.Tensor]


def main() -> int:
    options = _parser().parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("benchmarks.overlap: there is no CUDA device; --device cpu only shows that it runs",
              file=sys.stderr)  # fmt: skip
        return 2
    with tempfile.TemporaryDirectory(dir=options.dir) as folder:
        bench = _Bench(options, Path(folder))
        rows = bench.run()
    shape = f"{bench.rows} samples of {options.seq_length} tokens a step"
    table = Table(title=f"{_name(options.device)}, {shape}, {options.rounds} rounds")
    for column in ("batches from", "ms a step", "times the least", "M tokens/s"):
        table.add_column(column, justify="left" if column == "batches from" else "right")
    least = rows["resident batch"]
    for name, seconds in rows.items():
        tokens = bench.rows * options.seq_length / seconds / 1e6
        table.add_row(name, f"{1e3 * seconds:.3f}", f"{seconds / least:.3f}", f"{tokens:,.1f}")
    Console(width=120).print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.overlap", description=__doc__)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--seq-length", type=int, default=2048)
    parser.add_argument("--micro-batch-size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--width", type=int, default=4096, help="of the matrices of a step")
    parser.add_argument("--products", type=int, default=16, help="matrix products of a step")
    parser.add_argument("--dir", help="where the corpus goes")
    parser.add_argument("--json", type=Path)
    return parser


class _Bench:
    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self._options = options
        self.rows = options.micro_batch_size
        self._samples = self.rows * (options.steps + 1)
        self._prefix = _write_corpus(folder / "corpus", self._samples * options.seq_length + 1)
        self._cache = folder / "cache"
        self._dataset = megaindex.IndexedDataset(self._prefix)
        self._index = megaindex.build_index(
            self._dataset, sequence_length=options.seq_length, seed=SEED
        )
        self._weight = torch.randn(
            options.width, options.width, device=options.device, dtype=torch.bfloat16
        )

    def run(self) -> dict[str, float]:
        """Return the seconds of a step with each side, measured alternately."""
        sides: dict[str, Callable[[], Iterator[Batch]]] = {
            "resident batch": self._resident,
            "Loader, copied ahead": self._loader,
            "GPTDataset of megaindex, DataLoader without workers": lambda: self._torch(
                0, ours=True
            ),
        }
        for workers in (0, 2, 4):
            name = f"megatron-core's GPTDataset, DataLoader with {workers} workers"
            sides[name] = lambda workers=workers: self._torch(workers, ours=False)  # type: ignore[misc]
        first = {name: _tokens(next(side())) for name, side in sides.items()}
        reference = first["Loader, copied ahead"]
        if any(not torch.equal(tokens, reference) for tokens in first.values()):
            raise SystemExit("overlap: the sides do not serve the same samples")
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(self._options.rounds):
            for name, side in sides.items():
                seconds[name].append(self._steps(side()))
        return {name: statistics.median(measured) for name, measured in seconds.items()}

    def _steps(self, batches: Iterator[Batch]) -> float:
        """Return the seconds of a step, after a warm-up."""
        self._compute(next(batches))
        self._wait()
        start = time.perf_counter()
        for _ in range(self._options.steps - 1):
            self._compute(next(batches))
        self._wait()
        return (time.perf_counter() - start) / (self._options.steps - 1)

    def _compute(self, batch: Batch) -> torch.Tensor:
        """Run work that depends on the batch and does not synchronize with the host."""
        state = self._weight * batch["loss_mask"].mean() + batch["tokens"].sum() % 2
        for _ in range(self._options.products):
            state = torch.tanh(state @ self._weight)
        return state

    def _wait(self) -> None:
        if self._options.device == "cuda":
            torch.cuda.synchronize()

    def _sampler(self) -> MicroBatchSampler:
        return MicroBatchSampler(
            num_samples=self._samples, micro_batch_size=self.rows, data_parallel_rank=0,
            data_parallel_size=1,
        )  # fmt: skip

    def _resident(self) -> Iterator[Batch]:
        batch = next(self._loader())
        while True:
            yield batch

    def _loader(self) -> Iterator[Batch]:
        loader = Loader(
            self._index,
            self._dataset,
            self._sampler(),
            reader="mapped",
            device=self._options.device,
            num_threads=2,
            read_ahead=4,
        )
        return iter(loader)

    def _torch(self, workers: int, *, ours: bool) -> Iterator[Batch]:
        dataset = GPTDataset(self._index, self._dataset) if ours else self._peer()
        device = self._options.device
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_sampler=self._sampler(),
            num_workers=workers,
            pin_memory=device == "cuda",
        )
        for batch in loader:
            yield {name: field.to(device, non_blocking=True) for name, field in batch.items()}

    def _peer(self) -> torch.utils.data.Dataset[Batch]:
        from benchmarks import peer

        theirs = peer.open_megatron(Path(self._prefix))
        dataset: torch.utils.data.Dataset[Batch] = peer.megatron_index(
            theirs, self._index.num_samples, self._options.seq_length, SEED, self._cache
        )
        return dataset


def _name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else "CPU"


def _tokens(batch: Batch) -> torch.Tensor:
    return batch["tokens"].cpu()


def _write_corpus(prefix: Path, tokens: int) -> str:
    rng = np.random.default_rng(1)
    with megaindex.IndexedDatasetWriter(str(prefix), np.uint16) as writer:
        while tokens > 0:
            writer.add_document(rng.integers(1, 50_000, min(tokens, 1 << 16)).astype(np.uint16))
            tokens -= 1 << 16
    return str(prefix)


if __name__ == "__main__":
    sys.exit(main())
