"""Batches read from a bucket against those read from a disk."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.examples import one_in
from support.object_server import Proxy, request, slow_to_send, upload
from torch.utils.data import DataLoader

import megaindex
from megaindex.builders.blend import build_blend
from megaindex.errors import InvalidArgument, StorageError
from megaindex.format import IndexedDataset
from megaindex.index.spans import Spans
from megaindex.loader import GPTDataset, Loader, MicroBatchSampler, collate
from megaindex.loader.numpy_dataset import NumpyDataset
from megaindex.loader.positional_reader import PositionalOptions, PositionalTokens, plain_reader
from megaindex.objects.store import _copied


def gather(dataset: IndexedDataset, spans: Spans, width: int, pad_id: int) -> np.ndarray:
    """The tokens of located samples, int64[samples, width]."""
    out = np.empty((spans.row_splits.size - 1, width), np.int64)
    plain_reader([dataset]).read(spans, out, pad_id=pad_id)
    return out


def batches(index: Any, datasets: Any, **how: Any) -> list[torch.Tensor]:
    sampler = MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=4, data_parallel_rank=0,
        data_parallel_size=1,
    )  # fmt: skip
    loader = Loader(index, datasets, sampler, **how)
    got = [batch["tokens"].clone() for batch in loader]
    assert got
    return got


def check_equal(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@one_in(3)
@given(
    lengths=st.lists(st.integers(0, 90), min_size=3, max_size=30),
    dtype=st.sampled_from([np.uint16, np.int32]),
    order=st.sampled_from(["megatron", "epoch", "window"]),
    length=st.integers(1, 40),
    gap=st.sampled_from([0, 64, None]),
    limit=st.sampled_from([64, 1 << 20]),
    seed=st.integers(0, 9),
)
def test_every_order_reads_the_same_tokens(
    s3: str, proxy: Proxy, tmp_path: Path, lengths: list[int], dtype: Any, order: str,
    length: int, gap: int | None, limit: int, seed: int,
) -> None:  # fmt: skip
    lengths[0] = 100
    (tmp_path / "c").mkdir(exist_ok=True)
    for old in (tmp_path / "c").iterdir():
        old.unlink()
    local = write_corpus(tmp_path / "c" / "corpus", lengths, dtype)
    url = upload(proxy.upstream, s3, "hypothesis", tmp_path / "c" / "corpus")
    asked: dict[str, Any] = {"sequence_length": length, "seed": seed, "order": order}
    ours, theirs = megaindex.build_index(url, **asked), megaindex.build_index(local, **asked)
    reader = PositionalTokens(
        [IndexedDataset(url)],
        PositionalOptions(threads=3, merge_gap=gap, bytes_in_flight=limit),
    )
    try:
        ids = np.random.default_rng(seed).integers(0, ours.num_samples, 12)
        shape = (ids.size, length)
        got, labels = np.empty(shape, np.int64), np.empty(shape, np.int64)
        reader.read(ours.locate(ids), got, labels, pad_id=-7)
    finally:
        reader.close()
    expected = gather(local, theirs.locate(ids), length + 1, -7)
    np.testing.assert_array_equal(got, expected[:, :-1])
    np.testing.assert_array_equal(labels, expected[:, 1:])


@pytest.mark.slow
def test_loaders_choose_by_themselves(store: Any) -> None:
    local, url = store()
    remote = IndexedDataset(url)
    index = megaindex.build_index(url, sequence_length=24, seed=2)
    expected = batches(index, local, reader="mapped")
    check_equal(batches(index, remote), expected)
    check_equal(batches(index, remote, reader="positional", read_ahead=0), expected)
    with pytest.raises(InvalidArgument, match=rf"{url}: lies in an object store"):
        batches(index, remote, reader="mapped")
    ids = list(range(6))
    np.testing.assert_array_equal(
        NumpyDataset(index, [remote]).__getitems__(ids)["tokens"],
        NumpyDataset(index, [local]).__getitems__(ids)["tokens"],
    )
    spans = index.locate(ids)
    np.testing.assert_array_equal(gather(remote, spans, 25, 0), gather(local, spans, 25, 0))


def test_files_and_objects_in_one_blend(store: Any, tmp_path: Path) -> None:
    local, url = store()
    disk = write_corpus(tmp_path / "disk", [50] * 40)
    asked: dict[str, Any] = {
        "weights": [0.7, 0.3], "num_samples": 120, "sequence_length": 24, "seed": 2,
    }  # fmt: skip
    expected = build_blend([local, disk], **asked)
    blend = build_blend([url, disk.path_prefix], cache_dir=tmp_path / "indices", **asked)
    want = batches(expected, [local, disk], reader="mapped")
    check_equal(batches(blend, blend.datasets), want)
    # opened again from its snapshot, as long as the object is what it was
    again = build_blend([url, disk.path_prefix], cache_dir=tmp_path / "indices", **asked)
    assert not any(dataset.is_open for dataset in again.datasets)
    check_equal(batches(again, again.datasets), want)


def test_a_snapshot_of_a_replaced_object_is_not_used(
    store: Any, s3: str, proxy: Proxy, tmp_path: Path
) -> None:
    _, url = store()
    asked: dict[str, Any] = {
        "weights": [1.0], "num_samples": 20, "sequence_length": 24, "seed": 2,
        "cache_dir": tmp_path / "indices",
    }  # fmt: skip
    build_blend([url], **asked)
    assert not build_blend([url], **asked).datasets[0].is_open
    replace(proxy, s3, tmp_path)
    assert build_blend([url], **asked).datasets[0].is_open


@pytest.mark.slow
def test_many_sources_are_looked_at_together(store: Any, proxy: Proxy, tmp_path: Path) -> None:
    local, url = store(lengths=[40] * 20)
    asked: dict[str, Any] = {
        "weights": [1.0] * 12, "num_samples": 60, "sequence_length": 24, "seed": 2,
    }  # fmt: skip
    proxy.latency = 0.03
    blend = build_blend([url] * 12, cache_dir=tmp_path / "indices", **asked)
    assert proxy.in_flight() > 4
    proxy.seen.clear()
    again = build_blend([url] * 12, cache_dir=tmp_path / "indices", **asked)
    assert (len(proxy.seen), proxy.in_flight() > 4) == (24, True)
    want = batches(build_blend([local] * 12, **asked), [local] * 12, reader="mapped")
    check_equal(batches(blend, blend.datasets), want)
    check_equal(batches(again, again.datasets), want)


def replace(proxy: Proxy, bucket: str, tmp_path: Path) -> None:
    """Other tokens in a .bin of the same size."""
    content = bytearray((tmp_path / "corpus.bin").read_bytes())
    content[:4] = b"\7\7\7\7"
    request(proxy.upstream, "PUT", f"/{bucket}/data/corpus.bin", bytes(content))


@pytest.mark.parametrize("knows_conditions", [True, False])
def test_an_object_replaced_between_plan_and_read_is_not_served(
    store: Any, s3: str, proxy: Proxy, tmp_path: Path, knows_conditions: bool
) -> None:
    _, url = store()
    remote = IndexedDataset(url)
    index = megaindex.build_index(remote, sequence_length=24, seed=2)
    replace(proxy, s3, tmp_path)
    proxy.drops_conditions = not knows_conditions
    served: list[Any] = []
    with pytest.raises(StorageError, match=rf"^{url}\.bin: changed since it was opened"):
        served.extend(batches(index, remote))
    assert served == []


@pytest.mark.slow
def test_batches_of_the_future_are_in_flight_together(store: Any, proxy: Proxy) -> None:
    local, url = store(lengths=[3_000] * 400)
    index = megaindex.build_index(url, sequence_length=1000, seed=2, order="epoch")
    remote = IndexedDataset(url)
    proxy.seen.clear()
    proxy.latency = 0.05
    sampler = [list(range(4 * k, 4 * k + 4)) for k in range(16)]
    got = [batch["tokens"].clone() for batch in Loader(index, remote, sampler)]
    assert proxy.in_flight() > 8  # more than two batches of four rows
    want = [b["tokens"].clone() for b in Loader(index, local, sampler, reader="mapped")]
    check_equal(got, want)


@pytest.mark.slow
def test_one_request_for_neighbours_several_for_long_ones(store: Any, proxy: Proxy) -> None:
    local, url = store(lengths=[100_000] * 30, dtype=np.uint16)
    index = megaindex.build_index(url, sequence_length=60_000, seed=1, order="window")
    reader = PositionalTokens([IndexedDataset(url)])
    spans = index.locate(np.arange(12))
    proxy.seen.clear()
    out = np.empty((12, 60_000), np.int64)
    reader.read(spans, out, pad_id=0)
    few = len(proxy.seen)
    assert few < 8
    np.testing.assert_array_equal(out, gather(local, spans, 60_000, 0))
    proxy.seen.clear()
    PositionalTokens([IndexedDataset(url)], PositionalOptions(merge_gap=0)).read(
        spans, out, pad_id=0
    )
    assert len(proxy.gets(".bin")) > few


@pytest.mark.slow
def test_staging_is_bounded_whatever_lies_between(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs of 400 bytes, 40 kB apart: merged they would be 100 times as long."""
    local, url = store(lengths=[100, 10_000] * 100)
    index = megaindex.build_index(
        url, sequence_length=99, seed=1, order="epoch", documents=np.arange(0, 200, 2)
    )
    limit = 64 << 10
    reader = PositionalTokens([IndexedDataset(url)], PositionalOptions(bytes_in_flight=limit))
    taken: list[int] = []
    take = reader._take_staging
    monkeypatch.setattr(
        reader, "_take_staging", lambda nbytes: taken.append(nbytes) or take(nbytes)
    )
    out = np.empty((90, 100), np.int64)
    spans = index.locate(np.arange(90))
    reader.read(spans, out, pad_id=0)
    assert 0 < max(taken) <= limit
    np.testing.assert_array_equal(out, gather(local, spans, 100, 0))


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_workers_of_a_dataloader(store: Any) -> None:
    """A forked worker loads an obstore of its own: the parent has used the one it inherits."""
    local, url = store()
    index = megaindex.build_index(url, sequence_length=24, seed=2)
    remote = IndexedDataset(url)
    assert remote[9].size
    loading = DataLoader(
        GPTDataset(index, remote), batch_size=8, num_workers=2, collate_fn=collate,
        multiprocessing_context="fork", timeout=120,
    )  # fmt: skip
    here = GPTDataset(index, local)
    want = [here.__getitems__(list(rows)).batch["tokens"].clone() for rows in loading.batch_sampler]
    check_equal([batch["tokens"].clone() for batch in loading], want)
    assert remote[9].size  # and the parent goes on with its own


