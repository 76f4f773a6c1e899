"""Orders and their settings, for the parameter ``order`` of `megaindex.build_index`.

An order is given by its name, with default settings, or as an object:

>>> build_index("data/web", sequence_length=2048, order=EpochOrder(epochs_mixed=2))

Defaults are those of the framework (`megaindex.index.frameworks`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import (
    LONG_DOCUMENTS,
    PYTHON_SUMS,
    FinalEpochPolicy,
    FrameworkRules,
    LeftOver,
    LongDocuments,
    PythonSum,
    framework_rules,
)
from megaindex.validation import check_between, check_choice, check_flag, check_share

if TYPE_CHECKING:
    from megaindex.format import IndexedDataset

PackImpl: TypeAlias = Literal["unpacked", "pack_until_overflow"]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Base class of the orders. Settings are checked; a wrong value raises InvalidArgument."""

    name: ClassVar[str]
    """Name in messages, cache keys and plans."""
    lacks: ClassVar[tuple[str, ...]] = ()
    """Parameters of `build_index` that the order does not have."""

    def __post_init__(self) -> None:
        row = framework_rules(self.name)
        for field in fields(self):
            name, value = field.name, getattr(self, field.name)
            if value is None and field.default is None:
                value = getattr(row, name, None)
            elif name in _CHECKS:
                value = _CHECKS[name](name, value)
            object.__setattr__(self, name, value)

    def __str__(self) -> str:
        return self.name

    @property
    def settings(self) -> dict[str, Any]:
        """Values of all settings, by name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def changed_settings(self) -> dict[str, Any]:
        """Settings that differ from their defaults, and the interpreter's, which has none."""
        row = framework_rules(self.name)
        default = {f.name: f.default or getattr(row, f.name, None) for f in fields(self)}
        return {k: v for k, v in self.settings.items() if v != default[k] or k == "python_sum"}

    @property
    def row(self) -> FrameworkRules:
        """Rules of the framework with these settings."""
        row = framework_rules(self.name)
        return replace(row, **{k: v for k, v in self.settings.items() if hasattr(row, k)})


@dataclass(frozen=True, kw_only=True)
class FrameworkOrder(Order):
    """Settings common to the orders of the frameworks.

    Documents of all epochs are shuffled and concatenated, samples are cut from them and shuffled.
    The result is kept in document_index, sample_index and shuffle_index.
    """

    separate_final_epoch: FinalEpochPolicy | None = None
    final_epoch_threshold: float | None = None
    exact_num_epochs: int | None = None
    lacks: ClassVar[tuple[str, ...]] = ("source_name",)

    def __init_subclass__(cls) -> None:
        """Describe the settings in the docstring of each order."""
        own = _PYTHON_SUM if issubclass(cls, _SumsInPython) else ""
        cls.__doc__ = f"{cls.__doc__}\n    Attributes:\n{own}{_FRAMEWORK_SETTINGS}"


_PYTHON_SUM = """\
        python_sum: sum of weights and splits: ``"plain"`` as Python adds up to 3.11, or
            ``"compensated"``, from 3.12 on. Default: that of the Python that runs.
"""
_FRAMEWORK_SETTINGS = """\
        separate_final_epoch: ``"always"`` shuffles the last of several epochs separately,
            ``"never"`` with the others, ``"auto"`` separately if less than
            ``final_epoch_threshold`` of its samples are requested (``GPTDataset`` of megatron-core
            0.16.1). Default: the rule of the framework; never in GPT-NeoX, auto in the others.
        final_epoch_threshold: share of an epoch, 0 to 1. Default: 0.8, as in Megatron-LM.
        exact_num_epochs: number of epochs to build, at least 1 (``--train-data-exact-num-epochs``
            of Megatron-DeepSpeed). Default: as many as are needed for the requested samples.

    Raises:
        InvalidArgument: a value is out of range.
    """


@dataclass(frozen=True, kw_only=True)
class _SumsInPython(Order):
    """Orders whose weights or splits depend on the version of Python."""

    python_sum: PythonSum | None = None
    """``"plain"``: weights and splits are summed as Python does up to 3.11; ``"compensated"``: as
    from 3.12 on. Default: as the running Python does."""


