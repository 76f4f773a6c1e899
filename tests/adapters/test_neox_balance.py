"""Balanced steps under GPT-NeoX: the samples of every step stay, on any ranks."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import neox_stand_in
from support.corpora import write_sparse_corpus
from support.neox_running import arguments, loaders_of

import megaindex.adapters.neox as adapter
from megaindex.adapters import status
from megaindex.errors import InvalidArgument
from megaindex.index.balance import CostModel

COST = CostModel(linear=0, attention=1)
LENGTHS = np.random.default_rng(8).integers(1, 40, 150).tolist()


def served(args: SimpleNamespace, count: int, part: int = 0) -> list[list[list[tuple[int, ...]]]]:
    """The rows of so many micro batches of every rank, side by side."""
    ranks = []
    for rank in range(args.world_size):
        args.rank = rank
        loaders = loaders_of(args)
        iterator = neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)[part]
        batches = itertools.islice(iterator, count)
        ranks.append([[tuple(row.tolist()) for row in batch["text"]] for batch in batches])
    return [list(each) for each in zip(*ranks, strict=True)]


def steps(rounds: list[Any], accumulation: int) -> list[list[tuple[int, ...]]]:
    found = []
    for first in range(0, len(rounds), accumulation):
        rows = [row for ranks in rounds[first : first + accumulation] for r in ranks for row in r]
        found.append(sorted(rows))
    return found


def spread(ranks: list[list[tuple[int, ...]]]) -> int:
    """The most work of a rank in a micro batch, minus the least: squares of documents' lengths."""
    documents = np.searchsorted(np.cumsum(LENGTHS), ranks, "right")[..., :-1].tolist()
    work = [sum(n**2 for row in rows for n in Counter(row).values()) for rows in documents]
    return max(work) - min(work)


def settings(folder: Path, **given: Any) -> SimpleNamespace:
    shape = {"world_size": 2, "batch_size": 2, "gradient_accumulation_steps": 3}
    sizes = given.pop("sizes", [LENGTHS])
    args = arguments(
        folder, sizes, **{**shape, "train_batch_size": 12, "split": "100,0,0", **given}
    )
    args.data_path = args.paths[0] if len(sizes) == 1 else None
    args.eval_iters = 1
    return args


@pytest.mark.parametrize("blend", [False, True])
@pytest.mark.parametrize("iteration", [0, 2])
def test_steps_keep_their_samples(neox: Any, tmp_path: Path, blend: bool, iteration: int) -> None:
    sizes = [LENGTHS, LENGTHS[::-1], LENGTHS[:70]] if blend else [LENGTHS]
    args = settings(tmp_path, sizes=sizes, split="60,20,20", iteration=iteration)
    count = 3 * (args.train_iters - iteration)
    adapter.install()
    plain = served(args, count)
    valid = served(args, 1, part=1)
    adapter.install(balance=COST)
    balanced = served(args, count)
    assert plain != balanced
    assert steps(plain, 3) == steps(balanced, 3)
    if not blend:
        assert 3 * sum(map(spread, balanced)) < sum(map(spread, plain))
    assert served(args, 1, part=1) == valid  # evaluations stay in order
    # a resumed run goes on as if nothing had happened
    args.iteration += 3
    assert served(args, count - 9) == balanced[9:]


def test_a_step_that_reaches_into_the_next_pass(neox: Any, tmp_path: Path) -> None:
    """As many samples as are there, more iterations: NeoX starts over within a step."""
    args = settings(tmp_path, train_iters=4, split="60,20,20")
    adapter.install()
    (length,) = {len(loaders_of(args)["train"])}
    count = 3 * length
    assert length % 3
    plain = served(args, count)
    adapter.install(balance=COST)
    balanced = served(args, count)
    assert plain != balanced
    assert steps(plain, 3) == steps(balanced, 3)


def test_a_balanced_pass_that_comes_in_another_order_next(neox: Any, tmp_path: Path) -> None:
    """The pass itself is served; the next, which has an order of its own, is refused."""
    args = settings(tmp_path, train_epochs=1, train_iters=1, split="60,20,20")
    adapter.install(exact=True)
    (length,) = {len(loaders_of(args)["train"])}
    plain = served(args, length)
    adapter.install(exact=True, balance=COST)
    whole = length // 3 * 3
    assert steps(served(args, length)[:whole], 3) == steps(plain[:whole], 3)
    with pytest.raises(InvalidArgument, match="second pass"):
        served(args, length + 1)


def test_what_is_refused(neox: Any, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="balance must be a CostModel"):
        adapter.install(balance="llama3-8b")
    adapter.install(balance=COST)
    args = settings(tmp_path, split="60,20,20", pack_impl="unpacked")
    with pytest.raises(InvalidArgument, match="pack_impl unpacked"):
        served(args, 1)
    args = settings(tmp_path, split="60,20,20")
    loaders = loaders_of(args)
    loaders["train"].batch_sampler.wrap_last = True
    with pytest.raises(InvalidArgument, match="over samples in order"):
        neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)
    adapter.install(exact=True, balance=COST)
    args = settings(tmp_path, split="60,20,20", train_epochs=1, train_iters=300)
    with pytest.raises(InvalidArgument, match="second pass"):
        served(args, 1)


def test_squares_of_a_step_fit_64_bits(neox: Any, tmp_path: Path) -> None:
    write_sparse_corpus(tmp_path / "c0", [2**31 - 1] * 10)
    one = {"world_size": 1, "batch_size": 1, "train_iters": 1, "split": "60,20,20"}
    adapter.install(balance=COST)
    for rows in (7, 8):
        args = settings(
            tmp_path,
            **one,
            seq_length=2**30,
            gradient_accumulation_steps=rows,
            train_batch_size=rows,
        )
        loader = loaders_of(args)["train"]
        loaders = {"train": loader, "valid": None, "test": None}
        neox_stand_in.data_utils().shift_and_wrap_data_loaders(args, loaders)
        batches = iter(loader.batch_sampler)
        if rows == 7:
            assert sorted(next(batches)[0] for _ in range(7)) == list(range(7))
        else:
            with pytest.raises(InvalidArgument, match=r"8 rows of .* less than 2\*\*63"):
                next(batches)


def test_without_attention_rows_stay_in_order(neox: Any, tmp_path: Path) -> None:
    args = settings(tmp_path, split="60,20,20")
    adapter.install()
    plain = served(args, 6)
    adapter.install(balance=CostModel(linear=1, attention=0))
    assert served(args, 6) == plain
    assert "data loader train: left to GPT-NeoX, all rows are equal work" in str(status())


def test_a_balanced_loader_is_reported(
    neox: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "megaindex")
    args = settings(tmp_path, split="60,20,20")
    adapter.install(balance=COST)
    served(args, 1)  # on each of two ranks
    samples = len(loaders_of(args)["train"].dataset)
    text = f"data loader train: balanced {samples} samples, 2 ranks, cost model 0:1"
    assert caplog.text.count(f"megaindex: {text}") == 1
    assert text in str(status())
