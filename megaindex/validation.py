"""Conversion and checks of arguments, and of the fields of checkpoints.

Public functions convert NumPy and other number-like arguments to Python numbers here, since NumPy
integers overflow, JSON cannot encode them and float32 spreads through arithmetic. The checks raise
InvalidArgument with the user's name of the value, ``name``: ``sequence_length``, ``--seq-length``
or ``run.yaml: sequence_length``.

A wrong field of a checkpoint raises FormatError with the field, the rule and the value.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
import reprlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Literal

from megaindex.arithmetic import INT32_MAX, INT64_MAX
from megaindex.errors import FormatError, InvalidArgument, MegaIndexError

DEFAULT_SEED = 1234
"""Default seed of Megatron-LM, GPT-NeoX and megaindex."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = 100
_LONGEST = 200  # characters of a value in a message


def check_integer(name: str, value: object, *, flags: bool = True) -> int:
    """Return an integer as a Python int; 1.0, "1" and, without ``flags``, bools are refused."""
    with contextlib.suppress(TypeError):
        if flags or not isinstance(value, bool):
            return int(operator.index(value))  # type: ignore[arg-type]
    raise InvalidArgument(
        f"{name} must be an integer, got {shown(value)} of type {type(value).__name__}"
    )


def check_kind(name: str, value: object, kind: type[Any], needed: str, remedy: str) -> None:
    """Check the class of a value; ``needed`` names it in the message."""
    if not isinstance(value, kind):
        raise InvalidArgument(f"{name} must be {needed}, got {shown(value)}; {remedy}")


def setting_or_none(setting: str, value: object | None, name: str = "") -> int | None:
    """Return None for None, else the result of `check_setting`."""
    return None if value is None else check_setting(setting, value, name)


def make_plain(
    settings: object,
    *names: str,
    optional: Sequence[str] = (),
    called: Callable[[str], str] = str,
) -> None:
    """Replace fields of a frozen dataclass by checked Python ints, in its ``__post_init__``.

    An ``optional`` field may be None. ``called`` returns the user's name of a field.
    """
    for name in (*names, *optional):
        value = getattr(settings, name)
        if value is not None or name in names:
            object.__setattr__(settings, name, check_setting(name, value, called(name)))


def check_between(
    name: str,
    value: object,
    least: int,
    most: int = INT64_MAX,
    *,
    most_is: str = "",
    error: type[MegaIndexError] = InvalidArgument,
) -> int:
    """Return an integer from ``least`` to ``most`` as a Python int.

    ``most_is`` explains the upper bound in the message.
    """
    number = check_integer(name, value)
    if not least <= number <= most:
        last = "2**32 - 1" if most == 2**32 - 1 else most
        rule = f"from {least} to {last}" if most != least + 1 else f"{least} or {most}"
        if most == INT64_MAX:
            rule = f"at least {least}" + (" and below 2**63" if number > most else "")
        raise error(f"{name} must be {rule}{most_is and ', '}{most_is}, got {shown(number)}")
    return number


_RANGES = {
    **dict.fromkeys(("sequence_length", "seq_length"), (1, INT32_MAX - 1)),
    "seed": (0, 2**32 - 1),
    "add_extra_token": (0, 1),
    **dict.fromkeys(
        ("num_samples", "more_samples", "planned_samples", "micro_batch_size", "batch_size",
         "data_parallel_size", "gradient_accumulation_steps", "global_batch_size", "world_size",
         "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size",
         "interval", "eval_interval", "eval_global_batch_size", "eval_micro_batch_size",
         "train_epochs", "points", "workers"),
        (1, INT64_MAX),
    ),
    **dict.fromkeys(
        ("iterations", "eval_iters", "start", "start_eval_at_iter", "consumed_samples"),
        (0, INT64_MAX),
    ),
}  # fmt: skip
"""Bounds of integer settings, the same in Python, on command lines and in files."""


def check_setting(setting: str, value: object, name: str = "") -> int:
    """Return an integer as a Python int, checked against the range of ``setting`` if it has one."""
    bounds = _RANGES.get(setting)
    word = name or setting
    return check_integer(word, value) if bounds is None else check_between(word, value, *bounds)


