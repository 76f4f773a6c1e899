"""Aligned batches against Megatron-LM's own packing and flattening, and the rule of its kernels.

MEGATRON_TAGS is a folder with a checkout ``megatron-main``; without it those tests are skipped.
"""

from __future__ import annotations

import itertools
import os
import site
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.corpora import write_corpus

pytest.importorskip("torch")
import torch
from support.megatron_training import training

import megaindex.adapters.megatron as adapter
from megaindex import PackedOrder, Skip, build_index
from megaindex.adapters.megatron.batches import divide_documents
from megaindex.errors import InvalidArgument
from megaindex.loader import BatchMaker, GPTDataset, MappedTokens, SampleOptions

__all__ = ["training"]  # a fixture
HERE = Path(__file__).parent
CHECKOUT = Path(os.environ.get("MEGATRON_TAGS", "/nowhere"), "megatron-main")
BATCHES = 1000
SIZE, ROWS = 128, 4

COMPARE = """
import sys
from unittest.mock import MagicMock

sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock()  # it needs triton
import numpy as np
import torch
from megatron.core.datasets.data_schedule_utils import _pack_sequences
from megatron.core.utils import flatten_batch_for_packed_sequences
from megatron.core.utils import round_up_to_nearest_multiple  # as its sequence packing for RL

path, align = sys.argv[1], int(sys.argv[2])
given = np.load(path)
splits, lengths = given["splits"], given["lengths"]
rows = given["tokens"].shape[0]
for k in range(rows):
    own = torch.tensor(lengths[splits[k]:splits[k + 1]])
    padded = torch.tensor([round_up_to_nearest_multiple(n, align) for n in own.tolist()])
    samples = [{name: torch.zeros(n) for name in ("tokens", "labels", "loss_mask", "position_ids")}
               for n in padded.tolist()]
    theirs = _pack_sequences(samples, padded, own, "cpu")
    count = own.numel() + 1
    for name in ("cu_seqlens", "cu_seqlens_padded"):
        assert torch.equal(torch.tensor(given[name][k][:count]), theirs[name]), (k, name)
    left = given["tokens"].shape[1] - int(padded.sum())
    assert int(given["max_seqlen"][k]) == max(int(theirs["max_seqlen"]), left)
size = given["tokens"].shape[1]
for first in range(0, rows, 4):
    part = slice(first, first + 4)
    batch = {name: torch.tensor(given[name][part]) for name in given if name not in
             ("splits", "lengths")}
    flat = flatten_batch_for_packed_sequences(dict(batch))
    merged = flat["cu_seqlens_padded"][0]
    assert int(merged[-1]) == flat["tokens"].numel()
    assert (merged % align == 0).all() and (merged[1:] > merged[:-1]).all()
    starts = [k * size + x for k, row in enumerate(batch["cu_seqlens_padded"].tolist())
              for x in row if x < size]
    assert merged.tolist() == [*starts, len(batch["tokens"]) * size]
print(rows)
"""


DIVIDE = """
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

sys.modules["megatron.core.transformer.moe.ops.paged_stash"] = MagicMock()
import numpy as np
import torch
import megaindex.adapters.megatron
from megaindex.errors import InvalidArgument
import megatron.core.utils as utils

path, ranks = sys.argv[1], int(sys.argv[2])
megaindex.adapters.megatron.install()
given = np.load(path)


def indices(bounds, total, size, rank):  # the published rule, in place of Transformer Engine's
    found = []
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:]):
        part = (end - begin) // (2 * size)
        for number in (rank, 2 * size - 1 - rank):
            found += range(begin + number * part, begin + (number + 1) * part)
    return torch.tensor(found)


utils.tex = SimpleNamespace(thd_get_partitioned_indices=indices)
fields = ("tokens", "labels", "loss_mask", "position_ids", "cu_seqlens", "cu_seqlens_padded",
          "max_seqlen")
seen = []
for rank in range(ranks):
    torch.distributed.get_world_size = lambda group=None: ranks
    torch.distributed.get_rank = lambda group=None: rank
    batch = utils.flatten_batch_for_packed_sequences(
        {name: torch.tensor(given[name][:4]) for name in fields})
    mine = utils.get_batch_on_this_cp_rank(batch, is_hybrid_cp=False, cp_group=None,
                                           use_per_sequence_balancing=True)
    bounds = mine["cu_seqlens_padded"][0] // ranks
    for begin, end in zip(bounds.tolist(), bounds.tolist()[1:]):
        seen.append((begin, rank, mine["tokens"][0, begin:end].tolist()))
whole = sorted(given["tokens"][:4].reshape(-1).tolist())
assert sorted(token for _, _, part in seen for token in part) == whole
wrong = {name: torch.tensor(given[name][:1]) for name in fields}
wrong["cu_seqlens_padded"] = wrong["cu_seqlens_padded"] + 1
megaindex.adapters.megatron.uninstall()
megaindex.adapters.megatron.install()
try:
    utils.get_batch_on_this_cp_rank(wrong, is_hybrid_cp=False, cp_group=None)
except InvalidArgument as error:
    assert "align" in str(error)
else:
    raise AssertionError("it divides documents that are not aligned")
print("divided")
"""


def batches_of(prefix: Path, align: int, seed: int) -> tuple[Any, dict[str, Any]]:
    index = build_index(
        prefix, sequence_length=SIZE, order=PackedOrder(align=align), epochs=40, seed=seed
    )
    options = SampleOptions(cu_seqlens=True, boundaries="documents")
    maker = BatchMaker(index, MappedTokens(index.datasets), options)
    rows = min(index.num_samples, BATCHES * ROWS) // ROWS * ROWS
    buffers = maker.allocate(rows)
    return maker.fill(buffers, list(range(rows))), buffers.arrays


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("packing") / "c"
    lengths = np.random.default_rng(8).lognormal(3.3, 0.9, 400).astype(int) + 1
    write_corpus(path, lengths.tolist())
    return path


