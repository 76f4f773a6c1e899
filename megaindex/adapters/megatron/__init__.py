"""megaindex under Megatron-LM and megatron-core: the same samples in the same order, faster.

    import megaindex.adapters.megatron as adapter
    adapter.install()

replaces how ``megatron.core.datasets`` builds, caches and reads its indices; `uninstall` puts
everything back. Settings of `install` change what is asked of each source, and how its last epoch
is shuffled. ``python -m megaindex.adapters.megatron -- pretrain_gpt.py …`` runs a script with it
installed. Without touching Megatron, the classes here are its own with the methods of megaindex:
``from megaindex.adapters.megatron import GPTDataset, BlendedMegatronDatasetBuilder``.
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
