"""Writes orders_<order>.json: the index arrays that a framework's own code builds.

    python tests/golden/make_orders.py ORDER SOURCE VERSION > tests/golden/orders_ORDER.json

ORDER is neox, megatron-legacy or paddlenlp; SOURCE a folder that holds its package, with its
compiled helpers where it imports them from: `megatron/data` of GPT-NeoX or Megatron-DeepSpeed, or
the unpacked wheels of paddlenlp and fast_dataindex. VERSION is the commit or release.

Its modules run as they stand. What they import besides numpy (torch, paddle, deepspeed, the
package around them) is replaced by stand-ins for one process without a GPU.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import platform
import sys
import tempfile
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np

PROGRAMS = {
    "neox": "GPT-NeoX, megatron/data/{data_utils,gpt2_dataset,blendable_dataset}.py, helpers.cpp",
    "megatron-legacy": "Megatron-DeepSpeed, megatron/data/{gpt_dataset,dataset_utils,"
    "blendable_dataset}.py, helpers.cpp",
    "paddlenlp": "PaddleNLP, paddlenlp/data/{causal_dataset,blendable_dataset}.py, fast_dataindex",
}
MODULES = {
    "neox": "megatron.data.data_utils",
    "megatron-legacy": "megatron.data.gpt_dataset",
    "paddlenlp": "paddlenlp.data.causal_dataset",
}
ARRAYS = {"document_index": "doc_idx", "sample_index": "sample_idx", "shuffle_index": "shuffle_idx"}
SEEDS = (0, 1, 1234, 2**31 - 1, 2**32 - 1)
ARGUMENTS = SimpleNamespace(
    train_data_exact_num_epochs=None, train_desc_path=None, train_doc_idx_path=None,
    train_sample_idx_path=None, train_shuffle_idx_path=None, use_dataset_only=False,
    return_data_index=False,
)  # fmt: skip


class Lengths:
    """In place of an indexed dataset: the lengths, and tokens that are all 0."""

    def __init__(self, sizes: list[int], with_mask: bool) -> None:
        self.sizes = np.array(sizes, np.int32)
        self._with_mask = with_mask

    def get(self, i: int, offset: int = 0, length: int | None = None) -> Any:
        tokens = np.zeros(self.sizes[i] - offset if length is None else length, np.int64)
        return (tokens, None) if self._with_mask else tokens


class Framework:
    """One framework, loaded; `corpora` are the lengths of the datasets by prefix."""

    def __init__(self, order: str, source: Path, *, reads: bool = False) -> None:
        """``reads``: with its own reader of datasets, in place of their lengths."""
        self.order = order
        self.corpora: dict[str, list[int]] = {}
        self.folder = tempfile.mkdtemp()
        sys.path.insert(0, str(source))
        one = MagicMock(**{
            "utils.data.Dataset": object, "io.Dataset": object,
            "distributed.get_rank.return_value": 0,
            "distributed.get_world_size.return_value": 1,
            "cuda.LongTensor": np.array, "get_accelerator.return_value.LongTensor": np.array,
            "get_args.return_value": ARGUMENTS,
        })  # fmt: skip
        stand_ins = ["torch", "torch.utils", "torch.utils.data", "torch.distributed", "paddle"]
        stand_ins += ["deepspeed", "deepspeed.accelerator", "megatron.core", "megatron.utils"]
        for name in stand_ins:
            sys.modules[name] = one
        for name in ("megatron", "paddlenlp"):  # a package, but not its own __init__.py
            sys.modules[name] = self._package(name, source / name, one)
            folder = self._package(f"{name}.data", source / name / "data", one)
            sys.modules[f"{name}.data"] = folder
        readers = MagicMock(make_dataset=self._open)
        for name in ("megatron", "paddlenlp") if not reads else ():
            sys.modules[f"{name}.data.indexed_dataset"] = readers
        for name in ("online_dataset", "pairwise_dataset", "samplers"):
            sys.modules[f"megatron.data.{name}"] = MagicMock()
        self.module = importlib.import_module(MODULES[order])

    @staticmethod
    def _package(name: str, path: Path, one: MagicMock) -> ModuleType:
        package = ModuleType(name)
        package.__path__ = [str(path)]
        package.mpu, package.get_args = one.mpu, one.get_args
        package.print_rank_0, package.is_rank_0 = lambda *_, **__: None, lambda: True
        return package

    def _open(self, prefix: str, *_: Any, **__: Any) -> Lengths:
        return Lengths(self.corpora[prefix], self.order == "paddlenlp")

    def add(self, sizes: list[int]) -> str:
        prefix = os.path.join(self.folder, f"corpus{len(self.corpora)}", "c")
        os.makedirs(os.path.dirname(prefix))
        self.corpora[prefix] = sizes
        return prefix

    def datasets(
        self, paths: list[str], split: str, samples: list[int], length: int, seed: int
    ) -> Any:
        """Train, valid and test, by the function that the framework's training calls."""
        if self.order == "neox":
            return self.module.build_train_valid_test_datasets(
                data_prefix=paths[0], use_shared_fs=True, data_impl="mmap", pack_impl="packed",
                allow_chopped=True, splits_string=split, train_valid_test_num_samples=samples,
                train_valid_test_epochs=[None] * 3, seq_length=length, seed=seed, skip_warmup=True,
            )  # fmt: skip
        return self.module.build_train_valid_test_datasets(
            paths, "mmap", split, samples, length, seed, True
        )

    def blend(self, paths: list[str], weights: list[float], n: int, length: int, seed: int) -> Any:
        """The weighted train split: normalised weights, requests, and the blend."""
        if self.order != "neox":
            pairs = [text for w, p in zip(weights, paths, strict=True) for text in (repr(w), p)]
            ask = self.module.get_datasets_weights_and_num_samples
            _, normalized, requests = ask(pairs, [n] * 3)
            blend, _, _ = self.datasets(pairs, "1,0,0", [n, n, n], length, seed)
            return normalized, [row[0] for row in requests], blend
        normalized, requests = self.module.get_normalized_weights_and_num_samples(weights, n)
        parts = [
            self.module.build_the_dataset(
                data_prefix=path, name=f"train_{i}", data_impl="mmap", pack_impl="packed",
                allow_chopped=True, num_samples=requests[i], num_epochs=None, seq_length=length,
                seed=seed, skip_warmup=True, build_index_mappings=True, pos_data_prefix=None,
                neg_data_prefix=None, dataset_impl="gpt2",
            )
            for i, path in enumerate(paths)
        ]  # fmt: skip
        return normalized, requests, self.module.BlendableDataset(parts, normalized)


