"""Brute-force counting."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np

from megaindex.run.run import Run


def brute_force(stream: Run) -> dict[str, Any]:
    """Everything `count_exposure` counts, token by token in plain loops."""
    seen = [[[0] * n for n in source.lengths.tolist()] for source in stream.sources]
    last: dict[tuple[int, int, int], int] = {}
    tokens, earlier, distances = ([0] * stream.num_steps for _ in range(3))
    by_source = [[0] * len(stream.sources) for _ in range(stream.num_steps)]
    first_repeats = [-1] * len(stream.sources)
    past = _histograms(seen)
    for step in range(stream.num_steps):
        served = []
        for sample in range(stream.step_bounds[step], stream.step_bounds[step + 1]):
            places = []
            columns = (column.tolist() for column in stream.index.locate([sample]))
            for source, document, offset, length in zip(*columns, strict=True):
                first = stream.sources[source].first_document
                places += [(source, document - first, offset + k) for k in range(length)]
            served += places[: stream.index.sequence_length]
        for source, document, k in served:
            tokens[step] += 1
            earlier[step] += seen[source][document][k]
            by_source[step][source] += seen[source][document][k]
        for place in served:
            source, document, k = place
            if place in last:
                distances[step - last[place]] += 1
                if first_repeats[source] < 0:
                    first_repeats[source] = step
            last[place] = step
        for source, document, k in served:
            seen[source][document][k] += 1
        if step + 1 == stream.past_steps:
            past = _histograms(seen)
    return {
        "tokens": np.array(tokens),
        "earlier": np.array(earlier),
        "distances": np.array(distances),
        "by_source": np.array(by_source),
        "first_repeats": first_repeats,
        "past": past,
        "total": _histograms(seen),
    }


def _histograms(seen: list[list[list[int]]]) -> dict[str, Any]:
    documents = [d for source in seen for d in source if d]
    return {
        "tokens": [_trimmed(np.bincount(list(itertools.chain(*source)))) for source in seen],
        "in_part": _trimmed(np.bincount([max(d) for d in documents])),
        "whole": _trimmed(np.bincount([min(d) for d in documents])),
    }


def _trimmed(counts: np.ndarray) -> list[int]:
    return np.trim_zeros(counts, "b").tolist()


def as_plain(histograms: Any) -> dict[str, Any]:
    """The library's histograms in the form of `brute_force`."""
    return {
        "tokens": [_trimmed(row) for row in histograms.tokens],
        "in_part": _trimmed(histograms.documents_in_part),
        "whole": _trimmed(histograms.documents_whole),
    }
