"""Log lines and `status` of the adapters: the datasets that megaindex or the framework serves.

Lines are logged by the logger ``megaindex`` at level INFO, on rank 0 and not in the workers of a
DataLoader. For GPT-NeoX, which configures no logging, they are printed if the level hides them.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from megaindex.loader.waits import TimedBatches, Waits
from megaindex.validation import count_of

if TYPE_CHECKING:
    from megaindex.index.balance import CostModel

logger = logging.getLogger("megaindex")


class ServedDataset(NamedTuple):
    """One dataset, or the data loader of training, and the code that serves it.

    Attributes:
        framework: framework whose adapter made the record.
        kind: class of the dataset, or ``data loader``.
        name: name of the dataset.
        served_by: ``megaindex``, or the framework.
        how: ``built`` or ``opened``, ``balanced`` for a data loader; or the reason for which it was
            left to the framework.
        samples: number of samples; None: unknown.
        epochs: number of epochs; None: unknown.
        seconds: time of building or opening; None: not measured.
        cache: common prefix of the names of its files; None where it has no files.
        detail: of a balanced data loader: number of ranks and cost model; else empty.
    """

    framework: str
    kind: str
    name: str
    served_by: str
    how: str
    samples: int | None = None
    epochs: int | None = None
    seconds: float | None = None
    cache: str | None = None
    detail: str = ""

    def __str__(self) -> str:
        if self.served_by != "megaindex":
            return f"{self.kind} {self.name}: left to {self.served_by}, {self.how}"
        size = "" if self.samples is None else f" {count_of(self.samples, 'sample')}"
        epochs = "" if self.epochs is None else f", {count_of(self.epochs, 'epoch')}"
        seconds = "" if self.seconds is None else f" in {self.seconds:.2f} s"
        where = ""
        if self.how in _PLACES:
            cached = self.cache is not None
            where = f", {_PLACES[self.how]} {self.cache}" if cached else ", in memory"
        detail = f", {self.detail}" if self.detail else ""
        return f"{self.kind} {self.name}: {self.how}{size}{epochs}{seconds}{where}{detail}"


_TRAINING_LOADER = ("data loader", "train")
_PLACES = {"built": "into", "opened": "from"}


@dataclass(frozen=True)
class Status:
    """The adapters that are installed, and the datasets that were made under them.

    Attributes:
        installed: for each framework its version and the settings of `install`.
        datasets: records of the datasets, the oldest first.
        waits: for each framework the time that training in this process waited for its batches.
    """

    installed: dict[str, str]
    datasets: tuple[ServedDataset, ...]
    waits: dict[str, Waits]

    def __str__(self) -> str:
        active = [f"{framework}: {how}" for framework, how in self.installed.items()]
        lines = active or ["megaindex is installed under no framework"]
        waited = [f"  {name}: {each}" for name, each in self.waits.items() if each.steps]
        return "\n".join([*lines, *(f"  {served}" for served in self.datasets), *waited])


def status() -> Status:
    """Return the installed adapters, and for every dataset made since then the code that serves it:
    megaindex or, with the reason, the framework."""
    present = [reports for reports in _ALL if reports.active is not None]
    return Status(
        installed={reports.framework: str(reports.active) for reports in present},
        datasets=tuple(served for reports in present for served in reports.recorded()),
        waits={reports.framework: reports.waits for reports in present},
    )


def wrap_iterations(owner: Any, wrap: Callable[[Iterator[Any]], Iterator[Any]]) -> None:
    """Wrap the iterators of one object, such as a DataLoader.

    It becomes an instance of a subclass of its class, since special methods are not looked up on
    instances.
    """
    cls = type(owner)
    facts = {"__iter__": lambda self: wrap(iter(cls.__iter__(self))), "__module__": cls.__module__}
    owner.__class__ = type(cls.__name__, (cls,), facts)


class Reports:
    """The lines and the record of one framework's adapter."""

    def __init__(self, framework: str, show: Callable[[str], object] | None = None) -> None:
        """``show`` prints a line where the logger's level hides it; None: it stays hidden."""
        self.framework = framework
        self.active: str | None = None
        self.rows: dict[tuple[str, str, str], ServedDataset] = {}
        self.waits = Waits()
        self._show = show
        self._was_announced = False

    def begin(self, framework_version: str, settings: str) -> None:
        """Start an empty record, and log that megaindex is active."""
        from megaindex import __version__

        before = self.active
        self.active = f"megaindex {__version__} is active under {framework_version}{settings}"
        self.rows.clear()
        self.waits = Waits()
        self._was_announced = self._was_announced and self.active == before
        self._announce()

    def end(self) -> None:
        """Clear the record."""
        self.active = None
        self._was_announced = False
        self.rows.clear()

    def recorded(self) -> list[ServedDataset]:
        """Return all records, the oldest first."""
        return list(self.rows.values())

    def serve(self, kind: str, name: str, how: str, **facts: Any) -> None:
        """Record a dataset that megaindex serves."""
        self.serve_each([ServedDataset(self.framework, kind, name, "megaindex", how, **facts)])

    def serve_each(self, rows: Sequence[ServedDataset], summary: str = "") -> None:
        """Record datasets that megaindex serves, in one log record: a line for each, a summary."""
        self.rows |= {(row.kind, row.name, row.cache or ""): row for row in rows}
        if self._is_logged():
            lines = [*map(str, rows), *([summary] if summary else [])]
            self._log("\n".join(f"megaindex: {line}" for line in lines))

    def measure(self, loader: Any, batches_of_step: Callable[[], int]) -> None:
        """Add to `waits` what the iterations of a DataLoader wait.

        Args:
            loader: a DataLoader of torch, see `wrap_iterations`.
            batches_of_step: function that returns the batches of the step that begins.
        """
        waits = self.waits
        wrap_iterations(loader, lambda batches: TimedBatches(batches, waits, batches_of_step))

    def replace(self, names: Iterable[str]) -> None:
        """Record functions of the framework that other modules had imported by name."""
        rows = [
            ServedDataset(self.framework, "function", name, "megaindex", "replaced")
            for name in names
        ]
        if rows:
            self.serve_each(rows)

    def balance(self, samples: int, ranks: int, cost: CostModel) -> None:
        """Record, and log once, that the steps of the training loader are balanced."""
        kind, name = _TRAINING_LOADER
        detail = f"{count_of(ranks, 'rank')}, cost model {cost.linear}:{cost.attention}"
        row = ServedDataset(
            self.framework, kind, name, "megaindex", "balanced", samples=samples, detail=detail
        )
        if self.rows.get((kind, name, "")) != row:
            self.serve_each([row])

    def leave_in_order(self) -> None:
        """Record, and log once, that the cost model leaves the training loader as it is."""
        reason = "all rows are equal work, since the cost model has attention 0"
        self.leave(*_TRAINING_LOADER, reason)

    def leave(self, kind: str, name: str, reason: str) -> None:
        """Record, and log once, that the framework's own code serves a dataset."""
        key = kind, name, reason
        if key in self.rows:
            return
        self.rows[key] = row = ServedDataset(self.framework, kind, name, self.framework, reason)
        if self._is_logged():
            self._log(f"megaindex: {row}")

    def _announce(self) -> None:
        if not self._was_announced and self._is_logged():
            self._was_announced = True
            self._log(str(self.active))

    def _is_logged(self) -> bool:
        return (self._show is not None or logger.isEnabledFor(logging.INFO)) and on_rank_0()

    def _log(self, text: str) -> None:
        if self.active is not None:  # False for classes that are used without `install`
            self._announce()
        if logger.isEnabledFor(logging.INFO):
            logger.info("%s", text)
        elif self._show is not None:
            self._show(text)


def on_rank_0() -> bool:
    """Return whether this process is rank 0 of its job, and not a worker of a DataLoader."""
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "distributed"):
        if torch.utils.data.get_worker_info() is not None:
            return False
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return bool(torch.distributed.get_rank() == 0)
    return os.environ.get("RANK", "0") == "0"


MEGATRON = Reports("Megatron")
NEOX = Reports("GPT-NeoX", functools.partial(print, flush=True))
_ALL = (MEGATRON, NEOX)
