"""Settings of `install`, and the replacement of a framework's names, now or at their import."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel, check_balance
from megaindex.index.blend import Blend
from megaindex.index.frameworks import FrameworkRules, framework_rules
from megaindex.index.order_settings import make_order
from megaindex.index.skips import Skip, given_skips
from megaindex.validation import check_buffer, shown

if TYPE_CHECKING:
    from megaindex.adapters.locked_run import LockedRun
    from megaindex.lock.lock_file import Lock
    from megaindex.settings.amended import AmendedBlend

_ABSENT: Any = object()


class Patches:
    """Replacements that are undone together; false if empty."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def __bool__(self) -> bool:
        return bool(self._undo)

    def replace(self, owner: Any, name: str, value: object) -> None:
        """Set an attribute of a module or a class, where `undo` restores or deletes it."""
        before = _names(owner).get(name, _ABSENT)
        _restore(owner, name, value)
        self._undo.append(partial(_restore, owner, name, before))

    def replace_all(self, replacements: Mapping[int, object]) -> list[str]:
        """Replace objects, given by their ids, in every loaded module that holds them.

        Returns:
            ``MODULE.NAME`` of each that was replaced.
        """
        found = []
        for module_name, module in list(sys.modules.items()):
            # modules that load others on access, or raise, are read without their own code
            if not issubclass(type(module), ModuleType) or module_name.startswith("megaindex."):
                continue
            held = dict(_names(module))  # nearly every module has none of them
            if replacements.keys().isdisjoint(map(id, held.values())):
                continue
            for name, value in held.items():
                if id(value) in replacements:
                    self.replace(module, name, replacements[id(value)])
                    found.append(f"{module_name}.{name}")
        return found

    def replace_module(self, name: str, module: ModuleType) -> None:
        """Make ``import name`` give another module."""
        before = sys.modules.get(name, _ABSENT)
        sys.modules[name] = module
        self._undo.append(partial(_restore_module, name, before))

    def undo(self) -> None:
        """Undo the replacements in reverse order."""
        while self._undo:
            self._undo.pop()()


def _names(owner: Any) -> Any:
    """Return the names of a module or a class, of a module those that may be changed."""
    is_module = issubclass(type(owner), ModuleType)
    return _MODULE_NAMES.__get__(owner) if is_module else vars(owner)


_MODULE_NAMES: Any = vars(ModuleType)["__dict__"]


def _restore(owner: Any, name: str, before: object) -> None:
    if issubclass(type(owner), ModuleType):
        _names(owner).pop(name, None)
        if before is not _ABSENT:
            _names(owner)[name] = before
    elif before is _ABSENT:
        delattr(owner, name)
    else:
        setattr(owner, name, before)


def _restore_module(name: str, before: Any) -> None:
    if before is _ABSENT:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = before


