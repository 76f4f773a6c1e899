"""Settings of a run: keys of the text, tokenizer, end token and token type."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from megaindex.errors import InvalidArgument
from megaindex.format.header import code_of_dtype, get_dialect
from megaindex.tokenize.tokenizers import Tokenizer, TokenizerFile, load
from megaindex.validation import check_integer

_UINT16_BELOW = 65_500  # entries of the vocabulary for which Megatron takes uint16


@dataclass(frozen=True, kw_only=True)
class TokenizeSettings:
    """As checked; picklable and small."""

    tokenizer: TokenizerFile
    keys: tuple[str, ...]
    """Of the JSON objects, or columns; text files have no keys and name their output by it."""
    eod: int | None
    """Id behind every document that has tokens; None for none."""
    dtype: str

    def identity(self) -> dict[str, Any]:
        """What of this decides the tokens: of the tokenizer its content, not its path."""
        return {
            "tokenizer": self.tokenizer.fingerprint,
            "add_special_tokens": self.tokenizer.add_special_tokens,
            "keys": list(self.keys),
            "eod": self.eod,
            "dtype": self.dtype,
        }


def check_settings(
    tokenizer: TokenizerFile,
    keys: Sequence[str],
    *,
    eod: int | str | None,
    append_eod: bool,
    dtype: Any | None,
) -> TokenizeSettings:
    """Load the tokenizer once, and hold everything against it.

    Raises:
        InvalidArgument: keys are missing or twice there, the token that ends documents is not in
            the vocabulary, or the token type does not hold every id.
        FormatError: the file is not a tokenizer.
    """
    if not keys or len(set(keys)) != len(keys):
        raise InvalidArgument(f"keys={list(keys)}: must be at least one, and each only once")
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
                f"{file}: does not say which token ends a document; name it with --eod"
            )
        return loaded.own_eod
    found = loaded.id_of(eod) if isinstance(eod, str) else check_integer("eod", eod)
    if found is None or not 0 <= found <= loaded.largest_id:
        raise InvalidArgument(
            f"eod={eod!r}: is not in the vocabulary of {file}, whose ids are 0 to "
            f"{loaded.largest_id}; name a token of it, or its id"
        )
    return found


def _token_type(
    loaded: Tokenizer, file: TokenizerFile, eod: int | None, dtype: Any | None
) -> np.dtype[Any]:
    """Megatron's choice, uint16 or int32, unless another is wanted; it must hold every id."""
    if dtype is None:
        dtype = np.uint16 if loaded.vocab_size < _UINT16_BELOW else np.int32
    dialect = get_dialect("megatron")
    chosen = dialect.dtypes[code_of_dtype(dtype, dialect)]
    largest = max(loaded.largest_id, -1 if eod is None else eod)
    if chosen.kind == "f" or largest > np.iinfo(chosen).max:
        holds = "is no integer type" if chosen.kind == "f" else f"ends at {np.iinfo(chosen).max}"
        raise InvalidArgument(
            f"dtype={chosen}: {holds}, and the ids of {file} go up to {largest}; pass --dtype int32"
        )
    return chosen
