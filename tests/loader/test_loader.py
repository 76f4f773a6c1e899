"""The loader against GPTDataset, and its behaviour under errors, forks and threads."""

from __future__ import annotations

import gc
import os
import pickle
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.examples import one_in
from support.inputs import for_each

import megaindex
from megaindex.errors import FormatError, InvalidArgument, OutOfRange, StorageError
from megaindex.format import IndexedDataset
from megaindex.index.orders.epoch import EpochIndex
from megaindex.index.spans import Index
from megaindex.io.mapping import DescriptorCache, RangeReader
from megaindex.loader import (
    EvaluationSampler,
    GPTDataset,
    MicroBatchSampler,
    NumpyDataset,
    Recorder,
)
from megaindex.loader.batch import BatchMaker, SampleOptions
from megaindex.loader.batch_reader import BufferPool
from megaindex.loader.loader import Loader
from megaindex.loader.positional_reader import AutoTokens, PositionalTokens
from megaindex.loader.token_readers import MappedTokens, PrefetchingTokens

EOD = 7
Batch = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(2).integers(1, 60, 300)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths, np.uint16, eod=EOD)


@pytest.fixture(scope="module")
def index(corpus: IndexedDataset) -> Index:
    return megaindex.build_index(corpus, sequence_length=48, seed=4)


@pytest.fixture(scope="module")
def whole(corpus: IndexedDataset, index: Index) -> Batch:
    """All samples, in order."""
    return expected(GPTDataset(index, corpus), list(range(index.num_samples)))


@pytest.fixture(autouse=True)
def no_thread_stays() -> Iterator[None]:
    before = threading.enumerate()
    yield
    new = [thread for thread in threading.enumerate() if thread not in before]
    for thread in new:
        thread.join(0.1)
    if any(thread.is_alive() for thread in new):
        gc.collect()  # an error that was raised holds the frames of the iteration
    for thread in new:
        thread.join(10)
        assert not thread.is_alive(), thread.name


def sampler(index: Index, **changes: Any) -> MicroBatchSampler:
    settings: dict[str, Any] = {
        "num_samples": index.num_samples,
        "micro_batch_size": 3,
        "data_parallel_rank": 1,
        "data_parallel_size": 2,
        "tail": "pad",
    }
    return MicroBatchSampler(**(settings | changes))


def expected(dataset: GPTDataset, ids: list[int | None]) -> Batch:
    return torch.utils.data.default_collate(dataset.__getitems__(ids))


def assert_equal(batch: Batch, right: Batch) -> None:
    assert sorted(batch) == sorted(right)
    for name, value in right.items():
        assert batch[name].dtype == value.dtype, name
        assert torch.equal(batch[name], value), name


@given(
    flags=st.tuples(*[st.booleans()] * 5),
    reader=st.sampled_from(["auto", "mapped", "positional"]),
    ahead=st.sampled_from([(0, 1), (1, 1), (3, 2), (8, 4)]),
    rank=st.integers(0, 1),
    bytes_ahead=st.sampled_from([1, 1 << 30]),
)
def test_batches_are_gpt_datasets(
    corpus: IndexedDataset,
    index: Index,
    flags: tuple[bool, ...],
    reader: str,
    ahead: tuple[int, int],
    rank: int,
    bytes_ahead: int,
) -> None:
    options = SampleOptions(
        eod_id=EOD,
        eod_mask_loss=flags[0],
        reset_position_ids=flags[1],
        reset_attention_mask=flags[2],
        create_attention_mask=flags[3],
        cu_seqlens=flags[4],
    )
    dataset = GPTDataset(index, corpus, options=options)
    order = sampler(index, data_parallel_rank=rank)
    loader = Loader(
        index, corpus, order, options=options, reader=reader,
        read_ahead=ahead[0], num_threads=ahead[1], bytes_ahead=bytes_ahead,
    )  # fmt: skip
    assert len(loader) == len(order) > 20
    served = 0
    for batch, ids in zip(loader, sampler(index, data_parallel_rank=rank), strict=True):
        assert_equal(batch, expected(dataset, ids))
        served += 1
    assert served == len(order)


