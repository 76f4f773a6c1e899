"""Texts of a document, decoded from a line or row, and the errors of bad lines."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

Text = tuple[str, ...]
"""The value of one key: one text, or the texts of a list, each of which becomes a sequence."""

_DECODER = json.JSONDecoder()
_SHOWN = 60  # most characters of a value in a message


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
    """As in `Record`."""
    error: BadRecord


class Record(NamedTuple):
    """A document before it is tokenized."""

    place: int
    """Number of its line or row in the piece, from 0."""
    texts: tuple[Text, ...]
    """One for each key."""
    size: int
    """Bytes of the line, or about so many of a row."""
    begin: int = 0
    """First byte of the line in the unpacked file; 0 of a row."""


def from_json(raw: bytes, keys: Sequence[str]) -> tuple[Text, ...]:
    """Return the values of `keys` in a JSON object, each a string or a list of strings.

    Python's json parses the line, as in Megatron: NaN is accepted, and the last of equal keys wins.

    Raises:
        BadRecord: rule utf-8, json, object, missing-key, type or surrogate.
    """
    text = decoded(raw)
    try:
        found, end = _DECODER.raw_decode(text)
    except (ValueError, RecursionError):
        end = -1
    if end != len(text):  # an error, or white space around the value
        found = _parsed(text)
    if not isinstance(found, dict):
        raise BadRecord("object", f"must be a JSON object, got {_excerpt(found)}")
    return tuple([_value(found, key) for key in keys])


def _parsed(text: str) -> Any:
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise BadRecord(
            "json", f"is not valid JSON: {_reason(error)}; it begins {_excerpt(text)}"
        ) from None


def decoded(raw: bytes) -> str:
    """Decode UTF-8; raise BadRecord, rule utf-8, with the offset of the first bad byte."""
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise BadRecord(
            "utf-8",
            f"is not valid UTF-8: byte 0x{raw[error.start]:02x} at {error.start} ({error.reason})",
        ) from None


def _reason(error: Exception) -> str:
    """Return the message without its line number, which is always 1."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg.removesuffix(' at')} at character {error.pos}"
    return str(error)


def _value(found: dict[str, Any], key: str) -> Text:
    value = found.get(key)
    if isinstance(value, str) and value.isascii():  # nearly always
        return (value,)
    if key not in found:
        has = ", ".join(map(repr, list(found)[:10])) or "nothing"
        raise BadRecord("missing-key", f"has no key {key!r}; it has {has}")
    texts = tuple(value) if isinstance(value, list) else (value,)
    for text in texts:
        if not isinstance(text, str):
            rule = "must hold a string or a list of strings"
            raise BadRecord("type", f"key {key!r} {rule}, got {_excerpt(value)}")
        if not text.isascii():
            _check_characters(text, key)
    return texts


def _check_characters(text: str, key: str) -> None:
    """Refuse lone surrogates, which JSON can write and UTF-8 cannot encode."""
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
