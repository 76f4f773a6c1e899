"""Benchmark of GPT-NeoX's data loaders over 50 sources × 3 splits, with and without adapter.

Both sides run the same code of a GPT-NeoX checkout alternately in one process on the same files:
``build_train_valid_test_data_loaders`` and the loaders that it returns. Data modules and compiled
helpers are GPT-NeoX's; packages for GPU clusters are replaced by stubs.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np

import megaindex.adapters.neox as adapter
from benchmarks.corpora import move_away, write_linked
from benchmarks.timing import Comparison, allow_many_files, installed_or_not, timed

SOURCES, DOCUMENTS = 50, 20_000
MANY = {"sources": 250, "documents": 10_000}  # GPT-NeoX blends at most 254
SEQUENCE_LENGTH = 2048
BATCH = 4
STEPS = 20_000  # about one in six samples of the sources
READ = 4000  # samples
_SYNCED_AFTER = 3.0  # seconds, for the background sync of megaindex
GOALS = {"cold": 5.0, "warm": 10.0, "samples": 3.0, "batches": 3.0}
WHAT = {
    "cold": "build",
    "warm": "open",
    "first": "open, and a first batch of each loader",
    "samples": f"read {READ} samples one by one",
    "batches": f"read {READ} samples as batches of {BATCH}",
    "workers": f"read {READ} samples as batches of {BATCH}, 2 workers",
}


def missing(checkout: str | None) -> str | None:
    """Return the missing requirement of this benchmark, or None."""
    if checkout is None:
        return "neox: skipped; give --neox the path of a GPT-NeoX checkout"
    data = Path(checkout) / "megatron" / "data"
    if not (data / "data_utils.py").is_file():
        return f"neox: skipped; {checkout} is no GPT-NeoX checkout: it has no megatron/data"
    if not list(data.glob("helpers*.so")):
        return f"neox: skipped; compile GPT-NeoX's helpers first: make -C {data}"
    return None


def compare(
    what: str,
    checkout: str,
    directory: Path,
    rounds: int,
    *,
    sources: int = SOURCES,
    documents: int = DOCUMENTS,
) -> Comparison:
    """Run one of `WHAT` in a process of its own, since megatron-core has the same package name."""
    command = [sys.executable, "-m", "benchmarks.neox", what, checkout, str(directory), str(rounds)]
    command += [str(sources), str(documents)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return Comparison(**json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.neox", description=__doc__)
    parser.add_argument("what", choices=WHAT)
    parser.add_argument("checkout", help="path of a GPT-NeoX checkout")
    parser.add_argument("directory", type=Path, help="where the corpora go")
    parser.add_argument("rounds", type=int)
    parser.add_argument("sources", type=int)
    parser.add_argument("documents", type=int, help="of 1000 tokens, in each source")
    options = parser.parse_args()
    allow_many_files()
    with _redirected_output() as out:
        run = _Run(
            load_data_utils(options.checkout), options.directory, options.sources, options.documents
        )
        row = _compare(options.what, run, options.rounds)
        print(json.dumps(row), file=out)


@contextlib.contextmanager
def _redirected_output() -> Iterator[Any]:
    """Send the output of both sides to a file; yield the former standard output."""
    sys.stdout.flush()
    with os.fdopen(os.dup(1), "w") as out, tempfile.TemporaryFile() as log:
        os.dup2(log.fileno(), 1)
        yield out
        sys.stdout.flush()


def _compare(what: str, run: _Run, rounds: int) -> dict[str, Any]:
    run.check_equal()
    datasets = 3 * run.sources
    measure, items, unit = {
        "cold": (run.cold, datasets, "dataset"),
        "warm": (run.warm, datasets, "dataset"),
        "first": (run.first, datasets, "dataset"),
        "samples": (run.samples, READ, "sample"),
        "batches": (partial(run.batches, 0), READ, "sample"),
        "workers": (partial(run.batches, 2), READ, "sample"),
    }[what]
    seconds = _alternate(measure, rounds)
    run.remove_moved()
    return {
        "what": f"GPT-NeoX, {run.sources:,} sources x 3 splits of {run.documents:,} documents, "
        f"{WHAT[what]}",
        "ours": seconds[True],
        "peer": seconds[False],
        "items": items,
        "unit": unit,
        "asked": GOALS.get(what),
        "output_bytes": 1 << 20,
    }


def _alternate(measure: Callable[[], float], rounds: int) -> dict[bool, list[float]]:
    seconds: dict[bool, list[float]] = {True: [], False: []}
    for number in range(rounds + 1):
        for installed in (True, False):
            gc.collect()
            os.sync()
            with installed_or_not(adapter, installed):
                elapsed = measure()
            if number:  # the first run of each side is a warm-up
                seconds[installed].append(elapsed)
    return seconds


class _Run:
    """Settings of a run, and its measured parts in seconds."""

    def __init__(self, utils: Any, directory: Path, sources: int, documents: int) -> None:
        self._utils = utils
        self.sources, self.documents = sources, documents
        self._folder = directory / f"neox-{sources}-of-{documents}"
        self._moved = directory / "moved-away"
        prefixes = write_linked(self._folder, sources, documents)
        weights = np.random.default_rng(20260101).lognormal(0, 0.5, len(prefixes)).tolist()
        nothing = [
            f"{kind}_data_paths"
            for part in ("train", "valid", "test")
            for kind in (
                f"{part}_label", f"{part}_reward", f"pos_{part}", f"neg_{part}",
                f"pos_{part}_label", f"neg_{part}_label",
            )
        ]  # fmt: skip
        self._settings = {
            **dict.fromkeys(nothing),
            **{f"{part}_data_paths": prefixes for part in ("train", "valid", "test")},
            **{f"{part}_data_weights": weights for part in ("train", "valid", "test")},
            "train_iters": STEPS, "train_epochs": None, "eval_interval": 1000, "eval_iters": 10,
            "train_batch_size": BATCH, "batch_size": BATCH, "seq_length": SEQUENCE_LENGTH,
            "seed": 1234, "data_impl": "mmap", "pack_impl": "packed", "dataset_impl": "gpt2",
            "allow_chopped": True, "mmap_warmup": False, "weight_by_num_documents": False,
            "precompute_model_name": None, "is_pipe_parallel": False, "use_shared_fs": True,
            "num_workers": 0,
        }  # fmt: skip

    def cold(self) -> float:
        time.sleep(_SYNCED_AFTER)
        self._empty()
        return timed(self._build)

    def warm(self) -> float:
        self._build()
        return timed(self._build)

    def first(self) -> float:
        self._build()
        return timed(lambda: [next(iter(loader)) for loader in self._build().values()])

    def samples(self) -> float:
        dataset = self._build()["train"].dataset
        begin, end = _halves(STEPS * BATCH)
        for number in begin:
            dataset[number]
        return timed(lambda: [dataset[number]["text"].size for number in end])

    def batches(self, workers: int) -> float:
        """Time the second half of the batches; the first half opens files."""
        loader = self._build(num_workers=workers)["train"]
        iterator = iter(loader)
        for _ in range(READ // BATCH):
            next(iterator)
        return timed(lambda: [next(iterator)["text"].shape for _ in range(READ // BATCH)])

    def check_equal(self) -> None:
        """Check that files, batches of every loader and samples of the blends are equal."""
        with installed_or_not(adapter, False):
            theirs = self._outcome()
        with installed_or_not(adapter, True):
            ours = self._outcome()
        if ours[0] != theirs[0]:
            raise SystemExit("the caches differ")
        if len(ours[1]) != len(theirs[1]) or not all(
            np.array_equal(a, b) for a, b in zip(ours[1], theirs[1], strict=True)
        ):
            raise SystemExit("the samples differ")

    def _outcome(self) -> tuple[dict[str, bytes], list[Any]]:
        self._empty()
        loaders = self._build()
        files = {path.name: path.read_bytes() for path in self._folder.glob("*.npy")}
        read = []
        for loader in loaders.values():
            read += [batch["text"].numpy() for batch in itertools.islice(loader, 20)]
            size = len(loader.dataset)
            read += [loader.dataset[k]["text"] for k in range(0, size, max(1, size // 200))]
            read += [loader.dataset.dataset_index, loader.dataset.dataset_sample_index]
        return files, read

    def remove_moved(self) -> None:
        """Remove the files of earlier builds."""
        shutil.rmtree(self._moved, ignore_errors=True)

    def _build(self, **changed: Any) -> dict[str, Any]:
        settings = SimpleNamespace(**{**self._settings, **changed})
        loaders: dict[str, Any] = self._utils.build_train_valid_test_data_loaders(settings)
        return loaders

    def _empty(self) -> None:
        blends = self._folder / "megaindex-blends"
        move_away([blends, *self._folder.glob("*_indexmap_*")], self._moved)


def _halves(size: int) -> tuple[range, range]:
    """Return 2 × READ samples spread over a run: those of the warm-up and those measured."""
    step = max(1, size // (2 * READ))
    return range(0, READ * step, step), range(READ * step, 2 * READ * step, step)


def load_data_utils(checkout: str) -> Any:
    """Import GPT-NeoX's ``megatron.data.data_utils`` in a process group of one CPU rank."""
    import torch

    def print_rank_0(*message: object) -> None:
        if torch.distributed.get_rank() == 0:
            print(*message, flush=True)

    torch.distributed.init_process_group(
        "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    torch.cuda.LongTensor = torch.LongTensor
    package, mpu = ModuleType("megatron"), ModuleType("megatron.mpu")
    package.__path__ = [str(Path(checkout) / "megatron")]
    vars(package).update(print_rank_0=print_rank_0, mpu=mpu)
    initialize = ModuleType("megatron.mpu.initialize")
    for kind in ("data", "model", "pipe", "io"):
        alone: dict[str, Any] = {
            f"get_{kind}_parallel_rank": lambda: 0,
            f"get_{kind}_parallel_world_size": lambda: 1,
            f"get_{kind}_parallel_group": lambda: None,
            f"get_{kind}_parallel_src_rank": lambda: 0,
        }
        vars(mpu).update(alone)
        vars(initialize).update(alone)
    for module in (package, mpu, initialize):
        sys.modules[module.__name__] = module
    import megatron.data.data_utils as module

    return module


if __name__ == "__main__":
    main()
