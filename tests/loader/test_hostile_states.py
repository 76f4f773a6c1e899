"""Damaged states: each is refused with a typed error and no effect, or loaded as it is."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import FormatError, InvalidArgument, MegaIndexError
from megaindex.format import IndexedDataset
from megaindex.index.receipts import BlockReceipts
from megaindex.index.spans import Index
from megaindex.loader import CyclicSampler, Loader, MicroBatchSampler, Recorder, loader_of_recipe
from megaindex.loader.token_readers import MappedTokens
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target

torch = pytest.importorskip("torch")

S = 16
MICRO = 2


def deep(levels: int = 5_000) -> list[Any]:
    value: list[Any] = []
    for _ in range(levels):
        value = [value]
    return value


VALUES: dict[str, Callable[[], Any]] = {
    **{str(n): lambda n=n: n for n in (-1, 0, 1, 2, 3, 4, 6, 8, 12, 24, 500, 2**31, 2**62)},
    **{str(n): lambda n=n: n for n in (2**63 - 1, 2**63, 2**64, 10**30, -(2**63))},
    "ten thousand digits": lambda: 10**10_000,
    **{repr(text): lambda text=text: text for text in ("", "x", "1", "0" * 32, "+" * 32, "cyclic")},
    **{repr(x): lambda x=x: x for x in (0.0, 4.0, 1e400, -1e400, float("nan"), True, False, None)},
    "deep": deep,
    "deep text": lambda: "[" * 5_000,
    "list": list,
    "pair": lambda: ["0" * 32, 3],
    "mapping": dict,
    "numbers as keys": lambda: {1: 2, "x": 3},
    "int64": lambda: np.int64(4),
    "array": lambda: np.array([1, 2]),
    "tensor": lambda: torch.tensor([1, 2]),
}


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            yield from places(value[key], (*path, key))


def is_place(values: list[Any], key: Any) -> bool:
    return isinstance(key, int) and key < len(values)


def changed(state: dict[str, Any], data: st.DataObject) -> Any:
    """With other values at one place or two, without one, or with a key that is no text."""
    state = copy.deepcopy(state)
    name = data.draw(st.sampled_from(sorted(VALUES)))
    everywhere = list(places(state))
    for _ in range(data.draw(st.integers(1, 2))):
        place = data.draw(st.sampled_from(everywhere))
        if not place:
            return VALUES[name]()
        inner: Any = state
        with contextlib.suppress(LookupError, TypeError):  # what lies in a value that was replaced
            for key in place[:-1]:
                inner = inner[key]
        if not isinstance(inner, dict | list):
            continue
        if not (place[-1] in inner if isinstance(inner, dict) else is_place(inner, place[-1])):
            continue
        how = data.draw(st.sampled_from(["replace"] * 8 + ["remove", "key"]))
        if how == "replace":
            inner[place[-1]] = VALUES[name]()
        elif how == "remove":
            del inner[place[-1]]
        elif isinstance(inner, dict):
            inner[7] = 7
    return state


def summed(receipt: dict[str, Any]) -> str:
    """A receipt without what states of earlier versions lack: it may be missing, or another's."""
    later = ("in_place", "misplaced", "data_parallel_rank", "data_parallel_size")
    return json.dumps({name: receipt[name] for name in receipt if name not in later})


def consumed_of(loader: Any) -> int:
    """From a checkpoint that is JSON, whatever it went on from."""
    state: dict[str, Any] = json.loads(json.dumps(loader.state_dict()))
    state = state.get("loader", state)
    assert state["consumed_samples"] == state["sampler"]["consumed_samples"]
    return int(state["consumed_samples"])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(2).integers(1, 60, 60)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths, np.uint16)


@pytest.fixture(scope="module")
def index(corpus: IndexedDataset) -> Index:
    return megaindex.build_index(corpus, sequence_length=S, seed=4)


def sampler(index: Index, **changes: Any) -> MicroBatchSampler:
    given: dict[str, Any] = {
        "num_samples": index.num_samples, "micro_batch_size": MICRO, "data_parallel_rank": 0,
        "data_parallel_size": 1, "global_batch_size": 12, "fingerprint": "order 1",
    }  # fmt: skip
    return MicroBatchSampler(**{**given, **changes})


