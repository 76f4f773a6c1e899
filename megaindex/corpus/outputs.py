"""Checks of output paths, and the result of a merge, split, import or tokenization."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from megaindex.errors import InvalidArgument, visible
from megaindex.format import IndexedDataset
from megaindex.format.pair import check_output_prefix
from megaindex.format.sink import written_paths
from megaindex.io.atomic import AtomicFiles
from megaindex.io.paths import refuse_zero_byte


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """A pair that was written and checked."""

    path_prefix: str
    documents: int
    tokens: int
    dtype: str
    nbytes: int
    """Bytes of the .bin."""
    how: str
    """"copied", or the kind of link that the .bin is."""

    def line(self, seconds: float) -> str:
        """Return the line that the command prints."""
        rate = self.nbytes / 1e6 / max(seconds, 1e-9)  # the clock may not have advanced
        return (
            f"{visible(self.path_prefix)}: {self.documents:,} documents, {self.tokens:,} tokens, "
            f"{self.dtype}, {self.how}, {self.nbytes / 1e6:,.1f} MB in {seconds:.2f} s "
            f"({rate:,.0f} MB/s)"
        )


def checked_outcome(path_prefix: str, dialect: str, how: str = "copied") -> WriteResult:
    """Check every entry of a written .idx and return its counts."""
    dataset = IndexedDataset(path_prefix, dialect=dialect)
    dataset.validate()
    return WriteResult(
        path_prefix=path_prefix,
        documents=len(dataset.document_indices) - 1,
        tokens=dataset.num_tokens,
        dtype=str(dataset.dtype),
        nbytes=dataset.nbytes,
        how=how,
    )


def check_outputs(outputs: Sequence[str], inputs: Iterable[str], *, overwrite: bool) -> None:
    """Check the prefixes of output pairs against each other and against the paths of input files.

    Raises:
        InvalidArgument: an output is an input or another output, or names half a pair or a folder;
            or a path holds a zero byte.
        StorageError: an output exists and may not be replaced.
    """
    inputs = tuple(inputs)
    for path in (*inputs, *outputs):
        refuse_zero_byte(path)
    taken = {os.path.realpath(path) for path in inputs}
    for prefix in outputs:
        check_output_prefix(prefix)
        for path in written_paths(prefix):
            real = os.path.realpath(path)
            if real in taken:
                raise InvalidArgument(
                    f"{path}: is also an input or another output of this call; choose another "
                    f"prefix"
                )
            taken.add(real)
        AtomicFiles(written_paths(prefix), overwrite=overwrite)  # raises if a file exists
