"""Subsets of documents: their choice, and their indices compared with those of copied pairs."""

from __future__ import annotations

import bisect
import itertools
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.corpora import write_corpus
from support.inputs import for_each

from megaindex import EpochOrder, IndexedDataset, PackedOrder, SubsetRule, WindowOrder, build_index
from megaindex.builders.described import build_described
from megaindex.cache.fingerprint import documents_setting
from megaindex.errors import InvalidArgument
from megaindex.index.description import describe_index
from megaindex.index.documents import (
    LAST_WORD,
    DocumentSubset,
    WordRange,
    lengths_of,
    word_text,
)
from megaindex.kernels.reference.bijection import key_word
from megaindex.settings.recipe import RecipeSource

SHARES = ("1/16", "1/8", "1/4", 0.5, "999/1000", 1)


def words_of(name: str, seed: int, count: int) -> list[int]:
    """Words by the specification of docs/lock-format.md, one at a time."""
    key = WordRange(seed, name)._key
    return [key_word(key, number) for number in range(count)]


def by_words(lengths: list[int], words: list[int], rule: dict[str, Any]) -> list[int]:
    """Documents of a rule, found by sorting; -1 in front if none is left."""
    order = sorted(range(len(lengths)), key=words.__getitem__)
    held = Fraction(rule.get("held_out", 0))
    kept, total = len(order), sum(lengths)
    while held and sum(lengths[d] for d in order[kept:]) < held * total:
        kept -= 1
    if rule.get("evaluates"):
        return sorted(order[kept:])
    pool = order[:kept]
    need = Fraction(rule.get("share", 1)) * sum(lengths[d] for d in pool)
    ends = np.cumsum([lengths[d] for d in pool]).tolist()
    return sorted(pool if rule.get("share", 1) == 1 else pool[: bisect.bisect_left(ends, need) + 1])