def check_choice(name: str, value: object, choices: Sequence[str]) -> Any:
    """Return ``value`` if it is one of ``choices``."""
    if not isinstance(value, str) or value not in choices:
        raise InvalidArgument(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
    return value


def check_text(name: str, value: object) -> str:
    """Return text that UTF-8 and a lock can hold."""
    if isinstance(value, str) and re.fullmatch("[^\0\ud800-\udfff]*", value):
        return value
    raise InvalidArgument(f"{name} must be text in UTF-8, got {shown(value)}")


def check_flag(name: str, value: object) -> bool:
    """Return a bool of Python or NumPy as a Python bool; numbers are refused."""
    if isinstance(value, bool) or type(value).__name__ in ("bool", "bool_"):  # names of NumPy
        return bool(value)
    raise InvalidArgument(f"{name} must be True or False, got {shown(value)}")


def check_share(name: str, value: object) -> float:
    """Return a number from 0 to 1 as a Python float."""
    number = check_number(name, value)
    if not 0 <= number <= 1:
        raise InvalidArgument(f"{name} must be from 0 to 1, got {number}")
    return number


def check_number(name: str, value: object) -> float:
    """Return a finite number as a Python float."""
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
    """Return a variance buffer: a finite number from 1, or ``"exact"``."""
    if isinstance(value, str):
        if value == "exact":
            return "exact"
    else:
        with contextlib.suppress(InvalidArgument):
            number = check_number(name, value)
            if number >= 1:
                return number
    raise InvalidArgument(
        f"{name} must be a number >= 1 or exact, got {shown(value)}; 1.0 adds no samples"
    )


def check_exact(name: str, value: object) -> int | float | Fraction:
    """Return a finite number without loss: a Python int, float or Fraction."""
    number = check_number(name, value)
    if isinstance(value, Fraction):
        return Fraction(int(value.numerator), int(value.denominator))
    return operator.index(value) if hasattr(value, "__index__") else number


def check_weight(name: str, value: object, *, zero: bool = False) -> int | float | Fraction:
    """Return the positive weight of a source without loss: a Python int, float or Fraction.

    With ``zero`` it may be 0.
    """
    with contextlib.suppress(InvalidArgument):
        weight = check_exact(name, value)
        if weight > 0 or (zero and weight == 0):
            return weight
    raise InvalidArgument(
        f"{name} must be positive and finite, got {shown(value)}; leave out a source with weight 0"
    )


def check_weights(
    name: str, values: Sequence[object], count: int, *, zero: bool = False
) -> list[Any]:
    """Return the weights of ``count`` sources, each checked by `check_weight`; not all are 0."""
    if len(values) != count:
        raise InvalidArgument(
            f"{name} must be {count_of(count, 'number')}, one for each source, got {len(values)}"
        )
    weights = [check_weight(f"{name}[{k}]", value, zero=zero) for k, value in enumerate(values)]
    if not any(weights):
        check_weight(f"{name}[0]", weights[0])  # one is positive
    check_number(f"the sum of {name}", sum(map(float, weights)))
    return weights


def check_fraction(name: str, value: object) -> Fraction:
    """Return the fraction that the decimal form of ``value`` denotes: for the float 0.1, 1/10."""
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
    """Return a positive number of epochs exactly as written: ``1.5``, ``"3/2"`` or ``2``."""
    try:
        epochs = parse_fraction(str(value))
    except ValueError:
        epochs = Fraction(0)
    if not 0 < epochs <= INT64_MAX:
        below = " below 2**63" if epochs > 0 else ""
        raise InvalidArgument(
            f"{name} must be a positive number{below} such as 1, 1.5 or 3/2, got {shown(value)}"
        )
    return epochs


def read_number(text: str) -> float | str:
    """Return the float in a text, or the text itself for a later check to refuse."""
    try:
        return float(text)
    except ValueError:
        return text


def parse_fraction(text: str) -> Fraction:
    """Return ``1.5``, ``3/2`` or ``2`` exactly.

    Raises:
        ValueError: not a number, or an exponent so long that the integer would fill the memory.
    """
    if len(text.lower().partition("e")[2]) > 4:
        raise ValueError(f"{text!r} has an exponent of more than four characters")
    try:
        return Fraction(text.strip())
    except ZeroDivisionError:
        raise ValueError(f"{text!r} divides by zero") from None


def shown(value: object) -> str:
    """Return the representation of a value for a message, shortened if it is long or nested."""
    try:
        text = _SHORT.repr(value)
        return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
    except ValueError:  # of an integer with more than 4300 digits
        return f"a value of type {type(value).__name__} that is too long to write"


_HEX = frozenset("0123456789abcdefABCDEF")


@dataclass(frozen=True)
class CheckpointReader:
    """Reader of the fields of a mapping in a checkpoint; wrong fields raise FormatError.

    ``what`` names the mapping in messages: ``the state of a sampler``.
    """

    what: str
    values: Mapping[str, Any]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping):
            raise self.error("it must be a mapping", self.values)
        for key in self.values:
            if not isinstance(key, str):
                raise self.error("its keys must be text", key)

    def error(self, rule: str, value: object) -> FormatError:
        """Return the FormatError for a value that breaks a rule."""
        return FormatError(
            f"not {self.what}: {rule}, got {shown(value)}; take it from an intact checkpoint"
        )

    def field(self, name: str, rule: str) -> Any:
        """Return the value of a field, which must exist."""
        if name not in self.values:
            raise FormatError(
                f"not {self.what}: it has no {name}, which {rule}; take it from an intact "
                "checkpoint"
            )
        return self.values[name]

    def checked(self, name: str, rule: str, is_right: Callable[[Any], bool]) -> Any:
        """Return the value of a field, checked by the predicate ``is_right``."""
        value = self.field(name, rule)
        if not is_right(value):
            raise self.error(f"{name} {rule}", value)
        return value

    def check_version(self, *versions: int) -> None:
        reads = " or ".join(map(str, versions))
        version = self.field("version", f"must be {reads}")
        if type(version) is not int or version not in versions:
            raise FormatError(
                f"not {self.what}: it has version {shown(version)}, this release reads {reads}; "
                "use the release that wrote it, or take it from an intact checkpoint"
            )

    def integer(self, name: str, *, least: int = 0, most: int = INT64_MAX) -> int:
        """Return an integer within these bounds; bools are refused, NumPy integers accepted."""
        rule = f"must be a whole number from {least} to {most}"
        value = self.field(name, rule)
        try:
            number = check_integer(name, value)
        except InvalidArgument:
            number = least - 1
        if isinstance(value, bool) or not least <= number <= most:
            raise self.error(f"{name} {rule}", value)
        return number

    def text(self, name: str) -> str:
        return str(self.checked(name, "must be text", lambda value: isinstance(value, str)))

    def hashed(self, name: str) -> str:
        """Return a text of 32 hex digits."""
        return str(self.checked(name, "must be 32 hex digits", _is_hash))

    def flag(self, name: str) -> bool:
        rule = "must be true or false"
        return bool(self.checked(name, rule, lambda value: isinstance(value, bool)))

    def part(self, name: str, what: str) -> CheckpointReader:
        """Return a reader of the mapping in this field."""
        rule = "must be a mapping"
        return CheckpointReader(
            what, self.checked(name, rule, lambda value: isinstance(value, Mapping))
        )


