"""``python -m megaindex.adapters.megatron -- script.py arguments``: a script with megaindex under
Megatron."""

from __future__ import annotations

import os
import runpy
import sys

from megaindex.adapters.megatron.patches import install

_USAGE = "usage: python -m megaindex.adapters.megatron [--] script.py [arguments of the script]"


def main(arguments: list[str]) -> int:
    """Run the script as ``python script.py`` would."""
    if arguments[:1] == ["--"]:
        arguments = arguments[1:]
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_USAGE, file=sys.stdout if arguments else sys.stderr)
        return 0 if arguments else 2
    sys.argv = arguments
    sys.path[0] = os.path.dirname(os.path.abspath(arguments[0]))
    install()
    runpy.run_path(arguments[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
