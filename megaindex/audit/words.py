"""Sentences that terminal and page share."""

from __future__ import annotations

import numpy as np

from megaindex.audit.report import Audit, Jump


def headline(audit: Audit) -> str:
    """What was audited, in one line."""
    stream = audit.stream
    order = f"order {stream.order}, " if stream.order else ""
    past = f", of which {stream.past_steps:,} are past" if stream.past_steps else ""
    return (
        f"{order}{stream.num_samples:,} samples of {stream.index.sequence_length:,} tokens in "
        f"{stream.num_steps:,} steps{past}; corpus of {audit.tokens:,} tokens"
    )


def jump_words(jump: Jump) -> str:
    """What a jump is, and what it does to the loss."""
    return (
        f"From step {jump.step:,} on, tokens have been seen {jump.after:.2f} times before, just "
        f"before it {jump.before:.2f} times: the training loss tends to fall there, because the "
        "model meets these tokens once more, not because it has learned more."
    )


def cut_words(audit: Audit) -> list[str]:
    """Tokens that no sample holds, source by source."""
    return [
        f"{source.name}: {source.cut_tokens:,} tokens "
        f"({percent(source.cut_tokens / int(counts.sum()))}) are in no sample of an epoch, by "
        f"{source.cut_by}, and stay unseen."
        for source, counts in zip(audit.stream.sources, audit.exposure.total.tokens, strict=True)
        if source.cut_tokens
    ]


def distance_words(audit: Audit) -> str:
    """How far repeats are apart."""
    distances = audit.exposure.distances
    repeated = int(distances.sum())
    if repeated == 0:
        return "No token is served twice."
    cumulated = np.cumsum(distances)
    least = int(np.flatnonzero(distances)[0])
    tenth, median, most = (
        int(np.searchsorted(cumulated, share * repeated)) for share in (0.1, 0.5, 0.9)
    )
    return (
        f"Tokens served again: {repeated:,}. Steps since the last time: at least {least:,}, "
        f"median {median:,}; 10 % within {tenth:,}, 90 % within {most:,}."
    )


def percent(share: float) -> str:
    """Two decimals, and never 0 or 100 for what is only close to it."""
    if 0 < share < 0.00005:
        return "<0.01%"
    return ">99.99%" if 0.99995 <= share < 1 else f"{share:.2%}"
