"""Integers of NumPy at every entrance: the same results as with Python's own."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import EpochOrder, MegatronOrder, NeoxDocumentsOrder
from megaindex.corpus import tokenize
from megaindex.engine import open_engine
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.extension import extend_index, times_served
from megaindex.index.receipts import explain, fingerprint_keys, planned_block_receipts
from megaindex.plan import make_plan
from megaindex.run.run import RunSource, run_of_index
from megaindex.settings.batch_schedule import BatchSchedule, ramp_up
from megaindex.settings.recipe import Recipe, RecipeEvaluation, RecipeSource, RecipeStage, Stream
from megaindex.settings.recipe_file import to_mapping
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import Data, Evaluation, RunSettings, Target
from megaindex.settings.settings import Settings
from megaindex.settings.sources import Source
from megaindex.validation import (
    check_exact,
    check_fraction,
    check_integer,
    check_number,
    differ,
    percent,
    shown,
)

N = Callable[[int], Any]
"""Makes an integer of one kind or another."""
KINDS: list[N] = [np.int32, np.int64, np.uint8]
KEYS = fingerprint_keys(["0123456789abcdef" * 2])


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    lengths = np.random.default_rng(3).integers(1, 60, 90)
    return write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths, np.uint16, eod=9)


def everything_in(value: Any) -> Iterator[Any]:
    """All scalars in nested results."""
    if dataclasses.is_dataclass(value):
        value = vars(value)
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    if isinstance(value, (list, tuple)):
        for part in value:
            yield from everything_in(part)
    else:
        yield value


def assert_plain(value: Any) -> None:
    for one in everything_in(value):
        assert not isinstance(one, (np.generic, np.ndarray)), one
        if isinstance(one, Fraction):
            assert type(one.numerator) is type(one.denominator) is int


def facts(index: Any) -> dict[str, Any]:
    spans = index.locate(np.arange(min(index.num_samples, 150)))
    sizes = ("num_samples", "num_epochs", "tokens_per_epoch", "sequence_length", "add_extra_token")
    rows = [part.tolist() for part in (*spans, spans.row_splits)]
    return {"rows": rows, **{name: getattr(index, name) for name in sizes}}


INDICES: dict[str, Callable[[N], dict[str, Any]]] = {
    "megatron": lambda n: {"num_samples": n(200)},
    "one epoch": lambda n: {"add_extra_token": n(0)},
    "float epochs": lambda n: {"epochs": np.float32(1.5) if n is not int else 1.5},
    "threshold": lambda n: {
        "num_samples": n(200),
        "order": MegatronOrder(final_epoch_threshold=n(1)),
    },
    "exact": lambda n: {"num_samples": n(230), "order": MegatronOrder(exact_num_epochs=n(2))},
    "neox": lambda n: {"order": "neox", "num_samples": n(200)},
    "packing": lambda n: {"num_samples": n(80), "order": NeoxDocumentsOrder(pack_impl="unpacked")},
    "epoch": lambda n: {"num_samples": n(200), "order": EpochOrder(epochs_mixed=n(2))},
    "carry": lambda n: {"num_samples": n(200), "order": EpochOrder(left_over="carry")},
    "window": lambda n: {"order": "window", "num_samples": n(200)},
}


@for_each("name", INDICES)
@for_each("kind", KINDS)
def test_an_index_is_the_same(corpus: IndexedDataset, name: str, kind: N, tmp_path: Path) -> None:
    def build(n: N, **more: Any) -> Any:
        settings = {"sequence_length": n(16), "seed": n(7), **INDICES[name](n), **more}
        return megaindex.build_index(corpus, **settings)

    expected, got = build(int), build(kind)
    assert facts(got) == facts(expected)
    assert_plain(facts(got))
    build(int, cache_dir=tmp_path)
    entries = sorted(tmp_path.iterdir())
    assert facts(build(kind, cache_dir=tmp_path)) == facts(expected)
    assert sorted(tmp_path.iterdir()) == entries  # found, not built again


@for_each(
    "settings",
    [
        lambda n: {"num_samples": n(200), "weights": [n(100), n(100)]},
        lambda n: {"num_samples": n(200), "weights": [n(100), n(100)], "variance_buffer": n(2)},
        lambda n: {"num_samples": n(200), "weights": [n(200), n(100)], "order": "neox"},
        lambda n: {"num_samples": n(200), "weights": [n(200), n(100)], "order": "epoch"},
        lambda n: {"num_samples": n(100), "weights": None},
    ],
)
@for_each("kind", KINDS)
def test_a_blend_is_the_same(
    corpus: IndexedDataset, settings: Callable[[N], dict[str, Any]], kind: N, tmp_path: Path
) -> None:
    def build(n: N) -> Any:
        return megaindex.build_blend(
            [corpus.path_prefix] * 2,
            sequence_length=n(16),
            seed=n(7),
            cache_dir=tmp_path,
            **settings(n),
        )

    expected = facts(build(int))
    files = sorted(tmp_path.iterdir())
    assert facts(build(kind)) == expected
    assert sorted(tmp_path.iterdir()) == files  # the same entries, and the same snapshot


@pytest.mark.parametrize("kind", [np.int32, np.int64])
def test_products_do_not_wrap_and_limits_hold(corpus: IndexedDataset, kind: N) -> None:
    def build(**settings: Any) -> Any:
        return megaindex.build_index(corpus, **{"sequence_length": 64, "seed": 1, **settings})

    most = int(np.iinfo(kind).max)
    carry = {"order": EpochOrder(left_over="carry")}
    assert (
        build(num_samples=kind(34_000_000), **carry).num_samples
        == build(num_samples=34_000_000, **carry).num_samples
        >= 34_000_000
    )
    for order in ("megatron", "neox", "epoch"):
        refusals = []
        for number in (2**62, np.int64(2**62)):
            with pytest.raises(InvalidArgument) as refusal:
                build(num_samples=number, order=order)
            refusals.append(str(refusal.value))
        assert refusals[0] == refusals[1]
    assert type(build(num_samples=np.int64(2**62), order="window").num_samples) is int
    for name, number in (
        ("sequence_length", most),
        ("seed", -1),
        ("num_samples", 0),
        ("add_extra_token", 2),
    ):
        refusals = []
        for value in (number, kind(number)):
            with pytest.raises(InvalidArgument) as refusal:
                build(**{name: value})
            refusals.append(str(refusal.value))
        assert refusals[0] == refusals[1]


@for_each("wrong", [np.float64(3), 3.0, float("nan"), "3", np.array([3]), np.bool_()])
def test_non_integers_are_refused_everywhere(corpus: IndexedDataset, wrong: Any) -> None:
    build = {"sequence_length": 16, "seed": 1}
    for name in (*build, "num_samples", "add_extra_token"):
        with pytest.raises(InvalidArgument, match=f"{name} must be an integer"):
            megaindex.build_index(corpus, **{**build, name: wrong})
    for order, name in ((MegatronOrder, "exact_num_epochs"), (EpochOrder, "epochs_mixed")):
        with pytest.raises(InvalidArgument, match=f"{name} must be an integer"):
            order(**{name: wrong})
    with pytest.raises(InvalidArgument, match="num_samples must be an integer"):
        megaindex.build_blend([corpus], **build, num_samples=wrong)
    with pytest.raises(InvalidArgument, match="must be an integer"):
        BatchSchedule.constant(wrong)
    with pytest.raises(InvalidArgument, match="--seq-length must be an integer"):
        Settings(seq_length=wrong)


@for_each("wrong", [float("nan"), float("inf"), "2", None, 10**400, [2], 1e300])
def test_non_numbers_are_refused(corpus: IndexedDataset, wrong: Any) -> None:
    for settings in (
        {"num_samples": 9, "weights": [wrong, 1]},
        {"num_samples": 9, "weights": [1, 1], "variance_buffer": wrong},
        {"num_samples": wrong, "weights": [1, 1]},
    ):
        if wrong is None and "variance_buffer" in settings:
            continue  # the framework's own
        if wrong == 1e300 and settings["weights"] == [1e300, 1]:
            continue  # a weight like another
        with pytest.raises(InvalidArgument):
            megaindex.build_blend([corpus] * 2, sequence_length=16, seed=1, **settings)


def test_numbers_keep_their_type() -> None:
    assert check_exact("x", np.int8(100)) == 100
    assert type(check_exact("x", np.int8(1))) is int
    assert check_exact("x", Fraction(1, 3)) == Fraction(1, 3)
    assert_plain([check_exact("x", Fraction(np.int64(3), np.int64(4)))])
    assert check_fraction("x", 0.1) == check_fraction("x", np.float64(0.1)) == Fraction(1, 10)
    assert_plain([check_fraction("x", Fraction(np.int64(3), np.int64(4)))])
    longest = Fraction(10**4300, 3)  # which Python does not write
    assert check_fraction("x", longest) == longest
    assert check_integer("x", True) == 1
    assert type(check_integer("x", True)) is int
    assert type(check_number("x", np.float32(0.5))) is float
    for wrong in ("x", None, float("nan"), [1]):
        with pytest.raises(InvalidArgument, match="x must be a number or a fraction"):
            check_fraction("x", wrong)


@for_each(
    ("share", "text"),
    [(0.0, "0.00%"), (1e-9, "<0.01%"), (0.00005, "0.01%"), (0.99994, "99.99%"),
     (0.99995, ">99.99%"), (1 - 1e-11, ">99.99%"), (1 - 1e-12, "100.00%"), (1.0, "100.00%")],
)  # fmt: skip
def test_a_share_is_shown_as_none_or_all_only_where_it_is(share: float, text: str) -> None:
    """Errors of rounding aside."""
    assert percent(share) == text


@pytest.mark.parametrize("kind", KINDS)
def test_extended_and_iterated_indices_are_the_same(corpus: IndexedDataset, kind: N) -> None:
    def build(seed: int) -> Any:
        return megaindex.build_index(corpus, sequence_length=16, seed=seed)

    def run(n: N) -> list[Any]:
        old = build(7)
        longer = extend_index(
            old, consumed_samples=n(40), more_samples=n(250), seed=n(7), further=build
        )
        ladder = planned_block_receipts(old, n(3), n(90), KEYS, stride=n(32))
        between = explain(old, build(8), n(0), n(9), KEYS)
        stream = run_of_index(
            old, [RunSource(name="c", sequence_lengths=corpus.sequence_lengths)],
            global_batch_size=n(8), num_steps=n(9), consumed_samples=n(16),
            micro_batch_size=n(2), data_parallel_size=n(2),
        )  # fmt: skip
        sizes = [stream.past_steps, stream.num_steps, stream.micro_batch_size]
        served = times_served(old, n(50))
        return [facts(longer), ladder.to_dict(), str(between), served, sizes]

    assert run(kind) == run(int)
    assert_plain(run(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_and_its_plan_are_the_same(kind: N) -> None:
    def make(n: N) -> RunSettings:
        return RunSettings(
            order=EpochOrder(epochs_mixed=n(2)), sequence_length=n(128),
            data=Data(train=(Source(tokens=n(250), weight=n(100)),
                             Source(tokens=n(240), weight=n(200)))),
            batch=ramp_up(n(4), n(4), n(100), n(20), "x"),
            target=Target(kind="iterations", value=n(60)),
            seed=n(3), evaluation=Evaluation(interval=n(5), iterations=n(2), batch_size=n(4)),
            data_parallel_size=n(2), micro_batch_size=n(2),
            gradient_accumulation_steps=n(1), consumed_samples=n(8), coverage="none",
        )  # fmt: skip

    assert make(kind) == make(int)
    assert_plain(make(kind))
    plan = make_plan(make(kind)).to_json()
    assert json.dumps(plan) == json.dumps(make_plan(make(int)).to_json())


@pytest.mark.parametrize("kind", KINDS)
def test_settings_and_recipes_are_the_same(kind: N) -> None:
    def settings(n: N) -> RunSettings:
        given = Settings(
            seq_length=n(16),
                micro_batch_size=n(16),
                data_parallel_size=n(16),
                seed=n(1),
                gradient_accumulation_steps=n(2),
                train_iters=n(9),
                tokens_per_epoch=("10K",),
            rampup_batch_size=None,
                eval_interval=n(3),
                eval_iters=n(1),
            phase_transition_iterations=(n(2), n(5)),
        )  # fmt: skip
        return resolve(given)

    assert settings(kind) == settings(int)
    assert_plain(settings(kind))

    def recipe(n: N) -> Recipe:
        mixed = RecipeStage(
            name="one",
            streams=(Stream(source="a", proportion=n(2)), Stream(source="b", proportion=0.5)),
            length=Target(kind="iterations", value=n(9)), first_step=n(0), epoch_size=n(90),
        )  # fmt: skip
        chosen = RecipeStage(name="two", streams=(Stream(source="a", choose=n(8)),))
        return Recipe(
            sequence_length=n(16), batch=BatchSchedule(stages=((n(0), n(4)), (n(8), n(8)))),
            sources=(RecipeSource(name="a", tokens=n(250), max_epochs=n(3)),
                     RecipeSource(name="b", path="b")),
            stages=(mixed, chosen), seed=n(5), exhaustion="stop", micro_batch_size=n(2),
            data_parallel_size=n(2), gradient_accumulation_steps=n(1),
            evaluation=RecipeEvaluation(source=RecipeSource(name="v", tokens=n(99)), interval=n(7)),
        )  # fmt: skip

    assert recipe(kind) == recipe(int)
    assert_plain(recipe(kind))
    assert json.dumps(to_mapping(recipe(kind))) == json.dumps(to_mapping(recipe(int)))


@pytest.mark.parametrize("kind", KINDS)
def test_tokenizing_is_the_same(tmp_path: Path, kind: N) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "abc"}\n' * 9)
    for name, n in (("a", int), ("b", kind)):
        with open_engine(workers=1) as engine:
            tokenize(tmp_path / name, [tmp_path / "in.jsonl"], tokenizer="bytes", eod=n(7),
                     part_bytes=n(40), engine=engine)  # fmt: skip
    for suffix in (".bin", ".idx"):
        assert (tmp_path / f"a{suffix}").read_bytes() == (tmp_path / f"b{suffix}").read_bytes()
    for settings in ({"eod": 1.5}, {"part_bytes": 40.0}, {"part_bytes": float("nan")}):
        with pytest.raises(InvalidArgument, match="must be an integer"):
            tokenize(tmp_path / "c", [tmp_path / "in.jsonl"], tokenizer="bytes", **settings)


@pytest.mark.parametrize("kind", KINDS)
def test_samplers_and_their_states_are_the_same(kind: N) -> None:
    pytest.importorskip("torch")
    from megaindex.loader import CyclicSampler, EvaluationSampler, MicroBatchSampler
    from megaindex.loader.samplers import RandomAccessSampler

    def run(n: N) -> list[Any]:
        ranks = {"micro_batch_size": n(2), "data_parallel_rank": n(1), "data_parallel_size": n(2)}
        served: list[Any] = []
        for made in (
            MicroBatchSampler(num_samples=n(200), **ranks, global_batch_size=n(100), tail="wrap",
                              consumed_samples=n(100), train_samples=n(190)),
            CyclicSampler(num_samples=n(50), train_samples=n(200), consumed_samples=n(4), **ranks),
        ):  # fmt: skip
            served += [len(made), list(made), made.state_dict(), made.state_after(n(3))]
            json.dumps(made.state_dict())
            made.load_state_dict(made.state_after(n(3)))
            served += [list(made)]
        hosts = RandomAccessSampler(num_samples=n(200), **ranks, consumed_samples=n(100))
        return [
            *served,
            list(EvaluationSampler(num_samples=n(9), **ranks)),
            hosts[n(3)],
            str(hosts),
        ]

    assert run(kind) == run(int)
    assert_plain(run(kind))


@pytest.mark.parametrize("kind", KINDS)
def test_a_loader_of_such_numbers_goes_on(corpus: IndexedDataset, kind: N) -> None:
    pytest.importorskip("torch")
    from megaindex.cache.fingerprint import corpus_fingerprint
    from megaindex.loader import Loader, MicroBatchSampler, PositionalOptions, Recorder
    from megaindex.loader.batch import SampleOptions

    def make(n: N) -> Loader:
        index = megaindex.build_index(
            corpus, sequence_length=n(16), seed=n(1), order="epoch", num_samples=n(200)
        )
        sampler = MicroBatchSampler(num_samples=n(200), micro_batch_size=n(4),
                                    data_parallel_rank=n(0), data_parallel_size=n(1))  # fmt: skip
        return Loader(
            index, corpus, sampler, options=SampleOptions(pad_id=n(3), eod_id=n(9)),
            read_ahead=n(2), num_threads=n(1), bytes_ahead=n(200),
            recorder=Recorder([corpus_fingerprint(corpus)], stride=n(16)),
        )  # fmt: skip

    def run(n: N) -> tuple[list[Any], list[Any]]:
        loader = make(n)
        batches = iter(loader)
        next(batches)
        state = loader.state_dict()
        following = next(batches)["tokens"].tolist()
        resumed = make(n)
        resumed.load_state_dict(json.loads(json.dumps(state)))
        resumed.load_state_dict(state)
        assert next(iter(resumed))["tokens"].tolist() == following
        assert_plain(state)
        return following, [state]

    assert run(kind) == run(int)
    assert_plain(PositionalOptions(threads=kind(3), merge_gap=kind(9), bytes_in_flight=kind(9)))


def test_invalid_loader_arguments_are_refused(corpus: IndexedDataset) -> None:
    pytest.importorskip("torch")
    from megaindex.loader import Loader, PositionalOptions
    from megaindex.loader.batch import SampleOptions

    index = megaindex.build_index(corpus, sequence_length=16, seed=1)
    for device in (-1, "cuda:-2", "no such", 1.5, [0]):
        with pytest.raises(InvalidArgument, match="device="):
            Loader(index, corpus, [], device=device)  # type: ignore[arg-type]
    for name in ("read_ahead", "num_threads", "bytes_ahead"):
        for wrong in (1.5, float("nan"), "1"):
            with pytest.raises(InvalidArgument, match=f"{name} must be an integer"):
                Loader(index, corpus, [], **{name: wrong})
    for wrong in (1.5, "1", None, float("nan")):
        with pytest.raises(InvalidArgument, match="pad_id must be an integer"):
            SampleOptions(pad_id=wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="timeout must be a finite number"):
        PositionalOptions(timeout=float("nan"))


def test_a_number_that_is_too_long_to_write_is_named_by_its_type() -> None:
    assert shown(10**4000).startswith("1000")
    assert shown(10**5000) == "a value of type int that is too long to write"


def test_values_that_cannot_be_compared_differ() -> None:
    ring: list[object] = []
    ring.append(ring)
    other: list[object] = []
    other.append(other)
    assert differ(np.zeros(2), np.zeros(2))
    assert differ(ring, other)
    assert not differ([1, {"a": 2}], [1, {"a": 2}])
    assert differ([1], [2])