def after_import(name: str, callback: Callable[[ModuleType], None]) -> Callable[[], None]:
    """Call ``callback(module)`` when the module ``name`` is imported, or now if it was.

    Returns:
        A function that cancels the call.
    """
    if name in sys.modules:
        callback(sys.modules[name])
        return lambda: None
    finder = _Finder(name, callback)
    sys.meta_path.insert(0, finder)
    return finder.withdraw


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that asks the other finders for one module and wraps its loader."""

    def __init__(self, name: str, callback: Callable[[ModuleType], None]) -> None:
        self._name = name
        self._callback = callback

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,  # noqa: ARG002
        target: ModuleType | None = None,  # noqa: ARG002
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != self._name:
            return None
        self.withdraw()  # so that the search below does not come back here
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ModuleLoader(spec.loader, self._callback)
        return spec

    def withdraw(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)


class _ModuleLoader(importlib.abc.Loader):
    def __init__(
        self, loader: importlib.abc.Loader, callback: Callable[[ModuleType], None]
    ) -> None:
        self._loader = loader
        self._callback = callback

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._callback(module)


@dataclass(frozen=True, kw_only=True)
class Policy:
    """The samples requested of each source, and the shuffling of its epochs."""

    variance_buffer: float | Literal["exact"] | None
    """None: the framework's own."""
    row: FrameworkRules
    """Rules of the framework's order, with the final epoch of `install`."""
    balance: CostModel | None = None
    """Cost model by which each step's samples are assigned to the ranks."""
    skip: tuple[Skip, ...] = ()
    """Steps that are not trained on, and documents whose loss is masked."""
    lock: LockedRun | None = None
    """Lock that the datasets must agree with."""
    amend: AmendedBlend | None = None
    """Training data as the run began, and the changes of its blend."""
    keys: bool | Literal["wide"] = False
    """Give the rows of micro batches."""

    @functools.cached_property
    def final_epoch(self) -> dict[str, Any]:
        """Settings of the final epoch that differ from the framework's, by name."""
        if self.row == framework_rules(self.row.order):
            return {}
        settings: dict[str, Any] = {"separate_final_epoch": self.row.separate_final_epoch}
        if self.row.separate_final_epoch == "auto":
            settings["final_epoch_threshold"] = self.row.final_epoch_threshold
        return settings

    @functools.cached_property
    def mark(self) -> str:
        """Suffix of the names of arrays; empty where the final epoch is the framework's."""
        values = self.final_epoch.values()
        return "_".join(["", "final", *map(str, values)]) if values else ""

    def enlarged(self, num_samples: int | None) -> int | None:
        """Return the samples requested of a path outside a blend, with a numeric buffer."""
        buffer = self.variance_buffer
        if num_samples is None or buffer is None or isinstance(buffer, str):
            return num_samples
        return math.ceil(num_samples * buffer)

    def blend(self, weights: Sequence[float], *, explicit: bool) -> Blend:
        """Return the blend by a variance buffer of `install`; its draws are counted."""
        buffer = self.variance_buffer
        assert buffer is not None, "without a buffer the framework's own function is used"
        return Blend(
            row=self.row, weights=weights, explicit=explicit, buffer=buffer, counting="exact"
        )

    def __str__(self) -> str:
        """Return the settings that differ from the framework's, each after a comma."""
        changed: dict[str, Any] = {}
        if self.variance_buffer is not None:
            changed["variance_buffer"] = self.variance_buffer
        changed.update(self.final_epoch)
        if self.balance is not None:
            changed["balance"] = f"{self.balance.linear}:{self.balance.attention}"
        if self.skip:
            changed["skip"] = f"of {len(self.skip)} entr{'y' if len(self.skip) == 1 else 'ies'}"
        if self.lock is not None:
            changed["checked by"] = str(self.lock)
            changed["identity"] = self.lock.identity
        if self.keys:
            changed["keys"] = self.keys
        if self.amend is not None:
            changed["amended at samples"] = " ".join(
                str(change.consumed_samples) for change in self.amend.changes
            )
        return "".join(f", {name} {value}" for name, value in changed.items())


def make_policy(
    order: str,
    variance_buffer: object | None = None,
    separate_final_epoch: Any = None,
    final_epoch_threshold: Any = None,
    balance: object = None,
    skip: Any = None,
    lock: str | os.PathLike[str] | Lock | None = None,
    amend: str | os.PathLike[str] | AmendedBlend | None = None,
    keys: bool | Literal["wide"] = False,
) -> Policy:
    """Check the settings of `install`.

    Raises:
        InvalidArgument: a buffer below 1, an unknown policy, a threshold that is not from 0 to 1
            or has no effect, a balance that is not a CostModel, the lock of another run, changes
            that are wrong.
        FormatError, StorageError: the lock is damaged, or a file cannot be read.
    """
    settings = {
        "separate_final_epoch": separate_final_epoch,
        "final_epoch_threshold": final_epoch_threshold,
    }
    if skip and lock is not None:
        raise InvalidArgument(
            "lock and skip exclude each other: a lock holds the skips of its run; lock the run "
            "with these skips, and give the lock alone"
        )
    if amend is not None and lock is not None:
        raise InvalidArgument(
            "lock and amend exclude each other: a lock holds the changes of its run, and megaindex "
            "does not compare them with those of a framework; leave one of them out"
        )
    row = make_order(order, settings).row
    if final_epoch_threshold is not None and row.separate_final_epoch != "auto":
        raise InvalidArgument(
            f"final_epoch_threshold {final_epoch_threshold} has no effect with "
            f"separate_final_epoch {row.separate_final_epoch}; use auto, or leave it out"
        )
    locked = None
    if lock is not None:
        from megaindex.adapters.locked_run import LockedRun  # which loads the orders and builders

        locked = LockedRun(lock, order)
    if amend is not None:
        from megaindex.settings.amended import AmendedBlend

        if not isinstance(amend, (str, os.PathLike, AmendedBlend)):
            raise InvalidArgument(
                f"amend must be an AmendedBlend or the path of a YAML file, got {shown(amend)}"
            )
        amend = amend if isinstance(amend, AmendedBlend) else AmendedBlend.read(amend)
        if not amend.changes:
            raise InvalidArgument(
                "amend: consumed_samples extends a run, which the frameworks' data cannot; give "
                "changes, or train on the index of megaindex.extend_run"
            )
    return Policy(
        variance_buffer=(
            None if variance_buffer is None else check_buffer("variance_buffer", variance_buffer)
        ),
        row=row,
        balance=check_balance(balance),
        skip=given_skips(skip) if locked is None else locked.skip,
        lock=locked,
        amend=amend,
        keys=keys,
    )
