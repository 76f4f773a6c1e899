"""The two files of a pair: names and mapping."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.format.header import (
    HEADER_BYTES,
    DtypeTable,
    IndexHeader,
    bound_end_fault,
    check_bounds,
    check_fault,
    check_sequences,
    dtype_of_code,
    get_dialect,
    has_modes,
    parse_header,
)
from megaindex.io.mapping import map_file
from megaindex.io.paths import (
    FileInfo,
    is_remote,
    plain,
    version_at,
    version_of,
)
from megaindex.io.threads import map_interruptibly
from megaindex.kernels import file_mapper, num_threads
from megaindex.objects.files import each_of, local_copy, stat_path
from megaindex.objects.store import read_all

_CHECKED = 1 << 22  # sequences that a thread checks at once
_ATTEMPTS = 5

logger = logging.getLogger("megaindex")


def pair_paths(path_prefix: str | os.PathLike[str]) -> tuple[str, str]:
    """Return the paths of the .bin and of the .idx."""
    path_prefix = os.fspath(path_prefix)
    return path_prefix + ".bin", path_prefix + ".idx"


def provenance_path(path_prefix: str | os.PathLike[str]) -> str:
    """Return the path of the provenance of a pair."""
    return os.fspath(path_prefix) + ".provenance"


def check_not_a_half(path_prefix: str | os.PathLike[str]) -> None:
    """Raise InvalidArgument if the prefix is the full name of one of the files."""
    path_prefix = os.fspath(path_prefix)
    for suffix in (".bin", ".idx"):
        if path_prefix.endswith(suffix):
            raise InvalidArgument(
                "path_prefix must be the common prefix of .bin and .idx, "
                f"{path_prefix[: -len(suffix)]!r}, got {path_prefix!r}"
            )


def check_output_prefix(path_prefix: str) -> None:
    """Raise InvalidArgument for a prefix of a pair to write that names a file or a folder."""
    check_not_a_half(path_prefix)
    if not os.path.basename(path_prefix):
        raise InvalidArgument(
            f"path_prefix must end with the name of the pair, got {path_prefix!r}; add it"
        )


@dataclass(kw_only=True, eq=False, slots=True)
class MappedPair:
    """A .bin and its .idx as read-only arrays, each of which owns its mapping.

    In an object store, the .idx is a copy on this machine, and the .bin is not mapped.
    """

    bin_path: str
    idx_path: str
    header: IndexHeader
    dtype: np.dtype[Any]
    lengths: npt.NDArray[np.int32]
    """Number of tokens of each sequence, int32[n]."""
    pointers: npt.NDArray[np.int64]
    """Offset of each sequence in the .bin, in bytes, int64[n]."""
    bounds: npt.NDArray[np.int64]
    """Document bounds, in sequences, int64[m]."""
    modes: npt.NDArray[np.int8] | None
    """Mode of each sequence, int8[n], if the file holds them."""
    mapped_tokens: npt.NDArray[Any] | None
    """The whole .bin, as `dtype`; None in an object store."""
    idx_nbytes: int
    bin_nbytes: int
    versions: tuple[str, ...] = ()
    """`FileInfo.version` of the .idx and the .bin; empty for a pair of the old format."""

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The whole .bin; InvalidArgument in an object store."""
        if self.mapped_tokens is None:
            raise InvalidArgument(
                f"{self.bin_path}: lies in an object store, but the whole .bin is needed on this "
                "machine; read it through a loader, or copy the pair to a disk"
            )
        return self.mapped_tokens

    def runs_of_tokens(self, runs: Sequence[tuple[int, int]]) -> list[npt.NDArray[Any]]:
        """Return tokens [begin, begin + count) of the .bin for each (begin, count), unchecked.

        They are views of the mapping, or copies from an object store, with merged requests.
        """
        if self.mapped_tokens is not None:
            return [self.mapped_tokens[begin : begin + count] for begin, count in runs]
        size = self.dtype.itemsize
        info = FileInfo(self.bin_path, self.bin_nbytes, self.versions[1])
        parts = read_all(info, [(begin * size, count * size) for begin, count in runs])
        return [part.view(self.dtype) for part in parts]

    def check_sequences(self, start: int, stop: int) -> int:
        """Check sequences start..stop and return their tokens, or raise FormatError."""
        return check_sequences(
            self.lengths[start:stop],
            self.pointers[start:stop],
            itemsize=self.dtype.itemsize,
            bin_size=self.bin_nbytes,
            idx_path=self.idx_path,
            first=start,
        )

    def check_documents(self) -> None:
        """Raise unless the .bin is on this machine and the documents cover all sequences."""
        _ = self.tokens  # InvalidArgument in an object store
        count = self.header.num_sequences
        if self.bounds[-1] != count:
            raise FormatError(
                f"{self.idx_path}: its documents must end at sequence {count}, got "
                f"{self.bounds[-1]}; merge the files it was made of instead"
            )

    def check_everything(self) -> int:
        """Check every entry of the .idx and return the number of tokens, or raise FormatError."""
        count = self.header.num_sequences

        def check(start: int) -> int:
            if start < 0:
                check_bounds(self.bounds, count, self.idx_path)
                return 0
            return self.check_sequences(start, min(start + _CHECKED, count))

        starts = [-1, *range(0, count, _CHECKED)]
        if count <= _CHECKED:
            return sum(map(check, starts))
        return sum(map_interruptibly(check, starts, num_threads()))


