"""The run of a recipe."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import Any

from megaindex.builders.recipe import OpenRecipe, OpenSource, open_recipe
from megaindex.index.documents import members_of
from megaindex.io.paths import sha256_of
from megaindex.recipe.layout import RecipeLayout
from megaindex.run.identity import canonical_forms, short_hash
from megaindex.run.run import Run, RunSource, StepShape, skipped_run
from megaindex.run.subset import rows_of, subset_of
from megaindex.settings.batch_schedule import Steps
from megaindex.settings.recipe import Recipe
from megaindex.validation import check_between


def run_of_recipe(recipe: Recipe, *, consumed_samples: int = 0) -> Run:
    """Return the run of a recipe.

    Args:
        recipe: the run.
        consumed_samples: samples served so far, on all ranks; the steps that they complete are the
            past ones.

    Raises:
        InvalidArgument: the recipe cannot be planned, or has sources without files.
        FormatError, StorageError: a source cannot be read.
    """
    return run_of_opened(open_recipe(recipe), consumed_samples=consumed_samples)


def run_of_opened(opened: OpenRecipe, *, consumed_samples: int = 0) -> Run:
    """Return the run of an opened recipe; see `run_of_recipe`."""
    recipe = opened.layout.recipe
    run = Run(
        index=opened.unskipped,
        sources=tuple(map(source_of_opened, opened.sources)),
        steps=opened.layout.steps(),
        masked_rows=opened.layout.samples_masked,
        order=_order_of(opened),
        settings=_settings(opened),
        shapes=shapes_of(opened.layout),
    )
    run = skipped_run(run, recipe.skip, opened.layout.batch)
    end = run.num_samples
    if run.skips is not None:
        end = max(end, run.skips.run_end)
    check_between("--consumed-samples", consumed_samples, 0, end, most_is="the samples of the run")
    consumed = max(consumed_samples, recipe.first_sample)
    return replace(run, past_steps=run.steps.iterations_within(consumed))


def evaluation_of_opened(opened: OpenRecipe) -> Run | None:
    """Return one round of a recipe's evaluation, a single step of all its rows; None without one.

    Every round is the same.
    """
    layout, source = opened.layout, opened.validation
    rounds, evaluation = layout.evaluation, layout.recipe.evaluation
    if rounds is None or source is None or evaluation is None:
        return None
    recipe = layout.recipe
    return Run(
        index=source.index(rounds.samples),
        sources=(source_of_opened(source),),
        steps=Steps(end=rounds.samples, size=rounds.samples),
        masked_rows=rounds.masked,
        order=_order_of(opened),
        settings=_settings(opened),
        shapes=(StepShape(0, recipe.micro_batch_size, recipe.data_parallel_size),),
        rounds=rounds.count,
        every=evaluation.interval,
        is_evaluation=True,
    )


def identity_of_opened(opened: OpenRecipe) -> str | None:
    """Return the identity of the run of a recipe, as a lock of it has; None for changes of the mix
    that no file holds.

    Raises:
        StorageError: a file of documents or of mix changes cannot be read.
    """
    recipe, runs = opened.layout.recipe, {"train": run_of_opened(opened)}
    if recipe.mix_changes is not None and recipe.mix_changes.size and not recipe.mix_changes.path:
        return None
    if (valid := evaluation_of_opened(opened)) is not None:
        runs["valid"] = valid
    rows, files = rows_of(list(opened.pairs)), rows_of(recipe.files)
    forms = canonical_forms(
        {name: subset_of(run, rows, files) for name, run in runs.items()},
        [opened.validation_cache.fingerprint(pair) for pair in opened.pairs.values()],
        [sha256_of(path)[1] for path in files],
    )
    return short_hash(forms)


def shapes_of(layout: RecipeLayout) -> tuple[StepShape, ...]:
    """Return the division of the steps of each stage whose batches have another shape."""
    recipe, shapes = layout.recipe, list[StepShape]()
    stages = {stage.name: stage for stage in recipe.stages}
    firsts = {piece.name: piece.first_sample for piece in reversed(layout.stages)}
    before: tuple[int | None, ...] = ()
    for name, first in sorted(firsts.items(), key=itemgetter(1)):
        stage = stages[name]
        ranks = recipe.micro_batch_of(stage), recipe.ranks_of(stage)
        if (recipe.length_of(stage), *ranks) != before:
            shapes.append(StepShape(first if shapes else 0, *ranks))
            before = recipe.length_of(stage), *ranks
    return tuple(shapes)


def source_of_opened(source: OpenSource) -> RunSource:
    """Return a source of an opened recipe."""
    return RunSource(
        targets=source.targets,
        name=source.corpus.name,
        sequence_lengths=source.dataset.sequence_lengths,
        cut_tokens=source.size.cut_tokens,
        cut_by=f"long_documents {source.corpus.long_documents}",
        path_prefix=source.dataset.path_prefix,
        members=members_of(source.epoch),
    )


def _settings(opened: OpenRecipe) -> dict[str, Any]:
    recipe = opened.layout.recipe
    past = {} if recipe.past is None else {"past": f"{recipe.past.steps} steps elsewhere"}
    return {
        "seed": recipe.seed,
        "stages": ", ".join(stage.name for stage in recipe.stages),
        "tail": recipe.tail,
        "exhaustion": recipe.exhaustion,
        **past,
    }


def _order_of(opened: OpenRecipe) -> str:
    """Return the order of all sources; epoch if they differ."""
    orders = {opened.layout.recipe.order_of(source.corpus) for source in opened.sources}
    return next(iter(orders)) if orders in ({"packed"}, {"blocks"}) else "epoch"
