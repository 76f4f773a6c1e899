"""The frameworks' orders against what their own code built; see tests/golden/make_orders.py."""

from __future__ import annotations

import functools
import hashlib
import json
import operator
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus
from support.inputs import for_each

import megaindex
from megaindex import MegatronLegacyOrder, MegatronOrder
from megaindex.format import IndexedDataset
from megaindex.index.blend import Blend
from megaindex.index.frameworks import framework_rules
from megaindex.index.order_settings import make_order
from megaindex.index.orders import framework as shuffled

FOLDER = Path(__file__).parents[1] / "golden"
ORDERS = ("neox", "megatron-legacy", "paddlenlp")
GOLDEN = {
    order: json.loads((FOLDER / f"orders_{order.replace('-', '_')}.json").read_text())
    for order in ORDERS
}


def cases(kind: str) -> list[tuple[str, int]]:
    return [(order, k) for order in ORDERS for k in range(len(GOLDEN[order][kind]))]


def lengths_of(case: dict[str, Any]) -> Any:
    if case["sizes"] is not None:
        return case["sizes"]
    seed, low, high, count = case["randint"]
    return np.random.RandomState(seed).randint(low, high, count)


def assert_recorded(array: Any, recorded: dict[str, Any], name: str) -> None:
    assert str(array.dtype) == recorded["dtype"], name
    assert list(array.shape) == recorded["shape"], name
    if "values" in recorded:
        np.testing.assert_array_equal(array, recorded["values"], err_msg=name)
    else:
        assert (
            hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
            == (recorded["sha256"])
        ), name


Corpora = Callable[[list[int]], IndexedDataset]


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Corpora:
    """Corpora by their lengths, each written once for all backends and orders."""
    folder, written = tmp_path_factory.mktemp("corpora"), dict[bytes, IndexedDataset]()

    def of(lengths: Any) -> IndexedDataset:
        key = np.array(lengths, np.int64).tobytes()
        if key not in written:
            written[key] = write_corpus(folder / str(len(written)), lengths)
        return written[key]

    return of


@pytest.mark.slow_cases("reference")
@for_each(("order", "k"), cases("indices"))
def test_arrays_are_the_frameworks(
    backend: Any, corpora: Corpora, monkeypatch: pytest.MonkeyPatch, order: str, k: int
) -> None:
    monkeypatch.setattr(shuffled, "active", lambda: backend)
    case = GOLDEN[order]["indices"][k]
    index = megaindex.build_index(
        corpora(lengths_of(case)),
        sequence_length=case["sequence_length"],
        seed=case["seed"],
        num_samples=case["num_samples"],
        split=case["split"],
        order=make_order(order, {"exact_num_epochs": case.get("exact_num_epochs")}),
    )
    for name in ("document_index", "sample_index", "shuffle_index"):
        assert_recorded(getattr(index, name), case[name], name)


def test_the_vectors_hold_last_epochs_of_either_kind() -> None:
    """Several epochs, apart and together, at the threshold and one below it."""
    for order in ORDERS:
        apart, shares = [], []
        for case in GOLDEN[order]["indices"]:
            if case["sizes"] is None:
                continue
            begin, end = framework_rules(order).split_bounds(case["split"], len(case["sizes"]))[0]
            tokens, length = sum(case["sizes"][begin:end]), case["sequence_length"]
            epochs = case["document_index"]["shape"][0] // (end - begin)
            before, per_epoch = ((epochs - 1) * tokens - 1) // length, (tokens - 1) // length
            if epochs > 1:
                values = case["shuffle_index"]["values"]
                apart.append(sorted(values[:before]) == list(range(before)))
                shares.append(case["num_samples"] - before - int(0.8 * per_epoch))
        if order == "neox":
            assert not any(apart)
        else:
            assert apart == [share < 0 for share in shares]
            assert any(apart)
            assert not all(apart)
        assert {0, -1} <= set(shares)


def summed_alike(order: str, k: int) -> bool:
    """Python 3.12 and later round the sums of some floats otherwise, in the frameworks too."""
    shares = [float(share) for share in re.split("[,/]", GOLDEN[order]["splits"][k]["split"])]
    return sum(shares) == functools.reduce(operator.add, shares)


