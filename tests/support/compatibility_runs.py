"""Commands and calls whose results golden/compatibility.json holds, by public names alone.

Every group runs in a working directory of its own, which `write_inputs` filled; paths are relative,
so names and keys that depend on paths are the same everywhere. What a clock, a boot or an inode
decides is left out, and of messages, whose wording may improve, their figures are kept.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from support.command_line import cli
from support.folders import inside

import megaindex
from megaindex.corpus import content_fingerprint, corpus_fingerprint
from megaindex.loader import (
    CyclicSampler,
    Loader,
    MicroBatchSampler,
    Recorder,
    SampleOptions,
    check_receipts,
    join_states,
    loader_of_recipe,
)
from megaindex.recipe import open_recipe, read_recipe

TOKEN_FILES = Path(__file__).parents[1] / "golden" / "token_files"
S = 16
_SHOWN = 2500
"""Characters of a JSON value that is kept as it is; of a longer one the shape and a hash."""


# what is compared


def digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=12).hexdigest()


def array(values: Any) -> str:
    """Type, shape and a hash of the elements."""
    values = np.ascontiguousarray(values)
    return f"{values.dtype.str} {list(values.shape)} {digest(values.tobytes())}"


def plain(value: Any) -> Any:
    """JSON without what a machine decides: floats to 12 digits, messages as their figures."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items() if k not in ("boot_id", "durable")}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.12g}")
    return _figures(value) if isinstance(value, str) else value


def _figures(text: str) -> str:
    """A message of four words or more: the numbers in it."""
    if len(text.split()) < 4:
        return text
    return " ".join(["message:", *sorted(re.findall(r"(?<![\w.])\d[\d.,/]*\d|\b\d\b", text))])


def kept(value: Any) -> Any:
    """``value``, or of a long one what fits: its keys, the plain ones in full, and a hash."""
    text = json.dumps(plain(value), sort_keys=True)
    if len(text) <= _SHOWN or not isinstance(value, dict):
        return json.loads(text) if len(text) <= _SHOWN else digest(text.encode())
    return {key: kept_part(part) for key, part in json.loads(text).items()}


def kept_part(part: Any) -> Any:
    text = json.dumps(part, sort_keys=True)
    return part if len(text) <= 160 else digest(text.encode())


def command(*words: object) -> Any:
    """Exit status of a command, and what it prints if that is JSON."""
    status, out, err = cli(*words)
    if status == 2:
        assert err.strip(), f"no message: {words}"
        return 2
    if "--json" in words:
        return [status, kept(json.loads(out, object_hook=_without_added_keys))]
    return status


ADDED_KEYS = {"run_settings", "first_repeated_step", "earlier_exposures_by_source"}


def _without_added_keys(found: dict[str, Any]) -> dict[str, Any]:
    """A JSON object without the keys added since the golden file was made."""
    return {key: value for key, value in found.items() if key not in ADDED_KEYS}


def files_in(folder: str | Path) -> dict[str, Any]:
    """Relative path to hash; of what describes a cache, its content."""
    found = {}
    for path in sorted(p for p in Path(folder).rglob("*") if p.is_file()):
        name = path.relative_to(folder).as_posix()
        if path.name.startswith(("blend-", "sources-")):  # name and content depend on file times
            found["-".join([path.name.split("-")[0], "*", path.name.split("-")[-1]])] = sorted(
                json.loads(path.read_text())
            )
        elif path.name == "manifest.json":
            manifest = json.loads(path.read_text())
            assert re.fullmatch("[0-9a-f]{32}", manifest.pop("checksum"))
            found[name] = plain(manifest)
        elif path.suffix == ".json":
            content = _sidecar(json.loads(path.read_text()))
            same = (other for other, value in found.items() if value == content)
            found[name] = next((f"as {other}" for other in same), content)
        else:
            found[name] = digest(path.read_bytes())
    return found


def _sidecar(content: dict[str, Any]) -> Any:
    """What lies beside a framework's arrays, without times and inodes."""
    sets = {
        name: {
            **each,
            "files": {file: facts[0] for file, facts in each["files"].items()},
            "stamp": len(each["stamp"]),
        }
        for name, each in content["sets"].items()
    }
    _, *others = sets  # of the others a hash each
    sets |= {name: digest(json.dumps(sets[name], sort_keys=True).encode()) for name in others}
    return {**content, "boot": "", "durable": len(content["durable"]), "sets": sets}


# what is read


