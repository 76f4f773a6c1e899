"""What a full disk and a read-only file system really say: run by test_mounts.py, in the folder of
which ``small`` is a file system of 2 MiB and ``fixed`` one that is mounted read-only."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoint_runs import opened, take, text_loader, write_sources
from support.command_line import cli

import megaindex
from megaindex.cache import npy
from megaindex.corpus.merge import merge
from megaindex.errors import StorageError

SPARE_KIB = (0, 4, 12, 32, 256)
"""Free space in which an act begins: the first write fails, a later one, or none."""


def write(prefix: Path) -> None:
    with megaindex.IndexedDatasetWriter(prefix, np.int64) as writer:
        writer.add_documents(np.zeros(600_000, np.int64), np.full(6_000, 100))


def expect(number: int, place: Path, act: Callable[[], object]) -> None:
    with pytest.raises(StorageError) as raised:
        act()
    message = str(raised.value)
    assert raised.value.errno == number, message
    assert str(place) in message
    assert ";" in message
    assert os.listdir(place) == [], f"{place}: left {os.listdir(place)}"


def acts(folder: Path, place: Path) -> dict[str, Callable[[], object]]:
    """Everything that writes into a place, each at a name that no other takes."""
    web, out = folder / "web", place / "out"
    run = ("--data-path", web, "--seq-length", 4, "--epochs", 2)
    steps = ("--micro-batch-size", 2, "--global-batch-size", 4)
    linked = place / "linked"  # GPT-NeoX keeps its arrays beside the pair
    settings: dict[str, Any] = {"sequence_length": 4, "seed": 1, "order": "megatron"}
    build = partial(command, "build", *run, "--cache-dir", out / "build")
    return {
        "build": build,
        "build without hard links": partial(without_hard_links, build),
        "export to maxtext": partial(
            command, "export", "--to", "maxtext", *run, *steps, "--cache-dir", out / "maxtext"
        ),
        "export to neox": partial(
            command, "export", "--to", "neox", "--data-path", linked, "--seq-length", 4,
            "--train-iters", 4000, *steps,
        ),
        "extend": partial(
            megaindex.extend_run, str(web), num_samples=30_000, more_samples=5_000,
            cache_dir=out / "extend", **settings,
        ),
        "split": partial(command, "split", web, place / "part-{}", "--parts", 3),
        "lock": partial(command, "lock", *run, *steps, "--out", place / "run.lock"),
        "lock with a cache": partial(
            command, "lock", *run, *steps, "--out", place / "cached.lock", "--cache-dir",
            out / "lock",
        ),
        "audit": partial(command, "audit", *run, *steps, "--html", place / "audit.html"),
        "merge": partial(command, "merge", place / "merged", web, web),
    }  # fmt: skip


def refused_link(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, "Operation not permitted")


def without_hard_links(act: Callable[[], object]) -> None:
    """As on file systems that have none, where a claim is created and then written."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "link", refused_link)
        act()


def command(*words: object) -> None:
    """Run a command; raise its error, which must be one line."""
    status, _, error = cli(*words)
    if status:
        assert error.count("\n") == 1, error
        raise StorageError(error.rstrip())


def listed(place: Path) -> list[str]:
    return sorted(str(path.relative_to(place)) for path in place.rglob("*") if not path.is_dir())


def fails_whole(place: Path, name: str, act: Callable[[], object], says: str) -> bool:
    """Whether an act failed with a typed error that names the place, and left no file."""
    before = listed(place)
    try:
        act()
    except StorageError as error:
        message = str(error)
        assert str(place) in message, (name, message)
        assert re.search(says, message), (name, message)
        assert "\n" not in message, (name, message)
        assert ";" in message, (name, message)
        assert listed(place) == before, (name, message)
        return True
    assert listed(place) != before, name
    return False


def fill(place: Path, spare_kib: int) -> None:
    filler = place / "filler"
    with open(filler, "wb", buffering=0) as file:
        with contextlib.suppress(OSError):
            while file.write(bytes(4096)):
                pass
        file.truncate(max(0, file.tell() - (spare_kib << 10)))


def empty(place: Path, *kept: str) -> None:
    for path in place.iterdir():
        if path.name not in kept:
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def checkpoints(folder: Path, place: Path) -> None:
    """A run whose pairs and cache lie in a place that cannot be written saves and resumes."""
    loader = text_loader(place / "pairs", 0)
    batches = iter(loader)
    for _ in range(3):
        next(batches)
    state = loader.state_dict()
    resumed = text_loader(place / "pairs", 0)
    resumed.load_state_dict(state)
    assert list(take(resumed)) == list(take(batches)) != []
    opened(place / "pairs", cache_dir=place / "known")


def mount(place: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", str(place)], check=True)


def main(folder: Path) -> None:
    write(folder / "corpus")
    for number, name in ((errno.ENOSPC, "small"), (errno.EROFS, "fixed")):
        place = folder / name
        for mapped in (1 << 20, 1 << 40):
            npy.WORTH_MAPPING = mapped
            settings = {"sequence_length": 1, "seed": 1, "epochs": 2, "cache_dir": place}
            expect(number, place, partial(megaindex.build_index, folder / "corpus", **settings))
        expect(number, place, partial(write, place / "out"))
        inputs = [str(folder / "corpus")]
        expect(number, place, partial(merge, str(place / "out"), inputs))

    with megaindex.IndexedDatasetWriter(folder / "web", np.int64) as writer:
        writer.add_documents(np.arange(20_000), np.full(200, 100))
    for name in ("small", "fixed"):
        place = folder / name
        mount(place, "rw")
        for suffix in (".bin", ".idx"):
            (place / f"linked{suffix}").symlink_to(folder / f"web{suffix}")
        (place / "pairs").mkdir()
        write_sources(place / "pairs")
        kept = ("linked.bin", "linked.idx", "pairs")
        for what, act in acts(folder, place).items():
            if name == "small":
                failures = []
                for spare in SPARE_KIB:
                    fill(place, spare)
                    failures.append(fails_whole(place, what, act, "No space"))
                    empty(place, *kept)
                assert failures[0], what
            else:
                mount(place, "ro")
                assert fails_whole(place, what, act, "Read-only|no write access"), what
                mount(place, "rw")
            assert not fails_whole(place, what, act, "-"), what
            empty(place, *kept)
        fill(place, 0)
        if name == "fixed":
            mount(place, "ro")
        checkpoints(folder, place)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
