"""install(exact=True): epochs are epochs, and no sample stands for another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import neox_stand_in
from support.neox_corpora import GOLDEN
from support.neox_running import SIZES, arguments, batches, dataset_of, loaders_of, texts

import megaindex.adapters.neox as adapter
from megaindex.errors import OutOfRange
from megaindex.index.frameworks import framework_rules


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
