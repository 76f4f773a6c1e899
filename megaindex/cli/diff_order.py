"""Report where two orders differ, how much, and why; the exit status is 1 if they differ."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megaindex.audit.diff import compare
from megaindex.audit.diff_inputs import (
    Side,
    existing,
    is_settings,
    read_settings,
    side_from_arrays,
    side_from_settings,
)
from megaindex.cli.options import Parser, add_flags, print_json
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.frameworks import framework_rules

_COMMON = ("data_path", "sequence_length", "epochs", "num_samples", "seed", "split", "order")


def main(arguments: Sequence[str]) -> int:
    """Return 0 if the orders are equal, 1 if they differ."""
    options = _parser().parse_args(arguments)
    sides = [*options.sides, *(side for side in (options.a, options.b) if side is not None)]
    if len(sides) != 2:
        raise InvalidArgument(
            f"two sides are needed, got {len(sides)}; give e.g. order=megatron order=neox, or --a "
            "and --b"
        )
    given = {name: getattr(options, name) for name in _COMMON}
    names = [name for name, value in given.items() if value is not None]
    if names and all(os.path.isfile(side) and _named(side) for side in sides):
        flag = "--" + names[0].replace("_", "-").replace("sequence", "seq")
        raise InvalidArgument(f"{flag} is for sides of settings, and both are runs; leave it out")
    common = {name: value for name, value in given.items() if value is not None}
    difference = compare(*(_side(text, common) for text in sides))
    if options.json:
        print_json(difference.to_json())
    else:
        from megaindex.audit.render import print_difference

        print_difference(difference)
    return int(not difference.equal)


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="megaindex diff-order",
        description=__doc__,
        epilog="A and B: settings (order=neox,seed=1), a YAML or JSON file of settings, a lock, a "
        "recipe, a framework's configuration or launch script, an entry of a megaindex cache, or a "
        "directory with the index arrays of Megatron or GPT-NeoX",
        allow_abbrev=False,
    )
    parser.add_argument("sides", nargs="*", metavar="A B", help="orders to compare, see below")
    parser.add_argument("--a", metavar="A", help="first side, in place of the position")
    parser.add_argument("--b", metavar="B", help="second side")
    common = parser.add_argument_group("defaults of both sides")
    add_flags(common, "--data-path", nargs=None, help="prefix of .bin and .idx")
    add_flags(common, "--seq-length", dest="sequence_length")
    add_flags(common, "--epochs", "--num-samples", "--seed", "--split", "--order")
    add_flags(parser, "--json")
    return parser


def _side(text: str, common: dict[str, Any]) -> Side:
    if os.path.isfile(text) and (run := _named(text)) is not None:
        from megaindex.audit.lock_side import side_from_lock
        from megaindex.door import open_run

        return replace(side_from_lock(open_run(text, kind=run).make_lock()), name=text)
    path = existing(text)
    if path is None:
        return side_from_settings(text, read_settings(text, common))
    dataset = None
    if "data_path" in common:
        row = framework_rules(common.get("order", "megatron"))
        dataset = IndexedDataset(common["data_path"], dialect=row.file_dialect)
    return side_from_arrays(path, dataset)


def _named(path: str) -> str | None:
    """Return the kind of the run that a file names; None for settings of one side."""
    from megaindex.settings.run_words import kinds_of_file

    if is_settings(path):
        return None
    kinds = kinds_of_file(path)
    return kinds[0] if len(kinds) == 1 else None
