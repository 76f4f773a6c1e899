"""Command ``python -m megaindex.adapters.megatron -- script.py arguments``: runs a script under the
adapter."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from megaindex.adapters.megatron import install
from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel
from megaindex.validation import read_number

_SETTINGS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "--variance-buffer": ("variance_buffer", read_number),
    "--separate-final-epoch": ("separate_final_epoch", read_number),
    "--final-epoch-threshold": ("final_epoch_threshold", read_number),
    "--amend": ("amend", str),
    "--balance": ("balance", partial(CostModel.parse, name="--balance")),
}
_USAGE = """usage: python -m megaindex.adapters.megatron [--variance-buffer B|exact]
           [--separate-final-epoch auto|always|never] [--final-epoch-threshold T]
           [--balance PRESET|LINEAR:ATTENTION] [--amend FILE]
           [--] script.py [arguments of the script]"""


def main(arguments: list[str]) -> int:
    """Install the adapter, run the script as ``python script.py`` would, return the exit status."""
    given: dict[str, str] = {}
    while len(arguments) > 1 and arguments[0] in _SETTINGS:
        given[arguments[0]] = arguments[1]
        arguments = arguments[2:]
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    try:
        read = [(*_SETTINGS[flag], text) for flag, text in given.items()]
        install(**{name: parse(text) for name, parse, text in read})
    except InvalidArgument as error:
        print(error, file=sys.stderr)
        return 2
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
