"""Aligned documents as the attention of trainers takes them: their own code on the CPU.

The packages are those of requirements/trainers.txt, which `make trainers` installs.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.corpora import write_corpus

from megaindex import PackedOrder, build_index
from megaindex.loader import GPTDataset, SampleOptions, collate

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
SIZE, ALIGN = 64, 8


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> GPTDataset:
    prefix = tmp_path_factory.mktemp("aligned") / "c"
    write_corpus(prefix, np.random.default_rng(1).integers(1, 2 * SIZE, 150).tolist())
    index = build_index(prefix, sequence_length=SIZE, order=PackedOrder(align=ALIGN), epochs=1)
    return GPTDataset(index, options=SampleOptions(cu_seqlens=True, boundaries="documents"))


def documents_of(dataset: GPTDataset, rows: int) -> torch.Tensor:
    """int[rows, S]: the number of the document of each token, -1 for padding."""
    spans = dataset.index.locate(np.arange(rows))
    begins, ends = spans.bounds_in_samples()
    found = torch.full((rows, SIZE), -1)
    for row in range(rows):
        for number in range(spans.row_splits[row], spans.row_splits[row + 1]):
            found[row, begins[number] : ends[number]] = number
    return found


def test_torchtitan_masks_documents_by_their_positions(dataset: GPTDataset) -> None:
    attention = pytest.importorskip("torchtitan.models.common.attention")
    batch = collate(dataset.__getitems__(list(range(20))))
    expected = documents_of(dataset, 20)
    allowed = attention.get_document_mask_mod(batch["position_ids"])
    places = torch.arange(SIZE)
    for row in range(20):
        real = expected[row] >= 0
        found = allowed(torch.tensor(row), 0, places[:, None], places[None, :])
        same = expected[row][:, None] == expected[row][None, :]
        assert torch.equal(found[real], same[real])


def test_transformers_finds_documents_by_their_positions(dataset: GPTDataset) -> None:
    """Each token of padding is a document of its own to it."""
    module: Any = pytest.importorskip("transformers.modeling_flash_attention_utils")
    for number in range(20):
        batch = collate(dataset.__getitems__([number]))
        (bounds, _), _ = module.prepare_fa_kwargs_from_position_ids(batch["position_ids"])
        found = documents_of(dataset, number + 1)[number]
        changes = 1 + torch.nonzero((found[1:] != found[:-1]) | (found[1:] < 0)).flatten()
        assert bounds.tolist() == [0, *changes.tolist(), SIZE]


def find_bridge() -> Path | None:
    try:
        found = importlib.util.find_spec("megatron.bridge")
    except ModuleNotFoundError:
        return None
    folders = [] if found is None else list(found.submodule_search_locations or [])
    return Path(folders[0], "training", "utils", "packed_seq_utils.py") if folders else None


def test_megatron_bridge_takes_both_arrays(dataset: GPTDataset) -> None:
    """By its own names, and with the number of entries that count."""
    found = find_bridge()
    if found is None:
        pytest.skip("megatron.bridge is not installed; make trainers installs it")
    spec = importlib.util.spec_from_file_location("packed_seq_utils", found)
    assert spec is not None
    assert spec.loader is not None
    module: Any = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)  # alone: the package needs Transformer Engine
    for number in range(20):
        batch = collate(dataset.__getitems__([number]))
        padded = batch["cu_seqlens_padded"]
        count = (padded == SIZE).int().argmax() + 1
        made = module.get_packed_seq_params({
            "cu_seqlens": padded, "cu_seqlens_argmin": count, "max_seqlen": batch["max_seqlen"],
            "cu_seqlens_unpadded": batch["cu_seqlens"], "cu_seqlens_unpadded_argmin": count,
        })  # fmt: skip
        spans = dataset.index.locate([number])
        begins, _ = spans.bounds_in_samples()
        starts = [*begins.tolist(), SIZE]
        assert made.cu_seqlens_q_padded.tolist()[: len(begins)] == starts[:-1]
        assert made.cu_seqlens_q_padded.tolist()[-1] == SIZE
        assert (made.cu_seqlens_kv_padded % ALIGN == 0).all()
        inputs = spans.input_lengths(SIZE)
        assert made.cu_seqlens_q.tolist()[: len(begins) + 1] == [0, *np.cumsum(inputs).tolist()]
        assert len(made.cu_seqlens_q) == len(made.cu_seqlens_q_padded)
