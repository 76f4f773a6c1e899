"""``python -m benchmarks``: run all benchmarks, print a table and write JSON."""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

import megaindex
from benchmarks import (
    adapters,
    backends,
    balance,
    cold,
    dataloader,
    first_batch,
    index_build,
    kernels,
    loading,
    merge,
    neox,
    objects,
    orders,
    packing,
    scaling,
    startup,
    tokenize,
)
from benchmarks.timing import Clock, Comparison, allow_many_files, timed

Job = Callable[[], Comparison]


def main() -> None:
    options = _parser().parse_args()
    allow_many_files()
    console = Console(width=None if Console().is_terminal else 130, highlight=False)
    if options.quick or options.processor_time:
        Clock.use_processor_time()
    with tempfile.TemporaryDirectory(dir=options.dir, prefix="megaindex-bench-") as temporary:
        directory = Path(temporary)
        rows, notes, figures = [], [], []
        jobs = _quick(directory, options.rounds) if options.quick else _jobs(options, directory)
        for group, job in jobs:
            if options.only and not any(part in group for part in options.only):
                continue
            row = job()
            rows.append(row)
            console.print(f"  {row.what}: {row.ratio:.2f}x", style="dim")
        memory = _memory(options, directory)
        notes += _notes(options, directory)
        if _includes(options, "packing", unasked=False):
            figures = _packing(options, console, notes)
        if _includes(options, "cold", unasked=False):
            console.print(cold.describe_device(directory))
        copies = {} if Clock.is_of_processor else _roofline(rows)
    if rows:
        console.print(_table(rows, copies))
    for name, sides in memory:
        console.print(_memory_line(name, sides))
    for note in notes:
        console.print(note)
    report = _report(rows, memory, copies) | {"notes": notes}
    if figures:
        report["figures"] = [asdict(figure) for figure in figures]
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(report, indent=1))
    console.print(f"written to {options.json}")


def _memory(options: argparse.Namespace, directory: Path) -> list[tuple[str, Any]]:
    """Return the peak memory of both sides of builds and merges."""
    memory: list[tuple[str, Any]] = []
    if _includes(options, "memory"):
        memory += [(name, index_build.memory(name, directory)) for name in options.memory]
    if _includes(options, "merge"):
        memory.append((f"{merge.SHARDS} merged shards", merge.memory(directory)))
    return memory


def _notes(options: argparse.Namespace, directory: Path) -> list[str]:
    """Return figures as text, and the reason why a benchmark is left out."""
    notes = []
    if _includes(options, "tokenize", unasked=False):
        notes += tokenize.figures(directory)
    if _includes(options, "balance"):
        notes += balance.figures(directory, options.megatron)
    reason = neox.missing(options.neox)
    if reason is not None and _includes(options, "neox"):
        notes.append(reason)
    return notes


def _includes(options: argparse.Namespace, figures: str, *, unasked: bool = True) -> bool:
    """Return True if figures are named in ``--only``, or belong to a whole run."""
    if options.only:
        return figures in options.only
    return unasked and not options.quick


def _packing(
    options: argparse.Namespace, console: Console, notes: list[str]
) -> list[packing.Figure]:
    """Return the figures of order packed, and append what they are measured on to ``notes``."""
    found = []
    for figure in packing.figures(options.documents, options.rounds, options.olmo, options.bridge):
        if isinstance(figure, str):
            notes.append(figure)
            console.print(figure)
        else:
            found.append(figure)
            console.print(
                f"  {figure.what}: {figure.text} {figure.unit}  {figure.note}", style="dim"
            )
    console.print(packing.table(found))
    return found


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measured runs of each side")
    parser.add_argument("--dir", help="where corpora and caches go; default: the system's")
    parser.add_argument("--json", type=Path, default=Path("benchmarks/results/latest.json"))
    parser.add_argument(
        "--quick",
        action="store_true",
        help="jobs of a minute, by processor time; see benchmarks.baseline",
    )
    parser.add_argument(
        "--processor-time",
        action="store_true",
        help="measure the processor time of both sides in place of wall time",
    )
    parser.add_argument(
        "--only",
        nargs="+",
        help="index, sample_index, shuffle, blend, exhaustive, orders, merge, tokenize, loading, "
        "cold, first, startup, adapters, neox, objects, scaling, numba, balance, memory, "
        "packing (only if named)",
    )
    parser.add_argument("--neox", metavar="CHECKOUT", help="a GPT-NeoX checkout to compare with")
    parser.add_argument(
        "--megatron", metavar="CHECKOUT", help="a Megatron-LM main checkout to compare balance with"
    )
    parser.add_argument("--olmo", metavar="CHECKOUT", help="an OLMo-core checkout, for packing")
    parser.add_argument("--bridge", metavar="CHECKOUT", help="a Megatron-Bridge checkout, likewise")
    parser.add_argument(
        "--documents", type=int, default=packing.DOCUMENTS, help="documents that are packed"
    )
    parser.add_argument("--sources", type=int, default=50, help="datasets of the blend loaded from")
    parser.add_argument("--memory", nargs="*", default=["40B"], help="corpora to measure memory on")
    return parser


