"""Loader of a locked run under any trainer: its fields, its ranks, and one state for all of them.

loader = RunLoader("run.lock", fields="huggingface")   # ranks of torch.distributed
for batch in loader:
    loss = model(**batch).loss
checkpoint["data"] = loader.state_dict()               # called on every rank, equal on all
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeVar

import megaindex
from megaindex.errors import FormatError, InvalidArgument, MegaIndexError, StorageError
from megaindex.io.atomic import Damaged, parse_object

try:
    import torch
    from torch import distributed
except ImportError as error:
    raise InvalidArgument(
        f"the adapters of trainers need torch, which cannot be imported: {error}; pip install "
        "'megaindex[torch]'"
    ) from None

from megaindex.adapters.reports import logger, on_rank_0
from megaindex.loader.batch import SampleOptions
from megaindex.loader.loader import Loader
from megaindex.loader.lock_loader import open_run
from megaindex.loader.receipts import join_states
from megaindex.loader.row_fields import row_fields
from megaindex.loader.run_recipe import MixController
from megaindex.loader.waits import Waits
from megaindex.lock.lock_file import Lock, read_lock, section_digest
from megaindex.validation import check_between, check_choice

Batch = dict[str, torch.Tensor]
Result = TypeVar("Result")
FIELDS = ("megatron", "huggingface", "torchtitan")
_TEXT = "megaindex"  # key of the state in a checkpoint of DCP
IGNORED = -100  # label without loss, of PyTorch's cross_entropy and of all three trainers


class RunLoader:
    """Iterable over the batches of one rank of a locked run, for trainers that save one state.

    Trainers take it as it is: since it is not a DataLoader, they neither replace its sampler nor
    divide it between the ranks once more. It is made on every rank, and fails on all of them if one
    cannot open the run. It is iterated once: the order holds all epochs.

    Args:
        lock: path of the lock, or the lock.
        fields: fields of a batch. ``megatron``: those of `BatchMaker`. ``huggingface``:
            ``input_ids``, ``labels`` and ``shift_labels``, both the next tokens, since models
            shift ``labels`` alone; and ``position_ids`` if the options reset them. ``torchtitan``:
            a pair of a dict with ``input`` and ``positions``, and labels. In both, labels without
            loss are -100.
        data_parallel_rank: rank of this process. Default: that of torch.distributed, or 0.
        data_parallel_size: number of ranks. Default: that of torch.distributed, or 1.
        micro_batch_size: rows of one micro batch of a rank. Default: that of the lock, or 1.
        micro_batches_per_step: those of the trainer, its gradient accumulation, to be checked.
        sequence_length: that of the trainer, to be checked.
        keys: True or ``"wide"``, as for `megaindex.loader.SampleOptions`: the fields that say what
            each row is are in the batch with ``fields="megatron"``, else in `rows`, since models
            do not take them. Default: that of ``options``.
        joined: the state has the receipts of all ranks, which are gathered. False: those of this
            rank alone, for processes that torch.distributed does not connect.
        **opening: other arguments of `megaindex.lock.open_run`: search, cache_dir, options, device,
            and so on.

    Raises:
        InvalidArgument: the trainer's settings contradict the lock, or ranks are missing.
        FormatError, StorageError: as `megaindex.lock.open_run`, on this rank or another.
    """

    def __init__(
        self,
        lock: str | os.PathLike[str] | Lock,
        *,
        fields: str = "megatron",
        data_parallel_rank: int | None = None,
        data_parallel_size: int | None = None,
        micro_batch_size: int | None = None,
        micro_batches_per_step: int | None = None,
        sequence_length: int | None = None,
        keys: bool | Literal["wide"] | None = None,
        joined: bool = True,
        **opening: Any,
    ) -> None:
        check_choice("fields", fields, FIELDS)
        self._fields, self._joined = fields, joined
        self._options: SampleOptions = opening.pop("options", None) or SampleOptions()
        if keys is not None:
            self._options = replace(self._options, keys=keys)
        self._rows_now: Batch | None = None
        if fields != "megatron" and self._options.create_attention_mask:
            raise InvalidArgument(
                f"create_attention_mask must be off with fields={fields!r}, whose masks differ; "
                "the model makes its own"
            )
        rank, size = _ranks(data_parallel_rank, data_parallel_size)

        def open_lock() -> str:
            read = read_lock(lock)
            self._name, self._identity = read.path, read.identity
            self._loader: Loader = open_run(
                read,
                data_parallel_rank=rank,
                data_parallel_size=size,
                micro_batch_size=micro_batch_size,
                options=self._options,
                **opening,
            )
            self._check_length(sequence_length)
            if micro_batches_per_step is not None:
                self.check_steps(check_between("micro_batches_per_step", micro_batches_per_step, 1))
            return read.content.get("digest") or section_digest(read.content["subsets"])

        if joined:
            on_every_rank(open_lock)
        else:
            open_lock()
        self._length = len(self._loader)
        if rank == 0 and on_rank_0():
            named = f"{self._name or 'a lock'}, identity {self._identity}"
            logger.info("megaindex %s serves the run of %s", megaindex.__version__, named)

    def _check_length(self, length: int | None) -> None:
        """Raise InvalidArgument if the trainer's samples have another length."""
        lengths = self._loader.sequence_lengths
        if length is not None and lengths != {length}:
            raise InvalidArgument(
                f"{self._name}: has samples of {_listed(lengths)} tokens, "
                f"and the trainer {length}; its sequence length must be that of all samples"
            )

    def check_steps(self, micro_batches: int) -> None:
        """Raise InvalidArgument unless ``micro_batches`` of this rank make a step of the lock."""
        sizes, rows = self._step_sizes, micro_batches * self._rows
        if sizes != {rows}:
            raise InvalidArgument(
                f"{self._name}: has steps of {_listed(sizes)} samples, and "
                f"the trainer {rows}, {micro_batches} of {self._rows}; set its global batch "
                "size or gradient accumulation so that they are equal, or lock the run with its "
                "batch size"
            )

    def check_length(self, max_steps: int | None, setting: str, epochs: float | None) -> None:
        """Raise InvalidArgument if a trainer would read beyond the end of the run.

        Args:
            max_steps: number of its steps; None or not above 0: no limit.
            setting: name of its setting of epochs.
            epochs: value of that setting.
        """
        steps = len(self) // self.micro_batches_per_step
        limit = 0 if max_steps is None else max_steps
        if limit > steps or (limit <= 0 and (epochs is None or not 0 < epochs <= 1)):
            shown = f"{epochs:g}" if isinstance(epochs, float) else epochs
            raise InvalidArgument(
                f"the run of the lock has {steps} steps, and the trainer max_steps={max_steps}, "
                f"{setting}={shown}; set {setting}=1, since the order holds all epochs, or "
                f"max_steps up to {steps}"
            )

    @property
    def _step_sizes(self) -> set[int]:
        return {*self._loader.sampler.schedule.sizes()}

    @property
    def _rows(self) -> int:
        """Rows of one micro batch on every rank."""
        rows: int = self._loader.sampler.ranks.rows_per_round
        return rows

    @property
    def loader(self) -> Loader:
        """The loader of this rank."""
        return self._loader

    @property
    def identity(self) -> str:
        """Identity of the run of the lock, 32 hex digits."""
        return self._identity

    @property
    def consumed_samples(self) -> int:
        """Number of samples returned on all ranks together."""
        return self._loader.consumed_samples

    @property
    def micro_batches_per_step(self) -> int:
        """Micro batches of this rank in a step.

        Raises:
            InvalidArgument: steps differ in size.
        """
        sizes = self._step_sizes
        if len(sizes) > 1:
            raise InvalidArgument(
                f"{self._name}: has steps of {_listed(sizes)} samples, and "
                "the trainer steps of one size; lock the run with one batch size"
            )
        return sizes.pop() // self._rows

    @property
    def returned(self) -> int:
        """Number of micro batches of this rank before the next one, from the start of the run."""
        return self._length - self._loader.batches_left

    @property
    def wait(self) -> Waits:
        """Time that the trainer waited for batches of this rank."""
        return self._loader.wait

    def set_mix(self, weights: Mapping[str, Any], at: int | None = None) -> int:
        """Draw with other weights from a step on; see `megaindex.loader.Loader.set_mix`.

        Every process calls it with the same weights after the same number of batches. Where the
        trainer has taken a batch of the next step already, that step is begun.
        """
        return self._loader.set_mix(weights, at)

    def report_loss(self, source: str | int, loss: float, tokens: int = 1) -> None:
        """Record a loss of a source; see `megaindex.loader.Loader.report_loss`."""
        self._loader.report_loss(source, loss, tokens)

    def control_mix(self, controller: MixController, *, at: int | None = None) -> int | None:
        """Set the mix that a controller returns on process 0 of torch.distributed.

        Every process calls it after the same number of batches; the losses are those reported on
        process 0. See `megaindex.loader.Loader.control_mix`.

        Raises:
            InvalidArgument: as `set_mix`; or the ranks are not connected by torch.distributed.
        """
        ranks = self._loader.sampler.ranks
        if processes() == 1 and ranks.data_parallel_size > 1:
            raise InvalidArgument(
                f"control_mix: the {ranks.data_parallel_size} ranks must be connected by "
                "torch.distributed, which sends the weights to all; without it give every rank the "
                "same weights with set_mix"
            )
        weights = from_first_rank(lambda: controller(self._loader.mix_statistics()))
        return None if weights is None else self.set_mix(weights, at)

    def __len__(self) -> int:
        """Return the number of micro batches of this rank in the whole run, as trainers count."""
        return self._length

    def __repr__(self) -> str:
        return f"RunLoader({self._name!r}, {self._loader!r})"

    def __iter__(self) -> Iterator[Any]:
        for batch, rows in self.batches():
            self._rows_now = rows
            yield batch

    def batches(self) -> Iterator[tuple[Any, Batch]]:
        """Iterate over batches and the fields that say what their rows are."""
        makes = {"huggingface": self._as_huggingface, "torchtitan": _as_torchtitan}
        make = makes.get(self._fields)
        for batch in self._loader:
            rows = {name: batch[name] for name in self._options.row_fields}
            yield (batch if make is None else make(batch)), rows

    def rows(self) -> Batch:
        """Return the fields of ``keys`` of the batch that was returned last.

        Raises:
            InvalidArgument: the loader was made without ``keys``, or has returned no batch.
        """
        return given_rows(self._rows_now)

    def _as_huggingface(self, batch: Batch) -> Batch:
        labels = _labels(batch)
        fields = {"input_ids": batch["tokens"], "labels": labels, "shift_labels": labels}
        if self._options.resets_positions:
            fields["position_ids"] = batch["position_ids"]
        return fields

    def state_dict(self) -> dict[str, Any]:
        """Return the state after the last batch returned, with the receipts of all ranks.

        It is that of `megaindex.loader.join_states`, so any number of ranks may load it. Every
        process of torch.distributed calls it, after the same number of batches.

        Raises:
            InvalidArgument: a rank is missing, or has returned other batches.
        """
        state = self._loader.state_dict()
        return _join_all(state) if self._joined else state

    def load_state_dict(self, state: Mapping[str, Any], *, allow: Collection[str] = ()) -> None:
        """Continue from `state_dict`; see `megaindex.loader.Loader.load_state_dict`."""
        self._loader.load_state_dict(state, allow=allow)

    def text_state_dict(self) -> dict[str, str]:
        """Return `state_dict` as one text, for DCP, which loads the keys that it finds here."""
        return {_TEXT: json.dumps(self.state_dict())}

    def load_text_state_dict(self, state: Mapping[str, Any], remedy: str) -> None:
        """Continue from a result of `text_state_dict`, with any number of ranks.

        Args:
            state: the state of the dataloader in a checkpoint.
            remedy: for a checkpoint without one, in the trainer's words.

        Raises:
            InvalidArgument: the run of the checkpoint had another dataloader, or `load_state_dict`
                refuses the state.
            FormatError: the state is damaged.
        """
        if _TEXT not in state:
            raise InvalidArgument(
                "the checkpoint has no state of megaindex, since its run had another dataloader; "
                f"{remedy}"
            )
        try:
            stored = parse_object(state[_TEXT])
        except (Damaged, TypeError) as error:
            raise FormatError(
                f"the state of megaindex in the checkpoint is damaged: {error}; resume from another"
            ) from None
        self.load_state_dict(stored)


