"""Order ``epoch``: complete passes, stable under extension, equal to brute force."""

from __future__ import annotations

import itertools
import os
import pickle
import signal
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.bounds import check_bounds
from support.command_line import plan_json
from support.corpora import write_corpus

import megaindex
from megaindex import EpochOrder
from megaindex.arithmetic import samples_for_epochs
from megaindex.index.array_index import ArrayIndex
from megaindex.index.orders import epoch as epoch_module
from megaindex.index.orders.epoch import EpochIndex, PassTables
from megaindex.kernels import load, num_threads
from megaindex.plan.coverage import count_served

LENGTHS = st.lists(st.integers(0, 30), min_size=1, max_size=40).filter(lambda x: sum(x) > 20)
NUMBERS = itertools.count()


@st.composite
def indices(draw: st.DrawFn) -> EpochIndex:
    lengths = np.array(draw(LENGTHS), np.int32)
    documents: Any = range(lengths.size)
    if draw(st.booleans()):
        chosen = np.flatnonzero(np.array(draw(st.permutations(range(lengths.size)))) % 3 > 0)
        documents = chosen.astype(np.int32)
    tokens = int(lengths[documents].sum())
    extra = draw(st.integers(0, 1))
    mixed = draw(st.integers(1, 3))
    length = draw(st.integers(1, 19 if tokens > 20 else max(1, tokens - extra)))
    if tokens < length + extra:
        documents, tokens = range(lengths.size), int(lengths.sum())
    return EpochIndex(
        sequence_lengths=lengths,
        documents=documents,
        tokens_per_epoch=tokens,
        sequence_length=length,
        seed=draw(st.integers(0, 2**32 - 1)),
        source_name=draw(st.sampled_from(["wiki", "code", ""])),
        num_epochs=mixed * draw(st.integers(1, 3)),
        epochs_mixed=mixed,
        left_over=draw(st.sampled_from(["drop", "carry"])),
        add_extra_token=extra,
    )


def corpus_tokens(index: Any, ids: Any) -> list[np.ndarray]:
    """Per sample, its tokens as numbers counted through the whole corpus."""
    starts = np.concatenate(([0], np.cumsum(index.sequence_lengths, dtype=np.int64)))
    spans = index.locate(ids)
    assert (spans.length > 0).all()
    assert (spans.offset + spans.length <= index.sequence_lengths[spans.document]).all()
    begins = starts[spans.document] + spans.offset
    runs = [np.arange(b, b + n) for b, n in zip(begins, spans.length, strict=True)]
    splits = spans.row_splits
    nothing = [np.zeros(0, np.int64)]
    return [np.concatenate(nothing + runs[a:b]) for a, b in itertools.pairwise(splits)]


def brute_force(index: EpochIndex) -> list[np.ndarray]:
    """Every sample in the order of training, from the concatenated passes."""
    starts = np.concatenate(([0], np.cumsum(index.sequence_lengths, dtype=np.int64)))
    passes = []
    for block in range(index.num_blocks):
        documents = index.permuted_documents(block)
        passes.append([np.arange(starts[d], starts[d + 1]) for d in documents])
    S, width = index.sequence_length, index.sequence_length + index.add_extra_token
    served: list[np.ndarray] = []
    stream = np.zeros(0, np.int64)
    for block, runs in enumerate(passes):
        if index.left_over == "drop":
            stream = np.zeros(0, np.int64)
        stream = np.concatenate([stream, *runs])
        first = len(served) if index.left_over == "carry" else 0
        cut = []
        while (first + len(cut)) * S + width <= stream.size:
            at = (first + len(cut)) * S
            cut.append(stream[at : at + width])
        served += [cut[i] for i in index.shuffled_samples(block)]
    return served


@given(index=indices())
def test_locate_reads_the_concatenated_passes(index: EpochIndex) -> None:
    expected = brute_force(index)
    assert index.num_samples == len(expected)
    ids = np.random.default_rng(1).permutation(index.num_samples)
    for tokens, sample in zip(corpus_tokens(index, ids), ids, strict=True):
        np.testing.assert_array_equal(tokens, expected[sample])


