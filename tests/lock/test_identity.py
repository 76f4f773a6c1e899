"""The identity of a run: what decides samples and steps enters it, and nothing else."""

from __future__ import annotations

import json
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.command_line import cli
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import IndexedDataset, Skip, build_blend
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.index.description import describe_index
from megaindex.lock import make_lock, read_lock, report_run, run_of_lock
from megaindex.recipe import read_recipe
from megaindex.run.identity import canonical_form, canonical_forms
from megaindex.settings.recipe_file import recipe_of

SEED = int(os.environ.get("MEGAINDEX_EXPLORE_SEED", "7"))
EXAMPLES = int(os.environ.get("MEGAINDEX_TEST_EXAMPLES", "80"))
RUN: dict[str, Any] = {
    "sequence_length": 16,
    "train_iters": 30,
    "global_batch_size": 4,
    "eval_iters": 0,
}
SPLIT: dict[str, Any] = {"split": "1,0,0"}
RECIPE = """
sequence_length: 16
batch: {micro_batch_size: 2, data_parallel_size: 2}
sources: {web: web, code: code}
stages:
  main: {steps: 30, mix: {web: 2, code: 1}}
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for number, name in enumerate(("web", "code")):
        write_corpus(tmp_path / name, np.random.default_rng(number).integers(1, 60, 40), np.uint16)
    np.save(tmp_path / "ids.npy", np.arange(7))
    np.save(tmp_path / "others.npy", np.arange(1, 8))
    (tmp_path / "run.yaml").write_text(RECIPE)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def identity(**changes: Any) -> str:
    given = {"data_path": [1, "web", 2, "code"], **RUN, **SPLIT, **changes}
    return make_lock(**given).write("run.lock", overwrite=True).identity


def test_what_does_not_decide_samples_and_steps_does_not_enter(folder: Path) -> None:
    first = identity()
    assert len(first) == 32
    ranks = {"micro_batch_size": 2, "data_parallel_size": 2}
    assert identity(**ranks, global_batch_size=None) == first
    there = folder / "elsewhere"
    there.mkdir()
    for path in folder.glob("*.*"):
        shutil.copy(path, there)
    assert read_lock(there / "run.lock").identity == first
    paths = [1, str(there / "web"), 2, str(there / "code")]
    assert make_lock(data_path=paths, **RUN, **SPLIT).write("moved.lock").identity == first


@for_each(
    "changes",
    [
        {"seed": 5},
        {"train_iters": 31},
        {"global_batch_size": 2, "train_iters": 60},
        {"sequence_length": 15},
        {"order": "neox"},
        {"data_path": [2, "web", 1, "code"]},
        {"data_path": [2, "code", 1, "web"]},
        {"split": "9,1,0"},
        {"skip": Skip(steps=3)},
        {"skip": Skip(steps=3, move=True)},
        {"skip": Skip(documents="ids.npy", source="web", from_step=2)},
    ],
)
def test_what_decides_them_enters(changes: dict[str, Any]) -> None:
    assert identity(**changes) != identity()


def test_documents_of_a_mask_enter_by_their_content() -> None:
    def masked(name: str) -> str:
        return identity(skip=Skip(documents=name, source="web"))

    assert masked("ids.npy") != masked("others.npy")
    shutil.copy("ids.npy", "again.npy")
    assert masked("ids.npy") == masked("again.npy")


def test_lengths_of_a_source_enter(folder: Path) -> None:
    """The same ones in another order: the node of the source stays as it is."""
    first = identity()
    lengths = IndexedDataset(folder / "web").sequence_lengths[::-1].copy()
    for suffix in ("bin", "idx"):
        (folder / f"web.{suffix}").unlink()
    write_corpus(folder / "web", lengths, np.uint16)
    assert identity() != first


def test_rows_of_padding_enter() -> None:
    subset = {
        "index": {"order": "arrays", "samples": 5}, "samples": 5, "steps": [[0, 5, 1]],
        "sources": [0], "targets": [None], "rounds": 1, "every": None,
    }  # fmt: skip
    forms = [
        canonical_forms({"train": {**subset, "masked_rows": rows}}, ["0" * 32], ())
        for rows in (0, 3)
    ]
    assert [each["train"].pop("masked_rows") for each in forms] == [0, 3]
    assert forms[0] == forms[1]


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("targets", ([None], [["labels", 1]], [["labels", 0]], [["loss_mask", 1]])),
        ("rounds", (1, 2)),
        ("every", (None, 5, 6)),
        ("samples", (4, 5)),
    ],
)
def test_targets_rounds_and_ends_enter(field: str, values: Any) -> None:
    subset = {
        "index": {"order": "arrays", "samples": 5}, "samples": 5, "steps": [[0, 5, 1]],
        "sources": [0], "targets": [None], "rounds": 1, "every": None, "masked_rows": 0,
    }  # fmt: skip
    pairs = ["0" * 32, "1" * 32]
    forms = [canonical_forms({"train": {**subset, field: each}}, pairs, ()) for each in values]
    assert len({json.dumps(each) for each in forms}) == len(values)


def form(node: Any, samples: int = 12, **others: Any) -> Any:
    """Return the pieces of the canonical form of a subset."""
    subset = {"index": node, "samples": samples, "steps": [[0, 1, samples]], **others}
    return canonical_form(subset, ())["pieces"]


def test_a_keyed_order_has_no_end(folder: Path) -> None:
    corpus = str(folder / "web")
    first, longer = (
        describe_index(build_blend([corpus, corpus], sequence_length=16, seed=3, order="epoch",
                                   weights=[1, 1], num_samples=n))
        for n in (80, 400)
    )  # fmt: skip
    assert first["common"] != longer["common"] or first["sources"] != longer["sources"]
    assert form(first) == form(longer)
    arrays = describe_index(build_blend([corpus], sequence_length=16, order="neox",
                                        weights=[1], num_samples=40))  # fmt: skip
    ((*_, leaf),) = form(arrays)[0]["streams"]
    assert leaf["epochs"] >= 1


def test_sequences_of_one_source_have_no_end_either() -> None:
    """A source of which a list of documents was read before the run joined."""

    def past(epochs: int) -> Any:
        leaf = {"order": "epoch", "name": "a", "epochs": epochs, "samples": 9 * epochs}
        parts = [{"ranges": [[0, 5, 1]], "index": leaf}]
        row = {"order": "sequence", "parts": parts}
        stage = {"samples": 12, "rule": "stratified", "shares": [1], "begins": [0]}
        return form({"order": "stages", "common": {}, "sources": [row], "stages": [stage]})

    assert past(1) == past(2)
    leaf = {"order": "epoch", "name": "a", "without": 1}
    subset = {"index": leaf, "samples": 5, "steps": [[0, 5, 1]]}
    ((*_, node),) = canonical_form(subset, ("s0", "s1"))["pieces"][0]["streams"]
    assert node == {**leaf, "without": "s1"}
    assert past(1)[0]["streams"][0][2]["parts"][0]["index"] == {"order": "epoch", "name": "a"}


@pytest.mark.parametrize(("scale", "same"), [(1, True), (3, True), (2.5, False)])
@pytest.mark.parametrize("batching", ["stratified", "per_stream"])
def test_shares_of_a_stage_enter_in_proportion(batching: str, scale: float, same: bool) -> None:
    text = RECIPE.replace("mix:", f"batching: {batching}, mix:")
    Path("run.yaml").write_text(text)
    first = make_lock(read_recipe("run.yaml")).write("first.lock").identity
    ratio = f"web: {2 * scale:g}, code: {scale if same else 1:g}"
    Path("run.yaml").write_text(text.replace("web: 2, code: 1", ratio))
    assert (make_lock(read_recipe("run.yaml")).write("second.lock").identity == first) == same


def staged(*stages: dict[str, Any], size: int = 2) -> Any:
    sources = [{"order": "epoch", "name": name} for name in "abc"[:size]]
    return form({"order": "stages", "common": {}, "sources": sources, "stages": list(stages)}, 99)


def stage(samples: int, begins: list[int], **fields: Any) -> dict[str, Any]:
    return {"rule": "stratified", "samples": samples, "begins": begins, **fields}


def test_a_blend_by_divisors_is_a_stage() -> None:
    """Weights in the proportion 2 to 1, as integers and with a common divisor."""
    table = {"common": {}, "sources": [{"order": "epoch", "name": name} for name in "ab"]}
    blend = {"order": "blend", "rule": "divisor", "weights": [4, 2], "samples": 12, **table}
    assert form(blend) == staged(stage(12, [0, 0], shares=[2, 1]))


@pytest.mark.parametrize(
    ("draws", "period"),
    [
        ({"shares": [2, 1]}, 3),
        ({"shares": [4, 2]}, 3),
        ({"rule": "per_stream", "shares": [2, 1], "batch": 4}, 12),
        ({"rule": "per_stream", "shares": [2, 1], "batch": [4, 1]}, 9),
    ],
)
def test_stages_that_continue_are_one(draws: dict[str, Any], period: int) -> None:
    """Only where the rule starts over, and each stream where the stage before left it."""
    sizes = draws.get("batch", 1)
    first, second = (sizes * 2, sizes) if isinstance(sizes, int) else (8, 1)
    whole = staged(stage(5 * period, [7, 0], **draws))
    later = [7 + 2 * first, 2 * second]
    assert staged(stage(2 * period, [7, 0], **draws), stage(3 * period, later, **draws)) == whole
    inside = [stage(2 * period + 1, [7, 0], **draws), stage(3 * period - 1, later, **draws)]
    assert len(staged(*inside)) == 2
    for wrong in ([later[0] + 1, later[1]], [later[0], later[1] - 1]):
        parts = staged(stage(2 * period, [7, 0], **draws), stage(3 * period, wrong, **draws))
        assert len(parts) == 2


def test_other_stages_stay_apart() -> None:
    both = [stage(6, [0, 0], shares=[2, 1]), stage(6, [4, 2], shares=[2, 1])]
    assert len(staged(*both)) == 1
    for change in (
        {"shares": [1, 2]}, {"sources": [1, 0]}, {"rule": "random", "seed": 1, "name": "b"}
    ):  # fmt: skip
        assert len(staged(both[0], {**both[1], **change})) == 2
    shuffled = {"rule": "random", "seed": 1, "name": "a", "period": 6}
    assert len(staged(*({**each, **shuffled} for each in both))) == 2


def test_shares_before_a_change_of_the_mix_enter_in_proportion() -> None:
    def changed(*shares: int) -> Any:
        first = {"rule": "stratified", "shares": list(shares)}
        return staged(stage(9, [0, 0], rule="changed", columns=[0, 1], first=first))

    assert changed(4, 2) == changed(2, 1)
    assert changed(4, 3) != changed(2, 1)


def test_a_stage_of_one_stream_reads_it_in_order() -> None:
    leaf = {"order": "epoch", "name": "b"}
    parts = [{"ranges": [[3, 12, 1]], "index": leaf}]
    pieces = form({"order": "sequence", "parts": parts})
    others = (
        stage(9, [3], shares=[5], sources=[0]),
        stage(9, [3], rule="random", shares=[5], seed=1, name="a", period=4, sources=[0]),
        stage(9, [3], rule="per_stream", shares=[1], batch=4, sources=[0]),
        stage(9, [3], rule="changed", columns=[0], file="x", changes=[0, 1], sources=[0]),
    )
    assert all(staged(each) == staged(others[0]) for each in others)
    draws = {"rule": "stratified", "shares": [1]}
    assert pieces[0]["draws"] == staged(others[0])[0]["draws"] == draws
    # 3 samples of a stage, and 9 of a part that begins there
    table = {"common": {}, "sources": [leaf]}
    before = {"order": "stages", "stages": [stage(3, [0], shares=[2])], **table}
    joined = [{"ranges": [[0, 3, 1]], "index": before}, *parts]
    assert form({"order": "sequence", "parts": joined}) == form(leaf)


def test_a_greedy_blend_keeps_what_wraps() -> None:
    table = {"common": {}, "sources": [{"order": "arrays", "samples": n} for n in (5, 9)]}
    blend = {"order": "blend", "rule": "greedy", "weights": ["a", "b"], "samples": 12, **table}
    assert "uncounted" not in form(blend)[0]["draws"]
    for changed in ({"uncounted": 1}, {"uncounted": 2}, {"weights": ["b", "a"]}):
        assert form({**blend, **changed}) != form(blend)
    alone = {**blend, "weights": ["a"], "sources": table["sources"][:1]}
    assert form(alone)[0]["draws"] == {"rule": "stratified", "shares": [1]}
    assert form({**alone, "uncounted": 1})[0]["draws"]["rule"] == "greedy"


def test_what_only_neox_wraps_does_not_enter_where_nothing_wraps() -> None:
    """The same samples under Megatron-LM and GPT-NeoX, whose datasets hide their last sample."""
    assert identity(order="neox", data_path=[1, "web", 1, "code"]) == identity(
        order="megatron", data_path=[1, "web", 1, "code"]
    )


def test_ranges_that_continue_are_one() -> None:
    leaf = {"order": "arrays", "samples": 50}
    blend = {"order": "blend", "rule": "greedy", "weights": ["a", "b"], "samples": 50,
             "common": leaf, "sources": [{}, {}]}  # fmt: skip
    for node in (leaf, blend):

        def sequence(*parts: list[list[int]], inner: Any = node) -> Any:
            return form(
                {"order": "sequence", "parts": [{"ranges": r, "index": inner} for r in parts]}
            )

        whole = sequence([[0, 30, 1]])
        assert whole == form(node, 30)
        assert sequence([[0, 10, 1], [10, 30, 1]]) == whole
        assert sequence([[0, 10, 1]], [[10, 10, 1], [10, 30, 1]]) == whole
        assert sequence([[0, 10, 1], [11, 31, 1]]) != whole
        assert sequence([[0, 10, 2], [10, 20, 1]]) != sequence([[0, 20, 1]])
        assert sequence([[0, 10, 1], [0, 10, 1], [0, 10, 3]]) == sequence([[0, 10, 5]])
        for apart in ([[0, 10, 1], [10, 20, 2]], [[0, 10, 2], [10, 20, 1]]):
            assert [piece["times"] for piece in sequence(apart)] == [each[2] for each in apart]
        assert sequence([[0, 10, 1], [5, 5, 1], [10, 20, 1]]) == sequence([[0, 20, 1]])


def test_steps_and_holes_that_follow_each_other_are_one() -> None:
    leaf = {"order": "arrays", "samples": 50}

    def whole(steps: Any, left_out: Any, moved: Any, masks: Any = ()) -> Any:
        node = {"order": "skipped", "end": 40, "left_out": left_out, "moved": moved,
                "masks": masks, "index": leaf}  # fmt: skip
        return canonical_form({"index": node, "samples": 50, "steps": steps}, ("s0", "s1"))

    first = whole([[0, 4, 5], [20, 6, 5]], [[4, 12]], [[4, 12]])
    assert first["steps"] == [[0, 4, 5], [20, 6, 5]]
    assert whole([[0, 4, 2], [8, 4, 3], [20, 6, 5]], [[4, 8], [8, 12]], [[4, 8], [8, 12]]) == first
    assert whole([[0, 4, 5], [20, 6, 5]], [[4, 8], [9, 12]], [[4, 8], [9, 12]]) != first
    assert whole([[0, 4, 5], [20, 6, 5]], [[4, 12]], []) != first
    masks = [{"source": 0, "from": 3, "file": 1}, {"source": 0, "from": 0, "file": 0}]
    ours, theirs = (whole([[0, 5, 10]], [], [], each) for each in (masks, masks[::-1]))
    assert ours == theirs
    assert [mask["file"] for mask in ours["masks"]] == ["s0", "s1"]
    assert first["pieces"][0]["samples"] == 40


def test_rows_of_an_evaluation_do_not_enter() -> None:
    """Of a recipe they depend on the ranks; those of training are padding of its last step."""
    text = RECIPE.replace("data_parallel_size: 2", "data_parallel_size: {}, global_batch_size: 12")
    text += "evaluation: {{source: code, interval: 9}}\ntail: {}\n"
    text = (
        text.replace("{micro", "{{micro")
        .replace("12}", "12}}")
        .replace("{web: web, code: code}", "{{web: web, code: code}}")
    )
    text = text.replace("main: {steps: 30, mix: {web: 2, code: 1}}",
                        "main: {{samples: 31, mix: {{web: 2, code: 1}}}}")  # fmt: skip

    def locked(ranks: int, tail: str) -> Any:
        Path("run.yaml").write_text(text.format(ranks, tail))
        return make_lock(read_recipe("run.yaml")).write("run.lock", overwrite=True)

    one, two = locked(1, "pad"), locked(3, "pad")
    rows = [each.content["subsets"]["valid"]["masked_rows"] for each in (one, two)]
    assert rows[0] != rows[1]
    assert one.identity == two.identity
    assert one.content["subsets"]["train"]["masked_rows"] == 5
    assert locked(1, "drop").identity != one.identity


def random_run(rng: random.Random) -> tuple[Any, bool]:
    """Return a recipe or settings, in one of few runs and many forms, and if it has masks.

    Sources of recipes are named by their fingerprints, by which flags shuffle them, too.
    """
    names = rng.choice([["web"], ["web", "code"]])
    order = rng.choice(["epoch", "epoch", "window", "packed", "megatron", "neox"])
    weights = dict(zip(["web", "code"], rng.choice([(1, 1), (2, 1), (4, 2)]), strict=True))
    sizes = {"micro_batch_size": 3, "data_parallel_size": 2}
    batch = rng.choice([{"global_batch_size": 6}, sizes, {**sizes, "global_batch_size": 6}])
    skip = rng.choice([(), (), [{"steps": "1-2"}], [{"steps": "1"}, {"steps": "2"}],
                       [{"steps": "1-2", "move": True}], [{"steps": "1", "move": True},
                       {"steps": "2", "move": True}], [{"documents": "ids.npy", "from_step": 3}],
                       [{"documents": "again.npy", "from_step": 3}]])  # fmt: skip
    masked = any("documents" in each for each in skip)
    if order in ("megatron", "neox") or rng.random() < 0.4:
        words = [word for name in names for word in (weights[name], name)]
        entries = [Skip(**{**each, **({"source": "web"} if "documents" in each else {})})
                   for each in skip]  # fmt: skip
        target = rng.choice([{"train_iters": 12}, {"train_samples": 72}])
        past = rng.choice([{}, {"consumed_samples": 18}])
        data = words if len(names) > 1 else words[1]
        return {"data_path": data, "order": order, "seed": 5, "sequence_length": 8, **SPLIT,
                "eval_iters": 0, "skip": entries, **batch, **target, **past}, masked  # fmt: skip
    prints = {name: corpus_fingerprint(IndexedDataset(name)) for name in names}
    stages, batching = {}, rng.choice(["stratified", "stratified", "per_stream", "random"])
    for number, steps in enumerate(rng.choice([[12], [6, 6], [4, 8], [5, 7], [3, 3, 6]])):
        scale = rng.choice([1, 2])
        mix = {prints[name]: scale * weights[name] for name in names}
        stages[f"{rng.choice('abc')}{number}"] = {"steps": steps, "mix": mix, "batching": batching}
    entries = [{**each, **({"source": prints["web"]} if "documents" in each else {})}
               for each in skip]  # fmt: skip
    own = {} if order == "epoch" else {"order": order}
    sources = {prints[name]: {"path": name, **own} for name in names}
    return recipe_of({"sequence_length": 8, "seed": 5, "batch": batch, "sources": sources,
                      "stages": stages, **({"skip": entries} if skip else {})},
                     "random.yaml", Path.cwd()), masked  # fmt: skip


@pytest.mark.slow
def test_random_runs_have_one_identity_if_and_only_if_they_have_the_same_samples() -> None:
    """Steps, spans at every position, and masks; a mask that masks nothing has its own."""
    rng = random.Random(SEED)
    shutil.copy("ids.npy", "again.npy")
    identities: dict[str, set[Any]] = {}
    runs: dict[Any, set[str]] = {}
    for _ in range(EXAMPLES):
        settings, masked = random_run(rng)
        lock = make_lock(**settings) if isinstance(settings, dict) else make_lock(settings)
        lock = lock.write("random.lock", overwrite=True)
        run = run_of_lock(lock)
        ids = np.arange(run.num_samples)
        ids = ids if run.skips is None else ids[~run.skips.is_hole(ids)]
        spans = run.index.locate(ids)
        marks = b"" if spans.masked is None or not spans.masked.any() else spans.masked.tobytes()
        columns = (ids, run.step_bounds, *spans, spans.row_splits)
        what = (*(column.tobytes() for column in columns), marks, *lock.fingerprints("train"))
        identities.setdefault(lock.identity, set()).add(what)
        if not masked:
            runs.setdefault(what, set()).add(lock.identity)
    assert [len(each) for each in identities.values()] == [1] * len(identities)
    assert [len(each) for each in runs.values()] == [1] * len(runs)
    assert 1 < len(runs) < EXAMPLES  # some are in several forms


@pytest.mark.parametrize("tokens", [False, True])
def test_commands_print_both(tokens: bool) -> None:
    words = ("--data-path", "web", "--seq-length", 16, "--train-iters", 5)
    words = (*words, "--global-batch-size", 4, "--split", "1,0,0", *["--tokens"] * tokens)
    status, out, _ = cli("lock", *words, "--out", "a.lock", "--json")
    lock = read_lock("a.lock")
    both = [lock.identity, lock.content_identity]
    assert status == 0
    assert [json.loads(out)[key] for key in ("identity", "content")] == both
    assert (lock.content_identity is not None) == tokens
    lines = [
        f"  identity of the run {lock.identity}",
        f"  identity of the tokens {lock.content_identity or 'not hashed'}",
    ]
    for command in (("lock", *words, "--out", "b.lock"), ("verify", "b.lock")):
        assert cli(*command)[1].splitlines()[1:3] == lines
    status, out, _ = cli("verify", "b.lock", "--json")
    (found,) = json.loads(out)["reports"]
    assert [found["identity"], found["content"]] == both
    report = report_run("a.lock")
    assert [report.to_json()[key] for key in ("identity", "content")] == both
    page = {line.split("|")[1].strip(): line.split("|")[2].strip()
            for line in report.to_markdown().splitlines() if line.count("|") == 3}  # fmt: skip
    assert page["identity of the run"] == f"`{lock.identity}`"
    shown = f"`{lock.content_identity}`" if tokens else "not hashed"
    assert page["identity of the tokens"] == shown


def test_verify_prints_no_identity_of_a_lock_with_findings() -> None:
    make_lock(data_path="web", **RUN, **SPLIT).write("run.lock")
    text = Path("run.lock").read_text().replace('"past_steps": 0', '"past_steps": 1')
    Path("run.lock").write_text(text)
    status, out, _ = cli("verify", "run.lock")
    assert status == 1
    assert "identity" not in out


def test_identity_of_tokens_is_of_the_training_sources_in_their_order(folder: Path) -> None:
    def content(*names: str, valid: str = "web") -> str | None:
        given = {"train_data_path": [word for name in names for word in (1, name)],
                 "valid_data_path": [valid], "test_data_path": [valid], **RUN}  # fmt: skip
        return make_lock(tokens=True, **{**given, "eval_iters": 1}).content_identity

    first = content("web", "code")
    assert content("web", "code", valid="code") == first
    assert content("code", "web") != first
    assert content("web") != first
    before = make_lock(data_path="web", **RUN, **SPLIT).identity
    tokens = bytearray((folder / "web.bin").read_bytes())
    tokens[100] ^= 1
    (folder / "web.bin").write_bytes(tokens)
    assert content("web", "code") != first
    assert make_lock(data_path="web", **RUN, **SPLIT).identity == before
