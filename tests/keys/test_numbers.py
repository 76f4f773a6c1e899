"""Numbers of keys, compared with those of keys.js, which follows docs/keys.md alone."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

from megaindex import InvalidArgument
from megaindex.kernels.reference.bijection import key_word
from megaindex.keys import generator, torch_generator, uniform
from megaindex.keys.numbers import _uniform_tensor, stream_number

TESTS = Path(__file__).parents[1]
PROGRAM = TESTS / "independent/keys.js"
GOLDEN = TESTS / "golden/keys.json"
ROWS = json.loads(GOLDEN.read_text())["rows"]
WORD = 2**64 - 1


def stream_of(row: dict[str, Any]) -> int | str:
    return int(row["number"]) if row["stream"] is None else str(row["stream"])


@for_each("row", ROWS)
def test_numbers_are_those_of_the_golden_file(row: dict[str, Any]) -> None:
    key, stream, numbers = int(row["key"]), stream_of(row), row["uniform"]
    assert stream_number(stream) == int(row["number"])
    for same in (key, key & WORD, np.int64(key), np.uint64(key & WORD)):
        assert uniform(same, 4, stream).tolist() == numbers
    assert uniform(np.array([[key], [7]]), 4, stream)[0, 0].tolist() == numbers
    assert uniform(key, 2, stream).tolist() == numbers[:2]
    raw = generator(key, stream).bit_generator.random_raw(8)
    assert [f"{word:016x}" for word in raw.tolist()] == row["philox"]


@pytest.mark.parametrize("row", ROWS[::7], ids=lambda row: f"{row['key']}-{row['number']}")
def test_words_are_those_of_a_shuffle_key(row: dict[str, Any]) -> None:
    """As docs/lock-format.md defines them, of the key (stream, mix(key))."""
    mixed = np.uint64(_mix(int(row["key"]) & WORD))
    words = np.array([int(row["number"]), mixed], np.uint64)
    assert [f"{key_word(words, i):016x}" for i in range(4)] == row["words"]


def _mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ x >> 27) * 0x94D049BB133111EB & WORD
    return x ^ x >> 31


def node() -> str:
    found = shutil.which("node")
    if found is None:
        pytest.skip("there is no node")
    return found


def test_the_golden_file_is_that_of_its_command() -> None:
    done = subprocess.run([node(), PROGRAM, "vectors"], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["rows"] == ROWS


@pytest.mark.parametrize("count", [50_000, pytest.param(1_000_000, marks=pytest.mark.slow)])
def test_masks_of_many_samples_are_equal_in_three_programs(count: int) -> None:
    torch = pytest.importorskip("torch")
    places, share = 4, 0.15
    command = [node(), PROGRAM, *map(str, ("masks", count, places, "mlm", share))]
    done = subprocess.run([*command], capture_output=True, check=True)
    theirs = np.frombuffer(bytearray(done.stdout), np.bool_).reshape(count, places)
    keys = np.array([_mix(k) for k in range(count)], np.uint64)
    assert np.array_equal(uniform(keys, places, "mlm") < share, theirs)
    tensor = torch.from_numpy(keys.view(np.int64))
    assert torch.equal(uniform(tensor, places, "mlm") < share, torch.from_numpy(theirs))
    assert torch.equal(as_on_a_device(tensor, places) < share, torch.from_numpy(theirs))
    assert abs(theirs.mean() - share) < 5 * np.sqrt(share / theirs.size)


def as_on_a_device(tensor: Any, n: int) -> Any:
    """Numbers in Torch's own arithmetic, which tensors of accelerators take."""
    from megaindex.keys.numbers import _counters, mixed

    return _uniform_tensor(tensor, mixed(_counters(stream_number("mlm"), n)))


