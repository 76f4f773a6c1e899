"""`megaindex verify` of pairs and caches: broken rules are found, counted and located."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.builders.recipe import open_recipe
from megaindex.cli import main
from megaindex.corpus.inspect import inspect
from megaindex.errors import InvalidArgument, MissingFile
from megaindex.format.findings import Finding
from megaindex.settings.recipe_file import read_recipe
from megaindex.verify import pair
from megaindex.verify.verify import verify, verify_all

LENGTHS = [5, 0, 7, 9, 3]
COUNT = len(LENGTHS)
POINTERS = 34 + 4 * COUNT
BOUNDS = POINTERS + 8 * COUNT


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    """Write five documents of uint16 ids from 0 on, each ending in 7."""
    write_corpus(tmp_path / "c", LENGTHS, np.uint16, eod=7)
    return str(tmp_path / "c")


def patch(path: str, offset: int, data: bytes) -> None:
    with open(path, "r+b") as file:
        file.seek(offset)
        file.write(data)


def only(findings: tuple[Finding, ...]) -> Finding:
    (finding,) = findings
    return finding


def rules(path: str, **options: Any) -> dict[str, int]:
    return {f.rule: f.count for f in verify(path, **options).findings}


@pytest.mark.parametrize("full", [False, True])
def test_a_sound_pair_has_no_findings(prefix: str, full: bool) -> None:
    report = verify(prefix, full=full)
    assert report.is_clean
    assert report.counted == {"sequences": 5, "documents": 5, "tokens": 24, "bytes": 48}
    assert verify(prefix + ".idx").is_clean
    assert verify(prefix + ".bin").is_clean


@pytest.mark.parametrize(
    ("offset", "data", "rule", "where"),
    [
        (0, b"X", "magic", "byte 0"),
        (0, b"TNTIDX\0\0", "old-format", "byte 0"),
        (9, b"\2", "version", "byte 9"),
        (17, b"\x63", "dtype-code", "byte 17"),
        (18, b"\6", "file-size", "byte 142"),
        (34 + 8, struct.pack("<i", -1), "length", "sequence 2"),
        (POINTERS + 8, struct.pack("<q", 11), "inside-token", "sequence 1"),
        (POINTERS + 16, struct.pack("<q", -2), "outside-bin", "sequence 2"),
        (POINTERS + 16, struct.pack("<q", 2**62), "outside-bin", "sequence 2"),
        (BOUNDS, b"\1", "bound-first", "document bound 0"),
        (BOUNDS + 8, b"\4", "bound-order", "document bound 2"),
        (BOUNDS + 8 * COUNT, b"\6", "bound-last", "document bound 5"),
    ],
)
def test_damage_of_the_index_is_located(
    prefix: str, offset: int, data: bytes, rule: str, where: str
) -> None:
    patch(prefix + ".idx", offset, data)
    found = [f for f in verify(prefix).findings if f.rule == rule]
    assert found[0].severity == "error"
    assert found[0].where == where
    assert found[0].file == prefix + ".idx"
    assert found[0].repair
    with pytest.raises(megaindex.FormatError):
        megaindex.IndexedDataset(prefix).validate()


@pytest.mark.parametrize("gone", [".bin", ".idx"])
def test_half_a_pair_is_a_finding(prefix: str, gone: str) -> None:
    os.unlink(prefix + gone)
    finding = only(verify(prefix).findings)
    assert finding.rule == "missing-file"
    assert finding.file == prefix + gone


def test_a_bin_cut_short_and_one_too_long(prefix: str) -> None:
    data = Path(prefix + ".bin").read_bytes()
    Path(prefix + ".bin").write_bytes(data[:20])
    assert rules(prefix) == {"outside-bin": 3}
    Path(prefix + ".bin").write_bytes(data + b"\1\2\3")
    finding = only(verify(prefix).findings)
    assert (finding.rule, finding.where, finding.severity) == ("unused-bytes", "byte 48", "warning")
    assert rules(prefix, full=True) == {"unused-bytes": 1, "partial-token": 1}


@pytest.mark.parametrize("chunk", [3, 8, 1 << 22])
def test_tokens_beyond_the_vocabulary_are_counted_and_located(
    prefix: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_CHUNK_BYTES", chunk)  # 3: a read ends inside a token
    report = verify(prefix, full=True, vocab_size=20)
    finding = only(report.findings)
    # ids count on: 0 … 3 7 | 5 … 10 7 | 12 … 19 7 | 21 22 7
    assert (finding.rule, finding.count, finding.found) == ("token-range", 2, "21")
    assert finding.where == "byte 42, sequence 4"
    assert verify(prefix, full=True, vocab_size=23).is_clean
    assert verify(prefix, full=True, vocab_size=2**40).is_clean
    with open(prefix + ".bin", "ab") as file:
        file.write(b"\1")
    partial = next(f for f in verify(prefix, full=True).findings if f.rule == "partial-token")
    assert (partial.where, partial.found) == ("byte 48", "1 bytes")


def test_a_cache_of_an_interrupted_build_is_a_cache(tmp_path: Path) -> None:
    (tmp_path / "tmp.0f.1").mkdir()
    (report,) = verify_all(tmp_path)
    assert (report.kind, report.counted["entries"]) == ("cache", 0)


def test_negative_ids_are_outside_every_vocabulary(tmp_path: Path) -> None:
    with megaindex.IndexedDatasetWriter(tmp_path / "c", np.int32) as writer:
        writer.add_document([1, -100, 3])
    assert rules(str(tmp_path / "c"), full=True, vocab_size=10) == {"token-range": 1}
    with megaindex.IndexedDatasetWriter(tmp_path / "d", np.uint16) as writer:
        writer.add_document([1, 65_535, 3])
    assert rules(str(tmp_path / "d"), full=True, vocab_size=65_535) == {"token-range": 1}
    assert verify(str(tmp_path / "d"), full=True, vocab_size=65_536).is_clean
    assert verify(str(tmp_path / "c"), full=True).is_clean


@pytest.mark.parametrize("chunk", [1, 2, 5])
def test_document_ends(prefix: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pair, "_CHUNK_DOCUMENTS", chunk)
    assert verify(prefix, full=True, eod=7).is_clean
    finding = only(verify(prefix, full=True, eod=9).findings)
    assert (finding.rule, finding.count) == ("document-end", 4)  # the empty one has no last token
    assert finding.where == "document 0, byte 8"
    patch(prefix + ".bin", 2 * 20, struct.pack("<H", 9))
    patch(prefix + ".bin", 2 * 23, struct.pack("<H", 9))
    finding = only(verify(prefix, full=True, eod=7).findings)
    assert (finding.count, finding.where, finding.found) == (2, "document 3, byte 40", "9")


def test_floats_that_are_not_finite(tmp_path: Path) -> None:
    with megaindex.IndexedDatasetWriter(tmp_path / "c", np.float32) as writer:
        writer.add_document(np.array([1, np.nan, np.inf, 2], np.float32))
    finding = only(verify(str(tmp_path / "c"), full=True).findings)
    assert (finding.rule, finding.count, finding.where) == ("not-finite", 2, "byte 4, sequence 0")
    patch(f"{tmp_path}/c.bin", 0, struct.pack("<f", -np.inf))
    finding = only(verify(str(tmp_path / "c"), full=True).findings)
    assert (finding.count, finding.where, finding.found) == (3, "byte 0, sequence 0", "-inf")


def lay_out(prefix: str, lengths: list[int], pointers: list[int], size: int) -> None:
    """Write a pair of one-byte tokens, one sequence a document."""
    bounds = np.arange(len(lengths) + 1, dtype=np.int64)
    header = struct.pack("<9sQBQQ", b"MMIDIDX\0\0", 1, 1, len(lengths), len(bounds))
    arrays = np.array(lengths, np.int32).tobytes() + np.array(pointers, np.int64).tobytes()
    Path(prefix + ".idx").write_bytes(header + arrays + bounds.tobytes())
    Path(prefix + ".bin").write_bytes(bytes(size))


@pytest.mark.parametrize("at_once", [1, 3, 1 << 22])
def test_gaps_overlaps_and_duplicates(
    tmp_path: Path, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pair, "_AT_ONCE", at_once)
    path = str(tmp_path / "c")
    lay_out(path, [4, 4, 0, 2, 4, 3], [10, 0, 7, 3, 10, 14], 20)
    # in the order of the .bin: 0–4, 3–5, a gap, 10–14 twice, 14–17, a gap
    assert rules(path) == {"pointer-order": 2}
    findings = {f.rule: f for f in verify(path, full=True).findings}
    assert {rule: f.count for rule, f in findings.items()} == {
        "pointer-order": 2,
        "overlap": 1,
        "duplicate-sequence": 1,
        "unused-bytes": 2,
    }
    assert all(f.severity == "warning" for f in findings.values())
    assert findings["overlap"].where == "sequence 3"
    assert findings["unused-bytes"].where == "byte 5"
    for length in (4, 0):  # the only sequence does not begin with the .bin, or holds no token
        lay_out(path, [length], [length], 2 * length or 8)
        finding = only(verify(path, full=True).findings)
        assert (finding.rule, finding.where, finding.count) == ("unused-bytes", "byte 0", 1)


@for_each("at_once", [1, 2, 3, 7])
@for_each("ranges", [3, 1 << 16])  # of seven bytes each, or of one
@for_each("seed", range(3))
def test_findings_do_not_depend_on_the_sequences_sorted_together(
    tmp_path: Path, at_once: int, ranges: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(seed)
    path = str(tmp_path / "c")
    lay_out(path, rng.integers(0, 4, 12).tolist(), rng.integers(3, 15, 12).tolist(), 20)
    expected = verify(path, full=True).findings
    monkeypatch.setattr(pair, "_AT_ONCE", at_once)
    monkeypatch.setattr(pair, "_RANGES", ranges)
    found = verify(path, full=True).findings
    assert {f.rule: (f.count, f.where) for f in found} == {
        f.rule: (f.count, f.where) for f in expected
    }


def test_shuffled_pointers_without_gaps_are_only_out_of_order(tmp_path: Path) -> None:
    order = np.random.default_rng(1).permutation(5000)
    lay_out(str(tmp_path / "c"), [3] * 5000, (3 * order).tolist(), 15000)
    assert list(rules(str(tmp_path / "c"), full=True)) == ["pointer-order"]


def test_memory_does_not_grow_with_the_bin(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    lay_out(path, [200_000_000], [0], 0)
    os.truncate(path + ".bin", 200_000_000)  # sparse
    verify(path, full=True)
    tracemalloc.start()
    report = verify(path, full=True, vocab_size=200, eod=0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.is_clean
    assert peak < 40_000_000


def test_many_bad_entries_become_one_finding(tmp_path: Path) -> None:
    count = (1 << 17) + 50  # more than a chunk
    lay_out(str(tmp_path / "c"), [-1] * count, [0] * count, 0)
    finding = only(verify(str(tmp_path / "c")).findings)
    assert (finding.rule, finding.count, finding.where) == ("length", count, "sequence 0")


@pytest.mark.parametrize("chunk", [1, 2, 3, 1 << 17])
def test_bounds_are_compared_with_those_of_the_chunk_before(
    prefix: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bound 1 is beyond the sequences, and 2 and 4 are below the bound before."""
    monkeypatch.setattr("megaindex.format.header._CHUNK", chunk)
    patch(prefix + ".idx", BOUNDS, np.array([0, 9, 2, 3, 1, 5]).tobytes())
    finding = only(verify(prefix).findings)
    assert (finding.rule, finding.where, finding.count) == ("bound-order", "document bound 1", 3)
    assert (finding.found, finding.expected) == ("9", "0 to 5")


