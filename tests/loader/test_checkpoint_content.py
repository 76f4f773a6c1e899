"""Checks of tokens, masks and positions against a checkpoint."""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from support import checkpoint_runs as runs
from support.checkpoint_runs import RANKS, S

import megaindex
from megaindex.builders.recipe import open_recipe
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.loader import (
    GPTDataset,
    Loader,
    MicroBatchSampler,
    Recorder,
    SampleOptions,
    loader_of_recipe,
)
from megaindex.loader.checkpoint import order_facts
from megaindex.loader.receipts import check_receipts, join_states, receipted
from megaindex.loader.sampler_state import RankLayout
from megaindex.settings.recipe import Recipe, Stream


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    runs.write_sources(tmp_path)
    return tmp_path


def after(loader: Any, batches: int) -> dict[str, Any]:
    """The state after some batches, as JSON keeps it."""
    list(runs.take(loader, batches))
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    return state


def change(path: Path, begin: int, count: int) -> None:
    """Zeroes in place of some bytes; the file keeps its size."""
    content = bytearray(path.read_bytes())
    assert any(content[begin : begin + count])
    content[begin : begin + count] = bytes(count)
    path.write_bytes(content)


@pytest.mark.parametrize("source", ["web", "chat_labels", "qa_mask"])
@pytest.mark.parametrize("content", ["sampled", "whole"])
def test_a_recipe_refuses_changed_tokens_labels_and_masks(
    folder: Path, source: str, content: Any
) -> None:
    def loader(content: Any) -> Loader:
        return loader_of_recipe(runs.opened(folder), micro_batch_size=2, content=content)

    state = after(loader(content), 5)
    loader("sampled").load_state_dict(state)
    loader("whole").load_state_dict(state)
    change(folder / f"{source}.bin", 400, 100)
    part = "content" if source == "web" else "targets"
    for ours in ("sampled", "whole"):
        with pytest.raises(InvalidArgument, match=f"source {source[:4].rstrip('_m')}.*{part}"):
            loader(ours).load_state_dict(state)
        loader(ours).load_state_dict(state, allow=[part])
    loader(None).load_state_dict(state)  # compares lengths alone, as asked


@pytest.mark.parametrize("how", ["bytes", "corpus", "pointers"])
def test_a_loader_refuses_another_corpus_of_equal_lengths(folder: Path, how: str) -> None:
    state = after(runs.text_loader(folder, 0), 3)
    runs.text_loader(folder, 0).load_state_dict(state)
    web = IndexedDataset(str(folder / "web"))
    if how == "bytes":
        change(folder / "web.bin", 4000, 100)
    elif how == "corpus":
        tokens = [web.get(k) + 1 for k in range(len(web))]
        for suffix in (".bin", ".idx"):
            (folder / f"web{suffix}").unlink()
        runs.write(folder / "web", tokens)
    else:  # a sequence that reads the tokens of another
        pointers = web.sequence_pointers.copy()
        pointers[0] = pointers[1]
        at = 34 + 4 * len(web)
        idx = bytearray((folder / "web.idx").read_bytes())
        idx[at : at + 8 * len(web)] = pointers.tobytes()
        (folder / "web.idx").write_bytes(idx)
    assert corpus_fingerprint(IndexedDataset(str(folder / "web"))) == corpus_fingerprint(web)
    fresh = runs.text_loader(folder, 0)
    with pytest.raises(InvalidArgument, match=r"source 0 \(.*web\): it holds other tokens"):
        fresh.load_state_dict(state)
    assert fresh.consumed_samples == 0
    fresh.load_state_dict(state, allow=["content"])
    assert fresh.consumed_samples == 12


def test_a_loader_refuses_another_mask(folder: Path) -> None:
    from megaindex.loader.targets import SourceTargets, Targets

    def loader(kind: Any) -> Loader:
        index = runs.opened(folder).sources[1].index(20)
        companion = IndexedDataset(str(folder / f"chat_{'mask' if kind != 'labels' else kind}"))
        targets = Targets([SourceTargets(kind=kind, companion=companion)])
        chat = IndexedDataset(str(folder / "chat"))
        return Loader(index, chat, runs._sampler(index, 0), targets=targets)

    state = after(loader("loss_mask"), 2)
    with pytest.raises(InvalidArgument, match="loss is on labels instead of loss_mask"):
        loader("labels").load_state_dict(state)
    change(folder / "chat_mask.bin", 0, 1600)
    with pytest.raises(InvalidArgument, match=r'labels or loss mask differ.*allow=\("targets"'):
        loader("loss_mask").load_state_dict(state)
    loader("loss_mask").load_state_dict(state, allow=["targets"])