def _jobs(options: argparse.Namespace, directory: Path) -> Iterator[tuple[str, Job]]:
    rounds = options.rounds
    yield from _building(directory, rounds)
    yield from _corpora(directory, rounds)
    yield from (("loading", job) for job in _loading(options, directory))
    yield from _reading(directory, rounds, options.neox)
    yield from _numba(directory, rounds)


def _quick(directory: Path, rounds: int) -> Iterator[tuple[str, Job]]:
    """Yield jobs of a minute that `benchmarks.baseline` compares with earlier ones."""
    from benchmarks import peer  # noqa: F401

    gc.freeze()  # torch's objects, which take a quarter of a second to go through before each run
    yield "index", partial(index_build.compare, "1B", directory, rounds)
    yield "sample_index", partial(kernels.sample_index, "1B", directory, rounds)
    yield "shuffle", partial(kernels.shuffle, rounds, 16_000_000)
    for count in (2, 8, 100, 1000):
        yield "blend", partial(kernels.greedy, "lognormal", count, rounds)
    for count in (8, 100, 1000):
        yield "exhaustive", partial(kernels.exhaustive, count, rounds)
    yield (
        "loading",
        partial(
            loading.compare, directory, rounds, length=2048, sources=1, ours="buffers", workers=0
        ),
    )
    yield "first", partial(first_batch.compare, first_batch.CASES[0], directory, rounds)
    for part in ("cold", "first"):
        yield "adapters", partial(adapters.compare, adapters.QUICK, part, directory, rounds)
    for what in ("import", "one file"):
        yield "startup", partial(startup.compare, what, directory, rounds)


def _building(directory: Path, rounds: int) -> Iterator[tuple[str, Job]]:
    for name in ("1B", "10B", "40B", "100M-short", "100k-long"):
        yield "index", partial(index_build.compare, name, directory, rounds)
    for name in ("1B", "40B", "100M-short", "100k-long"):
        yield "sample_index", partial(kernels.sample_index, name, directory, rounds)
    yield "shuffle", partial(kernels.shuffle, rounds)
    for count in (2, 3, 8, 100, 1000, 4000):
        for family in kernels.FAMILIES:
            yield "blend", partial(kernels.greedy, family, count, rounds)
    for count, draws in ((2, 10), (2, 50), (2, 99), (100, 10)):
        yield "blend", partial(kernels.short_blends, count, draws, rounds)
    for count in (2, 8, 100, 1000, 4000):
        yield "exhaustive", partial(kernels.exhaustive, count, rounds)
    yield "orders", partial(orders.first_batch, directory, rounds)
    yield "orders", partial(orders.bijection, rounds)
    for order in ("megatron", "epoch", "window"):
        for name in ("100k-long", "40B"):
            yield "orders", partial(orders.locate, name, order, directory, rounds)
            yield "orders", partial(orders.receipts, name, order, directory, rounds)
    for order in ("packed", "blend"):
        yield "orders", partial(orders.receipts, "40B", order, directory, rounds)
    for order in ("megatron", "epoch", "packed"):
        yield "orders", partial(orders.served, order, directory, rounds)
    for engine, workers in scaling.SIDES:
        yield "scaling", partial(scaling.compare, engine, workers, directory, rounds)


def _corpora(directory: Path, rounds: int) -> Iterator[tuple[str, Job]]:
    yield "merge", partial(merge.compare, directory, rounds)
    for what in ("text", "gigatoken", "500000"):
        if tokenize.missing(what) is None:
            yield "tokenize", partial(tokenize.compare, what, directory, rounds)


