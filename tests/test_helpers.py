"""The peers' call forms: positional signatures, values and dtypes of megatron-core's helpers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each
from support.megatron_dataset import megatron_dataset

import megaindex.helpers as ours
from megaindex.errors import InvalidArgument


@pytest.fixture(params=["helpers", "native"])
def functions(request: pytest.FixtureRequest) -> Any:
    """megaindex.helpers, and the native module, which has functions of the same names."""
    if request.param == "helpers":
        return ours
    return pytest.importorskip("megaindex.kernels._native")


def test_sample_idx_forms(functions: Any, megatron_datasets: Any, rng: np.random.Generator) -> None:
    theirs = megatron_datasets.helpers
    lengths = rng.integers(0, 50, 200).astype(np.int32)
    documents = rng.permutation(np.tile(np.arange(200, dtype=np.int32), 3))
    tokens = int(lengths.sum())
    arguments = (lengths, documents, 16, 3, tokens)
    for name in ("build_sample_idx", "build_sample_idx_int32", "build_sample_idx_int64"):
        # the peer's typed forms have no defaults
        for flags in ((True, 1), (True, 0), (False, 0)):
            expected = getattr(theirs, name)(*arguments, *flags)
            actual = getattr(functions, name)(*arguments, *flags)
            assert actual.dtype == expected.dtype
            np.testing.assert_array_equal(actual, expected)
    longest = np.array([2**31 - 1], np.int32), np.zeros(1, np.int32), 2**30, 1, 2**31 - 1
    expected = theirs.build_sample_idx(*longest, True, 1)
    assert expected.dtype == np.int32
    assert functions.build_sample_idx(*longest, True, 1).dtype == np.int32
    np.testing.assert_array_equal(functions.build_sample_idx(*longest, True, 1), expected)
    five = functions.build_sample_idx_int32(*arguments)  # GPT-NeoX's form
    np.testing.assert_array_equal(five, theirs.build_sample_idx(*arguments))


@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_blending_fills_its_outputs(
    functions: Any, megatron_helpers: ModuleType, rng: np.random.Generator, dtype: type
) -> None:
    weights = rng.dirichlet(np.ones(7))
    expected = np.zeros(1000, np.int16), np.zeros(1000, np.int64)
    actual = np.zeros(1000, dtype), np.zeros(1000, np.int64)
    megatron_helpers.build_blending_indices(*expected, weights, 7, 1000, False)
    functions.build_blending_indices(*actual, weights.tolist(), 7, 1000, False)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])
    sizes = [3, 500, 7]
    megatron_helpers.build_exhaustive_blending_indices(
        *(e[:510] for e in expected), np.array(sizes), 3
    )
    functions.build_exhaustive_blending_indices(*(a[:510] for a in actual), sizes, 3)
    np.testing.assert_array_equal(actual[0], expected[0])
    np.testing.assert_array_equal(actual[1], expected[1])


def test_mappings(functions: Any, megatron_helpers: ModuleType, rng: np.random.Generator) -> None:
    sizes = rng.integers(1, 60, 300).astype(np.int32)
    docs = np.unique(np.concatenate(([0, 300], rng.integers(0, 300, 60)))).astype(np.int64)
    titles = rng.integers(1, 9, docs.size - 1).astype(np.int32)
    expected = megatron_helpers.build_mapping(docs, sizes, 2, 1000, 128, 0.1, 7, False, 2)
    for actual in (
        functions.build_mapping(docs, sizes, 2, 1000, 128, 0.1, 7, False, 2),
        functions.build_mapping(docs, sizes, 2, 1000, 128, 0.1, 7, False),  # GPT-NeoX's form
    ):
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    np.testing.assert_array_equal(
        functions.build_blocks_mapping(docs, sizes, titles, 2, 1000, 128, 7, False, True),
        megatron_helpers.build_blocks_mapping(docs, sizes, titles, 2, 1000, 128, 7, False, True),
    )


def test_views_of_an_idx_file(
    functions: Any, megatron_datasets: Any, megatron_helpers: ModuleType, tmp_path: Path
) -> None:
    """The arrays of Megatron's own reader, which begin at byte 34 of the mapped file."""
    corpus = write_corpus(tmp_path / "c", np.arange(500) % 70)
    dataset = megatron_datasets.IndexedDataset(corpus.path_prefix)
    lengths, documents = dataset.sequence_lengths, dataset.document_indices[:-1].astype(np.int32)
    assert not lengths.flags.aligned
    order = np.random.default_rng(3).permutation(np.tile(documents, 2))
    numbers = (32, 2, int(lengths.sum()), True, 1)
    for name in ("build_sample_idx_int32", "build_sample_idx_int64"):
        expected = getattr(megatron_helpers, name)(lengths, order, *numbers)
        actual = getattr(functions, name)(lengths, order, *numbers)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
    docs = dataset.document_indices
    assert not docs.flags.aligned
    numbers = (2, 2**40, 128, 0.1, 7, False, 1)
    np.testing.assert_array_equal(
        functions.build_mapping(docs, lengths, *numbers),
        megatron_helpers.build_mapping(docs, lengths, *numbers),
    )


