"""The modules of megatron-core, imported once, and what differs between its versions."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from megaindex.errors import InvalidArgument

_PACKAGE = "megatron.core.datasets"


@dataclass(frozen=True, kw_only=True)
class Core:
    """``megatron.core.datasets``, and its own functions as they were before anything was patched.

    ``originals`` has them by class and name: ``originals["GPTDataset", "__getitem__"]``.
    """

    helpers: ModuleType
    indexed_dataset: ModuleType
    gpt_dataset: ModuleType
    blended_dataset: ModuleType
    builder: ModuleType
    originals: dict[tuple[str, str], Callable[..., Any]]

    def is_plain(self, cls: type, base: str, *names: str) -> bool:
        """Whether a class has these methods of Megatron's class ``base`` from Megatron or from
        here, not from a subclass of the user's own.

        Functions are compared, not what they say of themselves: one that wraps Megatron's says the
        same.
        """
        from megaindex.adapters.megatron.classes import METHODS

        return all(
            getattr(cls, name, None) in (self.originals.get((base, name)), METHODS[base].get(name))
            for name in names
        )


@functools.cache
def core() -> Core:
    """megatron-core's dataset modules.

    Raises:
        InvalidArgument: megatron-core cannot be imported.
    """
    try:
        helpers, indexed, gpt, blended, builder = (
            importlib.import_module(f"{_PACKAGE}.{name}")
            for name in (
                "helpers",
                "indexed_dataset",
                "gpt_dataset",
                "blended_dataset",
                "blended_megatron_dataset_builder",
            )
        )
    except ImportError as error:
        raise InvalidArgument(
            f"{_PACKAGE} cannot be imported ({error}); install megatron-core, or put a checkout "
            "of Megatron-LM on PYTHONPATH"
        ) from error
    classes = (
        indexed.IndexedDataset,
        indexed.IndexedDatasetBuilder,
        indexed._IndexWriter,
        gpt.GPTDataset,
        blended.BlendedDataset,
        builder.BlendedMegatronDatasetBuilder,
    )
    originals = {
        (owner.__name__, name): function.__func__
        if isinstance(function, staticmethod)
        else function
        for owner in classes
        for name, function in vars(owner).items()
        if callable(function) or isinstance(function, staticmethod)
    }
    return Core(
        helpers=helpers,
        indexed_dataset=indexed,
        gpt_dataset=gpt,
        blended_dataset=blended,
        builder=builder,
        originals=originals,
    )


def is_built_here(is_built_on_rank: Callable[[], bool]) -> bool:
    """Whether this process is to have the dataset."""
    distributed = importlib.import_module("torch.distributed")
    return not distributed.is_initialized() or bool(is_built_on_rank())
