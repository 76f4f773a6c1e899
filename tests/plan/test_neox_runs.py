"""Plans against runs of GPT-NeoX's own code; golden/neox_runs.json says how they were made."""

from __future__ import annotations

import json
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import IndexedDatasetWriter, NeoxDocumentsOrder
from megaindex.errors import InvalidArgument
from megaindex.index.skips import Skip
from megaindex.plan import Plan, make_plan
from megaindex.plan.advice import adapter_settings
from megaindex.plan.coverage import count_served
from megaindex.plan.export import export_settings
from megaindex.run.from_settings import run_of_settings
from megaindex.run.passes import LoaderPasses, loader_passes
from megaindex.settings.neox_yaml import read_neox
from megaindex.settings.run_builder import resolve
from megaindex.settings.run_settings import Data, RunSettings, Target

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/neox_runs.json").read_text())
RUNS = [pytest.param(run, id=f"{k}-{run['kind']}") for k, run in enumerate(GOLDEN["runs"])]
AUDITED = [
    param
    for param, run in zip(RUNS, GOLDEN["runs"], strict=True)
    if "error" not in run and "pack_impl" not in run["keys"]
]
SPLITS = ("train", "valid", "test")


def run_of(case: dict[str, Any], folder: Path) -> RunSettings:
    """The run of a case, its corpora written and its configuration read from a file."""
    for name, sizes in case["corpora"].items():
        write_corpus(folder / name, sizes)
        if name in case["prompts"]:
            with IndexedDatasetWriter(folder / f"{name}_label", dtype="int32") as writer:
                for size, prompt in zip(sizes, case["prompts"][name], strict=True):
                    writer.add_document(np.array([-100] * prompt + [1] * (size - prompt)))
    text = json.dumps({**case["keys"], "data_impl": "mmap"}).replace('"@', f'"{folder}/')
    file = folder / "c.yml"
    file.write_text(text)
    return resolve(read_neox([file]))


