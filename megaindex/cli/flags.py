"""Flags that change what a verb does, and leave others without a meaning."""

from __future__ import annotations

import argparse
from collections.abc import Collection

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
