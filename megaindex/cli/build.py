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
    order_of_flags,
    print_json,
    refuse_others,
    refuse_weights,
)
from megaindex.errors import FormatError, InvalidArgument, visible
from megaindex.validation import DEFAULT_SEED, count_of

if TYPE_CHECKING:
    from megaindex.builders.cached import BuildSettings, Built
    from megaindex.engine import Engine


def main(arguments: Sequence[str]) -> int:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.recipe:
        refuse_others(parser, options, "--recipe", ["cache_dir", "json"])
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
    add_flags(parser, "--max-documents", "--long-documents", "--align")
    length = parser.add_mutually_exclusive_group()
    add_flags(length, "--epochs", help="whole epochs, a fraction is rounded up; default: 1")
    add_flags(length, "--num-samples")
    add_engine_arguments(parser)
    add_flags(parser, "--json")
    return parser


def _build_recipe(options: argparse.Namespace) -> None:
    """Open and check every source of a recipe; its orders are computed, no arrays are stored."""
    from megaindex.builders.recipe import open_recipe
    from megaindex.settings.recipe_file import read_recipe

    start = time.perf_counter()
    opened = open_recipe(read_recipe(options.recipe), cache_dir=options.cache_dir)
    index = opened.index
    seconds = time.perf_counter() - start
    if options.json:
        found = {
            "recipe": options.recipe,
            "num_samples": index.num_samples,
            "sequence_length": index.sequence_length,
            "num_steps": opened.layout.num_steps,
            "tokens_per_epoch": index.tokens_per_epoch,
            "cache_dir": options.cache_dir,
            "seconds": seconds,
            "sources": [
                {
                    "name": source.corpus.name,
                    "path": source.dataset.path_prefix,
                    "fingerprint": fingerprint,
                }
                for source, fingerprint in zip(opened.sources, opened.fingerprints, strict=True)
            ],
        }
        print_json(found)
        return
    samples = index.num_samples - opened.layout.recipe.first_sample
    lengths = " → ".join(map(str, opened.layout.recipe.stage_lengths))
    kept = "nothing is stored"
    if options.cache_dir is not None:
        kept = visible(f"results of the checks are in {options.cache_dir}")
    steps, sources = opened.layout.num_steps, len(opened.sources)
    print(
        f"{visible(options.recipe)}: {samples:,} samples of {lengths} tokens in "
        f"{count_of(steps, 'step')}, from {count_of(sources, 'source')} of "
        f"{index.tokens_per_epoch:,} tokens, in {seconds:.2f} s; samples are computed on access, "
        f"{kept}"
    )
    for source, fingerprint in zip(opened.sources, opened.fingerprints, strict=True):
        where = visible(f"{source.corpus.name}: {source.dataset.path_prefix}")
        print(f"  {where}, content {fingerprint}")


def _build(options: argparse.Namespace) -> None:
    for name in ("seq_length", "cache_dir"):
        if getattr(options, name) is None:
            raise InvalidArgument(f"--{name.replace('_', '-')} is missing, or give --recipe")
    paths, settings = _paths(options), _settings(options)
    start = time.perf_counter()
    with chosen_engine(options) as engine:
        alone = len(paths) == 1 and options.engine == "local"
        workers = 1 if alone else engine.workers
        built = [settings.built(paths[0])] if alone else _built_by(engine, paths, settings)
    seconds = time.perf_counter() - start
    if options.json:
        _print_json(built, seconds, workers, options)
    elif alone:
        _print_one(built[0], options)
    else:
        how = f"in {seconds:.2f} s on {count_of(workers, 'worker')} ({options.engine})"
        print(_summary(built, how, options))


def _paths(options: argparse.Namespace) -> list[str]:
    paths = list(options.data_path or ())
    refuse_weights("build", paths)
    if options.data_paths_file is not None:
        paths += _lines(options.data_paths_file)
    if not paths:
        raise InvalidArgument("--data-path is missing, or give --recipe")
    return list(dict.fromkeys(paths))


def _lines(file: str) -> list[str]:
    from megaindex.io.atomic import read_named

    try:
        paths = [line.strip() for line in read_named(file).decode().splitlines()]
    except UnicodeDecodeError as error:
        raise FormatError(f"{file}: not a text file: {error}; write one prefix a line") from None
    if not any(paths):
        raise FormatError(f"{file}: must name at least one dataset; write one prefix a line")
    return [path for path in paths if path]


def _settings(options: argparse.Namespace) -> BuildSettings:
    from megaindex.builders.cached import BuildSettings

    return BuildSettings(
        sequence_length=options.seq_length,
        seed=options.seed,
        num_samples=options.num_samples,
        epochs=options.epochs,
        split=options.split,
        subset=options.subset,
        order=order_of_flags(options),
        cache_dir=options.cache_dir,
    )


def _built_by(engine: Engine, paths: Sequence[str], settings: BuildSettings) -> list[Built]:
    """Return the sizes of the indices, in the order of `paths`."""
    from megaindex.builders.cached import build_many
    from megaindex.progress import counting

    built = {}
    with counting("building", len(paths)) as count:
        for one in build_many(paths, settings, engine):
            built[one.path] = one
            count(1)
    return [built[path] for path in paths]


def _print_one(built: Built, options: argparse.Namespace) -> None:
    from megaindex.kernels import backend

    print(
        f"order {built.order}: {built.num_samples:,} samples of {options.seq_length} tokens, "
        f"{count_of(built.num_epochs, 'epoch')} of {built.tokens_per_epoch:,} tokens, in "
        f"{built.seconds:.2f} s ({backend()}), {_where(options)}"
    )


def _print_json(
    built: Sequence[Built], seconds: float, workers: int, options: argparse.Namespace
) -> None:
    from megaindex.kernels import backend

    found = {
        "order": options.order,
        "sequence_length": options.seq_length,
        "num_samples": sum(one.num_samples for one in built),
        "tokens_per_epoch": sum(one.tokens_per_epoch for one in built),
        "cache_dir": None if _is_computed(options) else options.cache_dir,
        "backend": backend(),
        "engine": options.engine,
        "workers": workers,
        "seconds": seconds,
        "datasets": list(map(vars, built)),
    }
    print_json(found)


def _summary(built: Sequence[Built], how: str, options: argparse.Namespace) -> str:
    slowest = max(built, key=lambda one: one.seconds)
    samples = sum(one.num_samples for one in built)
    tokens = sum(one.tokens_per_epoch for one in built)
    return (
        f"order {options.order}: {count_of(len(built), 'dataset')}, {samples:,} samples of "
        f"{options.seq_length} tokens, {tokens:,} tokens in one epoch of each, {how}, "
        f"{_where(options)}\n"
        f"slowest: {visible(slowest.path)}, {slowest.num_samples:,} samples in "
        f"{slowest.seconds:.2f} s"
    )


def _is_computed(options: argparse.Namespace) -> bool:
    return options.order in ("epoch", "window")


def _where(options: argparse.Namespace) -> str:
    if _is_computed(options):
        return "samples computed on access, nothing stored"
    return f"in {visible(options.cache_dir)}"
