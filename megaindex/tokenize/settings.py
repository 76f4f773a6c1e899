"""Settings of a tokenizing run: keys, tokenizer, end token and token type."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.format.header import code_of_dtype, get_dialect
from megaindex.tokenize.tokenizers import Tokenizer, TokenizerFile, load
from megaindex.validation import check_integer

_UINT16_BELOW = 65_500  # vocabulary size below which Megatron chooses uint16
_END_NAME = re.compile(r"eo[dst]\b|end|</s>", re.IGNORECASE)
_MOST_NAMED = 10  # special tokens in a message


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """Checked settings; small and picklable."""

    tokenizer: TokenizerFile
    keys: tuple[str, ...]
    """Keys of JSON objects, or columns; for text files they only name the output."""
    eod: int | None
    """Id appended to every document that has tokens."""
    dtype: str

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the tokens; a tokenizer by its content."""
        encoder = self.tokenizer.encoder
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "add_special_tokens": self.tokenizer.add_special_tokens,
            "keys": list(self.keys),
            "eod": self.eod,
            "dtype": self.dtype,
        } | ({} if encoder is None else {"encoder": encoder})


def check_settings(
    tokenizer: TokenizerFile,
    keys: Sequence[str],
    *,
    eod: int | str | None,
    append_eod: bool,
    dtype: Any | None,
) -> TokenizeSettings:
    """Load the tokenizer and check the other settings against it.

    Raises:
        InvalidArgument: keys are missing or repeated, the end token is not in the vocabulary, or
            the token type does not hold every id.
        FormatError: the file is not a tokenizer.
    """
    if not keys or len(set(keys)) != len(keys):
        raise InvalidArgument(f"keys must be one or more distinct names, got {list(keys)}")
    loaded = load(tokenizer)
    end = _end_of_document(loaded, tokenizer, eod) if append_eod or eod is not None else None
    return TokenizeSettings(
        tokenizer=tokenizer,
        keys=tuple(keys),
        eod=end,
        dtype=str(_token_type(loaded, tokenizer, end, dtype)),
    )


def _end_of_document(loaded: Tokenizer, file: TokenizerFile, eod: int | str | None) -> int:
    if eod is None:
        if loaded.own_eod is None:
            raise InvalidArgument(
                f"{file}: defines no end token; name one with --eod{_special_tokens(loaded)}"
            )
        return loaded.own_eod
    found = loaded.id_of(eod) if isinstance(eod, str) else check_integer("eod", eod)
    if found is None or not 0 <= found <= loaded.largest_id:
        raise InvalidArgument(
            f"--eod must be a token of {file} or an id from 0 to {loaded.largest_id}, got {eod!r}"
            f"{_special_tokens(loaded)}"
        )
    return found


def _special_tokens(loaded: Tokenizer) -> str:
    """Return the special tokens for a message, those with the name of an end token first."""
    tokens = loaded.special_tokens.items()
    order = sorted(tokens, key=lambda token: (not _END_NAME.search(token[0]), token[1]))
    if not order:
        return ""
    named = ", ".join(f"{text!r} ({number})" for text, number in order[:_MOST_NAMED])
    more = len(order) - _MOST_NAMED
    return f"; its special tokens are {named}{f' and {more} more' if more > 0 else ''}"


def _token_type(
    loaded: Tokenizer, file: TokenizerFile, eod: int | None, dtype: Any | None
) -> np.dtype[Any]:
    """Return `dtype`, by default Megatron's choice of uint16 or int32; it must hold every id."""
    if dtype is None:
        dtype = np.uint16 if loaded.vocab_size < _UINT16_BELOW else np.int32
    dialect = get_dialect("megatron")
    chosen = dialect.dtypes[code_of_dtype(dtype, dialect)]
    largest = max(loaded.largest_id, -1 if eod is None else eod)
    if chosen.kind == "f":
        raise InvalidArgument(f"--dtype must be an integer type, got {chosen}; pass --dtype int32")
    if largest > np.iinfo(chosen).max:
        raise InvalidArgument(
            f"--dtype {chosen} holds ids up to {np.iinfo(chosen).max}, and those of {file} go up "
            f"to {largest}; pass --dtype int32"
        )
    return chosen
