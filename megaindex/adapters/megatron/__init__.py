"""Adapter for Megatron-LM and megatron-core: the same samples in the same order, built faster.

    import megaindex.adapters.megatron as adapter
    adapter.install()

replaces the functions of ``megatron.core.datasets`` that build, cache and read indices; `uninstall`
restores them. Settings of `install` change the number of samples requested of each source, and the
shuffling of its last epoch. ``python -m megaindex.adapters.megatron -- pretrain_gpt.py …`` runs a
script with the adapter installed.

To use megaindex in part and without `install`, import ``GPTDataset``, ``BlendedDataset``,
``BlendedMegatronDatasetBuilder``, ``IndexedDataset`` or ``IndexedDatasetBuilder`` of this package:
subclasses of Megatron's classes with megaindex's methods and Megatron's parameters.
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