def _reading(directory: Path, rounds: int, checkout: str | None) -> Iterator[tuple[str, Job]]:
    for reader, workers in (("mapped", 0), ("positional", 0), ("mapped", 2), ("mapped", 4)):
        yield "cold", partial(cold.compare, reader, workers, directory, rounds)
    yield "cold", partial(cold.compare, "mapped", 0, directory, rounds, as_it_is=True)
    for blend in first_batch.CASES:
        yield "first", partial(first_batch.compare, blend, directory, rounds)
    for what in ("import", *startup.PLANNED):
        yield "startup", partial(startup.compare, what, directory, rounds)
    for case in adapters.CASES:
        for part in adapters.PARTS:
            yield "adapters", partial(adapters.compare, case, part, directory, rounds)
    for workers in (0, 2):
        for length, sources in ((2048, 1), (2048, 50), (8192, 1)):
            yield "adapters", partial(
                dataloader.compare, directory, rounds, length=length, sources=sources,
                workers=workers,
            )  # fmt: skip
        yield "adapters", partial(
            dataloader.compare, directory, rounds, length=2048, sources=1, workers=workers,
            mask=True,
        )  # fmt: skip
    if neox.missing(checkout) is None:
        for part in neox.WHAT:
            yield "neox", partial(neox.compare, part, str(checkout), directory, rounds)
        yield "neox", partial(neox.compare, "first", str(checkout), directory, rounds, **neox.MANY)
    for how, latency in (("one by one", 0.0), ("one by one", 0.02), ("batch by batch", 0.02)):
        yield "objects", partial(objects.compare, how, latency, directory, rounds)


def _numba(directory: Path, rounds: int) -> Iterator[tuple[str, Job]]:
    yield "numba", partial(backends.sample_index, directory, rounds)
    yield "numba", partial(backends.shuffle, rounds)
    for count in (8, 1000):
        yield "numba", partial(backends.blend, count, rounds)
        yield "numba", partial(backends.exhaustive, count, rounds)


def _loading(options: argparse.Namespace, directory: Path) -> Iterator[Job]:
    sides = (("buffers", 0), ("buffers", 2), ("buffers", 4), ("DataLoader", 0))
    for length in (2048, 8192, 131_072):
        yield partial(loading.against_memcpy, directory, options.rounds, length=length)
        for sources in (1, options.sources):
            for ours, workers in sides:
                yield partial(
                    loading.compare, directory, options.rounds, length=length, sources=sources,
                    ours=ours, workers=workers,
                )  # fmt: skip


def _roofline(rows: list[Comparison]) -> dict[int, tuple[float, float]]:
    """Return the seconds to copy each output's bytes into fresh and into reused memory."""
    copies = {}
    for nbytes in {row.output_bytes for row in rows if row.output_bytes}:
        source, target = np.ones(nbytes, np.uint8), np.empty(nbytes, np.uint8)
        np.copyto(target, source)
        fresh = statistics.median(timed(source.copy) for _ in range(3))
        reused = statistics.median(timed(partial(np.copyto, target, source)) for _ in range(3))
        copies[nbytes] = fresh, reused
    return copies


def _table(rows: list[Comparison], copies: dict[int, tuple[float, float]]) -> Table:
    table = Table(
        title="against megatron-core 0.16.1 or GPT-NeoX, medians of alternating runs, answers equal"
    )
    for column in ("what", "ours", "peer", "ratio", "goal", "ns", "peer ns", "x fresh copy"):
        table.add_column(column, justify="left" if column == "what" else "right")
    for row in rows:
        ours, peer = statistics.median(row.ours), statistics.median(row.peer)
        missed = row.asked is not None and row.ratio < row.asked
        table.add_row(
            row.what,
            f"{ours * 1e3:,.1f} ms",
            f"{peer * 1e3:,.1f} ms",
            f"{'[red]' if missed else '[green]'}{row.ratio:.2f}",
            "" if row.asked is None else f"{row.asked:g}",
            f"{row.nanoseconds(row.ours):,.1f}",
            f"{row.nanoseconds(row.peer):,.1f}",
            f"{ours / copies[row.output_bytes][0]:.1f}" if row.output_bytes in copies else "",
        )
    return table


def _memory_line(name: str, sides: dict[str, dict[str, float]]) -> str:
    ours, peer = sides["ours"], sides["peer"]
    return (
        f"peak memory beyond the arrays of {name} ({ours['outputs'] / 1e6:,.0f} MB), each in its "
        f"own process: {100 * ours['share']:.1f} % here, {100 * peer['share']:.1f} % there"
    )


_COPIES = ("copy_fresh_seconds", "copy_reused_seconds")


def _report(
    rows: list[Comparison], memory: list[tuple[str, object]], copies: dict[int, tuple[float, float]]
) -> dict[str, object]:
    return {
        "megaindex": megaindex.__version__,
        "backend": megaindex.backend(),
        "threads": kernels.num_threads(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "peer": "megatron-core 0.16.1",
        "rows": [
            {
                "what": row.what,
                "ratio": row.ratio,
                "ratio_of_least": row.ratio_of_least,
                "asked": row.asked,
                "ours_seconds": row.ours,
                "peer_seconds": row.peer,
                f"ns_per_{row.unit}": row.nanoseconds(row.ours),
                "output_bytes": row.output_bytes,
            }
            | dict(zip(_COPIES, copies.get(row.output_bytes, ()), strict=False))
            for row in rows
        ],
        "memory": dict(memory),
    }


if __name__ == "__main__":
    main()
