"""The corpora of tests/golden/neox_packing.json, written again; see make_neox_packing.py."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np

from megaindex import IndexedDataset, IndexedDatasetWriter

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/neox_packing.json").read_text())


def write_pair(prefix: str, dtype: type, rows: list[Any]) -> IndexedDataset:
    with IndexedDatasetWriter(prefix, dtype, dialect="neox") as writer:
        for row in rows:
            writer.add_document(np.asarray(row, dtype))
    return IndexedDataset(prefix, dialect="neox")


def write_corpus_and_companions(
    prefix: Path, sizes: list[int], prompts: list[int] | None = None
) -> dict[str, IndexedDataset]:
    """text, label, reward and ref of one corpus.

    Tokens count on through the corpus; the first labels of a sequence are -100, as many as its
    entry of ``prompts`` says, and the others the token; the reward of sequence i is i / 4 - 1, the
    reference value of a token its negative eighth.
    """
    ends = np.cumsum([0, *sizes])
    text = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
    labels = [row.copy() for row in text]
    for row, prompt in zip(labels, prompts or [0] * len(sizes), strict=True):
        row[:prompt] = -100
    return {
        "text": write_pair(f"{prefix}", np.int32, text),
        "label": write_pair(f"{prefix}_label", np.int32, labels),
        "reward": write_pair(
            f"{prefix}_reward", np.float32, [[i / 4 - 1] for i in range(len(sizes))]
        ),
        "ref": write_pair(f"{prefix}_ref", np.float32, [-row / 8 for row in text]),
    }
