"""Runs that go past their planned end by their settings: one source, and blends."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.bounds import check_bounds
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.builders.extend import ExtendedRun, check_built
from megaindex.errors import InvalidArgument
from megaindex.format import IndexedDataset
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.receipts import fingerprint_keys, planned_receipt

ORDERS = ("megatron", "neox", "megatron-legacy", "paddlenlp")
LENGTH = 16
KEYS = fingerprint_keys([f"{k}" * 32 for k in range(3)])


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(8)
    return [
        write_corpus(folder / f"c{k}", rng.integers(0, 90, n)) for k, n in enumerate((60, 35, 9))
    ]


def extend(corpora: Any, order: str = "megatron", **how: Any) -> ExtendedRun:
    return megaindex.extend_run(corpora, sequence_length=LENGTH, seed=5, order=order, **how)


@for_each("order", ORDERS)
@for_each("weights", [(0.6, 0.3, 0.1), None])
@for_each("buffer", [None, "exact"])
@for_each(("consumed", "more"), [(0, 40), (100, 1), (130, 700), (200, 90)])
def test_a_blend_keeps_its_past_and_draws_on(
    corpora: list[IndexedDataset],
    order: str,
    weights: Any,
    consumed: int,
    more: int,
    buffer: Any,
) -> None:
    planned = {"num_samples": 220, "weights": weights, "variance_buffer": buffer}
    run = extend(corpora, order, consumed_samples=consumed, more_samples=more, **planned)
    old, index = run.old, run.index
    assert isinstance(index, BlendedIndex)
    assert isinstance(old, BlendedIndex)
    assert run.num_samples == index.num_samples == consumed + more
    past = planned_receipt(old, 0, consumed, KEYS)
    assert planned_receipt(index, 0, consumed, KEYS) == past
    assert sum(run.served) == consumed
    # the draws are those of the blend, had it been longer
    if weights is not None or order != "megatron" or buffer == "exact":
        longer = megaindex.build_blend(
            corpora, sequence_length=LENGTH, seed=5, order=order, weights=weights,
            num_samples=consumed + more + 50, variance_buffer="exact",
        )  # fmt: skip
        np.testing.assert_array_equal(
            index.dataset_index, longer.dataset_index[: index.num_samples]
        )
    # of each source every sample of the old index comes once before one of a further epoch
    for number, (source, before) in enumerate(zip(run.sources, old.indices, strict=True)):
        drawn = index.dataset_sample_index[index.dataset_index == number]
        np.testing.assert_array_equal(drawn, np.arange(drawn.size))
        if drawn.size > run.served[number]:
            stages: Any = source.stretches  # type: ignore[attr-defined]
            parts = getattr(stages[0].index, "stretches", stages[:1])
            ids = np.concatenate([np.asarray(part.samples) for part in parts])
            assert len(set(ids.tolist())) == min(drawn.size, before.num_samples)
            assert sum(len(stage.samples) for stage in stages) == drawn.size
        else:
            assert source is before
    index.locate(np.arange(index.num_samples))


def test_a_longer_extension_of_a_blend_begins_with_a_shorter_one(
    corpora: list[IndexedDataset],
) -> None:
    how = {"num_samples": 220, "weights": (0.6, 0.3, 0.1), "consumed_samples": 150}
    short, long = (extend(corpora, "neox", more_samples=n, **how) for n in (300, 800))
    end = short.num_samples
    assert planned_receipt(long.index, 0, end, KEYS) == planned_receipt(short.index, 0, end, KEYS)


def test_all_of_an_unweighted_blend_is_followed_by_further_epochs(
    corpora: list[IndexedDataset],
) -> None:
    run = extend(corpora, more_epochs="1/2")
    assert run.consumed_samples == run.old.num_samples
    assert run.num_samples - run.consumed_samples == run.old.tokens_per_epoch // 2 // LENGTH
    assert all(len(source.further_seeds) == 1 for source in run.sources)  # type: ignore[attr-defined]
    shares = np.bincount(run.index.dataset_index[run.consumed_samples :]) / np.bincount(  # type: ignore[union-attr]
        run.old.dataset_index  # type: ignore[attr-defined]
    )
    np.testing.assert_allclose(shares, 0.5, atol=0.1)


def test_no_more_samples_were_drawn_than_were_built(corpora: list[IndexedDataset]) -> None:
    index = megaindex.build_index(corpora[0], sequence_length=LENGTH)
    check_bounds(
        lambda served: check_built("web", index, served),
        [index.num_samples],
        [index.num_samples + 1],
        f"web: the run must have drawn at most {index.num_samples} samples, the number built, got",
    )


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ({"num_samples": 200, "more_samples": 0}, "more_samples must be at least 1"),
        ({"num_samples": 200}, "more_samples or more_epochs must be given"),
        ({"num_samples": 200, "more_samples": 1, "consumed_samples": 999}, "must be from 0 to 200"),
        ({"epochs": 1, "more_samples": 1}, "epochs cannot be given for a blend"),
        (
            {"num_samples": 9, "more_samples": 1, "order": "epoch"},
            "cannot be extended, ",
        ),
    ],
)
def test_bad_settings_of_a_blend_are_refused(
    corpora: list[IndexedDataset], how: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        extend(corpora, **{"weights": (2, 1, 1), **how})
    with pytest.raises(InvalidArgument, match="are settings of a blend"):
        extend(corpora[0], weights=[1.0], num_samples=9, more_samples=1)


@pytest.mark.slow_cases("True-megatron", "True-neox")
@pytest.mark.parametrize("order", ["megatron", "neox"])
@pytest.mark.parametrize("blend", [False, True])
def test_a_run_is_trained_on_from_its_checkpoint(
    corpora: list[IndexedDataset], order: str, blend: bool
) -> None:
    """On other ranks, with receipts that are those of the extended plan."""
    pytest.importorskip("torch")
    from support.checkpoint_runs import served_over_a_restart

    sources = corpora if blend else corpora[:1]
    how: Any = {"weights": (0.6, 0.3, 0.1)} if blend else {}
    run = extend(
        sources if blend else sources[0], order, num_samples=150, consumed_samples=96,
        more_samples=200, **how,
    )  # fmt: skip

    check = served_over_a_restart(run.old, run.index, 96)
    assert check.equal
    assert check.served.total.count == run.num_samples == 296


def test_the_command_extends_a_blend(
    corpora: list[IndexedDataset], capsys: pytest.CaptureFixture[str]
) -> None:
    import json

    from megaindex.cli import main

    paths = [word for k, c in enumerate(corpora) for word in (f"0.{3 - k}", c.path_prefix)]
    settings = "--seq-length 16 --order neox --num-samples 150 --consumed-samples 120"
    arguments = ["extend", "--data-path", *paths, *settings.split(), "--more-samples", "400"]
    assert main([*arguments, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["past_unchanged"] is True
    assert report["more_samples"] == 400
    served = report["from_the_old_index"] + sum(e["samples"] for e in report["further_epochs"])
    assert served == 400
    assert [source["data_path"] for source in report["sources"]] == paths[1::2]
    assert sum(source["consumed_samples"] for source in report["sources"]) == 120
    for shares in ("coverage_before", "coverage_after"):
        assert sum(report[shares].values()) == pytest.approx(1)
    assert main(arguments) == 0
    assert f"samples of a further epoch of {corpora[1].path_prefix}" in capsys.readouterr().out


def test_a_part_of_an_epoch_of_whole_documents_is_a_part_of_its_samples(tmp_path: Path) -> None:
    """Which hold padding, so that their number does not follow from the tokens."""
    corpus = write_corpus(tmp_path / "c", np.random.default_rng(2).integers(1, 90, 300))
    run = megaindex.extend_run(
        corpus, sequence_length=64, order="packed", epochs="3/2", more_epochs="1/2"
    )
    per_epoch = megaindex.build_index(corpus, sequence_length=64, order="packed").num_samples
    assert run.old.num_samples == 2 * per_epoch
    assert run.consumed_samples == 3 * per_epoch // 2
    assert run.num_samples == run.consumed_samples + per_epoch // 2
