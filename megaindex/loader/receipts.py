"""Receipts of what the trainer was handed: added to where a batch leaves the loader, not before.

A dataset made with ``fingerprints`` puts a row ``receipt`` into every sample: its position and the
hash of the runs of tokens that were read for it. `receipted` takes the rows off each batch as it
hands the batch over, so batches read ahead and thrown away do not count:

    recorder = Recorder([corpus_fingerprint(dataset)])
    for batch in receipted(loader, recorder):
        train(batch)
    checkpoint["data"] = recorder.state_dict()
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument
from megaindex.index.ladder import DEFAULT_STRIDE, Ladder
from megaindex.index.plain import shown
from megaindex.index.receipt import Receipt, fingerprint_keys, sample_receipts
from megaindex.index.spans import Spans
from megaindex.index.stored import Stored, differ
from megaindex.kernels.types import I64

Batch = TypeVar("Batch", bound=MutableMapping[str, Any])


class Recorder:
    """The ladder of what one rank was handed; ladders of all ranks add up to the planned one.

    Args:
        fingerprints: of the sources, 32 hex digits each.
        parameters: what else must be equal when a run goes on, such as seed and order; JSON values.
        stride: positions of a block of the ladder, a power of two.
    """

    def __init__(
        self,
        fingerprints: Sequence[str],
        parameters: Mapping[str, Any] | None = None,
        *,
        stride: int = DEFAULT_STRIDE,
    ) -> None:
        self._keys = fingerprint_keys(fingerprints)
        self._identity = {
            "fingerprints": list(fingerprints),
            "parameters": dict(parameters or {}),
        }
        self._ladder = Ladder(stride=stride, blocks={})

    @property
    def ladder(self) -> Ladder:
        return self._ladder

    @property
    def receipt(self) -> Receipt:
        return self._ladder.total

    def add(self, positions: npt.ArrayLike, spans: Spans) -> None:
        """Samples at ``positions`` that read ``spans``, where there is no GPTDataset."""
        self.add_rows(sample_receipts(np.asarray(positions, np.int64), spans, self._keys))

    def add_rows(self, rows: npt.ArrayLike) -> None:
        """Rows of samples, int64[n, 3], as `sample_receipts` gives them.

        A row at position -1 is one of padding, in which nothing was served.
        """
        added: I64 = np.asarray(rows, np.int64).reshape(-1, 3)
        added = added[added[:, 0] != -1]
        blocks = dict(self._ladder.blocks)
        numbers = added[:, 0] >> (self._ladder.stride.bit_length() - 1)  # one may be 2**63
        for number in np.unique(numbers).tolist():
            new = Receipt.from_rows(added[numbers == number])
            blocks[number] = blocks.get(number, Receipt()) + new
        self._ladder = Ladder(stride=self._ladder.stride, blocks=blocks)

    def state_dict(self) -> dict[str, Any]:
        """Receipt, ladder, fingerprints and parameters: kilobytes, JSON values."""
        return {**self.receipt.to_dict(), "ladder": self._ladder.to_dict(), **self._identity}

    def take(self, ladder: Ladder) -> None:
        """Go on from a ladder of this run, as `read` gives it."""
        self._ladder = ladder

    def read(self, state: Mapping[str, Any] | None) -> Ladder:
        """The ladder of `state_dict`, or an empty one where there is none; nothing is changed.

        Raises:
            As `load_state_dict`.
        """
        if state is None:
            return Ladder(stride=self._ladder.stride, blocks={})
        ladder = stored_ladder(state)
        for name, ours in self._identity.items():
            if differ(state[name], ours):
                raise InvalidArgument(
                    f"the checkpoint was made with {name} {shown(state[name])}, this run has "
                    f"{shown(ours)}; go on with the same corpora and settings, or start a new "
                    "receipt"
                )
        return ladder

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from `state_dict`.

        Raises:
            InvalidArgument: it belongs to other corpora or parameters.
            FormatError: not what `state_dict` gives, or the receipt is not that of its ladder.
        """
        Stored(_WHAT, state)
        self._ladder = self.read(state)


_WHAT = "the state of a recorder"


def _is_list_of_text(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(each, str) for each in value)


def stored_ladder(state: Mapping[str, Any]) -> Ladder:
    """The ladder in what `Recorder.state_dict` gave, of whatever corpora and parameters.

    Raises:
        FormatError: not what it gives, or the receipt is not that of its ladder.
    """
    stored = Stored(_WHAT, state)
    stored.checked("fingerprints", "must be a list of text", _is_list_of_text)
    stored.part("parameters", "the parameters of a receipt")
    receipt = Receipt.from_dict(state)
    ladder = Ladder.from_dict(stored.field("ladder", "must be a mapping"))
    if ladder.total != receipt:
        raise FormatError(
            "the stored receipt is not the sum of its ladder; take it from an intact checkpoint"
        )
    return ladder


def receipted(batches: Iterable[Batch], recorder: Recorder) -> Iterator[Batch]:
    """The batches without their ``receipt`` rows, which are added as each is handed over.

    Use it on batches in host memory, before they are moved to a device.

    Raises:
        InvalidArgument: a batch carries none.
    """
    for batch in batches:
        rows = batch.pop("receipt", None)
        if rows is None:
            raise InvalidArgument(
                "a batch carries no receipt; make its GPTDataset with fingerprints=[…]"
            )
        recorder.add_rows(rows)
        yield batch
