"""Fields of a batch, as in Megatron's GPTDataset, in reused buffers.

maker = BatchMaker(index, MappedTokens([dataset]), SampleOptions(eod_id=0, eod_mask_loss=True))
buffers = maker.allocate(rows=4)
for micro_batch in sampler:
    maker.fill(buffers, micro_batch)
    train(buffers.tensors())         # before the next fill, or from other buffers

Buffers are reused because fresh arrays cost more in page faults than the copying does: 22 µs a
sample of 2048 tokens. torch is imported only where tensors are asked for.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from megaindex._types import I64, IntArray
from megaindex.errors import InvalidArgument
from megaindex.index.receipts import fingerprint_keys, sample_receipts
from megaindex.index.skips import masked_labels, refuse_removal
from megaindex.index.spans import (
    PADDING,
    Index,
    Spans,
    alignments,
    locate_rows,
    sequence_lengths_at,
)
from megaindex.kernels import active
from megaindex.loader.checkpoint import check_datasets, check_token_dtype
from megaindex.loader.row_fields import RowFields, check_keys, row_fields
from megaindex.loader.targets import Targets, targets_within_documents
from megaindex.loader.token_readers import TokenReader
from megaindex.validation import (
    check_between,
    check_choice,
    check_integer,
    check_kind,
    make_plain,
    shown,
)

if TYPE_CHECKING:
    import torch

TOKEN_DTYPES = ("int64", "int32")

Shapes = Mapping[str, tuple[tuple[int, ...], str]]
"""Shape and dtype of each field."""


class Buffers:
    """The arrays of one micro batch, as allocated by `BatchMaker.allocate`.

    Args:
        rows: number of samples.
        arrays: the fields by name, one row for each sample.
    """

    def __init__(self, rows: int, arrays: dict[str, npt.NDArray[Any]]) -> None:
        self.rows = rows
        self.arrays = arrays
        self.constant_loss_mask = False
        """True while ``loss_mask`` is that of samples without padding, so that a fill need not
        write it. Code that changes the mask between two fills sets this to False."""
        self._own_references = self._references()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the fields as new torch tensors that share memory with `arrays`."""
        import torch

        return {name: torch.from_numpy(array) for name, array in self.arrays.items()}

    @property
    def in_use(self) -> bool:
        """True if a tensor or view of an array is alive, so that a fill would change it.

        Decided by reference counts, which are not exact in free-threaded Python while other threads
        run; there it is always True.
        """
        return not _references_are_exact() or self._references() != self._own_references

    def _references(self) -> list[int]:
        return [sys.getrefcount(array) for array in self.arrays.values()]


Allocate = Callable[[int, Shapes], Buffers]
"""A function of (rows, shapes) that returns uninitialised buffers."""


def pageable(rows: int, shapes: Shapes) -> Buffers:
    """Allocate buffers in ordinary memory."""
    return Buffers(rows, {name: np.empty(shape, dtype) for name, (shape, dtype) in shapes.items()})


def pinned(rows: int, shapes: Shapes) -> Buffers:
    """Allocate page-locked buffers, for asynchronous copies; pageable ones without CUDA."""
    import torch

    if not torch.cuda.is_available():
        return pageable(rows, shapes)
    tensors = {
        name: torch.empty(shape, dtype=getattr(torch, dtype), pin_memory=True)
        for name, (shape, dtype) in shapes.items()
    }
    return Buffers(rows, {name: tensor.numpy() for name, tensor in tensors.items()})


def _references_are_exact() -> bool:
    is_gil_enabled = getattr(sys, "_is_gil_enabled", None)  # from Python 3.13 on
    return is_gil_enabled is None or bool(is_gil_enabled())


