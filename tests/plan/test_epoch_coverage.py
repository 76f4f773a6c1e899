"""Coverage of order epoch past its first pass, against counting the tokens it serves."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from corpora import write_corpus
from planning import plan_json

import megaindex


@pytest.mark.parametrize("epochs", ["1.3", "2", "0.4"])
def test_coverage_is_that_of_the_tokens_served(tmp_path: Path, epochs: str) -> None:
    lengths = np.random.default_rng(1).integers(1, 300, 120)
    corpus = write_corpus(tmp_path / "c", lengths)
    plan = plan_json("--data-path", corpus.path_prefix, "--seq-length", 64, "--global-batch-size",
                     8, "--epochs", epochs, "--order", "epoch", "--coverage", "exact")  # fmt: skip
    served = plan["samples_consumed"]
    index = megaindex.build_index(
        corpus, sequence_length=64, seed=1234, num_samples=served, order="epoch"
    )
    spans = index.locate(np.arange(served))
    length = spans.length.copy()
    length[spans.row_splits[1:] - 1] -= 1  # the shifted label's token is the next sample's
    begin = corpus.sequence_pointers[spans.document] // 4 + spans.offset
    times = np.zeros(corpus.num_tokens, np.int64)
    for first, count in zip(begin, length, strict=True):
        times[first : first + count] += 1
    (row,) = plan["datasets"]
    assert row["coverage_method"] in ("built", "closed-form")
    expected = np.bincount(times) / times.size
    assert list(row["coverage"].values()) == pytest.approx(expected.tolist())
    assert sum(row["coverage"].values()) == pytest.approx(1)
