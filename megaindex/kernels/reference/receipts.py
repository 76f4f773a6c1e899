"""Receipts: 128-bit sums of a hash of each position and its spans."""

from __future__ import annotations

from megaindex._types import I32, I64, U64

WORD = 2**64 - 1

# Odd multipliers of the chain of runs, document, offset and length: fractional parts of the square
# roots of the first eight primes, as in SHA-512. The finalisers, shifts and multipliers, are those
# of MurmurHash3 and SplitMix64.
HIGH_LANE = (0x6A09E667F3BCC909, 0xBB67AE8584CAA73B, 0x3C6EF372FE94F82B, 0xA54FF53A5F1D36F1)
HIGH_MIX = (33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33)
LOW_LANE = (0x510E527FADE682D1, 0x9B05688C2B3E6C1F, 0x1F83D9ABFB41BD6B, 0x5BE0CD19137E2179)
LOW_MIX = (30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)


def receipt_add(
    positions: I64,
    source: I32,
    document: I64,
    offset: I64,
    length: I64,
    row_splits: I64,
    keys: U64,
    blocks: I64,
    sums: U64,
) -> None:
    """Add the hash of each sample to the sum of its block.

    Sample k is at ``positions[k]`` of the training order and has the runs
    ``row_splits[k]:row_splits[k + 1]`` of source, document, offset and length.

    Args:
        keys: uint64[sources, 2], the fingerprint of each source.
        blocks: int64[samples], the row of ``sums`` that each sample is added to.
        sums: uint64[number of blocks, 2], high and low word of each sum modulo 2**128; updated.
    """
    for k, position in enumerate(positions.tolist()):
        high = low = position
        for at in range(row_splits[k], row_splits[k + 1]):
            key = keys[source[at]].tolist()
            run = (int(document[at]), int(offset[at]), int(length[at]))
            high = _after_run(high, key[0], run, HIGH_LANE)
            low = _after_run(low, key[1], run, LOW_LANE)
        high, low = mixed(high, HIGH_MIX), mixed(low, LOW_MIX)
        before = sums[blocks[k]].tolist()
        total = (before[0] << 64 | before[1]) + (high << 64 | low)
        sums[blocks[k]] = total >> 64 & WORD, total & WORD


def _after_run(h: int, key: int, run: tuple[int, int, int], lane: tuple[int, ...]) -> int:
    weighed = sum(part * factor for part, factor in zip(run, lane[1:], strict=True))
    return (h ^ h >> 32) * lane[0] + key + weighed & WORD


def mixed(h: int, mix: tuple[int, ...]) -> int:
    """Return a bijection of 64 bits: shifts and multiplications in turn."""
    h = (h ^ h >> mix[0]) * mix[1] & WORD
    h = (h ^ h >> mix[2]) * mix[3] & WORD
    return h ^ h >> mix[4]
