"""Texts of a document from the bytes of a line, and the rules that these can break."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

Text = tuple[str, ...]
"""The value of one key: the sequences of a document, one unless the value is a list."""

_parse = json.JSONDecoder().decode
_SHOWN = 60  # characters of a value that a message repeats


class BadRecord(Exception):
    """A line or row that cannot be a document."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(rule, detail)
        self.rule = rule
        self.detail = detail


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A line or row that is left out."""

    place: int
    """As of a `Record`."""
    error: BadRecord


@dataclass(frozen=True, kw_only=True)
class Record:
    """A document before it is tokenized."""

    place: int
    """Number of its line or row in the piece, from 0."""
    texts: tuple[Text, ...]
    """One for each key."""
    size: int
    """Bytes it was made of."""


def from_json(raw: bytes, keys: Sequence[str]) -> tuple[Text, ...]:
    """Return the values of `keys` in a JSON object, each a string or a list of strings.

    Accepts what Python's json accepts, as Megatron does: NaN, and of a key that is there twice the
    last.

    Raises:
        BadRecord: rule utf-8, json, object, missing-key, type or surrogate.
    """
    text = decoded(raw)
    try:
        found = _parse(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(
            "json", f"is no JSON: {_reason(error)}; it begins {_excerpt(text)}"
        ) from None
    if not isinstance(found, dict):
        raise BadRecord("object", f"is no JSON object but {_excerpt(found)}")
    return tuple(_value(found, key) for key in keys)


def decoded(raw: bytes) -> str:
    """Raises BadRecord, rule utf-8, naming the byte."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(
            "utf-8",
            f"is no UTF-8: byte 0x{raw[error.start]:02x} at {error.start} ({error.reason})",
        ) from None


def _reason(error: Exception) -> str:
    """Without the line, which to json is always 1."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos}"
    return str(error)


def _value(found: dict[str, Any], key: str) -> Text:
    if key not in found:
        has = ", ".join(map(repr, list(found)[:10])) or "nothing"
        raise BadRecord("missing-key", f"has no key {key!r}; it has {has}")
    value = found[key]
    texts = tuple(value) if isinstance(value, list) else (value,)
    for text in texts:
        if not isinstance(text, str):
            kind = "neither a string nor a list of strings"
            raise BadRecord("type", f"key {key!r} holds {_excerpt(value)}, {kind}")
        if not text.isascii():
            _check_characters(text, key)
    return texts


def _check_characters(text: str, key: str) -> None:
    """JSON can write half a pair of surrogates, which no UTF-8 and no tokenizer has room for."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise BadRecord(
            "surrogate", f"key {key!r} holds a lone surrogate, U+{code:04X}, at {error.start}"
        ) from None


def _excerpt(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"
