"""JSON values of settings: rows in place of paths, text in place of fractions and floats."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from typing import Any

from megaindex.io.paths import absolute
from megaindex.lock.shape import PATHS
from megaindex.run.subset import map_leaves


def placed(value: Any, names: Sequence[str] = PATHS) -> Any:
    """Return a dataclass with absolute paths in the fields of these names that hold one."""
    given = {name: getattr(value, name, None) for name in names}
    return replace(
        value, **{k: absolute(path) for k, path in given.items() if isinstance(path, str) and path}
    )


def with_rows(value: Any, rows: Mapping[str, int]) -> Any:
    """Return JSON values with rows in place of paths, and text in place of other numbers."""
    return map_leaves(
        value, lambda key, each: rows[each] if key in PATHS and each in rows else plain(each)
    )


def plain(value: Any) -> Any:
    """Return a number as text, unless it is an integer: "0.3", "1/3"."""
    if isinstance(value, Fraction):
        return f"{value.numerator}/{value.denominator}"
    return repr(value) if isinstance(value, float) else value


def with_paths(value: Any, paths: Sequence[str]) -> Any:
    """Return JSON values with paths in place of rows."""
    return map_leaves(
        value, lambda key, each: paths[each] if key in PATHS and type(each) is int else each
    )


def every_field(value: Any, left_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the fields of a dataclass, also those with defaults, which may change."""
    names = [field.name for field in fields(value) if field.name not in left_out]
    return {name: getattr(value, name) for name in names}


def changed_fields(value: Any) -> dict[str, Any]:
    """Return the fields of a dataclass that differ from their defaults."""
    defaults = {field.name: field.default for field in fields(value)}
    return {name: each for name, each in every_field(value).items() if each != defaults[name]}


def number(value: Any) -> Any:
    """Return the number that `plain` wrote as text; other values unchanged."""
    if not isinstance(value, str):
        return value
    with contextlib.suppress(ValueError):
        return Fraction(value) if "/" in value else float(value)
    return value


def numbers(values: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: number(each) if key in names else each for key, each in values.items()}


def tuples(value: Any) -> Any:
    """Return the values of a mapping with tuples in place of lists."""
    if isinstance(value, dict):
        return {key: tuples(each) for key, each in value.items()}
    return tuple(map(tuples, value)) if isinstance(value, list) else value


def leaves(value: Any, where: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the place and the value of all plain values in JSON values."""
    if not isinstance(value, (dict, list)):
        yield where, value
        return
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield from leaves(each, f"{where}.{key}".lstrip("."))
