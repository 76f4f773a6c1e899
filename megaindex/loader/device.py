"""Copies batches to a device while it computes.

The copies run on a CUDA stream of their own, from page-locked memory, ahead of the batches' use;
whoever takes a batch finds it on the device and waits for nothing.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

Tensors: TypeAlias = dict[str, torch.Tensor]


class DeviceCopies:
    """Copies of batches on ``device``; on one without CUDA an ordinary copy, on the CPU none."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.asynchronous = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.asynchronous else None  # type: ignore[no-untyped-call]

    def copy(self, tensors: Tensors) -> Tensors:
        """The tensors on the device, complete; their memory may be written again afterwards.

        Meant for a thread that reads ahead: it waits for the copy, without holding up other
        threads, and the device goes on with what it computes.
        """
        if self._stream is None:
            return {name: tensor.to(self._device) for name, tensor in tensors.items()}
        with torch.cuda.stream(self._stream):
            copies = {n: t.to(self._device, non_blocking=True) for n, t in tensors.items()}
            done = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            done.record()
        done.synchronize()
        return copies

    def hand_over(self, copies: Tensors) -> Tensors:
        """Call where the batch is taken: its memory is not given to another copy before what its
        taker's stream does with it is done."""
        if self.asynchronous:
            stream = torch.cuda.current_stream(self._device)
            for tensor in copies.values():
                tensor.record_stream(stream)
        return copies
