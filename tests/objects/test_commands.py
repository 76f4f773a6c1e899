"""Every verb that reads a corpus takes a URL where it takes a path."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.object_server import Proxy, request, upload

from megaindex.builders.recipe import open_recipe
from megaindex.cli import main
from megaindex.errors import InvalidArgument, MissingFile, StorageError
from megaindex.loader import loader_of_recipe
from megaindex.settings.recipe_file import read_recipe, recipe_of, to_mapping
from megaindex.verify.verify import verify, verify_all

RUN = ("--seq-length", "16", "--micro-batch-size", "2", "--data-parallel-size", "1")


def output(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    status = main(list(arguments))
    shown = capsys.readouterr()
    assert status == (arguments[0] == "diff-order"), shown.err
    return shown.out


def without_paths(text: str, *paths: str) -> str:
    for path in paths:
        text = text.replace(path, "PATH")
    return text


@pytest.mark.slow_cases("arguments0")
@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--data-path", "{}", *RUN, "--epochs", "2", "--json"),
        ("plan", "--data-path", "0.3", "{}", "0.7", "{}", *RUN, "--train-iters", "40", "--split",
         "90,5,5", "--json"),
        ("audit", "--data-path", "{}", *RUN, "--epochs", "1", "--json"),
        ("audit", "--data-path", "{}", *RUN, "--epochs", "1", "--step", "3", "--json"),
        ("extend", "--data-path", "{}", "--seq-length", "16", "--epochs", "1", "--more-epochs",
         "1", "--json"),
        ("diff-order", "order=epoch", "order=window", "--data-path", "{}", "--seq-length", "16",
         "--epochs", "1", "--json"),
        ("inspect", "--json", "{}"),
        ("verify", "--json", "{}"),
        ("verify", "--json", "--full", "--vocab-size", "50000", "{}"),
    ],
)  # fmt: skip
def test_as_of_a_disk(
    store: Any, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    local, url = store(dtype=np.uint16)
    shown = {
        path: without_paths(output(capsys, *(a.format(path) for a in arguments)), path)
        for path in (local.path_prefix, url)
    }
    assert json.loads(shown[url]) == json.loads(shown[local.path_prefix])


def test_build_fills_the_same_cache(
    store: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    local, url = store()
    cache = tmp_path / "indices"
    build = ("build", "--seq-length", "16", "--cache-dir", str(cache), "--data-path")
    output(capsys, *build, url)
    entries = sorted(cache.iterdir())
    output(capsys, *build, local.path_prefix)
    assert sorted(cache.iterdir()) == entries


def test_verify_reads_every_token(store: Any, s3: str, proxy: Proxy, tmp_path: Path) -> None:
    _, url = store(dtype=np.uint16)
    content = bytearray((tmp_path / "corpus.bin").read_bytes())
    content[2000:2002] = b"\xff\xff"
    request(proxy.upstream, "PUT", f"/{s3}/data/corpus.bin", bytes(content))
    assert verify(url).findings == ()
    report = verify(f"{url}.idx", full=True, vocab_size=60_000)
    (finding,) = report.findings
    assert (finding.file, finding.rule) == (f"{url}.bin", "token-range")
    assert finding.where.startswith("byte 2000")
    with pytest.raises(InvalidArgument, match="lies in an object store"):
        verify(url, full=True, eod=1)


@pytest.mark.slow
def test_verify_has_several_requests_under_way(store: Any, proxy: Proxy) -> None:
    local, url = store(lengths=[4 << 20] * 2)
    proxy.seen.clear()
    proxy.latency = 0.1
    report = verify(url, full=True, vocab_size=1 << 24)
    assert report.findings == ()
    assert report.counted["tokens"] == local.num_tokens
    assert len(proxy.gets(".bin")) == 8
    assert proxy.in_flight() > 4


@pytest.mark.parametrize(
    "arguments",
    [
        ("audit", "--data-path", "P", *RUN, "--epochs", "1", "--html", "{}"),
        ("plan", "--recipe", "{}"),
        ("build", "--recipe", "{}"),
        ("diff-order", "{}", "order=epoch", "--data-path", "P", "--seq-length", "16"),
        ("import", "numpy", "{}.npy", "OUT", "--separator", "0"),
        ("import", "numpy", "{}.raw", "OUT", "--separator", "0", "--stored-dtype", "uint16"),
        ("import", "nanotron", "{}", "OUT"),
        ("import", "tntidx", "{}", "OUT"),
        ("import", "mds", "{}", "OUT"),
        ("import", "parquet", "{}", "OUT"),
    ],
)
def test_what_must_be_a_file_here_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...]
) -> None:
    write_corpus(tmp_path / "P", [20] * 10)
    here = {"P": str(tmp_path / "P"), "OUT": str(tmp_path / "OUT")}
    status = main([here.get(each, each).format("s3://bucket/x") for each in arguments])
    shown = capsys.readouterr().err
    assert status == 2, shown
    assert "s3://bucket/x" in shown
    assert "lies in an object store; " in shown
    assert not list(tmp_path.glob("OUT*"))


@pytest.mark.parametrize("verb", ["plan", "build", "audit", "verify", "inspect"])
def test_help_says_that_urls_are_taken(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    with pytest.raises(SystemExit):
        main([verb, "--help-all" if verb in ("plan", "audit") else "--help"])
    assert "URLs (s3://, gs://, az://)" in " ".join(capsys.readouterr().out.split())


def test_verify_and_inspect_take_folders(
    store: Any, s3: str, proxy: Proxy, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those right in the folder, in order of name, as of a disk."""
    local, _ = store()
    for name in ("web", "code", "deeper/other"):
        upload(proxy.upstream, s3, f"data/{name}", Path(local.path_prefix))
    request(proxy.upstream, "DELETE", f"/{s3}/data/web.bin")
    folder = f"s3://{s3}/data"
    expected = [f"{folder}/{name}" for name in ("code", "corpus", "web")]
    for url in (folder, f"{folder}/"):
        reports = verify_all(url)
        assert [report.path for report in reports] == expected
        assert [report.is_clean for report in reports] == [True, True, False]
    request(
        proxy.upstream, "PUT", f"/{s3}/data/web.bin", Path(f"{local.path_prefix}.bin").read_bytes()
    )
    shown = json.loads(output(capsys, "verify", "--json", "--workers", "1", folder))
    assert [report["path"] for report in shown["reports"]] == expected
    output(capsys, "inspect", folder)
    upload(proxy.upstream, s3, "top", Path(local.path_prefix))
    assert [report.path for report in verify_all(f"s3://{s3}")] == [f"s3://{s3}/top"]
    with pytest.raises(MissingFile, match=rf"^s3://{s3}/dat: neither a pair .* nor a folder"):
        verify_all(f"s3://{s3}/dat")
    proxy.faults += ["403"]
    with pytest.raises(StorageError, match=rf"^s3://{s3}/data/: cannot list"):
        verify_all(f"{folder}/")


