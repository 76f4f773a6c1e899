"""The plan of a recipe: for each stage and source what is drawn, how far its epochs get, and when
something comes a second time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megaindex.recipe.evaluation import Rounds
from megaindex.recipe.itinerary import Itinerary, PlannedStage


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What one stage draws from one source."""

    stage: str
    source: str
    first_step: int
    """Step that serves the stage's first sample; steps count from 0."""
    end_step: int
    """One past the step that serves its last sample."""
    samples: int
    share: float
    """Of the stage's samples."""
    tokens: int
    epochs_begin: float
    """Epochs of the source that were read before the stage."""
    epochs_end: float
    first_repeat: int | None
    """First step in which the stage serves a sample that was served before."""


@dataclass(frozen=True, kw_only=True)
class SourceTotal:
    """One source over the whole run."""

    source: str
    kind: str
    path: str
    tokens_per_epoch: int
    samples_per_epoch: int
    drawn: int
    epochs: float
    unseen: int
    """Samples of its epoch that the run never serves."""


@dataclass(frozen=True, kw_only=True)
class RecipePlan:
    """The answer; steps count from 0, step k is what trainers log as iteration k + 1."""

    train_iters: int
    samples_consumed: int
    tokens_consumed: int
    """Of samples of sequence_length tokens; those of instruction data may be padded."""
    samples_masked: int
    """Rows of the last batch that are padding without loss."""
    sequence_length: int
    batch_schedule: tuple[tuple[int, int], ...]
    samples_per_rank: int | None
    exhaustion: str
    stopped_by: str
    evaluation_rounds: int
    evaluation_batches: int
    """Global batches of a round."""
    evaluation_samples: int
    """Samples that a round scores, each once."""
    evaluation_masked: int
    """Rows of a round's last batch that are padding without loss."""
    evaluation_available: int
    """Samples that the validation data hold."""
    draws: tuple[Draw, ...]
    sources: tuple[SourceTotal, ...]

    def to_json(self) -> dict[str, Any]:
        """One object of plain values, as ``--json`` prints it."""
        plain = {**vars(self), "batch_schedule": [list(stage) for stage in self.batch_schedule]}
        plain["draws"] = [vars(draw) for draw in self.draws]
        plain["sources"] = [vars(source) for source in self.sources]
        return plain


def make_recipe_plan(itinerary: Itinerary) -> RecipePlan:
    """The plan of a recipe that was laid out."""
    recipe = itinerary.recipe
    rounds = itinerary.evaluation or Rounds(count=0, batches=0, samples=0, masked=0, available=0)
    samples, parallel = itinerary.num_samples, recipe.data_parallel_size
    rows = samples + itinerary.samples_masked
    return RecipePlan(
        train_iters=itinerary.num_steps,
        samples_consumed=samples,
        tokens_consumed=samples * recipe.sequence_length,
        samples_masked=itinerary.samples_masked,
        sequence_length=recipe.sequence_length,
        batch_schedule=recipe.batch.stages,
        samples_per_rank=None if parallel is None else rows // parallel,
        exhaustion=recipe.exhaustion,
        stopped_by=itinerary.stopped_by,
        evaluation_rounds=rounds.count,
        evaluation_batches=rounds.batches,
        evaluation_samples=rounds.samples,
        evaluation_masked=rounds.masked,
        evaluation_available=rounds.available,
        draws=_draws(itinerary),
        sources=_totals(itinerary),
    )


def _draws(itinerary: Itinerary) -> tuple[Draw, ...]:
    """Rows of all stages; ``reached`` is how far each source was read by the stages before."""
    reached = [0] * len(itinerary.sizes)
    rows: list[Draw] = []
    for stage in itinerary.stages:
        rows += _stage_draws(itinerary, stage, reached)
        for source, begin, count in zip(
            stage.mixed.sources, stage.mixed.begins, stage.counts, strict=True
        ):
            reached[source] = max(reached[source], begin + count)
    return tuple(rows)


def _stage_draws(itinerary: Itinerary, stage: PlannedStage, reached: list[int]) -> list[Draw]:
    recipe, mixed = itinerary.recipe, stage.mixed
    end = stage.first_sample + stage.num_samples
    rows = []
    streams = zip(mixed.sources, mixed.begins, stage.counts, strict=True)
    for stream, (source, begin, count) in enumerate(streams):
        per_epoch = itinerary.sizes[source].samples
        fresh = max(0, per_epoch - begin) if begin >= reached[source] else 0
        rows.append(
            Draw(
                stage=stage.name,
                source=recipe.sources[source].name,
                first_step=recipe.batch.iterations_within(stage.first_sample),
                end_step=recipe.batch.iterations_within(end - 1) + 1,
                samples=count,
                share=count / stage.num_samples,
                tokens=count * recipe.sequence_length,
                epochs_begin=begin / per_epoch,
                epochs_end=(begin + count) / per_epoch,
                first_repeat=_first_beyond(itinerary, stage, stream, fresh),
            )
        )
    return rows


def _first_beyond(itinerary: Itinerary, stage: PlannedStage, stream: int, fresh: int) -> int | None:
    """The step in which a stream is drawn beyond its first ``fresh`` samples of the stage."""
    if stage.counts[stream] <= fresh:
        return None
    limits = [stage.num_samples] * len(stage.mixed.sources)
    limits[stream] = fresh
    position = stage.first_sample + stage.mixing.longest(limits, stage.num_samples)
    return itinerary.recipe.batch.iterations_within(position)


def _totals(itinerary: Itinerary) -> tuple[SourceTotal, ...]:
    rows = zip(
        itinerary.recipe.sources,
        itinerary.sizes,
        itinerary.drawn(),
        itinerary.reads_to(),
        strict=True,
    )
    return tuple(
        SourceTotal(
            source=source.name,
            kind=source.kind,
            path=source.path,
            tokens_per_epoch=size.tokens,
            samples_per_epoch=size.samples,
            drawn=drawn,
            epochs=drawn / size.samples,
            unseen=max(0, size.samples - reached),
        )
        for source, size, drawn, reached in rows
    )
