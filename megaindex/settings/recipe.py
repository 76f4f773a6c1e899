"""A run of several sources and stages, with its evaluation.

A `Recipe` is in samples, steps and epochs. `megaindex.recipe.layout` computes its positions from
the sizes of the sources; `megaindex.settings.recipe_file` reads and writes it as YAML.

>>> Recipe(
...     sequence_length=2048,
...     batch=BatchSchedule.constant(256),
...     sources=(
...         RecipeSource(name="web", path="data/web"),
...         RecipeSource(name="code", path="data/code"),
...     ),
...     stages=(
...         RecipeStage(
...             name="stable",
...             streams=(Stream(source="web", proportion=Fraction(7, 10)),
...                      Stream(source="code", proportion=Fraction(3, 10))),
...             length=Target(kind="iterations", value=Fraction(10_000)),
...         ),
...     ),
... )
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal

from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import LONG_DOCUMENTS, LongDocuments
from megaindex.index.skips import Skip, given_skips, source_number
from megaindex.index.subset_rule import DEFAULT_SUBSET_SEED, Share, SubsetRule
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.past import Past, PastRead
from megaindex.settings.run_settings import TAILS, Tail, Target, TargetKind
from megaindex.validation import (
    DEFAULT_SEED,
    check_between,
    check_choice,
    check_fraction,
    check_kind,
    check_share,
    check_text,
    make_plain,
)

Kind = Literal["pretraining", "finetuning"]
_BY_ORDER: Any = ""  # replaced by `default_long_documents`


def default_long_documents(order: str) -> LongDocuments:
    """Return the treatment of long documents in an order, if none is given."""
    return "split" if order == "packed" else "truncate"


@dataclass(frozen=True, kw_only=True)
class RecipeSource:
    """A source: one .bin/.idx pair, and the rules for making samples of it.

    Attributes:
        name: label in streams and plans.
        path: path prefix of the pair; empty for planning from ``tokens`` alone.
        shuffle_name: name that the shuffle depends on besides the seed. Default: the fingerprint of
            the pair; of the k-th further source of the same fingerprint, ``FINGERPRINT/k``. Those
            with a name given are not counted.
        kind: pretraining: documents are concatenated and cut every sequence_length tokens.
            finetuning: samples are whole documents, with loss on some of their tokens.
        order: ``"epoch"``, ``"window"`` or ``"packed"``, see `EpochOrder`, `WindowOrder` and
            `PackedOrder`; ``"blocks"``: see docs/orders.md. In a recipe of several sequence
            lengths, order epoch becomes order blocks.
        labels: finetuning: prefix of a pair with the label of every token, -100 for tokens
            without loss.
        loss_mask: finetuning: prefix of a pair with 1 for every token with loss, such as those of a
            response, and 0 for the others. Without labels and loss_mask all tokens have loss.
        packed: finetuning: several whole documents a sample, where they fit; False: one a sample.
        long_documents: finetuning and order packed: documents longer than a sample are
            truncated, split or skipped. Default: truncated, and split in order packed.
        max_documents: order packed: most pieces of documents in a sample, see `PackedOrder`.
        align: order packed: documents begin at multiples of it, see `PackedOrder`.
        block_tokens: order blocks: tokens that a block holds at least. Default: that of
            `default_block_tokens`.
        max_epochs: epochs that the run may draw; None: one, where the exhaustion policy sets a
            limit.
        max_fraction: share of the samples that the run may draw, up to 1: max_epochs x max_fraction
            of them, as in OLMo-core. It limits the number of samples, and does not select them:
            1/16 with 4 epochs is a quarter of one epoch, not a sixteenth of the source four times,
            which ``subset: 1/16`` with ``max_epochs: 4`` is.
        tokens: tokens of one epoch, for planning without files.
        subset: share of the tokens, of whole documents chosen by a hash, that makes an epoch, see
            `SubsetRule`; or its threshold, with the shuffle_name that it belongs to.
        held_out: share of the tokens that training leaves out, or its threshold likewise. In an
            evaluation: the documents that it reads.
        subset_seed: part of the key of this hash; it is not the seed of the run.

    Raises:
        InvalidArgument: a setting is out of range, or excludes another.
    """

    name: str
    path: str = ""
    shuffle_name: str = ""
    kind: Kind = "pretraining"
    order: Literal["epoch", "window", "packed", "blocks"] = "epoch"
    labels: str = ""
    loss_mask: str = ""
    packed: bool = True
    long_documents: LongDocuments = _BY_ORDER
    max_documents: int | None = None
    align: int = 1
    block_tokens: int | None = None
    max_epochs: Fraction | None = None
    max_fraction: Fraction | None = None
    tokens: int | None = None
    subset: Share | None = None
    held_out: Share | None = None
    subset_seed: int = DEFAULT_SUBSET_SEED

    def __post_init__(self) -> None:
        if not self.name:
            raise InvalidArgument(f"source {self.path}: has no name; give it one")
        where = f"source {self.name}"
        for setting in ("path", "labels", "loss_mask"):
            object.__setattr__(self, setting, os.fspath(getattr(self, setting)))
        if (self.tokens is None) == (not self.path):
            raise InvalidArgument(f"{where}: give either a path or, to plan without files, tokens")
        if self.tokens is not None:
            tokens = check_between(f"{where}: tokens", self.tokens, 1, 2**62 - 1)
            object.__setattr__(self, "tokens", tokens)
        check_text(f"{where}: shuffle_name", self.shuffle_name)
        if self.labels and self.loss_mask:
            raise InvalidArgument(f"{where}: labels and loss_mask exclude each other; give one")
        self._check_kind(where)
        self._check_subset(where)
        for setting in ("max_epochs", "max_fraction"):
            if getattr(self, setting) is None:
                continue
            value = check_fraction(f"{where}: {setting}", getattr(self, setting))
            object.__setattr__(self, setting, value)
            if not 0 < value <= 2**31:
                raise InvalidArgument(
                    f"{where}: {setting} must be positive and at most 2**31, got {shown(value)}"
                )
        if self.max_fraction is not None and self.max_fraction > 1:
            raise InvalidArgument(
                f"{where}: max_fraction must be at most 1, got {self.max_fraction}; max_epochs "
                "allows more than one epoch"
            )

    @property
    def subset_rule(self) -> SubsetRule:
        """Which of its documents training reads."""
        return SubsetRule(share=self.subset, held_out=self.held_out, seed=self.subset_seed)

    def _check_subset(self, where: str) -> None:
        try:
            rule = self.subset_rule
        except InvalidArgument as error:
            raise InvalidArgument(f"{where}: {error}") from None
        rule.check_pinned(where, self.shuffle_name, self.path)
        object.__setattr__(self, "subset", rule.share)
        object.__setattr__(self, "held_out", rule.held_out)
        object.__setattr__(self, "subset_seed", rule.seed)

    @property
    def most_epochs(self) -> Fraction:
        """Epochs that its limits allow the run to draw."""
        return (self.max_epochs or Fraction(1)) * (self.max_fraction or Fraction(1))

    def _check_kind(self, where: str) -> None:
        check_choice(f"{where}: kind", self.kind, ("pretraining", "finetuning"))
        if self.long_documents == _BY_ORDER:
            object.__setattr__(self, "long_documents", default_long_documents(self.order))
        check_choice(f"{where}: long_documents", self.long_documents, LONG_DOCUMENTS)
        if self.order not in ("epoch", "window", "packed", "blocks"):
            raise InvalidArgument(
                f"{where}: order must be epoch, window, packed or blocks, got {self.order!r}; the "
                "orders of the frameworks have no stages"
            )
        self._check_blocks(where)
        if self.order == "packed":
            self._check_packed(where)
        else:
            for name, usual in (("max_documents", None), ("align", 1)):
                if getattr(self, name) != usual:
                    raise InvalidArgument(
                        f"{where}: {name} is a setting of order packed, the order is {self.order}; "
                        "leave it out or choose order packed"
                    )
        if self.kind == "pretraining" and (self.labels or self.loss_mask):
            raise InvalidArgument(f"{where}: labels and loss_mask are for kind finetuning")
        if self.kind == "finetuning" and self.order in ("window", "blocks"):
            raise InvalidArgument(f"{where}: order {self.order} cuts documents; use order epoch")
        by_length = self.order in ("packed", "blocks") and f"order {self.order}"
        if self.tokens is not None and (by_length or self.kind == "finetuning"):
            raise InvalidArgument(
                f"{where}: the samples of {by_length or 'kind finetuning'} depend on document "
                "lengths; give a path in place of tokens"
            )

    def _check_blocks(self, where: str) -> None:
        if self.block_tokens is not None:
            least = check_between(f"{where}: block_tokens", self.block_tokens, 2, 2**62)
            object.__setattr__(self, "block_tokens", least)
            if self.kind == "finetuning" or self.order not in ("epoch", "blocks"):
                raise InvalidArgument(
                    f"{where}: block_tokens is a setting of order blocks; leave it out"
                )

    def _check_packed(self, where: str) -> None:
        if self.max_documents is not None:
            limit = check_between(f"{where}: max_documents", self.max_documents, 1)
            object.__setattr__(self, "max_documents", limit)
        object.__setattr__(self, "align", check_between(f"{where}: align", self.align, 1))
        if not self.packed:
            raise InvalidArgument(
                f"{where}: packed: false puts one document into a sample, order packed several; "
                "leave one of them out"
            )


@dataclass(frozen=True, kw_only=True)
class RecipeEvaluation:
    """Evaluation on one source, with the same samples in every round.

    Attributes:
        source: source of the samples.
        interval: steps between two rounds; one more round follows the last step.
        iterations: batches of a round. None: all samples of the source, each once, over all ranks.
        batch_size: global batch size; None: that of the last training step.
        sequence_length: tokens of a sample; None: that of the stages.
    """

    source: RecipeSource
    interval: int = 1000
    iterations: int | None = None
    batch_size: int | None = None
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        kind = (RecipeSource, "a RecipeSource", "write RecipeSource(name=…, path=…)")
        check_kind("evaluation: source", self.source, *kind)
        if self.source.held_out is not None and self.source.subset is not None:
            raise InvalidArgument(
                "evaluation: the source has held_out, which are the documents that it reads, and "
                "subset; leave one of them out"
            )
        word = "evaluation: {}".format
        optional = ["iterations", "batch_size", "sequence_length"]
        make_plain(self, "interval", optional=optional, called=word)
        if self.iterations is not None:
            check_between(word("iterations"), self.iterations, 1)


@dataclass(frozen=True, kw_only=True)
class Rounds:
    """Evaluation rounds of a run."""

    count: int
    batches: int
    """Global batches of a round, the same number on every rank."""
    samples: int
    """Samples that a round scores, each once."""
    masked: int
    """Rows without loss that complete the last batch, or the last micro batch of every rank."""
    available: int
    """Samples of the source."""


def rounds_of(
    evaluation: RecipeEvaluation,
    available: int,
    num_steps: int,
    batch_size: int,
    *,
    rows: int | None = None,
    first_step: int,
) -> Rounds:
    """Return the evaluation rounds of a run, on a source of ``available`` samples.

    A round is a multiple of the ``rows`` of one micro batch on every rank; None: of batches.
    ``batch_size`` is that of a setting without one, ``first_step`` the steps of another system.
    """
    size = evaluation.batch_size or batch_size
    samples = available
    if evaluation.iterations is not None:
        samples = evaluation.iterations * size
    if samples > available:
        raise InvalidArgument(
            f"evaluation: {evaluation.iterations} iterations of {size} samples read {samples}, "
            f"source {evaluation.source.name} holds {available}; ask for fewer, or leave "
            "iterations out to read each sample once"
        )
    batches = ceil_div(samples, size)
    return Rounds(
        count=ceil_div(num_steps, evaluation.interval) - first_step // evaluation.interval,
        batches=batches,
        samples=samples,
        masked=ceil_div(samples, rows or size) * (rows or size) - samples,
        available=available,
    )


LENGTH_KEYS: dict[TargetKind, str] = {
    "iterations": "steps",
    "samples": "samples",
    "tokens": "tokens",
    "epochs": "epochs",
}
"""Keys of a stage's length in recipe files, by kind of target."""
BATCH_FACTORS = ("micro_batch_size", "data_parallel_size", "gradient_accumulation_steps")
Batching = Literal["stratified", "random", "per_stream"]
Rounding = Literal["largest_remainder", "streaming"]
Exhaustion = Literal["repeat", "stop", "continue", "redistribute", "error"]
EXHAUSTIONS = ("repeat", "stop", "continue", "redistribute", "error")
BATCHINGS = ("stratified", "random", "per_stream")
ROUNDINGS = ("largest_remainder", "streaming")


