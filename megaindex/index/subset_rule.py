"""Rules that choose the documents of a subset: a share of the tokens, and a share held out.

The documents of a source are ordered by their words (`megaindex.index.documents`). A share of the
tokens is the shortest prefix of this order that has them, so that a smaller share is part of a
larger one, whatever the seed of the run; what is held out is the shortest suffix.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from megaindex._types import I32, I64, U64
from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.index.documents import (
    LAST_WORD,
    DocumentSubset,
    WordRange,
    parts_of_range,
    word_text,
)
from megaindex.io.threads import map_interruptibly
from megaindex.kernels import num_threads
from megaindex.validation import check_fraction, check_setting, shown

DEFAULT_SUBSET_SEED = 0
_BIN_BITS = 12  # first bits of a word, by which tokens are summed
_BIN_SHIFT = np.uint64(64 - _BIN_BITS)
_NEAR = 2  # bins on both sides of a likely threshold

Share: TypeAlias = Fraction | str
"""Share of the tokens; or a threshold, the word of a document as ``0x`` and 16 digits."""


def check_subset_share(word: str, value: object) -> Share:
    """Return a share above 0 and up to 1, or a threshold.

    Raises:
        InvalidArgument: it is neither.
    """
    if isinstance(value, bool):
        raise InvalidArgument(f"{word} must be a share, such as 1/16, got {value}")
    if isinstance(value, str) and value.strip()[:2] in ("0x", "0X"):
        if not re.fullmatch(r"0x[0-9a-f]{16}", value):
            raise InvalidArgument(
                f"{word} must be a share, or 0x and 16 hexadecimal digits in small letters, got "
                f"{shown(value)}; copy the threshold that the plan prints"
            )
        return value
    share = check_fraction(word, value)
    if not 0 < share <= 1:
        raise InvalidArgument(f"{word} must be above 0 and at most 1, got {share}")
    return share


@dataclass(frozen=True, kw_only=True)
class SubsetRule:
    """Documents of a source that take part: a share of those that are not held out.

    >>> build_index("data/web", sequence_length=2048, order="epoch",
    ...             document_subset=SubsetRule(share="1/16"))

    Attributes:
        share: share of the tokens that are not held out, above 0 and up to 1; or the threshold of
            one, as plans and locks have it. Default: all.
        held_out: share of the tokens that training leaves out, or its threshold.
        seed: part of the key of the words, and not the seed of the run.
        evaluates: the documents are those held out.

    Raises:
        InvalidArgument: a value is neither.
    """

    share: Share | None = None
    held_out: Share | None = None
    seed: int = DEFAULT_SUBSET_SEED
    evaluates: bool = False

    def __post_init__(self) -> None:
        for name, word in (("share", "subset"), ("held_out", "held_out")):
            if getattr(self, name) is not None:
                value = check_subset_share(word, getattr(self, name))
                object.__setattr__(self, name, value)
        object.__setattr__(self, "seed", check_setting("seed", self.seed, "subset_seed"))
        if self.seed != DEFAULT_SUBSET_SEED and self.share is None and self.held_out is None:
            raise InvalidArgument(
                f"subset_seed {self.seed}: has no effect without subset or held_out; leave it out"
            )
        if self.held_out == word_text(0):
            raise InvalidArgument(f"held_out {self.held_out} leaves no document; raise it")
        if self.held_out == 1:
            raise InvalidArgument(
                "held_out must be below 1, or training has no documents; lower it"
            )

    def __bool__(self) -> bool:
        return self.held_out is not None or self.share not in (None, 1)

    def check_pinned(self, where: str, shuffle_name: str, path: str) -> None:
        """Refuse a threshold of a source without the name in its key."""
        for name, share in (("subset", self.share), ("held_out", self.held_out)):
            if isinstance(share, str) and not (shuffle_name and path):
                raise InvalidArgument(
                    f"{where}: {name} {share} is a threshold, which belongs to a pair and the name "
                    "by which it is shuffled; give both, as the plan prints them"
                )

    def count(self, tokens: int) -> int:
        """Return the tokens of an epoch of a source of which only their number is known."""
        held = 0 if self.held_out is None else _part(tokens, Fraction(self.held_out))
        if self.evaluates:
            return held
        pool = tokens - held
        return pool if self.share is None else _part(pool, Fraction(self.share))

    def choose(self, name: str, lengths: I32, within: range, where: str) -> range | DocumentSubset:
        """Return the documents of an epoch.

        Args:
            name: name by which the source is shuffled.
            lengths: int32[sequences] of the source.
            within: its sequences that belong to training, or to the evaluation.
            where: the source, for messages.

        Raises:
            InvalidArgument: the share reaches what is held out, or no document is left.
        """
        if not self:
            return within
        tokens = _TokensByWord(WordRange(self.seed, name), lengths, within, self._likely)
        if not tokens.total:
            return within
        held = LAST_WORD + 1 if self.held_out is None else self._held(tokens, where)
        if self.evaluates:
            return _some(replace(tokens.words, first=held), tokens, where, held)
        last = self._last(tokens, held)
        if last >= held:
            raise InvalidArgument(
                f"{where}: subset {self.share} reaches documents that held_out {self.held_out} "
                "leaves out; lower one of them"
            )
        return _some(replace(tokens.words, last=last), tokens, where, held)

    @property
    def _likely(self) -> list[Fraction]:
        """Parts of all words up to a threshold, where lengths do not depend on the words."""
        held = 0 if self.held_out is None or isinstance(self.held_out, str) else self.held_out
        share = 1 if self.share is None or isinstance(self.share, str) else self.share
        return [Fraction(1 - held), Fraction(share * (1 - held))]

    def _held(self, tokens: _TokensByWord, where: str) -> int:
        """Return the least word that is held out."""
        assert self.held_out is not None, "the callers ask for it"
        if isinstance(self.held_out, str):
            return int(self.held_out, 16)
        most = tokens.total - _part(tokens.total, self.held_out)
        first = tokens.threshold(most, behind=True)
        if tokens.since(first) == tokens.total:
            raise InvalidArgument(
                f"{where}: held_out {self.held_out} leaves no token for training; lower it"
            )
        return first

    def _last(self, tokens: _TokensByWord, held: int) -> int:
        """Return the greatest word of the share of the tokens before ``held``."""
        if isinstance(self.share, str):
            return int(self.share, 16)
        if self.share is None or self.share == 1:
            return held - 1
        pool = tokens.total - (0 if self.held_out is None else tokens.since(held))
        return tokens.threshold(_part(pool, self.share)) if pool else held - 1


class Reader(NamedTuple):
    """A source of training or of an evaluation, of which documents may be held out."""

    label: str
    """Name in messages."""
    fingerprint: Callable[[], str]
    """Function that returns the fingerprint of its pair, called if any documents are held out."""
    rule: SubsetRule
    shuffle_name: str | None
    """None: its fingerprint."""
    trains: bool

    def holds_out(self, pair: str) -> tuple[Any, ...]:
        """Return what decides the documents of its pair that are held out; empty for none."""
        rule = self.rule
        if rule.held_out is None:
            return ()
        return (rule.held_out, rule.seed, self.shuffle_name or pair)


def check_held_out(readers: Sequence[Reader]) -> None:
    """Check that no source trains on what another source of the same fingerprint holds out.

    Raises:
        InvalidArgument: two of them hold out different documents, or one none.
    """
    if all(reader.rule.held_out is None for reader in readers):
        return
    pairs: dict[str, list[tuple[Reader, tuple[Any, ...]]]] = {}
    for reader in readers:
        pair = reader.fingerprint()
        pairs.setdefault(pair, []).append((reader, reader.holds_out(pair)))
    for same in pairs.values():
        for (one, ours), (other, theirs) in itertools.product(same, repeat=2):
            if ours and ours != theirs and (one.trains or other.trains):
                raise InvalidArgument(
                    f"{other.label}: reads documents that {one.label} holds out, a pair of the "
                    "same lengths; give both the same held_out, subset_seed and shuffle_name, "
                    "which differs by default where a pair is given twice"
                )


def no_subset(order: str) -> InvalidArgument:
    """Return the error of a subset under a framework's own order."""
    return InvalidArgument(
        "a subset is read by order epoch, window, packed and blocks, and the order is "
        f"{order}, in which the framework reads all documents; choose one of these, which "
        "megaindex's loaders read, or write the documents as a pair of their own"
    )


