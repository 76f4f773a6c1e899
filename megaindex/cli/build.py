"""Build the index arrays of datasets into a cache, or open them if they are there."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from megaindex.cli.options import (
    Parser,
    add_engine_arguments,
    add_flags,
    chosen_engine,
    refuse_others,
    refuse_weights,
)
from megaindex.errors import FormatError, InvalidArgument
from megaindex.validation import DEFAULT_SEED

if TYPE_CHECKING:
    from megaindex.builders.many import BuildSettings, Built
    from megaindex.engine import Engine


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.recipe:
        refuse_others(parser, options, "--recipe", ["cache_dir"])
        _build_recipe(options)
    else:
        _build(options)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex build", description=__doc__)
    add_flags(parser, "--recipe", help="open, check and lay out the sources of a run instead")
    add_flags(parser, "--data-path", "--seq-length", "--split", "--subset", "--cache-dir")
    parser.add_argument("--data-paths-file", metavar="FILE", help="more prefixes, one a line")
    add_flags(parser, "--seed", default=DEFAULT_SEED)
    add_flags(parser, "--order", default="megatron")
    length = parser.add_mutually_exclusive_group()
    add_flags(length, "--epochs", help="such as 1, 1.5 or 3/2; default: 1")
    add_flags(length, "--num-samples")
    add_engine_arguments(parser)
    return parser


def _build_recipe(options: argparse.Namespace) -> None:
    """Open and check every source of a recipe; its orders are computed, no arrays are stored."""
    from megaindex.builders.recipe import open_recipe
    from megaindex.recipe.recipe_file import read_recipe

    start = time.perf_counter()
    opened = open_recipe(read_recipe(options.recipe), cache_dir=options.cache_dir)
    index = opened.index
    seconds = time.perf_counter() - start
    kept = "nothing is stored"
    if options.cache_dir is not None:
        kept = f"results of the checks are in {options.cache_dir}"
    print(
        f"{options.recipe}: {index.num_samples:,} samples of {index.sequence_length} tokens in "
        f"{opened.layout.num_steps:,} steps, from {len(opened.sources)} source(s) of "
        f"{index.tokens_per_epoch:,} tokens, in {seconds:.2f} s; samples are computed on access, "
        f"{kept}"
    )
    for source, fingerprint in zip(opened.sources, opened.fingerprints, strict=True):
        print(f"  {source.corpus.name}: {source.dataset.path_prefix}, content {fingerprint}")


def _build(options: argparse.Namespace) -> None:
    for name in ("seq_length", "cache_dir"):
        if getattr(options, name) is None:
            raise InvalidArgument(f"--{name.replace('_', '-')} is missing, or give --recipe")
    paths = _paths(options)
    with chosen_engine(options) as engine:
        if len(paths) == 1 and options.engine == "local":
            _build_one(paths[0], options)
        else:
            _build_many(paths, options, engine)


def _paths(options: argparse.Namespace) -> list[str]:
    paths = list(options.data_path or ())
    refuse_weights("build", paths)
    if options.data_paths_file is not None:
        paths += _lines(options.data_paths_file)
    if not paths:
        raise InvalidArgument("--data-path is missing, or give --recipe")
    return list(dict.fromkeys(paths))


def _lines(file: str) -> list[str]:
    from megaindex.io.os_errors import as_storage_error
    from megaindex.io.paths import check_local

    check_local(file, "copy it to a disk")
    with as_storage_error(file, "cannot read"), open(file, encoding="utf-8") as lines:
        try:
            paths = [line.strip() for line in lines]
        except UnicodeDecodeError as error:
            raise FormatError(
                f"{file}: not a text file: {error}; write one prefix a line"
            ) from None
    if not any(paths):
        raise FormatError(f"{file}: must name at least one dataset; write one prefix a line")
    return [path for path in paths if path]


def _settings(options: argparse.Namespace) -> BuildSettings:
    from megaindex.builders.many import BuildSettings

    return BuildSettings(
        sequence_length=options.seq_length,
        seed=options.seed,
        num_samples=options.num_samples,
        epochs=options.epochs,
        split=options.split,
        subset=options.subset,
        order=options.order,
        cache_dir=options.cache_dir,
    )


def _build_one(path: str, options: argparse.Namespace) -> None:
    from megaindex.kernels import backend

    settings = _settings(options)
    start = time.perf_counter()
    index = settings.build(path)
    seconds = time.perf_counter() - start
    print(
        f"order {index.order}: {index.num_samples:,} samples of {index.sequence_length} tokens, "
        f"{index.num_epochs} epoch(s) of {index.tokens_per_epoch:,} tokens, in {seconds:.2f} s "
        f"({backend()}), {_where(options)}"
    )


def _build_many(paths: Sequence[str], options: argparse.Namespace, engine: Engine) -> None:
    from megaindex.builders.many import build_many
    from megaindex.progress import counting

    settings = _settings(options)
    start = time.perf_counter()
    built = []
    with counting("building", len(paths)) as count:
        for one in build_many(paths, settings, engine):
            built.append(one)
            count(1)
    seconds = time.perf_counter() - start
    workers = f"{engine.workers} worker(s) ({options.engine})"
    print(_summary(built, settings.sequence_length, f"in {seconds:.2f} s on {workers}", options))


def _summary(built: Sequence[Built], length: int, how: str, options: argparse.Namespace) -> str:
    slowest = max(built, key=lambda one: one.seconds)
    samples = sum(one.num_samples for one in built)
    tokens = sum(one.tokens_per_epoch for one in built)
    return (
        f"order {options.order}: {len(built):,} dataset(s), {samples:,} samples of {length} "
        f"tokens, {tokens:,} tokens in one epoch of each, {how}, {_where(options)}\n"
        f"slowest: {slowest.path}, {slowest.num_samples:,} samples in {slowest.seconds:.2f} s"
    )


def _where(options: argparse.Namespace) -> str:
    if options.order in ("epoch", "window"):
        return "samples computed on access, nothing stored"
    return f"in {options.cache_dir}"