@dataclass(frozen=True, kw_only=True)
class Stream:
    """Draws of a stage from one source: a proportion, or a number of epochs or samples.

    At most one of ``proportion``, ``repeat`` and ``choose`` may be given; without any, an epoch of
    the mixture has one epoch of the source.

    Attributes:
        source: name of the `RecipeSource`.
        proportion: share of the stage, relative to the other streams.
        repeat: epochs of the source in each epoch of the mixture.
        choose: samples of the source in each epoch of the mixture.
        restart: begin with the first sample of the source, instead of going on from its position.
        batch_size: samples of a step that draws from the source, over all ranks, under batching
            per_stream; None: the batch of the stage.

    Raises:
        InvalidArgument: a setting is out of range, or excludes another.
    """

    source: str
    proportion: Fraction | None = None
    repeat: Fraction | None = None
    choose: int | None = None
    restart: bool = False
    batch_size: int | None = None

    def __post_init__(self) -> None:
        given = [k for k in ("proportion", "repeat", "choose") if getattr(self, k) is not None]
        if len(given) > 1:
            raise InvalidArgument(
                f"stream {self.source}: {' and '.join(given)} exclude each other; give one"
            )
        make_plain(self, optional=["choose", "batch_size"])
        if self.batch_size is not None:
            check_between(f"stream {self.source}: batch_size", self.batch_size, 1, 2**53)
        for name in given:
            value = check_fraction(f"stream {self.source}: {name}", getattr(self, name))
            if name != "choose":
                object.__setattr__(self, name, value)
            if value <= 0:
                raise InvalidArgument(
                    f"stream {self.source}: {name} must be positive, got {shown(value)}; leave out "
                    "a stream that is not drawn"
                )
            if value >= 2**53 or value < Fraction(1, 2**53):
                raise InvalidArgument(
                    f"stream {self.source}: {name} must be below 2**53 and not below its inverse, "
                    f"got {shown(value)}"
                )