def write_inputs() -> None:
    """Corpora, texts, settings of other programs and recipes, into the working directory.

    Lengths and tokens are formulas, the same with every NumPy.
    """
    for name, count, dtype in (
        ("web", 60, "int32"),
        ("books", 41, "int32"),
        ("code", 30, "uint16"),
    ):
        lengths = [1 + (37 * k + len(name)) % 70 for k in range(count)]
        _pair(name, dtype, [np.arange(k, k + n) % 500 for k, n in enumerate(lengths)])
    with megaindex.IndexedDatasetWriter("parts", np.int32) as writer:  # of several sequences each
        for k in range(25):
            lengths = [(5 * k + j) % 17 for j in range(1 + k % 3)]
            writer.add_document(np.arange(sum(lengths)) + k, lengths)
    documents = [np.arange(k, k + 2 + 13 * k % 22) for k in range(40)]
    responses = [np.arange(d.size) >= d.size // 2 for d in documents]
    for name in ("chat", "qa"):
        _pair(name, "int32", documents)
        _pair(f"{name}_mask", "uint8", responses)
        labels = [np.where(r, d, -100) for d, r in zip(documents, responses, strict=True)]
        _pair(f"{name}_labels", "int32", labels)
    Path("cut.idx").write_bytes(Path("web.idx").read_bytes())
    Path("cut.bin").write_bytes(Path("web.bin").read_bytes()[:-40])
    for name, text in TEXTS.items():
        Path(name).write_text(text)


def _pair(prefix: str, dtype: str, documents: list[Any]) -> None:
    with megaindex.IndexedDatasetWriter(prefix, dtype) as writer:
        for tokens in documents:
            writer.add_document(np.asarray(tokens, dtype))


_NEOX = """
seq_length: 16
train_micro_batch_size_per_gpu: 2
gradient_accumulation_steps: 2
global_num_gpus: 2
eval_interval: 10
eval_iters: 2
seed: 7
"""
_MEGATRON = (
    "--seq-length 16 --micro-batch-size 2 --global-batch-size 8 --eval-interval 10 --eval-iters 2 "
    "--seed 7 "
)
_RECIPE = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 2}
sources:
  web: web
  code: {path: code, order: window}
  chat: {path: chat, kind: finetuning, labels: chat_labels}
  qa: {path: qa, kind: finetuning, packed: false, loss_mask: qa_mask, long_documents: split}
"""
TEXTS = {
    "one.yml": f"{_NEOX}data_path: web\nsplit: '60,20,20'\ntrain_iters: 40\n",
    "blend.yml": _NEOX + """
train_data_paths: [web, books]
valid_data_paths: [code]
test_data_paths: [code]
train_data_weights: [0.7, 0.3]
train_iters: 40
""",
    "epochs.yml": f"{_NEOX}data_path: web\nsplit: '60,20,20'\ntrain_epochs: 2\n",
    "unpacked.yml": _NEOX + """
train_data_paths: [chat, qa]
train_label_data_paths: [chat_labels, qa_labels]
valid_data_paths: [chat]
valid_label_data_paths: [chat_labels]
test_data_paths: [qa]
test_label_data_paths: [qa_labels]
train_data_weights: [0.6, 0.4]
train_iters: 12
pack_impl: unpacked
""",
    "overflow.yml": f"{_NEOX}train_data_paths: [web]\nvalid_data_paths: [books]\n"
    "test_data_paths: [books]\ntrain_iters: 12\npack_impl: pack_until_overflow\n"
    "allow_chopped: false\n",
    "run.sh": f"""#!/bin/bash
ITERS=${{1:-40}}
DATA=(--data-path 0.7 web 0.3 books --split 60,20,20)
torchrun --nproc_per_node 4 pretrain_gpt.py {_MEGATRON} "${{DATA[@]}}" --train-iters $ITERS
""",
    "nanotron.yaml": """
data_stages:
- {name: stable, start_training_step: 1,
   data: {dataset: {dataset_folder: [web, books], dataset_weights: [0.9, 0.1]}, seed: 42}}
- {name: annealing, start_training_step: 21,
   data: {dataset: {dataset_folder: [web, books, code], dataset_weights: [0.5, 0.2, 0.3]},
          seed: 42}}
parallelism: {dp: 2, tp: 1, pp: 1}
tokens: {sequence_length: 16, train_steps: 30, micro_batch_size: 2,
         batch_accumulation_per_replica: 2, val_check_interval: -1, limit_val_batches: 0}
""",
    "stages.yaml": _RECIPE + """
stages:
  stable: {steps: 20, mix: {web: 3, code: 1}}
  decay: {steps: 10, batching: random, mix: {web: 1, chat: 1, qa: 1}}
""",
    "passes.yaml": _RECIPE + """
seed: 5
tail: pad
evaluation: {source: books, interval: 10}
stages:
  text: {steps: 12, batching: stratified, mix: {web: 1}}
  joined: {epochs: 1, batching: per_stream, mix: {web: {choose: 40}, chat: {repeat: 2.5}}}
""",
    "random.yaml": _RECIPE + """
tail: wrap
stages:
  all: {samples: 120, batching: random, rounding: streaming, mix: {web: 0.5, code: 0.3, qa: 0.2}}
""",
    "weights.yaml": _RECIPE + """
exhaustion: stop
stages:
  all: {tokens: 2000, weights: {by: tokens, alpha: 0.5}, mix: {web: , code: }}
""",
    "ramp.yaml": _RECIPE.replace(
        "parallel_size: 2}", "parallel_size: 2, rampup: [4, 4, 40], global_batch_size: 12}"
    ) + """
stages:
  all: {steps: 12, mix: {web: 1, code: 1}}
