"""Show that two records of a run differ by exactly what was skipped, or that documents are absent.

A record is a lock, or a JSON file with the state of a loader (`Loader.state_dict`), or a list
with those of all ranks. The exit status is 1 if the records differ by more. With --absent, FIRST is
the lock, recipe or configuration of a run, and the status is 1 if it reads one of the documents."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megaindex.cli.options import Parser, add_flags, print_json
from megaindex.errors import InvalidArgument
from megaindex.validation import shown


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the records differ by exactly their skips, or documents are absent, else 1."""
    options = _parser().parse_args(arguments)
    if options.absent is not None:
        return _prove_absence(options)
    if options.from_step is not None or options.checkpoints is not None:
        raise InvalidArgument("--from-step and --checkpoints need --absent; give the documents too")
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


def _prove_absence(options: argparse.Namespace) -> int:
    """Return 0 if the run reads none of the documents from the step on, else 1."""
    if options.second is not None or options.search is not None or options.from_step is None:
        raise InvalidArgument(
            "--absent takes one run and --from-step: megaindex prove run.lock --absent ids.npy:web "
            "--from-step 1000"
        )
    from megaindex.audit.trace import source_of
    from megaindex.cli.plan import ids_and_source
    from megaindex.console import print_lines
    from megaindex.door import open_run
    from megaindex.index.skips import read_ids
    from megaindex.verify.absence import absence
    from megaindex.verify.record_proof import named_in

    path, source = ids_and_source(options.absent)
    run = open_run(options.first).run
    source = named_in([each.name for each in run.sources], source)
    found = absence(
        run,
        read_ids(path),
        from_step=options.from_step,
        source=source_of(run, source, "--absent"),
        checkpoints=_steps(options.checkpoints),
    )
    if options.json:
        print_json(found.to_json())
    else:
        print_lines(str(found).split("\n"))
    return int(not found.holds)


def _steps(text: str | None) -> list[int]:
    words = [] if text is None else text.split(",")
    if not all(word.isdecimal() and len(word) < 19 for word in words):
        raise InvalidArgument(
            f"--checkpoints must be steps made, such as 1000,2000, got {shown(text)}"
        )
    return list(map(int, words))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex prove", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "first", metavar="FIRST", help="record without the skip: a lock, or states as JSON"
    )
    parser.add_argument("second", metavar="SECOND", nargs="?", help="record with the skip")
    parser.add_argument(
        "--search", metavar="DIR", help="folder in which files of a lock are sought that were moved"
    )
    absent = parser.add_argument_group("documents that a run does not read")
    add = absent.add_argument
    add("--absent", metavar="FILE[:SOURCE]", help="their ids: .npy or text, and their source")
    add("--from-step", type=int, metavar="N", help="first step that reads none of them, from 0")
    add("--checkpoints", metavar="K,L,…", help="steps made at checkpoints, to count the documents")
    add_flags(parser, "--json")
    return parser
