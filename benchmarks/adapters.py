"""BlendedMegatronDatasetBuilder on a blend of 500 corpora, with the adapter installed and without.

Both sides run the same lines of megatron-core in one process, in turn, on one set of files.
"""

from __future__ import annotations

import gc
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

import megaindex.adapters.megatron as adapter
from benchmarks.corpora import Shape, write_sparse
from benchmarks.timing import Comparison, timed

SOURCES = 500
SEQUENCE_LENGTH = 2048
SIZES = {"20k": 20_000, "2k": 2_000}  # documents of 1000 tokens in each corpus
ASKED = {("20k", "cold"): 5.0, ("20k", "warm"): 10.0}
_COMPARED = 200  # samples of every split


def compare(size: str, what: str, directory: Path, rounds: int) -> Comparison:
    """A ``cold`` build, a ``warm`` one, or a warm one up to the ``first`` batch."""
    documents = SIZES[size]
    prefixes = _corpora(directory, documents)
    samples = SOURCES * documents * 1000 // SEQUENCE_LENGTH  # an epoch, about
    cache = directory / f"blend-{size}"

    def build() -> list[Any]:
        return _build(prefixes, samples, cache)

    def empty() -> None:
        shutil.rmtree(cache, ignore_errors=True)

    if what == "cold":
        _check_equal(build, empty, cache)
    run = {"cold": build, "warm": build, "first": lambda: _first_batch(build()[0])}[what]
    ours, peer = _alternate(run, empty if what == "cold" else (lambda: None), rounds)
    kind = "warm, and a first batch of 16" if what == "first" else what
    return Comparison(
        what=f"Megatron blend of {SOURCES} corpora of {documents:,} documents, {kind}",
        ours=ours,
        peer=peer,
        items=SOURCES,
        unit="source",
        asked=ASKED.get((size, what)),
        output_bytes=1 << 20,
    )


def _first_batch(blend: Any) -> list[Any]:
    if hasattr(blend, "__getitems__"):
        batch: list[Any] = blend.__getitems__(range(16))
        return batch
    return [blend[i] for i in range(16)]


def _alternate(
    run: Callable[[], object], prepare: Callable[[], None], rounds: int
) -> tuple[list[float], list[float]]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 1):
        for side, installed in zip(seconds, (True, False), strict=True):
            prepare()
            gc.collect()
            with _installed(installed):
                elapsed = timed(run)
            if number:  # the first run of each side warms it up
                side.append(elapsed)
    return seconds


@contextmanager
def _installed(wanted: bool) -> Iterator[None]:
    if wanted:
        adapter.install()
    try:
        yield
    finally:
        adapter.uninstall()


def _corpora(directory: Path, documents: int) -> list[str]:
    folder = directory / f"blend-of-{documents}"
    folder.mkdir(exist_ok=True)
    first = write_sparse(folder, Shape(name="c0", documents=documents, mean_tokens=1000, epochs=1))
    prefixes = [str(first)]
    for number in range(1, SOURCES):  # alike, which makes no difference to the work
        prefix = folder / f"c{number}"
        if not prefix.with_suffix(".idx").exists():
            with open(prefix.with_suffix(".bin"), "wb") as file:
                file.truncate(first.with_suffix(".bin").stat().st_size)
            shutil.copyfile(first.with_suffix(".idx"), prefix.with_suffix(".idx"))
        prefixes.append(str(prefix))
    return prefixes


def _build(prefixes: list[str], samples: int, cache: Path) -> list[Any]:

    import torch.distributed as dist

    from benchmarks import peer

    if not dist.is_initialized():  # a blend asks for its rank
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    weights = np.random.default_rng(20260101).lognormal(0, 0.5, len(prefixes))
    config = peer.GPTDatasetConfig(
        random_seed=1,
        sequence_length=SEQUENCE_LENGTH,
        blend=(prefixes, weights.tolist()),
        split="969,30,1",
        tokenizer=peer.Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        create_attention_mask=False,
        path_to_cache=str(cache),
        mid_level_dataset_surplus=0.05,  # else Megatron refuses: a source is drawn beyond its end
    )
    sizes = [samples, samples // 50, samples // 500]
    builder = peer.BlendedMegatronDatasetBuilder(peer.GPTDataset, sizes, lambda: True, config)
    built: list[Any] = builder.build()
    return built


def _check_equal(build: Callable[[], list[Any]], empty: Callable[[], None], cache: Path) -> None:
    """Files byte by byte, and samples of every split, of a cold build."""

    def outcome(installed: bool) -> tuple[dict[str, bytes], list[Any]]:
        empty()
        with _installed(installed):
            built = build()
            read = [
                [{k: np.asarray(v) for k, v in d[i].items()} for i in range(0, len(d), step)]
                for d in built
                for step in [max(1, len(d) // _COMPARED)]
            ]
        paths = [p for p in cache.iterdir() if not p.name.endswith("-megaindex.json")]
        return {path.name: path.read_bytes() for path in paths}, read

    theirs, ours = outcome(False), outcome(True)
    if ours[0] != theirs[0]:
        raise SystemExit("the caches differ")
    for a, b in zip(theirs[1], ours[1], strict=True):
        for x, y in zip(a, b, strict=True):
            if x.keys() != y.keys() or not all(np.array_equal(x[k], y[k]) for k in x):
                raise SystemExit("the samples differ")
