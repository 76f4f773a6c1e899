"""Datasets that GPT-NeoX builds in one go: corpora opened once, arrays fetched together."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from support import neox_stand_in
from support.inputs import for_each
from support.neox_running import SIZES, arguments, batches, loaders_of, texts

import megaindex.adapters.neox as adapter
import megaindex.helpers
from megaindex import adapters
from megaindex.adapters.neox import blend as blend_module
from megaindex.adapters.neox.arrays import _current, grouped
from megaindex.adapters.neox.datasets import BatchRows, join_batches
from megaindex.cache.fingerprint import canonical_json
from megaindex.errors import FormatError
from megaindex.format import dataset as reader
from megaindex.index.blend import normalized
from megaindex.index.draws import BlendDraws, GreedyDraws
from megaindex.index.frameworks import as_range
from megaindex.index.orders import framework as shuffled

ARRAYS = ("document_index", "sample_index", "shuffle_index")
FILES = ("doc_idx", "sample_idx", "shuffle_idx")


def npy_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.glob("*.npy")}


def sidecars(folder: Path) -> dict[str, Path]:
    """By the name of the set that each is of."""
    return {p.name.removesuffix("-megaindex.json"): p for p in folder.glob("*-megaindex.json")}


def sets_of(folder: Path) -> set[str]:
    return {path.name.removesuffix("_doc_idx.npy") for path in folder.glob("*_doc_idx.npy")}


def count_calls(monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[Any]:
    calls: list[Any] = []
    function = getattr(module, name)

    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        return function(*args, **kwargs)

    monkeypatch.setattr(module, name, counted)
    return calls


def test_corpora_are_opened_and_arrays_computed_once(
    neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES, train_iters=2, weights=[1.0, 2.0, 3.0])
    opened = count_calls(monkeypatch, reader, "map_pair")
    built = count_calls(monkeypatch, shuffled, "build")
    loaders = loaders_of(args)
    of_the_group = [path for path, *_ in opened][len(SIZES) :]  # before, sources are counted
    assert sorted(of_the_group) == sorted(args.paths)
    train = [d.doc_idx.size for d in loaders["train"].dataset.datasets]
    valid = [d.doc_idx.size for d in loaders["valid"].dataset.datasets]
    contents = {(k, size) for sizes in (train, valid) for k, size in enumerate(sizes)}
    assert len(built) == len(contents) < 3 * len(SIZES)
    found = sidecars(tmp_path)
    assert found.keys() == sets_of(tmp_path)
    assert len(found) == 3 * len(SIZES)
    assert len({path.stat().st_ino for path in found.values()}) == 1


@pytest.mark.parametrize(
    ("sizes", "policy", "given"),
    [
        (SIZES, {}, {}),
        # two parts of two epochs of one corpus, with the last one apart in validation alone
        (
            SIZES[:1],
            {"separate_final_epoch": "auto", "final_epoch_threshold": 0.8},
            {"train_batch_size": 1, "batch_size": 1, "eval_interval": 2},
        ),
    ],
)
def test_files_are_those_of_datasets_built_one_by_one(
    neox: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    sizes: Any,
    policy: Any,
    given: Any,
) -> None:
    one_by_one = neox_stand_in.build_weighted_datasets
    adapter.install(**policy)
    args = arguments(tmp_path, sizes, **given)
    together = texts(args, 9)
    files = npy_files(tmp_path)
    for path in tmp_path.glob("*_indexmap_*"):
        path.unlink()
    alone = sys.modules["megatron.data.data_utils"]
    monkeypatch.setattr(alone, "build_weighted_datasets", one_by_one)
    assert texts(args, 9) == together
    assert npy_files(tmp_path) == files
    inodes = {path.stat().st_ino for path in sidecars(tmp_path).values()}
    assert len(inodes) == 3 * len(sizes)


def test_sidecars_of_single_sets_stay_valid(
    neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES)
    alone = sys.modules["megatron.data.data_utils"]
    with monkeypatch.context() as patch:
        patch.setattr(alone, "build_weighted_datasets", neox_stand_in.build_weighted_datasets)
        expected = texts(args, 9)
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    built = count_calls(monkeypatch, shuffled, "build")
    with caplog.at_level(logging.INFO, "megaindex"):
        assert texts(args, 9) == expected
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert not built
    assert not [r for r in caplog.records if "checked and used" in r.message]


def test_arrays_of_the_framework_are_recorded_together(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES)
    expected = texts(args, 9)
    for path in sidecars(tmp_path).values():
        path.unlink()
    files = npy_files(tmp_path)
    assert texts(args, 9) == expected
    assert npy_files(tmp_path) == files
    found = sidecars(tmp_path)
    assert found.keys() == sets_of(tmp_path)
    assert len({path.stat().st_ino for path in found.values()}) == 1
    record = json.loads(next(iter(found.values())).read_text())
    assert {fields["origin"] for fields in record["sets"].values()} == {"found"}


def test_one_missing_file_rebuilds_its_set_alone(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES)
    expected = texts(args, 9)
    states = {p.name: os.stat(p).st_ino for p in tmp_path.glob("*.npy")}
    lost = next(iter(sorted(tmp_path.glob("c1_valid_1_*_sample_idx.npy"))))
    lost.unlink()
    assert texts(args, 9) == expected
    base = lost.name.removesuffix("_sample_idx.npy")
    changed = {p.name for p in tmp_path.glob("*.npy") if os.stat(p).st_ino != states[p.name]}
    assert changed <= {f"{base}_{name}.npy" for name in FILES}
    assert sidecars(tmp_path).keys() == sets_of(tmp_path)


def test_a_corpus_that_changed_is_noticed_in_every_split(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES)
    texts(args, 2)
    for path in [*tmp_path.glob("c1*.idx"), *tmp_path.glob("c1*.bin")]:
        path.unlink()
    changed = arguments(tmp_path, [SIZES[0], SIZES[1][::-1], SIZES[2]])
    fresh = arguments(tmp_path / "fresh", [SIZES[0], SIZES[1][::-1], SIZES[2]])
    for part in range(3):
        ours, theirs = (batches(one, 2, part) for one in (changed, fresh))
        for a, b in zip(ours, theirs, strict=True):
            np.testing.assert_array_equal(a["text"], b["text"])


def test_damage_after_the_lookup_is_noticed_when_it_is_read(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES)
    expected = texts(args, 9)
    loader = loaders_of(args)["train"]
    for path in tmp_path.glob("*_train_*_shuffle_idx.npy"):
        os.truncate(path, path.stat().st_size - 4)
    rows = [row for batch in loader for row in batch["text"].tolist()][: len(expected)]
    assert rows == expected


def test_damage_of_the_frameworks_arrays_is_refused_when_read(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES)
    texts(args, 2)
    for path in sidecars(tmp_path).values():
        path.unlink()
    loader = loaders_of(args)["train"]
    for path in tmp_path.glob("*_train_*_shuffle_idx.npy"):
        path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(FormatError):
        next(iter(loader))


def test_what_was_not_opened_is_complete_without_the_adapter(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES)
    blend = loaders_of(args)["train"].dataset
    copied = pickle.loads(pickle.dumps(blend))
    adapter.uninstall()
    for one in (blend, copied):
        assert one.dataset_index.size == one.dataset_sample_index.size == one.size
        for dataset in one.datasets:
            held = vars(dataset)
            assert held["shuffle_idx_len"] == held["shuffle_idx"].size - 1
            assert held["sample_idx_len"] == held["sample_idx"].shape[0] - 1
            assert held["doc_idx"].size


def test_blends_of_every_length_are_drawn_by_their_weights(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES, weights=[0.5, 0.2, 0.3])
    blends = [loader.dataset for loader in loaders_of(args).values()]
    weights = normalized(args.weights)
    assert len({blend.size for blend in blends}) > 1
    for blend in blends:
        source, sample = np.zeros(blend.size, np.uint8), np.zeros(blend.size, np.int64)
        megaindex.helpers.build_blending_indices(source, sample, weights, 3, blend.size, False)
        np.testing.assert_array_equal(blend.dataset_index, source)
        np.testing.assert_array_equal(blend.dataset_sample_index, sample)
        with pytest.raises(ValueError, match="read-only"):
            blend.dataset_index[0] = 1


@pytest.fixture
def keeps_blends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blend_module, "_WORTH_KEEPING", 1)


def entries_of(folder: Path) -> list[Path]:
    return sorted(path for path in (folder / blend_module.FOLDER).iterdir() if path.is_dir())


def outcome_of(entry: Path) -> tuple[list[int], list[int]]:
    source, sample = (
        np.load(entry / f"{name}.npy") for name in ("dataset_index", "dataset_sample_index")
    )
    return source.tolist(), sample.tolist()


def outcome(blend: Any) -> tuple[list[int], list[int]]:
    return blend.dataset_index.tolist(), blend.dataset_sample_index.tolist()


def test_a_blend_that_was_kept_is_not_drawn_again(
    neox: Any, tmp_path: Path, keeps_blends: None, monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Its lines in the log are the same; other weights and sizes have entries of their own."""
    args = arguments(tmp_path, SIZES, weights=[0.5, 0.2, 0.3])
    drawn = count_calls(monkeypatch, BlendDraws, "fill")
    before, said = [], []
    for _ in range(2):
        adapter.install()
        blends = [loader.dataset for loader in loaders_of(args).values()]
        before.append([outcome(blend) for blend in blends])
        said.append([line for line in capfd.readouterr().out.split("\n") if "achieved" in line])
        assert len(drawn) == 2  # validation and test have the same length
        kept = [row for row in adapters.status().datasets if row.kind == "BlendableDataset"]
        del blends
    assert before[0] == before[1]
    assert said[0] == said[1]
    assert len(said[0]) == 9
    assert {row.how for row in kept} == {"opened"}
    assert {row.cache for row in kept} == {str(path) for path in entries_of(tmp_path)}
    copied = pickle.loads(pickle.dumps(loaders_of(args)["valid"].dataset))
    assert outcome(copied) == before[0][1]
    adapter.uninstall()
    adapter.install()
    for weights in ([0.5, 0.3, 0.2], [0.5, 0.2, 0.3000001]):
        loaders_of(SimpleNamespace(**{**vars(args), "weights": weights}))
    assert len(entries_of(tmp_path)) == len(drawn) == 6


