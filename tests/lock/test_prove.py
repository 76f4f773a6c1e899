"""Locks and checkpoints that differ by exactly their skips, or by more: `compare_records`."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.folders import inside
from support.inputs import for_each
from support.locked_runs import write_inputs

import megaindex
from megaindex import FormatError, InvalidArgument, Skip
from megaindex.builders.recipe import open_recipe
from megaindex.index import receipts
from megaindex.kernels import load
from megaindex.loader import join_states
from megaindex.lock import compare_records, make_lock, open_run, read_lock
from megaindex.lock.lock_file import lock_text
from megaindex.recipe import Recipe, read_recipe

STEPS, SIZE = 20, 4
RUN: dict[str, Any] = {
    "data_path": ["1", "data/web", "2", "data/code"],
    "sequence_length": 32,
    "train_iters": STEPS,
    "global_batch_size": SIZE,
    "split": "90,10,0",
    "eval_iters": 1,
}
OTHERS: list[tuple[dict[str, Any], str]] = [
    ({"seed": 7}, "order: common.seed: 1234 in the first, 7 in the second"),
    ({"data_path": ["1", "data/web", "3", "data/code"]}, "order: weights[0]: "),
    ({"data_path": ["1", "data/web", "2", "data/chat"]}, "fingerprint of source 1: "),
    ({"sequence_length": 48}, "order: common.sequence_length: 32 in the first, 48 in the second"),
    ({"train_iters": 25}, "number of steps: 20 in the first, 25 in the second"),
    ({"train_iters": 10, "global_batch_size": 8}, "samples before step 1: 4 in the first, 8 in"),
    ({"eval_iters": 0}, "subset valid: "),
    ({"data_path": "data/web"}, "subset valid: index.order: 'blend' in the first, 'arrays' in the"),
]
"""Runs that differ by more than skips, and how the difference is named."""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("runs")
    write_inputs(folder)
    with inside(folder):
        yield folder


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def locked(name: str, skip: Any = (), **settings: Any) -> Any:
    return make_lock(**{**RUN, **settings}, skip=list(skip)).write(name, overwrite=True)


Masks = set[tuple[int, int, tuple[int, ...]]]


def random_skips(rng: np.random.Generator, name: str) -> tuple[list[Skip], dict[int, bool], Masks]:
    """Skips in any number of entries, and what they are: steps with move, and masks."""
    chosen = rng.permutation(STEPS)[: rng.integers(0, 6)].tolist()
    moves = {step: bool(rng.integers(2)) for step in chosen}
    entries = []
    for move in (False, True):
        steps = sorted(step for step in chosen if moves[step] == move)
        cut = int(rng.integers(len(steps) + 1))
        entries += [Skip(steps=part, move=move) for part in (steps[:cut], steps[cut:]) if part]
    masks: Masks = set()
    for number in range(int(rng.integers(3))):
        source, step = int(rng.integers(2)), int(rng.choice([0, 5]))
        ids = np.unique(rng.integers(0, 3, 2)) if rng.integers(3) else np.zeros(0, np.int64)
        given: dict[str, Any] = {"source": str(source), "from_step": step}
        if ids.size:  # under another name in each lock
            Path(f"{name}{number}.ids").write_text("\n".join(map(str, [*ids, ids[0]])))
            given["documents"] = f"{name}{number}.ids"
        if (source, step, tuple(ids)) not in masks:
            masks.add((source, step, tuple(ids)))
            entries.append(Skip(**given))
    return entries, moves, masks


def skips_of(found: tuple[Skip, ...]) -> tuple[dict[int, bool], Masks]:
    moves, masks = {}, set()
    for skip in found:
        for first, last in skip.ranges:
            moves.update(dict.fromkeys(range(first, last + 1), skip.move))
        if not skip.ranges:
            text = Path(str(skip.documents)).read_text() if skip.documents is not None else ""
            source = ["web", "code"].index(Path(str(skip.source)).name)
            masks.add((source, int(skip.from_step or 0), tuple(sorted({*map(int, text.split())}))))
    return moves, masks


def check_random(rng: np.random.Generator) -> None:
    """Two random sets of skips of one run, and of another run, by sets in plain Python."""
    runs = [random_skips(rng, name) for name in ("first", "second")]
    locks = [locked(f"{k}.lock", entries) for k, (entries, _, _) in enumerate(runs)]
    proof = compare_records(*locks)
    assert proof.holds, proof
    (first, second) = ((moves, masks) for _, moves, masks in runs)
    for ours, theirs, found in ((second, first, proof.added), (first, second, proof.removed)):
        steps = {k: move for k, move in ours[0].items() if theirs[0].get(k) != move}
        assert skips_of(found) == (steps, ours[1] - theirs[1])
    for record, (_, moves, _) in zip((proof.first, proof.second), runs, strict=True):
        assert record.samples_skipped == SIZE * len(moves)
        assert record.samples_moved == SIZE * sum(moves.values())
        assert record.check.planned.total.count == SIZE * (STEPS - len(moves) + sum(moves.values()))
    changed, named = OTHERS[int(rng.integers(len(OTHERS)))]
    other = compare_records(locks[0], locked("other.lock", runs[1][0][:0], **changed))
    assert not other.holds
    assert any(text.startswith(named) for text in other.differences), (named, other.differences)


@pytest.mark.slow
def test_random_locks_differ_by_their_skips() -> None:
    for seed in range(5):
        check_random(np.random.default_rng(seed))


def test_entries_of_skips_are_compared_in_any_order() -> None:
    first = locked("first.lock", [Skip(steps="5"), Skip(steps="2")])
    proof = compare_records(first, locked("second.lock", [Skip(steps="1-6")]))
    assert skips_of(proof.added) == (dict.fromkeys((1, 3, 4, 6), False), set())
    assert proof.removed == ()


@pytest.mark.slow
def test_more_random_locks_differ_by_their_skips() -> None:
    for seed in range(5, 60):
        check_random(np.random.default_rng(seed))


@for_each(("changed", "named"), OTHERS)
def test_the_first_other_difference_is_named(changed: dict[str, Any], named: str) -> None:
    locked("first.lock", [Skip(steps="2")])
    locked("second.lock", **changed)
    status, shown, _ = cli("prove", "first.lock", "second.lock", "--json")
    proof = json.loads(shown)
    assert (status, proof["holds"]) == (1, False)
    assert any(text.startswith(named) for text in proof["differences"]), proof["differences"]
    assert "differ by more than" in cli("prove", "first.lock", "second.lock")[1]


def test_a_lock_is_known_by_its_content_too() -> None:
    first, second = locked("first.lock"), locked("second.lock", [Skip(steps="2")])
    shutil.copy(str(second.path), "second.json")
    assert cli("prove", "first.lock", "second.json") == cli("prove", "first.lock", "second.lock")
    assert compare_records(first, second).holds


def test_removed_tokens_are_counted() -> None:
    Path("bad.txt").write_text("1 5")
    skip = Skip(documents="bad.txt", source="data/web", remove=True)
    first, second = locked("first.lock"), locked("second.lock", [skip])
    proof = compare_records(first, second)
    count = proof.second.tokens_removed
    assert count > proof.first.tokens_removed == 0
    assert f"; {count:,} tokens removed" in str(proof.second)
    assert "removed" not in str(proof.first)


def test_tokens_of_two_locks_are_compared(tmp_path: Path) -> None:
    for name, eod in (("first", None), ("second", 7)):
        (tmp_path / name).mkdir()
        write_corpus(tmp_path / name / "data", [40] * 20, np.uint16, eod=eod)
        locked(f"{name}.lock", data_path=str(tmp_path / name / "data"), split=None, eval_iters=0,
               tokens=True)  # fmt: skip
    shown = cli("prove", "first.lock", "second.lock")
    assert (shown[0], "difference: source 0: tokens: chunk 0: " in shown[1]) == (1, True)


def test_moved_files_are_searched(tmp_path: Path) -> None:
    Path("here.ids").write_text("1 5")
    locked("first.lock")
    locked("second.lock", [Skip(documents="here.ids", source="data/web", from_step=2)])
    Path("here.ids").rename(tmp_path / "there.ids")
    assert "--search" in cli("prove", "first.lock", "second.lock")[2]
    assert cli("prove", "first.lock", "second.lock", "--search", tmp_path)[0] == 0


@pytest.mark.parametrize("text", ["[]", "3", "[{}, 3]"])
def test_a_file_without_states_is_no_record(text: str) -> None:
    Path("mixed.json").write_text(text)
    locked("first.lock", [])
    found = cli("prove", "first.lock", "mixed.json")
    assert (found[0], "must hold the state of a loader, or a list of" in found[2]) == (2, True)


def test_a_lock_with_other_receipts_is_no_record() -> None:
    lock = locked("first.lock", [Skip(steps="2")])
    content = json.loads(json.dumps(lock.content))
    content["subsets"]["train"]["receipts"]["blocks"][0] = "0" * 32
    Path("edited.lock").write_bytes(lock_text(content))
    with pytest.raises(FormatError, match=r"edited.lock: the receipt of steps from 0 on must be"):
        compare_records(lock, read_lock("edited.lock"))


def run(of: Any, rounds: int, ranks: int) -> list[dict[str, Any]]:
    """States of the ranks of a locked run, or of a recipe, after so many micro batches."""
    from megaindex.loader import loader_of_recipe

    states = []
    for rank in range(ranks):
        loader = (
            loader_of_recipe(open_recipe(of), data_parallel_rank=rank, data_parallel_size=ranks)
            if isinstance(of, Recipe)
            else open_run(of, data_parallel_rank=rank, data_parallel_size=ranks)
        )
        for _ in zip(range(rounds), loader, strict=False):
            pass
        states.append(json.loads(json.dumps(loader.state_dict())))
    return states


def test_a_checkpoint_of_a_loader_is_compared_by_the_lock_of_its_run() -> None:
    """Its state holds the positions and digests of its skips, and no settings."""
    pytest.importorskip("torch")
    Path("bad.txt").write_text("1 5")
    skip = [Skip(steps="1-2"), Skip(steps="4", move=True)]
    masks = [Skip(documents="bad.txt", source="data/code", from_step=3), Skip(source="data/web")]
    plain, whole = locked("plain.lock"), locked("whole.lock", [*skip, *masks])
    states = run(whole, 17 * SIZE, 1)
    for lock in (plain, locked("steps.lock", skip)):
        with pytest.raises(InvalidArgument, match="masks 2 documents that the lock does not name"):
            compare_records(lock, states)
    assert (proof := compare_records(whole, states)).holds
    assert (proof.added, proof.removed, proof.second.samples_moved) == ((), (), 0)
    ended = compare_records(whole, run(whole, 18 * SIZE, 1))
    assert (ended.holds, ended.end) == (True, STEPS * SIZE)  # without the moved samples behind it
    assert (ended.second.samples_skipped, ended.second.samples_moved) == (3 * SIZE, SIZE)
    steps = run(locked("steps.lock", skip), 9 * SIZE, 2)
    proof = compare_records(plain, steps)
    assert proof.holds, proof
    assert skips_of(proof.added) == ({1: False, 2: False, 4: True}, set())
    assert compare_records(steps, plain).removed == proof.added
    assert any("steps and what follows not compared" in text for text in
               proof.content.not_compared)  # fmt: skip
    assert "; steps and what follows not compared" in str(proof).splitlines()[-1]
    own = compare_records(read_lock("steps.lock"), steps)
    assert own.holds
    assert not any("steps" in text for text in own.content.not_compared)
    partly = copy.deepcopy(steps)
    for state in partly:
        assert state["sampler"]["skip"]["dropped"] == [[4, 12]]
        state["sampler"]["skip"]["dropped"] = [[4, 11]]
    with pytest.raises(InvalidArgument, match="samples that are not whole steps of the lock"):
        compare_records(plain, partly)
    half = locked("half.lock", train_iters=None, train_samples=STEPS * SIZE, global_batch_size=2)
    of_half = compare_records(run(half, 6, 1), plain)
    assert "steps and what follows not compared" in str(of_half)
    assert not compare_records(locked("other.lock", seed=5), steps).holds
    served = join_states(steps)
    served["receipt"] = join_states(run(plain, 9, 2))["receipt"]
    assert not compare_records(plain, [served]).holds  # it served what it says not


@for_each("name", ["native", "numba", "reference"])
def test_a_checkpoint_of_fewer_sources_than_the_lock_differs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receipts are compared by keys of its own sources, and no others are equal."""
    pytest.importorskip("torch")
    states = run(locked("one.lock", data_path=["1", "data/web"]), 8, 1)
    monkeypatch.setattr(receipts, "active", lambda: load(name))
    for proof in (compare_records(states, locked("two.lock")),
                  compare_records(locked("two.lock"), states)):  # fmt: skip
        assert not proof.holds
        assert "fingerprint of source 1: " in str(proof)
    index = megaindex.open_run("two.lock").index()
    keys = receipts.fingerprint_keys(["0" * 32])
    with pytest.raises(InvalidArgument, match="must be of the 2 sources of the index, got 1"):
        receipts.planned_receipt(index, 0, 4, keys)
    receipts.planned_receipt(index, 0, 4, np.concatenate((keys, keys)))


