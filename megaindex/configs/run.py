"""One training run, complete and validated.

`megaindex.configs.run_builder.resolve` makes a `Run` from loose settings; code can also write one:

>>> Run(order="neox", sequence_length=2048, data=Data(train=(Source(tokens=2113896210),)),
...     batch=BatchSchedule.constant(128), target=Target(kind="epochs", value=Fraction(1)))
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Literal

from megaindex.configs.batch_schedule import BatchSchedule
from megaindex.configs.megatron_versions import DEFAULT_VERSION, Version, find_version
from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import FrameworkRules
from megaindex.index.order_settings import NeoxDocumentsOrder, Order, order_of
from megaindex.validation import (
    DEFAULT_SEED,
    check_between,
    check_buffer,
    check_epochs,
    check_fraction,
    check_integer,
    check_setting,
    check_weight,
    make_plain,
)

Tail = Literal["drop", "pad", "wrap"]
TAILS = ("drop", "pad", "wrap")
Buffer = float | Literal["exact"]
TargetKind = Literal["epochs", "iterations", "samples", "tokens", "loader_epochs"]
"""loader_epochs are GPT-NeoX's train_epochs: one epoch of each source is built, for validation and
test too, and so many times the micro batches of its loader are trained on."""


@dataclass(frozen=True, kw_only=True)
class Source:
    """One corpus of a blend: a path prefix, or only the tokens of its epoch."""

    path: str = ""
    weight: float | None = None
    """Explicit weight, positive and finite; None everywhere in a blend means no weights."""
    tokens: int | None = None
    """Tokens of one epoch, where there is no file to read."""
    labels: str = ""
    """Path prefix of the labels, for a `NeoxDocumentsOrder`."""
    rejected: str = ""
    """Path prefix of the other side of pairwise data; `path` is then the preferred one."""
    rejected_labels: str = ""

    def __post_init__(self) -> None:
        if self.tokens is not None:
            object.__setattr__(self, "tokens", check_between("tokens", self.tokens, 1))
        if self.weight is None:
            return
        name = f"the weight of {self.path or 'a source without a path'}"
        object.__setattr__(self, "weight", check_weight(name, self.weight))


@dataclass(frozen=True, kw_only=True)
class Data:
    """Sources of each split."""

    train: tuple[Source, ...]
    valid: tuple[Source, ...] = ()
    test: tuple[Source, ...] = ()
    split: str | None = None
    """Divides the train sources among train, valid and test; None leaves each split its own."""
    documents_alpha: float | None = None
    """GPT-NeoX's weight_by_num_documents: the weights are computed from the numbers of documents,
    with this exponent."""
    apart: bool = False
    """Whether each split has sources of its own, be they for training alone."""

    def __post_init__(self) -> None:
        if self.split is None and (self.valid or self.test):
            object.__setattr__(self, "apart", True)


@dataclass(frozen=True, kw_only=True)
class Target:
    """How long to train."""

    kind: TargetKind
    value: Fraction
    per_source: tuple[Fraction, ...] = ()
    """Epochs of each source instead of `value`; they also set the weights."""

    def __post_init__(self) -> None:
        check = check_epochs if self.kind == "epochs" else check_fraction
        object.__setattr__(self, "value", check(self.kind, self.value))
        each = tuple(check(self.kind, value) for value in self.per_source)
        object.__setattr__(self, "per_source", each)


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """When and how long a run evaluates."""

    interval: int = 1000
    iterations: int = 100
    batch_size: int | None = None
    """Global batch size of evaluation; None: that of training."""
    micro_batch_size: int | None = None
    start: int = 0
    """First iteration that evaluates (Megatron's --start-eval-at-iter)."""
    alone: bool = False
    """Evaluate once and train nothing (Megatron's --skip-train)."""
    full: bool = False
    """Each evaluation reads its whole datasets, built for one epoch (--full-validation)."""
    multiple: bool = False
    """Each validation source is evaluated by itself (--multiple-validation-sets)."""

    def __post_init__(self) -> None:
        optional = ["batch_size", "micro_batch_size"]
        make_plain(self, "interval", "iterations", "start", optional=optional)


@dataclass(frozen=True, kw_only=True)
class Run:
    """Everything a plan depends on."""

    order: str | Order
    """A name stands for its default settings."""
    sequence_length: int
    data: Data
    batch: BatchSchedule
    target: Target
    variance_buffer: Buffer | None = None
    """None: what the framework itself applies; "exact": what the blend really draws."""
    surplus: float | None = None
    """Megatron's --mid-level-dataset-surplus, which changes its buffer of weighted blends."""
    tail: Tail = "drop"
    seed: int = DEFAULT_SEED
    evaluation: Evaluation = Evaluation()
    data_parallel_size: int | None = None
    micro_batch_size: int | None = None
    gradient_accumulation_steps: int | None = None
    consumed_samples: int = 0
    """Samples the run had consumed when it stopped; iterations are counted from there."""
    phases: tuple[int, ...] = ()
    """Iterations at which Megatron builds its datasets anew."""
    coverage: Literal["auto", "exact", "expected", "none"] = "auto"
    blend_counts: Literal["auto", "exact", "bounds"] = "auto"
    """Whether the draws of a long greedy blend are counted or bounded."""
    version: Version | None = None
    """Release of Megatron-LM, for order megatron; None: the default one."""
    dataloader: Literal["single", "cyclic"] = "single"
    """Megatron's --dataloader-type: in order, or permuted anew and without end."""
    notes: tuple[str, ...] = ()
    """What the reader of the settings wants said with the plan."""
    ignored: tuple[str, ...] = ()
    """Settings of the framework that concern its data and change nothing in the plan."""

    def __post_init__(self) -> None:
        factors = ("micro_batch_size", "data_parallel_size", "gradient_accumulation_steps")
        make_plain(self, "sequence_length", "seed", "consumed_samples", optional=factors)
        phases = tuple(check_integer("a phase", phase) for phase in self.phases)
        object.__setattr__(self, "phases", phases)
        order = order_of(self.order)
        object.__setattr__(self, "order", order)
        if self.version is None and order.name == "megatron":
            object.__setattr__(self, "version", find_version(DEFAULT_VERSION))
        self.batch.check_multiple_of((self.micro_batch_size or 1) * (self.data_parallel_size or 1))
        if self.variance_buffer is not None:
            buffer = check_buffer("variance_buffer", self.variance_buffer)
            object.__setattr__(self, "variance_buffer", buffer)
        self._check_surplus()
        self._check_target()
        for name in ("train", "valid", "test"):
            _check_sources(getattr(self.data, name), name)
        if not self.data.train:
            raise InvalidArgument("no training data: give --data-path or --tokens-per-epoch")
        if self.packing is not None:
            self._check_packing(self.packing)

    @property
    def loader_batch(self) -> int:
        """Samples that the loaders of all ranks read at once: a micro batch each, or a global batch
        where these sizes are not known.
        """
        return self.unit or self.batch.final

    @cached_property
    def row(self) -> FrameworkRules:
        """The rules of the order, with its settings and those of the framework's release."""
        row = order_of(self.order).row
        if self.version is not None:
            row = replace(row, framework=self.version.framework)
        if self.surplus is not None:
            row = replace(row, buffer_weighted=1 + self.surplus)
        return row

    @property
    def packing(self) -> NeoxDocumentsOrder | None:
        """The order, where its samples are whole documents."""
        return self.order if isinstance(self.order, NeoxDocumentsOrder) else None

    @property
    def unit(self) -> int | None:
        """Samples of one micro batch on every rank; None where they are not known."""
        if self.micro_batch_size is None or self.data_parallel_size is None:
            return None
        return self.micro_batch_size * self.data_parallel_size

    @property
    def nominal_batch(self) -> int:
        """Megatron's args.global_batch_size, of which it builds train_iters and evaluations.

        With a step schedule that is one micro batch on every rank, whatever is consumed.
        """
        steps = self.row.order == "megatron" and self.batch.stepped
        return self.unit or self.batch.final if steps else self.batch.final

    def _check_surplus(self) -> None:
        if self.surplus is None:
            return
        if self.row.order != "megatron" or not 0 <= self.surplus < math.inf:
            raise InvalidArgument(
                "--mid-level-dataset-surplus must be at least 0, in order megatron, got "
                f"{self.surplus} in order {self.order}"
            )
        if self.variance_buffer is not None:
            raise InvalidArgument(
                "--mid-level-dataset-surplus and --variance-buffer exclude each other; remove one"
            )

    def _check_target(self) -> None:
        target = self.target
        values = target.per_source or (target.value,)
        if min(values) < 0:
            raise InvalidArgument(
                f"target of {target.kind} must be positive, got {', '.join(map(str, values))}"
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
        kind, data = packing.pack_impl, self.data
        if kind == "pack_until_overflow" and self.target.kind == "epochs":
            raise InvalidArgument(
                "--epochs: pack_until_overflow fills another number of samples in each pass; give "
                "--train-iters"
            )
        sources = [*data.train, *data.valid, *data.test]
        for source in sources:
            if source.tokens is not None:
                raise InvalidArgument(f"pack_impl {kind} needs files; give --data-path")
            if kind == "unpacked" and not source.labels:
                raise InvalidArgument(
                    f"pack_impl unpacked: {source.path} has no labels, and GPT-NeoX ends with an "
                    "AttributeError; give train_label_data_paths, valid_ and test_ ones, with "
                    "train_data_paths"
                )

    def _check_loader_epochs(self, value: Fraction) -> None:
        if not self.row.uncounted_samples:
            raise InvalidArgument(
                f"order {self.order}: train_epochs are GPT-NeoX's; give --epochs in place of them"
            )
        check_setting("train_epochs", int(value) if value.denominator == 1 else value)
        if self.micro_batch_size is None or self.data_parallel_size is None:
            raise InvalidArgument(
                "train_epochs counts micro batches: give --micro-batch-size and --world-size"
            )


def _check_sources(sources: tuple[Source, ...], split: str) -> None:
    weights = [source.weight for source in sources]
    if any(weight is None for weight in weights) and any(w is not None for w in weights):
        raise InvalidArgument(f"{split} data: give every source a weight, or none")
