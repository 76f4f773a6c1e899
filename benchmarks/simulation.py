"""``python -m benchmarks.simulation``: start of a run of 10 trillion tokens on 16,384 ranks.

The work of one machine is measured on both sides; a discrete-event simulation adds the cluster:
every rank queues at a metadata service for its files and at storage servers for its tokens. The
assumptions are the fields of `Cluster` and `Corpora`.
"""

from __future__ import annotations

import argparse
import heapq
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

import megaindex
from benchmarks import index_build, kernels
from benchmarks.corpora import SHAPES, write_sparse
from megaindex.index.mixing import Stratified


@dataclass(frozen=True, kw_only=True)
class Corpora:
    """Assumed corpora."""

    sources: int = 1000
    documents: int = 10_000_000
    """Of each source."""
    mean_tokens: int = 1000
    token_bytes: int = 4
    sequence_length: int = 8192

    @property
    def samples(self) -> int:
        """Samples of one epoch of all sources."""
        return self.sources * (self.documents * self.mean_tokens // self.sequence_length)


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """Assumed cluster."""

    ranks: int = 16_384
    ranks_per_node: int = 8
    builders: int = 64
    """Nodes that build indices side by side, where that is possible."""
    metadata_rate: float = 100_000.0
    """Names that the file system looks up in a second, for all nodes together."""
    lookup_latency: float = 3e-4
    """Seconds that a rank waits for each, one after another, where nobody is in its way."""
    storage_servers: int = 256
    server_bandwidth: float = 4e9
    """Bytes a second of each server."""
    node_bandwidth: float = 20e9
    """Bytes a second into each node."""
    latency: float = 1e-3
    """Median seconds of one read; single ones are lognormal with sigma 0.8."""
    reads_in_flight: int = 16
    """Of one rank."""

    @property
    def nodes(self) -> int:
        return self.ranks // self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class Rates:
    """Measured seconds on this machine."""

    index: tuple[float, float]
    """A document of an array index, built and saved: ours, megatron-core's."""
    blend: tuple[float, float]
    """A draw from 1000 datasets."""
    check: float
    """A document of an .idx that is checked when it is opened."""
    table: float
    """A document of the pass of order epoch, one thread."""
    divisor: float
    """Counting the draws of 1000 sources up to any position, by Webster's rule."""
    open: float
    """A pair, its entries known to be valid."""


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to start the run, as work of each rank."""

    name: str
    before: float
    """Seconds on nodes without accelerators, before the run is started."""
    kept_bytes: int
    """Of index files."""
    names: int
    """Files that each rank, or its node, looks up before its first batch."""
    names_by_node: bool
    """Whether the ranks of a node share what was looked up (stat), or each asks (open)."""
    node_bytes: int
    """Of .idx files that each node reads before the first batch."""
    rank_seconds: float
    """Of work on each rank before the first batch."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation", description=__doc__)
    parser.add_argument("--dir", help="where corpora and caches go; default: the system's")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/simulation.json"))
    options = parser.parse_args()
    corpora, cluster = Corpora(), Cluster()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="megaindex-bench-") as temporary:
        rates = measure(Path(temporary))
    results = {way.name: start(way, corpora, cluster) for way in ways(rates, corpora, cluster)}
    console = Console(width=None if Console().is_terminal else 130, highlight=False)
    console.print(_table(results, corpora, cluster))
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = {"rates": rates, "corpora": corpora, "cluster": cluster}
    text = {name: asdict(part) for name, part in report.items()} | {"results": results}
    options.json.write_text(json.dumps(text, indent=1))
    console.print(f"written to {options.json}")


def measure(directory: Path) -> Rates:
    """Measure the rates, after a comparison of results with the peer's."""
    built = index_build.compare("10B", directory, 1)
    drawn = kernels.greedy("lognormal", 1000, 1)
    shape = SHAPES["10B"]
    prefix = write_sparse(directory, shape)

    index = megaindex.build_index(prefix, sequence_length=8192, seed=1, order="epoch")
    check = _least(lambda: megaindex.IndexedDataset(prefix).validate())
    table = _least(lambda: index._make_table(0, 1))
    return Rates(
        index=(statistics.median(built.ours) / built.items,
               statistics.median(built.peer) / built.items),
        blend=(statistics.median(drawn.ours) / drawn.items,
               statistics.median(drawn.peer) / drawn.items),
        check=check / shape.documents,
        table=table / shape.documents,
        divisor=_divisor_seconds(),
        open=_least(lambda: megaindex.IndexedDataset(prefix)),
    )  # fmt: skip


def _divisor_seconds() -> float:
    shares = tuple(np.random.default_rng(1).integers(1, 1000, 1000).tolist())
    return _least(lambda: Stratified(shares=shares).counts(10**9))


def _least(work: Callable[[], object]) -> float:
    """Return the seconds of the fastest of five runs."""
    seconds = []
    for _ in range(5):
        begin = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)


