"""The name by which a source is shuffled: by recipe, flags and Python, and through changes."""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import IndexedDataset, IndexedDatasetWriter, build_blend, build_index
from megaindex.audit import run_of_settings
from megaindex.cache import fingerprint as fingerprints
from megaindex.corpus import corpus_fingerprint
from megaindex.errors import InvalidArgument
from megaindex.index.orders.keyed import shuffle_names
from megaindex.index.spans import Index
from megaindex.lock import make_lock, read_lock, run_of_lock, verify_lock
from megaindex.plan import make_plan
from megaindex.recipe import (
    Recipe,
    RecipeSource,
    Stream,
    amend,
    check_past,
    open_recipe,
    plan_recipe,
    read_nanotron,
    read_recipe,
)
from megaindex.settings.recipe_file import recipe_of, to_mapping

STEPS, BATCH = 40, 4
SAMPLES = STEPS * BATCH


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Corpora ``web`` and ``code``, and ``there/text`` with the content of ``web``."""
    for number, name in enumerate(("web", "code")):
        write_corpus(tmp_path / name, np.random.default_rng(number).integers(1, 60, 90), np.uint16)
    (tmp_path / "there").mkdir()
    for suffix in ("bin", "idx"):
        shutil.copy(tmp_path / f"web.{suffix}", tmp_path / "there" / f"text.{suffix}")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def fingerprint(path: str = "web") -> str:
    return corpus_fingerprint(IndexedDataset(path))


def recipe(
    *paths: str, settings: str = "", mix: str = "", more: str = "", names: str = "abcd"
) -> Recipe:
    """A recipe of sources with these names, each with ``settings``, in shares of 1, 2, 3, …."""
    named = list(zip(names, paths, strict=False))
    sources = ", ".join(f"{name}: {{path: {path}{settings}}}" for name, path in named)
    shares = mix or ", ".join(f"{name}: {k}" for k, (name, _) in enumerate(named, 1))
    text = (
        f"sequence_length: 16\nbatch: {{global_batch_size: {BATCH}}}\nsources: {{{sources}}}\n"
        f"stages:\n  main: {{steps: {STEPS}, mix: {{{shares}}}}}\n{more}"
    )
    Path("run.yaml").write_text(text)
    return read_recipe("run.yaml")


def names_of(given: Recipe) -> list[str]:
    return open_recipe(given).layout.shuffle_names


def spans(index: Index, count: int = SAMPLES) -> list[list[int]]:
    found = index.locate(np.arange(count))
    return [column.tolist() for column in (*found, found.row_splits)]


def blend(order: str, paths: list[str], **settings: Any) -> Any:
    return build_blend(
        paths, weights=[float(k) for k, _ in enumerate(paths, 1)], order=order,
        sequence_length=16, num_samples=SAMPLES, **settings,
    )  # fmt: skip


def flags(order: str, paths: list[str]) -> dict[str, Any]:
    data = [word for k, path in enumerate(paths, 1) for word in (k, path)]
    return {
        "order": order, "data_path": data if len(paths) > 1 else paths, "sequence_length": 16,
        "global_batch_size": BATCH, "train_iters": STEPS, "eval_iters": 0,
    }  # fmt: skip


# the rule


def test_a_further_source_of_a_fingerprint_is_numbered() -> None:
    assert shuffle_names(["f", "g", "f", "f", "g"]) == ["f", "g", "f/1", "f/2", "g/1"]
    assert shuffle_names(["f", "f", "f"], ["", "x", ""]) == ["f", "x", "f/1"]
    assert shuffle_names(["f", "f"], ["f", ""]) == ["f", "f"]
    assert shuffle_names(["f", "f"], ["f/1", ""]) == ["f/1", "f"]
    assert shuffle_names(["", "", "f"], ["", "x", ""]) == ["", "x", "f"]
    assert shuffle_names([]) == []


PAIRS = [
    ["web"],
    ["web", "code"],
    ["web", "web"],
    ["web", "there/text"],
    ["web", "code", "there/text", "web"],
]


@for_each("order", ["epoch", "packed", "window"])
@for_each("paths", PAIRS)
def test_flags_recipe_and_python_give_the_same_samples(order: str, paths: list[str]) -> None:
    ours = recipe(*paths, settings=f", order: {order}")
    theirs = flags(order, paths)
    samples = spans(open_recipe(ours).index)
    assert spans(run_of_settings(**theirs).index) == samples
    assert spans(blend(order, paths)) == samples
    if len(paths) == 1:
        index = build_index("web", sequence_length=16, order=order, num_samples=SAMPLES)
        assert spans(index) == samples
    locks = [make_lock(ours), make_lock(**theirs)]
    receipts = [lock.subset("train")["receipts"] for lock in locks]
    assert receipts[0] == receipts[1]
    assert locks[0].identity == locks[1].identity


KINDS = {
    "epoch": "",
    "window": ", order: window",
    "packed": ", order: packed",
    "blocks": ", order: blocks, block_tokens: 200",
    "bins": ", kind: finetuning",
}


@pytest.mark.parametrize("settings", KINDS.values(), ids=KINDS)
def test_a_source_may_move_and_be_renamed(settings: str) -> None:
    first = open_recipe(recipe("web", "code", settings=settings))
    other = recipe("there/text", "code", settings=settings, names="xy")
    second = open_recipe(other)
    assert spans(second.index) == spans(first.index)
    assert make_lock(other).identity == make_lock(recipe("web", "code", settings=settings)).identity
    named = replace(other.sources[0], shuffle_name="x")
    third = open_recipe(replace(other, sources=(named, other.sources[1])))
    assert spans(third.index) != spans(first.index)


def test_stages_of_two_lengths_do_not_depend_on_labels() -> None:
    text = (
        "sequence_length: 16\nbatch: {global_batch_size: 4}\nsources: {SOURCE}\n"
        "stages:\n  one: {steps: 9, mix: {NAME: 1}}\n"
        "  two: {steps: 2, sequence_length: 48, mix: {NAME: 1}}\n"
    )
    found = []
    for name, path in (("a", "web"), ("b", "there/text")):
        Path("run.yaml").write_text(text.replace("SOURCE", f"{name}: {path}").replace("NAME", name))
        opened = open_recipe(read_recipe("run.yaml"))
        found.append(spans(opened.index, opened.index.num_samples))
        planned = plan_recipe(read_recipe("run.yaml"))
        assert planned.reads == opened.layout.reads
        assert planned.shuffle_names == [fingerprint()]
    assert found[0] == found[1]


@pytest.mark.parametrize("order", ["epoch", "packed", "window"])
def test_two_sources_of_one_pair_are_shuffled_apart(order: str) -> None:
    opened = open_recipe(recipe("web", "there/text", settings=f", order: {order}"))
    assert opened.layout.shuffle_names == [fingerprint(), f"{fingerprint()}/1"]
    first, second = (source.index(SAMPLES) for source in opened.sources)
    plain = {"sequence_length": 16, "order": order, "num_samples": 60}
    assert spans(build_index("web", **plain), 60) == spans(first, 60) != spans(second, 60)
    named = build_index("web", source_name=f"{fingerprint()}/1", **plain)
    assert spans(named, 60) == spans(second, 60)


def test_orders_of_frameworks_have_no_name() -> None:
    for order in ("megatron", "neox", "megatron-legacy", "paddlenlp"):
        index = blend(order, ["web", "there/text"])
        first, second = (spans(source, 40) for source in index.indices)
        assert first == second
        run = run_of_settings(**flags(order, ["web", "there/text"]))
        assert "name" not in str(make_lock(**flags(order, ["web", "web"])).subset("train")["index"])
        assert spans(run.index.indices[1], 40) == first  # type: ignore[attr-defined]


# names that are given


def test_a_given_name_decides_and_is_not_counted() -> None:
    def names(*given: str) -> list[str]:
        plain = recipe(*["web"] * len(given))
        pairs = zip(plain.sources, given, strict=True)
        sources = tuple(replace(source, shuffle_name=name) for source, name in pairs)
        return names_of(replace(plain, sources=sources))

    own = fingerprint()
    assert names("", "", "") == [own, f"{own}/1", f"{own}/2"]
    assert names("x", "", "") == ["x", own, f"{own}/1"]
    assert names("", "x", "") == [own, "x", f"{own}/1"]
    assert names(own, "") == [own, own]
    assert names("", own) == [own, own]
    assert names("", f"{own}/1", "") == [own, f"{own}/1", f"{own}/1"]


def test_a_name_is_given_by_recipe_and_python() -> None:
    given = recipe("web", settings=", shuffle_name: text")
    index = build_index("web", sequence_length=16, order="epoch", source_name="text", epochs=2)
    samples = spans(index)
    assert spans(open_recipe(given).index) == samples
    assert samples != spans(build_index("web", sequence_length=16, order="epoch", epochs=2))
    by_fingerprint = recipe("web", settings=f", shuffle_name: {fingerprint()}")
    assert spans(open_recipe(by_fingerprint).index) == spans(open_recipe(recipe("web")).index)
    both = blend("epoch", ["web", "web"], source_name="text")
    assert [source.source_name for source in both.indices] == ["text", "text"]
    assert spans(both.indices[0]) == samples


def test_a_name_is_given_by_flags(folder: Path) -> None:
    paths = ["web", "web", "there/text"]
    plain = flags("epoch", paths)
    given = {**plain, "shuffle_names": ["", "text", ""]}
    own = fingerprint()
    run = run_of_settings(**given)
    assert [source.source_name for source in run.index.indices] == [own, "text", f"{own}/1"]  # type: ignore[attr-defined]
    named = recipe(*paths)
    source = replace(named.sources[1], shuffle_name="text")
    named = replace(named, sources=(named.sources[0], source, named.sources[2]))
    assert make_lock(**given).identity == make_lock(named).identity
    words = [f"{word}" for word in plain["data_path"]]
    sizes = ["--seq-length", 16, "--global-batch-size", BATCH, "--train-iters", STEPS]
    names = ["--order", "epoch", "--eval-iters", 0, "--shuffle-names", "", "text", ""]
    status, _, err = cli("lock", "--data-path", *words, *sizes, *names, "--out", "run.lock")
    assert (status, err) == (0, "")
    lock = read_lock("run.lock")
    assert lock.identity == make_lock(named).identity
    data = lock.content["settings"]["run"]["data"]["train"]
    assert [each.get("shuffle_name") for each in data] == [None, "text", None]
    assert verify_lock("run.lock", whole=True).findings == ()
    assert spans(run_of_lock("run.lock").index) == spans(run.index)


def test_a_plan_counts_under_a_given_name() -> None:
    given = {**flags("packed", ["web"]), "coverage": "exact", "train_iters": 12}
    plans = [make_plan(**given, shuffle_names=[name]) for name in ("", "text")]
    for name, plan in zip((None, "text"), plans, strict=True):
        index = build_index("web", sequence_length=16, order="packed", source_name=name)
        (row,) = plan.rows("train")
        assert row.coverage.tokens_served == index.count_inputs(0, 12 * BATCH)  # type: ignore[attr-defined]
    assert plans[0].rows("train")[0].coverage != plans[1].rows("train")[0].coverage


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shuffle_names": ["x"]}, "shuffle_names has 1 names for 2 sources"),
        ({"shuffle_names": ["x", "y", "z"]}, "shuffle_names has 3 names for 2 sources"),
        ({"order": "neox", "shuffle_names": ["x", "y"]}, "the order is neox, which has no names"),
    ],
)
def test_names_that_do_not_fit_the_run_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make_plan(**{**flags("epoch", ["web", "code"]), **changes})


@pytest.mark.parametrize("name", ["\ud800", "a\0b", 3])
def test_a_name_is_text_that_a_lock_can_hold(name: Any) -> None:
    with pytest.raises(InvalidArgument, match="source_name must be text in UTF-8"):
        build_index("web", sequence_length=16, order="epoch", source_name=name)
    with pytest.raises(InvalidArgument, match="source a: shuffle_name must be text in UTF-8"):
        RecipeSource(name="a", path="web", shuffle_name=name)
    with pytest.raises(InvalidArgument, match="shuffle_names must be text in UTF-8"):
        make_plan(**flags("epoch", ["web"]), shuffle_names=[name])
    named, own = (
        build_index("web", sequence_length=16, order="epoch", source_name=each)
        for each in ("é\n", None)
    )
    assert spans(named, 60) != spans(own, 60)


def test_a_name_keeps_the_keys_of_a_corpus_that_changes(folder: Path) -> None:
    """Bounds of documents that move leave lengths and samples, and change the fingerprint."""
    given, other = recipe("web", settings=", shuffle_name: text"), recipe("web")
    before = [spans(open_recipe(each).index, 80) for each in (given, other)]
    lengths = IndexedDataset("web").sequence_lengths.tolist()
    for suffix in ("bin", "idx"):
        (folder / f"web.{suffix}").unlink()
    with IndexedDatasetWriter("web", np.uint16) as writer:
        writer.add_document(np.zeros(sum(lengths)), lengths)
    after = [spans(open_recipe(each).index, 80) for each in (given, other)]
    assert after[0] == before[0]
    assert after[1] != before[1]


def test_files_keep_a_given_name() -> None:
    given = recipe("web", "code", settings=", shuffle_name: text")
    assert recipe_of(to_mapping(given), "run.yaml", Path()) == given
    plain = to_mapping(recipe("web"))
    assert "shuffle_name" not in plain["sources"]["a"]
    with pytest.raises(InvalidArgument, match="shuffle_name must be text, got 3"):
        recipe("web", settings=", shuffle_name: 3")


@pytest.mark.parametrize("name", ["", "text"])
def test_a_lock_holds_the_name_that_was_found(folder: Path, name: str) -> None:
    given = recipe("web", "there/text", settings=f", shuffle_name: '{name}'")
    lock = make_lock(given).write("run.lock")
    node = lock.subset("train")["index"]
    names = [{**node["common"], **each}["name"] for each in node["sources"]]
    assert names == ([name] * 2 if name else [fingerprint(), f"{fingerprint()}/1"])
    settings = lock.content["settings"]["recipe"]["sources"]
    assert [each.get("shuffle_name", "") for each in settings.values()] == [name, name]
    samples = spans(open_recipe(given).index)
    assert spans(run_of_lock("run.lock").index) == samples
    elsewhere = folder / "elsewhere"
    shutil.copytree(folder, elsewhere, ignore=shutil.ignore_patterns("elsewhere"))
    assert spans(run_of_lock(elsewhere / "run.lock").index) == samples


# what else a run has


def test_an_evaluation_is_a_source_of_its_own() -> None:
    """It is not counted among the sources, nor they with it."""
    evaluated = recipe("web", "web", more="evaluation: {source: there/text, interval: 10}\n")
    opened = open_recipe(evaluated)
    assert opened.validation is not None
    own = fingerprint()
    assert opened.validation.shuffle_name == own
    assert opened.layout.shuffle_names == [own, f"{own}/1"]
    alone = build_index("web", sequence_length=16, order="epoch")
    assert spans(opened.validation.index(60), 60) == spans(alone, 60)
    given = recipe("web", more="evaluation: {source: {path: web, shuffle_name: x}}\n")
    named = open_recipe(given).validation
    assert named is not None
    assert named.shuffle_name == "x"


def test_each_split_is_counted_by_itself() -> None:
    given = {
        **flags("epoch", ["web", "there/text"]), "eval_iters": 2, "eval_interval": 20,
        "split": "6,3,1",
    }  # fmt: skip
    names = [
        [source.source_name for source in run_of_settings(**given, subset=subset).index.indices]  # type: ignore[attr-defined]
        for subset in ("train", "valid", "test")
    ]
    assert names == [[fingerprint(), f"{fingerprint()}/1"]] * 3
    apart = {**given, "split": None, "train_data_path": given["data_path"]}
    del apart["data_path"]
    alone = run_of_settings(**apart, valid_data_path=["web"], subset="valid").index
    assert alone.source_name == fingerprint()  # type: ignore[attr-defined]
    train = run_of_settings(**apart, valid_data_path=["web"]).index
    assert [each.source_name for each in train.indices] == names[0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("order", ["epoch", "packed"])
def test_a_plan_counts_the_samples_of_the_run(order: str) -> None:
    """Of both sources a part of an epoch, in which they read other documents."""
    given = flags(order, ["web", "there/text"])
    given["data_path"] = [1, "web", 1, "there/text"]
    plan = make_plan(**given, coverage="exact")
    index = run_of_settings(**given).index
    lengths = IndexedDataset("web").sequence_lengths
    found = []
    for source, row in zip(index.indices, plan.rows("train"), strict=True):  # type: ignore[attr-defined]
        seen = np.zeros(lengths.sum(), np.int64)
        starts = np.cumsum(lengths) - lengths
        read = source.locate(np.arange(row.drawn))
        for document, offset, length in zip(
            read.document, read.offset, read.input_lengths(16), strict=True
        ):
            begin = starts[document] + offset
            seen[begin : begin + length] += 1
        assert row.coverage.tokens_served == seen.sum()
        shares = np.bincount(seen) / seen.size
        assert row.coverage.tokens == pytest.approx(shares.tolist())
        found.append(seen.tolist())
    assert found[0] != found[1]


def test_a_warm_blend_has_the_samples_of_a_cold_one(folder: Path) -> None:
    paths = ["web", "there/text", "code", "web"]
    cold = blend("epoch", paths, cache_dir=folder / "cache")
    samples = spans(blend("epoch", paths))
    assert spans(cold) == samples
    warm = blend("epoch", paths, cache_dir=folder / "cache")
    assert type(warm.indices[1]).__name__ == "LazyIndex"
    assert spans(warm) == samples


def test_a_plan_without_files_has_no_names() -> None:
    text = (
        "sequence_length: 16\nbatch: {global_batch_size: 4}\nsources: {SOURCES}\n"
        "stages: {main: {steps: 40, mix: {x: 1, y: 2}}}\n"
    )
    layouts = []
    for sources in (
        "x: {tokens: 900}, y: {tokens: 900}",
        "x: {tokens: 900, shuffle_name: z}, y: {tokens: 900, shuffle_name: z}",
    ):
        Path("run.yaml").write_text(text.replace("SOURCES", sources))
        layouts.append(plan_recipe(read_recipe("run.yaml")))
    first, second = layouts
    assert (first.reads, first.sizes) == (second.reads, second.sizes)
    assert first.shuffle_names == ["x", "y"]
    Path("run.yaml").write_text(text.replace("SOURCES", "x: {tokens: 900}, y: web"))
    assert plan_recipe(read_recipe("run.yaml")).shuffle_names == ["x", fingerprint()]


def test_recipes_of_other_files_have_the_rule(folder: Path) -> None:
    (folder / "nanotron.yaml").write_text(
        "tokens: {sequence_length: 16, micro_batch_size: 2, batch_accumulation_per_replica: 2,\n"
        "         train_steps: 40}\n"
        "parallelism: {dp: 1}\n"
        "data_stages:\n- name: main\n  start_training_step: 1\n"
        "  data: {seed: 1234, dataset: {dataset_folder: [web, there/text],\n"
        "         dataset_weights: [1, 2]}}\n"
    )
    given = read_nanotron("nanotron.yaml")
    assert names_of(given) == [fingerprint(), f"{fingerprint()}/1"]


def test_a_fingerprint_is_computed_once(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For a source with a given name, and one in the cache, not at all."""
    computed: list[str] = []

    class Counting(dict[Any, str]):
        def __setitem__(self, dataset: Any, value: str) -> None:
            computed.append(Path(dataset.path_prefix).name)
            super().__setitem__(dataset, value)

    def during(call: Callable[..., Any], *given: Any, **settings: Any) -> list[str]:
        computed.clear()
        monkeypatch.setattr(fingerprints, "_fingerprints", Counting())
        call(*given, **settings)
        return computed.copy()

    def opened(given: Recipe, **settings: Any) -> None:
        _ = open_recipe(given, **settings).fingerprints

    given = recipe("web", "code", more="evaluation: {source: there/text}\n")
    assert during(opened, given) == ["web", "code", "text"]
    assert during(plan_recipe, given) == ["web", "code", "text"]
    assert during(make_lock, given) == ["web", "code", "text"]
    assert during(make_plan, **flags("epoch", ["web", "code"]), coverage="none") == []
    assert during(make_plan, **flags("epoch", ["web", "web"]), coverage="none") == ["web"]
    assert during(opened, given, cache_dir=folder / "cache") == ["web", "code", "text"]
    monkeypatch.setattr(fingerprints, "array_bytes", _unread)
    opened(given, cache_dir=folder / "cache")
    plan_recipe(recipe("web", settings=", shuffle_name: text"))


