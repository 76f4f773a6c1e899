"""`megaindex trace`: rows of a step, and the steps of rows and documents, against a brute force."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import xxhash
from support.command_line import cli
from support.corpora import write_corpus
from support.folders import inside
from support.inputs import for_each
from support.tokenizing import run as tokenize

from megaindex import (
    FormatError,
    IndexedDataset,
    IndexedDatasetWriter,
    InvalidArgument,
    build_index,
)
from megaindex.audit import (
    documents_of,
    origins,
    run_of_index,
    run_of_settings,
    runs_of,
    step_ranges,
    steps_of,
)
from megaindex.cli.trace import _summary
from megaindex.corpus import merge
from megaindex.format.provenance import ProvenanceSpool, RowFile, open_provenance


def text_of(rng: np.random.Generator, name: str, number: int) -> Any:
    """A text, sometimes empty or a list of texts, each of which becomes a sequence."""
    text = f"{name}{number} " * int(rng.integers(1, 30))
    return {3: "", 5: [text, text]}.get(number % 7, text)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Pairs a and b of two files each, of which a.jsonl is in both, and c without a provenance."""
    folder, rng = tmp_path_factory.mktemp("trace"), np.random.default_rng(3)
    for name in ("a", "b", "d"):
        lines = [json.dumps({"text": text_of(rng, name, n)}) for n in range(60)]
        lines[9] = ""
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    tokenize(folder / "a", [folder / "a.jsonl", folder / "d.jsonl"], eod=256)
    tokenize(folder / "b", [folder / "b.jsonl", folder / "a.jsonl"], eod=256)
    write_corpus(folder / "c", rng.integers(1, 90, 40), np.uint16)
    recipe = """
sequence_length: 64
seed: 5
batch: {micro_batch_size: 2, data_parallel_size: 2, gradient_accumulation_steps: 2}
sources: {a: {path: a}, b: {path: b}}
stages:
  one: {steps: 20, mix: {a: 1, b: 2}}
  two: {steps: 20, mix: {a: 3, b: 1}}
"""
    (folder / "r.yaml").write_text(recipe)
    return folder


def runs(folder: Path) -> dict[str, list[object]]:
    batch = ["--seq-length", 64, "--micro-batch-size", 2, "--data-parallel-size", 2]
    batch += ["--gradient-accumulation-steps", 2]
    a, b = folder / "a", folder / "b"
    return {
        "recipe": ["--recipe", folder / "r.yaml"],
        "megatron": ["--data-path", 2, a, 1, b, *batch, "--train-iters", 20],
        "neox": ["--order", "neox", "--data-path", a, *batch, "--epochs", 3, "--split", "9,1,0"],
        "epoch": ["--order", "epoch", "--data-path", a, *batch, "--epochs", 3],
        "packed": ["--order", "packed", "--data-path", b, *batch, "--epochs", 3],
        "window": ["--order", "window", "--data-path", b, *batch, "--epochs", 2],
    }


def trace(*words: object) -> dict[str, Any]:
    status, out, err = cli("trace", *words, "--json")
    assert (status, err) == (0, "")
    found: dict[str, Any] = json.loads(out)
    return found


NAMES = ["recipe", "megatron", "neox", "epoch", "packed", "window"]


