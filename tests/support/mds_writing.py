"""The real MDSWriter of mosaicml-streaming, without the cloud clients that its package loads."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import distribution
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest


def write_mds(
    folder: Path, columns: dict[str, str], samples: list[dict[str, Any]], **options: Any
) -> str:
    """Write shards of 9000 bytes, unless said otherwise, and index.json into a new folder."""
    options = {"columns": columns, "out": str(folder), "size_limit": 9000, **options}
    with _loaded() as writer_class, writer_class(**options) as writer:
        for sample in samples:
            writer.write(sample)
    return str(folder)


@contextmanager
def _loaded() -> Iterator[Any]:
    """MDSWriter, whose modules look one another up in sys.modules while it works."""
    modules = _modules()
    sys.modules.update(modules)
    try:
        yield modules["streaming.base.format.mds.writer"].MDSWriter
    finally:
        for name in modules:
            del sys.modules[name]


@cache
def _modules() -> dict[str, Any]:
    """Its modules run as they stand; the packages around them are not initialised, and the
    compressors and the progress bar they import are replaced."""
    root = str(distribution("mosaicml-streaming").locate_file("streaming"))
    stand_ins: dict[str, Any] = {name: MagicMock() for name in ("brotli", "snappy", "tqdm")}
    stand_ins["zstd"] = _zstd()
    for name, path in (("streaming", root), ("streaming.base", f"{root}/base")):
        stand_ins[name] = ModuleType(name)
        stand_ins[name].__path__ = [path]
    sys.modules.update(stand_ins)
    try:
        importlib.import_module("streaming.base.format.mds.writer")
    finally:
        ours = [name for name in sys.modules if name in stand_ins or name.startswith("streaming.")]
        modules = {name: sys.modules.pop(name) for name in ours}
    return modules


def _zstd() -> Any:
    """The `zstd` package is one function; `zstandard`, which reads here, writes the same frames."""
    zstandard = pytest.importorskip("zstandard")
    return SimpleNamespace(
        compress=lambda data, level: zstandard.ZstdCompressor(level=level).compress(data)
    )
