"""The plan and its parts; their fields are the keys of ``--json`` and keep their names.

The effect of the skips of a run is one of the parts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any

from megaindex._types import I64
from megaindex.index.skips import Skips, masked_tokens, skips_of
from megaindex.index.spans import Index
from megaindex.index.stretches import StretchedIndex
from megaindex.plan.subsets import SourceSubset
from megaindex.recipe.layout import StageEnd
from megaindex.run.target import Evaluations, Phase
from megaindex.validation import count_of

MANY_SOURCES = 24
"""Most sources that are all shown."""
SHOWN_SOURCES = 10
"""Sources shown of more."""
_ALWAYS_LISTED = 4  # times seen whose shares --json lists where they are 0
_LEAST_SHARE = 1e-15  # of a token in the largest corpora
_SHOWN_MASKED = 10


@dataclass(frozen=True, kw_only=True)
class MaskEffect:
    """Tokens of one source whose loss is masked, or that are removed."""

    source: str
    tokens: int
    """Labels of the samples served that are tokens of masked documents."""
    removed: int = 0
    """Inputs and labels of them that are tokens of removed documents."""


@dataclass(frozen=True, kw_only=True)
class SkipEffect:
    """Effect of the skips of a run; steps count from 0.

    Attributes:
        steps_dropped: steps that are not made.
        samples_dropped: their samples.
        steps_moved: steps whose samples are served behind the end.
        samples_moved: their samples.
        samples_left_over: moved samples that do not fill a step and are not served.
        steps_made: steps that the run makes, those of moved samples included.
        samples_to_read: samples of these steps that are not consumed yet.
        samples_padded: rows of the last step that are padding.
        first_masked_step: first step with masked documents; None without any.
        first_removed_step: first step with removed documents; None without any.
        masked_documents: documents named in the skips, whole sources not counted.
        masked: tokens without loss, and removed, for each source; None where they were not counted.
    """

    steps_dropped: int
    samples_dropped: int
    steps_moved: int
    samples_moved: int
    samples_left_over: int
    steps_made: int
    samples_to_read: int
    samples_padded: int
    first_masked_step: int | None
    first_removed_step: int | None
    masked_documents: int
    masked: tuple[MaskEffect, ...] | None

    @property
    def tokens_masked(self) -> int | None:
        """Tokens without loss of all sources; None where they were not counted."""
        return None if self.masked is None else sum(row.tokens for row in self.masked)

    def counted(self, index: Index, names: Sequence[str]) -> SkipEffect:
        """Return the effect with the tokens without loss in an index with skips."""
        skips = skips_of(index)
        if not self.has_masks or skips is None:
            return self
        assert isinstance(index, StretchedIndex), "it has skips"
        end = skips.run_end - self.samples_left_over
        counts = masked_tokens(index, len(names), end)
        masked = [
            MaskEffect(source=name, tokens=masked, removed=removed)
            for name, (masked, removed) in zip(names, counts.T.tolist(), strict=True)
            if masked or removed
        ]
        return replace(self, masked=tuple(masked))

    @property
    def has_masks(self) -> bool:
        """True with documents that are masked or removed."""
        return self.first_masked_step is not None or self.first_removed_step is not None

    @property
    def warnings(self) -> tuple[str, ...]:
        """Sentences on what the plan does not count."""
        text = "coverage is not counted where documents are removed; megaindex audit counts it"
        return () if self.first_removed_step is None else (text,)

    @property
    def changes_counts(self) -> bool:
        """True if samples of the order are not served."""
        return bool(self.steps_dropped or self.samples_left_over)

    def lines(self) -> Iterator[str]:
        """Yield the sentences of the printed plan."""
        for steps, samples, what in (
            (self.steps_dropped, self.samples_dropped, "dropped"),
            (self.steps_moved, self.samples_moved, "moved behind the end"),
        ):
            if steps:
                yield f"{count_of(steps, 'step')} {what}, {count_of(samples, 'sample')}"
        if self.samples_left_over:
            left = count_of(self.samples_left_over, "moved sample")
            yield f"{left} of an incomplete last step not served; tail pad serves them"
        if self.steps_dropped or self.steps_moved:
            yield f"{count_of(self.steps_made, 'step')} made in all"
        yield from self._mask_lines(self.first_masked_step, "loss of ", "masked", "tokens")
        yield from self._mask_lines(self.first_removed_step, "", "removed", "removed")

    def _mask_lines(self, step: int | None, of: str, what: str, field: str) -> Iterator[str]:
        if step is None:
            return
        start = f"from step {step:,} on"
        if self.masked is None:
            subject = "loss" if of else "documents"
            yield f"{subject} {what} {start}; the tokens were not counted, which needs the files"
            return
        counts = {row.source: getattr(row, field) for row in self.masked if getattr(row, field)}
        most = sorted(counts, key=lambda name: -counts[name])[:_SHOWN_MASKED]
        rows = ", ".join(f"{name} {counts[name]:,}" for name in most)
        if others := len(counts) - len(most):
            rows += f" and {others:,} more"
        total = count_of(sum(counts.values()), "token")
        yield f"{of}{total} {what} {start}" + (f": {rows}" if rows else "")


def effect_of(skips: Skips, bounds: I64, *, masked_rows: int = 0, consumed: int = 0) -> SkipEffect:
    """Return the effect of skips, whose masked tokens are not counted yet.

    ``bounds`` and ``masked_rows`` are those of `SkippedSteps`, ``consumed`` is the position at
    which a resumed run begins.
    """
    numbers = {False: 0, True: 0}
    for setting in skips.settings:
        numbers[setting.move] += sum(last + 1 - first for first, last in setting.ranges)
    firsts: dict[bool, list[int]] = {False: [], True: []}
    for each in skips.settings:
        if each.from_step is not None:
            firsts[each.remove].append(each.from_step)
    return SkipEffect(
        steps_dropped=numbers[False],
        samples_dropped=skips.num_skipped - skips.num_moved,
        steps_moved=numbers[True],
        samples_moved=skips.num_moved,
        samples_left_over=max(0, skips.run_end - int(bounds[-1])),
        steps_made=bounds.size - 1 - sum(numbers.values()),
        samples_to_read=skips.served_before(int(bounds[-1])) - skips.served_before(consumed),
        samples_padded=masked_rows,
        first_masked_step=min(firsts[False], default=None),
        first_removed_step=min(firsts[True], default=None),
        masked_documents=sum(m.documents.size for m in skips.masks if m.documents is not None),
        masked=None if firsts[False] or firsts[True] else (),
    )


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Shares of a source's tokens by times served.

    Of each sample consumed the first S tokens count: the last is only the label of the one before.

    Attributes:
        method: closed-form (exact), built (exact, counted in the built index), expected (mean
            over seeds) or none.
        tokens: fractions of the tokens served 0, 1, 2, … times; they add up to 1.
        documents: fractions of the non-empty documents by the times that their most served
            token is served; empty unless the index was built.
        tokens_served: tokens served, repetitions included; None unless the index was built.
    """

    method: str
    tokens: tuple[float, ...] = ()
    documents: tuple[float, ...] = ()
    tokens_served: int | None = None

    def to_json(self) -> dict[str, float]:
        """Return `tokens` as ``{"seen_0": …, …}``, from seen_4 on without those of none."""
        return _by_times(self.tokens)