""",
    "text.jsonl": "".join(
        json.dumps({"text": f"line {k} " + "äb€" * (k % 7), "other": "x" * k}) + "\n"
        for k in range(40)
    ),
    "text.txt": "".join(f"a line of text, number {k}\n" for k in range(30)),
}  # fmt: skip


# groups: what is held, by name


def caches() -> dict[str, Any]:
    """File names, bytes and descriptions of every order and policy, kept and in memory."""
    found = {}
    for order in ("megatron", "neox", "megatron-legacy", "paddlenlp"):
        for name, more in CACHES.items():
            folder = f"kept/{order}-{name}"
            words = ["build", "--seq-length", S, "--order", order, "--cache-dir", folder, *more]
            found[f"{order} {name}"] = [cli(*words)[0], files_in(folder)]
    for name, more in POLICIES.items():
        folder = f"kept/policy-{name}"
        words = ["audit", *_RUN, "--cache-dir", folder, "--json", "--points", 3, *more]
        found[name] = [command(*words), files_in(folder)]
    return found


_RUN = ("--seq-length", S, "--micro-batch-size", 2, "--data-parallel-size", 2)
CACHES: dict[str, list[Any]] = {
    "plain": ["--data-path", "web"],
    "two": ["--data-path", "web", "books", "--epochs", "3/2", "--workers", 1],
    "split": ["--data-path", "parts", "--split", "60,30,10", "--subset", "valid", "--seed", 3],
    "samples": ["--data-path", "code", "--num-samples", 150],
}
POLICIES: dict[str, list[Any]] = {
    "always": ["--data-path", "web", "--epochs", 2, "--separate-final-epoch", "always"],
    "never": ["--data-path", "web", "--epochs", "3/2", "--separate-final-epoch", "never"],
    "auto": ["--data-path", "web", "--epochs", "1.9", "--order", "neox",
             "--separate-final-epoch", "auto"],
    "threshold": ["--data-path", "web", "--epochs", "1.6", "--final-epoch-threshold", 0.5],
    "exact-epochs": ["--data-path", "web", "--order", "megatron-legacy", "--train-iters", 40,
                     "--train-data-exact-num-epochs", 2],
    "blend": ["--data-path", 0.7, "web", 0.3, "books", "--train-iters", 50],
    "blend-buffer": ["--data-path", 0.7, "web", 0.3, "books", "--train-iters", 50,
                     "--variance-buffer", 1.25],
    "blend-exact": ["--data-path", 0.7, "web", 0.3, "books", "--train-iters", 50, "--order", "neox",
                    "--variance-buffer", "exact"],
    "blend-legacy": ["--data-path", 2, "web", 1, "code", "--train-iters", 30, "--order",
                     "megatron-legacy"],
    "unweighted": ["--data-path", "web", "books", "--train-iters", 30],
    "epoch": ["--data-path", "web", "--epochs", 4, "--order", "epoch", "--epochs-mixed", 2],
    "carry": ["--data-path", "web", "--epochs", 3, "--order", "epoch", "--left-over", "carry"],
    "window": ["--data-path", "web", "--epochs", 2, "--order", "window"],
}  # fmt: skip


def receipts() -> dict[str, Any]:
    """Receipts of what every order has served, and of what an extension serves."""
    found = {}
    for order in ("megatron", "neox", "megatron-legacy", "paddlenlp", "epoch", "window"):
        common = ["extend", "--seq-length", S, "--order", order, "--json"]
        found[f"{order} one"] = command(
            *common, "--data-path", "web", "--epochs", 2, "--consumed-samples", 200,
            "--more-samples", 90,
        )  # fmt: skip
        found[f"{order} split"] = command(
            *common, "--data-path", "parts", "--split", "70,20,10", "--num-samples", 20,
            "--more-epochs", "1.5", "--seed", 3,
        )  # fmt: skip
        found[f"{order} blend"] = command(
            *common, "--data-path", 0.7, "web", 0.3, "books", "--num-samples", 180,
            "--more-samples", 50,
        )  # fmt: skip
    found["buffer"] = command(
        "extend", "--seq-length", S, "--data-path", 0.7, "web", 0.3, "books", "--num-samples", 180,
        "--variance-buffer", "1.3", "--more-samples", 50, "--json",
    )  # fmt: skip
    for recipe in RECIPES:
        status, out, _ = cli("build", "--recipe", recipe, "--cache-dir", "known")
        contents = re.findall(r"(\w+): (\w+), content ([0-9a-f]{32})", out)
        found[f"sources of {recipe}"] = [status, contents]
    return found


RECIPES = [name for name in TEXTS if name.endswith(".yaml") and name != "nanotron.yaml"]


def indices() -> dict[str, Any]:
    """The arrays of `build_index` and `build_blend`, and what they locate."""
    found: dict[str, Any] = {}
    for order in ("megatron", "neox", "megatron-legacy", "paddlenlp", "epoch", "window"):
        for prefix in ("web", "parts"):
            index = megaindex.build_index(
                prefix, sequence_length=S, seed=1, epochs=2, order=order, add_extra_token=1
            )
            found[f"{order} {prefix}"] = _index(index)
        found[f"{order} blend"] = _index(
            megaindex.build_blend(
                ["web", "books", "code"], weights=[0.5, 0.3, 0.2], num_samples=150,
                sequence_length=S, seed=1, order=order,
            ),
            asked=150,
        )  # fmt: skip
    partial = megaindex.build_index(
        "web", sequence_length=S, seed=1, documents=range(9, 50), drop_last_partial=False,
        add_extra_token=0,
    )  # fmt: skip
    found["last partial"] = _index(partial)
    named = megaindex.build_index(
        "web", sequence_length=S, seed=1, order="epoch", source_name="name"
    )
    found["named"] = _index(named)
    return found


def _index(index: Any, asked: int | None = None) -> dict[str, Any]:
    """Of all samples, or the ``asked`` where a framework's blend is longer than its sources."""
    arrays: dict[str, str] = {}
    for name in ("document_index", "sample_index", "shuffle_index", "dataset_index",
                 "dataset_sample_index"):  # fmt: skip
        with suppress(AttributeError, megaindex.InvalidArgument):  # not every order has them
            arrays[name] = array(getattr(index, name))
    spans = index.locate(np.arange(asked or index.num_samples))
    return {
        "num_samples": index.num_samples,
        **arrays,
        "locate": digest(" ".join(map(array, (*spans, spans.row_splits))).encode()),
    }


