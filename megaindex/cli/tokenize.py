"""Tokenize JSONL, text (plain, gzip or zstd) and Parquet files into a .bin/.idx pair.

The bytes equal those of Megatron's preprocess_data.py with the same tokenizer and options. After an
interruption the same command resumes the work. Sentences are not split (--split-sentences of
Megatron); a list of strings is taken as sentences split before.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from megaindex.cli.options import Parser, add_engine_arguments, add_flags, chosen_engine, print_json
from megaindex.errors import InvalidArgument, visible

if TYPE_CHECKING:
    from megaindex.corpus.tokenize.run import Tokenized

_UNITS = {"": 0, "k": 10, "m": 20, "g": 30}


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    from megaindex.corpus.tokenize.run import tokenize
    from megaindex.progress import copying

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
            encoder=options.encoder,
            dtype=options.dtype,
            on_bad_line=options.on_bad_line,
            part_bytes=_bytes(options.part_size),
            engine=engine,
            overwrite=options.overwrite,
            discard_parts=options.discard_parts,
            stage=copying,
        )
    if options.json:
        print_json(made.to_json())
    else:
        _print(made, time.perf_counter() - start)
    return 0


_HELP = {
    "output": "prefix of the pair; with several --json-keys, OUT_<key>_document are the prefixes",
    "inputs": "files, URLs (s3://, gs://, az://) or folders, in order",
    "--tokenizer": "a tokenizer.json, a SentencePiece .model, a folder with one of them (names on "
    "the Hugging Face hub are not downloaded), or bytes for one token a byte",
    "--format": "text files: each line (lines) or each file (files) is a document; default: by "
    "name, for .txt files of a folder files, for those named lines",
    "--json-keys": "keys of JSON objects, or Parquet columns, to tokenize; default: text",
    "--on-bad-line": "skip leaves bad lines and rows out and lists them in OUT.bad.jsonl; default: "
    "stop",
    "--part-size": "bytes of input for each task (the result does not depend on it); default: 64M",
    "--append-eod": "end documents with the end token that the tokenizer defines",
    "--eod": "end documents with this token",
    "--add-special-tokens": "add the special tokens of a tokenizer.json's template; default: yes, "
    "as in Megatron",
    "--encoder": "library that encodes the texts of a tokenizer.json, with the ids of tokenizers",
    "--dtype": "token type; default: by vocabulary size, as in Megatron",
    "--megatron-names": "use OUT_<key>_document for one key too",
    "--discard-parts": "remove finished parts of an interrupted run with other settings from "
    "OUT.parts",
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex tokenize", description=__doc__)
    inputs = parser.add_argument_group("inputs")
    tokens = parser.add_argument_group("tokens")

    def add(name: str, group: argparse._ActionsContainer = parser, **arguments: Any) -> None:
        group.add_argument(name, help=_HELP[name], **arguments)

    add("output", metavar="OUT")
    add("inputs", metavar="IN", nargs="+")
    add("--tokenizer", required=True, metavar="T")
    add("--format", inputs, choices=("jsonl", "lines", "files", "parquet"))
    add("--json-keys", inputs, nargs="+", default=["text"], metavar="KEY")
    add("--on-bad-line", inputs, default="stop", choices=("stop", "skip"))
    add("--part-size", inputs, default="64M", metavar="N")
    add("--append-eod", tokens, action="store_true")
    add("--eod", tokens, metavar="TOKEN|ID")
    add("--add-special-tokens", tokens, action=argparse.BooleanOptionalAction, default=True)
    add("--encoder", tokens, choices=("gigatoken",))
    add("--dtype", tokens, metavar="T")
    add_engine_arguments(parser)
    add("--megatron-names", action="store_true")
    add_flags(parser, "--overwrite", help="replace existing pairs and OUT.bad.jsonl")
    add("--discard-parts", action="store_true")
    add_flags(parser, "--json")
    return parser


def _print(made: Tokenized, seconds: float) -> None:
    print("\n".join(map(visible, made.lines(seconds))))
    if made.bad is not None:
        plural = "" if made.bad.count == 1 else "s"
        print(
            f"  {made.bad.count:,} bad line{plural} left out, all in {visible(made.bad.path)}",
            file=sys.stderr,
        )
        for line in made.bad.first:
            print(f"    {visible(str(line))}", file=sys.stderr)


def _token(text: str | None) -> int | str | None:
    """Convert digits to an id; keep the text of a token."""
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
