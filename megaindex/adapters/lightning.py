"""Data of a locked run for Lightning's Trainer.

    trainer = lightning.Trainer(max_epochs=1, accumulate_grad_batches=4)
    trainer.fit(module, datamodule=LockedDataModule("run.lock"))   # or with ckpt_path

Lightning's checkpoints hold the position and the receipts of all ranks, and a run continues on any
number of ranks. Batches have the fields of `megaindex.adapters.RunLoader`.
"""

from __future__ import annotations

import os
from typing import Any

from megaindex.adapters.run_loader import RunLoader
from megaindex.errors import InvalidArgument
from megaindex.lock.lock_file import Lock

try:
    from lightning.pytorch import LightningDataModule
except ImportError as error:
    raise InvalidArgument(
        f"megaindex.adapters.lightning needs lightning, which cannot be imported: {error}; pip "
        "install lightning"
    ) from None

__all__ = ["LockedDataModule"]


class LockedDataModule(LightningDataModule):  # type: ignore[misc]
    """Data module of Lightning whose training samples are those of a lock.

    Args:
        lock: path of the lock, or the lock.
        fields: fields of a batch, as for `megaindex.adapters.RunLoader`.
        micro_batch_size: rows of one micro batch of a rank. Default: that of the lock, or 1.
        **opening: other arguments of `megaindex.adapters.RunLoader`.
    """

    def __init__(
        self,
        lock: str | os.PathLike[str] | Lock,
        *,
        fields: str = "megatron",
        micro_batch_size: int | None = None,
        **opening: Any,
    ) -> None:
        super().__init__()
        self._lock = lock
        self._opening = {"fields": fields, "micro_batch_size": micro_batch_size, **opening}
        self.run: RunLoader | None = None

    def train_dataloader(self) -> RunLoader:
        """Return the loader of this rank, whose state Lightning saves and loads."""
        trainer = self.trainer
        assert trainer is not None, "Lightning calls it"
        ranks = trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        size = trainer.accumulate_grad_batches
        self.run = run = RunLoader(
            self._lock,
            data_parallel_rank=ranks["rank"],
            data_parallel_size=ranks["num_replicas"],
            micro_batches_per_step=size,
            **self._opening,
        )
        steps = len(run) // size
        epochs = trainer.max_epochs
        if epochs != 1 and not 0 <= trainer.max_steps <= steps:
            raise InvalidArgument(
                f"the run of the lock has {steps} steps, and the trainer max_epochs={epochs}, "
                f"max_steps={trainer.max_steps}; set max_epochs=1, since the order holds all "
                f"epochs, or max_steps up to {steps}"
            )
        return run