def loader_of(index: Index, corpus: IndexedDataset, batches: int, **changes: Any) -> Loader:
    """One that has handed over so many batches."""
    recorder = Recorder(["0" * 31 + "1"], {"seed": 4}, stride=8)
    made = Loader(index, corpus, sampler(index, **changes), recorder=recorder, read_ahead=0)
    iterator = iter(made)
    for _ in range(batches):
        next(iterator)
    return made


QUICK = settings(phases=[Phase.generate])  # what is drawn is small already


@QUICK
@given(data=st.data(), batches=st.integers(0, 11), tail=st.sampled_from(["drop", "pad", "wrap"]))
def test_any_value_in_the_state_of_a_loader(
    corpus: IndexedDataset, index: Index, data: st.DataObject, batches: int, tail: str
) -> None:
    state = changed(loader_of(index, corpus, batches, tail=tail).state_dict(), data)
    loader = loader_of(index, corpus, 2, tail=tail)
    before = loader.state_dict()
    allow = data.draw(st.sampled_from([(), ("order",), ("receipt",), ("kind", "fingerprint")]))
    try:
        loader.load_state_dict(state, allow=allow)
    except MegaIndexError:
        assert loader.state_dict() == before
        expected = range(2 * MICRO, 3 * MICRO)
        loader = Loader(index, corpus, sampler(index, consumed_samples=4), read_ahead=0)
    else:
        after = loader.state_dict()
        assert consumed_of(loader) == state["consumed_samples"]
        nothing = loader_of(index, corpus, 0).state_dict()["receipt"]
        assert summed(after["receipt"]) == summed(state["receipt"] or nothing)
        if state["sampler"]["kind"] == "single":
            assert after["sampler"]["rows_left"] == state["sampler"]["rows_left"]
        consumed = int(state["consumed_samples"])
        expected = range(consumed, consumed + MICRO)
    most = index.num_samples // MICRO + 12
    assert len(loader) <= most
    batch = next(iter(loader), None)
    if batch is not None and expected.stop <= index.num_samples:
        right = np.empty((MICRO, S), np.int64)
        MappedTokens([corpus]).read(index.locate(expected), right, pad_id=0)
        np.testing.assert_array_equal(batch["tokens"].numpy(), right)


@QUICK
@given(data=st.data(), kind=st.sampled_from(["single", "cyclic"]), rounds=st.integers(0, 20))
def test_any_value_in_the_state_of_a_sampler(data: st.DataObject, kind: str, rounds: int) -> None:
    common = {"num_samples": 90, "micro_batch_size": 2, "data_parallel_size": 2}

    def make(rank: int = 0) -> MicroBatchSampler | CyclicSampler:
        if kind == "cyclic":
            return CyclicSampler(train_samples=180, data_parallel_rank=rank, **common)
        return MicroBatchSampler(
            global_batch_size=12, tail="wrap", data_parallel_rank=rank, **common
        )

    state = changed(make().state_after(rounds), data)
    resumed = make()
    resumed.load_state_dict(resumed.state_after(1))
    before = resumed.state_dict()
    allow = data.draw(st.sampled_from([(), ("kind",), ("num_samples", "train_samples")]))
    try:
        resumed.load_state_dict(state, allow=allow)
    except MegaIndexError:
        assert resumed.state_dict() == before
        return
    after = json.loads(json.dumps(resumed.state_dict()))
    assert after["consumed_samples"] == state["consumed_samples"]
    assert len(resumed) == len(list(resumed)) <= 50
    again = make()
    again.load_state_dict(after, allow=allow)
    assert list(again) == list(resumed)


