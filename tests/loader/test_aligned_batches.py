"""Batches of aligned documents: places, masks and the fields of variable-length attention."""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

from megaindex import IndexedDataset, IndexedDatasetWriter, PackedOrder, build_blend, build_index
from megaindex.errors import InvalidArgument
from megaindex.index.source_targets import SourceTargets
from megaindex.loader import (
    BatchMaker,
    MappedTokens,
    NeoxDataset,
    NumpyDataset,
    SampleOptions,
    Targets,
)
from megaindex.loader.positional_reader import PositionalTokens
from megaindex.recipe import (
    BatchSchedule,
    Recipe,
    RecipeSource,
    RecipeStage,
    Stream,
    Target,
    open_recipe,
)

SIZE, ALIGN = 64, 8
OPTIONS = SampleOptions(cu_seqlens=True, boundaries="documents")


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """150 documents of distinct tokens, up to twice as long as a sample."""
    path = tmp_path_factory.mktemp("aligned") / "c"
    lengths = np.random.default_rng(1).integers(1, 2 * SIZE, 150)
    write_corpus(path, lengths.tolist())
    return path


def build(prefix: Path, **settings: Any) -> Any:
    given = {"sequence_length": SIZE, "epochs": 1, "order": PackedOrder(align=ALIGN), **settings}
    return build_index(prefix, **given)


def batch_of(
    index: Any, ids: list[int | None], options: SampleOptions = OPTIONS, **more: Any
) -> Any:
    reader = more.pop("reader", MappedTokens)(index.datasets)
    maker = BatchMaker(index, reader, options, **more)
    buffers = maker.allocate(len(ids))
    return maker.fill(buffers, ids), buffers.arrays


def check_row(row: dict[str, Any], spans: list[tuple[int, int, int, int]], data: Any) -> None:
    """Every field of a row, computed from its spans one token at a time."""
    tokens, labels, mask, position = ([0] * SIZE for _ in range(4))
    starts, sums = [0], [0]
    longest = 0
    for place, document, offset, length in spans:
        whole = data[document].tolist()
        inputs = min(length, SIZE - place)
        for k in range(inputs):
            tokens[place + k] = whole[offset + k]
            position[place + k] = k
            if k + 1 < length:  # the next token of the same document, read with this sample
                labels[place + k] = whole[offset + k + 1]
                mask[place + k] = 1
        padded = -(-inputs // ALIGN) * ALIGN
        starts.append(starts[-1] + padded)
        sums.append(sums[-1] + inputs)
        longest = max(longest, padded)
    if starts[-1] < SIZE:
        longest = max(longest, SIZE - starts[-1])
        starts.append(SIZE)
        sums.append(sums[-1])
    assert row["tokens"].tolist() == tokens
    assert row["labels"].tolist() == labels
    assert row["loss_mask"].tolist() == mask
    assert row["position_ids"].tolist() == position
    assert row["cu_seqlens_padded"].tolist() == starts + [SIZE] * (SIZE + 1 - len(starts))
    assert row["cu_seqlens"].tolist() == sums + [sums[-1]] * (SIZE + 1 - len(sums))
    assert int(row["max_seqlen"]) == longest


@pytest.mark.parametrize("reader", [MappedTokens, PositionalTokens])
def test_every_field_of_every_row(prefix: Path, reader: Any) -> None:
    index, data = build(prefix), IndexedDataset(str(prefix))
    ids = [*range(index.num_samples), None]
    spans, arrays = batch_of(index, ids, reader=reader)
    assert arrays["cu_seqlens_padded"].dtype == arrays["cu_seqlens"].dtype == np.int32
    begins, _ = spans.bounds_in_samples()
    table = np.column_stack((begins, spans.document, spans.offset, spans.length)).tolist()
    for k in range(len(ids)):
        row = {name: values[k] for name, values in arrays.items()}
        mine = table[spans.row_splits[k] : spans.row_splits[k + 1]]
        check_row(row, [tuple(each) for each in mine], data)
    assert not arrays["loss_mask"][-1].any()


def test_without_alignment_the_fields_stay(prefix: Path) -> None:
    index = build(prefix, order="packed")
    _, arrays = batch_of(index, [0, 1])
    assert "cu_seqlens_padded" not in arrays
    again = build(prefix, order=PackedOrder(align=1))
    _, same = batch_of(again, [0, 1])
    assert {n: v.tobytes() for n, v in arrays.items()} == {n: v.tobytes() for n, v in same.items()}


def test_attention_does_not_reach_padding(prefix: Path) -> None:
    options = SampleOptions(
        create_attention_mask=True, reset_attention_mask=True, boundaries="documents"
    )
    index = build(prefix)
    spans, arrays = batch_of(index, list(range(20)), options)
    covered = spans.covered(SIZE)
    document = np.zeros((20, SIZE), np.int64)
    begins, ends = spans.bounds_in_samples()
    row = np.repeat(np.arange(20), np.diff(spans.row_splits))
    for number in range(len(spans)):
        document[row[number], begins[number] : ends[number]] = number + 1
    allowed = ~arrays["attention_mask"][:, 0]
    for k in range(20):
        for query in np.flatnonzero(covered[k]):
            expected = (document[k] == document[k, query]) & (np.arange(SIZE) <= query)
            assert np.array_equal(allowed[k, query], expected)


def test_loss_targets_follow_the_tokens(prefix: Path, tmp_path: Path) -> None:
    """A loss mask of a companion that is the token's parity."""
    data = IndexedDataset(str(prefix))
    lengths = data.sequence_lengths.tolist()
    write_corpus(tmp_path / "mask", lengths, np.uint8)
    companion = IndexedDataset(str(tmp_path / "mask"))
    targets = Targets([SourceTargets(kind="loss_mask", companion=companion)])
    index = build(prefix)
    spans, arrays = batch_of(index, list(range(index.num_samples)), targets=targets)
    begins, _ = spans.bounds_in_samples()
    row = np.repeat(np.arange(index.num_samples), np.diff(spans.row_splits))
    expected = np.zeros((index.num_samples, SIZE))
    for number in range(len(spans)):
        marks = companion[int(spans.document[number])]
        for k in range(int(spans.length[number]) - 1):
            at = int(begins[number]) + k
            expected[row[number], at] = marks[int(spans.offset[number]) + k + 1] > 0
    assert np.array_equal(arrays["loss_mask"], expected)


def test_maxtext_fields(prefix: Path) -> None:
    index = build(prefix)
    samples = NumpyDataset(index, options=OPTIONS, fields="maxtext")
    spans, arrays = batch_of(index, [0, 1, 2])
    found = samples.__getitems__([0, 1, 2])
    segments = found["inputs_segmentation"]
    covered = spans.covered(SIZE)
    assert np.array_equal(segments > 0, covered)
    assert np.array_equal(found["inputs"], arrays["tokens"])
    for k in range(3):
        count = int(np.diff(spans.row_splits)[k])
        assert sorted(set(segments[k][covered[k]].tolist())) == list(range(1, count + 1))


def test_masked_documents(prefix: Path) -> None:
    from megaindex import Skip
    from megaindex.loader import Loader, MicroBatchSampler

    index = build(prefix)
    chosen = set(range(0, 150, 3))
    sampler = MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=4, data_parallel_rank=0,
        data_parallel_size=1, skip=Skip(documents=sorted(chosen)), index=index, tail="pad",
    )  # fmt: skip
    plain = MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=4, data_parallel_rank=0,
        data_parallel_size=1, tail="pad",
    )  # fmt: skip
    position = 0
    for ours, theirs in zip(Loader(index, sampler), Loader(index, plain), strict=True):
        rows = len(ours["tokens"])
        ids = np.arange(position, min(position + rows, index.num_samples))
        spans = index.locate(ids)
        begins, ends = spans.bounds_in_samples()
        row = np.repeat(np.arange(ids.size), np.diff(spans.row_splits))
        expected = theirs["loss_mask"].numpy().copy()
        for number in range(len(spans)):
            if int(spans.document[number]) in chosen:
                expected[row[number], max(0, begins[number] - 1) : ends[number] - 1] = 0
        assert np.array_equal(ours["loss_mask"].numpy(), expected)
        position += rows


