"""The real grain reads our sources: the same batches on any number of workers and hosts."""

from __future__ import annotations

import itertools
import json
import os
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex.adapters.grain import BatchSource, SampleSource
from megaindex.loader.numpy_dataset import Fields, NumpyDataset
from megaindex.loader.samplers import RandomAccessSampler
from megaindex.recipe import open_recipe, read_recipe

S, HOSTS, MICRO = 16, 3, 4


@pytest.fixture(scope="session")
def grain() -> Any:
    if os.environ.get("MEGAINDEX_SANITIZE") == "1":
        pytest.skip("grain does not run under the sanitizers")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("grain")


@pytest.fixture(scope="module")
def samples(tmp_path_factory: pytest.TempPathFactory) -> NumpyDataset:
    """62 samples of one epoch."""
    prefix = tmp_path_factory.mktemp("grain") / "web"
    rng = np.random.default_rng(4)
    dataset = write_corpus(prefix, rng.multinomial(62 * S + 1, [1 / 50] * 50))
    index = megaindex.build_index(str(prefix), sequence_length=S, seed=3, epochs=1, order="epoch")
    assert index.num_samples == 62
    return NumpyDataset(index, [dataset], fields="maxtext")


def batches_of(host: int, hosts: int = HOSTS, **more: Any) -> RandomAccessSampler:
    return RandomAccessSampler(
        num_samples=62, micro_batch_size=MICRO, data_parallel_rank=host,
        data_parallel_size=hosts, **more,
    )  # fmt: skip


def assert_equal(theirs: Iterable[Fields], ours: Iterable[Fields]) -> None:
    for got, expected in zip(theirs, ours, strict=True):
        assert got.keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_array_equal(got[name], array)


def test_a_map_dataset_of_samples(grain: Any, samples: NumpyDataset) -> None:
    source = SampleSource(samples)
    assert len(source) == 62
    dataset = grain.MapDataset.source(source).batch(MICRO, drop_remainder=True)
    expected = [samples.__getitems__(range(k, k + MICRO)) for k in range(0, 60, MICRO)]
    assert_equal([dataset[k] for k in range(len(dataset))], expected)


@pytest.mark.parametrize("tail", ["drop", "pad"])
def test_hosts_have_equally_many_batches_and_no_loss_on_padding(
    grain: Any, samples: NumpyDataset, tail: str
) -> None:
    """62 samples make 5 whole batches of 12, and one of 2. Slices of grain give the hosts 21, 21
    and 20 samples, so the last one is a batch short, whatever is done about remainders."""
    sliced = [
        len(grain.MapDataset.source(SampleSource(samples))[host::HOSTS].batch(1))
        for host in range(HOSTS)
    ]
    assert sliced == [21, 21, 20]
    rows, served = [], []
    for host in range(HOSTS):
        batches = batches_of(host, tail=tail)
        read = list(grain.MapDataset.source(BatchSource(samples, batches)).to_iter_dataset())
        assert_equal(read, [samples.__getitems__(ids) for ids in batches])
        loss = np.concatenate([batch["targets_segmentation"].any(axis=1) for batch in read])
        ids = [i for each in batches for i in each]
        assert loss.tolist() == [i is not None for i in ids]
        rows.append(len(ids))
        served += [i for i in ids if i is not None]
    assert rows == [20 + 4 * (tail == "pad")] * HOSTS
    assert sorted(served) == list(range(60 + 2 * (tail == "pad")))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_data_loader_with_workers_reads_the_same_batches(
    grain: Any, samples: NumpyDataset, workers: int
) -> None:
    batches = batches_of(1)
    source = BatchSource(samples, batches)
    sampler = grain.samplers.SequentialSampler(len(source), grain.sharding.NoSharding())
    loader = grain.DataLoader(data_source=source, sampler=sampler, worker_count=workers)
    assert_equal(loader, [samples.__getitems__(ids) for ids in batches])


