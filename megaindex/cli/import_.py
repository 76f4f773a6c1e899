"""Convert the token files of another system to a .bin/.idx pair.

If the input holds nothing but tokens, the .bin is a hard link to it, or a symbolic link across file
systems; otherwise the tokens are copied. The printed line names the method.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaindex.cli.options import Parser, add_flags, print_pairs

if TYPE_CHECKING:
    from megaindex.corpus.imports.flat import DocumentStream, FlatTokens

_FORMATS = {
    "nanotron": "a .ds file of datatrove, with its .ds.index beside it",
    "numpy": "a .npy file, or raw tokens without a header",
    "tntidx": "a .bin/.idx pair of --dataset-impl lazy or cached, by its prefix",
    "mds": "a folder of MDS shards of MosaicML Streaming",
    "parquet": "token lists in a .parquet or .arrow file, or a folder of them",
}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from megaindex.corpus.imports.flat import import_pair
    from megaindex.progress import copying

    start = time.perf_counter()
    with copying("importing") as bar:
        outcome = import_pair(
            _open(options),
            options.output,
            dtype=options.dtype,
            dialect=options.dialect,
            copy=getattr(options, "copy", False),
            overwrite=options.overwrite,
            bar=bar,
        )
    print_pairs([outcome], time.perf_counter() - start, as_json=options.json)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex import", description=__doc__)
    formats = parser.add_subparsers(dest="format", required=True, metavar="FORMAT")
    of = {
        name: formats.add_parser(name, help=text, description=f"Import {text}.")
        for name, text in _FORMATS.items()
    }
    for one in of.values():
        one.add_argument("source", metavar="IN", help="the input")
        one.add_argument("output", metavar="OUT", help="prefix of the .bin and .idx")
        one.add_argument("--dtype", metavar="T", help="token type of the pair; default: as stored")
        add_flags(one, "--dialect", "--overwrite", "--json")
    for name in ("nanotron", "numpy", "tntidx"):
        of[name].add_argument("--copy", action="store_true", help="copy the tokens, do not link")
    column = "column of tokens; default: tokens, input_ids or the only one"
    dtype = "token type of raw bytes, such as uint16"
    for name in ("mds", "parquet"):
        of[name].add_argument("--column", help=column)
    for name in ("numpy", "mds"):
        of[name].add_argument("--stored-dtype", metavar="T", help=dtype)
    documents = of["numpy"].add_mutually_exclusive_group(required=True)
    documents.add_argument("--separator", type=int, metavar="ID", help="id that ends a document")
    documents.add_argument("--boundaries", metavar="FILE", help=".npy of document ends in tokens")
    return parser


def _open(options: argparse.Namespace) -> FlatTokens | DocumentStream:
    from megaindex.corpus.imports import formats, mds

    source = options.source
    if options.format == "nanotron":
        return formats.open_nanotron(source)
    if options.format == "tntidx":
        return formats.open_tntidx(source, options.dialect)
    if options.format == "mds":
        return mds.open_mds(source, options.column, options.stored_dtype)
    if options.format == "parquet":
        return formats.open_columns(source, options.column)
    return formats.open_numpy(
        source,
        stored_dtype=options.stored_dtype,
        separator=options.separator,
        boundaries=options.boundaries,
    )