def test_tensors_of_every_integer_dtype() -> None:
    torch = pytest.importorskip("torch")
    for dtype in (torch.int64, torch.uint64, torch.int32, torch.uint8):
        keys = torch.tensor([[3], [200]]).to(dtype)
        for drawn in (uniform(keys, 3, "mlm"), as_on_a_device(keys, 3)):
            assert drawn.dtype == torch.float64
            assert drawn.tolist() == uniform([[3], [200]], 3, "mlm").tolist()
    for wrong in (torch.tensor([1.0]), torch.tensor([True]), torch.tensor([1j])):
        for draw in (lambda keys: uniform(keys, 1), lambda keys: as_on_a_device(keys, 1)):
            with pytest.raises(InvalidArgument, match="key must hold integers"):
                draw(wrong)


def test_long_rows_are_drawn_in_blocks() -> None:
    keys = np.arange(-7, 8)
    for n in (2**15 - 1, 2**15, 2**15 + 1, 10_000):
        drawn = uniform(keys, n)
        assert drawn.shape == (15, n)
        assert all(
            np.array_equal(row, uniform(int(key), n)) for key, row in zip(keys, drawn, strict=True)
        )
    assert uniform(keys, 0).shape == (15, 0)
    assert uniform(keys[:0], 3).shape == (0, 3)


@pytest.mark.parametrize("shift", [0, 44])
def test_places_rows_and_streams_are_independent(shift: int) -> None:
    """In 16 x 16 cells, and for keys that differ in few bits."""
    keys = np.arange(100_000) << shift
    drawn, other = uniform(keys, 8, "mlm"), uniform(keys, 8, "fim")
    for one, two in ((drawn[:, 1:], drawn[:, :-1]), (drawn[1:], drawn[:-1]), (drawn, other)):
        cells = np.bincount((one * 16).astype(int).ravel() * 16 + (two * 16).astype(int).ravel())
        expected = one.size / 256
        assert abs(((cells - expected) ** 2 / expected).sum() - 255) < 5 * np.sqrt(510)
    assert 0 <= drawn.min() < drawn.max() < 1


def test_the_first_and_last_of_each_range() -> None:
    for key in (-(2**63), 2**64 - 1):
        assert generator(key).random() < 1
        uniform(key, 1)
    for stream in (0, 2**64 - 1):
        uniform(1, 1, stream)
    for key in (-(2**63) - 1, 2**64):
        for draw in (lambda key: uniform(key, 1), generator):
            with pytest.raises(InvalidArgument, match="key must be from"):
                draw(key)
    for stream in (-1, 2**64):
        with pytest.raises(InvalidArgument, match="stream must be from"):
            uniform(1, 1, stream)
    with pytest.raises(InvalidArgument, match="n must be at least 0"):
        uniform(1, -1)
    for wrong in ([0.5], ["a"], [True], [-1, 2**64 - 1]):
        with pytest.raises(InvalidArgument, match="key must hold integers"):
            uniform(wrong, 1)
    with pytest.raises(InvalidArgument, match="stream must be"):
        uniform(1, 1, 0.5)  # type: ignore[call-overload]
    with pytest.raises(InvalidArgument, match="key must be an integer"):
        generator(0.5)  # type: ignore[arg-type]


def test_streams_begin_at_0() -> None:
    torch = pytest.importorskip("torch")
    assert uniform(5, 3).tolist() == uniform(5, 3, 0).tolist()
    assert generator(5).random() == generator(5, 0).random()
    first, same = (torch.rand(1, generator=torch_generator(5, *stream)) for stream in ((), (0,)))
    assert first == same


def test_torch_generators_are_seeded_with_the_first_word() -> None:
    torch = pytest.importorskip("torch")
    for row in ROWS[:12]:
        drawn = torch_generator(int(row["key"]), stream_of(row))
        assert drawn.initial_seed() == int(row["words"][0], 16)
    one, same, other = (torch_generator(5, stream) for stream in ("mlm", "mlm", "fim"))
    first = torch.rand(4, generator=one)
    assert torch.equal(first, torch.rand(4, generator=same))
    assert not torch.equal(first, torch.rand(4, generator=other))


def test_numbers_of_arrays_load_no_torch() -> None:
    code = (
        "import sys; from megaindex.keys import Store, generator, uniform; uniform([1], 3);"
        " generator(1); print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
