"""Global batch size from whichever of its factors are given."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from megaindex.errors import InvalidArgument
from megaindex.index.arithmetic import global_batch_size

if TYPE_CHECKING:
    from megaindex.recipe.settings import Settings


@dataclass(frozen=True, kw_only=True)
class BatchSizes:
    """The global batch and, where known, what it is made of."""

    global_batch: int
    micro_batch: int | None
    data_parallel: int | None
    accumulation: int | None

    @property
    def unit(self) -> int | None:
        """Samples of one micro batch on every rank."""
        if self.micro_batch is None or self.data_parallel is None:
            return None
        return self.micro_batch * self.data_parallel


def batch_sizes(settings: Settings) -> BatchSizes:
    """Completes micro batch x data-parallel size x accumulation = global batch.

    Raises:
        InvalidArgument: too few sizes are given, or they contradict each other.
    """
    micro = settings.micro_batch_size
    parallel = _data_parallel(settings)
    steps = settings.gradient_accumulation_steps
    wanted = settings.global_batch_size
    if settings.batch_schedule is not None:
        return _scheduled(settings, micro, parallel, steps)
    if wanted is None:
        return _product(micro, parallel, steps)
    if (
        parallel is None
        and micro is not None
        and steps is not None
        and not wanted % (micro * steps)
    ):
        parallel = wanted // (micro * steps)
    if micro is None and parallel is not None and settings.order == "neox":
        micro = wanted // (parallel * (steps or 1))  # as GPT-NeoX derives it
    if micro is not None and parallel is not None and steps is None:
        steps, rest = divmod(wanted, micro * parallel)
        if rest:
            raise InvalidArgument(
                f"--global-batch-size {wanted} is not a multiple of --micro-batch-size {micro} x "
                f"{_parallel_text(settings, parallel)} = {micro * parallel}; change one of them"
            )
    if micro is not None and parallel is not None and steps is not None:
        product = global_batch_size(micro, parallel, steps)
        if product != wanted:
            raise InvalidArgument(
                f"--global-batch-size {wanted} is not --micro-batch-size {micro} x "
                f"{_parallel_text(settings, parallel)} x --gradient-accumulation-steps {steps} = "
                f"{product}; change one of them"
            )
    return BatchSizes(
        global_batch=wanted, micro_batch=micro, data_parallel=parallel, accumulation=steps
    )


def _product(micro: int | None, parallel: int | None, steps: int | None) -> BatchSizes:
    if micro is None:
        raise InvalidArgument(
            "the batch size is missing: give --global-batch-size, or --micro-batch-size and "
            "--data-parallel-size"
        )
    if parallel is None:
        raise InvalidArgument(
            "the number of GPUs is missing: give --world-size, --data-parallel-size or "
            "--global-batch-size"
        )
    steps = 1 if steps is None else steps
    return BatchSizes(
        global_batch=global_batch_size(micro, parallel, steps),
        micro_batch=micro,
        data_parallel=parallel,
        accumulation=steps,
    )


def _scheduled(
    settings: Settings, micro: int | None, parallel: int | None, steps: int | None
) -> BatchSizes:
    """With a schedule the batch sizes are its own; accumulation follows from them."""
    if steps is not None or settings.global_batch_size is not None:
        raise InvalidArgument(
            "--batch-schedule sets the global batch size; remove --global-batch-size and "
            "--gradient-accumulation-steps"
        )
    return BatchSizes(global_batch=1, micro_batch=micro, data_parallel=parallel, accumulation=None)


def _data_parallel(settings: Settings) -> int | None:
    """Data-parallel size, given or from the world size and the model-parallel sizes."""
    model = (
        (settings.tensor_model_parallel_size or 1)
        * (settings.pipeline_model_parallel_size or 1)
        * (settings.context_parallel_size or 1)
    )
    world, given = settings.world_size, settings.data_parallel_size
    if world is None:
        return given
    if world % model:
        raise InvalidArgument(
            f"--world-size {world} is not a multiple of tensor x pipeline x context parallel "
            f"size {model}; change one of them"
        )
    if given is not None and given != world // model:
        raise InvalidArgument(
            f"--data-parallel-size {given} contradicts --world-size {world} / {model} = "
            f"{world // model}; remove one of them"
        )
    return world // model


def _parallel_text(settings: Settings, parallel: int) -> str:
    """The data-parallel size as it was given, or what it follows from."""
    if settings.data_parallel_size is not None:
        return f"--data-parallel-size {parallel}"
    model = (settings.world_size or 1) // parallel
    return f"data-parallel size {parallel} (--world-size {settings.world_size} / {model})"