def test_bounds_that_end_early_are_an_error_except_in_neox(prefix: str) -> None:
    patch(prefix + ".idx", BOUNDS + 8 * COUNT, b"\4")
    assert only(verify(prefix).findings).severity == "error"
    assert only(verify(prefix, dialect="neox").findings).severity == "warning"


@pytest.fixture
def cache(prefix: str, tmp_path: Path) -> Path:
    for seed in (1, 2):
        megaindex.build_index(prefix, sequence_length=4, seed=seed, cache_dir=tmp_path / "cache")
    return tmp_path / "cache"


def entry_of(cache: Path) -> Path:
    return next(path for path in sorted(cache.iterdir()) if path.is_dir())


def test_a_sound_cache(cache: Path) -> None:
    report = verify(cache, full=True)
    assert report.is_clean
    assert report.counted["entries"] == 2
    assert report.counted["arrays"] == 6
    assert verify(entry_of(cache)).kind == "cache entry"


def test_damage_of_a_cache_entry(cache: Path) -> None:
    entry = entry_of(cache)
    array = entry / "shuffle_index.npy"
    patch(str(array), array.stat().st_size - 1, b"\x63")
    assert verify(cache).is_clean
    finding = only(verify(cache, full=True).findings)
    assert (finding.rule, finding.file) == ("checksum", str(array))
    os.truncate(array, 100)
    assert only(verify(cache).findings).rule == "file-size"
    array.unlink()
    assert only(verify(entry).findings).found == "no file"
    (entry / "notes.txt").write_text("x")
    assert rules(str(entry)) == {"file-size": 1, "stray-file": 1}
    (entry / "manifest.json").write_text("{}")
    assert rules(str(entry)) == {"manifest": 1}


