"""install(variance_buffer=…, separate_final_epoch=…): what is built is what the planner says."""

from __future__ import annotations

import itertools
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support import neox_stand_in
from support.command_line import plan_json
from support.corpora import write_corpus
from support.examples import one_in
from support.inputs import for_each
from support.megatron_blends import assert_equal, build, files, places, samples
from support.neox_running import arguments, batches, loaders_of

import megaindex
import megaindex.adapters.megatron
import megaindex.adapters.neox
from megaindex.adapters.policy import make_policy
from megaindex.errors import InvalidArgument
from megaindex.index.order_settings import make_order

POLICIES: list[dict[str, Any]] = [
    {"separate_final_epoch": "always"},
    {"separate_final_epoch": "never"},
    {"separate_final_epoch": "auto", "final_epoch_threshold": 0.3},
    {"separate_final_epoch": "auto", "final_epoch_threshold": 1},
    {"separate_final_epoch": "auto", "final_epoch_threshold": 0},
]
ADAPTERS = (megaindex.adapters.megatron, megaindex.adapters.neox)

buffers = st.sampled_from([None, 1, 1.0, 1.005, 1.3, "exact"])
requests = st.tuples(
    st.integers(1, 70), st.lists(st.floats(0.05, 1), min_size=2, max_size=5), buffers
)


def planned(
    order: str, paths: list[str], weights: list[float] | None, iterations: int, buffer: Any
) -> list[tuple[Any, ...]]:
    """Samples asked of each training source, and samples and epochs that are built."""
    words: list[object] = []
    for path, weight in itertools.zip_longest(paths, weights or ()):
        words += [path] if weight is None else [repr(weight), path]
    if buffer is not None:
        words += ["--variance-buffer", buffer]
    plan = plan_json(
        "--data-path", *words, "--seq-length", 16, "--micro-batch-size", 4, "--data-parallel-size",
        1, "--gradient-accumulation-steps", 1, "--train-iters", iterations, "--order", order,
        "--coverage", "none",
    )  # fmt: skip
    return [(row["requested"], row["built"], row["epochs"]) for row in plan["datasets"]]


def of_megatron(dataset: Any) -> tuple[Any, ...]:
    epochs = dataset.document_index.size // len(dataset.indices)
    return dataset.num_samples, len(dataset), epochs


def of_neox(dataset: Any) -> tuple[Any, ...]:
    index = dataset.megaindex.epoch(0).index
    return dataset.megaindex.requested, index.num_samples, index.num_epochs


@one_in(2)
@given(request=requests)
@example(request=(70, [0.5, 0.5], "exact"))
def test_megatron_builds_what_is_planned(
    core: Any, corpora: list[str], request: tuple[int, list[float], Any]
) -> None:
    iterations, weights, buffer = request
    paths = corpora[: len(weights)]
    # a buffer that is too small has sources extended: see test_overdrawn_sources_are_extended
    config = {"blend": (paths, weights), "split": "100,0,0"}
    megaindex.adapters.megatron.install(variance_buffer=buffer)
    with tempfile.TemporaryDirectory() as cache:
        try:
            cold, warm = (build(core, (4 * iterations, 0, 0), cache, **config)[0] for _ in "12")
            drawn = np.bincount(cold.dataset_index, minlength=len(paths)).tolist()
            rows = planned("megatron", paths, weights, iterations, buffer)
            for blend in (cold, warm):
                for dataset, count, row in zip(blend.datasets, drawn, rows, strict=True):
                    assert of_megatron(dataset) == row or count > row[1]
                    assert count <= len(dataset)
            if buffer == "exact":
                assert len(cold) == 4 * iterations
                assert drawn == [requested for requested, _, _ in rows]
        finally:
            megaindex.adapters.megatron.uninstall()
        wide = {**config, "mid_level_dataset_surplus": 5.0}
        build(core, (4 * iterations, 0, 0), cache, **wide)  # plain Megatron, on the same cache


@one_in(2)
@given(request=requests)
def test_neox_builds_what_is_planned(neox: Any, request: tuple[int, list[float], Any]) -> None:
    iterations, weights, buffer = request
    megaindex.adapters.neox.install(variance_buffer=buffer)
    generator = np.random.default_rng(iterations)
    sizes = [generator.integers(5, 60, 12).tolist() for _ in weights]
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(Path(folder), sizes, weights=weights, train_iters=iterations)
        blend = loaders_of(args)["train"].dataset
        rows = planned("neox", args.paths, weights, iterations, buffer)
        assert [of_neox(dataset) for dataset in blend.datasets] == rows


def test_neox_builds_a_sample_of_a_source_that_is_not_drawn(neox: Any, tmp_path: Path) -> None:
    megaindex.adapters.neox.install(variance_buffer="exact")
    args = arguments(tmp_path, [[60] * 9, [9]], weights=[1.0, 0.001], train_iters=2)
    built = [of_neox(dataset) for dataset in loaders_of(args)["train"].dataset.datasets]
    assert built[1] == (1, 1, 2)
    assert planned("neox", args.paths, args.weights, 2, "exact") == built


