"""The page of messages: commands and calls, each followed by its message."""

from __future__ import annotations

import shlex
import shutil
import struct
from pathlib import Path
from typing import Any

import numpy as np
from support.command_line import cli
from support.corpora import write_corpus

import megaindex
from megaindex.errors import MegaIndexError

PAGE = Path(__file__).parents[1] / "golden" / "messages.txt"
LOCKED = "--data-path a --seq-length 8 --global-batch-size 2 --epochs 1"
COMMAND, CALL = "$ megaindex ", ">>> "

RECIPE = """\
sequence_length: 8
batch: {{micro_batch_size: 2, data_parallel_size: 1}}
sources: {{web: a, code: {code}}}
stages: {{all: {{steps: 2, mix: {{web: 1, {mixed}: {share}}}}}}}
"""
NEOX = "seq_length: 8\ntrain_batch_size: 4\ndata_path: a\n"
EXACT = "# megaindex.adapters.neox.install(exact={})\n"
EPOCHS = "".join(f"{split}_data_paths: [a, b]\n" for split in ("train", "valid", "test"))
FILES = {
    "alpha.yml": NEOX.replace("data_path: a", EPOCHS)
    + "train_iters: 4\nweight_by_num_documents: true\nweighted_sampler_alpha: 1.0e+9\n",
    "captured.json": '{"megaindex_capture": 9}',
    "damaged.json": '{"megaindex_capture": 1',
    "counts.txt": "512 4\n",
    "empty.lock": "{}",
    "epochs.yml": NEOX + "train_epochs: 2\n",
    "exact.yml": EXACT.format(True)
    + "seq_length: 8\ntrain_micro_batch_size_per_gpu: 4\nglobal_num_gpus: 1\ntrain_epochs: 2\n"
    + EPOCHS,
    "launch.sh": "torchrun pretrain_gpt.py --seq-length 8 --micro-batch-size 2 --train-iters 9",
    "lengths.txt": "512 many\n",
    "lines.jsonl": '{"text": "a"}\n{"text": \n',
    "neox.yml": "seq_lenght: 8\ntrain_batch_size: 4\n",
    "overflow.yml": NEOX + "pack_impl: pack_until_overflow\ntrain_iters: 4\n",
    "one_epoch.yml": (
        "{seq_length: 8, train_micro_batch_size_per_gpu: 2, train_epochs: 1, data_path: a,"
        " data_impl: mmap, split: '1,0,0'}"
    ),
    "paths.txt": "a\nnone\n",
    "setting.yaml": "sequence_lenght: 8\n" + RECIPE.format(code="b", mixed="code", share=1),
    "share.yaml": RECIPE.format(code="b", mixed="code", share=-1),
    "source.yaml": RECIPE.format(code="b", mixed="cod", share=1),
    "stages.yaml": """\
sequence_length: 8
batch: {micro_batch_size: 2, data_parallel_size: 1}
sources: {web: a}
stages: {short: {steps: 2, mix: {web: 1}}, long: {steps: 2, sequence_length: 16, mix: {web: 1}}}
""",
    "state.json": "[{}]",
    "states.json": "[1]",
    "text.txt": "some words\n",
    "unplanned.yml": EXACT.format("") + NEOX,
    "unread.yaml": RECIPE.format(code="none", mixed="code", share=1),
}


def prepare() -> None:
    """Write the files of the page into the working folder."""
    write_corpus(Path("a"), [20, 0, 7, 33])
    write_corpus(Path("b"), [9, 9], np.uint16)
    write_corpus(Path("few"), [3])
    for name in ("cut", "other", "long", "half"):
        for suffix in (".bin", ".idx"):
            shutil.copy("a" + suffix, name + suffix)
    Path("cut.bin").write_bytes(Path("a.bin").read_bytes()[:-4])
    Path("other.idx").write_bytes(b"TNTIDX" + Path("a.idx").read_bytes()[6:])
    head = bytearray(Path("a.idx").read_bytes())
    head[18:26] = struct.pack("<Q", 2**40)
    Path("long.idx").write_bytes(head)
    Path("half.bin").unlink()
    for name, text in FILES.items():
        Path(name).write_text(text)
    assert cli("lock", "--out", "run.lock", *LOCKED.split())[0] == 0


def answered(page: str) -> str:
    """Return the page with the messages that its commands and calls have now."""
    prepare()
    kept = [line for line in page.splitlines() if line.startswith((COMMAND, CALL, "#")) or not line]
    return "".join(f"{line}\n{_message(line)}" for line in kept)


def _message(line: str) -> str:
    if not line.startswith((COMMAND, CALL)):
        return ""
    if line.startswith(COMMAND):
        status, out, err = cli(*shlex.split(line.removeprefix(COMMAND)))
        assert status == 2, f"{line}: ended with {status}, not with an error"
        assert out == "", f"{line}: printed {out}"
        return err.replace(f"{Path.cwd()}/", "")
    names: dict[str, Any] = {"megaindex": megaindex, "np": np}
    try:
        eval(line.removeprefix(CALL), names)
    except MegaIndexError as error:
        return f"{type(error).__name__}: {error}\n"
    raise AssertionError(f"{line}: no error")
