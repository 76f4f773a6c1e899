"""Random-access samples as NumPy arrays, for trainers without PyTorch.

samples = NumpyDataset(index, fields="maxtext")
batches = RandomAccessSampler(num_samples=len(samples), micro_batch_size=4,
                              data_parallel_rank=host, data_parallel_size=hosts)
for ids in batches:
    train(samples.__getitems__(ids))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from megaindex.errors import OutOfRange
from megaindex.format import IndexedDataset
from megaindex.index.spans import Index
from megaindex.loader.batch import BatchMaker, SampleIds, SampleOptions
from megaindex.loader.positional_reader import reader_of
from megaindex.loader.targets import Targets
from megaindex.loader.token_readers import TokenReader
from megaindex.validation import check_choice

Fields = dict[str, npt.NDArray[Any]]
FieldNames = Literal["megatron", "maxtext"]


class NumpyDataset:
    """Samples of an index as dicts of NumPy arrays, single or in batches; safe to pickle and share.

    Args:
        index: the samples, from build_index, build_blend or a recipe.
        datasets: the sources of the index, in the order of the index, or a reader of them.
            Default: those that the index was built from.
        options: default: those of Megatron without resets or masks.
        targets: loss targets of the sources that are instruction data.
        fields: ``megatron``: the fields of `BatchMaker`. ``maxtext``: int32 ``inputs``,
            ``targets``, ``inputs_position``, ``inputs_segmentation`` (documents of a row counted
            from 1 if the options reset positions, else 1; 0 after the end of a short row) and
            ``targets_segmentation``, which is 0 also at tokens without loss; those of ``keys`` are
            in `rows` alone.

    Raises:
        InvalidArgument: the datasets do not belong to the index, or hold tokens that do not fit
            ``token_dtype``.
    """

    def __init__(
        self,
        index: Index,
        datasets: IndexedDataset | Sequence[IndexedDataset] | TokenReader | None = None,
        options: SampleOptions | None = None,
        targets: Targets | None = None,
        *,
        fields: FieldNames = "megatron",
    ) -> None:
        check_choice("fields", fields, ("megatron", "maxtext"))
        self._maker = BatchMaker(index, reader_of(index, datasets), options, targets=targets)
        self._fields = fields

    @property
    def index(self) -> Index:
        """The index that samples are located in."""
        return self._maker.index

    def __len__(self) -> int:
        return self.index.num_samples

    def __repr__(self) -> str:
        return f"NumpyDataset({self.index!r})"

    def __getitem__(self, sample_id: int | slice | None) -> Fields:
        """Return the fields of one sample, arrays [S], or of a slice, [n, S]; raises as
        `__getitems__`, and OutOfRange for a number below 0."""
        if isinstance(sample_id, slice):
            return self.__getitems__(range(len(self))[sample_id])
        if sample_id is not None and sample_id < 0:
            raise OutOfRange(f"sample must be from 0 to {len(self) - 1}, got {sample_id}")
        return {name: array[0] for name, array in self.__getitems__([sample_id]).items()}

    def rows(self, sample_ids: Sequence[int | None]) -> Fields:
        """Return the fields of ``SampleOptions(keys=True)`` alone, arrays [n], without tokens.

        Raises:
            OutOfRange: the index does not hold a sample id.
            InvalidArgument: the options have no keys.
        """
        return self._maker.rows(sample_ids)

    def __getitems__(self, sample_ids: SampleIds) -> Fields:
        """Return the fields of a batch as new arrays [n, S]; sample id None or -1 gives padding.

        Raises:
            OutOfRange: the index does not hold a sample id.
            FormatError, StorageError: the tokens cannot be read.
        """
        buffers = self._maker.allocate(len(sample_ids))
        spans = self._maker.fill(buffers, sample_ids)
        if self._fields == "megatron":
            return buffers.arrays
        return _as_maxtext(
            buffers.arrays,
            spans.covered(self._maker.sequence_length),
            separates_documents=self._maker.options.resets_positions,
        )


def _as_maxtext(
    arrays: Fields, has_token: npt.NDArray[np.bool_], *, separates_documents: bool
) -> Fields:
    positions = arrays["position_ids"].astype(np.int32)
    if separates_documents:
        segments = np.cumsum((positions == 0) & has_token, axis=1, dtype=np.int32)
    else:
        segments = np.ones_like(positions)
    segments *= has_token
    positions *= has_token
    return {
        "inputs": arrays["tokens"].astype(np.int32),
        "targets": arrays["labels"].astype(np.int32),
        "inputs_position": positions,
        "inputs_segmentation": segments,
        "targets_segmentation": segments * (arrays["loss_mask"] > 0),
    }
