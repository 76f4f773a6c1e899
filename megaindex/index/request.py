"""What is asked of an index: checked, and its length in samples and epochs."""

from __future__ import annotations

from fractions import Fraction

from megaindex.errors import InvalidArgument
from megaindex.index.arithmetic import (
    INT32_MAX,
    INT64_MAX,
    samples_for_epochs,
)
from megaindex.index.dialect import DIALECTS
from megaindex.index.plain import check_integer, parse_fraction

_FRAMEWORKS = tuple(order for order, row in DIALECTS.items() if row.is_framework)
_SETTINGS = {
    "separate_final_epoch": _FRAMEWORKS,
    "final_epoch_threshold": _FRAMEWORKS,
    "exact_num_epochs": _FRAMEWORKS,
    "drop_last_partial": _FRAMEWORKS,
    "epochs_mixed": ("epoch",),
    "left_over": ("epoch",),
    "source_name": ("epoch", "window"),
    "pack_impl": ("neox",),
}


def check_integers(sequence_length: int, seed: int, add_extra_token: int) -> tuple[int, int, int]:
    """The three as plain integers; refuses what is out of range, or no integer, in every order."""
    sequence_length = check_integer("sequence_length", sequence_length)
    seed = check_integer("seed", seed)
    add_extra_token = check_integer("add_extra_token", add_extra_token)
    if not 1 <= sequence_length < INT32_MAX:
        raise InvalidArgument(
            f"sequence_length must be from 1 to {INT32_MAX - 1}, got {sequence_length}"
        )
    if not 0 <= seed < 2**32:
        raise InvalidArgument(f"seed must be from 0 to 2**32 - 1, got {seed}")
    if add_extra_token not in (0, 1):
        raise InvalidArgument(f"add_extra_token must be 0 or 1, got {add_extra_token!r}")
    return sequence_length, seed, add_extra_token


def check_one_sample(name: str, tokens: int, sequence_length: int, extra: int) -> None:
    """Refuses documents that together hold less than one sample."""
    if tokens < sequence_length + extra:
        raise InvalidArgument(
            f"{name}: the documents hold {tokens} tokens, one sample needs "
            f"{sequence_length + extra} (sequence_length {sequence_length} + {extra} for the "
            "shifted label); use more documents or a smaller sequence_length"
        )


def check_total(name: str, tokens: int) -> None:
    """Refuses more tokens than any array can count."""
    if tokens > INT64_MAX:
        raise InvalidArgument(
            f"{name}: the epochs asked for hold {tokens} tokens, more than 2**63 - 1; ask for fewer"
        )


def check_settings(order: str, **given: bool) -> None:
    """Refuses settings that mean nothing in an order."""
    for setting, is_given in given.items():
        orders = _SETTINGS[setting]
        if is_given and order not in orders:
            raise InvalidArgument(
                f"{setting} is a setting of order {' and '.join(orders)}, the order is {order}; "
                "leave it out, or choose another order"
            )


def samples_asked(
    num_samples: int | None, wanted: Fraction, tokens: int, sequence_length: int, extra: int
) -> int:
    """Samples asked for, where ``wanted`` is what was asked in epochs."""
    if num_samples is not None:
        return num_samples
    return samples_for_epochs(wanted, tokens, sequence_length, extra)


def epochs_asked(num_samples: int | None, epochs: int | float | str | Fraction | None) -> Fraction:
    """Epochs asked for; the length of the run is ``num_samples`` where that is given."""
    if num_samples is not None and epochs is not None:
        raise InvalidArgument("num_samples and epochs both set the length; give one of them")
    if num_samples is not None and num_samples < 1:
        raise InvalidArgument(f"num_samples must be at least 1, got {num_samples}")
    try:
        wanted = parse_fraction("1" if epochs is None else str(epochs))
    except ValueError:
        wanted = Fraction(0)
    if wanted <= 0:
        raise InvalidArgument(
            f"epochs must be a positive number such as 1, 1.5 or 3/2, got {epochs!r}"
        )
    return wanted