def _by_times(shares: Sequence[float]) -> dict[str, float]:
    least = {True: 0.0, False: _LEAST_SHARE}
    return {
        f"seen_{times}": share
        for times, share in enumerate(shares)
        if share >= least[times < _ALWAYS_LISTED]
    }


@dataclass(frozen=True, kw_only=True)
class PackingFacts:
    """Samples of one epoch of a source in order packed."""

    fill: float
    """Share of the positions of the samples that tokens fill."""
    padding: int
    """Positions that are padding."""
    cut_tokens: int
    """Tokens in no sample, because their documents are truncated or skipped."""
    long_documents: int
    """Documents longer than a sample, which are split, truncated or skipped."""
    max_documents: int
    """Most pieces of documents in a sample that the order allows."""
    pieces_per_sample: float
    """Mean number of pieces of documents in a sample."""
    most_pieces: int
    """Largest number of pieces in a sample."""
    likeness: float
    """Mean quotient of the shortest and the longest piece of a sample, where it has several."""
    rare_tokens: float
    """Share of the tokens in pieces that share their length with at most one other: epochs change
    least of what they share a sample with."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One source in one split. Defaults are those of a source without a sample in the split.

    Numbers are of samples unless their name says otherwise; None where draws were not counted.

    Attributes:
        split: train, valid or test.
        phase: number of Megatron's phase, or of the stretch of a recipe in which the mixture does
            not change, from 1; None for a run of one.
        source: position in the blend, from 1.
        path: path prefix; empty where only tokens were given.
        weight: weight in the blend; None for a blend without weights.
        tokens_per_epoch: tokens of one epoch of the source in the split.
        samples_per_epoch: samples of one epoch.
        requested: samples that the framework requests of the source, with its variance buffer.
        drawn: samples of it among those consumed.
        drawn_bounds: least and most of `drawn`.
        drawn_by_blend: samples of it in the whole blend that the framework fills, which may be
            longer.
        built: samples of the epochs built.
        epochs: epochs built.
        distinct: different samples among those drawn.
        repeated: samples drawn beyond the first epoch, or a second time; None if not counted.
        coverage: shares of the tokens by times served.
        error: error with which the framework ends on this source; empty if it does not.
        packing: samples of an epoch in order packed; not a key of ``--json`` in the other orders.
        stage: stage of a recipe; empty, and not a key of ``--json``, in other runs.
        label: name of the source in a recipe, likewise.
    """

    split: str
    phase: int | None = None
    source: int
    path: str
    weight: float | None
    tokens_per_epoch: int
    samples_per_epoch: int | None = 0
    requested: int | None = 0
    drawn: int | None = 0
    drawn_bounds: tuple[int, int] = (0, 0)
    drawn_by_blend: int | None = 0
    built: int | None = 0
    epochs: int | None = 0
    distinct: int | None = 0
    repeated: int | None = 0
    coverage: Coverage = Coverage(method="none")
    error: str = ""
    packing: PackingFacts | None = None
    stage: str = ""
    label: str = ""

    @property
    def name(self) -> str:
        """Name of the source in a recipe, its path, or ``source`` and its number."""
        return self.label or self.path or f"source {self.source}"

    def to_json(self) -> dict[str, Any]:
        """Return the fields, the coverage under three keys."""
        return {
            **json_object(self, "packing", "stage", "label"),
            "coverage_documents": _by_times(self.coverage.documents),
            "coverage_method": self.coverage.method,
        }


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """Epochs and samples that another number of iterations would build."""

    train_iters: int
    num_epochs_built: int
    samples_built: int
    begins: str
    """First source with more epochs than in the plan; empty without such."""


