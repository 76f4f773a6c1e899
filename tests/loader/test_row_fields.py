"""Fields that say what the rows of a batch are, in every kind of run."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from support.corpora import write_corpus
from support.run_kinds import KINDS, YES, Kind, write_corpora
from support.run_questions import Asked, as_arrays, rows_of

import megaindex
from megaindex import InvalidArgument
from megaindex.cache.fingerprint import content_fingerprint
from megaindex.index.receipts import fingerprint_keys
from megaindex.index.spans import datasets_of, exposures_of, sequence_lengths_at
from megaindex.kernels import load
from megaindex.keys import content
from megaindex.loader import (
    BatchMaker,
    Loader,
    MappedTokens,
    MicroBatchSampler,
    NumpyDataset,
    Recorder,
    SampleOptions,
    join_states,
)
from megaindex.loader.row_fields import ROW_FIELDS, WIDE_FIELD

WIDE = SampleOptions(keys="wide")
NAMES = [*ROW_FIELDS, WIDE_FIELD]
Row = tuple[int, ...]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("rows")
    write_corpora(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        yield folder


def rows(batches: Iterable[Any]) -> list[Row]:
    """Fields of all rows but those of padding: sample, source, exposure, key and its high word."""
    found = []
    for batch in batches:
        columns = [np.asarray(batch[name]).tolist() for name in NAMES]
        padding = [row for row in zip(*columns, strict=True) if row[0] < 0]
        assert {*padding} <= {(-1, -1, -1, 0, 0)}
        found += [row for row in zip(*columns, strict=True) if row[0] >= 0]
    return found


def expected_rows(run: Any) -> list[Row]:
    """The rows of a run by its spans and the specification of the kernel."""
    keys = fingerprint_keys([content_fingerprint(each) for each in datasets_of(run.index)])
    found = []
    for runs in run.runs():
        ids = np.unique(runs.sample)
        widths = np.broadcast_to(sequence_lengths_at(run.index, ids), ids.shape)
        starts, passes = np.arange(ids.size), exposures_of(run.index, ids)
        splits = np.append(np.searchsorted(runs.sample, ids), runs.sample.size)
        out = [np.empty(ids.size, kind) for kind in (*ROW_FIELDS.values(), "int64")]
        load("reference").row_keys(
            ids, starts, runs.source, runs.document, runs.offset, runs.length, splits,
            int(widths.max()), keys, starts, passes, *out,
        )  # fmt: skip
        found += list(zip(*(column.tolist() for column in out), strict=True))
    return found


@pytest.mark.parametrize("most", [9, pytest.param(None, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if kind.cell("load") == YES], ids=lambda kind: kind.name
)
def test_rows_of_every_kind_of_run_are_the_same_everywhere(
    folder: Path, kind: Kind, most: int | None
) -> None:
    """Rows of one rank and of the spans; and of one kind in three each: those of two ranks and one
    after them, those of the first batches by the lock, and the fields without rows."""
    number = KINDS.index(kind)
    asked, wide = Asked(kind), WIDE
    if asked.options:
        wide = replace(asked.options["options"], keys="wide")
    if kind.name == "an index of one's own":
        asked.made.num_epochs = 2
        with pytest.raises(InvalidArgument, match="keys: "):
            asked.loader(0, 1, options=WIDE)
        return
    batches = [as_arrays(batch) for batch in asked.loader(0, 1, options=wide, read_ahead=0)]
    whole = rows(batches)
    assert {*whole} == {*expected_rows(replace(asked.run, past_steps=0))}
    if number % 3 == 0 or most is None:
        check_ranks(asked, wide, whole)
    if number % 3 == 1 or most is None:
        check_lock(asked, wide, batches, most)
    if number % 3 == 2 or most is None:
        check_others(asked, batches, most)


def check_ranks(asked: Asked, wide: SampleOptions, whole: list[Row]) -> None:
    """Compare the rows of two ranks, and of one that goes on behind them, with those of one."""
    first = [asked.loader(rank, 2, options=wide) for rank in range(2)]
    half = len(first[0]) // 2
    served = [as_arrays(batch) for each in first for batch in itertools.islice(each, half)]
    state = json.loads(json.dumps(join_states([each.state_dict() for each in first])))
    rest = asked.loader(0, 1, options=wide, read_ahead=0)
    rest.load_state_dict(state)
    served += [as_arrays(batch) for batch in rest]
    assert sorted(rows(served)) == sorted(whole)


def check_others(asked: Asked, batches: list[Any], most: int | None) -> None:
    """Compare the other fields with those of a loader without rows."""
    plain = [as_arrays(batch) for batch in itertools.islice(asked.loader(0, 1), most)]
    for batch, other in zip(batches[:most], plain, strict=True):
        assert list(other) == [name for name in batch if name not in NAMES]
        assert all(np.array_equal(batch[name], other[name]) for name in other)


def check_lock(asked: Asked, wide: SampleOptions, batches: list[Any], most: int | None) -> None:
    """Compare the rows with those of the lock's loader."""
    if asked.made is None or asked.kind.locked is not None:
        opened = megaindex.open_run(asked.lock.path)
        loader = opened.loader(data_parallel_size=1, micro_batch_size=1, options=wide)
        locked = rows(as_arrays(batch) for batch in itertools.islice(loader, most))
        assert locked
        assert locked == rows(batches)[asked.past :][: None if most is None else len(locked)]


