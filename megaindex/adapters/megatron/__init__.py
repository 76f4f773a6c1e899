"""Adapter for Megatron-LM and megatron-core: the same samples in the same order, built faster.

    import megaindex.adapters.megatron as adapter
    adapter.install()

replaces the functions of ``megatron.core.datasets`` that build, cache and read indices; `uninstall`
restores them. Settings of `install` change the number of samples requested of each source, and the
shuffling of its last epoch. ``python -m megaindex.adapters.megatron -- pretrain_gpt.py …`` runs a
script with the adapter installed. Without `install`, the classes of this package are subclasses of
Megatron's with megaindex's methods:
``from megaindex.adapters.megatron import GPTDataset, BlendedMegatronDatasetBuilder``.
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