@dataclass(frozen=True, kw_only=True)
class Tail:
    """Effect of a tail policy on the samples of the target."""

    policy: str
    train_iters: int
    samples_consumed: int
    samples_dropped: int
    samples_masked: int
    samples_repeated: int
    ranks_masked: int = 0
    """Data-parallel ranks whose rows of the last batch are all masked."""


@dataclass(frozen=True, kw_only=True)
class BufferEffect:
    """Effect of another variance buffer on the same run."""

    variance_buffer: float
    num_epochs_built: int
    samples_built: int
    max_train_iters_without_repeat: int
    short: tuple[str, ...] | None
    """Sources of which more is drawn than built; None where draws were not counted."""


@dataclass(frozen=True, kw_only=True)
class LoaderRestart:
    """Length of a loader of GPT-NeoX, which starts over after the samples its datasets report."""

    split: str
    samples_counted: int
    """Samples in whole micro batches of all ranks; with 0 the run ends with an error."""
    samples_read: int


@dataclass(frozen=True, kw_only=True)
class DryLoader:
    """A split of which the run reads more samples than Megatron's loader has."""

    split: str
    samples_there: int
    """Samples in whole micro batches of all ranks."""
    samples_read: int
    train_iters: int | None
    """Iterations, or None for an evaluation, after which the run stops."""


