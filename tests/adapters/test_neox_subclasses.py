"""Subclasses of GPT-NeoX's classes that read in their own way: batches do not go past them."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support import neox_stand_in
from support.neox_corpora import write_pair
from support.neox_running import ADDED, SIZES, adding, arguments, loaders_of

import megaindex
import megaindex.adapters.neox as adapter
import megaindex.loader


def write_old_format(prefix: str, rows: np.ndarray) -> None:
    """Sequences of one length, in GPT-NeoX's format before memory maps."""
    count, size = rows.shape
    bounds = np.arange(count + 1)
    header = [1, 4, rows.itemsize, count, count, count + 1]
    numbers = [*header, *bounds, *(bounds * size), *[size] * count, *bounds]
    Path(f"{prefix}.idx").write_bytes(b"TNTIDX\0\0" + np.array(numbers, "<i8").tobytes())
    rows.tofile(f"{prefix}.bin")


def samples(dataset: Any) -> list[dict[str, list[int]]]:
    """The first 6 samples, out of the batches of GPT-NeoX's DataLoader."""
    args = SimpleNamespace(batch_size=3, world_size=1, rank=0)
    batches = itertools.islice(neox_stand_in.data_utils().make_data_loader(dataset, args), 2)
    rows = [{n: v[k].tolist() for n, v in batch.items()} for batch in batches for k in range(3)]
    assert len(rows) == 6
    return rows


def added(rows: list[dict[str, list[int]]]) -> list[dict[str, list[int]]]:
    return [{name: [t + ADDED for t in tokens] for name, tokens in row.items()} for row in rows]


def make(kind: str, folder: Path) -> Any:
    """A dataset of the class that has that name in the stand-in now."""
    blend = loaders_of(arguments(folder, SIZES))["train"].dataset
    return blend if kind == "BlendableDataset" else blend.datasets[0]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("kind", ["GPT2Dataset", "BlendableDataset"])
def test_samples_are_the_subclasss(
    kind: str, exact: bool, neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    caplog.set_level(logging.INFO, "megaindex")
    adapter.install(exact=exact)
    expected = added(samples(make(kind, tmp_path)))
    with monkeypatch.context() as patch:
        patch.setattr(neox_stand_in, kind, adding(getattr(neox_stand_in, kind), "__getitem__"))
        dataset = make(kind, tmp_path)
    assert type(dataset).__name__ == f"Adding{kind}"
    assert f"Adding{kind} has a __getitem__ of its own" in caplog.text
    assert samples(dataset) == expected
    assert samples(neox_stand_in.BlendableDataset([dataset], [1.0])) == expected


def read_plainly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gives the stand-in's GPT2Dataset code of its own: sequence k, read in both ways."""

    def init(self: Any, name: str, prefix: str, documents: Any, indexed: Any, *_: Any) -> None:
        self.indexed_dataset = indexed
        self.shuffle_idx_len = self.sample_idx_len = len(documents)

    def get_item(self: Any, k: int) -> Any:
        sequences = self.indexed_dataset
        read = {"get": sequences.get(k, 0, 4), "__getitem__": sequences[k][:4]}
        return {name: tokens.copy() for name, tokens in read.items()}

    monkeypatch.setattr(neox_stand_in.GPT2Dataset, "__init__", init)
    monkeypatch.setattr(neox_stand_in.GPT2Dataset, "__getitem__", get_item)


@pytest.mark.parametrize("method", ["get", "__getitem__"])
@pytest.mark.parametrize("kind", ["MMapIndexedDataset", "IndexedCachedDataset"])
def test_sequences_are_the_subclasss(
    kind: str, method: str, neox: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_plainly(monkeypatch)
    adapter.install()
    tokens = np.arange(48, dtype=np.int32).reshape(6, 8)
    prefix = str(tmp_path / "c")
    if kind == "MMapIndexedDataset":
        write_pair(prefix, np.int32, list(tokens))
    else:
        write_old_format(prefix, tokens)
    sequences = adding(getattr(neox_stand_in, kind), method)(prefix)
    dataset = neox_stand_in.GPT2Dataset(
        "train", prefix, np.arange(6, dtype=np.int32), sequences, 6, None, 4, 1
    )
    rows = {name: tokens[:, :4] + ADDED * (name == method) for name in ("get", "__getitem__")}
    expected = [{name: values[k].tolist() for name, values in rows.items()} for k in range(6)]
    assert samples(dataset) == expected
    assert samples(neox_stand_in.BlendableDataset([dataset], [1.0])) == expected


def test_documents_need_not_follow_each_other(neox: Any, tmp_path: Path) -> None:
    adapter.install()
    prefix, chosen = str(tmp_path / "c"), [0, 2, 5]
    write_pair(prefix, np.int32, list(np.arange(48, dtype=np.int32).reshape(6, 8)))
    sequences = neox_stand_in.MMapIndexedDataset(prefix)
    dataset = neox_stand_in.GPT2Dataset(
        "train", prefix, np.array(chosen, np.int32), sequences, 6, None, 4, 1
    )
    index = megaindex.build_index(
        prefix, sequence_length=4, order="neox", num_samples=6, seed=1, documents=chosen
    )
    own = megaindex.loader.NeoxDataset(index, megaindex.IndexedDataset(prefix))
    rows = [{"text": own[k]["text"].tolist()} for k in range(6)]
    assert samples(dataset) == rows
