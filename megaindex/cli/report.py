"""Print the exposure of a run by source: tokens, epochs, shares and repetitions.

The page is Markdown, for publication. Other formats describe the data by the lock alone."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaindex.cli.options import Parser, add_flags, print_json, take_run
from megaindex.cli.plan import add_run_arguments, check_lock_alone, lock_of_options
from megaindex.errors import InvalidArgument, visible

if TYPE_CHECKING:
    from megaindex.lock.lock_file import Lock


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    take_run(options, "report")
    from megaindex.audit.lock_report import report_run
    from megaindex.lock.lock_file import read_lock
    from megaindex.progress import counting_samples

    if options.lock:
        check_lock_alone(options)
    elif options.search:
        raise InvalidArgument("--search is for moved pairs of a lock; leave it out")
    if options.format != "exposure" and (options.json or options.search):
        other = "--json" if options.json else "--search"
        raise InvalidArgument(f"{other} is for the exposure; leave it out with --format")
    lock = options.lock or lock_of_options(options)
    if options.format != "exposure":
        _summarize(read_lock(lock), options.format)
        return 0
    with counting_samples() as progress:
        report = report_run(
            lock, search=options.search, cache_dir=options.cache_dir, progress=progress
        )
    if options.json:
        print_json(report.to_json())
    else:
        print(report.to_markdown(), end="")
    return 0


def _summarize(lock: Lock, form: str) -> None:
    from megaindex.lock.summaries import croissant, eu_summary

    if form == "eu":
        print(eu_summary(lock), end="")
        return
    found, lacking = croissant(lock)
    for text in lacking:
        line = f"megaindex report: described as a live data set, without {text}"
        print(visible(line), file=sys.stderr)
    print_json(found)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex report", description=__doc__, allow_abbrev=False)
    add_run_arguments(parser)
    group = parser.add_argument_group("report")
    add = group.add_argument
    formats = "exposure (default); croissant (JSON-LD); or eu, the summary of the AI Act"
    add("--format", default="exposure", choices=("exposure", "croissant", "eu"), help=formats)
    add("--lock", metavar="FILE", help="lock of the run, in place of its settings")
    add(
        "--search", metavar="DIR", help="folder in which pairs of a lock are sought that were moved"
    )
    add_flags(group, "--cache-dir", "--json")
    return parser
