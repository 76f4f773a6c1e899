"""Flags that change what a verb does, and leave others without a meaning."""

from __future__ import annotations

import argparse
import os
from collections.abc import Collection, Sequence

from megaindex.errors import InvalidArgument


def refuse_others(
    parser: argparse.ArgumentParser,
    options: argparse.Namespace,
    flag: str,
    besides: Collection[str],
) -> None:
    """Refuse what `flag` would silently pass over.

    Args:
        flag: such as ``--repair``, which was given.
        besides: names of the options that have a meaning with it.

    Raises:
        InvalidArgument: another option has a value that is not its default.
    """
    own = flag.removeprefix("--").replace("-", "_")
    for name, value in vars(options).items():  # "paths" are no flag
        if name not in (own, "paths", *besides) and value != parser.get_default(name):
            other = f"--{name.replace('_', '-')}"
            raise InvalidArgument(
                f"{other}: has no meaning with {flag}, which takes "
                f"{', '.join(f'--{one}'.replace('_', '-') for one in besides)} and no other; leave "
                f"it out"
            )


def refuse_weights(verb: str, words: Sequence[str]) -> None:
    """Refuse ``w P w P …``, as `megaindex plan` and the frameworks take blends.

    Raises:
        InvalidArgument: every other word is a number, and there is no dataset of that name.
    """
    weights, paths = words[::2], words[1::2]
    if paths and len(weights) == len(paths) and all(map(_is_weight, weights)):
        raise InvalidArgument(
            f"{words[0]} {words[1]}: megaindex {verb} takes prefixes without weights, which "
            f"belong to megaindex plan; give {' '.join(paths[:3])}{' …' * (len(paths) > 3)}"
        )


def _is_weight(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return not (os.path.lexists(word) or os.path.lexists(f"{word}.idx"))
