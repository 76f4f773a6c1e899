"""Skips of samplers and loaders against lists in plain Python, under kills and resumes."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import (
    FormatError,
    InvalidArgument,
    MissingFile,
    OutOfRange,
    Skip,
    StorageError,
    build_blend,
    build_index,
    open_run,
)
from megaindex.index.array_index import served_tokens
from megaindex.index.skips import (
    StoredSkips,
    named_as,
    numbered,
    numbered_masks,
    read_ids,
    read_skips,
    resolve_skips,
    skip_difference,
    skips_of,
    source_number,
    with_skips,
    without_holes,
)
from megaindex.index.spans import locate_range, sequence_lengths_at
from megaindex.lock import compare_records, read_lock
from megaindex.recipe import (
    BatchSchedule,
    Recipe,
    RecipeSource,
    RecipeStage,
    Stream,
    Target,
    open_recipe,
)

torch = pytest.importorskip("torch")

from megaindex.corpus import corpus_fingerprint  # noqa: E402
from megaindex.loader import (  # noqa: E402
    CostModel,
    CyclicSampler,
    GPTDataset,
    Loader,
    MicroBatchSampler,
    Recorder,
    SampleOptions,
    check_receipts,
    join_states,
    loader_of_recipe,
)
from megaindex.loader.receipts import Round  # noqa: E402

S = 16


def steps_of(schedule: BatchSchedule, total: int, tail: str) -> list[tuple[int, int]]:
    """First and last position + 1 of each step of a run without skips."""
    steps, position = [], 0
    while position < total:
        size = next(size for first, size in reversed(schedule.stages) if first <= position)
        if position + size > total and tail == "drop":
            break
        steps.append((position, min(total, position + size)))
        position += size
    return steps


def model(
    schedule: BatchSchedule, num_samples: int, total: int, tail: str, skips: list[Skip]
) -> list[int]:
    """Positions in the order in which they are served, one by one."""
    steps = steps_of(schedule, total, tail)
    end = steps[-1][1] if tail == "drop" else total
    dropped, moved = set(), []
    for skip in skips:
        for first, last in skip.ranges:
            for begin, stop in steps[first : last + 1]:
                dropped |= set(range(begin, stop))
                moved += [*range(begin, stop)] if skip.move else []
    served, position = [], 0
    while True:
        while position in dropped:
            position += 1
        size = next(size for first, size in reversed(schedule.stages) if first <= position)
        left = end + len(moved) - position
        if left <= 0 or (left < size and tail == "drop"):
            return served
        rows = size if tail == "wrap" else min(left, size)
        served += range(position, position + rows)
        position += rows


def sample_of(position: int, num_samples: int, end: int, moved: list[int]) -> int:
    if position < end:
        return position
    return moved[position - end] if position < end + len(moved) else position - len(moved)


def served_by(samplers: list[MicroBatchSampler], rounds: int) -> list[int]:
    """Ids that the ranks read in the first rounds, in the order in which rows are dealt."""
    found: list[int] = []
    for number, batches in enumerate(zip(*samplers, strict=True)):
        if number == rounds:
            break
        found += [i for batch in batches for i in batch if i is not None]
    return found


@given(st.data())
def test_served_positions_are_those_of_a_list(data: Any) -> None:
    """Steps dropped and moved, by runs that stop anywhere and go on with other ranks and more
    skips; tails, schedules."""
    draw = data.draw
    schedule = draw(
        st.sampled_from(
            [
                BatchSchedule.constant(4),
                BatchSchedule.constant(8),
                BatchSchedule(stages=((0, 4), (12, 8))),
                BatchSchedule(stages=((0, 4), (16, 8), (40, 12))),
            ]
        )
    )
    num_samples = draw(st.integers(24, 90))
    total = draw(st.integers(24, num_samples))
    tail = draw(st.sampled_from(["drop", "pad", "wrap"]))
    steps = steps_of(schedule, total, tail)
    chosen = draw(st.lists(st.integers(0, len(steps) - 1), unique=True, max_size=len(steps) - 2))
    first_known = draw(st.integers(0, len(steps)))  # later ones are added at a resume
    moves = {step: draw(st.booleans()) for step in chosen}
    first = [Skip(steps=step, move=moves[step]) for step in chosen if step < first_known]
    later = [Skip(steps=step, move=moves[step]) for step in chosen if step >= first_known]
    added_from = steps[first_known][0] if first_known < len(steps) else total
    settings: dict[str, Any] = {
        "num_samples": num_samples,
        "train_samples": total,
        "tail": tail,
        "global_batch_size": schedule,
    }
    skips, state, found = first, None, []
    for number in range(8):
        if number == 7:
            skips = [*first, *later]
        ranks, micro = draw(st.sampled_from([(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4)]))
        samplers = [
            MicroBatchSampler(
                micro_batch_size=micro,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                skip=skips,
                **settings,
            )
            for rank in range(ranks)
        ]
        for sampler in samplers:
            if state is not None and state["rows_left"] % (micro * ranks):
                break
            if state is not None:
                sampler.load_state_dict(json.loads(json.dumps(state)))
        else:
            rounds = len(samplers[0])
            assert all(len([*sampler]) == rounds for sampler in samplers)
            if number < 7:
                rounds = draw(st.integers(0, rounds))
            then = samplers[0].state_after(rounds)
            if number < 7 and then["consumed_samples"] > added_from:
                continue  # killed before this state was written
            found += served_by(samplers, rounds)
            assert {str(sampler.state_after(rounds)) for sampler in samplers} == {str(then)}
            state = then
    if state is None or len(found) < 1:
        return
    expected = model(schedule, num_samples, total, tail, [*first, *later])
    count = num_samples + sum(
        stop - begin for step, (begin, stop) in enumerate(steps) if moves.get(step)
    )
    plain = [position for position in range(count) if position in set(expected)]
    wrapped = [p if p < count else plain[p - count] for p in expected]
    if len(found) != len(wrapped):  # the last launch could not divide the step begun
        assert state["rows_left"]
        assert found == wrapped[: len(found)]
        return
    assert found == wrapped


def write_ids(path: Path, *ids: int) -> Path:
    path.write_text("\n".join(map(str, ids)))
    return path


def two_sources(folder: Path) -> tuple[Any, Any]:
    rng = np.random.default_rng(5)
    web = write_corpus(folder / "web", rng.integers(1, 40, 90), eod=7)
    return web, write_corpus(folder / "code", rng.integers(1, 60, 50))


def recipe(folder: Path, skip: Any = (), order: Any = "epoch", **changes: Any) -> Recipe:
    def stage(name: str, samples: int, **shares: int) -> RecipeStage:
        return RecipeStage(
            name=name,
            streams=tuple(Stream(source=s, proportion=Fraction(w)) for s, w in shares.items()),
            length=Target(kind="samples", value=Fraction(samples)),
        )

    return Recipe(
        sequence_length=S,
        batch=BatchSchedule.constant(8),
        sources=(
            RecipeSource(name="web", path=str(folder / "web"), order=order),
            RecipeSource(name="code", path=str(folder / "code")),
        ),
        stages=(stage("one", 48, web=2, code=1), stage("two", 68, web=1, code=1)),
        skip=skip,
        **changes,
    )


def expected_rows(opened: Any, skip: list[Skip]) -> dict[int, tuple[Any, ...]]:
    """Tokens and loss mask of each position, by (source, document) of every token."""
    plain = open_recipe(recipe_without(opened.layout.recipe))
    index, total = plain.index, plain.layout.num_samples
    steps = steps_of(BatchSchedule.constant(8), total, opened.layout.recipe.tail)
    dropped, moved = set(), []
    for each in skip:
        for first, last in each.ranges:
            for begin, stop in steps[first : last + 1]:
                dropped |= set(range(begin, stop))
                moved += [*range(begin, stop)] if each.move else []
    moved.sort()
    ids = {each: set(map(int, read_ids(str(each.documents)))) for each in skip if each.documents}
    rows = {}
    names = [source.name for source in opened.layout.recipe.sources]
    for position in [p for p in range(total) if p not in dropped] + [
        total + k for k in range(len(moved))
    ]:
        spans = index.locate([sample_of(position, total, total, moved)])
        tokens, mask = [], []
        for source, document, offset, length in zip(
            *(column.tolist() for column in spans), strict=True
        ):
            text = opened.datasets[source].get(document, offset, length).tolist()
            tokens += text
            is_masked = any(
                (each.documents is None or document in ids[each])
                and names[source] == each.source
                and position >= steps[each.from_step][0]
                for each in skip
                if not each.steps
            )
            mask += [0.0 if is_masked else 1.0] * len(text)
        rows[position] = tuple(tokens[:S]), tuple(mask[1 : S + 1])
    return rows


def recipe_without(given: Recipe) -> Recipe:
    from dataclasses import replace

    return replace(given, skip=())


def read_all(
    opened: Any, draw: Any, balance: CostModel | None = None, launches: int = 4
) -> tuple[list[list[Any]], list[dict[str, Any]]]:
    """Rows that launches on changing ranks read, by launch, and the last states."""
    states: list[dict[str, Any]] | None = None
    found = []
    for number in range(launches):
        ranks, micro = draw([(1, 2), (2, 1), (2, 2), (4, 2), (1, 8)])
        loaders = [
            loader_of_recipe(
                opened[number] if isinstance(opened, list) else opened,
                data_parallel_rank=rank,
                data_parallel_size=ranks,
                micro_batch_size=micro,
                content=None,
                balance=balance,
                read_ahead=0,
                reader="mapped",
            )
            for rank in range(ranks)
        ]
        if states is not None:
            joined = json.loads(json.dumps(join_states(states)))
            if joined["sampler"]["rows_left"] % (ranks * micro):
                continue
            for loader in loaders:
                loader.load_state_dict(joined)
        rounds = len(loaders[0])
        if number < launches - 1:
            rounds = draw(range(0, rounds // 2 + 1))
        rows = []
        for loader in loaders:
            batches = iter(loader)
            for _ in range(rounds):
                batch = next(batches)
                for tokens, mask in zip(batch["tokens"], batch["loss_mask"], strict=True):
                    rows.append((tuple(tokens.tolist()), tuple(mask.tolist())))
        found.append(rows)
        states = [loader.state_dict() for loader in loaders]
    assert states is not None
    return found, states


@pytest.mark.parametrize(
    ("tail", "balance"),
    [
        *(pytest.param(tail, None, marks=pytest.mark.slow) for tail in ("drop", "pad", "wrap")),
        ("pad", CostModel(linear=1, attention=1)),
    ],
)
def test_a_recipe_with_skips_serves_the_rows_of_a_list(
    tmp_path: Path, tail: Any, balance: CostModel | None
) -> None:
    two_sources(tmp_path)
    rng = np.random.default_rng(len(tail))
    np.save(tmp_path / "bad.npy", [3, 80, 3, 7, 11])
    skip = [
        Skip(steps="2 4-5"),
        Skip(steps=[7, 9], move=True),
        Skip(documents=tmp_path / "bad.npy", source="web", from_step=3),
        Skip(documents=write_ids(tmp_path / "bad.txt", 8, 5, 6), source="code"),
        Skip(source="code", from_step=10),
    ]
    opened = open_recipe(recipe(tmp_path, skip, tail=tail))
    for _ in range(3):
        found, states = read_all(opened, lambda values: values[rng.integers(len(values))], balance)
        expected = sorted(expected_rows(opened, skip).values())
        served = sorted(row for rows in found for row in rows if any(row[0]))
        if json.loads(json.dumps(states))[0]["sampler"]["rows_left"]:
            continue  # the last launch could not divide the step begun
        assert served == expected
        assert any(0.0 in mask for _, mask in served)
        checked = check_receipts(states, opened.index)
        assert checked.equal, checked
        assert checked.served.total.count == len(served)
        wrong = open_recipe(recipe(tmp_path, skip[:-1], tail=tail))
        assert not check_receipts(states, wrong.index).equal


def test_statistics_of_the_mix_count_moved_steps(tmp_path: Path) -> None:
    two_sources(tmp_path)
    skip = [Skip(steps=[2, 3], move=True), Skip(steps=[5])]
    loader = loader_of_recipe(open_recipe(recipe(tmp_path, skip)), micro_batch_size=8)
    counts = [sum(row.samples for row in loader.mix_statistics()) for _ in loader]
    assert counts == [8 * k for k in range(1, len(counts) + 1)]


def test_packed_documents_keep_their_place_without_loss(tmp_path: Path) -> None:
    two_sources(tmp_path)
    skip = Skip(documents=write_ids(tmp_path / "ids", *range(40)), source="web", from_step=4)
    plain, with_skip = (
        open_recipe(recipe(tmp_path, each, order="packed")) for each in ((), (skip,))
    )
    for one, other in zip(*(loader_of_recipe(o, micro_batch_size=8) for o in (plain, with_skip)),
                          strict=True):  # fmt: skip
        assert all(torch.equal(one[name], other[name]) for name in one if name != "loss_mask")
        assert (other["loss_mask"] <= one["loss_mask"]).all()
    assert (other["loss_mask"] < one["loss_mask"]).any()


def test_skips_are_added_at_a_resume(tmp_path: Path) -> None:
    """A loss spike at step 8: resume before it, skip 6 and 7 and mask documents from there on."""
    two_sources(tmp_path)
    before = open_recipe(recipe(tmp_path))
    loader = loader_of_recipe(before, micro_batch_size=8)
    batches = iter(loader)
    for _ in range(5):
        next(batches)
    state = json.loads(json.dumps(loader.state_dict()))
    assert state["sampler"]["version"] == 1
    skip = [Skip(steps="6-7"), Skip(source="code", from_step=5)]
    after = open_recipe(recipe(tmp_path, skip))
    resumed = loader_of_recipe(after, micro_batch_size=8)
    resumed.load_state_dict(state)
    rest = list(resumed)
    assert len(rest) == len(loader) - 5 - 2
    checked = check_receipts([resumed.state_dict()], after.index)
    assert checked.equal, checked
    assert not check_receipts([resumed.state_dict()], before.index).equal
    totals = {row.source: row.samples for row in resumed.ledger.totals(resumed.consumed_samples)}
    plain = {row.source: row.samples for row in loader.ledger.totals(resumed.consumed_samples)}
    assert sum(plain.values()) - sum(totals.values()) == 16
    # and the state that results does not load without them
    late = resumed.state_dict()
    list(batches)  # the run of the spike goes on to its end, too
    whole = compare_records([loader.state_dict()], [late])
    assert whole.holds, whole
    assert whole.second.samples_skipped == 16
    assert whole.second.tokens_masked > 100
    assert whole.added == after.layout.recipe.skip
    assert "loss of" in str(whole)
    served = {
        **late,
        "receipt": loader.state_dict()["receipt"],
    }
    assert not compare_records([loader.state_dict()], [served]).holds  # it served what it says not
    assert late["sampler"]["version"] == 3
    with pytest.raises(InvalidArgument, match="skips samples 48 to 63"):
        loader_of_recipe(before, micro_batch_size=8).load_state_dict(late)
    again = loader_of_recipe(open_recipe(recipe(tmp_path, skip)), micro_batch_size=8)
    again.load_state_dict(late)
    for wrong, reason in (
        (Skip(steps="4"), "samples 32 to 39 are to be skipped, and 40 samples were served"),
        (Skip(source="web"), "all documents of web from sample 0 on, and 40 samples were served"),
    ):
        other = loader_of_recipe(open_recipe(recipe(tmp_path, (wrong,))), micro_batch_size=8)
        with pytest.raises(InvalidArgument, match=reason):
            other.load_state_dict(state)


def test_masks_begin_with_the_first_sample_of_their_step(tmp_path: Path) -> None:
    web, _ = two_sources(tmp_path)
    index = build_index(web, sequence_length=S, epochs=2)
    later = Skip(documents=range(0, 90, 2), from_step=4)
    sampler = MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=4, data_parallel_rank=0,
        data_parallel_size=1, skip=[Skip(documents=range(90), from_step=7), later],
    )  # fmt: skip
    positions = np.arange(index.num_samples)
    spans = sampler.skipped(index).locate(positions)
    position = np.repeat(positions, np.diff(spans.row_splits))
    expected = (position >= 28) | ((position >= 16) & (spans.document % 2 == 0))
    assert spans.masked is not None
    assert np.array_equal(spans.masked, expected)
    assert {16, 28} <= set(position[spans.masked].tolist())


def test_skipped_samples_are_not_read_by_other_samplers(tmp_path: Path) -> None:
    web, _ = two_sources(tmp_path)
    index = build_index(web, sequence_length=S, epochs=2)
    settings: dict[str, Any] = {
        "num_samples": index.num_samples, "micro_batch_size": 4, "data_parallel_rank": 0,
        "data_parallel_size": 1, "balance": CostModel(linear=0, attention=1),
    }  # fmt: skip
    sampler = MicroBatchSampler(index=index, skip=Skip(steps="2"), **settings)
    assert len(list(Loader(index, sampler))) == index.num_samples // 4 - 1
    view = sampler.skipped(index)
    with pytest.raises(OutOfRange, match="sample 8 is skipped"):
        GPTDataset(view)[8]
    with pytest.raises(InvalidArgument, match="the index has skips of its own"):
        MicroBatchSampler(skip=Skip(steps="2"), **settings).skipped(view)
    with pytest.raises(InvalidArgument, match="the index must have the 999 samples"):
        MicroBatchSampler(skip=Skip(steps="2"), **{**settings, "num_samples": 999}).skipped(index)


def test_evaluation_is_not_skipped(tmp_path: Path) -> None:
    from megaindex.recipe import RecipeEvaluation

    web, _ = two_sources(tmp_path)
    evaluation = RecipeEvaluation(source=RecipeSource(name="validation", path=web.path_prefix))
    skip = Skip(source="web", from_step=0)
    loader = loader_of_recipe(open_recipe(recipe(tmp_path, skip, evaluation=evaluation)))
    assert all(batch["loss_mask"].all() for batch in loader.evaluation())


def test_a_loader_of_one_index_skips(tmp_path: Path) -> None:
    web, _ = two_sources(tmp_path)
    index = build_index(web, sequence_length=S, epochs=1)

    def loader(**changes: Any) -> Loader:
        sampler = MicroBatchSampler(
            num_samples=index.num_samples, data_parallel_rank=0, data_parallel_size=1,
            **{"micro_batch_size": 4, **changes},
        )  # fmt: skip
        recorder = Recorder([corpus_fingerprint(web)])
        return Loader(
            index, sampler, recorder=recorder, options=SampleOptions(eod_id=7, eod_mask_loss=True)
        )

    ids = tmp_path / "bad.txt"
    ids.write_text("4 2\n2\n\n9")
    skips = [Skip(steps="1", move=True), Skip(documents=ids, from_step=2)]
    skipped = loader(skip=skips)
    batches, plain = list(skipped), list(loader())
    assert [b["tokens"].tolist() for b in batches[:1]] == [plain[0]["tokens"].tolist()]
    assert batches[-1]["tokens"].tolist() == plain[1]["tokens"].tolist()
    assert torch.equal(batches[0]["loss_mask"], plain[0]["loss_mask"])
    assert any((a["loss_mask"] < b["loss_mask"]).any()
               for a, b in zip(batches[1:-1], plain[2:], strict=True))  # fmt: skip
    state = skipped.state_dict()
    view = skipped._sampler.skipped(index)
    assert check_receipts([state], view).equal
    # of a last step that wraps to the first samples that are not skipped
    rows = index.num_samples % 6
    assert rows
    wrapping = loader(micro_batch_size=6, skip=Skip(steps="0"), tail="wrap")
    *_, last = wrapping
    first = torch.cat([batch["tokens"] for batch in plain])[6:12]
    assert torch.equal(last["tokens"][rows:], first[:-rows])
    wrapped = wrapping._sampler.skipped(index)
    assert check_receipts([wrapping.state_dict()], wrapped).equal
    with pytest.raises(InvalidArgument, match="does not; give the recipe, the sampler"):
        loader().load_state_dict(state)
    with pytest.raises(InvalidArgument, match='does not; give .* allow=\\("skip",\\)'):
        loader()._sampler.load_state_dict(skipped._sampler.state_dict())
    again: dict[str, Any] = {
        "index": view, "micro_batch_size": 4, "data_parallel_rank": 0, "data_parallel_size": 1
    }  # fmt: skip
    for count in (view.num_samples, index.num_samples):
        of_view = MicroBatchSampler(num_samples=count, **again)
        assert len(of_view) == len(skipped._sampler)
    for count in (view.num_samples - 1, index.num_samples + 1):
        with pytest.raises(InvalidArgument, match=f"must be those of the index, 108, got {count}"):
            MicroBatchSampler(num_samples=count, **again)
    with pytest.raises(InvalidArgument, match="the index has skips already; give them once"):
        MicroBatchSampler(num_samples=index.num_samples, skip=skips, **again)
    settings = {"num_samples": 8, "micro_batch_size": 1, "data_parallel_rank": 0}
    cyclic = CyclicSampler(train_samples=8, data_parallel_size=1, **settings)
    with pytest.raises(InvalidArgument, match="a sampler of type CyclicSampler serves"):
        Loader(view, cyclic)


@for_each(
    ("settings", "reason"),
    [
        ({"steps": "5-3"}, "must begin with the smaller step"),
        ({"steps": "x"}, "steps must be numbers from 0 and ranges"),
        ({"steps": ""}, "steps is empty"),
        ({"steps": "1-4 4"}, "step 4 occurs twice"),
        ({"steps": [-1]}, "a step must be"),
        ({}, "give either steps, or documents or a source"),
        ({"steps": "1", "source": "web"}, "write two entries"),
        ({"steps": "1", "from_step": 3}, "from_step belongs to documents"),
        ({"source": "web", "move": True}, "move belongs to steps"),
        ({"documents": [[1]]}, "integers in one dimension"),
        ({"documents": []}, "must hold"),
        ({"documents": [-4]}, "must hold sequence ids from 0"),
        ({"documents": [2**62 + 1]}, "must hold sequence ids from 0"),
        ({"documents": np.zeros(0, np.int64)}, "must hold at least one id"),
        ({"documents": [[1], [1, 2]]}, "documents must be a list of ids"),
        ({"source": -1}, "source must be a name or a number from 0"),
        ({"source": True}, "source must be a name or a number from 0"),
        ({"source": ""}, "source must be a name or a number from 0"),
        ({"source": "web", "from_step": -1}, "from_step must be"),
        ({"steps": [(5, 3)]}, "steps 5-3 must begin with the smaller step"),
        ({"steps": ["3", "x"]}, "steps must be numbers from 0 and ranges"),
    ],
)
def test_a_wrong_skip_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        Skip(**settings)


def test_the_greatest_id_of_a_document() -> None:
    assert Skip(documents=[0, 2**62]).documents.tolist() == [0, 2**62]  # type: ignore[arg-type]


def test_a_source_is_a_name_or_a_number() -> None:
    number: Any = 0
    assert Skip(source=number) == Skip(source="0") != Skip(source="web")
    assert read_skips({"source": 0}, "skip", ".") == (Skip(source="0"),)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ("3", "skip must be a mapping with steps, documents or source"),
        ([{"steps": "3"}, 3], "skip must be a mapping with steps, documents or source"),
        ({"documents": 3, "source": "web"}, "documents must be the path of a file of ids"),
        ([{"steps": "3"}, {"steps": "x"}], r"skip\[1\]: steps must be numbers"),
    ],
)
def test_a_wrong_skip_of_a_file_is_refused(tmp_path: Path, value: Any, reason: str) -> None:
    with pytest.raises(InvalidArgument, match=reason):
        read_skips(value, "skip", tmp_path)


def test_skips_that_do_not_fit_the_run_are_refused(tmp_path: Path) -> None:
    two_sources(tmp_path)
    (tmp_path / "words").write_text("1 two")
    (tmp_path / "no.npy").write_text("1 2")
    (tmp_path / "large").write_text("1 " + "9" * 20)
    (tmp_path / "empty.npy").touch()
    np.save(tmp_path / "low.npy", np.array([3, -1]))
    with open(tmp_path / "two.npy", "wb") as file:
        np.savez(file, a=np.arange(2))
    for skip, reason in (
        (Skip(steps="14"), "step 14 lies beyond the end of the run, whose steps are 0 to 13"),
        (Skip(steps="0-13"), "every step of the run is skipped"),
        ((Skip(steps="3-5"), Skip(steps="5", move=True)), "step 5 is skipped twice"),
        (Skip(source="web", from_step=14), "from_step 14 lies beyond the end"),
        (Skip(source="books"), "unknown source books; the sources are web, code"),
        (
            Skip(documents=write_ids(tmp_path / "one", 1)),
            "documents need their source, one of web, code",
        ),
        (
            Skip(documents=write_ids(tmp_path / "90", 90), source="web"),
            "document 90 does not exist, web has sequences 0 to 8",
        ),
        (Skip(documents=[1], source="web"), "must be a file, got an array"),
        (Skip(documents=tmp_path / "words", source="web"), "words: must hold sequence ids"),
        (Skip(documents=tmp_path / "low.npy", source="web"), "low.npy must hold seq.*, got -1$"),
        (Skip(documents=tmp_path / "large", source="web"), "large: must hold .* got '9{20}'"),
        (Skip(documents=tmp_path / "two.npy", source="web"), "two.npy: not an array of ids"),
        (Skip(documents=tmp_path / "empty.npy", source="web"), "empty.npy: not an array of ids"),
        (Skip(documents=tmp_path / "no.npy", source="web"), "no.npy: not an array of ids"),
    ):
        with pytest.raises(InvalidArgument, match=reason):
            open_recipe(recipe(tmp_path, skip))
    with pytest.raises(StorageError, match="document ids: .*a folder, not a regular file"):
        open_recipe(recipe(tmp_path, Skip(documents=tmp_path, source="web")))
    with pytest.raises(MissingFile, match="document ids: .*gone does not exist"):
        open_recipe(recipe(tmp_path, Skip(documents=tmp_path / "gone", source="web")))


def test_a_source_is_its_name_or_its_number(tmp_path: Path) -> None:
    """A settings file may have a name of digits without quotes."""
    (tmp_path / "ids").write_text("1 2")
    for source in (7, "7"):
        (skip,) = read_skips({"documents": "ids", "source": source}, "skip", tmp_path)
        assert skip.source == "7"
    for name in ("web", "code"):
        write_corpus(tmp_path / name, [9] * 40)
    blend = build_blend([tmp_path / "web", tmp_path / "code"], num_samples=30, sequence_length=S)
    rows = np.arange(30)
    spans = blend.locate(rows)
    wanted = (spans.source == 1) & np.isin(spans.document, [1, 8])
    assert wanted.any()

    def skipped(source: str) -> Any:
        return MicroBatchSampler(
            num_samples=30, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1,
            skip=Skip(documents=[1, 8], source=source),
        ).skipped(blend)  # fmt: skip

    for source in ("1", str(tmp_path / "code"), "code", f"{tmp_path.name}/code"):
        np.testing.assert_array_equal(skipped(source).locate(rows).masked, wanted)
    for source in ("2", "ode", f"{tmp_path.name}/"):
        with pytest.raises(InvalidArgument, match=f"skip: unknown source {source}"):
            skipped(source)
    with pytest.raises(InvalidArgument, match="unknown source web; the sources are a/web, b/web"):
        source_number("web", ["a/web", "b/web"])


def test_documents_far_apart_are_masked_too(tmp_path: Path) -> None:
    """Ids that are few for their range are searched, others looked up in a table of bits."""
    write_corpus(tmp_path / "long", [3] * 20_000)
    index = build_index(tmp_path / "long", sequence_length=S, order="window")
    masked = [3, 19_000]
    sampler = MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=1, data_parallel_rank=0,
        data_parallel_size=1, skip=Skip(documents=masked),
    )  # fmt: skip
    spans = sampler.skipped(index).locate(np.arange(index.num_samples))
    assert spans.masked is not None
    np.testing.assert_array_equal(spans.masked, np.isin(spans.document, masked))
    assert spans.masked.any()


def test_steps_that_do_not_line_up_are_refused() -> None:
    def sampler(**changes: Any) -> MicroBatchSampler:
        settings: dict[str, Any] = {
            "num_samples": 96, "micro_batch_size": 1, "data_parallel_rank": 0,
            "data_parallel_size": 1, "global_batch_size": 8, "skip": Skip(steps="5"),
        }  # fmt: skip
        return MicroBatchSampler(**{**settings, **changes})

    assert len(sampler(consumed_samples=16)) == 72
    with pytest.raises(InvalidArgument, match="the step of samples 36 to 43 reaches into"):
        sampler(consumed_samples=20)


def test_a_wrapped_step_reads_no_skipped_samples() -> None:
    sampler = MicroBatchSampler(
        num_samples=14, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1,
        tail="wrap", skip=Skip(steps="0"),
    )  # fmt: skip
    assert list(sampler) == [[4, 5, 6, 7], [8, 9, 10, 11], [12, 13, 4, 5]]


def test_no_range_is_served_after_a_hole_at_the_end() -> None:
    schedule = BatchSchedule.constant(4)
    skips = resolve_skips([Skip(steps=((1, 2), (8, 9)))], schedule, num_samples=40)
    assert skips is not None
    assert list(skips.segments()) == [(0, 4), (12, 32)]
    assert list(skips.segments(4, 12)) == []


@pytest.mark.parametrize("size", [1, 2])
def test_a_step_of_one_sample_is_moved_too(size: int) -> None:
    step = Skip(steps="1", move=True)
    skips = resolve_skips([step], BatchSchedule.constant(size), num_samples=5 * size)
    assert skips is not None
    moved = [*range(size, 2 * size)]
    expected = [*range(5 * size), *moved, *range(5 * size, 7 * size)]
    assert skips.samples_at(np.arange(8 * size)).tolist() == expected


def test_a_run_in_its_moved_steps_continues_on_a_longer_order() -> None:
    settings: dict[str, Any] = {
        "micro_batch_size": 2, "data_parallel_rank": 0, "data_parallel_size": 1,
        "global_batch_size": 4, "train_samples": 20, "skip": Skip(steps=[1], move=True),
    }  # fmt: skip
    run = MicroBatchSampler(num_samples=20, **settings)
    whole = list(run)
    state = run.state_after(len(whole) - 1)
    assert state["consumed_samples"] == 22  # behind the 20 positions of the run without moved ones
    longer = MicroBatchSampler(num_samples=30, **settings)
    longer.load_state_dict(state)
    assert list(longer) == whole[-1:]


def test_samples_of_a_round_that_wraps() -> None:
    skips = resolve_skips([Skip(steps="0")], BatchSchedule.constant(4), num_samples=14)
    for begin, end, served in ((8, 12, [8, 9, 10, 11]), (12, 16, [12, 13, 4, 5]),
                               (16, 20, [6, 7, 8, 9])):  # fmt: skip
        counts = [Round(begin, end, 14, skips).count(np.array([n])) for n in range(14)]
        assert np.flatnonzero(counts).tolist() == sorted(served)
        assert max(counts) == 1


def test_damaged_skips_of_a_state_are_refused() -> None:
    sampler = MicroBatchSampler(
        num_samples=64, micro_batch_size=1, data_parallel_rank=0, data_parallel_size=1,
        global_batch_size=4, skip=[Skip(steps="3"), Skip(documents=[1, 2])],
    )  # fmt: skip
    state = sampler.state_dict()
    for changes in (
        {"skip": None}, {"version": 1}, {"skip": {**state["skip"], "dropped": [[5, 3]]}},
        {"skip": {**state["skip"], "end": -1}}, {"skip": {**state["skip"], "masked": [3]}},
        {"skip": {**state["skip"], "moved": [[1, 4], [2, 6]]}},
        {"skip": {**state["skip"], "masked": [{**state["skip"]["masked"][0], "digest": "x"}]}},
    ):  # fmt: skip
        with pytest.raises(FormatError):
            sampler.load_state_dict({**state, **changes})


def test_what_is_not_a_list_of_ranges() -> None:
    stored = StoredSkips(end=64, dropped=[(4, 8)], moved=[], masked=[])
    state = {"skip": {"end": 64, "dropped": [(4, 8)], "moved": [], "masked": []}}
    assert StoredSkips.read(state) == stored
    for taken in ([[0, 2**62]], [[4, 8], [8, 9]]):
        assert StoredSkips.read({"skip": {**state["skip"], "dropped": taken}})
    for ranges in (
        {"4": 8}, "48", 5, None, [[4]], [[4, 8, 9]], [4, 8], [{4: 8, 5: 9}], [["4", 8]], [[4, 4]],
        [[-1, 8]], [[4, 8], [7, 9]], [[0, 2**62 + 1]],
    ):  # fmt: skip
        with pytest.raises(FormatError) as caught:
            StoredSkips.read({"skip": {**state["skip"], "dropped": ranges}})
        assert "the skips of it: dropped must be a list of ranges of positions, sorted" in str(
            caught.value
        )


def test_equal_skips_are_one_key() -> None:
    """Ids are compared by their content, in any order."""
    ids = np.array([7, 3, 7, 2**40])
    entries = [Skip(documents=ids), Skip(documents=[3, 7, 2**40]), Skip(documents=ids[:2])]
    assert entries[0] == entries[1] != entries[2]
    assert len({*entries}) == 2
    assert hash(entries[0]) == hash(entries[1]) != hash(entries[2])
    many = np.arange(0, 9000, 2)
    assert Skip(documents=many) != Skip(documents=many + (many == 4000))


def test_a_copy_of_an_index_with_skips(tmp_path: Path) -> None:
    """As a worker of a data loader gets it."""
    index = build_index(write_corpus(tmp_path / "web", [40] * 50), sequence_length=S, epochs=1)
    skip = [Skip(steps=2), Skip(documents=[3])]
    skips = resolve_skips(skip, BatchSchedule.constant(4), num_samples=index.num_samples)
    assert skips is not None
    skipped = with_skips(index, skips)
    for each in (skipped, without_holes(skipped, 0, skips.run_end)):
        again = pickle.loads(pickle.dumps(each))
        ids = [0, 7, 13, 50]
        for ours, theirs in zip(again.locate(ids), each.locate(ids), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert (again.sequence_length, again.num_epochs) == (S, 1)


def test_samples_served_are_iterated_and_found_by_their_numbers(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "web", np.full(60, 17))
    index = build_index(corpus, sequence_length=S, epochs=1)
    skip = [Skip(steps=2), Skip(steps=4, move=True)]
    skips = resolve_skips(skip, BatchSchedule.constant(4), num_samples=index.num_samples)
    assert skips is not None
    served = without_holes(with_skips(index, skips), 0, skips.run_end)
    iterated = locate_range(served, 3, served.num_samples)
    for ours, theirs in zip(iterated, served.locate(np.arange(3, served.num_samples)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    found = served_tokens(served, np.array([5, 30]))
    for sample, document, offset in zip(found.sample, found.document, found.offset, strict=True):
        spans = served.locate([sample])
        assert (document, offset) in zip(
            spans.document.tolist(), spans.offset.tolist(), strict=True
        )
    assert found.length.sum() == sum(
        spans.input_lengths(S)[np.isin(spans.document, [5, 30])].sum()
        for spans in map(served.locate, range(served.num_samples))
    )
    assert sequence_lengths_at(served, np.arange(3)) == S


def test_positions_behind_the_run_are_the_samples_that_it_leaves(tmp_path: Path) -> None:
    """A run of 40 of its samples, of which it moves one step and drops another."""
    corpus = write_corpus(tmp_path / "web", np.full(60, 17))
    index = build_index(corpus, sequence_length=S, epochs=1)
    skips = resolve_skips(
        [Skip(steps=2, move=True), Skip(steps=4)],
        BatchSchedule.constant(4),
        num_samples=index.num_samples,
        train_samples=40,
    )
    assert skips is not None
    whole = with_skips(index, skips)
    behind = np.arange(40, whole.num_samples)
    expected = index.locate([*range(8, 12), *range(40, index.num_samples)])
    for found, right in zip(whole.locate(behind), expected, strict=True):
        np.testing.assert_array_equal(found, right)


def test_the_position_after_samples_that_a_state_counts() -> None:
    stored = StoredSkips(end=24, dropped=[[4, 8], [12, 16]], moved=[[8, 12]], masked=[])
    served = [position for position in range(28) if not 4 <= position < 16]
    expected = [0, *(position + 1 for position in served)]
    assert [stored.position_of(count) for count in range(len(expected))] == expected


def test_a_run_that_serves_moved_samples_keeps_its_end() -> None:
    """With another number of samples they would have other positions."""
    ours = StoredSkips(end=24, dropped=[], moved=[[8, 12]], masked=[])
    longer = StoredSkips(end=32, dropped=[], moved=[[8, 12]], masked=[])
    assert not skip_difference(ours, longer, consumed=20, decided=24)
    assert not skip_difference(ours, ours, consumed=21, decided=25)
    reason = skip_difference(ours, longer, consumed=21, decided=25)
    assert "serves moved samples already" in reason


def test_a_file_of_ids_holds_at_least_one(tmp_path: Path) -> None:
    for text, ids in (("0\n", [0]), ("3 1\n3", [1, 3])):
        (tmp_path / "ids.txt").write_text(text)
        assert read_ids(str(tmp_path / "ids.txt")).tolist() == ids
    for text in ("", " \n\n"):
        (tmp_path / "ids.txt").write_text(text)
        with pytest.raises(InvalidArgument, match="must hold at least one id, got none"):
            read_ids(str(tmp_path / "ids.txt"))


_RECIPE = """
sequence_length: 16
batch: {{global_batch_size: 4}}
sources: {{{first}: a, code: b}}
stages: {{all: {{steps: 20, mix: {{{first}: 1, code: 1}}}}}}
skip: [{{documents: ids.npy, source: {source}, from_step: 1, remove: true}}]
"""
_ALONE = """
sequence_length: 16
batch: {global_batch_size: 4}
sources: {web: a}
stages: {all: {steps: 20, mix: {web: 1}}}
skip: [{documents: ids.npy, from_step: 1}]
"""


@for_each("kind", ["flags, path", "flags, none", "flags, number", "alone", "web", "0", "renamed"])
def test_states_with_masks_go_on_under_the_lock_and_the_reverse(tmp_path: Path, kind: str) -> None:
    """However a source is named, also where its label changes."""
    for name in "ab":
        write_corpus(tmp_path / name, [60] * 20)
    np.save(tmp_path / "ids.npy", [1, 2, 3])
    options = SampleOptions(eod_id=0)
    a = str(tmp_path / "a")
    named = {"flags, path": a, "flags, none": None, "flags, number": "0"}
    other = None
    if kind in named:
        skip = Skip(documents=str(tmp_path / "ids.npy"), source=named[kind], from_step=1)
        run = open_run(
            a, sequence_length=16, global_batch_size=4, train_iters=15, order="epoch", skip=[skip]
        )
    else:
        text = _ALONE if kind == "alone" else _RECIPE.format(
            first="web", source=0 if kind == "0" else "web"
        )  # fmt: skip
        (tmp_path / "run.yaml").write_text(text)
        run = open_run(tmp_path / "run.yaml")
        if kind == "renamed":
            renamed = _RECIPE.format(first="internet", source="internet")
            (tmp_path / "renamed.yaml").write_text(renamed)
            other = open_run(tmp_path / "renamed.yaml")
    run.lock(tmp_path / "run.lock")
    runs = [run, open_run(tmp_path / "run.lock"), *([other] if other else [])]

    def rows(loader: Loader, count: int) -> list[Any]:
        return [batch["tokens"].tolist() for _, batch in zip(range(count), loader, strict=False)]

    expected = rows(run.loader(options=options), 15)
    for served in runs:
        loader = served.loader(options=options)
        rows(loader, 6)
        state = json.loads(json.dumps(loader.state_dict()))
        for going_on in runs:
            resumed = going_on.loader(options=options)
            resumed.load_state_dict(state)
            assert rows(resumed, 9) == expected[6:]
    # other documents are still another run
    np.save(tmp_path / "ids.npy", [1, 2])
    changed = open_run(tmp_path / "run.yaml") if kind not in named else open_run(
        a, sequence_length=16, global_batch_size=4, train_iters=15, order="epoch", skip=[skip]
    )  # fmt: skip
    with pytest.raises(InvalidArgument, match="masks 3 documents|removes 3 documents"):
        changed.loader(options=options).load_state_dict(state)


def test_masks_of_a_checkpoint_have_the_names_of_this_run(tmp_path: Path) -> None:
    """By the numbers of their sources, which a changed list of sources translates."""
    pair = [str(tmp_path / name) for name in "ab"]
    for prefix in pair:
        write_corpus(Path(prefix), [60] * 20)
    index = build_blend(pair, weights=[1, 1], num_samples=60, sequence_length=16, seed=1)
    index = index_with_masks(index, [Skip(documents=[1], source=pair[0]), Skip(source="1")])
    assert mask_numbers(index) == [0, 1]
    first, second = (dict(mask.record) for mask in skips_of(index).masks)
    state = {"skip": {"end": 60, "dropped": [], "moved": [], "masked": [first, second]}}
    known = numbered(state, index)
    assert [mask["number"] for mask in known["skip"]["masked"]] == [0, 1]
    assert "number" not in first
    assert numbered({"kind": "x"}, index) == {"kind": "x"}

    def named(mask: dict[str, Any], numbers: list[int] | None = None) -> Any:
        found = named_as({"skip": {**state["skip"], "masked": [mask]}}, index, numbers)
        return found["skip"]["masked"][0]["source"]

    for mask, numbers, expected in (
        ({**first, "source": "web", "number": 0}, None, pair[0]),
        ({**first, "source": None, "number": 0}, None, pair[0]),
        ({**first, "source": "web", "number": 7}, [7, 0], pair[0]),
        ({**second, "source": pair[1], "number": 1}, None, "1"),
        ({**second, "source": "books", "number": 0}, [-1, 0], "1"),
        ({**first, "source": "web"}, None, "web"),  # of release 1.0
        # of other documents, or of a source that is not there
        ({**first, "source": "web", "number": 0, "documents": 2}, None, "web"),
        ({**first, "source": "web", "number": 3}, None, "web"),
        # of another source, which this run calls as the checkpoint calls its own
        ({**first, "number": 1}, None, f"{pair[0]} of the checkpoint"),
        ({**second, "number": 0}, [0, -1], "1 of the checkpoint"),
    ):
        assert named(mask, numbers) == expected
    assert named_as({}, index, None) == {}


def mask_numbers(index: Any) -> list[int]:
    return [number for number, _ in numbered_masks(index)]


def index_with_masks(index: Any, skip: list[Skip]) -> Any:
    return MicroBatchSampler(
        num_samples=60, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1, skip=skip
    ).skipped(index)


def test_a_sampler_finds_the_sources_of_every_index(tmp_path: Path) -> None:
    """Of a sampler without an index, sources are sought in each index that it is used with."""
    pair = [str(tmp_path / name) for name in "ab"]
    for prefix in pair:
        write_corpus(Path(prefix), [60] * 20)

    def blend(*prefixes: str) -> Any:
        return build_blend(
            list(prefixes), weights=[1, 1], num_samples=60, sequence_length=16, seed=1
        )

    def sampler(source: str | None) -> MicroBatchSampler:
        return MicroBatchSampler(
            num_samples=60, micro_batch_size=4, data_parallel_rank=0, data_parallel_size=1,
            skip=Skip(documents=[1, 2], source=source),
        )  # fmt: skip

    one = sampler(pair[1])
    first = one.skipped(blend(*pair))
    second = one.skipped(blend(*reversed(pair)))
    assert (mask_numbers(first), mask_numbers(second)) == ([1], [0])
    assert mask_numbers(blend(*pair)) == []
    # a state goes on before and after the index is known, by the names as they are written
    known, fresh = sampler(pair[1]), sampler(pair[1])
    known.skipped(blend(*pair))
    for state in (known.state_dict(), fresh.state_dict()):
        fresh.load_state_dict(state)
        known.load_state_dict(state)
    with pytest.raises(InvalidArgument, match="masks 2 documents of 1"):
        fresh.load_state_dict(sampler("1").state_dict())


@for_each("masks", ["web", "math"])
def test_states_of_a_sampler_alone_are_compared_by_name(tmp_path: Path, masks: str) -> None:
    """As StatefulDataLoader keeps them: a source that joins in front changes no name."""
    for name in "abc":
        write_corpus(tmp_path / name, [60] * 20)
    np.save(tmp_path / "ids.npy", [1, 2, 3])
    text = """
