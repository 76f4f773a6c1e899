"""Names of values of sources in the log of a training run: TensorBoard, Weights & Biases."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence


def source_scalars(
    prefix: str, names: Sequence[str], values: Mapping[str, Iterable[float | None]]
) -> dict[str, float]:
    """Return values under the names of a log.

    Names are ``data/epoch`` for all sources together and ``data/epoch/web`` for the source ``web``
    of several, ``data/epoch/web#2`` if it is listed again.

    Args:
        prefix: first part of each name.
        names: name of each source.
        values: for each value by name, that of all sources together, then of each; None is left
            out.
    """
    labels = [""]
    counts: Counter[str] = Counter()
    for name in (each.strip("/") for each in names if len(names) > 1):
        counts[name] += 1
        labels.append(f"/{name}" + f"#{counts[name]}" * (counts[name] > 1))
    return {
        f"{prefix}/{value}{label}": number
        for value, numbers in values.items()
        for label, number in zip(labels, numbers, strict=False)  # of one source, that of all
        if number is not None
    }
