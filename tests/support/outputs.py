"""The page of outputs: commands, each followed by all that it prints."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import numpy as np
from support.command_line import cli
from support.corpora import write_corpus, write_pairs
from support.messages import COMMAND

PAGE = Path(__file__).parents[1] / "golden" / "outputs.txt"
FILE = "$ cat "
_VARIES = {
    r"in \d+\.\d+ s\b": "in 0.01 s",
    r"\d{4}-\d\d-\d\d \d\d:\d\d UTC": "2026-01-01 00:00 UTC",
    r"sources:\s+/\S+/\*": "sources: /work/*",  # the working folder, on a line of its own if long
    r"megaindex runs on Numba, .*\n": "",
    r"\(\d+ MB/s\)": "(9 MB/s)",
    r'"seconds": [\d.e-]+': '"seconds": 0.01',
    r"\((native|numba|reference)\)": "(native)",
    r'"backend": "\w+"': '"backend": "native"',
}
FILES = {
    "recipe.yaml": """\
sequence_length: 256
seed: 7
batch: {micro_batch_size: 2, data_parallel_size: 2, gradient_accumulation_steps: 2}
sources: {web: web, code: code, few: few}
stages:
  first: {steps: 20, mix: {web: 3, code: 1}}
  last: {steps: 9, mix: {web: 1, code: 2, few: 1}}
""",
    "capped.yaml": """\
sequence_length: 128
batch: {global_batch_size: 8, micro_batch_size: 2, data_parallel_size: 2}
sources:
  web: {path: web, max_fraction: 1/2}
  code: {path: code, max_epochs: 2}
  chat: {path: few, kind: finetuning}
exhaustion: continue
stages:
  short: {samples: 400, mix: {web: {proportion: 2}, code: {proportion: 1}}}
  long:
    tokens: 80k
    sequence_length: 512
    mix: {web: 1, code: 1, chat: 1}
""",
    "neox.yml": """\
{seq_length: 256, train_micro_batch_size_per_gpu: 4, global_num_gpus: 2, train_iters: 60,
 train_data_paths: [web, code], train_data_weights: [2, 1],
 valid_data_paths: [few, few], test_data_paths: [few, few], eval_interval: 20, eval_iters: 2}
""",
    "alone.yml": """\
{seq_length: 256, train_micro_batch_size_per_gpu: 4, global_num_gpus: 2, train_iters: 60,
 data_path: web, data_impl: mmap, split: '90,6,4', eval_interval: 20, eval_iters: 2}
""",
    "launch.sh": """\
#!/bin/bash
GPUS=4
BATCH=$((GPUS * 4))
DATA="0.7 web 0.3 code"
torchrun --nproc_per_node $GPUS pretrain_gpt.py --seq-length 256 --micro-batch-size 2 \\
    --global-batch-size $BATCH --train-iters 40 --eval-interval 10 --eval-iters 2 \\
    --data-path $DATA --split 90,6,4
""",
    "histogram.txt": "100 400\n900 30\n",
    "skipped.txt": "3\n5\n17\n",
}


def prepare() -> None:
    """Write the files of the page into the working folder."""
    write_pairs(web=300, code=120)
    write_corpus(Path("few"), [40, 0, 77, 500, 8, 31, 300, 64] * 4, np.uint16)
    for name, text in FILES.items():
        Path(name).write_text(text)


def answered(page: str) -> str:
    """Return the page with what its commands print now."""
    prepare()
    head, *rest = page.split("\n\n", 1)
    commands = [line for line in "".join(rest).splitlines() if line.startswith((COMMAND, FILE))]
    return f"{head}\n\n" + "\n".join(f"{line}\n{_output(line)}" for line in commands)


def _output(line: str) -> str:
    if line.startswith(FILE):
        shown = Path(line.removeprefix(FILE)).read_text()
    else:
        status, out, err = cli(*shlex.split(line.removeprefix(COMMAND)))
        shown = out + err + f"(status {status})\n" * (status != 0)
    for pattern, text in _VARIES.items():
        shown = re.sub(pattern, text, shown)
    return shown.replace(f"{Path.cwd()}", "/work")
