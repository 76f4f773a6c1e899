"""Show that two records of a run differ by exactly what was skipped.

A record is a lock, or a JSON file with the state of a loader (`Loader.state_dict`), or a list
with those of all ranks. The exit status is 1 if the records differ by more."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megaindex.cli.options import Parser, add_flags, print_json
from megaindex.errors import InvalidArgument


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the records differ by exactly their skips, else 1."""
    options = _parser().parse_args(arguments)
    if options.second is None:
        raise InvalidArgument(
            f"{options.first} is one record of two; give the record with the skip too, as in "
            "`megaindex prove before.lock after.lock`; `megaindex verify` checks one alone"
        )
    from megaindex.console import print_lines
    from megaindex.progress import copying
    from megaindex.verify.record_proof import compare_records, read_record

    with copying("reading") as bar:
        proof = compare_records(
            read_record(options.first), read_record(options.second), search=options.search, bar=bar
        )
    if options.json:
        print_json(proof.to_json())
    else:
        print_lines(str(proof).split("\n"))
    return int(not proof.holds)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex prove", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "first", metavar="FIRST", help="record without the skip: a lock, or states as JSON"
    )
    parser.add_argument("second", metavar="SECOND", nargs="?", help="record with the skip")
    parser.add_argument(
        "--search", metavar="DIR", help="folder in which files of a lock are sought that were moved"
    )
    add_flags(parser, "--json")
    return parser
