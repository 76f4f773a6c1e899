"""``megaindex build``: index arrays of a dataset, built into a cache or found there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence

from megaindex.cli.run import guarded
from megaindex.errors import InvalidArgument
from megaindex.plan.__main__ import Parser


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    build = _build_recipe if options.recipe else _build
    return guarded("build", lambda: build(options))


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex build", description=__doc__)
    parser.add_argument("--recipe", metavar="FILE", help="open and lay out a whole run instead")
    parser.add_argument("--data-path", metavar="P", help="prefix of .bin and .idx")
    parser.add_argument("--seq-length", type=int, metavar="S")
    parser.add_argument("--seed", type=int, default=1234, help="default: 1234, as the frameworks")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--epochs", metavar="E", help="such as 1, 1.5 or 3/2; default: 1")
    length.add_argument("--num-samples", type=int, metavar="N")
    parser.add_argument("--split", help="such as 969,30,1; default: all documents")
    parser.add_argument("--subset", default="train", choices=("train", "valid", "test"))
    parser.add_argument("--order", default="megatron", help="default: megatron")
    parser.add_argument("--cache-dir", metavar="DIR")
    return parser


def _build_recipe(options: argparse.Namespace) -> None:
    """Every source is opened and checked; orders of recipes are computed, nothing is kept."""
    from megaindex.build.recipe import open_recipe
    from megaindex.recipe.recipe_file import read_recipe

    start = time.perf_counter()
    opened = open_recipe(read_recipe(options.recipe))
    index = opened.index
    seconds = time.perf_counter() - start
    print(
        f"{options.recipe}: {index.num_samples:,} samples of {index.sequence_length} tokens in "
        f"{opened.itinerary.num_steps:,} steps, from {len(opened.sources)} source(s) of "
        f"{index.tokens_per_epoch:,} tokens, in {seconds:.2f} s; computed as they are read, "
        "nothing to keep"
    )
    for source, fingerprint in zip(opened.sources, opened.fingerprints, strict=True):
        print(f"  {source.corpus.name}: {source.dataset.path_prefix}, content {fingerprint}")


def _check(options: argparse.Namespace) -> None:
    for name in ("data_path", "seq_length", "cache_dir"):
        if getattr(options, name) is None:
            raise InvalidArgument(f"--{name.replace('_', '-')} is missing, or give --recipe")


def _build(options: argparse.Namespace) -> None:
    import megaindex

    _check(options)
    start = time.perf_counter()
    index = megaindex.build_index(
        options.data_path,
        sequence_length=options.seq_length,
        seed=options.seed,
        num_samples=options.num_samples,
        epochs=options.epochs,
        split=options.split,
        subset=options.subset,
        order=options.order,
        cache_dir=options.cache_dir,
    )
    seconds = time.perf_counter() - start
    computed = index.order in ("epoch", "window")
    where = "computed as it is read, nothing to keep" if computed else f"in {options.cache_dir}"
    print(
        f"order {index.order}: {index.num_samples:,} samples of {index.sequence_length} tokens, "
        f"{index.num_epochs} epoch(s) of {index.tokens_per_epoch:,} tokens, in {seconds:.2f} s "
        f"({megaindex.backend()}), {where}"
    )
