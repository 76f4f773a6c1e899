"""Pairs written by hand, to break any part of them; calls that fail; children that crash."""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

RawPair = Callable[..., str]


@pytest.fixture
def raw_pair(tmp_path: Path) -> RawPair:
    """`raw_pair(lengths, pointers=…, …)` writes train.bin and train.idx; returns the prefix."""

    def write(
        lengths: Sequence[int] = (3, 0, 2),
        *,
        pointers: Sequence[int] | None = None,
        bounds: Sequence[int] | None = None,
        modes: Sequence[int] | None = None,
        code: int = 4,
        magic: bytes = b"MMIDIDX\0\0",
        version: int = 1,
        counts: tuple[int, int] | None = None,
        data: bytes | None = None,
        tail: bytes = b"",
        cut: int | None = None,
        name: str = "train",
    ) -> str:
        sizes = np.array(lengths, dtype=np.int32)
        ends = np.cumsum(sizes, dtype=np.int64)
        if pointers is None:
            pointers = ((ends - sizes) * 4).tolist()
        if bounds is None:
            bounds = range(len(sizes) + 1)
        if data is None:
            total = int(ends[-1]) if len(ends) else 0
            data = np.arange(100, 100 + total, dtype=np.int32).tobytes()
        n, m = counts or (len(sizes), len(bounds))
        parts: list[Any] = [
            struct.pack("<9sQBQQ", magic, version, code, n, m),
            sizes.tobytes(),
            np.array(pointers, dtype=np.int64).tobytes(),
            np.array(bounds, dtype=np.int64).tobytes(),
            np.array(modes or [], dtype=np.int8).tobytes(),
            tail,
        ]
        (tmp_path / f"{name}.idx").write_bytes(b"".join(parts)[:cut])
        (tmp_path / f"{name}.bin").write_bytes(data)
        return str(tmp_path / name)

    return write


@pytest.fixture
def in_child() -> Callable[[Callable[[], Any]], str]:
    """Run a function in a forked process; the text of what it raised, or "exit n", or ""."""
    return run_in_child


def run_in_child(function: Callable[[], Any]) -> str:
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            function()
        except BaseException as error:
            os.write(send, f"{type(error).__name__}: {error}".encode())
        os._exit(0)
    os.close(send)
    with os.fdopen(receive, "rb") as stream:
        said = stream.read().decode()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return said or (f"exit {status}" if status else "")


@pytest.fixture
def fail_call(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, Callable[[], Any]], None]:
    """`fail_call("fsync", 2, act)` lets the second call of os.fsync do `act` instead."""

    def patch(name: str, number: int, act: Callable[[], Any]) -> None:
        real, calls = getattr(os, name), iter(range(1, 1000))
        thread = threading.get_ident()  # others sync cache entries in the background

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            mine = threading.get_ident() == thread
            return act() if mine and next(calls) == number else real(*args, **kwargs)

        monkeypatch.setattr(os, name, wrapped)

    return patch