def test_an_entry_under_another_name(cache: Path) -> None:
    entry = entry_of(cache)
    entry.rename(cache / ("0" * 32))
    finding = only(verify(cache).findings)
    assert (finding.rule, finding.found) == ("key", entry.name)


@pytest.fixture
def snapshots(prefix: str, tmp_path: Path) -> list[Path]:
    """Write the snapshots of a blend and of a recipe to one cache."""
    cache = tmp_path / "cache"
    megaindex.build_blend([prefix], num_samples=3, weights=[1], cache_dir=cache, sequence_length=4)
    recipe = tmp_path / "run.yaml"
    recipe.write_text(
        "sequence_length: 4\nbatch: {global_batch_size: 1}\n"
        f"sources: {{text: {prefix}}}\nstages: {{all: {{steps: 2, mix: {{text: 1}}}}}}\n"
    )
    open_recipe(read_recipe(recipe), cache_dir=cache)
    return sorted(cache.glob("*-megaindex.json"))


def test_a_snapshot_in_a_cache_is_not_taken_for_a_sidecar(
    snapshots: list[Path], capsys: pytest.CaptureFixture[str]
) -> None:
    assert [path.name.partition("-")[0] for path in snapshots] == ["blend", "sources"]
    reports = verify_all(snapshots[0].parent, full=True)
    assert [report.kind for report in reports] == ["cache", "snapshot", "snapshot"]
    assert all(report.is_clean for report in reports)
    assert [report.counted for report in reports[1:]] == [{"sources": 1}] * 2
    assert main(["verify", str(snapshots[0].parent), "--workers", "1"]) == 0
    assert main(["inspect", str(snapshots[0])]) == 0
    assert "sources = [" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (lambda text: text[:-9], "it is not valid JSON"),
        (lambda text: "[]", "it is not a JSON object"),
        (lambda text: '{"sources": 1}', "it does not contain a list of sources"),
        (lambda text: '{"sources": [{}]}', "it has a source without a prefix"),
        (lambda text: text.replace('"sequence_length":4', '"sequence_length":5'), "its checksum"),
        (lambda text: text.replace('"sequence_length":4', '"sequence_length":NaN'), "its checksum"),
    ],
)
def test_damage_of_a_snapshot(
    snapshots: list[Path], change: Callable[[str], str], found: str
) -> None:
    blend = snapshots[0]
    blend.write_text(change(blend.read_text()))
    finding = only(verify(blend).findings)
    assert (finding.rule, finding.severity, finding.file) == ("snapshot", "error", str(blend))
    assert finding.found.startswith(found)
    (described,) = inspect(blend)
    assert described.faults[0].startswith(found)
    assert main(["verify", str(blend)]) == 1


