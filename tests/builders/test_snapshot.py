"""A blend that was built before opens at once, its sources when they are read, and never stale."""

from __future__ import annotations

import json
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

import megaindex
from megaindex import EpochOrder, MegatronOrder, PackedOrder
from megaindex.cache import fingerprint as records
from megaindex.errors import InvalidArgument, StorageError
from megaindex.index.array_index import scan, served_tokens
from megaindex.index.blended_index import BlendedIndex, LazyIndex
from megaindex.loader import MappedTokens

S = 16

Built = tuple[list[str], Path, list[list[int]]]


def write_corpora(folder: Path) -> list[str]:
    rng = np.random.default_rng(2)
    for name in "abcde":
        write_corpus(folder / name, rng.integers(1, 90, 40))
    return [str(folder / name) for name in "abcde"]


@pytest.fixture
def prefixes(tmp_path: Path) -> list[str]:
    return write_corpora(tmp_path)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A cache that the tests copy, and what its blend serves."""
    folder = tmp_path_factory.mktemp("built")
    prefixes = write_corpora(folder)
    return prefixes, folder / "cache", served(blend_of(prefixes, folder / "cache"))


def blend_of(prefixes: list[str], cache: Path, **settings: Any) -> BlendedIndex:
    request = {"num_samples": 60, "weights": [5, 4, 3, 2, 1], "sequence_length": S, "seed": 3}
    return megaindex.build_blend(
        prefixes, cache_dir=cache, variance_buffer=1.5, **{**request, **settings}
    )


def served(index: BlendedIndex, samples: object = None) -> list[list[int]]:
    ids = np.arange(60) if samples is None else np.array(samples)
    tokens = np.empty((ids.size, S), np.int64)
    MappedTokens(index.datasets).read(index.locate(ids), tokens, pad_id=-1)
    return tokens.tolist()


@pytest.mark.parametrize("order", ["megatron", "neox", "epoch"])
def test_a_warm_blend_opens_what_a_batch_reads(
    prefixes: list[str], tmp_path: Path, order: str
) -> None:
    settings: dict[str, Any] = {"order": order}
    cold = blend_of(prefixes, tmp_path / "cache", **settings)
    warm = blend_of(prefixes, tmp_path / "cache", **settings)
    assert not any(dataset.is_open for dataset in warm.datasets)
    assert served(warm, [0]) == served(cold, [0])
    assert sum(dataset.is_open for dataset in warm.datasets) == 1
    assert served(warm) == served(cold)
    assert warm.num_epochs == cold.num_epochs
    assert warm.tokens_per_epoch == cold.tokens_per_epoch


def test_threads_and_processes_may_share_it(prefixes: list[str], tmp_path: Path) -> None:
    expected = served(blend_of(prefixes, tmp_path / "cache"))
    warm = blend_of(prefixes, tmp_path / "cache")
    reader = MappedTokens(warm.datasets)

    def one(sample: int) -> list[int]:
        tokens = np.empty((1, S), np.int64)
        reader.read(warm.locate([sample]), tokens, pad_id=-1)
        return list(tokens[0].tolist())

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(one, range(60))) == expected
    again = pickle.loads(pickle.dumps(blend_of(prefixes, tmp_path / "cache")))
    assert served(again) == expected


def test_samples_of_documents_are_found_in_each_source(prefixes: list[str], tmp_path: Path) -> None:
    blend_of(prefixes, tmp_path / "cache")
    warm = blend_of(prefixes, tmp_path / "cache")
    documents = np.arange(0, 40, 3)
    for source in range(5):
        found, expected = (
            sorted(zip(*(column.tolist() for column in each), strict=True))
            for each in (served_tokens(warm, documents, source), scan(warm, documents, source))
        )
        assert found == expected != []


def test_a_source_of_another_size_is_refused(prefixes: list[str], tmp_path: Path) -> None:
    blend_of(prefixes, tmp_path / "cache")
    source = blend_of(prefixes, tmp_path / "cache").indices[1]
    assert isinstance(source, LazyIndex)
    size = source.num_samples
    for recorded in (size - 1, size + 1):
        with pytest.raises(StorageError) as caught:
            replace(source, num_samples=recorded).locate([0])
        assert str(caught.value) == (
            f"{prefixes[1]}: the index must have {recorded} samples, as when the blend was built, "
            f"got {size}; build the blend again"
        )


def test_a_changed_source_is_noticed(prefixes: list[str], tmp_path: Path) -> None:
    before = served(blend_of(prefixes, tmp_path / "cache"))
    for suffix in (".bin", ".idx"):
        Path(prefixes[1] + suffix).unlink()
    write_corpus(Path(prefixes[1]), np.full(40, 45))
    after = blend_of(prefixes, tmp_path / "cache")
    assert all(dataset.is_open for dataset in after.datasets)
    assert served(after) != before
    assert served(after) == served(blend_of(prefixes, tmp_path / "other"))


def test_a_source_that_changes_before_it_is_read_is_refused(
    prefixes: list[str], tmp_path: Path
) -> None:
    blend_of(prefixes, tmp_path / "cache")
    warm = blend_of(prefixes, tmp_path / "cache")
    for prefix in prefixes:
        for suffix in (".bin", ".idx"):
            Path(prefix + suffix).unlink()
        write_corpus(Path(prefix), np.full(7, 45))
    with pytest.raises(StorageError, match="changed since it was opened"):
        served(warm)


@pytest.mark.parametrize("damage", ["{", '{"sources": [], "checksum": ""}', "[]"])
def test_a_damaged_snapshot_is_not_believed(
    prefixes: list[str], tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    expected = served(blend_of(prefixes, tmp_path / "cache"))
    (snapshot,) = (tmp_path / "cache").glob("blend-*.json")
    snapshot.write_text(damage)
    index = blend_of(prefixes, tmp_path / "cache")
    assert all(dataset.is_open for dataset in index.datasets)
    assert served(index) == expected
    assert "is damaged; all sources are opened again" in caplog.text


def test_a_snapshot_written_with_spaces_is_read(prefixes: list[str], tmp_path: Path) -> None:
    expected = served(blend_of(prefixes, tmp_path / "cache"))
    (snapshot,) = (tmp_path / "cache").glob("blend-*.json")
    snapshot.write_text(json.dumps(json.loads(snapshot.read_text()), indent=1))
    index = blend_of(prefixes, tmp_path / "cache")
    assert not any(dataset.is_open for dataset in index.datasets)
    assert served(index) == expected


def test_a_snapshot_with_a_changed_digit_is_not_believed(
    prefixes: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    blend_of(prefixes, tmp_path / "cache")
    (snapshot,) = (tmp_path / "cache").glob("blend-*.json")
    text = snapshot.read_text()
    samples = json.loads(text)["sources"][0]["num_samples"]
    snapshot.write_text(text.replace(f'"num_samples":{samples}', f'"num_samples":{samples + 1}', 1))
    index = blend_of(prefixes, tmp_path / "cache")
    assert all(dataset.is_open for dataset in index.datasets)
    assert "is damaged; all sources are opened again" in caplog.text


@pytest.mark.parametrize("value", [None, -1, 1.5, [], [1, 2, 3, 4, 5, 6, "", ""], 2**63, {}])
@pytest.mark.parametrize(
    "field", ["prefix", "identity", "order", "entry", "num_samples", "num_epochs", "stamp"]
)
def test_a_forged_snapshot_is_not_believed(
    built: Built, tmp_path: Path, field: str, value: object
) -> None:
    """One whose checksum is that of what it says."""
    prefixes, cache, expected = built
    shutil.copytree(cache, tmp_path / "cache")
    (snapshot,) = (tmp_path / "cache").glob("blend-*.json")
    stored = json.loads(snapshot.read_text())["sources"]
    stored[0][field] = value
    records.write_records(snapshot, stored)
    index = blend_of(prefixes, tmp_path / "cache")
    assert all(dataset.is_open for dataset in index.datasets)
    assert served(index) == expected


def test_an_entry_that_is_gone_is_built_again(prefixes: list[str], tmp_path: Path) -> None:
    expected = served(blend_of(prefixes, tmp_path / "cache"))
    warm = blend_of(prefixes, tmp_path / "cache")
    for manifest in (tmp_path / "cache").glob("*/manifest.json"):
        manifest.unlink()
    assert served(warm) == expected


def test_other_requests_have_other_snapshots(prefixes: list[str], tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    requests: list[dict[str, Any]] = [{}, {"seed": 4}, {"num_samples": 61}, {"sequence_length": 8}]
    for number, request in enumerate(requests, 1):
        blend_of(prefixes, cache, **request)
        assert len(list(cache.glob("blend-*.json"))) == number
    blend_of(prefixes, cache, documents=np.arange(30))  # an array is no plain value
    assert len(list(cache.glob("blend-*.json"))) == len(requests)


def test_an_index_of_another_size_than_recorded_is_not_read(
    prefixes: list[str], tmp_path: Path
) -> None:
    """The draws of the blend are of the size that it had."""
    cache = tmp_path / "cache"
    blend_of(prefixes, cache)
    (path,) = cache.glob("blend-*-megaindex.json")
    stored = records.load_records(path)
    stored[0]["num_samples"] += 1
    records.write_records(path, stored)
    with pytest.raises(StorageError, match=r"a: the index must have \d+ samples"):
        served(blend_of(prefixes, cache))


@pytest.mark.parametrize("wrong", [-1, 5])
@pytest.mark.parametrize("order", ["megatron", "epoch"])
def test_a_source_that_does_not_exist_is_not_read(
    prefixes: list[str], tmp_path: Path, order: str, wrong: int
) -> None:
    """Of a blend whose sources are open, and of one that opens them when they are read."""
    for _ in range(2):
        index = blend_of(prefixes, tmp_path / "cache", order=order)
        which = index.dataset_index.copy()
        which[7] = wrong
        damaged = replace(index, dataset_index=which)
        with pytest.raises(InvalidArgument, match=f"dataset_index: an entry is {wrong}, the blend"):
            damaged.locate([7])
        assert served(damaged, [6]) == served(index, [6])


def test_a_blend_of_open_datasets_has_no_snapshot(prefixes: list[str], tmp_path: Path) -> None:
    """They may map files that were replaced since, which the stamps of now would hide."""
    cache = tmp_path / "cache"
    opened: Any = [megaindex.IndexedDataset(prefixes[0]), *prefixes[1:]]
    expected = served(blend_of(opened, cache))
    assert list(cache.iterdir())
    assert not list(cache.glob("blend-*"))
    assert served(blend_of(prefixes, cache)) == expected
    again = blend_of(opened, cache)
    assert again.datasets[0] is opened[0]
    assert all(dataset.is_open for dataset in again.datasets)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (MegatronOrder(separate_final_epoch="always"), MegatronOrder(separate_final_epoch="never")),
        (EpochOrder(), EpochOrder(left_over="carry")),
        (PackedOrder(max_documents=2), PackedOrder(max_documents=3)),
    ],
)
def test_settings_of_the_order_decide_the_snapshot(
    prefixes: list[str], tmp_path: Path, one: Any, other: Any
) -> None:
    request: dict[str, Any] = {"num_samples": 400, "cache_dir": tmp_path / "cache"}
    request |= {"weights": [5, 4, 3, 2, 1], "sequence_length": S, "seed": 3}
    for order in (one, other, one):
        index = megaindex.build_blend(prefixes, order=order, **request)
        alone = megaindex.build_blend(prefixes, order=order, **{**request, "cache_dir": None})
        ids = np.arange(400)
        for found, expected in zip(index.locate(ids), alone.locate(ids), strict=True):
            np.testing.assert_array_equal(found, expected)
    assert len(list((tmp_path / "cache").glob("blend-*"))) == 2
