"""Receipts and block receipts of whole indices."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex.cache.fingerprint import corpus_fingerprint
from megaindex.format import IndexedDataset
from megaindex.index import receipts as receipts_module
from megaindex.index.array_index import ArrayIndex
from megaindex.index.receipts import (
    BlockReceipts,
    Receipt,
    explain,
    fingerprint_keys,
    planned_block_receipts,
    planned_receipt,
    receipts_between,
    sample_receipts,
)
from megaindex.index.spans import Spans


@dataclass(frozen=True)
class Setting:
    dataset: IndexedDataset
    index: ArrayIndex
    keys: Any


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Setting:
    lengths = np.random.default_rng(4).integers(0, 90, 300)
    dataset = write_corpus(tmp_path_factory.mktemp("corpus") / "c", lengths)
    index = megaindex.build_index(dataset, sequence_length=32, seed=3, epochs="2.5")
    return Setting(dataset, index, fingerprint_keys([corpus_fingerprint(dataset)]))


def served(setting: Setting, positions: list[int], samples: list[int] | None = None) -> Receipt:
    """Of ``samples`` served at ``positions``; by default the right ones."""
    spans = setting.index.locate(positions if samples is None else samples)
    return Receipt.of(np.array(positions, np.int64), spans, setting.keys)


@given(
    seed=st.integers(0, 2**32 - 1),
    ranks=st.integers(1, 9),
    micro_batch=st.integers(1, 7),
    begin=st.integers(0, 300),
    count=st.integers(0, 600),
)
def test_parts_in_any_order_add_up_to_the_plan(
    setting: Setting, seed: int, ranks: int, micro_batch: int, begin: int, count: int
) -> None:
    end = min(setting.index.num_samples, begin + count)
    generator = np.random.default_rng(seed)
    batches = [
        list(range(start, min(end, start + micro_batch)))
        for start in range(begin, end, micro_batch)
    ]
    generator.shuffle(batches)
    totals = [Receipt()] * ranks
    for batch in batches:
        rank = int(generator.integers(ranks))
        spans = setting.index.locate(batch)
        totals[rank] = totals[rank].add(np.array(batch), spans, setting.keys)
    assert sum(totals, Receipt()) == planned_receipt(setting.index, begin, end, setting.keys)


@given(data=st.data())
def test_one_wrong_sample_changes_the_receipt(setting: Setting, data: st.DataObject) -> None:
    count = data.draw(st.integers(2, 100))
    positions = list(range(count))
    planned = planned_receipt(setting.index, 0, count, setting.keys)
    assert served(setting, positions) == planned
    a, b = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    swapped = positions.copy()
    swapped[a], swapped[b] = b, a
    repeated = positions.copy()
    repeated[a] = b
    assert served(setting, positions, swapped).words != planned.words
    assert served(setting, positions, repeated).words != planned.words
    assert served(setting, positions[:a] + positions[a + 1 :]).words != planned.words
    assert served(setting, [*positions, a]).words != planned.words


@given(data=st.data())
def test_one_shifted_token_changes_the_receipt(setting: Setting, data: st.DataObject) -> None:
    ids = np.arange(data.draw(st.integers(1, 30)))
    spans = setting.index.locate(ids)
    right = Receipt.of(ids, spans, setting.keys)
    at = data.draw(st.integers(0, len(spans) - 1))
    for name in ("document", "offset", "length"):
        for step in (-1, 1):
            moved = getattr(spans, name).copy()
            moved[at] += step
            assert Receipt.of(ids, replace(spans, **{name: moved}), setting.keys) != right
    other = fingerprint_keys(["0" * 31 + "1"])
    assert Receipt.of(ids, spans, other) != right


def test_sources_count_by_content_not_by_number(setting: Setting) -> None:
    ids = np.arange(20)
    spans = setting.index.locate(ids)
    elsewhere = replace(spans, source=np.full(len(spans), 2, np.int32))
    keys = np.concatenate((np.zeros((2, 2), np.uint64), setting.keys))
    assert Receipt.of(ids, elsewhere, keys) == Receipt.of(ids, spans, setting.keys)


def test_every_backend_plans_the_same(
    setting: Setting, backend: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = planned_block_receipts(setting.index, 5, 400, setting.keys, stride=64)
    monkeypatch.setattr(receipts_module, "active", lambda: backend)
    assert planned_block_receipts(setting.index, 5, 400, setting.keys, stride=64) == expected
    assert planned_receipt(setting.index, 5, 400, setting.keys) == expected.total
    assert [r.count for r in expected.blocks.values()] == [59, 64, 64, 64, 64, 64, 16]


def test_parts_of_several_threads_add_up(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = planned_block_receipts(setting.index, 5, 400, setting.keys, stride=8)
    monkeypatch.setattr(receipts_module, "_WORTH_THREADS", 1)
    for threads in (2, 3):
        monkeypatch.setattr(receipts_module, "num_threads", lambda threads=threads: threads)
        assert planned_block_receipts(setting.index, 5, 400, setting.keys, stride=8) == expected


@given(bounds=st.lists(st.integers(0, 400), min_size=2, max_size=9, unique=True).map(sorted))
@example(bounds=[0, 10, 20, 25, 40])  # even at first
@example(bounds=[0, 10, 20, 30, 40, 47])  # but for the last
def test_receipts_between_bounds(setting: Setting, bounds: list[int]) -> None:
    expected = [planned_receipt(setting.index, *pair, setting.keys) for pair in pairwise(bounds)]
    assert receipts_between(setting.index, bounds, setting.keys) == expected


def test_progress_of_receipts(setting: Setting) -> None:
    seen: list[tuple[int, int]] = []
    receipts_between(
        setting.index, [5, 40, 400], setting.keys, progress=lambda *counts: seen.append(counts)
    )
    done = [count for count, _ in seen]
    assert done[-1] == 395
    assert done == sorted(done)
    assert {total for _, total in seen} == {395}


def test_rows_of_samples_add_up(setting: Setting) -> None:
    ids = np.array([7, 3, 99, 3])
    rows = sample_receipts(ids, setting.index.locate(ids), setting.keys)
    assert rows.dtype == np.int64
    assert rows[:, 0].tolist() == ids.tolist()
    assert Receipt.from_rows(rows) == served(setting, ids.tolist())
    assert rows[1].tolist() == rows[3].tolist()


@given(wrong=st.integers(0, 799), stride=st.sampled_from([1, 4, 64, 1024]))
def test_block_receipts_and_explain_find_the_first_difference(
    setting: Setting, wrong: int, stride: int
) -> None:
    index = setting.index
    shuffle = index.shuffle_index.copy()
    shuffle[[wrong, -1]] = shuffle[[-1, wrong]]
    other = replace(index, shuffle_index=shuffle)
    end = index.num_samples
    planned = planned_block_receipts(index, 0, end, setting.keys, stride=stride)
    changed = planned_block_receipts(other, 0, end, setting.keys, stride=stride)
    assert planned.first_difference(planned) is None
    block = wrong // stride
    assert planned.first_difference(changed) == (block * stride, (block + 1) * stride)
    shorter = planned_block_receipts(index, 0, block * stride, setting.keys, stride=stride)
    missing = (block * stride, (block + 1) * stride)
    assert planned.first_difference(shorter) == shorter.first_difference(planned) == missing

    found = explain(index, other, 0, end, setting.keys)
    assert found is not None
    assert found.position == wrong
    assert found.ours == runs(index.locate([wrong]))
    assert found.theirs == runs(index.locate([end - 1]))
    assert f"sample {wrong}: tokens {found.ours[0][2]} to" in str(found)
    assert explain(index, other, 0, wrong, setting.keys) is None


def runs(spans: Spans) -> list[tuple[int, ...]]:
    return list(zip(*(part.tolist() for part in spans), strict=True))


def test_explain_crosses_chunks(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(receipts_module, "_CHUNK", 50)
    other = megaindex.build_index(setting.dataset, sequence_length=32, seed=4, epochs="2.5")
    start = explain(setting.index, other, 0, 400, setting.keys)
    assert start is not None
    again = explain(setting.index, other, start.position + 1, 400, setting.keys)
    assert again is not None
    assert again.position > start.position
    keys = fingerprint_keys(["a" * 32])  # another corpus under the same runs
    found = explain(setting.index, setting.index, 120, 400, setting.keys, keys)
    assert found is not None
    assert found.position == 120


def test_sums_wrap_at_128_bits() -> None:
    high = Receipt((2**64 - 1, 2**64 - 1), 1)
    assert high + Receipt((0, 1), 1) == Receipt((0, 0), 2)
    assert Receipt((0, 2**64 - 1), 1) + Receipt((0, 1), 1) == Receipt((1, 0), 2)


@given(
    words=st.lists(
        st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1)), min_size=1, max_size=40
    )
)
def test_limbs_add_up_as_receipts_do(words: list[tuple[int, int]]) -> None:
    receipts = [Receipt(pair, count) for count, pair in enumerate(words)]
    reduced = np.sum([receipt.limbs() for receipt in receipts], axis=0)
    assert Receipt.from_limbs(reduced) == sum(receipts, Receipt())


def test_checkpoints_hold_both_in_kilobytes(setting: Setting) -> None:
    receipts = planned_block_receipts(setting.index, 0, 800, setting.keys, stride=32)
    text = json.dumps({"ladder": receipts.to_dict(), **receipts.total.to_dict()})
    assert len(text) < 2000  # 25 blocks
    stored = json.loads(text)
    assert BlockReceipts.from_dict(stored["ladder"]) == receipts
    assert Receipt.from_dict(stored) == receipts.total


@pytest.mark.parametrize(
    "stored", [{}, {"receipt": "12", "samples": 1}, {"receipt": "x" * 32, "samples": 1}]
)
def test_damaged_receipts_are_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(megaindex.FormatError, match="32 hex digits and a number of samples"):
        Receipt.from_dict(stored)


BLOCK = ["0" * 32, 1]


@for_each(
    ("stored", "message"),
    [
        ({}, "a stride and blocks"),
        ({"stride": 2, "blocks": 5}, "a stride and blocks"),
        ({"blocks": {}, "stride": "a"}, "a stride and blocks"),
        ({"stride": 0, "blocks": {}}, "a stride and blocks"),
        ({"stride": 6, "blocks": {}}, "stride must be a power of two"),
        ({"stride": 2, "blocks": {"-1": BLOCK}}, "keys of blocks must be block numbers"),
        ({"stride": 2, "blocks": {"03": BLOCK}}, "keys of blocks must be block numbers"),
        ({"stride": 2, "blocks": {str(2**62): BLOCK}}, "keys of blocks must be block numbers"),
    ],
)
def test_damaged_block_receipts_are_refused(stored: dict[str, Any], message: str) -> None:
    with pytest.raises(megaindex.FormatError, match=message):
        BlockReceipts.from_dict(stored)


def test_the_last_block_of_a_stride() -> None:
    for stride, number in ((1, 2**63 - 1), (2, 2**62 - 1)):
        last = {"stride": stride, "blocks": {str(number): BLOCK}}
        assert BlockReceipts.from_dict(last).to_dict() == last


@pytest.mark.parametrize("pair", [[], ["0" * 32], ["0" * 32, 1, 1], "01", {"0" * 32: 1}])
def test_a_block_is_a_receipt_and_a_number(pair: Any) -> None:
    with pytest.raises(megaindex.FormatError, match="block 3 must be a receipt and a number"):
        BlockReceipts.from_dict({"stride": 2, "blocks": {"3": pair}})


@pytest.mark.parametrize("fingerprints", [[], ["ab"], "a" * 32, ["g" * 32]])
def test_bad_fingerprints_are_refused(fingerprints: Any) -> None:
    with pytest.raises(megaindex.InvalidArgument, match="32 hex digits for each source"):
        fingerprint_keys(fingerprints)


def test_bad_ranges_and_strides_are_refused(setting: Setting) -> None:
    end = setting.index.num_samples
    with pytest.raises(megaindex.OutOfRange, match=f"samples 0 to {end + 1} do not all exist"):
        planned_receipt(setting.index, 0, end + 1, setting.keys)
    with pytest.raises(megaindex.InvalidArgument, match="stride must be a power of two"):
        planned_block_receipts(setting.index, 0, 9, setting.keys, stride=3)
    one, two = (planned_block_receipts(setting.index, 0, 9, setting.keys, stride=s) for s in (1, 2))
    with pytest.raises(megaindex.InvalidArgument, match="must have the same stride"):
        one.first_difference(two)
    assert planned_receipt(setting.index, 4, 4, setting.keys) == Receipt()