def test_a_checkpoint_of_a_recipe_is_compared_with_a_lock() -> None:
    pytest.importorskip("torch")
    Path("skipped.yaml").write_text(
        Path("run.yaml").read_text() + "skip: [{steps: '3'}, {source: web, from_step: 6}]\n"
    )
    plain = make_lock(read_recipe("run.yaml")).write("recipe.lock", overwrite=True)
    skipped = make_lock(read_recipe("skipped.yaml")).write("skipped.lock", overwrite=True)
    Path("after.json").write_text(json.dumps(run(skipped, 20, 2)))
    status, shown, _ = cli("prove", "recipe.lock", "after.json", "--json")
    proof = json.loads(shown)
    assert (status, proof["holds"]) == (0, True)
    assert proof["added"] == ["steps 3", "all documents, source web, from step 6"]
    assert (proof["first"]["record"], proof["second"]["record"]) == ("lock", "checkpoint")
    assert (
        "the same skips, and no other difference, up to sample 88"
        in (cli("prove", "skipped.lock", "after.json")[1])
    )
    assert cli("prove", "after.json", "recipe.lock")[0] == 0
    assert compare_records(plain, skipped).holds


def test_identities_of_locks_are_shown_with_the_samples_compared() -> None:
    first = locked("first.lock")
    same = locked("second.lock", train_iters=None, train_samples=STEPS * SIZE)
    assert same.identity == first.identity
    status, out, _ = cli("prove", "first.lock", "second.lock")
    assert status == 0
    assert f"\nidentity: {first.identity} in both, 80 samples of it compared\n" in out
    other = locked("second.lock", [Skip(steps="2")])
    proof = compare_records(first, other)
    line = f"\nidentity: {first.identity} in the first, {other.identity} in the second\n"
    assert line in str(proof)
    both = [proof.to_json()[name]["identity"] for name in ("first", "second")]
    assert both == [first.identity, other.identity]