@QUICK
@given(data=st.data())
def test_any_value_in_the_state_of_a_recorder(
    corpus: IndexedDataset, index: Index, data: st.DataObject
) -> None:
    whole = loader_of(index, corpus, 9).state_dict()["receipt"]
    recorder = Recorder(["0" * 31 + "1"], {"seed": 4}, stride=8)
    recorder.add([1], index.locate([1]))
    before = recorder.state_dict()
    state = changed(whole, data)
    try:
        recorder.load_state_dict(state)
    except MegaIndexError:
        assert recorder.state_dict() == before
    else:
        assert summed(recorder.state_dict()) == summed(state)
        recorder.add([3], index.locate([3]))
        assert recorder.receipt.count == int(state["samples"]) + 1


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenRecipe:
    folder = tmp_path_factory.mktemp("sources")
    for number, name in enumerate(("web", "code")):
        lengths = np.random.default_rng(number).integers(1, 70, 50)
        write_corpus(folder / name, lengths, np.int32)
    mix = (Stream(source="web", proportion=Fraction(2)), Stream(source="code", proportion=1))
    length = Target(kind="iterations", value=Fraction(9))
    return open_recipe(
        Recipe(
            sequence_length=S,
            batch=BatchSchedule.constant(4),
            sources=tuple(
                RecipeSource(name=name, path=str(folder / name)) for name in ("web", "code")
            ),
            stages=(RecipeStage(name="one", streams=mix, length=length),),
        )
    )


@QUICK
@given(data=st.data(), batches=st.integers(0, 9))
def test_any_value_in_the_state_of_a_recipe(
    opened: OpenRecipe, data: st.DataObject, batches: int
) -> None:
    def make(batches: int) -> Loader:
        made = loader_of_recipe(opened, micro_batch_size=MICRO, read_ahead=0)
        iterator = iter(made)
        for _ in range(batches):
            next(iterator)
        return made

    state = changed(make(batches).state_dict(), data)
    loader = make(3)
    before = loader.state_dict()
    allow = data.draw(st.sampled_from([(), ("past",), ("content", "targets")]))
    try:
        loader.load_state_dict(state, allow=allow)
    except MegaIndexError:
        assert loader.state_dict() == before
        return
    assert consumed_of(loader) == loader.consumed_samples == state["consumed_samples"]
    expected = range(loader.consumed_samples, loader.consumed_samples + MICRO)
    batch = next(iter(loader), None)
    if batch is not None:
        right = np.empty((MICRO, S), np.int64)
        MappedTokens(opened.datasets).read(opened.index.locate(expected), right, pad_id=0)
        np.testing.assert_array_equal(batch["tokens"].numpy(), right)


def test_a_state_with_two_positions_is_refused(corpus: IndexedDataset, index: Index) -> None:
    """Its first batch was once served again, under a receipt that counted it."""
    state = loader_of(index, corpus, 3).state_dict()
    state["sampler"]["consumed_samples"] = 0
    loader = loader_of(index, corpus, 0)
    with pytest.raises(FormatError, match="consumed_samples of its sampler must be 6"):
        loader.load_state_dict(state)
    state = loader_of(index, corpus, 3).state_dict()
    other = loader_of(index, corpus, 9).state_dict()["receipt"]
    with pytest.raises(InvalidArgument, match="counts 18 samples"):
        loader.load_state_dict({**state, "receipt": other})
    assert loader.state_dict()["consumed_samples"] == 0
    loader.load_state_dict({**state, "receipt": other}, allow=["receipt"])
    assert loader.state_dict()["receipt"] == other


def test_a_receipt_that_counts_too_many_samples_is_allowed_by_name(
    corpus: IndexedDataset, index: Index
) -> None:
    """As earlier versions left it where a loader was iterated anew after a break."""
    state = loader_of(index, corpus, 1).state_dict()
    state["receipt"] = loader_of(index, corpus, 6).state_dict()["receipt"]
    assert (state["consumed_samples"], state["receipt"]["samples"]) == (2, 12)
    fresh = loader_of(index, corpus, 0)
    with pytest.raises(InvalidArgument, match=r'counts 12 samples, .* allow=\("receipt",\)'):
        fresh.load_state_dict(state)
    fresh.load_state_dict(state, allow=("receipt",))
    assert fresh.state_dict() == state


