"""`describe_index`: what the description of a run's index holds."""

from __future__ import annotations

import json
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import megaindex
from megaindex.builders.described import build_described
from megaindex.builders.recipe import open_recipe
from megaindex.errors import InvalidArgument
from megaindex.index.array_index import ArrayIndex
from megaindex.index.blended_index import BlendedIndex
from megaindex.index.description import describe_index
from megaindex.index.stretches import Stretch, StretchedIndex
from megaindex.settings.batch_schedule import BatchSchedule
from megaindex.settings.mix_changes import MixChanges
from megaindex.settings.recipe import Recipe, RecipeSource, RecipeStage, Stream
from megaindex.settings.run_settings import Target
from megaindex.validation import shown


@pytest.fixture
def prefix(tmp_path: Path) -> str:
    with megaindex.IndexedDatasetWriter(tmp_path / "web", dtype="uint16") as writer:
        for length in np.random.default_rng(1).integers(1, 90, 40):
            writer.add_document(np.arange(length))
    return str(tmp_path / "web")


def test_values_that_all_sources_have_stand_once(prefix: str) -> None:
    blend = megaindex.build_blend(
        [prefix, prefix], weights=[3, 1], num_samples=50, sequence_length=32, order="neox"
    )
    node = describe_index(blend)
    assert node["weights"] == ["0x1.8000000000000p-1", "0x1.0000000000000p-2"]
    assert node["common"]["documents"] == [0, 40]
    assert node["sources"] == [
        {key: value for key, value in describe_index(index).items() if key not in node["common"]}
        for index in blend.indices
    ]


def test_draws_of_stages_that_do_not_fit_are_refused(prefix: str, tmp_path: Path) -> None:
    table = np.array([[0, 2**31, 0], [8, 2**30, 2**30], [16, 0, 2**31]])
    changes = MixChanges.from_array(("a", "b"), table, "").write(tmp_path / "mix.npy")
    opened = open_recipe(
        Recipe(
            sequence_length=8,
            batch=BatchSchedule.constant(4),
            sources=tuple(RecipeSource(name=name, path=prefix) for name in "ab"),
            stages=(
                RecipeStage(
                    name="all",
                    streams=tuple(Stream(source=name, proportion=Fraction(1)) for name in "ab"),
                    length=Target(kind="iterations", value=Fraction(6)),
                ),
            ),
            mix_changes=changes,
        )
    )
    node = describe_index(opened.index)
    (stage,) = node["stages"]
    stage["file"], files = 0, [changes.path]
    ids = np.arange(opened.index.num_samples)
    again = build_described(node, opened.datasets, files=files)
    np.testing.assert_array_equal(again.locate(ids).offset, opened.index.locate(ids).offset)
    for rows, names in ((table[:2], 2), (np.delete(table, 2, axis=1) * [1, 0] + [0, 2**31], 1)):
        np.save(changes.path, rows)
        with pytest.raises(InvalidArgument, match=f"has {len(rows)} changes of {names} sources, a"):
            build_described(node, opened.datasets, files=files)
    stage["rule"] = "even"
    with pytest.raises(ValueError, match="unknown rule 'even'"):
        build_described({**node, "stages": [{**stage, "shares": [1, 1]}]}, opened.datasets)


@pytest.mark.parametrize("order", ["epoch", "window"])
def test_a_description_that_does_not_fit_its_dataset_is_refused(prefix: str, order: str) -> None:
    dataset = megaindex.IndexedDataset(prefix)
    index = megaindex.build_index(dataset, sequence_length=32, order=order)
    node = describe_index(index)
    samples = node["samples"]
    ids = np.arange(samples)
    again = build_described(node, [dataset])
    np.testing.assert_array_equal(again.locate(ids).document, index.locate(ids).document)
    for change, message in (
        ({"samples": samples + 1}, f"must have {samples + 1} samples, got {samples}; restore"),
        ({"documents": [0, 41]}, "are 0 to 40, and it has 40; restore the dataset"),
        ({"documents": [-1, 40]}, "are -1 to 39, and it has 40"),
        ({"documents": [7, 7]}, "are 7 to 6, and it has 40"),
    ):
        with pytest.raises(InvalidArgument, match=message):
            build_described({**node, **change}, [dataset])


BLOCKS = {"order": "blocks", "block_tokens": 40}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sequence_length": 10**6}, "an epoch must have at least 1000001 tokens, one sample, got "
         "{tokens}; lower sequence_length"),
        ({**BLOCKS, "epochs": 2**20 + 1}, "order blocks: 1048577 epochs of {tokens} tokens need "
         "too many tables; draw at most 1048576 epochs of the source"),
        ({**BLOCKS, "sequence_length": 1000}, "order blocks: a block must have at least 1000 "
         "tokens and 1 more, one sample, and with block_tokens 40 none has; raise it, or lower "
         "sequence_length"),
    ],
)  # fmt: skip
def test_a_description_without_samples_is_refused(
    prefix: str, change: dict[str, Any], message: str
) -> None:
    dataset = megaindex.IndexedDataset(prefix)
    node = describe_index(megaindex.build_index(dataset, sequence_length=32, order="epoch"))
    with pytest.raises(InvalidArgument) as caught:
        build_described({**node, **change}, [dataset])
    assert str(caught.value) == message.format(tokens=dataset.num_tokens)