def given_rows(rows: Batch | None) -> Batch:
    """Return the rows of a micro batch; InvalidArgument if there are none."""
    if not rows:
        raise InvalidArgument(
            "rows need keys=True, and a micro batch that the trainer has begun; give keys=True to "
            "the adapter, and ask in the step of the trainer"
        )
    return rows


def take_rows(batch: Batch) -> Batch:
    """Remove the fields that say what the rows are from a batch, and return them."""
    return {name: batch.pop(name) for name in row_fields(wide=True) if name in batch}


def _listed(sizes: Collection[int]) -> str:
    return " and ".join(map(str, sorted(sizes)))


def _labels(batch: Batch) -> torch.Tensor:
    return batch["labels"].masked_fill(batch["loss_mask"] == 0, IGNORED)


def _as_torchtitan(batch: Batch) -> tuple[Batch, torch.Tensor]:
    return {"input": batch["tokens"], "positions": batch["position_ids"]}, _labels(batch)


def processes() -> int:
    """Return the number of processes of torch.distributed, 1 before it is initialised."""
    connected = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size() if connected else 1


def _ranks(rank: int | None, size: int | None) -> tuple[int, int]:
    """Return the ranks given, else those of torch.distributed, else 0 of 1."""
    if (rank is None) != (size is None):
        raise InvalidArgument("data_parallel_rank and data_parallel_size must be given together")
    if rank is not None and size is not None:
        return rank, size
    if processes() > 1:
        return distributed.get_rank(), processes()
    if (started := os.environ.get("WORLD_SIZE", "1")) != "1":
        raise InvalidArgument(
            f"{started} processes were started, and torch.distributed is not initialised: each "
            "would read all samples; make the loader after init_process_group, or give "
            "data_parallel_rank and data_parallel_size"
        )
    return 0, 1


