"""Benchmark of random samples of a corpus in an object store, against s3fs."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np

import megaindex
from benchmarks.object_server import served
from benchmarks.timing import Comparison, timed

SEQUENCE_LENGTH = 2048
MICRO_BATCH = 8
_TOKENS = 128 << 20  # of 2 bytes each
_MEAN_TOKENS = 1000
_BUCKET = "bucket"

Peer = Literal["one by one", "batch by batch"]


def compare(peer: Peer, latency: float, directory: Path, rounds: int) -> Comparison:
    """Time the same samples on both sides; every batch is first compared with the file.

    Args:
        peer: call of s3fs: ``cat_file`` for each range, or ``cat_ranges`` for those of a batch.
        latency: delay of the server in seconds.
    """
    samples = 512 if peer == "batch by batch" or not latency else 128
    write_corpus(directory)
    with served(directory, latency) as port, _environment(port, directory):
        sides = _Sides(port, directory)
        ids = np.random.default_rng(3).permutation(sides.num_samples)[:samples]
        batches = ids.reshape(-1, MICRO_BATCH).tolist()
        runs: dict[str, Callable[[], Iterator[Any]]] = {
            "ours": partial(sides.ours, batches),
            "peer": partial(sides.theirs, batches, peer),
        }
        for name, run in runs.items():
            sides.check(name, batches, run())
        seconds: dict[str, list[float]] = {"ours": [], "peer": []}
        for _ in range(rounds):
            for name, run in runs.items():
                seconds[name].append(timed(lambda run=run: sum(1 for _ in run())))
    wait = f"{1e3 * latency:.0f} ms a request" if latency else "no latency"
    return Comparison(
        what=f"random samples of an object store, S 2048, {wait}, against s3fs {peer}",
        ours=seconds["ours"],
        peer=seconds["peer"],
        items=samples,
        unit="sample",
        output_bytes=samples * SEQUENCE_LENGTH * 8,
    )


@cache
def write_corpus(directory: Path) -> Path:
    """Write a corpus of random tokens to the folder served as a bucket."""
    folder = directory / _BUCKET
    folder.mkdir()
    rng = np.random.default_rng(1)
    drawn = rng.lognormal(np.log(_MEAN_TOKENS) - 0.5, 1.0, _TOKENS // _MEAN_TOKENS)
    tokens = rng.integers(0, 50_000, 1 << 22, dtype=np.uint16)
    with megaindex.IndexedDatasetWriter(str(folder / "corpus"), np.uint16) as writer:
        for length in np.clip(drawn, 1, 1 << 20).astype(np.int64).tolist():
            begin = int(rng.integers(0, tokens.size - length))
            writer.add_document(tokens[begin : begin + length])
    return folder / "corpus"


@contextlib.contextmanager
def _environment(port: int, directory: Path) -> Iterator[None]:
    """Set server and credentials for both sides, without a proxy."""
    before = dict(os.environ)
    for name in [name for name in os.environ if "proxy" in name.lower()]:
        del os.environ[name]
    os.environ |= {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "MEGAINDEX_OBJECT_CACHE": str(directory / "objects"),
    }
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


class _Sides:
    """Both sides over the same object, in the same order."""

    def __init__(self, port: int, directory: Path) -> None:
        import s3fs

        from megaindex.objects import store as library

        library._this.clients.clear()  # of the previous server
        self._local = megaindex.IndexedDataset(str(write_corpus(directory)))
        self._remote = megaindex.IndexedDataset(f"s3://{_BUCKET}/corpus")
        self._index = megaindex.build_index(
            self._local, sequence_length=SEQUENCE_LENGTH, seed=1, epochs=1
        )
        self.num_samples = self._index.num_samples
        self._files = s3fs.S3FileSystem(
            endpoint_url=f"http://127.0.0.1:{port}", skip_instance_cache=True
        )

    def ours(self, batches: list[list[int]]) -> Iterator[np.ndarray[Any, Any]]:
        from megaindex.loader import Loader

        for batch in Loader(self._index, self._remote, batches):
            yield batch["tokens"].numpy()

    def theirs(self, batches: list[list[int]], how: Peer) -> Iterator[np.ndarray[Any, Any]]:
        for rows in batches:
            spans = self._index.locate(rows)
            size = self._local.dtype.itemsize
            begins = self._local.sequence_pointers[spans.document] + spans.offset * size
            stops = begins + spans.length * size
            path = f"{_BUCKET}/corpus.bin"
            if how == "one by one":
                parts = [
                    self._files.cat_file(path, start=begin, end=stop)
                    for begin, stop in zip(begins.tolist(), stops.tolist(), strict=True)
                ]
            else:
                paths = [path] * begins.size
                parts = self._files.cat_ranges(paths, begins.tolist(), stops.tolist())
            tokens = np.frombuffer(b"".join(parts), self._local.dtype).astype(np.int64)
            yield tokens.reshape(len(rows), -1)[:, :-1]

    def check(
        self, name: str, batches: list[list[int]], got: Iterator[np.ndarray[Any, Any]]
    ) -> None:
        from megaindex.loader import MappedTokens

        reader = MappedTokens([self._local])
        for rows, tokens in zip(batches, got, strict=True):
            expected = np.empty((len(rows), SEQUENCE_LENGTH), np.int64)
            reader.read(self._index.locate(rows), expected, pad_id=0)
            if not np.array_equal(tokens, expected):
                raise SystemExit(f"objects, {name}: a batch differs from the file's")
