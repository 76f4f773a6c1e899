"""Write what was opened as a pair, and check the pair."""

from __future__ import annotations

import numpy.typing as npt

from megaindex.corpus.imports.flat import FlatTokens, target_dtype, write_flat
from megaindex.corpus.imports.stream import Stream, write_stream
from megaindex.corpus.outcome import Outcome, checked_outcome
from megaindex.corpus.outputs import check_outputs
from megaindex.format.dtypes import get_dialect
from megaindex.io.progress import Bar, silent


def import_pair(
    source: FlatTokens | Stream,
    output: str,
    *,
    dtype: npt.DTypeLike | None = None,
    dialect: str = "megatron",
    copy: bool = False,
    overwrite: bool = False,
    bar: Bar = silent,
) -> Outcome:
    """Write an opened input as the pair `output`, whole or not at all, then check every entry.

    Args:
        source: what one of the open_ functions of this package returned.
        dtype: token type of the pair; by default as stored, or int32 for uint32 in a dialect
            without a code for it. Tokens that do not fit are refused.
        dialect: whose dtype codes to write.
        copy: copy the tokens where a link would do.
        overwrite: replace an existing pair.

    Raises:
        InvalidArgument: tokens do not fit the type, or the dialect has no code for it.
        FormatError: the input is damaged.
        StorageError: the pair exists, or a file cannot be read or written.
    """
    table = get_dialect(dialect)
    if isinstance(source, Stream):
        check_outputs([output], [], overwrite=overwrite)
        write_stream(source, output, dtype, table, overwrite=overwrite, bar=bar)
        return checked_outcome(output, dialect)
    check_outputs([output], [source.path], overwrite=overwrite)
    target = target_dtype(source, dtype, table)
    how = write_flat(source, output, target, table, copy=copy, overwrite=overwrite, bar=bar)
    stored = source.tokens.dtype
    if how != "copied" and stored != target:
        how += f", {stored} ids below 2^{8 * target.itemsize - 1} read as {target}"
    return checked_outcome(output, dialect, how)
