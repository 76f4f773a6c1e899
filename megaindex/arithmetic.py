"""Size formulas in integers: samples, epochs, iterations and batches.

S is sequence_length (tokens per sample), T the tokens of one epoch, E epochs. A sample reads
``extra`` tokens beyond its S for the shifted label; neighbours share them, so E epochs hold
``(E*T - extra) // S`` samples.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from megaindex.errors import InvalidArgument

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


def ceil_div(numerator: int, denominator: int) -> int:
    """Return the quotient rounded up, exact for integers of any size."""
    return -(-numerator // denominator)


def samples_in(
    tokens: int, sequence_length: int, extra: int = 1, *, drop_last_partial: bool = True
) -> int:
    """Return the number of samples in ``tokens`` consecutive tokens.

    With ``drop_last_partial=False`` a last, shorter sample counts too. megatron-core computes that
    case in float32, which is wrong from 2**24 tokens on: for 16777218 tokens at S = 2048 it
    returns 8192 instead of 8193.
    """
    available = max(0, tokens - extra)
    if drop_last_partial:
        return available // sequence_length
    return ceil_div(available, sequence_length)


def tokens_for(num_samples: int, sequence_length: int, extra: int = 1) -> int:
    """Return the tokens that ``num_samples`` samples read, shared ones counted once."""
    return num_samples * sequence_length + extra


def epochs_for(
    num_samples: int, tokens_per_epoch: int, sequence_length: int, extra: int = 1
) -> int:
    """Return the least number of epochs, at least one, that hold ``num_samples`` samples."""
    needed = tokens_for(num_samples, sequence_length, extra)
    return max(1, ceil_div(needed, tokens_per_epoch))


def epochs_built(
    exact: int | None, num_samples: int, tokens_per_epoch: int, sequence_length: int, extra: int = 1
) -> int:
    """Return ``exact`` if it is given, else the least number of epochs that hold the samples.

    Raises:
        InvalidArgument: ``exact`` epochs hold too few samples, or the last of them is not needed.
    """
    if exact is None:
        return epochs_for(num_samples, tokens_per_epoch, sequence_length, extra)
    least = samples_in((exact - 1) * tokens_per_epoch, sequence_length, extra)
    most = samples_in(exact * tokens_per_epoch, sequence_length, extra)
    if not least <= num_samples <= most:
        raise InvalidArgument(
            f"exact_num_epochs={exact}: num_samples must be from {least} to {most}, the samples of "
            f"{exact - 1} and of {exact} epochs, got {num_samples}"
        )
    return exact


def samples_for_epochs(
    epochs: Fraction | int,
    tokens_per_epoch: int,
    sequence_length: int,
    extra: int = 1,
    *,
    carry_left_over: bool = True,
) -> int:
    """Return the number of samples in ``epochs`` epochs, which may be a fraction.

    With ``carry_left_over`` a sample may span two epochs, as in the framework orders:
    ``floor((E*T - extra) / S)``. Without, each epoch drops its own left-over:
    ``floor(E * floor((T - extra) / S))``.
    """
    whole, parts = int(epochs.numerator), int(epochs.denominator)
    if carry_left_over:
        return max(0, (whole * tokens_per_epoch - parts * extra) // (parts * sequence_length))
    return whole * samples_in(tokens_per_epoch, sequence_length, extra) // parts


@dataclass(frozen=True, kw_only=True)
class FinalEpoch:
    """Decision to shuffle the last epoch apart from the others, with its sample counts."""

    apart: bool
    samples_before: int
    """Samples of all epochs but the last."""
    samples_from: int
    """Samples taken from the last epoch."""
    samples_per_epoch: int


def final_epoch(
    num_samples: int,
    num_epochs: int,
    tokens_per_epoch: int,
    sequence_length: int,
    extra: int = 1,
    *,
    policy: str = "auto",
    threshold: float = 0.80,
) -> FinalEpoch:
    """Apply Megatron's rule for shuffling the last epoch apart.

    The last epoch is shuffled apart if fewer than ``int(threshold * samples_per_epoch)`` of its
    samples are used. ``policy`` is ``auto`` (that rule), ``always`` or ``never``; a single epoch
    is never apart.
    """
    before = samples_in((num_epochs - 1) * tokens_per_epoch, sequence_length, extra)
    per_epoch = samples_in(tokens_per_epoch, sequence_length, extra)
    from_final = num_samples - before
    few = from_final < int(threshold * per_epoch)
    apart = num_epochs > 1 and (policy == "always" or (policy == "auto" and few))
    return FinalEpoch(
        apart=apart,
        samples_before=before,
        samples_from=from_final,
        samples_per_epoch=per_epoch,
    )


def global_batch_size(micro_batch: int, data_parallel: int, accumulation: int) -> int:
    """Return the samples of one iteration."""
    return micro_batch * data_parallel * accumulation


def shuffle_dtype(num_samples: int) -> str:
    """Return the dtype of Megatron's and NeoX's shuffle_index: uint32 below 2**32 - 2 samples."""
    return "int64" if num_samples >= 2**32 - 2 else "uint32"
