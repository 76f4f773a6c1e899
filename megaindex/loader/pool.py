"""Buffers of batches, used again once nobody holds the batch."""

from __future__ import annotations

import contextlib
from collections import deque

import numpy as np

from megaindex.loader.buffers import Buffers, ordinary, pinned
from megaindex.loader.fields import BatchMaker
from megaindex.loader.options import SampleOptions


class BufferPool:
    """Buffers of one number of rows; safe to share between threads.

    A batch that was handed over stays its holder's as long as any of its tensors lives, or a view
    of one, or a NumPy array made from one: its memory is written again only after the last of them
    is gone. Who keeps every batch makes the pool allocate anew for each.

    Args:
        keep: buffers that are watched for reuse; more are left to whoever holds them.
        restore: write the fields again that no fill writes, such as position ids that do not
            depend on the tokens. Without it, a holder that changed them in place would find that
            change in later batches.
    """

    def __init__(
        self, maker: BatchMaker, rows: int, *, keep: int, pin: bool = False, restore: bool = True
    ) -> None:
        self._maker = maker
        self._rows = rows
        self._pin = pin
        self._watched: deque[Buffers] = deque(maxlen=keep)
        # pops and appends of both are atomic: a lock could be held when the process forks
        first = self._allocate()
        self._idle = [first]
        self.nbytes = sum(array.nbytes for array in first.arrays.values())
        """Bytes of one batch."""
        self._restores = restore
        self._constant = {name: first.arrays[name].copy() for name in _never_filled(maker.options)}

    def take(self) -> Buffers:
        """Buffers that nobody else holds, to be filled."""
        with contextlib.suppress(IndexError):
            return self._idle.pop()
        buffers = self._dropped()
        if buffers is None:
            return self._allocate()
        self._restore(buffers)
        return buffers

    def give_back(self, buffers: Buffers) -> None:
        """They were copied elsewhere, and nobody has seen them."""
        self._idle.append(buffers)

    def watch(self, buffers: Buffers) -> None:
        """Somebody holds their tensors now; they are used again when nobody does."""
        self._watched.append(buffers)

    def _allocate(self) -> Buffers:
        return self._maker.allocate(self._rows, pinned if self._pin else ordinary)

    def _dropped(self) -> Buffers | None:
        for _ in range(len(self._watched)):
            try:
                buffers = self._watched.popleft()
            except IndexError:  # other threads took the rest
                return None
            if not buffers.in_use:
                return buffers
            self._watched.append(buffers)
        return None

    def _restore(self, buffers: Buffers) -> None:
        if self._pin:
            _finish_copies()
        if self._restores:
            for name, values in self._constant.items():
                np.copyto(buffers.arrays[name], values)
            buffers.constant_loss_mask = False


def _never_filled(options: SampleOptions) -> list[str]:
    """Fields that are written when buffers are allocated, and not with each batch."""
    names = [] if options.resets_positions else ["position_ids"]
    if options.create_attention_mask and not options.reset_attention_mask:
        names.append("attention_mask")
    return names


def _finish_copies() -> None:
    """A copy to a device may still read the memory of a batch that was dropped after asking for it,
    on a stream that is not known here."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()