@pytest.mark.parametrize("case", RUNS)
def test_the_plan_is_the_run(case: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(case, tmp_path)
    if "error" in case:
        assert_dead(case["error"], run)
        return
    plan = make_plan(run)
    assert plan.train_iters == case["train_iters"]
    assert not plan.caution.startswith(("train:", "valid:", "test:"))
    for split in SPLITS:
        assert_split(plan, split, case["splits"][split])


def assert_dead(error: str, run: RunSettings) -> None:
    """What ends in an error is refused, or named in the plan's first line."""
    plan = plan_or_refusal(run)
    if isinstance(plan, str):
        assert "none of the" in plan or error in plan
        return
    assert error in plan.caution
    assert plan.warnings[0] == plan.caution
    assert any("GPT-NeoX ends with" in reason for reason in plan.check_failures)


def plan_or_refusal(run: RunSettings) -> Plan | str:
    try:
        return make_plan(run)
    except InvalidArgument as refusal:
        return str(refusal)


def assert_split(plan: Plan, split: str, ran: dict[str, Any]) -> None:
    rows = [row for row in plan.datasets if row.split == split and row.built]
    assert [row.built for row in rows] == ran["built"]
    assert sum(row.drawn for row in rows) == ran["rows"]
    counted = [end.samples_counted for end in plan.loaders if end.split == split]
    assert counted == [ran["counted"]] * bool(ran["built"])
    for row, times in zip(rows, ran["served"], strict=True):
        assert row.coverage.method in ("closed-form", "built")
        shares = list(row.coverage.tokens)
        shares += [0.0] * (len(times) - len(shares))
        np.testing.assert_allclose(shares[: len(times)], np.array(times) / sum(times), atol=1e-12)
        assert sum(shares[len(times) :]) == 0


@for_each("case", AUDITED)
def test_the_audit_serves_what_the_run_does(case: dict[str, Any], tmp_path: Path) -> None:
    run = run_of(case, tmp_path)
    for split in SPLITS:
        ran = case["splits"][split]
        if not ran["rows"]:
            continue
        stream = run_of_settings(run, subset=split)
        assert int(stream.step_bounds[-1]) == ran["rows"]
        if len(stream.sources) > 1:
            continue
        source = stream.sources[0]
        served, _ = count_served(stream.index, ran["rows"], source.lengths, source.first_document)
        assert np.trim_zeros(served, "b").tolist() == ran["served"][0]


@for_each("case", [param for param in RUNS if "error" not in param.values[0]])
def test_what_was_read_is_printed(case: dict[str, Any], tmp_path: Path) -> None:
    """Packings, pairs, labels, weights by documents and train_epochs are read back as they are."""
    run = run_of(case, tmp_path)
    plan = make_plan(run)
    file = tmp_path / "printed.yml"
    file.write_text(export_settings(plan, run, "neox"))
    again = resolve(read_neox([file]))
    assert make_plan(again).to_json() == plan.to_json()
    assert (again.data, again.packing, again.target) == (run.data, run.packing, run.target)


EPOCHS: dict[str, Any] = {
    **{f"{split}_data_paths": ["@a"] for split in SPLITS}, "train_epochs": 2, "seq_length": 8,
    "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "global_num_gpus": 1,
    "eval_iters": 1, "eval_interval": 5,
}  # fmt: skip


@pytest.mark.parametrize("exact", [True, False])
def test_skips_of_epochs_with_orders_of_their_own_are_not_counted(
    tmp_path: Path, exact: bool
) -> None:
    case = {"corpora": {"a": [30] * 9}, "prompts": {}, "keys": EPOCHS}
    run = replace(run_of(case, tmp_path), exact=exact)
    for skip, method in ((), None), ((Skip(steps=3),), "none"):
        plan = make_plan(replace(run, skip=skip))
        methods = {row.coverage.method for row in plan.rows("train")}
        assert (methods == {"none"}) == (exact and method == "none")
        assert {row.coverage.method for row in plan.rows("valid")} & {"none"} == set()


@for_each(
    ("tokens", "length", "said"),
    [(1, 8, "of one token"), (2, 8, ""), (270, 1, "of sequences of one token"), (270, 2, "")],
)
def test_the_helpers_of_neox_refuse_a_source_of_one_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tokens: int, length: int, said: str
) -> None:
    keys = {**EPOCHS, "train_data_paths": ["@a", "@b"], "seq_length": length}
    case = {"corpora": {"a": [30] * 9, "b": [tokens]}, "prompts": {}, "keys": keys}
    run = run_of(case, tmp_path)
    error = f"an abort of its compiled helpers, which refuse a source {said}" if said else ""
    assert make_plan(run).rows("train")[1].error == error
    assert make_plan(replace(run, exact=True)).rows("train")[1].error == ""
    monkeypatch.setattr("megaindex.plan.plan.BUILD_LIMIT", -1)  # packings have other errors
    whole = NeoxDocumentsOrder(pack_impl="pack_until_overflow")
    settings = {"sequence_length": length, "global_batch_size": 2, "train_iters": 3}
    for order in (whole, "megatron"):
        plan = make_plan(data_path=[str(tmp_path / "a")], order=order, **settings)
        assert plan.datasets[0].error == ""


@for_each(
    ("change", "needed"),
    [
        ({"variance_buffer": 1.25}, {}),  # of epochs, not samples
        ({"target": Target(kind="iterations", value=Fraction(9))}, {}),
        ({"variance_buffer": 1.25, "target": Target(kind="iterations", value=Fraction(9))},
         {"variance_buffer": 1.25}),
        ({"variance_buffer": 1.005, "target": Target(kind="iterations", value=Fraction(9))}, {}),
        ({"exact": True}, {"exact": True}),
    ],
)  # fmt: skip
def test_arguments_of_the_adapter_that_a_run_needs(
    tmp_path: Path, change: dict[str, Any], needed: dict[str, Any]
) -> None:
    case = {"corpora": {"a": [30] * 9}, "prompts": {}, "keys": EPOCHS}
    run = replace(run_of(case, tmp_path), **change)
    assert adapter_settings(run) == needed
    together = replace(run, data=Data(train=run.data.train, split="969,30,1"))
    assert "variance_buffer" not in adapter_settings(together)


