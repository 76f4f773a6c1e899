"""Megatron-Bridge's data loaders on CPU.

In the place of transformer_engine, which needs CUDA, is a package of empty classes.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import megatron.core.datasets.gpt_dataset
import megatron.core.distributed
import megatron.core.models.gpt
import megatron.core.optimizer  # noqa: F401  before it finds a transformer_engine
import torch


class _Empty(type):
    """A class with a class for every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Empty(name, (), {})

    def __or__(cls, other: Any) -> Any:
        return cls


class _Package(ModuleType):
    __path__: list[str] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(_Empty("", (), {}), name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> Any:
        if name.partition(".")[0] != "transformer_engine":
            return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> ModuleType:
        return _Package(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.insert(0, _Finder())

from megatron.bridge.data import loaders, utils  # noqa: E402
from megatron.bridge.data.samplers import build_pretraining_data_loader  # noqa: E402
from megatron.bridge.training.config import GPTDatasetConfig, TrainingConfig  # noqa: E402
from megatron.bridge.training.state import TrainState  # noqa: E402

__all__ = [
    "GPTDatasetConfig",
    "TrainState",
    "TrainingConfig",
    "build_pretraining_data_loader",
    "loaders",
    "utils",
]


class _OnCpu(ModuleType):
    """PyTorch, which makes its tensors on the CPU."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    @staticmethod
    def tensor(*args: Any, **settings: Any) -> torch.Tensor:
        return torch.tensor(*args, **{**settings, "device": "cpu"})


loaders.torch = _OnCpu("torch")
