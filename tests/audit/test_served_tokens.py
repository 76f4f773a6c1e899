"""The audit counts the tokens that a loader feeds as input, whatever samples are made of."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.auditing import as_plain, brute_force
from support.examples import one_in

from megaindex import IndexedDataset, IndexedDatasetWriter, build_index
from megaindex.audit.exposure import count_exposure
from megaindex.builders.recipe import open_recipe
from megaindex.errors import InvalidArgument
from megaindex.loader import Loader, MicroBatchSampler, SampleOptions, loader_of_recipe
from megaindex.run.from_recipe import run_of_recipe
from megaindex.run.run import Run, RunSource, run_of_index
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage
from megaindex.settings.recipe import Stream as RecipeStream

NUMBERS = itertools.count()


def write(prefix: Path, lengths: list[int], first: int = 1) -> IndexedDataset:
    """Documents of tokens first, first + 1, ...: a served token says where it comes from."""
    with IndexedDatasetWriter(str(prefix), np.int32) as writer:
        for length in lengths:
            writer.add_document(np.arange(first, first + length, dtype=np.int32))
            first += length
    return IndexedDataset(str(prefix))


def times_fed(batches: Any, tokens: int) -> np.ndarray:
    """int64[tokens]: how often each token was in a batch's ``tokens``; 0 is padding."""
    times = np.zeros(tokens + 1, np.int64)
    for batch in batches:
        times += np.bincount(batch["tokens"].numpy().ravel(), minlength=tokens + 1)
    return times[1:]


def check(stream: Run, fed: np.ndarray) -> None:
    """The audit's histogram of each source, and the brute-force count of everything."""
    counted, expected = count_exposure(stream), brute_force(stream)
    assert as_plain(counted.total) == expected["total"]
    sizes = [int(source.lengths.sum()) for source in stream.sources]
    by_source = np.split(fed, np.cumsum(sizes)[:-1])
    for counts, served in zip(counted.total.tokens, by_source, strict=True):
        most = max(counts.size, int(served.max(initial=0)) + 1)
        np.testing.assert_array_equal(
            np.pad(counts, (0, most - counts.size)), np.bincount(served, minlength=most)
        )
    assert int(counted.step_tokens.sum()) == int(fed.sum())


@pytest.mark.slow
@one_in(1)  # each writes and opens files
@given(
    lengths=st.lists(st.lists(st.integers(2, 30), min_size=1, max_size=12), min_size=1, max_size=3),
    kinds=st.lists(st.sampled_from(["pretraining", "finetuning"]), min_size=3, max_size=3),
    packed=st.booleans(),
    long_documents=st.sampled_from(["truncate", "split", "skip"]),
    sequence_length=st.integers(1, 12),
    batch=st.integers(1, 4),
    tail=st.sampled_from(["drop", "pad"]),
)
def test_the_audit_counts_what_a_recipe_loader_serves(
    tmp_path: Path,
    lengths: list[list[int]],
    kinds: list[str],
    packed: bool,
    long_documents: Any,
    sequence_length: int,
    batch: int,
    tail: Any,
) -> None:
    sources, first = [], 1
    for number, (documents, kind) in enumerate(zip(lengths, kinds, strict=False)):
        path = tmp_path / f"c{next(NUMBERS)}"
        write(path, documents, first)
        first += sum(documents)
        finetuning = kind == "finetuning"
        sources.append(
            RecipeSource(name=f"s{number}", path=str(path), kind=kind,
                   packed=packed or not finetuning,
                   long_documents=long_documents if finetuning else "truncate")
        )  # fmt: skip
    streams = tuple(RecipeStream(source=source.name) for source in sources)
    try:
        recipe = Recipe(
            sequence_length=sequence_length, batch=BatchSchedule.constant(batch), tail=tail,
            sources=tuple(sources), stages=(RecipeStage(name="one", streams=streams),),
        )  # fmt: skip
        loader = loader_of_recipe(open_recipe(recipe), micro_batch_size=1, read_ahead=0)
    except InvalidArgument:  # too little text for a sample, or a batch
        return
    check(run_of_recipe(recipe), times_fed(loader, first - 1))


def test_whole_documents_are_served_to_their_last_token(tmp_path: Path) -> None:
    write(tmp_path / "chat", [8, 8, 8, 8])
    recipe = Recipe(
        sequence_length=8, batch=BatchSchedule.constant(1),
        sources=(RecipeSource(name="chat", path=str(tmp_path / "chat"), kind="finetuning"),),
        stages=(RecipeStage(name="one", streams=(RecipeStream(source="chat"),)),),
    )  # fmt: skip
    counted = count_exposure(run_of_recipe(recipe))
    assert as_plain(counted.total)["tokens"] == [[0, 32]]
    assert counted.step_tokens.tolist() == [8, 8, 8, 8]


@pytest.mark.slow
@pytest.mark.parametrize("extra", [0, 1])
@given(
    lengths=st.lists(st.integers(0, 20), min_size=1, max_size=12).filter(lambda x: sum(x) > 13),
    sequence_length=st.integers(1, 12),
    epochs=st.sampled_from([1, 2]),
)
def test_a_shorter_last_sample_is_served_as_a_whole(
    tmp_path: Path, extra: int, lengths: list[int], sequence_length: int, epochs: int
) -> None:
    dataset = write(tmp_path / f"c{next(NUMBERS)}", lengths)
    index = build_index(
        dataset, sequence_length=sequence_length, seed=3, epochs=epochs, drop_last_partial=False,
        add_extra_token=extra,
    )  # fmt: skip
    source = RunSource(name="c", sequence_lengths=dataset.sequence_lengths)
    sampler = MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=1, data_parallel_rank=0,
        data_parallel_size=1,
    )  # fmt: skip
    loader = Loader(index, dataset, sampler, options=SampleOptions(), read_ahead=0)
    fed = times_fed(loader, dataset.num_tokens)
    check(run_of_index(index, [source], global_batch_size=1), fed)
    if extra == 0:
        assert fed.sum() == epochs * dataset.num_tokens
