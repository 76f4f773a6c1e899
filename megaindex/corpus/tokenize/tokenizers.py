"""Text to token ids, by the libraries whose files people have; each equals a call of Megatron's.

| file | library | what is called | what of Megatron's it equals |
|---|---|---|---|
| tokenizer.json | tokenizers | `encode_batch(texts)` | AutoTokenizer's `(text).input_ids` |
| *.model | sentencepiece | `encode(texts)` | `encode_as_ids(text)` |
| bytes | built in | `text.encode()` | `list(text.encode("utf-8"))` |

Without `add_special_tokens` the first equals --tokenizer-hf-no-include-special-tokens.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import xxhash

from megaindex.corpus.byte_level import END_OF_DOCUMENT
from megaindex.errors import InvalidArgument, StorageError
from megaindex.io.failures import as_storage_error
from megaindex.io.kinds import open_regular
from megaindex.io.locations import check_local

BYTES = "bytes"


@dataclass(frozen=True, kw_only=True)
class TokenizerFile:
    """Which tokenizer, by content; small, so that it travels with every task."""

    path: str
    """Of its file; "bytes" for the built-in one."""
    library: str
    """"tokenizers", "sentencepiece" or "bytes"."""
    fingerprint: str
    """Library, its version, and XXH3-128 of the file."""
    add_special_tokens: bool

    def __str__(self) -> str:
        return self.path


class Tokenizer(Protocol):
    """A loaded tokenizer; one thread, no state that one text leaves for the next."""

    vocab_size: int
    """As Megatron counts it to choose the token type."""
    largest_id: int

    @property
    def own_eod(self) -> int | None:
        """The token that the tokenizer itself says ends a document."""

    def id_of(self, token: str) -> int | None:
        """Of a token by its text; None if there is none."""

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        """Ids of each text; raises what the library raises for a text it cannot encode."""


def find_tokenizer(path: str | os.PathLike[str], *, add_special_tokens: bool) -> TokenizerFile:
    """The tokenizer at `path`: a file, a folder that holds one, or "bytes".

    Raises:
        InvalidArgument: the library that it takes is not installed.
        StorageError: the file cannot be read.
    """
    path = os.fspath(path)
    check_local(path, "download the tokenizer first")
    if path == BYTES:
        library, fingerprint = BYTES, "bytes 1"
    else:
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
    """Load it, once in a process.

    Raises:
        FormatError: the file is no tokenizer.
        StorageError: the file is no longer what it was when the run began.
    """
    from megaindex.corpus.tokenize.libraries import load_sentencepiece, load_tokenizers

    if file.library == BYTES:
        return Bytes()
    now = find_tokenizer(file.path, add_special_tokens=file.add_special_tokens)
    if now != file:
        raise StorageError(
            f"{file.path}: is not the tokenizer that the run began with ({now.fingerprint}, was "
            f"{file.fingerprint}); put it back, or begin anew"
        )
    return load_sentencepiece(file) if file.library == "sentencepiece" else load_tokenizers(file)


class Bytes:
    """Token = byte of the UTF-8 text, 256 = end of document."""

    vocab_size = END_OF_DOCUMENT + 1
    largest_id = END_OF_DOCUMENT
    own_eod = END_OF_DOCUMENT

    def id_of(self, token: str) -> int | None:
        del token  # bytes have no names
        return None

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        return [text.encode() for text in texts]


@contextmanager
def one_thread() -> Iterator[None]:
    """Keep the libraries from starting threads of their own: tasks are the parallelism."""
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
            f"{path}: takes the library {library}; pip install 'megaindex[{library}]'"
        ) from None
