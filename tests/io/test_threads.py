"""The end of a process whose queues still send."""

from __future__ import annotations

import subprocess
import sys

import pytest

SENDING = """
import multiprocessing, sys, time
import megaindex.io.threads

class Slow:
    def __reduce__(self):
        time.sleep(60 if "stuck" in sys.argv else 0.5)
        print("sent", flush=True)
        return Slow, ()

if "main" not in sys.argv:
    multiprocessing.process._parent_process = object()  # as set where a process was spawned
megaindex.io.threads._QUEUE_SECONDS = 0.2 if "stuck" in sys.argv else 30
queue = multiprocessing.Queue()
queue.cancel_join_thread()  # as in a DataLoader worker that is stopped
queue.put(Slow())
"""


@pytest.mark.parametrize(("kind", "output"), [("spawned", "sent\n"), ("stuck", ""), ("main", "")])
def test_a_spawned_process_ends_after_its_batch_is_sent(kind: str, output: str) -> None:
    command = [sys.executable, "-c", SENDING, kind]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout == output
