"""Map the two files of a pair and check, at O(1) cost, that they belong together."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format.dtypes import dtype_of_code, get_dialect
from megaindex.format.header import HEADER_BYTES, IndexHeader, has_modes, parse_header
from megaindex.format.paths import check_not_a_half, pair_paths
from megaindex.format.validate import check_bound_ends, check_bounds, check_sequences
from megaindex.io.facts import Facts
from megaindex.io.locations import is_remote
from megaindex.io.mapping import map_file
from megaindex.io.objects.files import each_of, local_copy, look_at

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, eq=False)
class MappedPair:
    """A .bin and its .idx as read-only arrays, each of which owns its mapping.

    Of a pair in an object store the .idx is a copy on this machine, and the .bin is not mapped.
    """

    bin_path: str
    idx_path: str
    header: IndexHeader
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    """int32[n], tokens of each sequence."""
    pointers: npt.NDArray[np.int64]
    """int64[n], where each sequence begins, in bytes."""
    bounds: npt.NDArray[np.int64]
    """int64[m], in sequences."""
    modes: npt.NDArray[np.int8] | None
    """int8[n], if the file holds them."""
    mapped_tokens: npt.NDArray[Any] | None
    """The whole .bin, as `dtype`; None where it lies in an object store."""
    idx_nbytes: int
    bin_nbytes: int
    versions: tuple[str, ...] = ()
    """Of the .idx and the .bin: `Facts.version`. None of a pair that is no .bin and .idx of today's
    format."""

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The whole .bin; InvalidArgument where it lies in an object store."""
        if self.mapped_tokens is None:
            raise InvalidArgument(
                f"{self.bin_path}: lies in an object store, and what was asked needs the whole "
                ".bin here; read it through a loader, or copy the pair to a disk"
            )
        return self.mapped_tokens

    def runs_of_tokens(self, runs: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        """Tokens [begin, begin + count) of the .bin for each (begin, count), which it holds.

        Views of the mapping; from an object store arrays of their own, by as few requests as
        pay.
        """
        if self.mapped_tokens is not None:
            return [self.mapped_tokens[begin : begin + count] for begin, count in runs]
        from megaindex.io.objects.coalesced import read_all

        size = self.dtype.itemsize
        facts = Facts(self.bin_path, self.bin_nbytes, self.versions[1])
        parts = read_all(facts, [(begin * size, count * size) for begin, count in runs])
        return [part.view(self.dtype) for part in parts]

    def check_sequences(self, start: int, stop: int) -> int:
        """Check sequences start..stop and return their tokens; FormatError names the first bad."""
        return check_sequences(
            self.lengths[start:stop],
            self.pointers[start:stop],
            itemsize=self.dtype.itemsize,
            bin_size=self.bin_nbytes,
            idx_path=self.idx_path,
            first=start,
        )

    def check_everything(self) -> int:
        """Check every entry of the .idx and return the tokens of all sequences."""
        check_bounds(self.bounds, self.header.num_sequences, self.idx_path)
        return self.check_sequences(0, self.header.num_sequences)


def map_pair(path_prefix: str, dialect_name: str, *, multimodal: bool) -> MappedPair:
    """Map both files and check header, sizes, first and last bound, and the last sequence."""
    dialect = get_dialect(dialect_name)
    bin_path, idx_path = pair_paths(path_prefix)
    remote = is_remote(bin_path)
    data = None
    if remote:
        bin_facts, idx_facts = _both_files(path_prefix, bin_path, idx_path)
        index, _ = map_file(local_copy(idx_facts))
    else:
        try:
            index, idx_facts = map_file(idx_path)
            data, bin_facts = map_file(bin_path)
        except StorageError:
            _both_files(path_prefix, bin_path, idx_path)  # raises where one is missing
            raise
    header = parse_header(index[:HEADER_BYTES].tobytes(), idx_path)
    with_modes = has_modes(header, index.size, idx_path)
    if multimodal and not with_modes:
        raise FormatError(
            f"{idx_path}: ends after the document bounds, without the {header.num_sequences} modes "
            f"of a multimodal file; open it with multimodal=False"
        )
    dtype = dtype_of_code(header.dtype_code, dialect, idx_path)
    arrays = index_arrays(index, header)
    pair = MappedPair(
        bin_path=bin_path,
        idx_path=idx_path,
        header=header,
        dtype=dtype,
        lengths=arrays.lengths,
        pointers=arrays.pointers,
        bounds=arrays.bounds,
        modes=arrays.modes if with_modes else None,
        mapped_tokens=(
            None if data is None else data[: data.size - data.size % dtype.itemsize].view(dtype)
        ),
        idx_nbytes=index.size,
        bin_nbytes=bin_facts.nbytes,
        versions=(idx_facts.version, bin_facts.version),
    )
    check_bound_ends(pair.bounds, header.num_sequences, dialect, idx_path)
    _check_last_sequence(pair)
    return pair


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexArrays:
    """The arrays of an .idx as far as the file holds them: of one cut short, fewer entries."""

    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int8]
    """Empty where there are none."""