@dataclass(frozen=True, kw_only=True)
class Weighting:
    """Proportions computed from the sizes of the sources: size ** alpha.

    Attributes:
        by: unit of the sizes, of one epoch.
        alpha: from 0 (equal proportions) to 1 (proportional to size); a temperature of 1 / alpha.
    """

    by: Literal["tokens", "documents", "samples"] = "tokens"
    alpha: float = 1.0

    def __post_init__(self) -> None:
        check_choice("by", self.by, ("tokens", "documents", "samples"))
        object.__setattr__(self, "alpha", check_share("alpha", self.alpha))


@dataclass(frozen=True, kw_only=True)
class RecipeStage:
    """A stage: a mixture of streams and its length.

    Attributes:
        name: name in plans and states.
        streams: sources of the mixture, with their shares.
        length: iterations, samples, tokens, or epochs of the mixture. None: one epoch of the
            mixture.
        first_step: step, from 0, with which the stage must begin; None: not checked.
        planned_samples: samples before the stage was shortened by `megaindex.recipe.amend`,
            which exhaustion redistribute divides. None: those of the stage.
        epoch_size: samples of an epoch of the mixture, for proportions. None: those of all its
            sources.
        weighting: proportions by size, in place of those of the streams.
        batching: stratified: draws spread as evenly as possible. random: these, shuffled in
            blocks of 2048. per_stream: every batch is of one stream, of its batch_size if it
            has one; shares are those of samples.
        rounding: rule by which shares of an epoch_size, and repeats, are rounded to samples;
            "streaming" is that of mosaicml-streaming.
        sequence_length: tokens a sample; None: that of the recipe.
        batch: global batch sizes, by samples since the start of the stage; None: those of the
            recipe.
        micro_batch_size: samples of a micro batch of one rank; None: those of the recipe.
        data_parallel_size: number of data-parallel ranks; None: that of the recipe.
        gradient_accumulation_steps: micro batches of one rank in a step of ``batch``; None:
            unknown.

    Raises:
        InvalidArgument: a setting is out of range, or excludes another.
    """

    name: str
    streams: tuple[Stream, ...]
    length: Target | None = None
    first_step: int | None = None
    planned_samples: int | None = None
    epoch_size: int | None = None
    weighting: Weighting | None = None
    batching: Batching = "stratified"
    rounding: Rounding = "largest_remainder"
    sequence_length: int | None = None
    batch: BatchSchedule | None = None
    micro_batch_size: int | None = None
    data_parallel_size: int | None = None
    gradient_accumulation_steps: int | None = None

    def __post_init__(self) -> None:
        where = f"stage {self.name}"
        optional = ["first_step", "planned_samples", "epoch_size", "sequence_length"]
        optional += BATCH_FACTORS
        make_plain(self, optional=optional, called=f"{where}: {{}}".format)
        if not self.streams:
            raise InvalidArgument(f"{where}: has no stream; give at least one")
        names = [stream.source for stream in self.streams]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidArgument(f"{where}: source {twice[0]} is listed twice; list it once")
        by_share = [stream.proportion is not None for stream in self.streams]
        if any(by_share) and not all(by_share):
            raise InvalidArgument(
                f"{where}: {names[by_share.index(False)]} has no proportion and "
                f"{names[by_share.index(True)]} has one; give all streams one, or none"
            )
        own = [s.proportion or s.repeat or s.choose for s in self.streams]
        if self.weighting is not None and any(own):
            raise InvalidArgument(
                f"{where}: weights by {self.weighting.by} take the place of proportion, repeat "
                f"and choose; write every source without a value, such as {names[0]}:, or remove "
                "the weights"
            )
        size = self.epoch_size
        if size is not None and (not self.by_proportion or not 1 <= size < 2**53):
            raise InvalidArgument(
                f"{where}: epoch_size, a number of samples from 1 to 2**53 - 1, is divided by "
                f"proportions, got {size}; give every stream a proportion, or remove it"
            )
        check_choice(f"{where}: batching", self.batching, BATCHINGS)
        check_choice(f"{where}: rounding", self.rounding, ROUNDINGS)
        sized = [stream.source for stream in self.streams if stream.batch_size is not None]
        if sized and self.batching != "per_stream":
            raise InvalidArgument(
                f"{where}: stream {sized[0]} has a batch_size, and with batching {self.batching} "
                "every step draws from all streams; use batching per_stream, or remove it and give "
                "the stage a batch"
            )
        self._check_length(where)

    def _check_length(self, where: str) -> None:
        length = self.length
        if length is None:
            return
        whole = length.kind == "epochs" or length.value.denominator == 1
        if length.per_source or not whole or not 0 < length.value <= 2**62:
            raise InvalidArgument(
                f"{where}: its length must be positive, at most 2**62, and whole except for "
                f"epochs, got {shown(length.value)} {length.kind}"
            )

    @property
    def has_batch_sizes(self) -> bool:
        """True if a stream has a batch size of its own."""
        return any(stream.batch_size is not None for stream in self.streams)

    @property
    def by_proportion(self) -> bool:
        """True if streams have shares of the stage, False if they have numbers of samples."""
        return self.weighting is not None or self.streams[0].proportion is not None