@dataclass(frozen=True, kw_only=True)
class RankShare:
    """Share of one data-parallel rank."""

    data_parallel_size: int
    samples_per_rank: int
    micro_batches_per_rank: int | None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Plan of a run of any kind. Figures outside `datasets` are those of the train split.

    All figures are integers computed exactly. Samples are of `sequence_length` tokens; tokens count
    once a sample, without the extra one of the label. Figures that a kind of run does not have, or
    that ask about other runs where the settings are unknown, are None.

    Attributes:
        order: name of the order of the samples; None if the sources differ in it.
        sequence_length: tokens of a sample, without the extra one of the label; of the longest, if
            the stages of a recipe differ.
        variance_buffer: factor of the samples requested of each source of a blend, or ``"exact"``.
        tail: policy for the samples of the target that fill no batch: drop, pad or wrap.
        train_iters: iterations of the run; of a resumed one, those still to come.
        global_batch_size: samples of the last iteration's batch; None if sources have batches of
            their own.
        batch_schedule: first sample and batch size of each stage, as in `BatchSchedule`; where
            sources have batches of their own, a mapping of sources to batch sizes.
        tokens_per_epoch: tokens of one epoch.
        samples_per_epoch: samples of one epoch.
        samples_consumed: samples consumed after the last iteration, without the masked ones of a
            padded last batch.
        tokens_consumed: tokens of `samples_consumed`, without the padding of order packed.
        samples_built: samples of the epochs built; None where draws were not counted.
        samples_left_over: samples of the epochs aimed at, or of the whole epochs that the run
            reaches into, that it does not consume.
        num_epochs_built: most epochs built of a source; None where draws were not counted.
        max_train_iters_without_repeat: most iterations that serve no sample twice; 0 where none
            does, or GPT-NeoX ends with an error there.
        max_train_iters_same_epochs: most iterations for which no further epoch is built.
        datasets: one row for each source of each split, and of each phase or stage.
        caution: warning that opens the printed plan where the run differs from the target.
        warnings: warnings with their remedies, most harmful first.
        check_failures: reasons for which ``--check`` fails; empty if it passes.
        skip: effect of skipped steps and documents; None, and not a key of ``--json``, without.
        subsets: sources of training of which a subset is read; not a key of ``--json`` without.
    """

    order: str | None
    sequence_length: int
    variance_buffer: float | str | None
    tail: str | None
    train_iters: int
    global_batch_size: int | None
    batch_schedule: tuple[tuple[int, int | dict[str, int]], ...]
    tokens_per_epoch: int | None
    samples_per_epoch: int | None
    samples_consumed: int
    tokens_consumed: int | None
    samples_built: int | None
    samples_left_over: int | None
    num_epochs_built: int | None
    max_train_iters_without_repeat: int | None
    max_train_iters_same_epochs: int | None
    datasets: tuple[Row, ...]
    caution: str = ""
    warnings: tuple[str, ...] = ()
    check_failures: tuple[str, ...] = ()
    skip: SkipEffect | None = None
    subsets: tuple[SourceSubset, ...] = ()

    def rows(self, split: str) -> list[Row]:
        """Return the rows of one split (train, valid or test)."""
        return [row for row in self.datasets if row.split == split]

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints: the fields, of JSON types alone."""
        return json_object(self, "skip", "subsets")

    def __repr__(self) -> str:
        """Return the tables that the command prints, of at most 100 columns."""
        return str(_module("console").text_of(self.view()))

    def _repr_html_(self) -> str:
        return str(_module("console").html_of(self.view()))

    def view(self) -> Any:
        """Return the tables and notes of the printed plan."""
        return _module("plan.render").run_view(self)


