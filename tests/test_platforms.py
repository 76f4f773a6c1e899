"""Planning, building and reading where the functions of Linux that macOS lacks are missing."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Functions and flags of os that some macOS lacks, preadv before version 11, after typeshed's stubs
LINUX_ONLY = (
    "copy_file_range", "eventfd", "fdatasync", "getrandom", "getresuid", "getxattr", "listxattr",
    "memfd_create", "pidfd_open", "pipe2", "posix_fadvise", "posix_fallocate", "preadv", "pwritev",
    "removexattr", "sched_getaffinity", "sched_setaffinity", "setxattr", "splice", "unshare",
    "O_DIRECT", "O_NOATIME", "O_PATH", "O_TMPFILE",
)  # fmt: skip

REMOVE = f"""
import os

for name in {LINUX_ONLY}:
    if hasattr(os, name):
        delattr(os, name)
"""

WITHOUT = """
import pathlib

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


FORKED = """
import obstore
from megaindex.objects.store import library

store = obstore.store.MemoryStore()
obstore.put(store, "key", b"value")  # starts the threads of the runtime
pid = os.fork()
if pid == 0:
    mine = library()
    own = mine.store.MemoryStore()
    mine.put(own, "key", b"of the child")
    same = mine.get(own, "key").bytes() == b"of the child" and mine is not obstore
    os._exit(0 if same else 1)
assert os.waitpid(pid, 0)[1] == 0
assert bytes(obstore.get(store, "key").bytes()) == b"value"
assert os.listdir(os.environ["TMPDIR"]) == []
"""


def run(script: str, folder: Path) -> None:
    """Run a script in a folder, without the functions that macOS lacks."""
    environment = {k: v for k, v in os.environ.items() if k != "MEGAINDEX_NUM_THREADS"}
    (folder / "temporary").mkdir()
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", REMOVE + script], cwd=folder, capture_output=True,
        text=True, check=False, env={**environment, "TMPDIR": str(folder / "temporary")},
        timeout=120,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def test_plans_builds_and_reads_without_the_functions_that_macos_lacks(tmp_path: Path) -> None:
    run(WITHOUT, tmp_path)


def test_a_forked_process_loads_its_object_store_without_anonymous_files(tmp_path: Path) -> None:
    pytest.importorskip("obstore")
    run(FORKED, tmp_path)


def test_each_use_of_a_function_that_macos_lacks_has_another_way() -> None:
    """A file that names one asks for it with hasattr."""
    used = re.compile(rf"\bos\.({'|'.join(LINUX_ONLY)})\b")
    found = set()
    for path in (ROOT / "megaindex").rglob("*.py"):
        text = path.read_text()
        code = re.sub(r'""".*?"""|#[^\n]*', "", text, flags=re.DOTALL)
        for name in set(used.findall(code)):
            found.add(name)
            assert f'hasattr(os, "{name}")' in text, f"{path}: os.{name}"
    assert {"memfd_create", "posix_fallocate", "posix_fadvise"} <= found
