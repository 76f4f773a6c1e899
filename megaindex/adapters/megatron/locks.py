"""The lock of ``install(lock=…)`` under Megatron: its steps, and the place of a resumed run."""

from __future__ import annotations

import copy
from typing import Any

from megaindex.adapters.megatron.core import core, microbatch_calculator
from megaindex.adapters.reports import MEGATRON
from megaindex.adapters.skipped_dataset import whole_iterations
from megaindex.errors import InvalidArgument


def check_batches(args: Any = None, *, is_built: bool = False) -> None:
    """Compare the global batch sizes with the lock, and the iterations of Megatron's ``args``.

    Args:
        args: Megatron's arguments; None: the iterations are unknown.
        is_built: True for datasets that are built before the calculator of microbatches, whose
            batch sizes are compared when the loader is made.

    Raises:
        InvalidArgument: the calculator of microbatches is not initialised.
        FormatError: they differ.
    """
    lock = core().policy.lock
    assert lock is not None, "there is a lock"
    try:
        calculator: Any = copy.copy(microbatch_calculator())
    except InvalidArgument:
        if not is_built:
            raise
        reason = "the global batch size is unknown until a loader is made, which compares it"
        MEGATRON.leave("lock", "steps", reason)
        return

    def batch_size(consumed_samples: int) -> int:
        calculator.update(consumed_samples, False)
        running = getattr(calculator, "get_current_running_global_batch_size", None)
        return int((running or calculator.get_current_global_batch_size)())

    lock.check_steps(whole_iterations(args), batch_size)


def check_resumed(args: Any, consumed_samples: int) -> None:
    """Compare the place of a run that begins, or goes on, with the lock.

    Raises:
        FormatError: the samples consumed are not those of its iterations.
    """
    lock = core().policy.lock
    assert lock is not None, "there is a lock"
    lock.check_resumed(consumed_samples, getattr(args, "iteration", None))
