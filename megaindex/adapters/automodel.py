"""NeMo Automodel: a locked run in its recipe, and megaindex's kernels in its own datasets.

    recipe = TrainFinetuneRecipeForNextTokenPrediction(config)   # without dataset
    megaindex.adapters.automodel.attach(recipe, "run.lock")
    recipe.setup()

The checkpoints of the recipe hold the position and the receipts of all ranks, and a run continues
on any number of ranks.

For runs that keep Automodel's copy of Megatron's datasets, `install` replaces the function that
compiles its helpers on every node by megaindex's kernels, before or after it is imported; samples,
order and cache files stay the same.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import ModuleType
from typing import Any

import megaindex.helpers
from megaindex.adapters.policy import Patches, after_import
from megaindex.adapters.run_loader import Batch, RunLoader, given_rows, take_rows
from megaindex.errors import InvalidArgument
from megaindex.lock.lock_file import Lock

__all__ = ["attach", "install", "uninstall"]

PACKAGE = "nemo_automodel.components.datasets.llm"
HOME = f"{PACKAGE}.megatron.megatron_utils"
USERS = (f"{PACKAGE}.megatron.helpers", f"{PACKAGE}.megatron_dataset")  # which import it by name

_patches = Patches()
_cancel: list[Callable[[], None]] = []


def install() -> None:
    """Replace the ``compile_helper`` of Automodel 0.7 on by a function that returns
    `megaindex.helpers`.

    Raises:
        InvalidArgument: Automodel is not installed, or imports its compiled module by name, as
            before 0.7.
    """
    _check_installed()
    if _patches or _cancel:
        return
    _cancel.append(after_import(HOME, _replace))


def uninstall() -> None:
    """Undo `install`."""
    while _cancel:
        _cancel.pop()()
    _patches.undo()


def _replace(home: ModuleType) -> None:
    theirs = home.compile_helper
    if theirs.__annotations__.get("return") not in (ModuleType, "ModuleType", "types.ModuleType"):
        _cancel.clear()
        raise InvalidArgument(
            "megaindex.adapters.automodel.install() is for Automodel 0.7 on: the one that is "
            "installed imports its compiled helpers by name; update it, or leave install() out"
        )
    for module in (home, *(sys.modules[name] for name in USERS if name in sys.modules)):
        if getattr(module, "compile_helper", None) is theirs:
            _patches.replace(module, "compile_helper", _compiled)


def _compiled() -> ModuleType:
    """Return the functions of the compiled module, by the same names and arguments."""
    return megaindex.helpers


def _check_installed() -> None:
    if importlib.util.find_spec("nemo_automodel") is None:
        raise InvalidArgument(
            "megaindex.adapters.automodel needs nemo_automodel, which cannot be imported: it is "
            "not installed; pip install nemo-automodel"
        )


def attach(recipe: Any, lock: str | os.PathLike[str] | Lock, **opening: Any) -> None:
    """Let a recipe read the samples of a lock, before its ``setup``.

    Args:
        recipe: a recipe of Automodel whose configuration has no dataset to train on; ``dataset``
            may hold a tokenizer, which the recipe saves with the model.
        lock: path of the lock, or the lock.
        **opening: other arguments of `megaindex.adapters.RunLoader`: search, cache_dir, options,
            keys; ``recipe.dataloader.rows()`` then has the rows of the current micro batch.

    Raises:
        InvalidArgument: Automodel is not installed, or the recipe has a dataset or packing of its
            own.
    """
    _check_installed()
    from nemo_automodel.components.config.loader import ConfigNode

    config = recipe.cfg
    if "dataloader" in vars(config):
        raise InvalidArgument(
            "the recipe is set up, or a lock is attached already; attach one lock to a recipe, "
            "before its setup"
        )
    for setting in ("dataset._target_", "packed_sequence.packed_sequence_size"):
        if config.get(setting, None):
            raise InvalidArgument(
                f"the recipe has a {setting.partition('.')[0]} of its own; leave {setting} out of "
                "its configuration, the lock has the samples and their order"
            )
    dataset = config.get("dataset", None)
    dataset = {} if dataset is None else dataset.to_dict()
    # the two settings that the recipe reads to make its dataloader
    vars(config)["dataset"] = ConfigNode({**dataset, "_target_": None})
    vars(config)["dataloader"] = _DataloaderConfig(recipe, lock, opening)


class _DataloaderConfig:
    """The settings of a recipe's training dataloader, with what the recipe asks of its own."""

    dataset_builds_on_all_ranks = True
    emits_thd = False
    packing = None

    def __init__(self, recipe: Any, lock: Any, opening: dict[str, Any]) -> None:
        self._recipe, self._config = recipe, recipe.cfg
        self._lock, self._opening = lock, opening
        self.seed = self._config.get("seed", 42)

    def build(
        self, *, dp_rank: int, dp_world_size: int, pp_enabled: bool = False, **_others: Any
    ) -> RecipeDataLoader:
        """Return the dataloader of this rank, after comparing the schedule with the lock."""
        if pp_enabled:
            raise InvalidArgument(
                "a lock cannot be attached to a recipe with pipelines, whose dataloader also makes "
                "their masks; set distributed.pp_size=1"
            )
        schedule = self._config.step_scheduler
        rows = self._config.get("step_scheduler.local_batch_size", 1)
        run = RunLoader(
            self._lock,
            fields="huggingface",
            data_parallel_rank=dp_rank,
            data_parallel_size=dp_world_size,
            micro_batch_size=rows,
            micro_batches_per_step=schedule.global_batch_size // (rows * dp_world_size),
            **self._opening,
        )
        run.check_length(schedule.max_steps, "step_scheduler.num_epochs", schedule.num_epochs)
        loader = RecipeDataLoader(run)
        self._recipe._forward_backward_step = partial(
            loader.forward_backward_step, self._recipe._forward_backward_step
        )
        return loader


class RecipeDataLoader:
    """Dataloader of a recipe. Its state is one text, equal on all ranks."""

    use_distributed_checkpointing = True  # so that the recipe asks all ranks for the state

    def __init__(self, run: RunLoader) -> None:
        self.run = run
        self._rows: Batch | None = None

    def __len__(self) -> int:
        return len(self.run)

    def __iter__(self) -> Iterator[Any]:
        for batch, rows in self.run.batches():
            del batch["shift_labels"]  # the recipe compares labels as they are
            yield {**batch, **rows}  # they stay together: the recipe takes the batches of a step

    def rows(self) -> Batch:
        """Return the fields of ``keys`` of the micro batch whose forward pass began last.

        Raises:
            InvalidArgument: ``keys`` is not set, or no step has begun.
        """
        return given_rows(self._rows)

    def forward_backward_step(
        self, step: Any, number: int, batch: Any, *others: Any, **more: Any
    ) -> Any:
        """Call the recipe's ``_forward_backward_step`` without the fields of ``keys``."""
        if more.get("is_train", True):
            self._rows = take_rows(batch)
        return step(number, batch, *others, **more)

    def state_dict(self) -> dict[str, str]:
        """Return the joined state as one text."""
        return self.run.text_state_dict()

    def load_state_dict(self, state_dict: dict[str, str]) -> None:
        """Continue from a result of `state_dict`, with any number of ranks."""
        self.run.load_text_state_dict(
            state_dict, "restore a checkpoint of a run on a lock, or begin a new run"
        )
