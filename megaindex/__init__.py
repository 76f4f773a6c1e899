"""Exact data order for Megatron-format corpora: plan a run, build its index, read its batches.

    import megaindex
    corpus = megaindex.IndexedDataset("/data/my_corpus_text_document")
    index = megaindex.build_index(corpus, sequence_length=2048, seed=1234, epochs=1)
    sampler = megaindex.loader.MicroBatchSampler(num_samples=index.num_samples,
        micro_batch_size=4, data_parallel_rank=0, data_parallel_size=8)
    for batch in megaindex.loader.Loader(index, sampler): print(batch["tokens"])

`make_plan` computes the iterations and epochs of a run beforehand. Other public names are in
`megaindex.plan`, `megaindex.recipe`, `megaindex.loader`, `megaindex.corpus`, `megaindex.audit`,
`megaindex.keys`, `megaindex.helpers` and the adapters of each framework, such as
`megaindex.adapters.megatron`. Names are imported on first use: importing the package loads none of
numpy, numba and torch.
"""

from megaindex._lazy import lazy_exports

__version__ = "1.0.0"
lazy_exports(__name__)
