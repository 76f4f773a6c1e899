"""The plan and its parts. `Plan.to_json` is the contract of ``--json``: fields keep their names."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Coverage:
    """Shares of tokens by times served, among the first S tokens of each sample consumed."""

    method: str
    """closed-form (exact), built (exact: counted in the built index), expected, or none."""
    tokens: tuple[float, ...] = ()
    """Fraction of the tokens served 0, 1, 2, … times."""
    documents: tuple[float, ...] = ()
    """Fraction of the non-empty documents of which a token was served in 0, 1, 2, … of the built
    epochs; only where the index was built."""

    def to_json(self) -> dict[str, float]:
        """``seen_0``, ``seen_1``, …: fractions of the tokens, which add up to 1."""
        return {f"seen_{times}": share for times, share in enumerate(self.tokens)}

    def documents_to_json(self) -> dict[str, float]:
        """The same for documents; empty where they were not counted."""
        return {f"seen_{times}": share for times, share in enumerate(self.documents)}


@dataclass(frozen=True, kw_only=True)
class Row:
    """One source in one split; the defaults are those of a source without a sample there."""

    split: str
    phase: int | None = None
    """Number of Megatron's phase, from 1; None for a run of one piece."""
    source: int
    """Its place in the blend, from 1."""
    path: str
    """Empty where only tokens were given."""
    weight: float | None
    tokens_per_epoch: int
    samples_per_epoch: int = 0
    requested: int | None = 0
    """Samples the order asks of the source; None where the blend was not counted."""
    drawn: int | None = 0
    """Samples of it among those consumed."""
    drawn_bounds: tuple[int, int] = (0, 0)
    drawn_by_blend: int | None = 0
    """Samples of it in the whole blend that the framework fills, which may be longer."""
    built: int | None = 0
    epochs: int | None = 0
    distinct: int | None = 0
    """Different samples among those drawn; None where they are not counted."""
    repeated: int | None = 0
    """Samples drawn beyond its first epoch, or again."""
    coverage: Coverage = Coverage(method="none")
    error: str = ""
    """Error with which the framework ends on this source; empty: none."""

    @property
    def name(self) -> str:
        """Path of the source, or its number."""
        return self.path or f"source {self.source}"

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "drawn_bounds": list(self.drawn_bounds),
            "coverage": self.coverage.to_json(),
            "coverage_documents": self.coverage.documents_to_json(),
            "coverage_method": self.coverage.method,
        }


@dataclass(frozen=True, kw_only=True)
class Neighbour:
    """Epochs and samples that a number of iterations would build."""

    train_iters: int
    num_epochs_built: int
    samples_built: int
    begins: str
    """The first source that has an epoch more than in the plan, empty if none has."""


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
    """Effect that a variance buffer would have had on the same run."""

    variance_buffer: float
    num_epochs_built: int
    samples_built: int
    max_train_iters_without_repeat: int
    short: tuple[str, ...] | None
    """Sources drawn more often than built; None where draws were not counted."""


@dataclass(frozen=True, kw_only=True)
class LoaderRestart:
    """A loader of GPT-NeoX, which starts over after the samples that its datasets count."""

    split: str
    samples_counted: int
    """In whole micro batches of all ranks; 0: the run ends with an error."""
    samples_read: int


@dataclass(frozen=True, kw_only=True)
class Phase:
    """Iterations [begin, end) of Megatron, with datasets, and rows, of their own."""

    begin: int
    end: int
    first_sample: int
    samples: int


@dataclass(frozen=True, kw_only=True)
class Evaluations:
    """Evaluation of the whole run."""

    rounds: int
    """Evaluations that the framework builds for; Megatron's --start-eval-at-iter skips some."""
    valid_samples: int
    """Samples asked of the validation blend; with full validation, those of one pass."""
    test_samples: int
    batch_size: int
    rounds_run: int
    """Evaluations that take place."""
    valid_samples_read: int
    test_samples_read: int
    full: bool = False
    """True if each evaluation reads all of each validation dataset."""
    iterations: tuple[int, ...] = ()
    """Iterations of an evaluation, for each validation set; Megatron's eval_iters."""


@dataclass(frozen=True, kw_only=True)
class DryLoader:
    """A split of which the run reads more than Megatron's single-pass loader has."""

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
    """The answer; top-level figures are those of the train split."""

    order: str
    framework: str
    sequence_length: int
    variance_buffer: float | str
    tail: str
    target: str
    train_iters: int
    global_batch_size: int
    batch_schedule: tuple[tuple[int, int], ...]
    tokens_per_epoch: int
    samples_per_epoch: int
    samples_consumed: int
    """Position in the stream after the last iteration, `consumed_samples` included."""
    consumed_samples: int
    samples_built: int | None
    samples_left_over: int
    tokens_consumed: int
    tokens_left_over: int
    num_epochs_built: int | None
    max_train_iters_without_repeat: int
    max_train_iters_same_epochs: int
    max_train_iters_exact: bool
    """False where the two are safe lower bounds, because draws were not counted."""
    neighbours: tuple[Neighbour, ...]
    tails: tuple[Tail, ...]
    datasets: tuple[Row, ...]
    evaluation: Evaluations | None
    ranks: RankShare | None
    phases: tuple[Phase, ...]
    buffer_effect: BufferEffect | None
    loaders: tuple[LoaderRestart, ...] = ()
    """Of frameworks whose loaders start over."""
    caution: str = ""
    """First line of the printed plan where the run serves something else than the target."""
    framework_version: str | None = None
    """Release of Megatron-LM whose rules hold."""
    ignored_settings: tuple[str, ...] = ()
    """Settings that concern the framework's data and change nothing in the plan."""
    dry_loaders: tuple[DryLoader, ...] = ()
    warnings: tuple[str, ...] = ()
    check_failures: tuple[str, ...] = ()
    """Reasons for which ``--check`` fails; empty: it passes."""

    def rows(self, split: str) -> list[Row]:
        """The rows of one split."""
        return [row for row in self.datasets if row.split == split]

    def to_json(self) -> dict[str, Any]:
        """One object of plain values, as ``--json`` prints it."""
        return {name: _plain(value) for name, value in vars(self).items()}


def epochs_text(count: int | None) -> str:
    """Return ``one epoch``, ``3 epochs`` or, for None, ``? epochs``."""
    if count is None:
        return "? epochs"
    return "one epoch" if count == 1 else f"{count} epochs"


def _plain(value: Any) -> Any:
    if hasattr(value, "to_json"):
        return _plain(value.to_json())
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if hasattr(value, "__dataclass_fields__"):
        return {key: _plain(item) for key, item in vars(value).items()}
    return value
