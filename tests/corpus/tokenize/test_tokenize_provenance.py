"""Provenance of tokenized, merged, split and imported pairs: every document in its file."""

from __future__ import annotations

import gzip
import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.tokenizing import names, packed, run

from megaindex import IndexedDataset
from megaindex.corpus import cut_at, merge, split, verify
from megaindex.corpus.imports import formats
from megaindex.corpus.imports.flat import import_pair
from megaindex.errors import FormatError, StorageError
from megaindex.format.provenance import Provenance, open_provenance
from megaindex.verify import pair as pair_module

RNG = random.Random(5)


def opened(prefix: Path) -> Provenance:
    found = open_provenance(str(prefix))
    assert found is not None
    found.check_columns()
    return found


def write_lines(path: Path, count: int, bad: bool = False) -> Path:
    """Write JSONL with blank and, if `bad`, bad lines, and all ends of lines."""
    lines = []
    for number in range(count):
        kind = RNG.random()
        text = "x" * RNG.choice([0, 1, 5, 400])
        if bad and kind < 0.1:
            line = '{"other": 1}' + " " * RNG.choice([0, 300])
        elif kind < 0.3:
            line = ""
        else:
            line = json.dumps({"text": f"{path.name} {number} {text}", "n": f"{number}"})
        lines.append(line + RNG.choice(["\n", "\n", "\r\n"]))
    path.write_bytes(packed("\ufeff".encode() + "".join(lines).encode(), path.suffix))
    return path


def check_rows(prefix: Path) -> int:
    """Compare each document with the bytes and the line that its origin names."""
    found, data = opened(prefix), IndexedDataset(str(prefix))
    bounds = data.document_indices
    assert found.num_documents == len(bounds) - 1
    rows = found.locate(np.arange(found.num_documents))
    contents: dict[int, tuple[bytes, list[bytes]]] = {}
    for document, (number, row, begin, end) in enumerate(zip(*rows, strict=True)):
        if number == -1:
            continue
        file = found.files[number]
        if number not in contents:
            raw = Path(file.path).read_bytes()
            content = gzip.decompress(raw) if file.compression == "gzip" else raw
            contents[number] = content, content.splitlines()
        content, lines = contents[number]
        line = content[begin:end]
        if file.format != "files":
            assert line == lines[row].removeprefix("\ufeff".encode())
        text = json.loads(line)[file.key] if file.format == "jsonl" else line.decode()
        first, stop = bounds[document : document + 2]
        tokens = b"".join(bytes(data[i].astype(np.uint8)) for i in range(first, stop))
        assert tokens == text.encode()
    return found.num_documents - found.num_unknown


def test_every_document_has_its_line_whatever_the_parts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blank and bad lines, texts that are empty, several keys, an input given twice, compression;
    the bytes are equal for other parts and, of JSON, for two processes."""
    inputs = [write_lines(tmp_path / "a.jsonl", 90, bad=True), tmp_path / "b.txt"]
    inputs += [write_lines(tmp_path / "c.jsonl.gz", 50), inputs[0], tmp_path / "d.txt"]
    for file in (inputs[1], inputs[4]):
        file.write_text("a line\n\n\nanother\n" * 3)
    texts = [inputs[1], inputs[4]]
    for name, files, options in (
        ("json", [inputs[0], inputs[2], inputs[3]], {"keys": ("text", "n"), "on_bad_line": "skip"}),
        ("lines", texts, {}),
        ("files", texts, {"format": "files"}),
    ):
        made: list[list[bytes]] = []
        for part_bytes, workers in ((1 << 20, 1), (200, 1), (700, 1 + (name == "json"))):
            out = tmp_path / f"{name}-{part_bytes}"
            result = run(out, files, part_bytes=part_bytes, workers=workers, **options)
            prefixes = [Path(pair.path_prefix) for pair in result.pairs]
            assert all(check_rows(prefix) == result.documents for prefix in prefixes)
            for at_once in (1 << 20, 7):  # lines
                monkeypatch.setattr(pair_module, "_LINES_AT_ONCE", at_once)
                assert verify(prefixes[0], inputs=True).is_clean
            made.append([Path(f"{p}.provenance").read_bytes() for p in prefixes])
        assert made[0] == made[1] == made[2]
    assert opened(tmp_path / "files-200").files[0].row_name == "row"


def test_rows_of_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"text": [None if n % 5 == 0 else f"row {n}" for n in range(40)]})
    plain = {"compression": "none", "use_dictionary": False, "write_statistics": False}
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=7, **plain)
    run(tmp_path / "o", [tmp_path / "a.parquet"], part_bytes=1, on_bad_line="skip")
    found, data = opened(tmp_path / "o"), IndexedDataset(str(tmp_path / "o"))
    rows = found.locate(np.arange(32))
    assert [f"row {n}".encode() for n in rows.row] == [bytes(d.astype(np.uint8)) for d in data]
    assert not found.files[0].has_bytes
    assert verify(tmp_path / "o", inputs=True).is_clean
    size = (tmp_path / "a.parquet").stat().st_size
    texts, more = table.column("text").to_pylist()[:39], 0
    for _ in range(6):  # another file of the same size, without the last row
        shorter = pyarrow.table({"text": [*texts[:-1], "x" * more]})
        parquet.write_table(shorter, tmp_path / "a.parquet", row_group_size=7, **plain)
        more += size - (tmp_path / "a.parquet").stat().st_size
    (finding,) = verify(tmp_path / "o", inputs=True).findings
    assert (finding.rule, finding.where, finding.found) == ("input-rows", "row 39", "39 rows")


def test_merging_and_splitting_carry_it_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A merge of the parts of a split is what was split; documents of other pairs are unknown."""
    run(tmp_path / "a", [write_lines(tmp_path / "a.jsonl", 60)])
    run(tmp_path / "b", [write_lines(tmp_path / "b.jsonl", 60)])
    write_corpus(tmp_path / "old", [7], np.uint16)
    a, b, old, out = (str(tmp_path / name) for name in ("a", "b", "old", "out"))
    merge(out, [a, b, a])
    assert check_rows(Path(out)) == opened(Path(out)).num_documents
    assert len(opened(Path(out)).files) == 2
    split(out, [f"{out}-{{}}"], lambda pair: cut_at(pair, [7, 70]))
    for part in range(3):
        assert check_rows(Path(f"{out}-{part}"))
    merge(f"{out}-all", [f"{out}-{part}" for part in range(3)])
    assert Path(f"{out}-all.provenance").read_bytes() == Path(f"{out}.provenance").read_bytes()
    with caplog.at_level(logging.WARNING, "megaindex"):
        merge(f"{out}-mixed", [a, old, b])
    assert "old.provenance: does not exist, as of 1 of 3 inputs" in caplog.text
    mixed = opened(Path(f"{out}-mixed"))
    assert mixed.num_unknown == 1
    for name, unknown in (("mixed", 1), ("all", None)):
        counted = verify(f"{out}-{name}").counted
        assert counted.get("documents of unknown origin") == unknown
    assert check_rows(Path(f"{out}-mixed")) == mixed.num_documents - 1
    merge(f"{out}-old", [old, old])
    assert not {"out-old.provenance", "old.provenance"} & names(tmp_path)
    merge(f"{out}-mixed", [old, old], overwrite=True)
    assert open_provenance(f"{out}-mixed") is None