def test_a_folder_of_pairs_and_caches(prefix: str, cache: Path, tmp_path: Path) -> None:
    write_corpus(tmp_path / "d", [3])
    assert [report.kind for report in verify_all(tmp_path)] == ["pair", "pair"]
    with pytest.raises(InvalidArgument, match="must have one subject"):
        verify(tmp_path)


def test_paths_without_a_subject(tmp_path: Path) -> None:
    with pytest.raises(MissingFile, match="does not exist"):
        verify(tmp_path / "no")
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidArgument, match=r"holds no .idx"):
        verify(tmp_path / "empty")
    (tmp_path / "text").write_text("x")
    with pytest.raises(InvalidArgument, match="must be an .idx, a .bin"):
        verify(tmp_path / "text")


def test_token_rules_need_the_tokens(prefix: str) -> None:
    with pytest.raises(InvalidArgument, match="add --full"):
        verify(prefix, eod=7)
    with pytest.raises(InvalidArgument, match="at least 1"):
        verify(prefix, full=True, vocab_size=0)


def test_exit_status_table_and_json(
    prefix: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["verify", prefix]) == 0
    assert "no findings" in capsys.readouterr().out
    assert main(["verify", prefix, "--full", "--vocab-size", "20"]) == 1
    assert "and 1 more" in capsys.readouterr().out
    assert main(["verify", prefix, "--full", "--vocab-size", "22"]) == 1
    assert "more" not in capsys.readouterr().out
    assert main(["verify", prefix, "--full", "--vocab-size", "20", "--json"]) == 1
    (report,) = json.loads(capsys.readouterr().out)["reports"]
    assert report["findings"][0]["count"] == 2
    assert main(["verify", prefix + "x"]) == 2
    assert main(["verify", prefix, "--dtype", "int32"]) == 2