def test_native_functions_run_native_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever MEGAINDEX_BACKEND names."""
    native = pytest.importorskip("megaindex.kernels._native")
    monkeypatch.setattr(ours, "active", lambda: None)
    assert native.build_sample_idx([9, 9], [1, 0], 4, 1, 18).shape == (5, 2)
    with pytest.raises(AttributeError):
        ours.build_sample_idx([9, 9], [1, 0], 4, 1, 18)
    with pytest.raises(InvalidArgument, match="sequence_length must be from 1"):
        native.build_sample_idx([9, 9], [1, 0], 0, 1, 18)


def placed(form: str, array: np.ndarray, folder: Path) -> np.ndarray:
    """The values of an array, lying in memory as frameworks pass them."""
    if form == "unaligned":
        room = np.empty(array.nbytes + 1, np.uint8)
        result = room[1:].view(array.dtype)
        result[...] = array
    elif form == "strided":
        result = np.zeros(2 * array.size, array.dtype)[::2]
        result[...] = array
    else:  # at byte 34, where the arrays of an .idx file begin
        path = folder / f"{len(list(folder.iterdir()))}.bin"
        path.write_bytes(b"x" * 34 + array.tobytes())
        mode: Any = "r" if form == "read-only map" else "r+"
        result = np.memmap(path, array.dtype, mode, 34)
    assert not (result.flags.aligned and result.flags.c_contiguous) or array.itemsize <= 2
    return result


FORMS = ("unaligned", "strided", "read-only map", "map")


@pytest.mark.parametrize("form", FORMS)
def test_arrays_are_read_wherever_they_lie(
    form: str,
    backend: Any,
    megatron_helpers: ModuleType,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    sizes = rng.integers(1, 60, 300).astype(np.int32)
    docs = np.unique(np.concatenate(([0, 300], rng.integers(0, 300, 60)))).astype(np.int64)
    titles = rng.integers(1, 9, docs.size - 1).astype(np.int32)
    order = rng.permutation(np.tile(np.arange(300, dtype=np.int32), 2))
    tokens = int(sizes.sum())
    calls: list[tuple[str, tuple[np.ndarray, ...], tuple[Any, ...]]] = [
        ("build_mapping", (docs, sizes), (2, 1000, 128, 0.1, 7, False, 2)),
        ("build_blocks_mapping", (docs, sizes, titles), (2, 1000, 128, 7, False, True)),
        ("build_sample_idx_int32", (sizes, order), (16, 2, tokens, True, 1)),
        ("build_sample_idx_int64", (sizes, order), (16, 2, tokens, False, 0)),
    ]
    for name, arrays, numbers in calls:
        expected = getattr(megatron_helpers, name)(*arrays, *numbers)
        given = [placed(form, array, tmp_path) for array in arrays]
        actual = getattr(ours, name)(*given, *numbers, backend=backend)
        assert actual.dtype == expected.dtype
        np.testing.assert_array_equal(actual, expected)
        if name.endswith("int32"):
            flags = [bool(number) for number in numbers[-2:]]
            actual = ours.build_sample_idx(*given, *numbers[:-2], *flags, backend=backend)
            np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [np.int16, np.uint8])
def test_outputs_are_filled_wherever_they_lie(
    form: str,
    dtype: type,
    backend: Any,
    rng: np.random.Generator,
    tmp_path: Path,
) -> None:
    weights, sizes = rng.dirichlet(np.ones(5)), rng.integers(0, 40, 5)
    size = int(sizes.sum())
    for build, values, numbers in (
        (ours.build_blending_indices, weights, (5, size, False)),
        (ours.build_exhaustive_blending_indices, sizes, (5,)),
    ):
        expected = np.zeros(size, dtype), np.zeros(size, np.int64)
        build(*expected, values, *numbers, backend=backend)  # type: ignore[arg-type, operator]
        actual = [placed(form, np.zeros_like(e), tmp_path) for e in expected]
        given = placed(form, values, tmp_path)
        if form == "read-only map":
            with pytest.raises(InvalidArgument, match="writeable"):
                build(*actual, given, *numbers, backend=backend)  # type: ignore[operator]
            continue
        build(*actual, given, *numbers, backend=backend)  # type: ignore[operator]
        for a, e in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(a, e)


@for_each(
    "change",
    [
        {0: np.zeros(6, np.int32)},
        {0: np.zeros(12, np.int16)[::2]},
        {0: np.zeros(5, np.int16)},
        {0: np.zeros((6, 1), np.int16)},
        {1: [0] * 6},
        {1: np.broadcast_to(np.int64(0), 6)},
        {2: [0.5, 0.3, 0.2]},
        {2: np.array([0.5, 0.3, 0.2], ">f8")},
        {2: np.array([0.5, 0.3, -0.2])},
        {2: np.array([0.5, np.nan, 0.2])},
        {2: np.array([0.5, 0.3, 0.2, np.inf])},
        {3: 4},
        {3: 0},
        {3: np.int64(3)},
        {4: 7},
        {4: 2**70},
        {4: 6.0},
        {4: True},
    ],
)
def test_the_native_core_leaves_other_arguments_to_python(change: dict[int, Any]) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    arguments: list[Any] = [
        np.full(6, -1, np.int16), np.full(6, -1), np.array([0.5, 0.3, 0.2]), 3, 6,
    ]  # fmt: skip
    for place, value in change.items():
        arguments[place] = value
    outputs = [np.array(output) for output in arguments[:2]]
    assert native.fill_greedy(*arguments) is False
    for output, before in zip(arguments[:2], outputs, strict=True):
        np.testing.assert_array_equal(output, before)
    if not {2, 4} & set(change):
        sizes = np.array([2, 3, 1])
        assert native.fill_exhaustive(*arguments[:2], sizes, arguments[3]) is False


@pytest.mark.parametrize("sizes", [[2, -1, 1], [2**62] * 3, [4, 1, 2], [2.0, 3.0, 1.0]])
def test_the_native_core_leaves_other_sizes_to_python(sizes: list[Any]) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    index, samples = np.full(6, -1, np.int16), np.full(6, -1)
    assert native.fill_exhaustive(index, samples, np.array(sizes), 3) is False
    assert set(index) == set(samples) == {-1}


def test_calls_that_need_no_conversion_are_one_native_call(
    megatron_helpers: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    monkeypatch.setattr(ours, "_check_blend", None)
    weights, sizes = np.array([0.5, 0.3, 0.2]), np.array([20, 30, 9])
    for size in (0, 10, 59):
        actual = np.zeros(59, np.uint8), np.zeros(59, np.int64)
        expected = np.zeros(59, np.int16), np.zeros(59, np.int64)
        ours.build_blending_indices(*actual, weights, 3, size, backend=native)
        megatron_helpers.build_blending_indices(*expected, weights, 3, size, False)
        np.testing.assert_array_equal(actual, expected)
    ours.build_exhaustive_blending_indices(*actual, sizes, 3, backend=native)
    megatron_helpers.build_exhaustive_blending_indices(*expected, sizes, 3)
    np.testing.assert_array_equal(actual, expected)


def test_outputs_that_share_memory_are_refused() -> None:
    room = np.zeros(5, np.int64)
    with pytest.raises(InvalidArgument, match="must not share memory"):
        ours.build_exhaustive_blending_indices(room.view(np.int16)[:4], room[:4], [2, 2], 2)


def test_it_stands_in_for_megatrons_module(
    megatron_datasets: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = write_corpus(tmp_path / "c", np.arange(300) % 50)
    settings = {"num_samples": 300, "sequence_length": 32, "seed": 3}
    theirs = megatron_dataset(megatron_datasets, corpus.path_prefix, **settings)
    import megatron.core.datasets as package

    calls = []

    def counted(*arguments: Any) -> np.ndarray:
        calls.append(arguments)
        return ours.build_sample_idx(*arguments)

    stand_in = ModuleType("helpers")
    stand_in.__dict__.update({name: getattr(ours, name) for name in ours.__all__})
    stand_in.build_sample_idx = counted  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "megatron.core.datasets.helpers", stand_in)
    monkeypatch.setattr(package, "helpers", stand_in)
    with_ours = megatron_dataset(megatron_datasets, corpus.path_prefix, **settings)
    assert len(calls) == 1
    np.testing.assert_array_equal(with_ours.sample_index, theirs.sample_index)
    np.testing.assert_array_equal(with_ours.shuffle_index, theirs.shuffle_index)


def test_writes_are_never_lost_in_a_converted_copy(megatron_helpers: ModuleType) -> None:
    """The peer converts an int32 dataset_index into an int16 copy and fills that."""
    lost = np.full(4, 9, np.int32)
    megatron_helpers.build_blending_indices(lost, np.zeros(4, np.int64), [0.5, 0.5], 2, 4, False)
    assert (lost == 9).all()
    with pytest.raises(InvalidArgument, match="dataset_index must be an int16 or uint8 array"):
        ours.build_blending_indices(lost, np.zeros(4, np.int64), [0.5, 0.5], 2, 4, False)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="dataset_sample_index must be an int64 array"):
        ours.build_blending_indices(
            np.zeros(4, np.int16), np.zeros(4, np.int32), [0.5, 0.5], 2, 4, False
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sizes": [[1], [1, 2]]}, "sizes must be an array"),
        ({"num_epochs": "x"}, "num_epochs must be an integer"),
        ({"tokens_per_epoch": 2**63}, "tokens_per_epoch must be from 0"),
        ({"tokens_per_epoch": 2**62, "num_epochs": 4}, "must be below 2"),
        ({"sequence_length": 4.0}, "sequence_length must be an integer"),
        # on both sides of a bound, inside of which another rule refuses them
        ({"tokens_per_epoch": (2**63 - 1) // 7, "num_epochs": 7}, "cannot hold"),
        ({"tokens_per_epoch": 2**62, "num_epochs": 2}, "must be below 2"),
        ({"document_idx": [2**31 - 1]}, "has no length"),
        ({"document_idx": [2**31]}, "document_idx must fit int32"),
        ({"document_idx": [-(2**31)]}, "has no length"),
        ({"document_idx": [-(2**31) - 1]}, "document_idx must fit int32"),
    ],
)
def test_arguments_of_another_kind_are_refused(change: dict[str, Any], message: str) -> None:
    valid = {"sizes": [9], "document_idx": [0], "sequence_length": 4, "num_epochs": 1}
    with pytest.raises(InvalidArgument, match=message):
        ours.build_sample_idx_int64(**{**valid, "tokens_per_epoch": 9, **change})


@for_each(
    ("weights", "num_datasets", "size", "message"),
    [
        ([0.5, np.nan], 2, 4, "weights must be finite"),
        ([0.5, -1], 2, 4, "weights must be finite and >= 0"),
        ([0.5, 1j], 2, 4, "weights must be real numbers"),
        (["a", "b"], 2, 4, "weights must be numbers"),
        ([0.5, 0.5], 3, 4, "at most the 2 weights given"),
        (
            [0.5, 0.5],
            0,
            4,
            r"num_datasets must be from 1 to 255 \(uint8\) and at most the 2 weights given, got 0",
        ),
        ([0.5, 0.5], 2, 5, "must hold 5 draws"),
        ([1.0] * 256, 256, 4, r"from 1 to 255 \(uint8\)"),
    ],
)
def test_blends_that_cannot_be_are_refused(
    weights: list[float], num_datasets: int, size: int, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ours.build_blending_indices(
            np.zeros(4, np.uint8), np.zeros(4, np.int64), weights, num_datasets, size
        )


def test_an_empty_dataset_is_never_drawn() -> None:
    index, sample = np.zeros(5, np.int16), np.zeros(5, np.int64)
    ours.build_exhaustive_blending_indices(index, sample, [0, 3, 0, 2], 4)
    assert np.bincount(index, minlength=4).tolist() == [0, 3, 0, 2]
    for sizes, says in [
        ([-1, 6], "sizes must be >= 0"),
        ([2**62, 2**62 - 1], "must hold"),
        ([2**62, 2**62], "sizes must be >= 0 with a sum below"),
    ]:
        with pytest.raises(InvalidArgument, match=says):
            ours.build_exhaustive_blending_indices(index, sample, sizes, 2)


@for_each(
    ("sizes", "documents", "S", "epochs", "tokens", "message"),
    [
        ([2**31], [0], 4, 1, 9, "sizes must fit int32"),
        ([1.5], [0], 4, 1, 9, "sizes must be integers"),
        ([9], [0], 0, 1, 9, "sequence_length must be from 1"),
        ([9], [], 4, 1, 9, "document_idx must hold at least one document"),
        ([9], [0], 4, 0, 9, "num_epochs must be from 1"),
        ([9], [0], 4, 1, 10**12, "cannot hold the 1000000000000 tokens"),
        ([9], [0], 4, 1, 18, "fewer tokens than num_epochs"),
        ([9], [1], 4, 1, 9, "names a sequence that has no length"),
    ],
)
def test_sample_indices_that_cannot_be_are_refused(
    sizes: list[int], documents: list[int], S: int, epochs: int, tokens: int, message: str
) -> None:
    with pytest.raises(InvalidArgument, match=message):
        ours.build_sample_idx(sizes, documents, S, epochs, tokens)


def test_flags_that_have_no_truth() -> None:
    both = np.array([True, False])
    sizes, documents = np.array([9, 9], np.int32), np.array([0, 1], np.int32)
    with pytest.raises(InvalidArgument, match="drop_last_partial_sequence must be True or False"):
        ours.build_sample_idx(sizes, documents, 4, 1, 18, both)
    with pytest.raises(InvalidArgument, match="use_one_sent_blocks must be True or False"):
        ours.build_blocks_mapping(
            np.array([0, 2]), sizes, sizes[:1], 1, 9, 16, 1, use_one_sent_blocks=both
        )
