"""megaindex under Megatron-LM and megatron-core: the same samples in the same order, faster.

    import megaindex.adapters.megatron as adapter
    adapter.install()

replaces how ``megatron.core.datasets`` builds, caches and reads its indices; `uninstall` puts
everything back. Settings of `install` change what is asked of each source, and how its last epoch
is shuffled. ``python -m megaindex.adapters.megatron -- pretrain_gpt.py …`` runs a script with it
installed. Without touching Megatron, the classes here are its own with the methods of megaindex:
``from megaindex.adapters.megatron import GPTDataset, BlendedMegatronDatasetBuilder``.
"""

from __future__ import annotations

from typing import Any

_FUNCTIONS = ("install", "is_installed", "uninstall")

__all__ = [
    "BlendedDataset",
    "BlendedMegatronDatasetBuilder",
    "GPTDataset",
    "IndexedDataset",
    "IndexedDatasetBuilder",
    "install",
    "is_installed",
    "uninstall",
]


def __getattr__(name: str) -> Any:  # Megatron and torch are loaded only for what needs them
    if name in _FUNCTIONS:
        from megaindex.adapters.megatron import patches

        return getattr(patches, name)
    if name in __all__:
        from megaindex.adapters.megatron import core, patches

        del patches  # whose import registers the methods
        return core.load_class(name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
