"""The real grain reads our sources: the same batches on any number of workers and hosts."""

from __future__ import annotations

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