@pytest.mark.slow
def test_spawned_workers_end_in_peace_when_a_loop_breaks_early(store: Any) -> None:
    """The thread that sends their batches is in PyTorch while the interpreter ends."""
    local, url = store()
    index = megaindex.build_index(url, sequence_length=24, seed=2)
    loading = DataLoader(
        GPTDataset(index, IndexedDataset(url)), batch_size=8, num_workers=1, prefetch_factor=1,
        collate_fn=slow_to_send, multiprocessing_context="spawn", timeout=120,
    )  # fmt: skip
    batches = iter(loading)
    here = GPTDataset(index, local)
    for number, row in enumerate(next(batches)[1]):
        assert torch.equal(row["tokens"], here[number]["tokens"])
    (worker,) = batches._workers
    batches._shutdown_workers()
    worker.join()
    assert worker.exitcode == 0


@pytest.mark.parametrize("size", [0, 1, 20_003])
def test_an_extension_is_copied_whole(tmp_path: Path, size: int) -> None:
    (tmp_path / "one.so").write_bytes(np.random.default_rng(1).bytes(size))
    with _copied(str(tmp_path / "one.so")) as copy:
        assert Path(copy).read_bytes() == (tmp_path / "one.so").read_bytes()


def _grandchild(url: str, queue: Any) -> None:
    context = multiprocessing.get_context("fork")
    tokens = IndexedDataset(url)[9].tolist()
    inner = context.Process(target=lambda: queue.put((tokens, IndexedDataset(url)[9].tolist())))
    inner.start()
    inner.join(30)


@pytest.mark.filterwarnings("ignore:.*multi-threaded:DeprecationWarning")
def test_children_of_children(store: Any) -> None:
    local, url = store()
    assert IndexedDataset(url)[9].size
    context = multiprocessing.get_context("fork")
    queue = context.SimpleQueue()
    child = context.Process(target=_grandchild, args=(url, queue))
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert queue.get() == (local[9].tolist(), local[9].tolist())
