"""megaindex decides which token of a Megatron-format corpus is trained on when, exactly.

Names are resolved on first use: importing the package loads none of numpy, numba and torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megaindex.build import build_index
    from megaindex.build.blend import build_blend
    from megaindex.build.extend import extend_run
    from megaindex.corpus.tokenize import tokenize
    from megaindex.errors import (
        EngineError,
        FormatError,
        InvalidArgument,
        MegaIndexError,
        MissingFile,
        OutOfRange,
        StorageError,
    )
    from megaindex.format import IndexedDataset, IndexedDatasetWriter
    from megaindex.kernels import backend

__version__ = "0.1.0"

_HOMES = {
    "EngineError": "megaindex.errors",
    "FormatError": "megaindex.errors",
    "IndexedDataset": "megaindex.format",
    "IndexedDatasetWriter": "megaindex.format",
    "InvalidArgument": "megaindex.errors",
    "MegaIndexError": "megaindex.errors",
    "MissingFile": "megaindex.errors",
    "OutOfRange": "megaindex.errors",
    "StorageError": "megaindex.errors",
    "backend": "megaindex.kernels",
    "build_blend": "megaindex.build.blend",
    "build_index": "megaindex.build",
    "extend_run": "megaindex.build.extend",
    "tokenize": "megaindex.corpus.tokenize",
}

__all__ = [
    "EngineError",
    "FormatError",
    "IndexedDataset",
    "IndexedDatasetWriter",
    "InvalidArgument",
    "MegaIndexError",
    "MissingFile",
    "OutOfRange",
    "StorageError",
    "__version__",
    "backend",
    "build_blend",
    "build_index",
    "extend_run",
    "tokenize",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'megaindex' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
