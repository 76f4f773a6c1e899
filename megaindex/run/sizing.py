"""Sizing of the blend of a split: from samples requested to samples and epochs of each source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cached_property

from megaindex.arithmetic import ceil_div
from megaindex.errors import InvalidArgument
from megaindex.index.blend import Blend
from megaindex.index.draws import Draws, Progress
from megaindex.index.frameworks import SPLITS, FrameworkRules, PythonSum, Split, sum_as
from megaindex.run.parts import SplitPart
from megaindex.settings.run_settings import Buffer, RunSettings
from megaindex.settings.sources import Source


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Sources of the blend of one split, with the rules that turn requests into epochs."""

    row: FrameworkRules
    sequence_length: int
    names: tuple[str, ...]
    tokens: tuple[int, ...]
    """Tokens of one epoch of each source, positive."""
    weights: tuple[float | int, ...] | None
    """Explicit weights, or None."""
    buffer: Buffer
    asks_one_epoch: bool
    """True if one epoch of each source is requested: GPT-NeoX's train_epochs."""
    pass_samples: tuple[int, ...] | None = None
    """Samples of one pass over each source's documents, for samples of whole documents."""
    pass_samples_vary: bool
    """True if `pass_samples` are lower bounds over the orders of the documents."""
    walk: str = "auto"
    """`RunSettings.blend_counts`."""
    progress: Progress | None = None

    def __post_init__(self) -> None:
        for name, tokens in zip(self.names, self.tokens, strict=True):
            if tokens < 1:
                raise InvalidArgument(
                    f"{name} holds no tokens for this split; leave it out, or change --split"
                )
            samples = self.row.samples_in_epochs(1, tokens, self.sequence_length)
            if samples < 1 and not self.row.is_framework and self.pass_samples is None:
                raise InvalidArgument(
                    f"{name} holds {tokens} tokens, one sample needs {self.sequence_length + 1} "
                    f"(--seq-length {self.sequence_length} + 1); lower --seq-length"
                )

    def per_epoch(self) -> list[int]:
        """Return the samples of one epoch of each source."""
        return self.samples_of([1] * len(self.tokens))

    def samples_of(self, epochs: Sequence[Fraction | int]) -> list[int]:
        """Return the samples of these numbers of epochs of each source."""
        if self.pass_samples is not None:
            return [int(n * size) for n, size in zip(epochs, self.pass_samples, strict=True)]
        return [
            self.row.samples_in_epochs(count, size, self.sequence_length)
            for count, size in zip(epochs, self.tokens, strict=True)
        ]

    @property
    def single(self) -> bool:
        return len(self.tokens) == 1

    @property
    def one_epoch_only(self) -> bool:
        """True for several paths without weights, of which Megatron always builds one epoch."""
        unweighted = not self.single and self.weights is None
        return unweighted and self.row.request == "megatron" and self.buffer != "exact"

    @property
    def exact(self) -> bool:
        """True if requests are exactly the samples that the blend draws."""
        return self.blend.exact

    @cached_property
    def blend(self) -> Blend:
        blend = Blend.of_sources(
            self.weights,
            self.per_epoch,
            len(self.tokens),
            self.row,
            buffer=self.buffer,
            counting=self.walk,
            progress=self.progress,
        )
        if not self.single and not any(blend.weights):
            raise InvalidArgument(
                f"{' and '.join(self.names[:3])}: no sample of {self.sequence_length + 1} tokens "
                "in any source of this split; lower --seq-length, or give more documents"
            )
        return blend

    @property
    def draws(self) -> Draws:
        return self.blend.counted

    def drawn(self, samples: int) -> list[int] | None:
        """Return the draws of each source in the first ``samples``; None if not counted."""
        counts = self.draws.counts(samples)
        return None if counts is None else counts.tolist()

    def requested(self, samples: int) -> list[int] | None:
        """Return the samples requested of each source, see `Blend.requests`."""
        if self.asks_one_epoch or self.one_epoch_only:
            return self.per_epoch()
        return self.blend.requests(samples)

    def blend_size(self, samples: int) -> int:
        """Return the positions that the framework fills for ``samples`` of the blend."""
        return samples if self.one_epoch_only or self.single else self.blend.size(samples)

    def epochs(self, requested: Sequence[int]) -> list[int]:
        """Return the epochs built for the samples requested of each source."""
        if self.pass_samples is not None:
            pairs = zip(requested, self.pass_samples, strict=True)
            return [max(1, ceil_div(count, size)) for count, size in pairs]
        return [
            self.row.epochs_for(count, size, self.sequence_length)
            for count, size in zip(requested, self.tokens, strict=True)
        ]

    def built(self, requested: Sequence[int], epochs: Sequence[int]) -> list[int]:
        """Return the samples built of each source; of NeoX's whole documents, those requested."""
        return list(requested) if self.built_as_requested else self.samples_of(epochs)

    @property
    def built_as_requested(self) -> bool:
        """True for NeoX's samples of whole documents, of which no more is built."""
        return self.pass_samples is not None and self.row.is_framework

    def longest(self, epochs: Sequence[int]) -> tuple[int, bool]:
        """Return the most samples of the blend for which no source needs more than its ``epochs``.

        The second value is False if the first is a lower bound.
        """
        limits = self.samples_of(epochs)
        if self.one_epoch_only:
            return sum(limits), True
        if self.asks_one_epoch:
            return self.draws.longest(limits)
        longest, certain = self.blend.longest(limits)
        return longest, certain and (self.exact or not self.pass_samples_vary)


