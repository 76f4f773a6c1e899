"""The native core: see `megaindex.kernels.reference` for what each function computes."""

from megaindex.kernels.types import F64, I32, I64, U32, U64, DatasetIndex, IntArray

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
def epoch_starts(
    key: U64, lengths: I32, copies: int, stride: int, out: I64, num_threads: int = 1
) -> None: ...
def epoch_spans(
    key: U64, lengths: I32, copies: int, stride: int, starts: I64, begins: I64, ends: I64
) -> tuple[I64, I64, I64, I64]: ...
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
