"""megaindex under GPT-NeoX's own data loaders.

    import megaindex.adapters.neox
    megaindex.adapters.neox.install()        # before GPT-NeoX builds its data loaders

Every batch is the one that GPT-NeoX would serve, and the index arrays have its file names, so a run
may begin with and go on without, or the other way round. What identifies the arrays is kept beside
them in ``…-megaindex.json``: a corpus that changed is noticed. Index building, blending and reading
are megaindex's; a resumed run does not count through the batches before; and batches are read again
where GPT-NeoX keeps every batch of an epoch in memory.

``install(variance_buffer=…, separate_final_epoch=…)`` sets what each source is asked for, and how
its epochs are shuffled. With ``install(exact=True)`` these change:

- a sample that is not there raises OutOfRange; none is served in its place (modulo)
- a source of a blend is asked for the samples that the blend draws, not for N·w·1.005, unless
  variance_buffer says otherwise
- a dataset has the samples it has; GPT-NeoX counts one less
- train_epochs are epochs: each in an order of its own, the first in GPT-NeoX's; each source of a
  blend once in each; a resumed run goes on in its epoch
- a sample of whole documents holds no token of the next one, and a part of a split no documents of
  another; such arrays have names that end in ``_exact``
"""

from megaindex._lazy import lazy_exports

lazy_exports(__name__)
