"""What opening a recipe told is kept, and holds as long as the files are the same."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus

from megaindex.builders.recipe import open_recipe
from megaindex.cache import fingerprint as records
from megaindex.errors import FormatError, InvalidArgument
from megaindex.format.pair import MappedPair
from megaindex.loader import loader_of_recipe
from megaindex.settings.recipe import Recipe
from megaindex.settings.recipe_file import read_recipe


class LookedAt(Exception):
    """Every entry of an .idx was checked."""


@pytest.fixture
def recipe(tmp_path: Path) -> Recipe:
    rng = np.random.default_rng(3)
    for name in ("web", "code", "valid"):
        write_corpus(tmp_path / name, rng.integers(1, 90, 200))
    path = tmp_path / "run.yaml"
    path.write_text(
        "sequence_length: 32\nbatch: {global_batch_size: 4}\n"
        "evaluation: {source: valid, interval: 20}\n"
        "sources: {web: web, code: code, valid: valid}\n"
        "stages:\n  all: {steps: 50, mix: {web: 2, code: 1}}\n"
    )
    return read_recipe(path)


@pytest.fixture
def blind(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(_: MappedPair) -> int:
        raise LookedAt

    monkeypatch.setattr(MappedPair, "check_everything", look)


def test_the_second_process_takes_what_the_first_one_learned(
    recipe: Recipe, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    first = open_recipe(recipe, cache_dir=tmp_path / "cache")
    request.getfixturevalue("blind")
    with pytest.raises(LookedAt):
        open_recipe(recipe)
    second = open_recipe(recipe, cache_dir=tmp_path / "cache")
    assert second.fingerprints == first.fingerprints
    assert second.layout.num_steps == first.layout.num_steps == 50
    ids = np.arange(first.index.num_samples)
    for one, other in zip(first.index.locate(ids), second.index.locate(ids), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
def test_a_corpus_that_changed_is_looked_at_again(
    recipe: Recipe, tmp_path: Path, suffix: str
) -> None:
    before = open_recipe(recipe, cache_dir=tmp_path / "cache")
    path = tmp_path / f"code{suffix}"
    data = bytearray(path.read_bytes())
    if suffix == ".idx":
        data[34:38] = b"\xff\xff\xff\xff"  # the first length is now -1
        path.write_bytes(data)
        with pytest.raises(FormatError, match="sequence 0 must have a length of at least 0"):
            open_recipe(recipe, cache_dir=tmp_path / "cache")
        return
    os.utime(path, ns=(1, 1))
    after = open_recipe(recipe, cache_dir=tmp_path / "cache")
    assert after.fingerprints == before.fingerprints


def test_other_sources_are_not_taken_for_known(recipe: Recipe, tmp_path: Path) -> None:
    open_recipe(recipe, cache_dir=tmp_path / "cache")
    write_corpus(tmp_path / "more", np.full(50, 40))
    web, *others = recipe.sources
    other = replace(recipe, sources=(replace(web, path=str(tmp_path / "more")), *others))
    opened = open_recipe(other, cache_dir=tmp_path / "cache")
    assert opened.sources[0].size.tokens == 2000
    assert len(list((tmp_path / "cache").iterdir())) == 2


@pytest.mark.parametrize("damage", [b"", b"{}", b"[1]", b"cut"])
def test_a_damaged_record_is_not_believed(recipe: Recipe, tmp_path: Path, damage: bytes) -> None:
    before = open_recipe(recipe, cache_dir=tmp_path / "cache")
    (record,) = (tmp_path / "cache").iterdir()
    text = record.read_bytes()
    record.write_bytes(
        text.replace(b'"num_tokens":', b'"num_tokens":1') if damage == b"cut" else damage
    )
    after = open_recipe(recipe, cache_dir=tmp_path / "cache")
    assert [s.size for s in after.sources] == [s.size for s in before.sources]
    assert record.read_bytes() == text  # written anew


@pytest.mark.parametrize("forged", [{"num_tokens": -1}, {"num_tokens": "7"}, {"fingerprint": 7}])
def test_a_forged_record_is_not_believed(
    recipe: Recipe, tmp_path: Path, forged: dict[str, object]
) -> None:
    before = open_recipe(recipe, cache_dir=tmp_path / "cache")
    (record,) = (tmp_path / "cache").iterdir()
    text = record.read_bytes()
    stored = json.loads(text)["sources"]
    records.write_records(record, [{**one, **forged} for one in stored])
    after = open_recipe(recipe, cache_dir=tmp_path / "cache")
    assert [s.size for s in after.sources] == [s.size for s in before.sources]
    assert record.read_bytes() == text  # written anew


def test_the_cache_is_a_directory_here(recipe: Recipe) -> None:
    with pytest.raises(InvalidArgument, match="s3://bucket/cache"):
        open_recipe(recipe, cache_dir="s3://bucket/cache")


def test_content_that_was_read_is_kept(
    recipe: Recipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def state() -> dict[str, Any]:
        return loader_of_recipe(open_recipe(recipe, cache_dir=tmp_path / "cache")).state_dict()

    first = state()
    monkeypatch.setattr(records, "content_fingerprint", None)
    assert state() == first


def test_build_keeps_what_it_learned(recipe: Recipe, tmp_path: Path) -> None:
    status, out, _ = cli(
        "build", "--recipe", tmp_path / "run.yaml", "--cache-dir", tmp_path / "cache"
    )
    assert status == 0
    assert f"results of the checks are in {tmp_path / 'cache'}" in out
    (record,) = (tmp_path / "cache").iterdir()
    assert record.name.startswith("sources-")


@pytest.mark.parametrize(
    "given", [["--seed", "7"], ["--data-path", "x"], ["--engine", "ray"], ["--epochs", "2"]],
    ids=lambda given: given[0],
)  # fmt: skip
def test_what_a_recipe_settles_is_no_flag_of_build(
    recipe: Recipe, tmp_path: Path, given: list[str]
) -> None:
    status, _, err = cli("build", "--recipe", tmp_path / "run.yaml", *given)
    assert status == 2
    assert f"{given[0]}: has no effect with --recipe, which takes only --cache-dir" in err


@pytest.mark.parametrize("packed", [True, False])
def test_finetuning_samples_fit_their_rows(tmp_path: Path, packed: bool) -> None:
    """A packed row of 16 has 16 tokens; a document alone has one more, its last label."""
    for name in ("chat", "labels"):
        write_corpus(tmp_path / name, np.array([40, 17, 16, 9, 7, 30, 5, 3, 8]))
    source = f"{{path: chat, kind: finetuning, labels: labels, packed: {str(packed).lower()}}}"
    path = tmp_path / "run.yaml"
    path.write_text(
        "sequence_length: 16\nbatch: {micro_batch_size: 1, data_parallel_size: 1}\n"
        f"sources: {{chat: {source}}}\nstages: {{all: {{steps: 5, mix: {{chat: 1}}}}}}\n"
    )
    index = open_recipe(read_recipe(path)).index
    spans = index.locate(np.arange(index.num_samples))
    tokens = np.add.reduceat(spans.length, spans.row_splits[:-1])
    assert tokens.max() == (16 if packed else 17)
