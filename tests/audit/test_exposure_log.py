"""Exposure of each source after every step, compared with counting token by token."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex.audit import ExposureLog, audit, run_of_index, run_of_recipe, run_of_settings
from megaindex.plan import Settings, resolve
from megaindex.recipe import read_recipe
from megaindex.run.run import Run


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("exposure_log")
    for seed, (name, count) in enumerate((("web", 40), ("code", 12))):
        write_corpus(root / name, np.random.default_rng(seed).integers(0, 40, count))
    (root / "run.yaml").write_text(
        "{sequence_length: 8, batch: {global_batch_size: 4}, sources: {web: web, code: code},"
        " stages: {one: {steps: 20, mix: {web: 3, code: 1}}, two: {steps: 15, mix: {code: 1}}}}"
    )
    return root


def settings(root: Path, **changes: Any) -> dict[str, Any]:
    blend = [0.6, root / "web", 0.4, root / "code"]
    return {"data_path": blend, "sequence_length": 8, "global_batch_size": 5, **changes}


def blended(root: Path) -> Run:
    return run_of_settings(**settings(root, epochs=2.3, order="neox"))


def of_split(root: Path) -> Run:
    return run_of_settings(**settings(root, train_iters=40, split="80,15,5", consumed_samples=13))


def of_recipe(root: Path) -> Run:
    return run_of_recipe(read_recipe(root / "run.yaml"))


def of_index(root: Path) -> Run:
    index = megaindex.build_index(root / "web", sequence_length=8, epochs=3, order="epoch")
    return run_of_index(index, global_batch_size=7)


def counted(stream: Run) -> list[list[tuple[int, int]]]:
    """For each number of steps and each source: tokens served, and different ones among them."""
    served = [[0, set()] for _ in stream.sources]
    rows = [[(0, 0) for _ in stream.sources]]
    for step in range(stream.num_steps):
        for runs in stream.runs(*stream.step_bounds[step : step + 2].tolist()):
            for source, document, offset, length in zip(*runs[1:], strict=True):
                tokens: Any = served[source]
                tokens[0] += int(length)
                tokens[1] |= {(int(document), int(offset) + k) for k in range(length)}
        rows.append([(count, len(distinct)) for count, distinct in served])
    return rows


@pytest.mark.parametrize("make", [blended, of_split, of_recipe, of_index])
def test_every_step_is_that_of_counting_token_by_token(make: Any, root: Path) -> None:
    stream = make(root)
    log = ExposureLog(stream)
    assert len(log) == log.num_steps == stream.num_steps
    sizes = [int(source.lengths.sum()) for source in stream.sources]
    expected = counted(stream)
    for step, row in enumerate(expected):
        every, *sources = log.after(step)
        assert [source.source for source in sources] == [s.name for s in stream.sources]
        rows = [tuple(map(sum, zip(*row, strict=True))), *row]
        exposures, totals = [every, *sources], [sum(sizes), *sizes]
        for exposure, (served, distinct), size in zip(exposures, rows, totals, strict=True):
            assert exposure.tokens == served
            assert exposure.epoch == served / size
            assert exposure.unseen == (size - distinct) / size
            assert exposure.repeats == ((served - distinct) / served if served else 0)
    assert log.after(log.num_steps)[0].repeats > 0


def test_coarse_counts_are_those_of_the_last_step_counted(root: Path) -> None:
    stream = of_index(root)
    fine, coarse = ExposureLog(stream), ExposureLog(stream, points=5)
    length = -(-stream.num_steps // 5)
    for step in range(stream.num_steps):
        assert coarse.after(step) == fine.after(step // length * length)
    assert coarse.after(stream.num_steps) == fine.after(stream.num_steps)


def test_scalars_have_names_for_a_log(root: Path) -> None:
    log = ExposureLog(of_recipe(root))
    row = {each.source: each for each in log.after(30)}
    scalars = log.scalars(30)
    assert scalars["data/epoch"] == row["all"].epoch
    assert scalars["data/unseen/code"] == row["code"].unseen
    assert scalars["data/repeats/code"] == row["code"].repeats > 0
    assert len(scalars) == 9
    assert set(ExposureLog(of_index(root)).scalars(3, "train")) == {
        "train/epoch", "train/unseen", "train/repeats",
    }  # fmt: skip
    assert repr(log) == "ExposureLog(35 steps of web, code)"


def test_a_source_that_is_listed_twice_has_two_names(root: Path) -> None:
    web, code = str(root / "web"), str(root / "code")
    paths = [0.4, web, 0.3, code, 0.3, web]
    stream = run_of_settings(
        data_path=paths, sequence_length=16, global_batch_size=8, train_iters=9
    )
    scalars = ExposureLog(stream).scalars(9)
    names = [web.strip("/"), code.strip("/"), web.strip("/") + "#2"]
    assert [name for name in scalars if name.startswith("data/epoch/")] == [
        f"data/epoch/{name}" for name in names
    ]


def test_a_step_is_found_from_the_samples_consumed(root: Path) -> None:
    log = ExposureLog(of_index(root))
    assert [log.step_of(samples) for samples in (0, 6, 7, 13, 14)] == [0, 0, 1, 1, 2]
    for call, value in ((log.after, log.num_steps + 1), (log.step_of, 10**6), (log.after, -1)):
        with pytest.raises(megaindex.InvalidArgument, match="must be from 0 to"):
            call(value)
    with pytest.raises(megaindex.InvalidArgument, match="points must be at least 1"):
        ExposureLog(of_index(root), points=0)


def test_a_run_by_name_is_the_run(root: Path) -> None:
    run = resolve(
        Settings(data_path=(str(root / "web"),), seq_length=8, global_batch_size=5, epochs="2")
    )
    named = run_of_settings(
        data_path=root / "web", sequence_length=8, global_batch_size=5, epochs=2
    )
    assert np.array_equal(run_of_settings(run).step_bounds, named.step_bounds)
    with pytest.raises(
        megaindex.InvalidArgument, match=r"^tokens_per_epoch and length_histogram have no documents"
    ):
        run_of_settings(tokens_per_epoch=900, sequence_length=8, global_batch_size=5, epochs=2)
    with pytest.raises(
        megaindex.InvalidArgument, match="RunSettings hold all settings, also epochs"
    ):
        run_of_settings(run, epochs=2)


def test_an_index_of_a_part_needs_its_sources(root: Path) -> None:
    index = megaindex.build_index(root / "web", sequence_length=8, split="80,20,0")
    with pytest.raises(megaindex.InvalidArgument, match="the sources of ArrayIndex.* are missing"):
        run_of_index(index, global_batch_size=2)


def test_an_index_of_ones_own_is_audited_and_others_are_refused(root: Path) -> None:
    base = megaindex.build_index(root / "web", sequence_length=8)
    members = ("num_samples", "num_epochs", "tokens_per_epoch", "sequence_length",
               "add_extra_token", "locate")  # fmt: skip
    sources = run_of_index(base, global_batch_size=2).sources
    own: Any = SimpleNamespace(**{name: getattr(base, name) for name in members})
    found = audit(run_of_index(own, sources, global_batch_size=2))
    expected = audit(run_of_index(base, global_batch_size=2))
    assert found.exposure.mean_earlier.tolist() == expected.exposure.mean_earlier.tolist()
    for name in members:
        partial: Any = SimpleNamespace(**{k: v for k, v in vars(own).items() if k != name})
        with pytest.raises(megaindex.InvalidArgument, match=f"has no {name}$"):
            run_of_index(partial, sources, global_batch_size=2)
