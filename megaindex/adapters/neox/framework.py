"""GPT-NeoX's data modules, and its own functions as they were before anything was replaced."""

from __future__ import annotations

import functools
import importlib
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from megaindex.adapters.policy import Policy, make_policy
from megaindex.adapters.reports import on_rank_0
from megaindex.errors import InvalidArgument

_PACKAGE = "megatron.data"


@dataclass(kw_only=True)
class NeoxFramework:
    """The modules of ``megatron.data``."""

    package: ModuleType
    gpt2_dataset: ModuleType
    pairwise_dataset: ModuleType
    blendable_dataset: ModuleType
    indexed_dataset: ModuleType
    samplers: ModuleType
    data_utils: ModuleType
    exact: bool = False
    """See `install`."""
    policy: Policy = field(default_factory=functools.partial(make_policy, "neox", *[None] * 3))
    """The samples requested of each source, and the shuffling of its epochs."""
    originals: dict[tuple[str, ...], Any] = field(default_factory=dict)
    """Replaced objects by (module, name) or (module, class, name)."""

    def is_own(self, dataset: Any) -> bool:
        """Return whether a low-level dataset is of GPT-NeoX's classes or a subclass of one."""
        module = self.indexed_dataset
        return isinstance(dataset, (module.MMapIndexedDataset, module.IndexedDataset))

    def print_line(self, text: str) -> None:
        """Print as GPT-NeoX does, on rank 0."""
        theirs = getattr(self.data_utils, "print_rank_0", None)
        if theirs is not None:
            theirs(text)
        elif on_rank_0():
            print(text, flush=True)

    def original(self, *names: str) -> Any:
        """Return GPT-NeoX's own function of that name."""
        if names in self.originals:
            return self.originals[names]
        owner: Any = getattr(self, names[0])
        for name in names[1:]:
            owner = getattr(owner, name)
        return owner


@functools.cache
def framework() -> NeoxFramework:
    """Return GPT-NeoX's data modules.

    Raises:
        InvalidArgument: they cannot be imported.
    """
    names = (
        "indexed_dataset",
        "gpt2_dataset",
        "pairwise_dataset",
        "blendable_dataset",
        "samplers",
        "data_utils",
    )
    try:
        modules: dict[str, Any] = {
            name: importlib.import_module(f"{_PACKAGE}.{name}") for name in names
        }
        package = importlib.import_module(_PACKAGE)
    except ImportError as error:
        raise InvalidArgument(
            f"{_PACKAGE} cannot be imported ({error}); put a checkout of GPT-NeoX on PYTHONPATH, "
            "and install what it needs"
        ) from error
    return NeoxFramework(package=package, **modules)
