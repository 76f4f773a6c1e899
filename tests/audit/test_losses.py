"""Losses by source, compared with sums row by row, in NumPy and Torch, on one rank and several."""

from __future__ import annotations

import copy
import multiprocessing
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from megaindex import InvalidArgument
from megaindex.audit import LossBySource

NAMES = ["web", "code", "a/b/", "web"]


def batches(count: int = 40) -> list[tuple[Any, Any, Any]]:
    rng = np.random.default_rng(5)
    found = []
    for _ in range(count):
        source = rng.integers(-1, len(NAMES), 16).astype(np.int32)
        loss = rng.gamma(2, 2, (16, 33)).astype(np.float32)
        mask = (rng.random((16, 33)) < 0.8).astype(np.float32)
        mask[source < 0] = 0
        found.append((np.where(mask > 0, loss, np.nan).astype(np.float32), source, mask))
    return found


def exact(rows: list[tuple[Any, Any, Any]]) -> list[list[Fraction]]:
    sums = [[Fraction(0), Fraction(0)] for _ in NAMES]
    for loss, source, mask in rows:
        for row, number in enumerate(source.tolist()):
            for place in np.flatnonzero(mask[row]).tolist():
                sums[number][0] += Fraction(float(loss[row, place]))
                sums[number][1] += 1
    return sums


def tensors(torch: Any, *arrays: Any) -> list[Any]:
    return [torch.from_numpy(each) for each in arrays]


@pytest.mark.parametrize("kind", ["arrays", "tensors", "mixed"])
def test_sums_are_those_of_rows_and_add_up(kind: str) -> None:
    rows, losses = batches(), LossBySource(NAMES)
    for k, batch in enumerate(rows):
        as_tensors = kind == "tensors" or (kind == "mixed" and k % 3 == 1)
        losses.update(*(tensors(pytest.importorskip("torch"), *batch) if as_tensors else batch))
    expected = exact(rows)
    for total, column in zip(losses.totals, zip(*expected, strict=True), strict=True):
        assert total.dtype == np.float64
        assert np.allclose(total, [float(each) for each in column], rtol=1e-13, atol=0)
    total = float(sum(sums[0] for sums in expected))
    assert abs(losses.totals[0].sum() - total) < 1e-6 * total
    scalars = losses.scalars()
    assert list(scalars) == [f"data/loss{name}" for name in ("", "/web", "/code", "/a/b", "/web#2")]
    means = [float(loss / weight) for loss, weight in expected]
    assert np.allclose(list(scalars.values())[1:], means)
    assert np.allclose(losses.means, means)
    assert np.isclose(scalars["data/loss"], total / float(sum(sums[1] for sums in expected)))


def test_losses_of_rows_weigh_one() -> None:
    losses = LossBySource(["web", "code"])
    losses.update([2.0, 4.0, 9.0, 7.0], [1, 1, -1, 0])
    assert losses.totals.tolist() == [[7, 6], [1, 2]]
    assert losses.scalars("train") == {
        "train/loss": 13 / 3, "train/loss/web": 7.0, "train/loss/code": 3.0,
    }  # fmt: skip
    one = LossBySource(["web"])
    assert one.scalars() == {}
    one.update([2.0], [0])
    assert one.scalars() == {"data/loss": 2.0}


def test_sources_without_weight_are_left_out() -> None:
    losses = LossBySource(["web", "code"])
    losses.update([[np.nan, 1.0]], [1], [[0.0, 0.5]])
    assert losses.scalars() == {"data/loss": 1.0, "data/loss/code": 1.0}
    assert np.isnan(losses.means[0])
    losses.update([np.nan], [0])  # a loss that counts
    assert np.isnan(losses.scalars()["data/loss/web"])
    losses.reset()
    assert losses.scalars() == {}


def test_small_dtypes_are_summed_in_float64() -> None:
    torch = pytest.importorskip("torch")
    losses = LossBySource(["web"])
    loss = torch.full((64, 4096), 3.0, dtype=torch.bfloat16, requires_grad=True)
    for _ in range(4):
        losses.update(loss, torch.zeros(64, dtype=torch.int32), torch.ones(64, 4096).bool())
    assert losses.totals.tolist() == [[3 * 2**20], [2**20]]


