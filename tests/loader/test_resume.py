"""A run of several processes that is killed inside a step and goes on with other ranks."""

from __future__ import annotations

import itertools
import json
import multiprocessing
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex.index.balance import lost_time, squared_lengths
from megaindex.index.receipts import Receipt, fingerprint_keys, planned_receipt

torch = pytest.importorskip("torch")

from support import rank_process  # noqa: E402
from support.rank_process import GLOBAL_BATCH, Launch  # noqa: E402

from megaindex.loader import CostModel  # noqa: E402


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Processes are forked from one that has loaded torch and started no thread."""
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.rank_process"])
    return context


def start(processes: Any, launch: Launch) -> dict[str, Any] | None:
    """All ranks of a launch; what the run wrote at its end, None where a rank died."""
    ranks = [
        processes.Process(target=rank_process.train, args=(launch, rank), daemon=False)
        for rank in range(launch.ranks)
    ]
    for process in ranks:
        process.start()
    if launch.dies is not None:
        ranks[launch.dies[0]].join(60)
        for process in ranks:  # they wait for the dead one
            process.kill()
    for process in ranks:
        process.join(60)
    if launch.dies is not None:
        assert ranks[launch.dies[0]].exitcode == -signal.SIGKILL
        return None
    assert [process.exitcode for process in ranks] == [0] * launch.ranks
    result: dict[str, Any] = json.loads((launch.folder / f"{launch.name}.json").read_text())
    return result


def consumed(folder: Path) -> int:
    state = torch.load(folder / "checkpoint", weights_only=True)
    return int(state["sampler"]["consumed_samples"])


def unbroken_losses(index: Any, dataset: Any) -> list[int]:
    """The sum of labels of each step, the last of fewer samples, read without a loader."""
    losses = []
    for first in range(0, index.num_samples, GLOBAL_BATCH):
        ids = range(first, min(first + GLOBAL_BATCH, index.num_samples))
        spans = index.locate(ids)
        runs = zip(
            spans.document.tolist(), spans.offset.tolist(), spans.length.tolist(), strict=True
        )
        text = np.concatenate([dataset.get(d, o, n) for d, o, n in runs]).astype(np.int64)
        losses.append(int(text.reshape(len(ids), -1)[:, 1:].sum()))
    return losses


@pytest.mark.slow
def test_a_killed_run_goes_on_with_other_ranks(processes: Any, tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", np.random.default_rng(7).integers(1, 90, 150))
    index, dataset, fingerprints = rank_process.run_index(tmp_path)
    assert index.num_samples > 14 * GLOBAL_BATCH
    assert index.num_samples % GLOBAL_BATCH  # some rows of the last step are padding
    planned = planned_receipt(index, 0, index.num_samples, fingerprint_keys(fingerprints))

    # 4 ranks x 6 micro batches a step: rank 2 dies in step 6, after the checkpoint of step 4
    first = Launch(folder=tmp_path, name="first", ranks=4, micro_batch_size=1, dies=(2, 33))
    assert start(processes, first) is None
    assert consumed(tmp_path) == 4 * GLOBAL_BATCH
    # 2 ranks x 4 micro batches: rank 0 dies in the fifth step from there
    second = Launch(
        folder=tmp_path, name="second", ranks=2, micro_batch_size=3, workers=1, dies=(0, 18)
    )
    assert start(processes, second) is None
    assert consumed(tmp_path) == 8 * GLOBAL_BATCH
    shutil.copy(tmp_path / "checkpoint", tmp_path / "kept")

    third = start(processes, Launch(folder=tmp_path, name="third", ranks=3, micro_batch_size=4))
    assert third is not None
    assert Receipt.from_dict(third) == planned
    assert third["losses"] == unbroken_losses(index, dataset)

    os.replace(tmp_path / "kept", tmp_path / "checkpoint")
    swapped = start(
        processes,
        Launch(folder=tmp_path, name="fourth", ranks=3, micro_batch_size=2, swapped=(209, 230)),
    )
    assert swapped is not None
    assert swapped["samples"] == planned.count
    assert Receipt.from_dict(swapped) != planned


@pytest.mark.slow
def test_balanced_ranks_serve_the_steps_of_unbalanced_ones(processes: Any, tmp_path: Path) -> None:
    write_corpus(tmp_path / "c", np.random.default_rng(7).integers(1, 30, 250))
    index, dataset, fingerprints = rank_process.run_index(tmp_path)
    assert index.num_samples % GLOBAL_BATCH
    runs = {}
    for name, balance in (("plain", None), ("balanced", CostModel(linear=0, attention=1))):
        launch = Launch(
            folder=tmp_path, name=name, ranks=4, micro_batch_size=1, workers=1, balance=balance
        )
        runs[name] = start(processes, launch)
        os.remove(tmp_path / "checkpoint")
    plain, balanced = runs["plain"], runs["balanced"]
    assert plain is not None
    assert balanced is not None
    planned = planned_receipt(index, 0, index.num_samples, fingerprint_keys(fingerprints))
    assert Receipt.from_dict(plain) == Receipt.from_dict(balanced) == planned
    assert plain["losses"] == balanced["losses"] == unbroken_losses(index, dataset)
    assert len(plain["steps"]) > 5
    for ours, theirs in zip(balanced["steps"], plain["steps"], strict=True):
        assert sorted(itertools.chain(*ours)) == sorted(itertools.chain(*theirs))
    assert balanced["steps"][:-1] != plain["steps"][:-1]
    # every sample was served in the step of its position
    assert sum(count for count, _ in balanced["placed"]) == index.num_samples
    # and the rounds are even: rank by rank, the work of each micro batch
    squares = squared_lengths(index, np.arange(index.num_samples)).astype(float)
    lost = {
        name: lost_time(np.array([squares[np.array(step).T] for step in run["steps"][:-1]]))
        for name, run in runs.items() if run is not None
    }  # fmt: skip
    assert lost["balanced"] < lost["plain"] / 2