def test_a_state_without_contents_is_continued_with_a_warning(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state = after(runs.text_loader(folder, 0), 3)
    runs.text_loader(folder, 0).load_state_dict(state)
    assert caplog.text == ""
    runs.text_loader(folder, 0).load_state_dict({**state, "content": None})
    assert "tokens, labels and loss masks were not compared" in caplog.text


def test_damaged_contents_are_refused(folder: Path) -> None:
    state = after(runs.text_loader(folder, 0), 3)
    for wrong in (3, [{}], [{**state["content"][0], "tokens": {"sampled": 3}}]):
        with pytest.raises(FormatError, match="take it from an intact checkpoint"):
            runs.text_loader(folder, 0).load_state_dict({**state, "content": wrong})
    two = {**state, "content": state["content"] * 2}
    with pytest.raises(InvalidArgument, match="the number of sources must be 2"):
        runs.text_loader(folder, 0).load_state_dict(two)
    with pytest.raises(InvalidArgument, match="content must be 'sampled', 'whole' or None"):
        loader_of_recipe(runs.opened(folder), content="all")  # type: ignore[arg-type]


# receipts of all ranks


@pytest.mark.parametrize("kind", ["text", "recipe"])
@pytest.mark.parametrize("stop", [6, 7])
def test_one_state_of_all_ranks_serves_any_ranks(folder: Path, kind: str, stop: int) -> None:
    loaders = [runs.LOADERS[kind](folder, rank) for rank in range(RANKS)]
    states = [after(loader, stop) for loader in loaders]
    index = loaders[0]._index
    assert check_receipts(states, index).equal
    joined = json.loads(json.dumps(join_states(states)))
    assert check_receipts([joined], index).equal
    loaders = [runs.LOADERS[kind](folder, rank) for rank in range(RANKS)]
    for loader in loaders:
        loader.load_state_dict(joined)
        list(runs.take(loader))
    check = check_receipts([loader.state_dict() for loader in loaders], index)
    assert check.equal
    assert str(check).endswith("of them in their round of micro batches")
    with pytest.raises(
        InvalidArgument, match="must be one of every rank, got those of 0 of 2, 0 of 2"
    ):
        join_states([states[0], states[0]])
    with pytest.raises(InvalidArgument, match="must be one of every rank, got those of 1 of 2"):
        check_receipts(states[1:], index)
    with pytest.raises(InvalidArgument, match="must be of one step of one run"):
        join_states([states[0], after(runs.LOADERS[kind](folder, 1), 1)])


def test_the_state_of_one_rank_is_counted_once(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It was once added up by every rank that loaded it, to a wrong sum of the right count."""
    state = after(runs.text_loader(folder, 0), 6)
    loaders = [runs.text_loader(folder, rank) for rank in range(RANKS)]
    for rank, loader in enumerate(loaders):
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            loader.load_state_dict(state)
        assert len(caplog.records) == rank
        list(runs.take(loader))
    assert "rank 1 of 2 loads the receipt of rank 0 of 2: it is counted once" in caplog.text
    check = check_receipts([loader.state_dict() for loader in loaders], loaders[0]._index)
    assert not check.equal
    lost = check.planned.total.count - check.served.total.count
    assert lost == 6 * 2  # micro batches of rank 1
    assert f"{check.served.total.count} samples were served of the" in str(check)


def test_the_state_of_one_rank_is_counted_by_one_of_fewer_ranks(folder: Path) -> None:
    def recorder(rank: int, size: int) -> Recorder:
        ranks = RankLayout(micro_batch_size=1, data_parallel_rank=rank, data_parallel_size=size)
        return Recorder(["0" * 32], ranks=ranks)

    served = recorder(3, 4)
    served.add_rows([[7, 1, 2], [9, 3, 4]])
    for size, counts in ((1, [2]), (2, [0, 2]), (3, [2, 0, 0]), (4, [0, 0, 0, 2])):
        ranks = [recorder(rank, size) for rank in range(size)]
        for each in ranks:
            each.load_state_dict(served.state_dict())
        assert [each.receipt.count for each in ranks] == counts


def test_a_receipt_is_continued_by_a_run_that_sources_joined() -> None:
    web, code = "0" * 32, "1" * 32
    before, after = Recorder([web]), Recorder([web, code])
    before.add_rows([[7, 1, 2]])
    after.load_state_dict(before.state_dict())
    assert after.receipt == before.receipt
    for others in ([code, web], [code]):
        with pytest.raises(InvalidArgument, match="fingerprints must be"):
            Recorder(others).load_state_dict(before.state_dict())
    with pytest.raises(InvalidArgument, match="fingerprints must be"):
        before.load_state_dict(after.state_dict())


def test_contents_are_those_of_the_files_that_were_opened(folder: Path) -> None:
    """A corpus that is written again in mid-run is not taken for the one that was served."""
    loader = runs.text_loader(folder, 0)
    list(runs.take(loader, 2))
    expected = runs.text_loader(folder, 0).state_dict()["content"]
    change(folder / "web.bin", 400, 100)
    assert loader.state_dict()["content"] == expected


def test_states_that_do_not_fit_together_are_refused(folder: Path) -> None:
    index = runs.text_loader(folder, 0)._index
    plain = Loader(index, IndexedDataset(str(folder / "web")), runs._sampler(index, 0))
    with pytest.raises(InvalidArgument, match="hold no receipts"):
        check_receipts([after(plain, 1)], index)
    recorder = Recorder(["0" * 32])
    with pytest.raises(InvalidArgument, match="end must be given"):
        check_receipts([recorder.state_dict()], index)
    with pytest.raises(InvalidArgument, match="with the state of each rank"):
        join_states([])
    recorder.add([3], index.locate([3]))
    with pytest.raises(InvalidArgument, match="the same receipt occurs twice"):
        join_states([recorder.state_dict()] * 2)
    with pytest.raises(InvalidArgument, match="must have the same corpora and settings"):
        join_states([recorder.state_dict(), Recorder(["1" * 32]).state_dict()])
    with pytest.raises(FormatError, match="not the state of a rank"):
        join_states([3])  # type: ignore[list-item]


# places


class Reordered:
    """A sampler whose micro batches come in another order than its state says."""

    def __init__(self, inner: MicroBatchSampler, order: Any) -> None:
        self._inner, self._order = inner, order

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def __len__(self) -> int:
        return len(self._inner)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._order(list(self._inner)))


def reverse(batches: list[Any]) -> list[Any]:
    return batches[::-1]


def swap(batches: list[Any]) -> list[Any]:
    batches = copy.deepcopy(batches)
    batches[3][0], batches[20][1] = batches[20][1], batches[3][0]
    return batches


@pytest.mark.parametrize(("order", "misplaced"), [(list, 0), (swap, 2), (reverse, None)])
@pytest.mark.parametrize("by", ["loader", "dataloader"])
def test_samples_out_of_their_round_are_counted(
    folder: Path, order: Any, misplaced: int | None, by: str
) -> None:
    """Their receipts are those of the plan: each was served once, but not when it was planned."""
    web = IndexedDataset(str(folder / "web"))
    index = megaindex.build_index(web, sequence_length=S, seed=1, epochs=2)
    states = []
    for rank in range(RANKS):
        sampler: Any = Reordered(runs._sampler(index, rank), order)
        recorder = Recorder([corpus_fingerprint(web)], ranks=sampler.ranks)
        if by == "loader":
            for _ in Loader(index, web, sampler, recorder=recorder):
                pass
        else:
            import torch

            samples = GPTDataset(index, web, fingerprints=[corpus_fingerprint(web)])
            batches = torch.utils.data.DataLoader(samples, batch_sampler=sampler)
            for _ in receipted(batches, recorder, sampler):
                pass
        states.append(recorder.state_dict())
    end = index.num_samples // 12 * 12
    check = check_receipts(states, index, end=end)
    assert check.served == check.planned
    assert check.in_place + check.misplaced == end
    if misplaced is None:
        assert check.misplaced > end // 2
    else:
        assert check.misplaced == misplaced * RANKS
    assert check.equal == (misplaced == 0)
    assert ("another round of micro batches" in str(check)) == (misplaced != 0)


@pytest.mark.parametrize("tail", ["drop", "pad", "wrap"])
@pytest.mark.parametrize("batch", [4, 12, 20])
def test_samples_of_every_tail_are_in_place(folder: Path, tail: Any, batch: int) -> None:
    web = IndexedDataset(str(folder / "web"))
    index = megaindex.build_index(web, sequence_length=S, seed=1, epochs=1)
    loaders = []
    for rank in range(RANKS):
        sampler = MicroBatchSampler(
            num_samples=index.num_samples, micro_batch_size=2, data_parallel_rank=rank,
            data_parallel_size=RANKS, global_batch_size=batch, tail=tail,
        )  # fmt: skip
        recorder = Recorder([corpus_fingerprint(web)], stride=16)
        loaders.append(Loader(index, web, sampler, recorder=recorder))
        list(runs.take(loaders[-1]))
    check = check_receipts([loader.state_dict() for loader in loaders], index)
    assert check.equal, str(check)
    assert check.in_place == check.served.total.count == loaders[0].consumed_samples


# breaks and errors


STOPS = [(1, 1, 2), (6, 5), (0, 3)]
LEFT = [*itertools.product(runs.LOADERS, STOPS)]


@pytest.mark.parametrize(
    ("kind", "stops"),
    [*LEFT[::2], *(pytest.param(*each, marks=pytest.mark.slow) for each in LEFT[1::2])],
)
def test_a_loop_that_was_left_goes_on(folder: Path, kind: str, stops: tuple[int, ...]) -> None:
    whole = list(runs.take(runs.LOADERS[kind](folder, 1)))
    loader = runs.LOADERS[kind](folder, 1)
    served = [batch for stop in stops for batch in runs.take(loader, stop)]
    state = loader.state_dict()
    assert len(loader) == len(whole) - sum(stops[:-1])
    served += list(runs.take(loader))
    assert served == whole
    with pytest.raises(InvalidArgument, match="the run is over: every batch"):
        iter(loader)
    loader.load_state_dict(state)
    assert list(runs.take(loader)) == whole[sum(stops) :]
    ended = loader.state_dict()
    resumed = runs.LOADERS[kind](folder, 1)
    resumed.load_state_dict(ended)
    assert list(runs.take(resumed)) == []  # a job that is started again at the end ends


def test_samplers_without_state_restart(folder: Path) -> None:
    web = IndexedDataset(str(folder / "web"))
    index = megaindex.build_index(web, sequence_length=S, seed=1, epochs=1)
    loader = Loader(index, web, [[0, 1], [2]])
    assert list(runs.take(loader, 1)) == list(runs.take(loader))[:1]
    assert len(list(runs.take(loader))) == 2


@pytest.mark.parametrize("read_ahead", [0, 3])
@pytest.mark.parametrize("error", [OSError("gone"), KeyboardInterrupt()])
def test_a_new_iteration_retries_the_failed_batch(
    folder: Path, read_ahead: int, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = runs.text_loader(folder, 0)
    loader._read_ahead = read_ahead
    whole = list(runs.take(runs.text_loader(folder, 0)))
    release = loader._source.release
    count = itertools.count()

    def fails_once(prepared: Any) -> Any:
        if next(count) == 4:
            raise error
        return release(prepared)

    monkeypatch.setattr(loader._source, "release", fails_once)
    batches = iter(loader)
    served = [next(batches)["tokens"].tolist() for _ in range(4)]
    with pytest.raises(type(error)):
        next(batches)
    for _ in range(2):
        says = OSError if isinstance(error, OSError) else InvalidArgument
        with pytest.raises(says, match="gone|ended by KeyboardInterrupt; start a new"):
            next(batches)
    assert served + list(runs.take(loader)) == whole


# the same past, written otherwise


@pytest.mark.slow_cases("per_stream", "stratified")
@pytest.mark.parametrize("batching", ["random", "stratified", "per_stream"])
def test_an_equivalent_recipe_is_accepted(folder: Path, batching: Any) -> None:
    def recipe(**shares: int) -> Recipe:
        first, second = runs.recipe(folder).stages
        streams = tuple(replace(s, proportion=shares[s.source]) for s in first.streams)
        stages = (replace(first, streams=streams, batching=batching), second)
        return runs.recipe(folder, stages=stages)

    old = loader_of_recipe(open_recipe(recipe(web=4, chat=2)), micro_batch_size=2)
    state = after(old, 20)
    whole = list(runs.take(old))
    scaled = recipe(web=2, chat=1)
    streams = (
        Stream(source="web", proportion=Fraction(2, 3)),
        Stream(source="chat", proportion=Fraction(1, 3)),
    )
    thirds = replace(scaled, stages=(replace(scaled.stages[0], streams=streams), scaled.stages[1]))
    web, chat, qa = scaled.sources  # chat and qa have the same lengths, and so one fingerprint
    others = [replace(scaled, sources=each) for each in ((web, chat, qa), (chat, web, qa))]
    for other in (thirds, recipe(web=400, chat=200)):
        others += [other, replace(other, sources=(chat, qa, web))]
    swapped = open_recipe(replace(scaled, sources=(qa, chat, web)))
    with pytest.raises(InvalidArgument, match="source chat: its shuffle name must be"):
        loader_of_recipe(swapped, micro_batch_size=2).load_state_dict(state)
    names = old.layout.shuffle_names
    named = [replace(qa, shuffle_name=names[2]), replace(chat, shuffle_name=names[1])]
    others.append(replace(scaled, sources=(*named, web)))
    for other in others:
        loader = loader_of_recipe(open_recipe(other), micro_batch_size=2, read_ahead=0)
        loader.load_state_dict(state)
        assert list(runs.take(loader)) == whole
        check = check_receipts([loader.state_dict()], loader._index)
        assert check.equal
    changed = open_recipe(recipe(web=4, chat=3))
    with pytest.raises(InvalidArgument, match="stage one: .* other samples"):
        loader_of_recipe(changed, micro_batch_size=2).load_state_dict(state)


# arguments


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda i, c, s: Loader(i, "prefix", s), "got 'prefix'; open a path with megaindex"),
        (lambda i, c, s: Loader(i, [c, Path("p")], s), "got PosixPath.*; open a path"),
        (
            lambda i, c, s: Loader("prefix", c, s),
            "index must have the members of megaindex.Index.*a str has no",
        ),
        (
            lambda i, c, s: GPTDataset("p", c),
            "index must have the members of megaindex.Index.*a str has no",
        ),
        (lambda i, c, s: GPTDataset(i, "p"), "got 'p'; open a path with megaindex"),
    ],
)
def test_paths_in_place_of_datasets_are_refused(folder: Path, make: Any, message: str) -> None:
    web = IndexedDataset(str(folder / "web"))
    index = megaindex.build_index(web, sequence_length=S, seed=1, epochs=1)
    with pytest.raises(InvalidArgument, match=message):
        make(index, web, [[0]])


def test_tokens_that_batches_do_not_hold_are_refused_at_once(tmp_path: Path) -> None:
    with megaindex.IndexedDatasetWriter(str(tmp_path / "wide"), np.int64) as writer:
        writer.add_document(np.arange(100))
    wide = IndexedDataset(str(tmp_path / "wide"))
    index = megaindex.build_index(wide, sequence_length=S, seed=1, epochs=1)
    options = SampleOptions(token_dtype="int32")
    message = "wide: tokens of int64 do not fit token_dtype='int32'"
    with pytest.raises(InvalidArgument, match=message):
        Loader(index, wide, [[0]], options=options)
    with pytest.raises(InvalidArgument, match=message):
        GPTDataset(index, wide, options=options)


def test_a_greedy_blend_states_the_last_bits_of_its_weights(folder: Path) -> None:
    paths = [str(folder / "web"), str(folder / "books")]

    def weights(order: str, share: float) -> str | None:
        blend = megaindex.build_blend(
            paths, weights=[share, 0.3], num_samples=40, sequence_length=16, order=order
        )
        return order_facts(blend, 10).get("weights")

    assert weights("megatron", 0.7) is not None
    assert weights("megatron", 0.7) == weights("megatron", 0.7)
    assert weights("megatron", 0.7) != weights("megatron", np.nextafter(0.7, 1))
    assert (
        order_facts(megaindex.build_index(paths[0], sequence_length=16), 10).get("weights") is None
    )