def test_the_provenance_of_another_pair_is_refused(tmp_path: Path) -> None:
    for name in "ab":
        run(tmp_path / name, [write_lines(tmp_path / f"{name}.jsonl", 20)])
    (tmp_path / "a.provenance").write_bytes((tmp_path / "b.provenance").read_bytes())
    with pytest.raises(FormatError, match=r"a\.provenance: belongs to another pair"):
        merge(str(tmp_path / "m"), [str(tmp_path / "a"), str(tmp_path / "b")])
    with pytest.raises(FormatError, match="belongs to another pair"):
        split(str(tmp_path / "a"), [str(tmp_path / "s{}")], lambda pair: cut_at(pair, [3]))
    report = verify(tmp_path / "a")
    assert "provenance-pair" in [finding.rule for finding in report.findings]
    (tmp_path / "new.provenance").write_text("of somebody")
    with pytest.raises(StorageError, match="already exists"):
        run(tmp_path / "new", [tmp_path / "a.jsonl"])


@pytest.mark.parametrize(
    ("change", "where"),
    [
        (lambda data: data + b"{}\n", "the file"),
        (lambda data: data.replace(b"\n", b" ", 1), "line "),
        (lambda data: data[1:] + b"\n", "line 1"),
        (lambda data: data.replace(b'"7"', b'"77"').replace(b"343", b"34"), "line 2"),
    ],
)
def test_inputs_that_changed_are_found(tmp_path: Path, change: Any, where: str) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b"".join(b'{"text": "%d"}\n' % (7**n) for n in range(9)))
    run(tmp_path / "o", [source])
    assert verify(tmp_path / "o", inputs=True).counted["input files read"] == 1
    source.write_bytes(change(source.read_bytes()))
    assert verify(tmp_path / "o").is_clean
    (finding,) = verify(tmp_path / "o", inputs=True).findings
    assert finding.rule == "input-rows"
    assert finding.where.startswith(where)
    source.unlink()
    report = verify(tmp_path / "o", inputs=True)
    assert report.is_clean
    assert report.counted["input files read"] == 0


def test_an_input_with_a_line_less_of_the_same_size_is_found(tmp_path: Path) -> None:
    source = tmp_path / "a.jsonl"
    source.write_bytes(b'{"text": "a"}\n\n{"text": "b"}\n')
    run(tmp_path / "o", [source])
    source.write_bytes(b'{"text": "a"}\n {"text": "b"}\n')
    (finding,) = verify(tmp_path / "o", inputs=True).findings
    assert (finding.where, finding.found, finding.expected) == (
        "the file", "2 lines", "3 lines or more",
    )  # fmt: skip


def test_imports_record_the_rows_of_their_source(tmp_path: Path) -> None:
    tokens = np.arange(50, dtype=np.uint16) % 7
    np.save(tmp_path / "a.npy", tokens)
    flat = formats.open_numpy(str(tmp_path / "a.npy"), separator=6)
    import_pair(flat, str(tmp_path / "o"))
    found, data = opened(tmp_path / "o"), IndexedDataset(str(tmp_path / "o"))
    rows = found.locate(np.arange(found.num_documents))
    content = (tmp_path / "a.npy").read_bytes()
    assert rows.row.tolist() == list(range(8))
    for document, begin, end in zip(data, rows.begin, rows.end, strict=True):
        assert content[begin:end] == document.tobytes()
