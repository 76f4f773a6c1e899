"""Many datasets built by many: the cache of one machine, whoever is killed on the way."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.corpora import write_corpus
from support.engine_builds import Struck, build_struck, content, settings
from support.ray_clusters import quiet

from megaindex.builders.cached import BuildTask, build_many
from megaindex.cli import main
from megaindex.engine import Engine
from megaindex.errors import InvalidArgument


@pytest.mark.slow
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
            dies=number == 3,
            seconds=0.05,
        )
        for number, path in enumerate(paths)
    ]
    tasks += [Struck(task=tasks[0].task, folder=tasks[0].folder, dies=True)]  # twice, at once
    list(engine.run(build_struck, tasks))
    list(build_many(paths, settings(tmp_path / "cache"), engine))
    assert len(list((tmp_path / "runs").iterdir())) >= len(paths) + 1 + 1
    assert content(tmp_path / "cache") == alone


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
    assert first.startswith(f"order megatron: 12 datasets, {samples:,} samples of 16 tokens, ")
    assert first.endswith(f" s on 2 workers ({kind}), in {tmp_path / 'cache'}")
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
        (
            ("--data-paths-file", tmp_path / "none"),
            "must name at least one dataset; write one prefix a line",
        ),
        (("--data-paths-file", tmp_path / "binary"), "not a text file"),
        (("--data-paths-file", tmp_path / "no"), "does not exist"),
        (("--data-path", *paths, "--address", "auto"), "needs engine ray"),
        (("--data-path", *paths, "--workers", 0), "workers must be at least 1"),
        (("--data-path", *paths[:2], tmp_path / "no"), f"{tmp_path}/no"),
    ):
        status, out, error = command(capsys, "build", *arguments, *rest)
        assert (status, out) == (2, "")
        assert reason in error
        assert error.count("\n") == 1