def plans() -> dict[str, Any]:
    """``plan --json`` for many combinations of flags."""
    found: dict[str, Any] = {}
    for name, words in PLANS.items():
        found[name] = command("plan", *words, "--json")
    matrix = itertools.product(
        ("megatron", "neox", "megatron-legacy", "paddlenlp", "epoch", "window"),
        (("web",), ("web", "books"), ("0.7", "web", "0.3", "books")),
        (("--epochs", "1"), ("--epochs", "2.5"), ("--train-iters", "70"),
         ("--train-tokens", "3000"), ("--train-samples", "180")),
    )  # fmt: skip
    for order, data, target in matrix:
        words = [*_RUN, "--order", order, "--data-path", *data, *target]
        plan = command("plan", *words, "--json")
        found[" ".join([order, *data, *target])] = digest(json.dumps(plan, sort_keys=True).encode())
    return found


_WEB = (*_RUN, "--data-path", "web")
_BLEND = (*_RUN, "--data-path", 0.7, "web", 0.3, "books")
PLANS: dict[str, tuple[Any, ...]] = {
    "issue 1164": ("--tokens-per-epoch", 2113896210, "--seq-length", 2048, "--micro-batch-size", 4,
                   "--data-parallel-size", 32, "--order", "neox", "--epochs", 1),
    "issue 1164, buffer": ("--tokens-per-epoch", 2113896210, "--seq-length", 2048,
                           "--micro-batch-size", 4, "--data-parallel-size", 32, "--order", "neox",
                           "--epochs", 1, "--variance-buffer", 1.005),
    "tokens, weights": ("--tokens-per-epoch", 50000, 20000, "--weights", 0.7, 0.3, *_RUN,
                        "--train-iters", 900),
    "epochs by source": (*_RUN, "--data-path", "web", "books", "--epochs", "2,1"),
    "split": (*_WEB, "--split", "60,20,20", "--train-iters", 30, "--eval-interval", 10,
              "--eval-iters", 3),
    "apart": (*_RUN, "--train-data-path", "web", "--valid-data-path", "books", "--test-data-path",
              "code", "--train-iters", 30),
    "pad": (*_WEB, "--epochs", 1, "--tail", "pad", "--order", "epoch"),
    "wrap": (*_WEB, "--epochs", 1, "--tail", "wrap", "--order", "epoch"),
    "expected": (*_WEB, "--epochs", 1.5, "--coverage", "expected"),
    "exact": (*_BLEND, "--train-iters", 60, "--coverage", "exact", "--blend-counts", "exact"),
    "none": (*_BLEND, "--train-iters", 60, "--coverage", "none", "--blend-counts", "bounds"),
    "buffer exact": (*_BLEND, "--train-iters", 60, "--variance-buffer", "exact", "--order", "neox"),
    "surplus": (*_BLEND, "--train-iters", 60, "--mid-level-dataset-surplus", 0.1),
    "schedule": (*_WEB, "--batch-schedule", "0:4 640:8", "--train-tokens", 2000),
    "rampup": (*_WEB, "--global-batch-size", 12, "--rampup-batch-size", 4, 4, 40,
               "--train-samples", 200),
    "world": ("--seq-length", S, "--data-path", "web", "--micro-batch-size", 1, "--world-size", 16,
              "--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size", 2,
              "--context-parallel-size", 2, "--epochs", 1),
    "cyclic": (*_WEB, "--train-iters", 50, "--dataloader-type", "cyclic", "--consumed-samples", 40),
    "phases": (*_WEB, "--train-iters", 50, "--phase-transition-iterations", 10, 30),
    "exact epochs": (*_WEB, "--train-iters", 40, "--order", "megatron-legacy",
                     "--train-data-exact-num-epochs", 2),
    "full validation": (*_WEB, "--split", "60,20,20", "--train-iters", 20, "--full-validation"),
    "validation sets": (*_RUN, "--data-path", "web", "books", "--split", "60,20,20",
                        "--train-iters", 20, "--multiple-validation-sets", "--full-validation"),
    "skip train": (*_WEB, "--split", "60,20,20", "--train-iters", 20, "--skip-train"),
    "main": (*_WEB, "--train-iters", 40, "--framework-version", "main"),
    "mixed": (*_WEB, "--epochs", 4, "--order", "epoch", "--epochs-mixed", 2),
    "carry": (*_WEB, "--epochs", 3, "--order", "epoch", "--left-over", "carry"),
    "neox one": ("--neox-config", "one.yml"),
    "neox blend": ("--neox-config", "blend.yml"),
    "neox epochs": ("--neox-config", "epochs.yml"),
    "neox unpacked": ("--neox-config", "unpacked.yml"),
    "neox overflow": ("--neox-config", "overflow.yml"),
    "neox flags": ("--neox-config", "one.yml", "--train-iters", 70, "--variance-buffer", 1.1),
    "megatron args": ("--megatron-args", f"{_MEGATRON} --data-path web --split 60,20,20 "
                      "--train-iters 40 --data-parallel-size 2"),
    "megatron samples": ("--megatron-args", f"{_MEGATRON} --data-path web --split 99,1,0 "
                         "--train-samples 320 --rampup-batch-size 4 4 40", "--world-size", 2),
    "megatron script": ("--megatron-args", "run.sh"),
    "megatron script 60": ("--megatron-args", "run.sh", "--script-args", "60"),
    "nanotron": ("--nanotron-config", "nanotron.yaml"),
    **{name: ("--recipe", name) for name in RECIPES},
}  # fmt: skip