def _unread(_: Any) -> Any:
    raise AssertionError("lengths are read")


# changes


def served(given: Recipe) -> dict[str, Any]:
    """State of a loader after 20 steps."""
    pytest.importorskip("torch")
    from megaindex.loader import loader_of_recipe

    loader = loader_of_recipe(open_recipe(given), micro_batch_size=BATCH)
    for _ in itertools.islice(loader, 20):
        pass
    state: dict[str, Any] = loader.state_dict()
    return state


def resumed(given: Recipe, state: dict[str, Any], **settings: Any) -> list[Any]:
    """What a loader serves behind a state."""
    from megaindex.loader import check_receipts, loader_of_recipe

    loader = loader_of_recipe(open_recipe(given), micro_batch_size=BATCH)
    loader.load_state_dict(state, **settings)
    rows = [batch["tokens"].tolist() for batch in loader]
    if not settings:
        assert check_receipts([loader.state_dict()], loader._index).equal
    return rows


def renamed(given: Recipe, **names: str) -> Recipe:
    """The recipe with other names of its sources, in its stages too."""
    stages = tuple(
        replace(stage, streams=tuple(
            replace(stream, source=names[stream.source]) for stream in stage.streams
        ))
        for stage in given.stages
    )  # fmt: skip
    sources = tuple(replace(source, name=names[source.name]) for source in given.sources)
    return replace(given, sources=sources, stages=stages)


