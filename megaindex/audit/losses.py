"""Loss of each source while training, summed in float64 over batches and ranks.

losses = LossBySource([source.name for source in run.sources])
losses.update(token_losses, batch["source"], batch["loss_mask"])                # every step
for name, value in losses.over_ranks().scalars().items():
    writer.add_scalar(name, value, iteration)                                 # or wandb.log(…)
losses.reset()
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from megaindex._lazy import torch_needed
from megaindex._types import F64
from megaindex.audit.scalars import source_scalars
from megaindex.errors import InvalidArgument
from megaindex.validation import check_text, shown

if TYPE_CHECKING:
    import torch

_PADDING = -1
_NO_SOURCES = 2  # columns behind those of the sources: rows of padding, and of unknown sources


class LossBySource:
    """Sums of losses and of their weights for each source, until `reset`.

    Losses in tensors are summed on their device, without waiting for it, until a sum is asked for.
    Rows of padding, whose source is -1, are left out.

    Args:
        names: name of each source, in the numbers of ``batch["source"]``, such as those of the
            sources of a run.

    Raises:
        InvalidArgument: ``names`` is empty or holds no texts. On asking: a row had a source that is
            not one of them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        if isinstance(names, str) or not names:
            raise InvalidArgument(
                f"names must be a list of at least one name, one a source, got {shown(names)}"
            )
        self.names = [check_text(f"names[{k}]", name) for k, name in enumerate(names)]
        self.reset()

    def reset(self) -> None:
        """Begin again with sums of 0."""
        self._totals: Any = np.zeros((2, len(self.names) + _NO_SOURCES))

    def update(self, loss: Any, source: Any, mask: Any = None) -> None:
        """Add the losses of a batch.

        Args:
            loss: loss of each row or of each token, [rows, …]; an array, or a tensor, whose graph
                is not kept.
            source: integers [rows], ``batch["source"]``.
            mask: weight of each loss, in the shape of ``loss``, such as ``batch["loss_mask"]``;
                where it is 0, the loss may be NaN. Default: 1.

        Raises:
            InvalidArgument: a shape does not fit, or ``source`` holds no integers.
        """
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(loss, torch.Tensor):
            self._update_tensor(loss, source, mask)
            return
        losses, sources = np.asarray(loss, np.float64), np.asarray(source)
        weights = np.ones_like(losses) if mask is None else np.asarray(mask, np.float64)
        _check_shapes(losses, sources, weights)
        weighted = np.multiply(losses, weights, out=np.zeros_like(losses), where=weights != 0)
        rows = [each.sum(axis=tuple(range(1, each.ndim))) for each in (weighted, weights)]
        places = _places(sources, len(self.names), np.where)
        width = len(self.names) + _NO_SOURCES
        self._add(np.stack([np.bincount(places, row, width) for row in rows]))

    def _update_tensor(self, loss: torch.Tensor, source: Any, mask: Any) -> None:
        import torch

        with torch.no_grad():
            losses = loss.to(torch.float64)
            sources = torch.as_tensor(source, device=loss.device)
            weights = torch.ones_like(losses)
            if mask is not None:
                weights = torch.as_tensor(mask, device=loss.device).to(torch.float64)
            _check_shapes(losses, sources, weights)
            weighted = torch.where(weights != 0, losses * weights, 0)
            rows = [
                each.reshape(len(each), -1).sum(1) if each.numel() else each.new_zeros(len(each))
                for each in (weighted, weights)
            ]
            places = _places(sources, len(self.names), torch.where)
            totals = losses.new_zeros(self._totals.shape)
            self._add(totals.index_add_(1, places, torch.stack(rows)))

    def add(self, totals: Any) -> None:
        """Add sums of another log of the same sources, such as of another rank.

        Args:
            totals: float64[2, sources], its `totals`.

        Raises:
            InvalidArgument: it has another shape.
        """
        sums = np.asarray(totals, np.float64)
        if sums.shape != (2, len(self.names)):
            raise InvalidArgument(
                f"totals must have the shape {[2, len(self.names)]}, as those of another log of "
                f"these sources, got {list(sums.shape)}"
            )
        self._add(np.pad(sums, [(0, 0), (0, _NO_SOURCES)]))

    def over_ranks(self, group: torch.distributed.ProcessGroup | None = None) -> LossBySource:
        """Return the sums over all ranks of a group, each of which has to call this.

        The group has to be of ranks that read other rows or other tokens: of data and context
        parallelism, not of tensor or pipeline parallelism.

        Args:
            group: of `torch.distributed`. Default: all ranks; this process alone where no group is
                initialized.
        """
        with torch_needed("LossBySource.over_ranks"):
            import torch
        joined = LossBySource(self.names)
        totals = torch.as_tensor(self._totals).clone()
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            if "nccl" in str(torch.distributed.get_backend(group)):  # a rank without a batch
                totals = totals.to("cuda")
            torch.distributed.all_reduce(totals, group=group)
        joined._totals = totals
        return joined

    @property
    def totals(self) -> F64:
        """float64[2, sources]: sum of losses times weights, and of weights."""
        summed = self._totals
        totals: F64 = summed if isinstance(summed, np.ndarray) else summed.cpu().numpy()
        if totals[1, -1]:
            raise InvalidArgument(
                f"source must be from 0 to {len(self.names) - 1}, or -1 in rows of padding, got "
                f"others in rows of weight {totals[1, -1]:g}; give the names of all sources"
            )
        return totals[:, : len(self.names)].copy()

    @property
    def means(self) -> F64:
        """float64[sources]: mean loss by weight; NaN for a source without any."""
        sums, weights = self.totals
        means = np.full(len(self.names), np.nan)
        np.divide(sums, weights, out=means, where=weights != 0)
        return means

    def scalars(self, prefix: str = "data") -> dict[str, float]:
        """Return the mean losses as values for a log, with the names of `ExposureLog`.

        Names are ``data/loss`` for all sources together, and ``data/loss/web`` for the source
        ``web`` of several, ``web#2`` if it is listed again. A source without weight is left out.
        """
        totals = self.totals
        columns = np.column_stack((totals.sum(axis=1), totals)).T.tolist()
        means = [loss / weight if weight else None for loss, weight in columns]
        return source_scalars(prefix, self.names, {"loss": means})

    def __repr__(self) -> str:
        names = ", ".join(self.names[:3]) + " …" * (len(self.names) > 3)
        return f"LossBySource({names})"

    def _add(self, totals: Any) -> None:
        if isinstance(self._totals, np.ndarray) and isinstance(totals, np.ndarray):
            self._totals += totals
            return
        import torch

        tensor = torch.as_tensor(totals)
        if isinstance(self._totals, np.ndarray):
            self._totals = torch.from_numpy(self._totals).to(tensor.device)
        self._totals += tensor.to(self._totals.device)


def _check_shapes(loss: Any, source: Any, mask: Any) -> None:
    if "int" not in str(source.dtype):
        raise InvalidArgument(f"source must be integers, as in a batch, got {source.dtype}")
    one_each = loss.ndim > 0 and tuple(loss.shape[:1]) == tuple(source.shape)
    if not one_each or loss.shape != mask.shape:
        raise InvalidArgument(
            "source must have one number for each row of loss, and mask the shape of loss, got "
            f"loss {list(loss.shape)}, source {list(source.shape)} and mask {list(mask.shape)}"
        )


def _places(source: Any, count: int, where: Callable[..., Any]) -> Any:
    """Return the column of each row's sums."""
    inside = (source >= 0) & (source < count)
    return where(inside, source, where(source == _PADDING, count, count + 1))