@dataclass(frozen=True, kw_only=True, repr=False)
class SettingsPlan(Plan):
    """Plan of settings, by the rules of `framework`, the framework and version of `order`.

    Its other fields are those of `Plan`.

    Attributes:
        framework: framework, with its version, whose rules hold.
        target: target of the run in words, such as ``1 epoch``.
        consumed_samples: samples consumed before the first iteration of the plan, which count in
            `samples_consumed`.
        tokens_left_over: tokens of the epochs aimed at that the run does not consume.
        max_train_iters_exact: False where ``max_train_iters_without_repeat`` and
            ``max_train_iters_same_epochs`` are lower bounds, because draws were not counted.
        neighbours: effects of `max_train_iters_same_epochs` and of one iteration more; empty if
            not exact.
        tails: effect of each tail policy.
        evaluation: samples that evaluations read; None for a run without them.
        ranks: share of each data-parallel rank; None if the number of ranks is unknown.
        phases: phases between Megatron's phase transitions; empty for a run without them.
        buffer_effect: effect of a variance buffer of 1.005, where the plan has another.
        loaders: loaders of GPT-NeoX, which start over; empty for other frameworks.
        framework_version: release of Megatron-LM whose rules hold; None for other frameworks.
        ignored_settings: settings of the framework's data that do not change the plan.
        dry_loaders: loaders of Megatron-LM that run out of samples.
        max_train_iters_with_exact_buffer: `max_train_iters_without_repeat` under the adapter's
            ``variance_buffer="exact"``; None where it does not exceed that, or is not
            counted.
    """

    order: str
    variance_buffer: float | str
    tail: str
    global_batch_size: int
    batch_schedule: tuple[tuple[int, int], ...]
    tokens_per_epoch: int
    samples_per_epoch: int
    samples_left_over: int
    tokens_consumed: int
    max_train_iters_without_repeat: int
    max_train_iters_same_epochs: int
    framework: str
    target: str
    consumed_samples: int
    tokens_left_over: int
    max_train_iters_exact: bool
    neighbours: tuple[Neighbour, ...]
    tails: tuple[Tail, ...]
    evaluation: Evaluations | None
    ranks: RankShare | None
    phases: tuple[Phase, ...]
    buffer_effect: BufferEffect | None
    loaders: tuple[LoaderRestart, ...] = ()
    framework_version: str | None = None
    ignored_settings: tuple[str, ...] = ()
    dry_loaders: tuple[DryLoader, ...] = ()
    max_train_iters_with_exact_buffer: int | None = None

    def view(self) -> Any:
        """Return the tables and notes of the printed plan."""
        return _module("plan.render").plan_view(self)


@dataclass(frozen=True, kw_only=True)
class StageDraw:
    """Samples that one stage draws from one source."""

    stage: str
    source: str
    first_step: int
    """Step that serves the stage's first sample; steps count from 0."""
    end_step: int
    """One past the step that serves its last sample."""
    samples: int
    share: float
    """Share of the stage's samples."""
    tokens: int
    """Tokens of these samples, without the padding of order packed."""
    epochs_begin: float
    """Epochs of the source read before the stage."""
    epochs_end: float
    first_repeat: int | None
    """First step that serves a sample for a second time; None without repeats."""
    deferred: int = 0
    """Tokens left of the block in which a stage of another sequence length stopped reading the
    source, which its epoch does not serve; not a key of ``--json`` in other orders than blocks."""
    batch_size: int | None = None
    """Samples of a step that draws from the source; None, and not a key of ``--json``, where the
    batch is that of the stage."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return json_object(self, "deferred", "batch_size")


@dataclass(frozen=True, kw_only=True)
class StepRange:
    """Consecutive steps of one stage, batch size and sequence length.

    Before step k of them, ``first_sample + (k - first_step) * batch_size`` samples are consumed,
    and ``sequence_length`` tokens with each of these steps' samples. Where the streams of the stage
    have batch sizes of their own, the samples are ``first_sample`` and the first ``k - first_step``
    of ``batch_sizes``.
    """

    stage: str
    first_step: int
    """Steps count from 0, skipped ones included."""
    end_step: int
    """One past the last step."""
    batch_size: int | None
    """None where streams have batch sizes of their own."""
    sequence_length: int
    first_sample: int
    """Samples consumed before ``first_step``."""
    first_token: int
    """Tokens consumed here before ``first_step``: samples × sequence_length, padding included."""
    batch_sizes: I64 | None = field(default=None, repr=False, compare=False)
    """int64[steps]: samples of each step; None, and not a key of ``--json``, where batch_size has
    them."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        sizes = self.batch_sizes
        listed = None if sizes is None else sizes.tolist()
        return json_object(replace(self, batch_sizes=listed), "batch_sizes")


