"""A corpus for the audit's tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus


@pytest.fixture(scope="session")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """400 documents of 1 to 79 tokens, three of them empty."""
    lengths = np.random.default_rng(5).integers(1, 80, 400)
    lengths[[0, 17, 399]] = 0
    path = tmp_path_factory.mktemp("audit") / "corpus"
    write_corpus(path, lengths)
    return path
