"""The past of a run that began in another system, of which only counts or documents are known."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction

from megaindex.errors import InvalidArgument
from megaindex.validation import check_between, check_fraction

_MOST_STEPS = 2**40
_MOST_EPOCHS = 10_000


@dataclass(frozen=True, kw_only=True)
class PastRead:
    """The part of one source that was read before the run joined.

    One of ``tokens``, ``samples`` and ``epochs``, or ``documents``, with or without ``epochs``.

    Attributes:
        source: name of the `RecipeSource`.
        tokens: tokens read, at most one epoch.
        samples: samples read, of the sequence_length at which the source is read first, at most
            one epoch.
        epochs: epochs read; with ``documents``, whole epochs read before them.
        documents: path of a file with the ids of the documents read in the current epoch, an
            integer ``.npy`` or text. They are left out of the rest of that epoch.

    Raises:
        InvalidArgument: a number is out of range, or none or several are given.
    """

    source: str
    tokens: int | None = None
    samples: int | None = None
    epochs: Fraction | None = None
    documents: str = ""

    def __post_init__(self) -> None:
        where = f"past: source {self.source}"
        for name in ("tokens", "samples"):
            if getattr(self, name) is not None:
                value = check_between(f"{where}: {name}", getattr(self, name), 0, 2**62 - 1)
                object.__setattr__(self, name, value)
        if self.epochs is not None:
            epochs = check_fraction(f"{where}: epochs", self.epochs)
            object.__setattr__(self, "epochs", epochs)
            if not 0 <= epochs <= _MOST_EPOCHS:
                raise InvalidArgument(
                    f"{where}: epochs must be from 0 to {_MOST_EPOCHS}, got {epochs}; leave out a "
                    "source that was not read"
                )
            if self.documents and epochs.denominator != 1:
                raise InvalidArgument(
                    f"{where}: epochs must be whole beside documents, got {epochs}; the documents "
                    "are those read in the epoch after them"
                )
        given = [n for n in ("tokens", "samples", "epochs") if getattr(self, n) is not None]
        if self.documents:
            given = ["documents", *(name for name in given if name != "epochs")]
        if len(given) != 1:
            raise InvalidArgument(
                f"{where}: give one of tokens, samples, epochs and documents, got "
                f"{' and '.join(given) or 'none'}"
            )

    def text(self) -> str:
        """Return what is known, as ``tokens 300,000``."""
        if self.documents:
            return f"documents {self.documents}" + (f", epochs {self.epochs}" * bool(self.epochs))
        if self.epochs is not None:
            return f"epochs {float(self.epochs):g}"
        name = "tokens" if self.samples is None else "samples"
        return f"{name} {getattr(self, name):,}"


@dataclass(frozen=True, kw_only=True)
class Past:
    """Steps made in another system, and what they read.

    Attributes:
        steps: steps made; the first step of the run here.
        read: parts of the sources that were read; sources not listed were not.
        mix: in place of ``read``: the share of each source in the tokens of all these steps.
        global_batch_size: with ``mix``: samples of a step there; None: those of the recipe.
        sequence_length: with ``mix``: tokens of a sample there; None: those of the recipe.

    Raises:
        InvalidArgument: a number is out of range, or both or neither of read and mix are given.
    """

    steps: int
    read: tuple[PastRead, ...] = ()
    mix: tuple[tuple[str, Fraction], ...] = ()
    global_batch_size: int | None = None
    sequence_length: int | None = None

    def __post_init__(self) -> None:
        steps = check_between("past: steps", self.steps, 1, _MOST_STEPS)
        object.__setattr__(self, "steps", steps)
        if bool(self.read) == bool(self.mix):
            raise InvalidArgument(
                "past: give either read, with the part of each source that was read, or mix, the "
                "shares of the sources in all steps"
            )
        for name in ("global_batch_size", "sequence_length"):
            value = getattr(self, name)
            if value is not None and self.read:
                raise InvalidArgument(f"past: {name} counts the tokens of a mix; remove it")
            if value is not None:
                object.__setattr__(self, name, check_between(f"past: {name}", value, 1, 2**31))
        shares = []
        for source, share in self.mix:
            value = check_fraction(f"past: mix: {source}", share)
            if value <= 0:
                raise InvalidArgument(
                    f"past: mix: {source} must be positive, got {value}; leave out a source that "
                    "was not read"
                )
            shares.append((source, value))
        object.__setattr__(self, "mix", tuple(shares))
        names = [read.source for read in self.read] + [source for source, _ in self.mix]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise InvalidArgument(f"past: source {twice[0]} is listed twice; list it once")

    @property
    def sources(self) -> list[str]:
        """Names of the sources read."""
        return [read.source for read in self.read] or [source for source, _ in self.mix]

    def reads(self, samples: int, sequence_length: int) -> dict[str, PastRead]:
        """Return the part of each source that was read, by name; of a mix in tokens.

        Args:
            samples: of the steps, by the batches of the recipe.
            sequence_length: tokens of a sample of the recipe.
        """
        if self.read:
            return {read.source: read for read in self.read}
        if self.global_batch_size is not None:
            samples = self.steps * self.global_batch_size
        tokens = samples * (self.sequence_length or sequence_length)
        total = sum(share for _, share in self.mix)
        return {
            source: PastRead(source=source, tokens=int(tokens * share / total))
            for source, share in self.mix
        }
