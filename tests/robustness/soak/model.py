"""What the samples of a run must be, in plain terms: lists of tokens, NumPy's own shuffle."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Documents = list[list[int]]
Rows = npt.NDArray[np.int64]


def shuffled_rows(
    documents: Documents, *, length: int, seed: int, wanted: int | None, epochs: int, apart: bool
) -> Rows:
    """The samples of orders megatron (``apart``: by its rule) and neox, one a row.

    Args:
        wanted: samples asked for, or None for those of ``epochs`` epochs.
        epochs: so many are built.
    """
    stream = np.random.RandomState(seed)
    total = sum(map(len, documents))
    before, built = ((epochs - 1) * total - 1) // length, (epochs * total - 1) // length
    from_last = (built if wanted is None else wanted) - max(0, before)
    last_apart = apart and epochs > 1 and from_last < int(0.80 * ((total - 1) // length))
    head = epochs - 1 if last_apart else epochs
    numbers = [_shuffled(stream, np.tile(np.arange(len(documents)), head))]
    if last_apart:
        numbers.append(_shuffled(stream, np.arange(len(documents))))
    text = np.array([t for n in np.concatenate(numbers) for t in documents[n]], np.int64)
    parts = [(0, before), (before, built)] if last_apart else [(0, built)]
    order = np.concatenate([_shuffled(stream, np.arange(*part)) for part in parts])
    return np.stack([text[k * length : k * length + length + 1] for k in order])


def _shuffled(stream: np.random.RandomState, values: npt.NDArray[np.int64]) -> Rows:
    stream.shuffle(values)
    return values


def check_epochs(rows: Rows, documents: Documents, length: int, epochs: int) -> None:
    """Orders epoch and window: each epoch has every token once, but for what fills no sample.

    Tokens differ from each other, so that they tell where they are from.
    """
    total = sum(map(len, documents))
    per_epoch = (total - 1) // length
    assert len(rows) == epochs * per_epoch
    known = {token for document in documents for token in document}
    for epoch in range(epochs):
        inputs = rows[epoch * per_epoch : (epoch + 1) * per_epoch, :-1].ravel().tolist()
        assert len(set(inputs)) == len(inputs) == per_epoch * length
        assert known.issuperset(inputs)
