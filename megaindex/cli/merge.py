"""Concatenate .bin/.idx pairs into one pair."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from megaindex.cli.options import Parser, add_flags, print_pairs, refuse_weights


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from megaindex.corpus.merge import merge
    from megaindex.progress import copying

    start = time.perf_counter()
    refuse_weights("merge", options.inputs)
    with copying(f"merging {len(options.inputs)} pairs") as bar:
        outcome = merge(
            options.output,
            options.inputs,
            dtype=options.dtype,
            dialect=options.dialect,
            overwrite=options.overwrite,
            bar=bar,
        )
    print_pairs([outcome], time.perf_counter() - start, as_json=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex merge", description=__doc__)
    parser.add_argument("output", metavar="OUT", help="prefix of the merged .bin and .idx")
    parser.add_argument("inputs", metavar="IN", nargs="+", help="prefixes, in order")
    parser.add_argument("--dtype", metavar="T", help="widen all tokens to this type, such as int32")
    add_flags(parser, "--dialect", "--overwrite", "--json")
    return parser
