"""The exposure of a locked run by source, for publication."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from megaindex.audit.report import audit, source_counts
from megaindex.lock.lock_file import Lock, read_lock
from megaindex.lock.opening import run_of_lock
from megaindex.lock.pinned_files import Folder
from megaindex.markup import markdown_table
from megaindex.plan.model import MANY_SOURCES, SHOWN_SOURCES, json_object
from megaindex.plan.render import repeats_text, unseen_text, worst_first
from megaindex.run.run import lengths_text

if TYPE_CHECKING:
    from megaindex.index.draws import Progress


@dataclass(frozen=True, kw_only=True)
class SourceReport:
    """Exposure of one source after all steps, in tokens.

    Attributes:
        source: name of the source.
        fingerprint: `corpus_fingerprint` of its pair, 32 hex digits.
        documents: documents that an epoch has.
        tokens: tokens of an epoch.
        served: tokens that were input of a sample, repetitions included.
        share: served, of the tokens served of all sources.
        epochs: served / tokens.
        unseen: tokens that no sample serves.
        cut: tokens in no sample of an epoch, because long documents are truncated or skipped; part
            of ``unseen``.
        served_again: tokens served after they were served once: served - tokens + unseen.
        masked: labels of the samples served that are tokens of skipped documents, without loss.
        same_as: other sources with this fingerprint, such as copies under another name.
    """

    source: str
    fingerprint: str
    documents: int
    tokens: int
    served: int
    share: float
    epochs: float
    unseen: int
    cut: int
    served_again: int
    masked: int
    same_as: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """Exposure of a run by source; ``to_markdown`` and ``to_json`` are for publication.

    Attributes:
        identity: identity of the run, 32 hex digits, which others can cite.
        content: identity of the tokens, 32 hex digits; None if they were not hashed.
        lock: digest of the lock, 64 hex digits; None if it was not written.
        receipt: receipt of all training samples, 32 hex digits.
        order: name of the order.
        settings: further settings of the run by name.
        sequence_length: tokens of a sample, the most if stages differ.
        sequence_lengths: those of the stages one after another, each once.
        samples: samples served.
        steps: steps made, without those skipped.
        steps_skipped: steps that are not made, or whose samples are served behind the end.
        padded_rows: rows of the last step that are padding.
        sources: exposure of each source.
    """

    identity: str
    content: str | None
    lock: str | None
    receipt: str
    order: str
    settings: dict[str, Any]
    sequence_length: int
    sequence_lengths: tuple[int, ...]
    samples: int
    steps: int
    steps_skipped: int
    padded_rows: int
    sources: tuple[SourceReport, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the report as JSON values."""
        return json_object(self)

    def to_markdown(self) -> str:
        """Return the report as a page of Markdown."""
        total = sum(source.served for source in self.sources)
        settings = dict(self.settings)
        weighted = "weights" in settings  # a column, which may be of thousands of sources
        weights = str(settings.pop("weights", "")).split(", ")
        facts = [
            ("order", self.order),
            *((name.replace("_", " "), value) for name, value in settings.items()),
            ("tokens of a sample", lengths_text(self.sequence_lengths)),
            ("samples served", f"{self.samples:,}"),
            ("steps made", f"{self.steps:,}"),
            ("steps skipped", f"{self.steps_skipped:,}"),
            ("rows of padding", f"{self.padded_rows:,}"),
            ("tokens served", f"{total:,}"),
            ("receipt of all samples", f"`{self.receipt}`"),
            ("identity of the run", f"`{self.identity}`"),
            ("identity of the tokens", f"`{self.content}`" if self.content else "not hashed"),
            *([("digest of the lock", f"`{self.lock}`")] if self.lock else []),
        ]
        exposure: list[tuple[str, ...]] = [
            ("source", *["weight"] * weighted, "documents", "tokens", "served", "share", "epochs")
        ]
        rest: list[tuple[str, ...]] = [
            ("source", "unseen", "cut", "served again", "masked", "fingerprint")
        ]
        for number in self._shown():
            each = self.sources[number]
            name = (each.source, *weights[number : number + 1] * weighted)
            share, epochs = f"{100 * each.share:.2f} %", f"{each.epochs:.3f}"
            counts = (f"{count:,}" for count in (each.documents, each.tokens, each.served))
            exposure.append((*name, *counts, share, epochs))
            counts = (f"{n:,}" for n in (each.unseen, each.cut, each.served_again, each.masked))
            rest.append((each.source, *counts, f"`{each.fingerprint}`"))
        parts = [
            "# Training data",
            markdown_table([("setting", "value"), *((name, str(value)) for name, value in facts)]),
            "## Exposure by source",
            markdown_table(exposure),
            *self._of_all(),
            "Tokens never served, cut from long documents, served after their first time, and "
            "served without loss because their documents are skipped:",
            markdown_table(rest),
            *self._duplicates(),
        ]
        return "\n\n".join(parts) + "\n"

    def _shown(self) -> Sequence[int]:
        """Return the numbers of the sources of the page; of many those served most often."""
        if len(self.sources) <= MANY_SOURCES:
            return range(len(self.sources))
        epochs = [each.epochs for each in self.sources]
        repeat = any(each.served_again for each in self.sources)
        return worst_first(range(len(epochs)), epochs, repeat=repeat)[:SHOWN_SOURCES]

    def _of_all(self) -> list[str]:
        """Return a sentence on all sources where some are left out."""
        count = len(self.sources)
        if count <= MANY_SOURCES:
            return []
        most = max(self.sources, key=lambda each: each.epochs)
        repeat = sum(each.served_again > 0 for each in self.sources)
        text = repeats_text(repeat, count, most.source, most.epochs)
        text += unseen_text({e.source: e.unseen / max(1, e.tokens) for e in self.sources})
        return [f"{SHOWN_SOURCES} of {count:,} sources, the worst first; --json lists all. {text}."]

    def _duplicates(self) -> list[str]:
        """Return a sentence for each group of sources of the same lengths."""
        groups: dict[str, list[str]] = {}
        for each in self.sources:
            groups.setdefault(each.fingerprint, []).append(each.source)
        texts = [
            f"{_names(names)} have the same fingerprint, so they hold documents of the same "
            "lengths, as copies do: tokens that one serves after another count as served for the "
            "first time."
            for names in groups.values()
            if len(names) > 1
        ]
        shown = texts if len(texts) <= MANY_SOURCES else texts[:SHOWN_SOURCES]
        left = len(texts) - len(shown)
        return [*shown, *[f"So do {left:,} more groups of sources; --json lists all."] * bool(left)]


