"""Targets that read text: Megatron command lines and scripts, GPT-NeoX files, planner settings."""

from __future__ import annotations

import atexit
import contextlib
import os
import shutil
import tempfile
from dataclasses import fields
from pathlib import Path
from typing import Any, get_type_hints

from choices import Choices

from megaindex.errors import MegaIndexError
from megaindex.settings import shell
from megaindex.settings.llm_foundry_yaml import read_llm_foundry
from megaindex.settings.maxtext_recipe import read_maxtext
from megaindex.settings.maxtext_yaml import read_maxtext as read_maxtext_settings
from megaindex.settings.megatron_args import read_megatron
from megaindex.settings.nanotron_yaml import read_nanotron
from megaindex.settings.neox_yaml import read_neox
from megaindex.settings.recipe_file import read_recipe, recipe_of, to_mapping
from megaindex.settings.run_builder import resolve
from megaindex.settings.settings import Settings

_MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
_FOLDER = Path(tempfile.mkdtemp(prefix="megaindex-fuzz-", dir=_MEMORY))
atexit.register(shutil.rmtree, _FOLDER, ignore_errors=True)
shell._MOST_EXPANDED = 1 << 15  # the bound of expansions is met often, and soon


def megatron(data: bytes) -> None:
    """A launch script, from a file, or a command line."""
    choices = Choices(data)
    if choices.below(2):
        path = _FOLDER / "train.sh"
        path.write_bytes(choices.rest())
        _resolved(lambda: read_megatron(str(path), environment={}))
    else:
        text = choices.rest().decode(errors="surrogateescape")
        _resolved(lambda: read_megatron(f"--seq-length 8 {text}", environment={"HOME": "/h"}))


def neox(data: bytes) -> None:
    """One GPT-NeoX file."""
    path = _FOLDER / "config.yml"
    path.write_bytes(data)
    _resolved(lambda: read_neox([path]))


def recipe(data: bytes) -> None:
    """One recipe; what is read is written out and read again as the same."""
    path = _FOLDER / "run.yaml"
    path.write_bytes(data)
    with contextlib.suppress(MegaIndexError):
        read = read_recipe(path)
        assert recipe_of(to_mapping(read), "again", _FOLDER) == read


def nanotron(data: bytes) -> None:
    """One Nanotron configuration."""
    path = _FOLDER / "nanotron.yaml"
    path.write_bytes(data)
    with contextlib.suppress(MegaIndexError):
        read_nanotron(path)


def llm_foundry(data: bytes) -> None:
    """One LLM-Foundry configuration."""
    path = _FOLDER / "llm_foundry.yaml"
    path.write_bytes(data)
    with contextlib.suppress(MegaIndexError):
        read_llm_foundry(path, devices=4)


def maxtext(data: bytes) -> None:
    """One MaxText configuration, as a recipe and in Megatron's order."""
    path = _FOLDER / "maxtext.yml"
    path.write_bytes(data)
    for read in (read_maxtext, read_maxtext_settings):
        with contextlib.suppress(MegaIndexError):
            read([str(path)], 4)


def settings(data: bytes) -> None:
    """Every flag of the planner: known words, numbers at their limits, or any text at all."""
    choices = Choices(data)
    given: dict[str, Any] = {"seq_length": 1 + choices.integer(64)}
    for _ in range(1 + choices.below(8)):
        name = choices.one_of(_NAMES)
        kind = _KINDS[name]
        if "tuple[int" in kind:
            given[name] = tuple(choices.integer(99) for _ in range(choices.below(4)))
        elif "tuple" in kind:
            given[name] = tuple(_text(choices) for _ in range(choices.below(4)))
        elif "str" in kind:
            given[name] = _text(choices)
        else:
            given[name] = choices.integer(99)
    _resolved(lambda: Settings(**given))


_WORDS = (
    *(
        "megatron",
        "neox",
        "epoch",
        "window",
        "paddlenlp",
        "auto",
        "never",
        "exact",
        "drop",
        "carry",
    ),
    *("1", "0.5", "3/2", "1.005", "1e9", "1e999999999", "250B", "1_000", "nan", "inf", "-1", "1/0"),
    *("969,30,1", "1,1", "0:768 250B:1536", "0:1e9999999T", "/data/a", "pad", "wrap", "", "²", "٣"),
)


def _text(choices: Choices) -> str:
    if not choices.seldom():
        return choices.one_of(_WORDS)
    return "".join(chr(choices.byte()) for _ in range(choices.below(12)))


_KINDS = {name: str(kind) for name, kind in get_type_hints(Settings).items()}
_NO_FLAGS = (
    "notes",
    "ignored",
    "companions",
    "packing",
    "labels",
)  # structured, filled by the readers
_NAMES = [f.name for f in fields(Settings) if f.name not in _NO_FLAGS]


def _resolved(read: Any) -> None:
    with contextlib.suppress(MegaIndexError):
        resolve(read())


