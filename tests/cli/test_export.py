"""``megaindex export``: arrays that the frameworks' own readers serve.

tests/golden/exports_*.json hold what GPT-NeoX, PaddleNLP and MaxText read of such exports.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.megatron_blends import build, one_process

from megaindex import (
    AmendedBlend,
    BlendChange,
    IndexedDataset,
    IndexedDatasetWriter,
    PackedOrder,
    Skip,
    build_index,
)
from megaindex.audit import run_of_recipe, run_of_settings
from megaindex.errors import FormatError, InvalidArgument
from megaindex.index import array_index
from megaindex.index.array_index import arrays_of
from megaindex.index.skips import resolve_skips, with_skips
from megaindex.index.spans import Index
from megaindex.loader import NumpyDataset
from megaindex.lock import make_lock
from megaindex.recipe import read_recipe
from megaindex.settings.batch_schedule import BatchSchedule

GOLDEN = Path(__file__).parents[1] / "golden"
CASES = [
    pytest.param(framework, recorded["lengths"], case, id=f"{framework}-{number}")
    for framework in ("neox", "paddlenlp", "maxtext")
    for recorded in [json.loads((GOLDEN / f"exports_{framework}.json").read_text())]
    for number, case in enumerate(recorded["cases"])
]


def export(*words: object) -> list[dict[str, Any]]:
    status, out, err = cli("export", *words, "--json")
    assert status == 0, err
    content = json.loads(out)
    assert list(content) == ["to", "order", "data_path", "datasets"]
    found: list[dict[str, Any]] = content["datasets"]
    return found


def refused(*words: object) -> str:
    status, out, err = cli("export", *words)
    assert (status, out, err.count("\n")) == (2, "", 1), err
    return err


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    with contextlib.chdir(tmp_path):
        yield tmp_path


def served(index: Index, samples: int) -> Any:
    """Inputs and last label of the samples that our loader serves, with 0 as padding."""
    batch = NumpyDataset(index)[:samples]
    last = np.where(batch["loss_mask"][:, -1:] > 0, batch["labels"][:, -1:], 0)
    return np.concatenate((batch["tokens"], last), axis=1).astype(np.int64)


def settings_of(words: list[str]) -> dict[str, Any]:
    """Settings of the run that the words describe, as arguments."""
    flags: dict[str, Any] = {}
    for word, value in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, _, own = word[2:].replace("-", "_").partition("=")
            flags[name] = own or value
    names = [name for name in flags if name not in ("to", "cache_dir")]
    whole = (
        "seq_length",
        "global_batch_size",
        "eval_interval",
        "eval_iters",
        "train_iters",
        "seed",
    )
    given = {name: int(flags[name]) if name in whole else flags[name] for name in names}
    for name in given.keys() & {
        "data_path",
        "train_data_path",
        "valid_data_path",
        "test_data_path",
    }:
        given[name] = [given[name]]
    for name in given.keys() & {"epochs_mixed"}:
        given[name] = int(given[name])
    return {"order": "epoch", **given}


@pytest.mark.parametrize(("framework", "lengths", "case"), CASES)
def test_frameworks_serve_what_the_loader_serves(
    folder: Path, framework: str, lengths: list[int], case: dict[str, Any]
) -> None:
    with IndexedDatasetWriter("corpus", dtype="uint16") as writer:
        for k, length in enumerate(lengths):
            writer.add_document((7 * k + np.arange(length)) % 60_000 + 1)
    words = case["words"]
    found = export(*words[1:])
    files = {file for each in found for file in each["files"]}
    assert {file for file in files if file.endswith(".npy")} == set(case["files"])
    assert all(os.path.isfile(file) for file in files)
    assert [each["subset"] for each in found] == list(case["subsets"])
    for each, (subset, theirs) in zip(found, case["subsets"].items(), strict=True):
        stream = run_of_settings(**settings_of(words), subset=subset)
        assert each["samples_served"] == theirs["served"] <= each["num_samples"]
        assert theirs["length"] >= each["num_samples"]
        text = served(stream.index, theirs["served"])
        assert hashlib.sha256(text.tobytes()).hexdigest() == theirs["sha256"]
    statuses = [each["status"] for each in export(*words[1:])]
    assert statuses == ["already there"] * len(found)


MEGATRON = (
    "--to", "megatron", "--data-path", "corpus", "--split", "90,5,5", "--seq-length", 16,
    "--seed", 1, "--global-batch-size", 4, "--eval-iters", 1, "--eval-interval", 100,
    "--cache-dir", "cache",
)  # fmt: skip


@pytest.fixture
def megatron(megatron_datasets: Any, folder: Path) -> Iterator[Any]:
    """megatron-core in one process, a corpus, and a description that it wrote in another folder."""
    write_corpus(folder / "corpus", np.random.default_rng(3).integers(0, 60, 300), np.uint16)
    with one_process(megatron_datasets, folder / "store") as core:
        build(core, [8, 4, 4], "other", blend=(["corpus"], None), split="90, 5, 5")
        (core.description,) = folder.glob("other/*-train-description.txt")
        yield core


@pytest.mark.parametrize(
    "words",
    [
        ("--epochs", 1),
        ("--epochs", 3, "--left-over", "carry"),
        ("--epochs", 1, "--order", "packed", "--long-documents", "skip"),
    ],
    ids=lambda words: " ".join(map(str, words)),
)
def test_megatron_core_serves_the_order_and_builds_nothing(
    megatron: Any, words: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    found = export(*MEGATRON, *words, "--description", megatron.description)
    assert [each["subset"] for each in found] == ["train", "valid", "test"]
    before = {file: os.stat(file).st_mtime_ns for file in os.listdir(".") if os.path.isfile(file)}
    from megatron.core.datasets import gpt_dataset

    for name in ("_build_document_index", "_build_shuffle_index"):
        monkeypatch.setattr(gpt_dataset, name, None)
    caplog.set_level(logging.INFO, "megatron")
    sizes = [each["samples_requested"] for each in found]
    made = build(megatron, sizes, "cache", blend=(["corpus"], None), split="90, 5, 5")
    assert caplog.text.count("Load the GPTDataset train indices") == 1
    given = dict(zip([str(w).replace("--", "").replace("-", "_") for w in words[::2]], words[1::2],
                     strict=True))  # fmt: skip
    run = {"data_path": ["corpus"], "split": "90,5,5", "seq_length": 16, "seed": 1,
           "global_batch_size": 4, "eval_iters": 1, "eval_interval": 100}  # fmt: skip
    for each, theirs in zip(found, made, strict=True):
        index = run_of_settings(**{"order": "epoch", **run, **given}, subset=each["subset"]).index
        assert len(theirs) >= index.num_samples == each["num_samples"]
        if words == ("--epochs", 1) and each["num_epochs"] == 1:
            assert len(theirs) == index.num_samples  # an epoch is an epoch
        ours = NumpyDataset(index)
        for number in range(0, each["samples_served"], 17):
            expected, sample = ours[number], theirs[number]
            np.testing.assert_array_equal(expected["tokens"], sample["tokens"])
            kept = expected["loss_mask"] > 0
            np.testing.assert_array_equal(expected["labels"][kept], sample["labels"][kept])
            assert sample["loss_mask"].numpy()[kept].all()
    after = {file: os.stat(file).st_mtime_ns for file in before}
    assert before == after


def test_the_adapter_refuses_exported_arrays(megatron: Any) -> None:
    import megaindex.adapters.megatron as adapter

    (train,) = export(
        *MEGATRON, "--epochs", 1, "--subset", "train", "--description", megatron.description
    )
    adapter.install()
    try:
        with pytest.raises(FormatError, match="export wrote these index arrays"):
            build(
                megatron, [train["samples_requested"], 0, 0], "cache",
                blend=(["corpus"], None), split="90, 5, 5",
            )  # fmt: skip
    finally:
        adapter.uninstall()


NEOX = ("--to", "neox", "--data-path", "c", "--seq-length", 16, "--global-batch-size", 4)


def test_files_with_other_content_are_kept(folder: Path) -> None:
    write_corpus(folder / "c", [40] * 50)
    (one,) = export(*NEOX, "--epochs", 2)
    assert export(*NEOX, "--epochs", 2, "--check")[0]["status"] == "as exported"
    documents = next(Path(file) for file in one["files"] if "doc_idx" in file)
    content = documents.read_bytes()
    words = (*NEOX, "--epochs", 2, "--order", "window")
    assert "has other content than order window of this run; give --overwrite" in refused(*words)
    assert documents.read_bytes() == content
    status, out, _ = cli("export", *words, "--check", "--overwrite")
    assert status == 1
    assert "the run reads 248: different" in out
    assert documents.read_bytes() == content
    assert export(*words, "--overwrite")[0]["status"] == "written"
    assert documents.read_bytes() != content
    documents.write_bytes(documents.read_bytes()[:150])  # cut short
    assert cli("export", *words, "--check")[0] == 1
    assert export(*words, "--overwrite")[0]["status"] == "written"
    # without the record that megaindex wrote them
    for record in folder.glob("*-megaindex.json"):
        record.unlink()
    before = documents.read_bytes()
    text = refused(*NEOX, "--epochs", 2, "--overwrite")
    assert "which megaindex export did not write" in text
    assert documents.read_bytes() == before
    for file in one["files"]:
        Path(file).unlink()
    assert cli("export", *NEOX, "--epochs", 2, "--check")[0] == 1
    assert not list(folder.glob("*.npy"))


def test_documents_behind_the_last_sample_are_not_compared(folder: Path) -> None:
    """As frameworks list them, where the end of the corpus fills no sample."""
    write_corpus(folder / "c", [3, 40, 7] * 30)
    (one,) = export(*NEOX, "--epochs", 1)
    path = next(file for file in one["files"] if "doc_idx" in file)
    documents = np.load(path)
    for found, status in (
        (np.append(documents, documents[:2]), "as exported"),
        (documents[:-1], "different"),
        (np.append(documents[:-1], documents[:1]), "different"),
        (np.append(documents, 0).astype(np.int64), "different"),
        (np.array(3, np.int32), "different"),
    ):
        np.save(path, found)
        assert f": {status}\n" in cli("export", *NEOX, "--epochs", 1, "--check")[1]
    np.save(path, np.append(documents, documents[:2]))
    assert export(*NEOX, "--epochs", 1)[0]["status"] == "already there"
    assert np.load(path).size == documents.size + 2


def test_a_description_that_changed_is_no_export_of_the_run(megatron: Any) -> None:
    words = [*MEGATRON, "--epochs", 1, "--description", megatron.description]
    (one, *_) = export(*words)
    (marker,) = [path for path in one["files"] if path.endswith("-description.txt")]
    assert export(*words, "--check")[0]["status"] == "as exported"
    text = Path(marker).read_text()
    Path(marker).write_text(text + " ")
    status, out, _ = cli("export", *words, "--check")
    assert (status, ": different\n" in out) == (1, True)
    Path(marker).write_bytes(b"\xff")
    assert "-description.txt: not a text file: " in refused(*words, "--check")


def test_labels_behind_documents_are_warned_of(folder: Path) -> None:
    write_corpus(folder / "c", [20, 5, 7] * 20)
    words = ("--to", "maxtext", *NEOX[2:], "--epochs", 1, "--cache-dir", "x")
    packed = ("--order", "packed", "--long-documents", "truncate")
    for more, said in ((packed, True), ((), False)):
        status, out, _ = cli("export", *words, *more, "--overwrite")
        assert status == 0
        assert ("Labels behind the end of a document carry loss, unless" in out) == said


def test_a_set_without_a_file_is_completed(folder: Path) -> None:
    write_corpus(folder / "c", [40] * 50)
    (one,) = export(*NEOX, "--epochs", 1)
    os.unlink(one["files"][1])
    assert ": missing\n" in cli("export", *NEOX, "--epochs", 1, "--check")[1]
    assert export(*NEOX, "--epochs", 1)[0]["status"] == "written"
    assert export(*NEOX, "--epochs", 1, "--check")[0]["status"] == "as exported"


def test_a_name_of_the_shuffle(folder: Path) -> None:
    write_corpus(folder / "c", np.random.default_rng(1).integers(1, 90, 200))
    shuffles = []
    for names in ([], ["--shuffle-names", "text"]):
        (found,) = export(
            "--to", "neox", "--data-path", "c", "--seq-length", 16, "--epochs", 1,
            "--global-batch-size", 4, "--eval-iters", 0, *names, "--overwrite",
        )  # fmt: skip
        shuffles.append(np.load(next(f for f in found["files"] if "doc_idx" in f)).tolist())
    index = build_index("c", sequence_length=16, order="epoch", source_name="text", epochs=1)
    assert index.materialise(0).document_index.tolist() == shuffles[1]
    assert shuffles[0] != shuffles[1]


def test_a_recipe_and_a_lock(folder: Path) -> None:
    write_corpus(folder / "c", np.random.default_rng(1).integers(1, 90, 200))
    Path("run.yaml").write_text(
        "sequence_length: 16\nbatch: {micro_batch_size: 4, data_parallel_size: 1}\n"
        "sources: {web: c}\nstages:\n  one: {epochs: 1, mix: {web: }}\n"
        "  two: {epochs: 0.5, mix: {web: }}\n"
    )
    (one,) = export("--to", "neox", "--recipe", "run.yaml")
    stream = run_of_recipe(read_recipe("run.yaml"))
    assert one["samples_served"] == one["samples_requested"] == stream.num_samples
    files = {name: np.load(next(f for f in one["files"] if name in f))
             for name in ("doc_idx", "sample_idx", "shuffle_idx")}  # fmt: skip
    # rows of two epochs, and one between them
    assert len(files["sample_idx"]) == one["num_samples"] + 2
    assert len(files["shuffle_idx"]) == one["num_samples"] + 1  # of any id, GPT-NeoX reads an entry
    assert cli("lock", "--recipe", "run.yaml")[0] == 0
    (locked,) = export("--to", "neox", "--lock", "run.lock")
    assert locked["status"] == "already there"
    assert locked["files"] == [os.path.abspath(file) for file in one["files"]]
    assert "--lock has the whole run, also --seed" in refused(
        "--to", "neox", "--lock", "run.lock", "--seed", 1
    )
    text = Path("run.yaml").read_text()
    Path("again.yaml").write_text(text.replace("{web: }}\n", "{web: {restart: true}}}\n"))
    (again,) = export("--to", "neox", "--recipe", "again.yaml", "--overwrite")
    assert again["samples_served"] == stream.num_samples
    sized = "{epochs: 1, batching: per_stream, mix: {web: {batch_size: BATCH}}}\n"
    for size in (8, 4):
        Path("sized.yaml").write_text(
            text.partition("stages")[0] + "stages:\n  one: " + sized.replace("BATCH", str(size))
        )
        if size == 4:  # that of the recipe
            export("--to", "neox", "--recipe", "sized.yaml", "--overwrite")
        else:
            said = refused("--to", "neox", "--recipe", "sized.yaml")
            assert re.search(
                r"serves (\d+) samples in (\d+) steps, and the framework \d+; give", said
            )
    Path("own.yaml").write_text(text.replace("0.5,", "0.5, sequence_length: 32,"))
    assert "one of each; leave them out" in refused("--to", "neox", "--recipe", "own.yaml")
    assert "a recipe trains on all documents" in refused(
        "--to", "neox", "--recipe", "run.yaml", "--split", "9,1"
    )


def test_a_changed_run_of_one_corpus(folder: Path) -> None:
    for name in "cd":
        write_corpus(folder / name, np.random.default_rng(1).integers(1, 90, 200))
    now = BlendChange(consumed_samples=24, weights={"c": 1})
    common = {"sequence_length": 16, "global_batch_size": 4, "train_iters": 20}
    for began, name in ([1, "c"], "one"), ([1, "c", 1, "d"], "two"):
        amend = AmendedBlend(data_path=began, num_samples=80, changes=[now])
        make_lock(amend=amend, data_path=[1, "c"], **common).write(f"{name}.lock")
    (one,) = export("--to", "neox", "one.lock")
    assert (one["samples_served"], one["samples_requested"]) == (80, 81)
    assert "has 2 sources" in refused("--to", "neox", "--lock", "two.lock")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ((*NEOX, "--epochs", 1, "--cache-dir", "x"), "lie beside its data"),
        (("--to", "maxtext", *NEOX[2:], "--epochs", 1), "--cache-dir is missing"),
        (("--to", "maxtext", *NEOX[2:], "--epochs", 1, "--cache-dir", "s3://b/c"), "on a disk"),
        ((*NEOX, "--epochs", 1, "--data-path", "s3://b/c"), "neox reads files on a disk"),
        (
            (*NEOX[:2], *NEOX[4:], "--epochs", 1, "--tokens-per-epoch", 9000),
            "an order is exported of documents",
        ),
        (("--to", "megatron", *NEOX[2:], "--epochs", 1, "--cache-dir", "x"), "--description is"),
        ((*NEOX, "--epochs", 1, "--description", "x"), "names its arrays without one"),
        (("--to", "paddlenlp", *NEOX[2:], "--epochs", 1), "--split is missing: PaddleNLP"),
        (("--to", "nemo", *NEOX[2:], "--epochs", 1), "--to must be"),
        ((*NEOX, "--epochs", 1, "--data-path", "c", "d"), "has 2 sources"),
        ((*NEOX, "--epochs", 1, "--tail", "pad"), "drops the samples that fill no batch"),
        ((*NEOX, "--epochs", 2, "--skip-steps", "1-2"), "skips are applied by megaindex"),
        ((*NEOX, "--train-iters", 9, "--consumed-samples", 4), "--consumed-samples"),
        ((*NEOX, "--epochs", 1, "--order", "packed"), "joins tokens 16 to 19 of document"),
        (
            (*NEOX, "--epochs", 1, "--order", "packed", "--long-documents", "truncate"),
            "samples have fewer than 16 tokens and a label",
        ),
        ((*NEOX, "--epochs", 1, "--subset", "valid"), "--subset valid: the run reads nothing"),
    ],
)
def test_what_the_arrays_cannot_express_is_refused(folder: Path, words: Any, message: str) -> None:
    for name in "cd":
        write_corpus(folder / name, [20, 36, 5, 7] * 20)
    before = sorted(os.listdir())
    assert message in refused(*words)
    assert sorted(os.listdir()) == before


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a description of a GPTDataset"),
        ("[1]", "without class"),
        ("{}", "without class"),
        (json.dumps({"class": "BlendedDataset"}), "without dataset_path"),
    ],
)
def test_descriptions_of_something_else(folder: Path, text: str, message: str) -> None:
    write_corpus(folder / "corpus", [40] * 50)
    Path("d.txt").write_text(text)
    assert message in refused(*MEGATRON, "--epochs", 1, "--description", "d.txt")


def test_a_description_of_another_split(megatron: Any) -> None:
    words = [*MEGATRON, "--epochs", 1, "--description", megatron.description]
    words[words.index("90,5,5")] = "80,10,10"
    assert "its run has the split 90, 5, 5, this one 80,10,10" in refused(*words)


def test_documents_of_several_sequences_are_refused_for_maxtext_alone(folder: Path) -> None:
    with IndexedDatasetWriter("c", dtype="uint16") as writer:
        for _ in range(20):
            writer.add_document(np.arange(40), lengths=[10, 30])
    words = ("--to", "maxtext", *NEOX[2:], "--epochs", 1, "--cache-dir", "x")
    assert "20 of 40 sequences" in refused(*words)
    (one,) = export(*NEOX, "--epochs", 1)
    assert all(os.path.exists(file) for file in one["files"])


def test_paddlenlp_looks_beside_the_data_first(folder: Path) -> None:
    write_corpus(folder / "c", [40] * 50)
    words = ("--to", "paddlenlp", *NEOX[2:], "--epochs", 1, "--split", "1,0,0")
    (one,) = export(*words)
    assert os.path.dirname(one["files"][0]) == "index-cache"
    text = refused(*words, "--cache-dir", "other", "--order", "window")
    assert "PaddleNLP reads these index arrays, which lie beside the data" in text
    for file in one["files"]:
        os.unlink(file)
    (other,) = export(*words, "--cache-dir", "other")
    assert other["status"] == "written"
    assert other["files"] == [os.path.join("other", os.path.basename(f)) for f in one["files"]]
    assert all(os.path.exists(file) for file in other["files"])
    assert not any(map(os.path.exists, one["files"]))


def test_samples_without_a_label(folder: Path) -> None:
    dataset: IndexedDataset = write_corpus(folder / "c", [40] * 50)
    index = build_index(dataset, sequence_length=16, order="epoch", add_extra_token=0)
    with pytest.raises(InvalidArgument, match="no extra token for the label"):
        arrays_of(index, dataset.sequence_lengths)


@pytest.mark.parametrize(
    ("skip", "message"),
    [
        (Skip(steps="2"), "the index serves no samples, or leaves positions out"),
        (Skip(documents=[3]), "some tokens carry no loss, which the arrays cannot say; leave the "
         "skips out"),
    ],
)  # fmt: skip
def test_samples_that_a_run_skips(folder: Path, skip: Skip, message: str) -> None:
    dataset = write_corpus(folder / "c", [40] * 50)
    index = build_index(dataset, sequence_length=16, order="epoch")
    skips = resolve_skips([skip], BatchSchedule.constant(5), num_samples=index.num_samples)
    skipped = with_skips(index, skips)
    with pytest.raises(InvalidArgument) as caught:
        arrays_of(skipped, dataset.sequence_lengths)
    assert str(caught.value) == message


def test_cut_documents_that_begin_a_sample(folder: Path) -> None:
    """Of long documents alone, every piece is a range."""
    dataset = write_corpus(folder / "c", [33, 20, 17])
    index = build_index(dataset, sequence_length=16, order=PackedOrder(max_documents=1))
    found = arrays_of(index, dataset.sequence_lengths)
    assert found.shuffle_index.size == index.num_samples == 7
    assert found.short_samples == 3
    once, often = (array_index._SampleIndexRows(index, dataset.sequence_lengths) for _ in range(2))
    once.add(np.arange(7), index.locate(np.arange(7)))
    for k in range(7):
        often.add(np.array([k]), index.locate([k]))
    for one, other in zip(once.arrays(wide=False), often.arrays(wide=False), strict=True):
        np.testing.assert_array_equal(one, other)
