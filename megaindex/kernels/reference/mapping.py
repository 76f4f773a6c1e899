"""Samples of sentence corpora: the frameworks' build_mapping and build_blocks_mapping.

Both cut every document into runs of whole sentences, epoch after epoch, and shuffle the runs. They
differ in the target length of a run and in the columns of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from megaindex._types import I32, I64, IntArray

LONGEST_SENTENCE = 512  # a document with a longer sentence is left out

Row: TypeAlias = tuple[int, ...]


class SentenceSample(NamedTuple):
    """The sentences [start, end) of one document, cut at ``target`` tokens."""

    start: int
    end: int
    target: int
    document: int


class Rules(NamedTuple):
    """Where a document may be cut."""

    min_num_sent: int  # sentences of a document that takes part, and of each sample but its last
    min_left: int  # sentences a sample leaves to its document, unless it takes them all
    keep_long_alone: bool  # a document of one long sentence takes part all the same


class Twister(NamedTuple):
    """Parameters of a Mersenne Twister engine of the C++ standard library."""

    bits: int
    size: int
    middle: int
    matrix: int
    tempering: tuple[int, int, int, int, int, int, int]
    multiplier: int


MT19937 = Twister(
    bits=32,
    size=624,
    middle=397,
    matrix=0x9908B0DF,
    tempering=(11, 0xFFFFFFFF, 7, 0x9D2C5680, 15, 0xEFC60000, 18),
    multiplier=1812433253,
)
MT19937_64 = Twister(
    bits=64,
    size=312,
    middle=156,
    matrix=0xB5026F5AA96619E9,
    tempering=(29, 0x5555555555555555, 17, 0x71D67FFFEDA60000, 37, 0xFFF7EEE000000000, 43),
    multiplier=6364136223846793005,
)


def map_sentences(
    docs: I64,
    sizes: I32,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int = 2,
) -> IntArray:
    """Return shuffled samples of BERT and T5: rows (first sentence, end sentence, target length).

    Args:
        docs: int64[documents + 1]; document d is the sentences docs[d] … docs[d + 1] - 1.
        sizes: int32[sentences], tokens of each sentence.
        num_epochs: epochs at most.
        max_num_samples: no further epoch is begun once there are this many samples.
        max_seq_length: target length of a sample, in tokens.
        short_seq_prob: one target in round(1 / short_seq_prob) is drawn from
            [2, max_seq_length] instead.
        seed: any int32.
        min_num_sent: documents with fewer sentences are left out.

    Returns:
        uint32[samples, 3], or uint64 if there are more than 2**32 - 1 sentences.
    """
    rules = Rules(min_num_sent, min_left=2, keep_long_alone=True)
    ratio = short_seq_ratio(short_seq_prob)
    # Megatron draws targets from one generator and shuffles with another of 64 bits
    words = mersenne_twister(MT19937, seed)

    def target(_document: int) -> int:
        if ratio == 0:
            return max_seq_length
        word = next(words)
        # one word decides whether and how short, as in Megatron: the two are not independent
        return 2 + word % (max_seq_length - 1) if word % ratio == 0 else max_seq_length

    def epoch() -> list[Row]:
        return [(s.start, s.end, s.target) for s in cut_documents(docs, sizes, rules, target)]

    rows = repeat(epoch, num_epochs, max_num_samples)
    return shuffled(rows, 3, row_dtype(sizes), seed)


def map_blocks(
    docs: I64,
    sizes: I32,
    titles_sizes: I32,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    use_one_sent_blocks: bool,
) -> IntArray:
    """Return shuffled blocks of REALM: rows (first sentence, end sentence, document, block).

    Blocks are numbered in each epoch. ``titles_sizes`` is int32[documents or more]: a block leaves
    room for its document's title. The other arguments are those of `map_sentences`.

    Returns:
        uint32[blocks, 4], or uint64 if there are more than 2**32 - 1 sentences.
    """
    least = 1 if use_one_sent_blocks else 2
    rules = Rules(least, min_left=least, keep_long_alone=False)

    def target(document: int) -> int:
        return max_seq_length - int(titles_sizes[document])

    def epoch() -> list[Row]:
        samples = cut_documents(docs, sizes, rules, target)
        return [(s.start, s.end, s.document, block) for block, s in enumerate(samples)]

    rows = repeat(epoch, num_epochs, max_num_samples)
    return shuffled(rows, 4, row_dtype(sizes), seed)


def cut_documents(
    docs: I64, sizes: I32, rules: Rules, target_of: Callable[[int], int]
) -> Iterator[SentenceSample]:
    """Yield the samples of one epoch, in the order of the corpus."""
    for document in range(len(docs) - 1):
        start, last = int(docs[document]), int(docs[document + 1])
        if not takes_part(sizes[start:last], rules):
            continue
        target = target_of(document)
        while start < last:
            end = cut(sizes, start, last, target, rules)
            yield SentenceSample(start, end, target, document)
            start = end
            target = target_of(document)  # also after the last sample, as Megatron does


def takes_part(sizes: I32, rules: Rules) -> bool:
    """Return whether a document has enough sentences and none that is too long."""
    if len(sizes) < rules.min_num_sent:
        return False
    if rules.keep_long_alone and len(sizes) == 1:
        return True
    for size in sizes:  # noqa: SIM110 - Numba compiles this function too, without all()
        if size > LONGEST_SENTENCE:
            return False
    return True


def cut(sizes: I32, start: int, last: int, target: int, rules: Rules) -> int:
    """Return the end of the sample that starts at ``start``, in a document that ends at ``last``.

    The sample ends where it reaches its target, unless it would have or leave too few sentences:
    then it takes the rest. With sizes 5, 5, 5, 5, two sentences at least and a target of 8:
    [0, 2), [2, 4). With a target of 12, [0, 3) would leave one sentence alone, so [0, 4).
    """
    tokens = 0
    for end in range(start + 1, last + 1 - rules.min_left):
        tokens += int(sizes[end - 1])
        if tokens >= target and end - start >= rules.min_num_sent:
            return end
    return last


def repeat(epoch: Callable[[], list[Row]], num_epochs: int, max_num_samples: int) -> list[Row]:
    """Return rows of whole epochs, until there are ``max_num_samples`` or more."""
    rows: list[Row] = []
    for _ in range(num_epochs):
        if len(rows) >= max_num_samples:
            break
        in_epoch = epoch()
        if not in_epoch:
            break  # further epochs are empty too
        rows += in_epoch
    return rows


def short_seq_ratio(short_seq_prob: float) -> int:
    """Return 1 / short_seq_prob, with halves rounded up, or 0 if the probability is 0.

    The result is at most 2**32: of larger ratios, a 32-bit word is a multiple only if it is 0.
    """
    if short_seq_prob * 2**32 <= 1:
        return 2**32 if short_seq_prob > 0 else 0
    return int(1 / short_seq_prob + 0.5)


def row_dtype(sizes: I32) -> type[np.unsignedinteger]:
    """Return the dtype of the rows of a corpus."""
    return np.uint32 if len(sizes) <= 0xFFFFFFFF else np.uint64


def shuffled(rows: list[Row], width: int, dtype: type[np.unsignedinteger], seed: int) -> IntArray:
    """Return the rows as an array, shuffled by Fisher-Yates with 64-bit words."""
    words = mersenne_twister(MT19937_64, shuffle_seed(seed))
    for i in range(len(rows) - 1, 0, -1):
        j = next(words) % (i + 1)
        rows[i], rows[j] = rows[j], rows[i]
    return np.array(rows, dtype).reshape(-1, width)


def shuffle_seed(seed: int) -> int:
    """Return seed + 1 as Megatron adds it, in 32 bits: 2**31 - 1 is followed by -2**31."""
    return (seed + 1 + 2**31) % 2**32 - 2**31


def mersenne_twister(kind: Twister, seed: int) -> Iterator[int]:
    """Yield the words of ``std::mt19937(seed)`` or ``std::mt19937_64(seed)``."""
    mask = (1 << kind.bits) - 1
    state = [seed & mask]
    for i in range(1, kind.size):
        previous = state[-1]
        state.append((kind.multiplier * (previous ^ previous >> (kind.bits - 2)) + i) & mask)
    lower = 0x7FFFFFFF
    u, d, s, b, t, c, last = kind.tempering
    while True:
        for i in range(kind.size):
            y = state[i] & ~lower | state[(i + 1) % kind.size] & lower
            far = state[(i + kind.middle) % kind.size]
            state[i] = far ^ y >> 1 ^ (kind.matrix if y & 1 else 0)
        for y in state:
            y ^= y >> u & d
            y ^= y << s & b
            y ^= y << t & c
            yield y ^ y >> last
