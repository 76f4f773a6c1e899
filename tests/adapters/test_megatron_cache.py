"""One cache for Megatron with and without the adapter: what is accepted, rebuilt and refused."""

from __future__ import annotations

import errno
import json
import logging
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.megatron_blends import (
    assert_equal,
    build,
    files,
    flat,
    installed,
    places,
    samples,
)
from support.megatron_dataset import Tokenizer

import megaindex
from megaindex.errors import FormatError, InvalidArgument

SPLIT = {"split": "60,20,20"}
SIZES = (60, 9, 5)


@pytest.mark.parametrize("in_bulk", [True, False])
def test_a_changed_corpus_is_noticed(
    core: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, in_bulk: bool
) -> None:
    """Arrays that were built here are rebuilt, those of Megatron are refused and left alone."""
    count = 3 if in_bulk else 1
    prefixes = [str(tmp_path / f"c{i}") for i in range(count)]
    for prefix in prefixes:
        write_corpus(Path(prefix), [40] * 30)
    config = {"blend": (prefixes, None), "split": "100"}
    build(core, SIZES, tmp_path / "theirs", **config)
    with installed():
        build(core, SIZES, tmp_path / "ours", **config)
        build(core, SIZES, tmp_path / "found", **config)
    build(core, SIZES, tmp_path / "theirs", **config)  # hit: Megatron checks nothing

    for suffix in (".bin", ".idx"):
        os.unlink(prefixes[0] + suffix)
    write_corpus(Path(prefixes[0]), [41] * 30)
    before = files(tmp_path / "theirs")
    with installed():
        with caplog.at_level(logging.WARNING, "megaindex"):
            ours = build(core, SIZES, tmp_path / "ours", **config)
        assert "rebuilt" in caplog.text
        with pytest.raises(FormatError, match=r"-train-\*: these index arrays were written by the"):
            build(core, SIZES, tmp_path / "theirs", **config)
    assert files(tmp_path / "theirs") == before
    assert_equal(samples(ours), samples(build(core, SIZES, tmp_path / "new", **config)))


def test_found_arrays_stay_theirs(core: Any, tmp_path: Path) -> None:
    """Accepted once, recorded, and still refused and kept when the corpus changes later."""
    prefix, cache = str(tmp_path / "c"), tmp_path / "cache"
    write_corpus(Path(prefix), [40] * 30)
    config = {"blend": ([prefix], None), "split": "100"}
    build(core, SIZES, cache, **config)
    before = files(cache)
    with installed():
        build(core, SIZES, cache, **config)
        [sidecar] = cache.glob("*-megaindex.json")
        assert '"origin":"found"' in sidecar.read_text()
        for suffix in (".bin", ".idx"):
            os.unlink(prefix + suffix)
        write_corpus(Path(prefix), [41] * 30)
        with pytest.raises(FormatError, match="the corpus changed after they were built"):
            build(core, SIZES, cache, **config)
    assert files(cache) == before


def test_a_touched_corpus_is_the_same(core: Any, tmp_path: Path) -> None:
    prefix, cache = str(tmp_path / "c"), tmp_path / "cache"
    write_corpus(Path(prefix), [40] * 30)
    config = {"blend": ([prefix, prefix], None), "split": "100"}
    with installed():
        build(core, SIZES, cache, **config)
        before = {path: path.stat().st_mtime_ns for path in cache.iterdir()}
        os.utime(prefix + ".idx", (1, 1))
        build(core, SIZES, cache, **config)
    assert {path: path.stat().st_mtime_ns for path in cache.iterdir()} == before


@pytest.mark.parametrize(
    "setting", ["add_extra_token_to_sequence", "drop_last_partial_validation_sequence"]
)
def test_settings_that_names_omit(core: Any, tmp_path: Path, setting: str) -> None:
    """Megatron serves one setting's arrays for the other's."""
    prefix = str(tmp_path / "c")
    write_corpus(Path(prefix), [7] * 32)
    config = {"blend": ([prefix], None), "split": "50,50,0"}
    expected = {
        value: samples(build(core, SIZES, tmp_path / f"{value}", **config, **{setting: value}))
        for value in (True, False)
    }
    with installed():
        for value in (True, False, True):
            ours = build(core, SIZES, tmp_path / "one", **config, **{setting: value})
            assert_equal(samples(ours), expected[value])


def remove_arrays(cache: Path) -> None:
    for path in cache.iterdir():
        if not path.name.endswith("-megaindex.json"):
            path.unlink()


