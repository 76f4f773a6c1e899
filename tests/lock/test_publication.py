"""Locks as publications: what they pin beside the identity, public names, lengths, summaries."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each
from support.locked_runs import RUNS, write_inputs

from megaindex import IndexedDataset, IndexedDatasetWriter
from megaindex.errors import FormatError, InvalidArgument, MegaIndexError
from megaindex.format.pair import provenance_path
from megaindex.format.provenance import ProvenanceSpool, RecordedTokenizer, RowFile
from megaindex.lock import make_lock, read_lock, verify_lock
from megaindex.lock.lengths import write_lengths
from megaindex.lock.lock_file import lock_text
from megaindex.lock.publication import with_about
from megaindex.lock.shape import Misshapen, check_shape, lock_schema
from megaindex.lock.summaries import croissant, eu_summary

RUN = "--seq-length 16 --train-iters 30 --global-batch-size 4 --eval-iters 0"
TOKENIZERS = [
    RecordedTokenizer(path=f"/home/ann/{name}.json", fingerprint=f"tokenizers 1 {name}",
                      add_special_tokens=name == "a", eod=eod)
    for name, eod in (("a", 0), ("b", None))
]  # fmt: skip
PROGRAM = Path(__file__).parents[1] / "independent" / "lock.js"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two pairs of one name, the second with modes, and documents of two sequences."""
    for name in ("a", "b"):
        (tmp_path / "home" / name).mkdir(parents=True)
    write_corpus(tmp_path / "home" / "a" / "text", np.arange(1, 60), np.uint16)
    other = str(tmp_path / "home" / "b" / "text")
    with IndexedDatasetWriter(other, dtype="int32", multimodal=True) as writer:
        for length in range(2, 60):
            writer.add_document(np.arange(length), lengths=[1, length - 1], modes=[0, 1])
    monkeypatch.chdir(tmp_path)
    return tmp_path


def lock(*words: str, out: str = "run.lock") -> dict[str, Any]:
    """Lock a blend of both pairs, or what else is named; return what the command prints."""
    run = words if words[:1] and words[0].endswith(".lock") else (*BLEND, *RUN.split(), *words)
    status, text, error = cli("lock", *run, "--out", out, "--overwrite", "--json")
    assert status == 0, error
    found: dict[str, Any] = json.loads(text)
    return found


BLEND = ("1", "home/a/text", "2", "home/b/text")


def rules(path: str, **options: Any) -> list[str]:
    return [found.rule for found in verify_lock(path, whole=True, **options).findings]