@given(index=indices())
def test_each_block_is_a_complete_pass(index: EpochIndex) -> None:
    S = index.sequence_length
    starts = np.concatenate(([0], np.cumsum(index.sequence_lengths, dtype=np.int64)))
    part = np.zeros(int(starts[-1]), np.int64)  # tokens of one epoch
    for document in np.asarray(index.documents):
        part[starts[document] : starts[document + 1]] = 1
    assert part.sum() == index.tokens_per_epoch
    for block in range(index.num_blocks):
        documents = np.sort(index.permuted_documents(block))
        np.testing.assert_array_equal(
            documents, np.sort(np.tile(index.documents, index.epochs_mixed))
        )
        shuffled = np.sort(index.shuffled_samples(block))
        np.testing.assert_array_equal(shuffled, np.arange(shuffled.size))
    times = np.zeros(part.size, np.int64)
    left = index.num_samples * S
    for block in range(index.num_blocks):
        ids = np.arange(index.samples_before(block), index.samples_before(block + 1))
        for tokens in corpus_tokens(index, ids):
            assert tokens.size == S + index.add_extra_token
            np.add.at(times, tokens[:S], 1)
        if index.left_over == "drop":
            # within the blocks so far, no token is served more often than it is there
            assert (times <= (block + 1) * index.epochs_mixed * part).all()
    assert times.sum() == left
    assert (times <= index.num_epochs * part).all()
    assert (index.num_epochs * part - times).sum() == index.tokens_left_over
    per_block = S - 1 + index.add_extra_token
    bound = per_block * (index.num_blocks if index.left_over == "drop" else 1)
    assert index.tokens_left_over <= bound


@given(index=indices(), more=st.integers(1, 3))
def test_more_epochs_change_nothing_before(index: EpochIndex, more: int) -> None:
    longer = index.extend(index.num_epochs + more * index.epochs_mixed)
    assert longer.num_samples > index.num_samples
    ids = np.arange(index.num_samples)
    for one, other in zip(index.locate(ids), longer.locate(ids), strict=True):
        np.testing.assert_array_equal(one, other)


@given(index=indices(), ranks=st.integers(1, 5))
def test_ranks_together_read_one_pass(index: EpochIndex, ranks: int) -> None:
    epoch = np.arange(index.samples_before(1))
    together = [corpus_tokens(index, epoch[rank::ranks]) for rank in range(ranks)]
    read = np.sort(np.concatenate([t[: index.sequence_length] for part in together for t in part]))
    whole = brute_force(index.extend(index.epochs_mixed))
    expected = np.concatenate([tokens[: index.sequence_length] for tokens in whole])
    np.testing.assert_array_equal(read, np.sort(expected))


@given(index=indices())
def test_arrays_of_an_epoch_read_the_same(index: EpochIndex) -> None:
    for epoch in range(0, index.num_epochs, index.epochs_mixed):
        block = epoch // index.epochs_mixed
        arrays = index.materialise(epoch + index.epochs_mixed - 1)
        held = ArrayIndex(
            order="epoch",
            **arrays._asdict(),
            sequence_lengths=index.sequence_lengths,
            sequence_length=index.sequence_length,
            num_epochs=1,
            tokens_per_epoch=index.tokens_per_epoch,
            add_extra_token=index.add_extra_token,
        )
        ids = np.arange(held.num_samples)
        ours = corpus_tokens(index, index.samples_before(block) + ids)
        for one, other in zip(ours, corpus_tokens(held, ids), strict=True):
            np.testing.assert_array_equal(one, other)


@given(index=indices(), share=st.floats(0, 1))
def test_coverage_in_closed_form_is_what_is_served(index: EpochIndex, share: float) -> None:
    served = round(share * index.samples_before(1))
    chosen = np.sort(np.asarray(index.documents))
    if chosen.size != chosen[-1] - chosen[0] + 1 or index.epochs_mixed > 1:
        return
    lengths = index.sequence_lengths[chosen]
    tokens, _ = count_served(index, served, lengths, int(chosen[0]))
    once = served * index.sequence_length
    assert tokens[:2].tolist() == [index.tokens_per_epoch - once, once]
    assert tokens[2:].sum() == 0