def test_a_change_appends() -> None:
    old = recipe("web", "web")
    layout = plan_recipe(old)
    later = replace(old.stages[0], name="later", streams=(
        Stream(source="b", proportion=Fraction(1)), Stream(source="c", proportion=Fraction(1)),
    ))  # fmt: skip
    more = RecipeSource(name="c", path="there/text")
    new = amend(layout, consumed_samples=80, stages=[later], sources=[more])
    own = fingerprint()
    assert names_of(new) == [own, f"{own}/1", f"{own}/2"]
    check_past(layout, plan_recipe(new), 80)
    assert spans(open_recipe(new).index, 80) == spans(open_recipe(old).index, 80)
    assert resumed(new, served(old))


def test_a_run_goes_on_under_other_labels_and_paths() -> None:
    old = recipe("web", "code", "web")
    state, rest = served(old), resumed(old, served(old))
    other = renamed(recipe("there/text", "code", "there/text"), a="x", b="a", c="z")
    check_past(plan_recipe(old), plan_recipe(other), 80)
    with pytest.raises(InvalidArgument, match="source a: content must be"):
        resumed(other, state)  # its name is that of another source now
    other = renamed(recipe("there/text", "code", "there/text"), a="x", b="y", c="z")
    assert resumed(other, state) == rest
    named = renamed(old, a="c", b="b", c="a")
    with pytest.raises(InvalidArgument, match="source a: its shuffle name must be"):
        resumed(named, state)


