"""Keys of rows: 128 bits of a hash of content and input tokens, the low word with the exposure.

The hash has two lanes, which begin at 0. For each run of input tokens, in order, three numbers v
are entered by ``h = mix(h + chain + v)``: the document plus the lane's word of the source's content
fingerprint, the offset, the length. The key is the low word with the exposure entered last,
``mix(low + exposure * EXPOSURE)``, which `content_of` inverts. All is modulo 2**64.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from megaindex._types import I32, I64, U64
from megaindex.kernels.reference.receipts import (
    HIGH_LANE,
    HIGH_MIX,
    LOW_LANE,
    LOW_MIX,
    WORD,
    mixed,
)

HIGH_CHAIN, LOW_CHAIN = HIGH_LANE[0], LOW_LANE[0]
EXPOSURE = 0x9E3779B97F4A7C15
"""Odd factor of the exposure."""
NOTHING = -1
"""Sample, source and exposure of a row without input tokens, whose key is 0."""


def row_keys(
    positions: I64,
    numbers: I64,
    source: I32,
    document: I64,
    offset: I64,
    length: I64,
    row_splits: I64,
    width: int,
    contents: U64,
    starts: I64,
    passes: I64,
    samples: I64,
    sources: I32,
    exposures: I32,
    keys: I64,
    high: I64,
) -> None:
    """Write the fields of each row; row k has the runs ``row_splits[k]:row_splits[k + 1]``.

    Args:
        positions: int64[rows], positions in the run.
        numbers: int64[rows], numbers of the samples among those of all sources.
        source, document, offset, length: the runs; those of length 0 are left out.
        width: input tokens of a row; tokens after them, those of labels, are left out.
        contents: uint64[sources, 2], high and low word of the content fingerprint of each source.
        starts, passes: int64[n], first number of each run of samples of one pass, and that pass.
        samples: int64[rows], out: the positions.
        sources: int32[rows], out: source of the first input token.
        exposures: int32[rows], out: pass of each sample.
        keys: int64[rows], out: low words with the exposure.
        high: int64[rows], out: high words; or int64[0], and they are not written.
    """
    for k, position in enumerate(positions.tolist()):
        first, low_word, high_word, left = NOTHING, 0, 0, width
        for at in range(row_splits[k], row_splits[k + 1]):
            taken = min(left, int(length[at]))
            if taken < 1:
                continue
            left -= taken
            first = int(source[at]) if first == NOTHING else first
            content = contents[source[at]].tolist()
            run = int(document[at]), int(offset[at]), taken
            high_word = _after_run(high_word, content[0], run, HIGH_CHAIN, HIGH_MIX)
            low_word = _after_run(low_word, content[1], run, LOW_CHAIN, LOW_MIX)
        samples[k] = sources[k] = exposures[k] = NOTHING
        keys[k] = 0
        if first != NOTHING:
            exposure = int(passes[np.searchsorted(starts, numbers[k], "right") - 1])
            samples[k], sources[k], exposures[k] = position, first, exposure
            keys[k] = _signed(mixed(low_word + exposure * EXPOSURE & WORD, LOW_MIX))
        if high.size:
            high[k] = _signed(high_word)


def _after_run(
    h: int, content: int, run: tuple[int, int, int], chain: int, mix: tuple[int, ...]
) -> int:
    for value in (content + run[0], run[1], run[2]):
        h = mixed(h + chain + value & WORD, mix)
    return h


def _signed(word: int) -> int:
    return word - 2**64 if word >> 63 else word


_BITS = 64
_UNMIX = tuple(pow(factor, -1, 2**_BITS) for factor in LOW_MIX[3:0:-2])
"""Inverses of the factors, the last one first."""


def content_of(key: Any, exposure: Any) -> Any:
    """Return the low word without the exposure: the key less the last step of `row_keys`.

    Args:
        key, exposure: arrays or tensors of int64, whose arithmetic wraps around.
    """
    for shift, factor in zip(LOW_MIX[4::-2], (*_UNMIX, None), strict=True):
        key = _unshifted(key, shift)
        if factor is not None:
            key = key * _signed(factor)
    return key - exposure * _signed(EXPOSURE)


def _unshifted(words: Any, shift: int) -> Any:
    """Return the words w of ``w ^ w >> shift``, a shift of unsigned numbers by a third or more."""
    once = words ^ words >> shift & (1 << _BITS - shift) - 1
    return words ^ once >> shift & (1 << _BITS - shift) - 1
