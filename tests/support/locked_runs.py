"""Runs that are locked: a recipe, a GPT-NeoX configuration, a Megatron script and plain flags."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from support.corpora import write_corpus

from megaindex.lock import Lock

RECIPE = """
sequence_length: 32
batch: {micro_batch_size: 2, data_parallel_size: 2, global_batch_size: 8}
sources:
  web: data/web
  code: {path: data/code, max_epochs: 2}
  chat: {path: data/chat, order: packed}
  book: {path: data/web, order: window}
  talk: {path: data/code, kind: finetuning, loss_mask: data/mask}
stages:
  stable: {steps: 12, mix: {web: 0.7, code: 0.3}}
  decay:
    samples: 60
    batching: random
    mix: {web: 1, chat: {proportion: 0.5, restart: true}, book: 2, talk: 1}
tail: pad
exhaustion: continue
evaluation: {source: data/chat, interval: 5, iterations: 2}
"""
NEOX = """
{"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "seq_length": 32,
 "train_iters": 20, "eval_iters": 2, "eval_interval": 10, "seed": 7, "num_gpus": 1,
 "train_data_paths": ["data/web", "data/code"], "train_data_weights": [0.3, 0.7],
 "valid_data_paths": ["data/chat"], "test_data_paths": ["data/chat"]}
"""
SCRIPT = """
python pretrain_gpt.py --seq-length 32 --micro-batch-size 2 --global-batch-size 8 \\
  --rampup-batch-size 4 4 24 --train-samples 100 --split 90,5,5 --eval-iters 1 \\
  --data-path 0.25 data/web 0.75 data/code
"""
LENGTHS = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 2, global_batch_size: 8}
sources:
  web: {path: data/web, block_tokens: 300}
  code: {path: data/code, block_tokens: 300}
  chat: {path: data/chat, block_tokens: 400}
stages:
  short: {steps: 60, mix: {web: 0.7, code: 0.3}}
  long:
    steps: 6
    sequence_length: 48
    batch: {micro_batch_size: 1, global_batch_size: 4}
    mix: {web: 1, code: 1}
  short_again: {steps: 4, mix: {web: 1, code: 1, chat: 1}}
mix_changes: {file: mix.npy, sources: [chat, code, web]}
skip: [{steps: "2 61"}, {documents: bad.ids, source: web, from_step: 3}]
"""
PAST = """
sequence_length: 32
batch: {micro_batch_size: 2, data_parallel_size: 2, global_batch_size: 8}
sources: {web: data/web, code: data/code, chat: data/chat}
past:
  steps: 5000
  read: {web: {documents: bad.ids, epochs: 1}, code: {tokens: 900}}
stages:
  all: {steps: 12, mix: {web: 2, code: 1, chat: 1}}
"""
SKIPS = """
skip:
  - {steps: "2 5-6"}
  - {steps: "8", move: true}
  - {documents: bad.ids, source: data/web, from_step: 3}
  - {source: "1", from_step: 12}
"""
AMEND = """
data_path: [0.7, data/web, 0.3, data/code]
num_samples: 200
changes:
- {consumed_samples: 90, data_path: [0.5, data/code, 0.5, data/chat]}
- {consumed_samples: 150, data_path: [0.6, data/web, 0.2, data/code, 0.2, data/chat]}
"""
EXTEND = "{data_path: [2, data/web, 1, data/code], num_samples: 250, consumed_samples: 101}"
RUNS = {
    "recipe": "--recipe run.yaml",
    "lengths": "--recipe lengths.yaml",
    "past": "--recipe past.yaml",
    "neox": "--neox-config neox.yml --world-size 1",
    "megatron": "--megatron-args train.sh --world-size 2",
    "flags": "--data-path data/web --order epoch --left-over carry --seq-length 32 --epochs 2.5 "
    "--global-batch-size 8",
    "phases": "--data-path data/web data/code --seq-length 32 --train-iters 9 --split 98,2,0 "
    "--phase-transition-iterations 4 --global-batch-size 4 --eval-iters 0",
    "skips": "--data-path 1 data/web 2 data/code --seq-length 32 --train-iters 20 --split 90,10,0 "
    "--global-batch-size 4 --eval-iters 1 --skip skips.yaml",
    "amended": "--data-path 0.6 data/web 0.2 data/code 0.2 data/chat --seq-length 32 "
    "--train-iters 70 --split 90,10,0 --global-batch-size 4 --eval-iters 1 --amend amend.yaml",
    "extended": "--order neox --train-data-path 2 data/web 1 data/code --seq-length 32 "
    "--train-iters 120 --global-batch-size 4 --eval-iters 0 --amend extend.yaml",
}


def write_inputs(folder: Path) -> None:
    """Write corpora and settings, to which the flags of `RUNS` are relative."""
    (folder / "data").mkdir()
    rng = np.random.default_rng(3)
    for name in ("web", "code", "chat"):
        lengths = rng.integers(1, 60, 120)
        write_corpus(folder / "data" / name, lengths, np.uint16)
        if name == "code":
            write_corpus(folder / "data" / "mask", lengths, np.uint8)
    (folder / "run.yaml").write_text(RECIPE)
    (folder / "lengths.yaml").write_text(LENGTHS)
    (folder / "past.yaml").write_text(PAST)
    half = 2**30
    rows = [[8 * 10, 0, half, half], [8 * 60 + 4 * 2, 0, half // 2, half + half // 2]]
    np.save(folder / "mix.npy", np.array(rows))
    (folder / "skips.yaml").write_text(SKIPS)
    (folder / "bad.ids").write_text(" ".join(map(str, range(0, 100, 3))))
    (folder / "neox.yml").write_text(NEOX)
    (folder / "train.sh").write_text(SCRIPT)
    (folder / "amend.yaml").write_text(AMEND)
    (folder / "extend.yaml").write_text(EXTEND)


def assert_receipt(state: Mapping[str, Any], lock: Lock, samples: int) -> None:
    """The joined state of all ranks has the lock's receipt, and every sample in its place."""
    receipt = state.get("loader", state)["receipt"]
    assert receipt["receipt"] == lock.content["subsets"]["train"]["receipts"]["total"]
    counts = (receipt["samples"], receipt["in_place"], receipt["misplaced"])
    assert counts == (samples, samples, 0)