@pytest.mark.parametrize("buffer", [None, 1, 1.3, "exact"])
def test_one_path_is_asked_for_what_is_planned(
    core: Any, corpora: list[str], tmp_path: Path, buffer: Any
) -> None:
    megaindex.adapters.megatron.install(variance_buffer=buffer)
    try:
        config = {"blend": ([corpora[0]], None), "split": "100"}
        dataset = build(core, (120, 0, 0), tmp_path, **config)[0]
        assert [of_megatron(dataset)] == planned("megatron", corpora[:1], None, 30, buffer)
    finally:
        megaindex.adapters.megatron.uninstall()


@pytest.mark.parametrize("buffer", [None, 1, 1.3, "exact"])
def test_one_path_under_neox_is_asked_for_what_is_planned(
    neox: Any, tmp_path: Path, buffer: Any
) -> None:
    megaindex.adapters.neox.install(variance_buffer=buffer)
    args = arguments(tmp_path, [list(range(5, 40))], train_iters=30, split="100,0,0")
    args.data_path = args.paths[0]
    dataset = loaders_of_train(args)
    assert [of_neox(dataset)] == planned("neox", args.paths, None, 30, buffer)


def loaders_of_train(args: Any) -> Any:
    utils = neox_stand_in.data_utils()
    count = len(utils.make_indexed_dataset(args.data_path, args.data_impl, True))
    return utils.build_train_valid_test_datasets(
        args.data_path, args.data_impl, [(0, count)] * 3, [4 * args.train_iters] * 3, [None] * 3,
        seq_length=args.seq_length, seed=args.seed,
    )[0]  # fmt: skip


@for_each("policy", POLICIES)
@for_each("count", [1, 3])
def test_final_epochs_under_megatron(
    policy: dict[str, Any], count: int, core: Any, tmp_path: Path
) -> None:
    """The arrays are those of `build_index`, and plain Megatron does not find them."""
    prefixes = [str(tmp_path / f"c{number}") for number in range(count)]
    for number, prefix in enumerate(prefixes):
        write_corpus(Path(prefix), list(range(10, 40 + number)))
    weights = None if count == 1 else [0.5, 0.3, 0.2]
    config = {"blend": (prefixes, weights), "split": "100", "random_seed": 5}
    cache, sizes = tmp_path / "cache", (150 * count, 0, 0)
    theirs = samples(build(core, sizes, tmp_path / "theirs", **config))
    megaindex.adapters.megatron.install(**policy)
    try:
        made = [build(core, sizes, cache, **config)[0] for _ in range(2)]
        for top in made:
            for dataset in getattr(top, "datasets", [top]):
                expected = megaindex.build_index(
                    dataset.dataset_path, sequence_length=16, seed=5,
                    num_samples=dataset.num_samples, order=make_order("megatron", policy),
                )  # fmt: skip
                assert expected.num_epochs > 1
                for name in ("document_index", "sample_index", "shuffle_index"):
                    np.testing.assert_array_equal(getattr(dataset, name), getattr(expected, name))
        before = files(cache)
        ours = samples(made[:1])
        batch = [made[1].__getitems__(places(made[1]))]
    finally:
        megaindex.adapters.megatron.uninstall()
    assert_equal(batch, ours)
    assert_equal(samples(build(core, sizes, cache, **config)), theirs)
    assert before.keys().isdisjoint(files(tmp_path / "theirs"))
    assert files(cache) == {**before, **files(tmp_path / "theirs")}
    megaindex.adapters.megatron.install(**policy)
    try:
        assert_equal(samples(build(core, sizes, cache, **config)[:1]), ours)
        megaindex.adapters.megatron.install()
        assert_equal(samples(build(core, sizes, cache, **config)), theirs)
    finally:
        megaindex.adapters.megatron.uninstall()


@pytest.mark.parametrize("policy", POLICIES[:1] + POLICIES[2:])
def test_final_epochs_under_neox(policy: dict[str, Any], neox: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path, [list(range(10, 40))], train_iters=40)
    megaindex.adapters.neox.install()
    loaders_of(args)
    before = set(tmp_path.glob("*.npy"))
    megaindex.adapters.neox.install(**policy)
    [dataset] = loaders_of(args)["train"].dataset.datasets
    expected = megaindex.build_index(
        args.paths[0], sequence_length=16, seed=1234, num_samples=dataset.megaindex.requested,
        order=make_order("neox", policy),
    )  # fmt: skip
    assert expected.num_epochs > 1
    for ours, theirs in (("document_index", "doc_idx"), ("sample_index", "sample_idx"),
                         ("shuffle_index", "shuffle_idx")):  # fmt: skip
        np.testing.assert_array_equal(getattr(dataset, theirs), getattr(expected, ours))
    added = {path.name for path in set(tmp_path.glob("*.npy")) - before}
    assert added
    assert all("_final_" in name for name in added)
    with pytest.raises(InvalidArgument, match="needs pack_impl packed"):
        loaders_of(arguments(tmp_path, [list(range(10, 40))], pack_impl="unpacked", labels=True))