sequence_length: 16
batch: {{global_batch_size: 4}}
sources: {{{more}web: a, code: b}}
stages: {{all: {{steps: 9, mix: {{web: 1, code: 1}}}}{stage}}}
skip: [{{documents: ids.npy, source: {source}, from_step: 1}}]
"""
    (tmp_path / "run.yaml").write_text(text.format(more="", stage="", source="web"))
    stage = ", end: {steps: 3, mix: {math: 1}}"
    later = text.format(more="math: c, ", stage=stage, source=masks)
    (tmp_path / "later.yaml").write_text(later)
    begun, going_on = (open_run(tmp_path / name).loader() for name in ("run.yaml", "later.yaml"))
    state = begun.sampler.state_after(6)
    if masks == "web":
        going_on.sampler.load_state_dict(state, allow=("num_samples", "train_samples"))
    else:
        with pytest.raises(InvalidArgument, match="masks 3 documents of web"):
            going_on.sampler.load_state_dict(state, allow=("num_samples", "train_samples"))


def test_a_pair_that_is_listed_twice_has_the_masks_of_its_number(tmp_path: Path) -> None:
    write_corpus(tmp_path / "a", [60] * 20)
    np.save(tmp_path / "ids.npy", [1, 2, 3])
    a = str(tmp_path / "a")
    skip = Skip(documents=str(tmp_path / "ids.npy"), source="1", from_step=1)
    run = open_run("1", a, "1", a, sequence_length=16, global_batch_size=4, train_iters=15,
                   order="epoch", skip=[skip])  # fmt: skip
    run.lock(tmp_path / "run.lock")
    for opened in (run, open_run(tmp_path / "run.lock")):
        loader = opened.loader()
        for _ in zip(range(6), loader, strict=False):
            pass
        proof = compare_records(read_lock(tmp_path / "run.lock"), [loader.state_dict()])
        assert (proof.holds, proof.added, proof.removed) == (True, (), ())


def test_checkpoints_of_masks_of_other_sources_are_compared(tmp_path: Path) -> None:
    """A mask of a source that the lock does not have is named, by a typed error or a verdict."""
    for name in "ab":
        write_corpus(tmp_path / name, [60] * 20)
    np.save(tmp_path / "ids.npy", [1, 2, 3])
    pair = [str(tmp_path / name) for name in "ab"]
    settings: dict[str, Any] = {
        "sequence_length": 16, "global_batch_size": 4, "train_iters": 15, "order": "epoch",
    }  # fmt: skip
    skip = [Skip(documents=str(tmp_path / "ids.npy"), source=pair[1], from_step=1)]
    loader = open_run("1", pair[0], "1", pair[1], skip=skip, **settings).loader()
    next(iter(loader))
    alone = open_run(pair[0], skip=[replace(skip[0], source="0")], **settings)
    alone.lock(tmp_path / "one.lock")
    state = json.loads(json.dumps(loader.state_dict()))
    for change in ({}, {"source": "9" * 5000}, {"number": 10**30}, {"number": 1, "source": "7"}):
        (mask,) = state["sampler"]["skip"]["masked"]
        mask |= change
        with pytest.raises((InvalidArgument, FormatError)):
            compare_records(read_lock(tmp_path / "one.lock"), [state])