@pytest.mark.parametrize("count", [1, 2])
def test_a_sidecar_is_not_of_arrays_in_their_place(core: Any, tmp_path: Path, count: int) -> None:
    """Megatron builds arrays of another setting where those of a sidecar were removed."""
    prefixes = [str(tmp_path / f"c{number}") for number in range(count)]
    for prefix in prefixes:
        write_corpus(Path(prefix), [7] * 34)
    config = {"blend": (prefixes, None), "split": "100", "mid_level_dataset_surplus": 1.0}
    cache = tmp_path / "cache"
    with installed():
        [ours, *_] = build(core, SIZES, cache, **config, add_extra_token_to_sequence=True)
        shape = getattr(ours, "datasets", [ours])[0].sample_index.shape
    remove_arrays(cache)
    others = build(core, SIZES, cache, **config, add_extra_token_to_sequence=False)
    assert getattr(others[0], "datasets", others)[0].sample_index.shape == shape
    before = files(cache)
    with installed():
        with pytest.raises(FormatError, match="written by the framework, not by megaindex"):
            samples(build(core, SIZES, cache, **config, add_extra_token_to_sequence=True))
        ours = build(core, SIZES, cache, **config, add_extra_token_to_sequence=False)
        assert_equal(samples(ours), samples(others))
    assert files(cache) == before


def test_found_arrays_that_were_replaced_are_found_anew(core: Any, tmp_path: Path) -> None:
    """The corpus changed, and Megatron has built its arrays again."""
    prefix, cache = str(tmp_path / "c"), tmp_path / "cache"
    config = {"blend": ([prefix], None), "split": "100"}
    for length in (40, 33):
        for suffix in (".bin", ".idx"):
            Path(prefix + suffix).unlink(missing_ok=True)
        write_corpus(Path(prefix), [length] * 30)
        theirs = samples(build(core, SIZES, cache, **config))
        with installed():
            assert_equal(samples(build(core, SIZES, cache, **config)), theirs)
        remove_arrays(cache)


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENOENT])
@pytest.mark.parametrize("count", [1, 2])
def test_acceptance_that_cannot_be_recorded(
    core: Any,
    corpora: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    count: int,
    number: int,
) -> None:
    """In a read-only directory, or where a builder tidied up meanwhile, arrays are used as well."""
    config = {"blend": (corpora[:count], None), **SPLIT, "mid_level_dataset_surplus": 1.0}
    theirs = samples(build(core, SIZES, tmp_path, **config))
    before = files(tmp_path)

    def rename(source: str, name: str) -> None:
        raise OSError(number, os.strerror(number), name)

    monkeypatch.setattr(os, "rename", rename)
    with installed(), caplog.at_level(logging.WARNING, "megaindex"):
        assert_equal(samples(build(core, SIZES, tmp_path, **config)), theirs)
    assert "these arrays are used, and will be checked again" in caplog.text
    assert files(tmp_path) == before


def test_damaged_arrays(core: Any, corpora: list[str], tmp_path: Path) -> None:
    config = {"blend": (corpora[:2], None), **SPLIT}
    expected = samples(build(core, SIZES, tmp_path, **config))
    victim = next(tmp_path.glob("*-GPTDataset-train-sample_index.npy"))
    whole = victim.read_bytes()
    victim.write_bytes(whole[:-8])
    with installed():
        with pytest.raises(FormatError, match="may be truncated or incomplete"):
            build(core, SIZES, tmp_path, **config)
        victim.write_bytes(whole[:-40] + bytes(40))
        with pytest.raises(FormatError, match="remove the files of that name"):
            build(core, SIZES, tmp_path, **config)
        for path in tmp_path.glob(victim.name.replace("sample_index.npy", "*")):
            path.unlink()
        assert_equal(samples(build(core, SIZES, tmp_path, **config)), expected)
        victim.write_bytes(whole[:-8])  # of a set that is ours by now
        assert_equal(samples(build(core, SIZES, tmp_path, **config)), expected)
        for sidecar in tmp_path.glob("*.json"):
            sidecar.unlink()
            sidecar.write_text("{")
        assert_equal(samples(build(core, SIZES, tmp_path, **config)), expected)


