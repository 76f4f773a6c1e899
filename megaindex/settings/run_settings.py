"""Settings of a training run, complete and validated.

`megaindex.plan.resolve` builds `RunSettings` from settings; it can also be written in Python:

>>> RunSettings(order="neox", sequence_length=2048, data=Data(train=(Source(tokens=2113896210),)),
...     batch=BatchSchedule.constant(128), target=Target(kind="epochs", value=Fraction(1)))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal, get_args

from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import SPLITS, FrameworkRules, sums_differ
from megaindex.index.order_settings import NeoxDocumentsOrder, Order, order_of
from megaindex.index.skips import Skip, given_skips
from megaindex.index.subset_rule import no_subset
from megaindex.settings.batch_schedule import BatchSchedule, SkippedSteps, skip_steps, steps_of
from megaindex.settings.megatron_versions import DEFAULT_VERSION, Version, find_version
from megaindex.settings.sources import Source
from megaindex.validation import (
    DEFAULT_SEED,
    check_buffer,
    check_choice,
    check_epochs,
    check_flag,
    check_fraction,
    check_integer,
    check_setting,
    make_plain,
)

Tail = Literal["drop", "pad", "wrap"]
TAILS = ("drop", "pad", "wrap")
Buffer = float | Literal["exact"]
TargetKind = Literal["epochs", "iterations", "samples", "tokens", "loader_epochs"]
"""loader_epochs are GPT-NeoX's train_epochs: passes of its loader over one epoch of each source.
Of validation and test one epoch is built too."""


def of_megatron_alone(flag: str, order: object, remedy: str = "remove it") -> InvalidArgument:
    """Return the refusal of a setting that only order megatron has."""
    return InvalidArgument(f"{flag} is a setting of order megatron, not {order}; {remedy}")


@dataclass(frozen=True, kw_only=True)
class Data:
    """Sources of each split.

    Attributes:
        train: sources of the training data; with ``split``, of the other splits too.
        valid: sources of the validation data, where each split has its own.
        test: sources of the test data, where each split has its own.
        split: shares of train, valid and test in the train sources, such as ``969,30,1``; None:
            each split has its own sources.
        documents_alpha: exponent of GPT-NeoX's weight_by_num_documents, which computes weights
            from the numbers of documents; None: explicit weights.
        apart: True if each split has its own sources, even if there are those of train alone.
    """

    train: tuple[Source, ...]
    valid: tuple[Source, ...] = ()
    test: tuple[Source, ...] = ()
    split: str | None = None
    documents_alpha: float | None = None
    apart: bool = False

    def __post_init__(self) -> None:
        if self.split is None and (self.valid or self.test):
            object.__setattr__(self, "apart", True)


@dataclass(frozen=True, kw_only=True)
class Target:
    """Length of a run, or of a stage of a recipe.

    Attributes:
        kind: unit: epochs, iterations, samples, tokens or loader_epochs (GPT-NeoX's train_epochs).
        value: number of these units.
        per_source: epochs of each source in place of `value`; they also set the weights.

    Raises:
        InvalidArgument: a value is not a number of its kind.
    """

    kind: TargetKind
    value: Fraction
    per_source: tuple[Fraction, ...] = ()

    def __post_init__(self) -> None:
        check_choice("kind", self.kind, get_args(TargetKind))
        check = check_epochs if self.kind == "epochs" else check_fraction
        object.__setattr__(self, "value", check(self.kind, self.value))
        each = tuple(check(self.kind, value) for value in self.per_source)
        object.__setattr__(self, "per_source", each)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Evaluations of a run, as in Megatron and GPT-NeoX.

    Attributes:
        interval: iterations between two evaluations.
        iterations: batches of an evaluation.
        batch_size: global batch size; None: that of training.
        micro_batch_size: micro batch size of evaluations; None: that of training.
        start: first iteration that evaluates (Megatron's --start-eval-at-iter).
        alone: evaluate once, without training (Megatron's --skip-train).
        full: read all of each validation dataset, built for one epoch (Megatron's
            --full-validation).
        multiple: evaluate each validation source separately (Megatron's
            --multiple-validation-sets).
    """

    interval: int = 1000
    iterations: int = 100
    batch_size: int | None = None
    micro_batch_size: int | None = None
    start: int = 0
    alone: bool = False
    full: bool = False
    multiple: bool = False

    def __post_init__(self) -> None:
        optional = ["batch_size", "micro_batch_size"]
        make_plain(self, "interval", "iterations", "start", optional=optional)


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """A training run: all settings that a plan depends on.

    Attributes:
        order: order of the samples, as in `megaindex.build_index`: a name, or an order object.
        sequence_length: tokens a sample, without the extra one of the shifted label.
        data: sources of each split.
        batch: global batch sizes over the run.
        target: length of the run.
        exact: GPT-NeoX's train_epochs under ``megaindex.adapters.neox.install(exact=True)``.
        variance_buffer: factor, from 1, of the samples requested of each source of a blend;
            "exact": the samples that the blend draws; None: the framework's own factor.
        surplus: Megatron's --mid-level-dataset-surplus: 1 less than its buffer of weighted blends.
        tail: policy for the samples of the target that fill no batch.
        seed: seed of the shuffles.
        evaluation: evaluations of the run.
        data_parallel_size: number of data-parallel ranks; None: unknown.
        micro_batch_size: samples of a micro batch of one rank; None: unknown.
        gradient_accumulation_steps: micro batches of one rank in an iteration; None: unknown.
        consumed_samples: samples consumed before a resume; iterations are counted from there.
        phases: iterations at which Megatron rebuilds its datasets (--phase-transition-iterations).
        coverage: method of the plan's coverage; auto counts in the built index where that is cheap.
        blend_counts: count or bound the draws of a greedy blend; auto bounds those of long blends.
        version: release of Megatron-LM, for order megatron; None: the default one.
        dataloader: Megatron's --dataloader-type: one pass in order, or passes in random order
            without end.
        skip: steps that are not trained on, and documents whose loss is masked, by
            `megaindex.adapters`.
        iterations_to_skip: Megatron's --iterations-to-skip, counted as its release does, from 0 or
            1: iterations that read their samples and do not train on them.
        notes: warnings of the reader of the settings, which the plan repeats.
        ignored: settings of the framework's data that do not change the plan.

    Raises:
        InvalidArgument: a setting is out of range or contradicts another.
    """

    order: str | Order
    sequence_length: int
    data: Data
    batch: BatchSchedule
    target: Target
    exact: bool = False
    variance_buffer: Buffer | None = None
    surplus: float | None = None
    tail: Tail = "drop"
    seed: int = DEFAULT_SEED
    evaluation: Evaluation = Evaluation()
    data_parallel_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    consumed_samples: int = 0
    phases: tuple[int, ...] = ()
    coverage: Literal["auto", "exact", "expected", "none"] = "auto"
    blend_counts: Literal["auto", "exact", "bounds"] = "auto"
    version: Version | None = None
    dataloader: Literal["single", "cyclic"] = "single"
    skip: tuple[Skip, ...] = ()
    iterations_to_skip: tuple[int, ...] = ()
    notes: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "skip", given_skips(self.skip))
        factors = ("micro_batch_size", "data_parallel_size", "gradient_accumulation_steps")
        make_plain(self, "sequence_length", "seed", "consumed_samples", optional=factors)
        phases = tuple(check_integer("a phase", phase) for phase in self.phases)
        object.__setattr__(self, "phases", phases)
        order = order_of(self.order)
        object.__setattr__(self, "order", order)
        if self.version is None and order.name == "megatron":
            object.__setattr__(self, "version", find_version(DEFAULT_VERSION))
        self._check_iterations_to_skip()
        self.batch.check_multiple_of((self.micro_batch_size or 1) * (self.data_parallel_size or 1))
        if self.variance_buffer is not None:
            buffer = check_buffer("variance_buffer", self.variance_buffer)
            object.__setattr__(self, "variance_buffer", buffer)
        self._check_surplus()
        self._check_target()
        for name in SPLITS:
            if len({source.weight is None for source in getattr(self.data, name)}) > 1:
                raise InvalidArgument(f"{name} data: give every source a weight, or none")
            for source in getattr(self.data, name):
                source.check_weight(zero=order.row.zero_weights)
                if source.subset_rule and order.row.is_framework:
                    raise no_subset(order.name)
                if source.shuffle_name and order.row.is_framework:
                    raise InvalidArgument(
                        "--shuffle-names is a setting of order epoch, window and packed, the order "
                        f"is {order.name}, which has no names; leave it out"
                    )
            weights = [source.weight for source in getattr(self.data, name)]
            if weights and weights[0] is not None and not any(weights):
                raise InvalidArgument(
                    f"all {name} data has weight 0, at which {order.row.framework} stops with an "
                    "AssertionError; give a source a positive weight"
                )
        if not self.data.train:
            raise InvalidArgument("no training data: give --data-path or --tokens-per-epoch")
        if self.packing is not None:
            self._check_packing(self.packing)
        if self.row.order == "packed" and any(
            source.tokens is not None and not source.histogram for source in self.data.train
        ):
            raise InvalidArgument(
                "order packed needs the lengths of the documents, not only their tokens: give "
                "--data-path or --length-histogram"
            )

    @property
    def loader_batch(self) -> int:
        """Samples of a micro batch on all ranks, or of a global batch without these sizes."""
        return self.unit or self.batch.final

    @cached_property
    def row(self) -> FrameworkRules:
        """Rules of the order, with its settings and those of the framework's release."""
        row = order_of(self.order).row
        if self.version is not None:
            row = replace(row, framework=self.version.framework)
        if self.surplus is not None:
            row = replace(row, buffer_weighted=1 + self.surplus)
        if self.exact and row.train_epochs == "repeated":
            row = replace(row, train_epochs="reshuffled", uncounted_samples=0, left_over="drop")
        return row

    @property
    def depends_on_python(self) -> bool:
        """True if its weights, or the bounds of its split, depend on the row's ``python_sum``."""
        row, data, sums = self.row, self.data, []
        if row.weight_sum == "python":
            if data.documents_alpha is not None:  # weights by files, which are not read here
                return True
            splits = (getattr(data, name) for name in SPLITS)
            sums = [[s.weight for s in split if s.weight is not None] for split in splits]
        if row.split_rule == "neox" and data.split is not None:
            sums.append(row.shares(data.split))
        return any(map(sums_differ, sums))

    @property
    def packing(self) -> NeoxDocumentsOrder | None:
        """The order if its samples are whole documents, else None."""
        return self.order if isinstance(self.order, NeoxDocumentsOrder) else None

    @property
    def unit(self) -> int | None:
        """Samples of one micro batch on every rank; None without these sizes."""
        if self.micro_batch_size is None or self.data_parallel_size is None:
            return None
        return self.micro_batch_size * self.data_parallel_size

    @property
    def nominal_batch(self) -> int:
        """Megatron's args.global_batch_size, by which it sizes train_iters and evaluations.

        With a step schedule it is one micro batch on every rank.
        """
        steps = self.row.order == "megatron" and self.batch.stepped
        return self.unit or self.batch.final if steps else self.batch.final

    @property
    def all_sources(self) -> tuple[Source, ...]:
        """The sources of training, validation and test."""
        return (*self.data.train, *self.data.valid, *self.data.test)

    @property
    def skipped_steps(self) -> list[int]:
        """Steps from 0 on that Megatron's --iterations-to-skip names; some may not be reached."""
        first = 0 if self.version is None else self.version.first_skipped
        return [number - first for number in self.iterations_to_skip]

    def skips(self, num_steps: int) -> tuple[Skip, ...]:
        """Return all skips of a run of so many steps, those of Megatron among them."""
        steps = [step for step in self.skipped_steps if step < num_steps]
        return (*self.skip, *([Skip(steps=steps)] if steps else []))

    def steps_with_skips(self, end: int, masked_rows: int) -> SkippedSteps | None:
        """Return the steps up to sample ``end`` with all skips; None without any.

        Raises:
            InvalidArgument: a skip does not fit the run.
            MissingFile, StorageError: a file of documents cannot be read.
        """
        if not self.skip and not self.iterations_to_skip:
            return None
        steps, _ = steps_of(self.batch, self.consumed_samples, end)
        return skip_steps(self.skips(steps.count), self.batch, steps, masked_rows=masked_rows)

    def _check_iterations_to_skip(self) -> None:
        numbers = {check_integer("--iterations-to-skip", n) for n in self.iterations_to_skip}
        object.__setattr__(self, "iterations_to_skip", tuple(sorted(numbers)))
        if numbers and self.skip:
            raise InvalidArgument(
                "--iterations-to-skip and --skip-steps, --skip-documents or --skip exclude each "
                "other: with the skips of the adapter, iterations do not have the numbers of steps "
                "any more; write all steps into --skip-steps"
            )
        if numbers and self.version is None:
            raise of_megatron_alone("--iterations-to-skip", self.order, "give --skip-steps")
        if numbers and min(self.skipped_steps) < 0:
            raise InvalidArgument(
                f"--iterations-to-skip counts from {min(numbers) - min(self.skipped_steps)} in "
                f"{self.row.framework}, got {min(numbers)}; remove it"
            )

    def _check_surplus(self) -> None:
        if self.surplus is None:
            return
        if self.row.order != "megatron":
            raise of_megatron_alone("--mid-level-dataset-surplus", self.order)
        if not 0 <= self.surplus < math.inf:
            raise InvalidArgument(
                f"--mid-level-dataset-surplus must be at least 0, got {self.surplus}"
            )
        if self.variance_buffer is not None:
            raise InvalidArgument(
                "--mid-level-dataset-surplus and --variance-buffer exclude each other; remove one"
            )

    def _check_target(self) -> None:
        target = self.target
        if check_flag("exact", self.exact) and target.kind != "loader_epochs":
            raise InvalidArgument(
                "install(exact=True) is planned with train_epochs alone; for other targets plan "
                "--variance-buffer exact, which it implies"
            )
        values = target.per_source or (target.value,)
        if min(values) < 0:
            raise InvalidArgument(
                f"the target of {target.kind} must be at least 0, got {', '.join(map(str, values))}"
            )
        if target.kind == "loader_epochs":
            self._check_loader_epochs(target.value)
        if target.per_source and len(target.per_source) != len(self.data.train):
            raise InvalidArgument(
                f"--epochs has {len(target.per_source)} values for {len(self.data.train)} sources; "
                "give one for all, or one each"
            )
        if target.per_source and self.data.train[0].weight is not None:
            raise InvalidArgument(
                "--epochs per source sets the weights; remove the weights from --data-path"
            )

    def _check_packing(self, packing: NeoxDocumentsOrder) -> None:
        kind = packing.pack_impl
        if kind == "pack_until_overflow" and self.target.kind == "epochs":
            raise InvalidArgument(
                "--epochs: pack_until_overflow fills another number of samples in each pass; give "
                "--train-iters"
            )
        for source in self.all_sources:
            if source.tokens is not None:
                raise InvalidArgument(f"pack_impl {kind} needs files; give --data-path")
            if kind == "unpacked" and not source.labels:
                raise InvalidArgument(
                    f"pack_impl unpacked: {source.path} has no labels, and GPT-NeoX ends with an "
                    "AttributeError; give train_label_data_paths, valid_ and test_ ones, with "
                    "train_data_paths"
                )

    def _check_loader_epochs(self, value: Fraction) -> None:
        if self.row.train_epochs == "none":
            raise InvalidArgument(
                f"order {self.order} has no train_epochs, a setting of GPT-NeoX; give --epochs"
            )
        check_setting("train_epochs", int(value) if value.denominator == 1 else value)
        if self.micro_batch_size is None or self.data_parallel_size is None:
            raise InvalidArgument(
                "train_epochs counts micro batches: give --micro-batch-size and --world-size"
            )
