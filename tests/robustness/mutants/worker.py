"""Process that has imported what tests need, and forks for each run of pytest.

Each line of its standard input is a run: a JSON list of pytest's arguments, the file for its output
and the seconds of CPU time for each process. It writes the process id of the child, then the exit
status. Nothing of the tree under test is imported before the fork.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import sys

PRELOADED = (
    "pytest", "hypothesis", "numpy", "numba", "torch", "asyncio", "_pytest.junitxml",
    "_pytest.skipping", "_pytest.unittest", "anyio.pytest_plugin", "xdist.plugin",
)  # fmt: skip
_MOST_BYTES = 1 << 33  # of memory


def main() -> None:
    sys.path.pop(0)  # this folder
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # as for the tests, before torch is imported
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    for line in sys.stdin:
        arguments, output, seconds = json.loads(line)
        child = os.fork()
        if not child:
            os._exit(_test(arguments, output, seconds))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def _test(arguments: list[str], output: str, seconds: int) -> int:
    import pytest

    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    for descriptor, path in enumerate((os.devnull, output, output)):
        os.dup2(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND), descriptor)
    status = pytest.main(arguments)
    sys.stdout.flush()
    return int(status)


if __name__ == "__main__":
    main()