@pytest.mark.parametrize("damage", ["cut", "counts", "manifest", "other"])
def test_a_damaged_blend_is_drawn_again(
    neox: Any, tmp_path: Path, keeps_blends: None, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES, weights=[0.5, 0.2, 0.3])
    expected = outcome(loaders_of(args)["train"].dataset)
    entry = next(each for each in entries_of(tmp_path) if outcome_of(each) == expected)
    before = entries_of(tmp_path)
    files = {path.name: path.read_bytes() for path in entry.iterdir()}
    if damage == "cut":
        (entry / "dataset_sample_index.npy").write_bytes(files["dataset_sample_index.npy"][:-8])
    elif damage == "counts":  # after a crash of the machine: checksums are compared
        manifest = json.loads(files["manifest.json"])
        counts = np.load(entry / "counts.npy")
        np.save(entry / "counts.npy", counts[::-1])
        body = {name: value for name, value in manifest.items() if name != "checksum"}
        body["boot_id"] = "another"
        checksum = xxhash.xxh3_128_hexdigest(canonical_json(body).encode())
        (entry / "manifest.json").write_text(canonical_json({**body, "checksum": checksum}))
        (entry / "durable").unlink(missing_ok=True)
    elif damage == "manifest":
        (entry / "manifest.json").write_bytes(files["manifest.json"].replace(b"uint8", b"int16"))
    else:
        adapter.install()
        loaders_of(SimpleNamespace(**{**vars(args), "weights": [0.2, 0.5, 0.3]}))
        other = next(each for each in entries_of(tmp_path) if each not in before)
        shutil.rmtree(entry)
        other.rename(entry)
    assert outcome(loaders_of(args)["train"].dataset) == expected
    assert "it is rebuilt" in caplog.text
    assert {name: (entry / name).read_bytes() for name in files} == files


