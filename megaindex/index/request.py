"""What is asked of an index: checked, and its length in samples and epochs."""

from __future__ import annotations

from fractions import Fraction

from megaindex.arithmetic import INT64_MAX
from megaindex.errors import InvalidArgument
from megaindex.validation import check_epochs


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


def epochs_asked(num_samples: int | None, epochs: int | float | str | Fraction | None) -> Fraction:
    """Epochs asked for; the length of the run is ``num_samples`` where that is given."""
    if num_samples is not None and epochs is not None:
        raise InvalidArgument("num_samples and epochs both set the length; give one of them")
    return Fraction(1) if epochs is None else check_epochs("epochs", epochs)
