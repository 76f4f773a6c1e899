"""Tokenizers: byte level, Hugging Face tokenizers and SentencePiece.

| file | library | call | equal to Megatron's |
|---|---|---|---|
| tokenizer.json | tokenizers | `encode_batch(texts)` | AutoTokenizer's `(text).input_ids` |
| *.model | sentencepiece | `encode(texts)` | `encode_as_ids(text)` |
| bytes | built in | `text.encode()` | `list(text.encode("utf-8"))` |

Without `add_special_tokens` the first equals --tokenizer-hf-no-include-special-tokens.
"""

from __future__ import annotations

import functools
import itertools
import os
import re
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import xxhash

from megaindex.errors import FormatError, InvalidArgument, MissingFile, StorageError
from megaindex.io.json_files import read_object
from megaindex.io.os_errors import as_storage_error
from megaindex.io.paths import check_local, open_regular

BYTES = "bytes"
_HUB_NAME = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?(?<!\.json)(?<!\.model)")
END_OF_DOCUMENT = 256
"""End token of the byte-level tokenizer."""

Ids = tuple[npt.NDArray[Any], npt.NDArray[np.int64]]
"""Ids of all texts, one after the other, and the number of ids of each text."""


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """A tokenizer identified by its content; small and picklable."""

    path: str
    """Path of the file; "bytes" for the built-in one."""
    library: str
    """"tokenizers", "sentencepiece" or "bytes"."""
    fingerprint: str
    """Library, its version, and XXH3-128 of the file."""
    add_special_tokens: bool

    def __str__(self) -> str:
        return self.path


class Tokenizer(Protocol):
    """A loaded tokenizer: single-threaded, stateless between texts."""

    vocab_size: int
    """Size by which Megatron chooses the token type."""
    largest_id: int

    @property
    def own_eod(self) -> int | None:
        """The end token that the tokenizer defines."""

    @property
    def special_tokens(self) -> dict[str, int]:
        """Ids of the special tokens by their texts."""

    def id_of(self, token: str) -> int | None:
        """Return the id of a token by its text; None if it is unknown."""

    def encode(self, texts: Sequence[str]) -> Ids:
        """Return the ids of texts; errors of the library are passed on."""

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids, those of special tokens included where they have one."""


def find_tokenizer(path: str | os.PathLike[str], *, add_special_tokens: bool) -> TokenizerFile:
    """Return the tokenizer at `path`: a file, a folder that holds one, or "bytes".

    Raises:
        InvalidArgument: its library is not installed, or a folder holds no tokenizer.
        MissingFile: the file or folder does not exist.
        StorageError: the file cannot be read.
    """
    path = os.fspath(path)
    check_local(path, "download the tokenizer first")
    if path == BYTES:
        library, fingerprint = BYTES, "bytes 1"
    else:
        _refuse_hub_name(path)
        path = os.path.abspath(_in_folder(path))
        action = "cannot read the tokenizer"
        with as_storage_error(path, action), open(open_regular(path, action), "rb") as file:
            content = file.read()
        library = "tokenizers" if content.lstrip()[:1] == b"{" else "sentencepiece"
        digest = xxhash.xxh3_128_hexdigest(content)
        fingerprint = f"{library} {_version(library, path)} {digest}"
    return TokenizerFile(
        path=path, library=library, fingerprint=fingerprint, add_special_tokens=add_special_tokens
    )


@functools.lru_cache(maxsize=1)
def load(file: TokenizerFile) -> Tokenizer:
    """Load a tokenizer; the last one loaded is cached.

    Raises:
        FormatError: the file is not a tokenizer.
        StorageError: the file changed since the run began.
    """

    if file.library == BYTES:
        return Bytes()
    now = find_tokenizer(file.path, add_special_tokens=file.add_special_tokens)
    if now != file:
        raise StorageError(
            f"{file.path}: changed since the run began ({now.fingerprint}, was "
            f"{file.fingerprint}); restore it, or start again"
        )
    return SentencePiece(file) if file.library == "sentencepiece" else HuggingFace(file)


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the libraries from starting threads of their own, since tasks run in parallel."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


class Bytes:
    """Byte-level tokenizer: ids 0 to 255 are bytes of the UTF-8 text, 256 ends a document."""

    vocab_size = END_OF_DOCUMENT + 1
    largest_id = END_OF_DOCUMENT
    own_eod = END_OF_DOCUMENT

    @property
    def special_tokens(self) -> dict[str, int]:
        return {}

    def id_of(self, token: str) -> int | None:
        del token  # bytes have no names
        return None

    def encode(self, texts: Sequence[str]) -> Ids:
        encoded = [text.encode() for text in texts]
        return np.frombuffer(b"".join(encoded), np.uint8), _lengths(encoded)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(i for i in ids if i < END_OF_DOCUMENT).decode(errors="replace")


class HuggingFace:
    """A tokenizer.json, as in transformers' fast tokenizers, without truncation and padding."""

    def __init__(self, file: TokenizerFile) -> None:
        from tokenizers import Tokenizer

        with _readable(file, "the tokenizers library"):
            loaded = Tokenizer.from_file(file.path)
        loaded.no_truncation()  # a tokenizer.json may turn both on
        loaded.no_padding()
        self._loaded = loaded
        self._special = file.add_special_tokens
        # tokenizers 0.20 added encode_batch_fast, which computes no offsets
        self._encode = getattr(loaded, "encode_batch_fast", loaded.encode_batch)
        self.vocab_size: int = loaded.get_vocab_size(with_added_tokens=True)
        self.largest_id: int = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)
        self._path = file.path

    @property
    def own_eod(self) -> int | None:
        token = _configured_eos(self._path)
        return None if token is None else self.id_of(token)

    @property
    def special_tokens(self) -> dict[str, int]:
        added = self._loaded.get_added_tokens_decoder().items()
        return {token.content: number for number, token in added if token.special}

    def id_of(self, token: str) -> int | None:
        found: int | None = self._loaded.token_to_id(token)
        return found

    def encode(self, texts: Sequence[str]) -> Ids:
        encodings = self._encode(list(texts), add_special_tokens=self._special)
        return _flat([encoding.ids for encoding in encodings])

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._loaded.decode(list(ids), skip_special_tokens=False)
        return text