@given(
    lengths=st.lists(st.integers(0, 40), min_size=2, max_size=1100),
    share=st.sampled_from(SHARES),
    held_out=st.sampled_from((None, "1/1000", "1/10", 0.5)),
    evaluates=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_rule_chooses_the_shortest_ends_of_the_order(
    lengths: list[int], share: Any, held_out: Any, evaluates: bool, seed: int
) -> None:
    rule: dict[str, Any] = {"share": share}
    if held_out is not None:
        rule |= {"held_out": held_out, "evaluates": evaluates}
    lengths[0], sizes = 7, np.array([7, *lengths[1:]], np.int32)
    expected = by_words(lengths, words_of("web", seed, len(lengths)), rule)
    kept_tokens = (
        sum(lengths)
        - sum(
            lengths[d]
            for d in by_words(
                lengths, words_of("web", seed, len(lengths)), rule | {"evaluates": True}
            )
        )
        if held_out
        else 1
    )
    made = SubsetRule(**rule, seed=seed)
    if kept_tokens == 0:
        with pytest.raises(InvalidArgument, match="held_out"):
            made.choose("web", sizes, range(sizes.size), "web")
        return
    found = made.choose("web", sizes, range(sizes.size), "web")
    if isinstance(found, range):
        assert list(found) == expected
        return
    every = np.arange(len(found))
    assert found.sequence_ids(every).tolist() == expected
    assert lengths_of(sizes, found).tolist() == [lengths[d] for d in expected]
    few = np.random.default_rng(seed).integers(0, len(found), max(1, len(found) // 9))
    assert found.sequence_ids(few).tolist() == [expected[place] for place in few]
    assert sorted(found.places(np.arange(-3, sizes.size + 3)).tolist()) == every.tolist()


@pytest.mark.parametrize("asked", [1, 3, 4, 5, 60])
def test_members_are_found_one_by_one_or_by_decoding_all(asked: int) -> None:
    found = DocumentSubset.of(WordRange(7, "web", 0, LAST_WORD // 3), range(100, 1124))
    assert len(found) > asked
    words = words_of("web", 7, 1124)
    expected = [number for number in range(100, 1124) if words[number] <= LAST_WORD // 3]
    # up to 4 one by one
    places = np.random.default_rng(asked).integers(0, len(found), asked)
    assert found.sequence_ids(places).tolist() == [expected[place] for place in places]


def test_shares_are_nested_whatever_the_run_and_grow_with_the_corpus() -> None:
    lengths = np.random.default_rng(5).lognormal(5, 1.6, 40_000).astype(np.int32)

    def ids(share: Any, size: int = lengths.size, **more: Any) -> set[int]:
        found = SubsetRule(share=share, **more).choose("web", lengths[:size], range(size), "web")
        return (
            set(found)
            if isinstance(found, range)
            else set(found.sequence_ids(np.arange(len(found))))
        )

    chosen = [ids(share) for share in SHARES]
    for smaller, larger in itertools.pairwise(chosen):
        assert smaller < larger
    for share, members in zip(SHARES, chosen, strict=True):
        tokens, want = int(lengths[sorted(members)].sum()), Fraction(share) * int(lengths.sum())
        assert want <= tokens < want + int(lengths.max()), share
    part = SubsetRule(share="1/16").choose("web", lengths[:30_000], range(30_000), "web")
    assert isinstance(part, DocumentSubset)
    pinned = ids(word_text(part.words.last))
    before = set(part.sequence_ids(np.arange(len(part))))
    assert {number for number in pinned if number < 30_000} == before  # and a share of the others
    assert 0.05 < len(pinned - before) / 10_000 < 0.08
    assert ids("1/16", seed=1) != chosen[0]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> IndexedDataset:
    folder = tmp_path_factory.mktemp("pair")
    rng = np.random.default_rng(3)
    return write_corpus(folder / "web", rng.integers(0, 60, 900), dtype=np.uint16)


ORDERS: dict[str, Any] = {
    "epoch": EpochOrder(),
    "carried": EpochOrder(left_over="carry", epochs_mixed=2),
    "window": WindowOrder(),
    "packed": PackedOrder(),
    "aligned": PackedOrder(align=8, long_documents="truncate"),
}


@for_each("order", ORDERS)
@for_each("rule", [{"share": "1/4"}, {"held_out": "1/9"}, {"share": "1/2", "held_out": "1/5"}])
def test_the_index_is_that_of_a_copy(
    order: str, rule: dict[str, Any], pair: IndexedDataset, tmp_path: Path
) -> None:
    common: dict[str, Any] = {
        "sequence_length": 32, "seed": 7, "epochs": 4, "order": ORDERS[order], "source_name": "w"
    }  # fmt: skip
    for evaluates in (False, True) if "held_out" in rule else (False,):
        made = SubsetRule(**rule, evaluates=evaluates)
        index = build_index(pair, split="8,2", document_subset=made, **common)
        members: Any = index.documents
        ids = members.sequence_ids(np.arange(len(members)))
        prefix = tmp_path / f"{order}{len(rule)}{evaluates}{'share' in rule}"
        lengths = pair.sequence_lengths[ids]
        copy = build_index(write_corpus(prefix, lengths, dtype=np.uint16), **common)
        every = np.arange(index.num_samples)
        found, expected = index.locate(every), copy.locate(every)
        assert index.num_samples == copy.num_samples
        assert index.tokens_per_epoch == copy.tokens_per_epoch
        np.testing.assert_array_equal(found.document, ids[expected.document])
        for name in ("offset", "length", "row_splits"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
        assert (ids < 720).all()  # the split comes first
        some = np.unique([0, ids[3], ids[-1], 718, 899])
        served = index.served_tokens(some)
        theirs = copy.served_tokens(np.flatnonzero(np.isin(ids, some)))
        key = np.lexsort((served.offset, served.sample))
        other = np.lexsort((theirs.offset, theirs.sample))
        np.testing.assert_array_equal(served.document[key], ids[theirs.document][other])
        np.testing.assert_array_equal(served.sample[key], theirs.sample[other])
        again = build_described(describe_index(index), [pair]).locate(every)
        np.testing.assert_array_equal(again.document, found.document)


@for_each(
    ("rule", "message"),
    [
        ({"share": 0}, "subset"),
        ({"share": "17/16"}, "subset"),
        ({"share": "0xff"}, "subset"),
        ({"share": "0x00000000FFFFFFFF"}, "subset"),
        ({"held_out": 1}, "held_out"),
        ({"held_out": -0.5}, "held_out"),
        ({"seed": -1}, "subset_seed"),
    ],
)
def test_what_is_no_share_is_refused(rule: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SubsetRule(**rule)


def test_a_rule_without_shares_chooses_all() -> None:
    lengths = np.full(9, 3, np.int32)
    assert SubsetRule().choose("web", lengths, range(2, 7), "web") == range(2, 7)


def test_a_subset_is_shown_and_named_in_keys_by_its_words() -> None:
    words = WordRange(7, "web", 0, LAST_WORD // 3)
    found = DocumentSubset.of(words, range(100, 1124))
    assert repr(found) == f"DocumentSubset({len(found)} of range(100, 1124))"
    assert documents_setting(found) == [100, 1124, words.to_json()]


def test_a_source_keeps_plain_values_of_its_rule() -> None:
    source = RecipeSource(name="a", path="a", subset="1/4", subset_seed=np.int64(3))
    assert (type(source.subset_seed), source.subset_seed) == (int, 3)
    assert source.subset == SubsetRule(share="1/4", seed=3).share


def test_subsets_that_cannot_be_are_refused(pair: IndexedDataset) -> None:
    quarter = SubsetRule(share="1/4")
    for order in ("megatron", "neox", "paddlenlp"):
        with pytest.raises(InvalidArgument, match=f"subset.*order is {order}"):
            build_index(pair, sequence_length=8, order=order, document_subset=quarter)
    with pytest.raises(InvalidArgument, match="range or a split"):
        build_index(
            pair, sequence_length=8, order="epoch", document_subset=quarter, documents=[3, 1]
        )
    members: Any = build_index(
        pair, sequence_length=8, order="epoch", document_subset="1/4", source_name="w"
    ).documents
    common: dict[str, Any] = {"sequence_length": 8, "order": "epoch", "documents": members}
    assert build_index(pair, source_name="w", **common).documents is members
    with pytest.raises(InvalidArgument, match="subset of another source, 'w'"):
        build_index(pair, **common)
    own = build_index(pair, sequence_length=8, order="epoch", document_subset="1/4").documents
    with pytest.raises(InvalidArgument, match="subset.*order is megatron"):
        build_index(pair, sequence_length=8, documents=own)


def test_a_rule_of_nothing_chooses_all_documents(pair: IndexedDataset) -> None:
    common: dict[str, Any] = {"sequence_length": 8, "order": "epoch"}
    everything = build_index(pair, **common)
    assert build_index(pair, document_subset=SubsetRule(), **common).documents == (
        everything.documents
    )
    chosen: Any = build_index(pair, document_subset=SubsetRule(), documents=[3, 1], **common)
    assert chosen.documents.tolist() == [3, 1]
    lengths, every = pair.sequence_lengths, range(900)
    held = SubsetRule(held_out="1/9", evaluates=True).choose("w", lengths, every, "w")
    assert isinstance(held, DocumentSubset)
    first = held.words.first
    for last, is_refused in ((first - 1, False), (first, True)):
        rule = SubsetRule(share=word_text(last), held_out="1/9")
        if is_refused:
            with pytest.raises(InvalidArgument, match="web: subset 0x.* held_out 1/9"):
                rule.choose("w", lengths, every, "web")
        else:
            rule.choose("w", lengths, every, "web")
    with pytest.raises(InvalidArgument, match="none of 900 documents"):
        SubsetRule(share=word_text(0)).choose("w", lengths, every, "web")
    alone = np.array([0, 9, 0], np.int32)
    with pytest.raises(InvalidArgument, match="held_out 1/1000"):
        SubsetRule(held_out="1/1000").choose("w", alone, range(3), "web")


def test_memory_is_a_bit_for_each_document() -> None:
    lengths = np.ones(3_000_000, np.int32)
    found = SubsetRule(share="1/16").choose("w", lengths, range(lengths.size), "web")
    assert isinstance(found, DocumentSubset)
    assert found.nbytes * 8 <= 1.1 * lengths.size
    assert len(found) == 187_500