def on_every_rank(act: Callable[[], str]) -> None:
    """Call ``act`` on every process of torch.distributed, and raise on all if it fails on one.

    Raises:
        MegaIndexError: as ``act`` on this process.
        StorageError: ``act`` failed on another process, which is named.
        InvalidArgument: the results differ.
    """
    if processes() == 1:
        act()
        return
    result, error = None, None
    try:
        result = act()
    except Exception as raised:
        error = raised
    mine = (
        socket.gethostname(),
        None if error is None else f"{type(error).__name__}: {error}",
        result,
    )
    every: list[Any] = [None] * processes()
    distributed.all_gather_object(every, mine)
    if error is not None:
        raise error
    for rank, (host, text, _) in enumerate(every):
        if text is not None:
            raise StorageError(
                f"process {rank} on {host} failed: {text}; if other processes read these files, "
                "give all of them the same file system"
            )
    for rank, (host, _, value) in enumerate(every):
        if value != every[0][2]:
            raise InvalidArgument(
                f"process {rank} on {host} has {value}, and process 0 {every[0][2]}; give all "
                "processes the same files"
            )


def from_first_rank(act: Callable[[], Result]) -> Result:
    """Return the result of ``act`` on process 0 of torch.distributed; if it fails, raise on all.

    Raises:
        MegaIndexError: as ``act`` on process 0.
        InvalidArgument: ``act`` failed there in another way, whose error is raised there.
    """
    if processes() == 1:
        return act()
    sent: list[Any] = [None, None]
    failed: Exception | None = None
    if distributed.get_rank() == 0:
        try:
            sent[0] = act()
        except MegaIndexError as error:
            sent[1] = failed = error
        except Exception as error:  # it may not be possible to send it
            failed = error
            sent[1] = InvalidArgument(f"process 0 failed: {type(error).__name__}: {error}")
    distributed.broadcast_object_list(sent, src=0)
    if sent[1] is not None:
        raise failed or sent[1]
    result: Result = sent[0]
    return result


def _join_all(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state of all ranks, each once: several processes may have one rank."""
    states: list[Any] = [state]
    if processes() > 1:
        is_first = distributed.get_rank() == 0
        states = [None] * processes()
        distributed.gather_object(state, states if is_first else None, dst=0)
    return from_first_rank(lambda: _join_ranks(states))


def _join_ranks(states: list[Any]) -> dict[str, Any]:
    by_rank: dict[int, Any] = {}
    size = 1
    for state in states:
        receipt = state["receipt"]
        size = receipt["data_parallel_size"]
        if by_rank.setdefault(receipt["data_parallel_rank"], state) != state:
            raise InvalidArgument(
                f"processes of data-parallel rank {receipt['data_parallel_rank']} returned other "
                "batches; call state_dict on all after the same number of batches"
            )
    if len(by_rank) != size:
        raise InvalidArgument(
            f"the state needs the receipts of {size} ranks, and torch.distributed connects "
            f"{len(by_rank)} of them; make the loader with joined=False, and join the states of "
            "all ranks with megaindex.loader.join_states"
        )
    return join_states([by_rank[rank] for rank in sorted(by_rank)])
