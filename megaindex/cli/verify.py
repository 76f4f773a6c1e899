"""Check pairs, caches and recipes; report each broken rule with its place and its repair.

The exit status is 1 if anything was found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaindex.cli.options import (
    Parser,
    add_engine_arguments,
    add_flags,
    chosen_engine,
    refuse_others,
    refuse_weights,
)
from megaindex.errors import InvalidArgument

if TYPE_CHECKING:
    from megaindex.console import FittedTable
    from megaindex.corpus.repair import Repair
    from megaindex.engine import Engine
    from megaindex.verify.report import Report
    from megaindex.verify.verify import Check


_OF_REPAIR = ("dialect", "dtype", "eod")


def main(arguments: Sequence[str]) -> int:
    """Return 0 without findings, else 1."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.repair is None:
        return int(not _verify(options))
    refuse_others(parser, options, "--repair", _OF_REPAIR)
    _repair(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex verify", description=__doc__)
    add = parser.add_argument
    add(
        "paths",
        metavar="PATH",
        nargs="+",
        help="prefix of a pair, an .idx or .bin, a cache or its entry, recipe, snapshot, sidecar, "
        "or a folder of these; also URLs (s3://, gs://, az://) of pairs or folders of pairs",
    )
    add("--full", action="store_true", help="read every byte, not only the .idx")
    add("--vocab-size", type=int, metavar="N", help="with --full: token ids must be below N")
    add("--eod", type=int, metavar="ID", help="with --full: documents must end with this token")
    add_flags(parser, "--dialect", "--json")
    add_engine_arguments(parser)
    repair = parser.add_argument_group("repair (in place of the check)")
    repair.add_argument(
        "--repair",
        metavar="OUT",
        help="write OUT.idx from the intact part of the pair, and OUT.bin as a link to its .bin; "
        "the original is not changed",
    )
    repair.add_argument("--dtype", metavar="T", help="token type, needed if the .idx is lost")
    return parser


def _verify(options: argparse.Namespace) -> bool:
    from megaindex.verify.verify import checks

    if options.dtype is not None:
        raise InvalidArgument("--dtype needs --repair; a check reads the type from the .idx")
    refuse_weights("verify", options.paths)
    to_do = checks(
        options.paths,
        full=options.full,
        dialect=options.dialect,
        vocab_size=options.vocab_size,
        eod=options.eod,
    )
    with chosen_engine(options) as engine:
        alone = len(to_do) == 1 and options.engine == "local"
        reports = [_report(to_do[0])] if alone else _reports(to_do, engine)
    if options.json:
        print(json.dumps({"reports": [report.to_json() for report in reports]}, indent=2))
    else:
        _print(reports)
    return all(report.is_clean for report in reports)


def _report(check: Check) -> Report:
    from megaindex.progress import copying, silent

    with copying("reading") as bar:
        return check.run(bar if check.full else silent)


def _reports(to_do: Sequence[Check], engine: Engine) -> list[Report]:
    from megaindex.progress import counting
    from megaindex.verify.verify import Check

    reports: dict[int, Report] = {}
    with counting("checking", len(to_do)) as count:
        for number, report in engine.run(Check.run, to_do):
            reports[number] = report
            count(1)
    return [reports[number] for number in range(len(to_do))]


def _print(reports: Sequence[Report]) -> None:
    from megaindex.console import print_lines, print_view

    for report in reports:
        counted = ", ".join(f"{count:,} {name}" for name, count in report.counted.items())
        depth = "every byte read" if report.full else "headers, sizes and entries"
        number = len(report.findings)
        verdict = f"{number or 'no'} finding{'' if number == 1 else 's'}"
        amounts = counted or "not readable"
        print_lines([f"{report.path}: {report.kind}, {amounts}; {depth}: {verdict}"])
        if report.findings:
            print_view(_table(report))


def _table(report: Report) -> FittedTable:
    from megaindex.console import FittedTable, TableColumn

    labels = (TableColumn(name, "label") for name in ("", "rule"))
    words = (TableColumn(name, "words") for name in ("where", "found", "expected", "repair"))
    table = FittedTable(*labels, *words)
    for finding in report.findings:
        more = f" and {finding.count - 1:,} more" if finding.count > 1 else ""
        name = finding.file.rpartition("/")[2]
        table.add_row(
            finding.severity,
            finding.rule,
            f"{name}: {finding.where}{more}",
            finding.found,
            finding.expected,
            finding.repair,
            style="red" if finding.severity == "error" else "yellow",
        )
    return table


def _repair(options: argparse.Namespace) -> None:
    from megaindex.corpus.repair import repair
    from megaindex.progress import copying

    if len(options.paths) != 1:
        raise InvalidArgument(f"--repair takes one PATH, got {len(options.paths)}")
    prefix = options.paths[0].removesuffix(".idx").removesuffix(".bin")
    with copying("reading") as bar:
        made = repair(
            prefix,
            options.repair,
            dialect=options.dialect,
            dtype=options.dtype,
            eod=options.eod,
            bar=bar,
        )
    _print_repair(made)


def _print_repair(made: Repair) -> None:
    print(
        f"{made.path_prefix}.idx: {made.documents:,} documents, {made.sequences:,} sequences; "
        f"{made.path_prefix}.bin is a {made.link}"
    )
    for text in made.certain:
        print(f"  certain  {text}")
    for text in made.lost:
        print(f"  lost     {text}")
