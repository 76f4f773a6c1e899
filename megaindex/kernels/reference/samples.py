"""sample_index: where every sample begins when documents are read one after another."""

from __future__ import annotations

from megaindex.errors import InvalidArgument
from megaindex.kernels.types import I32, IntArray


def cut_samples(
    lengths: I32,
    document_index: I32,
    sequence_length: int,
    extra: int,
    num_samples: int,
    total_tokens: int,
    out: IntArray,
    num_threads: int = 1,
) -> None:
    """Fill ``out``, int32 or int64 [num_samples + 1, 2]: (position in document_index, offset).

    Row k tells where sample k begins: at the last token of sample k-1 if samples hold one token
    more for the shifted label (``extra=1``), else one past it. With lengths 3 0 4, S = 2, extra 1,
    tokens ``a b c | | d e f g`` are cut into ``a b c``, ``c d e``, ``e f g``: rows (0,0) (0,2)
    (2,1) (2,3). ``total_tokens`` is what the documents hold together; where ``num_samples`` was
    rounded up, the last row ends at the last token.

    Raises:
        InvalidArgument: a document has no length, a length is negative, or tokens are missing.
    """
    out[0] = 0, 0
    row, position = 1, 0
    boundary = sequence_length - 1 + extra  # the token that row 1 points at
    for d, document in enumerate(document_index.tolist()):
        if not 0 <= document < lengths.size:
            raise InvalidArgument("document_index names a sequence that has no length")
        length = int(lengths[document])
        if length < 0:
            raise InvalidArgument("a length is negative")
        while row <= num_samples and boundary < position + length:
            out[row] = d, boundary - position + 1 - extra
            row += 1
            boundary += sequence_length
        position += length
    needed = num_samples * sequence_length + extra
    if position < min(needed, total_tokens):
        raise InvalidArgument("the documents hold fewer tokens than num_epochs * tokens_per_epoch")
    if position < needed and num_samples > 0:
        out[num_samples] = _last_partial(lengths, document_index, extra)


def _last_partial(lengths: I32, document_index: I32, extra: int) -> tuple[int, int]:
    """The row that ends at the last token there is; empty documents have none to share."""
    d = document_index.size - 1
    while extra == 1 and d > 0 and lengths[document_index[d]] == 0:
        d -= 1
    return d, int(lengths[document_index[d]]) - extra