@pytest.mark.parametrize("sources", [1, 2])
def test_exact_epochs_of_one_source_are_printed_as_a_recipe(tmp_path: Path, sources: int) -> None:
    keys = {**EPOCHS, "train_data_paths": ["@a", "@b"][:sources]}
    case = {"corpora": {"a": [30] * 9, "b": [30] * 9}, "prompts": {}, "keys": keys}
    run = replace(run_of(case, tmp_path), exact=True)
    if sources == 1:
        assert "stages:" in export_settings(make_plan(run), run, "recipe")
    else:
        with pytest.raises(InvalidArgument, match="each epoch reads its sources whole; write a re"):
            export_settings(make_plan(run), run, "recipe")


def test_epochs_of_sources_that_hold_no_sample(tmp_path: Path) -> None:
    keys = {**EPOCHS, "train_data_paths": ["@a", "@tiny"]}
    case = {"corpora": {"a": [30] * 9, "tiny": [5]}, "prompts": {}, "keys": keys}
    plan = make_plan(run_of(case, tmp_path))
    assert [row.built for row in plan.rows("train")] == [33, 0]
    error = (
        f"train: GPT-NeoX ends with a ValueError before step 1: {tmp_path}/tiny has no sample: "
        "remove it, or give it more documents"
    )
    assert plan.caution == error
    assert plan.warnings.count(error) == 1
    assert not [text for text in plan.warnings if "its loader counts" in text]
    few = {"corpora": {"few": [9] * 3}, "prompts": {}}
    with pytest.raises(InvalidArgument) as caught:
        make_plan(run_of({**few, "keys": {**EPOCHS, "train_data_paths": ["@few"]}}, tmp_path))
    assert str(caught.value) == (
        "train_epochs: one epoch of the sources holds less than a micro batch of 4 samples, and "
        "GPT-NeoX ends with a ZeroDivisionError; lower the batch size"
    )


@pytest.mark.parametrize(
    ("consumed", "before", "resumed_at"),
    [
        (0, 0, 0),
        (80, 48, 48),  # 4 rounds of 3 · 4 samples; 40 micro batches of training
        (92, 48, 54),  # 4 rounds; 46 micro batches, 9 rounds of 3 · 2 samples
        (240, 132, 6),  # more than the 132 samples of 11 rounds; 144 modulo 138
    ],
)
def test_validation_of_a_resumed_run(
    consumed: int, before: int, resumed_at: int, tmp_path: Path
) -> None:
    """GPT-NeoX resumes it at the micro batches of training, not at those of the rounds made."""
    keys = {**EPOCHS, "train_iters": 50, "train_micro_batch_size_per_gpu": 2, "eval_iters": 3,
            "gradient_accumulation_steps": 2}  # fmt: skip
    del keys["train_epochs"]
    case = {"corpora": {"a": [30] * 40}, "prompts": {}, "keys": keys}
    run = replace(run_of(case, tmp_path), consumed_samples=consumed)
    passes = loader_passes(run, [70, 70], "valid", 132)
    assert passes == LoaderPasses(samples=132, limit=138, before=before, resumed_at=resumed_at)
    served = list(range(before))
    place = resumed_at
    while len(served) < 132:
        served.append(place)
        place = place + 1 if place + 1 < 138 else resumed_at
    times = np.zeros(138, int)
    for part in passes.positions():
        times[part.begin : part.end] += part.times
    assert times.tolist() == np.bincount(served, minlength=138).tolist()
    test = loader_passes(run, [70, 70], "test", 132)
    assert test == LoaderPasses(samples=132, limit=138)


