"""Merge of .bin/.idx pairs in constant memory."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex.corpus.outputs import WriteResult, check_outputs, checked_outcome
from megaindex.errors import InvalidArgument
from megaindex.format.header import DtypeTable, code_of_dtype, get_dialect
from megaindex.format.pair import map_pair, pair_paths, provenance_path
from megaindex.format.provenance import InputRows, Provenance, ProvenanceSpool, open_provenance
from megaindex.format.sink import PairSink, written_paths
from megaindex.format.writer import append_pair
from megaindex.io.paths import listed_paths
from megaindex.progress import Bar, silent

logger = logging.getLogger("megaindex")


def merge(
    output: str | os.PathLike[str],
    inputs: Sequence[str | os.PathLike[str]],
    *,
    dtype: Any | None = None,
    dialect: str = "megatron",
    overwrite: bool = False,
    bar: Bar = silent,
) -> WriteResult:
    """Concatenate pairs: write the documents of `inputs`, in their order, as the pair `output`.

    The bytes equal those of Megatron's merge_datasets.py, except that bytes of a .bin outside every
    sequence are dropped (Megatron copies them, which shifts every later document). All inputs are
    checked first; the output is published whole or not at all. One input at a time is open. If an
    input has a provenance, the output has one; the origins of documents of the others are unknown.

    Args:
        output: prefix of the new pair.
        inputs: prefixes of the pairs.
        dtype: token type to widen all tokens to; by default all inputs must have the same.
        dialect: framework that defines the dtype codes of inputs and output: "megatron", "neox" or
            "paddlenlp".
        overwrite: replace an existing pair.
        bar: function of the total bytes that returns a function called with bytes copied.

    Returns:
        Documents, tokens, token type and bytes of the new pair, after a check of all its entries.

    Raises:
        InvalidArgument: inputs differ in token type or modes, or the output is one of them.
        FormatError: an input is damaged.
        StorageError: the output exists, or a file cannot be read or written.
    """
    output, inputs = os.fspath(output), listed_paths(inputs)
    files = [path for prefix in inputs for path in written_paths(prefix)]
    check_outputs([output], files, overwrite=overwrite)
    return concatenate(
        output,
        inputs,
        _origins(inputs, dialect),
        dtype=dtype,
        dialect=dialect,
        overwrite=overwrite,
        bar=bar,
    )


Origins = Callable[[ProvenanceSpool], None]
"""Function that adds the origins of all documents of a pair."""


def concatenate(
    output: str,
    inputs: Sequence[str],
    origins: Origins | None,
    *,
    dtype: Any | None = None,
    dialect: str = "megatron",
    overwrite: bool = False,
    bar: Bar = silent,
) -> WriteResult:
    """Merge as `merge`, with the given origins of documents, if any, as provenance."""
    table = get_dialect(dialect)
    kept, multimodal, nbytes = check_inputs(inputs, table, dtype)
    sink = PairSink(
        *pair_paths(output),
        kept,
        multimodal=multimodal,
        overwrite=overwrite,
        provenance=origins is not None,
    )
    try:
        sink.open()
        progress = bar(nbytes)
        for prefix in inputs:
            source = map_pair(prefix, dialect, multimodal=False)
            source.check_everything()  # again, since it may have changed
            append_pair(source, sink, progress)
        if sink.provenance is not None and origins is not None:
            with sink:
                origins(sink.provenance)
        sink.publish(code_of_dtype(kept, table))
        return checked_outcome(output, dialect)
    except BaseException:
        sink.take_back()
        raise
    finally:
        sink.discard()


def checked_provenance(prefix: str) -> Provenance | None:
    """Return the provenance of a pair with every byte checked, or None without one."""
    provenance = open_provenance(prefix)
    if provenance is not None:
        provenance.check_columns()
    return provenance


def _origins(inputs: Sequence[str], dialect: str) -> Origins | None:
    """Return the origins of the documents of pairs; None if none of them has a provenance."""
    without = [prefix for prefix in inputs if checked_provenance(prefix) is None]
    if len(without) == len(inputs):
        return None
    if without:
        logger.warning(
            "%s: does not exist, as of %d of %d inputs; the origins of their documents are unknown "
            "in the merged pair",
            provenance_path(without[0]),
            len(without),
            len(inputs),
        )

    def add(spool: ProvenanceSpool) -> None:
        for prefix in inputs:
            provenance = open_provenance(prefix)
            if provenance is None:
                count = len(map_pair(prefix, dialect, multimodal=False).bounds) - 1
                spool.add(InputRows.unknown(count))
            else:
                spool.add_part(provenance, 0, provenance.num_documents)

    return add


@dataclass(frozen=True, kw_only=True)
class _Input:
    path_prefix: str
    dtype: np.dtype[Any]
    modes: bool | None
    """None for a pair without sequences, which fits both."""
    nbytes: int


def check_inputs(
    prefixes: Sequence[str], dialect: DtypeTable, dtype: Any | None
) -> tuple[np.dtype[Any], bool, int]:
    """Check every entry of every .idx, and that the pairs can be merged.

    Returns:
        The token type of the merged pair, whether the inputs have modes, and the bytes of their
        sequences.

    Raises:
        InvalidArgument: `prefixes` is empty, or inputs differ in token type or in having modes.
        FormatError: an input is damaged, or its documents do not cover its sequences.
    """
    if not prefixes:
        raise InvalidArgument("inputs must name at least one pair, got none")
    found = [_checked_input(prefix, dialect) for prefix in prefixes]
    target = found[0].dtype if dtype is None else dialect.dtypes[code_of_dtype(dtype, dialect)]
    for one in found:
        if dtype is None and one.dtype != target:
            raise _mixed(found, one, dialect)
        if not holds_all(target, one.dtype):
            raise InvalidArgument(
                f"{one.path_prefix}: holds {one.dtype}, whose values do not all fit {target}; "
                f"choose a wider --dtype"
            )
    return target, _all_have_modes(found), sum(one.nbytes for one in found)


def holds_all(target: np.dtype[Any], source: np.dtype[Any]) -> bool:
    """Return True if `target` holds every value of `source` exactly."""
    long_integer = source.kind in "iu" and source.itemsize == 8  # "safe" to float64 in NumPy
    return np.can_cast(source, target, "safe") and not (long_integer and target.kind == "f")


def _checked_input(prefix: str, dialect: DtypeTable) -> _Input:
    pair = map_pair(prefix, dialect.name, multimodal=False)
    pair.check_documents()
    return _Input(
        path_prefix=prefix,
        dtype=pair.dtype,
        modes=None if pair.header.num_sequences == 0 else pair.modes is not None,
        nbytes=pair.check_everything() * pair.dtype.itemsize,
    )


def _mixed(found: list[_Input], other: _Input, dialect: DtypeTable) -> InvalidArgument:
    types = {one.dtype for one in found}
    wide = [d for d in dialect.dtypes.values() if all(holds_all(d, one) for one in types)]
    remedy = (
        f"pass --dtype {min(wide, key=lambda d: d.itemsize)} to widen all of them"
        if wide
        else "merge pairs of one type at a time"
    )
    return InvalidArgument(
        f"{other.path_prefix}: holds {other.dtype}, and {found[0].path_prefix} holds "
        f"{found[0].dtype}; pairs must have one token type; {remedy}"
    )


def _all_have_modes(found: list[_Input]) -> bool:
    with_modes = [one.path_prefix for one in found if one.modes is True]
    without = [one.path_prefix for one in found if one.modes is False]
    if with_modes and without:
        raise InvalidArgument(
            f"{with_modes[0]}: has sequence modes, unlike {without[0]}; merge multimodal pairs "
            f"only with one another"
        )
    return bool(with_modes)
