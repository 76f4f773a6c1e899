"""Fields of a batch, as Megatron's GPTDataset gives them, in reused buffers.

maker = BatchMaker(index, MappedTokens([dataset]), SampleOptions(eod_id=0, eod_mask_loss=True))
buffers = maker.allocate(rows=4)
for micro_batch in sampler:
    maker.fill(buffers, micro_batch)
    train(buffers.tensors())         # before the next fill, or from other buffers
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from megaindex._types import I64, IntArray
from megaindex.errors import InvalidArgument
from megaindex.index.receipts import fingerprint_keys, sample_receipts
from megaindex.index.spans import Index, Spans
from megaindex.kernels import active
from megaindex.loader.buffers import Allocate, Buffers, ordinary
from megaindex.loader.checkpoint import check_datasets, check_index, check_token_dtype
from megaindex.loader.targets import Targets
from megaindex.loader.token_readers import TokenReader
from megaindex.validation import check_between, check_choice, check_integer, make_plain

TOKEN_DTYPES = ("int64", "int32")


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """The options of Megatron's GPTDataset by its names, and a few more.

    Raises:
        InvalidArgument: an option needs another one, or an id does not fit the tokens.
    """

    eod_id: int | None = None
    """Id of the end-of-document token."""
    pad_id: int = -1
    """Id that fills up short samples. Tokens of the corpus that have it count as padding too."""
    eod_mask_loss: bool = False
    """No loss where the model reads an end-of-document token."""
    reset_position_ids: bool = False
    """Positions start again with each document."""
    reset_attention_mask: bool = False
    """Tokens do not attend to other documents; acts on ``attention_mask``."""
    create_attention_mask: bool = False
    """Return a [1, S, S] mask, True where attention is forbidden."""
    cu_seqlens: bool = False
    """Return what variable-length attention takes: ``cu_seqlens``, int32[S + 1], where documents
    begin, and S to the end of the row; and ``max_seqlen``, int32, tokens of the longest. Positions
    start again with each document. Shapes are those of Megatron-LM's inter-document masking, whose
    trainer strips the trailing S and joins the rows of a micro batch."""
    boundaries: Literal["eod", "documents"] = "eod"
    """Where documents meet, for position ids, attention mask and cu_seqlens: after each
    end-of-document token, as Megatron's resets have it; or as the index knows it, whatever the
    tokens, as its inter-document masking does."""
    dataset_id: bool = False
    """Return the number of the source, int16, as Megatron's BlendedDataset does."""
    token_dtype: Literal["int64", "int32"] = "int64"
    """Of tokens and labels. Megatron's trainer takes int64; int32 halves the bytes to copy."""

    def __post_init__(self) -> None:
        check_choice("boundaries", self.boundaries, ("eod", "documents"))
        check_choice("token_dtype", self.token_dtype, TOKEN_DTYPES)
        make_plain(self, "pad_id", optional=["eod_id"])
        for name, value in (("pad_id", self.pad_id), ("eod_id", self.eod_id)):
            limits = np.iinfo(self.token_dtype)
            if value is not None and not limits.min <= value <= limits.max:
                raise InvalidArgument(f"{name} must fit {self.token_dtype}, got {value}")
        by_token = self.boundaries == "eod" and self.separates_documents
        if self.eod_id is None and (self.eod_mask_loss or by_token):
            raise InvalidArgument(
                "eod_mask_loss, reset_position_ids, reset_attention_mask and cu_seqlens act on the "
                "end-of-document token; give its id as eod_id, or take the documents of the index "
                "with boundaries='documents'"
            )

    @property
    def separates_documents(self) -> bool:
        return self.reset_position_ids or self.reset_attention_mask or self.cu_seqlens

    @property
    def resets_positions(self) -> bool:
        return self.reset_position_ids or self.cu_seqlens


SampleIds = Sequence[int | None] | IntArray

PADDING = -1
"""Sample id of a row that only fills up a batch; None means the same."""