@pytest.mark.parametrize("recipe", [False, True])
def test_the_identity_of_a_checkpoint_is_that_in_its_state(recipe: bool) -> None:
    pytest.importorskip("torch")
    lock = make_lock(read_recipe("run.yaml")).write("first.lock", overwrite=True)
    if not recipe:
        lock = locked("first.lock")
    states = run(read_recipe("run.yaml") if recipe else lock, 4, 1)
    served = states[0].get("loader", states[0])["identity"]
    assert served == lock.identity
    for state in states:
        state.pop("identity", None)
        state.get("loader", {}).pop("identity", None)
    Path("states.json").write_text(json.dumps(states))
    _, out, _ = cli("prove", "first.lock", "states.json")
    assert f"\nidentity: {lock.identity} in the first, not known in the second\n" in out
    assert "identity" not in str(compare_records(states, states)) if recipe else True
    for inner in {0: states[0], 1: states[0].get("loader", states[0])}.values():
        inner["identity"] = lock.identity
        proof = compare_records(lock, states)
        assert proof.second.identity == lock.identity
        assert f"identity: {lock.identity} in both, {proof.common_samples} samples" in str(proof)
        for wrong in ("\x1b[31m" + "0" * 27, "0" * 31, "g" * 32, 5, ["0" * 32]):
            inner["identity"] = wrong
            Path("states.json").write_text(json.dumps(states))
            status, out, err = cli("prove", "first.lock", "states.json")
            assert (status, out, err.count("\n")) == (2, "", 1)
            assert "identity must be 32 hex digits" in err
            assert "\x1b" not in err
        inner["identity"] = None
        assert compare_records(lock, states).second.identity is None


