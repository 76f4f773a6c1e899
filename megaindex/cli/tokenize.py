"""``megaindex tokenize``: make .bin/.idx pairs of raw text.

JSONL and text files (plain, gzip or zstd) and Parquet files become one pair, with the bytes that
Megatron's preprocess_data.py writes for the same tokenizer and options. A run that was killed goes
on when the same command is given again. Sentences are not split (--split-sentences there); a value
that is a list of strings is taken as sentences that were split before.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaindex.cli.options import Parser, add_engine_arguments, add_flags, chosen_engine
from megaindex.errors import InvalidArgument

if TYPE_CHECKING:
    from megaindex.tokenize import Tokenized

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from megaindex.progress import copying
    from megaindex.tokenize import tokenize

    start = time.perf_counter()
    with chosen_engine(options) as engine:
        made = tokenize(
            options.output,
            options.inputs,
            tokenizer=options.tokenizer,
            format=options.format,
            keys=options.json_keys,
            megatron_names=options.megatron_names,
            eod=_token(options.eod),
            append_eod=options.append_eod,
            add_special_tokens=options.add_special_tokens,
            dtype=options.dtype,
            on_bad_line=options.on_bad_line,
            part_bytes=_bytes(options.part_size),
            engine=engine,
            overwrite=options.overwrite,
            stage=copying,
        )
    if options.json:
        print(json.dumps(made.to_json(), indent=2))
    else:
        _print(made, time.perf_counter() - start)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex tokenize", description=__doc__)
    parser.add_argument(
        "output",
        metavar="OUT",
        help="prefix of the pair; of several keys, OUT_<key>_document are the prefixes",
    )
    parser.add_argument(
        "inputs",
        metavar="IN",
        nargs="+",
        help="files, URLs (s3://, gs://, az://) or folders, in order",
    )
    parser.add_argument(
        "--tokenizer",
        required=True,
        metavar="T",
        help="a tokenizer.json, a SentencePiece .model, a folder with one of them, or bytes",
    )
    _add_input_arguments(parser)
    _add_token_arguments(parser)
    add_engine_arguments(parser)
    parser.add_argument("--megatron-names", action="store_true", help="OUT_<key>_document always")
    add_flags(parser, "--overwrite", help="replace existing pairs, and OUT.bad.jsonl")
    add_flags(parser, "--json")
    return parser


def _add_input_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("inputs")
    group.add_argument(
        "--format",
        choices=("jsonl", "lines", "files", "parquet"),
        help="text files: each line (lines) or each file (files) is a document; default: by name, "
        "with lines for .txt",
    )
    group.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="or columns; default: text"
    )
    group.add_argument(
        "--on-bad-line",
        default="stop",
        choices=("stop", "skip"),
        help="skip counts bad lines and rows and writes them to OUT.bad.jsonl; default: stop",
    )
    group.add_argument(
        "--part-size",
        default="64M",
        metavar="N",
        help="bytes of input for each task, such as 256M; the result does not depend on it",
    )


def _add_token_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("tokens")
    group.add_argument(
        "--append-eod", action="store_true", help="end documents with the tokenizer's own token"
    )
    group.add_argument("--eod", metavar="TOKEN|ID", help="end documents with this token")
    group.add_argument(
        "--add-special-tokens",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="those of the template in a tokenizer.json; default: as Megatron, yes",
    )
    group.add_argument("--dtype", help="token type; default: as Megatron, by the vocabulary's size")


def _print(made: Tokenized, seconds: float) -> None:
    print("\n".join(made.lines(seconds)))
    if made.bad is not None:
        plural = "" if made.bad.count == 1 else "s"
        print(
            f"  {made.bad.count:,} bad line{plural} left out, all in {made.bad.path}",
            file=sys.stderr,
        )
        for line in made.bad.first:
            print(f"    {line}", file=sys.stderr)


def _token(text: str | None) -> int | str | None:
    """Digits are an id, all else the text of a token."""
    return int(text) if text is not None and text.isdecimal() else text


def _bytes(text: str) -> int:
    number, unit = text.rstrip("bBiI"), ""
    if number and number[-1].lower() in _UNITS:
        number, unit = number[:-1], number[-1].lower()
    try:
        return int(number) << _UNITS[unit]
    except ValueError:
        raise InvalidArgument(
            f"--part-size {text}: must be a number of bytes, such as 67108864 or 64M"
        ) from None