class BatchMaker:
    """Fills buffers with samples of ``index`` that ``reader`` reads.

    ``tokens`` and ``labels`` are int64[n, S], or int32, the labels one token ahead; ``loss_mask``
    float32[n, S]; ``position_ids`` int64[n, S]. If asked for, ``attention_mask`` is
    bool[n, 1, S, S], ``cu_seqlens`` int32[n, S + 1], ``max_seqlen`` int32[n], and ``receipt``
    int64[n, 3]. Ids equal to ``pad_id`` carry no loss and are replaced by 0. Without the extra
    token the last label is padding.

    A row of padding reads nothing: tokens and labels are 0 and its loss mask is 0 throughout.

    Safe to share between threads that fill different buffers.

    Args:
        reader: of the index's sources, in its order.
        options: default: those of Megatron without resets or masks.
        num_threads: most threads that copy one batch; small ones are copied by one.
        fingerprints: of the sources, for the field ``receipt``: what was read for each sample.
        targets: of the sources that are instruction data: which of their tokens carry loss.

    Raises:
        InvalidArgument: the datasets are not those of the index, or hold tokens that the options'
            ``token_dtype`` does not.
    """

    def __init__(
        self,
        index: Index,
        reader: TokenReader,
        options: SampleOptions | None = None,
        *,
        num_threads: int = 1,
        fingerprints: Sequence[str] | None = None,
        targets: Targets | None = None,
    ) -> None:
        check_index(index)
        self._index = index
        self._targets = targets
        self._reader = reader
        self._options = options or SampleOptions()
        self._num_threads = check_integer("num_threads", num_threads)
        self._keys = None if fingerprints is None else fingerprint_keys(fingerprints)
        check_datasets(index, reader.datasets)
        check_token_dtype(reader.datasets, self._options.token_dtype)
        self._tokens_per_sample = index.sequence_length + index.add_extra_token
        # int32 corpora could hold -1; in uint16 ones only short samples are padded
        pad_id = self._options.pad_id
        kinds = {d.dtype for d in reader.datasets if d.dtype.kind in "iu"}
        self._reads_padding = any(
            np.iinfo(kind).min <= pad_id <= np.iinfo(kind).max for kind in kinds
        )

    @property
    def index(self) -> Index:
        return self._index

    @property
    def options(self) -> SampleOptions:
        return self._options

    def allocate(self, rows: int, make: Allocate = ordinary) -> Buffers:
        """Buffers of ``rows`` samples, with the fields written that never change; ``make`` says in
        what memory."""
        rows = check_between("rows", rows, 1)
        options, length = self._options, self._index.sequence_length
        shapes: dict[str, tuple[tuple[int, ...], str]] = {}
        if options.dataset_id:
            shapes["dataset_id"] = (rows,), "int16"
        shapes |= {
            "tokens": ((rows, length), options.token_dtype),
            "labels": ((rows, length), options.token_dtype),
        }
        if options.create_attention_mask:
            shapes["attention_mask"] = ((rows, 1, length, length), "bool")
        shapes["loss_mask"] = (rows, length), "float32"
        shapes["position_ids"] = (rows, length), "int64"
        if options.cu_seqlens:
            shapes["cu_seqlens"] = ((rows, length + 1), "int32")
            shapes["max_seqlen"] = ((rows,), "int32")
        if self._keys is not None:
            shapes["receipt"] = ((rows, 3), "int64")
        buffers = make(rows, shapes)
        buffers.arrays["position_ids"][:] = np.arange(length)
        if options.create_attention_mask:
            position = np.arange(length)
            buffers.arrays["attention_mask"][:] = position > position[:, None]
        return buffers

    def fill(self, buffers: Buffers, sample_ids: SampleIds) -> Spans:
        """Write these samples over whatever the buffers held.

        Args:
            sample_ids: as many as the buffers have rows; None or -1 is a row of padding.

        Returns:
            The runs that each row was read from, the extra token included.

        Raises:
            InvalidArgument: as many ids as rows are needed.
            OutOfRange: a sample id the index does not hold; no other sample is served in its place.
            FormatError, StorageError: the tokens cannot be read.
        """
        ids, spans = self._locate(buffers, sample_ids)
        arrays = buffers.arrays
        tokens, labels = arrays["tokens"], arrays["labels"]
        self._reader.read(
            spans, tokens, labels, pad_id=self._options.pad_id, num_threads=self._num_threads
        )
        if self._options.separates_documents:
            self._separate_documents(buffers, spans)
        self._mask_loss(buffers, spans)
        if self._targets is not None and self._targets.apply(spans, labels, arrays["loss_mask"]):
            buffers.constant_loss_mask = False
        if self._options.dataset_id:
            _first_sources(spans, arrays["dataset_id"])
        if self._keys is not None:
            arrays["receipt"][:] = sample_receipts(ids, spans, self._keys)
        return spans

    def _locate(self, buffers: Buffers, sample_ids: SampleIds) -> tuple[I64, Spans]:
        if len(sample_ids) != buffers.rows:
            raise InvalidArgument(
                f"the buffers have {buffers.rows} rows and {len(sample_ids)} samples were asked "
                "for; allocate buffers of that many rows, or fill up with None"
            )
        given = [PADDING if i is None else i for i in sample_ids]
        ids = np.asarray(given)
        if PADDING not in given:
            return ids, self._index.locate(ids)
        real = ids != PADDING
        spans = self._index.locate(ids[real])
        counts = np.zeros(ids.size, np.int64)
        counts[real] = np.diff(spans.row_splits)
        return ids, replace(spans, row_splits=np.concatenate(([0], np.cumsum(counts))))

    def _separate_documents(self, buffers: Buffers, spans: Spans) -> None:
        """Fill the fields in which each document begins anew; tokens still hold padding."""
        arrays, options = buffers.arrays, self._options
        positions: I64 = arrays["position_ids"]
        if not options.resets_positions:
            positions = np.empty_like(positions)
        fields = positions, arrays.get("cu_seqlens"), arrays.get("max_seqlen")
        if options.boundaries == "documents":
            width = self._index.sequence_length
            active().documents_by_run(spans.length, spans.row_splits, width, *fields)
        else:
            assert options.eod_id is not None, "SampleOptions asks for it"
            active().documents_by_token(arrays["tokens"], options.eod_id, *fields)
        if options.create_attention_mask and options.reset_attention_mask:
            _hide_other_documents(arrays["attention_mask"][:, 0], positions)

    def _mask_loss(self, buffers: Buffers, spans: Spans) -> None:
        arrays, options = buffers.arrays, self._options
        labels, loss_mask = arrays["labels"], arrays["loss_mask"]
        whole = int(spans.length.sum()) == buffers.rows * self._tokens_per_sample
        if whole and not options.eod_mask_loss and not self._reads_padding:
            if not self._index.add_extra_token:
                labels[:, -1] = 0
            if not buffers.constant_loss_mask:
                loss_mask[:] = 1
                # the last label, where samples have no extra token for it
                loss_mask[:, self._tokens_per_sample - 1 :] = 0
            buffers.constant_loss_mask = True
            return
        eod_id = options.eod_id if options.eod_mask_loss else None
        active().mask_loss(arrays["tokens"], labels, options.pad_id, eod_id, loss_mask)
        buffers.constant_loss_mask = False


def _first_sources(spans: Spans, out: IntArray) -> None:
    """The source of each row; 0 where it reads nothing."""
    begins, ends = spans.row_splits[:-1], spans.row_splits[1:]
    is_read = begins < ends
    if is_read.all():
        out[:] = spans.source[begins]
    else:
        out[:] = 0
        out[is_read] = spans.source[begins[is_read]]


def _hide_other_documents(mask: IntArray, positions: I64) -> None:
    """mask, bool[n, S, S]: row i sees the columns from the start of its document to i."""
    position = np.arange(positions.shape[1])
    first = position - positions
    np.less(position, first[:, :, None], out=mask)
    mask |= position > position[:, None]
