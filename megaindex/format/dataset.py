"""Reader of a .bin/.idx pair through read-only mappings, and histograms of lengths without a pair.

A text file with the lengths of the documents of a corpus serves planning without the corpus. One
line for each length, tokens and number of documents; lines that begin with # are comments:

    # tokens documents
    17 40312
    18 41029
"""

from __future__ import annotations

import operator
import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from megaindex._types import I64
from megaindex.arithmetic import INT32_MAX
from megaindex.errors import FormatError, InvalidArgument, OutOfRange, StorageError
from megaindex.format.header import IndexHeader, dtype_of_code, get_dialect
from megaindex.format.pair import MappedPair, map_pair, pair_paths
from megaindex.io.atomic import read_named
from megaindex.io.paths import FileInfo, is_remote, path_text, plain
from megaindex.objects.files import stat_path


class PairIdentity(NamedTuple):
    """Header, sizes and versions of the files of an open pair."""

    header: IndexHeader
    idx_nbytes: int
    bin_nbytes: int
    versions: tuple[str, ...] = ()
    """`FileInfo.version` of the .idx and of the .bin."""


class IndexedDataset:
    """Sequences of tokens of a Megatron-format pair, `<path_prefix>.bin` and `<path_prefix>.idx`.

    `ds[i]` is the array of tokens of sequence i, and `ds[a:b]` a list of such arrays; with
    `multimodal`, results are `(tokens, mode)` and `(list, modes)`. Arrays are read-only views of
    mappings that they keep alive, so they remain valid after the dataset is freed. No file
    descriptor stays open. Safe to share between threads and across fork; unpickling opens the files
    again, and refuses them if they have changed.

    From an object store (`s3://bucket/corpus`) the .idx is copied to this machine and mapped, and
    each access to tokens reads the .bin: one request for a sequence, or for a slice of adjacent
    sequences. Such arrays are copies; loaders read many samples at once.

    Opening makes the checks of cost O(1): both files exist, header, sizes of the arrays, first and
    last document bound, last sequence. `validate` checks every entry. Each read checks its own
    bounds, so that a damaged .idx never causes reads outside the .bin.

    Args:
        path_prefix: common path of both files, without `.bin` or `.idx`.
        multimodal: return the mode of each sequence too; the file must hold modes.
        dialect: framework of the dtype codes: "megatron", "neox" or "paddlenlp".

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
        path_prefix = plain(path_text(path_prefix))
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
        self._absolute = path_prefix if is_remote(path_prefix) else os.path.abspath(path_prefix)
        self._dialect = dialect
        self._multimodal = multimodal
        self._mapped = pair
        self._identity = identity
        self._num_tokens: int | None = None  # set once every entry is checked

    @classmethod
    def lazy(
        cls,
        path_prefix: str | os.PathLike[str],
        identity: PairIdentity,
        *,
        dialect: str = "megatron",
        multimodal: bool = False,
    ) -> IndexedDataset:
        """Return a dataset that opens its files on first use.

        Args:
            path_prefix: as for the constructor, like dialect and multimodal.
            identity: `identity` of the pair when it was open before; if it differs when the files
                are opened, they are refused with StorageError.
        """
        dataset = cls.__new__(cls)
        dataset._hold(plain(os.fspath(path_prefix)), dialect, multimodal, None, identity)
        return dataset

    @property
    def _pair(self) -> MappedPair:
        pair = self._mapped
        if pair is None:  # two threads may both open it, and either mapping serves
            pair = map_pair(self._absolute, self._dialect, multimodal=self._multimodal)
            found = _identity_of(pair)
            if found != self._identity:
                raise StorageError(
                    f"{self._path_prefix}: changed since it was opened: it had "
                    f"{_describe(self._identity)}, and has {_describe(found)}; open it again"
                )
            self._mapped = pair
        return pair

    @property
    def is_open(self) -> bool:
        """True once the files are mapped; see `lazy`."""
        return self._mapped is not None

    @property
    def identity(self) -> PairIdentity:
        """Header, sizes and versions, compared by `lazy` and by unpickling."""
        return self._identity

    @property
    def bin_info(self) -> FileInfo:
        """Absolute path, size and version of the .bin when the pair was opened."""
        identity = self._identity
        version = identity.versions[1] if identity.versions else ""
        return FileInfo(pair_paths(self._absolute)[0], identity.bin_nbytes, version)

    def validate(self) -> None:
        """Check every entry of the .idx once, in constant memory.

        Raises:
            FormatError: an entry breaks a rule; the message names the first.
        """
        if self._num_tokens is None:
            self._num_tokens = self._pair.check_everything()

    def mark_validated(self, num_tokens: int) -> None:
        """Mark every entry as checked, with the number of tokens that `validate` found before."""
        self._num_tokens = num_tokens

    @staticmethod
    def exists(path_prefix: str | os.PathLike[str]) -> bool:
        """Return True if both files of the pair exist; StorageError if they cannot be examined."""
        return all(stat_path(path) is not None for path in pair_paths(os.fspath(path_prefix)))

    @property
    def path_prefix(self) -> str:
        """Path or URL of the pair, without ``.bin`` and ``.idx``."""
        return self._path_prefix

    @property
    def dialect(self) -> str:
        """Framework whose dtype codes the file uses."""
        return self._dialect

    @property
    def sequence_lengths(self) -> npt.NDArray[np.int32]:
        """Number of tokens of each sequence, int32[n], unaligned in memory."""
        return self._pair.lengths

    @property
    def sequence_pointers(self) -> npt.NDArray[np.int64]:
        """Offset of each sequence in the .bin, in bytes, int64[n], unaligned in memory."""
        return self._pair.pointers

    @property
    def document_indices(self) -> npt.NDArray[np.int64]:
        """Document bounds, int64[documents + 1], unaligned: document d is the sequences
        document_indices[d] : document_indices[d + 1]."""
        return self._pair.bounds

    @property
    def sequence_modes(self) -> npt.NDArray[np.int8] | None:
        """Mode of each sequence, int8[n]; None unless opened with multimodal=True."""
        return self._pair.modes if self._multimodal else None

    @property
    def has_modes(self) -> bool:
        """True if the file holds modes, also when not opened as multimodal."""
        return self._pair.modes is not None

    @property
    def tokens(self) -> npt.NDArray[Any]:
        """The whole .bin as one array of `dtype`; sequence i begins at pointer // itemsize.

        InvalidArgument if the pair lies in an object store.
        """
        return self._pair.tokens

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the tokens."""
        if self._mapped is not None:
            return self._mapped.dtype
        dialect = get_dialect(self._dialect)
        known = dialect.dtypes.get(self.dtype_code)
        if known is not None:  # a blend of thousands of sources asks each several times
            return known
        return dtype_of_code(self.dtype_code, dialect, pair_paths(self._path_prefix)[1])

    @property
    def dtype_code(self) -> int:
        """Code of the tokens' dtype in the ``.idx``."""
        return self._identity.header.dtype_code

    @property
    def num_tokens(self) -> int:
        """Number of tokens of all sequences; the first access calls `validate`."""
        self.validate()
        assert self._num_tokens is not None
        return self._num_tokens

    @property
    def nbytes(self) -> int:
        """Size of the .bin in bytes."""
        return self._identity.bin_nbytes

    @property
    def index_nbytes(self) -> int:
        """Size of the .idx in bytes."""
        return self._identity.idx_nbytes

    def __len__(self) -> int:
        return self._identity.header.num_sequences

    def __iter__(self) -> Iterator[Any]:
        return (self.get(i) for i in range(len(self)))

    def __getitem__(self, index: Any) -> Any:
        if not isinstance(index, slice):
            return self.get(index)
        try:
            start, stop, step = index.indices(len(self))
        except TypeError:
            raise InvalidArgument(
                f"{self._path_prefix}: slices must have integers or None, got {index!r}"
            ) from None
        if step != 1:
            raise InvalidArgument(
                f"{self._path_prefix}: slices must have step 1, got {index.step}; index single "
                "sequences instead"
            )
        stop = max(start, stop)
        runs = [self._run(i, 0, None) for i in range(start, stop)]
        sequences = self._pair.runs_of_tokens(runs)
        modes = self.sequence_modes
        return sequences if modes is None else (sequences, modes[start:stop])

    def get(self, index: Any, offset: Any = 0, length: Any = None) -> Any:
        """Return tokens [offset, offset + length) of a sequence.

        Args:
            index: number of the sequence; negative numbers count from the end.
            offset: first token.
            length: number of tokens. Default: up to the end of the sequence.

        Returns:
            An array of `dtype`, or `(tokens, mode)` if multimodal.

        Raises:
            OutOfRange: the sequence does not exist, or the range exceeds it.
            FormatError: the sequence lies outside the .bin, or begins inside a token.
        """
        i, total = _integer(index, "index"), len(self)
        if not -total <= i < total:
            raise OutOfRange(
                f"{self._path_prefix}: the number of a sequence must be from {-total} to "
                f"{total - 1}, got {i}"
            )
        i = i if i >= 0 else i + total
        begin, count = self._run(i, offset, length)
        tokens = self._pair.mapped_tokens
        if tokens is not None:  # without the list: this path takes a microsecond
            tokens = tokens[begin : begin + count]
        else:
            tokens = self._pair.runs_of_tokens([(begin, count)])[0]
        modes = self.sequence_modes
        return tokens if modes is None else (tokens, modes[i])

    def _run(self, i: int, offset: Any, length: Any) -> tuple[int, int]:
        """Return offset in the .bin, in tokens, and number of tokens of part of a sequence."""
        pair = self._pair
        size = int(pair.lengths[i])
        begin, inside = divmod(int(pair.pointers[i]), pair.dtype.itemsize)
        if inside or size < 0 or begin < 0 or begin + size > pair.bin_nbytes // pair.dtype.itemsize:
            pair.check_sequences(i, i + 1)  # raises
        offset = _integer(offset, "offset")
        length = size - offset if length is None else _integer(length, "length")
        if offset < 0 or length < 0 or offset + length > size:
            raise OutOfRange(
                f"{self._path_prefix}: tokens of sequence {i} must be within 0 to {size}, got "
                f"{offset} to {offset + length}"
            )
        return begin + offset, length

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, (self._absolute, self._options(), self._identity)

    def lazy_arguments(self) -> tuple[str, PairIdentity, dict[str, Any]]:
        """Return the arguments of `lazy` that give this dataset; the path is absolute."""
        return self._absolute, self._identity, self._options()

    def _options(self) -> dict[str, Any]:
        return {"multimodal": self._multimodal, "dialect": self._dialect}

    def __repr__(self) -> str:
        return (
            f"IndexedDataset({self._path_prefix!r}: {len(self)} sequences, "
            f"{self._identity.header.num_bounds - 1} documents, {self.dtype})"
        )


def _reopen(path_prefix: str, options: dict[str, Any], identity: PairIdentity) -> IndexedDataset:
    """Unpickle: open the files and compare their identity."""
    dataset = IndexedDataset.lazy(path_prefix, identity, **options)
    _ = dataset.sequence_lengths
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
            f"{name} must be an integer, got {value!r} of type {type(value).__name__}"
        ) from None


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
        FormatError: a line is not two whole numbers, a length is given twice, or there is no
            token.
        MissingFile, StorageError: the file cannot be read.
    """
    lines = read_named(path, longest=1 << 30).splitlines()
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
    if histogram.tokens == 0 or histogram.num_documents > _MOST_DOCUMENTS:
        raise FormatError(
            f"{path}: the documents must hold a token and be fewer than 2**31, got "
            f"{histogram.num_documents} documents of {histogram.tokens} tokens"
        )
    return histogram
