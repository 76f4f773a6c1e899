"""What may happen next. Each operation changes the world, its model, and compares both."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import numpy as np
from robustness.soak.model import check_epochs, shuffled_rows
from robustness.soak.world import World, rows_of

import megaindex
from megaindex.builders.recipe import open_recipe
from megaindex.corpus.merge import merge
from megaindex.corpus.split import cut_evenly, split
from megaindex.index.extension import extend_index
from megaindex.loader import MicroBatchSampler
from megaindex.loader.loader import Loader
from megaindex.recipe.amend import amend, check_past
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target
from megaindex.verify.verify import verify_all


def write(world: World) -> None:
    """A new corpus, or another in place of one."""
    name, documents = f"c{world.random.randint(0, 5)}", world.new_documents()
    world.write(name, documents)
    world.known[name] = documents
    assert world.read(name) == documents


def write_interrupted(world: World) -> None:
    name, documents = f"c{world.random.randint(0, 5)}", world.new_documents()
    world.interrupted(lambda: world.write(name, documents), world.corpora)
    found = world.read(name)
    if found is None:
        world.known.pop(name, None)
    else:
        assert found in (documents, world.known.get(name))
        world.known[name] = found
    for path in world.corpora.glob("*.tmp.*"):  # as an administrator would
        path.unlink()


def build(world: World) -> None:
    _build(world, world.any_corpus(), _settings(world))


def build_interrupted(world: World) -> None:
    """Then built again: the same as if nothing had happened."""
    name, settings = world.any_corpus(), _settings(world)
    settings["seed"] = world.random.getrandbits(32)  # so that it is not there yet
    corpus = world.prefix(name)
    world.interrupted(
        lambda: megaindex.build_index(corpus, cache_dir=world.cache, **settings), world.cache
    )
    _build(world, name, settings)


def damage(world: World) -> None:
    """An entry cut short, emptied or garbled, which the next to want it replaces."""
    entries = sorted(path for path in world.cache.iterdir() if len(path.name) == 32)
    if not entries:
        return
    path = world.random.choice(sorted(world.random.choice(entries).glob("*.*")))
    how = world.random.randint(0, 2)
    if how == 0:
        path.unlink()
    elif how == 1 or path.suffix == ".npy":
        os.truncate(path, world.random.randint(0, path.stat().st_size - 1))
    else:
        path.write_bytes(world.random.randbytes(100))
    reports = verify_all(world.cache)
    assert any(f.severity == "error" for report in reports for f in report.findings)
    for name in list(world.known):
        _build(world, name, _settings(world))


def verify(world: World) -> None:
    """Everything that is there is sound, once damaged entries have been replaced."""
    for report in verify_all(world.corpora, full=True):
        assert [f for f in report.findings if f.severity == "error"] == []


def merge_and_split(world: World) -> None:
    names = [world.any_corpus() for _ in range(world.random.randint(1, 3))]
    together = [tokens for name in names for tokens in world.known[name]]
    out = str(world.folder / "merged")
    merge(out, [str(world.prefix(name)) for name in names], overwrite=True)
    dataset = megaindex.IndexedDataset(out)
    assert [dataset[k].tolist() for k in range(len(dataset))] == together
    parts = world.random.randint(1, min(4, len(together)))
    places = [str(world.folder / f"part{k}") for k in range(parts)]
    split(out, places, lambda pair: cut_evenly(pair, parts, "documents"), overwrite=True)
    pieces = [megaindex.IndexedDataset(place) for place in places]
    assert [p[k].tolist() for p in pieces for k in range(len(p))] == together


def resume(world: World) -> None:
    """Stopped at any batch, and continued by another number of ranks with other micro batches."""
    name, settings = world.any_corpus(), _settings(world)
    dataset = world.open(name)
    index = megaindex.build_index(dataset, cache_dir=world.cache, **settings)
    right = rows_of(index, dataset)[:, :-1]
    served, state = 0, None
    while served < len(right):
        ranks, micro = world.random.randint(1, 3), world.random.randint(1, 4)
        loaders = [_loader(index, dataset, world, ranks, rank, micro) for rank in range(ranks)]
        for loader in loaders:
            if state is not None:
                loader.load_state_dict(state)
        stop, steps = world.random.randint(1, 40), 0
        for batches in zip(*map(iter, loaders), strict=True):
            rows = np.concatenate([batch["tokens"].numpy() for batch in batches])
            assert np.array_equal(rows, right[served : served + len(rows)])
            served, steps = served + len(rows), steps + 1
            if steps == stop:
                break
        state = loaders[0].state_dict()
        assert all(loader.state_dict() == state for loader in loaders)
        world.counts["  samples served to resumed runs"] += steps * ranks * micro
        if steps < stop:  # the rest fills no step
            return


def extend(world: World) -> None:
    """The past stays as it was; then comes what it left out; then whole epochs."""
    name, settings = world.any_corpus(), _settings(world)
    dataset = world.open(name)
    old = megaindex.build_index(dataset, cache_dir=world.cache, **settings)
    consumed = world.random.randint(0, old.num_samples)
    more = world.random.randint(1, 2 * old.num_samples)
    further = {**settings, "epochs": 1, "num_samples": None}
    extended = extend_index(
        old, consumed_samples=consumed, more_samples=more, seed=settings["seed"],
        further=lambda seed: megaindex.build_index(dataset, **{**further, "seed": seed}),
    )  # fmt: skip
    before, after = rows_of(old, dataset), rows_of(extended, dataset)
    assert len(after) == consumed + more
    assert np.array_equal(after[:consumed], before[:consumed])
    rest = after[consumed : old.num_samples].tolist()
    unserved = before[consumed:].tolist()
    assert all(row in unserved for row in rest)
    if more >= len(unserved):
        assert sorted(rest) == sorted(unserved)


def change(world: World) -> None:
    """A run of two sources gets other shares at some step."""
    names = [world.any_corpus(), world.any_corpus()]
    if names[0] == names[1]:
        return
    sources = tuple(RecipeSource(name=name, path=str(world.prefix(name))) for name in names)
    recipe = Recipe(
        sequence_length=8, batch=BatchSchedule(stages=((0, world.random.randint(1, 6)),)),
        sources=sources, stages=(_stage(world, "one", names),), seed=world.random.randint(0, 99),
    )  # fmt: skip
    old = open_recipe(recipe)
    steps = world.random.randint(1, old.layout.num_steps)
    consumed = recipe.batch.samples_after(steps)
    changed = amend(old.layout, consumed_samples=consumed, stages=[_stage(world, "two", names)])
    new = open_recipe(changed)
    check_past(old.layout, new.layout, consumed)
    before, after = (rows_of(opened.index, *opened.datasets) for opened in (old, new))
    assert np.array_equal(before[:consumed], after[:consumed])
    source, sample = new.index.origin(np.arange(new.index.num_samples))
    for number in range(2):
        assert sample[source == number].tolist() == list(range((source == number).sum()))


def _stage(world: World, name: str, sources: list[str]) -> RecipeStage:
    shares = [Fraction(world.random.randint(1, 9)) for _ in sources]
    return RecipeStage(
        name=name,
        streams=tuple(
            Stream(source=s, proportion=share) for s, share in zip(sources, shares, strict=True)
        ),
        length=Target(kind="iterations", value=Fraction(world.random.randint(1, 20))),
        batching=world.random.choice(["stratified", "random"]),
    )


def _settings(world: World) -> dict[str, Any]:
    choose = world.random.choice
    settings = {
        "order": choose(["megatron", "megatron", "neox", "neox", "epoch", "window"]),
        "sequence_length": choose([1, 3, 8, 16]),
        "seed": choose([1, 1234]),
        "epochs": choose([1, 2, 3]),
    }
    if settings["order"] == "megatron" and choose([True, False]):
        settings["num_samples"], settings["epochs"] = world.random.randint(1, 300), None
    return settings


def _build(world: World, name: str, settings: dict[str, Any]) -> None:
    """Through the cache, and compared with the model."""
    dataset, documents = world.open(name), world.known[name]
    index = megaindex.build_index(dataset, cache_dir=world.cache, **settings)
    rows, length = rows_of(index, dataset), settings["sequence_length"]
    world.counts["  samples compared"] += len(rows)
    if settings["order"] in ("megatron", "neox"):
        total, wanted = sum(map(len, documents)), settings.get("num_samples")
        epochs = settings["epochs"] or -(-(wanted * length + 1) // total)
        right = shuffled_rows(
            documents, length=length, seed=settings["seed"], wanted=wanted, epochs=epochs,
            apart=settings["order"] == "megatron",
        )  # fmt: skip
        assert np.array_equal(rows, right)
        return
    check_epochs(rows, documents, length, settings["epochs"])
    key = (tuple(map(tuple, documents)), *sorted(settings.items()))
    assert world.answers.setdefault(hash(key), rows.tobytes()) == rows.tobytes()


def _loader(index: Any, dataset: Any, world: World, ranks: int, rank: int, micro: int) -> Loader:
    sampler = MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=micro, data_parallel_rank=rank,
        data_parallel_size=ranks,
    )  # fmt: skip
    reader = world.random.choice(["mapped", "positional"])
    return Loader(index, dataset, sampler, reader=reader, read_ahead=world.random.randint(0, 4))


OPERATIONS = {
    write: 3, write_interrupted: 3, build: 4, build_interrupted: 6, damage: 1, verify: 1,
    merge_and_split: 1, resume: 2, extend: 2, change: 2,
}  # fmt: skip
"""How often each is chosen, relative to the others."""
