"""Checkpoints, receipts and caches of the version before: golden/make_checkpoints.py."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from support import checkpoint_runs as runs

from megaindex.builders import recipe as known_module
from megaindex.cache.fingerprint import json_digest, stamps_of
from megaindex.index.receipts import fingerprint_keys, planned_block_receipts
from megaindex.loader.receipts import check_receipts, join_states, stored_receipt

GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "checkpoints.json").read_text())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("corpora")
    runs.write_sources(folder)
    return folder


@pytest.mark.parametrize("written", ["all", "lengths"])
@pytest.mark.parametrize("kind", runs.LOADERS)
def test_a_run_goes_on_from_its_states(
    folder: Path, kind: str, written: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Also from states as 0.1.0 wrote them, without content and places."""
    kept, after = _older if written == "lengths" else _plain, []
    for rank, state in enumerate(map(kept, GOLDEN["states"][kind])):
        loader = runs.LOADERS[kind](folder, rank)
        with caplog.at_level(logging.WARNING):
            loader.load_state_dict(state)
        said = [record.message for record in caplog.records]
        assert len(said) == (written == "lengths")
        assert all("were not compared" in message for message in said)
        caplog.clear()
        assert kept(loader.state_dict()) == _paths(state, folder)
        assert runs.digest(list(runs.take(loader))) == GOLDEN["rest"][kind][rank]
        after.append(loader.state_dict())
    if kind in ("text", "recipe"):
        index = loader._index
        check = check_receipts(after, index)
        assert check.equal
        # those before were not watched
        assert (check.in_place < check.served.total.count) == (written == "lengths")
        assert ("that is not recorded" in str(check)) == (written == "lengths")


@pytest.mark.parametrize("kind", ["text", "recipe"])
def test_its_receipts_are_those_of_the_plan(folder: Path, kind: str) -> None:
    states = GOLDEN["states"][kind]
    loader = runs.LOADERS[kind](folder, 0)
    index = loader._index
    assert check_receipts(states, index).equal
    joined = join_states(states)
    loader.load_state_dict(joined)
    state = joined["loader"] if kind == "recipe" else joined
    receipt = stored_receipt(state["receipt"])
    keys = fingerprint_keys(receipt.fingerprints)
    end, stride = state["consumed_samples"], receipt.counted.ladder.stride
    assert receipt.counted.ladder == planned_block_receipts(index, 0, end, keys, stride=stride)


def test_validation_caches_are_reused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the paths and times of these files in place of those of the golden ones."""
    runs.opened(folder, tmp_path)
    (path,) = tmp_path.glob("sources-*-megaindex.json")
    records = _paths(GOLDEN["sources"]["sources"], folder)
    prefixes = [record["prefix"] for record in records]
    for record, stamp in zip(records, stamps_of(prefixes), strict=True):
        record["stamp"] = stamp
    path.write_text(json.dumps({"sources": records, "checksum": json_digest({"sources": records})}))
    monkeypatch.delattr(known_module, "corpus_fingerprint")  # all of them are known
    opened = runs.opened(folder, tmp_path)
    by_name = {Path(record["prefix"]).name: record["fingerprint"] for record in records}
    assert opened.fingerprints == [by_name[name] for name in ("web", "chat", "qa")]
    contents = opened.contents()  # added to what was known
    monkeypatch.delattr(known_module, "contents_of")
    monkeypatch.setattr(
        known_module, "contents_of", lambda dataset, *, whole, known: dict(known), raising=False
    )
    assert runs.opened(folder, tmp_path).contents() == contents
    assert all(tokens for tokens, _ in contents)


def _plain(state: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(json.dumps(state))
    return plain


def _older(state: dict[str, Any]) -> dict[str, Any]:
    """Without what 0.1.0 did not write."""
    state = _plain(state)
    for source in state.get("sources", ()):
        del source["content"]
    loader = state.get("loader", state)
    del loader["content"]
    loader["order"].pop("weights", None)
    later = ("in_place", "misplaced", "data_parallel_rank", "data_parallel_size")
    for name in later if loader["receipt"] is not None else ():
        del loader["receipt"][name]
    return state


def _paths(value: Any, folder: Path) -> Any:
    return json.loads(json.dumps(value).replace("/corpora/", f"{folder}/"))