def map_pair(path_prefix: str, dialect_name: str, *, multimodal: bool) -> MappedPair:
    """Map both files and check header, sizes, first and last bound, and the last sequence.

    The two are of one pair even if another process replaces it meanwhile.
    """
    for _ in range(_ATTEMPTS):
        pair = _map_pair(path_prefix, dialect_name, multimodal=multimodal)
        if pair.mapped_tokens is None or _is_in_place(pair):
            return pair
    raise StorageError(
        f"{path_prefix}: was replaced {_ATTEMPTS} times while it was opened; wait for the process "
        "that writes it"
    )


def _is_in_place(pair: MappedPair) -> bool:
    """Return True if the .idx was not replaced before the .bin was mapped: a writer removes the old
    .idx before it replaces the .bin."""
    with contextlib.suppress(OSError):
        status = os.stat(plain(pair.idx_path))
        return (status.st_size, version_of(status)) == (pair.idx_nbytes, pair.versions[0])
    return False


def _map_pair(path_prefix: str, dialect_name: str, *, multimodal: bool) -> MappedPair:
    dialect = get_dialect(dialect_name)
    bin_path, idx_path = pair_paths(path_prefix)
    at_once = _map_at_once(bin_path, idx_path, dialect)
    if at_once is not None and (at_once.modes is not None or not multimodal):
        return at_once
    remote = is_remote(bin_path)
    data = None
    if remote:
        bin_info, idx_info = _both_files(path_prefix, bin_path, idx_path)
        index, _ = map_file(local_copy(idx_info))
    else:
        try:
            index, idx_info = map_file(idx_path)
            data, bin_info = map_file(bin_path)
        except StorageError:
            _both_files(path_prefix, bin_path, idx_path)  # raises where one is missing
            raise
    header = parse_header(index[:HEADER_BYTES].tobytes(), idx_path)
    with_modes = has_modes(header, index.size, idx_path)
    if multimodal and not with_modes:
        raise FormatError(
            f"{idx_path}: must hold {header.num_sequences} modes, as a multimodal file does, but "
            "ends after the document bounds; open it with multimodal=False"
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
        bin_nbytes=bin_info.nbytes,
        versions=(idx_info.version, bin_info.version),
    )
    check_fault(bound_end_fault(pair.bounds, header.num_sequences, dialect), idx_path)
    _check_last_sequence(pair)
    return pair


def _map_at_once(bin_path: str, idx_path: str, dialect: DtypeTable) -> MappedPair | None:
    """Return a local pair without faults, mapped in one call; None for any other, and without the
    native core."""
    core = file_mapper()
    mapped = core and core.map_pair_files(bin_path, idx_path, dialect.dtypes)
    if mapped is None:
        return None
    code, dtype, lengths, pointers, bounds, modes, tokens, *sizes, idx_time, bin_time = mapped
    return MappedPair(
        bin_path=bin_path,
        idx_path=idx_path,
        header=IndexHeader(dtype_code=code, num_sequences=lengths.size, num_bounds=bounds.size),
        dtype=dtype,
        lengths=lengths,
        pointers=pointers,
        bounds=bounds,
        modes=modes,
        mapped_tokens=tokens,
        idx_nbytes=sizes[0],
        bin_nbytes=sizes[1],
        versions=(version_at(idx_time), version_at(bin_time)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class IndexArrays:
    """Arrays of an .idx, with fewer entries if the file is truncated."""

    lengths: npt.NDArray[np.int32]
    pointers: npt.NDArray[np.int64]
    bounds: npt.NDArray[np.int64]
    modes: npt.NDArray[np.int8]
    """Empty in a file without modes."""


def index_arrays(index: npt.NDArray[np.uint8], header: IndexHeader) -> IndexArrays:
    """Return views of the bytes of an .idx at the offsets of its header."""
    size = index.size

    def entries(begin: int, end: int, itemsize: int) -> npt.NDArray[np.uint8]:
        count = max(0, min(end, size) - begin) // itemsize
        return index[begin : begin + count * itemsize]

    modes_end = header.modes_offset + header.num_sequences
    return IndexArrays(
        lengths=entries(HEADER_BYTES, header.pointers_offset, 4).view(np.int32),
        pointers=entries(header.pointers_offset, header.bounds_offset, 8).view(np.int64),
        bounds=entries(header.bounds_offset, header.modes_offset, 8).view(np.int64),
        modes=entries(header.modes_offset, modes_end, 1).view(np.int8),
    )


def _both_files(path_prefix: str, bin_path: str, idx_path: str) -> tuple[FileInfo, FileInfo]:
    bin_info, idx_info = each_of(stat_path, (bin_path, idx_path))
    if bin_info is not None and idx_info is not None:
        return bin_info, idx_info
    check_not_a_half(path_prefix)
    missing = [path for path, info in ((bin_path, bin_info), (idx_path, idx_info)) if info is None]
    if len(missing) == 2:
        raise MissingFile(
            f"{path_prefix}: neither {bin_path} nor {idx_path} exists; check the path, the common "
            "prefix of both names"
        )
    present = idx_path if missing == [bin_path] else bin_path
    raise MissingFile(
        f"{missing[0]}: missing, although {present} exists; put the missing file beside it, or "
        "write the pair again"
    )


def _check_last_sequence(pair: MappedPair) -> None:
    count = pair.header.num_sequences
    end = 0
    if count:
        begin, size = int(pair.pointers[-1]), int(pair.lengths[-1])
        end = begin + size * pair.dtype.itemsize
        if begin < 0 or begin % pair.dtype.itemsize or size < 0 or end > pair.bin_nbytes:
            pair.check_sequences(count - 1, count)  # raises
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
            "sequences are complete, its documents are not",
            pair.idx_path,
            pair.bounds[-1],
            count,
        )
