"""Text files with the lengths of the documents of a corpus, for planning without the corpus.

One line for each length, tokens and number of documents; lines that begin with # are comments:

    # tokens documents
    17 40312
    18 41029
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from megaindex._types import I64
from megaindex.arithmetic import INT32_MAX, INT64_MAX
from megaindex.errors import FormatError
from megaindex.io.os_errors import as_storage_error
from megaindex.io.paths import check_local

_MOST_DOCUMENTS = INT32_MAX  # of one .idx


@dataclass(frozen=True, kw_only=True, eq=False)
class LengthHistogram:
    """Numbers of documents by length."""

    lengths: I64
    """int64[n], rising: tokens, 0 to 2**31 - 1."""
    documents: I64
    """int64[n]: documents of that length."""

    @property
    def tokens(self) -> int:
        """Tokens of all documents."""
        return sum(int(a) * int(b) for a, b in zip(self.lengths, self.documents, strict=True))

    @property
    def num_documents(self) -> int:
        return int(self.documents.sum())


def read_length_histogram(path: str) -> LengthHistogram:
    """Return the histogram in a text file.

    Raises:
        FormatError: a line is not two whole numbers, a length is given twice, or there are no
            tokens, or more than 2**63 - 1.
        MissingFile, StorageError: the file cannot be read.
    """
    check_local(path, "copy it to a disk")
    with as_storage_error(path, "cannot read"), open(path, "rb") as file:
        lines = file.read().splitlines()
    found: dict[int, int] = {}
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or line.startswith(b"#"):
            continue
        if len(words) != 2 or not all(word.isdigit() and len(word) < 19 for word in words):
            raise FormatError(
                f"{path}: line {number} must be a length and a number of documents, such as "
                f"'512 40312', got {line[:60].decode(errors='replace')!r}"
            )
        length, documents = map(int, words)
        if length > INT32_MAX or documents > _MOST_DOCUMENTS:
            raise FormatError(
                f"{path}: line {number} must have a length and a number of documents below 2**31, "
                f"got {length} and {documents}; an .idx holds no more: divide the corpus"
            )
        if length in found:
            raise FormatError(
                f"{path}: line {number} gives length {length} a second time; add the two up"
            )
        found[length] = documents
    pairs = sorted(found.items())
    table = np.array(pairs, np.int64).reshape(-1, 2)
    histogram = LengthHistogram(lengths=table[:, 0].copy(), documents=table[:, 1].copy())
    if not 0 < histogram.tokens <= INT64_MAX or histogram.num_documents > _MOST_DOCUMENTS:
        raise FormatError(
            f"{path}: the documents must hold from 1 to 2**63 - 1 tokens and be fewer than 2**31, "
            f"got {histogram.num_documents} documents of {histogram.tokens} tokens"
        )
    return histogram