def test_changes_of_the_mix_go_on_under_other_labels() -> None:
    pytest.importorskip("torch")
    from megaindex.loader import loader_of_recipe

    old = recipe("web", "code")
    loader = loader_of_recipe(open_recipe(old), micro_batch_size=BATCH)
    loader.set_mix({"b": 1}, at=5)
    rows = [batch["tokens"].tolist() for batch in itertools.islice(loader, 20)]
    state = loader.state_dict()
    rest = [batch["tokens"].tolist() for batch in loader]
    assert len(rows) + len(rest) == STEPS
    assert resumed(renamed(old, a="x", b="y"), state) == rest
    swapped = renamed(old, a="b", b="a")
    with pytest.raises(InvalidArgument, match="source a: content must be"):
        resumed(swapped, state)


@pytest.mark.parametrize("mix", ["b: 1", "a: 1"])
def test_a_source_that_goes_renumbers_no_other(mix: str) -> None:
    """Whether it was read or not: the other one would take its name."""
    old = recipe("web", "web", mix=mix)
    state, rest = served(old), resumed(old, served(old))
    kept = "b" if mix == "b: 1" else "a"
    gone = recipe("web", mix=f"{kept}: 1", names=kept)
    if kept == "a":  # whose name stays
        with pytest.raises(InvalidArgument, match="source b: .* the recipe has no such source"):
            resumed(gone, state)
        assert resumed(gone, state, allow=["content", "targets"]) == rest
        return
    own = fingerprint()
    for allow in ([], ["content", "targets"]):
        says = f"source b: its shuffle name must be {own}/1, as in the checkpoint, got {own};"
        with pytest.raises(InvalidArgument, match=says):
            resumed(gone, state, allow=allow)
    with pytest.raises(InvalidArgument, match="stage main: .* other samples"):
        check_past(plan_recipe(old), plan_recipe(gone), 80)
    assert resumed(gone, state, allow=["past"]) != rest
    given = replace(gone, sources=(replace(gone.sources[0], shuffle_name=f"{own}/1"),))
    check_past(plan_recipe(old), plan_recipe(given), 80)
    assert resumed(given, state, allow=["content", "targets"]) == rest


