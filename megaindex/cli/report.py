"""Print the exposure of a locked run by source: tokens, epochs, shares and repetitions.

The page is Markdown, for publication."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megaindex.cli.options import Parser, add_flags, print_json


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from megaindex.audit.lock_report import report_run
    from megaindex.progress import counting_samples

    with counting_samples() as progress:
        report = report_run(
            options.lock, search=options.search, cache_dir=options.cache_dir, progress=progress
        )
    if options.json:
        print_json(report.to_json())
    else:
        print(report.to_markdown(), end="")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex report", description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("lock", metavar="LOCK", help="the lock of the run, which megaindex lock wrote")
    add("--search", metavar="DIR", help="folder in which pairs are sought that were moved")
    add_flags(parser, "--cache-dir", "--json")
    return parser
