"""Show that two records of a run differ by exactly what was skipped.

A record is a lock, or a JSON file with the state of a loader (`RecipeLoader.state_dict`), or a list
with those of all ranks. The exit status is 1 if the records differ by more."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from typing import Any

from megaindex.cli.options import Parser, add_flags
from megaindex.errors import FormatError, MissingFile, StorageError
from megaindex.lock.lock_file import FORMAT as LOCK_FORMAT
from megaindex.lock.lock_file import Lock, read_lock


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the records differ by exactly their skips, else 1."""
    options = _parser().parse_args(arguments)
    from megaindex.loader.record_proof import compare_records

    proof = compare_records(
        read_record(options.first), read_record(options.second), search=options.search
    )
    print(json.dumps(proof.to_json(), indent=2) if options.json else proof)
    return int(not proof.holds)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex prove", description=__doc__, allow_abbrev=False)
    parser.add_argument(
        "first", metavar="FIRST", help="record without the skip: a lock, or states as JSON"
    )
    parser.add_argument("second", metavar="SECOND", help="record with the skip")
    parser.add_argument(
        "--search", metavar="DIR", help="folder in which files of a lock are sought that were moved"
    )
    add_flags(parser, "--json")
    return parser


def read_record(path: str) -> Lock | list[Mapping[str, Any]]:
    """Return the lock, or the states of all ranks, in a file."""
    if path.endswith(".lock"):
        return read_lock(path)
    try:
        with open(path, encoding="utf-8") as file:
            content = json.load(file)
    except FileNotFoundError:
        raise MissingFile(f"{path}: there is no such record; check the path") from None
    except OSError as error:
        raise StorageError(f"{path}: cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: not a record in JSON ({error}); write the state with json.dump"
        ) from None
    if isinstance(content, Mapping) and content.get("format") == LOCK_FORMAT:
        return read_lock(path)
    states = content if isinstance(content, list) else [content]
    if not states or not all(isinstance(state, Mapping) for state in states):
        raise FormatError(
            f"{path}: must hold the state of a loader, or a list of those of all ranks"
        )
    return states
