"""Planning, building and reading where the functions of Linux that macOS lacks are missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

WITHOUT = """
import os, pathlib

for name in ("sched_getaffinity", "posix_fadvise", "posix_fallocate", "copy_file_range",
             "memfd_create"):
    delattr(os, name)

def refuse_proc(call):
    def called(path, *arguments, **settings):
        if isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith("/proc/"):
            refused.append(os.fspath(path))
            raise FileNotFoundError(2, "No such file or directory", os.fspath(path))
        return call(path, *arguments, **settings)
    return called

refused = []
os.readlink = refuse_proc(os.readlink)
pathlib.Path.read_text = refuse_proc(pathlib.Path.read_text)

import megaindex
from megaindex.corpus import merge
from megaindex.engine.local import LocalEngine
from megaindex.loader import NumpyDataset, PositionalOptions, PositionalTokens

for prefix in ("a", "b"):
    with megaindex.IndexedDatasetWriter(prefix) as writer:
        for document in range(9):
            writer.add_document(range(40 + document))
merge("c", ["a", "b"])
plan = megaindex.make_plan(data_path="c", sequence_length=16, epochs=1, global_batch_size=4,
                           order="neox")
assert plan.train_iters == 49 // 4  # 792 tokens
built = megaindex.build_index("c", sequence_length=16, seed=1, cache_dir="cache")
again = megaindex.build_index("c", sequence_length=16, seed=1, cache_dir="cache")
assert built.shuffle_index.tolist() == again.shuffle_index.tolist()
assert LocalEngine().workers == os.cpu_count()
data = megaindex.IndexedDataset("c")
positional = PositionalTokens([data], PositionalOptions(threads=1, merge_gap=0))
mapped, read = NumpyDataset(built, data), NumpyDataset(built, positional)
for sample in range(49):
    assert mapped[sample]["tokens"].tolist() == read[sample]["tokens"].tolist()
assert refused
"""


def test_plans_builds_and_reads_without_the_functions_that_macos_lacks(tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "MEGAINDEX_NUM_THREADS"}
    result = subprocess.run(
        [sys.executable, "-c", WITHOUT], cwd=tmp_path, env=environment, capture_output=True,
        text=True, check=False,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
