"""Loader of a recipe's run.

opened = open_recipe(read_recipe("run.yaml"))
loader = loader_of_recipe(opened, data_parallel_rank=rank, data_parallel_size=world)
for batch in loader:
    train(batch)
    log(loader.ledger.totals(loader.consumed_samples))
checkpoint["data"] = loader.state_dict()
"""

from __future__ import annotations

from functools import cache
from typing import Any

from megaindex.builders.recipe import OpenRecipe
from megaindex.index.balance import CostModel
from megaindex.loader.checkpoint import Contents, contents
from megaindex.loader.loader import Loader, loader_of
from megaindex.loader.run_recipe import RunRecipe
from megaindex.loader.targets import targets_of
from megaindex.run.from_recipe import evaluation_of_opened, identity_of_opened, run_of_opened


def loader_of_recipe(
    opened: OpenRecipe,
    *,
    data_parallel_rank: int = 0,
    data_parallel_size: int | None = None,
    micro_batch_size: int | None = None,
    balance: CostModel | None = None,
    **loading: Any,
) -> Loader:
    """Return the `Loader` of one rank of a recipe's run.

    Rows of instruction data carry loss at their targets only, and never across documents; padding
    carries no loss. A checkpoint, a few kilobytes, holds the recipe, the fingerprints of its
    sources, the receipt of the samples served and the number of samples consumed.

    Args:
        opened: a result of `megaindex.recipe.open_recipe`.
        data_parallel_rank: rank of this process, from 0.
        data_parallel_size: number of ranks. Default: that of the recipe, or 1. Iteration ends with
            an error at a stage that names another number, unless its batches can be divided by
            this one: continue from the state with as many ranks as the stage names.
        micro_batch_size: rows of one micro batch of a rank, in every stage. Default: those of the
            stages, or 1.
        balance: cost model by which each step's samples are assigned to the ranks, as for
            `MicroBatchSampler`; not in evaluations. The totals of ``ledger`` are then exact at the
            end of each step.
        **loading: other arguments of `Loader`: options, content, whose fingerprints are cached in
            the directory given to ``open_recipe``, reader, read_ahead, num_threads, bytes_ahead,
            pin_memory, device, restore_fields.

    Raises:
        InvalidArgument: a global batch is not a multiple of micro batch size × ranks.
        StorageError: a source cannot be read.
    """

    @cache
    def identity() -> str | None:
        return identity_of_opened(opened)

    if opened.layout.recipe.files:
        identity()  # of the files as they are now
    return loader_of(
        run_of_opened(opened),
        fingerprints=opened.fingerprints,
        identity=identity,
        evaluation=lambda: evaluation_of_opened(opened),
        contents=lambda whole: _contents(opened, whole),
        recipe=RunRecipe(lambda: opened, is_given=True),
        data_parallel_rank=data_parallel_rank,
        data_parallel_size=data_parallel_size,
        micro_batch_size=micro_batch_size,
        balance=balance,
        **loading,
    )


def _contents(opened: OpenRecipe, whole: bool) -> list[Contents]:
    cache = opened.validation_cache
    found = contents(opened.datasets, targets_of(opened), whole=whole, of=cache.content)
    cache.save()
    return found
