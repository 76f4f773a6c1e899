"""Writes neox_plan.json: what GPT-NeoX's own functions build, for the planner's tests.

    python tests/golden/make_neox_plan.py CHECKOUT > tests/golden/neox_plan.json

CHECKOUT is a GPT-NeoX working tree. Its functions are executed as they stand, taken out of their
modules so that their imports (torch, deepspeed) are not needed; its helpers.cpp is compiled.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import math
import platform
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

FUNCTIONS = {
    "megatron/data/data_utils.py": (
        "get_normalized_weights_and_num_samples",
        "get_train_valid_test_split_",
    ),
    "megatron/data/gpt2_dataset.py": (
        "_num_epochs",
        "_build_doc_idx",
        "_build_sample_idx",
        "_build_shuffle_idx",
    ),
}


def functions(checkout: Path) -> dict[str, Any]:
    """The functions by name, each executed from its source."""
    namespace: dict[str, Any] = {"np": np, "math": math, "List": list, "Tuple": tuple}
    for file, names in FUNCTIONS.items():
        tree = ast.parse((checkout / file).read_text())
        chosen = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in names]
        assert len(chosen) == len(names), file
        exec(compile(ast.Module(body=chosen, type_ignores=[]), file, "exec"), namespace)
    return namespace


def compiled_helpers(checkout: Path) -> Any:
    import pybind11

    out = Path(tempfile.mkdtemp()) / f"helpers{sysconfig.get_config_var('EXT_SUFFIX')}"
    includes = [f"-I{pybind11.get_include()}", f"-I{sysconfig.get_paths()['include']}"]
    source = checkout / "megatron/data/helpers.cpp"
    flags = ["-O3", "-shared", "-std=c++17", "-fPIC", *includes]
    subprocess.run(["g++", *flags, str(source), "-o", str(out)], check=True)
    spec = importlib.util.spec_from_file_location("helpers", out)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def served_histogram(
    sizes: np.ndarray, doc_idx: np.ndarray, sample_idx: np.ndarray, chosen: np.ndarray, length: int
) -> list[int]:
    """Tokens by times served among the first ``length`` tokens of the samples, token by token."""
    stream = [(d, t) for d in doc_idx for t in range(sizes[d])]
    begin_of = np.concatenate(([0], np.cumsum(sizes[doc_idx])))
    times: dict[tuple[int, int], int] = {}
    for sample in chosen:
        row, offset = sample_idx[sample]
        begin = int(begin_of[row] + offset)
        for token in stream[begin : begin + length]:
            times[token] = times.get(token, 0) + 1
    seen = np.bincount(list(times.values()))
    seen = np.concatenate((seen, np.zeros(max(0, 2 - len(seen)), np.int64)))
    seen[0] = int(sizes.sum()) - len(times)
    return [int(count) for count in seen]


def dataset_case(neox: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    sizes = rng.integers(0, 60, int(rng.integers(20, 120))).astype(np.int32)
    length = int(rng.integers(4, 40))
    tokens = int(sizes.sum())
    per_epoch = (tokens - 1) // length
    num_samples = int(rng.integers(1, 3 * per_epoch))
    seed = int(rng.integers(0, 2**31))
    documents = np.arange(len(sizes), dtype=np.int32)
    epochs = neox["_num_epochs"](tokens, length, num_samples)
    state = np.random.RandomState(seed=seed)
    doc_idx = neox["_build_doc_idx"](documents, epochs, state)
    sample_idx = neox["_build_sample_idx"](sizes, doc_idx, length, epochs, tokens)
    shuffle_idx = neox["_build_shuffle_idx"](len(sample_idx) - 1, state)
    chosen = shuffle_idx[:num_samples]
    return {
        "sizes": sizes.tolist(),
        "seq_length": length,
        "seed": seed,
        "num_samples": num_samples,
        "num_epochs": int(epochs),
        "samples_built": len(sample_idx) - 1,
        "served": served_histogram(sizes, doc_idx, sample_idx, chosen, length),
    }


def blend_case(neox: dict[str, Any], helpers: Any, rng: np.random.Generator) -> dict[str, Any]:
    """As build_weighted_datasets and BlendableDataset do, with tokens instead of files."""
    count = int(rng.integers(2, 12))
    weights = [float(w) for w in rng.lognormal(0, 1, count)]
    length = int(rng.integers(16, 129))
    num_samples = int(rng.integers(1, 5000))
    tokens = [int(t) for t in rng.integers(2 * length, 2000 * length, count)]
    normalized, requested = neox["get_normalized_weights_and_num_samples"](weights, num_samples)
    epochs = [neox["_num_epochs"](t, length, n) for t, n in zip(tokens, requested, strict=True)]
    built = [(e * t - 1) // length for e, t in zip(epochs, tokens, strict=True)]
    again = np.array(normalized, dtype=np.float64)
    again /= np.sum(again)
    dataset_index = np.zeros(num_samples, dtype=np.uint8)
    sample_index = np.zeros(num_samples, dtype=np.int64)
    helpers.build_blending_indices(dataset_index, sample_index, again, count, num_samples, False)
    return {
        "weights": weights,
        "tokens": tokens,
        "seq_length": length,
        "num_samples": num_samples,
        "requested": requested,
        "num_epochs": [int(e) for e in epochs],
        "built": built,
        "drawn": np.bincount(dataset_index, minlength=count).tolist(),
    }


def split_case(neox: dict[str, Any], rng: np.random.Generator) -> dict[str, Any]:
    splits = ["969, 30, 1", "95,5", "8/1/1", "1", "0.7,0.2,0.1", "99,0,1"]
    split, size = str(rng.choice(splits)), int(rng.integers(1, 5000))
    return {
        "split": split,
        "size": size,
        "bounds": neox["get_train_valid_test_split_"](split, size),
    }


def main() -> None:
    checkout = Path(sys.argv[1])
    neox, helpers = functions(checkout), compiled_helpers(checkout)
    rng = np.random.default_rng(1164)
    commit = sys.argv[2] if len(sys.argv) > 2 else "unknown"
    content = {
        "program": "GPT-NeoX, megatron/data/{data_utils.py,gpt2_dataset.py,helpers.cpp}",
        "commit": commit,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "command": "python tests/golden/make_neox_plan.py CHECKOUT COMMIT",
        "datasets": [dataset_case(neox, rng) for _ in range(20)],
        "blends": [blend_case(neox, helpers, rng) for _ in range(20)],
        "splits": [split_case(neox, rng) for _ in range(20)],
    }
    json.dump(content, sys.stdout, separators=(",", ":"))
    sys.stdout.write("\n")


if __name__ == "__main__":
    main()
