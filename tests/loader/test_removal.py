"""Removed documents, in batches against a reading of the .bin, in receipts, keys and states."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.inputs import for_each

from megaindex import (
    FormatError,
    IndexedDataset,
    IndexedDatasetWriter,
    InvalidArgument,
    PackedOrder,
    Skip,
    build_blend,
    build_index,
)
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.index.array_index import served_tokens
from megaindex.index.skips import StoredSkips
from megaindex.index.source_targets import SourceTargets
from megaindex.index.spans import Index
from megaindex.loader import (
    BatchMaker,
    MappedTokens,
    MicroBatchSampler,
    NeoxDataset,
    NumpyDataset,
    SampleOptions,
)
from megaindex.loader.targets import Targets

S, EOD, STEP = 16, 0, 4
REMOVED = {0: [1, 2, 3, 30, 31, 60], 1: [0, 5, 6, 7, 8, 9, 10, 11, 20]}


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> list[IndexedDataset]:
    """Two corpora of documents that end in the end token; tokens tell where they are from."""
    folder, rng = tmp_path_factory.mktemp("removal"), np.random.default_rng(1)
    for number in range(2):
        with IndexedDatasetWriter(str(folder / f"c{number}"), dtype="uint16") as writer:
            for _ in range(70):
                writer.add_document([*rng.integers(1, 60000, rng.integers(0, 40)), EOD])
        labels = rng.integers(-100, 2, IndexedDataset(str(folder / f"c{number}")).tokens.size)
        with IndexedDatasetWriter(str(folder / f"l{number}"), dtype="int32") as writer:
            for document in IndexedDataset(str(folder / f"c{number}")):
                unlabelled = labels[: document.size] < 0
                writer.add_document(np.where(unlabelled, -100, document.astype(np.int32)))
                labels = labels[document.size :]
    return [IndexedDataset(str(folder / f"c{number}")) for number in range(2)]


def sampler_of(index: Index, skip: Any, **given: Any) -> MicroBatchSampler:
    return MicroBatchSampler(
        num_samples=index.num_samples, micro_batch_size=STEP, data_parallel_rank=0,
        data_parallel_size=1, index=index, skip=skip, **given,
    )  # fmt: skip


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {"eod_id": EOD},
    "eod": {"eod_id": EOD, "eod_mask_loss": True, "reset_position_ids": True, "keys": "wide",
            "create_attention_mask": True, "reset_attention_mask": True, "token_dtype": "int32"},
    "apart": {"cu_seqlens": True, "boundaries": "documents", "keys": True},
}  # fmt: skip
ORDERS: dict[str, Any] = {
    "megatron": "megatron", "epoch": "epoch", "window": "window", "packed": "packed",
    "aligned": PackedOrder(align=4),
}  # fmt: skip


@pytest.mark.slow
@for_each("order", ORDERS)
@for_each("options", OPTIONS)
@for_each("labelled", [False, True])
def test_rows_without_the_documents(
    corpora: list[IndexedDataset], order: str, options: str, labelled: bool
) -> None:
    """Of every row before and behind the step, token by token."""
    if order == "aligned" and options == "eod":
        return  # aligned documents have the boundaries of the index
    blend = build_blend(
        corpora, weights=[2, 1], num_samples=160, sequence_length=S, order=ORDERS[order]
    )
    skip = [
        Skip(documents=REMOVED[0], source="0", from_step=10, remove=True),
        Skip(documents=REMOVED[1], source="1", from_step=12, remove=True),
        Skip(documents=[1, 12, 13], source="0", from_step=3),
        Skip(steps="15", move=True),
    ]
    index = sampler_of(blend, skip).skipped(blend)
    prints = [corpus_fingerprint(each) for each in corpora]
    targets = None
    if labelled:
        folder = Path(corpora[0].path_prefix).parent
        companion = IndexedDataset(str(folder / "l0"))
        targets = Targets([SourceTargets(kind="labels", companion=companion), None])
    make = lambda of: BatchMaker(  # noqa: E731
        of, MappedTokens(corpora), SampleOptions(**OPTIONS[options]), fingerprints=prints,
        targets=targets,
    )  # fmt: skip
    positions = [p for p in range(164) if not 60 <= p < 64]
    samples = [p if p < 160 else p - 100 for p in positions]
    ours, theirs = make(index), make(blend)
    found, plain = ours.allocate(len(positions)), theirs.allocate(len(positions))
    ours.fill(found, positions)
    theirs.fill(plain, samples)
    removed_tokens = 0
    for row, (position, sample) in enumerate(zip(positions, samples, strict=True)):
        spans, tokens, owners, begins = blend.locate([sample]), [], [], []
        for source, document, offset, length in zip(*map(list, spans), strict=True):
            begins.append(
                len(tokens)
                if spans.padding is None
                else len(tokens) + int(spans.padding[len(begins)]) - owners.count(None)
            )
            text = corpora[source].get(int(document), int(offset), int(length)).tolist()
            gap = begins[-1] - len(tokens)
            kind = ""
            if source == 0 and position >= 12 and document in (1, 12, 13):
                kind = "masked"
            if document in REMOVED[int(source)] and position >= (40, 48)[source]:
                kind = "removed"
            tokens += [None] * gap + text
            owners += [None] * gap + [kind] * len(text)
        width = len(tokens)
        for at in range(S):
            own = owners[at] if at < width else None
            label = owners[at + 1] if at + 1 < width else None
            got = {name: found.arrays[name][row, at] for name in ("tokens", "labels", "loss_mask")}
            was = {name: plain.arrays[name][row, at] for name in ("tokens", "labels", "loss_mask")}
            assert got["tokens"] == (EOD if own == "removed" else was["tokens"])
            assert got["labels"] == (EOD if label == "removed" else was["labels"])
            no_loss = own == "removed" or label in ("masked", "removed")
            assert got["loss_mask"] == (0 if no_loss else was["loss_mask"])
            if own == "removed" or label == "removed":
                removed_tokens += 1
            elif own == "":
                assert got["tokens"] == tokens[at]
        kinds = {k for k in owners if k}
        same = (found.arrays["receipt"][row] == plain.arrays["receipt"][row]).all()
        assert same == (not kinds and position == sample)
        if "key" in found.arrays and position == sample:
            lost = "removed" in owners[:S]
            assert (found.arrays["key"][row] == plain.arrays["key"][row]) == (not lost)
            if all(owner in ("removed", None) for owner in owners[:S]):
                assert found.arrays["sample"][row] == -1
    assert removed_tokens > 50
    for name in ("position_ids", "cu_seqlens", "max_seqlen", "attention_mask", "cu_seqlens_padded"):
        if name in found.arrays:
            assert np.array_equal(found.arrays[name], plain.arrays[name]), name
    served = served_tokens(index, np.array(REMOVED[0]), 0)
    before = served_tokens(blend, np.array(REMOVED[0]), 0)
    assert served.sample.max() < 40 <= before.sample.max()
    assert sorted(served.sample) == sorted(before.sample[before.sample < 40])


def test_what_needs_the_end_token_or_is_refused(corpora: list[IndexedDataset]) -> None:
    index = build_index(corpora[0], sequence_length=S, epochs=2)
    removing = sampler_of(index, Skip(documents=[3], remove=True)).skipped(index)
    apart = {"boundaries": "documents", "create_attention_mask": True}
    for options, fits in (
        ({}, False), ({"eod_id": 5}, True), ({"cu_seqlens": True, "boundaries": "documents"}, True),
        (apart, False), ({**apart, "reset_attention_mask": True}, True),
        ({"boundaries": "documents", "reset_attention_mask": True}, False),
        ({"boundaries": "documents", "reset_position_ids": True}, False),
    ):  # fmt: skip
        if fits:
            NumpyDataset(removing, options=SampleOptions(**options))
        else:
            with pytest.raises(InvalidArgument, match="remove: .* eod_id"):
                NumpyDataset(removing, options=SampleOptions(**options))
        NumpyDataset(index, options=SampleOptions(**options))
    with pytest.raises(InvalidArgument, match="NeoxDataset"):
        NeoxDataset(removing, corpora[0])
    for wrong in ({"steps": "1"}, {}):
        with pytest.raises(InvalidArgument, match="remove belongs to|give either steps"):
            Skip(**wrong, remove=True)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="remove"):
        Skip(documents=[1], remove=1)  # type: ignore[arg-type]


def test_a_state_is_resumed_with_later_removal_alone(corpora: list[IndexedDataset]) -> None:
    """Both sides of the first step that is left."""
    index = build_index(corpora[0], sequence_length=S, epochs=2)
    first = Skip(documents=[3, 4], from_step=2, remove=True)

    def state(*skip: Skip) -> dict[str, Any]:
        sampler = sampler_of(index, skip)
        batches = iter(sampler)
        for _ in range(5):
            next(batches)
        return json.loads(json.dumps(sampler.state_dict()))  # type: ignore[no-any-return]

    later = Skip(documents=[8], from_step=5, remove=True)
    for old, new, refused in (
        ([], [later], None),
        ([], [Skip(documents=[8], from_step=4, remove=True)], "20 samples were served before"),
        ([first], [first, later], None),
        ([first], [], "removes 2 documents"),
        ([first], [Skip(documents=[3, 4], from_step=2)], "removes 2 documents"),
        ([Skip(documents=[3, 4], from_step=2)], [first], "masks 2 documents"),
        ([Skip(documents=[8])], [Skip(documents=[8]), later], None),
    ):  # fmt: skip
        sampler = sampler_of(index, new)
        if refused is None:
            sampler.load_state_dict(state(*old))
        else:
            with pytest.raises(InvalidArgument, match=refused):
                sampler.load_state_dict(state(*old))
    for name, wrong, message in (
        ("remove", False, "remove must be true"), ("source", 3, "source must be text"),
        ("documents", "2", "documents must be"), ("documents", 0, "documents must be"),
        ("digest", "x", "digest"),
    ):  # fmt: skip
        stored = state(first)
        assert StoredSkips.read(stored) is not None
        stored["skip"]["masked"][0][name] = wrong
        with pytest.raises(FormatError, match=message):
            StoredSkips.read(stored)