def test_the_frameworks_own_policy_keeps_the_names(
    core: Any, corpora: list[str], tmp_path: Path
) -> None:
    config = {"blend": (corpora[:2], [0.5, 0.5]), "split": "100"}
    theirs = build(core, (200, 0, 0), tmp_path / "theirs", **config)
    megaindex.adapters.megatron.install(separate_final_epoch="auto", final_epoch_threshold=0.8)
    try:
        ours = build(core, (200, 0, 0), tmp_path / "ours", **config)
    finally:
        megaindex.adapters.megatron.uninstall()
    assert_equal(samples(ours), samples(theirs))
    assert files(tmp_path / "ours") == files(tmp_path / "theirs")


def test_exact_sources_without_weights(core: Any, corpora: list[str], tmp_path: Path) -> None:
    """Megatron builds one epoch of each, and caps the blend at that."""
    config = {"blend": (corpora[:3], None), "split": "100"}
    left = "a blend without weights: left to Megatron, one epoch of each source is built, and"
    megaindex.adapters.megatron.install(variance_buffer=1.5)
    build(core, (40, None, None), tmp_path, **config)
    build(core, (100_000, None, None), tmp_path, **config)
    assert left in str(megaindex.adapters.status())
    megaindex.adapters.megatron.install(variance_buffer="exact")
    try:
        blend = build(core, (40, None, None), tmp_path, **config)[0]
        assert left not in str(megaindex.adapters.status())
        assert len(blend) == 40
        total = sum(len(dataset) for dataset in blend.datasets)
        with pytest.raises(InvalidArgument, match=f"one epoch holds {total}"):
            build(core, (total + 1, None, None), tmp_path, **config)
    finally:
        megaindex.adapters.megatron.uninstall()


def test_classes_that_cannot_have_a_final_epoch(
    core: Any, corpora: list[str], tmp_path: Path
) -> None:
    class Counting(core.GPTDataset):  # type: ignore[misc]
        def _get_num_epochs(self, num_tokens_per_epoch: int) -> int:
            return int(super()._get_num_epochs(num_tokens_per_epoch))

    class Naming(core.GPTDataset):  # type: ignore[misc]
        @staticmethod
        def _key_config_attributes() -> list[str]:
            return ["random_seed", "sequence_length"]

    config = {"blend": ([corpora[0]], None), "split": "100"}
    megaindex.adapters.megatron.install(separate_final_epoch="never")
    try:
        for cls, message in ((Counting, "_get_num_epochs of its own"), (Naming, "names its files")):
            with pytest.raises(InvalidArgument, match=message):
                build(core, (90, 0, 0), tmp_path, cls=cls, **config)
    finally:
        megaindex.adapters.megatron.uninstall()


def test_a_buffer_of_a_single_path_is_rounded_up() -> None:
    policy = make_policy("neox", 1.05)
    assert [policy.enlarged(n) for n in (10, 20, 0, None)] == [11, 21, 0, None]


@pytest.mark.parametrize("adapter", ADAPTERS, ids=["megatron", "neox"])
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"variance_buffer": 0.99}, "variance_buffer must be a number >= 1 or exact"),
        ({"variance_buffer": "1.0"}, "variance_buffer must be a number >= 1 or exact"),
        ({"variance_buffer": float("inf")}, "variance_buffer must be a number >= 1 or exact"),
        ({"separate_final_epoch": "sometimes"}, "must be one of"),
        ({"separate_final_epoch": "auto", "final_epoch_threshold": 1.5}, "must be from 0 to 1"),
        ({"separate_final_epoch": "always", "final_epoch_threshold": 0.5}, "has no effect"),
    ],
)
def test_settings_that_cannot_be(
    adapter: Any, given: dict[str, Any], message: str, request: pytest.FixtureRequest
) -> None:
    request.getfixturevalue("neox" if adapter is megaindex.adapters.neox else "core")
    with pytest.raises(InvalidArgument, match=message):
        adapter.install(**given)


def test_exact_and_a_buffer_of_its_own(neox: Any, tmp_path: Path) -> None:
    """exact=True implies the exact buffer; one that is given wins."""
    weights = [0.62, 0.31, 0.07]
    asked = neox_stand_in.data_utils
    plain = asked().get_normalized_weights_and_num_samples(weights, 200)[1]
    megaindex.adapters.neox.install(exact=True)
    exact = asked().get_normalized_weights_and_num_samples(weights, 200)[1]
    assert sum(exact) == 200
    megaindex.adapters.neox.install(exact=True, variance_buffer=1.005)
    assert asked().get_normalized_weights_and_num_samples(weights, 200)[1] == plain
    megaindex.adapters.neox.install(variance_buffer="exact")
    assert asked().get_normalized_weights_and_num_samples(weights, 200)[1] == exact
    args = arguments(tmp_path, [[40] * 9] * 3, weights=weights)
    dataset = loaders_of(args)["train"].dataset.datasets[0]
    assert len(dataset) == dataset.shuffle_idx.size - 1  # GPT-NeoX's other ways stay
    assert len(batches(args, 3)) == 3
