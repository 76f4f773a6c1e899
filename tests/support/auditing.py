"""Brute-force counting."""

from __future__ import annotations

from typing import Any

import numpy as np

from megaindex.run.run import Run


def brute_force(stream: Run) -> dict[str, Any]:
    """Everything `count_exposure` counts, token by token in plain loops."""
    seen = [[np.zeros(n, int) for n in source.lengths] for source in stream.sources]
    last: dict[tuple[int, int, int], int] = {}
    tokens, earlier = (np.zeros(stream.num_steps, int) for _ in range(2))
    distances = np.zeros(stream.num_steps, int)
    by_source = np.zeros((stream.num_steps, len(stream.sources)), int)
    first_repeats = [-1] * len(stream.sources)
    past = _histograms(seen)
    for step in range(stream.num_steps):
        served = []
        for sample in range(stream.step_bounds[step], stream.step_bounds[step + 1]):
            places = []
            for source, document, offset, length in zip(
                *stream.index.locate([sample]), strict=True
            ):
                first = stream.sources[source].first_document
                places += [(source, document - first, offset + k) for k in range(length)]
            served += places[: stream.index.sequence_length]
        for source, document, k in served:
            tokens[step] += 1
            earlier[step] += seen[source][document][k]
            by_source[step, source] += seen[source][document][k]
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
        "tokens": tokens,
        "earlier": earlier,
        "distances": distances,
        "by_source": by_source,
        "first_repeats": first_repeats,
        "past": past,
        "total": _histograms(seen),
    }


def _histograms(seen: list[list[np.ndarray]]) -> dict[str, Any]:
    documents = [d for source in seen for d in source if d.size]
    return {
        "tokens": [_trimmed(np.bincount(np.concatenate(source))) for source in seen],
        "in_part": _trimmed(np.bincount([d.max() for d in documents])),
        "whole": _trimmed(np.bincount([d.min() for d in documents])),
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