def ways(rates: Rates, corpora: Corpora, cluster: Cluster) -> list[Way]:
    """Return the work of each rank for each way, derived from the programs on one machine."""
    documents = corpora.sources * corpora.documents
    # document_index, sample_index and shuffle_index of one epoch; the blend's two arrays
    arrays = 4 * documents + 12 * corpora.samples
    blend = 10 * corpora.samples
    # a node's first batches read at most so many sources
    touched = min(corpora.sources, cluster.ranks_per_node)
    table = corpora.documents * rates.table
    opened = corpora.sources * rates.open + rates.divisor
    return [
        Way(
            name="megatron-core: rank 0 builds, all ranks map",
            before=documents * rates.index[1] + corpora.samples * rates.blend[1],
            kept_bytes=arrays + blend,
            names=5 * corpora.sources + 2,  # .idx, .bin and three arrays of each source
            names_by_node=False,
            node_bytes=0,
            rank_seconds=0.0,
        ),
        Way(
            name="megaindex, order megatron, built on an engine",
            before=documents * rates.index[0] / cluster.builders + corpora.samples * rates.blend[0],
            kept_bytes=arrays + blend,
            names=2 * corpora.sources + 3,  # the snapshot compares the stamps of each pair
            names_by_node=True,
            node_bytes=0,
            rank_seconds=0.0,
        ),
        Way(
            name="megaindex, order epoch, every rank checks",
            before=0.0,
            kept_bytes=0,
            names=2 * corpora.sources,
            names_by_node=True,
            node_bytes=20 * documents,
            rank_seconds=documents * rates.check + opened + table,
        ),
        Way(
            name="megaindex, order epoch, checked once",
            before=documents * rates.check,
            kept_bytes=200 * corpora.sources,
            names=4 * corpora.sources + 1,  # stamps, and both files of each pair opened
            names_by_node=True,
            node_bytes=4 * corpora.documents * touched,
            rank_seconds=opened + table,
        ),
        Way(
            name="megaindex, order window, checked once",
            before=documents * rates.check,
            kept_bytes=200 * corpora.sources,
            names=4 * corpora.sources + 1,
            names_by_node=True,
            node_bytes=0,
            rank_seconds=opened,
        ),
    ]


def start(way: Way, corpora: Corpora, cluster: Cluster) -> dict[str, float]:
    """Return the simulated seconds to the first batch of the median and of the last rank."""
    generator = np.random.default_rng(1)
    askers = cluster.nodes if way.names_by_node else cluster.ranks
    # the service answers one name at a time, round-robin over ranks
    last_name = (way.names - 1) * askers + np.arange(askers)
    looked_up = np.maximum(last_name / cluster.metadata_rate, way.names * cluster.lookup_latency)
    if way.names_by_node:
        looked_up = np.repeat(looked_up, cluster.ranks_per_node)
    everything = way.node_bytes * cluster.nodes
    idx_seconds = max(
        way.node_bytes / cluster.node_bandwidth,
        everything / (cluster.storage_servers * cluster.server_bandwidth),
    )
    ready = looked_up + idx_seconds + way.rank_seconds
    done = _first_batches(ready, corpora, cluster, generator)
    return {
        "before": way.before,
        "kept_bytes": float(way.kept_bytes),
        "names": float(way.names * askers),
        "read_bytes": float(everything),
        "median": float(np.median(done)),
        "last": float(done.max()),
    }


def _first_batches(
    ready: np.ndarray, corpora: Corpora, cluster: Cluster, generator: np.random.Generator
) -> np.ndarray:
    """Return the time at which each rank has read a sample from servers of one read at a time."""
    nbytes = corpora.sequence_length * corpora.token_bytes
    runs = 1 + generator.poisson(corpora.sequence_length / corpora.mean_tokens, ready.size)
    servers = np.zeros(cluster.storage_servers)
    queue = [(float(at), rank, 0) for rank, at in enumerate(ready)]
    heapq.heapify(queue)
    done = ready.copy()
    while queue:
        at, rank, first = heapq.heappop(queue)
        last = first
        count = min(cluster.reads_in_flight, int(runs[rank]) - first)
        for server in generator.integers(0, servers.size, count):
            begin = max(at, servers[server])
            servers[server] = begin + nbytes / runs[rank] / cluster.server_bandwidth
            latency = cluster.latency * generator.lognormal(0.0, 0.8)
            last = max(last, float(servers[server]) + latency)
        done[rank] = max(done[rank], last)
        if first + count < runs[rank]:
            heapq.heappush(queue, (last, rank, first + count))
    return done


def _table(results: dict[str, dict[str, float]], corpora: Corpora, cluster: Cluster) -> Table:
    tokens = corpora.sources * corpora.documents * corpora.mean_tokens
    table = Table(
        title=f"{tokens:.0e} tokens in {corpora.sources * corpora.documents:.0e} documents of "
        f"{corpora.sources:,} sources, {cluster.ranks:,} ranks on {cluster.nodes:,} nodes"
    )
    table.add_column("way")
    for column in ("before the run", "index files", "look-ups", ".idx read", "first batch", "last"):
        table.add_column(column, justify="right")
    for name, result in results.items():
        table.add_row(
            name,
            _duration(result["before"]),
            f"{result['kept_bytes'] / 1e9:,.1f} GB",
            f"{result['names'] / 1e6:,.1f} M",
            f"{result['read_bytes'] / 1e12:,.2f} TB",
            _duration(result["median"]),
            _duration(result["last"]),
        )
    return table


def _duration(seconds: float) -> str:
    for size, unit in ((86_400, "days"), (3600, "h"), (60, "min")):
        if seconds >= 2 * size:
            return f"{seconds / size:,.1f} {unit}"
    return f"{seconds:,.2f} s" if seconds else "0"


if __name__ == "__main__":
    main()
