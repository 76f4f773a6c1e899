"""Flat token files of datatrove and Nanotron, of NumPy, and of Megatron's old format."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument
from megaindex.format.cast import CHUNK
from megaindex.format.legacy import open_legacy
from megaindex.imports.flat import Chunks, FlatTokens, open_tokens, token_dtype
from megaindex.io.mapping import map_readonly
from megaindex.io.os_errors import as_storage_error
from megaindex.io.paths import check_file, check_local

logger = logging.getLogger(__name__)


def open_nanotron(path: str) -> FlatTokens:
    """Open a `.ds` file of datatrove's DocumentTokenizer, as Nanotron reads it.

    `<path>.index` holds uint64 document ends in tokens; the last of them and the size of the file
    determine the token type, uint16 or uint32. A loss mask `<path>.loss` is not imported.

    Args:
        path: path of the `.ds` file.

    Returns:
        The tokens and document ends, for `import_pair`.

    Raises:
        MissingFile: the tokens or their index do not exist.
        FormatError: the two do not belong together.
    """
    index_path = f"{path}.index"
    ends = open_tokens(index_path, np.dtype("<u8")).view(np.int64)
    nbytes = map_readonly(path).size
    count = int(ends[-1]) if ends.size else 0
    if nbytes not in (2 * count, 4 * count):
        raise FormatError(
            f"{path}: must have 2 or 4 bytes for each of the {count} tokens in {index_path}, got "
            f"{nbytes} bytes; check that they belong together"
        )
    if os.path.exists(f"{path}.loss"):
        logger.warning("%s.loss: the loss mask is not imported", path)
    dtype = np.dtype("<u4" if nbytes == 4 * count and count else "<u2")
    return FlatTokens(
        path=path,
        format="nanotron",
        offset=0,
        tokens=open_tokens(path, dtype),
        sequence_ends=_in_chunks(ends),
    )


def open_numpy(
    path: str,
    *,
    stored_dtype: npt.DTypeLike | None = None,
    separator: int | None = None,
    boundaries: str | None = None,
) -> FlatTokens:
    """Open the tokens of a `.npy` file, or of any file without a header.

    Args:
        path: `.npy`, or raw little-endian tokens of `stored_dtype`.
        stored_dtype: integer type of raw tokens, such as "uint16"; not for a `.npy`.
        separator: id that ends each document, kept as its last token. Tokens after the last
            separator are a document too.
        boundaries: path of a `.npy` of document ends in tokens, with or without a leading 0.
            Exactly one of `separator` and `boundaries` is needed.

    Returns:
        The tokens and document ends, for `import_pair`.

    Raises:
        MissingFile: a file does not exist.
        FormatError: a file is not an array of integers in one dimension.
        InvalidArgument: `stored_dtype` is missing, or given for a `.npy`, or there is not exactly
            one of `separator` and `boundaries`.
    """
    if (separator is None) == (boundaries is None):
        raise InvalidArgument(
            "exactly one of separator (id that ends each document) and boundaries (.npy file of "
            "document ends) must be given"
        )
    if path.endswith(".npy"):
        if stored_dtype is not None:
            raise InvalidArgument(
                f"{path}: a .npy file has a dtype of its own, got stored dtype (--stored-dtype) "
                f"{stored_dtype}; leave it out"
            )
        tokens, offset = _map_npy(path)
    elif stored_dtype is None:
        raise InvalidArgument(
            f"{path}: raw tokens need a stored dtype (--stored-dtype); give e.g. uint16"
        )
    else:
        tokens, offset = open_tokens(path, token_dtype(stored_dtype)), 0
    ends = _ends_at(tokens, separator) if boundaries is None else _in_chunks(_ends(boundaries))
    return FlatTokens(path=path, format="numpy", offset=offset, tokens=tokens, sequence_ends=ends)


def open_tntidx(path_prefix: str, dialect: str) -> FlatTokens:
    """Open a pair of Megatron's old format TNTIDX (--dataset-impl lazy or cached).

    Args:
        path_prefix: prefix of the `.bin` and `.idx`.
        dialect: framework that defines the dtype codes: "megatron", "neox" or "paddlenlp".

    Returns:
        The tokens, sequence ends and document ends, for `import_pair`.

    Raises:
        FormatError: the pair is damaged, or its documents do not cover its sequences.
    """
    pair = open_legacy(path_prefix, dialect=dialect)
    if pair.bounds[-1] != len(pair.sizes):
        raise FormatError(
            f"{pair.idx_path}: its documents must end at sequence {len(pair.sizes)}, got "
            f"{pair.bounds[-1]}, as after a merge; import the files it was made of and merge them"
        )
    return FlatTokens(
        path=pair.bin_path,
        format="tntidx",
        offset=0,
        tokens=pair.tokens,
        sequence_ends=_in_chunks(pair.token_offsets[1:]),
        document_bounds=_in_chunks(pair.bounds[1:]),
    )


def _map_npy(path: str) -> tuple[npt.NDArray[Any], int]:
    """Map the integers of a .npy; return them and their offset in bytes."""
    check_local(path, "copy it to a disk")
    check_file(path)
    with as_storage_error(path, "cannot open"):
        try:
            array = np.load(path, mmap_mode="r", allow_pickle=False)
        except (ValueError, EOFError) as error:
            raise FormatError(f"{path}: not a valid .npy file: {error}; write it again") from error
    if (
        not isinstance(array, np.memmap)
        or array.ndim != 1
        or array.dtype.kind not in "iu"
        or not array.dtype.isnative
    ):
        raise FormatError(
            f"{path}: must hold little-endian integers in one dimension, got {array.dtype} of "
            f"shape {array.shape}; write it again"
        )
    return array, int(array.offset)


def _ends(path: str) -> npt.NDArray[np.int64]:
    bounds, _ = _map_npy(path)
    ends = bounds[1:] if bounds.size and bounds[0] == 0 else bounds
    # a uint64 above 2^63 becomes negative and is refused later
    return ends.view(np.int64) if ends.dtype.itemsize == 8 else ends.astype(np.int64)


def _in_chunks(ends: npt.NDArray[np.int64]) -> Chunks:
    def chunks() -> Iterator[npt.NDArray[np.int64]]:
        for start in range(0, len(ends), CHUNK):
            yield ends[start : start + CHUNK].astype(np.int64)

    return chunks


def _ends_at(tokens: npt.NDArray[Any], separator: int | None) -> Chunks:
    def chunks() -> Iterator[npt.NDArray[np.int64]]:
        last = 0
        for start in range(0, len(tokens), CHUNK):
            found = np.flatnonzero(tokens[start : start + CHUNK] == separator) + (start + 1)
            if found.size:
                last = int(found[-1])
                yield found
        if last < len(tokens):
            yield np.array([len(tokens)], dtype=np.int64)

    return chunks
