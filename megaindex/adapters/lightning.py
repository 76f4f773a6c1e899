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
        self.run = run = RunLoader(
            self._lock,
            data_parallel_rank=ranks["rank"],
            data_parallel_size=ranks["num_replicas"],
            micro_batches_per_step=trainer.accumulate_grad_batches,
            **self._opening,
        )
        run.check_length(trainer.max_steps, "max_epochs", trainer.max_epochs)
        return run
