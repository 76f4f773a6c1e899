"""Writes neox_packing.json: what GPT-NeoX's own datasets build and serve.

    python tests/golden/make_neox_packing.py SOURCE VERSION > tests/golden/neox_packing.json

SOURCE is a checkout of GPT-NeoX whose `megatron/data` holds its compiled helpers, VERSION its
commit. Its modules run as they stand on files that its own builder wrote; `megatron`, its `mpu` and
torch's distributed and CUDA calls are replaced by stand-ins for one process without a GPU.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import json
import os
import platform
import sys
import tempfile
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch

PROGRAM = "GPT-NeoX, megatron/data/{gpt2,indexed,blendable}_dataset.py, data_utils.py"


def load_neox(source: Path) -> Any:
    """`megatron.data.data_utils`, imported from a checkout."""
    sys.path.insert(0, str(source))
    torch.cuda.LongTensor = torch.LongTensor
    torch.distributed.get_rank = lambda *_, **__: 0
    torch.distributed.get_world_size = lambda *_, **__: 1
    torch.distributed.all_reduce = torch.distributed.broadcast = lambda *_, **__: None
    mpu = MagicMock()
    for name in ("model_parallel_rank", "data_parallel_rank", "pipe_parallel_rank"):
        getattr(mpu, f"get_{name}").return_value = 0
    mpu.get_data_parallel_world_size.return_value = 1
    package = ModuleType("megatron")
    package.__path__ = [str(source / "megatron")]
    package.mpu, package.print_rank_0 = mpu, lambda *_: None
    sys.modules["megatron"] = package
    sys.modules["megatron.mpu"] = mpu
    sys.modules["megatron.data.online_dataset"] = MagicMock()
    return importlib.import_module("megatron.data.data_utils")


class Corpora:
    """Files of one case: sequence i has sizes[i] tokens that count on through the corpus.

    Of its labels the first prompts[i] are -100, the others the token; its reward is i / 4 - 1, and
    the reference value of a token is -token / 8.
    """

    def __init__(self, builder: Any) -> None:
        self._builder = builder
        self.folder = Path(tempfile.mkdtemp())
        self._count = 0

    def write(self, sizes: list[int], prompts: list[int]) -> str:
        self._count += 1
        prefix = str(self.folder / f"c{self._count}")
        ends = np.cumsum([0, *sizes])
        text = [np.arange(a, b) for a, b in itertools.pairwise(ends)]
        labels = [t.copy() for t in text]
        for row, prompt in zip(labels, prompts, strict=True):
            row[:prompt] = -100
        self._pair(prefix, np.int32, text)
        self._pair(prefix + "_label", np.int32, labels)
        self._pair(prefix + "_reward", np.float32, [[i / 4 - 1] for i in range(len(sizes))])
        self._pair(prefix + "_ref", np.float32, [-t / 8 for t in text])
        return prefix

    def _pair(self, prefix: str, dtype: type, rows: list[Any]) -> None:
        builder = self._builder(prefix + ".bin", dtype)
        for row in rows:
            builder.add_item(np.asarray(row, dtype))
            builder.end_document()
        builder.finalize(prefix + ".idx")


def described(array: Any) -> dict[str, Any]:
    return {"dtype": str(array.dtype), "values": np.asarray(array).tolist()}


def served(dataset: Any) -> list[dict[str, list[float]] | None]:
    """Every sample; None where the framework finds no document and serves another sample."""
    rows: list[Any] = []
    for k in range(len(dataset.shuffle_idx)):
        row = int(dataset.shuffle_idx[k])
        missing = int(dataset.sample_idx[row + 1][0]) >= len(dataset.doc_idx)
        rows.append(None if missing else {n: v.tolist() for n, v in dataset[k].items()})
    return rows


def index_case(neox: Any, corpora: Corpora, rng: np.random.Generator, k: int) -> dict[str, Any]:
    count = int(rng.integers(5, 14))
    sizes = rng.integers(1, 24, count).tolist()
    prompts = [int(rng.integers(0, n + 1)) if rng.random() < 0.8 else n for n in sizes]
    pack_impl = ("unpacked", "pack_until_overflow", "packed")[k % 3]
    with_labels = pack_impl == "unpacked" or k % 2 == 0
    case = {
        "sizes": sizes, "prompts": prompts if with_labels else None, "pack_impl": pack_impl,
        "allow_chopped": k % 4 != 3, "sequence_length": int(rng.integers(6, 15)),
        "seed": (0, 1, 1234, 2**32 - 1)[k % 4], "num_samples": int(rng.integers(3, 16)),
        "num_documents": count - (k % 5 == 4), "reward": pack_impl == "unpacked" and k % 2 == 0,
        "ref": k % 3 == 0,
    }  # fmt: skip
    prefix = corpora.write(sizes, prompts)
    open_pair = importlib.import_module("megatron.data.indexed_dataset").make_dataset
    try:
        dataset = neox.GPT2Dataset(
            "train", prefix, np.arange(case["num_documents"], dtype=np.int32),
            open_pair(prefix, "mmap", True), case["num_samples"], None, case["sequence_length"],
            case["seed"], pack_impl=pack_impl, allow_chopped=case["allow_chopped"],
            label_dataset=open_pair(prefix + "_label", "mmap", True) if with_labels else None,
            reward_dataset=open_pair(prefix + "_reward", "mmap", True) if case["reward"] else None,
            ref_dataset=open_pair(prefix + "_ref", "mmap", True) if case["ref"] else None,
        )  # fmt: skip
    except IndexError:  # it passes over the last document of a pass, and then reads one more
        return {**case, "error": "IndexError"}
    names = {"document_index": "doc_idx", "sample_index": "sample_idx"}
    names["shuffle_index"] = "shuffle_idx"
    arrays = {ours: described(getattr(dataset, theirs)) for ours, theirs in names.items()}
    return {**case, **arrays, "len": len(dataset), "served": served(dataset)}


def arguments(**given: Any) -> SimpleNamespace:
    """A NeoXArgs with what the data loaders look at; one data-parallel rank."""
    sides = [f"{a}{b}_data_paths" for a in ("train", "valid", "test")
             for b in ("", "_label", "_reward")]  # fmt: skip
    sides += [f"{s}_{a}{b}_data_paths" for s in ("pos", "neg") for a in ("train", "valid", "test")
              for b in ("", "_label")]  # fmt: skip
    values = dict.fromkeys(sides)
    values |= {
        "data_path": None, "data_impl": "mmap", "pack_impl": "packed", "dataset_impl": "gpt2",
        "allow_chopped": True, "mmap_warmup": False, "split": "60,20,20", "seed": 1234,
        "seq_length": 16, "batch_size": 4, "train_batch_size": 4, "num_workers": 0,
        "train_iters": 9, "train_epochs": None, "eval_interval": 5, "eval_iters": 1, "iteration": 0,
        "gradient_accumulation_steps": 1, "is_pipe_parallel": False, "use_shared_fs": True,
        "weight_by_num_documents": False, "weighted_sampler_alpha": 0.3,
        "precompute_model_name": None, "train_data_weights": None, "valid_data_weights": None,
        "test_data_weights": None,
    }  # fmt: skip
    return SimpleNamespace(**{**values, **given})


def batches_of(iterator: Any, count: int) -> list[Any]:
    """The first batches; fewer where the framework ends in a RecursionError.

    It serves sample 0 where a sample lacks a document, even where that is sample 0.
    """
    batches: list[Any] = []
    with contextlib.suppress(StopIteration, RecursionError):
        while len(batches) < count:
            batches.append({n: v.tolist() for n, v in next(iterator).items()})
    return batches


def loader_case(neox: Any, corpora: Corpora, rng: np.random.Generator, k: int) -> dict[str, Any]:
    kind = ("split", "blend", "epochs", "labels", "documents", "overflow")[k % 6]
    given: dict[str, Any] = {"seed": 100 + k, "iteration": 3 if k >= 6 else 0}
    sides = range(1 if kind == "split" else 2 + k % 2)
    sizes = [rng.integers(8, 40, 10).tolist() for _ in sides]
    prompts = [[int(rng.integers(0, n)) for n in row] for row in sizes]
    if kind == "epochs":
        given |= {"train_iters": None, "train_epochs": 2}
    if kind in ("labels", "overflow"):
        given["pack_impl"] = {"labels": "unpacked", "overflow": "pack_until_overflow"}[kind]
    given["weight_by_num_documents"] = kind == "documents"
    weights = [1.0 if kind == "epochs" else float(rng.lognormal(0, 1)) for _ in sides]
    paths = [corpora.write(a, b) for a, b in zip(sizes, prompts, strict=True)]
    neox_args = loader_arguments(given, kind, paths, weights)
    loaders = neox.build_train_valid_test_data_loaders(neox_args)
    lengths = {name: len(loader) for name, loader in loaders.items()}
    iterators = neox.shift_and_wrap_data_loaders(neox_args, loaders)
    counts = (12, 3, 2)
    answer = [batches_of(it, n) for it, n in zip(iterators, counts, strict=True)]
    return {
        "kind": kind, "given": given, "sizes": sizes, "prompts": prompts, "weights": weights,
        "lengths": lengths, "batches": dict(zip(("train", "valid", "test"), answer, strict=True)),
    }  # fmt: skip


def loader_arguments(
    given: dict[str, Any], kind: str, paths: list[str], weights: list[float]
) -> SimpleNamespace:
    if kind == "split":
        return arguments(**given, data_path=paths[0])
    given = {**given}
    for split in ("train", "valid", "test"):
        given |= {f"{split}_data_paths": paths, f"{split}_data_weights": weights}
        if kind in ("labels", "overflow"):
            given[f"{split}_label_data_paths"] = [path + "_label" for path in paths]
    return arguments(**given)


def main() -> None:
    source, version = sys.argv[1:]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the framework prints to standard output
    warnings.simplefilter("ignore")  # of torch, that pinning memory needs an accelerator
    neox = load_neox(Path(source).resolve())
    indexed = importlib.import_module("megatron.data.indexed_dataset")
    corpora, rng = Corpora(indexed.MMapIndexedDatasetBuilder), np.random.default_rng(1234)
    others = np.random.default_rng(15)  # GPT-NeoX ends in an error under others
    content = {
        "program": PROGRAM,
        "version": version,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": f"python tests/golden/make_neox_packing.py SOURCE {version}",
        "indices": [index_case(neox, corpora, rng, k) for k in range(30)],
        "loaders": [loader_case(neox, corpora, others, k) for k in range(12)],
    }
    json.dump(content, answer, separators=(",", ":"))
    answer.write("\n")
    answer.close()


if __name__ == "__main__":
    main()
