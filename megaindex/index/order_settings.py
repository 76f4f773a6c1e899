"""Orders and their settings, as `megaindex.build_index` takes them for ``order``.

An order is given by its name, which stands for its default settings, or as an object:

>>> build_index("data/web", sequence_length=2048, order=EpochOrder(epochs_mixed=2))

Each class has the settings that have a meaning in its order. What a framework does by default is
its row in `megaindex.index.frameworks`. A wrong value is an InvalidArgument.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias

from megaindex.errors import InvalidArgument
from megaindex.index.frameworks import FinalEpochPolicy, FrameworkRules, LeftOver, framework_rules
from megaindex.validation import check_between, check_choice, check_flag, check_share

if TYPE_CHECKING:
    from megaindex.format import IndexedDataset

PackImpl: TypeAlias = Literal["unpacked", "pack_until_overflow"]


@dataclass(frozen=True, kw_only=True)
class Order:
    """Base class of the orders."""

    name: ClassVar[str]
    """The order's name, which messages, cache keys and plans show."""
    lacks: ClassVar[tuple[str, ...]] = ()
    """Parameters of `build_index` without a meaning in this order."""

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
        """All settings, by their names."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def changed_settings(self) -> dict[str, Any]:
        """Settings with another value than their default."""
        row = framework_rules(self.name)
        default = {f.name: f.default or getattr(row, f.name, None) for f in fields(self)}
        return {k: v for k, v in self.settings.items() if v != default[k]}

    @property
    def row(self) -> FrameworkRules:
        """The framework's rules, with these settings in force."""
        row = framework_rules(self.name)
        return replace(row, **{k: v for k, v in self.settings.items() if hasattr(row, k)})


@dataclass(frozen=True, kw_only=True)
class FrameworkOrder(Order):
    """Settings of the orders whose samples are cut from shuffled documents and kept in arrays.

    Args:
        separate_final_epoch: whether the last of several epochs is shuffled apart: ``"always"``,
            ``"never"``, or ``"auto"``, if fewer of its samples are asked for than the threshold
            (`GPTDataset` of Megatron-LM). Default: what the framework does.
        final_epoch_threshold: from 0 to 1, the share of an epoch below which auto shuffles it
            apart. Default: 0.8, as in Megatron-LM.
        exact_num_epochs: build so many epochs, of whose last ``num_samples`` decides the shuffle
            (``--train-data-exact-num-epochs`` of Megatron-DeepSpeed). Default: as many as hold
            the samples.
    """

    separate_final_epoch: FinalEpochPolicy | None = None
    final_epoch_threshold: float | None = None
    exact_num_epochs: int | None = None
    lacks: ClassVar[tuple[str, ...]] = ("source_name",)


@dataclass(frozen=True, kw_only=True)
class MegatronOrder(FrameworkOrder):
    """Order of Megatron-LM; see `FrameworkOrder` for the settings."""

    name: ClassVar[str] = "megatron"


@dataclass(frozen=True, kw_only=True)
class MegatronLegacyOrder(FrameworkOrder):
    """Order of Megatron-DeepSpeed and Megatron-LM before 2023; see `FrameworkOrder`."""

    name: ClassVar[str] = "megatron-legacy"


@dataclass(frozen=True, kw_only=True)
class NeoxOrder(FrameworkOrder):
    """Order of GPT-NeoX with ``pack_impl: packed``, its default; see `FrameworkOrder`."""

    name: ClassVar[str] = "neox"


@dataclass(frozen=True, kw_only=True)
class PaddleOrder(FrameworkOrder):
    """Order of PaddleNLP; see `FrameworkOrder` for the settings."""

    name: ClassVar[str] = "paddlenlp"


@dataclass(frozen=True, kw_only=True)
class NeoxDocumentsOrder(Order):
    """Samples of whole documents, GPT-NeoX's other two values of ``pack_impl``.

    The number of samples decides the order of all, so ``num_samples`` must be given.

    Args:
        pack_impl: ``"unpacked"`` makes each document a sample, ``"pack_until_overflow"`` as many
            as fit.
        allow_chopped: False leaves out documents that are longer than a sample.
        label_dataset: the pair with one label for each token; documents whose labels are all -100,
            as far as a sample reads them, are left out.
        next_token: False serves documents alone, where GPT-NeoX adds the first token of the next
            one as far as there is room.
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
        """Return the samples asked for; refuses epochs in place of them."""
        if num_samples is None or num_samples < 1:
            raise InvalidArgument(
                f"pack_impl {self.pack_impl} has no epochs: how many samples it shuffles decides "
                f"the order of all; give num_samples, at least 1, not {num_samples}"
            )
        return num_samples


@dataclass(frozen=True, kw_only=True)
class EpochOrder(Order):
    """Every epoch a complete pass, computed and never stored; see `megaindex.index.orders.epoch`.

    Args:
        epochs_mixed: complete epochs that are shuffled together.
        left_over: ``"drop"`` the tokens at the end of an epoch that fill no sample, or ``"carry"``
            them into the next.
    """

    epochs_mixed: int = 1
    left_over: LeftOver = "drop"
    name: ClassVar[str] = "epoch"
    lacks: ClassVar[tuple[str, ...]] = ("drop_last_partial",)


@dataclass(frozen=True, kw_only=True)
class WindowOrder(Order):
    """Contiguous windows of the ``.bin``, shuffled anew every epoch; it has no settings."""

    name: ClassVar[str] = "window"
    lacks: ClassVar[tuple[str, ...]] = ("drop_last_partial",)


def _check_pack_impl(name: str, value: object) -> str:
    if value == "packed":
        raise InvalidArgument(f"{name} packed cuts documents, which is order NeoxOrder; give that")
    return str(check_choice(name, value, ("unpacked", "pack_until_overflow")))


_KINDS: tuple[type[Order], ...] = (
    MegatronOrder, NeoxOrder, MegatronLegacyOrder, PaddleOrder, EpochOrder, WindowOrder,
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
}


def order_of(order: str | Order) -> Order:
    """Return the order, with its default settings where only its name is given."""
    return order if isinstance(order, Order) else _kind(order)()


def order_of_row(row: FrameworkRules) -> Order:
    """Return the order whose settings are those of a row."""
    kind = _kind(row.order)
    return kind(**{field.name: getattr(row, field.name) for field in fields(kind)})


def make_order(
    name: str, settings: Mapping[str, Any], words: Mapping[str, str] | None = None
) -> Order:
    """The order of a name, with settings as flags and files give them: None for those not given.

    A setting without a meaning in the order is refused. ``words``: what the user calls a setting.
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
    """Refuse parameters of `build_index` that were given and mean nothing in an order."""
    for name in order.lacks:
        if given[name]:
            having = [kind.name for kind in _KINDS if name not in kind.lacks]
            raise _without_meaning(name, having, str(order))


def _kind(name: str) -> type[Order]:
    order = framework_rules(name).order
    return next(kind for kind in _KINDS if kind.name == order)


def _without_meaning(word: str, having: list[str], order: str) -> InvalidArgument:
    return InvalidArgument(
        f"{word} is a setting of order {' and '.join(having)}, the order is {order}; leave it out, "
        "or choose another order"
    )
