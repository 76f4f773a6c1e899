"""The run of a recipe."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from megaindex.builders.recipe import OpenRecipe, OpenSource, open_recipe
from megaindex.recipe.recipe import Recipe
from megaindex.run.run import Run, RunSource, skipped_run
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
        step_bounds=opened.layout.step_bounds(),
        masked_rows=opened.layout.samples_masked,
        order=_order_of(opened),
        settings={
            "seed": recipe.seed,
            "stages": ", ".join(stage.name for stage in recipe.stages),
            "tail": recipe.tail,
            "exhaustion": recipe.exhaustion,
            **({} if recipe.past is None else {"past": f"{recipe.past.steps} steps elsewhere"}),
        },
        micro_batch_size=recipe.common_micro_batch_size,
        data_parallel_size=recipe.common_data_parallel_size,
    )
    run = skipped_run(run, recipe.skip, opened.layout.batch)
    end = int(run.step_bounds[-1])
    if run.skips is not None:
        end = max(end, run.skips.run_end)
    check_between("--consumed-samples", consumed_samples, 0, end, most_is="the samples of the run")
    consumed = max(consumed_samples, recipe.first_sample)
    past = int(np.searchsorted(run.step_bounds, consumed, "right")) - 1
    return replace(run, past_steps=past)


def source_of_opened(source: OpenSource) -> RunSource:
    """Return a source of an opened recipe."""
    return RunSource(
        name=source.corpus.name,
        lengths=source.dataset.sequence_lengths,
        cut_tokens=source.size.cut_tokens,
        cut_by=f"long_documents {source.corpus.long_documents}",
        path_prefix=source.dataset.path_prefix,
    )


def _order_of(opened: OpenRecipe) -> str:
    """Return the order of all sources; epoch if they differ."""
    orders = {opened.layout.recipe.order_of(source.corpus) for source in opened.sources}
    return next(iter(orders)) if orders in ({"packed"}, {"blocks"}) else "epoch"
