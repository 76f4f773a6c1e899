"""Read with worker processes in torchdata's StatefulDataLoader, and resume within the epoch."""

from torchdata.stateful_dataloader import StatefulDataLoader

from megaindex.loader import collate
from megaindex.lock import open_run


def make_loader() -> StatefulDataLoader:
    run = open_run("run.lock", data_parallel_rank=0, data_parallel_size=1)  # of `megaindex lock`
    # the loader's state includes that of the sampler, which any number of ranks may load
    return StatefulDataLoader(
        run.dataset(), batch_sampler=run.sampler, collate_fn=collate, num_workers=2
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
