"""Read with worker processes in torchdata's StatefulDataLoader, and resume within the epoch."""

from torchdata.stateful_dataloader import StatefulDataLoader

import megaindex
from megaindex.loader import GPTDataset, MicroBatchSampler, collate


def make_loader() -> StatefulDataLoader:
    corpus = megaindex.IndexedDataset("my_corpus")
    index = megaindex.build_index(corpus, sequence_length=128, epochs=1, order="epoch")
    sampler = MicroBatchSampler(
        num_samples=index.num_samples,
        micro_batch_size=4,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    # the loader's state includes that of the sampler
    return StatefulDataLoader(
        GPTDataset(index, corpus), batch_sampler=sampler, collate_fn=collate, num_workers=2
    )


if __name__ == "__main__":
    loader = make_loader()
    batches = iter(loader)
    first = [next(batches)["tokens"] for _ in range(3)]
    state = loader.state_dict()  # batches read ahead do not count
    expected = next(batches)["tokens"]

    resumed = make_loader()
    resumed.load_state_dict(state)
    rest = [batch["tokens"] for batch in resumed]
    print(f"{len(first)} and {len(rest)} batches, continued: {rest[0].equal(expected)}")