@pytest.mark.parametrize("pack_impl", ["unpacked", "pack_until_overflow"])
def test_packing_is_built_where_that_is_cheap_or_asked_for(
    pack_impl: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The epochs of unpacked documents follow from their number, those of packed ones do not."""
    case = next(
        run for run in GOLDEN["runs"]
        if run["keys"].get("pack_impl") == pack_impl and "error" not in run
    )  # fmt: skip
    run = run_of(case, tmp_path)
    epochs, methods = {}, {}
    for limit in (10**9, 10):
        monkeypatch.setattr("megaindex.plan.plan.BUILD_LIMIT", limit)
        for coverage in ("auto", "exact", "none"):
            rows = make_plan(replace(run, coverage=coverage)).rows("train")
            epochs[limit, coverage] = [row.epochs for row in rows]
            assert all((row.repeated is None) == (row.epochs is None) for row in rows)
            methods[limit, coverage] = {row.coverage.method for row in rows}
    counted = epochs.pop((10**9, "exact"))
    assert None not in counted
    unknown = [None] * len(counted)
    varies = pack_impl != "unpacked"
    assert epochs == {
        (limit, coverage): unknown if varies and limit == 10 and coverage != "exact" else counted
        for limit, coverage in epochs
    }
    assert methods == {
        (limit, coverage): {
            "built" if coverage == "exact" or (coverage == "auto" and limit > 10) else "none"
        }
        for limit, coverage in methods
    }


def test_the_work_up_to_which_a_packing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is that of 4 samples and of 2 passes over 3 documents."""
    write_corpus(tmp_path / "c", [9] * 3)
    order = NeoxDocumentsOrder(pack_impl="pack_until_overflow")
    for limit, epochs, method in ((10, 2, "built"), (9, None, "none")):
        monkeypatch.setattr("megaindex.plan.plan.BUILD_LIMIT", limit)
        plan = make_plan(data_path=[str(tmp_path / "c")], order=order, sequence_length=8,
                         global_batch_size=1, train_iters=4)  # fmt: skip
        (row,) = plan.rows("train")
        assert (row.requested, row.epochs, row.coverage.method) == (4, epochs, method)


def test_of_a_source_with_one_sample_that_sample_comes_again(tmp_path: Path) -> None:
    """GPT-NeoX takes NumPy's remainder by a length of 0, which is 0."""
    write_corpus(tmp_path / "one", [9])
    write_corpus(tmp_path / "more", [81])
    paths = {f"{split}_data_paths": ["@one", "@more"] for split in SPLITS}
    keys = {
        "seq_length": 8,
        "train_batch_size": 1,
        "global_num_gpus": 1,
        "train_epochs": 1,
        **paths,
    }
    run = run_of({"corpora": {}, "prompts": {}, "keys": keys}, tmp_path)
    plan = make_plan(run)
    one, more = (row for row in plan.datasets if row.split == "train")
    assert (plan.samples_left_over, plan.buffer_effect) == (6, None)
    buffered = make_plan(replace(run, variance_buffer="exact"))
    assert buffered.datasets == plan.datasets
    assert any("--variance-buffer has no effect" in text for text in buffered.warnings)
    assert (one.built, one.drawn, one.distinct, more.drawn) == (1, 5, 1, 4)
    assert one.coverage.tokens == pytest.approx((1 / 9, 0, 0, 0, 0, 8 / 9))
    (uneven,) = (text for text in plan.warnings if text.startswith("train: train_epochs draws"))
    assert f"1 of 2 sources is repeated, such as {one.name} (5 drawn, 1 in its epoch)" in uneven
    write_corpus(tmp_path / "two", [17])
    paths = {f"{split}_data_paths": ["@two", "@one", "@more"] for split in SPLITS}
    plan = make_plan(run_of({"corpora": {}, "prompts": {}, "keys": {**keys, **paths}}, tmp_path))
    drawn = [row.drawn for row in plan.datasets if row.split == "train"]
    (uneven,) = (text for text in plan.warnings if text.startswith("train: train_epochs draws"))
    assert f"2 of 3 sources are repeated, such as {one.name} ({drawn[1]} drawn, 1 in its" in uneven
