"""A Ray cluster that loses a node in the middle of a build; in no cluster when it begins."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
from support.engine_builds import Struck, build_struck, content, settings
from support.engine_tasks import runs_a_task, until
from support.ray_clusters import add_node, quiet, ray_cluster

import megaindex
from megaindex.builders.cached import BuildTask
from megaindex.engine import open_engine


@pytest.mark.slow
def test_a_node_lost_in_the_middle_changes_nothing(
    paths: list[str],
    alone: dict[str, object],
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    runs, lost, cache = tmp_path / "runs", tmp_path / "lost", tmp_path / "cache"
    runs.mkdir()
    tasks = [
        Struck(
            task=BuildTask(path=path, settings=settings(cache)),
            folder=str(runs),
            waits_for=str(lost),
        )
        for path in paths
    ]
    with ray_cluster(num_cpus=1) as cluster:
        node = add_node(cluster, num_cpus=3)
        seen: list[bool] = []
        lose = threading.Thread(target=_lose, args=(cluster, node, runs, lost, seen))
        with quiet(), open_engine("ray", address=cluster.address) as engine:
            lose.start()
            assert len(list(engine.run(build_struck, tasks))) == len(paths)
            lose.join()
    assert seen == [True, True]
    assert "its worker was lost" in caplog.text
    assert len(list(runs.iterdir())) > len(paths)  # and its task run again
    # whoever builds next removes what the lost ones left, such as a claim on what they published
    extra = {"sequence_length": 16, "seed": 99}
    for place in (cache, tmp_path / "extra"):
        megaindex.build_index(paths[0], **extra, cache_dir=place)
    assert content(cache) == {**alone, **content(tmp_path / "extra")}


def _lose(cluster: Any, node: Any, runs: Path, lost: Path, seen: list[bool]) -> None:
    """Once every CPU is in the middle of a build; three of them go with the node."""
    seen.append(until(lambda: _builders(runs) == 4, 60))
    with quiet():
        cluster.remove_node(node, allow_graceful=False)
    # Ray ends them once they miss their node
    seen.append(until(lambda: _builders(runs) == 1, 60))
    lost.touch()


def _builders(runs: Path) -> int:
    """Processes that are in a build."""
    pids = {path.read_text() for path in runs.iterdir()} - {""}
    return sum(runs_a_task(int(pid)) for pid in pids)