def test_a_blend_is_drawn_where_nothing_can_be_kept(
    neox: Any, tmp_path: Path, keeps_blends: None, caplog: pytest.LogCaptureFixture
) -> None:
    adapter.install()
    args = arguments(tmp_path, SIZES, weights=[0.5, 0.2, 0.3])
    (tmp_path / blend_module.FOLDER).write_text("no folder")
    blend = loaders_of(args)["train"].dataset
    assert caplog.text.count("the blend is drawn anew at each start") == 3
    (tmp_path / blend_module.FOLDER).unlink()
    assert outcome(loaders_of(args)["train"].dataset) == outcome(blend)


def test_one_of_many_draws_a_blend(
    neox: Any, tmp_path: Path, keeps_blends: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = normalized([3.0, 1.0, 2.0, 0.5])
    draws = GreedyDraws(weights)
    drawn = count_calls(monkeypatch, BlendDraws, "fill")
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: blend_module.draw(draws, 1000, str(tmp_path)), range(16)))
    source, sample = np.zeros(1000, np.uint8), np.zeros(1000, np.int64)
    megaindex.helpers.build_blending_indices(source, sample, weights, 4, 1000, False)
    for one in made:
        np.testing.assert_array_equal(one.arrays.dataset_index, source)
        np.testing.assert_array_equal(one.arrays.dataset_sample_index, sample)
        np.testing.assert_array_equal(one.arrays.counts, np.bincount(source, minlength=4))
    assert len(entries_of(tmp_path)) == len(drawn) == 1
    assert sum(one.was_built for one in made) == 1