@dataclass(frozen=True, kw_only=True, repr=False)
class Recipe:
    """A run of several sources and stages: all settings that decide its samples and their order.

    Attributes:
        sequence_length: tokens a sample, without the extra one of the shifted label. Like the
            batch and its factors, the default of the stages.
        batch: global batch sizes over the run.
        sources: sources of the stages.
        stages: stages, in order.
        seed: seed of the shuffles.
        tail: policy for the last batch of the run: leave incomplete batches out (drop),
            complete it with rows without loss (pad) or with further samples (wrap).
        exhaustion: policy for a source that reaches its limits: begin its next epoch (repeat,
            without limits), stop the run on all ranks, continue with the other sources, draw
            less of it from the start of the stage (redistribute), or refuse the plan (error).
        evaluation: evaluation during the run; None: none.
        micro_batch_size: samples of a micro batch of one rank; None: unknown.
        data_parallel_size: number of data-parallel ranks; None: unknown.
        gradient_accumulation_steps: micro batches of one rank in a step; None: unknown.
        skip: steps that are not trained on, and documents whose loss is masked.
        past: steps made in another system, from which the run goes on; None: none.
        mix_changes: weights that were changed in mid-run; None: none.
        mix_bounds: least and greatest share of a source in changed weights, by name.
        terms: settings of recipes, in messages, as the file of a framework writes them.

    Raises:
        InvalidArgument: a setting is out of range, or names do not agree.
    """

    sequence_length: int
    batch: BatchSchedule
    sources: tuple[RecipeSource, ...]
    stages: tuple[RecipeStage, ...]
    seed: int = DEFAULT_SEED
    tail: Tail = "drop"
    exhaustion: Exhaustion = "repeat"
    evaluation: RecipeEvaluation | None = None
    micro_batch_size: int | None = None
    data_parallel_size: int | None = None
    gradient_accumulation_steps: int | None = None
    skip: tuple[Skip, ...] = ()
    past: Past | None = None
    mix_changes: MixChanges | None = None
    mix_bounds: tuple[tuple[str, Fraction, Fraction], ...] = ()
    terms: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", given_skips(self.skip))
        make_plain(self, "sequence_length", "seed", optional=BATCH_FACTORS)
        check_choice("tail", self.tail, TAILS)
        check_choice("exhaustion", self.exhaustion, EXHAUSTIONS)
        self.batch.check_multiple_of((self.micro_batch_size or 1) * (self.data_parallel_size or 1))
        self._check_names()
        self._check_limits()
        self._check_shapes()

    def __repr__(self) -> str:
        """Return one line; `to_mapping` has all settings."""
        stages, sources = (
            ", ".join(each.name for each in several[:8]) + " …" * (len(several) > 8)
            for several in (self.stages, self.sources)
        )
        length = " → ".join(map(str, self.stage_lengths))
        return f"Recipe(stages {stages}; sources {sources}; {length} tokens a sample)"

    def called(self, setting: str) -> str:
        """Return a setting as the file that the recipe was read from writes it."""
        return self.terms.get(setting, setting)

    @property
    def exhaustion_remedy(self) -> str:
        """Return what lets a source be drawn further, for messages."""
        if self.terms:
            return f"raise {self.called('max_epochs')}"
        return "raise its max_epochs or max_fraction, or choose another exhaustion policy"

    def _check_names(self) -> None:
        if not self.sources or not self.stages:
            raise InvalidArgument("a recipe needs at least one source and one stage")
        for what, names in (
            ("sources", [source.name for source in self.sources]),
            ("stages", [stage.name for stage in self.stages]),
        ):
            twice = sorted({name for name in names if names.count(name) > 1})
            if twice:
                raise InvalidArgument(f"two {what} are called {', '.join(twice)}; rename one")
        for stage in self.stages:
            self._check_known(f"stage {stage.name}", [s.source for s in stage.streams])
        self._check_past()
        self._check_mix()
        for skip in self.skip:
            skip.to_dict()  # refuses arrays, which a checkpoint could not name
            if skip.source is not None:
                source_number(skip.source, list(self._numbers))

    def _check_known(self, where: str, names: Sequence[str]) -> None:
        for name in names:
            if name not in self._numbers:
                raise InvalidArgument(
                    f"{where}: unknown source {name}; the sources are "
                    f"{', '.join(sorted(self._numbers))}"
                )

    def _check_past(self) -> None:
        if self.past is None:
            return
        if self.skip:
            raise InvalidArgument(
                "past and skip exclude each other: steps and documents of the past are in no "
                "order of this run; leave skipped documents out of the sources"
            )
        self._check_known("past", self.past.sources)
        for read in self.past.read:
            source = self.sources[self.number(read.source)]
            if read.documents and (
                self.order_of(source) != "epoch" or source.kind != "pretraining" or source.tokens
            ):
                raise InvalidArgument(
                    f"past: source {source.name}: documents need a source with a path, of kind "
                    "pretraining and order epoch, in a recipe of one sequence length; give "
                    "tokens, samples or epochs"
                )

    def _check_mix(self) -> None:
        """Check sources and ranges of changed weights and their bounds."""
        changed = () if self.mix_changes is None else self.mix_changes.sources
        for setting, names in (
            ("mix_changes", changed),
            ("mix_bounds", [name for name, _, _ in self.mix_bounds]),
        ):
            self._check_known(setting, names)
            if len(set(names)) < len(names):
                raise InvalidArgument(
                    f"{setting}: a source is named twice; the sources are "
                    f"{', '.join(sorted(self._numbers))}"
                )
        for name, least, most in self.mix_bounds:
            if not 0 <= least <= most <= 1 or most == 0:
                raise InvalidArgument(
                    f"mix_bounds: {name}: must be two shares from 0 to 1, the lower first, got "
                    f"[{float(least):g}, {float(most):g}]"
                )
        lows = sum((low for _, low, _ in self.mix_bounds), Fraction(0))
        highs = sum((high for _, _, high in self.mix_bounds), Fraction(0))
        bounded = len(self.mix_bounds) == len(self.sources)
        if lows > 1 or (bounded and highs < 1):
            which = f"least shares sum to {float(lows):g}; lower one"
            if lows <= 1:
                which = f"greatest shares sum to {float(highs):g}; raise one"
            raise InvalidArgument(f"mix_bounds: no weights fit them, since the {which}")

    def _check_limits(self) -> None:
        limited = [s.name for s in self.sources if s.max_epochs or s.max_fraction]
        if self.exhaustion == "repeat" and limited:
            raise InvalidArgument(
                f"source {limited[0]} has a limit, which exhaustion repeat ignores; choose "
                "exhaustion stop, continue, redistribute or error"
            )

    def _check_shapes(self) -> None:
        """Check that the stages' own lengths and batches agree with the rest of the recipe."""
        for stage in self.stages:
            rows = (self.micro_batch_of(stage) or 1) * (self.ranks_of(stage) or 1)
            try:
                (stage.batch or self.batch).check_multiple_of(rows)
            except InvalidArgument as error:
                raise InvalidArgument(f"stage {stage.name}: {error}") from None
            self._check_batch_sizes(stage, rows)
        if not self.has_lengths:
            return
        scheduled = [s.name for s in self.stages if s.batch is None]
        if scheduled and not self.batch.is_constant:
            raise InvalidArgument(
                f"stage {scheduled[0]}: the batch schedule of the recipe counts samples of one "
                "sequence_length, and the stages have several; give each stage a batch of its own"
            )
        if any(skip.move for skip in self.skip):
            raise InvalidArgument(
                "skip: moved samples follow the end of the run, and the stages differ in "
                "sequence_length; leave move out"
            )
        for source in self.sources:
            self._check_source_lengths(source)
        if self.evaluation is not None and self.evaluation.sequence_length is None:
            raise InvalidArgument(
                f"evaluation: the stages have sequence lengths {_listed(self.stage_lengths)}; give "
                "evaluation a sequence_length"
            )

    def _check_batch_sizes(self, stage: RecipeStage, rows: int) -> None:
        """Check the batch sizes of a stage's streams, of which micro batches have ``rows``."""
        if not stage.has_batch_sizes:
            return
        for stream in stage.streams:
            if stream.batch_size is not None and stream.batch_size % rows:
                raise InvalidArgument(
                    f"stage {stage.name}: stream {stream.source}: batch_size {stream.batch_size} "
                    f"must be a multiple of micro batch x data-parallel size = {rows}; change it, "
                    "the micro batch or the ranks"
                )
        if any(skip.move for skip in self.skip):
            raise InvalidArgument(
                f"skip: moved samples make steps behind the end of the run, and the streams of "
                f"stage {stage.name} have steps of several sizes; leave move out"
            )
        if stage is self.stages[-1] and self.evaluation and self.evaluation.batch_size is None:
            raise InvalidArgument(
                f"evaluation: its batches are those of the last step, and the streams of stage "
                f"{stage.name} have several sizes; give evaluation a batch_size"
            )

    def _check_source_lengths(self, source: RecipeSource) -> None:
        lengths = self.lengths_of(source.name)
        if self.order_of(source) == "blocks":
            if source.tokens is not None:
                raise InvalidArgument(
                    f"source {source.name}: in a recipe of several sequence lengths, samples "
                    "depend on document lengths; give a path in place of tokens"
                )
            if source.block_tokens is not None and source.block_tokens <= max(lengths):
                raise InvalidArgument(
                    f"source {source.name}: block_tokens must be more than sequence_length "
                    f"{max(lengths)}, got {source.block_tokens}; raise it, or, in a run that began "
                    "with these blocks, read the pair as a new source at this length"
                )
        elif len(lengths) > 1:
            what = f"order {source.order}" if source.kind == "pretraining" else source.kind
            raise InvalidArgument(
                f"source {source.name}: samples of {what} are made for one sequence length, and "
                f"its stages have {_listed(lengths)}; make it a source for each length, with the "
                "same path and names of their own"
            )

    @property
    def has_lengths(self) -> bool:
        """True if the stages differ in sequence_length."""
        return len(self.stage_lengths) > 1

    @cached_property
    def stage_lengths(self) -> tuple[int, ...]:
        """The distinct sequence lengths of the stages, in order."""
        return tuple(dict.fromkeys(self.length_of(stage) for stage in self.stages))

    def length_of(self, stage: RecipeStage) -> int:
        """Return the sequence_length of a stage."""
        return stage.sequence_length or self.sequence_length

    def lengths_of(self, name: str) -> tuple[int, ...]:
        """Return the distinct sequence lengths at which a source is read, in order."""
        stages = [s for s in self.stages if any(each.source == name for each in s.streams)]
        lengths = dict.fromkeys(self.length_of(stage) for stage in stages)
        return tuple(lengths) or (self.stage_lengths[0],)

    def order_of(self, source: RecipeSource) -> str:
        """Return the order in which a source is read: blocks, in a recipe of several lengths."""
        becomes_blocks = source.kind == "pretraining" and source.order == "epoch"
        return "blocks" if becomes_blocks and self.has_lengths else source.order

    def micro_batch_of(self, stage: RecipeStage) -> int | None:
        """Return the micro batch size of a stage; None: unknown."""
        return stage.micro_batch_size or self.micro_batch_size

    def ranks_of(self, stage: RecipeStage) -> int | None:
        """Return the number of data-parallel ranks of a stage; None: unknown."""
        return stage.data_parallel_size or self.data_parallel_size

    @property
    def all_sources(self) -> tuple[RecipeSource, ...]:
        """The sources of the stages, and that of the evaluation."""
        evaluated = () if self.evaluation is None else (self.evaluation.source,)
        return (*self.sources, *evaluated)

    @property
    def common_data_parallel_size(self) -> int | None:
        """The data-parallel size of all stages; None if it is unknown or they differ."""
        return _only({self.ranks_of(stage) for stage in self.stages})

    @property
    def rows_per_round(self) -> int | None:
        """Rows of one micro batch on every rank; None without these settings."""
        if self.micro_batch_size is None or self.data_parallel_size is None:
            return None
        return self.micro_batch_size * self.data_parallel_size

    @property
    def files(self) -> list[str]:
        """Paths of the files of documents and of mix changes, each once."""
        named = [skip.documents for skip in self.skip if isinstance(skip.documents, str)]
        if self.mix_changes is not None and self.mix_changes.path:
            named.append(self.mix_changes.path)
        if self.past is not None:
            named += [read.documents for read in self.past.read if read.documents]
        return list(dict.fromkeys(named))

    @property
    def first_sample(self) -> int:
        """Position of the first sample: the samples of the steps of the past, 0 without."""
        return 0 if self.past is None else self.batch.samples_after(self.past.steps)

    @cached_property
    def past_reads(self) -> dict[str, PastRead]:
        """The part of each source that was read in the past, by name."""
        if self.past is None:
            return {}
        return self.past.reads(self.first_sample, self.sequence_length)

    def number(self, name: str) -> int:
        """Return the number of the source of that name."""
        return self._numbers[name]

    @cached_property
    def _numbers(self) -> dict[str, int]:
        return {source.name: number for number, source in enumerate(self.sources)}


def check_recipe(recipe: object) -> None:
    """Raise InvalidArgument for anything but a `Recipe`, such as the path of its file."""
    check_kind("recipe", recipe, Recipe, "a Recipe", "read a file with read_recipe")


def default_block_tokens(tokens: int, longest: int) -> int:
    """Return the tokens that a block of order blocks holds at least, unless they are given.

    They are 1/128 of an epoch, but at most 2**23, and at least 16 samples of the longest stage: so
    later stages of that length or shorter ones do not change them.
    """
    return max(16 * longest, min(tokens // 128, 2**23))


def _only(sizes: set[int | None]) -> int | None:
    return next(iter(sizes)) if len(sizes) == 1 else None


def _listed(numbers: tuple[int, ...]) -> str:
    return ", ".join(map(str, numbers))


def shown(value: Fraction | int) -> str:
    """Return a number for a message, shortened if it is long."""
    return reprlib.repr(str(value)).strip("'")
