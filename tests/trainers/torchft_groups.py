"""Replica groups of one rank under torchft's Manager, on CPU, with gloo and its lighthouse.

``torchft_groups.py LOCK FOLDER``: groups a and b train; b ends within step 7, which a repeats
alone; c joins after step 10. Each group writes a line for each step that the manager commits: step,
rank, number of groups, tokens.
"""

from __future__ import annotations

import json
import os
import sys
import time
import traceback
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


def main(lock: str, folder: Path) -> int:
    """Return the number of groups that failed."""
    server = LighthouseServer(
        bind="[::]:0", min_replicas=1, join_timeout_ms=500, heartbeat_timeout_ms=2000
    )

    def start(name: str, **ending: int) -> int:
        child = os.fork()
        if child:
            return child
        try:
            train(name, lock, folder, server.address(), **ending)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)

    groups = [start("a"), start("b", ends_at=7)]
    path, deadline = folder / "a.jsonl", time.monotonic() + 60
    while time.monotonic() < deadline:
        if path.exists() and len(path.read_text().splitlines()) > 10:
            break
        time.sleep(0.05)
    groups.append(start("c"))
    return sum(os.waitpid(group, 0)[1] != 0 for group in groups)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