@dataclass(frozen=True, kw_only=True)
class SampleOptions:
    """Options of the samples: those of Megatron's GPTDataset by their names, and a few more.

    Attributes:
        eod_id: id of the end-of-document token, also in the places of removed documents.
        pad_id: id that fills up short samples. Tokens of the corpus with this id count as
            padding too.
        eod_mask_loss: set the loss mask to 0 where the input is an end-of-document token.
        reset_position_ids: restart the position ids at 0 with each document.
        reset_attention_mask: forbid attention between documents in ``attention_mask``.
        create_attention_mask: return ``attention_mask``, bool[1, S, S], True where attention is
            forbidden.
        cu_seqlens: return the arguments of variable-length attention: ``cu_seqlens``, int32[S +
            1], the start of each document, filled up with S to the end of the row; and
            ``max_seqlen``, int32, the length of the longest document. Position ids restart with
            each document. The shapes are those of Megatron-LM's inter-document masking; its
            trainer strips the trailing S and joins the rows of a micro batch. Where documents are
            aligned (`PackedOrder`), also ``cu_seqlens_padded``, int32[S + 1], the start of each
            document with its padding, the last of them the padding of the row; ``cu_seqlens`` are
            then the sums of their own tokens, of as many documents and filled up with the last sum,
            ``max_seqlen`` is the longest with its padding, and position ids are 0 in padding.
        boundaries: document boundaries for position ids, attention mask and cu_seqlens: ``eod``
            puts one after each end-of-document token, as Megatron's resets do; ``documents``
            takes those of the index, as Megatron's inter-document masking does.
        dataset_id: return ``dataset_id``, int16, the number of the source, as Megatron's
            BlendedDataset does.
        keys: return ``sample``, ``source``, ``exposure`` and ``key``, which say what each row is,
            see `BatchMaker`; ``wide``: and ``key_high``, for keys of 128 bits.
        token_dtype: dtype of tokens and labels. Megatron's trainer takes int64; int32 halves
            the bytes to copy.

    Raises:
        InvalidArgument: an option lacks another that it needs, or an id does not fit
            ``token_dtype``.
    """

    eod_id: int | None = None
    pad_id: int = -1
    eod_mask_loss: bool = False
    reset_position_ids: bool = False
    reset_attention_mask: bool = False
    create_attention_mask: bool = False
    cu_seqlens: bool = False
    boundaries: Literal["eod", "documents"] = "eod"
    dataset_id: bool = False
    keys: bool | Literal["wide"] = False
    token_dtype: Literal["int64", "int32"] = "int64"

    def __post_init__(self) -> None:
        check_choice("boundaries", self.boundaries, ("eod", "documents"))
        check_choice("token_dtype", self.token_dtype, TOKEN_DTYPES)
        check_keys(self.keys)
        make_plain(self, "pad_id", optional=["eod_id"])
        for name, value in (("pad_id", self.pad_id), ("eod_id", self.eod_id)):
            limits = np.iinfo(self.token_dtype)
            if value is not None and not limits.min <= value <= limits.max:
                raise InvalidArgument(f"{name} must fit {self.token_dtype}, got {value}")
        by_token = self.boundaries == "eod" and self.separates_documents
        if self.eod_id is None and (self.eod_mask_loss or by_token):
            raise InvalidArgument(
                "eod_id must be given: eod_mask_loss, reset_position_ids, reset_attention_mask and "
                "cu_seqlens act on the end-of-document token; give its id as eod_id, or take the "
                "document bounds of the index with boundaries='documents'"
            )

    @property
    def separates_documents(self) -> bool:
        """True if an option keeps the documents of a sample apart."""
        return self.reset_position_ids or self.reset_attention_mask or self.cu_seqlens

    @property
    def resets_positions(self) -> bool:
        """True if positions are counted from the start of each document."""
        return self.reset_position_ids or self.cu_seqlens

    @property
    def can_fill(self) -> bool:
        """True if `fill` is given, or no token attends to it."""
        apart = self.cu_seqlens or (self.create_attention_mask and self.reset_attention_mask)
        return self.eod_id is not None or (apart and self.boundaries == "documents")

    @property
    def fill(self) -> int:
        """Token in the places of removed documents."""
        return 0 if self.eod_id is None else self.eod_id

    @property
    def row_fields(self) -> dict[str, str]:
        """Names and dtypes of the fields that say what each row is."""
        return row_fields(self.keys == "wide") if self.keys else {}


SampleIds = Sequence[int | None] | IntArray
"""Ids of samples; None, as -1, is a row of padding."""


