"""Against megatron-core's own builder on small corpora: epochs, samples, draws, splits."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import plan as cli
from support.command_line import plan_json
from support.corpora import write_corpus
from support.inputs import for_each
from support.megatron_dataset import Tokenizer

SEQ = 16
SPLITS = ("train", "valid", "test")

pytestmark = pytest.mark.not_quick


@pytest.fixture(scope="module")
def core() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from megatron.core.datasets import blended_megatron_dataset_builder as builder
        from megatron.core.datasets import gpt_dataset
    return builder.BlendedMegatronDatasetBuilder, gpt_dataset


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    root = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(3)
    prefixes = [root / name for name in "abcd"]
    for prefix, count in zip(prefixes, (300, 120, 60, 30), strict=True):
        write_corpus(prefix, rng.integers(1, 40, count))
    return [str(prefix) for prefix in prefixes]


def build(core: Any, sizes: list[int], **config: Any) -> list[Any]:
    """The datasets of train, valid and test, None where a split has none."""
    builder, gpt = core
    settings = gpt.GPTDatasetConfig(
        random_seed=1234,
        sequence_length=SEQ,
        tokenizer=Tokenizer(),
        reset_position_ids=False,
        reset_attention_mask=False,
        eod_mask_loss=False,
        **config,
    )
    result: list[Any] = builder(gpt.GPTDataset, sizes, lambda: True, settings).build()
    return result


def sources_of(dataset: Any) -> list[Any]:
    return list(getattr(dataset, "datasets", [dataset]))


def epochs_of(source: Any) -> int:
    return len(source.document_index) // len(source.indices)


def assert_as_built(plan: dict[str, Any], split: str, dataset: Any) -> None:
    rows = [row for row in plan["datasets"] if row["split"] == split]
    sources = sources_of(dataset)
    assert [row["path"] for row in rows] == [source.dataset.path_prefix for source in sources]
    assert [row["built"] for row in rows] == [len(source) for source in sources]
    assert [row["epochs"] for row in rows] == [epochs_of(source) for source in sources]
    if hasattr(dataset, "dataset_index"):
        taken = sum(row["drawn"] for row in rows)
        drawn = np.bincount(dataset.dataset_index[:taken], minlength=len(sources))
        assert [row["drawn"] for row in rows] == drawn.tolist()


def words(paths: list[str], weights: list[float] | None) -> list[object]:
    if weights is None:
        return list(paths)
    return [word for pair in zip(weights, paths, strict=True) for word in pair]


@for_each("weights", [[0.5, 0.3, 0.2], [3.0, 1.0, 7.0], [0.01, 0.98, 0.01]])
@for_each("iterations", [1, 37, 150, 400])
@for_each("surplus", [None, 0.0, 0.05])
def test_weighted_blend_with_splits(
    core: Any, paths: list[str], weights: list[float], iterations: int, surplus: float | None
) -> None:
    batch, interval, evals = 4, 50, 2
    plan = plan_json(
        "--data-path", *words(paths[:3], weights), "--split", "70,20,10", "--seq-length", SEQ,
        "--global-batch-size", batch, "--train-iters", iterations, "--eval-interval", interval,
        "--eval-iters", evals, "--coverage", "none",
        *([] if surplus is None else ["--variance-buffer", repr(1 + surplus)]),
    )  # fmt: skip
    rounds = (iterations // interval + 1) * evals
    sizes = [iterations * batch, rounds * batch, evals * batch]
    config = {} if surplus is None else {"mid_level_dataset_surplus": surplus}
    try:
        built = build(core, sizes, blend=(paths[:3], weights), split="70,20,10", **config)
    except IndexError:
        # The builder finds a source drawn more often than built: the plan must have warned.
        assert any("too small" in text for text in plan["warnings"])
        return
    assert not any("too small" in text for text in plan["warnings"])
    for split, dataset in zip(SPLITS, built, strict=True):
        assert_as_built(plan, split, dataset)


@for_each("iterations", [1, 60, 230, 600])
@for_each("weight", [None, 1.0])
def test_one_path_with_and_without_a_weight(
    core: Any, paths: list[str], iterations: int, weight: float | None
) -> None:
    """`--data-path 1.0 P` is buffered, `--data-path P` is not."""
    weights = None if weight is None else [weight]
    plan = plan_json(
        "--data-path", *words(paths[:1], weights), "--split", "100,0,0", "--seq-length", SEQ,
        "--global-batch-size", 2, "--train-iters", iterations, "--coverage", "none",
    )  # fmt: skip
    assert plan["variance_buffer"] == (1.0 if weight is None else 1.005)
    train, valid, test = build(
        core, [iterations * 2, 0, 0], blend=(paths[:1], weights), split="100,0,0"
    )
    assert valid is None
    assert test is None
    assert_as_built(plan, "train", train)
    # The plan's limits are those of the builder: the next iteration begins another epoch.
    for limit in ("max_train_iters_without_repeat", "max_train_iters_same_epochs"):
        epochs = [
            max(epochs_of(s) for s in sources_of(build(
                core, [n * 2, 0, 0], blend=(paths[:1], weights), split="100,0,0")[0]))
            for n in (plan[limit], plan[limit] + 1)
        ]  # fmt: skip
        assert epochs[1] == epochs[0] + 1


@pytest.mark.parametrize("iterations", [10, 200, 239, 240, 400])
def test_paths_without_weights_are_built_for_one_epoch(
    core: Any, paths: list[str], iterations: int
) -> None:
    plan = plan_json(
        "--data-path", *paths[:2], "--split", "100,0,0", "--seq-length", SEQ,
        "--global-batch-size", 2, "--train-iters", iterations, "--coverage", "none",
    )  # fmt: skip
    train = build(core, [iterations * 2, 0, 0], blend=(paths[:2], None), split="100,0,0")[0]
    rows = plan["datasets"]
    assert [row["built"] for row in rows] == [len(s) for s in train.datasets]
    assert [row["epochs"] for row in rows] == [1, 1]
    dry = len(train) < iterations * 2
    assert dry == (iterations > plan["max_train_iters_without_repeat"])
    assert dry == any("runs out of samples" in text for text in plan["warnings"])


def test_a_blend_by_size_with_a_source_of_no_sample_stops(core: Any, paths: list[str]) -> None:
    few, other, one = f"{paths[0]}_few", paths[0], paths[1]
    write_corpus(Path(few), [SEQ])
    for split, prefixes, given in (
        ("train", [other, few], ["--train-data-path", other, few]),
        ("test", [few, other], ["--train-data-path", one, "--test-data-path", few, other]),
    ):
        blends: list[Any] = [(prefixes, None) if split == name else None for name in SPLITS]
        with pytest.raises(AssertionError):
            build(core, [40, 0, 40], blend_per_split=blends)
        words_ = [*given, "--seq-length", SEQ, "--global-batch-size", 2, "--train-iters", 20]
        plan = plan_json(*words_, "--eval-iters", 20, "--coverage", "none")
        stop = f"{split}: no sample in {few}, at which Megatron's blend stops with an Assertion"
        remedy = "remove the source, or give it more documents"
        assert plan["caution"] == f"{stop}Error: {remedy}"
        status, _, err = cli(*words_, "--check")
        assert (status, err.count(stop)) == (1, 1)
        assert not any("--split" in text for text in plan["warnings"])


def test_sources_of_no_sample_are_refused(paths: list[str]) -> None:
    few = [f"{paths[0]}_{name}" for name in ("x", "y")]
    for prefix in few:
        write_corpus(Path(prefix), [SEQ])
    words_ = ["--seq-length", SEQ, "--global-batch-size", 2, "--train-iters", 3]
    valid = ["--train-data-path", paths[0], "--valid-data-path"]
    for data in (["--data-path"], valid, [*valid[:2], paths[1], "--test-data-path"]):
        status, out, err = cli(*data, *few, *words_)
        assert (status, out, err.count("\n")) == (2, "", 1)
        assert f"{few[0]} and {few[1]}: no sample of {SEQ + 1} tokens in any source" in err


def test_a_cyclic_loader_does_not_run_out_of_samples(paths: list[str]) -> None:
    words_ = ["--train-data-path", *paths[:2], "--seq-length", SEQ, "--global-batch-size", 4]
    for kind in ("single", "cyclic"):
        plan = plan_json(*words_, "--train-iters", 1000, "--dataloader-type", kind)
        assert any("runs out" in text for text in plan["warnings"]) == (kind == "single")


def test_each_split_with_its_own_blend(core: Any, paths: list[str]) -> None:
    plan = plan_json(
        "--train-data-path", 2, paths[0], 1, paths[1], "--valid-data-path", 1.0, paths[2],
        "--test-data-path", paths[3], "--seq-length", SEQ, "--global-batch-size", 4,
        "--train-iters", 90, "--eval-interval", 30, "--eval-iters", 3, "--coverage", "none",
    )  # fmt: skip
    blends = [([paths[0], paths[1]], [2.0, 1.0]), ([paths[2]], [1.0]), ([paths[3]], None)]
    sizes = [90 * 4, (90 // 30 + 1) * 3 * 4, 3 * 4]
    for split, dataset in zip(SPLITS, build(core, sizes, blend_per_split=blends), strict=True):
        assert_as_built(plan, split, dataset)


def test_many_sources_exceed_the_buffer_as_megatron_says(core: Any, tmp_path: Path) -> None:
    """64 lognormal weights and sources of a few samples: Megatron raises for most weights."""
    rng = np.random.default_rng(0)
    prefixes = [str(tmp_path / f"{i:02}") for i in range(64)]
    for prefix in prefixes:
        write_corpus(Path(prefix), [SEQ + 1])
    outcomes = set()
    for sigma in (0.1, 0.5, 1.0, 1.0, 2.0):
        weights = [float(w) for w in rng.lognormal(0, sigma, 64)]
        run = ["--data-path", *words(prefixes, weights), "--split", "100,0,0", "--seq-length", SEQ,
               "--global-batch-size", 1, "--train-iters", 1000, "--coverage", "none"]  # fmt: skip
        plan = plan_json(*run)
        warned = any("too small" in text for text in plan["warnings"])
        enough = re.findall(r"exact, or (\S+) or more, and plan", str(plan["warnings"]))
        assert [float(buffer) > 1.005 for buffer in enough] == [True] * warned
        for buffer in enough:
            larger = plan_json(*run, "--variance-buffer", buffer)
            assert not any("too small" in text for text in larger["warnings"])
        try:
            build(core, [1000, 0, 0], blend=(prefixes, weights), split="100,0,0")
            raised = False
        except IndexError:
            raised = True
        assert warned == raised, sigma
        outcomes.add(raised)
    assert outcomes == {True, False}


def test_the_buffer_named_requests_what_is_drawn(tmp_path: Path) -> None:
    """Of 4 samples, one requested of each source, 3 are of the source of weight 9 of 12."""
    prefixes = [str(tmp_path / name) for name in "abcd"]
    for prefix in prefixes:
        write_corpus(Path(prefix), [SEQ + 1])
    plan = plan_json("--train-data-path", *words(prefixes, [9.0, 1.0, 1.0, 1.0]), "--seq-length",
                     SEQ, "--global-batch-size", 1, "--train-iters", 1, "--eval-iters", 0,
                     "--variance-buffer", "1")  # fmt: skip
    assert [row["requested"] for row in plan["datasets"]] == [1, 1, 1, 1]
    (text,) = (text for text in plan["warnings"] if "too small" in text)
    assert "1 of 4 sources, such as " + prefixes[0] + " (3 of 1)" in text
    assert "pass --variance-buffer exact, or 3.002 or more, and plan again" in text


def test_a_larger_buffer_may_draw_more(tmp_path: Path) -> None:
    """Of 10 samples, 6 are of the source of weight 15 of 30, at a buffer of 1.509 more."""
    prefixes = [str(tmp_path / f"{k:02}") for k in range(16)]
    for prefix in prefixes:
        write_corpus(Path(prefix), [SEQ + 1])
    run = ["--train-data-path", *words(prefixes, [15.0] + [1.0] * 15), "--seq-length", SEQ,
           "--global-batch-size", 1, "--train-iters", 10, "--eval-iters", 0]  # fmt: skip
    buffers = ["1.005"]
    while len(buffers) < 9:
        said = str(plan_json(*run, "--variance-buffer", buffers[-1])["warnings"])
        if not (enough := re.findall(r"exact, or (\S+) or more, and plan", said)):
            break
        buffers += enough
    assert 2 < len(buffers) < 9
    assert sorted({*map(float, buffers)}) == [*map(float, buffers)]


def test_paths_without_weights_hold_one_epoch(tmp_path: Path) -> None:
    for name, samples in (("a", 4), ("b", 3)):
        write_corpus(tmp_path / name, [SEQ * samples + 1])
    for iterations in (7, 8):
        plan = plan_json("--data-path", tmp_path / "a", tmp_path / "b", "--split", "100,0,0",
                         "--seq-length", SEQ, "--global-batch-size", 1,
                         "--train-iters", iterations)  # fmt: skip
        said = [text for text in plan["warnings"] if "7 samples, and the run reads" in text]
        assert (len(said), iterations) in ((0, 7), (1, 8))


def test_unweighted_validation_that_runs_dry_is_forecast(core: Any, paths: list[str]) -> None:
    words_ = [
        "--train-data-path", paths[0], "--valid-data-path", *paths[1:4], "--seq-length", SEQ,
        "--global-batch-size", 4, "--train-iters", 20, "--coverage", "none", "--eval-interval", 10,
    ]  # fmt: skip
    for evals, dry in ((1, False), (100, True)):
        plan = plan_json(*words_, "--eval-iters", evals)
        sizes = [80, 3 * evals * 4, evals * 4]
        blends = [([paths[0]], None), (paths[1:4], None), None]
        valid = build(core, sizes, blend_per_split=blends)[1]
        assert (len(valid) < sizes[1]) == dry
        assert (
            any(text.startswith("valid: Megatron builds one") for text in plan["warnings"]) == dry
        )


@pytest.mark.parametrize(("ranks", "stops"), [(1, False), (2, True)])
def test_a_cyclic_loader_of_less_than_a_micro_batch_stops(
    paths: list[str], tmp_path: Path, ranks: int, stops: bool
) -> None:
    """Sources without weights are built for one epoch, here of six samples in all."""
    few = [tmp_path / name for name in ("x", "y")]
    for prefix in few:
        write_corpus(prefix, [3 * SEQ + 1])
    plan = plan_json(
        "--train-data-path", paths[0], "--valid-data-path", *few, "--seq-length", SEQ,
        "--micro-batch-size", 4, "--data-parallel-size", ranks, "--train-iters", 20,
        "--eval-interval", 10, "--dataloader-type", "cyclic", "--coverage", "none",
    )  # fmt: skip
    assert any("ZeroDivisionError" in text for text in plan["warnings"]) == stops
    assert [dry["split"] for dry in plan["dry_loaders"]] == ["valid"] * stops


@for_each("weight", [[], [1]])
def test_one_path_of_its_own_has_no_buffer(core: Any, paths: list[str], weight: list[int]) -> None:
    plan = plan_json(
        "--train-data-path", *weight, paths[0], "--seq-length", SEQ, "--global-batch-size", 4,
        "--train-iters", 20, "--coverage", "none", "--variance-buffer", 1.5,
    )  # fmt: skip
    blend = ([paths[0]], weight or None)
    built = build(
        core, [80, 0, 0], blend_per_split=[blend, None, None], mid_level_dataset_surplus=0.5
    )[0]
    assert [row["requested"] for row in plan["datasets"]] == [built.num_samples] == [80]


@pytest.mark.parametrize(("test", "draws"), [((), False), (("--test-data-path", "c"), True)])
def test_only_data_that_there_is_is_evaluated(
    paths: list[str], test: tuple[str, ...], draws: bool
) -> None:
    places = dict(zip("abcd", paths, strict=True))
    words_ = [
        "--train-data-path", paths[0], "--valid-data-path", paths[1],
        *(places.get(word, word) for word in test), "--seq-length", SEQ, "--global-batch-size", 4,
        "--train-iters", 20, "--coverage", "none", "--eval-interval", 10, "--eval-iters", 2,
    ]  # fmt: skip
    evaluation = plan_json(*words_)["evaluation"]
    assert (evaluation["valid_samples"], evaluation["test_samples"]) == (24, 8 * draws)
    assert evaluation["test_samples_read"] == 8 * draws
    assert ("the test draws 8" in cli(*words_)[1]) == ("test draws" in cli(*words_)[1]) == draws


@pytest.mark.parametrize("weights", [(), (2, 1)])
def test_draws_of_a_cyclic_loader_are_bounds_with_skips_too(
    paths: list[str], weights: tuple[int, ...]
) -> None:
    data = words(paths[:2], [*weights] or None)
    words_ = [
        "--data-path", *data, "--split", "100,0,0", "--seq-length", SEQ, "--global-batch-size", 8,
        "--train-iters", 12, "--dataloader-type", "cyclic", "--eval-interval", 99,
    ]  # fmt: skip
    for skips, samples in (((), 96), (("--iterations-to-skip", 2, 3), 80)):
        for row in plan_json(*words_, *skips)["datasets"]:
            assert (row["drawn"], row["drawn_bounds"]) == (None, [0, samples])
            assert row["coverage"] == {}


@for_each("weights", [None, [2, 1]])
@for_each(("samples", "read"), [(24, 24), (25, 32), (32, 32)])
def test_a_batch_schedule_reads_beyond_the_samples_of_a_blend(
    core: Any, paths: list[str], weights: list[float] | None, samples: int, read: int
) -> None:
    """Two iterations of 4, then iterations of 8; the built samples of both sources suffice."""
    plan = plan_json(
        "--data-path", *words(paths[:2], weights), "--split", "100,0,0", "--seq-length", SEQ,
        "--micro-batch-size", 1, "--data-parallel-size", 1, "--eval-interval", 99,
        "--train-samples", samples, "--batch-schedule", f"0:4 {SEQ * 8}:8",
    )  # fmt: skip
    train = build(core, [samples, 0, 0], blend=(paths[:2], weights), split="100,0,0")[0]
    dry = len(train) < read
    assert dry == (samples == 25)
    assert dry == any("runs out of samples" in text for text in plan["warnings"])


def test_a_batch_schedule_that_falls_stops(paths: list[str]) -> None:
    words_ = ["--data-path", paths[0], "--split", "100,0,0", "--seq-length", SEQ]
    words_ += ["--micro-batch-size", 2, "--data-parallel-size", 1, "--eval-interval", 99]
    schedule = f"0:4 {SEQ * 8}:8 {SEQ * 24}:6"  # two iterations of 4, two of 8
    for iterations, stops in ((4, False), (5, True)):
        plan = plan_json(*words_, "--train-iters", iterations, "--batch-schedule", schedule)
        text = "falls from 8 to 6, at which Megatron-LM (main, 2026-08) stops after 4 iterations"
        assert (text in plan["caution"]) == stops
        assert bool(plan["caution"]) == stops
    same = f"0:4 {SEQ * 8}:4 {SEQ * 24}:6"
    assert not plan_json(*words_, "--train-iters", 9, "--batch-schedule", same)["caution"]
    resumed = ["--consumed-samples", 24, "--train-iters", 3, "--batch-schedule", schedule]
    assert not plan_json(*words_, *resumed)["caution"]


@pytest.mark.parametrize(
    ("version", "stops"), [("0.16.1", True), ("0.19.0", True), ("main", False)]
)
def test_no_evaluation_of_a_blend(paths: list[str], version: str, stops: bool) -> None:
    words_ = [
        "--data-path", *words(paths[:2], [2, 1]), "--split", "90,5,5", "--seq-length", SEQ,
        "--global-batch-size", 4, "--train-iters", 20, "--eval-interval", 10, "--eval-iters", 0,
        "--framework-version", version,
    ]  # fmt: skip
    found = [text for text in plan_json(*words_)["warnings"] if "--eval-iters 0 makes" in text]
    assert [text.partition(":")[0] for text in found] == ["test", "valid"] * stops


def test_rows_of_evaluations_that_start_late(paths: list[str]) -> None:
    """What is read decides the draws: Megatron builds fewer evaluations than it makes."""
    words_ = [
        "--data-path", paths[0], "--split", "80,20,0", "--seq-length", SEQ, "--coverage", "none",
        "--global-batch-size", 4, "--train-iters", 12, "--eval-interval", 4, "--eval-iters", 1,
    ]  # fmt: skip
    for start, asked, read in ((0, 16, 16), (6, 12, 12), (8, 8, 12)):
        plan = plan_json(*words_, "--start-eval-at-iter", start)
        (row,) = (row for row in plan["datasets"] if row["split"] == "valid")
        assert (row["requested"], row["drawn"]) == (asked, read)


@pytest.mark.parametrize("alone", [(), ("--skip-train",)])
def test_no_advice_on_training_that_does_not_take_place(
    paths: list[str], alone: tuple[str, ...]
) -> None:
    words_ = ["--data-path", *words(paths[:2], [2.5, 1]), "--split", "80,20,0", "--seq-length", SEQ]
    words_ += [
        "--variance-buffer",
        1.5,
        "--global-batch-size",
        4,
        "--epochs",
        1,
        "--eval-interval",
        4,
        "--eval-iters",
        1,
    ]
    text = " ".join([(plan := plan_json(*words_, *alone))["caution"], *plan["warnings"]])
    assert ("train at most" in text or "to repeat no sample" in text) == (not alone)


def test_a_buffer_on_one_path_is_printed_as_a_call(paths: list[str]) -> None:
    words_ = ["--data-path", paths[0], "--split", "100,0,0", "--seq-length", SEQ]
    words_ += ["--global-batch-size", 4, "--train-iters", 60, "--eval-interval", 99]
    status, out, _ = cli(*words_, "--variance-buffer", "1.7", "--print-config", "megatron")
    assert status == 0
    assert "# megaindex.adapters.megatron.install(variance_buffer=1.7)" in out
    assert "--mid-level-dataset-surplus" not in out
    more = ["--data-path", *paths[:2], *words_[2:], "--variance-buffer", "1.7"]
    assert cli(*more, "--print-config", "megatron")[0] == 2
