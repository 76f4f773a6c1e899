"""Blends that change in mid-run under megatron-core: the past is its own, the rest amend_run's."""

from __future__ import annotations

import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each
from support.megatron_blends import assert_equal, build, files, flat, read

import megaindex.adapters.megatron as adapter
from megaindex import AmendedBlend, BlendChange, amend_run
from megaindex.adapters import status
from megaindex.adapters.megatron.batches import samples_index
from megaindex.errors import InvalidArgument

pytestmark = pytest.mark.usefixtures("uninstalled")
SPLIT = "90,8,2"
PLANNED, END = 150, 700


@pytest.fixture
def uninstalled() -> Iterator[None]:
    yield
    adapter.uninstall()


def spans_of(index: Any, begin: int, end: int) -> list[list[int]]:
    spans = index.locate(np.arange(begin, end))
    return [column.tolist() for column in (*spans, spans.row_splits)]


def amended(corpora: list[str], *changes: tuple[int, dict[int, float]], **how: Any) -> AmendedBlend:
    return AmendedBlend(
        data_path=["0.7", corpora[4], "0.3", corpora[1]],
        num_samples=PLANNED,
        changes=[
            BlendChange(consumed_samples=n, weights={corpora[k]: w for k, w in mix.items()})
            for n, mix in changes
        ],
        **how,
    )


def arrays_of_changes(cache: Path) -> dict[str, int]:
    """The stored arrays of amended runs, and when each was written."""
    found = (cache / "megaindex-amended").rglob("*.npy")
    return {path.name: path.stat().st_mtime_ns for path in found}


@pytest.mark.slow_cases("False")
@pytest.mark.parametrize("per_split", [False, True])
def test_the_past_is_megatrons(
    core: Any, corpora: list[str], tmp_path: Path, per_split: bool
) -> None:
    blend = ([corpora[4], corpora[1]], [0.7, 0.3])
    today = ([corpora[4], corpora[3]], [1.0, 3.0])
    valid = ([corpora[0]], None)

    def data(blend: Any) -> dict[str, Any]:
        if per_split:
            return {"blend_per_split": [blend, valid, None]}
        return {"blend": blend, "split": SPLIT}

    sizes = [PLANNED, 20, 8]
    theirs = build(core, sizes, tmp_path / "cache", **data(blend))
    before = files(tmp_path / "cache")
    others = build(core, [END, 20, 8], tmp_path / "other", **data(today))
    changes = amended(corpora, (60, {4: 1, 1: 2}), (100, {4: 1.0, 3: 3.0}))
    adapter.install(amend=changes)
    ours = build(core, [END, 20, 8], tmp_path / "cache", **data(today))
    assert all((tmp_path / "cache" / name).read_bytes() == before[name] for name in before)
    assert len(ours[0]) == END
    for k in range(60):
        assert_equal(read(ours[0], k), read(theirs[0], k))
    for mine, plain in zip(flat(ours[1:]), flat(others[1:]), strict=True):
        for k in range(len(plain)):
            assert_equal(read(mine, k), read(plain, k))
    run = amend_run(
        list(blend[0]), weights=blend[1], num_samples=PLANNED, changes=changes.changes,
        more_samples=END - 100, sequence_length=16, seed=1,
        **({} if per_split else {"split": SPLIT, "subset": "train"}),
    )  # fmt: skip
    assert any(getattr(source, "further_seeds", ()) for source in run.sources)
    index = samples_index(ours[0])
    assert spans_of(index, 0, END) == spans_of(run.index, 0, END)
    for k in range(60, END, 7):
        spans = run.index.locate([k])
        tokens = np.concatenate(
            [run.datasets[s].get(int(d), int(o), int(n)) for s, d, o, n in zip(*spans, strict=True)]
        )
        assert ours[0][k]["tokens"].tolist() == tokens[:16].tolist()
    batch = ours[0].__getitems__(list(range(END)))
    assert [row["tokens"].tolist() for row in batch] == [
        ours[0][k]["tokens"].tolist() for k in range(END)
    ]
    kept = arrays_of_changes(tmp_path / "cache")
    assert kept
    again = build(core, [END, 20, 8], tmp_path / "cache", **data(today))[0]
    assert arrays_of_changes(tmp_path / "cache") == kept
    assert spans_of(samples_index(again), 0, END) == spans_of(index, 0, END)
    copied = pickle.loads(pickle.dumps(ours[0]))
    assert_equal(copied[END - 1], ours[0][END - 1])


def test_a_single_path_becomes_a_blend(core: Any, corpora: list[str], tmp_path: Path) -> None:
    today = ([corpora[4], corpora[3]], [1.0, 1.0])
    text = tmp_path / "amend.yaml"
    text.write_text(
        f"data_path: {corpora[4]}\nnum_samples: {PLANNED}\nchanges:\n"
        f"- {{consumed_samples: 50, data_path: [0.5, {corpora[4]}, 0.5, {corpora[3]}]}}\n"
    )
    theirs = build(core, [PLANNED, 0, 0], None, blend=([corpora[4]], None), split="1,0,0")[0]
    adapter.install(amend=text)
    ours = build(core, [END, 0, 0], tmp_path / "cache", blend=today, split="1,0,0")[0]
    for k in range(50):
        assert ours[k]["tokens"].tolist() == theirs[k]["tokens"].tolist()
    assert len(ours) == END
    (row,) = [each for each in status().datasets if each.how == "amended"]
    assert (row.kind, row.name, row.samples) == ("BlendedDataset", "train", END)


