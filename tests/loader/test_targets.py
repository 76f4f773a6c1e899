"""Loss of instruction data beside text, token by token."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import InvalidArgument
from megaindex.index.spans import IGNORED_LABEL, Spans
from megaindex.loader.targets import SourceTargets, Targets
from megaindex.loader.token_readers import MappedTokens

WIDTH = 12
LENGTHS = [5, 3, 13, 4, 2, 7]
KINDS = ("text", "labels", "loss_mask", "all")


def write(prefix: Path, documents: list[np.ndarray]) -> IndexedDataset:
    with IndexedDatasetWriter(str(prefix), np.int32) as writer:
        for tokens in documents:
            writer.add_document(tokens)
    return IndexedDataset(str(prefix))


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[np.ndarray]]:
    """Tokens of four sources, and the companions of two of them."""
    rng = np.random.default_rng(1)
    tokens = {kind: [rng.integers(100, 999, n) for n in LENGTHS] for kind in KINDS}
    labels = [
        np.where(rng.random(n) < 0.5, IGNORED_LABEL, rng.integers(100, 999, n)) for n in LENGTHS
    ]
    mask = [rng.integers(0, 2, n) for n in LENGTHS]
    return {**tokens, "says labels": labels, "says loss_mask": mask}


@pytest.fixture(scope="module")
def datasets(
    corpora: dict[str, list[np.ndarray]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, IndexedDataset]:
    folder = tmp_path_factory.mktemp("corpora")
    return {name: write(folder / name.replace(" ", "_"), docs) for name, docs in corpora.items()}


def expected(
    corpora: dict[str, list[np.ndarray]], kind: str, pieces: list[tuple[int, int, int]]
) -> tuple[list[int], list[float]]:
    """Labels and loss of one row, token by token."""
    labels, loss = [], []
    for document, offset, length in pieces:
        tokens = corpora[kind][document][offset : offset + length]
        for j in range(length):
            if j + 1 == length:
                labels.append(0)
                loss.append(0.0)
                continue
            label, is_target = int(tokens[j + 1]), True
            if kind == "labels":
                label = int(corpora["says labels"][document][offset + j + 1])
                is_target = label != IGNORED_LABEL
            if kind == "loss_mask":
                is_target = bool(corpora["says loss_mask"][document][offset + j + 1])
            labels.append(label if is_target else 0)
            loss.append(float(is_target))
    fill = WIDTH - len(labels)
    return (labels + [0] * fill)[:WIDTH], (loss + [0.0] * fill)[:WIDTH]


@st.composite
def rows(draw: st.DrawFn) -> list[tuple[int, list[tuple[int, int, int]]]]:
    """Rows of one source each: documents one after the other, at most WIDTH + 1 tokens."""
    result = []
    for _ in range(draw(st.integers(1, 6))):
        source, pieces, room = draw(st.integers(0, 3)), [], WIDTH
        for document in draw(st.lists(st.integers(0, 5), max_size=4)):
            length = min(LENGTHS[document], room + (not pieces))
            if length >= 2:
                pieces.append((document, 0, length))
                room -= length
        result.append((source, pieces))
    return result


@given(batch=rows())
def test_targets_are_those_of_each_source(
    corpora: dict[str, list[np.ndarray]],
    datasets: dict[str, IndexedDataset],
    batch: list[tuple[int, list[tuple[int, int, int]]]],
) -> None:
    runs = [(source, *piece) for source, pieces in batch for piece in pieces]
    columns = np.ascontiguousarray(np.array(runs, np.int64).reshape(-1, 4).T)
    splits = np.concatenate(([0], np.cumsum([len(pieces) for _, pieces in batch])))
    spans = Spans(columns[0].astype(np.int32), columns[1], columns[2], columns[3], splits)
    tokens, labels = (np.empty((len(batch), WIDTH), np.int64) for _ in range(2))
    MappedTokens([datasets[kind] for kind in KINDS]).read(spans, tokens, labels, pad_id=-1)
    loss_mask = (labels != -1).astype(np.float32)
    labels[labels == -1] = 0
    text = labels.copy(), loss_mask.copy()
    Targets(
        [
            None,
            SourceTargets(kind="labels", companion=datasets["says labels"]),
            SourceTargets(kind="loss_mask", companion=datasets["says loss_mask"]),
            SourceTargets(kind="all"),
        ]
    ).apply(spans, labels, loss_mask)
    for k, (source, pieces) in enumerate(batch):
        if source == 0 or not pieces:
            assert labels[k].tolist() == text[0][k].tolist()
            assert loss_mask[k].tolist() == text[1][k].tolist()
        else:
            row = labels[k].tolist(), loss_mask[k].tolist()
            assert row == expected(corpora, KINDS[source], pieces)


def test_labels_and_masks_need_a_companion() -> None:
    with pytest.raises(InvalidArgument, match="labels and masks need a companion dataset"):
        SourceTargets(kind="labels")
