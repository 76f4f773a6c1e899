"""Describe pairs, cache entries, snapshots and sets of index arrays."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from megaindex.cli.options import Parser, add_flags, print_json, refuse_weights

if TYPE_CHECKING:
    from rich.table import Table

    from megaindex.corpus.inspect import EntryDescription, PairDescription

_BAR = 40  # characters of the longest bar


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from megaindex.console import print_view
    from megaindex.corpus.inspect import EntryDescription, inspect

    refuse_weights("inspect", options.paths)
    found = [each for path in options.paths for each in inspect(path)]
    if options.json:
        print_json({"descriptions": [each.to_json() for each in found]})
        return 0
    for each in found:
        facts = _entry_facts(each) if isinstance(each, EntryDescription) else _pair_facts(each)
        _print(each.path, facts, each.faults)
        if not isinstance(each, EntryDescription) and each.histogram:
            print_view(_histogram(each))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex inspect", description=__doc__)
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        help="prefixes of pairs, or URLs (s3://, gs://, az://); an .idx or .bin, a cache entry, or "
        "a folder of these",
    )
    add_flags(parser, "--json")
    return parser


def _print(path: str, facts: Iterator[tuple[str, str]], faults: Sequence[str]) -> None:
    from megaindex.console import print_lines

    named = [*facts, *(("damaged", fault) for fault in faults)]
    print_lines([path, *(f"  {name:<10} {text}" for name, text in named)])


def _pair_facts(pair: PairDescription) -> Iterator[tuple[str, str]]:
    bin_size = "missing" if pair.bin_nbytes is None else f"{pair.bin_nbytes:,} bytes"
    yield "files", f".idx {pair.index_nbytes:,} bytes, .bin {bin_size}"
    if pair.format != "MMIDIDX":
        known = {"TNTIDX": "TNTIDX, the old cached/lazy format; `megaindex import` reads it"}
        yield "format", known.get(pair.format, "not a Megatron index")
        return
    yield from _dtype_facts(pair)
    holds = f"{pair.documents:,} documents, {pair.sequences:,} sequences, {pair.tokens:,} tokens"
    yield "holds", holds
    yield "empty", f"{pair.empty_documents:,} documents, {pair.empty_sequences:,} sequences"
    yield "lengths", f"{pair.shortest:,} to {pair.longest:,} tokens"
    order = "rising, with gaps or overlaps" if pair.rising else "in any order"
    yield "layout", "contiguous sequences" if pair.contiguous else f"pointers {order}"
    yield "modes", "one for each sequence: multimodal" if pair.has_modes else "none"
    for path in pair.companions:
        yield "companion", path


def _dtype_facts(pair: PairDescription) -> Iterator[tuple[str, str]]:
    """Yield one line if the dialects agree, else one line for each."""
    guesses = pair.dialects
    if all(guess.possible for guess in guesses) and len({guess.dtype for guess in guesses}) == 1:
        yield "dtype", f"{guesses[0].dtype}, code {pair.dtype_code} in every dialect"
        return
    for guess in guesses:
        verdict = guess.dtype if guess.possible else "ruled out"
        yield guess.dialect, f"code {pair.dtype_code}: {verdict}; {guess.reason}"


def _entry_facts(entry: EntryDescription) -> Iterator[tuple[str, str]]:
    for name, value in entry.parameters.items():
        yield "parameter", f"{name} = {json.dumps(value)}"
    for name, array in entry.arrays.items():
        shape = " × ".join(str(size) for size in array["shape"])
        yield "array", f"{name}: {array['dtype']} [{shape}], {array['bytes']:,} bytes"
    if entry.arrays:
        yield "bytes", f"{entry.nbytes:,}"
        synced = "synced to disk" if entry.durable else "verified on first use after a reboot"
        yield "written", f"under boot {entry.boot_id}, {synced}"


def _histogram(pair: PairDescription) -> Table:
    from rich import box
    from rich.bar import Bar
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("tokens", "sequences"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", max_width=_BAR)
    most = max(count for _, count in pair.histogram)
    for lowest, count in pair.histogram:
        highest = max(lowest, 2 * lowest - 1)
        text = f"{lowest:,}" if highest == lowest else f"{lowest:,}–{highest:,}"
        table.add_row(text, f"{count:,}", Bar(most, 0, count))
    return table