@for_each(
    ("arguments", "named"),
    [
        (lambda data, ids: (ids,), {}),
        (lambda data, ids: (), {"sampler": True}),
        (lambda data, ids: (data, ids), {}),
        (lambda data, ids: ([data], ids), {}),
        (lambda data, ids: (data,), {"sampler": True}),
        (lambda data, ids: (), {"datasets": True, "sampler": True}),
    ],
)
def test_the_datasets_may_be_left_to_the_index(
    corpus: IndexedDataset, index: Index, arguments: Any, named: dict[str, bool]
) -> None:
    ids = [[3, 1], [2, None]]
    given = {"datasets": corpus, "sampler": ids}
    loader = Loader(index, *arguments(corpus, ids), **{name: given[name] for name in named})
    assert len(loader) == 2
    for batch, row in zip(loader, ids, strict=True):
        assert_equal(batch, expected(GPTDataset(index, corpus), row))
        assert_equal(batch, expected(GPTDataset(index), row))
        arrays = NumpyDataset(index).__getitems__(row)
        assert_equal(batch, {name: torch.from_numpy(array) for name, array in arrays.items()})
    assert repr(loader) == f"Loader({index!r}, list, 2 batches returned)"
    assert repr(GPTDataset(index)) == f"GPTDataset({index!r})"


@for_each("sampler", [None, "c", b"c", 3, "dataset", "datasets"])
def test_a_loader_without_sampler_is_refused(
    corpus: IndexedDataset, index: Index, sampler: Any
) -> None:
    given = {"dataset": corpus, "datasets": [corpus]}.get(sampler, sampler)
    with pytest.raises(InvalidArgument, match="the sampler is missing"):
        Loader(index, given)


def test_datasets_must_be_given_for_an_index_of_lengths(corpus: IndexedDataset) -> None:
    index = EpochIndex(
        sequence_lengths=corpus.sequence_lengths,
        documents=range(len(corpus)),
        tokens_per_epoch=corpus.num_tokens,
        sequence_length=48,
        seed=1,
        source_name="c",
    )
    for make in (lambda: Loader(index, [[0]]), lambda: GPTDataset(index)):
        with pytest.raises(InvalidArgument, match="datasets of EpochIndex.* are missing"):
            make()
    assert next(iter(Loader(index, corpus, [[0]])))["tokens"].shape == (1, 48)


def test_samplers_print_their_ranks_and_position(index: Index) -> None:
    one = sampler(index)
    assert repr(one) == (
        "MicroBatchSampler(micro batches of 3 for rank 1 of 2, 0 of "
        f"{index.num_samples} samples consumed)"
    )
    next(iter(one))
    assert "6 of" in repr(one)
    scored = EvaluationSampler(
        num_samples=7, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=3
    )
    assert repr(scored) == "EvaluationSampler(micro batches of 2 for rank 1 of 3, 7 samples)"