def printed_settings() -> dict[str, Any]:
    """``--print-config``: lines as they are, of comments the figures."""
    found = {}
    cases = {name: PLANS[name] for name in ("split", "apart", "exact", "rampup", "neox one",
             "neox blend", "megatron args", "megatron script", "surplus")}  # fmt: skip
    cases["neox"] = (*_WEB, "--split", "60,20,20", "--train-iters", 30, "--order", "neox")
    for (name, words), framework in itertools.product(cases.items(), ("neox", "megatron")):
        status, out, _ = cli("plan", *words, "--print-config", framework)
        found[f"{name} as {framework}"] = [status, [_setting(line) for line in out.splitlines()]]
    return found


def _setting(line: str) -> str:
    setting, mark, comment = line.partition("#")
    return f"{setting}{mark}{_figures(comment)}" if mark else setting


def reports() -> dict[str, Any]:
    """Every other verb that prints JSON."""
    for order in ("megatron", "neox"):
        cli("build", "--data-path", "web", "--seq-length", S, "--cache-dir", f"cache-{order}",
            "--order", order)  # fmt: skip
    Path("short.idx").write_bytes(Path("web.idx").read_bytes()[:-40])
    Path("short.bin").write_bytes(Path("web.bin").read_bytes())
    ((entry, _),) = ((p.parent, p) for p in Path("cache-neox").glob("*/manifest.json"))
    found = {" ".join(map(str, words)): command(*words, "--json") for words in REPORTS}
    found["diff of entries"] = command("diff-order", entry, "order=megatron", "--data-path", "web",
                                       "--seq-length", S, "--json")  # fmt: skip
    for recipe in RECIPES:
        found[f"audit {recipe}"] = command(
            "audit", "--recipe", recipe, "--points", 4, "--consumed-samples", 20, "--json"
        )
    return found


_DIFF = ("diff-order", "--data-path", "web", "--seq-length", S)
REPORTS: list[tuple[Any, ...]] = [
    ("inspect", "web"), ("inspect", "parts", "code"), ("inspect", "cache-megatron"),
    ("inspect", "chat_mask"),
    ("verify", "web", "parts", "--workers", 1), ("verify", "web", "--full", "--vocab-size", 500),
    ("verify", "web", "--full", "--vocab-size", 50),
    ("verify", "cache-megatron", "cache-neox", "--workers", 1),
    ("verify", "short"), ("verify", "cut", "--full"), ("verify", "stages.yaml", "--workers", 1),
    ("verify", "web", "--full", "--eod", 3),
    (*_DIFF, "order=megatron", "order=neox"),
    (*_DIFF, "--epochs", "1.9", "order=megatron", "order=neox"),
    (*_DIFF, "seed=1", "seed=2"), (*_DIFF, "order=epoch", "order=window"),
    (*_DIFF, "--num-samples", "300", "order=megatron,separate_final_epoch=never", "order=megatron"),
    (*_DIFF, "--epochs", 2, "order=epoch,left_over=carry", "order=epoch"),
    ("audit", *_WEB, "--epochs", 2, "--points", 5),
    ("audit", *_WEB, "--epochs", 2, "--step", 3), ("audit", *_WEB, "--epochs", 2, "--document", 7),
    ("audit", *_WEB, "--epochs", 2, "--step", 3, "--rank", 1),
    ("audit", *_BLEND, "--train-iters", 40, "--document", 7, "--source", 1),
    ("audit", "--neox-config", "one.yml", "--subset", "valid", "--points", 3),
    ("audit", "--megatron-args", "run.sh", "--subset", "test", "--points", 3),
]  # fmt: skip


def pairs() -> dict[str, Any]:
    """Bytes of the pairs that tokenize, merge, split and import write."""
    Path("made").mkdir()
    np.save("flat.npy", np.arange(1, 400, dtype=np.uint16) % 40)
    np.array([50, 120, 399], np.int64).tofile("ends.bin")
    np.save("ends.npy", np.array([50, 120, 399], np.int64))
    Path("raw.bin").write_bytes((np.arange(1, 400, dtype=np.uint16) % 40).tobytes())
    found: dict[str, Any] = {}
    for number, words in enumerate(PAIRS):
        key = " ".join(str(word).replace(str(TOKEN_FILES), "token_files") for word in words)
        assert key not in found, number
        found[key] = command(*words)
    files = files_in("made")  # a provenance has absolute paths
    pairs_alone = {name: of for name, of in files.items() if not name.endswith(".provenance")}
    return {**found, "files": pairs_alone}


