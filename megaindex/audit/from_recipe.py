"""From a recipe to the stream of its training: its sources opened, its stages laid out."""

from __future__ import annotations

from megaindex.audit.stream import AuditSource, Stream, step_bounds
from megaindex.build.recipe import open_recipe
from megaindex.recipe.model import Recipe


def stream_of_recipe(recipe: Recipe, *, consumed_samples: int = 0) -> Stream:
    """What a recipe serves; ``consumed_samples`` divide its past from its future.

    Raises:
        InvalidArgument: the recipe cannot be laid out, or has sources without files.
        FormatError, StorageError: a source cannot be read.
    """
    opened = open_recipe(recipe)
    bounds, past = step_bounds(recipe.batch, consumed_samples, opened.itinerary.num_samples)
    return Stream(
        index=opened.index,
        sources=tuple(
            AuditSource(
                name=source.corpus.name,
                lengths=source.dataset.sequence_lengths,
                cut_tokens=source.size.cut_tokens,
                cut_by=f"long_documents {source.corpus.long_documents}",
            )
            for source in opened.sources
        ),
        step_bounds=bounds,
        past_steps=past,
        masked_rows=opened.itinerary.samples_masked,
        order="epoch",
        micro_batch_size=recipe.micro_batch_size,
        data_parallel_size=recipe.data_parallel_size,
    )