def test_sources_that_are_aligned_otherwise_are_not_kept_apart(
    prefix: Path, tmp_path: Path
) -> None:
    write_corpus(tmp_path / "other", [50] * 20)
    prefixes = [str(prefix), str(tmp_path / "other")]
    blend = build_blend(
        prefixes, weights=[1, 1], num_samples=20, sequence_length=SIZE, order=PackedOrder(align=8)
    )
    _, arrays = batch_of(blend, [0, 1, 2, 3])
    assert (arrays["cu_seqlens_padded"] % ALIGN == 0).all()
    with pytest.raises(InvalidArgument, match="boundaries must be documents"):
        batch_of(blend, [0], SampleOptions(cu_seqlens=True, eod_id=1))
    _, plain = batch_of(blend, [0, 1], SampleOptions())
    assert "cu_seqlens" not in plain
    sources = tuple(
        RecipeSource(name=path[-1], path=path, order="packed", align=align)
        for path, align in zip(prefixes, (4, 8), strict=True)
    )
    length = Target(kind="iterations", value=Fraction(4))
    streams = tuple(Stream(source=source.name) for source in sources)
    mixed = open_recipe(
        Recipe(
            sequence_length=SIZE, batch=BatchSchedule.constant(2), sources=sources,
            stages=(RecipeStage(name="one", length=length, streams=streams),),
        )
    ).index  # fmt: skip
    with pytest.raises(InvalidArgument, match=r"aligned alike in all sources, got align \[4, 8\]"):
        batch_of(mixed, [0])
    batch_of(mixed, [0], SampleOptions())


def test_rewards_lie_at_their_tokens(prefix: Path, tmp_path: Path) -> None:
    lengths = IndexedDataset(str(prefix)).sequence_lengths.tolist()
    with IndexedDatasetWriter(str(tmp_path / "reward"), np.float32) as writer:
        for number in range(len(lengths)):
            writer.add_document([number + 1.0])
    index = build(prefix)
    reward = IndexedDataset(str(tmp_path / "reward"))
    samples = NeoxDataset(index, IndexedDataset(str(prefix)), reward_dataset=reward)
    for number in range(index.num_samples):
        spans = index.locate([number])
        expected = np.zeros(SIZE + 1)
        for document, begin, end in zip(spans.document, *spans.bounds_in_samples(), strict=True):
            expected[begin:end] = document + 1
        assert np.array_equal(np.asarray(samples[number]["reward"]), expected)
