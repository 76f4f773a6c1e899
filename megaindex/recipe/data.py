"""Blends as the frameworks' command lines write them."""

from __future__ import annotations

from collections.abc import Sequence

from megaindex.errors import InvalidArgument
from megaindex.index.plain import check_between, check_weights, read_number
from megaindex.recipe.run import Source
from megaindex.recipe.schedule import parse_count


def parse_blend(
    words: Sequence[str], weights: Sequence[str] | None, flag: str
) -> tuple[Source, ...]:
    """``P``, ``P P …`` or ``w P w P …`` as sources, read as Megatron reads them.

    An even number of words with a number in every odd place is a weighted blend; ``weights`` gives
    the weights apart.
    """
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


def parse_tokens(words: Sequence[str], weights: Sequence[str] | None) -> tuple[Source, ...]:
    """``T``, ``T T …`` as sources without files."""
    parsed = _weights(weights, len(words))
    return tuple(
        Source(tokens=_tokens(word), weight=weight)
        for word, weight in zip(words, parsed, strict=True)
    )


def _tokens(word: str) -> int:
    return check_between("--tokens-per-epoch", parse_count(word, "--tokens-per-epoch"), 1)


def _weights(weights: Sequence[str] | None, count: int) -> Sequence[float | None]:
    if weights is None:
        return [None] * count
    return check_weights("--weights", list(map(read_number, weights)), count)
