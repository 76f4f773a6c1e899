"""Split a .bin/.idx pair into several, between documents."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaindex.cli.options import Parser, add_flags, print_pairs
from megaindex.errors import InvalidArgument

if TYPE_CHECKING:
    from megaindex.corpus.split import Documents
    from megaindex.format.pair import MappedPair


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_intermixed_args(arguments)
    from megaindex.corpus.split import split
    from megaindex.progress import copying

    start = time.perf_counter()
    with copying("splitting") as bar:
        outcomes = split(
            options.source,
            options.outputs,
            lambda pair: _cuts(options, pair),
            dialect=options.dialect,
            overwrite=options.overwrite,
            bar=bar,
        )
    print_pairs(outcomes, time.perf_counter() - start, as_json=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex split", description=__doc__)
    add = parser.add_argument
    add("source", metavar="IN", help="prefix of .bin and .idx")
    add("outputs", metavar="OUT", nargs="+", help="a prefix for each part, or one that contains {}")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--at", metavar="D,D,…", help="first document of each part but the first")
    where.add_argument("--parts", type=int, metavar="N", help="N parts of about equal size")
    where.add_argument("--documents", metavar="A:B,…", help="documents A to B - 1 of each part")
    measure = "measure of size for --parts; default: tokens"
    add("--by", default="tokens", choices=("tokens", "documents"), help=measure)
    add_flags(parser, "--dialect", "--overwrite", "--json")
    return parser


def _cuts(options: argparse.Namespace, pair: MappedPair) -> list[Documents]:
    from megaindex.corpus.split import cut_at, cut_evenly, cut_ranges

    if options.at is not None:
        return cut_at(pair, [_integer("--at", text) for text in options.at.split(",")])
    if options.parts is not None:
        return cut_evenly(pair, options.parts, options.by)
    ranges = []
    for text in options.documents.split(","):
        first, _, stop = text.partition(":")
        ranges.append((_integer("--documents", first), _integer("--documents", stop)))
    return cut_ranges(pair, ranges)


def _integer(option: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        form = "A:B ranges" if option == "--documents" else "document numbers"
        raise InvalidArgument(
            f"{option}: must be {form}, separated by commas; {text!r} is not an integer"
        ) from None
