"""Files of a release, of every format that later releases read, and what is read from them.

    PYTHONPATH=.:tests python -m support.release_files

writes tests/golden/release-1.0/. Run it before a release alone: the files of one do not change.
"""

from __future__ import annotations

import hashlib
import json
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from support.command_line import cli
from support.folders import inside

from megaindex.index.skips import Skip
from megaindex.keys import Store, uniform
from megaindex.loader import MicroBatchSampler, SampleOptions, join_states, loader_of_recipe
from megaindex.lock import make_lock, read_lock
from megaindex.plan import make_plan
from megaindex.recipe import open_recipe, read_recipe

FOLDER = Path(__file__).parents[1] / "golden" / "release-1.0"
RECIPE = """\
sequence_length: 16
batch: {micro_batch_size: 1, data_parallel_size: 2, global_batch_size: 4}
sources:
  text: {path: text, subset: 3/4, held_out: 1/10, shuffle_name: text}
  code: {path: code, order: packed, align: 4}
stages:
  first: {steps: 12, mix: {text: 3, code: 1}}
  last: {epochs: 1, mix: {text: {repeat: 1}, code: {choose: 40}}}
evaluation: {source: {path: text, held_out: 1/10, shuffle_name: text}, interval: 8}
skip:
- {steps: 3-4, move: true}
- {documents: removed.ids, source: text, from_step: 2, remove: true}
- {documents: masked.ids, source: code, from_step: 6}
seed: 7
"""
_STEPS = 6  # before the checkpoint
_OPTIONS = SampleOptions(eod_id=0, boundaries="documents", keys="wide")


def write_files() -> None:
    """Write the inputs and all files, in the current directory."""
    lines = [
        f"line {number} of {number % 7} words " + "word " * (number % 23) for number in range(90)
    ]
    for name, part in (("text", lines[:60]), ("code", lines[60:])):
        Path(f"{name}.txt").write_text("\n".join(part) + "\n")
        words = [name, f"{name}.txt", "--tokenizer", "bytes", "--append-eod", "--format", "lines"]
        status, _, err = cli("tokenize", *words)
        assert status == 0, err
    Path("removed.ids").write_text("4 9 17 30\n")
    Path("masked.ids").write_text("2\n11 5\n")
    Path("run.yaml").write_text(RECIPE)
    make_lock(read_recipe("run.yaml"), tokens=True).write("run.lock")
    states = []
    for rank in range(2):
        loader = _loader(rank)
        for number, _ in enumerate(loader, 1):
            if number == 2 * _STEPS:
                break
        states.append(loader.state_dict())
    Path("state.json").write_text(json.dumps(join_states(states), indent=1))
    Path("sampler.json").write_text(json.dumps(_sampler(_STEPS).state_dict(), indent=1))
    keys = _keys(_loader(0))
    with Store("store", dtype="float32", shape=(3,)).writer() as writer:
        writer.append(keys, uniform(keys[:, 0], 3).astype(np.float32))
    Store("store").merge()


def facts() -> dict[str, Any]:
    """Return what is read from the files in the current directory."""
    lock, state = read_lock("run.lock"), json.loads(Path("state.json").read_text())
    loader = _loader(0)
    loader.load_state_dict(state)
    rest = [{name: _digest(value) for name, value in batch.items()} for batch in loader]
    sampler = _sampler(0)
    sampler.load_state_dict(json.loads(Path("sampler.json").read_text()))
    keys, store = _keys(_loader(0)), Store("store")
    found, is_found = store.find(keys)
    status, verified, _ = cli("verify", "run.lock", "--all", "--tokens")
    plan = make_plan(read_recipe("run.yaml")).to_json()
    traced = cli("trace", "run.lock", "--step", 7, "--json")
    assert (status, traced[0]) == (0, 0), verified + traced[2]
    return {
        "identity": lock.identity,
        "content": lock.content_identity,
        "receipts": {name: each["receipts"] for name, each in lock.content["subsets"].items()},
        "no findings": "no findings" in verified,
        "batches after the state": rest,
        "micro batches after the sampler": [np.asarray(each).tolist() for each in sampler][:5],
        "rows of the store": [int(store.num_rows), _digest(found[is_found])],
        "traced": _without_folders(json.loads(traced[1])),
        "train_iters": plan["train_iters"],
        "subsets": plan["subsets"],
    }


def _loader(rank: int) -> Any:
    opened = open_recipe(read_recipe("run.yaml"))
    return loader_of_recipe(
        opened, data_parallel_rank=rank, data_parallel_size=2, micro_batch_size=1, options=_OPTIONS
    )


def _sampler(steps: int) -> MicroBatchSampler:
    sampler = MicroBatchSampler(
        num_samples=200, micro_batch_size=2, data_parallel_rank=1, data_parallel_size=2,
        global_batch_size=8, skip=[Skip(steps="5", move=True)],
    )  # fmt: skip
    for _, _ in zip(range(2 * steps), sampler, strict=False):
        pass
    return sampler


def _keys(loader: Any) -> np.ndarray:
    rows = [(batch["key"], batch["key_high"]) for batch in loader]
    pairs = np.stack(
        [np.concatenate([np.asarray(x) for x in each]) for each in zip(*rows, strict=True)]
    )
    return np.unique(pairs.T[(pairs != 0).any(axis=0)], axis=0)


def _without_folders(value: Any) -> Any:
    """Return JSON values with the names of files in place of their paths."""
    if isinstance(value, dict):
        return {
            key: Path(each).name if key == "file" and each else _without_folders(each)
            for key, each in value.items()
        }
    return list(map(_without_folders, value)) if isinstance(value, list) else value


def _digest(value: Any) -> str:
    array = np.ascontiguousarray(np.asarray(value))
    return f"{array.dtype}{list(array.shape)} {hashlib.sha256(array.tobytes()).hexdigest()[:16]}"


def main() -> None:
    folder = Path(tempfile.gettempdir()) / "megaindex-release"  # whose name the provenance holds
    folder.mkdir()
    with inside(folder):
        write_files()
        Path("expected.json").write_text(json.dumps(facts(), indent=1) + "\n")
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.move(folder, FOLDER)


if __name__ == "__main__":
    main()