@for_each("wrong", [None, [], 3, "state", {}, {1: 2, "version": 9}, {"version": True}])
def test_values_that_are_not_states_are_refused(
    corpus: IndexedDataset, index: Index, opened: OpenRecipe, wrong: Any
) -> None:
    recorder = Recorder(["0" * 32])
    for load in (
        loader_of(index, corpus, 0).load_state_dict,
        sampler(index).load_state_dict,
        recorder.load_state_dict,
        loader_of_recipe(opened, micro_batch_size=MICRO).load_state_dict,
    ):
        with pytest.raises(FormatError, match=r"^not the state of .* from an intact checkpoint$"):
            load(wrong)
    with pytest.raises(FormatError, match="^not block receipts"):
        BlockReceipts.from_dict(wrong)


def test_keys_of_a_state_are_text(corpus: IndexedDataset, index: Index) -> None:
    loader = loader_of(index, corpus, 1)
    with pytest.raises(FormatError, match="its keys must be text, got 7; take it from an intact"):
        loader.load_state_dict({**loader.state_dict(), 7: 0})


def test_rows_left_are_bounded_by_the_largest_step() -> None:
    def make(batch: int, tail: str = "wrap") -> MicroBatchSampler:
        return MicroBatchSampler(num_samples=60, micro_batch_size=2, data_parallel_rank=0,
                                 data_parallel_size=2, global_batch_size=batch, tail=tail)  # type: ignore[arg-type]  # fmt: skip

    state = make(24).state_after(1)
    assert (state["rows_left"], state["largest_step"]) == (20, 24)
    with pytest.raises(FormatError, match="rows_left must be a whole number from 0 to 23"):
        make(24).load_state_dict({**state, "rows_left": 24})
    small = make(4)
    small.load_state_dict(state)  # the step goes on, with its rows, whatever comes after
    assert small.state_after(1) == {**state, "consumed_samples": 8, "rows_left": 16}
    assert len(small) == 5 + 9
    ended = make(24).state_after(len(make(24)))
    assert ended["consumed_samples"] == 72
    small.load_state_dict(ended)
    assert list(small) == []
    assert small.state_dict()["largest_step"] == 24
    for beyond in (60 + 24, 2**62):
        with pytest.raises(
            InvalidArgument, match=f"is at {beyond} samples .* past the end of this run, 83"
        ):
            small.load_state_dict({**ended, "consumed_samples": beyond})
    without = {name: ended[name] for name in ended if name != "largest_step"}
    with pytest.raises(FormatError, match="it has no largest_step"):
        make(4).load_state_dict(without)


def test_states_with_integers_of_numpy_still_load(corpus: IndexedDataset, index: Index) -> None:
    """Pickled ones may hold them; JSON never did."""
    state = loader_of(index, corpus, 3).state_dict()
    with_numpy = {
        **state,
        "consumed_samples": np.int64(6),
        "sampler": {
            name: np.int64(value) if type(value) is int and name != "version" else value
            for name, value in state["sampler"].items()
        },
    }
    loader = loader_of(index, corpus, 0)
    loader.load_state_dict(with_numpy)
    assert json.dumps(loader.state_dict()) == json.dumps(state)


def test_a_recipe_says_what_is_wrong_with_its_sources(opened: OpenRecipe, tmp_path: Path) -> None:
    loader = loader_of_recipe(opened, micro_batch_size=MICRO)
    state = loader.state_dict()
    part = state["recipe"]
    web, code = part["sources"]
    for sources, message in (
        ([{**web, "tokens": 5}, code], "source web must have .* tokens, .* content, got 5"),
        ([{**web, "tokens": 10**30}, code], "tokens must be a whole number from 1 to 46116860184"),
        ([{**web, "samples": float("inf")}, code], "samples must be a whole number .* got inf"),
        ([{**web, "fingerprint": 3}, code], "fingerprint must be 32 hex digits, got 3"),
        ([web], r"sources must equal those of its recipe, \['web', 'code'\]"),
        ([web, web, code], "sources must equal those of its recipe"),
    ):
        with pytest.raises(FormatError, match=message):
            loader.load_state_dict({**state, "recipe": {**part, "sources": sources}})
    for text, message in (
        ("[" * 5_000, "recipe cannot be read .*RecursionError"),
        ("{}", "recipe cannot be read .*sequence_length is missing"),
    ):
        with pytest.raises(FormatError, match=message):
            loader.load_state_dict({**state, "recipe": {**part, "text": text}})