def _is_hash(value: object) -> bool:
    return isinstance(value, str) and len(value) == 32 and _HEX.issuperset(value)


def differ(theirs: object, ours: object) -> bool:
    """Return True if a checkpoint's value differs from the present one."""
    try:
        return bool(theirs != ours)
    except (ValueError, RuntimeError):  # arrays, and recursive containers
        return True


def percent(share: float) -> str:
    """Format a share with two decimals; only exact 0 and 1 are shown as 0.00% and 100.00%."""
    if 0 < share < 0.00005:
        return "<0.01%"
    return ">99.99%" if 0.99995 <= share < 1 - 1e-12 else f"{share:.2%}"


def count_of(number: int, noun: str) -> str:
    """Return ``1 step`` or ``1,200 steps``."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def error_text(error: Exception, most: int = 400) -> str:
    """Return the type and the message of an error on one line, cut to ``most`` characters."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:most]


_STEPS = re.compile(r"([0-9]{1,18})(?:-([0-9]{1,18}))?")


def parse_steps(flag: str, text: str) -> range:
    """Return the steps of a text such as ``7`` or ``41190-41199``, whose both ends are included.

    Raises:
        InvalidArgument: the text has another form, or ends before it begins.
    """
    found = _STEPS.fullmatch(text)
    first = int(found[1]) if found else 0
    last = int(found[2] or first) if found else -1
    if last < first:
        raise InvalidArgument(f"{flag} must be a step, or steps as 41190-41199, got {shown(text)}")
    return range(first, last + 1)
