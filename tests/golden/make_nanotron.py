"""Writes nanotron.json: what Nanotron's own code draws, stage by stage, and reads from its YAML.

    python tests/golden/make_nanotron.py SOURCE COMMIT > tests/golden/nanotron.json

SOURCE is a checkout of Nanotron at COMMIT. Its modules blendable_dataset.py, nanoset.py and
config.py run as they stand, with helpers.cpp compiled. What they import besides numpy, numba and
yaml (torch, datatrove, transformers, the package around them) is replaced by stand-ins.
"""

from __future__ import annotations

import importlib
import json
import os
import platform
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import numba
import numpy as np
import pybind11
import yaml

SEQUENCE_LENGTH = 16
SEED = 42
EXAMPLES = ("config_nanoset", "config_resume_training", "config_qwen", "config_qwen_with_moe")
KEYS = {
    "data_stages": ("name", "start_training_step", "data"),
    "tokens": ("sequence_length", "train_steps", "micro_batch_size", "val_check_interval",
               "batch_accumulation_per_replica", "limit_val_batches"),
    "parallelism": ("dp", "tp", "pp"),
}  # fmt: skip
STAND_INS = (
    "dacite", "datasets", "datasets.download", "datasets.download.streaming_download_manager",
    "transformers", "datatrove", "datatrove.utils", "datatrove.utils.dataset", "tqdm", "torch",
    "torch.utils", "torch.utils.data", "nanotron.logging", "nanotron.parallel", "nanotron.utils",
    "nanotron.config.lighteval_config", "nanotron.config.models_config",
    "nanotron.config.parallelism_config", "nanotron.config.utils_config",
    "nanotron.generation", "nanotron.generation.sampler",
    "nanotron.parallel.pipeline_parallel", "nanotron.parallel.pipeline_parallel.engine",
    "nanotron.parallel.tensor_parallel", "nanotron.parallel.tensor_parallel.nn",
)  # fmt: skip

# steps and weights of each stage, None where a stage does not read a dataset
STAGES: list[tuple[int, list[tuple[int, list[float | None]]]]] = [
    (8, [(20, [0.9, 0.1])]),
    (8, [(20, [0.9, 0.1]), (20, [0.5, 0.5])]),
    (12, [(15, [8, 2, None]), (10, [None, 1, 3]), (5, [1, 1, 1])]),
    (4, [(25, [0.1588, 0.0456, 0.7955]), (25, [0.3, 0.3, 0.4])]),
    (6, [(40, [0.7, 0.2, 0.05, 0.03, 0.02])]),
]
# lengths of the datasets, weights, samples: of the class Nanoset
NANOSETS: list[tuple[list[int], list[float] | None, int]] = [
    ([60, 40], [8, 2], 250),
    ([60, 40], None, 230),
    ([30, 50, 20], [0.2, 0.3, 0.5], 300),
]


class Folder:
    """In place of a tokenized folder: sample k of it is k."""

    def __init__(self, folder_path: str, **_: Any) -> None:
        self.folder_path = folder_path
        self.subset_log = None

    def __len__(self) -> int:
        return int(self.folder_path.rsplit("/", 1)[1])

    def __getitem__(self, k: int) -> tuple[str, int]:
        return self.folder_path, int(k)


def prepare(source: Path) -> None:
    for name in STAND_INS:
        sys.modules[name] = MagicMock()
    sys.modules["nanotron.utils"].main_rank_first = nullcontext
    torch = sys.modules["torch"]
    torch.utils.data.Dataset = object
    torch.distributed.get_rank.return_value = 0
    sys.modules["datatrove.utils.dataset"].DatatroveFolderDataset = Folder
    for name in ("nanotron", "nanotron.config", "nanotron.data", "nanotron.data.nemo_dataset"):
        package = ModuleType(name)
        package.__path__ = [str(source / "src" / name.replace(".", "/"))]
        sys.modules[name] = package
    sys.modules["nanotron"].logging = sys.modules["nanotron.logging"]
    folder = tempfile.mkdtemp()
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    subprocess.run(
        ["g++", "-O3", "-shared", "-std=c++17", "-fPIC", f"-I{pybind11.get_include()}",
         f"-I{sysconfig.get_paths()['include']}",
         str(source / "src/nanotron/data/nemo_dataset/helpers.cpp"),
         "-o", os.path.join(folder, f"helpers{suffix}")],
        check=True,
    )  # fmt: skip
    sys.modules["nanotron.data.nemo_dataset"].__path__.append(folder)