@dataclass(frozen=True, kw_only=True)
class BlockFacts:
    """Tokens of the first epoch of a source in order blocks."""

    block_tokens: int
    """Tokens that a block holds at least."""
    blocks: int
    served: int
    """Tokens that the run serves as input."""
    dropped: int
    """Tokens at the ends of the blocks read that fill no sample, and labels of the last ones."""
    deferred: int
    """Tokens left of blocks that a stage of another sequence length ended."""
    unread: int
    """Tokens of blocks that were not begun, and the rest of the last one begun, without those that
    another system read."""


@dataclass(frozen=True, kw_only=True)
class SourceTotal:
    """One source over the whole run."""

    source: str
    kind: str
    path: str
    tokens_per_epoch: int
    samples_per_epoch: int
    drawn: int
    epochs: float
    unseen: int
    """Samples of its epoch that the run never serves; like ``samples_per_epoch`` those of the last
    sequence length at which it is read."""
    cut_tokens: int
    """Tokens of its epoch in no sample: cut off, or left out with long documents."""
    packing: PackingFacts | None = None
    """Samples of an epoch in order packed; not a key of ``--json`` in the other orders."""
    blocks: BlockFacts | None = None
    """Tokens of an epoch in order blocks; not a key of ``--json`` in the other orders."""

    def to_json(self) -> dict[str, Any]:
        """Return the fields."""
        return json_object(self, "packing", "blocks")


@dataclass(frozen=True, kw_only=True)
class SourcePast:
    """The part of a source that another system read, and what is assumed of it."""

    source: str
    given: str
    """What the recipe states, as ``tokens 300,000``."""
    samples: int
    """Samples of the source that are taken as read."""
    epochs: float
    assumed: str
    """What the statement leaves open; empty if it names the documents."""
    drawn: int
    """Samples that the run draws of those left in the epoch in progress."""
    may_repeat: int
    """Most of them that were read before, if the assumption is wrong."""
    expected_repeats: int
    """Those of them that were read before if that system read at random, a mean."""


@dataclass(frozen=True, kw_only=True)
class PlannedPast:
    """Steps of another system from which the run goes on."""

    steps: int
    first_sample: int
    """Position of the first sample here."""
    sources: tuple[SourcePast, ...]


@dataclass(frozen=True, kw_only=True)
class Padding:
    """Rows without loss in the last batch of the run, or of a round of evaluation."""

    rows: int
    micro_batches: int | None
    """Micro batches of padding alone; None where the recipe names no ranks."""
    ranks: int | None
    """Data-parallel ranks that read padding alone."""


@dataclass(frozen=True, kw_only=True)
class MixEffect:
    """Changes of the mix in mid-run."""

    changes: int
    first_step: int
    """First step with changed weights."""
    last_step: int
    """First step with the weights of the last change."""


@dataclass(frozen=True, kw_only=True)
class RemainingRun:
    """What is left of a run in progress, without steps dropped."""

    first_step: int
    """The first step to be made that is not begun."""
    steps: int
    samples: int
    """Samples that no rank was returned."""
    sources: dict[str, int]
    """Samples left of each source."""


@dataclass(frozen=True, kw_only=True)
class EarliestRepeat:
    """The earliest step at which a source can repeat under any mix within its bounds.

    Attributes:
        source: its name.
        least: least share that changed weights may give it.
        most: greatest share, also by the least shares of the others.
        first_step: first step, from 0, that can serve one of its samples again; None if none in
            the run can.
        planned_step: first step that does so by the plan; None if none does.
    """

    source: str
    least: float
    most: float
    first_step: int | None
    planned_step: int | None


