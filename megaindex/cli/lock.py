"""Write run.lock: the data, the order and the receipts of a run, in one text file.

megaindex verify run.lock checks it, megaindex.lock.open_run gives the run's loaders."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megaindex.cli.options import Parser, add_flags, check_output, print_json, take_run
from megaindex.cli.plan import (
    add_run_arguments,
    add_subset,
    check_lock_alone,
    lock_of_options,
)
from megaindex.errors import InvalidArgument, visible
from megaindex.validation import count_of

if TYPE_CHECKING:
    from megaindex.lock.lock_file import Lock

_NAMING = (
    "data_path", "tokens_per_epoch", "length_histogram", "recipe", "state", "_config",
    "megatron_args",
)  # fmt: skip
"""Ends of the options that name a run."""


def main(arguments: Sequence[str]) -> int:
    options = _parser().parse_args(arguments)
    take_run(options, "lock")
    if options.lock:
        check_lock_alone(options)
        _refuse_with_a_lock(options)
    elif not any(value for name, value in vars(options).items() if name.endswith(_NAMING)):
        raise InvalidArgument(
            "no run is named; give its file or its pairs first, as in `megaindex lock run.yaml` or "
            "`megaindex lock PREFIX --seq-length 2048 …`"
        )
    check_output("--out", options.out, ".lock", overwrite=options.overwrite)
    if options.lengths:
        check_output("--lengths", options.lengths, ".lengths", overwrite=options.overwrite)
    made = _published(options)
    lock = made.write(options.out, overwrite=options.overwrite)
    facts = _facts(lock)
    if options.json:
        print_json(facts)
    else:
        _print(facts)
    return 0


def _refuse_with_a_lock(options: argparse.Namespace) -> None:
    """Refuse what a lock that is there does not take."""
    given = ("tokens", "sha256", "amend", "cache_dir")
    others = [name for name in given if getattr(options, name)]
    if others or not (options.public or options.about or options.lengths):
        raise InvalidArgument(
            f"{options.lock} is a lock: --public, --about and --lengths publish it"
            + (f", and --{others[0].replace('_', '-')} is for its settings" if others else "")
            + "; give the settings to lock the run again"
        )


def _published(options: argparse.Namespace) -> Lock:
    """Return the lock of the options, as --about and --public change it; write its lengths."""
    from megaindex.lock.lengths import write_lengths
    from megaindex.lock.lock_file import read_lock
    from megaindex.lock.publication import public_lock, with_about

    if options.lock:
        made = read_lock(options.lock)
    else:
        made = lock_of_options(
            options,
            tokens=options.tokens,
            sha256=options.sha256,
            out=options.out,
            amend=options.amend,
        )
    if options.about:
        made = with_about(made, options.about)
    public = public_lock(made) if options.public else made
    if options.lengths:
        write_lengths(made, options.lengths, overwrite=options.overwrite)
    return public


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="megaindex lock", description=__doc__, allow_abbrev=False)
    add_run_arguments(parser)
    add_subset(parser)
    built = parser.add_argument_group("lock")
    add = built.add_argument
    add("--out", metavar="FILE", default="run.lock", help="the lock; default: run.lock")
    amend = "how a framework's run began and its blend changed since, as for install(amend=…)"
    add("--amend", metavar="FILE", help=amend)
    add("--tokens", action="store_true", help="hash every byte of the .bin files too")
    add("--sha256", action="store_true", help="hash the .idx and .bin files by SHA-256")
    add_flags(built, "--cache-dir", "--overwrite", "--json")
    add = parser.add_argument_group("publication (RUN may be a lock)").add_argument
    add("--lock", metavar="FILE", help="a lock to publish, in place of the settings of a run")
    add("--public", action="store_true", help="write names without folders")
    add("--about", metavar="FILE", help="title, licence, version, address of the run and sources")
    lengths = "write FILE.lengths, of all sources, with which others verify the lock"
    add("--lengths", metavar="FILE", help=lengths)
    return parser


def _facts(lock: Any) -> dict[str, Any]:
    subsets = {name: _subset_facts(subset) for name, subset in lock.content["subsets"].items()}
    return {
        "path": lock.path,
        "bytes": os.path.getsize(lock.path),
        "digest": lock.content["digest"],
        "identity": lock.identity,
        "content": lock.content_identity,
        "pairs": len(lock.sources),
        "subsets": subsets,
    }


def _subset_facts(subset: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a subset; ``samples`` and ``steps`` are positions, with those skipped.

    Of a run that joined another system's, they are those that follow ``first_step``.
    """
    import numpy as np

    from megaindex.run.subset import first_step, step_bounds_of

    left_out = np.array(subset["index"].get("left_out", ()), np.int64).reshape(-1, 2)
    bounds = step_bounds_of(subset)
    past = first_step(bounds)
    firsts, samples = bounds[past:-1], int(bounds[-1] - bounds[0])
    begins, ends = (np.searchsorted(column, firsts, "right") for column in left_out.T)
    return {
        **({"first_step": past} if past else {}),
        "samples": samples,
        "steps": firsts.size,
        "samples_served": samples - int(np.diff(left_out).sum()),
        "steps_made": int((begins == ends).sum()),
        "receipt": subset["receipts"]["total"],
    }


def _print(facts: dict[str, Any]) -> None:
    pairs = count_of(facts["pairs"], "pair")
    print(f"{visible(facts['path'])}: {facts['bytes']:,} bytes, {pairs}")
    print(f"  identity of the run {facts['identity']}")
    print(f"  identity of the tokens {facts['content'] or 'not hashed'}")
    for name, subset in facts["subsets"].items():
        skipped = subset["steps"] - subset["steps_made"]
        print(
            f"  {name:<5}  {subset['samples_served']:,} samples, {subset['steps_made']:,} steps"
            + f" ({skipped:,} skipped)" * (skipped > 0)
            + (f" from step {subset['first_step']:,} on" if "first_step" in subset else "")
            + f", receipt {subset['receipt']}"
        )