@pytest.mark.skipif(not CHECKOUT.is_dir(), reason="MEGATRON_TAGS has no megatron-main")
@pytest.mark.parametrize("context_parallel_size", [2, 4, 8])
def test_boundaries_are_those_of_megatron(
    prefix: Path, tmp_path: Path, context_parallel_size: int
) -> None:
    align = 2 * context_parallel_size
    spans, arrays = batches_of(prefix, align, context_parallel_size)
    path = tmp_path / "batches.npz"
    np.savez(path, splits=spans.row_splits, lengths=spans.input_lengths(SIZE), **arrays)
    paths = os.pathsep.join([str(CHECKOUT), *site.getsitepackages()])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", COMPARE, str(path), str(align)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout) == len(arrays["tokens"]) >= 1000


@pytest.mark.skipif(not CHECKOUT.is_dir(), reason="MEGATRON_TAGS has no megatron-main")
@pytest.mark.parametrize("ranks", [2, 4])
def test_megatron_divides_documents(prefix: Path, tmp_path: Path, ranks: int) -> None:
    """Its own function, as pretraining calls it, which would divide the row without the adapter."""
    _, arrays = batches_of(prefix, 2 * ranks, 3)
    path = tmp_path / "batches.npz"
    np.savez(path, **arrays)
    paths = os.pathsep.join([str(CHECKOUT), str(HERE.parents[1]), *site.getsitepackages()])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", DIVIDE, str(path), str(ranks)],
        env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.endswith("divided\n")


def dataset_of(prefix: Path, **options: Any) -> GPTDataset:
    index = build_index(prefix, sequence_length=SIZE, order=PackedOrder(align=4), epochs=1)
    return GPTDataset(index, options=SampleOptions(boundaries="documents", **options))


def test_bounds_that_megatron_would_not_read_are_refused(training: Any, prefix: Path) -> None:
    """By a release without the setting, or where it is off."""
    adapter.install()
    dataset, build = dataset_of(prefix, cu_seqlens=True), training.importer
    with pytest.raises(InvalidArgument, match="cu_seqlens: this release of Megatron-LM has no"):
        build.build_pretraining_data_loader(dataset, 0)
    training.args.dataloader_inter_document_masking = False
    with pytest.raises(InvalidArgument, match="--dataloader-inter-document-masking"):
        build.build_pretraining_data_loader(dataset, 0)
    assert build.build_pretraining_data_loader(dataset_of(prefix), 0) is not None
    adapter.install(skip=Skip(steps="1"))
    with pytest.raises(InvalidArgument, match="--dataloader-inter-document-masking"):
        build.build_pretraining_data_loader(dataset, 0)
    adapter.install()
    for setting in ("sft", "dataloader_inter_document_masking"):
        setattr(training.args, setting, True)
        assert build.build_pretraining_data_loader(dataset, 0) is not None
        setattr(training.args, setting, False)
    training.args.sft = True
    for ranks, is_divided in (
        (1, True),
        (2, True),
        (4, False),
    ):  # documents begin at multiples of 4
        training.args.context_parallel_size = ranks
        if is_divided:
            assert build.build_pretraining_data_loader(dataset, 0) is not None
        else:
            with pytest.raises(InvalidArgument, match="align must be a multiple of 8"):
                build.build_pretraining_data_loader(dataset, 0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_documents_are_divided_in_place_of_rows(
    prefix: Path, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    calls = []

    def theirs(batch: Any, is_hybrid_cp: bool, cp_group: Any = None,
               use_per_sequence_balancing: bool = False) -> Any:  # fmt: skip
        calls.append(use_per_sequence_balancing)
        return batch

    monkeypatch.setattr(torch.distributed, "get_world_size", lambda _: ranks)
    padded = torch.tensor([[0, 4, 12, 16]])
    divide = divide_documents(theirs)
    if ranks == 4:
        with pytest.raises(InvalidArgument, match="align must be a multiple of 8"):
            divide({"cu_seqlens_padded": padded}, False, None, use_per_sequence_balancing=True)
        return
    divide({"cu_seqlens_padded": padded}, False, None, use_per_sequence_balancing=True)
    divide({"cu_seqlens_padded": None}, False, None, use_per_sequence_balancing=True)
    assert calls == [False, True]

    def older(batch: Any) -> Any:
        return batch

    assert divide_documents(older) is older


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_token_is_on_one_rank(prefix: Path, ranks: int) -> None:
    """The published rule of Transformer Engine: each padded document is cut into 2 x ranks equal
    parts, of which rank r has parts r and 2 x ranks - 1 - r."""
    _, arrays = batches_of(prefix, 2 * ranks, 1)
    for bounds in arrays["cu_seqlens_padded"][:200].tolist():
        seen = np.zeros(SIZE, int)
        sizes = []
        for rank in range(ranks):
            mine = []
            for begin, end in itertools.pairwise(bounds):
                part, rest = divmod(end - begin, 2 * ranks)
                assert rest == 0
                for number in (rank, 2 * ranks - 1 - rank):
                    mine += range(begin + number * part, begin + (number + 1) * part)
            seen[mine] += 1
            sizes.append(len(mine))
        assert (seen == 1).all()
        assert set(sizes) == {SIZE // ranks}