def test_blocks_of_the_most_epochs(prefix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dataset = megaindex.IndexedDataset(prefix)
    node = describe_index(megaindex.build_index(dataset, sequence_length=32, order="epoch"))
    monkeypatch.setattr("megaindex.index.orders.blocks.MOST_EPOCHS", 3)
    blocks = {**node, **BLOCKS, "epochs": 3, "samples": 129}
    index: Any = build_described(blocks, [dataset])
    assert index.reaching(index.num_samples) is index
    with pytest.raises(InvalidArgument, match="order blocks: 4 epochs"):
        index.reaching(index.num_samples + 1)


def test_passes_of_a_loader_that_starts_over_are_ranges(prefix: str) -> None:
    index = megaindex.build_index(prefix, sequence_length=32, order="window")
    samples = np.concatenate((np.arange(9), np.tile(np.arange(4, 9), 3), np.arange(4, 6)))
    passes = StretchedIndex(stretches=(Stretch(index=index, samples=samples),))
    (part,) = describe_index(passes)["parts"]
    assert part["ranges"] == [[0, 9, 1], [4, 9, 3], [4, 6, 1]]
    assert part["index"] == describe_index(index)


@pytest.mark.parametrize("order", ["megatron", "epoch"])
@pytest.mark.parametrize("consumed", [1, 30, None])
def test_an_extended_run_is_its_description(prefix: str, order: str, consumed: int | None) -> None:
    """None: one of which all samples were served, so that none of the old index is left."""
    run = megaindex.extend_run(
        prefix, sequence_length=32, order=order, epochs=1, consumed_samples=consumed,
        more_samples=80,
    )  # fmt: skip
    node = json.loads(json.dumps(describe_index(run.index)))
    again = build_described(node, run.datasets)
    ids = np.arange(run.num_samples)
    assert again.num_samples == run.num_samples
    for found, expected in zip(again.locate(ids), run.index.locate(ids), strict=True):
        np.testing.assert_array_equal(found, expected)
    assert describe_index(again) == node


def test_arrays_of_unknown_origin_and_lists_of_documents_are_refused(prefix: str) -> None:
    index = megaindex.build_index(prefix, sequence_length=32)
    assert isinstance(index, ArrayIndex)
    names = ("order", "document_index", "sample_index", "shuffle_index", "sequence_lengths")
    shape = ("sequence_length", "num_epochs", "tokens_per_epoch", "add_extra_token")
    foreign = ArrayIndex(**{name: getattr(index, name) for name in (*names, *shape)})
    blend = BlendedIndex(
        indices=(index,),
        dataset_index=np.zeros(4, np.int16),
        dataset_sample_index=np.array([3, 0, 1, 3]),
    )
    for other in (foreign, blend, "an index"):
        with pytest.raises(InvalidArgument) as caught:
            describe_index(other)  # type: ignore[arg-type]
        assert str(caught.value) == (
            f"{shown(other)} cannot be described: its arrays were not built from settings; use an "
            "index of megaindex.build_index, build_blend or a recipe"
        )
    some = megaindex.build_index(prefix, sequence_length=32, documents=[1, 3, 5, 6, 7, 9])
    with pytest.raises(InvalidArgument, match="got 6 ids; use a split"):
        describe_index(some)


@pytest.mark.parametrize(
    ("moved", "is_right"),
    [([], True), ([[8, 12]], True), ([[8, 11]], False), ([[12, 16]], False), ([[20, 24]], False)],
)
def test_moved_samples_are_left_out_of_their_place(
    prefix: str, moved: list[list[int]], is_right: bool
) -> None:
    node = {
        "order": "skipped", "end": 40, "left_out": [[0, 4], [8, 12]], "moved": moved, "masks": [],
        "index": describe_index(megaindex.build_index(prefix, sequence_length=16, order="epoch")),
    }  # fmt: skip
    datasets = [megaindex.IndexedDataset(prefix)]
    if is_right:
        index = build_described(node, datasets)
        assert index.num_samples == node["index"]["samples"] + sum(b - a for a, b in moved)
        return
    with pytest.raises(InvalidArgument, match="moved samples must be ranges of those left out"):
        build_described(node, datasets)


@pytest.mark.parametrize(("epochs", "apart"), [(1, False), (2, True)])
def test_a_single_epoch_is_never_apart(prefix: str, epochs: int, apart: bool) -> None:
    order = megaindex.MegatronOrder(separate_final_epoch="always")
    index = megaindex.build_index(prefix, sequence_length=8, epochs=epochs, order=order)
    assert describe_index(index)["final_epoch_apart"] is apart
