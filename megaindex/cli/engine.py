"""The flags that choose what runs the tasks of a verb."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megaindex.engine import Engine


def add_engine_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds --engine, --workers and --address."""
    group = parser.add_argument_group("where tasks run (results never depend on it)")
    group.add_argument(
        "--engine",
        default="local",
        choices=("local", "ray"),
        help="processes of this machine, or Ray; default: local",
    )
    group.add_argument(
        "--workers", type=int, metavar="N", help="tasks at the same time; default: one per CPU"
    )
    group.add_argument(
        "--address",
        metavar="A",
        help="of a running Ray cluster, such as auto or 10.0.0.1:6379; default: start one here",
    )


def chosen_engine(options: argparse.Namespace) -> AbstractContextManager[Engine]:
    """The engine that the flags name, for a ``with``."""
    from megaindex.engine import open_engine

    return open_engine(options.engine, workers=options.workers, address=options.address)
