"""Samples as NumPy rows under both sets of names, and the batches of hosts by number."""

from __future__ import annotations

import pickle
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus

from megaindex import IndexedDatasetWriter
from megaindex.adapters.grain import SampleSource
from megaindex.builders.recipe import OpenRecipe, open_recipe
from megaindex.errors import InvalidArgument, OutOfRange
from megaindex.loader.batch import SampleOptions
from megaindex.loader.numpy_dataset import NumpyDataset
from megaindex.loader.samplers import MicroBatchSampler, RandomAccessSampler
from megaindex.loader.targets import targets_of
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target

S = 8


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> OpenRecipe:
    """40 samples, of text and of instruction data by turns."""
    folder = tmp_path_factory.mktemp("samples")
    rng = np.random.default_rng(2)
    write_corpus(folder / "web", rng.integers(2, 20, 30))
    with (
        IndexedDatasetWriter(str(folder / "chat"), np.int32) as chat,
        IndexedDatasetWriter(str(folder / "mask"), np.int32) as mask,
    ):
        for length in rng.integers(2, 6, 30):
            chat.add_document(rng.integers(100, 999, length))
            mask.add_document(np.minimum(np.arange(length), 1))
    return open_recipe(
        Recipe(
            sequence_length=S,
            batch=BatchSchedule.constant(4),
            sources=(
                RecipeSource(name="web", path=str(folder / "web")),
                RecipeSource(name="chat", path=str(folder / "chat"), loss_mask=str(folder / "mask"),
                       kind="finetuning"),
            ),
            stages=(
                RecipeStage(
                    name="one", length=Target(kind="iterations", value=Fraction(10)),
                    streams=(Stream(source="web"), Stream(source="chat")),
                ),
            ),
        )
    )  # fmt: skip


def samples_of(opened: OpenRecipe, **more: object) -> NumpyDataset:
    return NumpyDataset(opened.index, opened.datasets, targets=targets_of(opened), **more)  # type: ignore[arg-type]


def test_a_sample_is_a_row_of_its_batch(opened: OpenRecipe) -> None:
    samples = samples_of(opened)
    assert len(samples) == 40
    batch = samples.__getitems__([3, None, 0])
    assert batch["tokens"].shape == (3, S)
    for row, sample in enumerate((3, None, 0)):
        for name, array in samples[sample].items():
            np.testing.assert_array_equal(array, batch[name][row])
    assert not batch["loss_mask"][1].any()
    assert not batch["tokens"][1].any()
    with pytest.raises(OutOfRange):
        samples[40]
    again = pickle.loads(pickle.dumps(samples))
    np.testing.assert_array_equal(again[7]["tokens"], samples[7]["tokens"])


def test_it_is_shown_by_its_index(opened: OpenRecipe) -> None:
    samples = samples_of(opened)
    assert repr(samples) == f"NumpyDataset({opened.index!r})"
    assert repr(SampleSource(samples, fingerprint="1f")) == "SampleSource(40 samples, '1f')"


def test_a_slice_is_a_batch(opened: OpenRecipe) -> None:
    dataset = NumpyDataset(opened.index, opened.datasets, targets=targets_of(opened))
    for part in (slice(3, 7), slice(None, 5, 2), slice(-3, None)):
        batch = dataset.__getitems__(range(len(dataset))[part])
        for name, field in dataset[part].items():
            np.testing.assert_array_equal(field, batch[name])


def test_the_fields_of_maxtext(opened: OpenRecipe) -> None:
    """The same tokens under its names; segments count documents, 0 is padding or no loss."""
    options = SampleOptions(reset_position_ids=True, boundaries="documents")
    plain, named = (samples_of(opened, options=options, fields=f) for f in ("megatron", "maxtext"))
    for sample in (*range(40), None):
        ours, theirs = plain[sample], named[sample]
        assert {array.dtype for array in theirs.values()} == {np.dtype(np.int32)}
        np.testing.assert_array_equal(theirs["inputs"], ours["tokens"])
        np.testing.assert_array_equal(theirs["targets"], ours["labels"])
        segments, positions = np.zeros(S, int), np.zeros(S, int)
        lengths = [] if sample is None else opened.index.locate([sample]).length.tolist()
        at = 0
        for number, length in enumerate(lengths, 1):
            segments[at : at + length] = number
            positions[at : at + length] = np.arange(length)[: S - at]
            at += length
        np.testing.assert_array_equal(theirs["inputs_segmentation"], segments)
        np.testing.assert_array_equal(theirs["inputs_position"], positions)
        np.testing.assert_array_equal(
            theirs["targets_segmentation"], segments * (ours["loss_mask"] > 0)
        )
    whole = samples_of(opened, fields="maxtext").__getitems__(list(range(40)))
    assert set(np.unique(whole["inputs_segmentation"])) == {0, 1}
    with pytest.raises(InvalidArgument, match="fields must be one of"):
        samples_of(opened, fields="neox")


@given(data=st.data())
def test_batches_by_number_are_those_of_the_sampler(data: st.DataObject) -> None:
    ranks, micro = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 3))
    round_ = ranks * micro
    schedule = BatchSchedule(
        stages=((0, round_ * data.draw(st.integers(1, 3))),
                (data.draw(st.integers(1, 30)), round_ * data.draw(st.integers(1, 3))))
    )  # fmt: skip
    samples = data.draw(st.integers(0, 120))
    steps = data.draw(st.integers(0, schedule.iterations_within(samples)))
    settings = {
        "num_samples": samples, "micro_batch_size": micro, "data_parallel_size": ranks,
        "consumed_samples": schedule.samples_after(steps), "global_batch_size": schedule,
        "tail": data.draw(st.sampled_from(["drop", "pad"])),
    }  # fmt: skip
    for rank in range(ranks):
        hosts = RandomAccessSampler(data_parallel_rank=rank, **settings)
        assert list(hosts) == list(MicroBatchSampler(data_parallel_rank=rank, **settings))
        assert hosts[-0:2] == list(hosts)[:2]
        with pytest.raises(OutOfRange, match="the number of a batch must be from 0"):
            hosts[len(hosts)]


def test_hosts_have_equal_batches_and_no_loss_on_padding(opened: OpenRecipe) -> None:
    """37 samples for 4 hosts with batches of 2: 5 batches each, 3 rows of padding without loss."""
    samples = samples_of(opened, fields="maxtext")
    settings = {"num_samples": 37, "micro_batch_size": 2, "data_parallel_size": 4}
    hosts = [RandomAccessSampler(data_parallel_rank=r, tail="pad", **settings) for r in range(4)]
    assert [len(batches) for batches in hosts] == [5] * 4
    served, empty = [], 0
    for batches in hosts:
        for ids in batches:
            loss = samples.__getitems__(ids)["targets_segmentation"].any(axis=1)
            assert [i is not None for i in ids] == loss.tolist()
            served += [i for i in ids if i is not None]
            empty += ids.count(None)
    assert (sorted(served), empty) == (list(range(37)), 3)
    with pytest.raises(InvalidArgument, match="tail must be one of"):
        RandomAccessSampler(data_parallel_rank=0, tail="wrap", **settings)  # type: ignore[arg-type]


def test_it_needs_no_torch() -> None:
    modules = "megaindex.loader.numpy_dataset, megaindex.loader.samplers"
    code = f"import sys, {modules}, megaindex.adapters.grain"
    result = subprocess.run(
        [sys.executable, "-c", f"{code}; print({{'torch', 'grain', 'jax'}} & set(sys.modules))"],
        capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert result.stdout.strip() == "set()"
