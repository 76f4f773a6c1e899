"""Order objects: what each order can be told, and what a wrong value says."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import (
    EpochOrder,
    InvalidArgument,
    MegatronLegacyOrder,
    MegatronOrder,
    NeoxDocumentsOrder,
    NeoxOrder,
    PackedOrder,
    PaddleOrder,
    WindowOrder,
)
from megaindex.index.frameworks import FRAMEWORK_RULES, OWN_PYTHON_SUM
from megaindex.index.order_settings import Order, make_order, order_of, order_of_row

BY_NAME: dict[str, type[Order]] = {
    "megatron": MegatronOrder,
    "neox": NeoxOrder,
    "megatron-legacy": MegatronLegacyOrder,
    "paddlenlp": PaddleOrder,
    "epoch": EpochOrder,
    "window": WindowOrder,
    "packed": PackedOrder,
}


@for_each("name", FRAMEWORK_RULES)
def test_a_name_is_the_object_with_default_settings(name: str, tmp_path: Path) -> None:
    order = BY_NAME[name]()
    assert order_of(name) == order == make_order(name, {}) == order_of_row(FRAMEWORK_RULES[name])
    assert order.row == FRAMEWORK_RULES[name]
    own = {"python_sum": OWN_PYTHON_SUM}  # which has no default
    assert order.changed_settings == (own if hasattr(order, "python_sum") else {})
    corpus = write_corpus(tmp_path / "c", np.random.default_rng(0).integers(0, 50, 90))
    built = [
        megaindex.build_index(corpus, sequence_length=16, epochs=2, order=given)
        for given in (name, order)
    ]
    for one, other in zip(*(index.locate(np.arange(100)) for index in built), strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_frameworks_defaults_are_shown() -> None:
    assert MegatronOrder().settings == {
        "separate_final_epoch": "auto", "final_epoch_threshold": 0.8, "exact_num_epochs": None,
    }  # fmt: skip
    assert NeoxOrder().separate_final_epoch == "never"
    assert NeoxOrder() == NeoxOrder(separate_final_epoch="never")
    assert EpochOrder(epochs_mixed=3).changed_settings == {"epochs_mixed": 3}
    assert NeoxDocumentsOrder(pack_impl="unpacked").changed_settings == {
        "pack_impl": "unpacked", "python_sum": OWN_PYTHON_SUM,
    }  # fmt: skip


@for_each(
    ("make", "message"),
    [
        (lambda: MegatronOrder(separate_final_epoch="maybe"),
         "separate_final_epoch must be one of auto, always, never, got 'maybe'"),
        (lambda: NeoxOrder(final_epoch_threshold=1.5),
         "final_epoch_threshold must be from 0 to 1, got 1.5"),
        (lambda: PaddleOrder(final_epoch_threshold=float("nan")),
         "final_epoch_threshold must be a finite number"),
        (lambda: MegatronLegacyOrder(exact_num_epochs=0),
         "exact_num_epochs must be at least 1, got 0"),
        (lambda: NeoxDocumentsOrder(pack_impl="tight"),
         "pack_impl must be one of unpacked, pack_until_overflow, got 'tight'"),
        (lambda: NeoxDocumentsOrder(pack_impl="packed"), "got packed; use NeoxOrder"),
        (lambda: NeoxDocumentsOrder(pack_impl="unpacked", allow_chopped="no"),
         "allow_chopped must be True or False, got 'no'"),
        (lambda: NeoxDocumentsOrder(pack_impl="unpacked", next_token=2),
         "next_token must be True or False, got 2"),
        (lambda: EpochOrder(epochs_mixed=0), "epochs_mixed must be at least 1, got 0"),
        (lambda: EpochOrder(left_over="keep"),
         "left_over must be one of drop, carry, got 'keep'"),
    ],
)  # fmt: skip
def test_wrong_values_are_refused(make: Callable[[], Order], message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        make()


def test_settings_without_a_meaning_cannot_be_written() -> None:
    for kind, setting in (
        (NeoxOrder, {"left_over": "drop"}),
        (EpochOrder, {"separate_final_epoch": "never"}),
        (WindowOrder, {"epochs_mixed": 1}),
        (NeoxDocumentsOrder, {"pack_impl": "unpacked", "exact_num_epochs": 1}),
    ):
        with pytest.raises(TypeError, match="unexpected keyword"):
            kind(**setting)


def test_loose_settings_are_refused_in_the_words_of_the_user() -> None:
    words = {"epochs_mixed": "--epochs-mixed", "left_over": "--left-over"}
    loose = {"epochs_mixed": 2, "left_over": None}
    assert make_order("epoch", loose, words) == EpochOrder(epochs_mixed=2)
    with pytest.raises(InvalidArgument, match="^--epochs-mixed is a setting of order epoch"):
        make_order("neox", loose, words)
    with pytest.raises(InvalidArgument, match="^--left-over must be one of"):
        make_order("epoch", {"left_over": "keep"}, words)
    with pytest.raises(InvalidArgument, match="order must be one of"):
        make_order("random", {})