def changed_mix(text: str, **changes: Any) -> Any:
    """The lock of a recipe, with changes of its mix at steps 10 and ``at``."""
    at, weights = changes["at"], changes["weights"]
    half = 2**30
    rows = [[8 * 10, 0, half, half], [8 * at, *weights]]
    np.save("other.npy", np.array(rows))
    Path("changed.yaml").write_text(text.replace("mix.npy", "other.npy"))
    return make_lock(read_recipe("changed.yaml")).write("changed.lock", overwrite=True)


def test_a_changed_mix_is_named_by_step_and_weights() -> None:
    """Of two locks of several sequence lengths, and of a checkpoint and a lock."""
    text = Path("lengths.yaml").read_text()
    plain = make_lock(read_recipe("lengths.yaml")).write("lengths.lock", overwrite=True)
    whole = 2**31
    other = changed_mix(text, at=30, weights=[0, whole // 4, whole - whole // 4])
    named = "mix at step 30 (sample 240): no change in the first, code 0.25, web 0.75 in the second"
    proof = compare_records(plain, other)
    assert not proof.holds
    assert proof.differences[0] == named
    assert proof.differences[1].startswith("sample 24")
    assert len(proof.differences) == 2
    pytest.importorskip("torch")
    recipe = read_recipe("lengths.yaml")
    served = run(recipe, 31 * 2, 2)
    assert compare_records(plain, served).holds
    locked = compare_records(run(plain, 31 * 2, 2), other)  # a state without settings
    assert (locked.holds, locked.first.check.equal) == (False, False)
    assert compare_records(served, other).differences[0] == named
    before = compare_records(run(recipe, 29 * 2, 2), other)
    assert (before.holds, before.end, before.behind) == (True, 8 * 30, (named,))
    index = open_recipe(read_recipe("lengths.yaml")).index  # whose changes are not known
    found = compare_records(served, other, indices=(index, index)).differences
    assert found
    assert not any(each.startswith("mix") for each in found)


def test_records_of_a_past_are_compared_from_its_end_on() -> None:
    pytest.importorskip("torch")
    lock = make_lock(read_recipe("past.yaml")).write("past.lock", overwrite=True)
    states = run(lock, 10, 2)
    proof = compare_records(lock, states)
    assert (proof.holds, proof.common_samples) == (True, 8 * 5)
    assert str(proof).startswith("first: lock of 96 samples; ")
    Path("later.yaml").write_text(Path("past.yaml").read_text().replace("5000", "5001"))
    later = make_lock(read_recipe("later.yaml")).write("later.lock", overwrite=True)
    named = "samples before step 0: 40000 in the first, 40008 in the second"
    assert named in compare_records(lock, later).differences


def test_differences_of_other_kinds_of_order_are_short() -> None:
    """A recipe of several lengths and one of a past; of the same kind, nested values are cut."""
    names = ("past", "lengths", "recipe")
    past, lengths, recipe = (
        make_lock(read_recipe("run.yaml" if name == "recipe" else f"{name}.yaml")).write(
            f"{name}.lock", overwrite=True
        )
        for name in names
    )
    found = compare_records(lengths, past).differences
    named = [each for each in found if each.startswith("order: ")]
    assert named == ["order: order: 'sequence' in the first, 'stages' in the second"]
    whole = compare_records(recipe, past)
    found = whole.differences
    assert max(map(len, found)) < 500
    for count, more in ((8, []), (9, ["difference: 1 more, see --json"])):
        proof = replace(whole, differences=("d",) * count)
        lines = [line for line in str(proof).splitlines() if line.startswith("difference: ")]
        assert lines == ["difference: d"] * 8 + more
    assert any(each.endswith("... in the second") for each in found)