@pytest.fixture(scope="module")
def blend(folder: Path) -> Any:
    return megaindex.build_blend(
        ["web", "code"], weights=[3, 1], num_samples=192, sequence_length=16
    )


def loaders(index: Any, ranks: int, micro: int = 2, **state: Any) -> list[Loader]:
    prints = [megaindex.corpus.corpus_fingerprint(each) for each in index.datasets]
    return [
        Loader(
            index,
            MicroBatchSampler(
                num_samples=index.num_samples,
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                **state,
            ),
            options=WIDE,
            recorder=Recorder(prints),
        )
        for rank in range(ranks)
    ]


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize(
    ("workers", "ranks"),
    [
        (0, 1), (0, 6), (2, 2),
        *(pytest.param(*each, marks=pytest.mark.slow)
          for each in ((0, 2), (0, 16), (2, 1), (2, 6), (2, 16), (8, 1), (8, 2), (8, 6), (8, 16))),
    ],
)  # fmt: skip
def test_rows_do_not_depend_on_ranks_and_workers(blend: Any, ranks: int, workers: int) -> None:
    expected = rows(as_arrays(batch) for batch in loaders(blend, 1)[0])
    found = []
    every = loaders(blend, ranks)
    for loader in every[:: max(1, ranks // 3)] if workers else every:
        batches = torch.utils.data.DataLoader(
            loader.dataset(), batch_sampler=loader.sampler, num_workers=workers
        )
        found += rows(as_arrays(batch) for batch in batches)
    if workers:
        assert {*found} <= {*expected}
        assert len(found) == len({*found})
    else:
        assert sorted(found) == sorted(expected)


@pytest.mark.slow
def test_rows_go_on_after_resumes_at_other_sizes(blend: Any) -> None:
    whole = rows(as_arrays(batch) for batch in loaders(blend, 1)[0])
    served: list[Row] = []
    state = None
    for ranks, micro, steps in ((2, 2, 3), (6, 2, 2), (16, 1, 2), (3, 4, 2), (1, 2, None)):
        each = loaders(blend, ranks, micro)
        for loader in each:
            if state is not None:
                loader.load_state_dict(state)
            served += rows(as_arrays(batch) for batch in itertools.islice(loader, steps))
        state = join_states([loader.state_dict() for loader in each])
    assert sorted(served) == sorted(whole)


def test_the_same_tokens_have_one_content_in_every_pass(folder: Path) -> None:
    """In order window every pass has the same rows; a blend and another run have them, too."""
    settings: Any = {"sequence_length": 16, "order": "window"}
    three = megaindex.build_index("web", epochs=3, **settings)
    other = megaindex.build_index("web", epochs=1, seed=7, **settings)
    blend = megaindex.build_blend(["code", "web"], weights=[1, 1], num_samples=40, **settings)

    def keys_of(index: Any) -> dict[tuple[bytes, int], Row]:
        batch = NumpyDataset(index, options=WIDE)[:]
        passes = batch["exposure"].tolist()
        tokens = [row.tobytes() for row in batch["tokens"]]
        keys = zip(batch["key"].tolist(), passes, batch["key_high"].tolist(), strict=True)
        return dict(zip(zip(tokens, passes, strict=True), keys, strict=True))

    found, once, drawn = keys_of(three), keys_of(other), keys_of(blend)
    assert {each: found[each] for each in once} == once
    shared = found.keys() & drawn.keys()
    assert {each: found[each] for each in shared} == {each: drawn[each] for each in shared}
    assert len(shared) > 10
    assert len({key for key, _, _ in found.values()}) == len(found)
    by_content: dict[bytes, set[Row]] = {}
    for (tokens, _), row in found.items():
        by_content.setdefault(tokens, set()).add(tuple(content(*row).tolist()))
    assert {len(each) for each in by_content.values()} == {1}
    assert len({*itertools.chain(*by_content.values())}) == len(by_content) == len(found) // 3


def test_a_copy_of_a_corpus_has_the_same_keys_and_another_content_others(tmp_path: Path) -> None:
    lengths = [20, 30, 40]
    for name, eod in (("one", None), ("copy", None), ("other", 7)):
        write_corpus(tmp_path / name, lengths, eod=eod)
    found = {}
    for name in ("one", "copy", "other"):
        index = megaindex.build_index(str(tmp_path / name), sequence_length=8)
        found[name] = NumpyDataset(index, options=SampleOptions(keys=True))[:]["key"].tolist()
    assert found["one"] == found["copy"]
    assert not {*found["one"]} & {*found["other"]}


def test_rows_are_known_without_tokens(blend: Any) -> None:
    dataset = NumpyDataset(blend, options=WIDE, fields="maxtext")
    ids = [3, None, 150, 8]
    found = dataset.rows(ids)
    expected = NumpyDataset(blend, options=WIDE).__getitems__(ids)
    assert {name: array.tolist() for name, array in found.items()} == {
        name: expected[name].tolist() for name in NAMES
    }
    assert not {*NAMES} & {*dataset.__getitems__(ids)}
    with pytest.raises(InvalidArgument, match="rows need SampleOptions"):
        NumpyDataset(blend).rows(ids)


def test_padding_has_no_sample(blend: Any) -> None:
    batch = NumpyDataset(blend, options=WIDE).__getitems__([None, 5, -1])
    assert batch["sample"].tolist() == [-1, 5, -1]
    assert batch["source"].tolist() == [-1, int(blend.dataset_index[5]), -1]
    assert batch["exposure"].tolist()[::2] == [-1, -1]
    assert batch["key"].tolist()[::2] == batch["key_high"].tolist()[::2] == [0, 0]
    assert content(batch["key"], batch["exposure"]).tolist()[::2] == [0, 0]
    alone = NumpyDataset(blend, options=WIDE).__getitems__([None])
    assert alone["sample"].tolist() == [-1]
    dtypes = {name: str(batch[name].dtype) for name in NAMES}
    assert dtypes == {**ROW_FIELDS, WIDE_FIELD: "int64"}
    assert sum(np.dtype(dtype).itemsize for dtype in dtypes.values()) == 32


def test_only_keys_or_wide_keys_are_given() -> None:
    assert SampleOptions().row_fields == {}
    assert SampleOptions(keys=True).row_fields == ROW_FIELDS
    for wrong in ("narrow", None, 2):
        with pytest.raises(InvalidArgument, match="keys must be True, False or 'wide'"):
            SampleOptions(keys=wrong)  # type: ignore[arg-type]


def test_sources_are_read_when_they_are_first_drawn(folder: Path) -> None:
    lazy = [
        megaindex.IndexedDataset.lazy(name, megaindex.IndexedDataset(name).identity)
        for name in ("web", "code")
    ]
    blend = megaindex.build_blend(
        ["web", "code"], weights=[3, 1], num_samples=40, sequence_length=16
    )
    maker = BatchMaker(blend, MappedTokens(lazy), WIDE)
    first = int(np.flatnonzero(blend.dataset_index == 0)[0])
    buffers = maker.allocate(1)
    maker.fill(buffers, [first])
    assert [each.is_open for each in lazy] == [True, False]
    expected = NumpyDataset(blend, options=WIDE)[:]
    rest = maker.allocate(40)
    maker.fill(rest, range(40))  # type: ignore[arg-type]
    for name in NAMES:
        assert buffers.arrays[name][0] == expected[name][first]
        assert rest.arrays[name].tolist() == expected[name].tolist()


def test_rows_of_tokens_stay_as_they_are(blend: Any) -> None:
    assert rows_of([NumpyDataset(blend)[:]]) == rows_of([NumpyDataset(blend, options=WIDE)[:]])
