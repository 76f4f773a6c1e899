"""Sentences about an audit: its headline, findings and suggested changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megaindex._types import I64
from megaindex.audit.report import Audit, Jump, shares
from megaindex.console import percent
from megaindex.index.frameworks import FRAMEWORK_RULES

_NOTABLE = 0.01
"""Least share of unseen tokens of a source for which a change is suggested."""
_MOST_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class SourceCounts:
    """Tokens of one source after all steps."""

    name: str
    tokens: int
    served: int
    of_served: float
    """Share of this source in the tokens served."""
    unseen: float
    once: float
    more: float
    first_repeat: int | None
    """First step that serves a token again."""

    @property
    def epochs(self) -> float:
        """Mean number of times that a token is served."""
        return self.served / max(1, self.tokens)


def source_counts(audit: Audit) -> list[SourceCounts]:
    """Return the counts of each source."""
    exposure = audit.exposure
    served = exposure.composition.sum(axis=0)
    columns = zip(
        audit.stream.sources,
        exposure.total.tokens,
        served.tolist(),
        shares(served),
        exposure.first_repeats.tolist(),
        strict=True,
    )
    found = []
    for source, counts, tokens_served, share, repeat in columns:
        unseen, once, *more = shares(counts)
        found.append(
            SourceCounts(
                name=source.name,
                tokens=int(counts.sum()),
                served=tokens_served,
                of_served=share,
                unseen=unseen,
                once=once,
                more=sum(more),
                first_repeat=None if repeat < 0 else repeat,
            )
        )
    return found


def headline(audit: Audit) -> str:
    """Return a line with the order, the samples and the corpus."""
    stream = audit.stream
    order = f"order {stream.order}, " if stream.order else ""
    past = f", of which {stream.past_steps:,} are past" if stream.past_steps else ""
    return (
        f"{order}{stream.samples_served:,} samples of {stream.lengths_text} tokens in "
        f"{stream.num_steps:,} steps{past}; corpus of {audit.tokens:,} tokens"
    )


def findings(audit: Audit) -> list[str]:
    """Return sentences on what a run sees, as at the top of the audit's page.

    Shares of the corpus never seen, seen once and more often, so far and after all steps; the
    sources that repeat, those served most often for their size first, with their first repeats;
    jumps; and tokens that are in no sample.

    Args:
        audit: result of `megaindex.audit.audit`.
    """
    steps = {
        "so far": f"So far, after {audit.stream.past_steps:,} steps",
        "after all steps": f"After all {audit.stream.num_steps:,} steps",
    }
    return [
        *skip_texts(audit),
        *(f"{steps[name]}: {_seen(counts.tokens.sum(axis=0))}" for name, counts in audit.moments()),
        *_repeats(source_counts(audit)),
        *map(jump_text, audit.jumps),
        *cut_texts(audit),
    ]


def skip_texts(audit: Audit) -> list[str]:
    """Return sentences on the skips of a run."""
    return [] if audit.skip is None else [f"Skips: {'; '.join(audit.skip.lines())}."]


def _seen(counts: I64) -> str:
    unseen, once, more = (int(part.sum()) for part in (counts[:1], counts[1:2], counts[2:]))
    tokens = int(counts.sum())
    times = f", at most {int(np.flatnonzero(counts)[-1]):,} times" if more else ""
    parts = [(unseen, "never seen"), (once, "seen once"), (more, f"seen twice or more{times}")]
    parts = [(part, words) for part, words in parts if part]
    if len(parts) == 1:
        return f"all {tokens:,} tokens of the corpus are {parts[0][1]}."
    shown = (f"{percent(part / max(1, tokens))} ({part:,}) {words}" for part, words in parts)
    return f"of the corpus's {tokens:,} tokens, {'; '.join(shown)}."


def _repeats(sources: list[SourceCounts]) -> Iterator[str]:
    repeated = [s for s in sources if s.first_repeat is not None]
    if len(sources) == 1:
        for source in repeated:
            yield f"A token is seen for the second time from step {source.first_repeat:,} on."
        return
    repeated.sort(key=lambda source: -source.epochs)
    for source in repeated[:_MOST_NAMED]:
        yield (
            f"{source.name} repeats from step {source.first_repeat:,} on; it is served "
            f"{source.epochs:.2f} times over, and "
            + (
                f"{percent(source.unseen)} of it is never seen."
                if source.unseen
                else "all is seen."
            )
        )
    rest = len(repeated) - _MOST_NAMED
    if rest > 0:
        yield f"{rest:,} more sources repeat; the table of sources lists the steps."
    if repeated and len(repeated) < len(sources):
        yield f"{len(sources) - len(repeated):,} of {len(sources):,} sources never repeat."


def suggestions(audit: Audit) -> list[str]:
    """Return sentences on what to change about a run, as at the top of the audit's page.

    A source counts as unseen in part from 1 % of its tokens on.

    Args:
        audit: result of `megaindex.audit.audit`.
    """
    found = list(_changes(audit, source_counts(audit)))
    if found:
        return found
    return [
        "No change is suggested: less than 1 % of each source is never seen, and the exposure does "
        "not jump."
    ]


def _changes(audit: Audit, sources: list[SourceCounts]) -> Iterator[str]:
    stream = audit.stream
    if any(source.cut_tokens for source in stream.sources):
        yield (
            "To see the tokens that long_documents leaves out, set `long_documents: split` in "
            "these sources."
        )
    policy = stream.settings.get("separate_final_epoch")
    if audit.jumps and policy in ("auto", "always"):
        whole = ", or end the run with a whole epoch" * (policy == "auto")
        yield (
            "To avoid the jump, shuffle the last epoch with the others (`--separate-final-epoch "
            f"never`; this page then shows the share never seen){whole}."
        )
    elif audit.jumps:
        yield (
            "The jumps are boundaries of epochs, or of stages. Compare losses of the same epoch "
            "only."
        )
    sources.sort(key=lambda source: -source.epochs)
    unseen = [source for source in sources if source.unseen >= _NOTABLE]
    mixed = [source for source in unseen if source.more >= _NOTABLE]
    if mixed:
        flag = "--epochs N" if len(sources) == 1 else "--epochs N,N,…"
        order = ", or order epoch, which finishes each epoch before the next"
        yield (
            f"{_names(mixed)}: tokens repeat before all are seen, as where epochs are shuffled "
            "together and the run ends within them. Choose a whole number of epochs"
            + ("." if not _is_frameworks(stream.order) else f" (`megaindex plan {flag}`){order}.")
        )
    short = [source for source in unseen if source.more < _NOTABLE]
    if len(sources) == 1 and short:
        steps = -(-stream.num_steps * short[0].tokens // short[0].served)
        yield (
            f"The run ends before one epoch: the whole corpus takes about {steps:,} steps, not "
            f"{stream.num_steps:,}."
        )
    least = min((source.epochs for source in unseen), default=np.inf)
    over = [source for source in sources if source.epochs >= max(1, 2 * least)]
    if over:
        up_to = "up to " * (len(over) > 1)
        equal = "; ".join(
            f"{s.name} {percent(s.tokens / audit.tokens)} (now {percent(s.of_served)})"
            for s in dict.fromkeys([*over[:_MOST_NAMED], *unseen[:_MOST_NAMED]])
        )
        yield (
            f"{_names(over)}: served {up_to}{over[0].epochs:.2f} times over, while parts of "
            f"{_names(unseen)} are never seen. Sources that are seen equally often have these "
            f"shares of the tokens served: {equal}."
        )
    elif short and len(sources) > 1:
        yield (
            f"{_names(short)}: the run ends before one epoch of them; a longer run, or a larger "
            "share of it, reads more."
        )


def _names(sources: list[SourceCounts]) -> str:
    rest = len(sources) - _MOST_NAMED
    more = [f"{rest:,} more"] if rest > 0 else []
    return ", ".join([*(source.name for source in sources[:_MOST_NAMED]), *more])


def jump_text(jump: Jump) -> str:
    """Return a sentence on a jump and its effect on the loss."""
    return (
        f"From step {jump.step:,} on, tokens have been seen {jump.after:.2f} times before, just "
        f"before it {jump.before:.2f} times: the training loss tends to fall there, because the "
        "model has seen these tokens before, not because it generalises better."
    )


def cut_texts(audit: Audit) -> list[str]:
    """Return a sentence on each source with tokens that no sample holds."""
    return [
        f"{source.name}: {source.cut_tokens:,} tokens "
        f"({percent(source.cut_tokens / int(counts.sum()))}) are in no sample of an epoch, because "
        f"of {source.cut_by}, and stay unseen."
        for source, counts in zip(audit.stream.sources, audit.exposure.total.tokens, strict=True)
        if source.cut_tokens
    ]


def distance_text(audit: Audit) -> str:
    """Return sentences on the steps between repeats."""
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


def _is_frameworks(order: str) -> bool:
    row = FRAMEWORK_RULES.get(order)
    return row is not None and row.is_framework