def described(array: np.ndarray, whole: bool) -> dict[str, Any]:
    content = np.ascontiguousarray(array)
    values = content.tolist() if whole else hashlib.sha256(content.tobytes()).hexdigest()
    return {
        "dtype": str(array.dtype),
        "shape": list(array.shape),
        "values" if whole else "sha256": values,
    }


def index_case(
    framework: Framework, sizes: list[int], length: int, seed: int, n: int, split: str, **more: Any
) -> dict[str, Any]:
    prefix = framework.add(sizes)
    ARGUMENTS.train_data_exact_num_epochs = more.get("exact_num_epochs")
    train, _, _ = framework.datasets([prefix], split, [n, 1, 1], length, seed)
    ARGUMENTS.train_data_exact_num_epochs = None
    whole = len(sizes) <= 100
    arrays = {ours: described(getattr(train, name), whole) for ours, name in ARRAYS.items()}
    shared = {"sequence_length": length, "seed": seed, "num_samples": n, "split": split, **more}
    return {"sizes": sizes if whole else None, **shared, **arrays}


def small_cases(framework: Framework, rng: np.random.Generator) -> list[dict[str, Any]]:
    cases = []
    for k, share in enumerate([0.3, 1.0, 0.5, 0.79, 0.85, 0.0, "at", "below", 1.0] * 3):
        sizes = rng.integers(0, 60, int(rng.integers(20, 45))).tolist()
        length, split = int(rng.integers(4, 40)), ("1,0,0", "80,15,5", "969,30,1")[k % 3]
        bounds = framework.module.get_train_valid_test_split_(split, len(sizes))
        sizes[bounds[1] : bounds[1] + 1] = [7] * (bounds[2] > bounds[1])  # valid, test hold tokens
        sizes[bounds[2] : bounds[2] + 1] = [9] * (bounds[3] > bounds[2])
        tokens = sum(sizes[: bounds[1]])
        epochs = k % 4 + 1
        before, per_epoch = max(0, ((epochs - 1) * tokens - 1) // length), (tokens - 1) // length
        last = {"at": int(0.8 * per_epoch), "below": int(0.8 * per_epoch) - 1}.get(
            share, int(share * per_epoch) if not isinstance(share, str) else 0
        )
        n = max(1, before + last)
        cases.append(index_case(framework, sizes, length, SEEDS[k % 5], n, split))
    return cases


def exact_cases(framework: Framework, rng: np.random.Generator) -> list[dict[str, Any]]:
    """--train-data-exact-num-epochs: what the last of so many epochs gives decides its shuffle."""
    cases = []
    for epochs in (2, 3):
        for last in ("none", "few", "many", "more"):
            sizes = rng.integers(1, 60, 30).tolist()
            before, per_epoch = ((epochs - 1) * sum(sizes) - 1) // 16, (sum(sizes) - 1) // 16
            counts = {"none": 0, "few": per_epoch // 2, "many": per_epoch, "more": per_epoch + 1}
            n = before + counts[last]
            cases.append(
                index_case(framework, sizes, 16, 1234, n, "1,0,0", exact_num_epochs=epochs)
            )
    return cases


def large_cases(framework: Framework) -> list[dict[str, Any]]:
    cases = []
    for seed, share in ((1, 2.4), (2, 3.95), (3, 0.7)):
        recipe = [seed, 1, 2000, 6000]
        sizes = np.random.RandomState(seed).randint(1, 2000, 6000).tolist()
        n = int(share * sum(sizes)) // 128
        case = index_case(framework, sizes, 128, seed, n, "1,0,0")
        cases.append({**case, "randint": recipe})
    return cases


def blend_case(framework: Framework, rng: np.random.Generator) -> dict[str, Any]:
    count = int(rng.integers(2, 7))
    weights = [float(w) for w in rng.lognormal(0, 0.5, count)]
    n, length, seed = int(rng.integers(40, 400)), 8, 1234
    corpora = [rng.integers(20, 200, 12).tolist() for _ in range(count)]
    paths = [framework.add(sizes) for sizes in corpora]
    normalized, requested, blend = framework.blend(paths, weights, n, length, seed)
    return {
        "weights": weights,
        "sizes": corpora,
        "num_samples": n,
        "sequence_length": length,
        "seed": seed,
        "normalized": [float(w) for w in normalized],
        "requested": requested,
        "built": [len(dataset.sample_idx) - 1 for dataset in blend.datasets],
        "blend_size": len(blend),
        "dataset_index": described(blend.dataset_index, True),
        "dataset_sample_index": described(blend.dataset_sample_index, True),
    }


def split_case(framework: Framework, rng: np.random.Generator) -> dict[str, Any]:
    split = str(rng.choice(["969, 30, 1", "95,5", "8/1/1", "1", "0.7,0.2,0.1", "99,0,1"]))
    size = int(rng.integers(1, 5000))
    bounds = framework.module.get_train_valid_test_split_(split, size)
    return {"split": split, "size": size, "bounds": bounds}


def main() -> None:
    order, source, version = sys.argv[1:]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the frameworks, their C++ included, print to standard output
    framework = Framework(order, Path(source).resolve())
    rng = np.random.default_rng(1234)
    indices = small_cases(framework, rng) + large_cases(framework)
    if order == "megatron-legacy":
        indices += exact_cases(framework, rng)
    blends = [blend_case(framework, rng) for _ in range(8)]
    splits = [split_case(framework, rng) for _ in range(40)]
    content = {
        "program": PROGRAMS[order],
        "version": version,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": f"python tests/golden/make_orders.py {order} SOURCE {version}",
        "indices": indices,
        "blends": blends,
        "splits": splits,
    }
    json.dump(content, answer, separators=(",", ":"))
    answer.write("\n")
    answer.close()


if __name__ == "__main__":
    main()