def _part(tokens: int, share: Fraction) -> int:
    return ceil_div(share.numerator * tokens, share.denominator)


def _some(words: WordRange, tokens: _TokensByWord, where: str, held: int) -> DocumentSubset:
    """Return the documents in a range of words, one or more; InvalidArgument for 0."""
    found = DocumentSubset.of(words, tokens.within)
    if not len(found):
        raise InvalidArgument(
            f"{where}: the threshold chooses none of {len(tokens.within)} documents; copy the one "
            "that the plan prints"
        )
    held_from = held if held <= LAST_WORD else None
    return replace(found, held_from=held_from, of_tokens=tokens.total)


class _TokensByWord:
    """Tokens of the documents of a source in the order of their words."""

    def __init__(
        self, words: WordRange, lengths: I32, within: range, likely: Sequence[Fraction]
    ) -> None:
        self.words = words
        self.within = within
        self._lengths = lengths
        self._is_near = np.zeros(1 << _BIN_BITS, bool)
        """Bins of which the documents are kept in the pass that sums."""
        for part in likely:
            number = int(part * self._is_near.size)
            self._is_near[max(0, number - _NEAR) : number + _NEAR + 1] = True

    @cached_property
    def _scanned(self) -> tuple[I64, U64, I32]:
        """Tokens of the documents of each bin, int64[bins]; words and lengths of those near."""

        def scan(part: range) -> tuple[I64, U64, I32]:
            sums, near = np.zeros(self._is_near.size, np.int64), []
            for begin, end, words in self.words.chunks(part):
                bins, lengths = (words >> _BIN_SHIFT).view(np.int64), self._lengths[begin:end]
                # sums of doubles are exact below 2**53
                sums += np.bincount(bins, lengths, sums.size).astype(np.int64)
                at = np.flatnonzero(self._is_near[bins])
                near.append((words[at], lengths[at]))
            return sums, *_joined(near)

        parts = map_interruptibly(scan, parts_of_range(self.within), num_threads())
        sums: I64 = np.sum([part[0] for part in parts], axis=0, dtype=np.int64)
        return sums, *_joined([part[1:] for part in parts])

    @property
    def _sums(self) -> I64:
        return self._scanned[0]

    @property
    def total(self) -> int:
        return int(self._sums.sum())

    def _bin(self, number: int) -> tuple[U64, I64]:
        """Return the words of the documents of a bin in their order, and their lengths."""
        if not self._is_near[number]:  # as of few documents
            self._is_near[number] = True
            del self._scanned
        _, words, lengths = self._scanned
        at = np.flatnonzero(words >> _BIN_SHIFT == np.uint64(number))
        at = at[np.argsort(words[at])]
        return words[at], lengths[at].astype(np.int64)

    def threshold(self, tokens: int, *, behind: bool = False) -> int:
        """Return the first word at which the documents up to it have ``tokens``, at least 1.

        With ``behind``, at which they have more than that; ``tokens`` is below `total`.
        """
        ends = np.cumsum(self._sums)
        side: Literal["left", "right"] = "right" if behind else "left"
        number = int(np.searchsorted(ends, tokens, side))
        words, lengths = self._bin(number)
        before = int(ends[number]) - int(self._sums[number])
        return int(words[np.searchsorted(np.cumsum(lengths) + before, tokens, side)])

    def since(self, first: int) -> int:
        """Return the tokens of the documents whose words are ``first`` or more."""
        number = first >> 64 - _BIN_BITS
        words, lengths = self._bin(number)
        return int(self._sums[number + 1 :].sum() + lengths[words >= np.uint64(first)].sum())


def _joined(pieces: Sequence[tuple[U64, I32]]) -> tuple[U64, I32]:
    words, lengths = zip(*pieces, strict=True) if pieces else ((), ())
    none = np.empty(0, np.uint64), np.empty(0, np.int32)
    return np.concatenate([none[0], *words]), np.concatenate([none[1], *lengths])