def sizing_of(
    run: RunSettings,
    parts: Sequence[SplitPart],
    split: Split,
    progress: Progress | None,
    train: Sequence[SplitPart] = (),
) -> Sizing:
    """Return the sizing of one split.

    Epochs for each source set the weights, of validation and test too where a corpus is divided:
    those of the sources in ``train``, by default ``parts``.

    Raises:
        InvalidArgument: the training data is shorter than a sample; the frameworks repeat it.
    """
    row, tokens, needed = run.row, sum(part.tokens for part in parts), run.sequence_length + 1
    whole = run.packing is not None or row.order == "packed"
    if split == "train" and not whole and 0 < tokens < needed:
        raise InvalidArgument(
            f"the training data holds {tokens} tokens, one sample needs {needed} (--seq-length "
            f"{run.sequence_length} + 1); lower --seq-length"
        )
    weights: tuple[float | int, ...] | None = _weights([part.source for part in parts])
    if run.target.per_source and (split == "train" or run.data.split is not None):
        samples = _per_source_samples(run, train or parts)
        weights = tuple(
            next(s for s, t in zip(samples, run.data.train, strict=True) if t is part.source)
            for part in parts
        )
    if run.data.documents_alpha is not None:
        weights = documents_weights(
            [part.sequences for part in parts], run.data.documents_alpha, row.python_sum
        )
    if row.train_epochs == "reshuffled":
        weights = None  # each sample of each source is drawn
    if split != "train":  # Megatron-DeepSpeed has an exact number of epochs for training alone
        row = replace(row, exact_num_epochs=None)
    return Sizing(
        row=row,
        sequence_length=run.sequence_length,
        names=tuple(part.source.path or f"source {i}" for i, part in enumerate(parts, 1)),
        tokens=tuple(part.tokens for part in parts),
        weights=weights,
        buffer=_buffer(run, row, weights, len(parts)),
        pass_samples=tuple(p.pass_samples or 0 for p in parts) if whole else None,
        pass_samples_vary=run.packing is not None and run.packing.pack_impl != "unpacked",
        asks_one_epoch=run.target.kind == "loader_epochs",
        walk=run.blend_counts,
        progress=progress,
    )


def _per_source_samples(run: RunSettings, parts: Sequence[SplitPart]) -> tuple[int, ...]:
    """Return the samples of each source's epochs, which are its weights."""
    samples = tuple(
        run.row.samples_in_epochs(epochs, part.tokens, run.sequence_length)
        if part.packing is None
        else int(epochs * part.packing.num_samples)
        for epochs, part in zip(run.target.per_source, parts, strict=True)
    )
    if min(samples) < 1:
        raise InvalidArgument(
            f"--epochs: source {samples.index(min(samples)) + 1} gives no sample of "
            f"{run.sequence_length} tokens; raise its epochs, or leave it out"
        )
    return samples


def documents_weights(documents: Sequence[int], alpha: float, rule: PythonSum) -> tuple[float, ...]:
    """Return GPT-NeoX's weights by numbers of documents, in its own double expressions.

    The weights are share ** alpha · (1 - share), normalised by sums of the rule.

    Raises:
        InvalidArgument: they are beyond the range of doubles.
    """
    if len(documents) == 1:
        return (1.0,)
    shares = [count / sum(documents) for count in documents]
    try:
        powers = [share**alpha for share in shares]
        total = sum_as(rule, powers)
        scaled = [power / total * (1 - share) for power, share in zip(powers, shares, strict=True)]
        whole = sum_as(rule, scaled)
        return tuple(weight / whole for weight in scaled)
    except (OverflowError, ZeroDivisionError):
        raise InvalidArgument(
            f"weighted_sampler_alpha {alpha} gives weights beyond the range of doubles; give one "
            "from 0 to 1"
        ) from None


def _weights(sources: Sequence[Source]) -> tuple[float, ...] | None:
    weights = [source.weight for source in sources if source.weight is not None]
    return tuple(weights) if weights else None


def _buffer(
    run: RunSettings, row: FrameworkRules, weights: Sequence[float | int] | None, num_sources: int
) -> Buffer:
    """Return the run's buffer, else the framework's own."""
    if run.target.kind == "loader_epochs":
        return 1.0
    own = _own_buffer(run, row, weights, num_sources)
    if own_sources(run) and num_sources == 1 and row.weight_alone == "ignored":
        return own if run.variance_buffer != "exact" else "exact"
    return run.variance_buffer or own


def own_buffers(run: RunSettings) -> list[tuple[int, float]]:
    """Return the number of sources, and the framework's own buffer, of each split with sources."""
    found = []
    for sources in filter(None, (getattr(run.data, split) for split in SPLITS)):
        weights = (1.0,) if run.target.per_source else _weights(sources)
        found.append((len(sources), _own_buffer(run, run.row, weights, len(sources))))
    return found


def own_sources(run: RunSettings) -> bool:
    """Return True if each split has its own sources; for Megatron, train alone suffices."""
    if run.row.order == "megatron":
        return run.data.apart
    return run.data.split is None and bool(run.data.valid or run.data.test)


def _own_buffer(
    run: RunSettings, row: FrameworkRules, weights: Sequence[float | int] | None, num_sources: int
) -> float:
    """Return the buffer that the framework applies.

    Megatron builds one epoch of several paths without weights; other frameworks give them equal
    weights.
    """
    weighted = weights is not None or (num_sources > 1 and row.request != "megatron")
    if own_sources(run) and num_sources == 1 and row.weight_alone != "as given":
        weighted = row.weight_alone == "always"
    return row.default_buffer(weighted=weighted)
