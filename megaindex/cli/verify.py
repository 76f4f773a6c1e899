"""Check pairs, caches, recipes and locks; report each broken rule with its place and its repair.

The exit status is 1 if anything was found."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaindex.cache.array_files import SUFFIX
from megaindex.cli.options import (
    Parser,
    add_engine_arguments,
    add_flags,
    chosen_engine,
    print_json,
    refuse_others,
    refuse_weights,
)
from megaindex.errors import InvalidArgument, visible

if TYPE_CHECKING:
    from megaindex.console import FittedTable
    from megaindex.engine import Engine
    from megaindex.format.findings import Report
    from megaindex.verify.verify import Check


_OF_REPAIR = ("dialect", "dtype", "eod")
_OF_LOCK = {"step": None, "subset": "train", "all": False, "tokens": False, "search": None,
            "lengths": None, "cache_dir": None}  # fmt: skip


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
    paths = (
        "prefix of a pair, an .idx or .bin, a cache or its entry, recipe, lock, snapshot, sidecar, "
        "or a folder of these; also URLs (s3://, gs://, az://) of pairs or their folders"
    )
    inputs = "compare the places of the rows in PREFIX.provenance with the input files that exist"
    add("paths", metavar="PATH", nargs="+", help=paths)
    full = "read every byte, not only the .idx; of a lock, as --all"
    add("--full", action="store_true", help=full)
    add("--vocab-size", type=int, metavar="N", help="with --full: token ids must be below N")
    add("--eod", type=int, metavar="ID", help="with --full: documents must end with this token")
    add("--inputs", action="store_true", help=inputs)
    add_flags(parser, "--dialect", "--json")
    add_engine_arguments(parser)
    lock = parser.add_argument_group("checks of a lock (PATH is one lock)")
    steps = "only the samples of step K, from 0, or of steps K to L"
    lock.add_argument("--step", metavar="K[-L]", help=steps)
    add_flags(lock, "--subset", help="with --step; default: train")
    lock.add_argument("--all", action="store_true", help="the samples of all steps")
    lock.add_argument("--tokens", action="store_true", help="every byte of the .bin files")
    lock.add_argument("--search", metavar="DIR", help="find pairs that were moved, below DIR")
    lengths = "lengths of the sources, from `megaindex lock --lengths`, in place of the pairs"
    lock.add_argument("--lengths", metavar="FILE", help=lengths)
    add_flags(lock, "--cache-dir")
    add = parser.add_argument_group("repair (in place of the check)").add_argument
    meaning = (
        "rebuild OUT.idx from the .bin, whose documents end with --eod, with OUT.bin as a link to "
        "it; the original is not changed"
    )
    add("--repair", metavar="OUT", help=meaning)
    add("--dtype", metavar="T", help="token type, needed if the header of the .idx is lost")
    return parser


def _verify(options: argparse.Namespace) -> bool:
    from megaindex.verify.verify import checks

    if options.dtype is not None:
        raise InvalidArgument("--dtype needs --repair; a check reads the type from the .idx")
    refuse_weights("verify", options.paths)
    if any(getattr(options, name) != default for name, default in _OF_LOCK.items()):
        reports = [_lock_report(options)]
    else:
        to_do = checks(
            [pair for path in options.paths for pair in _named_by(path)],
            full=options.full,
            dialect=options.dialect,
            vocab_size=options.vocab_size,
            eod=options.eod,
            inputs=options.inputs,
        )
        with chosen_engine(options) as engine:
            alone = len(to_do) == 1 and options.engine == "local"
            reports = [_report(to_do[0])] if alone else _reports(to_do, engine)
    if options.json:
        print_json({"reports": [report.to_json() for report in reports]})
    else:
        _print(reports)
    return all(report.is_clean for report in reports)


def _named_by(path: str) -> list[str]:
    """Return the pairs of a framework's configuration or launch script; else the path itself."""
    from megaindex.settings.run_words import KINDS, kinds_of_file, named_run

    if not os.path.isfile(path) or path.endswith((".idx", ".bin", SUFFIX)):
        return [path]
    kinds = kinds_of_file(path)
    if len(kinds) != 1 or kinds[0] in ("lock", "recipe"):
        return [path]
    from megaindex.door import description_of, pairs_of

    found = pairs_of(description_of(named_run([path])))
    noun = KINDS[kinds[0]].noun
    pairs = "1 pair" if len(found) == 1 else f"{len(found)} pairs"
    print(f"megaindex verify: {visible(path)} is {noun} of {pairs}", file=sys.stderr)
    return found


def _lock_report(options: argparse.Namespace) -> Report:
    from megaindex.corpus.subjects import subjects
    from megaindex.lock.check import verify_lock
    from megaindex.progress import copying, counting_samples, silent
    from megaindex.validation import parse_steps

    for path in options.paths:
        if len(options.paths) > 1 or [each.kind for each in subjects(path)] != ["lock"]:
            raise InvalidArgument(
                f"{path}: --step, --all, --tokens, --search, --lengths, --subset and --cache-dir "
                "check one lock; give a file of `megaindex lock`"
            )
    for name, value in (("vocab_size", None), ("eod", None), ("inputs", False),
                        ("engine", "local"), ("workers", None)):  # fmt: skip
        if getattr(options, name) != value:
            flag = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{flag} is no check of a lock; leave it out")
    if options.step is None and options.subset != "train":
        raise InvalidArgument("--subset is of --step; give the steps, or leave it out")
    if options.step is not None and (options.all or options.full):
        raise InvalidArgument("--step and --all exclude each other; give one of them")
    with counting_samples() as progress, copying("reading") as bar:
        return verify_lock(
            options.paths[0],
            step=None if options.step is None else parse_steps("--step", options.step),
            subset=options.subset,
            whole=options.all or options.full,
            tokens=options.tokens,
            search=options.search,
            lengths=options.lengths,
            cache_dir=options.cache_dir,
            progress=progress,
            bar=bar if options.tokens else silent,
        )


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
        counted = ", ".join(_amount(*each) for each in report.counted.items())
        depth = "every byte read" if report.full else "headers, sizes and entries"
        if report.kind == "lock":
            depth = f"compared {', '.join(report.compared) or 'nothing'}"
        number = len(report.findings)
        verdict = f"{number or 'no'} finding{'' if number == 1 else 's'}"
        amounts = counted or "not readable"
        print_lines([f"{report.path}: {report.kind}, {amounts}; {depth}: {verdict}"])
        if report.identity and report.is_clean:
            print_lines(
                [
                    f"  identity of the run {report.identity}",
                    f"  identity of the tokens {report.content or 'not hashed'}",
                ]
            )
        if report.findings:
            print_view(_table(report))


def _amount(name: str, count: int) -> str:
    """Return "2 pairs" or "1 pair"; the first plural word of the name counts."""
    if count == 1:
        name = re.sub(r"ies\b", "y", name) if "ies" in name else re.sub(r"s\b", "", name, count=1)
    return f"{count:,} {name}"


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
    from megaindex.console import print_lines
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
    print_lines(
        [
            f"{made.path_prefix}.idx: {made.documents:,} documents, {made.sequences:,} sequences; "
            f"{made.path_prefix}.bin is a {made.link}",
            *(f"  certain  {text}" for text in made.certain),
            *(f"  lost     {text}" for text in made.lost),
        ]
    )
