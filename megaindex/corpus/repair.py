"""Rebuild an .idx from what is certain. Nothing is guessed, and the original is never touched.

What is certain of a pair as every writer lays it out, sequences one behind the other from byte 0:

    intact             lost                 certain because
    lengths, bounds    pointers             lengths add up to the .bin, all pointers left agree
    lengths            pointers, bounds     as above, and as many sequences end with `eod` as the
                                            header counts documents
    all of the .idx    the end of the .bin  documents that lie before the cut are whole
    the .bin           the .idx             only with `eod` and `dtype`: documents end with it

Anything else is refused, with the reason.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from megaindex.corpus.repair_sources import Rebuilt, from_damaged_index, from_tokens
from megaindex.errors import InvalidArgument, MissingFile
from megaindex.format.dtypes import code_of_dtype, get_dialect
from megaindex.format.paths import check_not_a_half, pair_paths
from megaindex.format.reader import IndexedDataset
from megaindex.format.spool import IndexSpool
from megaindex.io.atomic import AtomicFiles
from megaindex.io.failures import as_storage_error
from megaindex.io.kinds import check_file
from megaindex.io.locations import refuse_zero_byte
from megaindex.io.progress import Bar, silent

_CHUNK = 1 << 17


@dataclass(frozen=True, kw_only=True)
class Repair:
    """What was rebuilt, and what was not."""

    path_prefix: str
    certain: tuple[str, ...]
    lost: tuple[str, ...]
    sequences: int
    documents: int
    link: str
    """What the new .bin is: "hard link" or "symbolic link"."""


def repair(
    path_prefix: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    dialect: str = "megatron",
    dtype: npt.DTypeLike | None = None,
    eod: int | None = None,
    bar: Bar = silent,
) -> Repair:
    """Write `output`.idx beside a link of the .bin, from what is certain of the damaged pair.

    Args:
        path_prefix: the damaged pair; its .bin must be there.
        output: another prefix; existing files are refused.
        dialect: whose dtype codes the pair uses.
        dtype: token type, where the .idx is lost.
        eod: token id that ends every document, where the .idx or its document bounds are lost.
        bar: told of bytes that are read.

    Raises:
        InvalidArgument: nothing is broken, or nothing more is certain: says what is missing.
        MissingFile, StorageError: a file is none, or cannot be read, linked or written.
    """
    source, target = os.fspath(path_prefix), os.fspath(output)
    refuse_zero_byte(source)
    check_not_a_half(target)
    get_dialect(dialect)
    bin_path, idx_path = pair_paths(source)
    if not _is_file(bin_path):
        raise MissingFile(f"{bin_path}: missing; tokens cannot be rebuilt from an .idx")
    if _is_file(idx_path):
        rebuilt = from_damaged_index(source, dialect, eod, bar)
    elif dtype is None or eod is None:
        raise InvalidArgument(
            f"{idx_path}: missing; where documents end is certain only if the token type and the "
            f"token that ends every document are given: add --dtype and --eod"
        )
    else:
        code_of_dtype(dtype, get_dialect(dialect))
        rebuilt = from_tokens(bin_path, np.dtype(dtype), eod, bar)
    return _published(rebuilt, bin_path, target, dialect)


def _is_file(path: str) -> bool:
    """Whether a file is there.

    Raises:
        StorageError: something else is, or what is there cannot be told.
    """
    try:
        check_file(path, "cannot look at it")
    except MissingFile:
        return False
    return True


def _published(rebuilt: Rebuilt, bin_path: str, target: str, dialect: str) -> Repair:
    out_bin, out_idx = pair_paths(target)
    files = AtomicFiles((out_bin, out_idx))
    spool = IndexSpool(os.path.dirname(out_bin) or ".", multimodal=rebuilt.modes is not None)
    code = code_of_dtype(rebuilt.dtype, get_dialect(dialect))
    try:
        hard = files.link(bin_path, out_bin)
        with as_storage_error(out_idx, "cannot write"):
            spool.open()
            _fill(spool, rebuilt)
            spool.assemble(files.open(out_idx), code, rebuilt.dtype.itemsize)
        files.publish()
        dataset = IndexedDataset(target, dialect=dialect)
        dataset.validate()
    except BaseException:
        files.take_back()
        raise
    finally:
        files.discard()
        spool.close()
    return Repair(
        path_prefix=target,
        certain=rebuilt.certain,
        lost=rebuilt.lost,
        sequences=len(dataset),
        documents=len(dataset.document_indices) - 1,
        link="hard link" if hard else "symbolic link",
    )


def _fill(spool: IndexSpool, rebuilt: Rebuilt) -> None:
    lengths, modes = rebuilt.lengths, rebuilt.modes
    for start in range(0, len(lengths), _CHUNK):
        part = slice(start, start + _CHUNK)
        spool.add_sequences(lengths[part].copy(), None if modes is None else modes[part].copy())
    for start in range(1, len(rebuilt.bounds), _CHUNK):  # bound 0 is there already
        spool.add_bounds(rebuilt.bounds[start : start + _CHUNK].astype(np.int64))