@for_each(("order", "k"), [case for case in cases("splits") if summed_alike(*case)])
def test_splits(order: str, k: int) -> None:
    case = GOLDEN[order]["splits"][k]
    bounds = framework_rules(order).split_bounds(case["split"], case["size"])
    assert [0, *[end for _, end in bounds]] == case["bounds"]


@for_each(("order", "k"), cases("blends"))
def test_weights_requests_and_blends(backend: Any, corpora: Corpora, order: str, k: int) -> None:
    case = GOLDEN[order]["blends"][k]
    row, wanted = framework_rules(order), case["num_samples"]
    buffer = row.default_buffer(weighted=True)
    blend = Blend(row=row, weights=case["weights"], buffer=buffer)
    assert blend.shares == case["normalized"]
    requested = blend.requests(wanted)
    assert requested is not None
    assert requested == case["requested"]
    built = []
    for sizes, samples in zip(case["sizes"], requested, strict=True):
        index = megaindex.build_index(
            corpora(sizes), sequence_length=case["sequence_length"],
            seed=case["seed"], num_samples=samples, order=order,
        )  # fmt: skip
        built.append(index.num_samples)
    assert built == case["built"]
    sizes_by_rule = {
        "buffered": sum(requested),
        "built": sum(built) - len(built),
        "samples": wanted,
    }
    size = sizes_by_rule[row.blend_size]
    assert size == case["blend_size"]

    source = np.empty(size, case["dataset_index"]["dtype"])
    sample = np.empty(size, np.int64)
    counts = np.zeros(len(requested), np.int64)
    backend.blend_greedy(blend.draws.values, 0, size, counts, source, sample)
    assert_recorded(source, case["dataset_index"], "dataset_index")
    assert_recorded(sample, case["dataset_sample_index"], "dataset_sample_index")


@pytest.mark.parametrize(("exact", "samples"), [(1, 93), (2, 91), (2, 185)])
def test_epochs_that_cannot_give_the_samples_are_refused(
    exact: int, samples: int, tmp_path: Path
) -> None:
    corpus = write_corpus(tmp_path / "c", [50] * 37)  # 1850 tokens: 92 samples of 20 and 9 left
    index = megaindex.build_index(
        corpus, sequence_length=20, seed=1, num_samples=92,
        order=MegatronLegacyOrder(exact_num_epochs=2),
    )  # fmt: skip
    assert index.num_epochs == 2
    with pytest.raises(
        megaindex.InvalidArgument, match=f"exact_num_epochs={exact}: num_samples must be"
    ):
        megaindex.build_index(
            corpus, sequence_length=20, seed=1, num_samples=samples,
            order=MegatronOrder(exact_num_epochs=exact),
        )  # fmt: skip


@pytest.mark.parametrize("order", ["megatron", *ORDERS])
def test_the_final_epoch_is_apart_where_asked(order: str, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c", [50] * 40)  # 2000 tokens: 99 samples of 20 an epoch
    per_epoch, before = 99, 199  # samples of one and of two epochs

    def apart(samples: int, **options: Any) -> bool:
        index = megaindex.build_index(
            corpus, sequence_length=20, seed=5, num_samples=samples,
            order=make_order(order, options),
        )  # fmt: skip
        assert index.num_epochs == 3
        documents_apart = bool((np.bincount(index.document_index[:80]) == 2).all())
        head = np.sort(index.shuffle_index[:before])
        samples_apart = bool((head == np.arange(before)).all())
        assert documents_apart == samples_apart
        return samples_apart

    few, many = before + 20, before + 90
    assert [apart(n, separate_final_epoch="always") for n in (few, many)] == [True, True]
    assert [apart(n, separate_final_epoch="never") for n in (few, many)] == [False, False]
    assert [apart(n, separate_final_epoch="auto") for n in (few, many)] == [True, False]
    framework = order != "neox"
    assert [apart(n) for n in (few, many)] == [framework, False]
    edge = before + int(0.5 * per_epoch)
    options = {"separate_final_epoch": "auto", "final_epoch_threshold": 0.5}
    assert [apart(edge + k, **options) for k in (-1, 0)] == [True, False]