def megatron_seeds() -> list[bytes]:
    script = b"""#!/bin/bash
export GPUS=8
NODES=${NODES:-2}
WORLD_SIZE=$(($GPUS*NODES))
DATA="0.3 /d/a 0.7 /d/b"
ARGS=(--seq-length 2048 --data-path $DATA # blend
  --split 969,30,1)
A=1 torchrun --nproc_per_node $GPUS --nnodes=$NODES train.py "${ARGS[@]}" \\
  --micro-batch-size 2 --global-batch-size 64 --train-iters 100 --rampup-batch-size 8 8 1000
"""
    flat = b"--micro-batch-size 4 --data-path /d/a --train-samples 1.5M --global-batch-size 8"
    legacy = b"--train-data-exact-num-epochs 2 --data-path 1 '/d/a' 2 \"/d/b\" --train-iters 9"
    return [b"\1" + script, b"\0" + script, b"\0" + flat, b"\0" + legacy]


def neox_seeds() -> list[bytes]:
    return [
        b'{"seq_length": 2048, "train_batch_size": 64, "data_path": "/d/a", "train-iters": 10}',
        b"train-data-paths: [/d/a, /d/b]\ntrain-data-weights: [1., 3.]\nseq_length: 8\n"
        b"train_micro_batch_size_per_gpu: 2\nglobal_num_gpus: 4\ntrain_epochs: 2\n",
        b"hostfile: /dev/null\nnum_nodes: 2\nnum_gpus: 3\ninclude: a\nsplit: 1,1\n"
        b"data_path: [a]\npack_impl: packed\nweight_by_num_documents: no\neval_iters: auto\n",
        b"a: &a [1, 2]\nb: *a\n<<: {c: 2001-01-01}\nseq_length: 0x10\nseed: 1_0\nnum_gpus: 2\n",
    ]


def recipe_seeds() -> list[bytes]:
    return [
        b"sequence_length: 8\nbatch: {global_batch_size: 2}\nsources: {a: x, b: {path: y}}\n"
        b"stages: {one: {epochs: 1.5, mix: {a: 0.7, b: 3/10}}}\n",
        b"sequence_length: 8\nseed: 7\ntail: pad\nexhaustion: continue\n"
        b"batch: {micro_batch_size: 4, data_parallel_size: 8, gradient_accumulation_steps: 2}\n"
        b"evaluation: {source: /v, interval: 100, iterations: 5}\n"
        b"sources: {a: {path: /x, max_epochs: '7/2', order: window}}\n"
        b"stages:\n  s: {steps: 10, mix: {a: 1}}\n  t: {first_step: 10, "
        b"tokens: 1M, batching: random, mix: {a: {choose: 2, restart: true}}}\n",
    ]


def nanotron_seeds() -> list[bytes]:
    return [
        b"general: {seed: 42}\ntokens: {sequence_length: 8, micro_batch_size: 2, train_steps: 30,"
        b" batch_accumulation_per_replica: 1}\nparallelism: {dp: 4, tp: 1, pp: 1}\n"
        b"data_stages:\n- {name: a, start_training_step: 1, data: {seed: 1, dataset: "
        b"{dataset_folder: [x, y], dataset_weights: [1, 2], vocab_size: 9}}}\n"
        b"- {name: b, start_training_step: 20, data: {seed: 1, dataset: {dataset_folder: x}}}\n",
    ]


def llm_foundry_seeds() -> list[bytes]:
    return [
        b"v: {n: 8}\nmax_seq_len: ${v.n}\ntrain_loader: {name: text, dataset: {shuffle: true, "
        b"streams: {a: {local: x, split: train, proportion: 0.5}, b: {local: y, proportion: 0.5}}, "
        b"epoch_size: 10k, batching_method: random}}\nmax_duration: 100ba\neval_interval: 5ba\n"
        b"eval_loader: {name: text, dataset: {local: z}}\neval_subset_num_batches: 3\n"
        b"global_train_batch_size: 16\ndevice_eval_batch_size: 2\n"
        b"device_train_microbatch_size: auto\n",
    ]


def maxtext_seeds() -> list[bytes]:
    return [
        b"dataset_type: grain\ngrain_file_type: arrayrecord\ngrain_train_files: a*,0.5;b,0.5\n"
        b"max_target_length: 8\nper_device_batch_size: 0.5\nsteps: 10\nnum_epoch: 2\n"
        b"eval_interval: 5\neval_steps: 2\ngrain_eval_files: c\nmax_segments_per_seq: 4\n",
        b"dataset_type: grain\ngrain_file_type: mmap_npy\ngrain_train_files: x|a,1;y|b,2\n"
        b"mmap_npy_split: 99,1\nsteps: -1\nlearning_rate_schedule_steps: 7\n",
    ]


def settings_seeds() -> list[bytes]:
    return [bytes([8, 3, *range(k, k + 30)]) for k in range(0, 250, 25)]
