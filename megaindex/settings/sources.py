"""Sources of the data of a run, and the words of flags and files that name them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass

from megaindex.errors import InvalidArgument
from megaindex.index.subset_rule import DEFAULT_SUBSET_SEED, Share, SubsetRule
from megaindex.settings.batch_schedule import parse_count
from megaindex.validation import (
    check_between,
    check_text,
    check_weight,
    check_weights,
    read_number,
    shown,
)


@dataclass(frozen=True, kw_only=True)
class Source:
    """One corpus of a blend: a path prefix, or the tokens of its epoch alone.

    Attributes:
        path: path prefix of the .bin/.idx pair.
        weight: weight in the blend, finite and positive, or 0 where the framework builds such
            sources; None in all sources of a blend: no weights.
        tokens: tokens of one epoch, for planning without files.
        histogram: path of a file of document lengths with these tokens, see
            `read_length_histogram`.
        labels: path prefix of the labels, for a `NeoxDocumentsOrder`.
        shuffle_name: name by which orders epoch, window and packed shuffle the source. Default: its
            fingerprint, see `RecipeSource`.
        subset: share of the tokens that makes an epoch of training, in the same orders, or its
            threshold, see `SubsetRule`.
        held_out: share of the tokens that training leaves out, or its threshold.
        subset_seed: part of the key by which both are chosen.

    Raises:
        InvalidArgument: the weight is negative or not finite, or tokens are below 1.
    """

    path: str = ""
    weight: float | None = None
    tokens: int | None = None
    histogram: str = ""
    labels: str = ""
    shuffle_name: str = ""
    subset: Share | None = None
    held_out: Share | None = None
    subset_seed: int = DEFAULT_SUBSET_SEED

    def __post_init__(self) -> None:
        if self.tokens is not None:
            object.__setattr__(self, "tokens", check_between("tokens", self.tokens, 1))
        check_text("--shuffle-names", self.shuffle_name)
        rule = self.subset_rule
        rule.check_pinned(self.path, self.shuffle_name, self.path)
        object.__setattr__(self, "subset", rule.share)
        object.__setattr__(self, "held_out", rule.held_out)
        if self.weight is None:
            return
        weight = check_weight(self._weight_name, self.weight, zero=True)
        object.__setattr__(self, "weight", weight)

    @property
    def subset_rule(self) -> SubsetRule:
        """Which of its documents training reads."""
        return SubsetRule(share=self.subset, held_out=self.held_out, seed=self.subset_seed)

    @property
    def _weight_name(self) -> str:
        return f"the weight of {self.path or 'a source without a path'}"

    def check_weight(self, *, zero: bool) -> None:
        """Refuse a weight of 0, unless the framework builds such sources."""
        if self.weight is not None:
            check_weight(self._weight_name, self.weight, zero=zero)


def parse_blend(
    words: Sequence[str], weights: Sequence[str] | None, flag: str
) -> tuple[Source, ...]:
    """Return the sources of ``P``, ``P P …`` or ``w P w P …``, read as Megatron reads them.

    An even number of words with a number in every odd place is a weighted blend; ``weights`` are
    separate weights.
    """
    _check_words(words, flag)
    pairs = list(zip(words[::2], words[1::2], strict=False))
    numbers = [n for weight, _ in pairs if isinstance(n := read_number(weight), float)]
    inline = bool(pairs) and len(words) % 2 == 0 and len(numbers) == len(pairs)
    if numbers and not inline:
        raise InvalidArgument(
            f"{flag}: {' '.join(words)!r} mixes weights and bare paths; write a weight before "
            "every path, or none"
        )
    if inline and weights is not None:
        raise InvalidArgument(f"{flag} has weights already; remove --weights")
    if inline:
        return tuple(
            Source(path=path.strip(), weight=number)
            for number, (_, path) in zip(numbers, pairs, strict=True)
        )
    parsed = _weights(weights, len(words))
    return tuple(Source(path=p.strip(), weight=w) for p, w in zip(words, parsed, strict=True))


def _check_words(words: Sequence[str], flag: str) -> None:
    """Name the usual mistakes in a blend: quotes around it, percentages, weights behind paths, and
    variables without a value."""
    for word in words:
        if not word.strip():
            raise InvalidArgument(f"{flag}: {shown(word)} is empty; give the path of a pair")
        if len(word.split()) > 1 and not os.path.exists(f"{word.strip()}.idx"):
            raise InvalidArgument(
                f"{flag}: {shown(word)} is one word, and no path of a pair; remove the quotes "
                "around the blend"
            )
        if re.fullmatch(r"[0-9.]+%", word):
            raise InvalidArgument(
                f"{flag}: {word} is not a weight; write the number alone, {word[:-1]}"
            )
    firsts, seconds = ([isinstance(read_number(word), float) for word in words[k::2]]
                       for k in (0, 1))  # fmt: skip
    if firsts and len(firsts) == len(seconds) and all(seconds) and not any(firsts):
        raise InvalidArgument(
            f"{flag}: {shown(' '.join(words[:2]))} has the weight behind its path; write "
            f"{words[1]} before {shown(words[0])}"
        )


def parse_tokens(words: Sequence[str], weights: Sequence[str] | None) -> tuple[Source, ...]:
    """Return the sources of ``T T …``, numbers of tokens without files."""
    parsed = _weights(weights, len(words))
    return tuple(
        Source(tokens=_tokens(word), weight=weight)
        for word, weight in zip(words, parsed, strict=True)
    )


def read_histograms(
    paths: Sequence[str], weights: Sequence[str] | None, tokens: Sequence[str] | None
) -> tuple[Source, ...]:
    """Return the sources of files of document lengths; ``tokens``, if given, are their totals."""
    from megaindex.format.dataset import read_length_histogram  # which opens datasets

    if tokens is not None and len(tokens) != len(paths):
        raise InvalidArgument(
            f"--tokens-per-epoch has {len(tokens)} values for {len(paths)} files of "
            "--length-histogram; give one for each, or leave it out"
        )
    sources = []
    for number, (path, weight) in enumerate(zip(paths, _weights(weights, len(paths)), strict=True)):
        total = read_length_histogram(path).tokens
        if tokens is not None and _tokens(tokens[number]) != total:
            raise InvalidArgument(
                f"{path}: its documents hold {total} tokens, --tokens-per-epoch says "
                f"{tokens[number]}; count the lengths again, or leave --tokens-per-epoch out"
            )
        sources.append(Source(tokens=total, weight=weight, histogram=path))
    return tuple(sources)


def _tokens(word: str) -> int:
    return check_between("--tokens-per-epoch", parse_count(word, "--tokens-per-epoch"), 1)


def _weights(weights: Sequence[str] | None, count: int) -> Sequence[float | None]:
    if weights is None:
        return [None] * count
    return check_weights("--weights", list(map(read_number, weights)), count, zero=True)
