"""Whether index arrays that another program wrote are those of a corpus and a request."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError
from megaindex.index.arithmetic import shuffle_dtype
from megaindex.index.orders.shuffled import ShuffledOrder
from megaindex.kernels.types import I32, IntArray

_SAMPLED_ROWS = 256


def check_arrays(
    order: ShuffledOrder,
    lengths: I32,
    document_index: IntArray,
    sample_index: IntArray,
    shuffle_index: IntArray,
) -> None:
    """Check shapes and dtypes, that both shuffles are complete, that every row is in bounds, also
    of the document it lies in, and, for some hundred rows, that a sample has as many tokens as it
    should.

    The seed is not checked: it is in the names that the frameworks give the files.

    Raises:
        FormatError: the arrays are not those of ``order``.
    """
    samples = order.samples_built
    for name, array, dtype, shape in (
        ("document_index", document_index, "int32", (order.num_documents,)),
        ("sample_index", sample_index, order.sample_dtype, (samples + 1, 2)),
        ("shuffle_index", shuffle_index, shuffle_dtype(samples), (samples,)),
    ):
        if array.dtype != dtype or array.shape != shape:
            raise FormatError(
                f"{name} must be {dtype} of shape {shape}, is {array.dtype} of {array.shape}"
            )
    _check_documents(order, document_index)
    seen = np.zeros(samples, bool)
    if samples and int(shuffle_index.max()) < samples:
        seen[shuffle_index] = True
    if not seen.all():
        raise FormatError(f"shuffle_index must hold each of {samples} samples once")
    _check_rows(order, lengths, document_index, sample_index)


def _check_documents(order: ShuffledOrder, document_index: IntArray) -> None:
    documents = order.documents
    first, last = (
        (documents.start, documents.stop - 1)
        if isinstance(documents, range)
        else (int(documents.min()), int(documents.max()))
    )
    expected = np.bincount(np.asarray(documents) - first, minlength=last - first + 1)
    if document_index.min() >= first and document_index.max() <= last:
        times = np.bincount(document_index - first, minlength=last - first + 1)
        if np.array_equal(times, expected * order.num_epochs):
            return
    raise FormatError(
        f"document_index must hold each of its {len(documents)} documents {order.num_epochs} times"
    )


def _check_ends(
    order: ShuffledOrder,
    lengths: I32,
    document_index: IntArray,
    position: IntArray,
    offset: IntArray,
) -> None:
    """Of samples that are whole: the last document has the tokens that are read of it, the extra
    one too. Arrays cut without an extra token may end a sample after the last of a document."""
    if position.size == 0:
        return
    is_inside = int(position.max()) < document_index.size
    if not is_inside or np.any(offset > lengths[document_index[position]] - order.add_extra_token):
        raise FormatError(
            "sample_index has samples that end outside their last document: its documents have "
            "other lengths than when it was cut, or it was cut with another add_extra_token"
        )


def _check_rows(
    order: ShuffledOrder, lengths: I32, document_index: IntArray, sample_index: IntArray
) -> None:
    position, offset = sample_index[:, 0], sample_index[:, 1]
    if position.min() < 0 or position.max() > document_index.size or offset.min() < 0:
        raise FormatError("sample_index has rows outside document_index")
    samples, size = order.samples_built, order.sequence_length
    # a last sample that is partial has fewer tokens; all others have exactly size
    whole = min(samples, (order.total_tokens - order.add_extra_token) // size)
    _check_ends(order, lengths, document_index, position[1 : whole + 1], offset[1 : whole + 1])
    if not rising_rows(sample_index[: whole + 1]).all():
        raise FormatError("sample_index has a sample that does not begin after the one before it")
    rows = np.unique(np.linspace(0, max(whole - 1, 0), _SAMPLED_ROWS).astype(np.int64))
    for row in rows[rows < whole].tolist():
        (first, begin), (last, end) = sample_index[row : row + 2].tolist()
        between = int(lengths[document_index[first:last]].sum(dtype=np.int64))
        if first > last or between - begin + end != size:
            raise FormatError(
                f"sample {row} must have {size} tokens, has {between - begin + end}: its documents "
                "have other lengths than when it was cut"
            )


def rising_rows(sample_index: IntArray) -> npt.NDArray[np.bool_]:
    """bool[n - 1]: which rows are behind the row before: later, or farther on in its document."""
    position, offset = sample_index[:, 0], sample_index[:, 1]
    farther = (position[1:] == position[:-1]) & (offset[1:] > offset[:-1])
    rising: npt.NDArray[np.bool_] = farther | (position[1:] > position[:-1])
    return rising