@dataclass(frozen=True, kw_only=True)
class MegatronOrder(FrameworkOrder):
    """Order of Megatron-LM (megatron-core 0.16.1)."""

    name: ClassVar[str] = "megatron"


@dataclass(frozen=True, kw_only=True)
class MegatronLegacyOrder(FrameworkOrder, _SumsInPython):
    """Order of Megatron-DeepSpeed (main, 2025-07) and of Megatron-LM before 2023."""

    name: ClassVar[str] = "megatron-legacy"


@dataclass(frozen=True, kw_only=True)
class NeoxOrder(FrameworkOrder, _SumsInPython):
    """Order of GPT-NeoX (main, 2026-05) with its default ``pack_impl: packed``."""

    name: ClassVar[str] = "neox"


@dataclass(frozen=True, kw_only=True)
class PaddleOrder(FrameworkOrder, _SumsInPython):
    """Order of PaddleNLP (3.0.0b4)."""

    name: ClassVar[str] = "paddlenlp"


@dataclass(frozen=True, kw_only=True)
class NeoxDocumentsOrder(_SumsInPython):
    """Order of GPT-NeoX (main, 2026-05) with samples of whole documents.

    ``build_index`` needs ``num_samples`` with this order, because the number of samples decides
    their order.

    Args:
        python_sum: sum of weights and splits: ``"plain"`` as Python adds up to 3.11, or
            ``"compensated"``, from 3.12 on. Default: that of the Python that runs.
        pack_impl: ``"unpacked"``: one document per sample; ``"pack_until_overflow"``: as many as
            fit.
        allow_chopped: False omits documents longer than a sample.
        label_dataset: prefix of a pair, or open dataset, with one label for each token. Documents
            whose labels within a sample are all -100 are omitted.
        next_token: True: a sample with room left ends with the first token of the next document,
            as in GPT-NeoX; False: it does not.

    Raises:
        InvalidArgument: a value is not one of those above.
    """

    pack_impl: PackImpl
    allow_chopped: bool = True
    label_dataset: str | os.PathLike[str] | IndexedDataset | None = None
    next_token: bool = True
    name: ClassVar[str] = "neox"
    lacks: ClassVar[tuple[str, ...]] = ("source_name", "drop_last_partial", "add_extra_token")

    def __str__(self) -> str:
        return f"{self.name} with pack_impl {self.pack_impl}"

    def check_num_samples(self, num_samples: int | None) -> int:
        """Return the number of samples; InvalidArgument unless it is given and at least 1."""
        if num_samples is None or num_samples < 1:
            raise InvalidArgument(
                f"num_samples must be at least 1 with pack_impl {self.pack_impl}, got "
                f"{num_samples}; the number of samples decides their order, so give it in place of "
                "epochs"
            )
        return num_samples


@dataclass(frozen=True, kw_only=True)
class EpochOrder(Order):
    """Order of megaindex in which every epoch is a complete pass over the documents.

    Samples are computed from (seed, epoch, source name) when they are located; nothing is stored,
    and more epochs do not change earlier ones.

    Args:
        epochs_mixed: number of complete epochs shuffled together, at least 1.
        left_over: ``"drop"`` omits the tokens at the end of an epoch that fill no sample,
            ``"carry"`` reads them at the beginning of the next epoch.

    Raises:
        InvalidArgument: a value is out of range.
    """

    epochs_mixed: int = 1
    left_over: LeftOver = "drop"
    name: ClassVar[str] = "epoch"
    lacks: ClassVar[tuple[str, ...]] = ("drop_last_partial",)


@dataclass(frozen=True, kw_only=True)
class WindowOrder(Order):
    """Order of megaindex with contiguous windows of the ``.bin``, shuffled in every epoch.

    Samples are computed when they are located; nothing is stored. It has no settings.
    """

    name: ClassVar[str] = "window"
    lacks: ClassVar[tuple[str, ...]] = ("drop_last_partial",)