class Elsewhere:
    """A builder that makes nothing on this rank."""

    def __init__(self, core: Any) -> None:
        self.core = core

    def __call__(self, cls: Any, sizes: Any, _: Any, config: Any) -> Any:
        made = self.core.Builder(cls, sizes, lambda: True, config)
        made.is_built_on_rank = lambda: False
        return made


def test_other_ranks_and_runs_without_training_have_no_dataset(
    core: Any, corpora: list[str], tmp_path: Path
) -> None:
    blend = ([corpora[4], corpora[3]], [1.0, 3.0])
    adapter.install(amend=amended(corpora, (60, {4: 1, 3: 3})))
    made = build(core, [END, 8, 0], tmp_path, blend=blend, split=SPLIT, builder=Elsewhere(core))
    assert (made, list(tmp_path.iterdir())) == ([None] * 3, [])
    train, valid, _ = build(core, [END, 8, 0], tmp_path, blend=blend, split="0,100,0")
    assert (train, len(valid)) == (None, 8)


@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("phases", [None, [2]])
def test_runs_without_an_order_of_the_past_are_refused(
    core: Any, corpora: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    deferred: bool, phases: Any,
) -> None:  # fmt: skip
    training: Any = ModuleType("megatron.training.global_vars")
    training._GLOBAL_ARGS = SimpleNamespace(phase_transition_iterations=phases)
    monkeypatch.setitem(sys.modules, training.__name__, training)
    adapter.install(amend=amended(corpora, (60, {4: 1, 3: 3})))
    blend = ([corpora[4], corpora[3]], [1.0, 3.0])
    cases: list[tuple[dict[str, Any], str | None]] = [
        ({}, "amend: mock data has no documents"),
        ({"blend_per_split": [None, blend, None]}, "amend: there is no training data"),
        (
            {"blend": blend, "split": SPLIT},
            "amend: --dataloader-defer-npy-index-mmap leaves the arrays of the past unread; remove "
            "it" if deferred else
            "amend: --phase-transition-iterations counts the samples of each phase anew; remove it"
            if phases else None,
        ),
    ]  # fmt: skip
    for config, message in cases:

        def builder(cls: Any, sizes: Any, is_here: Any, made: Any) -> Any:
            made.defer_npy_index_mmap = deferred
            return core.Builder(cls, sizes, is_here, made)

        if message is None:
            assert len(build(core, [END, 0, 0], tmp_path, builder=builder, **config)[0]) == END
            continue
        with pytest.raises(InvalidArgument) as caught:
            build(core, [END, 0, 0], tmp_path, builder=builder, **config)
        assert str(caught.value) == message


@pytest.mark.parametrize(
    ("changes", "blend", "message"),
    [
        ([(60, {4: 1})], ([4, 1], [0.7, 0.3]), "data path of the framework must be that of the la"),
        ([(60, {4: 1, 1: 1})], ([4, 1], None), "data path of the framework must be that of the la"),
        ([(60, {4: 1, 1: 1})], ([4, 1], [1.0, 2.0]), "must be that of the last change"),
        ([(END, {4: 1, 1: 1})], ([4, 1], [1.0, 1.0]), "beyond the"),
        ([(60, {4: 1}), (60, {4: 1, 1: 1})], ([4, 1], [1.0, 1.0]), "in the order of their samples"),
    ],
)
def test_changes_that_do_not_fit_are_refused(
    core: Any, corpora: list[str], tmp_path: Path, changes: Any, blend: Any, message: str
) -> None:
    adapter.install(amend=amended(corpora, *changes))
    numbers, weights = blend
    with pytest.raises(InvalidArgument, match=message):
        build(
            core, [END, 0, 0], tmp_path, split="1,0,0",
            blend=([corpora[k] for k in numbers], weights),
        )  # fmt: skip


@for_each(
    ("text", "message"),
    [
        ("data_path: a\nnum_samples: 1\n", "changes is missing; it must be a list"),
        ("data_path: a\nchanges: []\nnum_samples: 1\n", "changes is empty"),
        ("data_path: a\nchanges: [{}]\n", "num_samples is missing; it must be"),
        ("data_path: a\nchanges: [{}]\nnum_samples: 3", "consumed_samples is missing"),
        (
            "data_path: a\nchanges: [{consumed_samples: 1}]\nnum_samples: 3",
            "data_path is missing; it must be",
        ),
        (
            "data_path: a\nchanges: [{consumed_samples: 1, data_path: a}]\nnum_samples: 3",
            "write a weight before every prefix",
        ),
        ("data_path: [1, a, b]\nnum_samples: 1\nchanges: [{}]", "consumed_samples is missing"),
        ("data: a\n", "did you mean data_path"),
        ("data_path: a\nnum_samples: 3\nchanges: [{data_paths: [1, a]}]", "did you mean data_path"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "amend.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgument, match=message):
        AmendedBlend.read(path)
