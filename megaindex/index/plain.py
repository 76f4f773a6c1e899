"""Numbers as callers give them, made plain: what is computed and stored goes on with Python's own.

An integer of NumPy wraps where Python's grows, a check computed in it wraps alike, and JSON takes
none; a float32 makes what it is multiplied by one too. So each entrance goes on with what these
functions return, not with what it was given.
"""

from __future__ import annotations

import contextlib
import math
import operator
import reprlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Literal

from megaindex.errors import InvalidArgument
from megaindex.kernels.sizes import INT32_MAX, INT64_MAX

DEFAULT_SEED = 1234
"""Of Megatron-LM, GPT-NeoX and megaindex."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100


def check_integer(name: str, value: object) -> int:
    """The plain int that ``value`` is.

    Raises:
        InvalidArgument: it only looks like an integer: 1.0 and "1" are none.
    """
    try:
        return int(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        raise InvalidArgument(
            f"{name} must be an integer, got {shown(value)} of type {type(value).__name__}"
        ) from None


def integer_or_none(name: str, value: object | None) -> int | None:
    """As `check_integer`, where None says that nothing was given."""
    return None if value is None else check_integer(name, value)


def make_plain(settings: object, *names: str, optional: Sequence[str] = ()) -> None:
    """Put plain integers in place of these fields of a frozen dataclass that is being made; of the
    optional ones None stays.

    Raises:
        InvalidArgument: a field is no integer.
    """
    for name in names:
        object.__setattr__(settings, name, check_integer(name, getattr(settings, name)))
    for name in optional:
        object.__setattr__(settings, name, integer_or_none(name, getattr(settings, name)))


def check_range(name: str, value: object, least: int, most: int = INT64_MAX) -> int:
    """The plain int that ``value`` is, from ``least`` to ``most``.

    Raises:
        InvalidArgument: it is no integer, or outside of these bounds.
    """
    number = check_integer(name, value)
    if not least <= number <= most:
        last = "2**32 - 1" if most == 2**32 - 1 else most
        rule = f"from {least} to {last}" if most > least + 1 else f"{least} or {most}"
        if most == INT64_MAX:
            rule = f"at least {least}" + (" and below 2**63" if number > most else "")
        raise InvalidArgument(f"{name} must be {rule}, got {shown(number)}")
    return number


def check_sequence_length(name: str, value: object) -> int:
    """Tokens per sample; it is stored in int32."""
    return check_range(name, value, 1, INT32_MAX - 1)


def check_seed(name: str, value: object) -> int:
    """The seed of an order, as NumPy's legacy generator takes it."""
    return check_range(name, value, 0, 2**32 - 1)


def check_choice(name: str, value: object, choices: Sequence[str]) -> str:
    """One of these words.

    Raises:
        InvalidArgument: it is another one, or no text.
    """
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
    return value


def check_flag(name: str, value: object) -> bool:
    """True or False; numbers are neither.

    Raises:
        InvalidArgument: it is something else.
    """
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # also NumPy's
        return bool(value)
    raise InvalidArgument(f"{name} must be True or False, got {shown(value)}")


def check_share(name: str, value: object) -> float:
    """A number from 0 to 1.

    Raises:
        InvalidArgument: it is none, or outside of these bounds.
    """
    number = check_number(name, value)
    if not 0 <= number <= 1:
        raise InvalidArgument(f"{name} must be from 0 to 1, got {number}")
    return number


def check_number(name: str, value: object) -> float:
    """The plain, finite float that ``value`` is.

    Raises:
        InvalidArgument: it is none, not a number (nan), or infinite.
    """
    try:
        number = math.nan if isinstance(value, (str, bytes)) else float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise InvalidArgument(
            f"{name} must be a finite number, got {shown(value)} of type {type(value).__name__}"
        )
    return number


def check_buffer(name: str, value: object) -> float | Literal["exact"]:
    """A variance buffer: a finite number from 1, or ``"exact"``.

    Raises:
        InvalidArgument: it is neither.
    """
    if isinstance(value, str):
        if value == "exact":
            return "exact"
    else:
        with contextlib.suppress(InvalidArgument):
            number = check_number(name, value)
            if number >= 1:
                return number
    raise InvalidArgument(f"{name} must be a number >= 1 or exact, got {shown(value)}; 1.0 is none")


def check_exact(name: str, value: object) -> int | float | Fraction:
    """A finite number as plain as it is exact: integers stay such, and fractions.

    Raises:
        InvalidArgument: as `check_number`.
    """
    number = check_number(name, value)
    if isinstance(value, Fraction):
        return Fraction(int(value.numerator), int(value.denominator))
    return operator.index(value) if hasattr(value, "__index__") else number


def check_fraction(name: str, value: object) -> Fraction:
    """The fraction that ``value`` is as written: of the float 0.1 a tenth.

    Raises:
        InvalidArgument: it is no number.
    """
    if isinstance(value, Fraction):
        return Fraction(int(value.numerator), int(value.denominator))
    try:
        return Fraction(operator.index(value))  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        return parse_fraction(str(value))
    except ValueError:
        raise InvalidArgument(
            f"{name} must be a number or a fraction, got {shown(value)} of type "
            f"{type(value).__name__}"
        ) from None


def check_epochs(name: str, value: object) -> Fraction:
    """A number of epochs, exactly as it is written: ``1.5``, ``"3/2"`` or ``2``.

    Raises:
        InvalidArgument: it is no number, or not positive.
    """
    try:
        epochs = parse_fraction(str(value))
    except ValueError:
        epochs = Fraction(0)
    if epochs <= 0:
        raise InvalidArgument(
            f"{name} must be a positive number such as 1, 1.5 or 3/2, got {shown(value)}"
        )
    return epochs


def parse_fraction(text: str) -> Fraction:
    """``1.5``, ``3/2`` or ``2`` exactly.

    Raises:
        ValueError: not a number, or with an exponent that would take all memory to write out.
    """
    if len(text.lower().partition("e")[2]) > 4:
        raise ValueError(f"{text!r} has an exponent of more than four characters")
    try:
        return Fraction(text.strip())
    except ZeroDivisionError:
        raise ValueError(f"{text!r} divides by zero") from None


def shown(value: object) -> str:
    """A value in a message, cut where it is long or deep."""
    try:
        return _SHORT.repr(value)
    except ValueError:  # Python writes no integer of more than 4300 digits
        return f"a value of type {type(value).__name__} that is too long to write"
