"""Adapter for GPT-NeoX's data loaders.

    import megaindex.adapters.neox
    megaindex.adapters.neox.install()        # before GPT-NeoX builds its data loaders

Every batch is the one that GPT-NeoX would serve, and the index arrays have its file names, so a run
can start with the adapter and continue without it, or the other way round. The file
``…-megaindex.json`` beside the arrays records their corpus, to detect one that changed. megaindex
builds indices, blends and reads; a resumed run does not iterate over earlier batches, and batches
are read again where GPT-NeoX keeps every batch of an epoch in memory.

``install(variance_buffer=…, separate_final_epoch=…)`` sets the number of samples requested of each
source, and the shuffling of its epochs. With ``install(exact=True)`` these change:

- a sample that does not exist raises OutOfRange; GPT-NeoX serves another (modulo)
- each source of a blend is built for the samples that the blend draws of it instead of N·w·1.005,
  unless variance_buffer is given
- the length of a dataset is its number of samples; GPT-NeoX's is one less
- with train_epochs each epoch has another order, the first that of GPT-NeoX; each source of a blend
  is served once in each; a resumed run continues in its epoch
- a sample of whole documents holds no token of the next one, and a part of a split no documents of
  another; the names of such arrays end in ``_exact``
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
