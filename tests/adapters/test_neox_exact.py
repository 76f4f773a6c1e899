"""install(exact=True): epochs are epochs, and no sample stands for another."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import neox_stand_in
from support.neox_corpora import GOLDEN, write_pair
from support.neox_running import SIZES, arguments, batches, dataset_of, loaders_of, texts

import megaindex.adapters.neox as adapter
from megaindex.audit import run_of_settings
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.index.frameworks import framework_rules
from megaindex.loader import NumpyDataset
from megaindex.lock import make_lock
from megaindex.plan import make_plan


@pytest.mark.parametrize("seed", [1234, 2**32 - 1])  # the largest of NumPy's generator
def test_exact_epochs_are_complete_passes_in_orders_of_their_own(
    seed: int, neox: Any, tmp_path: Path
) -> None:
    adapter.install(exact=True)
    args = arguments(tmp_path, SIZES[:1], train_iters=None, train_epochs=3, batch_size=1,
                     train_batch_size=1, seed=seed)  # fmt: skip
    per_epoch = (sum(SIZES[0]) - 1) // 16
    assert len(loaders_of(args)["train"]) == per_epoch
    rows = texts(args, 3 * per_epoch)
    epochs = [rows[k * per_epoch : (k + 1) * per_epoch] for k in range(3)]
    for epoch in epochs:  # 17 tokens a sample, of which neighbours share one
        tokens = [token for row in epoch for token in row[:16]]
        assert len(set(tokens)) == len(tokens) == 16 * per_epoch
    assert epochs[0] != epochs[1] != epochs[2]
    adapter.install()
    assert texts(args, per_epoch - 1) == epochs[0][:-1]  # GPT-NeoX leaves out the last


@pytest.mark.parametrize("iteration", [1, 4, 5, 9])
def test_exact_runs_go_on_in_their_epoch(iteration: int, neox: Any, tmp_path: Path) -> None:
    """GPT-NeoX goes on in the first epoch, and then repeats what is left of it for ever."""
    adapter.install(exact=True)
    given = {"train_iters": None, "train_epochs": 4, "batch_size": 2, "train_batch_size": 2}
    whole = texts(arguments(tmp_path, SIZES, **given), 40)
    resumed = texts(arguments(tmp_path, SIZES, iteration=iteration, **given), 40 - iteration)
    assert resumed == whole[2 * iteration :]


def test_an_exact_run_may_evaluate_alone(neox: Any, tmp_path: Path) -> None:
    adapter.install(exact=True)
    args = arguments(tmp_path, SIZES, train_iters=None, train_epochs=1)
    loaders = {**loaders_of(args), "train": None}
    iterators = neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)
    assert [iterator is None for iterator in iterators] == [True, False, False]


def test_exact_epochs_of_a_blend_serve_each_sample_once(neox: Any, tmp_path: Path) -> None:
    """GPT-NeoX draws as often from each: the small one again and again, the large in part."""
    adapter.install(exact=True)
    args = arguments(tmp_path, SIZES, train_iters=None, train_epochs=2, batch_size=1,
                     train_batch_size=1)  # fmt: skip
    samples = [(sum(sizes) - 1) // 16 for sizes in SIZES]
    assert len(loaders_of(args)["train"]) == sum(samples)
    rows = texts(args, 2 * sum(samples))
    for k in range(2):
        epoch = rows[k * sum(samples) : (k + 1) * sum(samples)]
        assert len({tuple(row) for row in epoch}) == sum(samples)


def test_exact_sources_are_asked_for_what_the_blend_draws(neox: Any, tmp_path: Path) -> None:
    adapter.install(exact=True)
    weights = [0.62, 0.31, 0.07]
    args = arguments(tmp_path, SIZES, weights=weights, train_iters=50, train_batch_size=4)
    loader = loaders_of(args)["train"]
    draws = np.bincount(loader.dataset.dataset_index[:200], minlength=3).tolist()
    asked = neox_stand_in.data_utils().get_normalized_weights_and_num_samples(weights, 200)[1]
    assert asked == draws
    assert len(loader.dataset) >= 200
    assert len(batches(args, 50)) == 50


def test_exact_blends_end_where_a_source_is_spent(neox: Any, tmp_path: Path) -> None:
    adapter.install(exact=True)
    args = arguments(tmp_path, SIZES, weights=[0.9, 0.05, 0.05])
    blend = loaders_of(args)["train"].dataset
    sizes = [len(dataset) for dataset in blend.datasets]
    assert len(blend) < sum(sizes)
    assert (blend.dataset_sample_index < np.array(sizes)[blend.dataset_index]).all()
    for wrong in (-1, len(blend)):
        with pytest.raises(OutOfRange):
            blend[wrong]


def test_exact_datasets_hold_all_their_samples(neox: Any, tmp_path: Path) -> None:
    case = next(c for c in GOLDEN["indices"] if c["pack_impl"] == "packed")
    adapter.install()
    theirs = dataset_of(case, tmp_path / "t")
    adapter.install(exact=True)
    ours = dataset_of(case, tmp_path / "o")
    assert len(ours) == len(theirs) + 1
    for wrong in (-1, len(ours)):
        with pytest.raises(OutOfRange):
            ours[wrong]


def test_exact_parts_of_a_split_hold_their_own_documents_alone(neox: Any, tmp_path: Path) -> None:
    adapter.install(exact=True)
    sizes = [[6, 5, 4, 9, 7, 8, 5, 6, 4, 5]]
    args = arguments(tmp_path, sizes, pack_impl="pack_until_overflow", allow_chopped=False)
    args.data_path = args.paths[0]
    begin, end = framework_rules("neox").split_bounds(args.split, 10)[1]
    bounds = np.cumsum([0, *sizes[0]])
    tokens = {t for batch in batches(args, 2, part=1) for t in batch["text"].ravel().tolist()}
    assert tokens - {0} == set(range(bounds[begin], bounds[end]))
    assert all(path.name.split("_doc_idx")[0].endswith("_exact")
               for path in tmp_path.glob("*_doc_idx.npy"))  # fmt: skip


def config_of(folder: Path, args: Any, comment: str = "exact=True", **changes: Any) -> str:
    """The file of a run with the call of the adapter in a comment."""
    keys = {
        "seq_length": args.seq_length, "seed": args.seed, "global_num_gpus": 1,
        "train_micro_batch_size_per_gpu": args.batch_size, "train_epochs": args.train_epochs,
        "gradient_accumulation_steps": args.gradient_accumulation_steps, "data_impl": "mmap",
        "eval_interval": args.eval_interval, "eval_iters": args.eval_iters,
        **{f"{split}_data_paths": args.paths for split in ("train", "valid", "test")}, **changes,
    }  # fmt: skip
    text = f"# megaindex.adapters.neox.install({comment})\n{json.dumps(keys)}"
    (folder / "c.yml").write_text(text)
    return str(folder / "c.yml")


BATCHES = [(1, 1), (3, 2), (15, 1), (16, 1), (16, 2)]  # samples, accumulated so many times
EXACT_RUNS = [*itertools.product([SIZES], BATCHES, [1, 2, 5])]  # of 5, 4 and 7 samples


@pytest.mark.parametrize(
    ("sizes", "batch", "epochs"),
    [
        *EXACT_RUNS[::2],
        *(pytest.param(*each, marks=pytest.mark.slow) for each in EXACT_RUNS[1::2]),
        *itertools.product([[[100, 162]]], BATCHES[::4], [1, 5]),  # of 16
    ],
)
def test_the_plan_of_exact_epochs_is_the_run(
    sizes: list[list[int]], batch: tuple[int, int], epochs: int, neox: Any, tmp_path: Path
) -> None:
    size, accumulation = batch
    ends = [0, *np.cumsum([sum(row) for row in sizes]).tolist()]
    for k, row in enumerate(sizes):
        bounds = itertools.pairwise(np.cumsum([ends[k], *row]).tolist())
        write_pair(str(tmp_path / f"c{k}"), np.int32, [np.arange(*each) for each in bounds])
    samples = size * accumulation
    args = arguments(
        tmp_path, sizes, train_iters=None, train_epochs=epochs, batch_size=size,
        train_batch_size=samples, gradient_accumulation_steps=accumulation,
    )  # fmt: skip
    file = config_of(tmp_path, args)
    plan = make_plan(neox_config=[file], coverage="exact")

    adapter.install(exact=True)
    iterations = len(loaders_of(args)["train"]) * epochs // accumulation
    rows = texts(args, iterations * accumulation)
    assert (plan.train_iters, plan.samples_consumed) == (iterations, len(rows))
    assert [each.samples_counted for each in plan.loaders] == [16 // size * size] * 3
    assert plan.samples_left_over == epochs * 16 - len(rows)
    assert plan.tokens_left_over == epochs * ends[-1] - 16 * len(rows)
    if iterations:
        index = run_of_settings(neox_config=[file]).index
        inputs = NumpyDataset(index)[: len(rows)]["tokens"]
        assert inputs.tolist() == [list(row[:-1]) for row in rows]
    means = make_plan(neox_config=[file], coverage="expected").rows("train")
    times = np.bincount(np.reshape(rows, (-1, 17)).astype(int)[:, :-1].ravel(), minlength=ends[-1])
    for k, source in enumerate(plan.rows("train")):
        served, mean = times[ends[k] : ends[k + 1]], means[k].coverage.tokens
        assert (source.epochs, source.built) == (1, (served.size - 1) // 16)
        assert (source.drawn, source.repeated) == (
            served.sum() // 16, max(0, served.sum() // 16 - source.built)
        )  # fmt: skip
        shares = np.bincount(served, minlength=2) / served.size
        np.testing.assert_allclose(source.coverage.tokens, shares, atol=1e-12)
        assert mean @ np.arange(len(mean)) == pytest.approx(served.mean())
    if iterations:
        later = make_plan(neox_config=[file], coverage="exact", consumed_samples=samples)
        assert later.train_iters == iterations - 1
        assert later.rows("train") == plan.rows("train")


@pytest.mark.parametrize(("size", "accepted"), [(16, True), (17, False)])
def test_an_exact_epoch_has_a_micro_batch(
    size: int, accepted: bool, neox: Any, tmp_path: Path
) -> None:
    adapter.install(exact=True)
    args = arguments(tmp_path, SIZES, train_iters=None, train_epochs=1, batch_size=size,
                     train_batch_size=size)  # fmt: skip
    if accepted:
        assert make_plan(neox_config=[config_of(tmp_path, args)]).train_iters == 1
        assert len(texts(args, 1)) == size
        return
    with pytest.raises(InvalidArgument, match="fewer than one batch of 17"):
        texts(args, 1)
    with pytest.raises(InvalidArgument, match="less than a micro batch of 17"):
        make_plan(neox_config=[config_of(tmp_path, args)])


def test_exact_runs_that_are_not_planned_or_served_under_a_lock_are_refused(tmp_path: Path) -> None:
    args = arguments(tmp_path, SIZES, train_epochs=2, batch_size=2)
    file = config_of(tmp_path, args)
    for settings in ({"train_iters": 5}, {"order": "epoch"}):
        with pytest.raises(InvalidArgument, match="train_epochs"):
            make_plan(neox_config=[file], **settings)
    uncounted = make_plan(neox_config=[file], blend_counts="bounds")
    assert [row.coverage.method for row in uncounted.rows("train")] == ["none"] * 3
    make_lock(neox_config=[file]).write(tmp_path / "exact.lock")
    with pytest.raises(InvalidArgument, match="shuffles each pass anew"):
        adapter.install(exact=True, lock=tmp_path / "exact.lock")
    with pytest.raises(InvalidArgument, match="exact must be True or False"):
        make_plan(neox_config=[config_of(tmp_path, args, "exact='yes'")])
    off = make_plan(neox_config=[config_of(tmp_path, args, "exact=False")])
    assert [row.built - 1 for row in off.rows("train")] == [4, 3, 6]
    assert off.train_iters == (4 + 3 + 6) // 2 * 2
