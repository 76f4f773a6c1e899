"""Many datasets built by many: the cache of one machine, whoever is killed on the way."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from corpora import write_corpus
from engine_builds import Struck, build_struck, content, settings
from engine_tasks import until
from ray_clusters import add_node, quiet, ray_cluster

import megaindex
from megaindex.build.many import BuildTask, build_many
from megaindex.cli import main
from megaindex.engine import Engine, open_engine
from megaindex.errors import InvalidArgument


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Prefixes of 30 corpora, no two alike."""
    folder = tmp_path_factory.mktemp("corpora")
    generator = np.random.default_rng(5)
    for number in range(30):
        write_corpus(folder / f"c{number:02}", generator.integers(1, 90, 40 + number), np.uint16)
    return [str(folder / f"c{number:02}") for number in range(30)]


@pytest.fixture(scope="module")
def alone(paths: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, object]:
    """What one process builds, one dataset after the other."""
    cache = tmp_path_factory.mktemp("alone")
    for path in paths:
        BuildTask(path=path, settings=settings(cache)).run()
    found = content(cache)
    assert len(found) == 30 * 5  # directory, manifest, three arrays
    return found


def test_the_cache_is_that_of_one_machine(
    engine: Engine, paths: list[str], alone: dict[str, object], tmp_path: Path
) -> None:
    for _ in range(2):  # the second time, all is there
        built = list(build_many([*paths, paths[0]], settings(tmp_path), engine))
        assert sorted(one.path for one in built) == paths
        assert content(tmp_path) == alone


def test_builders_killed_in_the_middle_change_nothing(
    engine: Engine, paths: list[str], alone: dict[str, object], tmp_path: Path
) -> None:
    (tmp_path / "runs").mkdir()
    tasks = [
        Struck(
            task=BuildTask(path=path, settings=settings(tmp_path / "cache")),
            folder=str(tmp_path / "runs"),
            dies=number % 10 == 3,
            seconds=0.05,
        )
        for number, path in enumerate(paths[:24])
    ]
    tasks += [Struck(task=t.task, folder=t.folder, dies=True) for t in tasks[:2]]  # twice, at once
    list(engine.run(build_struck, tasks))
    list(build_many(paths, settings(tmp_path / "cache"), engine))
    assert len(list((tmp_path / "runs").iterdir())) >= 24 + 2 + 3
    assert content(tmp_path / "cache") == alone


@pytest.mark.slow
def test_a_node_lost_in_the_middle_changes_nothing(
    paths: list[str], alone: dict[str, object], tmp_path: Path
) -> None:
    runs, cache = tmp_path / "runs", tmp_path / "cache"
    runs.mkdir()
    tasks = [
        Struck(task=BuildTask(path=path, settings=settings(cache)), folder=str(runs), seconds=0.4)
        for path in paths
    ]
    with ray_cluster(num_cpus=1) as cluster:
        node = add_node(cluster, num_cpus=3)
        lose = threading.Thread(target=_lose, args=(cluster, node, runs))
        with quiet(), open_engine("ray", address=cluster.address) as engine:
            lose.start()
            assert len(list(engine.run(build_struck, tasks))) == len(paths)
            lose.join()
    assert len(list(runs.iterdir())) > len(paths)  # something was lost, and run again
    # whoever builds next removes what the lost ones left, such as a claim on what they published
    extra = {"sequence_length": 16, "seed": 99}
    for place in (cache, tmp_path / "extra"):
        megaindex.build_index(paths[0], **extra, cache_dir=place)
    assert content(cache) == {**alone, **content(tmp_path / "extra")}


def _lose(cluster: Any, node: Any, runs: Path) -> None:
    until(lambda: len(list(runs.iterdir())) >= 9, 30)
    with quiet():
        cluster.remove_node(node, allow_graceful=False)


def test_a_dataset_that_fails_is_named_and_the_others_stay(
    engine: Engine, paths: list[str], tmp_path: Path
) -> None:
    write_corpus(tmp_path / "short", [3])
    with pytest.raises(InvalidArgument, match=rf"^{tmp_path}/short: the documents hold 3 tokens"):
        list(build_many([*paths[:5], f"{tmp_path}/short"], settings(tmp_path / "cache"), engine))
    with pytest.raises(InvalidArgument, match=r"/c0[01]: seed must be from 0"):
        list(build_many(paths[:2], settings(tmp_path / "cache", seed=-1), engine))


def command(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    with quiet():
        status = main([str(argument) for argument in arguments])
    captured = capsys.readouterr()
    return status, captured.out, captured.err


@pytest.mark.parametrize("kind", ["local", "ray"])
def test_the_command_builds_what_a_file_names(
    kind: str,
    paths: list[str],
    alone: dict[str, object],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
) -> None:
    where = ["--workers", 2]
    if kind == "ray":
        where = ["--engine", "ray", "--address", request.getfixturevalue("ray_address")]
    (tmp_path / "paths").write_text("\n\n".join(paths[2:]) + "\n")
    build = ("build", "--data-path", *paths[:3], "--data-paths-file", tmp_path / "paths")
    rest = ("--seq-length", 16, "--seed", 7, "--epochs", 2, "--cache-dir", tmp_path / "cache")
    status, out, error = command(capsys, *build, *rest, *where)
    assert (status, error) == (0, "")
    first, second = out.splitlines()
    samples = sum(_samples(value) for value in alone.values())
    assert first.startswith(f"order megatron: 30 dataset(s), {samples:,} samples of 16 tokens, ")
    assert first.endswith(f" s on 2 worker(s) ({kind}), in {tmp_path / 'cache'}")
    assert second.startswith(f"slowest: {Path(paths[0]).parent}/c")
    assert content(tmp_path / "cache") == alone


def _samples(value: object) -> int:
    return value["arrays"]["shuffle_index"]["shape"][0] if isinstance(value, dict) else 0


def test_what_the_command_refuses(
    paths: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "none").write_text("\n")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\0")
    rest = ("--seq-length", 16, "--cache-dir", tmp_path / "cache")
    for arguments, reason in (
        ((), "--data-path is missing"),
        (("--data-paths-file", tmp_path / "none"), "names no dataset; write one prefix a line"),
        (("--data-paths-file", tmp_path / "binary"), "is no text"),
        (("--data-paths-file", tmp_path / "no"), "cannot read"),
        (("--data-path", *paths, "--address", "auto"), "choose engine ray"),
        (("--data-path", *paths, "--workers", 0), "workers must be at least 1"),
        (("--data-path", *paths[:2], tmp_path / "no"), f"{tmp_path}/no"),
    ):
        status, out, error = command(capsys, "build", *arguments, *rest)
        assert (status, out) == (2, "")
        assert reason in error
        assert error.count("\n") == 1