def _names(names: Sequence[str]) -> str:
    shown, rest = names[:SHOWN_SOURCES], len(names) - SHOWN_SOURCES
    return ", ".join(shown) + f" and {rest:,} more" * (rest > 0)


def report_run(
    lock: Folder | Lock,
    *,
    search: Folder | None = None,
    cache_dir: Folder | None = None,
    progress: Progress | None = None,
) -> RunReport:
    """Return the exposure of a locked run by source, counted token by token.

    Args:
        lock, search, cache_dir: as for `megaindex.lock.open_run`.
        progress: called with (done, total) while samples are located.

    Raises:
        MissingFile, StorageError, FormatError: as `megaindex.lock.open_run`.
    """
    lock = read_lock(lock)
    run = run_of_lock(lock, search=search, cache_dir=cache_dir)
    result = audit(run, progress=progress)
    train, fingerprints = lock.content["subsets"]["train"], lock.fingerprints("train")
    skip = result.skip
    masked = {} if skip is None else {row.source: row.tokens for row in skip.masked or ()}
    skipped = 0 if skip is None else skip.steps_dropped + skip.steps_moved
    tokens, steps = result.exposure.total.tokens, np.arange(run.num_steps)
    made = (steps >= run.steps_elsewhere) & ~run.is_skipped(steps)
    names, settings = [source.name for source in run.sources], dict(run.settings)
    if "amend" in lock.content["settings"]:
        settings["weights since the last change"] = settings.pop("weights", "")
    if lock.content["settings"]["kind"] == "run":  # named by their paths, here as in the lock
        names = [lock.content["sources"]["rows"][row][0] for row in train["sources"]]
    sources = [
        SourceReport(
            source=names[number],
            fingerprint=fingerprint,
            same_as=tuple(
                names[other]
                for other, theirs in enumerate(fingerprints)
                if theirs == fingerprint and other != number
            ),
            documents=int((source.lengths > 0).sum()),
            tokens=counts.tokens,
            served=counts.served,
            share=counts.of_served,
            epochs=counts.epochs,
            unseen=int(tokens[number, 0]),
            cut=source.cut_tokens,
            served_again=counts.served - counts.tokens + int(tokens[number, 0]),
            masked=masked.get(counts.name, 0),
        )
        for number, (counts, source, fingerprint) in enumerate(
            zip(source_counts(result), run.sources, fingerprints, strict=True)
        )
    ]
    return RunReport(
        identity=lock.identity,
        content=lock.content_identity,
        lock=lock.content.get("digest"),
        receipt=train["receipts"]["total"],
        order=run.order,
        settings=settings,
        sequence_length=run.index.sequence_length,
        sequence_lengths=run.sequence_lengths,
        samples=int(np.diff(run.step_bounds)[made].sum()),
        steps=int(made.sum()),
        steps_skipped=skipped,
        padded_rows=train["masked_rows"],
        sources=tuple(sources),
    )