class BatchMaker:
    """Fills buffers with samples of an index, with the fields of megatron-core's GPTDataset.

    Fields of a batch of n samples of S tokens (``sequence_length``):

    - ``tokens``, ``labels``: [n, S] of ``token_dtype``; labels are one token ahead. Ids equal to
      ``pad_id`` carry no loss and are replaced by 0. Without the extra token the last label is
      padding.
    - ``loss_mask``: float32[n, S].
    - ``position_ids``: int64[n, S].
    - ``attention_mask``: bool[n, 1, S, S]; ``cu_seqlens``: int32[n, S + 1]; ``max_seqlen``:
      int32[n]; ``dataset_id``: int16[n], if set in the options. ``cu_seqlens_padded``: int32[n, S +
      1], beside ``cu_seqlens``, where documents are aligned.
    - ``receipt``: int64[n, 3], with ``fingerprints``; see `megaindex.loader.Recorder`.
    - with ``keys`` in the options:
      ``sample``, int64[n], the position in the run, that of receipts;
      ``source``, int32[n], the number of the source;
      ``exposure``, int32[n], the pass of the source's order that the sample belongs to, on average
      where a framework shuffles passes together;
      ``key``, int64[n], 64 bits of a hash of the source's content, the input tokens' places in it
      and the exposure, which `megaindex.keys.content` takes out;
      and with ``keys="wide"`` ``key_high``, int64[n], 64 more bits, without the exposure.

    A row of padding reads nothing: its tokens, labels and loss mask are 0, its sample, source and
    exposure -1, its key 0.

    Safe to share between threads that fill different buffers.

    Args:
        index: the samples, from build_index, build_blend or a recipe.
        reader: reader of the index's sources, in the order of the index.
        options: default: those of Megatron without resets or masks.
        num_threads: maximum number of threads that copy one batch; small batches use one.
        fingerprints: fingerprint of each source, 32 hex digits; adds the field ``receipt``.
        targets: loss targets of the sources that are instruction data. Default: every token, except
            the first of each document in order packed.

    Raises:
        InvalidArgument: the datasets do not belong to the index, or hold tokens that do not fit
            ``token_dtype``.
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
        if not hasattr(index, "locate") or not hasattr(index, "num_samples"):
            raise InvalidArgument(
                "index must be a result of build_index or build_blend, got "
                f"{shown(index)} of type {type(index).__name__}"
            )
        self._index = index
        self._targets = targets_within_documents(index, targets)
        self._reader = reader
        self._options = options or SampleOptions()
        check_kind(
            "options", self._options, SampleOptions, "a SampleOptions", "write SampleOptions(…)"
        )
        if not self._options.can_fill:
            refuse_removal(
                index,
                "the tokens of removed documents become eod_id, which is not given",
                "give it, or keep documents apart with cu_seqlens or reset_attention_mask, and "
                "boundaries='documents'",
            )
        self._num_threads = check_integer("num_threads", num_threads)
        self._keys = None if fingerprints is None else fingerprint_keys(fingerprints)
        check_datasets(index, reader.datasets)
        self._rows = RowFields(index, reader.datasets) if self._options.keys else None
        check_token_dtype(reader.datasets, self._options.token_dtype)
        self._sequence_length = index.sequence_length
        self._align = self._alignment()
        first = np.arange(min(1, index.num_samples))
        self._has_lengths = isinstance(sequence_lengths_at(index, first), np.ndarray)
        # int32 corpora could hold -1; in uint16 corpora only short samples are padded
        pad_id = self._options.pad_id
        kinds = {d.dtype for d in reader.datasets if d.dtype.kind in "iu"}
        self._reads_padding = any(
            np.iinfo(kind).min <= pad_id <= np.iinfo(kind).max for kind in kinds
        )

    def _alignment(self) -> int:
        """Return the multiple at which documents begin in all rows, 1 for any place."""
        found = alignments(self._index)
        if found == {1} or not self._options.separates_documents:
            return 1
        if len(found) > 1:
            raise InvalidArgument(
                "align: documents that are kept apart must be aligned alike in all sources, got "
                f"align {sorted(found)}; give all sources order packed with one align"
            )
        if self._options.boundaries != "documents":
            raise InvalidArgument(
                "boundaries must be documents where documents are aligned, got eod, which would "
                "take the padding for a part of them"
            )
        return found.pop()

    @property
    def index(self) -> Index:
        """The index that samples are located in."""
        return self._index

    @property
    def options(self) -> SampleOptions:
        """Options of the samples."""
        return self._options

    @property
    def sequence_length(self) -> int:
        """Number of tokens of a row."""
        return self._sequence_length

    def for_samples(self, sample_ids: SampleIds) -> BatchMaker:
        """Return the maker of batches as long as these samples, if the index has several lengths.

        Raises:
            InvalidArgument: the samples differ in length.
            OutOfRange: the index does not hold a sample id.
        """
        if not self._has_lengths:
            return self
        read = [i for i in sample_ids if i is not None and i != PADDING]
        ids = np.asarray(read or [self._index.num_samples - 1])  # padding completes the last batch
        lengths = np.unique(sequence_lengths_at(self._index, ids))
        if lengths.size > 1:
            raise InvalidArgument(
                f"the samples of a batch must have one sequence length, got {lengths.tolist()}; "
                "read the batches of a stage as its sampler yields them"
            )
        if int(lengths[0]) == self._sequence_length:
            return self
        maker = copy(self)
        maker._sequence_length = int(lengths[0])
        return maker

    def allocate(self, rows: int, make: Allocate = pageable) -> Buffers:
        """Return buffers of ``rows`` samples, allocated by ``make``, with the constant fields set.

        Raises:
            InvalidArgument: ``rows`` is below 1.
        """
        rows = check_between("rows", rows, 1)
        options, length = self._options, self._sequence_length
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
            if self._align > 1:
                shapes["cu_seqlens_padded"] = ((rows, length + 1), "int32")
            shapes["max_seqlen"] = ((rows,), "int32")
        shapes |= {name: ((rows,), dtype) for name, dtype in options.row_fields.items()}
        if self._keys is not None:
            shapes["receipt"] = ((rows, 3), "int64")
        buffers = make(rows, shapes)
        buffers.arrays["position_ids"][:] = np.arange(length)
        if options.create_attention_mask:
            position = np.arange(length)
            buffers.arrays["attention_mask"][:] = position > position[:, None]
        return buffers

    def fill(self, buffers: Buffers, sample_ids: SampleIds) -> Spans:
        """Overwrite the buffers with these samples.

        Args:
            sample_ids: one for each row of the buffers; None or -1 makes a row of padding.

        Returns:
            The spans that each row was read from, the extra token included.

        Raises:
            InvalidArgument: the number of ids is not the number of rows.
            OutOfRange: the index does not hold a sample id.
            FormatError, StorageError: the tokens cannot be read.
        """
        if self._has_lengths and self.for_samples(sample_ids) is not self:
            raise InvalidArgument(
                f"the buffers have rows of {self._sequence_length} tokens and the samples another "
                "sequence length; read a recipe of several lengths by loader_of_recipe"
            )
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
        if spans.masked is not None and spans.masked.any():
            arrays["loss_mask"][masked_labels(spans, labels.shape[1])] = 0
            buffers.constant_loss_mask = False
        if spans.removed is not None:
            removed = spans.tokens_removed(labels.shape[1] + 1)
            tokens[removed[:, :-1]] = labels[removed[:, 1:]] = self._options.fill
        if self._options.dataset_id:
            _first_sources(spans, arrays["dataset_id"])
        if self._rows is not None:
            self._rows.fill(arrays, ids, spans, self._sequence_length)
        if self._keys is not None:
            arrays["receipt"][:] = sample_receipts(ids, spans, self._keys)
        return spans

    def rows(self, sample_ids: Sequence[int | None]) -> dict[str, npt.NDArray[Any]]:
        """Return the fields of ``SampleOptions(keys=True)`` alone, arrays [n], without tokens.

        Raises:
            OutOfRange: the index does not hold a sample id.
            InvalidArgument: the options have no keys, or samples differ in length.
        """
        maker = self.for_samples(sample_ids)
        if maker._rows is None:
            raise InvalidArgument("rows need SampleOptions(keys=True); give it to the loader")
        wide = self._options.keys == "wide"
        return maker._rows.rows(sample_ids, maker._sequence_length, wide=wide)

    def _locate(self, buffers: Buffers, sample_ids: SampleIds) -> tuple[I64, Spans]:
        if len(sample_ids) != buffers.rows:
            raise InvalidArgument(
                f"sample_ids must be {buffers.rows}, one for each row of the buffers, got "
                f"{len(sample_ids)}; allocate buffers of that many rows, or fill up with None"
            )
        given = [PADDING if i is None else i for i in sample_ids]
        ids = np.asarray(given)
        if PADDING not in given:
            return ids, self._index.locate(ids)
        return ids, locate_rows(self._index, ids)

    def _separate_documents(self, buffers: Buffers, spans: Spans) -> None:
        """Fill the fields that depend on document boundaries; tokens still hold ``pad_id``."""
        arrays, options = buffers.arrays, self._options
        positions: I64 = arrays["position_ids"]
        if not options.resets_positions:
            positions = np.empty_like(positions)
        fields = positions, arrays.get("cu_seqlens"), arrays.get("max_seqlen")
        if self._align > 1:
            self._separate_aligned(arrays, spans, positions)
        elif options.boundaries == "documents":
            width = self._sequence_length
            active().documents_by_run(spans.length, spans.row_splits, width, *fields)
        else:
            assert options.eod_id is not None, "SampleOptions requires it"
            active().documents_by_token(arrays["tokens"], options.eod_id, *fields)
        if options.create_attention_mask and options.reset_attention_mask:
            _mask_other_documents(arrays["attention_mask"][:, 0], positions)

    def _separate_aligned(
        self, arrays: Mapping[str, npt.NDArray[Any]], spans: Spans, positions: I64
    ) -> None:
        """Fill the same fields where each document begins at a multiple of ``align``."""
        width = self._sequence_length
        lengths = spans.input_lengths(width)
        padded = -(-lengths // self._align) * self._align
        ends = spans.row_splits[1:]
        sums = np.concatenate(([0], np.cumsum(padded)))[spans.row_splits]
        # the padding of each row is its last document, of no tokens
        segments = np.insert(padded, ends, width - np.diff(sums))
        splits = spans.row_splits + np.arange(spans.row_splits.size)
        active().documents_by_run(
            segments, splits, width, positions, arrays.get("cu_seqlens_padded"),
            arrays.get("max_seqlen"),
        )  # fmt: skip
        positions *= spans.covered(width)
        if "cu_seqlens" in arrays:
            row = spans.rows
            number = np.arange(lengths.size) - spans.row_splits[row]
            steps = np.zeros_like(arrays["cu_seqlens"])
            steps[row, number + 1] = lengths
            np.cumsum(steps, axis=1, out=arrays["cu_seqlens"])

    def _mask_loss(self, buffers: Buffers, spans: Spans) -> None:
        arrays, options = buffers.arrays, self._options
        labels, loss_mask = arrays["labels"], arrays["loss_mask"]
        tokens_per_sample = self._sequence_length + self._index.add_extra_token
        whole = int(spans.length.sum()) == buffers.rows * tokens_per_sample
        if whole and not options.eod_mask_loss and not self._reads_padding:
            if not self._index.add_extra_token:
                labels[:, -1] = 0
            if not buffers.constant_loss_mask:
                loss_mask[:] = 1
                loss_mask[:, tokens_per_sample - 1 :] = 0  # without the extra token
            buffers.constant_loss_mask = True
            return
        eod_id = options.eod_id if options.eod_mask_loss else None
        active().mask_loss(arrays["tokens"], labels, options.pad_id, eod_id, loss_mask)
        buffers.constant_loss_mask = False


def _first_sources(spans: Spans, out: IntArray) -> None:
    """Write the source of each row; 0 for a row of padding."""
    begins, ends = spans.row_splits[:-1], spans.row_splits[1:]
    is_read = begins < ends
    if is_read.all():
        out[:] = spans.source[begins]
    else:
        out[:] = 0
        out[is_read] = spans.source[begins[is_read]]


def _mask_other_documents(mask: IntArray, positions: I64) -> None:
    """Write mask, bool[n, S, S]: False in row i from the start of its document to column i."""
    position = np.arange(positions.shape[1])
    first = position - positions
    np.less(position, first[:, :, None], out=mask)
    mask |= position > position[:, None]
