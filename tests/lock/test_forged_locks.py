"""Random locks, and locks with a forged value: opened with the same samples, or refused.

MEGAINDEX_TEST_EXAMPLES sets the number of forged values, MEGAINDEX_EXPLORE_SEED their seed.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import json
import os
import random
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.inputs import for_each
from support.locked_runs import RUNS, write_inputs

from megaindex import FormatError, InvalidArgument, MegaIndexError, Skip
from megaindex.audit import run_of_recipe, run_of_settings
from megaindex.lock import make_lock, open_run, read_lock, run_of_lock, verify_lock
from megaindex.lock.lock_file import section_digest
from megaindex.lock.settings import checked_settings
from megaindex.lock.shape import SECTIONS
from megaindex.settings.recipe_file import recipe_of

SEED = int(os.environ.get("MEGAINDEX_EXPLORE_SEED", "7"))
EXAMPLES = int(os.environ.get("MEGAINDEX_TEST_EXAMPLES", "25"))
RANDOM_LOCKS = max(20, EXAMPLES * 3 // 10)
STRIDE = max(1, 1000 // EXAMPLES)  # of the bytes that are changed
DEEP = 200
DIGESTS = ("digests", "digest")


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder of corpora, in which every run is locked as NAME.lock."""
    folder = tmp_path_factory.mktemp("runs")
    write_inputs(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for name, flags in RUNS.items():
            assert cli("lock", *flags.split(), "--out", f"{name}.lock", "--tokens")[::2] == (0, "")
        yield folder


@pytest.fixture(autouse=True)
def _there(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)


def signed(content: Any) -> bytes:
    """Return a lock of any values with the digests of its text."""
    fields = {name: value for name, value in content.items() if name not in DIGESTS}
    digests = {name: section_digest(fields[name]) for name in SECTIONS if name in fields}
    text = json.dumps({**fields, "digests": digests})[:-1] + ', "digest": "'
    return f'{text}{hashlib.sha256(text.encode()).hexdigest()}"\n}}\n'.encode()


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the places of all values of a lock."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for key, each in items:
        yield (*place, key)
        if isinstance(each, (dict, list)):
            yield from places(each, (*place, key))


def nested(depth: int, inner: Any) -> Any:
    for _ in range(depth):
        inner = {"order": "sequence", "parts": [{"ranges": [[0, 1, 1]], "index": inner}]}
    return inner


def forged(content: Any, rng: random.Random) -> tuple[str, Any]:
    """Return a place and the lock with another value there, or without the value."""
    every = [place for place in places(content) if place[0] not in DIGESTS]
    place, content = rng.choice(every), copy.deepcopy(content)
    *outer, key = place
    inside, other = content, content
    for name in outer:
        inside = inside[name]
    for name in rng.choice(every):
        other = other[name]
    value, other = inside[key], copy.deepcopy(other)
    is_number = type(value) is int
    values = [
        None, True, "", "x", "\ud800", "a\0b", [], {}, [[]], [value], {"a": value}, -1, 0, 1,
        2**31, 5 * 10**7, 10**12, 2**63 - 1, 2**63, 10**30, other, nested(DEEP, value), str(value),
        *([value + 1, value - 1, -value, value * 1000] if is_number else []),
        *([value[:-1], value * 2] if isinstance(value, (list, str)) else []),
    ]  # fmt: skip
    chosen = rng.randrange(len(values) + 2)
    if chosen < len(values):
        inside[key] = values[chosen]
    elif isinstance(inside, list) or chosen == len(values):
        del inside[key]
    else:
        inside["unknown"] = value
    return ".".join(map(str, place)), content


def refusals(path: str, kind: str) -> int:
    """Call everything that reads a lock; return how many took it without an error or a finding."""
    calls: list[Callable[[], Any]] = [
        lambda: verify_lock(path, whole=True, tokens=True).is_clean,
        lambda: verify_lock(path, step=1).is_clean,
        lambda: open_run(path),
    ]
    taken = 0
    for call in calls:
        with contextlib.suppress(MegaIndexError):
            taken += bool(call())
    for words in (
        ("prove", f"{kind}.lock", path),
        ("diff-order", path, f"{kind}.lock"),
        ("trace", "--lock", path, "--step", 1),
        ("report", "--lock", path),
    ):
        status, _, err = cli(*words)
        assert status in (0, 1, 2), words
        assert err.count("\n") <= 1, err
        taken += status != 2
    return taken


def test_a_forged_value_is_refused_or_found() -> None:
    """By errors and findings of one line: never by a traceback, or by an exhausted memory."""
    pytest.importorskip("torch")
    rng, names = random.Random(SEED), list(RUNS)
    contents = {name: json.loads(Path(f"{name}.lock").read_bytes()) for name in names}
    taken = 0
    for number in range(EXAMPLES):
        name = rng.choice(names)
        place, content = forged(contents[name], rng)
        path = f"forged{number}.lock"
        Path(path).write_bytes(signed(content))
        try:
            taken += refusals(path, name) > 0
        except Exception as error:
            raise AssertionError(f"{name}: {place}, in {Path.cwd()}/{path}") from error
        Path(path).unlink()
    assert 0 < taken < EXAMPLES / 2  # some values decide nothing


@pytest.mark.slow
def test_every_changed_byte_is_found() -> None:
    for name in RUNS:
        text = Path(f"{name}.lock").read_bytes()
        for at in range(SEED % STRIDE, len(text), STRIDE):
            bit = 1 << (SEED + at) % 8
            Path("flipped.lock").write_bytes(text[:at] + bytes([text[at] ^ bit]) + text[at + 1 :])
            with pytest.raises(FormatError, match=r"flipped\.lock: "):
                read_lock("flipped.lock")
            if at % 97 == 0:
                assert not verify_lock("flipped.lock").is_clean


def random_run(rng: random.Random) -> Any:
    """Return a recipe, or settings of another run, of any of the orders."""
    names = rng.sample(["web", "code", "chat"], rng.randint(1, 3))
    paths = {name: f"{Path.cwd()}/data/{name}" for name in names}
    seed, length = rng.randrange(2**32), rng.choice([8, 16, 33])
    batch = rng.choice([1, 4, 6])
    if rng.random() < 0.5:
        order = rng.choice(["megatron", "neox", "megatron-legacy", "paddlenlp", "epoch", "window",
                            "packed"])  # fmt: skip
        own = {"epoch": {"left_over": "carry", "epochs_mixed": 2}, "packed": {"max_documents": 3}}
        words = [word for path in paths.values() for word in (rng.randint(1, 9), path)]
        steps = rng.randint(4, 40)
        skip = rng.choice([(), [Skip(steps="1-2")], [Skip(steps="1", move=True)],
                           [Skip(source=words[1], from_step=2, remove=rng.random() < 0.5)]
                           ])  # fmt: skip
        return {
            "data_path": words if len(names) > 1 else words[1], "order": order, "seed": seed,
            "seq_length": length, "global_batch_size": batch, "eval_iters": rng.randint(0, 2),
            "split": rng.choice(["100,0,0", "80,20,0", "70,15,15"]), "skip": skip,
            **rng.choice([{"train_iters": steps}, {"train_samples": batch * steps + 1}]),
            **rng.choice([{}, own.get(order, {})]),
            **({"tail": "pad"} if order == "epoch" else {}),
        }  # fmt: skip
    stages = {}
    for number in range(rng.randint(1, 3)):
        chosen = rng.sample(names, rng.randint(1, len(names)))
        stages[f"s{number}"] = {
            "mix": {name: rng.randint(1, 5) for name in chosen},
            "batching": rng.choice(["stratified", "random", "per_stream"]),
            "steps": rng.randint(1, 12),
        }
    kinds = [{}, {"order": "window"}, {"order": "packed"}, {"kind": "finetuning"}]
    evaluation = {"evaluation": {"source": paths[names[0]], "interval": 3, "iterations": 1}}
    return recipe_of(
        {
            "sequence_length": length, "seed": seed, "batch": {"global_batch_size": batch},
            "sources": {name: {"path": paths[name], **rng.choice(kinds)} for name in names},
            "stages": stages, **rng.choice([{}, evaluation]),
            **rng.choice([{}, {"skip": [{"steps": "0"}]}]),
        },
        "random.yaml", Path.cwd(),
    )  # fmt: skip


@pytest.mark.slow
def test_random_locks_are_opened_with_the_same_samples() -> None:
    rng, refused = random.Random(SEED), 0
    for _ in range(RANDOM_LOCKS):
        run = random_run(rng)
        settings = run if isinstance(run, dict) else {"run": run}
        try:
            lock = make_lock(**settings)
        except InvalidArgument:  # as of a packed order whose documents are too few for the split
            refused += 1
            continue
        lock.write("random.lock", overwrite=True)
        assert verify_lock("random.lock", whole=True).findings == (), run
        is_recipe = not isinstance(run, dict)
        theirs = run_of_recipe(run) if is_recipe else run_of_settings(**run)
        ours = run_of_lock("random.lock")
        np.testing.assert_array_equal(ours.step_bounds, theirs.step_bounds)
        ids = np.arange(ours.num_samples)
        if ours.skips is not None:
            ids = ids[~ours.skips.is_hole(ids)]
        for mine, other in zip(ours.index.locate(ids), theirs.index.locate(ids), strict=True):
            np.testing.assert_array_equal(mine, other)
        last = ours.num_steps - 1
        assert verify_lock("random.lock", step=rng.randint(0, last)).findings == (), run
    assert refused < RANDOM_LOCKS / 4


def test_counts_are_bounded_before_arrays_are_made() -> None:
    """By the samples of the lock, and those by its own steps."""
    tracemalloc.start()
    try:
        for name, key in (("neox", "value"), ("flags", "value"), ("past", "steps")):
            for count in (5 * 10**7, 10**12):
                content = json.loads(Path(f"{name}.lock").read_bytes())
                (inside,) = content["settings"].keys() - {"kind"}
                inside = content["settings"][inside]
                target = inside["past"] if key == "steps" else inside["target"]
                target[key] = count if key == "steps" else f"{count}/1"
                Path("counts.lock").write_bytes(signed(content))
                with pytest.raises(InvalidArgument, match="must for at most"):
                    checked_settings(read_lock("counts.lock"))
                assert not verify_lock("counts.lock").is_clean
        content["subsets"]["train"]["steps"][1] = [40000, 1, 10**9]
        content["subsets"]["train"]["samples"] = 40000 + 10**9
        Path("counts.lock").write_bytes(signed(content))
        with pytest.raises(FormatError, match="number of subsets.train.steps must be"):
            read_lock("counts.lock")
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


@for_each(
    ("old", "new", "message"),
    [
        ('"tail": "drop"', '"tail": "drop", "tail": "pad"', "the key 'tail' twice"),
        ('"dialect": "megatron"', '"dialect": "other"', "dialect must be"),
        ('"chunk_bytes": 67108864', '"chunk_bytes": 67108865', "a power of two"),
        ('"chunk_bytes": 67108864', '"chunk_bytes": 33554432', "a power of two"),
        ('"masked_rows": 0', '"masked_rows": 0, "more": 1', "more"),
        (
            '"masked_rows": 0',
            '"masked_rows": 0, "a": 1, "masked_rows": 0',
            "key 'masked_rows' twice",
        ),
        ('"masked_rows": 0', '"masked_rows": 0.0', "numbers must be integers"),
        ('"masked_rows": 0', '"masked_rows": 1e3', "numbers must be integers"),
        ('"masked_rows": 0', '"masked_rows": -0', None),
        ('"samples": 272,', '"samples": NaN,', "numbers must be integers"),
        ('"samples": 272,', '"samples": Infinity,', "numbers must be integers"),
        ('"samples": 272,', '"samples": 271,', "the end of its steps"),
        ('"block_steps": 34', '"block_steps": 35', "block_steps must be"),
        ('"block_steps": 34', '"block_steps": 17', "2 receipts"),
        ('"past_steps": 0', '"past_steps": 35', "past_steps must be"),
        ("{", "\ufeff{", "BOM"),
        ('"files": []', '"files": ' + "[" * 100_000 + "]" * 100_000, "nested too deeply"),
    ],
)
def test_the_text_is_strict_json_of_the_table(old: str, new: str, message: str | None) -> None:
    text = Path("flags.lock").read_text()
    assert old in text
    path = Path("strict.lock")
    path.write_bytes(text.replace(old, new, 1).encode())
    with pytest.raises(FormatError, match=r"strict\.lock: ") as raised:
        read_lock(path)
    assert message is None or message in str(raised.value)
    assert not verify_lock(path).is_clean
    assert cli("diff-order", path, "flags.lock")[0] == 2


@for_each("wrap", [lambda value: [value], lambda value: {"x": value}])
def test_settings_lie_in_each_other_up_to_a_bound(wrap: Callable[[Any], Any]) -> None:
    content, value = read_lock("recipe.lock").content, 1
    for depth in range(1, 9):
        value = wrap(value)
        content["settings"]["recipe"]["more"] = value
        Path("deep.lock").write_bytes(signed(content))
        if depth < 8:
            assert read_lock("deep.lock").content["settings"]["recipe"]["more"] == value
    with pytest.raises(FormatError, match=r"recipe\.more\S+ must be at most 8 values deep, got 1;"):
        read_lock("deep.lock")


def test_a_block_has_at_most_the_steps_behind_those_of_the_past() -> None:
    content = read_lock("past.lock").content
    (before, *_), train = content["subsets"]["train"]["steps"], content["subsets"]["train"]
    assert before[1] == 0
    train["receipts"]["block_steps"] = steps = sum(row[2] for row in train["steps"][1:])
    train["receipts"]["blocks"] = train["receipts"]["blocks"][:1]
    Path("blocks.lock").write_bytes(signed(content))
    read_lock("blocks.lock")
    train["receipts"]["block_steps"] = steps + 1
    Path("blocks.lock").write_bytes(signed(content))
    with pytest.raises(FormatError, match=f"block_steps must be .* to {steps}, got {steps + 1}"):
        read_lock("blocks.lock")


def _sequence(inner: Any, *ranges: list[int]) -> Any:
    return {"order": "sequence", "parts": [{"ranges": list(ranges), "index": inner}]}


def _with_parts(content: Any, end: int, times: int = 1) -> None:
    """Change the node of stages to the only part of a sequence."""
    train = content["subsets"]["train"]
    train["index"] = _sequence(train["index"], [0, end, times])


def _skip_inside(content: Any) -> None:
    train = content["subsets"]["train"]
    skipped = {"order": "skipped", "end": 1, "left_out": [], "moved": [], "masks": []}
    train["index"] = _sequence({**skipped, "index": train["index"]}, [0, 1, 1])


def _twice(content: Any) -> None:
    for _ in range(2):
        _with_parts(content, content["subsets"]["train"]["samples"])


def _row_of_stages(content: Any) -> None:
    node = content["subsets"]["train"]["index"]
    node["common"], node["columns"] = {}, ["order", "parts"]
    inner = {**node, "rows": []}
    node["rows"] = [list(_sequence(inner, [0, 1, 1]).values()) for _ in node["rows"]]


@for_each(
    ("change", "message"),
    [
        (lambda content: _with_parts(content, content["subsets"]["train"]["samples"]), None),
        (
            lambda content: _with_parts(content, content["subsets"]["train"]["samples"] - 1),
            "all of",
        ),
        (lambda content: _with_parts(content, content["subsets"]["train"]["samples"], 2), "all of"),
        (_twice, r"parts\[0\].index.order must be"),
        (_skip_inside, r"parts\[0\].index.order must be"),
        (_row_of_stages, r"rows\[0\].parts\[0\].index.order must be"),
    ],
)
def test_nodes_nest_as_the_page_says(change: Callable[[Any], None], message: str | None) -> None:
    content = json.loads(Path("recipe.lock").read_bytes())
    assert content["subsets"]["train"]["index"]["order"] == "stages"
    change(content)
    Path("nested.lock").write_bytes(signed(content))
    if message is None:
        assert read_lock("nested.lock").identity == read_lock("recipe.lock").identity
        return
    with pytest.raises(FormatError, match=message):
        read_lock("nested.lock")


@pytest.mark.parametrize("samples", [272, 271])
def test_parts_of_a_sequence_hold_no_more_samples_than_the_lock(samples: int) -> None:
    content = json.loads(Path("flags.lock").read_bytes())
    train = content["subsets"]["train"]
    assert train["samples"] == 272
    train["index"] = _sequence(train["index"], [0, samples, 1], [0, 1, 1])
    Path("parts.lock").write_bytes(signed(content))
    if samples < 272:
        assert read_lock("parts.lock")
        return
    with pytest.raises(FormatError, match=r"parts\[0\].ranges must be of at most 272 samples"):
        read_lock("parts.lock")


def test_a_lock_is_utf_8() -> None:
    text = Path("flags.lock").read_bytes()
    at = text.index(b"masked_rows")
    Path("bytes.lock").write_bytes(text[:at] + b"\xff" + text[at:])
    with pytest.raises(FormatError, match=f"it is not UTF-8: invalid start byte at byte {at}"):
        read_lock("bytes.lock")


def test_only_greedy_blends_of_arrays_wrap() -> None:
    content = json.loads(Path("neox.lock").read_bytes())
    index = content["subsets"]["train"]["index"]
    index["uncounted"] = 1
    Path("wrapped.lock").write_bytes(signed(content))
    assert read_lock("wrapped.lock").identity != read_lock("neox.lock").identity
    order = index["common"]
    for inside, key, value, where in (
        (order, "order", "epoch", r"rows\[0\].order must be 'arrays'"),
        (index, "rule", "divisor", "index.rule must be 'greedy'"),
    ):
        before, inside[key] = inside[key], value
        Path("wrapped.lock").write_bytes(signed(content))
        with pytest.raises(FormatError, match=where):
            read_lock("wrapped.lock")
        inside[key] = before


def test_a_blend_draws_no_more_than_the_samples_of_its_sources() -> None:
    content = json.loads(Path("neox.lock").read_bytes())
    index = content["subsets"]["train"]["index"]
    others = [1] * (len(index["weights"]) - 1)
    for more in (0, 1):
        first = index["samples"] - len(others) - more
        index |= {"rule": "exhaustive", "weights": [first, *others]}
        Path("drawn.lock").write_bytes(signed(content))
        if not more:
            read_lock("drawn.lock")
            continue
        with pytest.raises(FormatError, match="index.samples must be"):
            read_lock("drawn.lock")


def test_removal_is_that_of_the_entries_of_skip() -> None:
    make_lock(
        data_path="data/web", sequence_length=8, global_batch_size=4, train_iters=9,
        split="100,0,0", eval_iters=0,
        skip=[Skip(source="data/web", from_step=2, remove=True), Skip(source="data/web")],
    ).write("removed.lock", overwrite=True)  # fmt: skip
    content = json.loads(Path("removed.lock").read_bytes())
    train = content["subsets"]["train"]
    first, second = train["index"]["masks"]
    assert (first["remove"], "remove" in second) == (True, False)
    for change, message in (
        ((first, "remove", 1), r"masks\[0\].remove must be"),
        ((first, "remove", False), "skip must be"),
        ((second, "remove", True), "skip must be"),
        ((train["skip"][0], "remove", False), "skip must be"),
        ((train["skip"][1], "remove", False), None),
    ):
        inside, key, value = change
        before = dict(inside)
        inside[key] = value
        Path("forged.lock").write_bytes(signed(content))
        if message is None:
            assert read_lock("forged.lock").identity == read_lock("removed.lock").identity
        else:
            with pytest.raises(FormatError, match=message):
                read_lock("forged.lock")
        inside.clear()
        inside.update(before)


def test_what_would_be_refused_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    lock = read_lock("flags.lock")  # of 34 steps
    monkeypatch.setattr("megaindex.lock.shape.MOST_STEPS", 34)
    lock.write("most.lock")
    monkeypatch.setattr("megaindex.lock.shape.MOST_STEPS", 33)
    with pytest.raises(InvalidArgument, match="number of subsets.train.steps"):
        lock.write("more.lock")
    assert not Path("more.lock").exists()