def test_a_source_before_one_of_its_pair_is_refused() -> None:
    old = recipe("web", names="b")
    state = served(old)
    before = recipe("web", "web", mix="b: 1")
    with pytest.raises(InvalidArgument, match="source b: its shuffle name must be"):
        resumed(before, state)
    behind = replace(before, sources=before.sources[::-1])
    assert resumed(behind, state) == resumed(old, state)
    own = replace(before.sources[0], shuffle_name="a")
    assert resumed(replace(before, sources=(own, before.sources[1])), state) == resumed(old, state)


def test_a_name_that_is_given_later_is_refused() -> None:
    old = recipe("web")
    state = served(old)
    with pytest.raises(InvalidArgument, match="source a: its shuffle name must be"):
        resumed(recipe("web", settings=", shuffle_name: text"), state)
    assert resumed(recipe("web", settings=f", shuffle_name: {fingerprint()}"), state) == resumed(
        old, state
    )


def test_layouts_of_sources_without_files_are_compared_by_their_names() -> None:
    text = (
        "sequence_length: 16\nbatch: {{global_batch_size: 4}}\n"
        "sources: {{x: {{tokens: 900}}, y: {{tokens: 900}}}}\n"
        "stages: {{main: {{steps: 40, mix: {}}}}}\n"
    )
    layouts = []
    for mix in ("{x: 1, y: 2}", "{y: 1, x: 2}"):
        Path("run.yaml").write_text(text.format(mix))
        layouts.append(plan_recipe(read_recipe("run.yaml")))
    check_past(layouts[0], layouts[0], 80)
    with pytest.raises(InvalidArgument, match="serves other samples"):
        check_past(*layouts, 80)
