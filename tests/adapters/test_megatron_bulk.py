"""Blends of many datasets: looked up by one listing, drawn while they are built."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
from support.corpora import write_corpus
from support.megatron_blends import assert_equal, build, installed, samples

from megaindex.cache import array_group, sidecar
from megaindex.cache.array_files import Listing
from megaindex.cache.sidecar import parse_sidecar
from megaindex.errors import FormatError, MissingFile

SIZES = (60, 9, 5)
WEIGHTS = [1.0, 2.0, 3.0, 2.0, 1.0]
CONFIG = {"split": "60,20,20", "mid_level_dataset_surplus": 1.0}


def inodes(cache: Path) -> set[int]:
    return {path.stat().st_ino for path in cache.glob("*-GPTDataset-*-megaindex.json")}


def test_weights_by_size_are_drawn_when_sizes_are_known(
    core: Any, corpora: list[str], tmp_path: Path
) -> None:
    config = {"blend": (corpora, None), **CONFIG}
    with installed():
        ours = build(core, SIZES, tmp_path / "ours", **config)
    assert_equal(samples(ours), samples(build(core, SIZES, tmp_path / "theirs", **config)))


@pytest.mark.parametrize("names", [20, 0])
def test_with_and_without_a_listing(
    core: Any,
    corpora: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    names: int,
) -> None:
    """In a directory with too many other files each one is looked for by itself."""
    monkeypatch.setattr(array_group, "_WORTH_LISTING", names)
    config = {"blend": (corpora, WEIGHTS), **CONFIG}
    expected = samples(build(core, SIZES, tmp_path / "theirs", **config))
    with installed():
        for cache in ("ours", "ours", "theirs", "theirs"):
            assert_equal(samples(build(core, SIZES, tmp_path / cache, **config)), expected)
    assert (Listing.of(str(tmp_path / "ours"), at_most=15 * names) is None) == (names == 0)
    assert len(inodes(tmp_path / "ours")) == 1
    assert len(inodes(tmp_path / "theirs")) == (1 if names else 15)  # accepted, and recorded


@pytest.mark.parametrize("damage", ["cut", "removed"])
def test_damage_that_a_listing_does_not_show(
    core: Any, corpora: list[str], tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    """Noticed when the arrays are mapped; what is ours is built again."""
    config = {"blend": (corpora, WEIGHTS), **CONFIG}
    expected = samples(build(core, SIZES, tmp_path / "theirs", **config))
    with installed():
        build(core, SIZES, tmp_path / "ours", **config)
        ours = build(core, SIZES, tmp_path / "ours", **config)
        for victim in (tmp_path / "ours").glob("*-GPTDataset-*-sample_index.npy"):
            if damage == "cut":
                os.truncate(victim, victim.stat().st_size - 8)
            else:
                victim.unlink()
        with caplog.at_level(logging.WARNING, "megaindex"):
            assert_equal(samples(ours), expected)
        assert "files are missing or of another size" in caplog.text
        assert_equal(samples(build(core, SIZES, tmp_path / "ours", **config)), expected)


def test_damage_of_what_is_not_ours(core: Any, corpora: list[str], tmp_path: Path) -> None:
    config = {"blend": (corpora, WEIGHTS), **CONFIG}
    build(core, SIZES, tmp_path, **config)
    with installed():
        build(core, SIZES, tmp_path, **config)  # accepted and recorded
        ours = build(core, SIZES, tmp_path, **config)
        [train, *_] = ours
        victim = next(tmp_path.glob(f"{train.datasets[0].unique_description_hash}*shuffle*"))
        whole = victim.read_bytes()
        victim.write_bytes(whole[:-4])
        with pytest.raises(FormatError, match="may be truncated or incomplete"):
            _ = train.datasets[0].shuffle_index
        assert victim.read_bytes() == whole[:-4]
        victim.write_bytes(whole)
        assert train.datasets[0].shuffle_index.size == len(train.datasets[0])


def test_damage_after_the_corpus_changed(core: Any, tmp_path: Path) -> None:
    """Arrays of another corpus do not take the place of those that are gone."""
    prefixes = [str(tmp_path / f"c{number}") for number in range(2)]
    for prefix in prefixes:
        write_corpus(Path(prefix), [40] * 30)
    config = {"blend": (prefixes, [1.0, 1.0]), "split": "100", "mid_level_dataset_surplus": 1.0}
    cache = tmp_path / "cache"
    with installed():
        build(core, SIZES, cache, **config)
        [train, *_] = build(core, SIZES, cache, **config)
        for suffix in (".bin", ".idx"):
            os.unlink(prefixes[0] + suffix)
        write_corpus(Path(prefixes[0]), [41] * 30)
        first = train.datasets[0]
        next(cache.glob(f"{first.unique_description_hash}*sample_index.npy")).unlink()
        with pytest.raises(MissingFile, match="sample_index"):
            _ = first.sample_index
        for dataset in (first, *train.datasets[1:]):  # else `uninstall` would map them
            vars(dataset).pop("_megaindex")


def power_loss(monkeypatch: pytest.MonkeyPatch, path: Path) -> None:
    """Another boot, after which all elements of an array read as zeros."""
    monkeypatch.setattr(sidecar, "boot_id", lambda: "another boot")
    monkeypatch.setattr(sidecar, "_read_last", None)
    status = path.stat()
    with open(path, "r+b") as file:
        file.seek(128)
        file.write(bytes(status.st_size - 128))
    os.utime(path, ns=(0, status.st_mtime_ns))


@pytest.mark.parametrize("array", ["document_index", "sample_index", "shuffle_index"])
def test_a_power_loss_is_noticed_and_mended(
    core: Any,
    corpora: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    array: str,
) -> None:
    """Of all sets the damaged one is built again; the others are noted, and not read again."""
    due: list[Any] = []
    monkeypatch.setattr(sidecar, "sync_later", due.append)
    config = {"blend": (corpora, WEIGHTS), **CONFIG}
    with installed():
        expected = samples(build(core, SIZES, tmp_path, **config))
        due.clear()
        victim = sorted(tmp_path.glob(f"*-GPTDataset-train-{array}.npy"))[1]
        power_loss(monkeypatch, victim)
        with caplog.at_level(logging.WARNING, "megaindex"):
            assert_equal(samples(build(core, SIZES, tmp_path, **config)), expected)
        named = {record.getMessage() for record in caplog.records}
        base = str(victim).removesuffix(f"-{array}.npy")
        assert named == {f"{base}: {array} lost what was written; rebuilt"}
        for sync in due:
            sync()
        monkeypatch.setattr(sidecar, "boot_id", lambda: "one more")
        monkeypatch.setattr(sidecar, "damaged_arrays", None)  # nothing is read
        assert_equal(samples(build(core, SIZES, tmp_path, **config)), expected)
    marks = {path.stat().st_ino: path for path in tmp_path.glob("*-megaindex.json")}.values()
    durable = [parse_sidecar(path.read_bytes()).durable for path in marks]
    assert sorted(durable)[:-1] == ["1"] * 4  # three blends and the set that was built again
    assert sorted(durable, key=len)[-1].count("0") == 1  # whose old record nobody reads any more


def test_a_power_loss_of_what_is_not_ours(
    core: Any, corpora: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sidecar, "sync_later", lambda sync: None)
    config = {"blend": (corpora, WEIGHTS), **CONFIG}
    build(core, SIZES, tmp_path, **config)
    with installed():
        build(core, SIZES, tmp_path, **config)
        victim = sorted(tmp_path.glob("*-GPTDataset-train-sample_index.npy"))[1]
        power_loss(monkeypatch, victim)
        before = victim.read_bytes()
        with pytest.raises(FormatError, match="not that of the checksum recorded"):
            build(core, SIZES, tmp_path, **config)
    assert victim.read_bytes() == before


def test_a_blend_is_opened_when_it_is_read(core: Any, corpora: list[str], tmp_path: Path) -> None:
    config = {"blend": (corpora, WEIGHTS), **CONFIG}
    with installed():
        build(core, SIZES, tmp_path, **config)
        sources = build(core, SIZES, tmp_path, **config)[0].datasets
        assert not any("shuffle_index" in vars(d) or "index" in vars(d.dataset) for d in sources)


def test_changes_to_a_sample_stay_with_it(core: Any, corpora: list[str], tmp_path: Path) -> None:
    config = {"blend": ([corpora[0]], None), **CONFIG}
    theirs = samples(build(core, SIZES, tmp_path / "cache", **config))
    with installed():
        ours = build(core, SIZES, tmp_path / "cache", **config)
        for dataset in ours:
            for number in range(min(3, len(dataset))):
                dataset[number]["loss_mask"].zero_()
                dataset[number]["tokens"].zero_()
        assert_equal(samples(ours), theirs)