@pytest.mark.slow
@for_each("name", NAMES)
def test_steps_and_rows_lead_to_each_other(folder: Path, name: str) -> None:
    run = runs(folder)[name]
    lines = {str(f): f.read_text().splitlines() for f in folder.glob("*.jsonl")}
    spans = []
    for step in range(3):
        found = trace(*run, "--step", step, "--text")["spans"]
        assert len({span["sample"] for span in found}) == 8
        for span in found:
            text = json.loads(lines[span["file"]][span["line"] - 1])["text"]
            texts = text if isinstance(text, list) else [text]
            length = span["length"] - span["text"].count("\ufffd")
            assert span["text"] in "".join(texts) or length < span["length"]
            content = (Path(span["file"])).read_bytes()[span["begin"] : span["end"]]
            assert content == lines[span["file"]][span["line"] - 1].encode()
        ranked = [trace(*run, "--step", step, "--rank", rank)["spans"] for rank in range(2)]
        assert sum(map(len, ranked)) == len(found)
        spans += [{k: v for k, v in span.items() if k != "text"} for span in found]
    chosen = sorted({(span["file"], span["line"]) for span in spans})[:: max(1, len(spans) // 6)]
    for file, line in chosen:
        found = trace(*run, "--rows", f"{file}:{line}")
        early = [span for span in found["spans"] if span["step"] < 3]
        expected = [span for span in spans if (span["file"], span["line"]) == (file, line)]
        assert sorted(early, key=repr) == sorted(expected, key=repr)
        steps = {span["step"] for span in found["spans"]}
        assert found["steps"] == " ".join(
            f"{a}" if a == b else f"{a}-{b}" for a, b in step_ranges(sorted(steps))
        )


def test_the_tables(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    run = runs(folder)["recipe"]
    past_of = [*run, "--rows", "d.jsonl:1-4", "--consumed-samples", "160"]
    status, out, _ = cli("trace", *past_of)
    assert status == 0
    found = trace(*past_of)
    ends = [[int(n) for n in each.split("-")] for each in found["steps"].split()]
    steps = {step for each in ends for step in range(each[0], each[-1] + 1)}
    past = sum(step < found["past_steps"] for step in steps)
    assert 0 < past < len(steps)
    assert f"in {len(steps)} steps: {past} past, {len(steps) - past} to come" in out
    status, out, _ = cli("trace", *run, "--rows", "d.jsonl:2", "--text")
    assert "  d.jsonl, line 2" in out
    status, out, _ = cli("trace", *runs(folder)["epoch"], "--step", 0)
    assert max(map(len, out.splitlines())) <= 80
    (tmp_path / "ids").write_text("3\n4 4\n")
    np.save(tmp_path / "ids.npy", np.array([4, 3]))
    found = [
        trace(*run, "--documents", tmp_path / name, "--source", 1) for name in ("ids", "ids.npy")
    ]
    assert found[0] == found[1]
    assert {span["document"] for span in found[0]["spans"]} == {3, 4}
    assert found[0]["documents"] == 2


def test_documents_that_are_not_served_are_counted(folder: Path) -> None:
    run = ["--data-path", folder / "a", "--order", "epoch", "--seq-length", 64,
           "--global-batch-size", 1, "--train-iters", 1]  # fmt: skip
    served = {span["document"] for span in trace(*run, "--step", 0)["spans"]}
    one, other = [number for number in range(20, 40) if number not in served][:2]
    for text, said in ((f"{one}", "1 document, not"), (f"{one} {other}", "2 documents, not")):
        (folder / "unserved").write_text(text)
        status, out, _ = cli("trace", *run, "--documents", folder / "unserved")
        assert (status, out) == (0, f"{said} served in any step of this run\n")


def test_pairs_without_a_provenance(folder: Path) -> None:
    """Alone, and merged with one that has it: some rows are unknown."""
    run = ["--data-path", folder / "c", "--seq-length", 64, "--global-batch-size", 8]
    spans = trace(*run, "--epochs", 1, "--step", 0)["spans"]
    assert {span["file"] for span in spans} == {None}
    status, _, err = cli("trace", *run, "--epochs", 1, "--rows", "c.jsonl:3")
    assert status == 2
    assert "c.provenance: does not exist" in err
    merge(str(folder / "m"), [str(folder / "c"), str(folder / "a")])
    run[1] = folder / "m"
    every = [trace(*run, "--epochs", 1, "--step", step)["spans"] for step in range(3)]
    files = {span["file"] for spans in every for span in spans}
    assert files > {None}
    status, out, _ = cli("trace", *run, "--epochs", 1, "--step", 0)
    assert "unknown" in out
    status, _, err = cli("trace", *run, "--epochs", 1, "--step", 0, "--text")
    assert status == 2
    assert "no tokenizer is recorded" in err
    status, out, err = cli(
        "trace", *run, "--epochs", 1, "--step", 0, "--text", "--tokenizer", "bytes"
    )
    assert (status, err) == (0, "")


@for_each(
    ("words", "message"),
    [
        ([], "one of --step, --rows and --documents must be given"),
        (["--step", 1, "--rows", "a.jsonl"], "must be given"),
        (["--rows", "a.jsonl", "--rank", 1], "--rank needs --step"),
        (["--step", 1, "--source", 0], "--source needs --documents"),
        (["--step", 1, "--tokenizer", "bytes"], "--tokenizer needs --text"),
        (["--step", 10**6], "step must be from 0"),
        (["--rows", "x.jsonl:1"], "x.jsonl: none of the 3 input files"),
        (["--rows", "jsonl:1"], "jsonl: none of the"),
        (["--rows", "a.jsonl:7-3"], "must be FILE:A-B with A <= B"),
        (["--rows", "a.jsonl:10"], "no document of this run came from these rows"),
        (["--rows", "a.jsonl:61-90"], "the pair has documents of lines 1 to 60"),
        (["--rows", "a.jsonl:0"], "count from 1"),
        (["--rows", "a.jsonl:0-3"], "count from 1"),
        (["--rows", "a.jsonl:58-61"], "with a document is 60"),
        (["--documents", "ids"], "ids does not exist"),
        (["--documents", "words"], "words: must hold sequence ids separated by white space"),
        (["--documents", "huge"], f"separated by white space, got '{2**63}'"),
        (["--documents", "far", "--source", "a"], "the audited documents are 0 to"),
        (
            ["--documents", "near", "--source", 2],
            "--source: unknown source 2",
        ),
    ],
)
def test_bad_input(
    folder: Path, monkeypatch: pytest.MonkeyPatch, words: list[object], message: str
) -> None:
    monkeypatch.chdir(folder)
    huge = f"5 {2**63}"
    for name, text in (("words", "one two"), ("huge", huge), ("far", "99999"), ("near", "1")):
        Path(name).write_text(text)
    status, out, err = cli("trace", "--recipe", "r.yaml", *words)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(("order", "dtype"), [("neox", "uint16"), ("paddlenlp", "uint32")])
def test_pairs_are_read_in_the_dialect_of_the_framework(
    order: str, dtype: str, tmp_path: Path
) -> None:
    """Megatron has no uint32, and no document bounds that end before the last sequence."""
    with IndexedDatasetWriter(tmp_path / "p", dtype, dialect=order) as writer:
        for number in range(20):
            writer.add_document([ord("a") + number] * 16)
    if order == "neox":
        raw = (tmp_path / "p.idx").read_bytes()
        short = raw[:26] + (11).to_bytes(8, "little") + raw[34:-80]  # 11 bounds, not 21
        (tmp_path / "p.idx").write_bytes(short)
    run = ["--data-path", tmp_path / "p", "--seq-length", 16, "--global-batch-size", 4,
           "--order", order, "--epochs", 1]  # fmt: skip
    spans = trace(*run, "--step", 0, "--text", "--tokenizer", "bytes")["spans"]
    assert len(spans) >= 4
    for span in spans:
        assert span["text"] == chr(ord("a") + span["document"]) * span["length"]


def test_a_run_of_pairs_with_and_without_provenance(folder: Path, tmp_path: Path) -> None:
    """Rows of one of two files whose paths end alike; the other pair names none."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.jsonl").write_bytes((folder / "a.jsonl").read_bytes())
    tokenize(tmp_path / "both", [tmp_path / "one/a.jsonl", tmp_path / "two/a.jsonl"], eod=256)
    run = ["--data-path", 1, folder / "c", 1, tmp_path / "both", "--seq-length", 64,
           "--global-batch-size", 8, "--train-iters", 4]  # fmt: skip
    status, out, err = cli("trace", *run, "--rows", "a.jsonl")
    assert (status, out) == (2, "")
    ends = ", ".join(str(tmp_path / name / "a.jsonl") for name in ("one", "two"))
    assert err == f"megaindex trace: a.jsonl: is the end of 2 input files, {ends}; give one\n"
    found = trace(*run, "--rows", f"{tmp_path}/one/a.jsonl")
    assert {span["file"] for span in found["spans"]} == {str(tmp_path / "one/a.jsonl")}
    assert trace(*run, "--rows", "one/a.jsonl") == found
    with inside(tmp_path / "two"):
        assert trace(*run, "--rows", "../one/a.jsonl") == found


def test_documents_of_pairs_that_cannot_be_opened(tmp_path: Path) -> None:
    write_corpus(tmp_path / "p", [8] * 4)
    with open(tmp_path / "p.provenance", "wb") as out:
        spool = ProvenanceSpool(str(tmp_path))
        spool.open()
        rows = np.arange(3)
        spool.add_file(RowFile(path="p.jsonl", format="jsonl"), rows, 9 * rows, 9 * rows + 8)
        spool.assemble(out, xxhash.xxh3_128_digest((tmp_path / "p.idx").read_bytes()))
        spool.close()
    run = ["--data-path", tmp_path / "p", "--seq-length", 8, "--global-batch-size", 1]
    status, _, err = cli("trace", *run, "--epochs", 1, "--rows", "p.jsonl")
    assert status == 2
    assert err == (
        f"megaindex trace: {tmp_path}/p.provenance: has 3 documents, and its pair 4; write the "
        "pair again, or delete the file\n"
    )
    index = build_index(IndexedDataset(tmp_path / "p"), sequence_length=8)
    sources = run_of_index(index, global_batch_size=1).sources
    without = replace(index, datasets=())
    named = run_of_index(without, global_batch_size=1, sources=sources)
    (tmp_path / "p.provenance").unlink()
    (origin,) = origins(named, steps_of(named, 0), text=True, tokenizer="bytes")
    assert origin.text == bytes(range(8)).decode()
    bare = replace(named, sources=(replace(sources[0], path_prefix=""),))
    with pytest.raises(InvalidArgument, match="the run has no path of the pair; give its sources"):
        list(origins(bare, steps_of(bare, 0), text=True, tokenizer="bytes"))
    write_corpus(tmp_path / "f", [8] * 4, np.float64)
    floats = run_of_index(build_index(tmp_path / "f", sequence_length=8), global_batch_size=1)
    with pytest.raises(InvalidArgument, match="its tokens are float64, and no ids of text"):
        list(origins(floats, steps_of(floats, 0), text=True, tokenizer="bytes"))


def test_steps_are_wrapped_at_80_columns() -> None:
    """Of the steps up to 52 the line would have 81."""
    run: Any = SimpleNamespace(past_steps=0, num_steps=60)
    runs: Any = SimpleNamespace(sample=np.arange(3), length=np.arange(3))
    _, first, second, _ = _summary(run, runs, 1, [(n, n) for n in range(0, 58, 2)])
    assert (first.split()[-1], second) == ("50", "  52 54 56")
    assert len(f"{first} 52") == 81
    whole = [0, 2, 4, 6, *range(10, 52, 2), 100, 102]
    _, first, second, _ = _summary(run, runs, 1, [(n, n) for n in whole])
    assert (len(first), second) == (80, "  102")


def test_rows_of_another_part_of_the_corpus(folder: Path) -> None:
    run = runs(folder)["neox"]
    settings = {"data_path": (str(folder / "a"),), "split": (9, 1, 0)}
    stream = run_of_settings(
        **settings, order="neox", sequence_length=64, global_batch_size=8, epochs="3"
    )
    pair = IndexedDataset(str(folder / "a"))
    first = np.searchsorted(pair.document_indices, stream.sources[0].lengths.size)  # of the next
    provenance = open_provenance(str(folder / "a"))
    assert provenance is not None
    rows = provenance.locate(np.array([first - 1, first]))
    inside, outside = (f"{Path(provenance.files[f].path).name}:{row + 1}"
                       for f, row in zip(rows.file, rows.row, strict=True))  # fmt: skip
    assert trace(*run, "--rows", inside)["spans"]
    status, _, err = cli("trace", *run, "--rows", outside)
    assert status == 2
    assert "in another part of the corpus, see --subset and --split" in err


def test_a_file_without_documents(tmp_path: Path) -> None:
    write_corpus(tmp_path / "p", np.random.default_rng(3).integers(1, 90, 40))
    rows = np.arange(40)
    with open(tmp_path / "p.provenance", "wb") as out:
        spool = ProvenanceSpool(str(tmp_path))
        spool.open()
        spool.number_of(RowFile(path="blank.jsonl", format="jsonl"))
        spool.add_file(RowFile(path="p.jsonl", format="jsonl"), rows, 9 * rows, 9 * rows + 8)
        spool.assemble(out, xxhash.xxh3_128_digest((tmp_path / "p.idx").read_bytes()))
        spool.close()
    run = ["--data-path", tmp_path / "p", "--seq-length", 64, "--global-batch-size", 8]
    status, out, err = cli("trace", *run, "--epochs", 1, "--rows", "blank.jsonl")
    assert (status, out) == (2, "")
    assert "no document of this run came from these rows; the pair has no document" in err


def test_a_damaged_provenance(folder: Path, tmp_path: Path) -> None:
    for suffix in ("bin", "idx"):
        (tmp_path / f"p.{suffix}").symlink_to(folder / f"a.{suffix}")
    run = ["--data-path", tmp_path / "p", "--seq-length", 64, "--global-batch-size", 8]
    whole = (folder / "a.provenance").read_bytes()
    for damage, text in (
        (whole[:-3], "truncated"),
        ((folder / "b.provenance").read_bytes(), "belongs to another pair"),
    ):
        (tmp_path / "p.provenance").write_bytes(damage)
        status, _, err = cli("trace", *run, "--epochs", 1, "--step", 0)
        assert status == 2
        assert f"p.provenance: {'must have' if text == 'truncated' else text}" in err


def test_another_tokenizer_at_the_recorded_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("tokenizers")
    from support.tokenizing import train_bpe

    train_bpe(tmp_path)
    (tmp_path / "t.jsonl").write_text('{"text": "The moon read the book. The sea."}\n' * 9)
    monkeypatch.chdir(tmp_path)
    tokenize(tmp_path / "t", ["t.jsonl"], tokenizer="tokenizer.json")
    run = ["--data-path", "t", "--seq-length", 8, "--global-batch-size", 1, "--epochs", 1]
    texts = [span["text"] for span in trace(*run, "--step", 2, "--text")["spans"]]
    assert all(text.strip() for text in texts)
    train_bpe(tmp_path, vocabulary=300)
    status, _, err = cli("trace", *run, "--step", 2, "--text")
    assert status == 2
    assert "is not the recorded tokenizer any more" in err


@pytest.mark.slow
def test_runs_with_skips(folder: Path) -> None:
    """Dropped steps serve nothing, and moved samples are served behind the end."""
    words = ["--order", "epoch", "--data-path", folder / "a", "--seq-length", 64]
    words += ["--global-batch-size", 8, "--epochs", 2, "--skip-steps", "2-4,7"]
    for more in ([], ["--move-skipped"]):
        spans = []
        for step in range(12):
            spans += trace(*words, *more, "--step", step)["spans"]
        assert (7 in {span["step"] for span in spans}) is False
        lines = {span["line"] for span in spans if span["file"].endswith("d.jsonl")}
        for line in sorted(lines)[::9]:
            found = trace(*words, *more, "--rows", f"d.jsonl:{line}")["spans"]
            expected = [s for s in spans if (s["file"][-7:], s["line"]) == ("d.jsonl", line)]
            early = [span for span in found if span["step"] < 12]
            assert sorted(early, key=repr) == sorted(expected, key=repr)
        found = trace(*words, *more, "--rows", "d.jsonl")["spans"]  # and behind the end
        last = max(span["step"] for span in found)
        served = trace(*words, *more, "--step", last)["spans"]
        own = [span for span in served if span["file"].endswith("d.jsonl")]
        expected = [span for span in found if span["step"] == last]
        assert sorted(own, key=repr) == sorted(expected, key=repr)


def test_from_python(folder: Path) -> None:
    stream = run_of_settings(
        data_path=(str(folder / "a"),), sequence_length=64, global_batch_size=8, epochs="2"
    )
    found = runs_of(stream, [7, 3, 3])
    assert (np.diff(found.sample) >= 0).all()
    one = [s.sample for document in (3, 7) for s in steps_of(stream, document)]
    assert sorted(one) == found.sample.tolist()
    assert step_ranges([]) == []
    assert step_ranges([5, 3, 4, 9, 7]) == [(3, 5), (7, 7), (9, 9)]
    assert issubclass(FormatError, ValueError)


def test_samples_behind_the_end_of_the_run_serve_nothing(tmp_path: Path) -> None:
    """Of 9 samples, a document each, 2 steps of 4 are the run."""
    index = build_index(write_corpus(tmp_path / "c", [8] * 9), sequence_length=8, order="packed")
    run = run_of_index(index, global_batch_size=4, num_steps=2)
    documents = index.locate(range(9)).document
    assert sorted(documents) == list(range(9))
    assert runs_of(run, documents).document.tolist() == documents[:8].tolist()
    assert [serving.step for serving in steps_of(run, documents[7])] == [1]
    assert steps_of(run, documents[8]) == []


@for_each("known", ["micro_batch_size", "data_parallel_size"])
def test_a_rank_needs_both_sizes(known: str, tmp_path: Path) -> None:
    index = build_index(write_corpus(tmp_path / "c", [8] * 9), sequence_length=8)
    sizes: dict[str, Any] = {known: 2}
    run = run_of_index(index, global_batch_size=4, **sizes)
    assert {(each.rank, each.micro_batch) for each in documents_of(run, 0)} == {(None, None)}
    with pytest.raises(InvalidArgument, match="a rank needs micro batch size and data-par"):
        documents_of(run, 0, rank=0)


def test_rows_of_a_file_that_grew_and_of_many_files(tmp_path: Path) -> None:
    """A pair has two of its four rows, another all."""
    names = ["a.jsonl", "b.jsonl", "c.jsonl", "d.jsonl"]
    with inside(tmp_path):
        for name, rows in (("few", 2), ("all", 4)):
            for file in names:
                Path(file).write_text('{"text": "The moon read the book."}\n' * rows)
            tokenize(tmp_path / name, names, eod=256)
        run = ["--data-path", 1, "few", 1, "all", "--seq-length", 8, "--global-batch-size", 4,
               "--train-iters", 20]  # fmt: skip
        assert {span["line"] for span in trace(*run, "--rows", "a.jsonl:2-4")["spans"]} == {2, 3, 4}
        _, _, err = cli("trace", *run, "--rows", "a.jsonl:2-5")
        assert "a.jsonl:2-5: the last row of" in err
        assert "with a document is 4, got 5; give rows up to 4" in err
        _, _, err = cli("trace", *run, "--rows", "e.jsonl")
    some = ", ".join(str(tmp_path / name) for name in names[:3])
    assert f"e.jsonl: none of the 4 input files of the run, such as {some}; give the path" in err


def test_at_most_two_hundred_spans_are_printed(tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", [8] * 202, np.uint16)  # a span each
    words = ["--data-path", tmp_path / "c", "--seq-length", 8, "--global-batch-size", 1]
    words += ["--order", "packed", "--epochs", 1]
    (tmp_path / "200").write_text(" ".join(map(str, range(200))))
    (tmp_path / "201").write_text(" ".join(map(str, range(201))))
    for which, more in (
        (("--step", "0-199"), ""),
        (("--step", "0-200"), "1 more spans; --json lists all"),
        (("--documents", tmp_path / "200"), ""),
        (("--documents", tmp_path / "201"), "1 more spans; --json lists all"),
    ):
        status, out, err = cli("trace", *words, *which)
        assert (status, err) == (0, "")
        assert out.count("unknown") == 200
        assert out.strip().endswith(more or "unknown")
