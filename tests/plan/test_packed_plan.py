"""Plans of order packed, compared with the samples that the index serves."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st
from support import command_line
from support.command_line import plan_json
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import InvalidArgument, PackedOrder, build_index, make_plan
from megaindex.errors import FormatError, MegaIndexError
from megaindex.format.dataset import read_length_histogram
from megaindex.index.orders import packed
from megaindex.plan import coverage as coverage_module
from megaindex.plan import packing as packing_module
from megaindex.plan.render import packing_texts
from megaindex.recipe import open_recipe, read_recipe

LENGTHS = np.random.default_rng(8).lognormal(3, 1.2, 400).astype(np.int32)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("packed") / "web"
    write_corpus(path, LENGTHS)
    return str(path)


def histogram_file(path: Path, lengths: Any) -> str:
    counts = sorted(Counter(map(int, lengths)).items())
    path.write_text("# tokens documents\n" + "".join(f"{n} {count}\n" for n, count in counts))
    return str(path)


@for_each("rule", ["split", "truncate", "skip"])
@for_each("limit", [None, 2])
@for_each("epochs", [1, 2])
def test_a_plan_is_the_run(corpus: str, rule: Any, limit: int | None, epochs: int) -> None:
    order = PackedOrder(long_documents=rule, max_documents=limit)
    plan = make_plan(
        data_path=corpus, sequence_length=32, global_batch_size=7, epochs=epochs, order=order,
        coverage="exact",
    )  # fmt: skip
    index = megaindex.build_index(corpus, sequence_length=32, order=order, epochs=epochs)
    (row,) = plan.rows("train")
    assert index.num_samples == row.built == row.samples_per_epoch * epochs
    assert plan.train_iters == index.num_samples // 7
    consumed = plan.train_iters * 7
    spans = index.locate(np.arange(consumed))
    inputs = int(spans.input_lengths(32).sum())
    assert plan.tokens_consumed == inputs
    assert not any("means over seeds" in text for text in plan.warnings)
    assert plan.tokens_left_over == epochs * int(LENGTHS.sum()) - inputs
    times = Counter[tuple[int, int]]()
    for d, o, n in zip(spans.document, spans.offset, spans.input_lengths(32), strict=True):
        times.update((int(d), int(o) + i) for i in range(int(n)))
    seen = np.bincount(list(times.values()), minlength=len(row.coverage.tokens))
    seen[0] = int(LENGTHS.sum()) - len(times)
    np.testing.assert_allclose(row.coverage.tokens, seen / LENGTHS.sum(), atol=1e-12)

    facts = row.packing
    assert facts is not None
    one = index.locate(np.arange(row.samples_per_epoch))
    pieces = np.diff(one.row_splits)
    placed = int(one.input_lengths(32).sum())
    assert facts.padding == row.samples_per_epoch * 32 - placed
    assert facts.fill == pytest.approx(placed / (row.samples_per_epoch * 32))
    assert facts.cut_tokens == int(LENGTHS.sum()) - placed
    assert facts.pieces_per_sample == pytest.approx(pieces.mean())
    assert facts.most_pieces == pieces.max() <= facts.max_documents
    assert facts.long_documents == np.count_nonzero(LENGTHS > 32)
    lengths = np.minimum(one.length, 32)
    quotients = [
        part.min() / part.max() for part in np.split(lengths, one.row_splits[1:-1]) if part.size > 1
    ]
    assert facts.likeness == pytest.approx(np.mean(quotients) if quotients else 1.0)


@given(lengths=st.lists(st.integers(0, 90), min_size=1, max_size=60).filter(any),
       rule=st.sampled_from(["split", "truncate", "skip"]))  # fmt: skip
@example(lengths=[15, 16, 17], rule="skip")
def test_a_histogram_plans_as_the_corpus(
    tmp_path_factory: pytest.TempPathFactory, lengths: list[int], rule: str
) -> None:
    assume(rule != "skip" or any(0 < length <= 16 for length in lengths))
    folder = tmp_path_factory.mktemp("h")
    write_corpus(folder / "web", lengths)
    common: dict[str, Any] = {
        "sequence_length": 16, "global_batch_size": 1, "epochs": 1, "order": "packed",
        "long_documents": rule,
    }  # fmt: skip
    files = make_plan(data_path=folder / "web", **common)
    histogram = make_plan(length_histogram=histogram_file(folder / "h.txt", lengths), **common)
    assert files.rows("train")[0].packing == histogram.rows("train")[0].packing
    for name in ("train_iters", "samples_per_epoch", "tokens_per_epoch", "tokens_consumed"):
        assert getattr(files, name) == getattr(histogram, name)


def test_a_blend_draws_what_the_plan_says(corpus: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "code", LENGTHS[:100] * 2)
    paths = [corpus, str(tmp_path / "code")]
    plan = make_plan(
        data_path=[0.25, paths[0], 0.75, paths[1]], sequence_length=32, global_batch_size=8,
        train_iters=60, order="packed",
    )  # fmt: skip
    blend = megaindex.build_blend(
        paths, num_samples=480, weights=[0.25, 0.75], order="packed", sequence_length=32
    )
    rows = plan.rows("train")
    assert [row.drawn for row in rows] == np.bincount(blend.dataset_index).tolist()
    assert [row.built for row in rows] == [index.num_samples for index in blend.indices]


@pytest.mark.parametrize(
    ("limit", "coverage", "builds"),
    [
        (10**6, "auto", 1),  # coverage and tokens are counted in one index
        (3 * LENGTHS.size - 1, "auto", 1),  # tokens alone, of one epoch
        (LENGTHS.size - 1, "auto", 0),
        (LENGTHS.size - 1, "exact", 1),
        (10**6, "expected", 0),
    ],
)
def test_an_epoch_in_part_is_built_once_and_within_the_limit(
    corpus: str, limit: int, coverage: str, builds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = Mock(wraps=packed.build)
    monkeypatch.setattr(packed, "build", built)
    for module in (packing_module, coverage_module):
        monkeypatch.setattr(module, "BUILD_LIMIT", limit)
    common: dict[str, Any] = {"sequence_length": 32, "order": "packed"}
    plan = make_plan(data_path=corpus, global_batch_size=7, epochs=2.4, coverage=coverage, **common)
    assert built.call_count == builds
    consumed = plan.samples_consumed
    assert plan.rows("train")[0].epochs == 3
    index = megaindex.build_index(corpus, epochs=3, **common)
    counted = int(index.locate(np.arange(consumed)).input_lengths(32).sum())
    warned = any("give --data-path and --coverage exact" in text for text in plan.warnings)
    assert warned == (builds == 0)
    if builds:
        assert plan.tokens_consumed == counted
    assert plan.tokens_consumed == pytest.approx(counted, rel=0.01)
    if coverage == "expected":  # two passes, of some samples three
        (row,) = plan.rows("train")
        one = index.locate(np.arange(row.samples_per_epoch)).input_lengths(32).sum()
        placed, rest = one / LENGTHS.sum(), consumed / row.samples_per_epoch - 2
        expected = (1 - placed, 0, placed * (1 - rest), placed * rest)
        np.testing.assert_allclose(row.coverage.tokens, expected, atol=1e-12)


def test_tokens_are_a_mean_if_those_of_one_source_are(corpus: str, tmp_path: Path) -> None:
    write_corpus(tmp_path / "code", LENGTHS[:100] * 2)
    samples = megaindex.build_index(corpus, sequence_length=32, order="packed").num_samples
    common: dict[str, Any] = {"sequence_length": 32, "order": "packed", "coverage": "none",
                              "global_batch_size": 1}  # fmt: skip
    whole = make_plan(data_path=corpus, train_iters=samples, **common)
    paths = [0.5, corpus, 0.5, str(tmp_path / "code")]
    both = make_plan(data_path=paths, train_iters=2 * samples, **common)
    assert both.rows("train")[0].drawn == samples
    for plan, is_mean in ((whole, False), (both, True)):
        assert any("--coverage exact" in text for text in plan.warnings) == is_mean


def recipe_in_two_stages(corpus: str, folder: Path) -> Any:
    write_corpus(folder / "code", LENGTHS[:150])
    (folder / "run.yaml").write_text(
        "sequence_length: 32\nbatch: {global_batch_size: 8}\nsources:\n"
        f"  web: {{path: {corpus}, order: packed, max_documents: 5, long_documents: skip}}\n"
        "  code: {path: code}\nstages:\n"
        "  one: {steps: 9, mix: {web: 0.5, code: 0.5}}\n  two: {steps: 30, mix: {web: 1}}\n"
    )
    return read_recipe(folder / "run.yaml")


def test_a_recipe_has_the_facts_and_leaves_padding_out(corpus: str, tmp_path: Path) -> None:
    recipe = recipe_in_two_stages(corpus, tmp_path)
    plan = make_plan(recipe)
    index = open_recipe(recipe).index
    spans = index.locate(np.arange(index.num_samples))
    of_sample = np.add.reduceat(spans.input_lengths(32), spans.row_splits[:-1])
    source = spans.source[spans.row_splits[:-1]]
    bound = 9 * 8
    expected = [int(of_sample[:bound][source[:bound] == k].sum()) for k in (0, 1)]
    expected.append(int(of_sample[bound:].sum()))
    assert [draw.tokens for draw in plan.draws] == expected
    assert plan.tokens_consumed == sum(expected) < plan.samples_consumed * 32
    assert expected[1] == plan.draws[1].samples * 32
    assert not any("means over seeds" in text for text in plan.warnings)
    web, code = plan.sources
    assert plan.draws[2].epochs_end > 1
    order = PackedOrder(max_documents=5, long_documents="skip")
    single = make_plan(data_path=corpus, sequence_length=32, global_batch_size=8, epochs=1,
                       order=order)  # fmt: skip
    assert web.packing == single.rows("train")[0].packing
    assert code.packing is None
    facts = json.loads(json.dumps(plan.to_json()))["sources"]
    assert facts[0]["packing"]["max_documents"] == 5
    assert "packing" not in facts[1]
    shown = " ".join(repr(plan).split())
    assert f"web fill {100 * web.packing.fill:.2f} %, {web.packing.padding:,} positions" in shown
    assert "documents are longer than a sample" in shown
    assert f"{plan.samples_consumed:,} samples, {plan.tokens_consumed:,} tokens" in shown


def test_the_source_that_leaves_out_the_largest_share_comes_first(tmp_path: Path) -> None:
    long = {"more": 90, "few": 10}  # of 50 tokens, which no sample of 32 takes
    for name, others in (("more", 900), ("few", 10)):
        write_corpus(tmp_path / name, np.repeat([30, 50], [others, long[name]]))
    (tmp_path / "run.yaml").write_text(
        "sequence_length: 32\nbatch: {global_batch_size: 2}\nsources:\n"
        "  more: {path: more, order: packed, long_documents: skip}\n"
        "  few: {path: few, order: packed, long_documents: skip}\n"
        "stages:\n  one: {steps: 4, mix: {more: 0.5, few: 0.5}}\n"
    )
    warnings = [w for w in make_plan(read_recipe(tmp_path / "run.yaml")).warnings if "leaves" in w]
    assert [warning.partition(":")[0] for warning in warnings] == ["few", "more"]
    assert "leaves 500 of 800 tokens (62.5%)" in warnings[0]


def test_tokens_of_a_recipe_that_are_not_counted(
    corpus: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_in_two_stages(corpus, tmp_path)
    counted = make_plan(recipe).tokens_consumed
    monkeypatch.setattr(packing_module, "BUILD_LIMIT", LENGTHS.size - 1)
    plan = make_plan(recipe)
    assert plan.tokens_consumed == pytest.approx(counted, rel=0.01)
    assert "tokens of web are means over seeds" in plan.warnings[-1]


@for_each(
    ("begin", "end", "located"),
    [
        (70, 75, 5),  # of one epoch, the samples read
        (10, 98, 12),  # or the others
        (0, 97, 3),
        (95, 203, 8),  # of each of two
        (30, 140, 70),
        (300, 500, 0),
    ],
)
def test_samples_that_are_located_to_count_their_tokens(
    monkeypatch: pytest.MonkeyPatch, begin: int, end: int, located: int
) -> None:
    epoch: Any = Mock(num_samples=100)
    monkeypatch.setattr(packing_module, "_MOST_LOCATED", located)
    assert packing_module.is_countable(epoch, packing_module.BUILD_LIMIT, begin, end)
    assert not packing_module.is_countable(epoch, packing_module.BUILD_LIMIT + 1, begin, end)
    monkeypatch.setattr(packing_module, "_MOST_LOCATED", located - 1)
    assert not packing_module.is_countable(epoch, 1, begin, end)


def test_the_json_has_the_facts_in_order_packed_alone(corpus: str) -> None:
    common: dict[str, Any] = {"data_path": corpus, "sequence_length": 32, "epochs": 1,
                              "global_batch_size": 4}  # fmt: skip
    packed = json.loads(json.dumps(make_plan(order="packed", **common).to_json(), default=vars))
    assert packed["datasets"][0]["packing"]["max_documents"] == 16
    assert "packing" not in make_plan(order="epoch", **common).to_json()["datasets"][0]


@pytest.mark.parametrize("count", [24, 25])
def test_facts_of_many_sources_are_cut(corpus: str, count: int) -> None:
    plan = make_plan(
        data_path=[corpus] * count, sequence_length=32, global_batch_size=4, train_iters=9,
        order="packed", coverage="none",
    )  # fmt: skip
    facts = packing_texts([(f"s{row.source}", row.packing) for row in plan.rows("train")])
    shown = 24 if count == 24 else 10
    assert [name for name, _ in facts[:shown]] == [f"s{number}" for number in range(1, shown + 1)]
    cut = [("", "… and 15 with more fill; --json lists all")] * (count - 24)
    assert facts[shown:] == cut
    assert repr(plan).count("; --json lists all") == 2 * (count - 24)  # of rows and facts


def test_lines_of_a_histogram_may_have_any_order(tmp_path: Path) -> None:
    (tmp_path / "h.txt").write_text("18 2\n# tokens documents\n3 7\n17 1\n")
    histogram = read_length_histogram(str(tmp_path / "h.txt"))
    assert histogram.lengths.tolist() == [3, 17, 18]
    assert histogram.documents.tolist() == [7, 1, 2]


@for_each(
    ("text", "message"),
    [
        ("17\n", "line 1 must be a length and a number of documents"),
        ("17 x\n", "line 1 must be"),
        ("17 -1\n", "line 1 must be"),
        ("1 1\n\n17 2\n17 3\n", "line 4 gives length 17 a second time"),
        ("17 2147483648\n", "below 2\\*\\*31"),
        ("2147483648 1\n", "below 2\\*\\*31"),
        ("0 12\n", "must hold a token"),
        ("", "must hold a token"),
        ("5 2147483646\n6 2\n", "fewer than 2\\*\\*31"),
    ],
)
def test_histograms_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "h.txt").write_text(text)
    with pytest.raises(FormatError, match=message):
        read_length_histogram(str(tmp_path / "h.txt"))


@for_each(
    ("text", "documents", "tokens"),
    [
        ("0 12\n1 1\n", 13, 1),
        ("2147483647 2147483647\n", 2**31 - 1, (2**31 - 1) ** 2),
        ("5 2147483646\n6 1\n", 2**31 - 1, 5 * 2**31 - 4),
    ],
)
def test_the_least_and_the_largest_histograms(
    tmp_path: Path, text: str, documents: int, tokens: int
) -> None:
    (tmp_path / "h.txt").write_text(text)
    histogram = read_length_histogram(str(tmp_path / "h.txt"))
    assert (histogram.num_documents, histogram.tokens) == (documents, tokens)


@for_each(
    ("settings", "message"),
    [
        ({"tokens_per_epoch": 5000}, "needs the lengths of the documents"),
        ({"tokens_per_epoch": 99}, "hold 105 tokens, tokens_per_epoch says 99"),
        ({"tokens_per_epoch": [105, 1]}, "has 2 values for 1 files"),
        ({"length_histogram": "missing"}, "missing does not exist"),
        ({"data_path": "c"}, "found data_path and length_histogram"),
        ({"max_documents": 0}, "max_documents must be at least 1"),
        ({"long_documents": "drop"}, "long_documents must be one of"),
        ({"long_documents": "skip", "sequence_length": 5}, "no document gives a sample"),
        ({"sequence_length": 2**24 + 1}, "sequence_length must be at most 16777216"),
        ({"order": "neox", "max_documents": 3}, "is a setting of order packed"),
    ],
)
def test_settings_that_are_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    common: dict[str, Any] = {"order": "packed", "sequence_length": 16, "global_batch_size": 1,
                              "epochs": 1}  # fmt: skip
    if settings != {"tokens_per_epoch": 5000} and "length_histogram" not in settings:
        common["length_histogram"] = histogram_file(tmp_path / "h.txt", [7] * 15)
    with pytest.raises(MegaIndexError, match=message):
        make_plan(**(common | settings))


def test_a_billion_documents_are_planned_from_their_lengths(tmp_path: Path) -> None:
    lengths = np.arange(1, 40_000)
    documents = (1.4e9 / lengths**1.1 / 8).astype(np.int64)
    (tmp_path / "h.txt").write_text(
        "".join(f"{n} {count}\n" for n, count in zip(lengths, documents, strict=True))
    )
    assert 10**9 < documents.sum() < 2**31
    plan = make_plan(
        length_histogram=tmp_path / "h.txt", sequence_length=8192, global_batch_size=1024,
        epochs=1, order="packed",
    )  # fmt: skip
    assert any("means over seeds" in text for text in plan.warnings)
    facts = plan.rows("train")[0].packing
    assert facts is not None
    tokens = int(lengths @ documents)
    assert plan.tokens_per_epoch == tokens
    assert plan.samples_per_epoch * 8192 == tokens + facts.padding


def test_a_part_shorter_than_a_sample_is_evaluated(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [30] * 100)
    common: dict[str, Any] = {"data_path": tmp_path / "c", "sequence_length": 256, "split": "98,2",
                              "order": "packed", "global_batch_size": 1}  # fmt: skip
    plan = make_plan(epochs=1, eval_iters=1, **common)
    (row,) = plan.rows("valid")
    index = megaindex.build_index(
        tmp_path / "c", sequence_length=256, split="98,2", subset="valid", order="packed"
    )
    assert row.samples_per_epoch == index.num_samples == 1


def test_a_split_of_a_histogram_is_not_silent(tmp_path: Path) -> None:
    path = histogram_file(tmp_path / "h.txt", [7] * 15)
    plan = make_plan(length_histogram=path, sequence_length=16, global_batch_size=1, epochs=1,
                     order="packed", split="9,1")  # fmt: skip
    assert any("split 9,1 divides documents and is not applied" in text for text in plan.warnings)


def test_packed_needs_a_name_or_an_order() -> None:
    with pytest.raises(InvalidArgument, match="max_documents must be at least 1"):
        PackedOrder(max_documents=0)
    assert PackedOrder(max_documents=3).changed_settings == {"max_documents": 3}
    assert PackedOrder().row.order == "packed"


def test_input_tokens_are_exact_where_epochs_are_complete() -> None:
    """A range that ends with an epoch and begins within one has a mean."""
    packing = packed.Cutting(sequence_length=8).pack(np.array([0, 5, 4, 3, 2, 7, 1, 0, 3]), 0, None)
    size = packing.num_samples
    for begin in range(2 * size + 1):
        for end in range(begin, 2 * size + 1):
            found = packing_module.mean_inputs(packing, begin, end)
            assert found.exact == (begin == end or begin % size == end % size == 0)
            if found.exact:
                assert found.tokens == (end - begin) // size * packing.input_tokens


@pytest.mark.parametrize("align", [1, 8, 16])
def test_padding_of_aligned_documents(tmp_path: Path, align: int) -> None:
    """That of the samples, by flags, by lengths alone, and in a recipe."""
    lengths = np.random.default_rng(3).integers(1, 150, 200)
    write_corpus(tmp_path / "c", lengths.tolist())
    order = PackedOrder(align=align)
    index = build_index(tmp_path / "c", sequence_length=64, order=order, epochs=1)
    padding = 64 * index.num_samples - int(lengths.sum())
    words = ["--order", "packed", "--seq-length", 64, "--global-batch-size", 4, "--epochs", 1]
    words += ["--align", align]
    report = plan_json("--data-path", tmp_path / "c", *words)
    histogram = tmp_path / "lengths.txt"
    values, counts = np.unique(lengths, return_counts=True)
    histogram.write_text("".join(f"{v} {n}\n" for v, n in zip(values, counts, strict=True)))
    without = plan_json("--length-histogram", histogram, *words)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "sequence_length: 64\nbatch: {global_batch_size: 4}\n"
        f"sources: {{c: {{path: {tmp_path / 'c'}, order: packed, align: {align}}}}}\n"
        "stages: {all: {epochs: 1, mix: {c: 1}}}\n"
    )
    for found in (report, without, plan_json(recipe)):
        assert found["samples_per_epoch"] == index.num_samples
        assert found["datasets"][0]["packing"]["padding"] == padding


def test_align_is_of_order_packed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [50] * 20)
    words = ["--data-path", tmp_path / "c", "--seq-length", 64, "--global-batch-size", 4]
    status, _, err = command_line.plan(*words, "--epochs", 1, "--order", "epoch", "--align", 8)
    assert status == 2
    assert "--align is a setting of order packed" in err
    status, _, err = command_line.plan(*words, "--epochs", 1, "--order", "packed", "--align", 7)
    assert status == 2
    assert "align" in err
