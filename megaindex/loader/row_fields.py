"""Fields that say what the rows of a batch are: position, source, pass and key."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.cache.fingerprint import content_fingerprint
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.exposures import ONE_PASS
from megaindex.index.receipts import fingerprint_keys
from megaindex.index.spans import (
    PADDING,
    Index,
    Spans,
    locate_rows,
    pass_numbers,
    pass_runs,
)
from megaindex.kernels import active
from megaindex.validation import shown

ROW_FIELDS = {"sample": "int64", "source": "int32", "exposure": "int32", "key": "int64"}
"""Fields of ``SampleOptions(keys=True)`` and their dtypes."""
WIDE_FIELD = "key_high"
"""A further field, int64, of ``SampleOptions(keys="wide")``."""
_NO_WORDS = np.empty(0, np.int64)


def check_keys(keys: object) -> None:
    """Raise InvalidArgument unless ``keys`` is True, False or ``"wide"``."""
    if keys not in (True, False, "wide"):
        raise InvalidArgument(f"keys must be True, False or 'wide', got {shown(keys)}")


def row_fields(wide: bool) -> dict[str, str]:
    """Return names and dtypes of the fields."""
    return {**ROW_FIELDS, WIDE_FIELD: "int64"} if wide else dict(ROW_FIELDS)


class RowFields:
    """Fields of the rows of an index.

    The content of a source is read when one of its rows is the first; of open datasets here.

    Args:
        index: the samples.
        datasets: sources of the index.

    Raises:
        InvalidArgument: the index does not know the passes of its samples.
        StorageError: a source cannot be read.
    """

    def __init__(self, index: Index, datasets: Sequence[IndexedDataset]) -> None:
        self._index, self._has_one_pass = index, index.num_epochs == 1
        self._passes = ONE_PASS if self._has_one_pass else pass_runs(index)
        self._datasets = datasets
        self._contents = np.zeros((len(datasets), 2), np.uint64)
        self._is_known = np.zeros(len(datasets), bool)
        self._learn([number for number, each in enumerate(datasets) if each.is_open])

    def fill(
        self, arrays: Mapping[str, npt.NDArray[Any]], sample_ids: I64, spans: Spans, width: int
    ) -> None:
        """Write the fields of rows that read ``spans``; -1 stands for a row of padding."""
        if not self._all_known:
            self._learn(np.unique(spans.source).tolist())
        active().row_keys(
            sample_ids,
            sample_ids if self._has_one_pass else pass_numbers(self._index, sample_ids),
            spans.source,
            spans.document,
            spans.offset,
            _hashed_lengths(spans, width),
            spans.row_splits,
            width,
            self._contents,
            self._passes.starts,
            self._passes.passes,
            arrays["sample"],
            arrays["source"],
            arrays["exposure"],
            arrays["key"],
            arrays.get(WIDE_FIELD, _NO_WORDS),
        )

    def rows(
        self, sample_ids: Sequence[int | None], width: int, *, wide: bool
    ) -> dict[str, npt.NDArray[Any]]:
        """Return the fields of samples without reading their tokens; None is a row of padding.

        Raises:
            OutOfRange: the index does not hold a sample id.
        """
        ids = np.array([PADDING if each is None else each for each in sample_ids], np.int64)
        spans = locate_rows(self._index, ids)
        arrays = {name: np.empty(ids.size, kind) for name, kind in row_fields(wide).items()}
        self.fill(arrays, ids, spans, width)
        return arrays

    def _learn(self, sources: Sequence[int]) -> None:
        """Read the content of sources that are not known yet."""
        for number in sources:
            if not self._is_known[number]:
                content = content_fingerprint(self._datasets[number])
                self._contents[number] = fingerprint_keys([content])[0]
                self._is_known[number] = True
        self._all_known = bool(self._is_known.all())


def _hashed_lengths(spans: Spans, width: int) -> I64:
    """Return int64[n], the tokens of each span that a key hashes: none of removed spans."""
    if spans.removed is not None:
        return spans.input_lengths(width) * ~spans.removed
    return spans.length if spans.padding is None else spans.input_lengths(width)
