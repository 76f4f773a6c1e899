"""The tokenizer libraries behind one interface."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from typing import Any

from megaindex.corpus.tokenize.tokenizers import TokenizerFile
from megaindex.errors import FormatError
from megaindex.io.kinds import open_regular


def load_tokenizers(file: TokenizerFile) -> HuggingFace:
    """A tokenizer.json; FormatError if it is none."""
    from tokenizers import Tokenizer

    try:
        loaded = Tokenizer.from_file(file.path)
    except Exception as error:  # the library raises nothing more precise
        raise FormatError(
            f"{file.path}: is no tokenizer that the tokenizers library can read: {error}; pass a "
            f"tokenizer.json, a SentencePiece .model, or bytes"
        ) from error
    return HuggingFace(loaded, file)


def load_sentencepiece(file: TokenizerFile) -> SentencePiece:
    """A SentencePiece model; FormatError if it is none."""
    import sentencepiece

    try:
        loaded = sentencepiece.SentencePieceProcessor(model_file=file.path)
    except (RuntimeError, OSError) as error:
        raise FormatError(
            f"{file.path}: is no tokenizer that SentencePiece can read: {error}; pass a "
            f"tokenizer.json, a SentencePiece .model, or bytes"
        ) from error
    return SentencePiece(loaded)


class HuggingFace:
    """What transformers' fast tokenizers run; nothing is cut short and nothing padded."""

    def __init__(self, loaded: Any, file: TokenizerFile) -> None:
        loaded.no_truncation()  # a tokenizer.json may ask for both
        loaded.no_padding()
        self._loaded = loaded
        self._special = file.add_special_tokens
        # without offsets, which nobody asks for; there since tokenizers 0.20
        self._encode = getattr(loaded, "encode_batch_fast", loaded.encode_batch)
        self.vocab_size: int = loaded.get_vocab_size(with_added_tokens=True)
        self.largest_id: int = max(loaded.get_vocab(with_added_tokens=True).values(), default=-1)
        self._path = file.path

    @property
    def own_eod(self) -> int | None:
        token = _configured_eos(self._path)
        return None if token is None else self.id_of(token)

    def id_of(self, token: str) -> int | None:
        found: int | None = self._loaded.token_to_id(token)
        return found

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        encodings = self._encode(list(texts), add_special_tokens=self._special)
        return [encoding.ids for encoding in encodings]


class SentencePiece:
    """A SentencePiece model; neither begin nor end of a sentence is added."""

    def __init__(self, loaded: Any) -> None:
        self._loaded = loaded
        self.vocab_size: int = loaded.get_piece_size()
        self.largest_id: int = self.vocab_size - 1

    @property
    def own_eod(self) -> int | None:
        found: int = self._loaded.eos_id()
        return found if found >= 0 else None

    def id_of(self, token: str) -> int | None:
        found: int = self._loaded.piece_to_id(token)  # of the unknown token, for what is unknown
        return found if self._loaded.id_to_piece(found) == token else None

    def encode(self, texts: Sequence[str]) -> list[Sequence[int]]:
        ids: list[Sequence[int]] = self._loaded.encode(list(texts), out_type=int, num_threads=1)
        return ids


def _configured_eos(path: str) -> str | None:
    """What the tokenizer_config.json beside a tokenizer.json says ends a sequence."""
    beside = os.path.join(os.path.dirname(path), "tokenizer_config.json")
    try:
        with open(open_regular(beside), encoding="utf-8") as file:
            config = json.load(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise FormatError(
            f"{beside}: is no JSON: {error}; mend it, or move it away and pass --eod"
        ) from error
    for name in ("eos_token", "sep_token"):  # Megatron takes the second for want of the first
        token = config.get(name) if isinstance(config, dict) else None
        token = token.get("content") if isinstance(token, dict) else token
        if isinstance(token, str):
            return token
    return None
