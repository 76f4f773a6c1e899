"""Order ``window``: contiguous windows of the .bin, in an order that is computed."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.command_line import plan_json
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.index.orders import epoch as module
from megaindex.index.orders.epoch import WindowIndex
from megaindex.plan.coverage import count_served

NUMBERS = itertools.count()


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """What an index needs of a dataset; no file stands behind it."""

    sequence_lengths: np.ndarray
    sequence_pointers: np.ndarray
    nbytes: int
    dtype: np.dtype[Any]
    path_prefix: str = "virtual"

    @classmethod
    def of(cls, lengths: np.ndarray, dtype: type = np.uint16) -> Corpus:
        size = np.dtype(dtype).itemsize
        ends = np.cumsum(lengths, dtype=np.int64) * size
        return cls(
            sequence_lengths=np.asarray(lengths, np.int32),
            sequence_pointers=ends - np.asarray(lengths, np.int64) * size,
            nbytes=int(ends[-1]),
            dtype=np.dtype(dtype),
        )


@st.composite
def indices(draw: st.DrawFn) -> WindowIndex:
    lengths = np.array(draw(st.lists(st.integers(0, 30), min_size=1, max_size=40)))
    lengths[draw(st.integers(0, lengths.size - 1))] += 21
    begin = draw(st.integers(0, lengths.size - 1))
    documents = range(begin, draw(st.integers(begin + 1, lengths.size)))
    if lengths[documents].sum() < 21:
        documents = range(lengths.size)
    return WindowIndex(
        dataset=Corpus.of(lengths, draw(st.sampled_from([np.uint16, np.int32]))),
        documents=documents,
        sequence_length=draw(st.integers(1, 20)),
        seed=draw(st.integers(0, 2**32 - 1)),
        source_name=draw(st.sampled_from(["wiki", "code", ""])),
        num_epochs=draw(st.integers(1, 3)),
        add_extra_token=draw(st.integers(0, 1)),
    )


def windows(index: WindowIndex, ids: np.ndarray) -> list[tuple[int, int]]:
    """[begin, end) of each sample in the .bin, counted in tokens, after checking its runs."""
    spans = index.locate(ids)
    assert (spans.length > 0).all()
    assert (spans.offset >= 0).all()
    lengths, pointers = index.dataset.sequence_lengths, index.dataset.sequence_pointers
    assert (spans.offset + spans.length <= lengths[spans.document]).all()
    begins = pointers[spans.document] // index.dataset.dtype.itemsize + spans.offset
    found = []
    for a, b in itertools.pairwise(spans.row_splits):
        ends = begins[a:b] + spans.length[a:b]
        np.testing.assert_array_equal(ends[:-1], begins[a + 1 : b])
        found.append((int(begins[a]), int(ends[-1])))
    return found


@given(index=indices())
def test_each_epoch_serves_every_window_once(index: WindowIndex) -> None:
    S, width = index.sequence_length, index.sequence_length + index.add_extra_token
    lengths = index.dataset.sequence_lengths
    first = int(lengths[: index.documents.start].sum())
    tokens = int(lengths[index.documents].sum())
    per_epoch = (tokens - index.add_extra_token) // S
    assert (index.tokens_per_epoch, index.samples_per_epoch) == (tokens, per_epoch)
    assert index.num_samples == index.num_epochs * per_epoch
    assert index.tokens_left_over == index.num_epochs * (tokens - per_epoch * S)
    expected = [(first + i * S, first + i * S + width) for i in range(per_epoch)]
    for epoch in range(index.num_epochs):
        ids = np.arange(epoch * per_epoch, (epoch + 1) * per_epoch)
        assert sorted(windows(index, ids)) == expected


@given(index=indices(), more=st.integers(1, 3), ranks=st.integers(1, 4))
def test_more_epochs_and_ranks_change_nothing(index: WindowIndex, more: int, ranks: int) -> None:
    ids = np.arange(index.num_samples)
    whole = windows(index, ids)
    longer = index.extend(index.num_epochs + more)
    assert windows(longer, ids) == whole
    for rank in range(ranks):
        assert windows(longer, ids[rank::ranks]) == whole[rank::ranks]


@given(index=indices(), share=st.floats(0, 1))
def test_coverage_in_closed_form_is_what_is_served(index: WindowIndex, share: float) -> None:
    served = round(share * index.num_samples)
    lengths = index.dataset.sequence_lengths[index.documents]
    tokens, _ = count_served(index, served, lengths, index.documents.start)
    passes, rest = divmod(served, index.samples_per_epoch)
    S, expected = index.sequence_length, np.zeros(passes + 2, np.int64)
    expected[0] += index.tokens_per_epoch - index.samples_per_epoch * S
    expected[passes] += (index.samples_per_epoch - rest) * S
    expected[passes + 1] += rest * S
    size = max(tokens.size, expected.size)
    np.testing.assert_array_equal(
        np.pad(tokens, (0, size - tokens.size)), np.pad(expected, (0, size - expected.size))
    )


def test_ten_trillion_tokens_in_several_sources_take_no_memory() -> None:
    longest = 2**31 - 1
    for source in range(5):
        dataset = Corpus.of(np.full(1000, longest, np.int32))
        index = WindowIndex(
            dataset=dataset,
            documents=range(1000),
            sequence_length=4096,
            seed=1,
            source_name=f"source {source}",
            num_epochs=3,
        )
        assert index.tokens_per_epoch == 1000 * longest > 2 * 10**12
        ids = np.random.default_rng(source).integers(0, index.num_samples, 500)
        found = windows(index, ids)
        assert all(begin % 4096 == 0 and end - begin == 4097 for begin, end in found)
        ends = windows(index, np.arange(index.samples_per_epoch - 3, index.samples_per_epoch + 3))
        assert len(set(ends)) == 6


def build(prefix: Path, **settings: Any) -> Any:
    return megaindex.build_index(
        prefix, order="window", **{"sequence_length": 32, "seed": 5, **settings}
    )


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("window") / "c"
    write_corpus(path, np.random.default_rng(4).integers(0, 60, 900))
    return path


@pytest.mark.slow
def test_samples_hold_the_tokens_of_the_file(prefix: Path) -> None:
    dataset = megaindex.IndexedDataset(prefix)
    index = build(prefix, epochs=2)
    seen = []
    for sample in range(index.num_samples):
        spans = index.locate([sample])
        pieces = zip(spans.document, spans.offset, spans.length, strict=True)
        tokens = np.concatenate([dataset.get(d, o, n) for d, o, n in pieces])
        begin = int(tokens[0])  # tokens count on through this corpus
        np.testing.assert_array_equal(tokens, dataset.tokens[begin : begin + 33])
        seen.append(begin)
    half = index.samples_per_epoch
    assert sorted(seen[:half]) == sorted(seen[half:]) == list(range(0, 32 * half, 32))
    assert seen[:half] != seen[half:]


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_samples_are_those_of_the_plan(prefix: Path, epochs: int) -> None:
    index = build(prefix, epochs=epochs)
    plan = plan_json(
        "--data-path", prefix, "--seq-length", 32, "--micro-batch-size", 1,
        "--data-parallel-size", 1, "--epochs", epochs, "--order", "window",
    )  # fmt: skip
    assert plan["train_iters"] == plan["samples_built"] == index.num_samples
    assert plan["num_epochs_built"] == index.num_epochs == epochs
    coverage = plan["datasets"][0]["coverage"]
    dataset = megaindex.IndexedDataset(prefix)
    tokens, _ = count_served(index, index.num_samples, dataset.sequence_lengths, 0)
    for times, count in enumerate(tokens.tolist()):
        assert coverage.get(f"seen_{times}", 0) == pytest.approx(count / dataset.num_tokens)


def test_seed_epoch_and_name_each_give_another_order(prefix: Path, tmp_path: Path) -> None:
    first = build(prefix, epochs=2)
    ids = np.arange(first.samples_per_epoch)
    orders = [
        windows(first, ids),
        windows(first, ids + first.samples_per_epoch),
        windows(build(prefix, seed=6), ids),
        windows(build(prefix, source_name="wiki"), ids),
    ]
    assert len({tuple(order) for order in orders}) == 4
    assert all(sorted(order) == sorted(orders[0]) for order in orders)
    for suffix in (".bin", ".idx"):
        (tmp_path / f"copy{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    assert windows(build(tmp_path / "copy"), ids) == orders[0]


def test_splits_and_numbers_of_samples(prefix: Path) -> None:
    train = build(prefix, split="9,1,0")
    assert train.documents == range(810)
    for asked in (1, train.samples_per_epoch, train.samples_per_epoch + 1):
        index = build(prefix, split="9,1,0", num_samples=asked)
        assert index.num_epochs == -(-asked // train.samples_per_epoch)
    assert len(train.locate([])) == 0


def test_arrays_of_a_window_index_are_refused(prefix: Path) -> None:
    index = build(prefix)
    for name in ("document_index", "sample_index", "shuffle_index"):
        with pytest.raises(megaindex.InvalidArgument, match=f"order window has no {name}"):
            getattr(index, name)
    with pytest.raises(megaindex.OutOfRange, match="the index holds samples 0 to"):
        index.locate([-1])


@for_each(
    ("settings", "message"),
    [
        ({"documents": [0, 2, 1]}, "documents must be a range or a split"),
        ({"sequence_length": 10**6}, "must have at least 1000001 tokens, one sample"),
        ({"drop_last_partial": False}, "drop_last_partial is a setting of order megatron, neox"),
        ({"num_samples": 2**63}, "num_samples must be at least 1 and below 2"),
        ({"epochs": 2**63}, "epochs must be a positive number below 2"),
        ({"epochs": 2**62}, "fewer than 2\\*\\*63 samples"),
    ],
)
def test_bad_settings_are_named(prefix: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(megaindex.InvalidArgument, match=message):
        build(prefix, **settings)


@pytest.mark.parametrize(
    ("per_epoch", "settings"), [(1, {"epochs": 2**63 - 1}), (7, {"num_samples": 2**63 - 1})]
)
def test_as_many_samples_as_have_ids(
    tmp_path: Path, per_epoch: int, settings: dict[str, Any]
) -> None:
    write_corpus(tmp_path / "c", [8 * per_epoch + 1])
    index = megaindex.build_index(
        tmp_path / "c", sequence_length=8, seed=1, order="window", **settings
    )
    assert (index.num_samples, index.samples_per_epoch) == (2**63 - 1, per_epoch)
    assert windows(index, np.array([2**63 - 2]))[0][1] % 8 == 1


def test_sequences_that_do_not_follow_each_other_are_refused() -> None:
    lengths = np.full(6, 10, np.int32)
    settings: dict[str, Any] = {
        "documents": range(6), "sequence_length": 8, "seed": 1, "source_name": "a",
    }  # fmt: skip
    for pointers, nbytes in (([2, 20, 40, 60, 80, 100], 120), ([0, 20, 40, 60, 80, 100], 122)):
        dataset = Corpus(
            sequence_lengths=lengths,
            sequence_pointers=np.array(pointers),
            nbytes=nbytes,
            dtype=np.dtype(np.uint16),
        )
        with pytest.raises(megaindex.FormatError, match="must fill bytes 0 to"):
            WindowIndex(dataset=dataset, **settings)
    for pointers in (
        [0, 20, 60, 40, 80, 100],  # exchanged
        [0, 20, 40, 42, 80, 100],  # overlapping
        [0, 20, 44, 60, 80, 100],  # apart by less than a window
        [0, 0, 0, 0, 0, 100],  # apart by several windows
    ):
        dataset = Corpus(
            sequence_lengths=lengths,
            sequence_pointers=np.array(pointers),
            nbytes=120,
            dtype=np.dtype(np.uint16),
        )
        index = WindowIndex(dataset=dataset, **settings)
        with pytest.raises(megaindex.FormatError, match="needs contiguous sequences"):
            index.locate(np.arange(index.num_samples))


def test_overlapping_sequences_that_every_window_fits_into_are_refused(
    backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No window crosses from one to the other, yet tokens 6 to 11 are of both."""
    monkeypatch.setattr(module, "active", lambda: backend)
    overlapping = Corpus(
        sequence_lengths=np.array([12, 10], np.int32),
        sequence_pointers=np.array([0, 12]),
        nbytes=32,
        dtype=np.dtype(np.uint16),
    )
    index = WindowIndex(
        dataset=overlapping, documents=range(2), sequence_length=5, seed=1, source_name="a"
    )
    assert index.num_samples == 3
    for sample in range(3):
        with pytest.raises(megaindex.FormatError, match="sequence 0 fills bytes 0 to 24 of the"):
            index.locate([sample])
    settings: dict[str, Any] = {"sequence_length": 5, "seed": 1, "source_name": "a"}
    sound = Corpus.of(np.array([12, 0, 4]))
    index = WindowIndex(dataset=sound, documents=range(3), **settings)
    assert sorted(index.locate(range(3)).offset.tolist()) == [0, 0, 5, 10]
    part = Corpus.of(np.array([12, 7, 20, 5]))  # neighbours of a part of the documents stay outside
    WindowIndex(dataset=part, documents=range(1, 3), **settings).locate(range(5))


def test_one_window_may_have_all_tokens(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [4, 5])
    assert build(tmp_path / "c", sequence_length=8).num_samples == 1
    with pytest.raises(megaindex.InvalidArgument, match="must have at least 10 tokens, one sample"):
        build(tmp_path / "c", sequence_length=9)