def index_arrays(index: npt.NDArray[np.uint8], header: IndexHeader) -> IndexArrays:
    """Views of the bytes of an .idx, at the places its header gives."""

    size = index.size

    def entries(begin: int, end: int, itemsize: int) -> npt.NDArray[np.uint8]:
        count = max(0, min(end, size) - begin) // itemsize
        return index[begin : begin + count * itemsize]

    modes_end = header.modes_offset + header.num_sequences
    return IndexArrays(
        lengths=entries(header.lengths_offset, header.pointers_offset, 4).view(np.int32),
        pointers=entries(header.pointers_offset, header.bounds_offset, 8).view(np.int64),
        bounds=entries(header.bounds_offset, header.modes_offset, 8).view(np.int64),
        modes=entries(header.modes_offset, modes_end, 1).view(np.int8),
    )


def _both_files(path_prefix: str, bin_path: str, idx_path: str) -> tuple[Facts, Facts]:
    bin_facts, idx_facts = each_of(look_at, (bin_path, idx_path))
    if bin_facts is not None and idx_facts is not None:
        return bin_facts, idx_facts
    check_not_a_half(path_prefix)
    missing = [
        path for path, facts in ((bin_path, bin_facts), (idx_path, idx_facts)) if facts is None
    ]
    if len(missing) == 2:
        raise MissingFile(
            f"{path_prefix}: neither {bin_path} nor {idx_path} exists; check the path: it is the "
            f"part that both names share"
        )
    present = idx_path if missing == [bin_path] else bin_path
    raise MissingFile(
        f"{missing[0]}: missing, although {present} exists; put the missing half of the pair "
        f"beside it, or write the pair again"
    )


def _check_last_sequence(pair: MappedPair) -> None:
    count = pair.header.num_sequences
    end = 0
    if count:
        begin, size = int(pair.pointers[-1]), int(pair.lengths[-1])
        end = begin + size * pair.dtype.itemsize
        if begin < 0 or begin % pair.dtype.itemsize or size < 0 or end > pair.bin_nbytes:
            pair.check_sequences(count - 1, count)  # raises, saying which rule is broken
    if end < pair.bin_nbytes:
        logger.warning(
            "%s: the last sequence ends at byte %d of %d; unless other sequences lie there, the %d "
            "bytes after it are never read",
            pair.bin_path,
            end,
            pair.bin_nbytes,
            pair.bin_nbytes - end,
        )
    if pair.bounds[-1] != count:
        logger.warning(
            "%s: document bounds end at sequence %d of %d, as in files that GPT-NeoX merged; its "
            "sequences are complete, its documents are not to be relied on",
            pair.idx_path,
            pair.bounds[-1],
            count,
        )
