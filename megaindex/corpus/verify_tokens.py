"""The tokens of a pair, read once from the first to the last, in constant memory."""

from __future__ import annotations

import bisect
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.corpus.findings import Collector
from megaindex.format.faults import Fault
from megaindex.format.pair import IndexArrays
from megaindex.io.facts import Facts
from megaindex.io.failures import as_storage_error
from megaindex.io.locations import is_remote
from megaindex.io.objects.files import open_binary
from megaindex.io.progress import Bar

_CHUNK_BYTES = 4 << 20
_OBJECT_CHUNK_BYTES = 32 << 20  # as many pieces as are read at a time
_CHUNK_DOCUMENTS = 1 << 17


def check_tokens(
    bin_facts: Facts,
    dtype: np.dtype[Any],
    vocab_size: int | None,
    pointers: npt.NDArray[np.int64] | None,
    found: Collector,
    bar: Bar,
) -> None:
    """Report token ids outside the vocabulary and floats that are no finite numbers.

    Every byte is read, so a disk that cannot give one says so here.

    Args:
        pointers: where sequences begin, in bytes, to name them; None if they are not to be trusted.
    """
    bin_path = bin_facts.path
    with as_storage_error(bin_path, "cannot read"), open_binary(bin_facts) as file:
        progress = bar(file.seek(0, 2))
        file.seek(0)
        at = 0
        chunk = _OBJECT_CHUNK_BYTES if is_remote(bin_path) else _CHUNK_BYTES
        while raw := file.read(chunk):
            whole = len(raw) // dtype.itemsize * dtype.itemsize
            if whole < len(raw) and whole:  # a read stopped inside a token: begin there again
                file.seek(whole - len(raw), 1)
                raw = raw[:whole]
            if not whole:
                found.add(bin_path, _partial(at, len(raw)), severity="warning")
                return
            tokens = np.frombuffer(raw, dtype)
            bad = _misfits(tokens, vocab_size)
            if bad is not None and bad.any():
                i = int(bad.argmax())
                byte = at + i * dtype.itemsize
                fault = _misfit(byte, tokens[i], vocab_size, pointers)
                found.add(bin_path, fault, count=int(bad.sum()))
            at += whole
            progress(whole)


def _misfits(tokens: npt.NDArray[Any], vocab_size: int | None) -> npt.NDArray[np.bool_] | None:
    bad: npt.NDArray[np.bool_]
    if tokens.dtype.kind == "f":
        bad = ~np.isfinite(tokens)
        return bad
    if vocab_size is None:
        return None
    if vocab_size > np.iinfo(tokens.dtype).max:  # only what is negative can be outside
        return tokens < 0
    bad = tokens >= vocab_size
    bad |= tokens < 0
    return bad


def _misfit(
    byte: int, token: Any, vocab_size: int | None, pointers: npt.NDArray[np.int64] | None
) -> Fault:
    where = f"byte {byte}"
    if pointers is not None and len(pointers) and pointers[0] <= byte:
        # right where pointers rise, as they do in files of every writer
        where += f", sequence {bisect.bisect_right(pointers, byte) - 1}"
    if token.dtype.kind == "f":
        return Fault(
            rule="not-finite",
            where=where,
            found=str(token),
            expected="a finite number",
            text="a value is no finite number",
            remedy="write the pair again from its source",
        )
    return Fault(
        rule="token-range",
        where=where,
        found=str(token),
        expected=f"0 to {(vocab_size or 0) - 1}",
        text="a token id is outside the vocabulary",
        remedy="check --vocab-size and the dialect; else tokenize again",
    )


def _partial(byte: int, count: int) -> Fault:
    return Fault(
        rule="partial-token",
        where=f"byte {byte}",
        found=f"{count} bytes",
        expected="whole tokens",
        text="the .bin ends inside a token",
        remedy="nothing reads them; a copy was cut short if tokens are missing",
    )


def check_document_ends(
    arrays: IndexArrays, tokens: npt.NDArray[Any], eod: int, bin_path: str, found: Collector
) -> None:
    """Report documents whose last token is not `eod`. Every entry of the .idx must be sound.

    Documents without sequences, or whose last sequence is empty, have no last token.
    """
    itemsize = tokens.dtype.itemsize
    for start in range(0, len(arrays.bounds) - 1, _CHUNK_DOCUMENTS):
        bounds = arrays.bounds[start : start + _CHUNK_DOCUMENTS + 1].copy()
        documents = np.flatnonzero(bounds[1:] > bounds[:-1])
        sequences = bounds[1:][documents] - 1
        sizes = arrays.lengths[sequences].astype(np.int64)
        documents, sequences, sizes = (a[sizes > 0] for a in (documents, sequences, sizes))
        ends = arrays.pointers[sequences] // itemsize + sizes - 1
        last = tokens[ends]
        bad = last != eod
        if bad.any():
            i = int(bad.argmax())
            fault = _no_end(start + int(documents[i]), int(ends[i]) * itemsize, last[i], eod)
            found.add(bin_path, fault, count=int(bad.sum()))


def _no_end(document: int, byte: int, token: Any, eod: int) -> Fault:
    return Fault(
        rule="document-end",
        where=f"document {document}, byte {byte}",
        found=str(token),
        expected=str(eod),
        text="a document does not end with the end-of-document token",
        remedy="check --eod; else tokenize again with --append-eod",
    )
