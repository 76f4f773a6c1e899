"""The native kernels where the system starts no more threads."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import megaindex

# RLIMIT_NPROC does not bind root, so root becomes another user; 77 says that no limit holds.
PROGRAM = """
import os, resource, threading
import numpy as np
from megaindex.kernels import _native as native

def results(threads):
    shuffled = np.empty(300_000, np.int64)
    native.shuffled_range(native.seed_state(7), 0, shuffled, threads)
    lengths = np.random.default_rng(1).integers(1, 9, 300_000).astype(np.int32)
    documents, total = np.arange(300_000, dtype=np.int32), int(lengths.sum())
    samples = np.empty((total // 64, 2), np.int64)
    native.cut_samples(lengths, documents, 64, 1, len(samples) - 1, total, samples, threads)
    starts = np.empty(300_000 // 50 + 1, np.int64)
    native.epoch_starts(np.array([1, 2], np.uint64), lengths, 1, 50, starts, threads)
    tokens, rows, width = np.arange(800_000, dtype=np.int32), 16, 50_000
    table = native.token_table([(tokens, np.array([0]), np.array([800_000], np.int32))])
    offsets, zeros = np.arange(rows) * width, np.zeros(rows, np.int64)
    out = np.zeros((rows, width), np.int64)
    assert native.gather(table, zeros.astype(np.int32), zeros, offsets, zeros + width,
                         np.arange(rows + 1), out, None, 0, threads) == -1
    return shuffled, samples, starts, out

alone = results(1)
resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
if os.getuid() == 0:
    try:
        os.setuid(65534)
    except OSError:
        os._exit(77)
try:
    threading.Thread(target=int).start()
    os._exit(77)
except RuntimeError:
    pass
for threads in (2, 4):
    assert all(np.array_equal(a, b) for a, b in zip(alone, results(threads), strict=True))
"""


def test_work_is_done_without_threads() -> None:
    pytest.importorskip("megaindex.kernels._native")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=Path(megaindex.__file__).parents[1],  # whose package is imported there, too
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode == 77:
        pytest.skip("no limit on threads holds here")
    assert done.returncode == 0, done.stderr
