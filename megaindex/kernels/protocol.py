"""The interface of all backends; `megaindex.kernels.reference` documents each function."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from megaindex._types import (
    F32,
    F64,
    I16,
    I32,
    I64,
    U32,
    U64,
    DatasetIndex,
    IndexArrays,
    IntArray,
    TokenSource,
)

NATIVE_INTERFACE = 8
"""Version of the native core's functions, as in csrc/python/module.cpp: both are raised when the
arguments of a function change, so that a core of an earlier build is refused."""


class Backend(Protocol):
    """One implementation of all kernels: reference, jit (Numba) or native."""

    def seed_state(self, seed: int) -> U32: ...

    def shuffle(self, state: U32, array: IntArray, num_threads: int = 1) -> None: ...

    def shuffled_range(
        self, state: U32, first: int, out: IntArray, num_threads: int = 1
    ) -> None: ...

    def shuffled_documents(
        self,
        state: U32,
        documents: I32 | None,
        first_document: int,
        num_epochs: int,
        out: I32,
        num_threads: int = 1,
    ) -> None: ...

    def cut_samples(
        self,
        lengths: I32,
        document_index: I32,
        sequence_length: int,
        extra: int,
        num_samples: int,
        total_tokens: int,
        out: IntArray,
        num_threads: int = 1,
    ) -> None: ...

    def bijection_apply(self, key: U64, n: int, indices: IntArray) -> I64: ...

    def bijection_invert(self, key: U64, n: int, values: IntArray) -> I64: ...

    def bijection_range(self, key: U64, n: int, begin: int, out: IntArray) -> None: ...

    def bijection_inverse_range(self, key: U64, n: int, begin: int, out: IntArray) -> None: ...

    def epoch_starts(
        self,
        key: U64,
        lengths: I32,
        copies: int,
        stride: int,
        out: I64,
        num_threads: int = 1,
    ) -> None: ...

    def epoch_begins(
        self,
        key: U64,
        lengths: I32,
        copies: int,
        stride: int,
        starts: I64,
        entries: I64,
        num_threads: int = 1,
    ) -> I64: ...

    def epoch_spans(
        self,
        key: U64,
        lengths: I32,
        copies: int,
        stride: int,
        starts: I64,
        begins: I64,
        ends: I64,
    ) -> tuple[I64, I64, I64, I64]: ...

    def array_spans(
        self,
        shuffle_index: IntArray,
        sample_index: IntArray,
        document_index: I32,
        lengths: I32,
        extra: int,
        sample_ids: I64,
    ) -> tuple[I64, I64, I64, I64]: ...

    def window_spans(
        self,
        pointers: I64,
        lengths: I32,
        item_size: int,
        first: int,
        stop: int,
        begins: I64,
        ends: I64,
    ) -> tuple[I64, I64, I64, I64]: ...

    def tokens_within(self, pointers: I64, lengths: I32, item_size: int, nbytes: int) -> int: ...

    def receipt_add(
        self,
        positions: I64,
        source: I32,
        document: I64,
        offset: I64,
        length: I64,
        row_splits: I64,
        keys: U64,
        blocks: I64,
        sums: U64,
    ) -> None: ...

    def row_keys(
        self,
        positions: I64,
        numbers: I64,
        source: I32,
        document: I64,
        offset: I64,
        length: I64,
        row_splits: I64,
        width: int,
        contents: U64,
        starts: I64,
        passes: I64,
        samples: I64,
        sources: I32,
        exposures: I32,
        keys: I64,
        high: I64,
    ) -> None: ...

    def pack_documents(
        self, lengths: I32, capacity: int, tokens: int, begins: I64
    ) -> tuple[int, int]: ...

    def count_pieces(
        self, lengths: I32, capacity: int, long_documents: int, num_threads: int = 1
    ) -> I64: ...

    def sort_pieces(
        self,
        lengths: I32,
        capacity: int,
        long_documents: int,
        counts: I64,
        documents: I32,
        sample_starts: I64,
        num_threads: int = 1,
    ) -> None: ...

    def pack_pieces(
        self, counts: I64, max_pieces: int, least_room: int, stacked: bool
    ) -> tuple[I64, I64]: ...

    def packed_spans(
        self,
        key: U64,
        lengths: I32,
        long_documents: int,
        extra: int,
        piece_starts: I64,
        documents: I32,
        sample_starts: I64,
        layers: I64,
        runs: I64,
        bins: I64,
    ) -> tuple[I64, I64, I64, I64]: ...

    def packed_bins(
        self,
        key: U64,
        piece_starts: I64,
        layers: I64,
        runs: I64,
        lengths: I64,
        places: I64,
        num_threads: int = 1,
    ) -> I64: ...

    def span_table(self, indices: Sequence[IndexArrays]) -> Any: ...

    def blended_spans(
        self, table: Any, which: I64, samples: I64
    ) -> tuple[I32, I64, I64, I64, I64]: ...

    def token_table(self, sources: Sequence[TokenSource]) -> Any: ...

    def gather(
        self,
        table: Any,
        source: I32,
        document: I64,
        offset: I64,
        length: I64,
        row_splits: I64,
        out: IntArray,
        labels: IntArray | None,
        pad_id: int,
        num_threads: int = 1,
    ) -> int: ...

    def row_table(
        self,
        indices: Sequence[IndexArrays],
        sources: Sequence[TokenSource],
        dataset_index: DatasetIndex | None,
        dataset_sample_index: I64 | None,
        descriptors: Sequence[int],
    ) -> Any: ...

    def read_rows(
        self, table: Any, sample_ids: list[Any], width: int, pad_id: int
    ) -> I64 | None: ...

    def mask_loss(
        self, tokens: IntArray, labels: IntArray, pad_id: int, eod_id: int | None, loss_mask: F32
    ) -> None: ...

    def documents_by_token(
        self,
        tokens: IntArray,
        eod_id: int,
        position_ids: I64 | None,
        cu_seqlens: I32 | None,
        max_seqlen: I32 | None,
    ) -> None: ...

    def documents_by_run(
        self,
        length: I64,
        row_splits: I64,
        width: int,
        position_ids: I64 | None,
        cu_seqlens: I32 | None,
        max_seqlen: I32 | None,
    ) -> None: ...

    def squared_lengths(self, length: I64, row_splits: I64, width: int, out: I64) -> None: ...

    def balance_rows(
        self,
        work: I64,
        served: int,
        rows_served: int,
        ranks: int,
        micro_batch_size: int,
        out: I64,
    ) -> None: ...

    def least_seen(
        self,
        begins: I64,
        ends: I64,
        row_splits: I64,
        widths: I64,
        counts: I64,
        num_samples: int,
    ) -> I64: ...

    def blend_greedy(
        self,
        weights: F64,
        begin: int,
        end: int,
        counts: I64,
        dataset_index: DatasetIndex | None,
        dataset_sample_index: I64 | None,
    ) -> None: ...

    def blend_exhaustive(
        self,
        sizes: I64,
        begin: int,
        end: int,
        counts: I64,
        dataset_index: DatasetIndex | None,
        dataset_sample_index: I64 | None,
    ) -> None: ...

    def divisor_counts(self, weights: U64, position: int) -> I64: ...

    def divisor_fill(
        self,
        weights: U64,
        begin: int,
        end: int,
        counts: I64,
        dataset_index: DatasetIndex | None,
        dataset_sample_index: I64 | None,
    ) -> None: ...

    def mix_table(self, shares: U32, lengths: I64, deficits: I64, counts: I64) -> None: ...

    def mix_fill(
        self,
        shares: U32,
        starts: I64,
        deficits: I64,
        counts: I64,
        begin: int,
        streams: I16,
        ordinals: I64,
        num_threads: int = 1,
    ) -> None: ...

    def map_sentences(
        self,
        docs: I64,
        sizes: I32,
        num_epochs: int,
        max_num_samples: int,
        max_seq_length: int,
        short_seq_prob: float,
        seed: int,
        min_num_sent: int = 2,
    ) -> IntArray: ...

    def map_blocks(
        self,
        docs: I64,
        sizes: I32,
        titles_sizes: I32,
        num_epochs: int,
        max_num_samples: int,
        max_seq_length: int,
        seed: int,
        use_one_sent_blocks: bool,
    ) -> IntArray: ...