def test_a_run_goes_on_from_grains_checkpoint(
    grain: Any, samples: NumpyDataset, tmp_path: Path
) -> None:
    """And grain refuses a checkpoint of another order, which only its name tells."""

    def iterator(fingerprint: str) -> Any:
        source = BatchSource(samples, batches_of(0), fingerprint=fingerprint)
        sampler = grain.samplers.SequentialSampler(len(source), grain.sharding.NoSharding())
        return iter(grain.DataLoader(data_source=source, sampler=sampler, worker_count=0))

    first = iterator("order one")
    taken = [next(first), next(first)]
    state = first.get_state()
    assert "order one" in json.loads(state)["data_source"]
    again = iterator("order one")
    again.set_state(state)
    assert_equal([*taken, *again], [samples.__getitems__(ids) for ids in batches_of(0)])
    with pytest.raises(ValueError, match="data source"):
        iterator("order two").set_state(state)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> NumpyDataset:
    """100 samples of a corpus and of whole documents of another one."""
    folder = tmp_path_factory.mktemp("mixture")
    rng = np.random.default_rng(6)
    write_corpus(folder / "web", rng.integers(5, 60, 80))
    write_corpus(folder / "chat", rng.integers(3, 30, 60))
    (folder / "run.yaml").write_text(
        "sequence_length: 16\nbatch: {micro_batch_size: 4, data_parallel_size: 3}\n"
        "sources: {web: web, chat: {path: chat, order: packed}}\ntail: pad\n"
        "stages: {all: {samples: 100, mix: {web: 2, chat: 1}}}\n"
    )
    index = open_recipe(read_recipe(folder / "run.yaml")).index
    assert set(index.locate(np.arange(100)).source.tolist()) == {0, 1}
    return NumpyDataset(index, fields="maxtext")


def test_a_mixture_with_packing_goes_on_with_other_hosts(grain: Any, mixture: NumpyDataset) -> None:
    """Three hosts read two steps, two go on for three, and one reads the rest: in each step the
    rows of all hosts are those that one host reads."""
    begin = 0
    for hosts, micro, steps in ((3, 4, 2), (2, 6, 3), (1, 12, 4)):
        rows = []
        for host in range(hosts):
            batches = RandomAccessSampler(
                num_samples=100, micro_batch_size=micro, data_parallel_rank=host,
                data_parallel_size=hosts, tail="pad", consumed_samples=begin,
            )  # fmt: skip
            dataset = grain.MapDataset.source(BatchSource(mixture, batches)).to_iter_dataset()
            rows.append(list(itertools.islice(dataset, steps)))
        for each in zip(*rows, strict=True):
            ids = [i if i < 100 else None for i in range(begin, begin + 12)]
            joined = {name: np.concatenate([batch[name] for batch in each]) for name in each[0]}
            assert_equal([joined], [mixture.__getitems__(ids)])
            begin += 12
    assert begin == 108  # the last eight rows are padding


def test_grains_elastic_iterator_reads_a_mixture_with_packing(
    grain: Any, mixture: NumpyDataset
) -> None:
    """Of MaxText's `grain_use_elastic_iterator`: it refuses what packs or mixes in grain itself.
    Its hosts take every h-th sample of a step."""
    from grain.experimental import ElasticIterator

    state: Any = None
    begin = 0
    for hosts, steps in ((3, 2), (2, 3), (4, 3)):
        dataset = grain.MapDataset.source(SampleSource(mixture))
        shards = [grain.sharding.ShardOptions(host, hosts) for host in range(hosts)]
        iterators = [ElasticIterator(dataset, 12, shard) for shard in shards]
        for iterator in iterators:
            if state is not None:
                iterator.set_state(state)
        for _ in range(steps):
            for host, iterator in enumerate(iterators):
                ids = range(begin + host, begin + 12, hosts)
                assert_equal([next(iterator)], [mixture.__getitems__(ids)])
            begin += 12
        states = [iterator.get_state() for iterator in iterators]
        assert states == [{"global_next_index": begin}] * hosts
        state = states[-1]


def test_other_hosts_go_on_from_the_samples_consumed(samples: NumpyDataset) -> None:
    """A run of 3 hosts goes on with 2, or 1, from the end of any step."""
    first = [i for host in range(HOSTS) for ids in batches_of(host)[:2] for i in ids]
    assert sorted(i for i in first if i is not None) == list(range(24))
    for hosts in (1, 2):
        rest = [
            i for host in range(hosts)
            for ids in batches_of(host, hosts, consumed_samples=24, tail="pad") for i in ids
        ]  # fmt: skip
        assert sorted(i for i in rest if i is not None) == list(range(24, 62))
