"""The loader's page-locked memory and its copies to a CUDA device; run where there is one."""

from __future__ import annotations

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex.index.spans import Index
from megaindex.loader import Loader, MicroBatchSampler, SampleOptions

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

BUSY_CYCLES = 3_000_000  # about 2 ms of GPU work
OPTIONS = SampleOptions(eod_id=7, eod_mask_loss=True, reset_position_ids=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[megaindex.IndexedDataset, Index]:
    lengths = np.random.default_rng(5).integers(1, 900, 2_000)
    corpus = write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths, np.uint16, eod=7)
    return corpus, megaindex.build_index(corpus, sequence_length=512, seed=4, order="epoch")


def loader(run: tuple[megaindex.IndexedDataset, Index], **settings: object) -> Loader:
    corpus, index = run
    sampler = MicroBatchSampler(
        num_samples=index.num_samples,
        micro_batch_size=8,
        data_parallel_rank=0,
        data_parallel_size=1,
    )
    return Loader(index, corpus, sampler, options=OPTIONS, **settings)


def expected(run: tuple[megaindex.IndexedDataset, Index]) -> list[dict[str, torch.Tensor]]:
    return [{name: t.clone() for name, t in batch.items()} for batch in loader(run)]


def assert_equal(
    found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]]
) -> None:
    assert len(found) == len(wanted) > 20
    for step, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        assert ours.keys() == theirs.keys()
        for name, tensor in theirs.items():
            assert torch.equal(ours[name].cpu(), tensor), (step, name)


@pytest.mark.parametrize("read_ahead", [1, 4])
def test_batches_on_the_device_equal_those_in_memory(run, read_ahead):
    wanted = expected(run)
    results = []
    for batch in loader(run, device="cuda", read_ahead=read_ahead):
        assert all(tensor.is_cuda for tensor in batch.values())
        torch.cuda._sleep(BUSY_CYCLES)  # work is queued behind, so batches are used late
        results.append({name: tensor.clone() for name, tensor in batch.items()})
    torch.cuda.synchronize()
    assert_equal(results, wanted)


def test_another_stream_may_use_a_batch(run):
    wanted, stream, results = expected(run), torch.cuda.Stream(), []
    with torch.cuda.stream(stream):
        for batch in loader(run, device="cuda"):
            torch.cuda._sleep(BUSY_CYCLES)
            results.append({name: tensor.clone() for name, tensor in batch.items()})
    stream.synchronize()
    assert_equal(results, wanted)


def test_pinned_batches_may_be_dropped_before_their_copy_ran(run):
    wanted, results = expected(run), []
    for batch in loader(run, pin_memory=True):
        assert all(tensor.is_pinned() for tensor in batch.values())
        torch.cuda._sleep(BUSY_CYCLES)  # the copies wait behind this
        results.append({n: t.to("cuda", non_blocking=True) for n, t in batch.items()})
        del batch
    torch.cuda.synchronize()
    assert_equal(results, wanted)


def test_a_checkpoint_counts_the_batches_that_were_returned(run):
    wanted, first = expected(run), loader(run, device="cuda", read_ahead=4)
    batches = iter(first)
    results = [{name: t.clone() for name, t in next(batches).items()} for _ in range(11)]
    state = first.state_dict()
    del batches
    second = loader(run, device="cuda", read_ahead=4)
    second.load_state_dict(state)
    results += [{name: t.clone() for name, t in batch.items()} for batch in second]
    torch.cuda.synchronize()
    assert_equal(results, wanted)


def test_an_attention_mask_is_copied_too(run):
    corpus, index = run
    sampler = MicroBatchSampler(
        num_samples=64, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1
    )
    options = SampleOptions(eod_id=7, reset_attention_mask=True, create_attention_mask=True)
    made = {
        device: [
            {name: t.cpu().clone() for name, t in batch.items()}
            for batch in Loader(index, corpus, sampler, options=options, device=device)
        ]
        for device in ("cpu", "cuda")
    }
    assert len(made["cpu"]) == len(made["cuda"]) == 16
    for ours, theirs in zip(made["cuda"], made["cpu"], strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_a_device_that_is_not_there_is_refused(run):
    corpus, _ = run
    assert isinstance(corpus, megaindex.IndexedDataset)
    with pytest.raises(megaindex.errors.InvalidArgument, match="cuda:99"):
        loader(run, device="cuda:99")
