"""What the examples of docs/reading.md need: run before them."""

import numpy as np

import megaindex

for name in ("web", "code"):
    with megaindex.IndexedDatasetWriter(name, dtype="uint16") as writer:
        for length in np.random.default_rng(len(name)).integers(50, 400, 300):
            writer.add_document(np.arange(length))
corpus = megaindex.IndexedDataset("web")
index = megaindex.build_index(corpus, sequence_length=128, epochs=1, order="epoch")
rank, ranks, checkpoint = 0, 1, {}
log = print


def train(batch):
    pass


class Distributed:
    @staticmethod
    def all_gather_object(states, state):
        states[:] = [state]