class SentencePiece:
    """A SentencePiece model, without begin and end tokens."""

    def __init__(self, file: TokenizerFile) -> None:
        import sentencepiece

        with _readable(file, "SentencePiece"):
            loaded = sentencepiece.SentencePieceProcessor(model_file=file.path)
        self._loaded = loaded
        self.vocab_size: int = loaded.get_piece_size()
        self.largest_id: int = self.vocab_size - 1

    @property
    def own_eod(self) -> int | None:
        found: int = self._loaded.eos_id()
        return found if found >= 0 else None

    @property
    def special_tokens(self) -> dict[str, int]:
        loaded, ids = self._loaded, range(self.vocab_size)
        return {loaded.id_to_piece(i): i for i in ids if loaded.is_control(i)}

    def id_of(self, token: str) -> int | None:
        found: int = self._loaded.piece_to_id(token)  # id of <unk> for an unknown token
        return found if self._loaded.id_to_piece(found) == token else None

    def encode(self, texts: Sequence[str]) -> Ids:
        return _flat(self._loaded.encode(list(texts), out_type=int, num_threads=1))

    def decode(self, ids: Sequence[int]) -> str:
        text: str = self._loaded.decode(list(ids))
        return text


def _flat(ids: Sequence[Sequence[int]]) -> Ids:
    tokens = array("i", itertools.chain.from_iterable(ids))
    return np.frombuffer(tokens, np.int32), _lengths(ids)


def _lengths(texts: Sequence[Sequence[int]]) -> npt.NDArray[np.int64]:
    return np.fromiter(map(len, texts), np.int64, len(texts))


@contextmanager
def _readable(file: TokenizerFile, library: str) -> Iterator[None]:
    """Raise FormatError for an error of the library, which may be of any type."""
    try:
        yield
    except Exception as error:
        raise FormatError(
            f"{file.path}: cannot be read by {library}: {error}; pass a tokenizer.json, a "
            f"SentencePiece .model, or bytes"
        ) from error


def _configured_eos(path: str) -> str | None:
    """Return the end token of the tokenizer_config.json beside a tokenizer.json."""
    beside = os.path.join(os.path.dirname(path), "tokenizer_config.json")
    try:
        config = read_object(beside)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FormatError(
            f"{beside}: must be a JSON object, but {error}; correct it, or move it away and pass "
            "--eod"
        ) from error
    for name in ("eos_token", "sep_token"):  # in the order of Megatron
        token = config.get(name)
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None


def _refuse_hub_name(path: str) -> None:
    """Raise MissingFile for a path that does not exist and may be a name on Hugging Face's hub."""
    if _HUB_NAME.fullmatch(path) and not os.path.lexists(path):
        folder = path.rpartition("/")[2]
        raise MissingFile(
            f"{path}: no such file or folder, and tokenizers are not downloaded; if it is a name "
            f"on the Hugging Face hub, get its tokenizer.json or tokenizer.model by: hf download "
            f"{path} --include 'tokenizer*' --local-dir {folder}; then pass --tokenizer {folder}"
        )


def _in_folder(path: str) -> str:
    if not os.path.isdir(path):
        return path
    for name in ("tokenizer.json", "tokenizer.model"):
        if os.path.isfile(found := os.path.join(path, name)):
            return found
    raise InvalidArgument(
        f"{path}: the folder holds neither tokenizer.json nor tokenizer.model; name the file itself"
    )


def _version(library: str, path: str) -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(library)
    except PackageNotFoundError:
        raise InvalidArgument(
            f"{path}: needs the library {library}; pip install 'megaindex[{library}]'"
        ) from None