PAIRS: list[tuple[Any, ...]] = [
    ("tokenize", "made/lines", "text.jsonl", "--tokenizer", "bytes", "--workers", 1, "--json"),
    ("tokenize", "made/eod", "text.txt", "text.jsonl", "--tokenizer", "bytes", "--eod", 256,
     "--workers", 1, "--part-size", "1k", "--json"),
    ("tokenize", "made/keys", "text.jsonl", "--tokenizer", "bytes", "--json-keys", "text", "other",
     "--dtype", "int32", "--workers", 1, "--json"),
    ("tokenize", "made/one", "text.txt", "--tokenizer", "bytes", "--format", "files",
     "--megatron-names", "--workers", 1),
    ("tokenize", "made/lines", "text.jsonl", "--tokenizer", "bytes", "--workers", 1),
    ("merge", "made/merged", "web", "books", "parts"),
    ("merge", "made/wide", "web", "code", "--dtype", "int32"),
    ("merge", "made/refused", "web", "code"),
    ("merge", "made/neox", "chat_mask", "qa_mask", "--dialect", "neox"),
    ("split", "web", "made/part-{}", "--parts", 3),
    ("split", "web", "made/docs-{}", "--parts", 4, "--by", "documents"),
    ("split", "parts", "made/a", "made/b", "--at", "7"),
    ("split", "web", "made/r0", "made/r1", "--documents", "0:5,20:31"),
    ("import", "nanotron", TOKEN_FILES / "datatrove_2.ds", "made/ds2", "--copy"),
    ("import", "nanotron", TOKEN_FILES / "datatrove_4.ds", "made/ds4", "--copy", "--dialect",
     "neox"),
    ("import", "tntidx", TOKEN_FILES / "tntidx_int32", "made/tnt", "--copy"),
    ("import", "tntidx", TOKEN_FILES / "tntidx_int64", "made/tnt64", "--copy"),
    ("import", "numpy", "flat.npy", "made/separated", "--separator", 0, "--copy"),
    ("import", "numpy", "flat.npy", "made/bounded", "--boundaries", "ends.npy"),
    ("import", "numpy", "raw.bin", "made/raw", "--stored-dtype", "uint16", "--separator", 0,
     "--dtype", "int32"),
    ("verify", "cut", "--repair", "made/refused", "--eod", 1),
]  # fmt: skip


def statuses() -> dict[str, int]:
    """Exit statuses, of right and of wrong input."""
    return {" ".join(map(str, words)): cli(*words)[0] for words in STATUSES}


STATUSES: list[tuple[Any, ...]] = [
    (), ("--help",), ("--version",), ("nonsense",), ("plan",), ("plan", "--help"),
    ("plan", *_WEB, "--epochs", 1), ("plan", *_WEB, "--epochs", 1, "--check"),
    ("plan", *_WEB, "--epochs", 2, "--check"), ("plan", *_WEB), ("plan", *_WEB, "--epochs", "x"),
    ("plan", *_WEB, "--epochs", 1, "--train-iters", 5), ("plan", *_WEB, "--epochs", 0),
    ("plan", *_WEB, "--epochs", 1, "--order", "other"),
    ("plan", *_WEB, "--epochs", 1, "--seed", -1),
    ("plan", "--data-path", "missing", *_RUN, "--epochs", 1),
    ("plan", "--recipe", "stages.yaml", "--check"), ("plan", "--recipe", "missing.yaml"),
    ("plan", "--recipe", "passes.yaml", "--check"),
    ("plan", "--recipe", "stages.yaml", "--epochs", 1), ("plan", "--neox-config", "missing.yml"),
    ("build",), ("build", "--data-path", "web", "--seq-length", S),
    ("build", "--data-path", "web", "--seq-length", 0, "--cache-dir", "other"),
    ("build", "--data-path", "web", "--seq-length", 10**7, "--cache-dir", "other"),
    ("build", "--data-path", 0.5, "web", 0.5, "books", "--seq-length", S, "--cache-dir", "other"),
    ("audit",), ("audit", *_WEB, "--epochs", 1, "--step", 10**9),
    ("audit", *_WEB, "--epochs", 1, "--document", 10**9),
    ("audit", *_WEB, "--epochs", 1, "--rank", 0), ("diff-order",), (*_DIFF, "seed=1", "seed=1"),
    (*_DIFF, "seed=1", "seed=2"), (*_DIFF, "seed=1", "other=2"), ("extend",),
    ("extend", "--data-path", "web", "--seq-length", S, "--num-samples", 50, "--more-samples", -1),
    ("tokenize",), ("tokenize", "other", "missing.txt", "--tokenizer", "bytes"),
    ("merge",), ("merge", "other", "missing"), ("merge", "web", "books"), ("split",),
    ("split", "web", "other-{}", "--parts", 0), ("split", "web", "other-{}", "--at", "x"),
    ("import",), ("import", "numpy", "missing.npy", "other", "--separator", 0), ("verify",),
    ("verify", "web"), ("verify", "missing"), ("inspect",), ("inspect", "web"),
    ("inspect", "missing"), ("demo", "--max-tokens", 0),
]  # fmt: skip


