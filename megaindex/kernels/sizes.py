"""The size formulas that kernels need too; all others are in `megaindex.index.arithmetic`."""

from __future__ import annotations

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def ceil_div(numerator: int, denominator: int) -> int:
    """Quotient rounded up, exact for integers of any size."""
    return -(-numerator // denominator)


def samples_in(
    tokens: int, sequence_length: int, extra: int = 1, *, drop_last_partial: bool = True
) -> int:
    """Samples that ``tokens`` tokens hold, read one after another.

    With ``drop_last_partial=False`` a last, shorter sample counts too. megatron-core counts that
    case in float32 and is wrong from 2**24 tokens on: 16777218 tokens at S = 2048 hold 8193
    samples, it says 8192.
    """
    available = max(0, tokens - extra)
    if drop_last_partial:
        return available // sequence_length
    return ceil_div(available, sequence_length)