def test_a_blend_is_read_from_all_its_datasets(tmp_path: Path) -> None:
    datasets = [
        write_corpus(tmp_path / str(k), [30 + k] * 20, dtype)
        for k, dtype in enumerate((np.uint16, np.int32, np.uint16))
    ]
    index = Interleaved([megaindex.build_index(d, sequence_length=16, seed=k)
                         for k, d in enumerate(datasets)])  # fmt: skip
    batches = {
        reader: list(Loader(index, datasets, sampler(index), reader=reader))
        for reader in ("mapped", "positional")
    }
    assert len(batches["mapped"]) == len(sampler(index))
    for mapped, positional in zip(*batches.values(), strict=True):
        assert_equal(mapped, positional)
    for batch, ids in zip(batches["mapped"], sampler(index), strict=True):
        for row, sample in zip(batch["tokens"], ids, strict=True):
            if sample is not None:
                part = GPTDataset(index.parts[sample % 3], datasets[sample % 3])
                assert torch.equal(row, part[sample // 3]["tokens"])


class Interleaved:
    """Sample k of the blend is sample k // n of index k % n."""

    def __init__(self, parts: list[Any]) -> None:
        self.parts = parts
        self.sequence_length = parts[0].sequence_length
        self.add_extra_token = parts[0].add_extra_token
        self.num_samples = len(parts) * min(part.num_samples for part in parts)
        self.num_epochs = 1
        self.tokens_per_epoch = sum(part.tokens_per_epoch for part in parts)

    def locate(self, sample_ids: Any) -> Any:
        located = [self.parts[k % 3].locate([k // 3]) for k in sample_ids]
        sizes = [len(spans) for spans in located]
        columns = {
            name: np.concatenate([getattr(spans, name) for spans in located])
            for name in ("document", "offset", "length")
        }
        return megaindex.index.spans.Spans(
            source=np.repeat(np.array([k % 3 for k in sample_ids], np.int32), sizes),
            row_splits=np.cumsum([0, *sizes]),
            **columns,
        )


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("read_ahead", [0, 4])
def test_a_batch_is_never_written_while_it_is_held(
    corpus: IndexedDataset, index: Index, read_ahead: int
) -> None:
    dataset = GPTDataset(index, corpus)
    loader = Loader(index, corpus, sampler(index), read_ahead=read_ahead)
    rng = np.random.default_rng(0)
    held: list[tuple[Any, Any]] = []
    addresses = set()
    for batch, ids in zip(loader, sampler(index), strict=True):
        addresses.add(batch["tokens"].data_ptr())
        right = expected(dataset, ids)
        # whole batches, single fields, rows, NumPy views, and views of views
        views: list[tuple[Any, Any]] = [
            (batch["labels"], right["labels"]),
            (batch["tokens"][1:, 3:].T, right["tokens"][1:, 3:].T),
            (batch["position_ids"].numpy()[0], right["position_ids"].numpy()[0]),
            (memoryview(batch["loss_mask"].numpy()[2]), right["loss_mask"].numpy()[2]),
        ]
        del batch
        held.extend(views[k] for k in np.flatnonzero(rng.random(4) < 0.3))
        del views
        for view, value in held:
            assert np.array_equal(np.asarray(view), np.asarray(value))
        held = [pair for pair in held if rng.random() < 0.8]
    assert len(addresses) < len(loader)


@pytest.mark.slow
def test_dropped_batches_are_written_again(corpus: IndexedDataset, index: Index) -> None:
    own = BatchMaker.allocate
    with patch.object(BatchMaker, "allocate", autospec=True, side_effect=own) as allocate:
        loader = Loader(index, corpus, sampler(index), read_ahead=2, num_threads=1)
        addresses = [batch["tokens"].data_ptr() for batch in loader]
    assert len(addresses) > 20
    assert len(set(addresses)) <= 2 + 1 + 2
    assert allocate.call_count <= 2 + 1 + 2


def test_free_threaded_python_never_writes_a_batch_again(
    corpus: IndexedDataset, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It does not count references exactly while other threads run."""
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: False, raising=False)
    pool = BufferPool(BatchMaker(index, MappedTokens([corpus])), 2, keep=4)
    first = pool.take()
    pool.watch(first)
    assert pool.take() is not first
    monkeypatch.setattr(sys, "_is_gil_enabled", lambda: True, raising=False)
    assert pool.take() is first


def test_changes_in_place_do_not_reach_later_batches(corpus: IndexedDataset, index: Index) -> None:
    options = SampleOptions(create_attention_mask=True)
    dataset = GPTDataset(index, corpus, options=options)
    loader = Loader(index, corpus, sampler(index), options=options)
    for batch, ids in zip(loader, sampler(index), strict=True):
        assert_equal(batch, expected(dataset, ids))
        for value in batch.values():
            value.fill_(1)


@pytest.mark.slow
@one_in(2)
@given(stop=st.integers(0, 31), sizes=st.tuples(*[st.integers(1, 4)] * 2), ahead=st.integers(0, 5))
def test_a_run_continues_after_the_last_batch_returned(
    corpus: IndexedDataset,
    index: Index,
    whole: Batch,
    stop: int,
    sizes: tuple[int, int],
    ahead: int,
) -> None:
    """A run on two ranks goes on with other ranks and micro batches, none skipped or repeated."""

    def loaders(ranks: int, micro: int) -> list[Loader]:
        return [
            Loader(
                index, corpus,
                sampler(index, tail="drop", data_parallel_size=ranks, micro_batch_size=micro,
                        data_parallel_rank=rank),
                read_ahead=ahead,
            )
            for rank in range(ranks)
        ]  # fmt: skip

    first = loaders(2, 3)
    iterations = [iter(loader) for loader in first]
    tokens = [next(rank)["tokens"] for _ in range(stop) for rank in iterations]
    states = [loader.state_dict() for loader in first]
    assert states[0] == states[1]
    assert states[0]["consumed_samples"] == stop * 6
    state = torch.load(_saved(states[0]), weights_only=True)
    then = loaders(*sizes)
    for loader in then:
        loader.load_state_dict(state)
    rounds = zip(*then, strict=True)
    tokens += [batch["tokens"] for batches in rounds for batch in batches]
    served = torch.cat(tokens)
    assert torch.equal(served, whole["tokens"][: len(served)])
    assert index.num_samples - len(served) < sizes[0] * sizes[1]


def _saved(state: dict[str, Any]) -> Any:
    import io

    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return file


@pytest.mark.parametrize("read_ahead", [0, 4])
def test_receipts_count_the_batches_returned(
    corpus: IndexedDataset, index: Index, read_ahead: int
) -> None:
    def recorder() -> Recorder:
        return Recorder(["0" * 31 + "1"], {"seed": 4})

    whole, interrupted = recorder(), recorder()
    for batch in Loader(index, corpus, sampler(index), recorder=whole, read_ahead=read_ahead):
        assert "receipt" not in batch
    direct = recorder()
    for ids in sampler(index):
        real = [k for k in ids if k is not None]
        direct.add(real, index.locate(real))
    assert whole.receipt == direct.receipt

    loader = Loader(index, corpus, sampler(index), recorder=interrupted, read_ahead=read_ahead)
    iteration = iter(loader)
    for _ in range(17):
        next(iteration)
    state = loader.state_dict()
    resumed = recorder()
    loader = Loader(index, corpus, sampler(index), recorder=resumed, read_ahead=read_ahead)
    loader.load_state_dict(state)
    for _ in loader:
        pass
    assert resumed.receipt == whole.receipt
    assert resumed.ladder == whole.ladder


def test_a_state_of_something_else_is_refused(corpus: IndexedDataset, index: Index) -> None:
    loader = Loader(index, corpus, sampler(index))
    state = loader.state_dict()
    with pytest.raises(FormatError, match="version 9"):
        loader.load_state_dict(state | {"version": 9})
    with pytest.raises(FormatError, match="not the state of a loader"):
        loader.load_state_dict(state["sampler"])
    other = Loader(index, corpus, sampler(index, fingerprint="another"))
    with pytest.raises(InvalidArgument, match="another") as refusal:
        other.load_state_dict(state)
    assert 'allow=("fingerprint",)' in str(refusal.value)
    other.load_state_dict(state, allow=("fingerprint",))


def test_any_iterable_is_a_sampler_without_state(corpus: IndexedDataset, index: Index) -> None:
    loader = Loader(index, corpus, [[5, 3], [1], [None, 2]])
    dataset = GPTDataset(index, corpus)
    for batch, ids in zip(loader, [[5, 3], [1], [None, 2]], strict=True):
        assert_equal(batch, expected(dataset, ids))
    with pytest.raises(InvalidArgument, match="type list has no state"):
        loader.state_dict()
    with pytest.raises(InvalidArgument, match="type list cannot load"):
        loader.load_state_dict({"version": 5, "identity": None, "recipe": None, "sampler": {}})
    assert list(Loader(index, corpus, [])) == []


@pytest.mark.slow
@pytest.mark.parametrize("read_ahead", [0, 5])
def test_an_error_comes_in_the_place_of_its_batch(
    corpus: IndexedDataset, index: Index, read_ahead: int
) -> None:
    ids = [[k] for k in range(10)] + [[index.num_samples]] + [[k] for k in range(10)]
    iteration = iter(Loader(index, corpus, ids, read_ahead=read_ahead))
    for _ in range(10):
        next(iteration)
    with pytest.raises(OutOfRange, match="does not exist"):
        next(iteration)


@pytest.mark.slow
def test_a_failing_disk_is_an_error_with_a_place(corpus: IndexedDataset, index: Index) -> None:
    bad = 2 * 1500

    def pread(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        if offset <= bad < offset + len(buffers[0]):
            raise OSError(5, "Input/output error")
        return os.preadv(descriptor, buffers, offset)

    reader = PositionalTokens(
        [corpus],
        reader=RangeReader(descriptors=DescriptorCache(), retries=1, first_pause=0, pread=pread),
    )
    served: list[Batch] = []
    with pytest.raises(StorageError, match="c.bin: cannot read .* after 2 attempts"):
        served.extend(Loader(index, corpus, sampler(index), reader=reader))
    spans = [index.locate([i for i in ids if i is not None]) for ids in sampler(index)]
    begins = [corpus.sequence_pointers[s.document] + 2 * s.offset for s in spans]
    hit = [
        bool(((begin <= bad) & (bad < begin + 2 * s.length)).any())
        for begin, s in zip(begins, spans, strict=True)
    ]
    assert len(served) <= hit.index(True)  # neighbours may be read along with an earlier batch


def test_only_the_newest_iteration_goes_on(corpus: IndexedDataset, index: Index) -> None:
    loader = Loader(index, corpus, sampler(index))
    old = iter(loader)
    next(old)
    new = iter(loader)
    next(new)
    with pytest.raises(InvalidArgument, match="this iteration has ended"):
        next(old)
    loader.load_state_dict(loader.state_dict())
    with pytest.raises(InvalidArgument, match="this iteration has ended"):
        next(new)


@pytest.mark.slow
def test_leaving_the_loop_ends_the_threads(corpus: IndexedDataset, index: Index) -> None:
    loader = Loader(index, corpus, sampler(index))
    for _ in loader:
        break
    names = [thread.name for thread in threading.enumerate()]
    assert not any(name.startswith("megaindex-ahead") for name in names)


@pytest.mark.slow_cases("auto")
@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("reader", ["mapped", "positional", "auto"])
def test_a_forked_child_begins_its_own(corpus: IndexedDataset, index: Index, reader: str) -> None:
    loader = Loader(index, corpus, sampler(index), reader=reader)
    iteration = iter(loader)
    next(iteration)
    second = list(Loader(index, corpus, sampler(index)))[1]["tokens"]
    child = os.fork()
    if child == 0:
        os._exit(0 if torch.equal(next(iter(loader))["tokens"], second) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    next(iteration)


def test_it_is_not_pickled(corpus: IndexedDataset, index: Index) -> None:
    with pytest.raises(InvalidArgument, match="cannot be pickled or passed"):
        pickle.dumps(Loader(index, corpus, sampler(index)))


def test_auto_times_both_ways_and_says_what_it_chose(
    corpus: IndexedDataset,
    index: Index,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timed: Counter[str] = Counter()

    def count(kind: str, cls: type[Any]) -> None:
        original = cls.fill

        def fill(self: Any, request: Any) -> None:
            timed[kind] += loader.reader.choice is None
            original(self, request)

        monkeypatch.setattr(cls, "fill", fill)

    count("mapped", PrefetchingTokens)
    count("positional", PositionalTokens)
    with caplog.at_level("INFO", "megaindex"):
        loader = Loader(index, corpus, sampler(index), reader="auto", num_threads=4)
        for _ in loader:
            pass
    reader = loader.reader
    assert isinstance(reader, AutoTokens)
    assert reader.choice is not None
    assert abs(timed["mapped"] - timed["positional"]) < 4  # batches under way at the choice
    said = [r.getMessage() for r in caplog.records if "tokens are read" in r.getMessage()]
    assert said == [f"tokens are read {reader.choice.reader}: {reader.choice.reason}"]


def test_files_that_are_not_on_a_local_disk_are_read_by_position(
    corpus: IndexedDataset, index: Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("megaindex.loader.positional_reader.is_local", lambda path: False)
    monkeypatch.setattr("megaindex.loader.positional_reader.file_system_type", lambda path: "nfs4")
    reader = AutoTokens([corpus])
    assert reader.choice is not None
    assert (reader.choice.reader, reader.choice.reason) == ("positional", "files are on nfs4")
    list(Loader(index, corpus, sampler(index), reader=reader))
    assert reader.datasets == (corpus,)


def test_a_device_without_cuda_gets_plain_copies(corpus: IndexedDataset, index: Index) -> None:
    dataset = GPTDataset(index, corpus)
    loader = Loader(index, corpus, sampler(index), device="cpu")
    kept = list(loader)
    for batch, ids in zip(kept, sampler(index), strict=True):
        assert_equal(batch, expected(dataset, ids))
    with pytest.raises(InvalidArgument, match="receipts need a recorder"):
        loader.dataset(receipts=True)
    recorders = [Recorder(["0" * 31 + "1"]) for _ in range(2)]
    for recorder, device in zip(recorders, ("cpu", None), strict=True):
        list(Loader(index, corpus, sampler(index), device=device, recorder=recorder))
    assert recorders[0].ladder == recorders[1].ladder


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("device", ["cuda", None])
def test_batches_on_a_cuda_device(corpus: IndexedDataset, index: Index, device: str | None) -> None:
    dataset = GPTDataset(index, corpus)
    loader = Loader(index, corpus, sampler(index), device=device, pin_memory=True)
    sums, right = [], []
    busy = torch.ones(2000, 2000, device="cuda")
    for batch, ids in zip(loader, sampler(index), strict=True):
        busy = busy @ busy * 1e-4  # the device lags behind: batches are dropped while it reads them
        moved = {name: t.to("cuda", non_blocking=True) for name, t in batch.items()}
        sums.append({name: (t.double() * 3).sum() for name, t in moved.items()})
        right.append({n: (t.double() * 3).sum() for n, t in expected(dataset, ids).items()})
        del batch, moved
    for ours, theirs in zip(sums, right, strict=True):
        assert {name: value.item() for name, value in ours.items()} == {
            name: value.item() for name, value in theirs.items()
        }


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"read_ahead": -1}, "read_ahead must be at least 0"),
        ({"num_threads": 0}, "num_threads must be at least 1"),
        ({"bytes_ahead": 0}, "bytes_ahead must be at least 1"),
        ({"reader": "fastest"}, "reader must be one of"),
    ],
)
def test_arguments_are_checked(
    corpus: IndexedDataset, index: Index, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        Loader(index, corpus, [[0]], **arguments)


@pytest.mark.slow_cases("4")
@pytest.mark.parametrize("read_ahead", [0, 4])
def test_the_state_is_that_of_the_newest_iteration(
    corpus: IndexedDataset, index: Index, read_ahead: int
) -> None:
    """Whatever an iteration before had read ahead, or still reads."""
    loader = Loader(index, corpus, sampler(index), read_ahead=read_ahead)
    old = iter(loader)
    for _ in range(3):
        next(old)
    third = loader.state_dict()
    new = iter(loader)
    assert loader.state_dict() == third
    next(new)
    assert loader.state_dict()["consumed_samples"] == third["consumed_samples"] // 3 * 4
    loader.load_state_dict(third)
    assert loader.state_dict() == third
    next(iter(loader))
    assert loader.state_dict()["consumed_samples"] == third["consumed_samples"] // 3 * 4


def test_another_order_is_refused_by_name(corpus: IndexedDataset, index: Index) -> None:
    loader = Loader(index, corpus, sampler(index))
    next(iter(loader))
    state = loader.state_dict()
    other = megaindex.build_index(corpus, sequence_length=index.sequence_length, seed=99)
    fresh = Loader(other, corpus, sampler(other))
    with pytest.raises(InvalidArgument, match="serves other samples"):
        fresh.load_state_dict(state)
    assert fresh.state_dict()["consumed_samples"] == 0
    fresh.load_state_dict(state, allow=["order", "num_samples", "train_samples"])
    assert fresh.state_dict()["consumed_samples"] == state["consumed_samples"]


def test_datasets_of_another_index_are_refused(
    corpus: IndexedDataset, index: Index, tmp_path: Path
) -> None:
    other = write_corpus(tmp_path / "other", corpus.sequence_lengths[::-1])
    with pytest.raises(InvalidArgument, match="of other lengths"):
        Loader(index, other, sampler(index))
    with pytest.raises(InvalidArgument, match="of other lengths"):
        GPTDataset(index, other)


def test_negative_ids_are_refused(corpus: IndexedDataset, index: Index) -> None:
    with pytest.raises(OutOfRange, match="sample ids must be at least 0"):
        GPTDataset(index, corpus)[-1]
