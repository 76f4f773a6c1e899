"""Dataloader of torchtitan over a locked run.

    config = llama3_debugmodel()                            # in the function that --config names
    config.dataloader = LockedDataLoader.Config(lock="run.lock")

Every sample comes once an epoch on any number of ranks, and a checkpoint continues on any other
number. Set ``training.seq_len``, ``training.global_batch_size`` and ``training.steps`` to those of
the lock: the first is checked when the dataloader is built, the second before the first update of
the model and before each checkpoint.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from megaindex.adapters.run_loader import Batch, RunLoader, given_rows
from megaindex.errors import InvalidArgument
from megaindex.loader.batch import SampleOptions

try:
    import torch
    from torch.optim.optimizer import register_optimizer_step_pre_hook
    from torchtitan.components.dataloader import BaseDataLoader
except ImportError as error:
    other = sys.modules.get("torchtitan") and str(error.name).startswith("torchtitan.")
    reason = "has no such module: releases up to 0.3 are served" if other else "cannot be imported"
    raise InvalidArgument(
        f"megaindex.adapters.torchtitan needs torchtitan, which {reason}: {error}; pip install "
        "torchtitan"
    ) from None

__all__ = ["LockedDataLoader"]


class _InputFields(dict[str, torch.Tensor]):
    """Inputs of a micro batch; they call ``begin`` when the trainer takes ``input``."""

    def __init__(self, inputs: Batch, begin: Callable[[], None]) -> None:
        super().__init__(inputs)
        self._begin = begin

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "input":
            self._begin()
        return super().__getitem__(name)


class LockedDataLoader(BaseDataLoader):  # type: ignore[misc]
    """Dataloader of torchtitan whose samples are those of a lock.

    Its state is one text, equal on all ranks, with the receipts of all of them.

    Args:
        config: settings of the dataloader.
        dp_world_size: number of data-parallel ranks.
        dp_rank: data-parallel rank of this process.
        seq_len: tokens of a sample, those of the lock.
        local_batch_size: rows of a micro batch.
        snapshot_every_n_steps: micro batches between checkpoints.
        **_others: other arguments of torchtitan's trainer.

    Raises:
        InvalidArgument: the trainer's settings contradict the lock.
        FormatError, StorageError: as `megaindex.lock.open_run`.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(BaseDataLoader.Config):  # type: ignore[misc]
        """Settings of the dataloader.

        Attributes:
            lock: path of the lock.
            search: folder in which pairs are sought that are not at their paths.
            cache_dir: cache of built indices.
            document_positions: restart positions in each document, as torchtitan's own datasets do.
            keys: True or ``"wide"``, as for `megaindex.loader.SampleOptions`; see
                `LockedDataLoader.rows`.
        """

        lock: str = ""
        search: str | None = None
        cache_dir: str | None = None
        document_positions: bool = True
        keys: bool | str = False

    def __init__(
        self,
        config: Config,
        *,
        dp_world_size: int,
        dp_rank: int,
        seq_len: int,
        local_batch_size: int,
        snapshot_every_n_steps: int | None = None,
        **_others: Any,
    ) -> None:
        if not config.lock:
            raise InvalidArgument("dataloader.lock must be the path of a lock; see megaindex lock")
        self._run = RunLoader(
            config.lock,
            fields="torchtitan",
            data_parallel_rank=dp_rank,
            data_parallel_size=dp_world_size,
            micro_batch_size=local_batch_size,
            sequence_length=seq_len,
            search=config.search,
            cache_dir=config.cache_dir,
            options=SampleOptions(
                reset_position_ids=config.document_positions,
                boundaries="documents",
                keys=config.keys,  # type: ignore[arg-type]
            ),
        )
        self._rows: Batch | None = None
        self._check_checkpoint(snapshot_every_n_steps)

    def rows(self) -> Batch:
        """Return the fields of ``keys``, on the CPU, of the micro batch whose forward pass began.

        That is the one whose ``input`` the trainer took last, in ``post_dataloading_process``; with
        pipelines it takes those of all micro batches of a schedule before the first pass.

        Raises:
            InvalidArgument: ``keys`` is not set, or no pass has begun.
        """
        return given_rows(self._rows)

    def _begin(self, rows: Batch) -> None:
        self._rows = rows

    @property
    def run(self) -> RunLoader:
        """The loader of this rank."""
        return self._run

    def __iter__(self) -> Iterator[tuple[dict[str, torch.Tensor], torch.Tensor]]:
        """Yield micro batches, and check how many the trainer takes for its first update."""
        first, is_checked = self._run.returned, False

        def check(*_: Any) -> None:
            nonlocal is_checked
            if not is_checked:
                is_checked = True
                self._run.check_steps(self._run.returned - first)

        # the trainer does not pass its global batch size to the dataloader
        hook = register_optimizer_step_pre_hook(check)
        try:
            for (inputs, labels), rows in self._run.batches():
                yield _InputFields(inputs, partial(self._begin, rows)), labels
                if is_checked:  # not in the hook: hooks are iterated over there
                    hook.remove()
        finally:
            hook.remove()

    def __len__(self) -> int:
        return len(self._run)

    def _check_checkpoint(self, micro_batches: int | None) -> None:
        """Raise InvalidArgument if checkpoints would lie within a step of the lock."""
        size = self._run.micro_batches_per_step
        if micro_batches is not None and micro_batches % size:
            raise InvalidArgument(
                f"a checkpoint after {micro_batches} micro batches would lie within a step of "
                f"{size}; set training.global_batch_size to that of the lock"
            )

    def state_dict(self) -> dict[str, Any]:
        """Return the joined state as one text."""
        self._check_checkpoint(self._run.returned)
        return self._run.text_state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a result of `state_dict`, with any number of ranks."""
        self._run.load_text_state_dict(
            state_dict,
            "leave it out with checkpoint.exclude_from_loading=['dataloader'] to begin the data at "
            "its start",
        )