def flags() -> dict[str, list[str]]:
    """The flags of every verb in its help, without those added since the golden file was made."""
    found = {}
    lists = cli("--help")[1] + cli("help", "more")[1]
    verbs = re.findall(r"^  ([a-z-]+) ", lists, re.M)
    imports = [f"import {kind}" for kind in ("nanotron", "numpy", "tntidx", "mds", "parquet")]
    for verb in [*verbs, *imports]:
        status, whole, _ = cli(*verb.split(), "--help-all")
        shown = whole if status == 0 else cli(*verb.split(), "--help")[1]
        listed = re.findall(r"^  (?:-[a-z], )?(--[a-z][a-z0-9-]*)", shown, re.M)
        found[verb] = sorted({*listed} - {"--help", *ADDED_FLAGS.get(verb, ())})
    return found


ADDED_FLAGS: dict[str, set[str]] = {
    **{verb: {"--json"} for verb in ("build", "merge", "split")},
    **{f"import {kind}": {"--json"} for kind in ("nanotron", "numpy", "tntidx", "mds", "parquet")},
    "extend": {"--max-documents", "--long-documents"},
    "tokenize": {"--discard-parts", "--encoder"},
}


def megatron_caches() -> dict[str, Any]:
    """What the adapter leaves in Megatron's cache, with each policy, and the samples it serves."""
    from support.megatron_blends import build, flat, one_process, read

    import megaindex.adapters.megatron as adapter

    found: dict[str, Any] = {}
    with _quiet(), one_process(_megatron(), Path("store").resolve()) as core:
        for name, (install, config) in MEGATRON.items():
            adapter.install(**install)
            try:
                datasets = flat(build(core, (60, 9, 5), f"megatron/{name}", **config))
                served = [[read(d, k)["tokens"].tolist() for k in range(len(d))] for d in datasets]
            finally:
                adapter.uninstall()
            found[name] = [digest(json.dumps(served).encode()), files_in(f"megatron/{name}")]
    return found


_SPLIT = {"split": "60,20,20"}
MEGATRON: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "one": ({}, {"blend": (["web"], None), **_SPLIT}),
    "blend": ({}, {"blend": (["web", "books"], [0.7, 0.3]), **_SPLIT}),
    "unweighted": ({}, {"blend": (["web", "code"], None), **_SPLIT}),
    "apart": ({}, {"blend_per_split": [(["web"], None), (["books"], None), (["code"], None)]}),
    "buffer": ({"variance_buffer": 1.25}, {"blend": (["web", "books"], [0.7, 0.3]), **_SPLIT}),
    "exact": ({"variance_buffer": "exact"}, {"blend": (["web", "books"], [0.7, 0.3]), **_SPLIT}),
    "final": ({"separate_final_epoch": "always"}, {"blend": (["web"], None), **_SPLIT}),
}


def _megatron() -> SimpleNamespace:
    from megatron.core.datasets import gpt_dataset, indexed_dataset, utils

    return SimpleNamespace(
        GPTDataset=gpt_dataset.GPTDataset,
        GPTDatasetConfig=gpt_dataset.GPTDatasetConfig,
        IndexedDataset=indexed_dataset.IndexedDataset,
        Split=utils.Split,
    )


@contextmanager
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def neox_caches() -> dict[str, Any]:
    """What the adapter leaves beside GPT-NeoX's data, in each mode, and the batches it serves."""
    from support import neox_running as running
    from support import neox_stand_in

    found: dict[str, Any] = {}
    with _modules_in_place(neox_stand_in.modules()):
        import megaindex.adapters.neox as adapter

        for name, (install, config) in NEOX.items():
            folder = Path("neox") / name
            folder.parent.mkdir(exist_ok=True)
            adapter.install(**install)
            try:
                args = running.arguments(folder, running.SIZES, **config)
                if "data_path" in config:
                    args.data_path = str(folder / "c0")
                served = running.texts(args, 9)
            finally:
                adapter.uninstall()
            left = {n: v for n, v in files_in(folder).items() if not n.endswith((".bin", ".idx"))}
            found[name] = [digest(json.dumps(served).encode()), left]
    return found


NEOX: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "blend": ({}, {}),
    "one": ({}, {"data_path": True}),
    "unpacked": ({}, {"pack_impl": "unpacked"}),
    "overflow": ({}, {"pack_impl": "pack_until_overflow", "allow_chopped": False}),
    "labels": ({}, {"labels": True, "prompts": [[3] * 5, [2] * 3, [0] * 9]}),
    "epochs": ({}, {"train_epochs": 1}),
    "buffer": ({"variance_buffer": 1.25}, {}),
    "exact": ({"exact": True}, {}),
}


@contextmanager
def _modules_in_place(modules: dict[str, Any]) -> Iterator[None]:
    """``modules`` in place of everything that is called megatron."""
    away = {n: sys.modules.pop(n) for n in [*sys.modules] if n.split(".")[0] == "megatron"}
    sys.modules.update(modules)
    try:
        with _quiet():
            yield
    finally:
        for name in modules:
            del sys.modules[name]
        sys.modules.update(away)


def samplers() -> dict[str, Any]:
    """What samplers serve, their states in mid-run, and what other ranks serve from there."""
    found = {}
    for name in SAMPLERS:
        states, served = [], []
        for rank in range(2):
            sampler = _sampler(name, rank, 2)
            batches = itertools.islice(sampler, 7)
            served.append(list(batches))
            states.append(sampler.state_dict())
        found[name] = {"served": digest(json.dumps(served).encode()), "states": states}
        found[name]["rest"] = rest_of(name, states)
    for tail in ("drop", "pad", "wrap"):
        served = [
            list(MicroBatchSampler(
                num_samples=50, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=3,
                global_batch_size=12, tail=tail,
            ))
            for rank in range(3)
        ]  # fmt: skip
        found[f"tail {tail}"] = served
    return found