@dataclass(frozen=True, kw_only=True, repr=False)
class RecipePlan(Plan):
    """Plan of a recipe. Steps count from 0: step k is iteration k + 1 in trainers' logs.

    Its other fields are those of `Plan`. `samples_consumed` are those of the run, without a past in
    another system. Samples of finetuning sources count as `sequence_length` tokens.

    Attributes:
        samples_masked: rows of the last batch that are padding without loss.
        samples_per_rank: rows that each data-parallel rank reads; None where the recipe names
            no ranks.
        exhaustion: policy for a source that reaches its limits, as in `Recipe`.
        stopped_by: source whose exhaustion ends the run early; empty if the run ends with its
            last stage.
        evaluation_rounds: rounds of evaluation; 0 for a run without them.
        evaluation_batches: global batches of a round.
        evaluation_samples: samples that a round scores, each once.
        evaluation_masked: rows of a round's last batch that are padding without loss.
        evaluation_available: samples of the validation data.
        padding: padding in the last batch of the run.
        evaluation_padding: padding in the last batch of a round of evaluation.
        stages: stages that the run begins; the last one ends early if ``stopped_by`` is given.
        draws: one for each stage and source, and for each piece of a stage between exhausted
            sources.
        sources: each source over the whole run.
        steps: ranges of steps, with the samples and tokens consumed at each step.
        past: steps of another system; None, and not a key of ``--json``, without.
        mix_changes: changes of the mix, likewise.
        mix_bounds: earliest repeat of each source under any mix, likewise.
        remaining: what is left of a run in progress, likewise.
    """

    samples_masked: int
    samples_per_rank: int | None
    exhaustion: str
    stopped_by: str
    evaluation_rounds: int
    evaluation_batches: int
    evaluation_samples: int
    evaluation_masked: int
    evaluation_available: int
    padding: Padding
    evaluation_padding: Padding
    stages: tuple[StageEnd, ...]
    draws: tuple[StageDraw, ...]
    sources: tuple[SourceTotal, ...]
    steps: tuple[StepRange, ...] = ()
    past: PlannedPast | None = None
    mix_changes: MixEffect | None = None
    mix_bounds: tuple[EarliestRepeat, ...] = ()
    remaining: RemainingRun | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the object that ``--json`` prints: the fields, of JSON types alone."""
        return json_object(
            self, "skip", "subsets", "past", "mix_changes", "mix_bounds", "remaining"
        )

    def view(self) -> Any:
        """Return the tables and notes of the printed plan."""
        return _module("plan.render").recipe_view(self)


def _module(name: str) -> Any:
    """Return a module that displays a plan: they import rich, and the tables this module."""
    return import_module(f"megaindex.{name}")


def epochs_text(count: int | None) -> str:
    """Return ``one epoch``, ``3 epochs`` or, for None, ``? epochs``."""
    if count is None:
        return "? epochs"
    return "one epoch" if count == 1 else f"{count} epochs"


def json_object(record: object, *optional: str) -> dict[str, Any]:
    """Return the fields of a record, of JSON types alone, the optional ones where they are set."""
    fields = {key: value for key, value in vars(record).items() if key not in optional or value}
    return {key: json_value(value) for key, value in fields.items()}


def json_value(value: Any) -> Any:
    """Return dataclasses and containers as JSON objects and lists; the rest as it is."""
    if hasattr(value, "to_json"):
        return json_value(value.to_json())
    if hasattr(value, "__dataclass_fields__"):
        value = vars(value)
    if isinstance(value, dict):
        return {key: json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    return value


def sizes_text(sizes: Collection[int]) -> str:
    """Return batch sizes, such as those of the streams of a stage."""
    each = sorted({*sizes})
    return " or ".join(map(str, each)) if len(each) <= 3 else f"{each[0]} … {each[-1]}"


def listed(sources: Sequence[str]) -> str:
    shown, rest = sources[:SHOWN_SOURCES], sources[SHOWN_SOURCES:]
    return ", ".join(shown) + f" and {len(rest):,} more" * bool(rest)
