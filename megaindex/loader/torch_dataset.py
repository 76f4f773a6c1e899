"""A map-style PyTorch dataset over an index, with the fields of Megatron's GPTDataset."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.receipt import fingerprint_keys, sample_receipts
from megaindex.index.spans import Index
from megaindex.kernels.types import I64
from megaindex.loader.gather import gather

Sample = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class MaskOptions:
    """What happens at an end-of-document token, named as in Megatron."""

    eod_id: int | None = None
    eod_mask_loss: bool = False
    """No loss where the model reads an end-of-document token."""
    reset_position_ids: bool = False
    """Positions start again after each end-of-document token."""
    reset_attention_mask: bool = False
    """Tokens do not attend across an end-of-document token."""
    create_attention_mask: bool = False
    """Return a [1, S, S] mask, True where attention is forbidden."""

    def __post_init__(self) -> None:
        if self.eod_id is None and (
            self.eod_mask_loss or self.reset_position_ids or self.reset_attention_mask
        ):
            raise InvalidArgument(
                "eod_mask_loss, reset_position_ids and reset_attention_mask act on the "
                "end-of-document token; give its id as eod_id"
            )


class GPTDataset(torch.utils.data.Dataset[Sample]):
    """Samples of ``index`` read from ``dataset``, each a dict of tensors.

    ``tokens`` and ``labels`` are int64[S], the labels one token ahead; ``loss_mask`` is
    float32[S]; ``position_ids`` int64[S]; ``attention_mask`` bool[1, S, S] if asked for. Equal to
    megatron-core's GPTDataset for the same index and options: ids equal to ``pad_id`` carry no
    loss and are replaced by 0.

    With the ``fingerprints`` of its sources each sample has a ``receipt`` too, int64[3], which
    `megaindex.loader.receipted` takes off and adds up: what was read for it, and where.

    Fetches whole batches at once under a DataLoader (``__getitems__``).

    Raises:
        OutOfRange: a sample id the index does not hold; no other sample is served in its place.
    """

    def __init__(
        self,
        index: Index,
        dataset: IndexedDataset,
        *,
        pad_id: int = -1,
        options: MaskOptions | None = None,
        fingerprints: Sequence[str] | None = None,
    ) -> None:
        self._index = index
        self._dataset = dataset
        self._pad_id = pad_id
        self._options = options or MaskOptions()
        self._keys = None if fingerprints is None else fingerprint_keys(fingerprints)

    def __len__(self) -> int:
        return self._index.num_samples

    def __getitem__(self, sample_id: int) -> Sample:
        return self.__getitems__([sample_id])[0]

    def __getitems__(self, sample_ids: Sequence[int]) -> list[Sample]:
        """The samples of one batch, read together."""
        index = self._index
        width = index.sequence_length + index.add_extra_token
        ids = np.asarray(sample_ids)
        spans = index.locate(ids)
        fields = self._fields(gather(self._dataset, spans, width, self._pad_id))
        if self._keys is not None:
            fields["receipt"] = sample_receipts(ids.astype(np.int64), spans, self._keys)
        return [
            {name: torch.from_numpy(rows[k]) for name, rows in fields.items()}
            for k in range(len(sample_ids))
        ]

    def _fields(self, text: I64) -> dict[str, np.ndarray]:
        if self._index.add_extra_token:
            tokens, labels = text[:, :-1].copy(), text[:, 1:].copy()
        else:
            tokens, labels = text, np.roll(text, -1, axis=1)
            labels[:, -1] = self._pad_id
        fields = _masks(tokens, self._options)
        fields["loss_mask"][labels == self._pad_id] = 0
        tokens[tokens == self._pad_id] = 0
        labels[labels == self._pad_id] = 0
        return {"tokens": tokens, "labels": labels, **fields}


def _masks(tokens: I64, options: MaskOptions) -> dict[str, np.ndarray]:
    is_eod = np.zeros(tokens.shape, bool) if options.eod_id is None else tokens == options.eod_id
    position = np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
    # where the document that each token belongs to begins: one past the last end before it
    begins = np.zeros_like(tokens)
    begins[:, 1:] = np.maximum.accumulate(np.where(is_eod, position + 1, 0), axis=1)[:, :-1]

    loss_mask = np.ones(tokens.shape, np.float32)
    if options.eod_mask_loss:
        loss_mask[is_eod] = 0
    fields: dict[str, np.ndarray] = {
        "loss_mask": loss_mask,
        "position_ids": position - begins if options.reset_position_ids else position.copy(),
    }
    if options.create_attention_mask:
        first = begins if options.reset_attention_mask else np.zeros_like(begins)
        columns = position[:, None, :]
        # row i sees columns first[i] ... i
        hidden = (columns > position[:, :, None]) | (columns < first[:, :, None])
        fields["attention_mask"] = hidden[:, None]
    return fields