@dataclass(frozen=True, kw_only=True)
class PackedOrder(Order):
    """Order of megaindex with samples of whole documents, packed by best-fit decreasing.

    A document of L tokens gives L // S samples of its own and a piece of L mod S tokens; pieces
    share samples. The label of the last token of a document carries no loss. So every token is the
    input of one sample per epoch, except those that ``long_documents`` omits; what remains of a
    sample is padding. Which documents share a sample changes in every epoch. Not ``pack_impl:
    packed`` of GPT-NeoX, which is `NeoxOrder`.

    Args:
        max_documents: most pieces of documents in a sample. Default: a 32nd of the sequence length,
            at least 16.
        long_documents: ``"split"`` cuts documents longer than a sample as above, ``"truncate"``
            keeps their first S tokens, ``"skip"`` omits them.
        align: documents begin at multiples of it, which divides the sequence length, and are padded
            up to the next one: 2 x the context-parallel size, or a multiple of that.

    Raises:
        InvalidArgument: a value is out of range.
    """

    max_documents: int | None = None
    long_documents: LongDocuments = "split"
    align: int = 1
    name: ClassVar[str] = "packed"
    lacks: ClassVar[tuple[str, ...]] = ("drop_last_partial",)


def _check_pack_impl(name: str, value: object) -> str:
    if value == "packed":
        raise InvalidArgument(
            f"{name} must be unpacked or pack_until_overflow, got packed; use NeoxOrder for it"
        )
    return str(check_choice(name, value, ("unpacked", "pack_until_overflow")))


_KINDS: tuple[type[Order], ...] = (
    MegatronOrder, NeoxOrder, MegatronLegacyOrder, PaddleOrder, EpochOrder, WindowOrder,
    PackedOrder,
)  # fmt: skip
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "separate_final_epoch": partial(check_choice, choices=("auto", "always", "never")),
    "final_epoch_threshold": check_share,
    "exact_num_epochs": partial(check_between, least=1),
    "pack_impl": _check_pack_impl,
    "allow_chopped": check_flag,
    "next_token": check_flag,
    "epochs_mixed": partial(check_between, least=1),
    "left_over": partial(check_choice, choices=("drop", "carry")),
    "python_sum": partial(check_choice, choices=PYTHON_SUMS),
    "long_documents": partial(check_choice, choices=LONG_DOCUMENTS),
    "max_documents": partial(check_between, least=1),
    "align": partial(check_between, least=1),
}


def order_of(order: str | Order) -> Order:
    """Return the order; a name stands for its default settings."""
    return order if isinstance(order, Order) else _kind(order)()


def order_of_row(row: FrameworkRules) -> Order:
    """Return the order with the settings of a row."""
    kind = _kind(row.order)
    return kind(**{field.name: getattr(row, field.name) for field in fields(kind)})


def make_order(
    name: str, settings: Mapping[str, Any], words: Mapping[str, str] | None = None
) -> Order:
    """Return an order with the settings that are not None; ``words`` are their names in messages.

    Raises:
        InvalidArgument: the order does not have a setting, or its value is wrong.
    """
    kind, given = _kind(name), {k: value for k, value in settings.items() if value is not None}
    own = {field.name for field in fields(kind)}
    for setting, value in given.items():
        word = (words or {}).get(setting, setting)
        if setting not in own:
            having = [k.name for k in _KINDS if setting in {field.name for field in fields(k)}]
            raise _without_meaning(word, having, name)
        _CHECKS[setting](word, value)
    return kind(**given)


def check_parameters(order: Order, **given: bool) -> None:
    """Raise InvalidArgument if a given parameter of `build_index` is not one of the order."""
    for name in order.lacks:
        if given[name]:
            having = [kind.name for kind in _KINDS if name not in kind.lacks]
            raise _without_meaning(name, having, str(order))


def _kind(name: str) -> type[Order]:
    order = framework_rules(name).order
    return next(kind for kind in _KINDS if kind.name == order)


def _without_meaning(word: str, having: list[str], order: str) -> InvalidArgument:
    return InvalidArgument(
        f"{word} is a setting of order {_joined(having)}, the order is {order}; omit it or "
        "choose another order"
    )


def _joined(names: list[str]) -> str:
    return " and ".join((", ".join(names[:-1]), names[-1]) if len(names) > 1 else names)
