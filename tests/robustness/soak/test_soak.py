"""Random operations against a model: builds, kills, full disks, resumed and changed runs."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from robustness.soak.operations import OPERATIONS
from robustness.soak.running import soak

# From Python 3.12 on, forking warns once anything has started a thread.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "operations"), [(0, 60), *((seed, 150) for seed in range(6))])
def test_nothing_diverges(
    tmp_path: Path, seed: int, operations: int, caplog: pytest.LogCaptureFixture
) -> None:
    """``make soak`` does the same for an hour."""
    caplog.set_level(logging.CRITICAL, "megaindex")
    counts = soak(tmp_path, seed, operations=operations)
    assert counts["operations"] == operations
    assert all(counts[operation.__name__] for operation in OPERATIONS)
    assert counts["  of which killed"] > 0
