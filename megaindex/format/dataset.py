"""Read a .bin/.idx pair through two read-only mappings."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument, OutOfRange, StorageError
from megaindex.format.header import IndexHeader, dtype_of_code, get_dialect
from megaindex.format.pair import MappedPair, map_pair, pair_paths
from megaindex.io.paths import FileInfo, plain
from megaindex.objects.files import stat_path


class PairIdentity(NamedTuple):
    """What an open pair is known by: the same files, as far as opening them can tell."""

    header: IndexHeader
    idx_nbytes: int
    bin_nbytes: int
    versions: tuple[str, ...] = ()
    """Of the .idx and the .bin: what an object store knows them by, when files were written."""


class IndexedDataset:
    """The sequences of `<path_prefix>.bin`, addressed through `<path_prefix>.idx`.

    `ds[i]` are the tokens of sequence i and `ds[a:b]` a list of such arrays; with `multimodal` each
    result comes as `(tokens, mode)`. All arrays are read-only views that own what they show: they
    outlive the dataset. No file descriptor stays open. Objects are safe to share between threads
    and across fork; pickles re-open the files and refuse them if they changed meanwhile.

    In an object store (`s3://bucket/corpus`) the .idx is mapped from a copy on this machine, and
    the .bin is read when tokens are asked for: one request for each sequence, one for a slice of
    neighbours. Such arrays are no views; loaders read many samples at once.

    Opening checks what costs O(1): both files, the header, every byte of the .idx accounted for,
    the first and last document bound, the last sequence. `validate` checks every entry, once. Each
    read checks its own bounds again, so no damage leads outside the file.

    Args:
        path_prefix: the common path of both files, without `.bin` or `.idx`.
        multimodal: read the mode of each sequence too; the file must hold modes.
        dialect: whose dtype codes the file uses: "megatron", "neox" or "paddlenlp".

    Raises:
        MissingFile: one or both files are missing.
        StorageError: a file cannot be read.
        FormatError: a rule of the format is broken.
        InvalidArgument: `path_prefix` names one of the files, or `dialect` is unknown.
    """

    def __init__(
        self,
        path_prefix: str | os.PathLike[str],
        *,
        multimodal: bool = False,
        dialect: str = "megatron",
    ) -> None:
        path_prefix = plain(os.fspath(path_prefix))
        pair = map_pair(path_prefix, dialect, multimodal=multimodal)
        self._hold(path_prefix, dialect, multimodal, pair, _identity_of(pair))

    def _hold(
        self,
        path_prefix: str,
        dialect: str,
        multimodal: bool,
        pair: MappedPair | None,
        identity: PairIdentity,
    ) -> None:
        self._path_prefix = path_prefix
        self._dialect = dialect
        self._multimodal = multimodal
        self._mapped = pair
        self._identity = identity
        self._num_tokens: int | None = None  # known once every entry has been checked

    @classmethod
    def later(
        cls,
        path_prefix: str | os.PathLike[str],
        identity: PairIdentity,
        *,
        dialect: str = "megatron",
        multimodal: bool = False,
    ) -> IndexedDataset:
        """A dataset that opens its files when they are first read: thousands cost nothing to make.

        Args:
            path_prefix: as for the constructor, and so are dialect and multimodal.
            identity: `identity` of the dataset when it was open before. Files that have another
                when they are opened are refused with StorageError.
        """
        dataset = cls.__new__(cls)
        dataset._hold(plain(os.fspath(path_prefix)), dialect, multimodal, None, identity)
        return dataset

    @property
    def _pair(self) -> MappedPair:
        pair = self._mapped
        if pair is None:  # two threads may both open it: either mapping will do
            pair = map_pair(self._path_prefix, self._dialect, multimodal=self._multimodal)
            self._check_identity(_identity_of(pair))
            self._mapped = pair
        return pair

    @property
    def _modes(self) -> npt.NDArray[np.int8] | None:
        return self._pair.modes if self._multimodal else None

    @property
    def is_open(self) -> bool:
        """Whether the files are mapped, which a dataset made by `later` does when it is read."""
        return self._mapped is not None

    @property
    def identity(self) -> PairIdentity:
        """Header, sizes and versions: what `later` and unpickling compare."""
        return self._identity

    @property
    def bin_facts(self) -> FileInfo:
        """The .bin as it was when the pair was opened."""
        identity = self._identity
        version = identity.versions[1] if identity.versions else ""
        return FileInfo(pair_paths(self._path_prefix)[0], identity.bin_nbytes, version)

    def validate(self) -> None:
        """Check every entry of the .idx, in constant memory; a second call costs nothing.

        Call it before trusting the lengths as a whole. FormatError names the first bad entry.
        """
        if self._num_tokens is None:
            self._num_tokens = self._pair.check_everything()

    def mark_validated(self, num_tokens: int) -> None:
        """Take every entry as checked, with so many tokens in all: because `validate` did so when
        these very files were opened before. Reads check their own bounds all the same."""
        self._num_tokens = num_tokens

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Whether both files of the pair exist; StorageError where that cannot be told."""
        return all(stat_path(path) is not None for path in pair_paths(os.fspath(path_prefix)))

    @property
    def path_prefix(self) -> str:
        return self._path_prefix

    @property
    def dialect(self) -> str:
        return self._dialect

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """int32[n]: the tokens of each sequence. Not aligned in memory, as the format has it."""
        return self._pair.lengths

    @property
    def sequence_pointers(self) -> npt.NDArray[np.int64]:
        """int64[n]: where each sequence begins in the .bin, in bytes. Not aligned in memory."""
        return self._pair.pointers

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """int64[m]: document d is sequences a[d] : a[d + 1] of this array a. Not aligned."""
        return self._pair.bounds

    @property
    def sequence_modes(self) -> npt.NDArray[np.int8] | None:
        """int8[n] when opened with multimodal=True, else None."""
        return self._modes

    @property
    def has_modes(self) -> bool:
        """Whether the file holds modes, opened as multimodal or not."""
        return self._pair.modes is not None

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The whole .bin as one array of `dtype`; sequence i begins at pointer // itemsize.

        InvalidArgument where it lies in an object store.
        """
        return self._pair.tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        if self._mapped is not None:
            return self._mapped.dtype
        dialect = get_dialect(self._dialect)
        return dtype_of_code(self.dtype_code, dialect, pair_paths(self._path_prefix)[1])

    @property
    def dtype_code(self) -> int:
        return self._identity.header.dtype_code

    @property
    def num_tokens(self) -> int:
        """The tokens of all sequences, exactly. The first use validates."""
        self.validate()
        assert self._num_tokens is not None
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes in the .bin."""
        return self._identity.bin_nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes in the .idx."""
        return self._identity.idx_nbytes

    def __len__(self) -> int:
        return self._identity.header.num_sequences

    def __iter__(self) -> Iterator[Any]:
        return (self.get(i) for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self.get(index)
        start, stop, step = index.indices(len(self))
        if step != 1:
            raise InvalidArgument(
                f"{self._path_prefix}[{index.start}:{index.stop}:{index.step}]: slices are "
                f"contiguous, with step 1; pick single sequences by number instead"
            )
        stop = max(start, stop)
        runs = [self._run(i, 0, None) for i in range(start, stop)]
        sequences = self._pair.runs_of_tokens(runs)
        return sequences if self._modes is None else (sequences, self._modes[start:stop])

    def get(self, index: Any, offset: Any = 0, length: Any = None) -> Any:
        """Tokens [offset, offset + length) of sequence `index`; to its end without a length.

        Returns:
            An array of `dtype`, or `(tokens, mode)` when multimodal.

        Raises:
            OutOfRange: there is no such sequence, or the range leaves it.
        """
        i = self._sequence_number(index)
        begin, count = self._run(i, offset, length)
        tokens = self._pair.mapped_tokens
        if tokens is not None:  # at once: a file is read in a microsecond
            tokens = tokens[begin : begin + count]
        else:
            tokens = self._pair.runs_of_tokens([(begin, count)])[0]
        return tokens if self._modes is None else (tokens, self._modes[i])

    def _sequence_number(self, index: Any) -> int:
        i = _integer(index, "index")
        count = len(self)
        if not -count <= i < count:
            raise OutOfRange(
                f"{self._path_prefix}: sequence {i} was asked for, and there are {count}; valid "
                f"numbers are {-count} to {count - 1}"
            )
        return i if i >= 0 else i + count

    def _run(self, i: int, offset: Any, length: Any) -> tuple[int, int]:
        """Where tokens of a sequence begin in the .bin, and how many they are."""
        pair = self._pair
        size = int(pair.lengths[i])
        begin, inside = divmod(int(pair.pointers[i]), pair.dtype.itemsize)
        if inside or size < 0 or begin < 0 or begin + size > pair.bin_nbytes // pair.dtype.itemsize:
            pair.check_sequences(i, i + 1)  # raises, saying which rule is broken
        offset = _integer(offset, "offset")
        length = size - offset if length is None else _integer(length, "length")
        if offset < 0 or length < 0 or offset + length > size:
            raise OutOfRange(
                f"{self._path_prefix}: tokens {offset} to {offset + length} of sequence {i} were "
                f"asked for, and it has {size}; stay within 0 to {size}"
            )
        return begin + offset, length

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"multimodal": self._multimodal, "dialect": self._dialect}
        return _reopen, (self._path_prefix, options, self._identity)

    def _check_identity(self, found: PairIdentity) -> None:
        if found != self._identity:
            raise StorageError(
                f"{self._path_prefix}: changed since it was looked at: it had "
                f"{_describe(self._identity)}, and has {_describe(found)}; open it anew"
            )

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({self._path_prefix!r}: {len(self)} sequences, "
            f"{self._identity.header.num_bounds - 1} documents, {self.dtype})"
        )


def _reopen(path_prefix: str, options: dict[str, Any], identity: PairIdentity) -> IndexedDataset:
    """Unpickle: the same files, in the state in which they were pickled."""
    dataset = IndexedDataset.later(path_prefix, identity, **options)
    _ = dataset.sequence_lengths  # opened, and compared, here and now
    return dataset


def _identity_of(pair: MappedPair) -> PairIdentity:
    return PairIdentity(pair.header, pair.idx_nbytes, pair.bin_nbytes, pair.versions)


def _describe(identity: PairIdentity) -> str:
    header, idx_nbytes, bin_nbytes, versions = identity
    return (
        f"{header.num_sequences} sequences and {header.num_bounds} document bounds with dtype code "
        f"{header.dtype_code} in {idx_nbytes} + {bin_nbytes} bytes"
        + (f", versions {' and '.join(versions)}" if versions else "")
    )


def _integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(
            f"{name}={value!r}: must be an integer, not {type(value).__name__}"
        ) from None