# ---- through the public door -------------------------------------------------------------------


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    lengths = np.random.default_rng(4).integers(0, 60, 900)
    path = tmp_path_factory.mktemp("epoch") / "c"
    write_corpus(path, lengths)
    return path


def build(prefix: Path, **settings: Any) -> Any:
    return megaindex.build_index(
        prefix, **{"order": "epoch", "sequence_length": 32, "seed": 5, **settings}
    )


@pytest.mark.parametrize("backend_name", ["reference", "numba", "native"])
@pytest.mark.parametrize("left_over", ["drop", "carry"])
def test_every_backend_has_the_same_order(
    prefix: Path, backend_name: str, left_over: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    if backend_name == "native" and os.environ.get("MEGAINDEX_NO_NATIVE") == "1":
        pytest.skip("installed without the native core")
    order = EpochOrder(epochs_mixed=2, left_over=left_over)
    settings = {"epochs": 6, "order": order}
    expected = build(prefix, **settings).locate(np.arange(300))
    monkeypatch.setattr(epoch_module, "active", lambda: load(backend_name))
    actual = build(prefix, **settings).locate(np.arange(300))
    for one, other in zip(actual, expected, strict=True):
        np.testing.assert_array_equal(one, other)


def test_seed_epoch_and_name_each_give_another_order(prefix: Path) -> None:
    first = build(prefix, epochs=3)
    others = [
        build(prefix, epochs=3, seed=6),
        build(prefix, epochs=3, source_name="wiki"),
        build(prefix, epochs=3, source_name=""),
        build(prefix, epochs=4, order=EpochOrder(epochs_mixed=2)),
    ]
    orders = {tuple(index.permuted_documents(0)[:50]) for index in [first, *others]}
    orders |= {tuple(first.permuted_documents(block)[:50]) for block in (1, 2)}
    assert len(orders) == 7
    samples = {tuple(index.shuffled_samples(0)[:50]) for index in [first, *others]}
    samples |= {tuple(first.shuffled_samples(block)[:50]) for block in (1, 2)}
    assert len(samples) == 7


def test_the_same_content_elsewhere_keeps_its_order(prefix: Path, tmp_path: Path) -> None:
    copy = tmp_path / "renamed"
    for suffix in (".bin", ".idx"):
        Path(f"{copy}{suffix}").write_bytes(Path(f"{prefix}{suffix}").read_bytes())
    ids = np.arange(200)
    for one, other in zip(build(prefix).locate(ids), build(copy).locate(ids), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("epochs", [1, 2, 5])
def test_samples_are_those_of_the_plan(prefix: Path, epochs: int) -> None:
    index = build(prefix, epochs=epochs)
    plan = plan_json(
        "--data-path", prefix, "--seq-length", 32, "--micro-batch-size", 1,
        "--data-parallel-size", 1, "--epochs", epochs, "--order", "epoch",
    )  # fmt: skip
    assert plan["train_iters"] == plan["samples_built"] == index.num_samples
    assert plan["num_epochs_built"] == index.num_epochs == epochs
    if epochs == 1:
        lengths = megaindex.IndexedDataset(prefix).sequence_lengths
        counted, _ = count_served(index, index.num_samples, lengths, 0)
        shares = plan["datasets"][0]["coverage"]
        assert list(shares) == ["seen_0", "seen_1"]
        assert list(shares.values()) == pytest.approx(list(counted[:2] / counted.sum()))
    carried = build(prefix, epochs=epochs, order=EpochOrder(left_over="carry"))
    tokens = index.tokens_per_epoch
    assert carried.num_samples == samples_for_epochs(epochs, tokens, 32)
    assert index.num_samples == samples_for_epochs(epochs, tokens, 32, carry_left_over=False)


@pytest.mark.parametrize("left_over", ["drop", "carry"])
@pytest.mark.parametrize("mixed", [1, 2])
def test_the_index_holds_the_samples_asked_for_and_no_block_more(
    prefix: Path, left_over: Any, mixed: int
) -> None:
    order = EpochOrder(epochs_mixed=mixed, left_over=left_over)
    block = build(prefix, epochs=mixed, order=order).num_samples
    for asked in (1, block, block + 1, 5 * block):
        index = build(prefix, num_samples=asked, order=order)
        assert index.num_samples >= asked > index.samples_before(index.num_blocks - 1)
    assert build(prefix, epochs="1.5").num_epochs == 2


def test_arrays_of_an_epoch_index_are_refused(prefix: Path) -> None:
    index = build(prefix)
    for name in ("document_index", "sample_index", "shuffle_index"):
        with pytest.raises(megaindex.InvalidArgument, match=rf"has no {name}.*materialise"):
            getattr(index, name)
    arrays = index.materialise(0)
    assert [a.dtype.name for a in arrays] == ["int32", "int32", "uint32"]
    with pytest.raises(megaindex.OutOfRange, match="epoch must be from 0 to 0"):
        index.materialise(1)
    with pytest.raises(megaindex.OutOfRange, match="the index holds samples 0 to"):
        index.locate([index.num_samples])
    assert len(index.locate([])) == 0


def test_a_sample_is_located_as_often_as_it_is_asked_for(prefix: Path) -> None:
    """Also one that begins in the epoch before."""
    for order in (EpochOrder(), EpochOrder(left_over="carry")):
        index = build(prefix, epochs=6, order=order)
        once = index.locate(np.arange(index.num_samples))
        thrice = index.locate(np.repeat(np.arange(index.num_samples), 3))
        for k in range(index.num_samples):
            first, end = once.row_splits[k : k + 2]
            for row in range(3 * k, 3 * k + 3):
                begin, stop = thrice.row_splits[row : row + 2]
                for ours, theirs in zip(once, thrice, strict=True):
                    assert np.array_equal(ours[first:end], theirs[begin:stop])


def test_threads_pickles_and_forks_read_the_same(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epoch_module, "WORTH_PREPARING", 1)
    order = EpochOrder(left_over="carry")
    index = build(prefix, epochs=20, order=order)
    ids = np.random.default_rng(0).integers(0, index.num_samples, 400)
    expected = [array.tolist() for array in build(prefix, epochs=20, order=order).locate(ids)]
    with ThreadPoolExecutor(4) as pool:
        for spans in pool.map(index.locate, [ids] * 8):
            assert [array.tolist() for array in spans] == expected
    copy = pickle.loads(pickle.dumps(index))
    assert [array.tolist() for array in copy.locate(ids)] == expected
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Python 3.12 warns of forks while there are threads
        child = os.fork()
    if child == 0:
        same = [array.tolist() for array in index.locate(ids)] == expected
        os._exit(0 if same else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_table_that_the_parent_is_making_is_made_by_the_child() -> None:
    """The thread that makes it does not exist in a forked process, which would wait for ever."""
    parent, begun, go_on = os.getpid(), threading.Event(), threading.Event()

    def make(block: int, threads: int) -> int:
        if os.getpid() == parent:
            begun.set()
            go_on.wait(60)
        return block + 7

    tables: PassTables[int, int] = PassTables(make)
    tables.prepare(3)
    assert begun.wait(60)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # fork beside threads
        child = os.fork()
    if child == 0:
        signal.alarm(20)
        os._exit(0 if tables.get(3) == 10 else 1)
    status = os.waitpid(child, 0)[1]
    go_on.set()
    assert os.waitstatus_to_exitcode(status) == 0
    assert tables.get(3) == 10


def test_tables_are_kept_in_the_cache(
    prefix: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = build(prefix, epochs=3).locate(range(40))
    monkeypatch.setattr("megaindex.builders.single._WORTH_KEEPING", 1)
    index = build(prefix, epochs=3, cache_dir=tmp_path)
    for each in (index, pickle.loads(pickle.dumps(index))):
        assert [a.tolist() for a in each.locate(range(40))] == [a.tolist() for a in expected]
    tables = sorted(tmp_path.glob("*/starts.npy"))
    assert tables
    again = build(prefix, epochs=3, cache_dir=tmp_path)
    again.locate(range(40))
    assert sorted(tmp_path.glob("*/starts.npy")) == tables
    for change in (
        {"seed": 8},
        {"source_name": "b"},
        {"documents": range(1, 40)},
        {"order": EpochOrder(epochs_mixed=2), "epochs": 4},
    ):
        known = {*tmp_path.glob("*/starts.npy")}
        build(prefix, **{"epochs": 3, "cache_dir": tmp_path, **change}).locate([0])
        assert known < {*tmp_path.glob("*/starts.npy")}, change


def test_a_table_that_could_not_be_made_is_tried_again() -> None:
    tables_made = []

    def make(block: int, threads: int) -> np.ndarray:
        tables_made.append(block)
        if len(tables_made) == 1:
            raise MemoryError("no room")
        return np.array([block])

    tables = PassTables(make)
    with pytest.raises(MemoryError, match="no room"):
        tables.get(7)
    assert tables.get(7).tolist() == [7]
    for block in (8, 9, 10, 7):
        assert tables.get(block).tolist() == [block]
    assert tables_made == [7, 7, 8, 9, 10, 7]  # three are kept


def test_without_another_thread_a_table_is_built_when_it_is_read(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    caplog.set_level("INFO", "megaindex")
    tables = PassTables(lambda block, threads: np.array([block, threads]))
    with monkeypatch.context() as limited:
        limited.setattr(threading.Thread, "start", start)
        tables.prepare(7)
    assert caplog.messages == ["megaindex-epoch-7 is not prepared ahead: can't start new thread"]
    found: list[list[int]] = []
    reader = threading.Thread(target=lambda: found.append(tables.get(7).tolist()), daemon=True)
    reader.start()
    reader.join(20)  # not for ever, if it waits for the table that nobody builds
    assert found == [[7, num_threads()]]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"epochs": 3, "order": EpochOrder(epochs_mixed=2)}, "multiple of epochs_mixed 2"),
        ({"sequence_length": 10**6}, "one sample needs 1000001"),
        ({"drop_last_partial": False}, "drop_last_partial is a setting of order megatron"),
        ({"order": "neox", "source_name": "a"}, "source_name is a setting of order epoch, window"),
        ({"epochs": 10**18}, "cannot be counted in 64 bits"),
    ],
)
def test_bad_settings_are_named(prefix: Path, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(megaindex.InvalidArgument, match=message):
        megaindex.build_index(
            prefix, **{"order": "epoch", "sequence_length": 32, "seed": 5, **settings}
        )


def of_one_document(tokens: int, **settings: Any) -> EpochIndex:
    return EpochIndex(
        sequence_lengths=np.array([tokens], np.int32), documents=range(1), tokens_per_epoch=tokens,
        sequence_length=1, seed=1, source_name="", add_extra_token=0, **settings,
    )  # fmt: skip


def test_the_most_tokens_and_mixed_documents() -> None:
    most, says = (2**63 - 1) // 73, "cannot be counted in 64 bits"  # without a remainder
    check_bounds(lambda n: of_one_document(73, num_epochs=n), [most], [most + 1], says)
    mixed = (2**62, 2**62 + 1)
    check_bounds(
        lambda n: of_one_document(1, num_epochs=n, epochs_mixed=n), mixed[:1], mixed[1:], says
    )


def test_passes_are_found_exactly_up_to_their_bound(
    prefix: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"epochs": 3, "order": EpochOrder(left_over="carry")}
    exact = build(prefix, **settings).pass_runs
    monkeypatch.setattr(epoch_module, "MOST_PASSES", 3)
    assert build(prefix, **settings).pass_runs.starts.tolist() == exact.starts.tolist()
    assert exact.starts.size > 3  # the samples that begin with carried tokens


@pytest.mark.parametrize(
    ("sequence_length", "first"), [(3, (9, 0)), (19, (9, 1)), (8, (8, 0)), (17, (8, 1))]
)
def test_arrays_begin_with_the_first_document_that_a_carried_token_is_of(
    tmp_path: Path, sequence_length: int, first: tuple[int, int]
) -> None:
    """Of ten documents of two tokens, 2, 1, 4 and 3 tokens are carried."""
    write_corpus(tmp_path / "c", [2] * 10)
    index = build(
        tmp_path / "c", sequence_length=sequence_length, epochs=2,
        order=EpochOrder(left_over="carry"),
    )  # fmt: skip
    arrays, before = index.materialise(1), index.permuted_documents(0)[first[0] :]
    assert arrays.document_index.tolist() == [*before, *index.permuted_documents(1)]
    assert arrays.sample_index[0].tolist() == [0, first[1]]
