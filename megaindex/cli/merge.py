"""``megaindex merge``: put .bin/.idx pairs one behind the other."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from megaindex.cli.options import Parser, refuse_weights
from megaindex.format.header import DIALECTS


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    _merge(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex merge", description=__doc__)
    parser.add_argument("output", metavar="OUT", help="prefix of the merged .bin and .idx")
    parser.add_argument("inputs", metavar="IN", nargs="+", help="prefixes, in the order wanted")
    parser.add_argument("--dtype", help="widen all tokens to this type, such as int32")
    parser.add_argument("--dialect", default="megatron", choices=DIALECTS, help="dtype codes")
    parser.add_argument("--overwrite", action="store_true", help="replace an existing pair")
    return parser


def _merge(options: argparse.Namespace) -> None:
    from megaindex.console import copying
    from megaindex.corpus.merge import merge

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
    print(outcome.line(time.perf_counter() - start))
