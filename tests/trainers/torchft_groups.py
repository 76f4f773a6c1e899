"""Replica groups of one rank under torchft's Manager, on CPU, with gloo and its lighthouse.

``torchft_groups.py LOCK FOLDER``: groups a and b train; b ends within step 7, which a repeats
alone; c joins after step 10. Each group writes a line for each step that the manager commits: step,
rank, number of groups, tokens.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer

from megaindex.loader import MicroBatchSampler, collate
from megaindex.lock import open_run

STEPS, SIZE = 20, 24


def train(name: str, lock: str, folder: Path, lighthouse: str, ends_at: int | None = None) -> None:
    weight = torch.zeros(256, 256, requires_grad=True)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=20)),
        state_dict=lambda: {"weight": weight.data},
        load_state_dict=lambda state: weight.data.copy_(state["weight"]),
        min_replica_size=1, use_async_quorum=False, rank=0, world_size=1, replica_id=name,
        store_addr="127.0.0.1", store_port=store.port, lighthouse_addr=lighthouse,
    )  # fmt: skip
    samples = open_run(lock).dataset()
    (folder / f"{name}.known").touch()  # to the lighthouse, which waits for those that it knows
    for other in "ab":
        wait_for(folder / f"{other}.known")
    with (folder / f"{name}.jsonl").open("w") as log:
        while manager.current_step() < STEPS:
            manager.start_quorum()
            step, groups = manager.current_step(), manager.num_participants()
            sampler = MicroBatchSampler(
                num_samples=STEPS * SIZE,
                micro_batch_size=SIZE // groups,
                data_parallel_rank=manager.participating_rank() or 0,
                data_parallel_size=groups,
                consumed_samples=SIZE * step,
            )
            batch: Any = collate(samples.__getitems__(next(iter(sampler))))
            if step == ends_at:
                os._exit(0)
            loss = torch.nn.functional.cross_entropy(weight[batch["tokens"]].mT, batch["labels"])
            (gradient,) = torch.autograd.grad(loss, weight)
            manager.allreduce(gradient).wait()
            if manager.should_commit():
                weight.data -= gradient
                row = [step, manager.participating_rank(), groups, batch["tokens"].tolist()]
                print(json.dumps(row), file=log, flush=True)
            time.sleep(0.05)  # so that a group can join
    manager.shutdown(wait=False)


def wait_for(path: Path, lines: int = 0) -> None:
    """Wait until a file is there, and has more than so many lines; at most a minute."""
    deadline = time.monotonic() + 60
    while not path.exists() or (lines and len(path.read_text().splitlines()) <= lines):
        if time.monotonic() > deadline:
            return
        time.sleep(0.05)


def group(name: str, lock: str, folder: Path, lighthouse: str, ends_at: str) -> None:
    """Train one group, as soon as all of them have imported torch; c after 10 steps of a."""
    (folder / f"{name}.ready").touch()
    wait_for(folder / "go")
    if name == "c":
        wait_for(folder / "a.jsonl", 10)
    train(name, lock, folder, lighthouse, ends_at=int(ends_at) or None)


def main(lock: str, folder: Path) -> int:
    """Return the number of groups that failed."""
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=5000, heartbeat_timeout_ms=2000
    )
    ends = {"a": 0, "b": 7, "c": 0}
    groups = [  # not forked: the server has threads, which a forked process would wait for
        subprocess.Popen(
            [sys.executable, __file__, lock, str(folder), name, server.address(), str(ends_at)]
        )
        for name, ends_at in ends.items()
    ]
    for name in ends:
        wait_for(folder / f"{name}.ready")
    (folder / "go").touch()
    return sum(each.wait() != 0 for each in groups)


if __name__ == "__main__":
    if len(sys.argv) > 3:
        group(sys.argv[3], sys.argv[1], Path(sys.argv[2]), *sys.argv[4:])
        os._exit(0)  # whatever threads the manager has left
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
