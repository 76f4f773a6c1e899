"""Builds that are struck in the middle, and caches compared byte for byte."""

from __future__ import annotations

import json
import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.engine_tasks import until

from megaindex.builders.cached import BuildSettings, BuildTask, Built
from megaindex.index.orders import framework as shuffled


@dataclass(frozen=True, kw_only=True)
class Struck:
    """A build that kills its worker the first time, or takes long enough to be struck."""

    task: BuildTask
    folder: str
    """Takes a file for each run of each dataset, with the number of its process."""
    dies: bool = False
    seconds: float = 0.0
    """Added to the build."""
    waits_for: str = ""
    """A file; the build stays in its middle until it is there."""

    def __str__(self) -> str:
        return str(self.task)


def build_struck(struck: Struck) -> Built:
    """As `BuildTask.run`, and something happens between the claim and the entry."""
    name = Path(struck.task.path).name
    earlier = len(list(Path(struck.folder).glob(f"{name}-*")))
    (Path(struck.folder) / f"{name}-{earlier}").write_text(str(os.getpid()))
    real = shuffled.build

    def build(*args: Any) -> None:
        real(*args)
        if struck.dies and not earlier:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(struck.seconds)
        if struck.waits_for:
            assert until(Path(struck.waits_for).exists, 300)

    shuffled.build = build
    try:
        return struck.task.run()
    finally:
        shuffled.build = real


def settings(cache: Path, **changes: Any) -> BuildSettings:
    asked: dict[str, Any] = {"sequence_length": 16, "seed": 7, "epochs": "2", **changes}
    return BuildSettings(**asked, cache_dir=str(cache))


def content(cache: Path) -> dict[str, object]:
    """All that is in a cache: bytes of files, and manifests but for the boot that they name."""
    found: dict[str, object] = {}
    for path in sorted(cache.rglob("*")):
        name = str(path.relative_to(cache))
        if path.name == "manifest.json":
            manifest = json.loads(path.read_text())
            del manifest["boot_id"], manifest["checksum"]
            found[name] = manifest
        elif path.name != "durable":  # marks what was synced since
            found[name] = None if path.is_dir() else path.read_bytes()
    return found
