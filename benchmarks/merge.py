"""Benchmark of merging a hundred shards, time and memory, against megatron-core's builder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np

from benchmarks.timing import Comparison, PeakMemory, alternate
from megaindex import IndexedDatasetWriter
from megaindex.corpus import merge

SHARDS = 100
DOCUMENTS = 2_000  # of each shard
MEAN_TOKENS = 1250


def compare(directory: Path, rounds: int) -> Comparison:
    """Check that both files are equal, then time both sides.

    megaindex syncs the pair to disk before it publishes it; the files of Megatron's builder are
    synced here.
    """
    shards = _shards(directory)
    ours, theirs = str(directory / "merged"), str(directory / "merged-by-megatron")

    def run_ours() -> object:
        return merge(ours, shards, overwrite=True)

    def run_peer() -> None:
        _merge_with_megatron(theirs, shards)
        for suffix in (".bin", ".idx"):
            with open(theirs + suffix, "rb") as file:
                os.fsync(file.fileno())

    run_ours()
    run_peer()
    for suffix in (".bin", ".idx"):
        if subprocess.run(["cmp", ours + suffix, theirs + suffix], check=False).returncode:
            raise SystemExit(f"merge: {suffix} differs from megatron-core's")
    nbytes = sum(os.path.getsize(ours + suffix) for suffix in (".bin", ".idx"))
    seconds = alternate(run_ours, run_peer, min(rounds, 3))  # the peer takes half a minute
    return Comparison(
        what=f"merge of {SHARDS} shards, {SHARDS * DOCUMENTS:,} documents, {nbytes / 1e6:,.0f} MB",
        ours=seconds[0],
        peer=seconds[1],
        items=SHARDS * DOCUMENTS,
        unit="document",
        output_bytes=nbytes,
    )


def memory(directory: Path) -> dict[str, dict[str, float]]:
    """Print the peak memory of each side, in a process of its own, as a share of the pair."""
    report = {}
    for side in ("ours", "peer"):
        command = [sys.executable, "-m", "benchmarks.merge", side, str(directory)]
        output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
        report[side] = json.loads(output.splitlines()[-1])
    return report


def _shards(directory: Path) -> list[str]:
    """Write the shards unless they exist, and return their prefixes."""
    generator = np.random.default_rng(20260101)
    prefixes = []
    for number in range(SHARDS):
        prefix = str(directory / f"shard-{number:03}")
        prefixes.append(prefix)
        if os.path.exists(prefix + ".idx"):
            continue
        lengths = generator.integers(1, 2 * MEAN_TOKENS, DOCUMENTS)
        tokens = np.frombuffer(generator.bytes(2 * int(lengths.sum())), np.uint16)
        with IndexedDatasetWriter(prefix, np.uint16) as writer:
            writer.add_documents(tokens, lengths)
    return prefixes


def _merge_with_megatron(output: str, shards: list[str]) -> None:
    """Merge as Megatron's tools/merge_datasets.py."""
    from benchmarks import peer

    builder = peer.IndexedDatasetBuilder(output + ".bin", np.uint16)
    for prefix in shards:
        builder.add_index(prefix)
    builder.finalize(output + ".idx")


def _measure(side: str, directory: Path) -> None:
    """Print the peak of one side."""
    shards, output = _shards(directory), str(directory / f"measured-{side}")
    if side == "ours":
        with PeakMemory() as peak:
            merge(output, shards, overwrite=True)
    else:
        from benchmarks import peer

        assert peer.IndexedDatasetBuilder  # imported before the measurement
        with PeakMemory() as peak:
            _merge_with_megatron(output, shards)
    outputs = sum(os.path.getsize(output + suffix) for suffix in (".bin", ".idx"))
    beyond = max(0, peak.bytes)
    print(json.dumps({"outputs": outputs, "beyond": beyond, "share": beyond / outputs}))


if __name__ == "__main__":
    _measure(sys.argv[1], Path(sys.argv[2]))