def staged_case(
    module: Any, batch: int, stages: Sequence[tuple[int, list[float | None]]]
) -> dict[str, Any]:
    """Each stage a BlendableDataset from its start, offset by what the stages before consumed."""
    train_steps = sum(steps for steps, _ in stages)
    consumed: dict[str, int] = {}
    rows = []
    for steps, weights in stages:
        folders = [f"s3://{'abcdef'[i]}/{10**6}" for i, w in enumerate(weights) if w is not None]
        datasets = [Folder(folder) for folder in folders]
        blend = module.BlendableDataset(
            datasets, [w for w in weights if w is not None], train_steps * batch, MagicMock(), SEED,
            consumed_tokens_per_dataset_folder={},
            offsets_in_samples={k: v // SEQUENCE_LENGTH for k, v in consumed.items()},
        )  # fmt: skip
        served = [blend[i] for i in range(steps * batch)]
        for step in range(steps):
            blend.update_consumption_metrics(step * batch, (step + 1) * batch, SEQUENCE_LENGTH)
        for folder, stats in blend.get_consumption_stats().items():
            consumed[folder] = consumed.get(folder, 0) + stats["tokens"]
        rows.append({
            "steps": steps, "weights": weights,
            "source": ["abcdef".index(folder[5]) for folder, _ in served],
            "sample": [sample for _, sample in served],
        })  # fmt: skip
    return {"global_batch_size": batch, "stages": rows}


def nanoset_case(
    module: Any, lengths: list[int], weights: list[float] | None, samples: int
) -> dict[str, Any]:
    folders = [f"{'abc'[i]}/{length}" for i, length in enumerate(lengths)]
    dataset = module.Nanoset(
        folders, SEQUENCE_LENGTH, 2, samples, dataset_weights=weights, random_seed=SEED
    )
    served = [dataset[i] for i in range(samples)]
    return {
        "lengths": lengths,
        "weights": weights,
        "num_samples": samples,
        "source": [folders.index(folder) for folder, _ in served],
        "sample": [sample for _, sample in served],
    }


def example_case(config: Any, path: Path) -> dict[str, Any]:
    """An example of the repository: the keys that data depend on, and what its classes make of
    them; a mapping of folders to weights is older than the classes, and left to its text."""
    whole = yaml.safe_load(path.read_text())
    content = {
        "data_stages": [
            {k: stage[k] for k in KEYS["data_stages"]} for stage in whole["data_stages"]
        ],
        **{part: {k: whole[part][k] for k in KEYS[part]} for part in ("tokens", "parallelism")},
    }
    stages = []
    for stage in content["data_stages"]:
        dataset = stage["data"]["dataset"]
        stages.append({
            "name": stage["name"],
            "start_training_step": stage["start_training_step"],
            "seed": config.DataArgs(dataset=None, seed=stage["data"]["seed"]).seed,
        })  # fmt: skip
        if isinstance(dataset["dataset_folder"], dict):
            folders, weights = zip(*dataset["dataset_folder"].items(), strict=True)
        else:
            args = config.NanosetDatasetsArgs(**dataset)
            folders = args.dataset_folder
            # get_tb_datasets
            weights = args.dataset_weights or [1] * len(folders)
        stages[-1].update(folders=list(folders), weights=list(weights))
    return {"file": f"examples/{path.name}", "content": content, "stages": stages}


def main() -> None:
    source, commit = Path(sys.argv[1]).resolve(), sys.argv[2]
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # helpers.cpp prints
    prepare(source)
    blendable = importlib.import_module("nanotron.data.nemo_dataset.blendable_dataset")
    nanoset = importlib.import_module("nanotron.data.nanoset")
    config = importlib.import_module("nanotron.config.config")
    content = {
        "program": "Nanotron, src/nanotron/data/{nemo_dataset/{blendable_dataset.py,helpers.cpp},"
        "nanoset.py}, src/nanotron/config/config.py, examples/*.yaml",
        "version": commit,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "command": f"python tests/golden/make_nanotron.py SOURCE {commit}",
        "sequence_length": SEQUENCE_LENGTH,
        "seed": SEED,
        "stages": [staged_case(blendable, batch, stages) for batch, stages in STAGES],
        "nanosets": [nanoset_case(nanoset, *case) for case in NANOSETS],
        "examples": [
            example_case(config, source / "examples" / f"{name}.yaml") for name in EXAMPLES
        ],
    }
    json.dump(content, answer, separators=(",", ":"))
    answer.write("\n")
    answer.close()


if __name__ == "__main__":
    main()
