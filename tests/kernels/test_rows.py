"""Rows of tokens by sample id, on every backend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.inputs import for_each
from support.random_arrays import index_arrays

from megaindex.errors import InvalidArgument
from megaindex.kernels import load

PAD = -7
DTYPES = ("uint8", "int16", "uint16", "int32", "int64")
Sources = tuple[list[Any], list[Any]]


def source(rng: np.random.Generator, extra: int) -> tuple[Any, Any]:
    """The arrays of an index over random lengths, and its tokens in any order in the file."""
    index = index_arrays(rng, extra)
    lengths = index[3]
    total = int(lengths.sum())
    tokens = rng.integers(0, 120, total).astype(rng.choice(DTYPES))
    order = rng.permutation(lengths.size)
    pointers = np.empty(lengths.size, np.int64)
    pointers[order] = np.cumsum(lengths[order], dtype=np.int64) - lengths[order]
    return index, (tokens, pointers * tokens.itemsize, lengths)


def sources(rng: np.random.Generator, count: int, extra: int = 1) -> Sources:
    made = [source(rng, extra) for _ in range(count)]
    return [index for index, _ in made], [tokens for _, tokens in made]


def draws(rng: np.random.Generator, indices: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    which = rng.integers(0, len(indices), 50).astype(rng.choice(["uint8", "int16"]))
    samples = np.array([rng.integers(0, indices[k][0].size) for k in which.tolist()], np.int64)
    return which, samples


def write(folder: Path, tokens: list[Any]) -> list[Path]:
    paths = [folder / f"{number}.bin" for number in range(len(tokens))]
    for path, (text, _, _) in zip(paths, tokens, strict=True):
        path.write_bytes(text.tobytes())
    return paths


class Files:
    """Descriptors of some files, closed at the end."""

    def __init__(self, paths: list[Path]) -> None:
        self._files = [path.open("rb") for path in paths]
        self.descriptors = [file.fileno() for file in self._files]

    def __enter__(self) -> list[int]:
        return self.descriptors

    def __exit__(self, *error: object) -> None:
        for file in self._files:
            file.close()


@given(
    seed=st.integers(0, 2**32 - 1), count=st.integers(1, 5), extra=st.integers(0, 1),
    width=st.integers(0, 90), blended=st.booleans(),
    from_files=st.sampled_from(["no", "some", "all"]),
)  # fmt: skip
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_rows_are_the_gathered_spans(
    backend: Any, tmp_path: Path, seed: int, count: int, extra: int, width: int, blended: bool,
    from_files: str,
) -> None:  # fmt: skip
    rng, reference = np.random.default_rng(seed), load("reference")
    indices, tokens = sources(rng, count if blended else 1, extra)
    which, samples = draws(rng, indices) if blended else (None, None)
    size = 50 if blended else indices[0][0].size
    ids = rng.integers(0, size, rng.integers(0, 9))
    spans = reference.blended_spans(
        indices,
        np.zeros_like(ids) if which is None else which[ids].astype(np.int64),
        ids if samples is None else samples[ids],
    )
    expected = np.empty((ids.size, width), np.int64)
    assert reference.gather(tokens, *spans, expected, None, PAD) == -1
    with Files(write(tmp_path, tokens)) as opened:
        if from_files != "all":
            opened = [-1, *opened[1:]] if from_files == "some" else []
        table = backend.row_table(indices, tokens, which, samples, opened)
        rows = backend.read_rows(table, ids.tolist(), width, PAD)
        again = backend.read_rows(table, list(ids), width, PAD)  # integers of NumPy
    assert rows.dtype == np.int64
    assert rows.shape == expected.shape
    np.testing.assert_array_equal(rows, expected)
    np.testing.assert_array_equal(again, expected)


def blend(backend: Any, seed: int = 3, **changed: Any) -> tuple[Any, list[Any], list[Any], Any]:
    rng = np.random.default_rng(seed)
    indices, tokens = sources(rng, 2)
    which, samples = draws(rng, indices)
    given = {
        "indices": indices, "sources": tokens, "dataset_index": which,
        "dataset_sample_index": samples, "descriptors": [], **changed,
    }  # fmt: skip
    return backend.row_table(**given), indices, tokens, (which, samples)


@for_each(
    "ids", [[50], [-1], [0, 2**63], [0, -(2**70)], [1.0], ["1"], [None], [np.float64(1)],
            [True], [np.True_]]
)  # fmt: skip
def test_ids_without_a_sample_give_none(backend: Any, ids: list[Any]) -> None:
    table, *_ = blend(backend)
    assert backend.read_rows(table, [0, 49], 8, PAD) is not None
    assert backend.read_rows(table, ids, 8, PAD) is None
    assert backend.read_rows(table, [0, *ids], 8, PAD) is None


def test_a_draw_that_its_source_does_not_have_gives_none(backend: Any) -> None:
    table, indices, _, (which, samples) = blend(backend)
    which[:4] = 0, 2, 1, 1
    samples[1:4] = 0, -1, indices[1][0].size
    assert backend.read_rows(table, [1], 8, PAD) is None  # source 2 of 2
    assert backend.read_rows(table, [2], 8, PAD) is None
    assert backend.read_rows(table, [3], 8, PAD) is None
    assert backend.read_rows(table, [4], 8, PAD) is not None


@for_each("pointer", [-2, 1 << 40, (1 << 63) - 2])
def test_damaged_files_give_none(backend: Any, pointer: int) -> None:
    table, _, tokens, _ = blend(backend)
    for _, pointers, _ in tokens:
        pointers[:] = pointer
    assert backend.read_rows(table, [0], 8, PAD) is None


def test_a_file_cut_short_gives_none(tmp_path: Path) -> None:
    native = pytest.importorskip("megaindex.kernels._native")
    _, _, tokens, _ = blend(native)
    paths = write(tmp_path, tokens)
    with Files(paths) as opened:
        table, *_ = blend(native, descriptors=opened)
        assert native.read_rows(table, list(range(50)), 8, PAD) is not None
        for path in paths:
            path.write_bytes(b"")
        assert native.read_rows(table, list(range(50)), 8, PAD) is None


def test_rows_that_are_referenced_are_not_written_again(backend: Any) -> None:
    table, *_ = blend(backend)
    held = [backend.read_rows(table, [k], 8, PAD)[0] for k in range(50)]
    copies = [row.copy() for row in held]
    for k in range(50):
        backend.read_rows(table, [49 - k], 8, PAD)
    np.testing.assert_array_equal(held, copies)
    held[0][:] = 1  # a batch is its receiver's


def test_sources_that_do_not_fit_are_refused(backend: Any) -> None:
    _, _, tokens, _ = blend(backend)
    wide = [(np.arange(9).astype(np.uint64), *tokens[0][1:]), tokens[1]]
    for changed, message in (
        ({"sources": tokens[:1]}, "indices, sources: must be as many"),
        ({"indices": [], "sources": []}, "indices, sources: must be as many"),
        ({"dataset_index": None, "dataset_sample_index": None}, "dataset_index: must be given"),
        ({"sources": wide}, "does not hold every token"),
        ({"descriptors": [-1]}, "descriptors: must be one for each"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            blend(backend, **changed)