def rest_of(name: str, states: list[Any]) -> list[str]:
    """Hashes of what is served from a state on, by the ranks before and by others."""
    rest = []
    for ranks, rank in ((2, 0), (2, 1), (1, 0), (3, 2)):
        sampler = _sampler(name, rank, ranks)
        try:
            sampler.load_state_dict(states[rank] if ranks == 2 else states[0])
            rest.append(digest(json.dumps(list(sampler)).encode()))
        except megaindex.MegaIndexError as error:
            rest.append(type(error).__name__)
    return rest


def _sampler(name: str, rank: int, ranks: int) -> Any:
    kind, settings = SAMPLERS[name]
    return kind(
        num_samples=130, micro_batch_size=2, data_parallel_rank=rank, data_parallel_size=ranks,
        **settings,
    )  # fmt: skip


SAMPLERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "single": (MicroBatchSampler, {"global_batch_size": 12}),
    "consumed": (MicroBatchSampler, {"global_batch_size": 12, "consumed_samples": 24}),
    "pad": (MicroBatchSampler, {"global_batch_size": 12, "tail": "pad", "train_samples": 100}),
    "cyclic": (CyclicSampler, {"train_samples": 300}),
}


def recipe_runs() -> dict[str, Any]:
    """Batches of recipes, their states in mid-run, and receipts of ranks that end the run."""
    found: dict[str, Any] = {}
    for name in RECIPES:
        states, served = [], []
        for rank in range(2):
            loader = _recipe_loader(name, rank)
            served += [_fields(batch) for batch in itertools.islice(loader, 5)]
            states.append(_json(loader.state_dict()))
        found[name] = {
            "fingerprints": open_recipe(read_recipe(name)).fingerprints,
            "served": digest(json.dumps(served).encode()),
            "states": states,
            "rest": recipe_rest(name, states),
        }
    return found


def recipe_rest(name: str, states: list[Any]) -> list[Any]:
    """What is served from a state on, by two ranks and by one, and whether receipts add up."""
    rest: list[Any] = []
    for ranks in (2, 1):
        ends = []
        for rank in range(ranks):
            loader = _recipe_loader(name, rank, ranks)
            loader.load_state_dict(states[rank] if ranks == 2 else join_states(states))
            rest.append(digest(json.dumps([_fields(batch) for batch in loader]).encode()))
            ends.append(loader.state_dict())
        check = check_receipts(ends, open_recipe(read_recipe(name)).index)
        rest.append([check.equal, str(check.served.total)])
    return rest


def _recipe_loader(name: str, rank: int, ranks: int = 2) -> Loader:
    opened = open_recipe(read_recipe(name))
    return loader_of_recipe(
        opened, data_parallel_rank=rank, data_parallel_size=ranks, micro_batch_size=2
    )


def _fields(batch: Any) -> dict[str, str]:
    return {name: array(np.asarray(value)) for name, value in batch.items()}


def _json(value: Any) -> Any:
    return json.loads(json.dumps(value))


def batches() -> dict[str, Any]:
    """Fields of batches with each option, and fingerprints of corpora."""
    found: dict[str, Any] = {}
    for name in ("web", "code", "parts"):
        dataset = megaindex.IndexedDataset(name)
        found[name] = [
            corpus_fingerprint(dataset),
            content_fingerprint(dataset),
            content_fingerprint(dataset, whole=True),
        ]
    web = megaindex.IndexedDataset("web")
    index = megaindex.build_index(web, sequence_length=S, seed=1, epochs=1)
    options: dict[str, dict[str, Any]] = {
        "default": {},
        "eod": {"eod_id": 9, "eod_mask_loss": True, "reset_position_ids": True},
        "documents": {"boundaries": "documents", "reset_position_ids": True, "cu_seqlens": True},
        "mask": {"eod_id": 9, "reset_attention_mask": True, "create_attention_mask": True},
    }
    for name, given in options.items():
        sampler = MicroBatchSampler(
            num_samples=index.num_samples, micro_batch_size=3, data_parallel_rank=1,
            data_parallel_size=2,
        )  # fmt: skip
        recorder = Recorder([corpus_fingerprint(web)], {"seed": 1}, stride=32)
        loader = Loader(index, web, sampler, options=SampleOptions(**given), recorder=recorder)
        served = [_fields(batch) for batch in loader]
        found[name] = [served[0], digest(json.dumps(served).encode()), _json(loader.state_dict())]
    return found


GROUPS: dict[str, Callable[[], dict[str, Any]]] = {
    each.__name__: each
    for each in (caches, receipts, indices, plans, printed_settings, reports, pairs, statuses,
                 flags, samplers, recipe_runs, batches, megatron_caches, neox_caches)
}  # fmt: skip


def run(group: str, folder: Path) -> dict[str, Any]:
    """What a group finds in a new folder, as JSON holds it."""
    with inside(folder):
        write_inputs()
        found: dict[str, Any] = json.loads(json.dumps(GROUPS[group]()))
    return found
