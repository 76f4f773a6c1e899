"""Documents that come in batches, because their bytes do not lie one behind the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.corpus.imports.flat import stored_or_sibling
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDatasetWriter
from megaindex.format.dtypes import Dialect
from megaindex.io.progress import Bar


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A few documents."""

    where: str
    """File they come from, for messages."""
    tokens: npt.NDArray[Any]
    lengths: npt.NDArray[np.int64]
    nbytes: int
    """Bytes of the input that are done with them."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """All documents of an input."""

    dtype: np.dtype[Any]
    """As stored."""
    nbytes: int
    """Bytes of the input."""
    batches: Iterator[Batch]


def write_stream(
    stream: Stream,
    output: str,
    dtype: npt.DTypeLike | None,
    dialect: Dialect,
    *,
    overwrite: bool,
    bar: Bar,
) -> None:
    """Write the pair; every token is checked against its type.

    Raises:
        InvalidArgument: a token does not fit.
        FormatError: the input is damaged.
        StorageError: the pair exists, or cannot be written.
    """
    target = stored_or_sibling(stream.dtype, dtype, dialect)
    progress = bar(stream.nbytes)
    with IndexedDatasetWriter(output, target, dialect=dialect.name, overwrite=overwrite) as writer:
        for batch in stream.batches:
            try:
                writer.add_documents(batch.tokens, batch.lengths)
            except InvalidArgument as error:
                raise InvalidArgument(f"{batch.where}: {error}") from error
            progress(batch.nbytes)