def test_a_page_that_no_sampled_row_lies_in(
    core: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of arrays without a sidecar every row is compared with the one before it."""
    prefix, cache = str(tmp_path / "c"), tmp_path / "cache"
    write_corpus(Path(prefix), [4000] * 1000)
    config = {"blend": ([prefix], None), "split": "100"}
    build(core, (None, None, None), cache, **config)
    victim = next(cache.glob("*-train-sample_index.npy"))
    rows = np.load(victim)
    assert len(rows) > 100_000
    middle = len(rows) // 2 + 40
    for begin, end, now in ((middle, middle + 100, 0), (2, 3, rows[1]), (-3, -2, rows[-2])):
        damaged = rows.copy()
        damaged[begin:end] = now
        np.save(victim, damaged)
        caplog.clear()
        with installed(), pytest.raises(FormatError, match="written by the framework"):
            build(core, (None, None, None), cache, **config)
        assert "sample_index must increase from row to row" in caplog.text


@pytest.mark.parametrize(
    ("name", "place", "value", "reason"),
    [
        ("shuffle", 0, 1, "shuffle_index must contain each of"),
        ("shuffle", 0, 2**31, "shuffle_index must contain each of"),
        ("shuffle", 0, 124, "shuffle_index must contain each of 124 samples once"),
        ("document", 0, 1, "document_index must contain each of"),
        ("document", 0, -1, "document_index must contain each of"),
        ("document", 0, 50, "document_index must contain each of"),
        ("sample", (0, 0), -1, "sample_index has rows outside document_index"),
        ("sample", (0, 1), -1, "sample_index has rows outside document_index"),
        ("sample", (-1, 0), 51, "sample_index has rows outside document_index"),
        ("sample", (0, 1), 1, "sample 0 must have 16 tokens"),
        ("sample", (1, 0), 50, "samples that end outside their last document"),
        ("sample", (2, 1), 40, "samples that end outside their last document"),
        ("sample", (2, 1), 39, "sample 1 must have 16 tokens, got 23"),
    ],
)
def test_foreign_arrays_are_checked(
    core: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, place: Any, value: int,
    reason: str,
) -> None:  # fmt: skip
    write_corpus(tmp_path / "c", [40] * 50)
    config = {"blend": ([str(tmp_path / "c")], None), "split": "100"}
    build(core, (None, None, None), tmp_path / "cache", **config)
    victim = next((tmp_path / "cache").glob(f"*-train-{name}_index.npy"))
    array = np.load(victim)
    array[place] = value if value != 1 or name == "sample" else array[1]
    np.save(victim, array)
    with installed(), pytest.raises(FormatError, match="written by the framework"):
        build(core, (None, None, None), tmp_path / "cache", **config)
    assert reason in caplog.text


def test_foreign_blends_are_checked(core: Any, corpora: list[str], tmp_path: Path) -> None:
    config = {"blend": (corpora[:3], [1.0, 2.0, 3.0]), **SPLIT, "mid_level_dataset_surplus": 0.5}
    build(core, SIZES, tmp_path, **config)
    victim = next(tmp_path.glob("*-BlendedDataset-train-dataset_index.npy"))
    drawn = np.load(victim)
    np.save(victim, np.roll(drawn, 1))
    with installed(), pytest.raises(FormatError, match="remove the files of that name"):
        build(core, SIZES, tmp_path, **config)


@pytest.mark.parametrize("source", [-1, 3])
def test_foreign_blends_of_other_sources_are_refused(
    core: Any, corpora: list[str], tmp_path: Path, source: int
) -> None:
    """Without weights and sizes the number of draws of each source is compared."""
    config = {"blend": (corpora[:3], None), **SPLIT}
    build(core, (None, None, None), tmp_path, **config)
    victim = next(tmp_path.glob("*-BlendedDataset-train-dataset_index.npy"))
    drawn = np.load(victim)
    drawn[-1] = source
    np.save(victim, drawn)
    with installed(), pytest.raises(FormatError, match="remove the files of that name"):
        build(core, (None, None, None), tmp_path, **config)


def test_overdrawn_sources_are_extended(core: Any, tmp_path: Path) -> None:
    """Where Megatron raises IndexError, the source is built as long as the blend draws it."""
    prefixes = [str(tmp_path / f"c{i}") for i in range(40)]
    for prefix in prefixes:
        write_corpus(Path(prefix), [17])  # a sample and a little more in each epoch
    weights = np.random.default_rng(0).lognormal(0, 1, 40).tolist()
    config = {"blend": (prefixes, weights), "split": "100", "mid_level_dataset_surplus": 0.005}
    sizes = (320, 0, 0)
    with pytest.raises(IndexError, match="oversamples"):
        build(core, sizes, tmp_path / "theirs", **config)
    with installed():
        for cache in (tmp_path / "ours", tmp_path / "ours", None):  # cold, warm, in memory
            blend = build(core, sizes, cache, **config)[0]
            drawn = np.bincount(blend.dataset_index, minlength=40)
            assert all(len(d) >= n for d, n in zip(blend.datasets, drawn, strict=True))
            assert len(samples([blend])[0]) == len(places(blend))
    with pytest.raises(IndexError, match="oversamples"):  # at its start, as without megaindex
        build(core, sizes, tmp_path / "ours", **config)
    if "mid_level_dataset_surplus" not in core.GPTDatasetConfig.__dataclass_fields__:
        return  # 0.12 has no wider surplus to compare with
    wide = {**config, "mid_level_dataset_surplus": 1.0}
    theirs = build(core, sizes, tmp_path / "wide", **wide)[0]
    np.testing.assert_array_equal(blend.dataset_index, theirs.dataset_index)
    np.testing.assert_array_equal(blend.dataset_sample_index, theirs.dataset_sample_index)


def test_caches_beside_the_data(core: Any, corpora: list[str], tmp_path: Path) -> None:
    """Without path_to_cache Megatron puts GPTDataset's arrays beside each corpus."""
    prefixes = []
    for number in range(2):
        write_corpus(tmp_path / f"c{number}", [30] * 20)
        prefixes.append(str(tmp_path / f"c{number}"))
    config = {"blend": (prefixes, None), "split": "100"}
    with installed():
        ours = samples(build(core, SIZES, None, **config))
    assert len(files(tmp_path / "c1/cache/GPTDataset_indices")) == 4
    assert_equal(ours, samples(build(core, SIZES, None, **config)))


@pytest.mark.parametrize("mode", ["defer_npy_index_mmap", "fast_cache_load", "sequences"])
def test_loading_without_looking(core: Any, corpora: list[str], tmp_path: Path, mode: str) -> None:
    """Megatron's modes that trust a complete cache, on a cache that megaindex built."""
    if "defer_npy_index_mmap" not in core.GPTDatasetConfig.__dataclass_fields__:
        pytest.skip("this megatron-core has no such mode")
    blend = (corpora[:1] + corpora[2:3], [0.5, 0.5])  # int32, as the tokenizer's vocabulary has it
    config: dict[str, Any] = {
        "blend_per_split": [blend, blend, None],
        "mid_level_dataset_surplus": 1.0,
    }
    with installed():
        expected = samples(build(core, (40, 20, 0), tmp_path, **config))

    class Wide(Tokenizer):
        vocab_size = 70_000

    config["tokenizer"] = Wide()
    modes: dict[str, Any] = {"defer_npy_index_mmap": True}
    if mode != "defer_npy_index_mmap":
        modes["fast_cache_load"] = True
    if mode == "sequences":
        low_level = [megaindex.IndexedDataset(prefix) for prefix in blend[0]]
        modes["sequences_per_dataset"] = {
            d.path_prefix: (len(d), d.document_indices.size) for d in low_level
        }
    with installed():
        ours = build(core, (40, 20, 0), tmp_path, **config, **modes)
        assert_equal(samples(ours), expected)
        assert_equal([d.__getitems__(places(d)) for d in flat(ours)], expected)


def test_a_part_of_a_split_without_tokens(core: Any, tmp_path: Path) -> None:
    """Where samples are asked of it Megatron counts epochs for ever, else it reads outside of its
    arrays."""
    write_corpus(tmp_path / "c", [30] * 20)
    config = {"blend": ([str(tmp_path / "c")], None), "split": "98,1,1"}
    with installed():
        for _ in range(2):  # cold, warm
            ours = build(core, (None,) * 3, tmp_path / "ours", **config)
            assert [len(dataset) for dataset in ours] == [37, 0, 0]
            assert ours[1].sample_index.tolist() == [[0, 0]]
        # --eval-iters 0: none are asked of it, and none are there
        ours = build(core, (37, 0, 0), tmp_path / "none", **config)
        assert [len(dataset) for dataset in ours] == [37, 0, 0]
        with pytest.raises(InvalidArgument, match="9 samples are requested of documents without"):
            build(core, SIZES, tmp_path, **config)


def test_a_corpus_that_a_blend_has_twice_is_built_once(
    core: Any, corpora: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with installed():
        for built in (3, 0):
            train = build(core, SIZES, tmp_path, blend=([corpora[0]] * 2, [0.5, 0.5]), **SPLIT)[0]
            assert f"6 datasets of a blend, {built} of them built" in caplog.text
            one, other = (dataset.shuffle_index for dataset in train.datasets)
            np.testing.assert_array_equal(one, other)
    assert not [record for record in caplog.records if record.levelno > logging.INFO]


def test_sidecars_of_a_blend_are_one_file(core: Any, corpora: list[str], tmp_path: Path) -> None:
    with installed():
        build(core, SIZES, tmp_path, blend=(corpora, None), **SPLIT)
    sidecars = list(tmp_path.glob("*-GPTDataset-*-megaindex.json"))
    assert len(sidecars) == 15
    assert len({path.stat().st_ino for path in sidecars}) == 1
    sets = json.loads(sidecars[0].read_text())["sets"]
    assert {f"{name}-megaindex.json" for name in sets} == {path.name for path in sidecars}
    assert not list(tmp_path.glob("*.tmp.*")) + list(tmp_path.glob("*.claim*"))