def test_splits_share_a_mapped_corpus(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    loaders = loaders_of(arguments(tmp_path, SIZES, train_iters=2, weights=[1.0, 2.0, 3.0]))
    parts = [loader.dataset.datasets for loader in loaders.values()]
    for splits in zip(*parts, strict=True):
        assert len({id(dataset.indexed_dataset) for dataset in splits}) == 1


@for_each(
    ("ids", "expected"),
    [
        ([0, 1, 2], range(3)),
        ([5, 6], range(5, 7)),
        ([9], range(9, 10)),
        ([0, 2, 1, 3], None),
        ([0, 0, 2], None),
        ([3, 2, 1], None),
        ([], None),
    ],
)
@for_each("dtype", ["int32", "int64", "uint32"])
def test_ids_are_a_range_where_they_are_one(
    ids: list[int], expected: range | None, dtype: str
) -> None:
    given = np.array(ids, dtype)
    found = as_range(given)
    assert found is given if expected is None else found == expected


def test_a_long_range_has_its_gap_found() -> None:
    given = np.arange(7, 100_007)
    assert as_range(given) == range(7, 100_007)
    given[[70_000, 70_001]] = given[[70_001, 70_000]]
    assert as_range(given) is given


def test_a_function_of_a_group_builds_in_that_group() -> None:
    inner = grouped(_current.get)
    outer, within, again = grouped(lambda: (_current.get(), inner(), _current.get()))()
    assert outer is within is again is not None
    assert inner() is not outer
    assert _current.get() is None


def test_parts_that_are_no_whole_batches_keep_their_places() -> None:
    texts = np.arange(6).reshape(3, 2)
    part = BatchRows({"text": texts[:2]})
    for other in ([{"text": texts[2]}], BatchRows({"text": texts[2:], "label": texts[2:]})):
        rows = join_batches([(np.array([2, 0]), part), (np.array([1]), other)], 3)
        assert not isinstance(rows, BatchRows)
        assert [row["text"].tolist() for row in rows] == [[2, 3], [4, 5], [0, 1]]


def test_datasets_of_a_blend_may_differ_in_length(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    made = [
        loaders_of(arguments(tmp_path, SIZES[:1], seq_length=length))["train"].dataset.datasets[0]
        for length in (16, 8)
    ]
    blend = neox_stand_in.BlendableDataset(made, [0.5, 0.5])
    for k, (source, sample) in enumerate(
        zip(blend.dataset_index, blend.dataset_sample_index, strict=True)
    ):
        expected = made[source][int(sample)]["text"].tolist()
        assert blend[k]["text"].tolist() == expected
        assert len(expected) == (17, 9)[source]
    together = [row["text"].tolist() for row in blend.__getitems__([0, 1, 2, 3])]
    assert together == [blend[k]["text"].tolist() for k in range(4)]
    assert {len(row) for row in together} == {17, 9}


def test_samples_are_the_same_one_by_one_and_together(neox: Any, tmp_path: Path) -> None:
    """Also those that a source does not have, in place of which GPT-NeoX serves others."""
    adapter.install()
    made = loaders_of(arguments(tmp_path, SIZES))["train"].dataset.datasets
    blend = neox_stand_in.BlendableDataset(made, [8.0, 1.0, 1.0])
    ids = list(range(len(blend)))
    sizes = np.array([dataset.shuffle_idx.size for dataset in made])
    assert (blend.dataset_sample_index >= sizes[blend.dataset_index]).any()
    apart = [
        blend.datasets[s][int(k)]["text"].tolist()
        for s, k in zip(blend.dataset_index, blend.dataset_sample_index, strict=True)
    ]
    assert [row["text"].tolist() for row in blend.__getitems__(ids)] == apart
    assert [blend[k]["text"].tolist() for k in ids] == apart
    size = len(ids)
    for few in (ids[:4], ids[2:3], ids[::-1], [size - 1, size, size + 1, 2 * size]):
        found = [row["text"].tolist() for row in blend.__getitems__(few)]
        assert found == [apart[k % size] for k in few]  # as GPT-NeoX, past a full pass too


def _run(folder: str, iterations: int, start: Any, results: Any) -> None:
    for name in [n for n in sys.modules if n.split(".")[0] == "megatron"]:
        del sys.modules[name]
    sys.modules.update(neox_stand_in.modules())
    adapter.install()
    args = arguments(Path(folder), SIZES, train_iters=iterations)
    start.wait()
    results.put((iterations, texts(args, 4)))


@pytest.mark.slow
def test_jobs_that_share_arrays_lose_no_entry(neox: Any, tmp_path: Path) -> None:
    """Runs of different lengths have the same validation and test arrays."""
    arguments(tmp_path, SIZES)  # writes the corpora
    context = multiprocessing.get_context("fork")
    lengths = [2, 3, 2, 3]
    start, results = context.Barrier(len(lengths)), context.Queue()
    jobs = [context.Process(target=_run, args=(str(tmp_path), n, start, results)) for n in lengths]
    for job in jobs:
        job.start()
    served = [results.get(timeout=120) for _ in jobs]
    for job in jobs:
        job.join(120)
        assert job.exitcode == 0
    assert len({str(row) for row in served}) == len(set(lengths))
    found = sidecars(tmp_path)
    assert found.keys() == sets_of(tmp_path)
    for name, path in found.items():
        fields = json.loads(path.read_text())["sets"][name]
        assert fields["origin"] == "built"
        for array, (size, time, inode) in fields["files"].items():
            suffix = dict(
                zip(("document_index", "sample_index", "shuffle_index"), FILES, strict=True)
            )
            status = os.stat(tmp_path / f"{name}_{suffix[array]}.npy")
            assert (status.st_size, status.st_mtime_ns, status.st_ino) == (size, time, inode)
    assert not list(tmp_path.glob("*.tmp.*")) + list(tmp_path.glob("*.claim*"))


def test_epochs_and_other_packings_are_grouped_too(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    for number, changes in enumerate(
        ({"train_epochs": 1, "train_iters": None}, {"pack_impl": "unpacked", "labels": True})
    ):
        folder = tmp_path / str(number)
        args: SimpleNamespace = arguments(folder, SIZES, **changes)
        first = texts(args, 4)
        assert len({p.stat().st_ino for p in sidecars(folder).values()}) == 1
        assert texts(args, 4) == first