def test_unknown_sources_are_refused_on_asking() -> None:
    torch = pytest.importorskip("torch")
    for number in (-2, 2, 2**31 - 1):
        for batch in ([1.0], [number]), tensors(torch, np.ones(1), np.array([number])):
            losses = LossBySource(["web", "code"])
            losses.update(*batch)
            for ask in (lambda losses: losses.totals, LossBySource.scalars):
                with pytest.raises(InvalidArgument, match="source must be from 0 to 1"):
                    ask(losses)
    losses = LossBySource(["web", "code"])
    losses.update([1.0, 1.0, 1.0], [-1, 0, 1])
    assert losses.totals.tolist() == [[1, 1], [1, 1]]


def test_shapes_that_do_not_fit() -> None:
    torch = pytest.importorskip("torch")
    losses = LossBySource(["web"])
    for batch in (
        (np.ones(3), np.zeros(2, int), np.ones(3)),
        (np.ones((2, 3)), np.zeros(2, int), np.ones(2)),
        (np.ones((2, 3)), np.zeros((2, 1), int), np.ones((2, 3))),
        (np.float64(1), np.zeros(1, int), np.float64(1)),
    ):
        given = [torch.as_tensor(each) for each in batch]
        for each in batch, given:
            with pytest.raises(InvalidArgument, match="source must have one number"):
                losses.update(*each)
    for names in ([], "web", [3]):
        with pytest.raises(InvalidArgument, match="names"):
            LossBySource(names)  # type: ignore[arg-type]


def test_sums_of_ranks_are_added() -> None:
    rows, whole, ranks = batches(8), LossBySource(NAMES), [LossBySource(NAMES) for _ in range(3)]
    for k, batch in enumerate(rows):
        whole.update(*batch)
        ranks[k % 3].update(*batch)
    joined = copy.deepcopy(ranks[0])
    for other in ranks[1:]:
        joined.add(other.totals)
    assert np.allclose(joined.totals, whole.totals, rtol=1e-14)
    with pytest.raises(InvalidArgument, match=r"totals must have the shape \[2, 4\]"):
        joined.add(np.zeros((2, 3)))
    alone = whole.over_ranks()
    assert np.array_equal(alone.totals, whole.totals)
    alone.update(*rows[0])
    assert not np.array_equal(alone.totals, whole.totals)


def sums_of_rank(rank: int, folder: Path) -> None:
    import torch

    torch.distributed.init_process_group(
        "gloo", f"file://{folder}/rendezvous", rank=rank, world_size=3
    )
    losses = LossBySource(["web", "code"])
    if rank:  # rank 0 has no batch
        losses.update(torch.full((2, 3), float(rank)), torch.tensor([0, rank % 2]))
    joined = losses.over_ranks()
    assert np.array_equal(joined.totals, losses.over_ranks().totals)
    (folder / str(rank)).write_text(str(joined.totals.tolist()))
    torch.distributed.destroy_process_group()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_all_ranks_have_the_sums_of_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked from a process that has loaded torch, which takes seconds."""
    pytest.importorskip("torch")
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=sums_of_rank, args=(rank, tmp_path)) for rank in range(3)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(60)
    assert [rank.exitcode for rank in ranks] == [0, 0, 0]
    for rank in range(3):
        assert (tmp_path / str(rank)).read_text() == "[[15.0, 3.0], [9.0, 3.0]]"


def test_repr() -> None:
    assert repr(LossBySource(["a", "b"])) == "LossBySource(a, b)"
    assert repr(LossBySource(NAMES)) == "LossBySource(web, code, a/b/ …)"


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_batches_without_rows_and_wrong_sources(library: str) -> None:
    module: Any = pytest.importorskip(library)
    make = np.asarray if library == "numpy" else module.as_tensor
    losses = LossBySource(["web", "code"])
    losses.update(make(np.zeros((0, 4))), make(np.zeros(0, np.int32)))
    losses.update(make(np.zeros(0)), make(np.zeros(0, np.int32)))
    assert losses.totals.tolist() == [[0, 0], [0, 0]]
    for loss, source in ((np.ones(2), np.zeros(2)), (np.float64(3), np.int64(0))):
        with pytest.raises(InvalidArgument, match="source must"):
            losses.update(make(loss), make(source))