def test_verify_finds_what_is_missing(store: Any, s3: str, proxy: Proxy) -> None:
    _, url = store()
    request(proxy.upstream, "DELETE", f"/{s3}/data/corpus.bin")
    (finding,) = verify(url).findings
    assert (finding.file, finding.rule) == (f"{url}.bin", "missing-file")


@pytest.mark.slow
def test_a_recipe_names_urls(
    store: Any, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    _, url = store(lengths=[40] * 60)
    _, mask = store("mask", lengths=[40] * 60)
    text = (
        "sequence_length: 16\n"
        "batch: {{micro_batch_size: 2, data_parallel_size: 1}}\n"
        "sources: {{web: '{0}', more: {{path: '{0}'}}, disk: corpus,\n"
        "  chat: {{path: '{0}', kind: finetuning, loss_mask: '{1}', packed: false}}}}\n"
        "stages: {{all: {{steps: 20, mix: {{web: 0.2, more: 0.2, disk: 0.2, chat: 0.4}}}}}}\n"
    )
    batches = {}
    for name, paths in (("remote", (url, mask)), ("local", ("corpus", "mask"))):
        file = tmp_path / f"{name}.yaml"
        file.write_text(text.format(*paths))
        recipe = read_recipe(file)
        again = recipe_of(to_mapping(recipe), "state", tmp_path)
        assert [c.path for c in again.sources] == [c.path for c in recipe.sources]
        output(capsys, "plan", "--recipe", str(file))
        loader = loader_of_recipe(open_recipe(recipe))
        batches[name] = (
            [{field: values.tolist() for field, values in batch.items()} for batch in loader],
            loader.recorder.state_dict(),
        )
    assert read_recipe(tmp_path / "remote.yaml").sources[0].path == url
    assert batches["remote"] == batches["local"]


@pytest.mark.parametrize("verb", ["plan", "audit", "inspect", "verify"])
def test_bad_urls_are_said_in_a_line(
    s3: str, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    secret = "aB3/cD4+eF5"
    for url in (f"s3://{s3}/missing", f"s3://KEY:{secret}@{s3}/corpus"):
        flags = () if verb in ("inspect", "verify") else ("--data-path",)
        more = (*RUN, "--epochs", "1") if flags else ()
        status = main([verb, *flags, url, *more])
        shown = capsys.readouterr()
        assert status == 2
        assert shown.err.startswith(f"megaindex {verb}: s3://") or ": s3://" in shown.err
        assert not any(part in shown.err + shown.out for part in secret.split("/"))
        assert "Traceback" not in shown.err
