"""A batch as a list of its samples, under collate functions."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from support.inputs import for_each
from torch.utils.data import default_collate

from megaindex.loader.torch_dataset import SampleList


def make_batch(rows: int = 3) -> dict[str, Any]:
    values = torch.arange(rows * 4).reshape(rows, 4)
    numbers = torch.arange(rows, dtype=torch.int16)
    return {"dataset_id": numbers, "tokens": values, "labels": values + 1}


def assert_same(ours: Any, plain: Any) -> None:
    assert list(ours) == list(plain)
    for name, value in plain.items():
        assert type(ours[name]) is type(value), name
        np.testing.assert_array_equal(np.asarray(ours[name]), np.asarray(value))


def plain_rows(batch: dict[str, Any]) -> list[dict[str, Any]]:
    numbers = list(batch["dataset_id"].numpy())
    return [
        {"dataset_id": numbers[k], "tokens": batch["tokens"][k], "labels": batch["labels"][k]}
        for k in range(len(numbers))
    ]


def test_collating_returns_the_batch_itself() -> None:
    batch = make_batch()
    samples = SampleList(batch)
    assert_same(samples[0], plain_rows(batch)[0])
    assert default_collate(samples) is batch


USES: list[Callable[[Any], Any]] = [
    list,
    lambda samples: [*samples, *samples],
    lambda samples: samples + [],  # noqa: RUF005
    lambda samples: [] + samples,  # noqa: RUF005
    lambda samples: plain_rows(make_batch(2)) + samples,
    lambda samples: samples + SampleList(make_batch(2)),
    lambda samples: samples * 2,
    lambda samples: samples[1:],
    lambda samples: [samples[-1]],
    lambda samples: list(reversed(samples)),
    lambda samples: samples.copy(),
    copy.copy,
    lambda samples: pickle.loads(pickle.dumps(samples)),
    lambda samples: [samples.pop(), *samples],
    lambda samples: list(zip(*map(list, map(dict.items, samples)), strict=True)) and samples,
    lambda samples: sorted(samples, key=lambda sample: -int(sample["tokens"][0])),
]


@for_each("use", USES)
def test_it_is_a_list_whatever_is_done_with_it(use: Callable[[Any], Any]) -> None:
    batch = make_batch()
    ours, plain = use(SampleList(batch)), use(plain_rows(batch))
    assert isinstance(ours, list)
    assert len(ours) == len(plain)
    for one, other in zip(ours, plain, strict=True):
        assert_same(one, other)


def change_first(samples: Any) -> None:
    samples[0]["tokens"] = samples[0]["tokens"] * 2


def add_to_first(samples: Any) -> None:
    for sample in samples:
        sample["more"] = sample["tokens"] + 5


def swap_fields(samples: Any) -> None:
    samples[0]["tokens"], samples[0]["labels"] = samples[0]["labels"], samples[0]["tokens"]


def in_place(samples: Any) -> None:
    samples[0]["tokens"] += 7
    samples[2]["labels"][1] = -1


def drop_field(samples: Any) -> None:
    del samples[0]["labels"]


def drop_last(samples: Any) -> None:
    del samples[-1]


@pytest.mark.parametrize(
    "change", [change_first, add_to_first, swap_fields, in_place, drop_field, drop_last]
)
def test_a_change_to_samples_is_collated(change: Callable[[Any], None]) -> None:
    ours, plain = SampleList(make_batch()), plain_rows(make_batch())
    change(ours)
    change(plain)
    assert_same(default_collate(ours), default_collate(plain))


def test_an_empty_batch_has_no_sample() -> None:
    samples = SampleList({name: field[:0] for name, field in make_batch().items()})
    assert not samples
    with pytest.raises(IndexError):
        samples[0]