def write_provenance(prefix: str, *tokenizers: RecordedTokenizer | None) -> None:
    count = IndexedDataset(prefix).document_indices.size - 1
    spool = ProvenanceSpool(str(Path(prefix).parent))
    spool.open()
    for number, tokenizer in enumerate(tokenizers):
        rows = np.arange(count * number // len(tokenizers), count * (number + 1) // len(tokenizers))
        file = RowFile(path=f"{number}.jsonl", format="jsonl", tokenizer=tokenizer)
        spool.add_file(file, rows, 10 * rows, 10 * rows + 9)
    with open(provenance_path(prefix), "wb") as out:
        spool.assemble(out, xxhash.xxh3_128_digest(Path(f"{prefix}.idx").read_bytes()))
    spool.close()


def test_a_run_has_one_identity_wherever_it_is(folder: Path) -> None:
    found = set()
    for place in ("one", "two/deep", "three"):
        shutil.copytree(folder / "home", folder / place / "home")
        path = str(folder / place / "run.lock")
        blend = [str(folder / place / word) if "/" in word else word for word in BLEND]
        status, text, _ = cli("lock", *blend, *RUN.split(), "--out", path, "--json")
        assert status == 0
        found.add(json.loads(text)["identity"])
        found.add(json.loads(cli("verify", path, "--json")[1])["reports"][0]["identity"])
        found.add(json.loads(cli("report", path, "--json")[1])["identity"])
        for verb in ("verify", "report"):
            assert read_lock(path).identity in cli(verb, path)[1]
    assert len(found) == 1


def test_tokenizers_and_provenance_are_pinned_beside_the_identity(folder: Path) -> None:
    del folder
    plain = lock(out="plain.lock")["identity"]
    write_provenance("home/a/text", TOKENIZERS[1], None, TOKENIZERS[0], TOKENIZERS[1])
    write_provenance("home/b/text", TOKENIZERS[0])
    assert lock()["identity"] == plain
    content = read_lock("run.lock").content
    assert [(row[7], row[8]) for row in content["sources"]["rows"]] == [
        ("uint16", [0, 1]), ("int32", [1])]  # fmt: skip
    assert [(each["name"], each["fingerprint"], each["special_tokens"], each["eod"])
            for each in content["tokenizers"]] == [
        ("/home/ann/b.json", "tokenizers 1 b", False, None),
        ("/home/ann/a.json", "tokenizers 1 a", True, 0)]  # fmt: skip
    assert "2 of 2 .provenance" in verify_lock("run.lock").compared
    assert rules("plain.lock") == []

    _, text, _ = cli("prove", "plain.lock", "run.lock")
    assert f"identity: {plain} in both" in text
    assert "beside it: other tokenizer of source 0, tokenizer of source 1, provenance of" in text
    assert "no other tokenizer, provenance or about" in cli("prove", "run.lock", "run.lock")[1]

    file = Path("home/b/text.provenance")
    with open(file, "ab") as out:
        out.write(b"\0")
    assert [(e.rule, e.file) for e in verify_lock("run.lock").findings] == [
        ("provenance", f"{file.absolute()}")]  # fmt: skip
    with pytest.raises(FormatError, match="text.provenance: must have"):
        make_lock(data_path=["home/b/text"], sequence_length=16, train_iters=3, global_batch_size=1)
    file.unlink()  # which names input files, and may not be published
    report = verify_lock("run.lock")
    assert (report.is_clean, "1 of 2 .provenance" in report.compared) == (True, True)


def test_a_public_lock_shows_no_folder_and_is_verified_by_lengths(folder: Path) -> None:
    write_provenance("home/a/text", TOKENIZERS[0])
    lock("--public", "--lengths", "run.lengths")
    text = Path("run.lock").read_text()
    assert not [word for word in (str(folder), "home", "ann", "a/text") if word in text]
    sources = read_lock("run.lock").content["sources"]["rows"]
    assert [row[0] for row in sources] == ["text", "text-2"]
    lock(out="private.lock")
    assert lock("private.lock", "--public", out="again.lock")["identity"] == lock()["identity"]
    assert rules("run.lock", search=folder / "home") == []
    shutil.rmtree(folder / "home")
    report = verify_lock("again.lock", whole=True, lengths="run.lengths")
    assert report.is_clean
    assert "the lengths of the sources" in report.compared
    assert not any(".idx" in text or "provenance" in text for text in report.compared)


@pytest.mark.slow
@for_each("name", RUNS)
def test_public_locks_of_every_kind_of_run(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_inputs(tmp_path)
    words = RUNS[name].split()
    assert cli("lock", *words, "--out", "run.lock", "--public", "--lengths", "run.lengths")[0] == 0
    text = Path("run.lock").read_text()
    assert str(tmp_path) not in text
    assert "data/" not in text
    shutil.rmtree("data")
    step = 5003 if name == "past" else 3
    assert cli("verify", "run.lock", "--all", "--lengths", "run.lengths")[0] == 0
    assert cli("verify", "run.lock", "--step", step, "--lengths", "run.lengths")[0] == 0
    if node := shutil.which("node"):
        command = [node, str(PROGRAM), "verify", "run.lock", "run.lengths"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stderr) == (0, "")
        assert read_lock("run.lock").identity in done.stdout
        assert "not compared: tokens" in done.stdout


def test_every_changed_byte_of_lengths_is_found(folder: Path) -> None:
    lock("--lengths", "run.lengths")
    text, node = Path("run.lengths").read_bytes(), shutil.which("node")
    assert int.from_bytes(text[8:16], "little") == 2
    # of the first bounds are 0, 1, …, n
    assert len(text) == 16 + 2 * 48 + 8 * 59 + 4 * (59 + 116)
    shutil.rmtree(folder / "home")
    places = [*range(112), 300, 580, 700, len(text) - 1]
    forged = [text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :] for at in places]
    for number, data in enumerate([*forged, text[:-1], text + b"\0", text[:40], b""]):
        Path("bad.lengths").write_bytes(data)
        assert rules("run.lock", lengths="bad.lengths") == ["lengths"], number
        if node and number % 29 == 0:
            command = [node, str(PROGRAM), "verify", "run.lock", "bad.lengths"]
            assert subprocess.run(command, capture_output=True, check=False).returncode == 1
    assert rules("run.lock", lengths="run.lengths") == []
    Path("bad.lengths").write_bytes(text[:7] + b"\2" + text[8:])
    shown = cli("verify", "run.lock", "--lengths", "bad.lengths", "--json")[1]
    assert ("version 2" in shown, "FormatError" in shown) == (True, False)
    assert cli("verify", "run.lock", "--tokens", "--lengths", "run.lengths")[0] == 2
    assert cli("verify", "run.lock", "--lengths", "no.lengths")[0] == 2


@pytest.mark.slow
def test_the_independent_reader_names_the_block_that_differs(folder: Path) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("there is no node")
    lock()
    command = [node, str(PROGRAM), "verify", "run.lock"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, "1 of 1 receipts" in done.stdout) == (0, True)
    content: Any = json.loads((folder / "run.lock").read_text())
    receipts = content["subsets"]["train"]["receipts"]
    for field in ("blocks", "total"):
        good = receipts[field]
        receipts[field] = ["0" * 32] if field == "blocks" else "0" * 32
        (folder / "run.lock").write_bytes(lock_text(content))
        receipts[field] = good
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert (done.returncode, f"not {'0' * 32}" in done.stdout) == (1, True)


def test_names_with_folders_are_refused(folder: Path) -> None:
    recipe = """
sequence_length: 16
batch: {global_batch_size: 4}
sources: {NAME: {path: home/a/text, shuffle_name: SHUFFLE}}
stages: {a: {steps: 9, batching: random, mix: {NAME: 1}}}
"""  # the shuffle of the stage is named a/0, and a is a folder
    for name, shuffle, rule in (("web", "web", None), ("../a/text", "web", "recipe.sources"),
                                ("web", f"{folder}/home/a/text", "shuffle_name")):  # fmt: skip
        text = recipe.replace("NAME", name).replace("SHUFFLE", shuffle)
        Path("run.yaml").write_text(text)
        status, _, error = cli("lock", "run.yaml", "--public", "--overwrite")
        assert (status, rule is None or rule in error) == (2 if rule else 0, True), error


ABOUT = """
title: Ten tokens
licence: CC0-1.0
version: "2"
address: https://example.org/data
sources:
  home/a/text: {title: A, licence: MIT, url: "https://example.org/a/text"}
  home/b/text: {url: "https://example.org/b/text"}
"""

# Of the template, as the summaries published for Apertus (1 September 2025) and SmolLM3 have them
EU_HEADINGS = [
    "1. General information", "1.1 Provider identification", "1.2 Model identification",
    "1.3 Modalities, overall training data size and other characteristics",
    "2. List of data sources", "2.1 Publicly available datasets",
    "2.2 Private non-publicly available datasets obtained from third parties",
    "2.2.1 Datasets commercially licensed by rightsholders or their representatives",
    "2.2.2 Private datasets obtained from other third parties",
    "2.3 Data crawled and scraped from online sources", "2.4 User data", "2.5 Synthetic data",
    "2.6 Other sources of data", "3. Data processing aspects",
    "3.1 Respect of reservation of rights from text and data mining exception or limitation",
    "3.2 Removal of illegal content", "3.3 Other information (optional)",
]  # fmt: skip


def test_about_and_addresses_are_beside_the_identity(folder: Path) -> None:
    del folder
    Path("about.yaml").write_text(ABOUT)
    plain = lock()["identity"]
    assert lock("run.lock", "--about", "about.yaml", "--public", out="about.lock")[
        "identity"] == plain  # fmt: skip
    found = read_lock("about.lock")
    assert [source.url for source in found.sources] == [
        "https://example.org/a/text", "https://example.org/b/text"]  # fmt: skip
    assert found.content["about"]["run"]["licence"] == "CC0-1.0"
    assert found.content["about"]["sources"] == [{"title": "A", "licence": "MIT"}, {}]
    for prefix, name in (("home/a/text", "text"), ("home/b/text", "text-2")):
        for suffix in (".idx", ".bin"):
            shutil.copy(f"{prefix}{suffix}", f"{name}{suffix}")
    assert "beside it: other about" in cli("prove", "run.lock", "about.lock")[1]
    text = eu_summary(found)
    assert "Less than 1 billion tokens" in text
    assert "| A " in text


@for_each(
    ("old", "new", "rule"),
    [
        ("licence: CC0", "license: CC0", "unknown setting license; did you mean licence"),
        ("title: Ten tokens", "title: [1]", "title must be text"),
        ("title: Ten tokens", "title: ''", "title must be printable text"),
        ("title: Ten tokens", 'title: "a\\nb"', "title must be printable text"),
        ("Ten tokens", "x" * 1001, "title must be printable text"),
        ('"2"', "2.0", "version must be text"),
        ("https://example.org/data", "example.org", "address must be an address"),
        ("home/b/text", "home/c/text", "sources.home/c/text: is no source of the run"),
        ("home/b/text", "./home/a/text", "given twice"),
        ('{url: "https://example.org/b/text"}', "3", "must be a mapping"),
        ('{url: "https://example.org/b/text"}', "{path: b}", "unknown setting path"),
    ],
)
def test_what_about_refuses(old: str, new: str, rule: str, folder: Path) -> None:
    del folder
    lock()
    assert old in ABOUT
    Path("about.yaml").write_text(ABOUT.replace(old, new, 1))
    with pytest.raises(InvalidArgument, match=rule):
        with_about(read_lock("run.lock"), "about.yaml")


def test_sha256_is_compared(folder: Path) -> None:
    plain = lock(out="plain.lock")["identity"]
    assert lock("--sha256")["identity"] == plain
    found = read_lock("run.lock")
    assert found.content["hash"] == "sha256"
    assert found.content_identity is not None
    digest = subprocess.run(["sha256sum", "home/a/text.bin"], capture_output=True, check=True)
    assert found.content["tokens"]["hashes"][0] == digest.stdout.split()[0].decode()
    assert found.content["tokens"]["chunk_bytes"] is None
    assert rules("run.lock", tokens=True) == []
    for suffix, rule in ((".idx", "idx"), (".bin", "tokens")):
        path = folder / "home" / "b" / f"text{suffix}"
        text = path.read_bytes()
        path.write_bytes(text[:-1] + bytes([text[-1] ^ 1]))
        assert rules("run.lock", tokens=True) == [rule]
        assert rules("plain.lock") == ["idx"] * (suffix == ".idx")
        path.write_bytes(text)
    shown = cli("prove", "run.lock", "run.lock")[1]
    assert "tokens not compared" not in shown
    assert "chunks of all and of 67108864 bytes" in _of_tokens("run.lock")


def _of_tokens(first: str) -> str:
    lock("--tokens", out="tokens.lock")
    return cli("prove", first, "tokens.lock")[1]


@for_each(
    "change",
    [
        lambda lock: lock.update(hash="xxh3-64"),
        lambda lock: lock.update(hash="md5"),
        lambda lock: lock.update(hash=["sha256"]),
        lambda lock: lock.update(tokens=None),
        lambda lock: lock["tokens"].update(chunk_bytes=2**26),
        lambda lock: lock["tokens"]["hashes"].pop(),
        lambda lock: lock.update(tokenizers=3),
        lambda lock: lock["sources"]["rows"][0][8].append(0),
        lambda lock: lock["sources"]["rows"][0].__setitem__(2, "0" * 16),
        lambda lock: lock["sources"]["rows"][0].__setitem__(7, "object"),
        lambda lock: lock["sources"]["rows"][0].__setitem__(9, "0" * 63),
        lambda lock: lock["sources"]["rows"][0].__setitem__(10, "example.org"),
        lambda lock: lock.update(about={"run": {}, "sources": [None]}),
        lambda lock: lock.update(about={"run": {"colour": ""}, "sources": [None, None]}),
        lambda lock: lock.update(about={"run": {"title": 1}, "sources": [None, None]}),
    ],
)
def test_other_shapes_are_refused(change: Callable[[Any], None], folder: Path) -> None:
    lock("--sha256")
    content = json.loads((folder / "run.lock").read_text())
    check_shape(content)
    change(content)
    with pytest.raises(Misshapen):
        check_shape(content)


def test_a_schema_of_the_table(folder: Path) -> None:
    """Of the shape alone: what it refuses, the table refuses."""
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads(cli("schema", "--locks")[1])
    assert schema == json.loads(json.dumps(lock_schema()))
    validator = jsonschema.Draft202012Validator(schema)
    for path in (Path(__file__).parents[1] / "golden" / "locks").glob("*.lock"):
        validator.validate(json.loads(path.read_text()))
    lock("--sha256")
    content = json.loads((folder / "run.lock").read_text())
    changes: list[Callable[[Any], object]] = [
        lambda lock: lock.update(colour=1),
        lambda lock: lock.pop("about"),
        lambda lock: lock["subsets"]["train"].update(rounds="1"),
        lambda lock: lock["subsets"]["train"]["index"].update(order="shuffled"),
        lambda lock: lock["subsets"]["train"]["index"].update(samples=0),
        lambda lock: lock["settings"].update(kind="recipe"),
        lambda lock: lock["sources"]["rows"][0].pop(),
    ]
    for change in changes:
        changed = json.loads(json.dumps(content))
        change(changed)
        assert not validator.is_valid(changed)
        with pytest.raises(Misshapen):
            check_shape(changed)


def test_croissant_says_when_it_is_live(folder: Path) -> None:
    del folder
    Path("about.yaml").write_text(ABOUT)
    for words, lacks in (
        ((), ["SHA-256", "the address of"]),
        (("--sha256",), ["the address of"]),
        (("--about", "about.yaml"), ["SHA-256"]),
        (("--sha256", "--about", "about.yaml"), []),
    ):
        lock(*words)
        status, text, error = cli("report", "run.lock", "--format", "croissant")
        found = json.loads(text)
        assert (status, found) == (0, croissant(read_lock("run.lock"))[0])
        assert found.get("isLiveDataset", False) == bool(lacks)
        assert error.count("live data set") == len(lacks)
        assert all(each in error for each in lacks)
        files = found["distribution"]
        assert len(files) == 4
        assert all(("sha256" in file) == ("--sha256" in words) for file in files)
    status, text, error = cli("report", "run.lock", "--format", "eu")
    assert (status, text) == (0, eu_summary(read_lock("run.lock")))
    assert "live data set" not in error
    assert files[0]["contentUrl"] == "https://example.org/a/text.bin"
    assert (found["license"], files[0]["license"]) == ("CC0-1.0", "MIT")


@for_each(
    ("tokens", "answer"),
    [
        (10**9 - 1, "Less than 1 billion tokens"),
        (10**9, "1 billion to 10 trillion tokens"),
        (10**13, "1 billion to 10 trillion tokens"),
        (10**13 + 1, "More than 10 trillion tokens"),
    ],
)
def test_sizes_of_the_summary_are_ranges(tokens: int, answer: str, folder: Path) -> None:
    del folder
    lock()
    found = read_lock("run.lock")
    rows: Any = found.content["sources"]["rows"]
    rows[0][6] = tokens - rows[1][6]
    text = eu_summary(found)
    assert f"Training data size: {answer}" in text
    assert f"{100 * rows[1][6] / tokens:.2f} %" in text
    numbered = re.findall(r"^(?:#+|-) (\d.*?)(?:: .*)?$", text, re.M)
    assert numbered == EU_HEADINGS
    answered = [line for line in text.split("\n") if line.startswith("- ") and "open" not in line]
    assert len(answered) == 1  # nothing else follows from a lock


def test_a_lock_is_published_and_not_locked_again(folder: Path) -> None:
    del folder
    lock()
    for words in ((), ("--tokens", "--public"), ("--sha256", "--public"), ("--seq-length", "8")):
        status, _, error = cli("lock", "run.lock", *words, "--out", "other.lock")
        assert (status, "run.lock" in error) == (2, True)
    write_lengths(read_lock("run.lock"), "run.lengths")
    with pytest.raises(MegaIndexError, match="already exists"):
        write_lengths(read_lock("run.lock"), "run.lengths")
