"""Samples and epoch sizes of mixtures equal those of mosaicml-streaming, its own code run here."""

from __future__ import annotations

import importlib
import sys
from dataclasses import replace
from fractions import Fraction
from importlib.metadata import distribution
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from megaindex.recipe.mixture import SourceSize, samples_per_epoch
from megaindex.settings.recipe import RecipeStage, Stream, Weighting

# what streaming/base/stream.py imports for downloads and ranks; the counts use none of it
UNUSED = ("compression", "constant", "distributed", "format", "hashing", "registry_utils",
          "storage", "util", "world")  # fmt: skip


@pytest.fixture(scope="module")
def their_streams() -> Any:
    """The class Stream of streaming/base/stream.py, which runs as it stands."""
    root = str(distribution("mosaicml-streaming").locate_file("streaming"))
    stand_ins: dict[str, Any] = {f"streaming.base.{name}": MagicMock() for name in UNUSED}
    for name, path in (("streaming", root), ("streaming.base", f"{root}/base")):
        stand_ins[name] = ModuleType(name)
        stand_ins[name].__path__ = [path]
    with pytest.MonkeyPatch.context() as patch:
        for name, module in stand_ins.items():
            patch.setitem(sys.modules, name, module)
        stream = importlib.import_module("streaming.base.stream").Stream
        patch.delitem(sys.modules, "streaming.base.stream")
    return stream


def their_counts(
    stream_class: Any,
    weights: list[dict[str, float]],
    sizes: list[int],
    epoch_size: int | None,
    seed: int,
) -> tuple[list[int], int]:
    """Samples of each stream in an epoch, and all together, as StreamingDataset asks for them."""
    streams = [SimpleNamespace(**weight) for weight in weights]
    total = stream_class.apply_weights(streams, np.array(sizes, np.int64), epoch_size, seed)
    return [int(stream.choose) for stream in streams], total


def our_counts(stage: RecipeStage, sizes: list[int], seed: int) -> tuple[int, ...]:
    return samples_per_epoch(
        stage, [SourceSize(tokens=9 * n, documents=1, samples=n) for n in sizes], seed
    )


def stage_of(weights: list[dict[str, Any]], **more: Any) -> RecipeStage:
    streams = tuple(Stream(source=str(k), **weight) for k, weight in enumerate(weights))
    return RecipeStage(name="s", streams=streams, rounding="streaming", **more)


SIZES = st.lists(st.integers(60, 10**6), min_size=1, max_size=9)
SEEDS = st.integers(0, 2**32 - 1)
WEIGHTS = st.one_of(st.floats(0.05, 20), st.integers(1, 40).map(lambda n: n / 10))


@given(sizes=SIZES, seed=SEEDS, data=st.data())
def test_proportions(their_streams: Any, sizes: list[int], seed: int, data: st.DataObject) -> None:
    """Rounded down, in doubles, and the shortfall to the streams that the seed draws."""
    shares = [data.draw(WEIGHTS) for _ in sizes]
    # enough for every stream to give a sample: theirs may give none, ours says so
    epoch_size = data.draw(st.one_of(st.none(), st.integers(20_000, 10**7)))
    theirs, total = their_counts(
        their_streams, [{"proportion": share} for share in shares], sizes, epoch_size, seed
    )
    if min(theirs) == 0:
        return
    stage = stage_of([{"proportion": Fraction(s)} for s in shares], epoch_size=epoch_size)
    ours = our_counts(stage, sizes, seed)
    assert list(ours) == theirs
    assert sum(ours) == total == (epoch_size or sum(sizes))


@given(sizes=SIZES, data=st.data())
def test_repeats_choices_and_neither(
    their_streams: Any, sizes: list[int], data: st.DataObject
) -> None:
    """``repeat`` truncates, ``choose`` is taken as it is, neither is one epoch of the stream."""
    theirs_given: list[dict[str, Any]] = []
    ours_given: list[dict[str, Any]] = []
    for _ in sizes:
        kind = data.draw(st.sampled_from(["repeat", "choose", "neither"]))
        if kind == "repeat":
            repeat = data.draw(st.integers(5, 400)) / 100
            theirs_given.append({"repeat": repeat})
            ours_given.append({"repeat": Fraction(str(repeat))})
        else:
            choice = {"choose": data.draw(st.integers(1, 10**7))} if kind == "choose" else {}
            theirs_given.append(choice)
            ours_given.append(choice)
    theirs, total = their_counts(their_streams, theirs_given, sizes, None, 0)
    ours = our_counts(stage_of(ours_given), sizes, 0)
    assert list(ours) == theirs
    assert sum(ours) == total


def test_a_repeat_in_doubles_can_be_a_sample_short(their_streams: Any) -> None:
    """0.29 x 100 is 28.999999999999996 there; exactly, it is 29."""
    assert their_counts(their_streams, [{"repeat": 0.29}], [100], None, 0) == ([28], 28)
    stage = stage_of([{"repeat": Fraction("0.29")}])
    assert our_counts(stage, [100], 0) == (28,)
    assert our_counts(replace(stage, rounding="largest_remainder"), [100], 0) == (29,)


@given(sizes=SIZES, seed=SEEDS, epoch_size=st.integers(20_000, 10**7))
def test_no_weights_and_an_epoch_size_draw_by_size(
    their_streams: Any, sizes: list[int], seed: int, epoch_size: int
) -> None:
    """Theirs takes the samples for proportions; a recipe says so: weights by samples."""
    theirs, total = their_counts(their_streams, [{} for _ in sizes], sizes, epoch_size, seed)
    if min(theirs) == 0:
        return
    stage = stage_of([{} for _ in sizes], epoch_size=epoch_size, weighting=Weighting(by="samples"))
    ours = our_counts(stage, sizes, seed)
    assert list(ours) == theirs
    assert sum(ours) == total == epoch_size
