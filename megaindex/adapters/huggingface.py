"""Data of a locked run for Hugging Face's Trainer, and for classes derived from it.

    trainer = Trainer(model=model, args=args)               # without train_dataset
    megaindex.adapters.huggingface.attach(trainer, "run.lock")
    trainer.train()                                         # or resume_from_checkpoint=True

Each checkpoint gets a file ``megaindex.json`` with the position and the receipts of all ranks, and
a resumed run continues there on any number of ranks, without reading the batches of the past.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from functools import partial
from operator import itemgetter
from typing import Any

from megaindex.adapters.run_loader import (
    Batch,
    RunLoader,
    from_first_rank,
    given_rows,
    take_rows,
)
from megaindex.errors import FormatError, InvalidArgument, MissingFile
from megaindex.io.atomic import Damaged, read_object, write_file
from megaindex.io.paths import as_storage_error
from megaindex.lock.lock_file import Lock

try:
    from torch.utils.data import BatchSampler, DataLoader, Dataset
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
except ImportError as error:
    raise InvalidArgument(
        f"megaindex.adapters.huggingface needs transformers, which cannot be imported: {error}; "
        "pip install transformers accelerate"
    ) from None

__all__ = ["TrainerData", "attach"]

FILE = "megaindex.json"


def attach(trainer: Any, lock: str | os.PathLike[str] | Lock, **opening: Any) -> TrainerData:
    """Let a trainer read the samples of a lock, and save and load its position.

    Args:
        trainer: a Trainer of transformers without a training dataset.
        lock: path of the lock, or the lock.
        **opening: other arguments of `megaindex.adapters.RunLoader`: search, cache_dir, options,
            keys, and ranks where they are not those of torch.distributed.

    Returns:
        The data of the trainer, whose ``run`` changes the mix and measures waits.

    Raises:
        InvalidArgument: the trainer has a dataset of its own, or another loader.
    """
    if trainer.train_dataset is not None:
        raise InvalidArgument(
            "the trainer has a train_dataset, which it would shuffle with a sampler of its own; "
            "make it without one, the lock has the samples and their order"
        )
    if "get_train_dataloader" in vars(trainer):
        raise InvalidArgument("the trainer has a loader already; attach one lock to a trainer")
    data = TrainerData(trainer, lock, opening)
    trainer.train = partial(data.train, trainer.train)
    trainer.get_train_dataloader = data.dataloader
    trainer.training_step = partial(data.training_step, trainer.training_step)
    trainer.add_callback(data)
    return data


class TrainerData(TrainerCallback):  # type: ignore[misc]
    """The data of a trainer: its dataloader, and the file in its checkpoints.

    Attributes:
        run: the loader of this rank; None until training begins.
    """

    def __init__(self, trainer: Any, lock: Any, opening: dict[str, Any]) -> None:
        self._trainer, self._lock, self._opening = trainer, lock, opening
        self._checkpoint: str | None = None
        self.run: RunLoader | None = None
        self._rows: Batch | None = None

    def rows(self) -> Batch:
        """Return the fields of ``keys`` of the micro batch of the current ``training_step``.

        Raises:
            InvalidArgument: ``keys`` is not set, or no step has begun.
        """
        return given_rows(self._rows)

    def training_step(self, step: Any, model: Any, inputs: Any, *others: Any, **more: Any) -> Any:
        """Call ``Trainer.training_step`` without the fields that the model does not take."""
        self._rows = take_rows(inputs)
        return step(model, inputs, *others, **more)

    def train(self, train: Any, resume_from_checkpoint: Any = None, **others: Any) -> Any:
        """Call ``Trainer.train``, and keep the checkpoint from which it resumes."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = get_last_checkpoint(self._trainer.args.output_dir) or True
        self._checkpoint = resume_from_checkpoint or None
        return train(resume_from_checkpoint=resume_from_checkpoint, **others)

    def dataloader(self) -> DataLoader[Any]:
        """Return the dataloader of this rank, at the position of the checkpoint."""
        args = self._trainer.args
        self.run = run = RunLoader(
            self._lock,
            fields="huggingface",
            micro_batch_size=self._trainer._train_batch_size,
            micro_batches_per_step=args.gradient_accumulation_steps,
            **self._opening,
        )
        run.check_length(args.max_steps, "num_train_epochs", args.num_train_epochs)
        if args.ignore_data_skip:
            raise InvalidArgument(
                "ignore_data_skip must be False: a resumed run would begin its epoch anew; the "
                "batches of the past are not read"
            )
        if self._checkpoint is not None:
            run.load_state_dict(from_first_rank(partial(_read, self._checkpoint)))
        # accelerate's skip_first_batches makes another DataLoader of dataset and batch sampler, and
        # leaves out the numbers of the batches of the past
        numbers = BatchSampler(range(len(run)), batch_size=1, drop_last=False)
        return DataLoader(_Batches(run), batch_sampler=numbers, collate_fn=itemgetter(0))

    def on_save(self, args: Any, state: Any, control: Any, **_others: Any) -> None:  # noqa: ARG002
        """Write the state of all ranks into the checkpoint that the trainer has written."""
        if self.run is None:
            return
        folder = self._trainer._get_output_dir(trial=None)
        path = os.path.join(folder, f"checkpoint-{state.global_step}", FILE)
        data = self.run.state_dict()
        from_first_rank(partial(_write, path, data))


class _Batches(Dataset[Any]):
    """Micro batches of a rank by number, read in order only."""

    def __init__(self, run: RunLoader) -> None:
        self._run = run
        self._batches: Iterator[Any] | None = None

    def __len__(self) -> int:
        """Return the samples of the run on all ranks, of which the trainer computes its speed."""
        rows: int = self._run.loader.sampler.ranks.rows_per_round
        return len(self._run) * rows

    def __getitem__(self, number: int) -> Any:
        if number != self._run.returned:
            raise InvalidArgument(
                f"the trainer asks for micro batch {number} of this rank, and the run is at "
                f"{self._run.returned}: the checkpoint has other steps than the trainer's state; "
                "resume with the batch size of the checkpoint"
            )
        if self._batches is None:
            self._batches = self._run.batches()
        batch, rows = next(self._batches)
        return {**batch, **rows}  # they stay together: the trainer takes batches ahead


def _read(checkpoint: str) -> dict[str, Any]:
    path = os.path.join(checkpoint, FILE)
    try:
        with as_storage_error(path, "cannot read"):
            return read_object(path)
    except MissingFile:
        raise MissingFile(
            f"{path}: does not exist: the checkpoint was written without megaindex, or not "
            "completely; resume from one that has the file"
        ) from None
    except Damaged as error:
        raise FormatError(f"{path}: {error}; resume from an intact checkpoint") from None


def _write(path: str, state: dict[str, Any]) -> bool:
    write_file(path, lambda file: file.write(json.dumps(state).encode()), overwrite=True)
    return True
