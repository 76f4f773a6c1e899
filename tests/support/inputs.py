"""Many inputs inside one test."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any

import pytest

_PARAM = type(pytest.param())


def for_each(
    names: str | tuple[str, ...], inputs: Iterable[Any]
) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that calls a test with every input, as ``parametrize`` does, in one test.

    Fixtures are made once for all inputs, but each has a folder below ``tmp_path``, and what it
    sets with ``monkeypatch`` is undone after it. All inputs are tried; the failure names those
    that failed, and is caused by that of the first. A skip, as of a backend that is not
    installed, skips the test.
    """
    words = (names,) if isinstance(names, str) else names
    rows = [_row(each, isinstance(names, str)) for each in inputs]

    def decorate(test: Any) -> Any:
        body, below = getattr(test, "for_each", (test, [{}]))  # decorated twice: all pairs
        cases = [{**dict(zip(words, row, strict=True)), **more} for row in rows for more in below]

        @functools.wraps(test)
        def of_all(**fixtures: Any) -> None:
            __tracebackhide__ = True
            errors = [
                (case, _error(body, _own(fixtures, number) | case))
                for number, case in enumerate(cases)
            ]
            failed = [(case, error) for case, error in errors if error is not None]
            if failed:
                lines = [f"{len(failed)} of {len(cases)} inputs failed:"]
                for case, error in failed:
                    shown = ", ".join(f"{name}={_shown(value)}" for name, value in case.items())
                    lines.append(f"{shown}: {_short(str(error) or repr(error))}")
                raise AssertionError("\n".join(lines)) from failed[0][1]

        signature = inspect.signature(test)
        left = [p for p in signature.parameters.values() if p.name not in words]
        assert len(left) == len(signature.parameters) - len(words), f"{test} takes {names}"
        of_all.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        of_all.for_each = body, cases  # type: ignore[attr-defined]
        del of_all.__wrapped__  # pytest asks the test itself for its fixtures and parameters
        return of_all

    return decorate


def _row(given: Any, is_one: bool) -> tuple[Any, ...]:
    """Return the values of an input, which may be a `pytest.param` without marks."""
    if isinstance(given, _PARAM):
        assert not given.marks, given
        return tuple(given.values)
    return (given,) if is_one else tuple(given)


def _own(fixtures: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the fixtures with a folder of the input's own."""
    if "tmp_path" not in fixtures:
        return fixtures
    folder = fixtures["tmp_path"] / str(number)
    folder.mkdir()
    return fixtures | {"tmp_path": folder}


def _error(body: Callable[..., None], arguments: dict[str, Any]) -> BaseException | None:
    with pytest.MonkeyPatch.context() as patch:
        if "monkeypatch" in arguments:
            arguments = arguments | {"monkeypatch": patch}
        try:
            body(**arguments)
        except (Exception, pytest.fail.Exception) as error:
            return error
    return None


def _shown(value: Any) -> str:
    return _short(getattr(value, "__name__", None) or repr(value))


def _short(text: str) -> str:
    words = " ".join(text.split())
    return words if len(words) <= 200 else f"{words[:200]}..."
