"""Read a .bin/.idx pair through two read-only mappings."""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

from megaindex.errors import InvalidArgument, OutOfRange, StorageError
from megaindex.format.header import IndexHeader
from megaindex.format.pair import map_pair
from megaindex.format.paths import pair_paths

_Identity = tuple[IndexHeader, int, int]


class IndexedDataset:
    """The sequences of `<path_prefix>.bin`, addressed through `<path_prefix>.idx`.

    `ds[i]` are the tokens of sequence i and `ds[a:b]` a list of such arrays; with `multimodal` each
    result comes as `(tokens, mode)`. All arrays are read-only views that own what they show: they
    outlive the dataset. No file descriptor stays open. Objects are safe to share between threads
    and across fork; pickles re-open the files and refuse them if they changed meanwhile.

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
        self._path_prefix = os.fspath(path_prefix)
        self._dialect = dialect
        self._multimodal = multimodal
        self._pair = map_pair(self._path_prefix, dialect, multimodal=multimodal)
        self._modes = self._pair.modes if multimodal else None
        self._num_tokens: int | None = None  # known once every entry has been checked

    def validate(self) -> None:
        """Check every entry of the .idx, in constant memory; a second call costs nothing.

        Call it before trusting the lengths as a whole. FormatError names the first bad entry.
        """
        if self._num_tokens is None:
            self._num_tokens = self._pair.check_everything()

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Whether both files of the pair exist."""
        return all(os.path.exists(path) for path in pair_paths(os.fspath(path_prefix)))

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
        """The whole .bin as one array of `dtype`; sequence i begins at pointer // itemsize."""
        return self._pair.tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        return self._pair.dtype

    @property
    def dtype_code(self) -> int:
        return self._pair.header.dtype_code

    @property
    def num_tokens(self) -> int:
        """The tokens of all sequences, exactly. The first use validates."""
        self.validate()
        assert self._num_tokens is not None
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        """Bytes in the .bin."""
        return self._pair.bin_nbytes

    @property
    def index_nbytes(self) -> int:
        """Bytes in the .idx."""
        return self._pair.idx_nbytes

    def __len__(self) -> int:
        return self._pair.header.num_sequences

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
        sequences = [self._view(i, 0, None) for i in range(start, stop)]
        return sequences if self._modes is None else (sequences, self._modes[start:stop])

    def get(self, index: Any, offset: Any = 0, length: Any = None) -> Any:
        """Tokens [offset, offset + length) of sequence `index`; to its end without a length.

        Returns:
            An array of `dtype`, or `(tokens, mode)` when multimodal.

        Raises:
            OutOfRange: there is no such sequence, or the range leaves it.
        """
        i = self._sequence_number(index)
        tokens = self._view(i, offset, length)
        return tokens if self._modes is None else (tokens, self._modes[i])

    def _sequence_number(self, index: Any) -> int:
        i = _integer(index, "index")
        count = self._pair.header.num_sequences
        if not -count <= i < count:
            raise OutOfRange(
                f"{self._path_prefix}: sequence {i} was asked for, and there are {count}; valid "
                f"numbers are {-count} to {count - 1}"
            )
        return i if i >= 0 else i + count

    def _view(self, i: int, offset: Any, length: Any) -> npt.NDArray[Any]:
        pair = self._pair
        size = int(pair.lengths[i])
        begin, inside = divmod(int(pair.pointers[i]), pair.dtype.itemsize)
        if inside or size < 0 or begin < 0 or begin + size > len(pair.tokens):
            pair.check_sequences(i, i + 1)  # raises, saying which rule is broken
        offset = _integer(offset, "offset")
        length = size - offset if length is None else _integer(length, "length")
        if offset < 0 or length < 0 or offset + length > size:
            raise OutOfRange(
                f"{self._path_prefix}: tokens {offset} to {offset + length} of sequence {i} were "
                f"asked for, and it has {size}; stay within 0 to {size}"
            )
        return pair.tokens[begin + offset : begin + offset + length]

    def __reduce__(self) -> tuple[Any, ...]:
        options = {"multimodal": self._multimodal, "dialect": self._dialect}
        return _reopen, (self._path_prefix, options, self._identity())

    def _identity(self) -> _Identity:
        return self._pair.header, self._pair.idx_nbytes, self._pair.bin_nbytes

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({self._path_prefix!r}: {len(self)} sequences, "
            f"{len(self._pair.bounds) - 1} documents, {self._pair.dtype})"
        )


def _reopen(path_prefix: str, options: dict[str, Any], identity: _Identity) -> IndexedDataset:
    """Unpickle: the same files, in the state in which they were pickled."""
    dataset = IndexedDataset(path_prefix, **options)
    if dataset._identity() != identity:
        then, now = (_describe(state) for state in (identity, dataset._identity()))
        raise StorageError(
            f"{path_prefix}: changed since it was pickled: it had {then}, and has {now}; open it "
            f"anew instead of unpickling"
        )
    return dataset


def _describe(identity: _Identity) -> str:
    header, idx_nbytes, bin_nbytes = identity
    return (
        f"{header.num_sequences} sequences and {header.num_bounds} document bounds with dtype code "
        f"{header.dtype_code} in {idx_nbytes} + {bin_nbytes} bytes"
    )


def _integer(value: Any, name: str) -> int:
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidArgument(
            f"{name}={value!r}: must be an integer, not {type(value).__name__}"
        ) from None
