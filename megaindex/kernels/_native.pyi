"""The native core: see `megaindex.kernels.reference` for what each function computes."""

from collections.abc import Sequence
from typing import Any

from megaindex.kernels.types import (
    F32,
    F64,
    I32,
    I64,
    U32,
    U64,
    DatasetIndex,
    IndexArrays,
    IntArray,
    TokenSource,
)

def seed_state(seed: int) -> U32: ...
def shuffle(state: U32, array: IntArray, num_threads: int = 1) -> None: ...
def shuffled_range(state: U32, first: int, out: IntArray, num_threads: int = 1) -> None: ...
def shuffled_documents(
    state: U32,
    documents: I32 | None,
    first_document: int,
    num_epochs: int,
    out: I32,
    num_threads: int = 1,
) -> None: ...
def draw_positions(state: U32, first: int, count: int) -> U64: ...
def cut_samples(
    lengths: I32,
    document_index: I32,
    sequence_length: int,
    extra: int,
    num_samples: int,
    total_tokens: int,
    out: IntArray,
    num_threads: int = 1,
) -> None: ...
def bijection_apply(key: U64, n: int, indices: IntArray) -> I64: ...
def bijection_invert(key: U64, n: int, values: IntArray) -> I64: ...
def bijection_range(key: U64, n: int, begin: int, out: IntArray) -> None: ...
def bijection_inverse_range(key: U64, n: int, begin: int, out: IntArray) -> None: ...
def epoch_starts(
    key: U64, lengths: I32, copies: int, stride: int, out: I64, num_threads: int = 1
) -> None: ...
def epoch_spans(
    key: U64, lengths: I32, copies: int, stride: int, starts: I64, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]: ...
def array_spans(
    shuffle_index: IntArray,
    sample_index: IntArray,
    document_index: I32,
    lengths: I32,
    extra: int,
    sample_ids: I64,
) -> tuple[I64, I64, I64, I64]: ...
def sort_by_sample(shuffle_index: U32, samples: int, begin: int, out: U64) -> None: ...
def window_spans(
    pointers: I64,
    lengths: I32,
    item_size: int,
    first: int,
    stop: int,
    begins: I64,
    ends: I64,
) -> tuple[I64, I64, I64, I64]: ...
def tokens_within(pointers: I64, lengths: I32, item_size: int, nbytes: int) -> int: ...
def receipt_add(
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
def pack_documents(lengths: I32, capacity: int, tokens: int, begins: I64) -> tuple[int, int]: ...
def span_table(indices: Sequence[IndexArrays]) -> Any: ...
def blended_spans(table: Any, which: I64, samples: I64) -> tuple[I32, I64, I64, I64, I64]: ...
def token_table(sources: Sequence[TokenSource]) -> Any: ...
def gather(
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
def mask_loss(
    tokens: IntArray, labels: IntArray, pad_id: int, eod_id: int | None, loss_mask: F32
) -> None: ...
def documents_by_token(
    tokens: IntArray,
    eod_id: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None: ...
def documents_by_run(
    length: I64,
    row_splits: I64,
    width: int,
    position_ids: I64 | None,
    cu_seqlens: I32 | None,
    max_seqlen: I32 | None,
) -> None: ...
def least_seen(
    begins: I64, ends: I64, row_splits: I64, widths: I64, counts: I64, num_samples: int
) -> I64: ...
def blend_greedy(
    weights: F64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None: ...
def blend_exhaustive(
    sizes: I64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None: ...
def blend_checkpoints(weights: F64, size: int, stride: int) -> I64: ...
def divisor_counts(weights: U64, position: int) -> I64: ...
def divisor_fill(
    weights: U64,
    begin: int,
    end: int,
    counts: I64,
    dataset_index: DatasetIndex | None,
    dataset_sample_index: I64 | None,
) -> None: ...
def build_mapping(
    docs: I64,
    sizes: I32,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    short_seq_prob: float,
    seed: int,
    min_num_sent: int = 2,
) -> IntArray: ...
def build_blocks_mapping(
    docs: I64,
    sizes: I32,
    titles_sizes: I32,
    num_epochs: int,
    max_num_samples: int,
    max_seq_length: int,
    seed: int,
    use_one_sent_blocks: bool,
) -> IntArray: ...
